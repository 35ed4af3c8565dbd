"""Watching a training of Lightning: `Trainer(callbacks=[LightningWatcher(images,
...)])`."""

from __future__ import annotations

from typing import Any

from featviz.api.watching import FitWatch
from featviz.models.requirements import missing_extra_error

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise missing_extra_error("featviz.lightning", "lightning", error) from error


class LightningWatcher(FitWatch, Callback):
    """A `featviz.Watcher` for the time of each `fit`; the steps are Lightning's
    `global_step`. A training that goes on from a checkpoint goes on with the series.

    Args:
        images, layers, every, out, tensorboard, overwrite, options: as for
            `featviz.Watcher`, which refuses them at the start of `fit`.
        part: name of the submodule that is watched, for a LightningModule whose forward
            does not take images; empty for the LightningModule itself.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose the layers, and draw the model before its first step."""
        self._begin(pl_module, trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *batch: Any, **more: Any
    ) -> None:
        """Draw if a step is due."""
        self._step(trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Draw the last step, and close what is open."""
        self._end(draw_last=True)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Close what is open."""
        self._end(draw_last=False)
