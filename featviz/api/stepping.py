"""What a Watcher does at a step: a run directory with its audit, and what TensorBoard shows."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from featviz.api.lending import Feeding
from featviz.api.words import of_keywords
from featviz.audit.health import HealthCheck
from featviz.drawing.tensorboard import Board
from featviz.errors import ForwardError, UsageError
from featviz.models.load import LoadedModel, adopt, fed
from featviz.pipeline.options import RunOptions
from featviz.pipeline.series import SeriesDrawer
from featviz.rundir import destination
from featviz.text import quoted

log = logging.getLogger(__name__)


class StepWriter:
    """The model, and what is done to it at each step that is drawn; planned once."""

    def __init__(
        self, model: nn.Module, files: list[str], asked: RunOptions, feeding: Feeding
    ) -> None:
        self._inputs, self._feeding = asked.inputs, feeding
        self._model = adopt(model, asked.inputs)
        with self._lent(0) as lent, _full_precision(lent.device):
            self._drawer = SeriesDrawer(lent, files, asked)
            self._health = self._check_of(lent)

    def _check_of(self, model: LoadedModel) -> HealthCheck | None:
        found = self._drawer.prepared
        try:
            return HealthCheck(model, found.samples, found.layers, self._inputs, found.blank)
        except UsageError as error:
            log.warning("the health of channels is not written: %s", of_keywords(error.message))
            return None

    def write(self, out: Path, step: int, board: Board | None) -> None:
        """Write the run directory of a step, and post it.

        Raises:
            FeatvizError: it cannot be written, or no image went through.
        """
        at = None if board is None else board.at_step(step)
        with (
            destination.replacing(out, destination.RUN) as folder,
            self._lent(step) as model,
            _full_precision(model.device),
        ):
            results = self._drawer.draw(model, folder, at)
            failed = [result for result in results if result.error is not None]
            for result in failed:
                log.warning("step %d, %s: %s", step, quoted(result.image), result.error)
            if len(failed) == len(results):
                raise ForwardError(f"no image went through: {failed[0].error}", failed[0].hint)
            if self._health is not None:
                document = self._health.write(model, folder)
                if at is not None:
                    at.add_scalars(_scalars(document))

    @contextmanager
    def _lent(self, step: int) -> Iterator[LoadedModel]:
        """The model where it is by now, with the caller's own feeding for a while."""
        module = self._model.module
        tensor = next(iter([*module.parameters(), *module.buffers()]), torch.empty(0))
        source = {"kind": "module", "type": type(module).__name__, "step": step}
        model = replace(self._model, device=tensor.device, source=source)
        with _in_its_precision(module, tensor.dtype):
            if self._feeding == Feeding():
                yield model
                return
            given = self._feeding.transform, self._feeding.further
            with fed(model, self._inputs, *given) as loaded:
                yield loaded


def _scalars(document: Mapping[str, Any]) -> dict[str, float]:
    """`dead_channels/layer1.0.relu`, and so on for each finding that a layer is judged for."""
    return {
        f"{finding}_channels/{row['label']}": float(len(channels))
        for row in document["layers"]
        for finding, channels in row["findings"].items()
    }


@contextmanager
def _in_its_precision(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Let a model of half or double precision take images, which are float32."""

    def cast(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(a.to(dtype) if _is_single(a) else a for a in args)

    if not dtype.is_floating_point or dtype == torch.float32:
        yield
        return
    hook = module.register_forward_pre_hook(cast)
    try:
        yield
    finally:
        hook.remove()


def _is_single(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


@contextmanager
def _full_precision(device: torch.device) -> Iterator[None]:
    """Without autocast. What a model switches on by itself (accelerate wraps its forward) keeps no
    copies of weights: copies made in inference mode would be of no use to the training."""
    with torch.autocast(device.type, enabled=False, cache_enabled=False):
        yield
