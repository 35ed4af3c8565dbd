"""The values of options: the types that they parse into, and a TOML file that gives them."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from featviz.cli import mistakes
from featviz.errors import FileError, UsageError
from featviz.files import read_text
from featviz.files.missing import hint_of, misspelt
from featviz.files.urls import Url, is_url, refuse_url
from featviz.text import quoted


class PathType(click.Path):
    """A path of this machine; a URL, of which a path would make a folder `s3:`, is refused."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(path_type=Path, **settings)

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Read a path, or refuse it."""
        try:
            refuse_url(value)
            return super().convert(value, param, ctx)
        except UsageError as error:
            raise mistakes.BadValueError(error.message, error.hint, param, ctx) from None
        except click.BadParameter as error:
            path = Path(value)
            if os.path.lexists(path):
                raise
            hint = hint_of(path, misspelt(path))
            raise mistakes.BadValueError(error.message, hint, param, ctx) from None


PASSING = ("memory",)
"""Protocols of stores that end with their process: of use in Python, but to no command."""


class PlaceType(PathType):
    """A run directory: a path, or a URL of an object store that outlives the command. A file is
    taken, too, since the reader of runs says what is wrong with it."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.name = "directory"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Read a path or a URL, or refuse it."""
        if isinstance(value, Url):
            return value
        try:
            if is_url(value):
                return lasting(Url.of_run(value))
        except UsageError as error:
            raise mistakes.BadValueError(error.message, error.hint, param, ctx) from None
        return super().convert(value, param, ctx)


def lasting(url: Any) -> Any:
    """A path, or a URL whose store outlives this command.

    Raises:
        UsageError: it does not.
    """
    if isinstance(url, Url) and url.protocol in PASSING:
        raise UsageError(
            f"{quoted(str(url))} is in the memory of this command, and vanishes with it",
            "give a folder, or a store that stays, such as s3://bucket/maps",
        )
    return url


EXISTING_FILE = PathType(exists=True, dir_okay=False)
PLACE = PlaceType()
EXISTING_PLACE = PlaceType(exists=True)


_LARGEST_CONFIG = 2**16
"""Bytes of a TOML file."""

_LONG_KEY = re.compile(
    r"""(?<![\w-]) (?: (?: [\w-]++ | "[^"\n]*+" | '[^'\n]*+' ) [ \t]*+ \. [ \t]*+ ){50}""",
    re.VERBOSE,
)
"""A dotted key of more than 50 parts: Python's reader takes the square of their number."""


_KEYS = "a key is an option's long name without dashes, or model or images"


class ConfigError(click.BadParameter):
    """A file of --config that does not say what it should, with what helps."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


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
            raise ConfigError(f"{lacks}; {_meant(name, params)}", _KEYS)
        if isinstance(value, dict):
            raise ConfigError(f"{path} has a table {quoted(repr(key))}, expected a value", _KEYS)
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
        hint = 'lines of TOML say OPTION = VALUE, such as layers = "ReLU", below [COMMAND] or alone'
        raise ConfigError(f"{quoted(str(path))} cannot be read: {words}", hint) from error


def _flat(content: dict[str, Any], path: Path, ctx: click.Context) -> dict[str, Any]:
    """The keys outside of tables, and over them those of the command's own table.

    Tables of other commands are for them; a table of no command is a mistake.
    """
    group = ctx.parent.command if ctx.parent else None
    commands = group.list_commands(ctx) if isinstance(group, click.Group) else []
    command = str(ctx.info_name)
    plain = {key: value for key, value in content.items() if not isinstance(value, dict)}
    for key in sorted(content.keys() - plain.keys() - {command, *commands}):
        lacks = f"{path} has a table [{quoted(key)}], and there is no such command"
        hint = "a table is named as a command is, and holds its options"
        raise ConfigError(f"{lacks}; {_meant(key, commands or [command])}", hint)
    return {**plain, **(content[command] if command in content.keys() - plain.keys() else {})}


def _meant(name: str, names: Iterable[str]) -> str:
    close = mistakes.close_to(name, names)
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
    if isinstance(param, click.Option) and param.is_flag and not isinstance(value, bool):
        return str(value)  # click reads words
    return [value] if many and not isinstance(value, list) else value


def given_or_config(ctx: click.Context, name: str, value: Any) -> Any:
    """An argument's value, or the config file's; a usage error where neither has it."""
    answer = value or (ctx.default_map or {}).get(name)
    if not answer:
        raise mistakes.missing(name, ctx)
    return answer
