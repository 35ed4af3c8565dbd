"""Arguments of forward that the user gives: `--transform`, `--forward-arg`, `--input`."""

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
"""NAME=VALUE, or NAME.KEY=VALUE for one key of an argument that is a dict."""
_VALUES = (
    "a number, true, false, none, zeros:1,77, ones:1,77:int64, randn:1,128, a file"
    " .npy, .npz or .pt, or image"
)
_NEW_TENSOR = re.compile(
    r"(?P<maker>zeros|ones|randn(?!.*:[ib])):(?P<sizes>\d+(?:,\d+)*)"
    r"(?::(?P<dtype>float32|int64|bool))?"
)
"""`ones:1,77:int64`: a function of torch, a shape, and a type. Without a type, it is
float32; randn takes no other type."""
_CONSTANTS = {"true": True, "false": False, "none": None, IMAGE: IMAGE}
_DIGITS = 16
"""Digits of a sha256 in descriptions for people."""
_MAX_BYTES = 2**30
"""The most bytes of a file of values."""
_MAX_VALUES = 2**28
"""The most values of a tensor that is made from a text."""
_READERS: dict[str, Callable[[bytes], np.ndarray]] = {
    ".npy": npy.read_npy,
    ".npz": npy.read_npz,
    ".pt": read_saved_tensor,
}


class Argument(NamedTuple):
    """An argument of forward, or one key of an argument that is a dict."""

    name: str
    key: str | None
    """The key, if the argument is a dict; None for a whole argument."""
    value: Any
    """The value; IMAGE stands for the image."""
    description: str
    """The text for the manifest. A file is described by its name and sha256, without its
    folder."""


