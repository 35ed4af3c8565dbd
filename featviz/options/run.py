"""The options of `run`, and the options that several commands share: model, input, and
drawing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct, field, structs

from featviz.errors import UsageError
from featviz.files.urls import Url
from featviz.options.fields import (
    DRAWING,
    GRADIENTS,
    INPUT,
    LAYERS,
    LIMITS,
    MODEL,
    OUTPUT,
    declared_options,
    every_option,
    option,
)
from featviz.options.values import (
    HPARAMS,
    Arguments,
    AutoInt,
    Captures,
    Channels,
    File,
    Folder,
    NonNegativeInt,
    Numbers,
    PositiveInt,
    RunLocation,
    Seed,
    Selectors,
    ShardNumber,
    Share,
    Size,
    Target,
    Texts,
    WeightsSource,
)
from featviz.records.tables import (
    ATTENTION_MAPS,
    BACKWARD,
    CLASS_MAPS,
    FORMATS,
    PRESETS,
    REDUCTIONS,
)
from featviz.text import safe_name

INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic", "lanczos")
"""How images are resized: the methods that torchvision has both for Pillow's images and
for tensors."""
PAD_GREY = 0.4
"""Default grey level between tiles: neither the black of a map's smallest value, nor the
grey (0.5) of a constant map."""

# options that several commands have
StageLayers = Annotated[
    Selectors | None,
    option(LAYERS, first=True, default_text="one layer for each stage"),
]
Overwrite = Annotated[bool, option(OUTPUT, first=True)]
NulSeparated = Annotated[bool, option(INPUT, flags=("-0", "--null"))]
TensorLayout = Annotated[Texts, option(DRAWING, "[SELECTORS=]LAYOUT")]
TensorBoard = Annotated[Folder | None, option(OUTPUT, "LOGDIR")]
Jobs = Annotated[PositiveInt | None, option(LIMITS, default_text="one a core")]


class ModelOptions(Struct, frozen=True):
    """The model, and how it is loaded."""

    spec: str
    """MODEL as the user typed it: `net.pth`, `net.py:make`, `timm:resnet50`, `hf:DIR`.
    """
    arch: Annotated[str | None, option(MODEL, "MODEL", first=True, is_path=True)] = None
    weights: Annotated[WeightsSource | None, option(MODEL, first=True)] = None
    seed: Annotated[Seed, option(MODEL)] = 0
    model_args: Annotated[
        Arguments, option(MODEL, first=True, flags=("--model-arg",))
    ] = field(default_factory=dict)
    hparams: bool = False
    """Whether the hyper_parameters of a Lightning checkpoint are passed to the function
    that builds the model. `model_args` of the same name override them."""
    trust: Annotated[bool, option(MODEL, first=True)] = False
    key: Annotated[str | None, option(MODEL, "KEY")] = None
    strip_prefix: Annotated[str | None, option(MODEL, "PREFIX")] = None
    ema: Annotated[bool | None, option(MODEL, default_text="no-ema")] = None
    partial: Annotated[bool, option(MODEL)] = False
    classes: Annotated[File | None, option(MODEL)] = None
    device: Annotated[str, option(MODEL, "DEVICE")] = "auto"

    def __post_init__(self) -> None:
        """Move `@hparams` from `model_args` to the field `hparams`."""
        # the record is frozen, but still being made here
        if HPARAMS in self.model_args:
            arguments = dict(self.model_args)
            del arguments[HPARAMS]
            structs.force_setattr(self, "model_args", arguments)
            structs.force_setattr(self, "hparams", True)


class InputOptions(Struct, frozen=True):
    """The user's choices for the model's input; None leaves a choice to the model."""

    preset: Annotated[
        str | None,
        option(
            INPUT,
            "PRESET",
            first=True,
            choices=PRESETS,
            default_text="as the model says, else imagenet",
        ),
    ] = None
    size: Annotated[Size | None, option(INPUT, first=True)] = None
    crop: Annotated[Size | None, option(INPUT)] = None
    interpolation: Annotated[str | None, option(INPUT, choices=INTERPOLATIONS)] = None
    mean: Annotated[Numbers | None, option(INPUT)] = None
    std: Annotated[Numbers | None, option(INPUT)] = None
    input_channels: Annotated[
        Annotated[int, Meta(ge=1, le=4096)] | None,
        option(INPUT, default_text="as the first convolution says"),
    ] = None
    background: Annotated[str, option(INPUT, "COLOUR")] = "white"
    frames: Annotated[
        PositiveInt | None, option(INPUT, default_text="16, else the first")
    ] = None
    input: Annotated[Texts, option(INPUT, "NAME=VALUE")] = ()
    images_per_pass: Annotated[
        PositiveInt | None, option(INPUT, default_text="as many as its forward takes")
    ] = None
    forward_args: Annotated[
        Texts, option(INPUT, "NAME=VALUE", flags=("--forward-arg",))
    ] = ()
    transform: Annotated[str | None, option(INPUT, "FUNCTION", is_path=True)] = None


class DrawOptions(Struct, frozen=True):
    """How maps become a picture. Options that torchvision has, too, have its names and
    meanings."""

    normalize: Annotated[str, option(DRAWING, "MODE", first=True)] = "auto"
    cmap: Annotated[str, option(DRAWING, "CMAP", first=True)] = "auto"
    # with torchvision's default of 8, 2048 maps of 7 x 7 make a strip of 74 x 2306 pixels
    nrow: Annotated[AutoInt, option(DRAWING, default_text="auto")] = None
    # None and 2 differ in the grey of the gaps, see `gap_grey`
    padding: Annotated[NonNegativeInt | None, option(DRAWING, default_text="2")] = None
    pad_value: Annotated[
        Share | None,
        option(DRAWING, "GREY", default_text=f"{PAD_GREY}, with padding 0"),
    ] = None
    scale: Annotated[AutoInt, option(DRAWING, default_text="auto")] = None
    min_tile: int = 32
    """Pixels that the longer side of a tile has at least if `scale` is None."""
    channels: Annotated[Channels | None, option(DRAWING, first=True)] = None
    max_slices: Annotated[PositiveInt, option(DRAWING)] = 16
    tensor_layout: TensorLayout = ()
    order: Annotated[Literal["index", "mean", "similarity"], option(DRAWING)] = "index"
    collapse: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | None, option(DRAWING, "R")
    ] = None
    labels: Annotated[bool, option(DRAWING, first=True)] = False
    marks: Annotated[bool, option(DRAWING)] = True
    overlay: Annotated[Share | None, option(DRAWING, "ALPHA")] = None
    reduce: Annotated[str | None, option(DRAWING, "REDUCTION", choices=REDUCTIONS)] = (
        None
    )
    figure: Annotated[bool, option(DRAWING)] = False
    # PNG is the only format from which levels are read back, for tooltips and comparisons
    format: Annotated[str, option(OUTPUT, choices=FORMATS)] = "png"
    flat: Annotated[bool, option(OUTPUT)] = False
    tensors: Annotated[str | None, option(OUTPUT, choices=("npy",))] = None

    @property
    def weighs(self) -> bool:
        """Whether each picture is a class activation map: it needs a layer's output and its
        gradient together."""
        return self.reduce in CLASS_MAPS

    @property
    def attends(self) -> bool:
        """Whether each picture is made from the attention weights up to a layer."""
        return self.reduce in ATTENTION_MAPS

    @property
    def gap(self) -> int:
        """Pixels between tiles and around them."""
        # make_grid's default
        return 2 if self.padding is None else self.padding

    @property
    def gap_grey(self) -> float:
        """Grey level of the gaps, and of cells without a map, 0..1. If only `padding` is
        set, it is make_grid's 0."""
        if self.pad_value is not None:
            return self.pad_value
        return PAD_GREY if self.padding is None else 0.0

    def check(self) -> None:
        """Refuse options that have no effect together with `reduce`.

        Raises:
            UsageError: `reduce` is set, and `order`, `collapse`, `labels` or `channels`
                differs from its default; for `pca` also `normalize` or `cmap`.
        """
        if self.reduce is None:
            return
        # an option with its default value may have been left out: it is allowed
        useless = ["order", "collapse", "labels", "channels"]
        if self.reduce == "pca":
            useless += ["normalize", "cmap"]
        for name in useless:
            if getattr(self, name) != declared_options(DrawOptions)[name].default:
                raise UsageError(
                    f"{name} and reduce={self.reduce} exclude each other",
                    "--reduce leaves one tile of all channels, of pca in colours of"
                    " its own",
                    options=(name, "reduce"),
                )


