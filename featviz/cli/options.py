"""Options that several commands share, and the values they parse into."""

from __future__ import annotations

import ast
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from featviz.cli import complete, config
from featviz.cli.types import FILE, PATH, NumbersType, SizeType
from featviz.models.sources import MODEL_HELP, WEIGHTS_HELP

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    from featviz.models.load import ModelOptions
    from featviz.models.preprocess import InputOptions


def stacked(*options: Callable[[F], F]) -> Callable[[F], F]:
    """One decorator for several options, in the order in which --help shows them."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def model_forms(function: F) -> F:
    """Put the forms of MODEL into a command's help, where it says {MODEL}."""
    function.__doc__ = str(function.__doc__).replace("{MODEL}", MODEL_HELP)
    return function


def _level(level: int) -> Callable[[click.Context, click.Parameter, bool], None]:
    def set_level(ctx: click.Context, param: click.Parameter, given: bool) -> None:
        if given:
            logging.getLogger("featviz").setLevel(level)

    return set_level


# What a command reads and where it writes

model_argument = click.argument("model", required=False, shell_complete=complete.models)
images_argument = click.argument(
    "images", nargs=-1, metavar="IMAGE...", shell_complete=complete.paths
)

null_option = click.option(
    "-0",
    "--null",
    "nul",
    is_flag=True,
    help="Let each path that IMAGE - reads from stdin end with NUL instead of a line break.",
)


def layers_option(help: str, default: str | None = None) -> Callable[[F], F]:
    """`--layers`; `default` says which layers are taken without it."""
    return click.option(
        "--layers",
        multiple=True,
        metavar="SELECTORS",
        shell_complete=complete.layers,
        show_default=default,
        help=help,
    )


select_layers = (
    "Take the layers that these selectors match: class names, globs, re:REGEX, CLASS@GLOB, "
    "fn:FUNCTION, SELECTOR#INDEX, !NOT; commas separate them."
)
"""Help of `--layers` where it decides what is looked at."""


def out_option(help: str, default: str | None = None, **settings: Any) -> Callable[[F], F]:
    """`--out`, a file or folder to write."""
    known = {"type": PATH, "help": help, **settings}
    if default is not None:
        known |= {"default": Path(default), "show_default": True}
    return click.option("--out", **known)


def overwrite_option(what: str) -> Callable[[F], F]:
    """`--overwrite`; `what` names the earlier result."""
    return click.option("--overwrite", is_flag=True, help=f"Replace {what} in --out.")


def json_option(what: str = "one JSON document") -> Callable[[F], F]:
    """`--json`; `what` is printed on stdout."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print {what} on stdout.")


# How a command is set up

config_option = click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    callback=config.read_config,
    is_eager=True,
    expose_value=False,
    help="Read values of options from this TOML file; the command line wins over it.",
)

verbosity_options = stacked(
    click.option(
        "-q",
        "--quiet",
        is_flag=True,
        expose_value=False,
        callback=_level(logging.ERROR),
        help="Print only errors on stderr.",
    ),
    click.option(
        "-v",
        "--verbose",
        is_flag=True,
        expose_value=False,
        callback=_level(logging.DEBUG),
        help="Print more details, and tracebacks, on stderr.",
    ),
)

junit_option = click.option(
    "--junit", type=FILE, help="Write the verdicts as JUnit XML into this file."
)


# The model and its input

checkpoint_options = stacked(
    click.option("--key", metavar="KEY", help="Take the weights at this key of a checkpoint."),
    click.option(
        "--strip-prefix", metavar="PREFIX", help="Remove this prefix from the names of weights."
    ),
    click.option(
        "--ema/--no-ema",
        default=None,
        show_default="no-ema",
        help="Take the averaged (EMA) weights of a checkpoint, or the plain ones.",
    ),
)
"""Where in a checkpoint the weights are."""

model_options = stacked(
    click.option(
        "--arch",
        metavar="MODEL",
        shell_complete=complete.models,
        help="Build this architecture for a MODEL that is a file of weights.",
    ),
    click.option(
        "--weights",
        metavar="WEIGHTS",
        shell_complete=complete.paths,
        help=f"Load these weights: {WEIGHTS_HELP}.",
    ),
    click.option(
        "--seed",
        type=int,
        metavar="N",
        default=0,
        show_default=True,
        help="Seed the random numbers of random weights and of noise.",
    ),
    click.option(
        "--model-arg",
        multiple=True,
        metavar="KEY=VALUE",
        help="Pass this argument to the factory or builder of the model; repeatable.",
    ),
    click.option(
        "--allow-global",
        multiple=True,
        metavar="PKG.NAME",
        help="Let a pickled model use this class or function; repeatable.",
    ),
    click.option("--unsafe-load", is_flag=True, help="Let a pickled model run any code it holds."),
    checkpoint_options,
    click.option(
        "--partial", is_flag=True, help="Load the weights that fit, although others do not."
    ),
    click.option(
        "--device",
        metavar="DEVICE",
        default="auto",
        show_default=True,
        help="Run the model on this device: auto, cpu, cuda, cuda:N or mps.",
    ),
)

input_options = stacked(
    click.option(
        "--size",
        type=SizeType(),
        help="Resize the shorter side of each image to N pixels, or the image to HxW.",
    ),
    click.option(
        "--crop", type=SizeType(), help="After resizing, crop the centre to NxN or HxW pixels."
    ),
    click.option(
        "--mean",
        type=NumbersType(),
        help="Subtract these means from the channels, whose values are 0..1.",
    ),
    click.option(
        "--std",
        type=NumbersType(),
        help="Divide the channels by these standard deviations, once --mean is subtracted.",
    ),
    click.option(
        "--channels",
        type=click.Choice(["1", "3"]),
        help="Read images as greyscale (1) or RGB (3).",
    ),
    click.option(
        "--exif/--no-exif",
        default=True,
        show_default=True,
        help="Turn images as their EXIF orientation says, or leave them as they are stored.",
    ),
    click.option(
        "--background",
        metavar="COLOUR",
        default="white",
        show_default=True,
        help="Put this colour under transparent images.",
    ),
    click.option(
        "--frames",
        type=int,
        metavar="N",
        default=16,
        show_default=True,
        help="Take N frames of each clip, for video models.",
    ),
    click.option(
        "--inputs",
        type=int,
        metavar="N",
        show_default="as the model's forward says",
        help="Pass N images at once to the model.",
    ),
)


def key_values(pairs: Sequence[str]) -> dict[str, Any]:
    """`key=value` strings to keyword arguments; values are Python literals, else strings."""
    arguments = {}
    for pair in pairs:
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


def to_model_options(model: str, given: dict[str, Any]) -> ModelOptions:
    """The options of the model, as a record."""
    from featviz.models.load import ModelOptions

    names = ["arch", "weights", "seed", "unsafe_load", "device"]
    names += ["key", "strip_prefix", "ema", "partial"]
    return ModelOptions(
        model,
        model_args=key_values(given["model_arg"]),
        allow_globals=tuple(given["allow_global"]),
        **{name: given[name] for name in names},
    )


def to_input_options(given: dict[str, Any]) -> InputOptions:
    """The options of the input, as a record."""
    from featviz.models.preprocess import InputOptions

    names = ("size", "crop", "mean", "std", "exif", "background", "frames", "inputs")
    channels = int(given["channels"]) if given["channels"] else None
    return InputOptions(channels=channels, **{name: given[name] for name in names})
