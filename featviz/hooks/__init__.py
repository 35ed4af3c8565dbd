"""Hooks: hand every tensor that a layer gives to a sink, the moment the layer gives it.

Layers are modules, or functions that modules call.

A later in-place operation may overwrite the tensor, so the sink must be done with it when it
returns; nothing here keeps a reference. The hooks return nothing, since a value that a forward
hook returns would replace the layer's output.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from featviz.errors import FeatvizError, ForwardError, LayoutError
from featviz.hooks.functions import watching
from featviz.records import Layer, Site, Skip

Sink = Callable[[Site, Tensor], None]
"""Takes a tensor while it is true; raises LayoutError for one that cannot be drawn."""

Wanted = Callable[[Layer], bool]
"""Whether a function is to be captured."""

_CALL = re.compile(r"@\d+")
"""What torch.export.unflatten puts behind the name of a module at its second and later calls."""


def list_layers(model: nn.Module) -> list[Layer]:
    """Every module once, in `named_modules()` order, with all names of a shared one."""
    names: dict[int, dict[str, None]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), {}).update(dict.fromkeys((name, _CALL.sub("", name))))
    return [
        Layer(
            index=index,
            name=name,
            type=class_names(module)[0],
            classes=class_names(module),
            aliases=tuple(alias for alias in names[id(module)] if alias != name),
        )
        for index, (name, module) in enumerate(model.named_modules())
    ]


def list_functions(model: nn.Module, args: Sequence[Any]) -> dict[Layer, int]:
    """The functions that modules call in one forward pass, in the order of their first calls.

    Returns:
        Layers named `layer1.0/fn:add`, each with the number of its calls.
    """
    found: Counter[Layer] = Counter()

    def seen(layer: Layer, result: Any) -> None:
        found[layer] += 1

    with watching(model, list_layers(model), seen):
        model(*args)
    return dict(found)


def class_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the module's class and its bases.

    A module of torch.export's unflattened programs knows the class that it stands for by name;
    that class is looked up among the modules already imported, and nothing is imported for it.
    """
    found: Any = type(module)
    if found.__module__ == "torch.export.unflatten" and (original := module.type_name()):  # type: ignore[operator]
        home, _, name = original.rpartition(".")
        found = vars(sys.modules.get(home, object)).get(name)
        if not isinstance(found, type):
            return (name, nn.Module.__name__)
    return tuple(c.__name__ for c in found.__mro__ if c is not object)


class Recorder:
    """Counts the calls of hooked layers and passes what they give to the sink."""

    def __init__(self, layers: Sequence[Layer], sink: Sink, wanted: Wanted) -> None:
        self.layers = layers
        self.sink = sink
        self.wanted = wanted
        self._drawing = False
        """While the sink works: what it calls is no function of the model."""
        self.calls: Counter[str] = Counter()
        """By name of the layer."""
        self.skipped: list[Skip] = []
        self.fault: Exception | None = None
        """What the sink raised, to tell a fault of ours from one of the model."""

    def restart(self) -> None:
        """Forget the calls of the last image."""
        self.calls.clear()
        self.skipped = []
        self.fault = None

    @property
    def never_ran(self) -> list[Layer]:
        """Hooked layers that did not fire since the last restart."""
        return [layer for layer in self.layers if not self.calls[layer.name]]

    def output_hook(self, layer: Layer) -> Callable[[nn.Module, Any, Any], None]:
        """A forward hook that takes the layer's output."""

        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._take_output(layer, output)

        return hook

    def take_function(self, layer: Layer, result: Any) -> None:
        """Take what a function gave, if it is wanted."""
        if not self._drawing and self.wanted(layer):
            self._take_output(layer, result)

    def _take_output(self, layer: Layer, output: Any) -> None:
        call = self.calls[layer.name]
        self.calls[layer.name] += 1
        for key, value in leaves(output):
            self._take(Site(layer, "output", call, key), value)

    def _take(self, site: Site, value: Any) -> None:
        if not isinstance(value, Tensor):
            self._skip(site, f"is {_describe(value)}, not a tensor")
            return
        self._drawing = True
        try:
            self.sink(site, value.detach())
        except LayoutError as error:
            self._skip(site, error.message)
        except Exception as error:
            self.fault = error
            raise
        finally:
            self._drawing = False

    def _skip(self, site: Site, reason: str) -> None:
        at = site.layer
        self.skipped.append(
            Skip(at.name, at.type, at.index, site.kind, site.call, site.key, reason)
        )