class PassOptions(Struct, frozen=True):
    """What happens while an image goes through the model, and back."""

    capture: Annotated[Captures, option(GRADIENTS, default_text="output")] = ("output",)
    target: Annotated[Target | None, option(GRADIENTS, default_text="top1")] = None
    grad_rule: Annotated[Literal["plain", "guided", "deconv"], option(GRADIENTS)] = (
        "plain"
    )
    ablate: Annotated[Texts, option(GRADIENTS, "SELECTORS:C,C")] = ()
    edit: Annotated[Texts, option(GRADIENTS, "SELECTORS:WHAT")] = ()
    seed: Seed = 0  # for noise; --seed, an option of the model, sets it, too

    @property
    def gradients(self) -> bool:
        """Whether a backward pass is wanted."""
        return not BACKWARD.isdisjoint(self.capture)

    @property
    def interventions(self) -> list[tuple[str, str]]:
        """All changes to the outputs of layers: first those of `ablate`, then those of
        `edit`. Each is the name of the option and the text."""
        ablations = [("ablate", text) for text in self.ablate]
        return ablations + [("edit", text) for text in self.edit]


class RunOptions(Struct, frozen=True):
    """All options of `run` except the model and the images."""

    layers: StageLayers = None
    out: Annotated[
        RunLocation, option(OUTPUT, "DIRECTORY", first=True, flags=("-o", "--out"))
    ] = Path("featviz-out")
    """A path; or a `files.urls.Url`, to which a copy of the run is uploaded."""
    overwrite: Overwrite = False
    resume: Annotated[bool, option(OUTPUT, first=True)] = False
    nul_separated: NulSeparated = False
    jobs: Jobs = None
    tensorboard: TensorBoard = None
    shard: Annotated[
        ShardNumber | None, option(LIMITS, default_text="that of torchrun or srun")
    ] = None
    draw: DrawOptions = DrawOptions()
    inputs: InputOptions = InputOptions()
    passes: PassOptions = PassOptions()

    @property
    def folder(self) -> Path:
        """The local folder of the run: `out`; or, if this is a URL, a folder with the
        URL's last name in the current folder."""
        if self.mirror:
            return Path(safe_name(self.out.name))
        return Path(self.out)

    @property
    def mirror(self) -> Url | None:
        """The URL to which a copy of the run is uploaded; None if `out` is a path."""
        return self.out if isinstance(self.out, Url) else None


def flag(name: str) -> str:
    """The name of an option of `run` on the command line.

    Args:
        name: its name in Python or in run.json. An unknown name, perhaps from a later
            version of featviz, gets dashes, too.
    """
    options = every_option(ModelOptions, RunOptions)
    if name in options:
        return options[name].flags[-1]
    return f"--{name.replace('_', '-')}"
