"""`--transform file.py:fn`: the user's own way from an image to the model's arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from featviz.errors import ImageError, LoadError, UsageError
from featviz.models import digests
from featviz.models.digests import SHOWN_DIGITS
from featviz.models.preprocess import InputOptions, Preprocess
from featviz.models.sources import FACTORY_FORM, factory
from featviz.text import quoted


@dataclass(frozen=True)
class UserTransform:
    """A function from a PIL image of mode L or RGB, or from an array, to what the model's forward
    takes."""

    text: str
    """As the user names it."""
    code: str | None
    """sha256 of the file or of the function; None where there is neither."""
    function: Callable[[Any], Any] = field(repr=False)
    names: tuple[str, ...] = ()
    """Where the function gives a dict: the arguments of forward, the image first."""

    @classmethod
    def of(cls, function: Callable[[Any], Any]) -> UserTransform:
        """A function that a program has at hand. Where it is sent to another process, its code is
        told here, as there may be no source there."""
        name = getattr(function, "__qualname__", type(function).__name__)
        return cls(name, digests.of_function(function), function)

    def __str__(self) -> str:
        digest = f" (sha256 {self.code[:SHOWN_DIGITS]})" if self.code else ""
        return f"transform {self.text.rpartition('/')[2]}{digest}"

    def __call__(self, image: Image.Image | np.ndarray) -> list[Tensor]:
        """The model's arguments, the image first: [1, C, H, W].

        Raises:
            ImageError: the function raised, or gave something else.
        """
        given = self._given(image)
        if isinstance(given, Mapping):
            if set(given) != set(self.names):
                raise ImageError(f"{self.text} gave {_keys(given)}, and before {_keys(self.names)}")
            return [given[name] for name in self.names]
        return [given[None] if given.ndim == 3 else given]

    def tried(self, image: Image.Image | np.ndarray) -> UserTransform:
        """The same, with the names of the arguments that it gives for this image.

        Raises:
            ImageError: as a call does.
        """
        given = self._given(image)
        if not isinstance(given, Mapping):
            return self
        names = sorted(given, key=lambda name: given[name].ndim not in (4, 5))
        return replace(self, names=tuple(names))

    def _given(self, image: Image.Image | np.ndarray) -> Tensor | Mapping[str, Tensor]:
        try:
            given = self.function(image)
        except Exception as error:  # the user's own code
            words = f"{type(error).__name__}: {quoted(str(error))}"
            raise ImageError(f"{self.text} raised {words}", "-v shows the traceback") from error
        if isinstance(given, Tensor) and given.ndim in (3, 4) and given.numel():
            return given
        if isinstance(given, Mapping) and given and _are_arguments(given):
            return {str(name): tensor for name, tensor in given.items()}
        raise ImageError(
            f"{self.text} gave {_words(given)}, expected a tensor [C, H, W] or [1, C, H, W], or a "
            "dict of tensors by the names of forward's arguments, one of them [1, C, H, W]"
        )


def by_transform(text: str, inputs: InputOptions, module: nn.Module) -> Preprocess:
    """The preprocessing that the user's function does, whatever the model's own would be. Where the
    function gives a dict, the model gets its tensors by their names from now on.

    Raises:
        UsageError: no such file, module or function.
        LoadError: the function fails on an empty image.
    """
    if FACTORY_FORM.fullmatch(text) is None:
        raise UsageError(f"--transform {text!r} names no function", "file.py:fn or pkg.mod:fn")
    function = factory.target(text)
    if not callable(function):
        raise UsageError(f"--transform {text!r} is a {type(function).__name__}", "name a function")
    transform = UserTransform(text, factory.code_digest(text), function)
    return by_function(transform, inputs, module)[0]


def by_function(
    transform: UserTransform, inputs: InputOptions, module: nn.Module
) -> tuple[Preprocess, RemovableHandle | None]:
    """The preprocessing that a function does, and the hook by which the model gets its tensors by
    their names, where the function gives a dict.

    Raises:
        LoadError: the function fails on an empty image.
    """
    channels = inputs.channels or 3
    plain = Preprocess(None, None, None, None, channels)
    try:
        transform = transform.tried(plain.empty())
    except ImageError as error:
        raise LoadError(f"--transform: {error.message}, for an empty image", error.hint) from error
    hook = None
    if transform.names:
        hook = module.register_forward_pre_hook(_by_name(transform.names), with_kwargs=True)
    return replace(plain, transform=transform), hook


def _by_name(names: Sequence[str]) -> Callable[..., tuple[tuple[()], dict[str, Any]]]:
    def hook(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return (), {**kwargs, **dict(zip(names, args, strict=True))}

    return hook


def _are_arguments(given: Mapping[Any, Any]) -> bool:
    tensors = all(isinstance(value, Tensor) for value in given.values())
    return tensors and any(value.ndim in (4, 5) for value in given.values())


def _words(given: Any) -> str:
    if isinstance(given, Tensor):
        return f"a tensor {list(given.shape)}"
    return _keys(given) if isinstance(given, Mapping) else f"a {type(given).__name__}"


def _keys(names: Any) -> str:
    return f"a dict of {quoted(', '.join(map(str, names))) or 'nothing'}"
