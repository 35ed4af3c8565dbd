"""Every option, declared once: its type, bounds, default, words and group.

A field of these records is an option of the command line, a keyword of the Python API, a key of a
TOML file, and what run.json records. `read` checks a value for all of them, in one set of words.
"""

from __future__ import annotations

import ast
import difflib
import math
import re
from collections import abc
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from os import PathLike, fspath
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct, field, structs

from featviz.errors import UsageError
from featviz.files.urls import Url, is_url, refuse_url
from featviz.records.tables import CLASS_MAPS, FORMATS, KINDS, PRESETS, REDUCTIONS, is_gradient
from featviz.records.types import Shard
from featviz.text import quoted

T = TypeVar("T", bound=Struct)

GROUPS = (
    *("Options", "Which layers", "What is read", "The model", "How maps are drawn", "Other views"),
    *("Gradients", "Changes inside the model", "Findings and gates", "What is written", "Limits"),
    *("Several machines", "General"),
)
"""Headings of groups of options, in the order in which help shows them. The first is for the few
that a short command alone has."""

OPTIONS, LAYERS, READ, MODEL, DRAWING, VIEWS, GRADIENTS, INTERVENTIONS, FINDINGS = GROUPS[:9]
OUTPUT, LIMITS, MACHINES, GENERAL = GROUPS[9:]

LONGEST_SIDE = 2**16
"""Pixels; no image is larger, and its tensor would not fit into memory."""

INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic", "lanczos")
"""How pixels are computed when an image is resized: values of torchvision's InterpolationMode that
both pictures of Pillow and tensors take."""

PAD_GREY = 0.4
"""Between tiles unless the user says otherwise: neither the black in which maps begin, nor the grey
(0.5) of a constant map."""

MOST_TOP = 1000

HPARAMS = "@hparams"
"""An argument of a model: all those that a Lightning checkpoint holds."""

# What makes values of what was given; each raises ValueError where it cannot


def _as(kind: Any, given: Any) -> Any:
    """A value of a type, also from its text; numbers of numpy and torch are Python's."""
    plain = given
    if getattr(given, "ndim", None) == 0 and hasattr(given, "item"):
        plain = given.item()
    for number in (float, int) if isinstance(given, str) else ():
        with suppress(ValueError):
            plain = number(given)  # for msgspec `.5` is no number
    value = msgspec.convert(plain, kind, strict=not isinstance(plain, str))
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(given)
    return value


def _parts(given: Any) -> list[Any]:
    """The parts of a list, each of which may be a list in a text: `224x224`, `.5,.5`, `1 2`."""
    if isinstance(given, str):
        return re.split(r"[\s,x×]+", given.strip().lower())
    several = given if hasattr(given, "__len__") else [given]
    return [part for one in several for part in (_parts(one) if isinstance(one, str) else [one])]


def _size(given: Any) -> int | tuple[int, int]:
    """Pixels: `224`, (height, width), `"224x320"`, `"224,320"`."""
    side = Annotated[int, Meta(ge=1, le=LONGEST_SIDE)]
    sides = [_as(side, part) for part in _parts(given)]
    if len(sides) not in (1, 2):
        raise ValueError(given)
    return sides[0] if len(sides) == 1 else (sides[0], sides[1])


def _numbers(given: Any) -> tuple[float, ...]:
    """`0.5`, a sequence, `".5,.5,.5"`."""
    return tuple(_as(float, part) for part in _parts(given))


def _captures(given: Any) -> tuple[str, ...]:
    names = [name for name in _parts(given) if name]
    if not names or not set(names) <= set(KINDS):
        raise ValueError(given)
    return tuple(dict.fromkeys(names))


def _auto(given: Any) -> int | None:
    return None if str(given).lower() == "auto" else _as(Count, given)


def _path(given: Any, is_dir: bool | None = None) -> Path:
    """A path, of a folder or a file if anything is there."""
    if not isinstance(given, (str, PathLike)) or "\0" in str(given):
        raise ValueError(given)
    refuse_url(fspath(given))
    path = Path(given)
    try:
        is_wrong = is_dir is not None and path.exists() and path.is_dir() is not is_dir
    except OSError as error:
        raise UsageError(f"{quoted(str(path))}: {error.strerror}", "name another place") from error
    if is_wrong:
        raise ValueError(given)
    return path


def _place(given: Any) -> Any:
    if isinstance(given, Url):
        return given
    return Url.of_run(given) if isinstance(given, str) and is_url(given) else _path(given)


def _shard(given: Any) -> Shard:
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", str(given))
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(given)
    return Shard(int(match[1]) - 1, int(match[2]))


def _tensors(given: Any) -> str | None:
    return ("npy" if given else None) if isinstance(given, bool) else _known_word(given, ["npy"])