def parse(
    texts: Sequence[str], seed: int = 0, option: str = "forward_args"
) -> list[Argument]:
    """Read the values of `--forward-arg`, or of `--input`.

    Args:
        texts: Texts, each NAME=VALUE or NAME.KEY=VALUE.
        seed: The seed of random numbers in the values.
        option: The option that has the texts, for messages.

    Raises:
        UsageError: Where a text has another form, its value cannot be read, or a name is
            given twice.
    """
    arguments: list[Argument] = []
    # one generator for all texts, so that two values of `randn` differ
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
    """Read the VALUE of an argument. Returns the value, and its description for the
    manifest.

    Args:
        title: The option and the name of the argument, for messages: `forward_args ids`.
        text: The text behind the `=`.
        random: Makes random numbers; one generator serves all arguments of a command.

    Raises:
        UsageError: Where the text is no VALUE, or its file cannot be read.
    """
    # TOML and shells write True and TRUE, too
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()], text
    new_tensor = _NEW_TENSOR.fullmatch(text)
    if new_tensor is not None:
        return _new_tensor(title, new_tensor, random)
    # the ending decides, so that the name of a missing file is never read as a number
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
        title: The option and the name of the argument, for messages.
        match: The match of _NEW_TENSOR with the text.
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
        title: The option and the name of the argument, for messages.
        path: The file, whose ending is one of `_READERS`.

    Raises:
        UsageError: Where there is no such file, it cannot be read, or it does not hold one
            tensor of numbers.
    """
    subject = f"{title}: {quoted(path.name)}"
    try:
        data = read_bytes(path, _MAX_BYTES)
        array = _READERS[path.suffix](data)
        # torch only takes this machine's byte order
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
    """Arguments of forward from values of a program, not from texts.

    Args:
        values: The values by the names of forward's arguments: anything that forward
            takes, or `"image"` for the image itself. Each key of a dict becomes an
            Argument of its own.
    """
    arguments = []
    for name, value in values.items():
        # an empty dict, which has no keys, becomes one Argument
        if isinstance(value, Mapping) and value:
            arguments += [_argument(name, key, item) for key, item in value.items()]
        else:
            arguments.append(_argument(name, None, value))
    return arguments


def _argument(name: str, key: str | None, value: Any) -> Argument:
    """An Argument with its description. That contains a short number or text as it is, and
    a digest of any other value.

    Args:
        name: `Argument.name`.
        key: `Argument.key`.
        value: Any value; `"image"` stands for the image. An array becomes a tensor.
    """
    label = f"{name}.{key}" if key else name
    if isinstance(value, str) and value == IMAGE:
        return Argument(name, key, IMAGE, f"{label}={IMAGE}")
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    text = quoted(repr(value))
    # a long `repr` is cut, and only a digest distinguishes such values
    is_plain = isinstance(value, (int, float, str, type(None))) and text == repr(value)
    if isinstance(value, Tensor):
        text = f"[{','.join(map(str, value.shape))}]"
    if not is_plain:
        text += f" (sha256 {digest(value)[:_DIGITS]})"
    return Argument(name, key, value, f"{label}={text}")


def digest(value: Any) -> str:
    """The sha256 of a value: of a tensor's values; of a function's bytecode with its default
    and bound values, but without the functions that it calls; of the pickle of anything
    else, or, if it cannot be pickled, of its `repr`."""
    sha256 = hashlib.sha256()
    if isinstance(value, Tensor):
        add_values(value, sha256)
        return sha256.hexdigest()
    pickled = io.BytesIO()
    pickler = pickle.Pickler(pickled)
    # equal values give equal bytes, whether or not they are the same object
    pickler.fast = True
    # torch would pickle the whole storage, of which a tensor may show only a part
    pickler.dispatch_table = {**copyreg.dispatch_table, Tensor: _as_text}
    try:
        pickler.dump(_picklable(value))
        sha256.update(pickled.getvalue())
    except Exception:  # the value cannot be pickled, or contains itself
        text = ADDRESS.sub("0x", repr(value))
        sha256.update(text.encode("utf-8", "backslashreplace"))
    return sha256.hexdigest()


def _as_text(tensor: Tensor) -> tuple[Any, ...]:
    """Reduce a tensor, for the pickle of a digest, to a text with its type, shape and
    digest."""
    return str, (f"{tensor.dtype} {list(tensor.shape)} {digest(tensor)}",)


def _picklable(value: Any) -> Any:
    """Replace a value that can be called (a function, a method, an object with __call__) by
    plain values that tell what it does: its bytecode, defaults and bound values. Any other
    value is returned as it is; so is a class, which pickle writes by its name."""
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


def add_hooks(
    module: nn.Module,
    preprocess: Preprocess,
    transform: UserTransform | None,
    forward_args: Sequence[Argument],
    device: torch.device,
) -> tuple[Preprocess, list[RemovableHandle]]:
    """Add hooks to a module which pass further arguments to each of its calls.

    Args:
        module: The module, which is changed.
        preprocess: How images become the module's input, with the user's transform if
            there is one.
        transform: The transform of `preprocess`; a hook passes its tensors as arguments
            by name. None if there is no transform, or the module has this hook already.
        forward_args: The user's arguments besides images.
        device: The device for tensors among the user's arguments.

    Returns:
        The preprocessing with descriptions of the arguments, and the hooks, which the
        caller may remove.

    Raises:
        UsageError: Where forward does not take an argument, or the transform returns it
            too.
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
            """A forward-pre-hook that passes the transform's tensors by name."""
            return (), {**kwargs, **dict(zip(outputs, args, strict=True))}

        # This hook has to run before the hook that adds the user's arguments, which passes
        # by name what is still positional.
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
        forward_args: The user's arguments. IMAGE as a value stands for the image, which is
            the first positional argument of the call. Then the image is passed under the
            user's name for it, and no positional argument is passed on.
        device: The device for tensors among the values.

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
        """The forward-pre-hook: it returns the call's arguments and the user's."""
        added = {}
        for name, key, value, _ in on_device:
            copied = args[0] if value is IMAGE else _copy_for_call(value, args)
            if key is None:
                added[name] = copied
            else:
                added.setdefault(name, {})[key] = copied
        if takes_image:
            return (), {**kwargs, **added}
        if free[: len(args)] == parameters[: len(args)]:
            return args, {**kwargs, **added}
        # The user's arguments include one that forward takes before an image, so images
        # are passed by keyword.
        return (), {**kwargs, **dict(zip(free, args, strict=False)), **added}

    return add


def _copy_for_call(value: Any, args: Sequence[Any]) -> Any:
    """A copy of a value for one call, since the model may change it.

    Args:
        value: A tensor, list or dict; any other value is returned as it is. A tensor with
            a batch of one is repeated to the batch size of the image.
        args: The positional arguments of the call, the image first.
    """
    if isinstance(value, list | dict):
        return value.copy()
    if not isinstance(value, Tensor):
        return value
    # arithmetic with a mask would broadcast the batch; concatenation of a token would not
    if args and value.ndim and len(value) == 1 and len(args[0]) > 1:
        return value.repeat_interleave(len(args[0]), 0)
    return value.clone()


