"""The passive data that stages hand to each other: frozen, with shapes and units on the fields."""

from featviz.records.channels import Activation, Call, Part, Role, Verdict
from featviz.records.layers import Hints, Layer, Sample, Site, Windows
from featviz.records.options import INTERVENTIONS, DrawOptions, Limits, PassOptions, Shard, Written
from featviz.records.results import (
    STAT_COLUMNS,
    Bytes,
    Capture,
    Floats,
    GridPlan,
    Guess,
    ImageResult,
    Outcome,
    RunResult,
    Skip,
    Tiles,
    finite,
)

__all__ = [
    "INTERVENTIONS",
    "STAT_COLUMNS",
    "Activation",
    "Bytes",
    "Call",
    "Capture",
    "DrawOptions",
    "Floats",
    "GridPlan",
    "Guess",
    "Hints",
    "ImageResult",
    "Layer",
    "Limits",
    "Outcome",
    "Part",
    "PassOptions",
    "Role",
    "RunResult",
    "Sample",
    "Shard",
    "Site",
    "Skip",
    "Tiles",
    "Verdict",
    "Windows",
    "Written",
    "finite",
]