_INDEXED = re.compile(r"(?<![^,!\s])([A-Z]\w*|fn:\w+)\[(-?\d{1,9}|[-\d]*:[-:\d]*)\](?=\s*(?:,|$))")
"""A class or function with an index as in Python, `Conv2d[0]`."""


def _selectors(given: Any) -> str:
    return _INDEXED.sub(r"\1#\2", given if isinstance(given, str) else ",".join(given))


def _format(given: Any) -> str:
    return _known_word("jpg" if str(given).lower() == "jpeg" else given, FORMATS)


def _target(given: Any) -> str:
    text = given.strip() if isinstance(given, str) else str(_as(Annotated[int, Meta(ge=0)], given))
    return f"class:{text}" if re.fullmatch(r"[0-9]{1,9}", text) else text


def _weights(given: Any) -> str:
    text: str = fspath(given)
    return text.lower() if text.lower() in ("none", "default") else text


def _arguments(given: Any) -> Mapping[str, Any]:
    """`key=value` texts, whose values are Python literals, else text; or a mapping."""
    if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        return given
    arguments: dict[str, Any] = {}
    for pair in [given] if isinstance(given, str) else given:
        key, equals, value = str(pair).partition("=")
        if pair == HPARAMS:
            key, value = pair, "True"
        elif not equals or not key.isidentifier():
            raise ValueError(given)
        try:
            arguments[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            arguments[key] = value
    return arguments


def _known_word(given: Any, choices: Collection[str]) -> str:
    """The choice that is meant, without regard to case."""
    found = [choice for choice in choices if choice.lower() == str(given).strip().lower()]
    if len(found) != 1 or not isinstance(given, str):
        raise ValueError(given)
    return found[0]


LISTS = (_size, _numbers, _captures, _selectors)
"""Readers of lists, of which each part may be an option of its own."""

# What a field takes


def _takes(metavar: str, expects: str, read: Callable[[Any], Any]) -> Meta:
    """The annotation of a type: what its values are called in help and in errors, and what makes
    them of what was given."""
    return Meta(extra={"metavar": metavar, "expects": expects, "read": read})


def _option(
    words: str, metavar: str = "", first: bool = False, *, group: str = OPTIONS, **extra: Any
) -> Meta:
    """The annotation of a field, beside its type and bounds.

    Args:
        words: for help; what stands behind a form feed is for `--help-all` alone.
        first: whether `--help` of a long command shows it.
        extra: fields of Option: `flags` on the command line, where they are not the name;
            `usual`, the default in words; `choices`; `expects`.
    """
    extra |= {"metavar": metavar} if metavar else {}
    return Meta(description=words, extra={"group": group, "first": first, **extra})


Count = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_PIXELS = f"pixels from 1 to {LONGEST_SIDE}, such as 224 or 224x320"
Size = Annotated[int | tuple[int, int], _takes("PIXELS", _PIXELS, _size)]
Numbers = Annotated[tuple[float, ...], _takes("N,N,N", "numbers, such as 0.5,0.5,0.5", _numbers)]
Auto = Annotated[int | None, _takes("N", "an integer ≥ 1, or auto", _auto)]
Place = Annotated[Any, _takes("PATH", "a path, or a URL of a store", _place)]
AnyPath = Annotated[Path, _takes("PATH", "a path", _path)]
File = Annotated[Path, _takes("FILE", "a file, not a folder", partial(_path, is_dir=False))]
Folder = Annotated[Path, _takes("FOLDER", "a folder, not a file", partial(_path, is_dir=True))]
Selectors = Annotated[str, _takes("SELECTORS", "selectors, such as Conv2d,layer1.*", _selectors)]
Target = Annotated[str, _takes("TARGET", "a target, such as class:281 or mean", _target)]
Texts = tuple[str, ...]

_model, _input = partial(_option, group=MODEL), partial(_option, group=READ)
_draw, _view = partial(_option, group=DRAWING), partial(_option, group=VIEWS)
_grad, _change = partial(_option, group=GRADIENTS), partial(_option, group=INTERVENTIONS)
_find, _write = partial(_option, group=FINDINGS), partial(_option, group=OUTPUT)
_limit = partial(_option, group=LIMITS)
_layers = partial(
    _option,
    "Take layers by class or name, such as Conv2d,ReLU or 'layer1.*'.\f Selectors are class names, "
    "globs, re:REGEX, CLASS@GLOB, fn:FUNCTION, SELECTOR#INDEX, !NOT; commas separate them.",
    first=True,
    group=LAYERS,
)
_out = partial(_option, group=OUTPUT, first=True, flags=("-o", "--out"))
_replace = partial(_write, first=True)


def _named(records: Mapping[str, Any], words: str, mark: str = ": ") -> str:
    """A table in a help text: `mean: their mean; max: their maximum`."""
    return "; ".join(f"{name}{mark}{getattr(one, words)}" for name, one in records.items())


_nul = _input(
    "Read paths that end with NUL, as `find -print0` writes them, where IMAGE is -.",
    flags=("-0", "--null"),
)
_junit = _write("Write the verdicts as JUnit XML into this file.")
_layout = _draw(
    "Read tensors in this layout instead of the guessed one: {LAYOUTS}. tokens:14x20+1 names the "
    "grid of the tokens, behind one other token; tokens:14x20+1,10 has ten behind it, too. "
    "Repeatable.",
    "[SELECTORS=]LAYOUT",
)
_batch = _limit("Pass up to N images of one shape through the model together.")
_board = _write(
    "Also write grids and histograms for TensorBoard into a folder of this one, named like --out.",
    "LOGDIR",
)
_targets = (
    "top1, class:N, class:NAME, sum, mean, norm, output[KEY]:sum|mean|norm, layer:NAME or "
    "layer:NAME:CHANNEL."
)
_overlay = "Blend each map with the input: 0 shows the input alone, 1 the map alone."


# fmt: off
# The model, and what it gets


class ModelOptions(Struct, frozen=True):
    """The model, and how it is loaded."""

    spec: str
    arch: Annotated[str | None, _model("Build this architecture, such as resnet50 or net.py:Net, "
        "for a file of weights.\f A LoRA adapter needs it, too.", "MODEL", True)] = None
    weights: Annotated[str | None, _model(
        "Load weights: default, none (random) or a file.\f {WEIGHTS}.", "WEIGHTS", True,
        read=_weights, expects="default, none, a weights entry or a file")] = None
    seed: Annotated[Seed, _model("Seed the random numbers of random weights and of noise.")] = 0
    model_args: Annotated[Mapping[str, Any], _model(
        "Pass this to the factory of the model; repeatable.\f Builders take it, too. "
        "@hparams passes the hyper_parameters of a Lightning checkpoint.", "KEY=VALUE",
        flags=("--model-arg",), read=_arguments, many=True, expects="KEY=VALUE, or a mapping",
    )] = field(default_factory=dict)
    hparams: bool = False
    """Pass a Lightning checkpoint's hyper_parameters to the factory, too; `model_args` win."""
    trust: Annotated[bool, _model("Trust MODEL: let a pickled model run any code.\f Classes "
        "may be in the current folder and the folder of the file.")] = False
    key: Annotated[str | None, _model("Take the weights at this key of a checkpoint.", "KEY")] = (
        None)
    strip_prefix: Annotated[
        str | None, _model("Remove this prefix from the names of weights.", "PREFIX")] = None
    ema: Annotated[bool | None, _model("Take the averaged (EMA) weights of a checkpoint, or the "
        "plain ones.", usual="no-ema")] = None
    partial: Annotated[bool, _model("Load the weights that fit, and leave the others out.")] = False
    device: Annotated[
        str, _model("Run the model on auto, cpu, cuda, cuda:N or mps.", "DEVICE")] = "auto"

    def __post_init__(self) -> None:
        """`@hparams` among the arguments is an argument of its own."""
        if HPARAMS in self.model_args:
            own = {name: v for name, v in self.model_args.items() if name != HPARAMS}
            structs.force_setattr(self, "model_args", own)
            structs.force_setattr(self, "hparams", True)


class InputOptions(Struct, frozen=True):
    """The user's choices for the model's input; None leaves a choice to the model."""

    preset: Annotated[str | None, _input(f"Prepare images as these models want them. "
        f"{_named(PRESETS, 'words')}.", choices=tuple(PRESETS),
        usual="as the model says, else imagenet")] = None
    size: Annotated[Size | None, _input("Resize the shorter side of images to N pixels, or images "
        "to HxW.\f A YOLO's longer side becomes N.", first=True)] = None
    crop: Annotated[Size | None, _input("Then crop the centre to NxN or HxW pixels.")] = None
    interpolation: Annotated[
        str | None, _input("Resize images in this way.", choices=INTERPOLATIONS)] = None
    mean: Annotated[Numbers | None, _input("Subtract these means from the channels (0..1).")] = None
    std: Annotated[Numbers | None, _input("Then divide by these standard deviations.")] = None
    channels: Annotated[Annotated[int, Meta(ge=1, le=4096)] | None, _input(
        "Read images as greyscale (1) or RGB (3), or files of N channels (.npy, .npz, .pt, .tif, "
        "or pictures with alpha).", usual="as the first convolution says")] = None
    background: Annotated[str, _input("Put this below transparent images.", "COLOUR")] = "white"
    frames: Annotated[Count | None, _input("Take N frames of each clip, for video models; of a "
        "video file also for others, as N images.", usual="16, else the first")] = None
    input: Annotated[Texts, _input(
        "Give the model this tensor in place of an image: randn:1,128 (random numbers of --seed), "
        "zeros:1,128, or a file (.npy, .npz, .pt). NAME is a parameter of its forward; repeatable.",
        "NAME=VALUE")] = ()
    inputs: Annotated[
        Count | None, _input("Pass N images to a forward.", usual="as its arguments say")] = None
    forward_args: Annotated[Texts, _input(
        "Pass this to the model's forward, too: a number, true, false, none, zeros:1,77, "
        "ones:1,77:int64, randn:1,9, a file (.npy, .npz, .pt), or image; NAME.KEY=VALUE fills a "
        "dict; repeatable.", "NAME=VALUE", flags=("--forward-arg",))] = ()
    transform: Annotated[str | None, _input(
        "Prepare images with this function (file.py:fn or pkg.mod:fn): from a PIL image or an "
        "array to a tensor [C, H, W], or to a dict of arguments of the model.", "FUNCTION")] = None


# How maps are drawn


class DrawOptions(Struct, frozen=True):
    """How maps become a picture; names and meanings are torchvision's where it has the option."""

    normalize: Annotated[str, _draw(
        "Scale values to brightness: map, layer, symmetric, range:LO,HI, percentile:LO,HI, none.\f "
        "Modes are {MODES}; auto: map, for gradients symmetric-percentile:99.", "MODE", True,
    )] = "auto"
    cmap: Annotated[str, _draw("Colour maps with grey, viridis, coolwarm or another colormap of "
        "matplotlib.\f Auto means grey, for gradients coolwarm.", "CMAP", True)] = "auto"
    nrow: Annotated[Auto, _draw("Put N maps in a row; auto makes a square.", usual="auto")] = None
    padding: Annotated[
        Annotated[int, Meta(ge=0)] | None, _draw("Leave N pixels around maps.", usual="2")] = None
    pad_value: Annotated[Share | None, _draw("Fill the pixels around maps with this grey, from 0 "
        "(black) to 1 (white).", "GREY", usual=f"{PAD_GREY}, with padding 0")] = None
    scale: Annotated[
        Auto, _draw("Enlarge maps N times; auto those below 32 pixels.", usual="auto")] = None
    min_tile: int = 32
    """Pixels that the longer side of a tile should have, for `scale=None`."""
    max_maps: Annotated[Count | None, _draw("Draw at most N maps of each layer.", first=True)] = (
        None)
    max_slices: Annotated[Count, _draw("Draw at most N slices of each map of a clip, volume or "
        "batch: evenly spread ones, of a batch the first.")] = 16
    tensor_layout: Annotated[Texts, _layout] = ()
    pick: Annotated[Literal["first", "top", "spread"], _draw("With max_maps, draw the first maps, "
        "those of highest mean, or evenly spread ones.")] = "first"
    order: Annotated[Literal["index", "mean", "similarity"], _draw(
        "Sort tiles by channel, by mean (largest first), or by similarity.")] = "index"
    collapse: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, _draw(
        "Draw maps that correlate by R or more, such as 0.98, as one tile, marked ×N.", "R")] = None
    labels: Annotated[bool, _draw("Write the channel on each tile.")] = False
    marks: Annotated[bool, _draw("Cross out maps of zeros, strike through other constant ones, "
        "and draw a strip of values where all are constant; or draw only the maps.")] = True
    overlay: Annotated[Share | None, _view(_overlay, "ALPHA")] = None
    reduce: Annotated[str | None, _view(f"Draw one picture of all channels. "
        f"{_named(REDUCTIONS, 'help')}.", "REDUCTION", choices=tuple(REDUCTIONS))] = None
    figure: Annotated[bool, _view("Also draw a figure with title, input and colour bar.")] = False
    format: Annotated[str, _write(f"Write pictures in this format: "
        f"{_named(FORMATS, 'words', ', ')}.", choices=tuple(FORMATS), read=_format)] = "png"
    flat: Annotated[bool, _write(
        "Write an image's pictures into one folder: cat__004_layer1.0.conv1.png.")] = False
    tensors: Annotated[str | None, _write(
        "Also keep the raw tensors, in this format.", choices=("npy",), read=_tensors)] = None

    @property
    def weighs(self) -> bool:
        """Whether each picture is a class activation map, which takes a layer's output and its
        gradient together."""
        return self.reduce in CLASS_MAPS

    @property
    def gap(self) -> int:
        """Pixels between tiles and around them."""
        return 2 if self.padding is None else self.padding

    @property
    def gap_grey(self) -> float:
        """Grey level of the gaps, and of cells that no map is for, 0..1: make_grid's 0 where
        `padding` is given."""
        if self.pad_value is not None:
            return self.pad_value
        return PAD_GREY if self.padding is None else 0.0

    def check(self) -> None:
        """Refuse options that would do nothing beside `reduce`."""
        if self.reduce is None:
            return
        names = ["order", "collapse", "labels", "max_maps"]
        names += ["normalize", "cmap"] if self.reduce == "pca" else []
        for name in names:
            if getattr(self, name) != declared(DrawOptions)[name].default:
                raise UsageError(
                    f"{name} and reduce={self.reduce} exclude each other",
                    "reduce leaves one tile of all channels, of pca in colours of its own",
                )