def _refuse_twice(
    forward_args: Sequence[Argument], transform: Any, outputs: Sequence[str]
) -> None:
    """Raise a UsageError for an argument that a transform returns, too. If a transform
    returns arguments by name, the value IMAGE is also an error.

    Args:
        forward_args: The user's arguments of forward.
        transform: The UserTransform of the preprocessing; None if there is none.
        outputs: The names of the transform's outputs; empty if it returns one tensor.
    """
    for argument in forward_args:
        if argument.name in outputs or (outputs and argument.value is IMAGE):
            # --input is a transform, too, which has a blank
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
    """Raise a UsageError for a name that no argument of a module's forward has.

    Args:
        module: The module.
        names: The names that the user gave.
        option: The option that has the names, for messages.
    """
    accepted = argument_names(module.forward)
    for name in names:
        # if forward has **kwargs, a misspelt name is not noticed
        if name not in accepted and not takes_any_name(module.forward):
            takes = listed(list(map(quoted, accepted)), 12) or "nothing"
            raise UsageError(
                f"{option} {name}: forward of {type(module).__name__} takes {takes}",
                did_you_mean(name, accepted, "give one of these"),
                options=(option,),
            )


@dataclass(frozen=True)
class UserTransform:
    """A function that replaces the model's own preprocessing. Either it is the user's, and
    takes an image; or it is featviz's, for a model whose input is no image."""

    text: str
    """The user's name for the function, for messages; empty for featviz's."""
    description: str
    """The text for the manifest."""
    function: Callable[[Any], Any] = field(repr=False)
    """The user's function takes a PIL image of mode L or RGB, or an array [C, H, W], and
    returns a tensor or a dict of tensors. featviz's function returns a list of tensors."""
    names: tuple[str, ...] = ()
    """If the function returns several tensors, the arguments of forward that get them, the
    image first; empty if it returns one."""
    blank: Tensor | None = None
    """For a model whose input is no image, zeros [N] or [1, N] that stand for an empty image;
    None for the user's function."""

    @classmethod
    def of(cls, function: Callable[[Any], Any]) -> UserTransform:
        """A transform of a function that the caller passes."""
        name = getattr(function, "__qualname__", type(function).__name__)
        sha256 = digest(function)[:_DIGITS]
        return cls(name, f"transform {name} (sha256 {sha256})", function)

    @classmethod
    def named(cls, text: str) -> UserTransform:
        """Import the function that `--transform` names, and make a transform of it.

        Args:
            text: `file.py:fn` or `pkg.mod:fn`.

        Raises:
            UsageError: Where `text` names no function, or there is no such function.
            LoadError: Where the import fails.
        """
        # a name of another form is refused before anything is imported
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
        """A transform that returns the tensors of `--input`, and ignores its image. A vector
        of floats [N] becomes [1, N].

        Args:
            texts: At least one text, each `NAME=VALUE`.
            seed: The seed of random numbers in the values.

        Raises:
            UsageError: Where a text cannot be read, or its value is no tensor, or empty.
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
            # make it a batch of one; integers may be indices, which a model may take as [N]
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
        """A transform that makes an array of `count` numbers the input [1, count]. It raises
        an ImageError for anything else."""

        def numbers(values: Any) -> list[Tensor]:
            # a folder with arrays may also have pictures
            if not isinstance(values, np.ndarray) or values.size != count:
                raise ImageError(f"is no vector of {count} numbers, as the first input")
            return [torch.from_numpy(values.reshape(1, -1).astype(np.float32))]

        return cls("", f"vector of {count} numbers", numbers, blank=torch.zeros(count))

    def preprocess(self, channels: int) -> Preprocess:
        """A Preprocess with this transform. The user's function is called once, with an empty
        image, to see what it returns.

        Args:
            channels: The channels of the images that the function gets: 1 or 3 for
                pictures, any number for arrays.

        Raises:
            LoadError: Where the user's function fails on the empty image.
        """
        preprocess = Preprocess(Chain(channels=channels), self)
        if self.blank is not None:
            return preprocess
        # the output for an empty image has the names of the arguments that are returned
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
            ImageError: Where the function fails, or does not return the arguments in
                `names`.
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
        """The tensors that the user's function returns, by the names of forward's arguments,
        the image [1, C, H, W] first. If it returns a plain tensor, the name is empty.

        Raises:
            ImageError: Where the function fails, or returns neither an image nor a dict of
                tensors with an image or a vector in it.
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
    """The keys of images and clips among the outputs of a transform; if there are none, the
    keys of vectors [N, F]. Empty if any value is not a tensor."""
    if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        return []
    # numbers, masks and conditions, which go with an image, have fewer axes
    images = [name for name, tensor in tensors.items() if tensor.ndim in (4, 5)]
    return images or [name for name, tensor in tensors.items() if tensor.ndim == 2]
