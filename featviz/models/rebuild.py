"""From inert stand-ins (`models.inert`) to weights, and to whole modules.

What a file holds beside its weights (meters, configurations) is left out, with the
reason; but a module is made with all of its attributes or not at all: then there is an
UnbuiltModule, a dict of what could be made of them.

A module is `object.__new__` of a class that is listed here, with attributes of which
each was made here, too. So no constructor runs; a class that a module keeps (`norm_layer`)
is replaced by one that cannot be called; and of functions it keeps only those of
`_FUNCTIONS`."""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import math
import pkgutil
import re
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from featviz.errors import FeatvizError
from featviz.models import inert
from featviz.models.inert import Made, Name, Storage
from featviz.models.requirements import import_ultralytics, require_torchvision
from featviz.text import listed, quoted

log = logging.getLogger(__name__)

_YOLO = ("ultralytics.nn.modules.", "ultralytics.nn.tasks.")
_OPTIONAL = ("timm.models.", "timm.layers.", *_YOLO)
_PACKAGES = ("torch.nn.modules.", "torchvision.models.", "torchvision.ops.", *_OPTIONAL)
"""Below these, classes of modules: their forward methods call no value that they keep
but modules, functions of the lists below and forward methods; none evaluates text,
opens a file or imports."""

_MODULES = (
    "torch.ao.nn.quantized.modules.functional_modules.FloatFunctional",
    "torch.ao.quantization.stubs.DeQuantStub",
    "torch.ao.quantization.stubs.QuantStub",
    "torch.nn.parallel.data_parallel.DataParallel",
    "torch.optim.swa_utils.AveragedModel",
)

_HELPERS = (
    "torchvision.models.detection._utils.BalancedPositiveNegativeSampler",
    "torchvision.models.detection._utils.BoxCoder",
    "torchvision.models.detection._utils.BoxLinearCoder",
    "torchvision.models.detection._utils.Matcher",
    "torchvision.models.detection._utils.SSDMatcher",
    "torchvision.ops.poolers.LevelMapper",
    "torchvision.transforms.transforms.CenterCrop",
    "torchvision.transforms.transforms.Compose",
    "torchvision.transforms.transforms.Normalize",
    "torchvision.transforms.transforms.Resize",
    "torchvision.transforms.transforms.ToTensor",
)
"""Classes of objects that hold numbers and modules."""

_FUNCTIONS = (
    "timm.layers.activations.gelu",
    "torch._C._nn.gelu",
    "torch.nn.functional.gelu",
    "torch.nn.functional.relu",
    "torch.nn.functional.silu",
    "torchvision.models.optical_flow.raft._pass_through_h",
    "torchvision.ops.boxes.box_iou",
    "ultralytics.nn.modules.head.Detect.forward",
)

_ENUMS = (
    "timm.layers.format.Format",
    "torchvision.transforms.functional.InterpolationMode",
)

_RENAMED = {
    "ultralytics.nn.modules.block.Silence": "torch.nn.modules.linear.Identity",
    "ultralytics.nn.tasks.YOLOv10DetectionModel": "ultralytics.nn.tasks.DetectionModel",
}

_SETTERS = (
    "torch.nn.modules.",
    # torch.compile replaces nn.Module.__setstate__ by a function of this module
    "torch._dynamo.mutation_guard",
    "timm.layers.ml_decoder",
    "ultralytics.nn.modules.block",
)
"""Where `__setstate__` was read: it fills in what older files lack."""

_OWN_FORWARDS = (
    "forward",
    "forward_fuse",
    "forward_slicing",
    "forward_split",
    "forward_split_cat",
)
"""Methods that Ultralytics, and timm's FasterNet, put in the place of a module's
forward."""

_NAME = re.compile(r"[a-zA-Z_]\w*(\.[a-zA-Z_]\w*)+", re.ASCII)
_NUMBER_TYPE = re.compile(r"f[248]|[iu][1248]|b1")
_MEMBER = re.compile(r"[^.\0\ud800-\udfff]+")
"""Names in a module: torch wants no dots, and results are filed under them."""

_KEY_TYPES = (bool, int, float, str, bytes, type(None))
_PLAIN_ATTRIBUTES = (bool, int, float, str, type(None), Tensor)
_BYTES_BESIDE = 64 * 2**20
"""Bytes that a tensor may have beside four times its data: it may be expanded."""
_MAX_MODULES = 20_000
"""Modules of a model, each as often as it is reached: shared ones make a small file
endless."""


