"""Watching a training of transformers: `Trainer(callbacks=[TrainerWatcher(images, ...)])`."""

from __future__ import annotations

from typing import Any

from torch import nn

from featviz.api.watching import FitWatch
from featviz.models.requirements import lacking

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise lacking("featviz.transformers", "hf", error) from error


class TrainerWatcher(FitWatch, TrainerCallback):
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

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **more: Any,
    ) -> None:
        """Choose the layers, and draw the model before its first step."""
        self._begin(model, state.global_step)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Draw if a step is due."""
        self._step(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """Draw the last step, and close what is open."""
        self._end(draw_last=True)
