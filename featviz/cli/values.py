"""Values of the command line: paths and URLs, and a TOML file that gives options."""

from __future__ import annotations

import os
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
    """A path of this machine, and with `urls` the URL of a run in an object store, too."""

    def __init__(self, *, urls: bool = False, **settings: Any) -> None:
        super().__init__(path_type=Path, **settings)
        self.urls = urls
        self.name = "directory" if urls else self.name

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Read it."""
        if self.urls and (isinstance(value, Url) or is_url(value)):
            return value if isinstance(value, Url) else Url.of_run(value)
        refuse_url(value)
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            path = Path(value)
            hint = "check the path" if os.path.lexists(path) else hint_of(path, misspelt(path))
            raise UsageError(error.message, hint) from None


FILE = PathType(exists=True, dir_okay=False)
RUN = PathType(urls=True, exists=True)
"""A run directory. A file is taken, too: the reader of runs says what is wrong with it."""

_LARGEST_CONFIG = 2**13
"""Bytes of a TOML file: of a long dotted key Python's reader takes the square."""


def read_config(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    """Take values of options from a TOML file: top-level keys, or those in a table of the command.

    A key is an option's long name without dashes in front; `model` and `images` stand for the
    arguments. Values are what one would type, paths included; the command line wins over them.
    """
    if path is None:
        return
    group, own = ctx.parent.command if ctx.parent else None, str(ctx.info_name)
    commands = group.list_commands(ctx) if isinstance(group, click.Group) else []
    content = _read_toml(path)
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    for key in sorted(tables.keys() - {own, *commands}):
        lacks = f"{path} has a table [{quoted(key)}], and there is no such command"
        hint = "a table is named as a command is, and holds its options"
        raise UsageError(f"{lacks}; {_meant(key, commands or [own])}", hint)
    params: dict[str, click.Parameter] = {}
    for param in ctx.command.params:
        names = [name.removeprefix("--") for name in param.opts if name.startswith("--")]
        is_argument = isinstance(param, click.Argument)
        params |= dict.fromkeys([str(param.name)] if is_argument else names, param)
    hint = "a key is an option's long name without dashes, or model or images"
    defaults = {}
    plain = {key: value for key, value in content.items() if key not in tables}
    for key, value in {**plain, **tables.get(own, {})}.items():
        name = key.replace("_", "-")
        if name not in params:
            lacks = f"{path} has {quoted(repr(key))}, which {ctx.command_path} lacks"
            raise UsageError(f"{lacks}; {_meant(name, params)}", hint)
        if isinstance(value, dict):
            raise UsageError(f"{path} has a table {quoted(repr(key))}, expected a value", hint)
        defaults[str(params[name].name)] = _as_typed(params[name], value)
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path, _LARGEST_CONFIG))
    except (OSError, FileError, ValueError, RecursionError) as error:
        words = "too many levels" if isinstance(error, RecursionError) else quoted(str(error))
        hint = 'lines of TOML say OPTION = VALUE, such as layers = "ReLU", below [COMMAND] or alone'
        raise UsageError(f"{quoted(str(path))} cannot be read: {words}", hint) from error


def _meant(name: str, names: Iterable[str]) -> str:
    close = mistakes.close_to(name, names)
    return f"did you mean {close[0]}?" if close else f"one of {', '.join(sorted(names))}"


def _as_typed(param: click.Parameter, value: Any) -> Any:
    """A TOML list is a list for repeatable options, and one comma-separated value for others."""
    many = param.multiple if isinstance(param, click.Option) else param.nargs == -1
    if isinstance(value, list) and not many:
        return ",".join(str(item) for item in value)
    if isinstance(param, click.Option) and param.is_flag and not isinstance(value, bool):
        return str(value)  # click reads words
    return [value] if many and not isinstance(value, list) else value