class PassOptions(Struct, frozen=True):
    """What happens while an image goes through the model, and back."""

    capture: Annotated[Texts, _grad(
        f"Draw these tensors of each layer: {', '.join(kind.help for kind in KINDS.values())}.",
        "KINDS", usual="output", read=_captures, expects=f"some of {', '.join(KINDS)}",
    )] = ("output",)
    target: Annotated[
        Target | None, _grad(f"Take gradients of this value: {_targets}", usual="top1")] = None
    grad_rule: Annotated[Literal["plain", "guided", "deconv"], _grad(
        "Pass gradients through ReLUs by this rule.")] = "plain"
    ablate: Annotated[Texts, _change(
        "Set these channels of the outputs of layers to zero; repeatable.", "SELECTORS:C,C")] = ()
    edit: Annotated[Texts, _change(
        "Then change outputs: 'conv1:channel 3,5-7*2' multiplies channels, 'relu:clamp=0,6' "
        "limits values, 'conv1:noise=0.1' adds Gaussian noise, 'layer4:grad*0.5' multiplies "
        "gradients; repeatable.", "SELECTORS:WHAT")] = ()
    seed: Seed = 0

    @property
    def gradients(self) -> bool:
        """Whether a backward pass is wanted."""
        return any(is_gradient(kind) for kind in self.capture)

    @property
    def interventions(self) -> list[tuple[str, str]]:
        """All changes to the outputs of layers, in order: `ablate` or `edit`, and the text."""
        return [("ablate", text) for text in self.ablate] + [("edit", text) for text in self.edit]


