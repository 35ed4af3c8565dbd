"""The result of a comparison of two runs: each layer, what only one run has, and the verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from featviz.errors import CHECK_FAILED
from featviz.files.urls import Url
from featviz.options.commands import DiffThresholds
from featviz.records import CaptureKey, GridPlan
from featviz.text import counted


@dataclass(frozen=True)
class DifferenceMap:
    """A picture of signed differences."""

    file: str
    image: str
    label: str
    stem: str
    channels: tuple[int, ...]
    """The drawn channels in tile order: the most changed first."""
    source: str
    limit: float
    """The relative difference at the ends of the colours."""
    plan: GridPlan
    slices: int


@dataclass(frozen=True)
class ComparedLayer:
    """One place of the model in both runs, over all images."""

    place: CaptureKey
    type: str
    index: int
    by: Sequence[str]
    """What its tensors were compared by: `tensors`, `statistics and pixels`, `statistics`."""
    reason: str | None
    """Why it could not be compared, in the first image where it could not."""
    images: Mapping[str, Mapping[str, float | None]]
    """By image: how many channels are `differing`, and `absolute`, `relative` and `cosine`."""
    differing: int
    total: int
    channel_images: tuple[int, int]
    """The same, with each channel counted in each image."""
    channels: Mapping[str, np.ndarray]
    """`absolute`, `relative`, `cosine` and `unlike`, as in `diff.compare.Change`: the worst of each
    channel over the images that could be compared."""
    cosine: float
    """The smallest of a whole tensor; NaN where only statistics are known."""
    most_changed: Sequence[int]
    image: str
    """The image in which the layer differs most; the next three hold for it."""
    severity: float
    """The largest relative difference, 0..1; 1 where shapes or finite values differ."""
    change: np.ndarray
    """[channels]: the largest relative difference of each, 0..1."""
    changed: Sequence[int]
    """The channels that differ, the most changed first."""
    difference: DifferenceMap | None = None

    @property
    def label(self) -> str:
        """`layer1.0.conv1`; the class name for the model itself."""
        return self.place.layer or self.type

    @property
    def cells(self) -> dict[str, str]:
        """A row of a table, by heading."""
        row = {"layer": self.label, "type": self.type, "tensor": self.place.stem}
        differing = sum(bool(numbers["differing"]) for numbers in self.images.values())
        row["images"] = f"{differing}/{len(self.images)}"
        row["channels"] = f"{self.differing:,}/{self.total:,}"
        if self.reason is not None:
            empty = dict.fromkeys(("absolute", "relative", "cosine"), "")
            return row | empty | {"most changed": self.reason, "by": ""}
        lost = self.channels["unlike"].max()
        return row | {
            "absolute": f"{self.channels['absolute'].max():.3g}"
            + (f" ({lost} not finite)" if lost else ""),
            "relative": f"{self.channels['relative'].max():.3g}",
            "cosine": f"{self.cosine:.6f}" if math.isfinite(self.cosine) else "",
            "most changed": ", ".join(map(str, self.most_changed)),
            "by": " or ".join(self.by),
        }

    @property
    def page_cells(self) -> list[tuple[str, str]]:
        """What the page says of it: the cells behind its name that hold something."""
        return [(heading, cell) for heading, cell in list(self.cells.items())[3:] if cell]


OnlyIn: TypeAlias = tuple[Mapping[str, str], Mapping[tuple[CaptureKey, str], str]]
"""The images, and the layers with their types, that one run has and the other has not, and why."""


def lines_of(only: OnlyIn) -> list[str]:
    """A line for each image and layer that only one run has."""
    images = [f"image {name} ({reason})" for name, reason in only[0].items()]
    return images + [
        f"layer {place.layer or type} {place.stem} ({reason})"
        for (place, type), reason in only[1].items()
    ]


@dataclass(frozen=True)
class Comparison:
    """Two runs compared."""

    base: Path | Url
    new: Path | Url
    thresholds: DiffThresholds
    images: tuple[str, ...]
    layers: tuple[ComparedLayer, ...]
    only_in_base: OnlyIn
    only_in_new: OnlyIn
    incomplete: Mapping[str, Sequence[str]]
    """Names of images that are left out as incomplete, under `base` and `new`."""

    @property
    def differing(self) -> tuple[ComparedLayer, ...]:
        """The layers that differ."""
        return tuple(layer for layer in self.layers if layer.differing)

    @property
    def first(self) -> ComparedLayer | None:
        """The first layer that diverges."""
        return next(iter(self.differing), None)

    @property
    def channels(self) -> tuple[int, int]:
        """How many channels of all layers differ in some image, and how many there are."""
        return sum(one.differing for one in self.layers), sum(one.total for one in self.layers)

    @property
    def channel_images(self) -> tuple[int, int]:
        """The same, with each channel counted in each image."""
        counts = [layer.channel_images for layer in self.layers]
        return sum(differing for differing, _ in counts), sum(total for _, total in counts)

    @property
    def ratio(self) -> float:
        """Share of channels that differ, each counted in each image."""
        differing, total = self.channel_images
        return differing / total if total else 0.0

    @property
    def within(self) -> bool:
        """Whether no more channels differ than the thresholds allow."""
        return self.ratio <= self.thresholds.max_diff_ratio

    @property
    def equal(self) -> bool:
        """Whether the runs are equal, as far as the thresholds ask."""
        added = lines_of(self.only_in_new) and not self.thresholds.ignore_added
        return self.within and not lines_of(self.only_in_base) and not added

    @property
    def exit_code(self) -> int:
        """0, or 4 where the runs differ."""
        return 0 if self.equal else CHECK_FAILED

    @property
    def summary(self) -> str:
        """The whole result in a line."""
        differing, total = self.channels
        where = "" if self.first is None else f", first at {self.first.label} ({self.first.type})"
        tensors, images = counted(len(self.layers), "tensor"), counted(len(self.images), "image")
        share = f"{self.ratio:.2%}"
        if len(self.images) > 1:
            some, every = self.channel_images
            share = f"{some:,} of {every:,} counted in each image, {share}"
        return (
            f"{'equal' if self.equal else 'different'}: {tensors} of {images} compared, "
            f"{differing:,} of {counted(total, 'channel')} differ ({share}){where}"
        )

    @property
    def lists(self) -> dict[str, Sequence[str]]:
        """What only one run has, or has in part, under titles."""
        return {
            "Only in BASE": lines_of(self.only_in_base),
            "Only in NEW": lines_of(self.only_in_new),
            **{f"Incomplete in {side.upper()}": names for side, names in self.incomplete.items()},
        }
