"""The passive data that stages hand to each other: frozen, with shapes and units on the fields."""

from featviz.records.choices import (
    CLASS_MAPS,
    FORMATS,
    KINDS,
    PRESETS,
    REDUCTIONS,
    SALIENCY,
    SUFFIXES,
    CaptureKind,
    InputPreset,
    PictureFormat,
    Reduction,
    is_gradient,
    is_signed,
)
from featviz.records.findings import RECTIFIERS, Activation, Call, Part, Role, Verdict
from featviz.records.layers import Hints, Layer, Origin, Place, Raster, Sample, Shard, Site
from featviz.records.results import (
    STAT_COLUMNS,
    UNLIKE_OUTPUTS,
    Bytes,
    ComparedLayer,
    Comparison,
    DifferenceMap,
    Floats,
    GridPlan,
    Guess,
    ImageResult,
    Integers,
    OnlyIn,
    Outcome,
    RunResult,
    Skip,
    TextTable,
    Tiles,
    finite,
)