# The commands


class RunOptions(Struct, frozen=True):
    """All options of `run` beside the model and the images."""

    layers: Annotated[Selectors | None, _layers(usual="one layer for each stage")] = None
    out: Annotated[Place, _out("Write the run into this folder.\f A URL is a place in an object "
        "store (s3://bucket/maps).", "DIRECTORY")] = Path("featviz-out")
    """A path, or the `files.urls.Url` below which a run is written in an object store."""
    overwrite: Annotated[bool, _replace("Replace the run in --out.")] = False
    resume: Annotated[bool, _write("Continue the run in --out where it stopped.")] = False
    nul_separated: Annotated[bool, _nul] = False
    jobs: Annotated[Count | None, _limit(
        "Encode pictures in N threads.", usual="a quarter of the cores, at least 2")] = None
    tensorboard: Annotated[Folder | None, _board] = None
    shard: Annotated[Shard | None, _option(
        "Draw only part I of N parts of the images; all parts may write into one --out.", "I/N",
        usual="that of torchrun or srun", group=MACHINES, read=_shard,
        expects="I/N with I from 1 to N, such as 2/8",
    )] = None
    draw: DrawOptions = DrawOptions()
    inputs: InputOptions = InputOptions()
    passes: PassOptions = PassOptions()


class LookOptions(Struct, frozen=True):
    """All options of `look` beside the model and the image."""

    layers: Annotated[Selectors | None, _layers(usual="one layer for each stage, at most 10")] = (
        None)
    out: Annotated[File | None, _out("Write the picture into this PNG file, in place of an "
        "earlier picture of look.", usual="look-MODEL-IMAGE.png")] = None
    overwrite: Annotated[bool, _replace("Replace any file in --out.")] = False
    nul_separated: Annotated[bool, _nul] = False
    maps: Annotated[Count, _option("Show N maps of each layer.", group=LAYERS, first=True)] = 8
    pick: Annotated[Literal["deviation", "value"], _option(
        "Show the maps whose values vary most from place to place, or those of highest mean.",
        group=LAYERS, first=True)] = "deviation"
    cmap: Annotated[
        str, _draw("Colour maps with grey, or a colormap of matplotlib.", "CMAP", True)] = "viridis"
    inputs: InputOptions = InputOptions()


