"""Watching a training of transformers: `Trainer(callbacks=[TrainerWatcher(images, ...)])`."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

from torch import nn

from featviz.api.fitting import FitWatch
from featviz.api.keywords import Layers, Picture, WatchKeywords
from featviz.models.requirements import lacking

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise lacking("featviz.transformers", "hf", error) from error


class TrainerWatcher(TrainerCallback):
    """A callback that draws the feature maps of fixed images, and audits their channels.

    It is a `featviz.Watcher` for the time of each `train`; the steps are the Trainer's
    `global_step`. A training that goes on from a checkpoint goes on with the series.

    Args:
        images, layers, every, out, tensorboard, overwrite, options: as for `featviz.Watcher`.
        part: name of the submodule that is watched, for a model whose forward does not begin with
            the image; empty for the model itself.

    Raises:
        FeatvizError: at the start of `train`, as `featviz.Watcher`.
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

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **more: Any,
    ) -> None:
        """Choose the layers, and draw the model before its first step."""
        self._watch.begin(model, state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Draw if a step is due."""
        self._watch.step(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Close what is open."""
        self._watch.end()
