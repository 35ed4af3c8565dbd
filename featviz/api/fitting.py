"""What the callbacks of trainers share: a watcher for each training that they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

from featviz.api.keywords import Layers, Picture, WatchKeywords
from featviz.api.watching import Watcher
from featviz.errors import UsageError
from featviz.hooks.layers import modules_by_name
from featviz.text import listed, quoted


class FitWatch:
    """A part of a callback: begins a `Watcher` when a trainer begins, and ends it with the
    training."""

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
        """Note what is asked for; it is checked when a training begins."""
        super().__init__()
        self._part, self._overwrite = part, overwrite
        self._given: dict[str, Any] = {"images": images, "layers": layers, "every": every}
        self._given |= {"out": out, "tensorboard": tensorboard, **options}
        self._watcher: Watcher | None = None

    def _begin(self, model: Any, number: int) -> None:
        """Watch a model that has taken `number` steps: from 0 a new series begins, or else the
        earlier one goes on.

        Raises:
            FeatvizError: as `Watcher`, or the model has no such part.
        """
        self._end(draw_last=False)
        again = number > 0
        choice = {"overwrite": self._overwrite and not again, "resume": again, "start": number}
        self._watcher = Watcher(self._chosen(model), **{**self._given, **choice}).__enter__()

    def _step(self, number: int) -> None:
        """Draw if a step is due."""
        if self._watcher is not None:
            self._watcher.step(number)

    def _end(self, draw_last: bool) -> None:
        """Draw the last step of a training that ended well, and close what is open."""
        watcher, self._watcher = self._watcher, None
        if watcher is not None:
            watcher.close(draw_last)

    def _chosen(self, model: Any) -> Any:
        if not self._part:
            return model
        modules = modules_by_name(model)
        if self._part not in modules:
            names = [name for name in modules if name and "." not in name]
            raise UsageError(
                f"part {self._part!r} is no module of {type(model).__name__}",
                f"one of {quoted(listed(names, 8), 200)}",
            )
        return modules[self._part]