@contextmanager
def hooked(
    model: nn.Module, layers: Sequence[Layer], sink: Sink, wanted: Wanted | None = None
) -> Iterator[Recorder]:
    """Hook the layers of a model for a while; every hook is removed, whatever happens.

    Args:
        wanted: asked at each call of a function, where it is not known beforehand which functions
            there are; otherwise those among `layers` are.
    """
    functions = {layer.name for layer in layers if layer.is_function}
    recorder = Recorder(layers, sink, wanted or (lambda layer: layer.name in functions))
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        for layer in layers:
            if not layer.is_function:
                module, hook = modules[layer.name], recorder.output_hook(layer)
                stack.callback(module.register_forward_hook(hook).remove)
                stack.enter_context(_weights_of(module))
        if functions or wanted:
            stack.enter_context(watching(model, list_layers(model), recorder.take_function))
        yield recorder


@contextmanager
def _weights_of(module: nn.Module) -> Iterator[None]:
    """Let a hooked nn.MultiheadAttention give its weights [1, heads, T, T], where its caller says
    `need_weights=False`; its other result is the same but for rounding."""
    if not isinstance(module, nn.MultiheadAttention):
        yield
        return

    def ask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if kwargs.get("need_weights") is False:
            return args, {**kwargs, "need_weights": True, "average_attn_weights": False}
        return None

    handle = module.register_forward_pre_hook(ask, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def forward(model: nn.Module, args: Sequence[Any], recorder: Recorder | None = None) -> Any:
    """Call the model.

    Raises:
        ForwardError: the model raised; the message names the innermost module at fault.
    """
    with faults(model, args, recorder):
        return model(*args)


@contextmanager
def faults(
    model: nn.Module, args: Sequence[Any], recorder: Recorder | None = None
) -> Iterator[None]:
    """Turn what the model raises in the block into a ForwardError."""
    try:
        yield
    except FeatvizError:
        raise
    except Exception as error:
        if recorder is not None and recorder.fault is error:
            raise
        raise ForwardError(
            f"the model failed in {_where(model, error)}: {_first_line(error)}",
            f"the input was {_shapes(args)}; --size, --crop and --channels change it, "
            "-v shows the traceback",
        ) from error


def leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten tuples, lists, dicts and dataclasses: pairs of (path, what stands there)."""
    for name, item in _items(value):
        yield from leaves(item, f"{key}.{name}" if key else str(name))
    if not _is_container(value):
        yield key, value


def _is_container(value: Any) -> bool:
    if isinstance(value, (tuple, list, Mapping)):
        return len(value) > 0
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _items(value: Any) -> list[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (tuple, list)):
        return list(enumerate(value))
    if _is_container(value):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
    return []


def _describe(value: Any) -> str:
    if value is None:
        return "None"
    name = type(value).__name__
    return f"an empty {name}" if isinstance(value, (tuple, list, Mapping)) else f"a {name}"


def _where(model: nn.Module, error: BaseException) -> str:
    """Name the innermost module on the traceback; costs nothing as long as nothing fails."""
    names = {id(module): name for name, module in model.named_modules()}
    found, trace = class_names(model)[0], error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and names.get(id(owner)):
            found = f"{names[id(owner)]} ({class_names(owner)[0]})"
        trace = trace.tb_next
    return found


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]


def _shapes(args: Sequence[Any]) -> str:
    tensors = [value for _, value in leaves(list(args)) if isinstance(value, Tensor)]
    return ", ".join(str(list(tensor.shape)) for tensor in tensors)
