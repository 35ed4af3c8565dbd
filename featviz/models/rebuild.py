"""Make weights and whole modules out of inert stand-ins (`models.inert`).

Other things in a file (meters, configurations) that cannot be made are left out, with the
reason. But a module is made with all of its attributes or not at all. If it cannot be made,
an UnbuiltModule takes its place: a dict of those attributes that could be made.

A module is made by `object.__new__` of a class that is listed here, and its attributes are
made here, too. So no constructor runs. A class that a module keeps (`norm_layer`) is
replaced by one that cannot be called, and a function must be one of `_FUNCTIONS`."""

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
"""Packages whose classes of modules were reviewed. Of the values that a module keeps, their
forward methods call only modules, functions of the lists below and forward methods; none
evaluates text, opens a file or imports."""

_MODULES = (
    "torch.ao.nn.quantized.modules.functional_modules.FloatFunctional",
    "torch.ao.quantization.stubs.DeQuantStub",
    "torch.ao.quantization.stubs.QuantStub",
    "torch.nn.parallel.data_parallel.DataParallel",
    "torch.optim.swa_utils.AveragedModel",
)
"""Classes of modules in other packages that were reviewed."""

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
"""Python modules whose `__setstate__` methods were reviewed: they only fill in attributes that
older files lack."""

_OWN_FORWARDS = (
    "forward",
    "forward_fuse",
    "forward_slicing",
    "forward_split",
    "forward_split_cat",
)
"""Methods by which Ultralytics, and timm's FasterNet, replace the forward of a module."""

_NAME = re.compile(r"[a-zA-Z_]\w*(\.[a-zA-Z_]\w*)+", re.ASCII)
_NUMBER_TYPE = re.compile(r"f[248]|[iu][1248]|b1")
_MEMBER = re.compile(r"[^.\0\ud800-\udfff]+")
"""Names of parameters, buffers and children. They have no dots, which torch does not allow,
and they become parts of file names."""

_KEY_TYPES = (bool, int, float, str, bytes, type(None))
_PLAIN_ATTRIBUTES = (bool, int, float, str, type(None), Tensor)
_BYTES_BESIDE = 64 * 2**20
"""A tensor may have four times the bytes of its storage, plus these. It may be larger than
its storage if it is expanded (strides of 0)."""
_MAX_MODULES = 20_000
"""The most modules of a model. A shared module counts each time: shared modules inside shared
modules would make a small file endless."""


