"""torch.export programs (.pt2), as modules whose layers take hooks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn

from featviz.errors import FeatvizError, LoadError
from featviz.models.files import exported_archive
from featviz.models.presets import FixedInput
from featviz.models.requirements import require_torchvision
from featviz.text import quoted

log = logging.getLogger(__name__)

Shape = tuple[int | None, ...]
"""Sizes of an input; None where any will do."""

_TRAINING_FLAG = {
    "aten.batch_norm.default": 5,
    "aten.dropout.default": 2,
    "aten.dropout_.default": 2,
}
"""Position of the argument that says whether an operator works as in training."""


@dataclass(frozen=True)
class Program:
    """A program as a tree of modules, with the input that it was exported for."""

    module: nn.Module
    shape: Shape

    @property
    def fixed(self) -> FixedInput:
        """What the program leaves no choice in."""
        _, channels, height, width = self.shape
        free = height is None or width is None
        return FixedInput(channels, None if free else (height, width))  # type: ignore[arg-type]


def read(path: Path, unsafe: bool = False, device: torch.device | None = None) -> Program:
    """Read a .pt2 file; torch sees a new archive with what is safe of it, unless `unsafe`.

    The modules are torch.export's InterpreterModules in the original's tree, with the original's
    names; each call of a shared module is a call of its one InterpreterModule, or, where the calls
    differ, one of `NAME`, `NAME@1`, ... (`torch.export.unflatten`).

    Args:
        device: where the program shall run; None is the CPU.

    Raises:
        LoadError: it could run code, cannot be read, or takes something else than one image.
    """
    program, module = _unflattened(path, unsafe, device)
    shape = _input_shape(path, program)
    module.register_forward_pre_hook(_refuse_others(shape))
    if _trains(program):
        log.warning(
            "%s was exported in training mode, so its BatchNorm and dropout work as in training; "
            "call model.eval() before torch.export",
            path.name,
        )
    return Program(module, shape)


def _unflattened(path: Path, unsafe: bool, device: torch.device | None) -> tuple[Any, nn.Module]:
    if unsafe:
        require_torchvision()  # some programs need its operators
    try:
        with path.open("rb") if unsafe else exported_archive.rewritten(path) as file, _silent():
            program = _moved(torch.export.load(file) if unsafe else _loaded(file), device)
            return program, torch.export.unflatten(program)
    except FeatvizError:
        raise
    except Exception as error:  # what is wrong with the file decides what torch raises
        cause: BaseException = error
        while cause.__cause__ is not None:  # torch says last what it was doing, with a traceback
            cause = cause.__cause__
        line = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        raise LoadError(
            f"{quoted(path.name)} cannot be loaded: {quoted(line)}",
            "is the file whole, and from this torch or older?",
        ) from error


def _loaded(file: BinaryIO) -> Any:
    """What `torch.export.load` does, but for its way back to a format that is all pickles."""
    from torch.export.pt2_archive._package import load_pt2

    return load_pt2(file).exported_programs["model"]


def _moved(program: Any, device: torch.device | None) -> Any:
    if device is None or device.type == "cpu":
        return program
    from torch.export.passes import move_to_device_pass

    return move_to_device_pass(program, device)


def _input_shape(path: Path, program: Any) -> Shape:
    """The shape [1, C, H, W] of the one tensor that the program takes.

    Raises:
        LoadError: it takes more, or another kind of tensor.
    """
    values = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    names = program.graph_signature.user_inputs
    one = torch.utils._pytree.tree_structure(((0,), {}))
    if program.module_call_graph[0].signature.in_spec != one or len(names) != 1:
        raise LoadError(
            f"{path.name} takes {', '.join(map(str, names)) or 'no input'}, not one image",
            "export it with one positional argument, the image",
        )
    value = values.get(names[0])
    shape = tuple(size if isinstance(size, int) else None for size in getattr(value, "shape", ()))
    dtype = getattr(value, "dtype", None)
    if len(shape) != 4 or shape[0] not in (1, None) or dtype != torch.float32:
        raise LoadError(
            f"{path.name} takes {dtype} {_words(shape)}, and featviz shows one image at a time, "
            "torch.float32 [1, C, H, W]",
            "export it for one such image, or with a dynamic batch",
        )
    return shape


def _refuse_others(shape: Shape) -> Any:
    """A hook that says in one line which shape the program takes."""

    def check(module: nn.Module, args: Sequence[Any]) -> None:
        got = tuple(args[0].shape)
        fits = len(got) == len(shape) and all(
            want in (None, size) for want, size in zip(shape, got, strict=True)
        )
        if not fits:
            raise ValueError(f"it was exported for inputs {_words(shape)}, not {_words(got)}")

    return check


def _trains(program: Any) -> bool:
    """Whether an operator was exported with its training flag set."""
    return any(
        str(node.target) in _TRAINING_FLAG
        and (*node.args, *([False] * 6))[_TRAINING_FLAG[str(node.target)]] is True
        for node in program.graph.nodes
    )


@contextmanager
def _silent() -> Iterator[None]:
    """torch.export logs tracebacks of what it raises or tries in another way afterwards."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


def _words(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"
