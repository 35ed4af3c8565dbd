"""Which images are exemplars of a channel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from featviz.records.options import Within

MOST_TOP = 1000
"""The largest number of exemplars of a channel."""


@dataclass(frozen=True)
class ExemplarChoice:
    """How the images that excite a channel most are chosen."""

    top: Annotated[int, Within(1, MOST_TOP)] = 9
    """Images that are shown of each channel."""
    by: Literal["max", "mean"] = "max"
    """What of a channel's map counts: its largest value, whose place is shown, or its mean, for
    which the whole image is."""
    per_class: bool = False
    """Choose images of each class apart: a class is the name of the folder that holds an image."""