class RefusedError(Exception):
    """A value in a file cannot be made: it is on no list here, or it is broken.

    Args:
        message: A predicate, whose subject is the file: `holds a ...`.
        names: The classes and functions that the file needs and that are on no list here.
    """

    def __init__(self, message: str, names: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.names = sorted(names)


class UnusableTensorError(RefusedError):
    """A tensor in a file has no data. Then the whole file is refused."""


class UnbuiltModule(dict[Any, Any]):
    """The attributes of a module that could not be made, and the reason in `refusal`."""

    def __init__(self, attributes: dict[Any, Any], refusal: RefusedError) -> None:
        super().__init__(attributes)
        self.refusal = refusal


def rebuild(content: Any) -> Any:
    """Make the values that the stand-ins in a file stand for.

    Args:
        content: The result of `inert.read`: stand-ins, and containers of them.

    Returns:
        Containers of data, tensors and modules. A module that needs something that is not
        listed here is an UnbuiltModule.

    Raises:
        RefusedError: Where the content itself cannot be made; or where something was left
            out, and the rest has no weights.
    """
    builder = Builder()
    value = builder.build(content)
    # without weights the file is of no use, and what was left out says why
    if builder.reasons and not builder.has_weights():
        raise _join_errors(builder.reasons)
    reasons = {
        name for error in builder.reasons for name in error.names or [str(error)]
    }
    if reasons:
        log.debug("left out: %s", listed([*map(quoted, sorted(reasons))], 20))
    return value


def is_missing_from_library(name: str) -> bool:
    """Whether a dotted name lies in a package of timm or Ultralytics, and the installed
    library does not have it, or is not installed. False for names of other packages."""
    if not name.startswith(_OPTIONAL) or not _NAME.fullmatch(name):
        return False
    try:
        _import_name(name)
    except (ImportError, AttributeError):
        return True
    return False


class _Built(NamedTuple):
    """The result of making the value of a stand-in."""

    value: Any
    """The value, or a RefusedError if it could not be made."""
    reason: RefusedError | None
    """Why something in the value was left out; None if it is complete."""


class Builder:
    """Makes the values of the stand-ins of one file. Each value is made once, so that objects
    which were shared are shared again."""

    def __init__(self) -> None:
        self.reasons: list[RefusedError] = []
        """Why values were left out: an error for each time that such a value was met."""
        self._built: dict[int, _Built] = {}
        """The values that were made, by the id of the stand-in."""

    def build(self, value: Any) -> Any:
        """The value of a stand-in. It is made at the first call, and cached.

        Args:
            value: A stand-in, or anything else that `inert.read` returns.

        Raises:
            RefusedError: Where it cannot be made; also at each later call.
            RecursionError, FeatvizError: As from `_attempt`.
        """
        if type(value) in _KEY_TYPES or type(value) is Storage:
            return value
        built = self._built.get(id(value))
        if built is None:
            # this error is the value until it is made, for a value that contains itself
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
        """Make the value of a stand-in. If it cannot be made, return a RefusedError, which
        `build` raises each time that the stand-in is met.

        Raises:
            UnusableTensorError: Where a tensor in it has no data.
            RecursionError: Where values are nested too deep.
            FeatvizError: Where the library of its class cannot be imported.
        """
        try:
            if type(value) in (list, tuple):
                return type(value)(self.build_elements(value))
            if type(value) is Name:
                return _value_of_name(value.text)
            if type(value) is Made:
                return self.build_call(value)
            raise _needs_error([_name_of(value)])
        except (UnusableTensorError, FeatvizError, RecursionError):
            raise
        except RefusedError as error:
            return error
        except Exception as error:  # the file's arguments for the value are wrong
            reason = quoted(error)
            return RefusedError(f"holds a broken {_name_of(value)}: {reason}")

    def build_call(self, made: Made) -> Any:
        """The value of a call in a file, such as an object of a class. The function or class
        that is called must be on one of the lists. If it is on none, a module becomes an
        UnbuiltModule, and a dict of another class a plain dict.

        Raises:
            RefusedError: Where the call is on no list, and makes no module or dict; or
                where it makes a special tensor (sparse, quantised).
        """
        name = made.maker.text
        if name in _BY_STAND_IN:
            return _BY_STAND_IN[name](self, made)
        if name in _BY_ARGUMENTS:
            # functools.partial and numpy's arrays have their arguments in a state, a tuple
            state = made.states[-1] if made.states else made.arguments
            return _BY_ARGUMENTS[name](*self.build_elements(state))
        if name in _ENUMS:
            return _import_name(name)(*made.arguments)
        if name in _HELPERS:
            return self._object(made, _import_name(name))
        # arguments would mean a call of the constructor, which torch.save never writes
        module_class = None if made.arguments else _module_class(name)
        state = made.states[-1] if made.states else None
        if module_class or "_modules" in [key for key, _ in _pairs(state)]:
            return self._module(made, module_class)
        if name.startswith("torch._utils._rebuild"):
            raise RefusedError(f"holds a tensor that is not plain ({name})")
        if not made.pairs:
            raise _needs_error([name])
        # a dict of an unknown class is replaced by a plain one, except inside a module
        self.reasons.append(_needs_error([name]))
        return self.build_dict(made)

    def build_elements(self, values: Iterable[Any]) -> list[Any]:
        """The values of several stand-ins; None for each value that is left out.

        Raises:
            UnusableTensorError: Where a tensor in them has no data.
        """
        built = []
        for value in values:
            try:
                built.append(self.build(value))
            except RefusedError as error:
                built.append(None)
                self._leave_out(error)
        return built

    def build_dict(self, made: Made) -> dict[Any, Any]:
        """The value of a dict of any class: a plain dict, without values that are left out.

        Raises:
            UnusableTensorError: Where a tensor in it has no data.
        """
        built = {}
        pairs = [*made.pairs]
        # the argument of OrderedDict is a list of pairs, that of Counter a dict
        for argument in made.arguments:
            pairs[:0] = argument if type(argument) is list else _pairs(argument)
        for key, value in pairs:
            try:
                built[self.build_key(key)] = self.build(value)
            except RefusedError as error:
                self._leave_out(error)
        return built

    def build_key(self, value: Any) -> Any:
        """The value of a key of a dict, or of an element of a set: a number, a text, or a
        tuple of these. Anything else is refused, since its hash could recurse too deep.

        Raises:
            RefusedError: Where it is anything else.
        """
        key = self.build(value)
        for element in key if type(key) is tuple else [key]:
            if type(element) not in _KEY_TYPES:
                raise RefusedError("holds a key that is no name or number")
        return key

    def _leave_out(self, error: RefusedError) -> None:
        """Note why a value is left out. But the error of a tensor without data is raised, since
        the whole file is refused then."""
        if isinstance(error, UnusableTensorError):
            raise error
        self.reasons.append(error)

    def has_weights(self) -> bool:
        """Whether a tensor, an array or a module was made so far."""
        types = (Tensor, np.ndarray, nn.Module, UnbuiltModule)
        return any(isinstance(built.value, types) for built in self._built.values())

    def _module(
        self, made: Made, module_class: type | None
    ) -> nn.Module | UnbuiltModule:
        """A module if it can be made completely; otherwise an UnbuiltModule.

        Args:
            made: The stand-in of the module.
            module_class: The class of the module; None if it is not listed.

        Raises:
            UnusableTensorError: Where a tensor in the module has no data.
        """
        before = len(self.reasons)
        try:
            if module_class is None:
                raise _needs_error([made.maker.text])
            module: nn.Module = self._object(made, module_class)
            # a value that was left out of it adds a reason, also if it was met before
            if len(self.reasons) == before:
                _check_module(module)
                return module
        except RefusedError as error:
            self._leave_out(error)
        refusal = _join_errors(self.reasons[before:])
        state = self.build(made.states[-1]) if made.states else {}
        return UnbuiltModule(state or {}, refusal)

    def _object(self, made: Made, made_class: type) -> Any:
        """An object of a listed class with the attributes in the file. Its constructor does not
        run.

        Raises:
            RefusedError: Where the file makes the object in another way than `torch.save`,
                or an attribute is refused.
        """
        if made.arguments or made.items or made.pairs or len(made.states) > 1:
            raise RefusedError(
                f"makes a {made_class.__name__} in a way that torch.save does not"
            )
        built: Any = object.__new__(made_class)
        # the file has no state for an object without attributes (torchvision's ToTensor)
        state = dict(self.build(made.states[0])) if made.states else {}
        attributes = {
            name: _accepted_attribute(made, built, name, value)
            for name, value in state.items()
        }
        if not isinstance(built, nn.Module):
            vars(built).update(attributes)
            return built
        # every module needs dicts of hooks and children, which the file may lack
        vars(built).update(vars(nn.Module()))
        try:
            # this method was reviewed (_SETTERS): it fills in what older files lack
            built.__setstate__(attributes)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise _broken_error(made_class) from error
        return built


class OwnForward(NamedTuple):
    """A method by which a file replaces the forward of a module."""

    owner: Made
    """The stand-in of the module whose method it is."""
    name: str
    """One of _OWN_FORWARDS."""


class KeptClass(type):
    """The metaclass of empty classes that cannot be called. Each stands for a class that a
    module keeps as an attribute."""

    def __call__(cls, *arguments: object, **keywords: object) -> Any:
        """Raise a RefusedError."""
        raise RefusedError(f"calls {cls.__name__}, which torch.save only keeps")


_FRESH = vars(nn.Module())
"""The attributes that every module has."""
_CONTENTS: dict[str, Any] = {
    "_parameters": Tensor,
    "_buffers": Tensor,
    "_modules": nn.Module,
}
"""The attributes with a module's parameters, buffers and children, and the types of these."""
_HOOKS = {name for name, v in _FRESH.items() if isinstance(v, dict)} - _CONTENTS.keys()
"""The other dicts among a module's attributes, all of which hold functions."""
_MISSING = object()


def _check_module(module: nn.Module) -> None:
    """Raise a RefusedError for a module that would fail in the first steps of every command:
    listing its tensors, moving them to a device, and reading its settings."""
    reached = module.named_modules(remove_duplicate=False)
    if any(True for _ in itertools.islice(reached, _MAX_MODULES, None)):
        raise RefusedError(f"holds a {type(module).__name__} of too many modules")
    try:
        # Only this module is checked, since those inside it were checked when they were
        # made. Checking all at each level took as long as reading the file
        # (EfficientNet-B4: 0.5 s).
        module._save_to_state_dict({}, "", keep_vars=True)
        # this is what `.to` does, but it changes no tensor
        if type(module)._apply is nn.Module._apply:
            module._apply(_unchanged, recurse=False)  # type: ignore[no-untyped-call]
        else:  # nn.LSTM lists its weights anew, Ultralytics changes its head, too
            module.to(non_blocking=False)
        # extra_repr reads the layer's settings, which forward needs, too
        module.extra_repr()
    except Exception as error:  # a state that is made up can raise anything
        raise _broken_error(type(module)) from error


def _unchanged(tensor: Tensor) -> Tensor:
    """Return the argument unchanged."""
    return tensor


def _accepted_attribute(made: Made, built: Any, name: Any, value: Any) -> Any:
    """The value for an attribute of an object: mostly the file's value. An OwnForward becomes
    the method that it names, and empty dicts of hooks become new ones.

    Args:
        made: The stand-in of the object.
        built: The object, which has no attributes yet.
        name: The name of the attribute in the file, which may be any value.
        value: The value in the file, made by Builder.

    Raises:
        RefusedError: Where the value could run code, or is impossible for this attribute.
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
    # in fused layers, Ultralytics replaces forward by another method of the layer
    if name == "forward" and type(value) is OwnForward and value.owner is made:
        return MethodType(inspect.getattr_static(made_class, value.name), built)
    _refuse_shadow(made_class, name, value)
    return value


def _check_contents(module_class: type, group: str, contents: Any) -> None:
    """Check the parameters, buffers or children of a module.

    Args:
        module_class: The class of the module, for messages.
        group: A key of _CONTENTS.
        contents: The value in the file, which should be a dict by names.

    Raises:
        RefusedError: Where a name or a value in it is impossible.
        AttributeError: Where it is not a dict; `Builder` refuses the module then.
    """
    # names become paths of layers and of files: `a.b` would be the path of another layer
    for name, content in contents.items():
        if type(name) is not str or not _MEMBER.fullmatch(name):
            raise RefusedError(
                f"holds a {module_class.__name__} with a module of an impossible name"
            )
        if content is not None and not isinstance(content, _CONTENTS[group]):
            raise _broken_error(module_class)


def _refuse_shadow(made_class: type, name: Any, value: Any) -> None:
    """Raise a RefusedError for an attribute that hides one of the class. A plain value (a
    number, a text, a tensor, a list of these) may do so, but it must not hide a method.

    Args:
        made_class: The class of the object.
        name: The name of the attribute.
        value: The value in the file, made by Builder.
    """
    if (
        name == "type" and type(value) is str
    ):  # Ultralytics hides nn.Module.type by a text
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


def _broken_error(module_class: type) -> RefusedError:
    """The error for a module whose attributes no constructor would have made."""
    return RefusedError(
        f"holds a broken {module_class.__name__}: it lacks parts of an"
        " nn.Module, or contains itself"
    )


# Names
# -----------------------------------------------------------------------------------------


def _join_errors(errors: Sequence[RefusedError]) -> RefusedError:
    """Join several errors to one, which has all names that they need. If they need no names,
    return the first error."""
    names = {name for error in errors for name in error.names}
    if names:
        return _needs_error(names)
    return errors[0]


def _needs_error(names: Iterable[str]) -> RefusedError:
    """The error for names that are on no list."""
    text = listed([*map(quoted, sorted(names))], 20)
    return RefusedError(
        f"needs {text}, which could run any code; nothing was executed", names
    )


def _name_of(value: Any) -> str:
    """The name of the class or function that makes a stand-in's value; for any other value the
    name of its type."""
    if type(value) is Made:
        return value.maker.text
    return type(value).__name__


def _value_of_name(name: str) -> Any:
    """The value of a name in a file that is not called there: a dtype of torch, a function of
    _FUNCTIONS, or a KeptClass for a class of modules.

    Raises:
        RefusedError: Where the name is on no list.
    """
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if type(dtype) is torch.dtype:
        return dtype
    if name in _FUNCTIONS:
        return _import_name(name)
    kept = _module_class(name)
    if kept is None:
        raise _needs_error([name])
    return KeptClass(kept.__name__, (), {})


def _module_class(name: str) -> Any:
    """The class of modules with a name, if objects of it may be made; else None. It must be
    below _PACKAGES or in _MODULES, must exist, must not define `__new__`, and its
    `__setstate__` must be one of _SETTERS."""
    name = _RENAMED.get(name, name)
    is_below = name.startswith(_PACKAGES) and _NAME.fullmatch(name)
    if name not in _MODULES and not is_below:
        return None
    try:
        module_class = _import_name(name)
    except (ImportError, AttributeError):
        return None
    if type(module_class) is not type or not issubclass(module_class, nn.Module):
        return None
    # The name may be an import of a class of another package, which was not reviewed. A class
    # that has moved within Ultralytics (files of 8.0.100) is still below its packages.
    home = f"{module_class.__module__}."
    if name not in _MODULES and not home.startswith(_PACKAGES):
        return None
    setter = module_class.__setstate__
    is_plain = module_class.__new__ is object.__new__
    if is_plain and setter.__module__.startswith(_SETTERS):
        return module_class
    return None


def _import_name(name: str) -> Any:
    """Import the class or function with a name. It must be one of the lists above, since
    importing can run code.

    Raises:
        ImportError, AttributeError: Where the installed library does not have it.
        FeatvizError: Where torchvision cannot be imported.
    """
    if name.startswith("torchvision."):
        require_torchvision()
    if name.startswith(_YOLO):
        import_ultralytics("ultralytics.nn.tasks")
    return pkgutil.resolve_name(name)


# Data
# ------------------------------------------------------------------------------------------


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    """The pairs of a dict that is still a stand-in; empty for any other value."""
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
    """The tensor of a call of `_rebuild_tensor`, or of its versions 2 and 3.

    Args:
        storage: The storage with the tensor's numbers.
        offset: The place of the first number in the storage, in numbers.
        size: The shape of the tensor.
        stride: The stride of each axis in the storage, in numbers.
        requires_grad: Ignored: for parameters `_rebuild_parameter` says it.
        hooks: The hooks of the tensor, which must be empty.
        marks: In version 3, the dtype of the tensor. And a dict, which must be empty:
            otherwise it says that the tensor is conjugated or negated.

    Raises:
        RefusedError: Where the tensor has hooks, or is conjugated or negated.
        UnusableTensorError: Where the storage does not have all numbers of the tensor.
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
    # with strides of 0, a small file can have a tensor that is larger than any memory
    if count * dtype.itemsize > 4 * untyped.nbytes() + _BYTES_BESIDE:
        raise UnusableTensorError(f"holds a tensor of shape {shape} without its data")
    tensor = torch.empty(0, dtype=dtype)
    try:
        # as_strided raises if the storage is too small; `set_` would enlarge the storage
        tensor.set_(untyped).as_strided(size, stride, offset)
    except (RuntimeError, TypeError) as error:
        raise UnusableTensorError(
            f"holds a tensor of shape {shape} that ends beyond its data"
        ) from error
    tensor.set_(untyped, offset, size, stride)
    return tensor


def _parameter(builder: Builder, made: Made) -> nn.Parameter:
    """The parameter of a call of `_rebuild_parameter`. The arguments of that are a tensor,
    whether it requires gradients, and hooks and attributes, which are left out."""
    tensor, requires_grad = made.arguments[:2]
    return nn.Parameter(builder.build(tensor).detach(), requires_grad is True)


def _typed_tensor(builder: Builder, made: Made) -> Any:
    """The tensor of a call of `_rebuild_from_type_v2`. The arguments of that are a function
    that makes a tensor, a class of tensors, the function's arguments, and attributes. The
    class and the attributes are left out."""
    return builder.build_call(Made(made.arguments[0], made.arguments[2]))


def _bytes(content: str | bytes = b"", encoding: str = "latin1") -> bytes:
    """The bytes of a call of `_codecs.encode`, `bytes` or `bytearray`.

    Args:
        content: The bytes; in pickles of older protocols a text, with a letter for each.
        encoding: Ignored: pickle writes only latin1.
    """
    if isinstance(content, str):
        return content.encode("latin1")
    return bytes(content)


def _number_type(builder: Builder, made: Made) -> np.dtype[Any]:
    """The type of a call of `numpy.dtype`. The first argument of that is a code such as `f4`;
    the order of the bytes is in the state."""
    code = made.arguments[0]
    if not _NUMBER_TYPE.fullmatch(code):
        raise RefusedError("holds a type of numpy that is none of plain numbers")
    is_swapped = made.states and made.states[0][1] == ">"
    return np.dtype(f">{code}" if is_swapped else code)


def _number(dtype: np.dtype[Any], content: str | bytes) -> bool | int | float:
    """A number of numpy, as a number of Python; `content` has its bytes."""
    number: bool | int | float = np.frombuffer(_bytes(content), dtype.str)[0].item()
    return number


def _array(
    version: int,
    shape: tuple[int, ...],
    dtype: np.dtype[Any],
    is_fortran: bool,
    content: str | bytes,
) -> np.ndarray:
    """The array of a call of numpy's `_reconstruct`; the arguments are those of its
    state.

    Args:
        version: The version of the state; only one exists.
        shape: The shape of the array.
        dtype: The type of its numbers.
        is_fortran: Whether the first axis runs fastest in `content`.
        content: The bytes of the numbers; in pickles of older protocols a text, with a
            letter for each byte.
    """
    order = "F" if is_fortran else "C"
    return _array_of_buffer(_bytes(content), dtype, shape, order)


def _array_of_buffer(
    content: bytes, dtype: np.dtype[Any], shape: tuple[int, ...], order: Any
) -> np.ndarray:
    """The array of a call of numpy's `_frombuffer`, which protocol 5 writes.

    Args:
        content: The bytes of the numbers.
        dtype: The type of the numbers.
        shape: The shape of the array.
        order: `C` where the last axis runs fastest in `content`, `F` where the first does.
    """
    return np.frombuffer(content, dtype.str).reshape(shape, order=order)


def _partial(
    target: Any, arguments: Iterable[Any], keywords: dict[str, Any], attributes: Any
) -> Any:
    """A `functools.partial`. The parameters are the parts of its state in the file; its
    attributes are left out.

    Raises:
        RefusedError: Where `target` is neither a listed function nor a class of modules.
    """
    if not isinstance(target, (KeptClass, FunctionType)):
        raise RefusedError("holds a functools.partial of what is no class of layers")
    return functools.partial(target, *arguments, **keywords or {})


def _attribute(builder: Builder, made: Made) -> Any:
    """The value of a call of `getattr(owner, name)`, for the few attributes that files
    keep: a forward method, a listed function, a member of a listed enumeration.

    Raises:
        RefusedError: Where it is another attribute.
    """
    owner, name = made.arguments
    if type(owner) is Made and name in _OWN_FORWARDS:
        return OwnForward(owner, name)
    if type(owner) is Name and f"{owner.text}.{name}" in _FUNCTIONS:
        return _import_name(f"{owner.text}.{name}")
    # as Python 3.11 writes a member of an enumeration
    if type(owner) is Name and owner.text in _ENUMS:
        return _import_name(owner.text).__members__[name]
    raise _needs_error(["builtins.getattr"])


def _set(builder: Builder, made: Made) -> set[Any]:
    """The value of a set. Its elements are items that were added, or in its argument."""
    items = itertools.chain(made.items, *made.arguments)
    return {builder.build_key(item) for item in items}


def _namespace(builder: Builder, made: Made) -> SimpleNamespace:
    """The value of a namespace, whose state is the dict of its attributes."""
    return SimpleNamespace(**builder.build(made.states[-1]))


_BY_STAND_IN: dict[str, Callable[[Builder, Made], Any]] = {
    "argparse.Namespace": _namespace,
    "builtins.dict": Builder.build_dict,
    "builtins.frozenset": _set,
    "builtins.getattr": _attribute,
    "builtins.set": _set,
    "collections.Counter": Builder.build_dict,
    "collections.OrderedDict": Builder.build_dict,
    "collections.defaultdict": Builder.build_dict,
    "numpy.dtype": _number_type,
    "torch._tensor._rebuild_from_type_v2": _typed_tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "types.SimpleNamespace": _namespace,
    "ultralytics.utils.IterableSimpleNamespace": _namespace,
    "ultralytics.yolo.utils.IterableSimpleNamespace": _namespace,
}
"""Functions that make the value of a call from its stand-in, by the name of the function or
class that is called in the file."""


def _path(*names: str) -> str:
    """A path as text, since the file may come from another system."""
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
"""Functions that make the value of a call from the values of its arguments, or of its state,
by the name of the function or class that is called in the file."""
