"""`featviz.Watcher`: feature maps and channel health of a model in training. The callbacks
of trainers are built on it (`FitWatch`)."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from featviz.api.keywords import (
    Layers,
    Pictures,
    alone_with,
    as_files,
    borrowed,
    check_module,
    in_python,
    names_of,
    read_feeding,
    selectors,
)
from featviz.audit.audit import health_check
from featviz.drawing import tensorboard as boards
from featviz.errors import FeatvizError, ForwardError, UsageError
from featviz.models.load import LoadedModel, adopt
from featviz.options import (
    DrawOptions,
    InputOptions,
    RunOptions,
    declared_options,
    no_option,
    read_from,
)
from featviz.options.commands import KernelOptions
from featviz.run import run as pipeline
from featviz.run.prepare import Prepared, find_images, prepare
from featviz.rundir.folder import Folder
from featviz.rundir.place import RUN, check_free, remove_result, replacing
from featviz.rundir.studies import (
    check_series,
    read_steps,
    step_folder,
)
from featviz.text import listed, quoted

log = logging.getLogger(__name__)

_KEYWORDS = {"every", "out", "tensorboard", "overwrite", "resume", "start"}
"""Keywords of `Watcher` that are no options of drawing and inputs."""
_NOT_WATCHED = {"figure", "flat"}
"""Drawing options that a watcher does not have."""

HealthCheck = Callable[[LoadedModel, Folder], Mapping[str, Any]]
"""Audits the channels of a model, writes audit.json into a folder, and returns its
content."""


class Watcher:
    """Draw the feature maps of fixed images, and audit their channels, while a model is
    trained.

    Call `step` after each step of the optimizer. Every `every` steps it writes a run
    directory with an audit.json, `OUT/step-000100`. In a `with` block, the watcher also
    writes `OUT/step-000000`, the model before its first step, and the last step when the
    block ends without an error. `featviz report OUT` shows the steps with a slider. The
    training goes on as if it were not watched.

    Args:
        model: the module that is trained; it may be wrapped (DistributedDataParallel).
            Of several processes, the first one writes.
        images, layers: as for `featviz.run`.
        every: how many optimizer steps lie between two drawings.
        out: the folder of the series.
        tensorboard: folder for TensorBoard's events (extra `featviz[tensorboard]`).
        overwrite: replace a series that `out` holds already.
        resume: go on with a series that `out` holds already, from a checkpoint. Steps of
            the series after the first new one are removed when that is written.
        start: how many optimizer steps the model has taken already. It is needed if
            `resume` goes on with a series: the steps of the checkpoint.
        options: how maps are drawn and what the model gets, as for `featviz.run`.

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

    @in_python()
    def __init__(
        self,
        model: nn.Module,
        images: Pictures,
        layers: Layers | None = None,
        every: int = 100,
        out: str | Path = "featviz-series",
        *,
        tensorboard: str | Path | None = None,
        overwrite: bool = False,
        resume: bool = False,
        start: int = 0,
        **options: Any,
    ) -> None:
        check_module(model)
        _check_parameters(model)
        if overwrite and resume:
            raise UsageError(
                "resume and overwrite exclude each other", "give one of them"
            )
        _check_keywords(options)
        # each reader removes its own keywords
        keywords = dict(options)
        self._feeding = read_feeding(keywords)
        self.out: Path = declared_options(KernelOptions)["out"].value(out)
        """The folder of the series."""
        self.every = _read_integer("every", every, least=1)
        """How many optimizer steps lie between two drawings."""
        self.number = _read_integer("start", start, least=0)
        """How many optimizer steps the model has taken so far."""
        self.steps: list[int] = []
        """The numbers of the steps that were drawn."""
        self._overwrite = overwrite
        # whether the latest step is not drawn yet, so that `close` may draw it
        self._pending = False
        # TensorBoard's events and temporary files, until `close`
        self._open = ExitStack()
        self._prepared: Prepared | None = None
        """None in processes that write nothing, and after `close`."""
        self._health: HealthCheck | None = None
        # all processes of a distributed training have the same weights, so only one draws
        if not _is_first_process():
            return
        board = declared_options(RunOptions)["tensorboard"].value(tensorboard)
        self._inputs = read_from(InputOptions, keywords)
        self._options = RunOptions(
            selectors(layers),
            self.out,
            tensorboard=board,
            draw=read_from(DrawOptions, keywords),
            inputs=self._inputs,
        )
        self._model = adopt(model, self._inputs)
        earlier = check_series(self.out, overwrite, resume, board)
        # featviz cannot know at which step the training goes on
        if resume and earlier and self.number == 0:
            raise UsageError(
                f"{self.out} goes on, and nobody says from which step",
                "Watcher(..., start=STEPS), the steps that the checkpoint has taken",
            )
        self._begin(images)

    def _begin(self, images: Pictures) -> None:
        """Prepare the images, and open the files that stay open until `close`.

        Raises:
            UsageError: the images are a mapping of tensors, which a series does not take.
            FeatvizError: as from `featviz.run`.
        """
        if isinstance(images, Mapping):
            raise UsageError(
                "a Watcher takes images, and no tensors by the names of arguments",
                "images in memory: tensors [C, H, W], arrays or PIL images",
            )
        with ExitStack() as stack:
            files = stack.enter_context(as_files(images))
            with self._borrowed() as source:
                self._prepared = prepare(
                    source, find_images(files, self._options), self._options
                )
                self._health = self._health_check(source, self._prepared)
            self._board = stack.enter_context(
                boards.open_board(self._options.tensorboard)
            )
            # nothing has failed: from now on `close` closes the files
            self._open = stack.pop_all()

    def _health_check(
        self, model: LoadedModel, prepared: Prepared
    ) -> HealthCheck | None:
        """Prepare the audit of each step. If no layer can be audited, warn, and return
        None.

        Args:
            model: the model before the first step.
            prepared: the images and layers of the run.
        """
        try:
            return health_check(
                model, prepared.samples, prepared.layers, self._inputs, prepared.blank
            )
        except UsageError as error:
            log.warning("the health of channels is not written: %s", error.message)
            return None

    def step(self, number: int | None = None) -> Path | None:
        """Note a step of the optimizer, and draw if one is due.

        Args:
            number: how many steps the model has taken by now; None counts one more. If
                numbers are skipped, the first one at or after each multiple of `every` is
                drawn.

        Returns:
            The run directory of this step if it was written. None if the step was not due,
            if this is not the first process, or if a step after the first one could not be
            written, of which the log warns.

        Raises:
            UsageError: the number is less than the one before.
            FeatvizError: the first step cannot be drawn.
        """
        before = self.number
        now = before + 1
        if number is not None:
            now = _read_integer("step", number, least=0)
        if now < before:
            raise UsageError(f"step {now} comes behind step {before}", "count upwards")
        self.number = now
        if now > before:
            self._pending = True
        # whether a multiple of `every` was reached or passed since the call before
        is_due = now // self.every > before // self.every
        return self._write() if is_due else None

    def close(self, draw_last: bool = True) -> None:
        """End the series. Nothing is written after that.

        Args:
            draw_last: draw the last step, unless it was drawn already.

        Raises:
            FeatvizError: the last step is the first that is drawn, and cannot be
                written.
        """
        try:
            if draw_last and self._pending:
                self._write()
        finally:
            self._open.close()
            self._prepared = None
            self._pending = False

    def __enter__(self) -> Watcher:
        """Draw the model before its first step, if it has taken none."""
        if self._prepared and self.number == 0:
            try:
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
        """End the series. After an error the last step is not drawn."""
        self.close(draw_last=error is None)

    def __repr__(self) -> str:
        return f"<Watcher of {self.out}: step {self.number}, {len(self.steps)} written>"

    def _write(self) -> Path | None:
        """Draw the model as it is now.

        Returns:
            The run directory of this step. None in a process that is not the first, and if
            a step after the first one cannot be drawn, of which the log warns.

        Raises:
            FeatvizError: the first step cannot be drawn.
        """
        self._pending = False
        if self._prepared is None:
            return None
        folder = step_folder(self.out, self.number)
        surplus = self._surplus_steps()
        try:
            # Before anything is drawn, refuse to remove the folder of a step that holds
            # files which are not ours.
            files = {}
            for step in surplus:
                path = step_folder(self.out, step)
                files[path] = check_free(path, RUN, True)
            if surplus:
                log.info(
                    "%s: the earlier steps %s go",
                    quoted(str(self.out)),
                    listed([str(step) for step in surplus], 3),
                )
            with replacing(folder, RUN) as new, self._borrowed() as model:
                self._draw(new, replace(self._prepared, model=model))
            for path, files_of_run in files.items():
                remove_result(Folder.open(self.out), path.name, files_of_run or ())
        except FeatvizError as error:
            # At the first step the cause is a wrong option, and the training should end at
            # once. Later, a full disk is no reason to lose hours of training.
            if not self.steps:
                raise
            log.warning("step %d is not drawn: %s", self.number, error.message)
            return None
        self.steps.append(self.number)
        return folder

    def _surplus_steps(self) -> list[int]:
        """The steps of an earlier training to remove when this one writes its first step:
        all later steps, and with `overwrite` all earlier ones, too. Empty once this training
        has written a step."""
        if self.steps:
            return []
        surplus = []
        for step in read_steps(self.out):
            # a folder of the same step is replaced anyway
            is_later = step > self.number
            if is_later or (self._overwrite and step < self.number):
                surplus.append(step)
        return surplus

    def _draw(self, folder: Folder, prepared: Prepared) -> None:
        """Write the run directory of this step, its audit, and TensorBoard's events.

        Args:
            folder: the folder of the step.
            prepared: the images and layers, with the model as it is now.

        Raises:
            ForwardError: all images failed.
        """
        board = self._board
        if board is not None:
            board = replace(board, step=self.number)
        results = pipeline.draw_into(folder, prepared, board)
        failed = [result for result in results if result.error is not None]
        for result in failed:
            log.warning(
                "step %d, %s: %s", self.number, quoted(result.name), result.error
            )
        # if all images fail, the model is to blame
        if len(failed) == len(results):
            raise ForwardError(
                f"no image went through: {failed[0].error}", failed[0].hint
            )
        if self._health is None:
            return
        document = self._health(prepared.model, folder)
        if board is None:
            return
        # curves for TensorBoard: how many channels are dead, step by step
        curves = []
        for row in document["layers"]:
            for finding, channels in row["findings"].items():
                tag = f"{finding}_channels/{row['label']}"
                curves.append({"tag": tag, "simple_value": len(channels)})
        board.post(curves)

    @contextmanager
    def _borrowed(self) -> Iterator[LoadedModel]:
        """In this block, have the model on the device where the training has it now. The
        module is locked for this thread, and an autocast of the training is off.

        If the model itself switches autocast on, as with accelerate, its cache of cast
        weights is off, too: the passes here run without gradients (`in_eval_mode`), and the
        training could not use weights that they have cast."""
        module = self._model.module
        tensors = [*module.parameters(), *module.buffers(), torch.empty(0)]
        device = tensors[0].device
        record = {"kind": "module", "type": type(module).__name__, "step": self.number}
        with (
            alone_with(module),
            torch.autocast(device.type, enabled=False, cache_enabled=False),
        ):
            model = replace(self._model, device=device, source=record)
            with borrowed(model, self._inputs, self._feeding) as fed_model:
                yield fed_model