class CamOptions(Struct, frozen=True):
    """All options of `cam` beside the model and the images."""

    layers: Annotated[Selectors | None, _layers(usual="the last layer that gives maps")] = None
    out: Annotated[AnyPath | None, _out("Write cam-IMAGE.png of each image into this folder; or "
        "the picture of one image into this PNG file.", usual=".")] = None
    """In Python, None writes nothing."""
    overwrite: Annotated[bool, _replace("Replace any file in --out.")] = False
    nul_separated: Annotated[bool, _nul] = False
    target: Annotated[Target | None, _grad(
        f"Show the evidence for this class, such as class:281 or class:tabby.\f Or for {_targets}",
        first=True, usual="the predicted class")] = None
    method: Annotated[str, _grad("Make the map in this way; xgradcam and gradxact also show what "
        "speaks against the target.", first=True, choices=tuple(CLASS_MAPS))] = "gradcam"
    overlay: Annotated[Share, _draw(_overlay, "ALPHA")] = 0.5
    cmap: Annotated[str, _draw("Colour maps with auto (turbo; coolwarm for maps with a sign), "
        "grey, or a colormap of matplotlib.", "CMAP")] = "auto"
    tensor_layout: Annotated[Texts, _layout] = ()
    inputs: InputOptions = InputOptions()


