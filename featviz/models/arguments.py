"""What the user gives forward: `--transform`, `--forward-arg` and `--input`."""

from __future__ import annotations

import copyreg
import functools
import hashlib
import inspect
import io
import math
import pickle
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from featviz.errors import FileError, ImageError, LoadError, UsageError
from featviz.files import npy, read_bytes
from featviz.models import sources
from featviz.models.preprocess import Chain, Preprocess, input_dtype
from featviz.models.weights import ADDRESS, add_values, read_saved_tensor
from featviz.records import Raster
from featviz.text import did_you_mean, listed, quoted

IMAGE = "image"
"""The VALUE that stands for the image itself."""

_NAMED_VALUE = re.compile(r"([^\W\d]\w*)(?:\.([^=]+))?=(.+)", re.DOTALL)
"""NAME=VALUE, or NAME.KEY=VALUE for a key of a dict."""
_VALUES = (
    "a number, true, false, none, zeros:1,77, ones:1,77:int64, randn:1,128, a file"
    " .npy, .npz or .pt, or image"
)
_NEW_TENSOR = re.compile(
    r"(?P<maker>zeros|ones|randn(?!.*:[ib])):(?P<sizes>\d+(?:,\d+)*)"
    r"(?::(?P<dtype>float32|int64|bool))?"
)
"""`ones:1,77:int64`: a function of torch, a shape, and a type, which is float32 if it is
left out; randn has no other."""
_CONSTANTS = {"true": True, "false": False, "none": None, IMAGE: IMAGE}
_DIGITS = 16
"""Digits of a sha256 in descriptions for people."""
_MAX_BYTES = 2**30
"""Of a file of values."""
_MAX_VALUES = 2**28
"""Of a tensor that a text makes."""
_READERS: dict[str, Callable[[bytes], np.ndarray]] = {
    ".npy": npy.read_npy,
    ".npz": npy.read_npz,
    ".pt": read_saved_tensor,
}


class Argument(NamedTuple):
    """An argument of forward."""

    name: str
    key: str | None
    """A key in the argument, where that is a dict; None for the argument itself."""
    value: Any
    description: str
    """What the manifest says of it. A file is described by its name and sha256, without
    its folder."""


def parse(
    texts: Sequence[str], seed: int = 0, option: str = "forward_args"
) -> list[Argument]:
    """Read the values of `--forward-arg`, or of `--input`.

    Args:
        texts: NAME=VALUE or NAME.KEY=VALUE, each.
        seed: Of random numbers in the values.
        option: The option that has the texts, for messages.

    Raises:
        UsageError: Where a text is neither, its value cannot be read, or a name stands
            twice.
    """
    arguments: list[Argument] = []
    # one for all texts: two of `randn` differ
    random = torch.Generator().manual_seed(seed)
    for text in texts:
        match = _NAMED_VALUE.fullmatch(text)
        if match is None:
            raise UsageError(
                f"{option} {quoted(text)} is not NAME=VALUE",
                f"VALUE is {_VALUES}; NAME.KEY=VALUE a dict's",
                options=(option,),
            )
        name, key, value_text = match.groups()
        label = f"{name}.{key}" if key else name
        try:
            value, description = _value(f"{option} {label}", value_text, random)
        except UsageError as error:
            error.options = (option,)
            raise
        for earlier in arguments:
            if earlier.name == name and (key is None or earlier.key in (None, key)):
                raise UsageError(
                    f"{option} {label} is given twice",
                    "give it once, or its keys",
                    options=(option,),
                )
        arguments.append(Argument(name, key, value, f"{label}={description}"))
    return arguments


def _value(title: str, text: str, random: torch.Generator) -> tuple[Any, str]:
    """A value that a text stands for, and its description for the manifest.

    Args:
        title: What gets the value, for messages: `forward_args ids`.
        text: What the user wrote behind the `=`.
        random: Makes random numbers; one for all arguments of a command.

    Raises:
        UsageError: Where it is not a value.
    """
    # TOML and shells write True and TRUE, too
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()], text
    new_tensor = _NEW_TENSOR.fullmatch(text)
    if new_tensor is not None:
        return _new_tensor(title, new_tensor, random)
    # by its name alone: a value that is meant as a file is never read as a number
    if Path(text).suffix in _READERS:
        return _read_file(title, Path(text))
    for number_type in (int, float):
        with suppress(ValueError):
            return number_type(text), text
    raise UsageError(f"{title}={quoted(text)} is no value", f"give {_VALUES}")


