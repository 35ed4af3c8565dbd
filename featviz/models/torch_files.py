"""Files of torch.save, read by torch's own restricted reader: data, and modules of known classes.

It calls only what it is told of, and is told of no class: each name that may be used stands for one
of our own that cannot be called and makes an empty object, which the file's state then fills. So no
constructor runs, and a class that a model keeps (ResNet's `_norm_layer`) cannot be called by its
forward either. What was made is looked at once, before any of it is used.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import pickle
import re
import threading
import warnings
import weakref
from argparse import Namespace
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BytesIO
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor, nn

from featviz.errors import FileError
from featviz.files import npy
from featviz.models.requirements import import_ultralytics, require_torchvision
from featviz.text import listed, quoted

_YOLO = ("ultralytics.nn.modules.", "ultralytics.nn.tasks.")
_PACKAGES = (
    "torch.nn.modules.",
    "torchvision.models.",
    "torchvision.ops.",
    "timm.models.",
    "timm.layers.",
    *_YOLO,
)
"""Below these, classes of modules: their forward methods call no value that they keep but modules,
functions of the lists below and forward methods; none evaluates text, opens a file or imports."""

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
"""Classes beside: their objects hold numbers and modules."""

_FUNCTIONS = (
    "timm.layers.activations.gelu",
    "torch._C._nn.gelu",
    "torch.nn.functional.gelu",
    "torch.nn.functional.relu",
    "torch.nn.functional.silu",
    "torchvision.models.optical_flow.raft._pass_through_h",
    "torchvision.ops.boxes.box_iou",
)

_ENUMS = ("timm.layers.format.Format", "torchvision.transforms.functional.InterpolationMode")

_RENAMED = {
    "ultralytics.nn.modules.block.Silence": "torch.nn.modules.linear.Identity",
    "ultralytics.nn.tasks.YOLOv10DetectionModel": "ultralytics.nn.tasks.DetectionModel",
}

_SETTERS = ("torch.nn.modules.", "timm.layers.ml_decoder", "ultralytics.nn.modules.block")
"""Where `__setstate__` was read: it fills in what older files lack."""

_NAME = re.compile(r"[a-zA-Z_]\w*(\.[a-zA-Z_]\w*)+", re.ASCII)
_NUMBER = re.compile(r"[<>=|]?(f[248]|[iu][1248]|b1)")
_UNSUPPORTED = re.compile(r"GLOBAL (.+?) (?:was not an allowed|whose module)")
_LOCK = threading.Lock()
"""torch keeps what its reader may use for the whole process."""

_SAVE_IMAGE = "torch.save(tensor, 'image.pt') of a plain tensor [C, H, W]"


class RefusedError(Exception):
    """What a file holds that is no model (`holds a ...`), or the names that it may not use."""

    def __init__(self, words: str, names: Iterable[str] = ()) -> None:
        self.names = sorted(names)
        needs = f"needs {listed([*map(quoted, self.names)], 20)}, which could run any code"
        super().__init__(words or f"{needs}; nothing was executed")


class _Name(type):
    """The class of what stands for a class while a file is read, and where one is kept as a value:
    it makes an empty object, and cannot be called."""

    made: type

    def __call__(cls, *args: object, **more: object) -> Any:
        raise RefusedError(f"calls {cls.__name__}, which torch.save only keeps")


class _NumberType:
    """What a file calls `numpy.dtype`: the type of single numbers."""

    def __init__(self, code: Any, *more: object) -> None:
        if type(code) is not str or not _NUMBER.fullmatch(code):
            raise RefusedError("holds a type of numpy that is none of plain numbers")
        self.dtype = np.dtype(code)

    def __setstate__(self, state: object) -> None:
        """Nothing more is needed."""


def load(file: BinaryIO, plain: bool = False) -> Any:
    """Read what torch.save wrote, tensors on the CPU; `plain` admits tensors and containers alone.
    A broken file raises whatever it makes torch raise."""
    try:
        with _only({}):
            needed = {*torch.serialization.get_unsafe_globals_in_checkpoint(file)}
    except ValueError:  # of before torch 1.6: what scripts keep beside weights
        needed = {*_KEPT}
    allowed = {} if plain else {n: m for n in needed if (m := _meaning(n)) is not None}
    if unknown := needed - allowed.keys():
        raise RefusedError("", unknown)
    file.seek(0)
    with _only(allowed), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about old ways to save, which a reader cannot change
        try:
            content = torch.load(file, "cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            found = _UNSUPPORTED.search(str(error))
            name = found[1] if found and "." in found[1] else f"builtins.{found and found[1]}"
            if found and _meaning(name) is None:
                raise RefusedError("", {name}) from error
            if found or "persistent_load of storage" in str(error):
                words = "is a whole model in the format of before torch 1.6"
                raise RefusedError(words) from error
            raise
    _check(content)
    return content


def read_tensor(data: bytes) -> np.ndarray:
    """The one tensor that the bytes of a file of torch.save hold, or the one that is called
    `image`, as an array; what numpy lacks (bfloat16) becomes float32."""
    if not data.startswith(b"PK"):
        raise FileError("is of the older format of torch.save", _SAVE_IMAGE)
    try:
        content = load(BytesIO(data), plain=True)
    except RefusedError as error:
        raise FileError(str(error), _SAVE_IMAGE) from error
    except Exception as error:  # a broken pickle decides itself what it raises
        words = quoted(str(error).splitlines()[0]) if str(error) else type(error).__name__
        raise FileError(f"is no whole file of torch.save: {words}") from error
    if isinstance(content, dict):
        tensors = {str(k): value for k, value in content.items() if isinstance(value, Tensor)}
        content = npy.only(tensors, "tensors", "torch.save(tensors[NAME], 'image.pt')")
    if not isinstance(content, Tensor):
        raise FileError(f"holds a {type(content).__name__}, and no tensor", _SAVE_IMAGE)
    if content.layout != torch.strided or content.is_quantized or content.is_complex():
        raise FileError("holds a tensor that is sparse, complex or quantised", _SAVE_IMAGE)
    dense = content.detach().resolve_neg()
    array: np.ndarray = (dense.float() if dense.dtype == torch.bfloat16 else dense).numpy()
    return array


@contextmanager
def _only(allowed: Mapping[str, Any]) -> Iterator[None]:
    """Let torch's reader use these names, and none that others have allowed in this process."""
    kinds = {m.made for m in allowed.values() if isinstance(m, _Name)}
    kinds |= {functools.partial} if "functools.partial" in allowed else set()
    names = [(meaning, name) for name, meaning in allowed.items()]
    states = [(kind, f"{number}\n") for number, kind in enumerate(kinds)]  # names no file can say
    with _LOCK:
        before = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals([*names, *states])
        try:
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


