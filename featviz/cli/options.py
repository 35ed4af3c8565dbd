"""Options that several commands share, and the records that they fill."""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from featviz.cli import command as cmd
from featviz.cli import complete, values
from featviz.cli.command import Option
from featviz.cli.values import EXISTING_FILE, FILE, NUMBERS, PATH, SIZE
from featviz.models.sources import MODEL_HELP, WEIGHTS_HELP, ModelOptions
from featviz.records import INTERPOLATIONS, PRESETS
from featviz.records.checking import choices

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    from featviz.models.preprocess import InputOptions


def stacked(*options: Callable[[F], F], group: str | None = None) -> Callable[[F], F]:
    """One decorator for several options, in the order in which --help shows them.

    Args:
        group: the heading of those of them that have none of their own, one of `command.GROUPS`.
    """

    def decorate(function: F) -> F:
        given = len(getattr(function, "__click_params__", ()))
        for option in reversed(options):
            function = option(function)
        for param in function.__click_params__[given:]:  # type: ignore[attr-defined]
            param.group = param.group or group
        return function

    return decorate


def option(*names: str, **settings: Any) -> Callable[[F], F]:
    """`click.option`, where help shows every default, calls a whole number N, and has groups.

    `group` and `first` are those of `command.Option`.
    """
    default = settings.get("default")
    usual: dict[str, Any] = {} if default is None else {"show_default": True}
    if settings.get("type", type(default)) is int:
        usual["metavar"] = "N"
    return click.option(*names, cls=Option, **{**usual, **settings})


def field_option(record: type, name: str, help: str, **settings: Any) -> Callable[[F], F]:
    """The option that fills a field of a record, whose default and choices it has."""
    field = name.removeprefix("--").replace("-", "_")
    default = getattr(record, field)
    if isinstance(default, bool):
        return option(name, is_flag=True, help=help, **settings)
    if default is not None and not settings.get("multiple"):
        settings = {"default": default, **settings}
    if not {"type", "metavar"} & settings.keys() and (words := choices(record, field)):
        settings["type"] = click.Choice(words)
    return option(name, help=help, **settings)


# What a command reads and where it writes


def model_argument(function: F) -> F:
    """MODEL, whose forms stand in the command's help where it says {MODEL}."""
    function.__doc__ = str(function.__doc__).replace("{MODEL}", MODEL_HELP)
    argument = click.argument(
        "model", required=False, metavar="MODEL", shell_complete=complete.models
    )
    return argument(function)


images_argument = click.argument(
    "images", nargs=-1, metavar="IMAGE...", shell_complete=complete.paths
)

null_option = option(
    "-0",
    "--null",
    "nul",
    is_flag=True,
    group=cmd.READ,
    help="Read paths that end with NUL, as `find -print0` writes them, where IMAGE is -.",
)


def layers_option(
    help: str, default: str | None = None, first: bool | str = True
) -> Callable[[F], F]:
    """`--layers`; `default` says which layers are taken without it."""
    return option(
        "--layers",
        multiple=True,
        metavar="SELECTORS",
        group=cmd.LAYERS,
        first=first,
        shell_complete=complete.layers,
        show_default=default,
        help=help,
    )


select_layers = (
    "Take the layers that these selectors match: class names, globs, re:REGEX, CLASS@GLOB, "
    "fn:FUNCTION, SELECTOR#INDEX, !NOT; commas separate them."
)
"""Help of `--layers` where it decides what is looked at."""

select_in_short = "Take layers by class or name, such as Conv2d,ReLU or 'layer1.*'."


_OUTPUT: dict[str, Any] = {"group": cmd.OUTPUT, "first": True}


def out_option(help: str, default: str | None = None, **settings: Any) -> Callable[[F], F]:
    """`--out`, a file or folder to write."""
    if default is not None:
        settings["default"] = Path(default)
    return option("--out", **{"type": PATH, "help": help, **_OUTPUT, **settings})


def overwrite_option(what: str) -> Callable[[F], F]:
    """`--overwrite`; `what` names the earlier result."""
    return option("--overwrite", is_flag=True, help=f"Replace {what} in --out.", **_OUTPUT)


