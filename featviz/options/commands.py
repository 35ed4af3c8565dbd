"""The options of the commands beside `run`, declared as those in `featviz.options` are."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from featviz.options import (
    FINDINGS,
    LAYERS,
    OVERLAY,
    TARGETS,
    AnyPath,
    Count,
    DrawOptions,
    File,
    Folder,
    Fraction,
    InputOptions,
    Place,
    Selectors,
    Share,
    Target,
    Texts,
    Whole,
    may_replace,
    of_files,
    of_grads,
    of_limits,
    of_maps,
    option,
    the_board,
    the_layers,
    the_layout,
    the_nul,
    the_out,
)
from featviz.records.tables import CLASS_MAPS

of_gates = partial(option, group=FINDINGS)
_JUNIT = of_files("Write the verdicts as JUnit XML into this file.")
_BATCH = of_limits("Pass up to N images of one shape through the model together.")
MOST_TOP = 1000

# fmt: off


class LookOptions(Struct, frozen=True):
    """All options of `look` beside the model and the image."""

    layers: Annotated[Selectors | None, the_layers(usual="one for each stage, at most 10")] = None
    out: Annotated[File | None, the_out("Write the picture into this PNG file, in place of an "
        "earlier picture of look.", usual="look-MODEL-IMAGE.png")] = None
    overwrite: Annotated[bool, may_replace("Replace any file in --out.")] = False
    maps: Annotated[Count, option("Show N maps of each layer.", group=LAYERS, first=True)] = 8
    cmap: Annotated[str, of_maps("Colour maps with this colormap.", "CMAP", True)] = "viridis"
    inputs: InputOptions = InputOptions()


class CamOptions(Struct, frozen=True):
    """All options of `cam` beside the model and the images."""

    layers: Annotated[Selectors | None, the_layers(usual="the last layer that gives maps")] = None
    out: Annotated[AnyPath | None, the_out("Write cam-IMAGE.png of each image into this folder; or "
        "the picture of one image into this PNG file.", usual=".")] = None
    """In Python, None writes nothing."""
    overwrite: Annotated[bool, may_replace("Replace any file in --out.")] = False
    nul_separated: Annotated[bool, the_nul] = False
    target: Annotated[Target | None, of_grads(
        f"Show evidence for this class, such as class:281 or class:tabby.\f Or for {TARGETS}",
        first=True, usual="the predicted class")] = None
    method: Annotated[str, of_grads("Make the map in this way; xgradcam and gradxact also show "
        "what speaks against the target.", first=True, choices=tuple(CLASS_MAPS))] = "gradcam"
    overlay: Annotated[Share, of_maps(OVERLAY, "ALPHA")] = 0.5
    cmap: Annotated[str, of_maps("Colour maps with auto (turbo; coolwarm for maps with a sign), "
        "grey, or a colormap of matplotlib.", "CMAP")] = "auto"
    tensor_layout: Annotated[Texts, the_layout] = ()
    inputs: InputOptions = InputOptions()


class ListOptions(Struct, frozen=True):
    """The options of `layers` beside the model and its input."""

    layers: Annotated[Selectors | None, option(
        "Mark the layers that these selectors match, as in `featviz run`.",
        first=True, group=LAYERS, usual="one layer for each stage")] = None
    functions: Annotated[bool, option("List functions, too.", group=LAYERS, first=True)] = False
    tree: Annotated[bool, of_files("Indent modules below their parents.", first=True)] = False
    inputs: InputOptions = InputOptions()


class KernelOptions(Struct, frozen=True):
    """Everything that `kernels` can be told beside the model."""

    layers: Annotated[Selectors | None, option(
        "Draw the convolutions that these selectors match, as in `featviz run`.",
        first=True, group=LAYERS, usual="all convolutions")] = None
    out: Annotated[AnyPath, the_out("Write the pictures into this folder.")] = (
        Path("featviz-kernels"))
    overwrite: Annotated[bool, may_replace("Replace the kernels in --out.")] = False
    all_slices: Annotated[bool, of_maps("Draw a tile for each input channel.", first=True)] = False
    tensorboard: Annotated[Folder | None, the_board] = None
    draw: DrawOptions = DrawOptions(normalize="symmetric")


class Thresholds(Struct, frozen=True):
    """Limits beyond which a channel has a finding."""

    eps: Annotated[Annotated[float, Meta(ge=0)], of_gates("Take values of at most E for zero, and "
        "values no further apart than E for equal.", "E")] = 0.0
    saturated_at: Annotated[Fraction, of_gates("Call a channel saturated where more than this "
        "share of its values is at a bound.", "SHARE")] = 0.99
    redundant_at: Annotated[Fraction | None, of_gates("Call channels redundant whose "
        "correlation with another is above R.", "R")] = None


class AuditOptions(Struct, frozen=True):
    """The options of `audit`, beside the model and the images."""

    layers: Annotated[Selectors | None, the_layers(usual="all activations, also functions")] = None
    inputs: InputOptions = InputOptions()
    batch_size: Annotated[Count, _BATCH] = 1
    thresholds: Thresholds = Thresholds()
    prove: Annotated[bool, of_gates("Run the images again without the channels that can go, and "
        "print by how much the output changes.", first=True)] = False
    max_suspects: Annotated[Whole, of_files("Draw at most N channels with a finding.")] = 48
    out: Annotated[AnyPath, the_out("Write the results into this folder.")] = Path("featviz-audit")
    overwrite: Annotated[bool, may_replace("Replace the audit in --out, and any files.")] = False
    nul_separated: Annotated[bool, the_nul] = False
    fail_on: Annotated[Texts, of_gates("End with exit code 4 if this gate is broken: dead>5%, "
        "nonfinite>0, 'layer3.*:constant>2'; repeatable.", "GATE", True)] = ()
    baseline: Annotated[File | None, of_gates("End with exit code 4 if findings are worse than in "
        "this earlier audit.json.", first=True)] = None
    junit: Annotated[File | None, _JUNIT] = None
    prune_out: Annotated[File | None, of_files("Write the channels that can be cut out into this "
        "JSON file: {layer: [channels]}.", first=True)] = None


class ExemplarOptions(Struct, frozen=True):
    """The options of `exemplars` beside the model and the images."""

    layers: Annotated[Selectors | None, the_layers(usual="one layer for each stage")] = None
    top: Annotated[Annotated[int, Meta(ge=1, le=MOST_TOP)], of_maps(
        "Show N images of each channel.", first=True)] = 9
    pick: Annotated[Literal["max", "mean"], of_maps("Rank images by the largest value, or by the "
        "mean of the map.\f The picture shows what the unit with the largest value sees, or with "
        "mean the whole image.", first=True)] = "max"
    per_class: Annotated[bool, of_maps("Choose the images of each class apart; the class of an "
        "image is the name of its folder.", first=True)] = False
    inputs: InputOptions = InputOptions()
    batch_size: Annotated[Count, _BATCH] = 1
    out: Annotated[AnyPath, the_out("Write the pictures and exemplars.json into this folder.")] = (
        Path("featviz-exemplars"))
    overwrite: Annotated[bool, may_replace("Replace the exemplars in --out.")] = False
    nul_separated: Annotated[bool, the_nul] = False


class DiffThresholds(Struct, frozen=True):
    """What counts as a difference."""

    tolerance: Annotated[Share, option("Accept relative differences up to T.", "T")] = 1e-4
    """How far a value may change, in the terms of `diff.compare.compare`. Threads and oneDNN moved
    values by up to 3e-6 (ten of torchvision's models on two cores)."""
    max_diff_ratio: Annotated[Share, option("Accept that up to this share of all channels, each "
        "counted in each image, differs, 0..1.", "SHARE")] = 0.0
    ignore_added: Annotated[bool, option("Accept layers and images that only NEW has.")] = False


class DiffFiles(Struct, frozen=True):
    """What `diff` writes."""

    out: Annotated[Folder | None, the_out("Write difference maps and diff.json into this folder.",
        usual="with --html, PAGE-maps beside the page")] = None
    html: Annotated[File | None, of_files("Write an HTML page into this file.")] = None
    junit: Annotated[File | None, _JUNIT] = None
    overwrite: Annotated[bool, may_replace("Replace any file at --html and --junit.")] = False


class ReportOptions(Struct, frozen=True):
    """The options of `report`."""

    out: Annotated[AnyPath | None, the_out(
        "Write the report into this folder, or with --single-file or --zip into this file.",
        usual="RUN/report, RUN/report.html or RUN/report.zip")] = None
    overwrite: Annotated[bool, may_replace("Replace any file that is in --out.")] = False
    single_file: Annotated[bool, option("Write one HTML file, of large runs fewer tiles.")] = False
    zip: Annotated[bool, option("Write one zip file of the report and its pictures.")] = False
    compare: Annotated[Place | None, option(
        "Show the pictures of this other run beside those of RUN.", "RUN")] = None
    kernels: Annotated[AnyPath | None, option("Show the kernels in this folder, which featviz "
        "kernels wrote, with their channels.", "DIR")] = None
    exemplars: Annotated[AnyPath | None, option("Show the pictures in this folder, which featviz "
        "exemplars wrote, with their channels.", "DIR")] = None
    audit: Annotated[AnyPath | None, option("Show the findings of this audit.json, or of the one "
        "in this folder with the pictures of its suspects.", usual="RUN/audit.json")] = None


class SheetOptions(Struct, frozen=True):
    """The options of `sheet`."""

    layer: Annotated[str, option("Draw the layer of this qualified name.", "NAME")]
    stem: Annotated[str, option("Cut the tiles from this picture of the layer: its file name "
        "without the ending, such as output.call1 or output.boxes.", "FILE", flags=("--tensor",),
    )] = "output"
    pick: Annotated[str | None, option("Show these channels.", "0-31,40", usual="all drawn")] = None
    order: Annotated[Literal["index", "mean", "max", "variance", "zeros"], option("Sort channels "
        "by number, or by a statistic averaged over the images, largest first.")] = "index"
    transpose: Annotated[bool, option("Draw images as rows and channels as columns.")] = False
    out: Annotated[
        File | None, the_out("Write the sheet into this PNG file.", usual="sheet-NAME.png")] = None
    overwrite: Annotated[bool, may_replace("Replace any file in --out.")] = False
