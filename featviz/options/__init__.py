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
from featviz.records.tables import BACKWARD, CLASS_MAPS, FORMATS, KINDS, PRESETS, REDUCTIONS
from featviz.records.types import Shard
from featviz.text import quoted, safe_name

T = TypeVar("T", bound=Struct)

GROUPS = (
    *("Options", "Which layers", "What is read", "The model", "How maps are drawn"),
    *("Gradients and changes", "Findings and gates", "What is written", "Limits", "General"),
)
"""Headings in the order of help. The first is for the few that a short command alone has."""
OPTIONS, LAYERS, READ, MODEL, DRAWING, GRADIENTS, FINDINGS, OUTPUT, LIMITS, GENERAL = GROUPS

LONGEST_SIDE = 2**16  # pixels; no image is larger, and its tensor would not fit into memory
INTERPOLATIONS = ("nearest", "nearest-exact", "bilinear", "bicubic", "lanczos")
"""How images are resized: what torchvision takes for pictures of Pillow and for tensors alike."""
PAD_GREY = 0.4
"""Between tiles unless the user says otherwise: neither the black in which maps begin, nor the grey
(0.5) of a constant map."""
HPARAMS = "@hparams"  # an argument of a model: all those that a Lightning checkpoint holds

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
    return tuple(_as(float, part) for part in _parts(given))


def _captures(given: Any) -> tuple[str, ...]:
    names = [name for name in _parts(given) if name]
    if not names or not set(names) <= set(KINDS):
        raise ValueError(given)
    return tuple(dict.fromkeys(names))


def _auto(given: Any) -> int | None:
    return None if str(given).lower() == "auto" else _as(Count, given)


def _path(given: Any, is_dir: bool | None = None, of_run: bool = False) -> Any:
    """A path, of a folder or a file if anything is there; of a run also a URL."""
    if of_run and (isinstance(given, Url) or (isinstance(given, str) and is_url(given))):
        return Url.of_run(given) if isinstance(given, str) else given
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


def _shard(given: Any) -> Shard:
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", str(given))
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(given)
    return Shard(int(match[1]) - 1, int(match[2]))


_INDEXED = re.compile(r"(?<![^,!\s])([A-Z]\w*|fn:\w+)\[(-?\d{1,9}|[-\d]*:[-:\d]*)\](?=\s*(?:,|$))")
"""A class or function with an index as in Python, `Conv2d[0]`."""


def _selectors(given: Any) -> str:
    return _INDEXED.sub(r"\1#\2", given if isinstance(given, str) else ",".join(given))


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


LISTS = (_size, _numbers, _captures, _selectors)
"""Readers of lists, of which each part may be an option of its own."""

# What a field takes


def option(
    words: str, metavar: str = "", first: bool = False, *, group: str = OPTIONS, **extra: Any
) -> Meta:
    """The annotation of a field, beside its type and bounds: its help (behind a form feed for
    `--help-all` alone), whether `--help` of a long command shows it, and fields of Option."""
    extra |= {"metavar": metavar} if metavar else {}
    return Meta(description=words, extra={"group": group, "first": first, **extra})


def _takes(metavar: str, expects: str, read: Callable[[Any], Any]) -> Meta:
    """The annotation of a type: what help and errors call its values, and what reads them."""
    return Meta(extra={"metavar": metavar, "expects": expects, "read": read})


