"""The options of all commands except `run`, declared as in `options.run`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from featviz.options.fields import (
    DRAWING,
    FINDINGS,
    GRADIENTS,
    INPUT,
    LAYERS,
    LIMITS,
    OPTIONS,
    OUTPUT,
    option,
)
from featviz.options.run import (
    DrawOptions,
    InputOptions,
    Jobs,
    NulSeparated,
    Overwrite,
    StageLayers,
    TensorBoard,
    TensorLayout,
)
from featviz.options.values import (
    AnyPath,
    Channels,
    File,
    Folder,
    Fraction,
    Names,
    NonNegativeInt,
    PositiveInt,
    RunLocation,
    Selectors,
    Share,
    Target,
    Texts,
)
from featviz.records.tables import ATTENTION_MAPS, CLASS_MAPS

MOST_TOP = 1000  # images of a channel that exemplars ranks


def _out(default_text: str = "") -> Meta:
    """Annotate --out; see `FieldNotes.default_text`."""
    flags = ("-o", "--out")
    return option(OUTPUT, first=True, flags=flags, default_text=default_text)


# An option of one name means the same in all commands; its help text and its default may
# differ.
OutFolder = Annotated[AnyPath, _out()]
BatchSize = Annotated[PositiveInt, option(LIMITS)]
Gates = Annotated[Texts, option(FINDINGS, "GATE", first=True)]
JUnit = Annotated[File | None, option(OUTPUT)]
FirstColormap = Annotated[str, option(DRAWING, "CMAP", first=True)]


class LookOptions(Struct, frozen=True):
    """All options of `look` except the model and the image."""

    layers: Annotated[
        Selectors | None,
        option(LAYERS, first=True, default_text="one for each stage, at most 10"),
    ] = None
    out: Annotated[File | None, _out("look-MODEL-IMAGE.png")] = None
    overwrite: Overwrite = False
    maps: Annotated[PositiveInt, option(LAYERS, first=True)] = 8
    channels: Annotated[Channels | None, option(LAYERS, first=True)] = None
    cmap: FirstColormap = "viridis"
    inputs: InputOptions = InputOptions()


class CamOptions(Struct, frozen=True):
    """All options of `cam` except the model and the images."""

    layers: Annotated[
        Selectors | None,
        option(LAYERS, first=True, default_text="what explains the target"),
    ] = None
    out: Annotated[AnyPath | None, _out(".")] = None
    """In Python, None writes nothing."""
    overwrite: Overwrite = False
    nul_separated: NulSeparated = False
    target: Annotated[
        Target | None,
        option(GRADIENTS, first=True, default_text="what is predicted"),
    ] = None
    method: Annotated[
        str,
        option(GRADIENTS, "METHOD", first=True, choices=(*CLASS_MAPS, *ATTENTION_MAPS)),
    ] = "gradcam"
    overlay: Annotated[Share, option(DRAWING, "ALPHA")] = 0.5
    cmap: Annotated[str, option(DRAWING, "CMAP")] = "auto"
    channels: Annotated[Channels | None, option(GRADIENTS, default_text="all")] = None
    tensor_layout: TensorLayout = ()
    jobs: Jobs = None
    inputs: InputOptions = InputOptions()


class FieldOptions(Struct, frozen=True):
    """All options of `field` except the model and the images."""

    layers: StageLayers = None
    also: Annotated[Texts, option(OPTIONS, "MODEL", first=True, is_path=True)] = ()
    out: Annotated[File | None, _out("field-MODEL.png")] = None
    """In Python, None writes nothing."""
    overwrite: Overwrite = False
    nul_separated: NulSeparated = False
    cmap: FirstColormap = "magma"
    inputs: InputOptions = InputOptions()


class ListOptions(Struct, frozen=True):
    """The options of `layers` except the model and its input."""

    layers: StageLayers = None
    functions: Annotated[bool, option(LAYERS, first=True)] = False
    tree: Annotated[bool, option(OUTPUT, first=True)] = False
    inputs: InputOptions = InputOptions()


class KernelOptions(Struct, frozen=True):
    """All options of `kernels` except the model."""

    layers: Annotated[
        Selectors | None, option(LAYERS, first=True, default_text="all convolutions")
    ] = None
    out: OutFolder = Path("featviz-kernels")
    overwrite: Overwrite = False
    all_slices: Annotated[bool, option(DRAWING, first=True)] = False
    tensorboard: TensorBoard = None
    # Weights have a sign, so zero is in the middle of the colours. Gaps are white, since
    # grey ones could not be seen between tiles around the middle grey.
    draw: DrawOptions = DrawOptions(normalize="symmetric", padding=4, pad_value=1.0)


class Thresholds(Struct, frozen=True):
    """Limits beyond which a channel has a finding."""

    # ReLU's zeros are exact; other activations need a limit
    eps: Annotated[Annotated[float, Meta(ge=0)], option(FINDINGS, "E")] = 0.0
    saturated_at: Annotated[Fraction, option(FINDINGS, "SHARE")] = 0.99
    redundant_at: Annotated[Fraction | None, option(FINDINGS, "R")] = None


class AuditOptions(Struct, frozen=True):
    """The options of `audit` except the model and the images."""

    layers: Annotated[
        Selectors | None,
        option(LAYERS, first=True, default_text="all activations, also functions"),
    ] = None
    inputs: InputOptions = InputOptions()
    batch_size: BatchSize = 1
    thresholds: Thresholds = Thresholds()
    prove: Annotated[bool, option(FINDINGS, first=True)] = False
    max_suspects: Annotated[NonNegativeInt, option(OUTPUT)] = 48
    out: OutFolder = Path("featviz-audit")
    overwrite: Overwrite = False
    nul_separated: NulSeparated = False
    fail_on: Gates = ()
    baseline: Annotated[File | None, option(FINDINGS, first=True)] = None
    junit: JUnit = None
    prune_out: Annotated[File | None, option(OUTPUT, first=True)] = None


class ExemplarOptions(Struct, frozen=True):
    """The options of `exemplars` except the model and the images."""

    layers: StageLayers = None
    top: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_TOP)], option(DRAWING, first=True)
    ] = 9
    rank_by: Annotated[Literal["max", "mean"], option(DRAWING, first=True)] = "max"
    channels: Annotated[
        Channels | None, option(LAYERS, first=True, default_text="all")
    ] = None
    per_class: Annotated[bool, option(DRAWING, first=True)] = False
    inputs: InputOptions = InputOptions()
    batch_size: BatchSize = 1
    out: OutFolder = Path("featviz-exemplars")
    overwrite: Overwrite = False
    nul_separated: NulSeparated = False


class DiffThresholds(Struct, frozen=True):
    """What counts as a difference."""

    tolerance: Annotated[Share, option(FINDINGS, "T", first=True)] = 1e-4
    """How far a value may change, measured as in `diff.compare.compare`. Another number of
    threads, or oneDNN, changed values by up to 3e-6 (ten of torchvision's models on two
    cores)."""
    max_diff_ratio: Annotated[Share, option(FINDINGS, "SHARE")] = 0.0
    ignore_added: Annotated[bool, option(FINDINGS)] = False
    fail_on: Gates = ()


class DiffModels(Struct, frozen=True):
    """Which layers of two models are compared, and how images become inputs."""

    layers: StageLayers = None
    inputs: InputOptions = InputOptions()


class DiffFiles(Struct, frozen=True):
    """The files that `diff` writes."""

    out: Annotated[Folder | None, _out("with --html, PAGE-maps beside the page")] = None
    html: Annotated[File | None, option(OUTPUT, first=True)] = None
    junit: JUnit = None
    overwrite: Overwrite = False


class ReportOptions(Struct, frozen=True):
    """The options of `report`."""

    out: Annotated[
        AnyPath | None, _out("RUN/report, RUN/report.html or RUN/report.zip")
    ] = None
    overwrite: Overwrite = False
    single_file: Annotated[bool, option(OPTIONS)] = False
    zip: Annotated[bool, option(OPTIONS)] = False
    compare: Annotated[RunLocation | None, option(OPTIONS, "RUN")] = None
    kernels: Annotated[AnyPath | None, option(OPTIONS, "DIR")] = None
    exemplars: Annotated[AnyPath | None, option(OPTIONS, "DIR")] = None
    audit: Annotated[AnyPath | None, option(OPTIONS, default_text="RUN/audit.json")] = (
        None
    )


class SheetOptions(Struct, frozen=True):
    """The options of `sheet`."""

    layers: Annotated[
        Selectors | None,
        option(LAYERS, first=True, default_text="the only layer of the runs"),
    ] = None
    images: Annotated[
        Names, option(INPUT, "NAMES", first=True, default_text="all")
    ] = ()
    channels: Annotated[
        Channels | None,
        option(LAYERS, first=True, default_text="all, of more than 24 top:24"),
    ] = None
    tensor: Annotated[
        str | None,
        option(LAYERS, "FILE", default_text="output of every call"),
    ] = None
    reduce: Annotated[Literal["pca"] | None, option(DRAWING, first=True)] = None
    similar_to: Annotated[str | None, option(DRAWING, "IMAGE@X,Y", first=True)] = None
    title: Annotated[str, option(DRAWING, "TEXT")] = ""
    width: Annotated[
        Annotated[float, Meta(gt=0, le=500)] | None,
        option(DRAWING, "N", first=True, default_text="that of the tiles"),
    ] = None
    dpi: Annotated[Annotated[int, Meta(ge=20, le=2400)], option(DRAWING)] = 100
    fps: Annotated[Annotated[float, Meta(ge=0.1, le=60)], option(DRAWING, "N")] = 4.0
    out: Annotated[File | None, _out("sheet.png")] = None
    """In Python, None writes nothing."""
    overwrite: Overwrite = False
