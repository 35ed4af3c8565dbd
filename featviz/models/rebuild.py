"""From inert stand-ins (`models.inert`) to weights, and to whole modules.

`Data` makes containers, tensors and numbers, wherever they are, and leaves the rest
out. `Modules` makes modules: of the classes listed here, by `object.__new__`, with
attributes of which each was made here, too; anything else refuses the module. So no
constructor runs, no class that a module keeps can be called, and of functions it keeps
only those of `_FUNCTIONS`."""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import pkgutil
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable
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
    # which torch.compile puts in front of that of nn.Module
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
_MOST_MODULES = 100_000
"""Modules of a model, each as often as it is reached: shared ones make a small file
endless."""


class RefusedError(Exception):
    """What is not made of a file, as a predicate (`holds a ...`), and the names that it
    needs."""

    def __init__(self, message: str, names: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.names = sorted(names)


class UnusableTensorError(RefusedError):
    """A tensor without its data, for which the whole file is refused."""


class UnbuiltModule(dict[Any, Any]):
    """The attributes of a module that was not made, and why."""

    def __init__(self, attributes: dict[Any, Any], refusal: RefusedError) -> None:
        super().__init__(attributes)
        self.refusal = refusal


def rebuild(content: Any, modules: bool = True) -> tuple[Any, list[str]]:
    """Make values of what `inert.read` returned.

    Args:
        content: Stand-ins.
        modules: Make modules of the classes that are listed here. Otherwise, and where
            a module needs more, there is an UnbuiltModule.

    Returns:
        Containers of data, tensors and modules; and the names of what was left out.

    Raises:
        RefusedError: Where the content itself is not made, or nothing in it that has
            weights.
    """
    data = Data(modules)
    value = data.build(content)
    if data.left_out and not data.has_weights():
        raise data.refusal()
    return value, sorted(data.left_out)


def lacks(name: str) -> bool:
    """Whether a name is of a class that Ultralytics or timm should have, and is not
    there."""
    if not name.startswith(_OPTIONAL) or not _NAME.fullmatch(name):
        return False
    try:
        _imported(name)
    except (ImportError, AttributeError):
        return True
    return False


class Data:
    """Makes data of stand-ins: each of them once, so that what was shared is shared
    again."""

    def __init__(self, modules: bool = False) -> None:
        self.modules = modules
        self.left_out: dict[str, RefusedError] = {}
        self._made: dict[int, Any] = {}

    def build(self, value: Any) -> Any:
        """The value of a stand-in; RefusedError where there is none."""
        if type(value) in _KEY_TYPES or type(value) is Storage:
            return value
        if id(value) not in self._made:
            self._made[id(value)] = RefusedError("holds a value that contains itself")
            self._made[id(value)] = self._attempt(value)
        made = self._made[id(value)]
        if isinstance(made, RefusedError):
            raise made
        return made

    def _attempt(self, value: Any) -> Any:
        try:
            return self._built(value)
        except (UnusableTensorError, FeatvizError, RecursionError):
            raise
        except RefusedError as error:
            return error
        except Exception as error:  # of arguments that are none of its maker's
            return RefusedError(
                f"holds a broken {_called(value)}: {quoted(str(error))}"
            )

    def _built(self, value: Any) -> Any:
        if type(value) in (list, tuple):
            return type(value)(self.elements(value))
        if type(value) is Name and type(_constant(value.text)) is torch.dtype:
            return _constant(value.text)
        if type(value) is not Made:
            raise _needs([_called(value)])
        maker = _MAKERS.get(_called(value))
        return maker(self, value) if maker else self._unknown(value)

    def _unknown(self, made: Made) -> Any:
        """A module, a dict of a class of somebody's own, or nothing."""
        state = made.states[-1] if made.states else None
        is_listed = self.modules and _module_class(_called(made)) is not None
        if not is_listed and "_modules" not in [name for name, _ in _pairs(state)]:
            if made.pairs:
                return self.mapping(made)
            if _called(made).startswith("torch._utils._rebuild"):
                raise RefusedError(
                    f"holds a tensor that is not plain ({_called(made)})"
                )
            raise _needs([_called(made)])
        refusal = _needs([_called(made)])
        if self.modules:
            try:
                return Modules().whole(made)
            except RefusedError as error:
                refusal = error
        data = Data() if self.modules else self
        return UnbuiltModule(data.build(state) or {}, refusal)

    def elements(self, values: Iterable[Any]) -> list[Any]:
        """What is in a list; None for what is left out."""
        built = []
        for value in values:
            try:
                built.append(self.build(value))
            except RefusedError as error:
                built.append(None)
                self._leave_out(error)
        return built

    def mapping(self, made: Made) -> dict[Any, Any]:
        """A dict of any class, as a dict or OrderedDict, without what is left out."""
        built = OrderedDict() if _called(made) == "collections.OrderedDict" else {}
        pairs = [*made.pairs]
        # of OrderedDict, Counter: a list of pairs, or a dict
        for argument in made.arguments:
            pairs[:0] = argument if type(argument) is list else _pairs(argument)
        for key, value in pairs:
            try:
                built[self.key(key)] = self.build(value)
            except RefusedError as error:
                self._leave_out(error)
        return built

    def key(self, value: Any) -> Any:
        """A key of a dict or an element of a set; hashing it is as deep as building it
        was."""
        key = self.build(value)
        for element in key if type(key) is tuple else [key]:
            if type(element) not in _KEY_TYPES:
                raise RefusedError("holds a key that is no name or number")
        return key

    def _leave_out(self, error: RefusedError) -> None:
        if isinstance(error, UnusableTensorError):
            raise error
        for name in error.names or [str(error)]:
            self.left_out[name] = error

    def refusal(self) -> RefusedError:
        """The error for all that was left out: the names, or else the first reason."""
        errors = [*self.left_out.values()]
        names = {name for error in errors for name in error.names}
        return _needs(names) if names else errors[0]

    def has_weights(self) -> bool:
        """Whether there is any tensor, array or module."""
        types = (Tensor, np.ndarray, nn.Module, UnbuiltModule)
        return any(isinstance(value, types) for value in self._made.values())


class OwnForward(NamedTuple):
    """What a file says stands in the place of a module's forward: another of its
    methods."""

    owner: Made
    name: str


class KeptClass(type):
    """Stands for a class that a module keeps: it cannot be called."""

    def __call__(cls, *arguments: object, **more: object) -> Any:
        """Refuse."""
        raise RefusedError(f"calls {cls.__name__}, which torch.save only keeps")


_FRESH = vars(nn.Module())
_CONTENTS: dict[str, Any] = {
    "_parameters": Tensor,
    "_buffers": Tensor,
    "_modules": nn.Module,
}
_HOOKS = {name for name, v in _FRESH.items() if isinstance(v, dict)} - _CONTENTS.keys()
_MISSING = object()


class Modules(Data):
    """Makes one module, and what it may keep."""

    def whole(self, made: Made) -> nn.Module:
        """The module, if nothing had to be left out."""
        module: nn.Module = self._unknown(made)
        if self.left_out:
            raise self.refusal()
        reached = itertools.islice(
            module.named_modules(remove_duplicate=False), _MOST_MODULES
        )
        if len([*reached]) == _MOST_MODULES:
            raise RefusedError(f"holds a {type(module).__name__} of too many modules")
        try:  # what every command does first with a module
            module.state_dict()
            # goes through all tensors as any .to, changing none
            module.to(non_blocking=False)
            for child in module.modules():
                # reads the settings of a layer, which others rely on
                child.extra_repr()
        except Exception as error:  # whatever a state that a file made up leads to
            raise _broken(type(module)) from error
        return module

    def _built(self, value: Any) -> Any:
        if type(value) is Name and value.text in _FUNCTIONS:
            return _imported(value.text)
        kept = _module_class(value.text) if type(value) is Name else None
        if kept is not None:
            names = {"__module__": kept.__module__, "__qualname__": kept.__qualname__}
            return KeptClass(kept.__name__, (), names)
        return super()._built(value)

    def _unknown(self, made: Made) -> Any:
        name = _called(made)
        if name == "functools.partial":
            target, arguments, keywords, _ = self.elements(made.states[-1])
            if not isinstance(target, (KeptClass, FunctionType)):
                raise RefusedError(
                    "holds a functools.partial of what is no class of layers"
                )
            return functools.partial(target, *arguments, **keywords or {})
        if name == "builtins.getattr":
            return _attribute(*made.arguments)
        if name in _ENUMS:
            return _imported(name)(*made.arguments)
        module_class = _module_class(name) or (
            _imported(name) if name in _HELPERS else None
        )
        if module_class is None:
            raise _needs([name])
        return self._object(made, module_class)

    def _object(self, made: Made, module_class: type) -> Any:
        """An empty object with these attributes; a module is completed by its own
        `__setstate__`."""
        if made.arguments or made.items or made.pairs or len(made.states) > 1:
            raise RefusedError(
                f"makes a {module_class.__name__} in a way that torch.save does not"
            )
        built: Any = object.__new__(module_class)
        # an object without attributes (torchvision's ToTensor) has no state in the file
        attributes = self.build(made.states[0]) if made.states else {}
        if not isinstance(attributes, dict):
            raise _broken(module_class)
        attributes = {**attributes}
        for name, value in attributes.items():
            if name in _CONTENTS:
                _check_contents(module_class, name, value)
            elif name in _HOOKS:
                if value:
                    text = f"a {module_class.__name__} with {name}"
                    raise RefusedError(
                        f"holds {text}, which would call what the file says"
                    )
                attributes[name] = type(_FRESH[name])()
            elif (
                name == "forward" and type(value) is OwnForward and value.owner is made
            ):
                method = inspect.getattr_static(module_class, value.name)
                attributes[name] = MethodType(method, built)
            else:
                _refuse_shadow(module_class, name, value)
        if not isinstance(built, nn.Module):
            vars(built).update(attributes)
            return built
        try:
            built.__setstate__(attributes)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise _broken(module_class) from error
        for name, fresh in _FRESH.items():
            expected = type(fresh) if isinstance(fresh, (bool, dict, set)) else object
            if not isinstance(vars(built).get(name, _MISSING), expected):
                raise _broken(module_class)
        return built


def _check_contents(module_class: type, group: str, contents: Any) -> None:
    """Parameters, buffers and children have names that torch would take, and are what
    they should be."""
    if not isinstance(contents, dict):
        raise _broken(module_class)
    for name, content in contents.items():
        if type(name) is not str or not _MEMBER.fullmatch(name):
            text = f"a {module_class.__name__} with a module of an impossible name"
            raise RefusedError(f"holds {text}")
        if content is not None and not isinstance(content, _CONTENTS[group]):
            raise _broken(module_class)


def _refuse_shadow(module_class: type, name: Any, value: Any) -> None:
    """No attribute takes the place of what the class defines, but a plain value of a
    plain one."""
    default = inspect.getattr_static(module_class, name, _MISSING)
    values = value if isinstance(value, (list, tuple)) else [value]
    is_plain = all(isinstance(element, _PLAIN_ATTRIBUTES) for element in values)
    if name == "type" and type(value) is str:  # Ultralytics sets it
        return
    # of torch before 1.0
    if name == "all_weights" and issubclass(module_class, nn.RNNBase):
        return
    is_method = callable(default) or hasattr(type(default), "__get__")
    replaces = default is not _MISSING and (is_method or not is_plain)
    if replaces or name.startswith("__") or type(value) is OwnForward:
        text = f"whose state replaces its {quoted(name)}: it could run code"
        raise RefusedError(f"holds a {module_class.__name__} {text}")


def _attribute(owner: Any, name: Any) -> Any:
    """What `getattr` would return, of the few attributes that files keep."""
    if type(owner) is Made and name in _OWN_FORWARDS:
        return OwnForward(owner, name)
    if type(owner) is Name and f"{owner.text}.{name}" in _FUNCTIONS:
        return _imported(f"{owner.text}.{name}")
    if type(owner) is Name and owner.text in _ENUMS:
        return _imported(owner.text).__members__[name]
    raise _needs(["builtins.getattr"])


def _broken(module_class: type) -> RefusedError:
    text = "it lacks parts of an nn.Module, or contains itself"
    return RefusedError(f"holds a broken {module_class.__name__}: {text}")


# Names
# -----------------------------------------------------------------------------------------


def _needs(names: Iterable[str]) -> RefusedError:
    """The error for names that are on no list."""
    text = listed([*map(quoted, sorted(names))], 20)
    return RefusedError(
        f"needs {text}, which could run any code; nothing was executed", names
    )


def _called(value: Any) -> str:
    """The name of what a stand-in is, or is made by; of anything else the name of its
    type."""
    if type(value) is Made:
        is_nested = type(value.maker) is Made
        return f"{_called(value.maker)}()" if is_nested else _called(value.maker)
    return value.text if type(value) is Name else type(value).__name__


def _constant(name: str) -> Any:
    """What torch has by a name such as `torch.float32`."""
    return getattr(torch, name.removeprefix("torch."), None)


def _module_class(name: str) -> Any:
    """The class of modules of this name, if it is one that may be made; None otherwise."""
    name = _RENAMED.get(name, name)
    if name not in _MODULES and not (
        name.startswith(_PACKAGES) and _NAME.fullmatch(name)
    ):
        return None
    try:
        module_class = _imported(name)
    except (ImportError, AttributeError):
        return None
    if type(module_class) is not type or not issubclass(module_class, nn.Module):
        return None
    home = module_class.__module__
    package = name.rpartition(".")[0]
    # in 8.0.100
    has_moved = package == "ultralytics.nn.modules" and home.startswith(package)
    setter: Any = module_class.__setstate__
    is_plain = module_class.__new__ is object.__new__ and setter.__module__.startswith(
        _SETTERS
    )
    return module_class if is_plain and (home == package or has_moved) else None


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
    return value.pairs if type(value) is Made else []


def _tensor(data: Data, made: Made) -> Tensor:
    """`_rebuild_tensor`, and v2 and v3 of it: storage, offset, size, stride,
    requires_grad, hooks, dtype (v3), and marks of conjugated or negated values. All its
    elements lie in its storage."""
    storage, offset, size, stride, *more = data.elements(made.arguments)
    if any(isinstance(value, dict) and value for value in more):
        raise RefusedError("holds a tensor that has hooks, or is conjugated or negated")
    untyped = storage.data._untyped_storage
    dtypes = [value for value in more if isinstance(value, torch.dtype)]
    dtype = dtypes[0] if dtypes else storage.data.dtype
    numbers = [offset, *size, *stride]
    if len(size) != len(stride) or any(type(n) is not int or n < 0 for n in numbers):
        raise UnusableTensorError("holds a tensor of an impossible shape")
    if math.prod(size) * dtype.itemsize > 4 * untyped.nbytes() + _BYTES_BESIDE:
        raise UnusableTensorError(f"holds a tensor of shape {[*size]} without its data")
    if math.prod(size) == 0:
        return torch.empty(size, dtype=dtype)
    last = offset + sum(
        (length - 1) * step for length, step in zip(size, stride, strict=True)
    )
    if (last + 1) * dtype.itemsize > untyped.nbytes():
        raise UnusableTensorError(
            f"holds a tensor of shape {[*size]} that ends beyond its data"
        )
    tensor = torch.empty(0, dtype=dtype).set_(untyped, offset, size, stride)
    return tensor.requires_grad_() if True in more else tensor


def _parameter(data: Data, made: Made) -> nn.Parameter:
    """`_rebuild_parameter`: a tensor, requires_grad; hooks and attributes are left out."""
    return nn.Parameter(
        data.build(made.arguments[0]).detach(), made.arguments[1] is True
    )


def _typed_tensor(data: Data, made: Made) -> Any:
    """`_rebuild_from_type_v2`: a maker, a class, its arguments, attributes; the class
    and the attributes are left out."""
    return data._built(Made(made.arguments[0], made.arguments[2]))


def _bytes(data: Data, made: Made) -> bytes:
    """`_codecs.encode`, `bytes` and `bytearray`: of older protocols a text, and latin1."""
    content = data.build(made.arguments[0]) if made.arguments else b""
    return content.encode("latin1") if type(content) is str else bytes(content)


def _number_type(data: Data, made: Made) -> np.dtype[Any]:
    """`numpy.dtype`: a code; and in its state the order of bytes."""
    code = made.arguments[0]
    if not _NUMBER_TYPE.fullmatch(code):
        raise RefusedError("holds a type of numpy that is none of plain numbers")
    is_swapped = made.states and made.states[0][1] == ">"
    return np.dtype(f">{code}" if is_swapped else code)


def _number(data: Data, made: Made) -> bool | int | float:
    """A single number of numpy as Python's own: type, bytes."""
    dtype, content = data.elements(made.arguments)
    number: bool | int | float = np.frombuffer(content, dtype.str)[0].item()
    return number


def _array(data: Data, made: Made) -> np.ndarray:
    """`_reconstruct`, whose state is version, shape, type, is_fortran, bytes; or of
    protocol 5 `_frombuffer`: bytes, type, shape, order."""
    if made.states:
        _, shape, dtype, is_fortran, content = data.elements(made.states[0])
    else:
        content, dtype, shape, order = data.elements(made.arguments)
        is_fortran = order == "F"
    # of Python 2
    content = content.encode("latin1") if type(content) is str else content
    return np.frombuffer(content, dtype.str).reshape(
        shape, order="F" if is_fortran else "C"
    )


def _set(data: Data, made: Made) -> set[Any]:
    """A set that the reader filled, or whose argument is a list."""
    items = itertools.chain(made.items, *made.arguments)
    return {data.key(item) for item in items}


def _namespace(data: Data, made: Made) -> SimpleNamespace:
    return SimpleNamespace(**data.build(made.states[-1]))


_MAKERS: dict[str, Callable[[Data, Made], Any]] = {
    "_codecs.encode": _bytes,
    "argparse.Namespace": _namespace,
    "builtins.bytearray": _bytes,
    "builtins.bytes": _bytes,
    "builtins.dict": Data.mapping,
    "builtins.frozenset": _set,
    "builtins.set": _set,
    "collections.Counter": Data.mapping,
    "collections.OrderedDict": Data.mapping,
    "collections.defaultdict": Data.mapping,
    "numpy._core.multiarray._reconstruct": _array,
    "numpy._core.multiarray.scalar": _number,
    "numpy._core.numeric._frombuffer": _array,
    "numpy.core.multiarray._reconstruct": _array,
    "numpy.core.multiarray.scalar": _number,
    "numpy.core.numeric._frombuffer": _array,
    "numpy.dtype": _number_type,
    "torch.Size": lambda data, made: torch.Size(data.build(made.arguments[0])),
    "torch._tensor._rebuild_from_type_v2": _typed_tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _tensor,
    "torch.device": lambda data, made: torch.device(*made.arguments),
    "torch.storage._load_from_bytes": lambda data, made: inert.read_pickle(
        _bytes(data, made)
    ),
    "types.SimpleNamespace": _namespace,
    "ultralytics.utils.IterableSimpleNamespace": _namespace,
    "ultralytics.yolo.utils.IterableSimpleNamespace": _namespace,
    **dict.fromkeys(
        ["pathlib.PosixPath", "pathlib.WindowsPath", "pathlib._local.PosixPath"],
        lambda data, made: "/".join(made.arguments),
    ),
}
"""What makes a value of a call, by the name of what would be called."""
