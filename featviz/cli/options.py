"""Options that several commands share, and the values they parse into."""

from __future__ import annotations

import ast
import difflib
import logging
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from featviz.cli import complete
from featviz.cli.types import NumbersType, SizeType
from featviz.errors import FileError
from featviz.files import read_text
from featviz.models.sources import MODEL_HELP, WEIGHTS_HELP
from featviz.text import quoted

_LARGEST_CONFIG = 2**16
"""Bytes of a TOML file."""

_LONG_KEY = re.compile(
    r"""(?<![\w-]) (?: (?: [\w-]++ | "[^"\n]*+" | '[^'\n]*+' ) [ \t]*+ \. [ \t]*+ ){50}""",
    re.VERBOSE,
)
"""A dotted key of more than 50 parts: Python's reader takes the square of their number."""

_LONGEST_NAME = 80
"""Letters of a name that are compared with others."""

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    from featviz.models.load import ModelOptions
    from featviz.models.preprocess import InputOptions


def stacked(options: Sequence[Callable[[F], F]]) -> Callable[[F], F]:
    """One decorator for a list of options, in the order in which --help shows them."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def model_forms(function: F) -> F:
    """Put the forms of MODEL into a command's help, where it says {MODEL}."""
    function.__doc__ = str(function.__doc__).replace("{MODEL}", MODEL_HELP)
    return function