def _new_tensor(
    title: str, match: re.Match[str], random: torch.Generator
) -> tuple[Tensor, str]:
    """The tensor of a text such as `ones:1,77:int64`, and its description.

    Args:
        title: As of `_value`.
        match: Of _NEW_TENSOR with the text.
        random: Makes the numbers of `randn`.

    Raises:
        UsageError: Where the tensor has too many values.
    """
    text = match[0]
    maker, sizes, dtype = match.groups()
    shape = [int(size) for size in sizes.split(",")]
    count = math.prod(shape)
    if count > _MAX_VALUES:
        raise UsageError(
            f"{title}={quoted(text)} has {count:,} values", f"at most {_MAX_VALUES:,}"
        )
    if maker == "randn":
        tensor = torch.randn(shape, generator=random)
        return tensor, f"{text} (seed {random.initial_seed()})"
    number_type = getattr(torch, dtype or "float32")
    return getattr(torch, maker)(shape, dtype=number_type), text


def _read_file(title: str, path: Path) -> tuple[Tensor, str]:
    """The tensor of a file .npy, .npz or .pt, and its description.

    Args:
        title: As of `_value`.
        path: Its ending is one of `_READERS`.

    Raises:
        UsageError: Where it is no file, cannot be read, or does not hold one tensor of
            numbers.
    """
    subject = f"{title}: {quoted(path.name)}"
    try:
        data = read_bytes(path, _MAX_BYTES)
        array = _READERS[path.suffix](data)
        # torch takes no byte order but this machine's
        native = array.astype(array.dtype.newbyteorder("="), order="C")
        tensor = torch.from_numpy(native)
    except FileNotFoundError:
        raise UsageError(f"{subject} is no file", "check the path") from None
    except FileError as error:
        raise UsageError(f"{subject} {error.message}", error.hint) from error
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{subject} cannot be read: {error}", "np.save of an array"
        ) from error
    return tensor, f"{path.name} (sha256 {hashlib.sha256(data).hexdigest()[:_DIGITS]})"


def from_values(values: Mapping[str, Any]) -> list[Argument]:
    """Arguments of forward from the values that a program has.

    Args:
        values: By the name of forward's argument: tensors, arrays, numbers, whatever
            forward takes; `"image"` for the image itself. Each key of a dict becomes an
            Argument.
    """
    arguments = []
    for name, value in values.items():
        # an empty dict has no keys that could stand for it, and is passed as it is
        if isinstance(value, Mapping) and value:
            arguments += [_argument(name, key, item) for key, item in value.items()]
        else:
            arguments.append(_argument(name, None, value))
    return arguments


def _argument(name: str, key: str | None, value: Any) -> Argument:
    """An Argument whose description has a short value as it is, and any other by its
    digest.

    Args:
        name: As of Argument.
        key: As of Argument.
        value: Anything; `"image"` stands for the image. An array becomes a tensor.
    """
    label = f"{name}.{key}" if key else name
    if isinstance(value, str) and value == IMAGE:
        return Argument(name, key, IMAGE, f"{label}={IMAGE}")
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    text = quoted(repr(value))
    # `repr` of anything longer is cut, so that a digest has to tell values apart
    is_plain = isinstance(value, (int, float, str, type(None))) and text == repr(value)
    if isinstance(value, Tensor):
        text = f"[{','.join(map(str, value.shape))}]"
    if not is_plain:
        text += f" (sha256 {digest(value)[:_DIGITS]})"
    return Argument(name, key, value, f"{label}={text}")


def digest(value: Any) -> str:
    """sha256 of a value. A tensor counts by its values; a function by its bytecode, with
    default and bound values, but not by what it calls; anything else by its pickle, or
    else by its `repr`."""
    sha256 = hashlib.sha256()
    if isinstance(value, Tensor):
        add_values(value, sha256)
        return sha256.hexdigest()
    pickled = io.BytesIO()
    pickler = pickle.Pickler(pickled)
    pickler.fast = True  # whether equal values are the same object makes no difference
    # torch would pickle the storage, of which a tensor may be a view
    pickler.dispatch_table = {**copyreg.dispatch_table, Tensor: _as_text}
    try:
        pickler.dump(_picklable(value))
        sha256.update(pickled.getvalue())
    except Exception:  # it cannot be pickled, or holds itself
        text = ADDRESS.sub("0x", repr(value))
        sha256.update(text.encode("utf-8", "backslashreplace"))
    return sha256.hexdigest()


def _as_text(tensor: Tensor) -> tuple[Any, ...]:
    """How a digest pickles a tensor: as a text with its type, shape and digest."""
    return str, (f"{tensor.dtype} {list(tensor.shape)} {digest(tensor)}",)


