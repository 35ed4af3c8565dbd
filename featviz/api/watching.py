"""`featviz.Watcher`: the feature maps and channel health of a model as it is trained."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack

import torch
from torch import nn

from featviz.api.keywords import Layers, Picture, WatchKeywords
from featviz.api.lending import Feeding, as_files, check_module, selectors
from featviz.api.stepping import StepWriter
from featviz.api.words import keyword_errors, of_keywords
from featviz.drawing import tensorboard as boards
from featviz.errors import FeatvizError, UsageError
from featviz.pipeline.keywords import read_keywords
from featviz.records.checking import no_option, whole_number
from featviz.rundir.series import (
    check_series,
    read_steps,
    removable,
    remove_steps,
    step_folder,
)
from featviz.text import listed, quoted

log = logging.getLogger(__name__)

_KEYWORDS = ("every", "out", "tensorboard", "overwrite", "resume", "start")


class Watcher:
    """Draw the feature maps of fixed images, and audit their channels, while a model is trained.

    Call `step` behind each step of the optimizer. Every `every` steps it writes a run directory
    with an audit.json, `OUT/step-000100`; within `with`, the model before its first step is
    `OUT/step-000000`, and the last step is drawn when the block ends without an error. `featviz
    report OUT` shows the steps behind a slider. The training goes on as if it were not watched:
    modes, buffers, gradients, hooks and random numbers stay as they were.

    Args:
        model: the module that is trained. One that is compiled, or in DataParallel or
            DistributedDataParallel, is looked at inside its wrapper; of several processes the first
            writes.
        images: paths and images in memory, as for `featviz.run`.
        layers: selectors, a class of modules, or a list of these. None takes one layer for each
            stage.
        every: optimizer steps from one drawing to the next.
        out: the folder of the series.
        tensorboard: folder for TensorBoard's events (extra `featviz[tensorboard]`); its steps are
            those of the training.
        overwrite: replace the series that is there.
        resume: go on with the series that is there, from a checkpoint; its steps behind that
            checkpoint are removed when the first new one is written.
        start: optimizer steps that the model has taken already.
        options: how maps are drawn (normalize, cmap, nrow, max_maps, format, ...) and what the
            model gets (size in pixels, mean, std, transform, forward_args, ...), as for
            `featviz.run`.

    Raises:
        FeatvizError: a bad option, no such images or layers, or a folder that holds something else.
            Once a first step is written, one that fails is warned about, and the training goes on.

    Example:
        >>> import featviz, tempfile, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        >>> image = torch.rand(3, 8, 8)
        >>> with tempfile.TemporaryDirectory() as out:
        ...     with featviz.Watcher(model, image, every=2, out=out, size=8) as watcher:
        ...         paths = [watcher.step() for batch in range(3)]
        >>> [path and path.name for path in paths], watcher.steps
        ([None, 'step-000002', None], [0, 2, 3])
    """

    @keyword_errors()
    def __init__(
        self,
        model: nn.Module,
        images: Picture | list[Picture] | tuple[Picture, ...],
        layers: Layers | None = None,
        every: int = 100,
        out: str | Path = "featviz-series",
        *,
        tensorboard: str | Path | None = None,
        overwrite: bool = False,
        resume: bool = False,
        start: int = 0,
        **options: Unpack[WatchKeywords],
    ) -> None:
        given: dict[str, Any] = dict(options)
        _check(model, overwrite, resume, given)
        feeding = Feeding.taken(given)
        if isinstance(given.get("tensors"), bool):
            given["tensors"] = "npy" if given["tensors"] else None
        self.out, self.every = Path(out), whole_number("every", every, least=1)
        self.number = whole_number("start", start)
        """The folder, the steps between two drawings, and the optimizer steps so far."""
        self.steps: list[int] = []
        """Those that were written."""
        self._stack, self._first = ExitStack(), _is_first()
        self._replaced, self._numbered, self._pending = overwrite, True, False
        if not self._first:
            return
        board = None if tensorboard is None else Path(tensorboard)
        plain = {"layers": selectors(layers), "out": self.out, "tensorboard": board}
        asked = read_keywords(given, 0, plain)
        earlier = check_series(self.out, overwrite, resume, board)
        self._numbered = self.number > 0 or not (resume and earlier)
        with ExitStack() as stack:
            files = stack.enter_context(as_files(images))
            self._work = StepWriter(model, files, asked, feeding)
            self._board = stack.enter_context(boards.opened(board))
            self._stack = stack.pop_all()

    @keyword_errors()
    def step(self, number: int | None = None) -> Path | None:
        """Note a step of the optimizer, and draw if one is due.

        Args:
            number: how many steps the model has taken by now; None counts one more. Where numbers
                are skipped, the first one at or behind each multiple of `every` is drawn.

        Returns:
            The run directory of this step if it was written, else None.

        Raises:
            UsageError: the number is no whole one, or below the last one, or a series that goes on
                is to count by itself and was not told from where.
            FeatvizError: the first step cannot be written.
        """
        if number is None and not self._numbered:
            raise UsageError(
                f"{self.out} goes on, and nobody says from which step",
                "Watcher(..., start=STEPS) or step(STEPS), the steps that the checkpoint has taken",
            )
        now = self.number + 1 if number is None else whole_number("step", number)
        before = self.number if self._numbered else now - 1
        if now < before:
            raise UsageError(f"step {now} comes behind step {before}", "count upwards")
        self.number, self._numbered = now, True
        self._pending = self._pending or now > before
        due = now // self.every > before // self.every
        return self._write() if due else None

    @keyword_errors()
    def close(self, draw_last: bool = True) -> None:
        """End the series: nothing is written any more.

        Args:
            draw_last: draw the last step, where it was none of those that were due.

        Raises:
            FeatvizError: the last step is the first that is drawn, and cannot be written.
        """
        try:
            if draw_last and self._pending:
                self._write()
        finally:
            self._stack.close()
            self._first = self._pending = False

    def __enter__(self) -> Watcher:
        if self._first and self.number == 0 and (self._replaced or not read_steps(self.out)):
            try:
                with keyword_errors():
                    self._write()
            except BaseException:
                self.close(draw_last=False)
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(draw_last=error is None)

    def __repr__(self) -> str:
        return f"<Watcher of {self.out}: step {self.number}, {len(self.steps)} written>"

    def _write(self) -> Path | None:
        """Draw the model as it is now; None in processes that are not the first, and where it
        failed behind the first step."""
        self._pending = False
        if not self._first:
            return None
        folder = step_folder(self.out, self.number)
        try:
            earlier = [] if self.steps else removable(self.out, self._replaced_steps())
            self._work.write(folder, self.number, self._board)
            remove_steps(earlier)
        except FeatvizError as error:
            if not self.steps:
                raise
            log.warning("step %d is not drawn: %s", self.number, of_keywords(error.message))
            return None
        self.steps.append(self.number)
        return folder

    def _replaced_steps(self) -> list[int]:
        """The steps of an earlier training that go when this one has written its first."""
        now, earlier = self.number, read_steps(self.out)
        gone = [step for step in earlier if step > now or (self._replaced and step != now)]
        if gone:
            names = listed([str(step) for step in gone], 3)
            log.info("%s: the earlier steps %s go", quoted(str(self.out)), names)
        return gone


def _is_first() -> bool:
    """Whether this process writes: it is alone, or the first of its group."""
    distributed = torch.distributed
    return not (distributed.is_available() and distributed.is_initialized()) or (
        distributed.get_rank() == 0
    )


def _check(model: Any, overwrite: Any, resume: Any, options: Mapping[str, Any]) -> None:
    """Refuse bad values before any work.

    Raises:
        UsageError: names the value and what it takes.
    """
    check_module(model)
    if overwrite and resume:
        raise UsageError("resume and overwrite exclude each other", "give one of them")
    known = {*WatchKeywords.__annotations__, *_KEYWORDS}
    if wrong := [name for name in options if name not in known]:
        raise no_option(wrong, known)
    if sharded := next((m for m in model.modules() if _is_sharded(m)), None):
        raise UsageError(
            f"the parameters of {type(sharded).__name__} are divided among processes (FSDP), and "
            "no single one can run it",
            "watch a model that each process has whole (DistributedDataParallel)",
        )


def _is_sharded(module: nn.Module) -> bool:
    kinds = [type(module), *map(type, module.parameters(recurse=False))]
    return any(kind.__name__ in ("FullyShardedDataParallel", "DTensor") for kind in kinds)