Count = Annotated[int, Meta(ge=1)]
Whole = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Fraction = Annotated[float, Meta(gt=0, lt=1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
_PIXELS = f"pixels from 1 to {LONGEST_SIDE}, such as 224 or 224x320"
_RUN = partial(_path, of_run=True)
Size = Annotated[int | tuple[int, int], _takes("PIXELS", _PIXELS, _size)]
Numbers = Annotated[tuple[float, ...], _takes("N,N,N", "numbers, such as 0.5,0.5,0.5", _numbers)]
Auto = Annotated[int | None, _takes("N", "an integer ≥ 1, or auto", _auto)]
Place = Annotated[Any, _takes("PATH", "a path, or a URL of a store", _RUN)]
AnyPath = Annotated[Path, _takes("PATH", "a path", _path)]
File = Annotated[Path, _takes("FILE", "a file, not a folder", partial(_path, is_dir=False))]
Folder = Annotated[Path, _takes("FOLDER", "a folder, not a file", partial(_path, is_dir=True))]
Selectors = Annotated[str, _takes("SELECTORS", "selectors, such as Conv2d,layer1.*", _selectors)]
Target = Annotated[str, _takes("TARGET", "a target, such as class:281 or mean", _target)]
Texts = tuple[str, ...]

of_model, of_input = partial(option, group=MODEL), partial(option, group=READ)
of_maps, of_grads = partial(option, group=DRAWING), partial(option, group=GRADIENTS)
of_files, of_limits = partial(option, group=OUTPUT), partial(option, group=LIMITS)
the_layers = partial(
    option,
    "Take layers by class or name, such as Conv2d,ReLU or 'layer1.*'.\f Selectors are class names, "
    "globs, re:REGEX, CLASS@GLOB, fn:FUNCTION, SELECTOR#INDEX, !NOT; commas separate them.",
    first=True,
    group=LAYERS,
)
the_out = partial(option, group=OUTPUT, first=True, flags=("-o", "--out"))
may_replace = partial(of_files, first=True)
the_nul = of_input(
    "Read paths that end with NUL, as `find -print0` writes them, where IMAGE is -.",
    flags=("-0", "--null"),
)
the_layout = of_maps(
    "Read tensors in this layout instead of the guessed one: {LAYOUTS}. tokens:14x20+1 names the "
    "grid of the tokens, behind one other token; tokens:14x20+1,10 has ten behind it, too. "
    "Repeatable.",
    "[SELECTORS=]LAYOUT",
)
the_board = of_files(
    "Also write grids and histograms for TensorBoard into a folder of this one, named like --out.",
    "LOGDIR",
)
TARGETS = (
    "top1, class:N, class:NAME, sum, mean, norm, output[KEY]:sum|mean|norm, layer:NAME or "
    "layer:NAME:CHANNEL."
)
OVERLAY = "Blend each map with the input: 0 shows the input alone, 1 the map alone."


# fmt: off
# The model, and what it gets


class ModelOptions(Struct, frozen=True):
    """The model, and how it is loaded."""

    spec: str
    arch: Annotated[str | None, of_model("Build this architecture, such as resnet50 or net.py:Net, "
        "for a file of weights.", "MODEL", True)] = None
    weights: Annotated[str | None, of_model(
        "Load weights: default, none (random) or a file.\f {WEIGHTS}.", "WEIGHTS", True,
        read=_weights, expects="default, none, a weights entry or a file")] = None
    seed: Annotated[Seed, of_model("Seed the random numbers of random weights and of noise.")] = 0
    model_args: Annotated[Mapping[str, Any], of_model(
        "Pass this to the factory of the model; repeatable.\f Builders take it, too. "
        "@hparams passes the hyper_parameters of a Lightning checkpoint.", "KEY=VALUE",
        flags=("--model-arg",), read=_arguments, many=True, expects="KEY=VALUE, or a mapping",
    )] = field(default_factory=dict)
    hparams: bool = False
    """Pass a Lightning checkpoint's hyper_parameters to the factory, too; `model_args` win."""
    trust: Annotated[bool, of_model("Trust MODEL: let a pickled model run any code.\f Classes "
        "may be in the current folder and the folder of the file.")] = False
    key: Annotated[str | None, of_model("Take the weights at this key of a file.", "KEY")] = None
    strip_prefix: Annotated[str | None, of_model("Cut this off names of weights.", "PREFIX")] = None
    ema: Annotated[bool | None, of_model("Take averaged (EMA) weights.", usual="no-ema")] = None
    partial: Annotated[bool, of_model("Load the weights that fit; leave the others out.")] = False
    device: Annotated[str, of_model("Run on auto, cpu, cuda, cuda:N or mps.", "DEVICE")] = "auto"

    def __post_init__(self) -> None:
        """`@hparams` among the arguments is an argument of its own."""
        if HPARAMS in self.model_args:
            own = {name: v for name, v in self.model_args.items() if name != HPARAMS}
            structs.force_setattr(self, "model_args", own)
            structs.force_setattr(self, "hparams", True)


class InputOptions(Struct, frozen=True):
    """The user's choices for the model's input; None leaves a choice to the model."""

    preset: Annotated[str | None, of_input("Prepare images as these models want them. "
        + "; ".join(f"{name}: {one.description}" for name, one in PRESETS.items()) + ".",
        choices=tuple(PRESETS), usual="as the model says, else imagenet")] = None
    size: Annotated[Size | None, of_input("Resize the shorter side of images to N pixels, or "
        "images to HxW.\f A YOLO's longer side becomes N.", first=True)] = None
    crop: Annotated[Size | None, of_input("Then crop the centre to NxN or HxW pixels.")] = None
    interpolation: Annotated[str | None, of_input("Resize by this.", choices=INTERPOLATIONS)] = None
    mean: Annotated[Numbers | None, of_input("Subtract these means from channels (0..1).")] = None
    std: Annotated[Numbers | None, of_input("Then divide by these standard deviations.")] = None
    channels: Annotated[Annotated[int, Meta(ge=1, le=4096)] | None, of_input(
        "Read images as greyscale (1) or RGB (3), or files of N channels (.npy, .npz, .pt, .tif, "
        "or pictures with alpha).", usual="as the first convolution says")] = None
    background: Annotated[str, of_input("Put this below transparent images.", "COLOUR")] = "white"
    frames: Annotated[Count | None, of_input("Take N frames of each clip, for video models; of a "
        "video file also for others, as N images.", usual="16, else the first")] = None
    input: Annotated[Texts, of_input(
        "Give the model this tensor in place of an image: randn:1,128 (random numbers of --seed), "
        "zeros:1,128, or a file (.npy, .npz, .pt). NAME is a parameter of its forward; repeatable.",
        "NAME=VALUE")] = ()
    inputs: Annotated[Count | None, of_input("Pass N images at once.", usual="by its code")] = None
    forward_args: Annotated[Texts, of_input(
        "Pass this to the model's forward, too: a number, true, false, none, zeros:1,77, "
        "ones:1,77:int64, randn:1,9, a file (.npy, .npz, .pt), or image; NAME.KEY=VALUE fills a "
        "dict; repeatable.", "NAME=VALUE", flags=("--forward-arg",))] = ()
    transform: Annotated[str | None, of_input(
        "Prepare images with this function (file.py:fn or pkg.mod:fn): from a PIL image or an "
        "array to a tensor [C, H, W], or to a dict of arguments of the model.", "FUNCTION")] = None


# How maps are drawn


class DrawOptions(Struct, frozen=True):
    """How maps become a picture; names and meanings are torchvision's where it has the option."""

    normalize: Annotated[str, of_maps(
        "Scale values to brightness: map, layer, symmetric, range:LO,HI, percentile:LO,HI, none.\f "
        "Modes are {MODES}; auto: map, for gradients symmetric-percentile:99.", "MODE", True,
    )] = "auto"
    cmap: Annotated[str, of_maps("Colour maps with grey, viridis, coolwarm or another colormap of "
        "matplotlib.\f Auto means grey, for gradients coolwarm.", "CMAP", True)] = "auto"
    nrow: Annotated[Auto, of_maps("Put N maps in a row; auto makes a square.", usual="auto")] = None
    padding: Annotated[Whole | None, of_maps("Leave N pixels around maps.", usual="2")] = None
    pad_value: Annotated[Share | None, of_maps("Fill the pixels around maps with this grey, from 0 "
        "(black) to 1 (white).", "GREY", usual=f"{PAD_GREY}, with padding 0")] = None
    scale: Annotated[Auto, of_maps("Enlarge maps N times; auto small ones.", usual="auto")] = None
    min_tile: int = 32
    """Pixels that the longer side of a tile should have, for `scale=None`."""
    max_maps: Annotated[Count | None, of_maps("Draw at most N maps of a layer.", first=True)] = None
    max_slices: Annotated[Count, of_maps("Draw at most N slices of each map of a clip, volume or "
        "batch: evenly spread ones, of a batch the first.")] = 16
    tensor_layout: Annotated[Texts, the_layout] = ()
    pick: Annotated[Literal["first", "top", "spread"], of_maps("With max_maps, draw the first, "
        "those of highest mean, or evenly spread ones.")] = "first"
    order: Annotated[Literal["index", "mean", "similarity"], of_maps(
        "Sort tiles by channel, by mean (largest first), or by similarity.")] = "index"
    collapse: Annotated[Annotated[float, Meta(gt=0, le=1)] | None, of_maps(
        "Draw maps that correlate by R or more, such as 0.98, as one tile, marked ×N.", "R")] = None
    labels: Annotated[bool, of_maps("Write the channel on each tile.")] = False
    marks: Annotated[bool, of_maps("Cross out maps of zeros, strike through other constant ones, "
        "and draw a strip of values where all are constant; or draw only the maps.")] = True
    overlay: Annotated[Share | None, of_maps(OVERLAY, "ALPHA")] = None
    reduce: Annotated[str | None, of_maps("Draw one picture of all channels. "
        + "; ".join(f"{name}: {one.help}" for name, one in REDUCTIONS.items()) + ".",
        "REDUCTION", choices=tuple(REDUCTIONS))] = None
    figure: Annotated[bool, of_maps("Also draw a figure: title, input, colour bar.")] = False
    format: Annotated[str, of_files("Write pictures in this format: "
        + "; ".join(f"{name}, {one.description}" for name, one in FORMATS.items()) + ".",
        choices=tuple(FORMATS))] = "png"
    flat: Annotated[bool, of_files("Write all pictures of an image into one folder.")] = False
    tensors: Annotated[
        str | None, of_files("Also keep the raw tensors.", choices=("npy",))] = None

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

    capture: Annotated[Texts, of_grads(
        f"Draw these tensors of each layer: {', '.join(kind.help for kind in KINDS.values())}.",
        "KINDS", usual="output", read=_captures, expects=f"some of {', '.join(KINDS)}",
    )] = ("output",)
    target: Annotated[Target | None, of_grads("Take gradients of " + TARGETS, usual="top1")] = None
    grad_rule: Annotated[
        Literal["plain", "guided", "deconv"], of_grads("Pass ReLUs back by this rule.")] = "plain"
    ablate: Annotated[Texts, of_grads(
        "Set these channels of the outputs of layers to zero; repeatable.", "SELECTORS:C,C")] = ()
    edit: Annotated[Texts, of_grads(
        "Then change outputs: 'conv1:channel 3,5-7*2' multiplies channels, 'relu:clamp=0,6' "
        "limits values, 'conv1:noise=0.1' adds Gaussian noise, 'layer4:grad*0.5' multiplies "
        "gradients; repeatable.", "SELECTORS:WHAT")] = ()
    seed: Seed = 0

    @property
    def gradients(self) -> bool:
        """Whether a backward pass is wanted."""
        return not BACKWARD.isdisjoint(self.capture)

    @property
    def interventions(self) -> list[tuple[str, str]]:
        """All changes to the outputs of layers, in order: `ablate` or `edit`, and the text."""
        return [("ablate", text) for text in self.ablate] + [("edit", text) for text in self.edit]


# The commands


class RunOptions(Struct, frozen=True):
    """All options of `run` beside the model and the images."""

    layers: Annotated[Selectors | None, the_layers(usual="one layer for each stage")] = None
    out: Annotated[Place, the_out("Write the run into this folder.\f A URL (s3://bucket/maps) "
        "is that of the folder maps, which is copied there.", "DIRECTORY")] = Path("featviz-out")
    """A path, or a `files.urls.Url` below which a copy of the run is kept."""
    overwrite: Annotated[bool, may_replace("Replace the run in --out.")] = False
    resume: Annotated[bool, of_files("Continue the run in --out where it stopped.")] = False
    nul_separated: Annotated[bool, the_nul] = False
    jobs: Annotated[Count | None, of_limits("Encode in N threads.", usual="cores / 4")] = None
    tensorboard: Annotated[Folder | None, the_board] = None
    shard: Annotated[Shard | None, option(
        "Draw only part I of N parts of the images; all parts may write into one --out.", "I/N",
        usual="that of torchrun or srun", group=LIMITS, read=_shard,
        expects="I/N with I from 1 to N, such as 2/8",
    )] = None
    draw: DrawOptions = DrawOptions()
    inputs: InputOptions = InputOptions()
    passes: PassOptions = PassOptions()

    @property
    def folder(self) -> Path:
        """Where the run is written: `out`, or the folder with the last name of its URL."""
        return Path(safe_name(self.out.name)) if self.mirror else Path(self.out)

    @property
    def mirror(self) -> Url | None:
        """Where a copy of the run is kept."""
        return self.out if isinstance(self.out, Url) else None


# fmt: on

# Reading values


@dataclass(frozen=True)
class Option:
    """A field as the command line, the Python API and documentation see it: its name in Python, the
    types in its union, its default (`msgspec.NODEFAULT` where it must be given, `usual` in words).
    """

    name: str
    hint: Any
    kinds: frozenset[Any]
    default: Any
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
            if self.choices:  # in any case; `tensors=True` takes the only one
                word = (self.choices[0] if given is True else given).strip().lower()
                word = "jpg" if word == "jpeg" else word
                return next(choice for choice in self.choices if choice.lower() == word)
            if tuple in self.kinds and isinstance(given, (str, tuple)):
                return tuple(_as(list[str], [given] if isinstance(given, str) else list(given)))
            if str in self.kinds:
                return msgspec.convert(fspath(given), str)
            return _as(self.hint, given)
        except (msgspec.ValidationError, ValueError, TypeError, AttributeError, StopIteration):
            shown = quoted(str(given[0] if type(given) is list and len(given) == 1 else given))
            hint = re.split(r"\.[ \f]|: {", self.words)[0].rstrip(".")
            if close := difflib.get_close_matches(shown.lower(), self.choices, 1, 0.65):
                hint = f"did you mean {close[0]}?"
            raise UsageError(f"{self.name}={shown}: expected {self.expects}", hint) from None
        except UsageError as error:
            raise UsageError(f"{self.name}: {error.message}", error.hint) from None


@cache
def declared(kind: type[Struct]) -> dict[str, Option]:
    """The options of a record by name, in the order of help; not those of the records in it."""
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for info in structs.fields(kind):
        hint, name, bounds = hints[info.name], info.name, ""
        parts, kinds, metas = [hint], set(), list[Meta]()  # what annotations say, the inner first
        while parts:
            part = parts.pop()
            origin = get_origin(part)
            if origin is Annotated:
                metas[:0] = part.__metadata__
                parts.append(part.__origin__)
            elif origin in (Literal, tuple, abc.Mapping) or not get_args(part):
                kinds.add(str if origin is Literal else origin or part)
            else:
                parts += get_args(part)
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
    `further` are values of fields as they stand."""
    defaults = {info.name: info.default for info in structs.fields(kind)}
    parts: dict[str, type[Struct]] = {**nested(kind), "": kind}
    for at, part in parts.items():
        if at in further:
            continue
        there = [one for name, one in declared(part).items() if name in given and name not in but]
        values = {one.name: one.value(given.pop(one.name)) for one in there}
        further |= {at: structs.replace(defaults[at], **values)} if at else values
    return kind(**further)


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