def _meaning(name: str) -> Any:
    """What a name of a file stands for; None if it may not be used."""
    name = _RENAMED.get(name, name)
    if name in _KEPT:
        return _KEPT[name]
    allowed = (*_FUNCTIONS, *_ENUMS, *_HELPERS, *_MODULES)
    if name not in allowed and not (name.startswith(_PACKAGES) and _NAME.fullmatch(name)):
        return None
    try:
        kind: Any = _attribute(name)
    except (ImportError, AttributeError):
        return None
    if name in _FUNCTIONS:
        return kind
    if name in _ENUMS:
        return functools.partial(_member, kind)
    if name not in _HELPERS:  # a class of modules, at its own place, which is made plainly
        if not isinstance(kind, type) or not issubclass(kind, nn.Module):
            return None
        home, named = kind.__module__, name.rpartition(".")[0]
        moved = named == "ultralytics.nn.modules" and home.startswith(f"{named}.")  # before 8.0.100
        setter: Any = kind.__setstate__
        read = setter is nn.Module.__setstate__ or setter.__module__.startswith(_SETTERS)
        plain = type(kind) is type and kind.__new__ is object.__new__ and read
        scripted = issubclass(kind, (torch.fx.GraphModule, torch.jit.ScriptModule))
        if scripted or not plain or not (home == named or moved):
            return None

    def make(cls: type, *args: object) -> Any:
        if args:
            raise RefusedError(f"makes a {kind.__name__} in a way that torch.save does not")
        return object.__new__(kind)

    words = {"__new__": make, "__module__": kind.__module__, "made": kind}
    return _Name(kind.__name__, (), {**words, "__qualname__": kind.__qualname__})


def _attribute(name: str) -> Any:
    module, _, attribute = name.rpartition(".")
    if name.startswith("torchvision."):
        require_torchvision()
    imported = import_ultralytics if name.startswith(_YOLO) else importlib.import_module
    return getattr(imported(module), attribute)