def _check_keywords(options: Mapping[str, Any]) -> None:
    """Refuse options that a watcher does not have.

    Raises:
        UsageError: there are such options.
    """
    known = (names_of(InputOptions, DrawOptions) | _KEYWORDS) - _NOT_WATCHED
    unknown = sorted(options.keys() - known)
    if unknown:
        raise no_option(unknown, known)


def _check_parameters(model: nn.Module) -> None:
    """Refuse a model whose parameters are divided among processes.

    Raises:
        UsageError: they are (FSDP).
    """
    for module in model.modules():
        classes = [type(module), *map(type, module.parameters(recurse=False))]
        names = {cls.__name__ for cls in classes}
        if names & {"FullyShardedDataParallel", "DTensor"}:
            raise UsageError(
                f"the parameters of {type(module).__name__} are divided among processes"
                " (FSDP), and no single one can run it",
                "watch a model that each process has whole (DistributedDataParallel)",
            )


def _is_first_process() -> bool:
    """Whether this is the first of several processes of a training, or the only one."""
    group = torch.distributed
    return not (group.is_available() and group.is_initialized() and group.get_rank())


def _read_integer(name: str, value: Any, *, least: int) -> int:
    """Read the value of a keyword as an integer.

    Args:
        name: the name of the keyword, for the message.
        least: the smallest number that is allowed.

    Raises:
        UsageError: the value is no integer (such as True or 2.0), or less than `least`.
    """
    # operator.index takes integers of numpy and torch, and refuses 2.0
    with suppress(TypeError):
        if not isinstance(value, bool) and operator.index(value) >= least:
            return operator.index(value)
    raise UsageError(f"{name}={quoted(str(value))}: expected an integer ≥ {least}")