def _picklable(value: Any) -> Any:
    """What can be called (a function, a method, an object with __call__) as plain values
    that say what it does. Any other value is returned as it is; so is a class, which
    pickle writes by its name."""
    if isinstance(value, functools.partial):
        return _picklable(value.func), value.args, value.keywords
    if isinstance(value, MethodType):
        return _picklable(value.__func__), getattr(value.__self__, "__dict__", None)
    if isinstance(value, FunctionType):
        bound = [_picklable(cell.cell_contents) for cell in value.__closure__ or ()]
        defaults = (value.__defaults__, value.__kwdefaults__)
        return _picklable(value.__code__), defaults, bound
    if isinstance(value, CodeType):
        constants = map(_picklable, value.co_consts)
        return value.co_code, value.co_names, list(constants)
    if isinstance(value, frozenset):
        # the order of a set differs from process to process
        return sorted(map(repr, value))
    # an object of a class with __call__, such as a transform of torchvision
    call = inspect.getattr_static(type(value), "__call__", None)
    if isinstance(call, FunctionType):
        return (_picklable(call), vars(value))
    return value


def feed(
    module: nn.Module,
    preprocess: Preprocess,
    transform: UserTransform | None,
    forward_args: Sequence[Argument],
    device: torch.device,
) -> tuple[Preprocess, list[RemovableHandle]]:
    """Let every call of a module get further arguments, by hooks.

    Args:
        module: The module that gets the hooks.
        preprocess: How images become its input; with the user's transform, if there is
            one.
        transform: The transform of `preprocess`: its tensors go to the arguments of their
            names. None where there is none, or the module has the hook for it already.
        forward_args: Arguments beside images.
        device: Where their tensors go.

    Returns:
        The preprocessing with descriptions of the arguments, and the hooks, which the
        caller may remove.

    Raises:
        UsageError: Where forward takes no such argument, or the transform returns it.
    """
    outputs: tuple[str, ...] = getattr(preprocess.transform, "names", ())
    hooks = []
    if forward_args:
        hook = _adding_hook(module, forward_args, device)
        _refuse_twice(forward_args, preprocess.transform, outputs)
        hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        descriptions = tuple(argument.description for argument in forward_args)
        preprocess = replace(preprocess, further=descriptions)
    if transform is not None and transform.blank is not None:
        _refuse_unknown(module, transform.names, "input")
    if transform is not None and outputs:

        def by_name(
            module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
        ) -> Any:
            """A forward-pre-hook: the transform's tensors as arguments by name."""
            return (), {**kwargs, **dict(zip(outputs, args, strict=True))}

        # Runs before the hook that adds the user's arguments. That one names arguments
        # that are still positional.
        hooks.append(
            module.register_forward_pre_hook(by_name, prepend=True, with_kwargs=True)
        )
    return replace(preprocess, dtype=input_dtype(module)), hooks