def lacks(name: str) -> bool:
    """Whether a name is of a class that Ultralytics or timm should have, and is not there."""
    if not _NAME.fullmatch(name) or not name.startswith(("timm.models.", "timm.layers.", *_YOLO)):
        return False
    try:
        _attribute(name)
    except (ImportError, AttributeError):
        return True
    return False


# What stands for functions that a file would call --------------------------------------------


def _member(kind: Any, value: str) -> Any:
    if type(value) is not str:
        raise RefusedError(f"holds a {kind.__name__} that is none")
    return kind(value)


def _attribute_of(owner: Any, name: str) -> Any:
    """What `getattr` would return: a forward method, or a way to interpolate."""
    if isinstance(owner, functools.partial) and owner.func is _member:
        return owner.args[0].__members__[name]
    kind = owner.made if isinstance(owner, _Name) else type(owner)
    found = inspect.getattr_static(kind, name, None) if _is_forward(name) else None
    found = found.__func__ if isinstance(found, staticmethod) else found
    if not issubclass(kind, nn.Module) or not isinstance(found, FunctionType):
        raise RefusedError("needs builtins.getattr, which could run any code")
    return found if isinstance(owner, _Name) else MethodType(found, owner)


def _is_forward(name: Any) -> bool:
    """Whether this is the name of a method that computes: `forward`, `forward_fuse`."""
    return type(name) is str and name.startswith("forward")


def _partial(kind: Any) -> Any:
    if not isinstance(kind, _Name):
        raise RefusedError("holds a functools.partial of something that is no class of layers")
    return functools.partial(kind)


def _number(kind: Any, content: Any) -> Any:
    """A single number of numpy as Python's own."""
    if not isinstance(kind, _NumberType) or type(content) is not bytes:
        raise RefusedError("holds a number of numpy that is none")
    size = kind.dtype.itemsize
    if len(content) != size:
        raise RefusedError(f"holds a number of {len(content)} bytes, expected {size}")
    return np.frombuffer(content, kind.dtype)[0].item()


def _path(*parts: Any) -> str:
    if not all(type(part) is str for part in parts):
        raise RefusedError("holds a path that is none")
    return "/".join(parts)


_KEPT: dict[str, Any] = {
    "argparse.Namespace": Namespace,
    "builtins.getattr": _attribute_of,
    "functools.partial": _partial,
    "numpy.dtype": _NumberType,
    **{f"numpy.{core}.multiarray.scalar": _number for core in ("core", "_core")},
    **{f"pathlib.{kind}": _path for kind in ("PosixPath", "WindowsPath")},
    **{f"pathlib._local.{kind}": _path for kind in ("PosixPath", "WindowsPath")},
    "types.SimpleNamespace": SimpleNamespace,
    "ultralytics.utils.IterableSimpleNamespace": SimpleNamespace,
    "ultralytics.yolo.utils.IterableSimpleNamespace": SimpleNamespace,
}
"""What training scripts keep beside weights, and what is made of it."""


# What was made ---------------------------------------------------------------------------------

_FRESH = vars(nn.Module())
_CONTENTS = {"_parameters": Tensor, "_buffers": Tensor, "_modules": nn.Module}
_HOOKS = {n for n, v in _FRESH.items() if isinstance(v, dict)} - _CONTENTS.keys()
_PART = re.compile(r"[^.\0\ud800-\udfff]+")
"""Names of modules: torch wants no dots, and results are filed under them."""
_PLAIN = (bool, int, float, str, type(None))
_BESIDE = 64 * 2**20
"""Bytes that a tensor may have beside four times its data: it may be expanded, or on meta."""


def _check(content: Any) -> None:
    """Refuse modules that are not what their classes make, and what could be called."""
    for value in nested(content, _parts):
        if isinstance(value, (Tensor, OrderedDict, Counter)):
            vars(value).clear()  # attributes, which could take the place of methods
        if isinstance(value, nn.Module):
            _check_module(value)
        elif isinstance(value, Tensor):
            if value._backward_hooks:
                raise RefusedError("holds a tensor with hooks, which would call what the file says")
            if value.layout is torch.strided:  # it may be expanded to much more than its data
                there = 0 if value.is_meta else value.untyped_storage().nbytes()
                if value.numel() * value.element_size() > 4 * there + _BESIDE:
                    words = f"holds a tensor of shape {list(value.shape)} without its data"
                    raise RefusedError(words)
        elif callable(value) and not _harmless(value):
            what = getattr(value, "__name__", type(value).__name__)
            raise RefusedError(f"keeps {quoted(what)}, which could be called")
    for module in (value for value in nested(content) if isinstance(value, nn.Module)):
        try:  # what every command does first with a module, which may contain itself
            module.state_dict()
            module.to(non_blocking=False)  # goes through all tensors as any .to, changing none
            for part in module.modules():
                part.extra_repr()  # reads the settings of a layer, which others rely on
        except Exception as error:  # whatever a state that a file made up leads to
            raise _broken(module) from error