def key_values(pairs: Sequence[str]) -> dict[str, Any]:
    """`key=value` strings to keyword arguments; values are Python literals, else strings."""
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key.isidentifier():
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--model-arg")
        try:
            found[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            found[key] = value
    return found


def read_config(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    """Take values of options from a TOML file: top-level keys, or those in a table of the command.

    A key is an option's long name without dashes in front; `model` and `images` stand for the
    arguments. Values are what one would type, paths included; the command line wins over them.
    """
    if path is None:
        return None
    params = {name: p for p in ctx.command.params for name in _config_names(p)}
    defaults = {}
    for key, value in _flat(_read_toml(path), path, ctx).items():
        name = key.replace("_", "-")
        if name not in params:
            lacks = f"{path} has {quoted(repr(key))}, which {ctx.command_path} lacks"
            raise click.BadParameter(f"{lacks}; {_meant(name, params)}")
        if isinstance(value, dict):
            raise click.BadParameter(f"{path} has a table {quoted(repr(key))}, expected a value")
        defaults[str(params[name].name)] = _as_typed(params[name], value)
    ctx.default_map = {**(ctx.default_map or {}), **defaults}
    return path


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path, _LARGEST_CONFIG)
        if _LONG_KEY.search(text):
            raise ValueError("a key of more than 50 parts")
        return tomllib.loads(text)
    except (OSError, FileError, ValueError, RecursionError) as error:
        words = "too many levels" if isinstance(error, RecursionError) else quoted(str(error))
        raise click.BadParameter(f"{quoted(str(path))} cannot be read: {words}") from error


def _flat(content: dict[str, Any], path: Path, ctx: click.Context) -> dict[str, Any]:
    """The keys outside of tables, and over them those of the command's own table.

    Tables of other commands are for them; a table of no command is a mistake.
    """
    group = ctx.parent.command if ctx.parent else None
    commands = group.list_commands(ctx) if isinstance(group, click.Group) else []
    own = str(ctx.info_name)
    found = {key: value for key, value in content.items() if not isinstance(value, dict)}
    for key in sorted(content.keys() - found.keys() - {own, *commands}):
        lacks = f"{path} has a table [{quoted(key)}], and there is no such command"
        raise click.BadParameter(f"{lacks}; {_meant(key, commands or [own])}")
    return {**found, **(content[own] if own in content.keys() - found.keys() else {})}


def _meant(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name[:_LONGEST_NAME], list(names), 1)
    return f"did you mean {close[0]}?" if close else f"one of {', '.join(sorted(names))}"


def _config_names(param: click.Parameter) -> list[str]:
    if isinstance(param, click.Argument):
        return [str(param.name)]
    return [opt.removeprefix("--") for opt in param.opts if opt.startswith("--")]


def _as_typed(param: click.Parameter, value: Any) -> Any:
    """A TOML list is a list for repeatable options, and one comma-separated value for others."""
    many = param.multiple if isinstance(param, click.Option) else param.nargs == -1
    if isinstance(value, list) and not many:
        return ",".join(str(item) for item in value)
    return [value] if many and not isinstance(value, list) else value


def given_or_config(ctx: click.Context, name: str, value: Any) -> Any:
    """An argument's value, or the config file's; a usage error where neither has it."""
    found = value or (ctx.default_map or {}).get(name)
    if not found:
        raise click.UsageError(f"Missing argument '{name.upper()}'.", ctx)
    return found


config_option = click.option(
    "--config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    callback=read_config,
    is_eager=True,
    expose_value=False,
    help="TOML file with values for any option; the command line wins.",
)


def _level(level: int) -> Callable[[click.Context, click.Parameter, bool], None]:
    def set_level(ctx: click.Context, param: click.Parameter, given: bool) -> None:
        if given:
            logging.getLogger("featviz").setLevel(level)

    return set_level


verbosity_options = stacked(
    [
        click.option(
            "-q",
            "--quiet",
            is_flag=True,
            expose_value=False,
            callback=_level(logging.ERROR),
            help="Only errors on stderr.",
        ),
        click.option(
            "-v",
            "--verbose",
            is_flag=True,
            expose_value=False,
            callback=_level(logging.DEBUG),
            help="More details, and tracebacks.",
        ),
    ]
)


def layer_options(default: str) -> Callable[[F], F]:
    """`--layers`; `default` says in the help what is taken without it."""
    return click.option(
        "--layers",
        multiple=True,
        metavar="SELECTORS",
        shell_complete=complete.layers,
        help="Class names, globs, re:REGEX, Class@glob, fn:FUNCTION, #index, !not; separated by "
        f"commas. Without it, {default}.",
    )


layer_option = layer_options("one layer for each stage")

model_options = stacked(
    [
        click.option(
            "--arch",
            metavar="MODEL",
            shell_complete=complete.models,
            help="What a file of weights belongs to.",
        ),
        click.option(
            "--weights",
            metavar="W",
            shell_complete=complete.paths,
            help=f"{WEIGHTS_HELP}.",
        ),
        click.option("--seed", type=int, default=0, show_default=True, help="For random weights."),
        click.option(
            "--model-arg",
            multiple=True,
            metavar="KEY=VALUE",
            help="Argument of a factory or builder; repeatable.",
        ),
        click.option(
            "--allow-global",
            multiple=True,
            metavar="PKG.NAME",
            help="A class or function that a pickled model may use; repeatable.",
        ),
        click.option(
            "--unsafe-load", is_flag=True, help="Let a pickled model run whatever it holds."
        ),
        click.option("--key", metavar="KEY", help="Where in a checkpoint the weights are."),
        click.option("--strip-prefix", metavar="P", help="What to take off their names."),
        click.option(
            "--ema/--no-ema", default=None, help="Averaged weights, or plain ones (default)."
        ),
        click.option("--partial", is_flag=True, help="Load what fits of weights that fit in part."),
        click.option(
            "--device", default="auto", show_default=True, help="auto, cpu, cuda, cuda:N or mps."
        ),
    ]
)

input_options = stacked(
    [
        click.option("--size", type=SizeType(), help="Resize: the shorter side, or HxW."),
        click.option("--crop", type=SizeType(), help="Centre crop after resizing."),
        click.option("--mean", type=NumbersType(), help="Subtracted from each channel of 0..1."),
        click.option("--std", type=NumbersType(), help="Divides each channel."),
        click.option("--channels", type=click.Choice(["1", "3"]), help="1: grey, 3: RGB."),
        click.option(
            "--exif/--no-exif", default=True, help="Apply the EXIF orientation (default)."
        ),
        click.option(
            "--background", default="white", show_default=True, help="Under transparent images."
        ),
        click.option(
            "--frames", type=int, default=16, show_default=True, help="Of a clip, for video models."
        ),
        click.option(
            "--inputs", type=int, help="Images that the model takes at once (it says so itself)."
        ),
    ]
)


def to_model_options(model: str, given: dict[str, Any]) -> ModelOptions:
    """The options of the model, as a record."""
    from featviz.models.load import ModelOptions

    names = [
        "arch",
        "weights",
        "seed",
        "unsafe_load",
        "device",
        "key",
        "strip_prefix",
        "ema",
        "partial",
    ]
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


@contextmanager
def bar() -> Iterator[Callable[[int], None]]:
    """A progress bar over images, on a terminal only; call it with how many there are in all."""
    if not sys.stderr.isatty():
        yield lambda total: None
        return
    from rich.console import Console
    from rich.progress import Progress as RichProgress

    with RichProgress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("images", total=None)
        yield lambda total: bar.update(task, total=total, advance=1)
