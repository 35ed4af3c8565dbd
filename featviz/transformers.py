"""Watching a training of transformers: `Trainer(callbacks=[TrainerWatcher(images,
...)])`."""

from __future__ import annotations

from typing import Any

from featviz.api.watching import FitWatch
from featviz.models.requirements import missing_extra_error

try:
    from transformers import (
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
except ImportError as error:
    raise missing_extra_error("featviz.transformers", "hf", error) from error


class TrainerWatcher(FitWatch, TrainerCallback):
    """A `featviz.Watcher` for the time of each `train`; the steps are the Trainer's
    `global_step`. A training that goes on from a checkpoint goes on with the series.

    Args:
        images, layers, every, out, tensorboard, overwrite, options: as for
            `featviz.Watcher`, which refuses them at the start of `train`.
        part: name of the submodule that is watched, for a model whose forward does not
            begin with the image; empty for the model itself.
    """

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **more: Any,
    ) -> None:
        """Choose the layers, and draw the model before its first step."""
        self._begin(more["model"], state.global_step)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **more: Any,
    ) -> None:
        """Draw if a step is due."""
        self._step(state.global_step)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **more: Any,
    ) -> None:
        """Draw the last step, and close what is open."""
        self._end(draw_last=True)
