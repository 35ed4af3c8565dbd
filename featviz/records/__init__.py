"""The passive data that stages hand to each other: frozen, with shapes and units on the fields."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from featviz.records.tables import (
    CLASS_MAPS,
    FORMATS,
    KINDS,
    PRESETS,
    REDUCTIONS,
    SALIENCY,
    SUFFIXES,
    PictureFormat,
    is_gradient,
    is_signed,
)
from featviz.records.types import (
    STAT_COLUMNS,
    UNLIKE_OUTPUTS,
    Bytes,
    Floats,
    GridPlan,
    Guess,
    Hints,
    ImageResult,
    Integers,
    Layer,
    Origin,
    Outcome,
    Place,
    Raster,
    RunResult,
    Sample,
    Shard,
    Site,
    Skip,
    TextTable,
    Tiles,
    finite,
)

if TYPE_CHECKING:
    from featviz.records.findings import (
        RECTIFIERS,
        Activation,
        Call,
        ComparedLayer,
        Comparison,
        DifferenceMap,
        OnlyIn,
        Part,
        Verdict,
    )


def __getattr__(name: str) -> Any:
    """What audits and comparisons find, which a plain run does not wait for."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(import_module("featviz.records.findings"), name)
