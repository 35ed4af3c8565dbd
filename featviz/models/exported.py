"""torch.export programs (.pt2), as modules whose layers take hooks."""

from __future__ import annotations

import logging
import re
import zipfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn

from featviz.errors import LoadError
from featviz.models.code import importable
from featviz.models.requirements import first_line
from featviz.text import quoted

Shape = tuple[int | None, ...]

_NEEDED = re.compile(rb'\\"type\\": \\"([\w.]+)\.\w+\\"|torch\.ops\.(torchvision)\.')
"""Classes of outputs, and operators, whose package must be imported first."""


def read(
    path: Path, trust: bool = False, device: torch.device | None = None
) -> tuple[nn.Module, tuple[int | None, tuple[int, int] | None]]:
    """Read a .pt2 file with `torch.export.load`, which can run whatever code it holds: the program
    as a tree of modules by the original's names, and the channels and the size of its input."""
    if not trust:
        words = "is an exported program, and torch reads it by running what it holds"
        words = f"{quoted(path.name)} {words}; nothing was executed"
        raise LoadError(words, "if you trust the file, --trust", add=("--trust",))
    heard = logging.root.manager.disable
    logging.disable(logging.ERROR)  # torch logs tracebacks, and raises
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("models/model.json")]
            texts = [archive.read(name) for name in names]
        with importable(path.parent), path.open("rb") as file:
            for one, other in [found for text in texts for found in _NEEDED.findall(text)]:
                import_module((one or other).decode())
            program = torch.export.load(file)
        if device is not None and device.type != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device)
        module = torch.export.unflatten(program)
    except Exception as error:  # the file decides what torch raises
        cause: BaseException = error
        while cause.__cause__ is not None:  # torch says last what it was doing
            cause = cause.__cause__
        raise LoadError(
            f"{quoted(path.name)} cannot be loaded: {quoted(first_line(cause))}",
            "is the file whole, as torch.export.save wrote it, and from this torch or older?",
        ) from error
    finally:
        logging.disable(heard)
    shape = _input_shape(path, program)

    def refuse_others(module: nn.Module, args: Sequence[Any]) -> None:
        got = tuple(args[0].shape)
        pairs = zip(shape, got, strict=False)
        if len(got) != len(shape) or any(want not in (None, size) for want, size in pairs):
            raise ValueError(f"it was exported for inputs {_words(shape)}, not {_words(got)}")

    module.register_forward_pre_hook(refuse_others)
    _, channels, *size = shape
    return module, (channels, None if None in size else tuple(size))  # type: ignore[return-value]


def _input_shape(path: Path, program: Any) -> Shape:
    names = program.graph_signature.user_inputs
    values = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    value = values.get(names[0]) if len(names) == 1 else None
    shape = tuple(size if isinstance(size, int) else None for size in getattr(value, "shape", ()))
    one = torch.utils._pytree.tree_structure(((0,), {}))
    plain = program.module_call_graph[0].signature.in_spec == one
    dtype = getattr(value, "dtype", None)
    if not plain or len(shape) != 4 or shape[0] not in (1, None) or dtype != torch.float32:
        given = ", ".join(map(str, names)) or "no input"
        raise LoadError(
            f"{path.name} takes {f'{dtype} {_words(shape)}' if plain else given}, not one image",
            "export it for one positional argument, an image torch.float32 [1, C, H, W]",
        )
    return shape


def _words(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"