class RefusedError(Exception):
    """Something in a file is not made: it is on no list, or it is broken.

    Args:
        message: A predicate, whose subject is the file: `holds a ...`.
        names: Classes and functions that the file would need, and no list here has.
    """

    def __init__(self, message: str, names: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.names = sorted(names)


class UnusableTensorError(RefusedError):
    """A tensor without its data, for which the whole file is refused."""


class UnbuiltModule(dict[Any, Any]):
    """The attributes of a module that was not made, and why it was not."""

    def __init__(self, attributes: dict[Any, Any], refusal: RefusedError) -> None:
        super().__init__(attributes)
        self.refusal = refusal


def rebuild(content: Any) -> Any:
    """Make values of what `inert.read` returned.

    Returns:
        Containers of data, tensors and modules, or an UnbuiltModule where a module
        needs more than is listed here.

    Raises:
        RefusedError: Where the content itself cannot be made, or something in it was left
            out and what remains has no weights.
    """
    builder = Builder()
    value = builder.build(content)
    # without weights the file is of no use, and what was left out says why
    if builder.reasons and not builder.has_weights():
        raise _joined(builder.reasons)
    reasons = {
        name for error in builder.reasons for name in error.names or [str(error)]
    }
    if reasons:
        log.debug("left out: %s", listed([*map(quoted, sorted(reasons))], 20))
    return value


def lacks(name: str) -> bool:
    """Whether Ultralytics or timm should have a class of this name, and has none."""
    if not name.startswith(_OPTIONAL) or not _NAME.fullmatch(name):
        return False
    try:
        _imported(name)
    except (ImportError, AttributeError):
        return True
    return False


class _Built(NamedTuple):
    """What was made of a stand-in."""

    value: Any
    """A value, or the RefusedError in its place."""
    reason: RefusedError | None
    """Why something in it was left out; None where it is complete."""


class Builder:
    """Makes values of stand-ins, each once: what was shared is shared again."""

    def __init__(self) -> None:
        self.reasons: list[RefusedError] = []
        """Why something was left out, each time that it was met."""
        self._built: dict[int, _Built] = {}
        """By the id of the stand-in."""

    def build(self, value: Any) -> Any:
        """The value of a stand-in, made once; RefusedError where it cannot be made."""
        if type(value) in _KEY_TYPES or type(value) is Storage:
            return value
        built = self._built.get(id(value))
        if built is None:
            # while the value is made, this error stands for it: a value that contains
            # itself meets the error
            itself = RefusedError("holds a value that contains itself")
            self._built[id(value)] = _Built(itself, None)
            before = len(self.reasons)
            result = self._attempt(value)
            reason = self.reasons[before] if len(self.reasons) > before else None
            built = _Built(result, reason)
            self._built[id(value)] = built
        elif built.reason is not None:
            self.reasons.append(built.reason)
        if isinstance(built.value, RefusedError):
            raise built.value
        return built.value

    def _attempt(self, value: Any) -> Any:
        """Make the value of a stand-in; where it is refused, return the error, which
        `build` raises each time that the stand-in is met.

        Raises:
            UnusableTensorError: A tensor in it has no data.
        """
        try:
            if type(value) in (list, tuple):
                return type(value)(self.elements(value))
            if type(value) is Name:
                return _named(value.text)
            if type(value) is Made:
                return self.called(value)
            raise _needs([_name_of(value)])
        except (UnusableTensorError, FeatvizError, RecursionError):
            raise
        except RefusedError as error:
            return error
        except Exception as error:  # its maker does not take these arguments
            reason = quoted(error)
            return RefusedError(f"holds a broken {_name_of(value)}: {reason}")

    def called(self, made: Made) -> Any:
        """What a call would return.

        Raises:
            RefusedError: Where what is called is on no list, or what it would make is
                not plain.
        """
        name = made.maker.text
        if name in _BY_STAND_IN:
            return _BY_STAND_IN[name](self, made)
        if name in _BY_ARGUMENTS:
            # older protocols put into a state what newer ones give as arguments
            state = made.states[-1] if made.states else made.arguments
            return _BY_ARGUMENTS[name](*self.elements(state))
        if name in _ENUMS:
            return _imported(name)(*made.arguments)
        if name in _HELPERS:
            return self._object(made, _imported(name))
        # with arguments it is a call of the constructor, which torch.save never writes
        module_class = None if made.arguments else _module_class(name)
        state = made.states[-1] if made.states else None
        if module_class or "_modules" in [key for key, _ in _pairs(state)]:
            return self._module(made, module_class)
        if name.startswith("torch._utils._rebuild"):
            raise RefusedError(f"holds a tensor that is not plain ({name})")
        if not made.pairs:
            raise _needs([name])
        # a dict of somebody's own class serves as a plain one, but not in a module
        self.reasons.append(_needs([name]))
        return self.mapping(made)

    def elements(self, values: Iterable[Any]) -> list[Any]:
        """What is in a list; None for what is left out.

        Raises:
            UnusableTensorError: A tensor in it has no data.
        """
        built = []
        for value in values:
            try:
                built.append(self.build(value))
            except RefusedError as error:
                built.append(None)
                self._leave_out(error)
        return built

    def mapping(self, made: Made) -> dict[Any, Any]:
        """A dict of any class, as a plain one, without what is left out.

        Raises:
            UnusableTensorError: a tensor in it has no data.
        """
        built = {}
        pairs = [*made.pairs]
        # the argument of OrderedDict is a list of pairs, that of Counter a dict
        for argument in made.arguments:
            pairs[:0] = argument if type(argument) is list else _pairs(argument)
        for key, value in pairs:
            try:
                built[self.key(key)] = self.build(value)
            except RefusedError as error:
                self._leave_out(error)
        return built

    def key(self, value: Any) -> Any:
        """A key of a dict, or an element of a set: a number, a text, or a tuple of these.

        Raises:
            RefusedError: It is anything else, whose hash could nest as deep as the file
                says.
        """
        key = self.build(value)
        for element in key if type(key) is tuple else [key]:
            if type(element) not in _KEY_TYPES:
                raise RefusedError("holds a key that is no name or number")
        return key

    def _leave_out(self, error: RefusedError) -> None:
        """Note why something is left out; a tensor without its data is raised again,
        since the whole file is refused for it."""
        if isinstance(error, UnusableTensorError):
            raise error
        self.reasons.append(error)

    def has_weights(self) -> bool:
        """Whether there is any tensor, array or module."""
        types = (Tensor, np.ndarray, nn.Module, UnbuiltModule)
        return any(isinstance(built.value, types) for built in self._built.values())

    def _module(
        self, made: Made, module_class: type | None
    ) -> nn.Module | UnbuiltModule:
        """A module if it can be made completely; otherwise a dict of its attributes.

        Args:
            made: Its stand-in.
            module_class: None where it is not listed.
        """
        before = len(self.reasons)
        try:
            if module_class is None:
                raise _needs([made.maker.text])
            module: nn.Module = self._object(made, module_class)
            # whatever was left out of it, now or where it was met before, has a reason
            if len(self.reasons) == before:
                _check_module(module)
                return module
        except RefusedError as error:
            self._leave_out(error)
        refusal = _joined(self.reasons[before:])
        state = self.build(made.states[-1]) if made.states else {}
        return UnbuiltModule(state or {}, refusal)

    def _object(self, made: Made, made_class: type) -> Any:
        """An empty object of a listed class, with the attributes that the file says.

        Raises:
            RefusedError: Where the file makes it as `torch.save` does not, or its
                attributes do not fit.
        """
        if made.arguments or made.items or made.pairs or len(made.states) > 1:
            raise RefusedError(
                f"makes a {made_class.__name__} in a way that torch.save does not"
            )
        built: Any = object.__new__(made_class)
        # an object without attributes (torchvision's ToTensor) has no state in the file
        state = dict(self.build(made.states[0])) if made.states else {}
        attributes = {
            name: _checked_attribute(made, built, name, value)
            for name, value in state.items()
        }
        if not isinstance(built, nn.Module):
            vars(built).update(attributes)
            return built
        # hooks and children, also where the file has none
        vars(built).update(vars(nn.Module()))
        try:
            # of a list of those that were read: they fill in what older files lack
            built.__setstate__(attributes)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise _broken(made_class) from error
        return built


class OwnForward(NamedTuple):
    """What stands in the place of a module's forward: another of its methods."""

    owner: Made
    """The module."""
    name: str


class KeptClass(type):
    """Stands for a class that a module keeps: it cannot be called."""

    def __call__(cls, *arguments: object, **keywords: object) -> Any:
        """Refuse."""
        raise RefusedError(f"calls {cls.__name__}, which torch.save only keeps")


_FRESH = vars(nn.Module())
"""The attributes of any module."""
_CONTENTS: dict[str, Any] = {
    "_parameters": Tensor,
    "_buffers": Tensor,
    "_modules": nn.Module,
}
_HOOKS = {name for name, v in _FRESH.items() if isinstance(v, dict)} - _CONTENTS.keys()
_MISSING = object()


def _check_module(module: nn.Module) -> None:
    """Refuse a module that does not take what every command does first with one."""
    reached = module.named_modules(remove_duplicate=False)
    if any(True for _ in itertools.islice(reached, _MAX_MODULES, None)):
        raise RefusedError(f"holds a {type(module).__name__} of too many modules")
    try:
        # What is inside it was checked when it was made. Going through all of it at each
        # level took as long as reading the file (EfficientNet-B4: 0.5 s).
        module._save_to_state_dict({}, "", keep_vars=True)
        # goes through its tensors as any .to, changing none
        if type(module)._apply is nn.Module._apply:
            module._apply(_itself, recurse=False)  # type: ignore[no-untyped-call]
        else:  # nn.LSTM lists its weights anew, Ultralytics changes its head, too
            module.to(non_blocking=False)
        # reads the settings of a layer, which others rely on
        module.extra_repr()
    except Exception as error:  # whatever a state that a file made up leads to
        raise _broken(type(module)) from error


def _itself(tensor: Tensor) -> Tensor:
    return tensor


def _checked_attribute(made: Made, built: Any, name: Any, value: Any) -> Any:
    """An attribute of an object; RefusedError where it could run code.

    Args:
        made: The stand-in of the object.
        built: The object, without attributes as yet.
        name: Of the attribute; a file may say anything here.
        value: What was made of what the file says.
    """
    made_class = type(built)
    if name in _CONTENTS:
        _check_contents(made_class, name, value)
        return value
    if name in _HOOKS:
        if value:
            raise RefusedError(
                f"holds a {made_class.__name__} with {name}, which would call what the"
                " file says"
            )
        return type(_FRESH[name])()
    # Ultralytics replaces the forward of fused layers by another of their methods
    if name == "forward" and type(value) is OwnForward and value.owner is made:
        return MethodType(inspect.getattr_static(made_class, value.name), built)
    _refuse_shadow(made_class, name, value)
    return value


def _check_contents(module_class: type, group: str, contents: Any) -> None:
    """Refuse parameters, buffers or children that no module has.

    Args:
        module_class: For messages.
        group: A key of _CONTENTS.
        contents: What the file says; it should be a dict by names.

    Raises:
        RefusedError: Where a name or a value in it is impossible.
        AttributeError: Where it is not a dict; `Builder` refuses the module then.
    """
    # names are paths of layers, and of files: `a.b` would be another layer
    for name, content in contents.items():
        if type(name) is not str or not _MEMBER.fullmatch(name):
            raise RefusedError(
                f"holds a {module_class.__name__} with a module of an impossible name"
            )
        if content is not None and not isinstance(content, _CONTENTS[group]):
            raise _broken(module_class)


def _refuse_shadow(made_class: type, name: Any, value: Any) -> None:
    """Refuse an attribute in the place of what the class defines; a plain value may
    replace a plain one."""
    if name == "type" and type(value) is str:  # Ultralytics' own, over nn.Module.type
        return
    default = inspect.getattr_static(made_class, name, _MISSING)
    values = value if isinstance(value, (list, tuple)) else [value]
    is_plain = all(isinstance(element, _PLAIN_ATTRIBUTES) for element in values)
    is_method = callable(default) or hasattr(type(default), "__get__")
    replaces = default is not _MISSING and (is_method or not is_plain)
    if replaces or name.startswith("__") or type(value) is OwnForward:
        raise RefusedError(
            f"holds a {made_class.__name__} whose state replaces its {quoted(name)}:"
            " it could run code"
        )


def _broken(module_class: type) -> RefusedError:
    """The error for a module that no constructor would have made so."""
    return RefusedError(
        f"holds a broken {module_class.__name__}: it lacks parts of an"
        " nn.Module, or contains itself"
    )


# Names
# -----------------------------------------------------------------------------------------


def _joined(errors: Sequence[RefusedError]) -> RefusedError:
    """One error for several: it has all their names, or is the first of them."""
    names = {name for error in errors for name in error.names}
    if names:
        return _needs(names)
    return errors[0]


def _needs(names: Iterable[str]) -> RefusedError:
    """The error for names that are on no list."""
    text = listed([*map(quoted, sorted(names))], 20)
    return RefusedError(
        f"needs {text}, which could run any code; nothing was executed", names
    )


def _name_of(value: Any) -> str:
    """The name of what a stand-in is made by; of anything else the name of its type."""
    if type(value) is Made:
        return value.maker.text
    return type(value).__name__


def _named(name: str) -> Any:
    """What a name alone stands for: a type of numbers, a function, a class of modules.

    Raises:
        RefusedError: Where the name is on no list.
    """
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if type(dtype) is torch.dtype:
        return dtype
    if name in _FUNCTIONS:
        return _imported(name)
    kept = _module_class(name)
    if kept is None:
        raise _needs([name])
    return KeptClass(kept.__name__, (), {})


def _module_class(name: str) -> Any:
    """The class of modules of this name, if it is one that may be made; None otherwise."""
    name = _RENAMED.get(name, name)
    is_below = name.startswith(_PACKAGES) and _NAME.fullmatch(name)
    if name not in _MODULES and not is_below:
        return None
    try:
        module_class = _imported(name)
    except (ImportError, AttributeError):
        return None
    if type(module_class) is not type or not issubclass(module_class, nn.Module):
        return None
    # A module may have imported the class from elsewhere, where nobody has read it. One
    # that has moved within Ultralytics (files of 8.0.100) is still below its packages.
    home = f"{module_class.__module__}."
    if name not in _MODULES and not home.startswith(_PACKAGES):
        return None
    setter = module_class.__setstate__
    is_plain = module_class.__new__ is object.__new__
    if is_plain and setter.__module__.startswith(_SETTERS):
        return module_class
    return None


def _imported(name: str) -> Any:
    """What a name of the lists stands for."""
    if name.startswith("torchvision."):
        require_torchvision()
    if name.startswith(_YOLO):
        import_ultralytics("ultralytics.nn.tasks")
    return pkgutil.resolve_name(name)


# Data
# ------------------------------------------------------------------------------------------


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    """The pairs of a dict that is still a stand-in."""
    if type(value) is Made:
        return value.pairs
    return []


def _tensor(
    storage: Storage,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    requires_grad: bool = False,
    hooks: Any = None,
    *marks: Any,
) -> Tensor:
    """`_rebuild_tensor`, and v2 and v3 of it.

    Args:
        storage: Where its numbers are.
        offset: Of the first number, in numbers of the storage.
        size: Its shape.
        stride: Of each axis, in numbers of the storage.
        requires_grad: Not kept: `_rebuild_parameter` says it of parameters.
        hooks: Refused, unless there are none.
        marks: Of v3 a dtype; a dict that says whether it is conjugated or negated.
    """
    dtype = storage.data.dtype
    for mark in (hooks, *marks):
        if isinstance(mark, torch.dtype):
            dtype = mark
        elif mark:
            raise RefusedError(
                "holds a tensor that has hooks, or is conjugated or negated"
            )
    count = math.prod(size)
    if count == 0:
        return torch.empty(size, dtype=dtype)
    shape = quoted([*size])
    untyped = storage.data._untyped_storage
    # with strides of 0, a small file has tensors that no memory holds
    if count * dtype.itemsize > 4 * untyped.nbytes() + _BYTES_BESIDE:
        raise UnusableTensorError(f"holds a tensor of shape {shape} without its data")
    tensor = torch.empty(0, dtype=dtype)
    try:
        # compares sizes and strides with the storage; `set_` would enlarge that
        tensor.set_(untyped).as_strided(size, stride, offset)
    except (RuntimeError, TypeError) as error:
        raise UnusableTensorError(
            f"holds a tensor of shape {shape} that ends beyond its data"
        ) from error
    tensor.set_(untyped, offset, size, stride)
    return tensor


def _parameter(builder: Builder, made: Made) -> nn.Parameter:
    """`_rebuild_parameter`: a tensor, requires_grad; hooks and attributes are left out."""
    tensor, requires_grad = made.arguments[:2]
    return nn.Parameter(builder.build(tensor).detach(), requires_grad is True)


def _typed_tensor(builder: Builder, made: Made) -> Any:
    """`_rebuild_from_type_v2`: a maker, a class, its arguments, attributes; the class
    and the attributes are left out."""
    return builder.called(Made(made.arguments[0], made.arguments[2]))


def _bytes(content: str | bytes = b"", encoding: str = "latin1") -> bytes:
    """`_codecs.encode`, `bytes` and `bytearray`: of older protocols a text, and latin1."""
    if isinstance(content, str):
        return content.encode("latin1")
    return bytes(content)


def _number_type(builder: Builder, made: Made) -> np.dtype[Any]:
    """`numpy.dtype`: a code; and in its state the order of bytes."""
    code = made.arguments[0]
    if not _NUMBER_TYPE.fullmatch(code):
        raise RefusedError("holds a type of numpy that is none of plain numbers")
    is_swapped = made.states and made.states[0][1] == ">"
    return np.dtype(f">{code}" if is_swapped else code)


def _number(dtype: np.dtype[Any], content: str | bytes) -> bool | int | float:
    """A single number of numpy as Python's own."""
    number: bool | int | float = np.frombuffer(_bytes(content), dtype.str)[0].item()
    return number


def _array(
    version: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    is_fortran: bool,
    content: str | bytes,
) -> np.ndarray:
    """An array, as numpy's `_reconstruct` makes it, from the state that the file has of
    it."""
    order = "F" if is_fortran else "C"
    return _array_of_buffer(_bytes(content), dtype, shape, order)


def _array_of_buffer(
    content: bytes, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any
) -> np.ndarray:
    """`_frombuffer`, of protocol 5."""
    return np.frombuffer(content, dtype.str).reshape(shape, order=order)


def _partial(
    target: Any, arguments: Iterable[Any], keywords: dict[str, Any], attributes: Any
) -> Any:
    """`functools.partial`, of which these are the state."""
    if not isinstance(target, (KeptClass, FunctionType)):
        raise RefusedError("holds a functools.partial of what is no class of layers")
    return functools.partial(target, *arguments, **keywords or {})


def _attribute(builder: Builder, made: Made) -> Any:
    """`getattr`, for the few attributes that files keep.

    Raises:
        RefusedError: Where it is another attribute.
    """
    owner, name = made.arguments
    if type(owner) is Made and name in _OWN_FORWARDS:
        return OwnForward(owner, name)
    if type(owner) is Name and f"{owner.text}.{name}" in _FUNCTIONS:
        return _imported(f"{owner.text}.{name}")
    # as Python 3.11 writes a member of an enumeration
    if type(owner) is Name and owner.text in _ENUMS:
        return _imported(owner.text).__members__[name]
    raise _needs(["builtins.getattr"])


def _set(builder: Builder, made: Made) -> set[Any]:
    """A set that the reader filled, or whose argument is a list."""
    items = itertools.chain(made.items, *made.arguments)
    return {builder.key(item) for item in items}


def _namespace(builder: Builder, made: Made) -> SimpleNamespace:
    """A namespace, whose state is a dict."""
    return SimpleNamespace(**builder.build(made.states[-1]))


_BY_STAND_IN: dict[str, Callable[[Builder, Made], Any]] = {
    "argparse.Namespace": _namespace,
    "builtins.dict": Builder.mapping,
    "builtins.frozenset": _set,
    "builtins.getattr": _attribute,
    "builtins.set": _set,
    "collections.Counter": Builder.mapping,
    "collections.OrderedDict": Builder.mapping,
    "collections.defaultdict": Builder.mapping,
    "numpy.dtype": _number_type,
    "torch._tensor._rebuild_from_type_v2": _typed_tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "types.SimpleNamespace": _namespace,
    "ultralytics.utils.IterableSimpleNamespace": _namespace,
    "ultralytics.yolo.utils.IterableSimpleNamespace": _namespace,
}
"""What makes a value of a stand-in, by the name of what would be called."""


def _path(*names: str) -> str:
    return "/".join(names)


_BY_ARGUMENTS: dict[str, Callable[..., Any]] = {
    "_codecs.encode": _bytes,
    "builtins.bytearray": _bytes,
    "builtins.bytes": _bytes,
    "functools.partial": _partial,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy._core.multiarray.scalar": _number,
    "numpy._core.numeric._frombuffer": _array_of_buffer,
    "pathlib.PosixPath": _path,
    "pathlib.WindowsPath": _path,
    "pathlib._local.PosixPath": _path,
    "torch.Size": torch.Size,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch.device": torch.device,
    "torch.storage._load_from_bytes": lambda content: inert.read_pickle(
        _bytes(content)
    ),
}
"""What makes a value of a call's arguments or state, which are made first."""