def json_option(what: str = "one JSON document") -> Callable[[F], F]:
    """`--json`; `what` is printed on stdout."""
    help = f"Print {what} on stdout."
    return option("--json", "as_json", is_flag=True, group=cmd.OUTPUT, help=help)


timeout_option = option(
    "--timeout",
    type=click.FloatRange(0, min_open=True),
    default=600.0,
    metavar="SECONDS",
    group=cmd.MACHINES,
    help="Wait up to SECONDS at the start for the other processes that torchrun started.",
)


def open_option(help: str) -> Callable[[F], F]:
    """`--open`, which shows a page in the user's browser."""
    return option("--open", is_flag=True, help=help, **_OUTPUT)


batch_size_option = option(
    "--batch-size",
    type=int,
    default=1,
    group=cmd.LIMITS,
    help="Pass up to N images of one shape through the model together.",
)

readers_option = option(
    "--readers",
    type=int,
    show_default="1, for images in stores 8",
    group=cmd.LIMITS,
    help="Read images ahead in N threads.",
)

shard_option = option(
    "--shard",
    metavar="I/N",
    group=cmd.MACHINES,
    help="Take only part I of N parts of the images; `featviz merge` joins the parts.",
)

# How a command is set up

config_option = option(
    "--config",
    type=EXISTING_FILE,
    callback=values.read_config,
    is_eager=True,
    expose_value=False,
    group=cmd.GENERAL,
    help="Read values of options from this TOML file; the command line wins over it.",
)


def _verbosity(short: str, long: str, level: int, help: str) -> Callable[[F], F]:
    def set_level(ctx: click.Context, param: click.Parameter, given: bool) -> None:
        if given:
            logging.getLogger("featviz").setLevel(level)

    settings = {"is_flag": True, "expose_value": False, "callback": set_level}
    return option(short, long, group=cmd.GENERAL, help=help, **settings)


verbosity_options = stacked(
    _verbosity("-q", "--quiet", logging.ERROR, "Print only errors on stderr."),
    _verbosity("-v", "--verbose", logging.DEBUG, "Print more details, and tracebacks, on stderr."),
)

junit_option = option(
    "--junit",
    type=FILE,
    group=cmd.OUTPUT,
    help="Write the verdicts as JUnit XML into this file.",
)


# The model and its input

_of_model = partial(field_option, ModelOptions)

checkpoint_options = stacked(
    _of_model("--key", "Take the weights at this key of a checkpoint.", metavar="KEY"),
    _of_model("--strip-prefix", "Remove this prefix from the names of weights.", metavar="PREFIX"),
    option(
        "--ema/--no-ema",
        default=None,
        show_default="no-ema",
        help="Take the averaged (EMA) weights of a checkpoint, or the plain ones.",
    ),
    group=cmd.MODEL,
)
"""Where in a checkpoint the weights are."""

model_options = stacked(
    _of_model(
        "--arch",
        "Build this architecture for a MODEL that is a file of weights, or a LoRA adapter.",
        metavar="MODEL",
        first="Build this architecture, such as resnet50 or net.py:Net, for a file of weights.",
        shell_complete=complete.models,
    ),
    _of_model(
        "--weights",
        f"Load these weights. {WEIGHTS_HELP}.",
        metavar="WEIGHTS",
        first="Load these weights: default, a file, or none (random).",
        shell_complete=complete.paths,
    ),
    _of_model("--seed", "Seed the random numbers of random weights and of noise."),
    option(
        "--model-arg",
        multiple=True,
        metavar="KEY=VALUE",
        help="Pass this argument to the factory or builder of the model; repeatable. @hparams "
        "passes the hyper_parameters of a Lightning checkpoint.",
    ),
    option(
        "--allow-global",
        multiple=True,
        metavar="PKG.NAME",
        help="Let a pickled model use this class or function; repeatable.",
    ),
    option(
        "--trust",
        "--unsafe-load",
        "trust",
        is_flag=True,
        help="Trust MODEL: let a pickled model run any code, with classes from the current folder "
        "and the folder of its file.",
    ),
    checkpoint_options,
    _of_model("--partial", "Load the weights that fit, and leave the others out."),
    _of_model(
        "--device",
        "Run the model on this device: auto, cpu, cuda, cuda:N or mps.",
        metavar="DEVICE",
    ),
    group=cmd.MODEL,
)