class ListOptions(Struct, frozen=True):
    """The options of `layers` beside the model and its input."""

    layers: Annotated[Selectors | None, _option(
        "Mark the layers that these selectors match, as in `featviz run`.",
        first=True, group=LAYERS, usual="one layer for each stage")] = None
    functions: Annotated[bool, _option(
        "Also list the functions that modules call.", group=LAYERS, first=True)] = False
    tree: Annotated[bool, _write("Indent modules below those that hold them.", first=True)] = False
    inputs: InputOptions = InputOptions()


class KernelOptions(Struct, frozen=True):
    """Everything that `kernels` can be told beside the model."""

    layers: Annotated[Selectors | None, _option(
        "Draw the convolutions that these selectors match, as in `featviz run`.",
        first=True, group=LAYERS, usual="all convolutions")] = None
    out: Annotated[AnyPath, _out("Write the pictures into this folder.")] = Path("featviz-kernels")
    overwrite: Annotated[bool, _replace("Replace the kernels in --out.")] = False
    all_slices: Annotated[bool, _draw(
        "Draw a tile for each input channel, in rows of output channels.", first=True)] = False
    tensorboard: Annotated[Folder | None, _board] = None
    draw: DrawOptions = DrawOptions(normalize="symmetric")


class Thresholds(Struct, frozen=True):
    """Limits beyond which a channel has a finding."""

    eps: Annotated[Annotated[float, Meta(ge=0)], _find("Take values of at most E for zero, and "
        "values no further apart than E for equal.", "E")] = 0.0
    saturated_at: Annotated[Annotated[float, Meta(gt=0, lt=1)], _find("Call a channel saturated "
        "where more than this share of its values is at a bound.", "SHARE")] = 0.99
    redundant_at: Annotated[Annotated[float, Meta(gt=0, lt=1)] | None, _find(
        "Look for redundant channels, whose correlation with another is above R.", "R")] = None


class AuditOptions(Struct, frozen=True):
    """The options of `audit`, beside the model and the images."""

    layers: Annotated[Selectors | None, _layers(usual="all activations, functions included")] = None
    inputs: InputOptions = InputOptions()
    batch_size: Annotated[Count, _batch] = 1
    thresholds: Thresholds = Thresholds()
    prove: Annotated[bool, _find("Run the images again without the channels that can be cut out, "
        "and print by how much the output changes.", first=True)] = False
    max_suspects: Annotated[Annotated[int, Meta(ge=0)], _write(
        "Draw at most N of the channels that have a finding.")] = 48
    out: Annotated[AnyPath, _out("Write the results into this folder.")] = Path("featviz-audit")
    overwrite: Annotated[bool, _replace(
        "Replace the audit in --out, and any file at --junit and --prune-out.")] = False
    nul_separated: Annotated[bool, _nul] = False
    fail_on: Annotated[Texts, _find("End with exit code 4 where this gate is broken: dead>5%, "
        "nonfinite>0, 'layer3.*:constant>2'; repeatable.", "GATE", True)] = ()
    baseline: Annotated[File | None, _find("End with exit code 4 where findings are worse than in "
        "this earlier audit.json.", first=True)] = None
    junit: Annotated[File | None, _junit] = None
    prune_out: Annotated[File | None, _write("Write the channels that can be cut out into this "
        "JSON file: {layer: [channels]}.", first=True)] = None


class ExemplarOptions(Struct, frozen=True):
    """The options of `exemplars` beside the model and the images."""

    layers: Annotated[Selectors | None, _layers(usual="one layer for each stage")] = None
    top: Annotated[Annotated[int, Meta(ge=1, le=MOST_TOP)], _draw(
        "Show N images of each channel.", first=True)] = 9
    pick: Annotated[Literal["max", "mean"], _draw("Rank images by the largest value, or by the "
        "mean of the map.\f The picture shows what the unit with the largest value sees, or with "
        "mean the whole image.", first=True)] = "max"
    per_class: Annotated[bool, _draw("Choose the images of each class apart; the class of an "
        "image is the name of its folder.", first=True)] = False
    inputs: InputOptions = InputOptions()
    batch_size: Annotated[Count, _batch] = 1
    out: Annotated[AnyPath, _out("Write the pictures and exemplars.json into this folder.")] = (
        Path("featviz-exemplars"))
    overwrite: Annotated[bool, _replace("Replace the exemplars in --out.")] = False
    nul_separated: Annotated[bool, _nul] = False


