"""The keywords of the public functions: the options of the command line, by their records."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, get_type_hints

import numpy as np
from msgspec import Struct
from PIL import Image
from torch import Tensor, nn

from featviz.drawing.normalize import in_full
from featviz.options import declared

Model: TypeAlias = str | Path | nn.Module
"""A MODEL string (`"resnet18"`, a file, `"file.py:factory"`), or a module, which is given back as
it was."""

Layers: TypeAlias = str | type[nn.Module] | Sequence[str | type[nn.Module]]
"""Selectors as text, classes of modules, or a list of these."""

Picture: TypeAlias = str | Path | Image.Image | np.ndarray | Tensor
"""A path, or an image in memory."""

F = TypeVar("F", bound=Callable[..., Any])

NOT_OF_KERNELS = ("overlay", "reduce", "figure", "flat", "tensors")
NOT_OF_TENSORS = ("figure", "flat", "format", "tensors")
"""Drawing options that a function lacks."""


def keywords_of(*kinds: type[Struct], but: Sequence[str] = (), **defaults: Any) -> Callable[[F], F]:
    """Give a function, in place of `**options`, the keywords that options of records are: in its
    signature with types and defaults (`defaults` are those of the function), and in its
    documentation with what they mean."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = {parameter.name for parameter in own}
        lines, further = [], []
        types = {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}
        for one in [option for kind in kinds for option in declared(kind).values()]:
            lines.append(f"        {one.name}: {in_full(one.words)}".replace("\f", ""))
            if one.name not in names and one.name not in but:
                kind = inspect.Parameter.KEYWORD_ONLY
                default = defaults.get(one.name, one.default)
                further.append(
                    inspect.Parameter(one.name, kind, default=default, annotation=types[one.name])
                )
                names.add(one.name)
        function.__signature__ = signature.replace(parameters=[*own, *further])  # type: ignore[attr-defined]
        kept = [line for line in lines if line.split(":")[0].strip() in names]
        function.__doc__ = f"{function.__doc__}\n    Options:\n" + "\n".join(kept) + "\n"
        return function

    return decorate


def names_of(*kinds: type[Struct]) -> set[str]:
    """All keywords of records, for messages."""
    return {name for kind in kinds for name in declared(kind)} | {"forward_args"}
