"""What `cam` finds in one image: a class activation map for each call of a layer."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from featviz.errors import FeatvizError
from featviz.records import REDUCTIONS, Bytes, Floats, Guess, Outcome, Site, Skip


@dataclass(frozen=True)
class LayerCam:
    """The class activation map of one call of a layer."""

    site: Site
    values: Floats = field(repr=False, compare=False)
    """[H, W] in the layer's resolution; [T, H, W] of a clip."""
    picture: Bytes = field(repr=False, compare=False)
    """The map over what the model saw, RGB [H, W, 3] in the size of the input."""
    limits: tuple[float, float]
    """The values that are drawn darkest and brightest."""

    @property
    def name(self) -> str:
        """`layer4`, `relu call 1`."""
        parts = [self.site.layer.label, f"call {self.site.call}" if self.site.call else ""]
        return " ".join(part for part in (*parts, self.site.key) if part)

    def as_json(self) -> dict[str, Any]:
        """For programs: all but the pixels."""
        at = self.site
        where = {"layer": at.layer.name, "type": at.layer.type, "call": at.call, "key": at.key}
        return {**where, "shape": self.values.shape, "range": self.limits}


@dataclass(frozen=True)
class ImageCam:
    """What became of one image."""

    image: str
    method: str
    target: str = ""
    """What the maps are evidence for: `tabby`, `class 281`, or the target as it was given."""
    outcome: Outcome = field(default_factory=Outcome)
    maps: tuple[LayerCam, ...] = ()
    """In the order in which the layers ran."""
    skipped: tuple[Skip, ...] = ()
    path: Path | None = None
    """The picture, where one was written."""
    shown: Bytes | None = field(default=None, repr=False, compare=False)
    """What the model saw, uint8 [H, W, C]."""
    error: FeatvizError | None = None
    """What went wrong with this image."""

    @property
    def prediction(self) -> tuple[Guess, ...]:
        """The likeliest classes, where the model is a classifier."""
        return self.outcome.prediction

    @property
    def words(self) -> str:
        """`cat.jpg: tabby 43.1 %; Grad-CAM for tabby`."""
        said = f": {self.prediction[0].words}" if self.prediction else ""
        return f"{self.image}{said}; {REDUCTIONS[self.method].words} for {self.target}"

    def as_json(self) -> dict[str, Any]:
        """For programs: all but the pixels."""
        if self.error is not None:
            return {"image": self.image, "error": self.error.message}
        return {
            "image": self.image,
            "file": None if self.path is None else str(self.path),
            "prediction": [asdict(guess) for guess in self.prediction],
            "method": self.method,
            "target": {"of": self.target, "value": self.outcome.target},
            "maps": [one.as_json() for one in self.maps],
            "skipped": [asdict(skip) for skip in self.skipped],
        }