class DiffThresholds(Struct, frozen=True):
    """What counts as a difference."""

    tolerance: Annotated[
        Share, _option("Accept relative differences up to this.", "RELATIVE")] = 1e-4
    """How far a value may change, in the terms of `diff.compare.compare`. Threads and oneDNN moved
    values by up to 3e-6 (ten of torchvision's models on two cores)."""
    max_diff_ratio: Annotated[Share, _option("Accept that up to this share of all channels, each "
        "counted in each image, differs, 0..1.", "SHARE")] = 0.0
    ignore_added: Annotated[bool, _option("Accept layers and images that only NEW has.")] = False


class DiffFiles(Struct, frozen=True):
    """What `diff` writes."""

    out: Annotated[Folder | None, _out("Write the difference maps and diff.json into this folder.",
        usual="with --html, PAGE-maps beside the page")] = None
    html: Annotated[File | None, _write("Write an HTML page into this file.")] = None
    junit: Annotated[File | None, _junit] = None
    overwrite: Annotated[bool, _replace(
        "Replace any file at --html and --junit, not only those of an earlier diff.")] = False


class ReportOptions(Struct, frozen=True):
    """The options of `report`."""

    out: Annotated[AnyPath | None, _out(
        "Write the report into this folder, or with --single-file or --zip into this file.",
        usual="RUN/report, RUN/report.html or RUN/report.zip")] = None
    overwrite: Annotated[bool, _replace("Replace any file that is in --out.")] = False
    single_file: Annotated[bool, _option("Write one HTML file that holds everything.")] = False
    zip: Annotated[bool, _option("Write one zip file of the report and its pictures.")] = False
    compare: Annotated[Place | None, _option(
        "Show the pictures of this other run beside those of RUN.", "RUN")] = None
    kernels: Annotated[AnyPath | None, _option("Show the kernels in this folder, which featviz "
        "kernels wrote, with their channels.", "DIR")] = None
    exemplars: Annotated[AnyPath | None, _option("Show the pictures in this folder, which featviz "
        "exemplars wrote, with their channels.", "DIR")] = None
    audit: Annotated[AnyPath | None, _option("Show the findings of this audit.json, or of the one "
        "in this folder with the pictures of its suspects.", usual="RUN/audit.json")] = None


class SheetOptions(Struct, frozen=True):
    """The options of `sheet`."""

    layer: Annotated[str, _option("Draw the layer of this qualified name.", "NAME")]
    stem: Annotated[str, _option("Cut the tiles from this picture of the layer: its file name "
        "without the ending, such as output.call1 or output.boxes.", "FILE", flags=("--tensor",),
    )] = "output"
    pick: Annotated[str | None, _option(
        "Show these channels, such as 0-31 or 3,7,12-15.", "LIST", usual="all that the run drew"),
    ] = None
    order: Annotated[Literal["index", "mean", "max", "variance", "zeros"], _option("Sort channels "
        "by number, or by a statistic averaged over the images, largest first.")] = "index"
    transpose: Annotated[
        bool, _option("Draw a row for each image and a column for each channel.")] = False
    out: Annotated[
        File | None, _out("Write the sheet into this PNG file.", usual="sheet-NAME.png")] = None
    overwrite: Annotated[bool, _replace("Replace any file in --out.")] = False


# fmt: on

# Reading values


@dataclass(frozen=True)
class Option:
    """A field as the command line, the Python API and documentation see it."""

    name: str
    """The keyword in Python; with dashes, the flag and the key in TOML."""
    hint: Any
    kinds: frozenset[Any]
    default: Any
    """`msgspec.NODEFAULT` where it must be given."""
    words: str
    group: str
    first: bool
    flags: tuple[str, ...]
    metavar: str = ""
    usual: str = ""
    expects: str = ""
    choices: tuple[str, ...] = ()
    read: Callable[[Any], Any] | None = None
    many: bool = False

    def value(self, given: Any) -> Any:
        """The value that was given: by a user as text, by a program in its types."""
        if given is None and (NoneType in self.kinds or self.kinds == {tuple}):
            return None if NoneType in self.kinds else self.default
        try:
            if self.read is not None:
                return self.read(given)
            if self.choices:
                return _known_word(given, self.choices)
            if tuple in self.kinds and isinstance(given, (str, tuple)):
                return tuple(_as(list[str], [given] if isinstance(given, str) else list(given)))
            if str in self.kinds:
                return msgspec.convert(fspath(given), str)
            return _as(self.hint, given)
        except (msgspec.ValidationError, ValueError, TypeError, KeyError):
            shown = quoted(str(given[0] if type(given) is list and len(given) == 1 else given))
            hint = re.split(r"\.[ \f]|: {", self.words)[0].rstrip(".")
            if close := difflib.get_close_matches(shown.lower(), self.choices, 1, 0.65):
                hint = f"did you mean {close[0]}?"
            raise UsageError(f"{self.name}={shown}: expected {self.expects}", hint) from None
        except UsageError as error:
            raise UsageError(f"{self.name}: {error.message}", error.hint) from None