input_options = stacked(
    option(
        "--preset",
        type=click.Choice(list(PRESETS)),
        show_default="as the model says, else imagenet",
        help="Prepare images as these models want them. "
        + "; ".join(f"{name}: {preset.words}" for name, preset in PRESETS.items())
        + ".",
    ),
    option(
        "--size",
        type=SIZE,
        first="Resize the shorter side of images to N pixels, or images to HxW.",
        help="Resize the shorter side of each image to N pixels (for a YOLO the longer one), or "
        "the image to HxW.",
    ),
    option("--crop", type=SIZE, help="After resizing, crop the centre to NxN or HxW pixels."),
    option(
        "--interpolation",
        type=click.Choice(INTERPOLATIONS),
        help="Compute the pixels of a resized image in this way.",
    ),
    option(
        "--mean",
        type=NUMBERS,
        help="Subtract these means from the channels, whose values are 0..1.",
    ),
    option(
        "--std",
        type=NUMBERS,
        help="Divide the channels by these standard deviations, once --mean is subtracted.",
    ),
    option(
        "--channels",
        type=int,
        show_default="as the first convolution says",
        help="Read images as greyscale (1) or RGB (3); of another number the files (.npy, .npz, "
        ".pt, .tif, or a picture with alpha) must have N channels.",
    ),
    option(
        "--exif/--no-exif",
        default=True,
        help="Turn images as their EXIF orientation says, or leave them as they are stored.",
    ),
    option(
        "--background",
        metavar="COLOUR",
        default="white",
        help="Put this colour under transparent images.",
    ),
    option(
        "--input",
        multiple=True,
        metavar="NAME=VALUE",
        help="Pass this argument to the model's forward beside the image: a number, true, false, "
        "none, zeros:1,77, ones:1,77:int64, or a file (.npy, .npz, .pt). image stands for the "
        "image itself, and NAME.KEY=VALUE fills a dict; repeatable.",
    ),
    option(
        "--transform",
        metavar="FUNCTION",
        help="Prepare images with this function (file.py:fn or pkg.mod:fn): from a PIL image, or "
        "the array of a .npy, .npz or .pt file, to a tensor [C, H, W], or to a dict of arguments "
        "of the model.",
    ),
    option("--frames", default=16, help="Take N frames of each clip, for video models."),
    option(
        "--inputs",
        type=int,
        show_default="as the model's forward says",
        help="Pass N images at once to the model.",
    ),
    group=cmd.READ,
)


_HPARAMS = "@hparams"
"""A value of --model-arg: the arguments that a Lightning checkpoint holds."""


def key_values(pairs: Sequence[str]) -> dict[str, Any]:
    """`key=value` strings to keyword arguments; values are Python literals, else strings.

    `@hparams`, which stands for those of a checkpoint, is left out.
    """
    arguments = {}
    for pair in pairs:
        if pair == _HPARAMS:
            continue
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--model-arg")
        try:
            arguments[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[key] = value
    return arguments


def selectors(given: dict[str, Any]) -> str | None:
    """All values of --layers as one list; None without any."""
    return ",".join(given["layers"]) or None


def fields_of(record: type, given: dict[str, Any]) -> dict[str, Any]:
    """The options that have the names of a record's fields."""
    return {field.name: given[field.name] for field in fields(record) if field.name in given}


def to_model_options(model: str, given: dict[str, Any]) -> ModelOptions:
    """The options of the model, as a record.

    Raises:
        FeatvizError: torch is missing, or cannot be loaded.
    """
    from featviz.models.requirements import require_torch

    require_torch(alone=True)
    return ModelOptions(
        model,
        model_args=key_values(given["model_arg"]),
        hparams=_HPARAMS in given["model_arg"],
        allow_globals=tuple(given["allow_global"]),
        **fields_of(ModelOptions, given),
    )


def to_input_options(given: dict[str, Any]) -> InputOptions:
    """The options of the input, as a record."""
    from featviz.models.preprocess import InputOptions

    return InputOptions(**fields_of(InputOptions, given))
