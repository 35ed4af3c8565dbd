"""`--config`: values of options from a TOML file. The command line wins over it."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

import click

from featviz.errors import FileError, UsageError
from featviz.files import read_text
from featviz.text import did_you_mean, quoted

_LARGEST = 2**13
"""A TOML file has at most this many bytes: Python's reader takes quadratic time for a long
dotted key."""


def read_config(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    """The callback of --config: make the values in a file the defaults of this command. A
    value in the table of the command wins over one at the top of the file. Tables of other
    commands are ignored.

    Args:
        path: the file; None if --config was not given.

    Raises:
        UsageError: the file cannot be read, is not TOML, or has a key that is neither an
            option of the command nor the name of a command.
    """
    if path is None:
        return
    params = _params_by_key(ctx.command)
    group = ctx.find_root().command
    assert isinstance(group, click.Group), "read_config is called for its commands"
    commands = group.list_commands(ctx)
    values: dict[str, Any] = {}
    table: dict[str, Any] = {}
    for key, value in _content(path).items():
        if not isinstance(value, dict):
            values[key] = value
            continue
        if key not in commands:
            raise _unknown_key_error(path, key, "no command has", commands)
        if key == ctx.info_name:
            table = value
    # as defaults of click, so that the command line wins over them
    defaults = {}
    for key, value in {**values, **table}.items():
        name = key.replace("_", "-")
        if name not in params:
            raise _unknown_key_error(path, key, f"{ctx.command_path} lacks", params)
        defaults[str(params[name].name)] = _as_click_value(params[name], value)
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


def _content(path: Path) -> dict[str, Any]:
    """The content of a TOML file.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        return tomllib.loads(read_text(path, _LARGEST))
    except (OSError, FileError, ValueError, RecursionError) as error:
        reason = quoted(str(error))
        if isinstance(error, RecursionError):  # in place of Python's text on its stack
            reason = "too many levels"
        raise UsageError(
            f"{quoted(str(path))} cannot be read: {reason}",
            'lines of TOML say OPTION = VALUE, such as layers = "ReLU", below [COMMAND]'
            " or alone",
        ) from error


def _params_by_key(command: click.Command) -> dict[str, click.Parameter]:
    """The options of a command by their long names without dashes, and its arguments by
    their names."""
    params: dict[str, click.Parameter] = {}
    for param in command.params:
        long_names = [name[2:] for name in param.opts if name.startswith("--")]
        params |= dict.fromkeys(long_names or [str(param.name)], param)
    return params


def _unknown_key_error(
    path: Path, key: str, problem: str, names: Collection[str]
) -> UsageError:
    """The error for a key of the file that is not known.

    Args:
        problem: what is wrong, as the end of a sentence after `which`.
        names: the keys that are known, with dashes.
    """
    every_name = f"one of {', '.join(sorted(names))}"
    remedy = did_you_mean(key.replace("_", "-"), names, every_name)
    return UsageError(
        f"{path} has {quoted(repr(key))}, which {problem}; {remedy}",
        "a key is an option's long name without dashes, or model or images; "
        "a table is named as a command is",
    )


def _as_click_value(param: click.Parameter, value: Any) -> Any:
    """A value of the file, in the form that click expects of a default."""
    # an argument of click has neither `multiple` nor `is_flag`
    is_repeatable = param.nargs == -1 or getattr(param, "multiple", False)
    is_flag = getattr(param, "is_flag", False)
    if is_repeatable:
        return value if isinstance(value, list) else [value]
    # for an option that is not repeatable, a list is one value with commas
    if isinstance(value, list):
        return ",".join(map(str, value))
    if is_flag and not isinstance(value, bool):
        return str(value)
    return value