def _taken_apart(hint: Any) -> tuple[list[Meta], set[Any]]:
    """What the annotations in a type say, the outer ones last, and the types in its union."""
    origin = get_origin(hint)
    if origin is Annotated:
        metas, kinds = _taken_apart(hint.__origin__)
        return [*metas, *hint.__metadata__], kinds
    if origin in (Literal, tuple, abc.Mapping) or not get_args(hint):
        return [], {str if origin is Literal else origin or hint}
    parts = [_taken_apart(part) for part in get_args(hint)]
    return [meta for metas, _ in parts for meta in metas], {k for _, kinds in parts for k in kinds}


@cache
def declared(kind: type[Struct]) -> dict[str, Option]:
    """The options of a record by name, in the order of help; not those of the records in it."""
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for info in structs.fields(kind):
        hint, name, bounds = hints[info.name], info.name, ""
        metas, kinds = _taken_apart(hint)
        words = next((meta.description for meta in metas if meta.description), None)
        if words is None:
            continue
        extra: dict[str, Any] = {
            "flags": (f"--{name.replace('_', '-')}",),
            "choices": get_args(hint.__origin__) if get_origin(hint.__origin__) is Literal else (),
            "metavar": "N" if int in kinds else "",
            "many": tuple in kinds,
        }
        for meta in metas:
            extra |= meta.extra or {}
            if meta.gt is not None:
                end = f", at most {meta.le}" if meta.lt is None else f" and below {meta.lt}"
                bounds = f" above {meta.gt}{end}"
            elif meta.ge is not None:
                bounds = f" ≥ {meta.ge}" if meta.le is None else f" from {meta.ge} to {meta.le}"
        if not extra.get("expects"):
            named = {bool: "true or false", int: "an integer", float: "a number"}
            plain = next((words for one, words in named.items() if one in kinds), "a text") + bounds
            several = "one of " * (len(extra["choices"]) > 1)
            extra["expects"] = several + ", ".join(extra["choices"]) or plain
        made = info.default_factory is not msgspec.NODEFAULT
        default = info.default_factory() if made else info.default
        found[name] = Option(name, hint, frozenset(kinds), default, words, **extra)
    return found


def nested(kind: type[Struct]) -> dict[str, type[Struct]]:
    """The records in a record."""
    fields = {info.name: info.type for info in structs.fields(kind)}
    return {n: t for n, t in fields.items() if isinstance(t, type) and issubclass(t, Struct)}


def every_option(*kinds: type[Struct]) -> dict[str, Option]:
    """The options of records and of those nested in them, whose defaults are the outer record's."""
    found: dict[str, Option] = {}
    for kind in kinds:
        found |= declared(kind)
        defaults = {info.name: info.default for info in structs.fields(kind)}
        for name, part in nested(kind).items():
            for one in every_option(part).values():
                found.setdefault(one.name, replace(one, default=getattr(defaults[name], one.name)))
    return found


def read(kind: type[T], given: Mapping[str, Any]) -> T:
    """A record of values as a user or a program gives them."""
    rest, options = dict(given), every_option(kind)
    plain = {name: rest.pop(name) for name in given.keys() & {*kind.__struct_fields__} - {*options}}
    made = read_from(kind, rest, **plain)
    if rest:
        raise no_option(rest, options)
    return made


def read_from(kind: type[T], given: dict[str, Any], but: Collection[str] = (), **further: Any) -> T:
    """A record, and the records in it, of those keywords that are their options, which are removed;
    `further` are values of fields as they stand.
    """

    def values(kind: type[Struct]) -> dict[str, Any]:
        there = [one for n, one in declared(kind).items() if n in given and n not in but]
        return {one.name: one.value(given.pop(one.name)) for one in there}

    for info in structs.fields(kind):
        if info.name in nested(kind) and info.name not in further:
            further[info.name] = structs.replace(info.default, **values(info.type))
    return kind(**values(kind), **further)


def no_option(wrong: Iterable[str], known: Iterable[str]) -> UsageError:
    """The error for keywords that do not exist."""
    names, there = list(wrong), sorted(known)
    close = difflib.get_close_matches(names[0], there, 1)
    hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(there)}"
    return UsageError(f"no option {', '.join(names)}", hint)


def flag(name: str) -> str:
    """What an option of `run` is called on the command line."""
    options = every_option(ModelOptions, RunOptions)
    return options[name].flags[-1] if name in options else f"--{name.replace('_', '-')}"
