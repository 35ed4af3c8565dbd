"""Watching a training of Lightning: `Trainer(callbacks=[LightningWatcher(images, ...)])`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

from featviz.api.fitting import FitWatch
from featviz.api.keywords import Layers, Picture, WatchKeywords
from featviz.models.requirements import lacking

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise lacking("featviz.lightning", "lightning", error) from error


class LightningWatcher(Callback):
    """A callback that draws the feature maps of fixed images, and audits their channels.

    It is a `featviz.Watcher` for the time of each `fit`; the steps are Lightning's `global_step`.
    A training that goes on from a checkpoint goes on with the series.

    Args:
        images, layers, every, out, tensorboard, overwrite, options: as for `featviz.Watcher`.
        part: name of the submodule that is watched, for a LightningModule whose forward does not
            take images; empty for the LightningModule itself.

    Raises:
        FeatvizError: at the start of `fit`, as `featviz.Watcher`.
    """

    def __init__(
        self,
        images: Picture | list[Picture] | tuple[Picture, ...],
        layers: Layers | None = None,
        every: int = 100,
        out: str | Path = "featviz-series",
        *,
        part: str = "",
        tensorboard: str | Path | None = None,
        overwrite: bool = False,
        **options: Unpack[WatchKeywords],
    ) -> None:
        super().__init__()
        self._watch = FitWatch(
            images, layers, every, out, part, overwrite, tensorboard=tensorboard, **options
        )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Choose the layers, and draw the model before its first step."""
        self._watch.begin(pl_module, trainer.global_step)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *batch: Any, **more: Any
    ) -> None:
        """Draw if a step is due."""
        self._watch.step(trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Close what is open."""
        self._watch.end()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Close what is open."""
        self._watch.end()