def _adding_hook(
    module: nn.Module, forward_args: Sequence[Argument], device: torch.device
) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """A forward-pre-hook that adds the user's arguments to each call of a module.

    Args:
        module: The module whose forward takes them.
        forward_args: The arguments. Where the value of some is IMAGE, the first
            positional argument of a call goes to these alone, and the others are left
            out.
        device: Where tensors among the values go.

    Raises:
        UsageError: Where forward takes no argument of such a name.
    """
    names = [argument.name for argument in forward_args]
    _refuse_unknown(module, names, "forward_args")
    parameters = argument_names(module.forward)
    free = [name for name in parameters if name not in names]
    takes_image = any(argument.value is IMAGE for argument in forward_args)
    on_device = []
    for argument in forward_args:
        if isinstance(argument.value, Tensor):
            argument = argument._replace(value=argument.value.to(device))
        on_device.append(argument)

    def add(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """The hook before the module's call: its arguments with those of the user."""
        added = {}
        for name, key, value, _ in on_device:
            copied = args[0] if value is IMAGE else _copied(value, args)
            if key is None:
                added[name] = copied
            else:
                added.setdefault(name, {})[key] = copied
        if takes_image:
            return (), {**kwargs, **added}
        if free[: len(args)] == parameters[: len(args)]:
            return args, {**kwargs, **added}
        # A parameter that the user has set stands before that of an image: images are
        # passed by keyword.
        return (), {**kwargs, **dict(zip(free, args, strict=False)), **added}

    return add


def _copied(value: Any, args: Sequence[Any]) -> Any:
    """A copy of a value for one call, since the model may change it.

    Args:
        value: A tensor, list or dict; any other value is returned as it is. A tensor with
            a batch of one grows to the batch of the image.
        args: The positional arguments of the call, the image first.
    """
    if isinstance(value, list | dict):
        return value.copy()
    if not isinstance(value, Tensor):
        return value
    # arithmetic would broadcast it (a mask), but a concatenation would not (a token)
    if args and value.ndim and len(value) == 1 and len(args[0]) > 1:
        return value.repeat_interleave(len(args[0]), 0)
    return value.clone()


def _refuse_twice(
    forward_args: Sequence[Argument], transform: Any, outputs: Sequence[str]
) -> None:
    """Refuse, with UsageError, an argument of forward that is among the outputs of a
    transform; and IMAGE, where a transform names its outputs.

    Args:
        forward_args: What the user gave for arguments of forward.
        transform: The UserTransform of the preprocessing; None where there is none.
        outputs: The names of its outputs; none where it returns a tensor.
    """
    for argument in forward_args:
        if argument.name in outputs or (outputs and argument.value is IMAGE):
            # --input is a transform that ignores its image
            option = "--transform" if transform.blank is None else "--input"
            names = listed(list(outputs), 12)
            raise UsageError(
                f"forward_args {argument.name}: {option} gives {names}",
                "one of the two",
                options=("forward_args",),
            )


def argument_names(function: Callable[..., Any]) -> list[str]:
    """The names of a function's arguments, without `*args` and `**kwargs`."""
    parameters = inspect.signature(function).parameters.values()
    return [
        p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


def takes_any_name(function: Callable[..., Any]) -> bool:
    """Whether a function has `**kwargs`, so that an argument may have any name."""
    parameters = inspect.signature(function).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def _refuse_unknown(module: nn.Module, names: Sequence[str], option: str) -> None:
    """Refuse, with UsageError, a name of no argument of a module's forward.

    Args:
        module: The module.
        names: The names that the user gave.
        option: The option that has them, for messages.
    """
    accepted = argument_names(module.forward)
    for name in names:
        # a misspelt name is not noticed where forward takes any
        if name not in accepted and not takes_any_name(module.forward):
            takes = listed(list(map(quoted, accepted)), 12) or "nothing"
            raise UsageError(
                f"{option} {name}: forward of {type(module).__name__} takes {takes}",
                did_you_mean(name, accepted, "give one of these"),
                options=(option,),
            )


@dataclass(frozen=True)
class UserTransform:
    """A function in place of the model's own preprocessing: the user's, from an image; or
    one of ours for models whose input is no image."""

    text: str
    """What the user calls it, for messages; empty for ours."""
    description: str
    """For the manifest."""
    function: Callable[[Any], Any] = field(repr=False)
    """The user's takes a PIL image of mode L or RGB, or an array [C, H, W]. It returns a
    tensor, or a dict of tensors. Ours return a list of tensors."""
    names: tuple[str, ...] = ()
    """Where the function returns several tensors: the arguments of forward that get them,
    the image first; none where it returns one."""
    blank: Tensor | None = None
    """Zeros [N] or [1, N] that stand for an empty image, where the input is no image; None
    for the user's function."""

    @classmethod
    def of(cls, function: Callable[[Any], Any]) -> UserTransform:
        """The transform of a function that a program has."""
        name = getattr(function, "__qualname__", type(function).__name__)
        sha256 = digest(function)[:_DIGITS]
        return cls(name, f"transform {name} (sha256 {sha256})", function)

    @classmethod
    def named(cls, text: str) -> UserTransform:
        """The transform of the function that `--transform` names, which is imported.

        Args:
            text: `file.py:fn` or `pkg.mod:fn`.

        Raises:
            UsageError: Where it names no function, or one that is not there.
            LoadError: Where its module fails.
        """
        # a plain name is refused here, before anything is imported
        if sources.CODE_REFERENCE.fullmatch(text) is None:
            raise UsageError(
                f"--transform {text!r} names no function", "file.py:fn or pkg.mod:fn"
            )
        function = sources.imported_object(text)
        if not callable(function):
            raise UsageError(
                f"--transform {text!r} is a {type(function).__name__}",
                "name a function",
            )
        description = f"transform {text.rpartition('/')[2]}"
        sha256 = sources.code_digest(text)
        if sha256 is not None:
            description += f" (sha256 {sha256[:_DIGITS]})"
        return cls(text, description, function)

    @classmethod
    def input(cls, texts: Sequence[str], seed: int = 0) -> UserTransform:
        """A transform that returns the tensors of `--input`, whatever the image; floats [N]
        become [1, N].

        Args:
            texts: At least one, `NAME=VALUE`.
            seed: Of random numbers in them.

        Raises:
            UsageError: Where a text cannot be read, or gives no tensor, or an empty one.
        """
        tensors = []
        arguments = parse(texts, seed, "input")
        for argument in arguments:
            value = argument.value
            if not isinstance(value, Tensor) or argument.key or not value.numel():
                raise UsageError(
                    f"input {argument.description} is no tensor",
                    "--forward-arg passes others",
                )
            # a batch of one; integers may be indices, of which a model takes [N] as
            # well
            is_vector = value.is_floating_point() and value.ndim == 1 < len(value)
            tensors.append(value[None] if is_vector else value)
        descriptions = " and ".join(argument.description for argument in arguments)
        return cls(
            text="",
            description=f"{descriptions} in place of an image",
            function=lambda _: [tensor.clone() for tensor in tensors],
            names=tuple(argument.name for argument in arguments),
            blank=torch.zeros(1, tensors[0].numel()),
        )

    @classmethod
    def vector(cls, count: int) -> UserTransform:
        """A transform that takes an array of `count` numbers as the input [1, count], and
        refuses any other image with ImageError."""

        def numbers(values: Any) -> list[Tensor]:
            # among the images of a folder there may be pictures, too
            if not isinstance(values, np.ndarray) or values.size != count:
                raise ImageError(f"is no vector of {count} numbers, as the first input")
            return [torch.from_numpy(values.reshape(1, -1).astype(np.float32))]

        return cls("", f"vector of {count} numbers", numbers, blank=torch.zeros(count))

    def preprocess(self, channels: int) -> Preprocess:
        """The preprocessing that the function does, whatever the model's own would be.

        Args:
            channels: Of the images that the function gets: 1 or 3 of a picture, any of
                an array.

        Raises:
            LoadError: Where the user's function fails on an empty image, with which it is
                called once.
        """
        preprocess = Preprocess(Chain(channels=channels), self)
        if self.blank is not None:
            return preprocess
        # an image without content shows which arguments of forward the function returns
        image = preprocess.empty()
        try:
            outputs = self.outputs(image.values if isinstance(image, Raster) else image)
        except ImageError as error:
            raise LoadError(
                f"--transform: {error.message}, for an empty image", error.hint
            ) from error
        names = tuple(filter(None, outputs))
        return replace(preprocess, transform=replace(self, names=names))

    def __str__(self) -> str:
        return self.description

    def __call__(self, image: Any) -> list[Tensor]:
        """The model's arguments in the order of `names`, the image [1, C, H, W] first.

        Raises:
            ImageError: Where the function fails, or returns something else than for an
                empty image.
        """
        if self.blank is not None:
            return self.function(image)  # type: ignore[no-any-return]
        outputs = self.outputs(image)
        names = self.names or ("",)
        if set(outputs) != set(names):
            raise ImageError(
                f"{self.text} gave another kind of output than for an empty image"
            )
        return [outputs[name] for name in names]

    def outputs(self, image: Image.Image | np.ndarray) -> dict[str, Tensor]:
        """The output of the user's function by the names of forward's arguments, the image
        [1, C, H, W] first. A tensor that is returned alone has the empty name.

        Raises:
            ImageError: Where the function fails, or returns neither an image nor a dict of
                tensors with one.
        """
        try:
            output = self.function(image)
        except Exception as error:  # the user's own code
            raise ImageError(
                f"{self.text} raised {type(error).__name__}: {quoted(error)}",
                "-v shows the traceback",
            ) from error
        description = f"a {type(output).__name__}"
        if isinstance(output, Tensor):
            if output.ndim in (3, 4) and output.numel():
                return {"": output[None] if output.ndim == 3 else output}
            description = f"a tensor {list(output.shape)}"
        elif isinstance(output, Mapping):
            images = _images(output)
            if images:
                first = {str(name): output[name] for name in images}
                return first | {str(name): tensor for name, tensor in output.items()}
            names = quoted(", ".join(map(str, output)))
            description = f"a dict of {names or 'nothing'}"
        raise ImageError(
            f"{self.text} gave {description}, expected a tensor [C, H, W] or [1, C, H,"
            " W], or a dict of tensors by the names of forward's arguments, one of"
            " them [1, C, H, W] or [1, F]"
        )


def _images(tensors: Mapping[Any, Any]) -> list[Any]:
    """The keys of images and clips among the outputs of a transform; of vectors [N, F]
    where there is no image; none where a value is no tensor."""
    if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        return []
    # beside an image there may be numbers, masks and conditions of fewer axes
    images = [name for name, tensor in tensors.items() if tensor.ndim in (4, 5)]
    return images or [name for name, tensor in tensors.items() if tensor.ndim == 2]
