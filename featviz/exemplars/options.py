"""What `exemplars` can be told beside the model and the images."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from featviz.images.decode import check_background
from featviz.models.preprocess import InputOptions
from featviz.records import Count, Shard
from featviz.records.checking import check
from featviz.records.exemplars import ExemplarChoice


@dataclass(frozen=True)
class ExemplarOptions:
    """The options of `exemplars`."""

    layers: str | None = None
    """Selectors; None takes one layer for each stage."""
    choice: ExemplarChoice = field(default_factory=ExemplarChoice)
    inputs: InputOptions = field(default_factory=InputOptions)
    batch_size: Count = 1
    """The largest number of images of one shape that go through together."""
    shard: Shard | None = None
    """The part of the images to take; None takes all."""
    out: Path = Path("featviz-exemplars")
    overwrite: bool = False
    nul_separated: bool = False
    """`-` reads NUL-separated paths."""

    def check(self) -> None:
        """Refuse bad values before any work.

        Raises:
            UsageError: names the option and the value.
        """
        check(self)
        check_background(self.inputs.background)

    def as_json(self) -> dict[str, Any]:
        """`options` of exemplars.json: what decides about the result, however it is divided."""
        return {"layers": self.layers, **asdict(self.choice), **self.inputs.as_record()}