def nested(
    content: Any,
    parts: Callable[[Any], Iterable[Any]] = lambda v: v.values() if isinstance(v, Mapping) else (),
) -> Iterator[Any]:
    """A value and all that is in it (if `parts` is not said, in mappings), each object once."""
    reached, seen = [content], {id(content)}
    for value in reached:
        yield value
        for inner in parts(value):
            if id(inner) not in seen:
                reached.append(inner)
                seen.add(id(inner))


def _parts(value: Any) -> Sequence[Any]:
    """What a value holds, at its first level."""
    if isinstance(value, dict):
        return [*dict.keys(value), *dict.values(value)]
    if isinstance(value, (list, tuple, set)):
        return [*value]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values(), *vars(value).values()]
    kind, kinds = type(value), (nn.Module, Namespace, SimpleNamespace)
    is_helper = f"{kind.__module__}.{kind.__qualname__}" in _HELPERS
    return [*vars(value).values()] if is_helper or isinstance(value, kinds) else []


def _harmless(value: Any) -> bool:
    """Whether a value that can be called may be kept: the name of a class, which cannot; a partial
    of one; a function that only computes; a forward method."""
    if isinstance(value, functools.partial):
        return isinstance(value.func, _Name) or value.func is _member
    if isinstance(value, MethodType):
        return isinstance(value.__self__, nn.Module) and _is_forward(value.__name__)
    known = isinstance(value, FunctionType) and _is_forward(value.__name__)
    known = known or isinstance(value, (_Name, weakref.ref))  # nn.LSTM makes references
    name = f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', '')}"
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    return known or name in _FUNCTIONS or kind in _HELPERS


def _check_module(module: nn.Module) -> None:
    """No attribute takes the place of what the class defines, and no hooks are set."""
    attributes, of = vars(module), f"holds a {type(module).__name__}"
    for name, value in attributes.items():
        owner = next((kind for kind in type(module).__mro__ if name in vars(kind)), None)
        if owner is None:
            replaced = type(name) is str and name.startswith("__")
        else:  # a plain value may take the place of a plain value
            default = vars(owner)[name]
            values = value if isinstance(value, (list, tuple)) else [value]
            plain = not callable(default) and not hasattr(type(default), "__get__")
            replaced = not (plain and all(isinstance(one, (*_PLAIN, Tensor)) for one in values))
            if name == "forward":  # of a fused model of Ultralytics
                own = isinstance(value, MethodType) and value.__self__ is module
                replaced = not (own and _is_forward(value.__name__))
            elif name == "type":  # Ultralytics sets it
                replaced = replaced and type(value) is not str
            elif name == "all_weights":  # of torch before 1.0
                replaced = replaced and not isinstance(module, nn.RNNBase)
        if replaced:
            words = f"whose state replaces its {quoted(str(name))}: it could run code"
            raise RefusedError(f"{of} {words}")
    for name, kind in _CONTENTS.items():
        items: Any = attributes.get(name)
        if type(items) not in (dict, OrderedDict) or not all(
            type(key) is str and (value is None or isinstance(value, kind))
            for key, value in dict.items(items)  # one of its own could hide some
        ):
            raise _broken(module)
    if not all(_PART.fullmatch(name) for name in attributes["_modules"]):
        raise RefusedError(f"{of} with a module of an impossible name")
    if filled := sorted(name for name in _HOOKS if attributes.get(name)):
        raise RefusedError(f"{of} with {filled[0]}, which would call what the file says")
    for name, fresh in _FRESH.items():
        kind = type(fresh) if isinstance(fresh, (bool, dict, set)) else object
        if name not in attributes or not isinstance(attributes[name], kind):
            raise _broken(module)


def _broken(module: nn.Module) -> RefusedError:
    words = "it lacks parts of an nn.Module, or contains itself"
    return RefusedError(f"holds a broken {type(module).__name__}: {words}")