class FitWatch:
    """A base class of callbacks: begins a `Watcher` when a trainer begins, and ends it
    with the training. A bad option is an error when the trainer begins, not when the
    callback is made.

    Args:
        part: the qualified name, in the trainer's module, of the module that is watched;
            empty for the trainer's module itself.
        images, layers, every, out, tensorboard, overwrite, options: as for `Watcher`.
    """

    def __init__(
        self,
        images: Pictures,
        layers: Layers | None = None,
        every: int = 100,
        out: str | Path = "featviz-series",
        *,
        part: str = "",
        tensorboard: str | Path | None = None,
        overwrite: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self._part = part
        self._overwrite = overwrite
        self._options: dict[str, Any] = {
            "images": images,
            "layers": layers,
            "every": every,
            "out": out,
            "tensorboard": tensorboard,
            **options,
        }
        self._watcher: Watcher | None = None

    def _begin(self, model: Any, number: int) -> None:
        """Watch a model that has taken `number` steps. With 0 a new series begins; with
        another number the earlier series goes on.

        Raises:
            UsageError: the model has no part with the given name.
            FeatvizError: as from `Watcher`.
        """
        # a trainer may begin again, after a failure or for another phase
        self._end(draw_last=False)
        try:
            watched = model.get_submodule(self._part)
        except AttributeError:
            message = f"part {self._part!r} is no module of {type(model).__name__}"
            names = [name for name, _ in model.named_children()]
            raise UsageError(
                message, f"one of {quoted(listed(names, 8), 200)}"
            ) from None
        watcher = Watcher(
            watched,
            overwrite=self._overwrite and number == 0,
            resume=number > 0,
            start=number,
            **self._options,
        )
        # without `with`, since the trainer ends it in another method
        self._watcher = watcher.__enter__()

    def _step(self, number: int) -> None:
        """Tell the watcher, if there is one, that the model has taken `number` steps; it
        draws if a drawing is due."""
        if self._watcher is not None:
            self._watcher.step(number)

    def _end(self, draw_last: bool) -> None:
        """End the watcher, if there is one.

        Args:
            draw_last: as in `Watcher.close`; True for a training that ended without an
                error.
        """
        watcher = self._watcher
        self._watcher = None
        if watcher is not None:
            watcher.close(draw_last)
