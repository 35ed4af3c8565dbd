"""What helps after an error: a hint, and the whole command that was meant."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from typing import Any

import click

from featviz.errors import FeatvizError

_LONGEST_COMMAND = 500
"""Characters of a command that a hint shows: a glob that the shell has expanded may have more."""

_LONGEST_NAME = 80
"""Letters of a name that are compared with others."""

LIKE, ALMOST = 0.6, 0.85
"""How like a name must be, as difflib counts, to be meant: perhaps, and almost certainly."""


class MistakeError(click.UsageError):
    """A command line that cannot be read, with what helps."""

    def __init__(self, message: str, ctx: click.Context | None, hint: str) -> None:
        super().__init__(message, ctx)
        self.hint = hint


class BadValueError(click.BadParameter):
    """A value that an option does not take, with what helps."""

    def __init__(
        self, message: str, hint: str | None, param: click.Parameter | None, ctx: Any
    ) -> None:
        super().__init__(message, ctx, param)
        self.hint = hint


def remedy(error: FeatvizError, arguments: Sequence[str]) -> str | None:
    """The error's hint, and behind it the command to go on with, where the error knows it and it
    fits on a line."""
    again = _amended(arguments, error.add, error.replace)
    return error.hint if again is None else with_command(error.hint, again)


def click_remedy(error: click.ClickException) -> str | None:
    """The hint of an error of the command line."""
    ctx: click.Context | None = getattr(error, "ctx", None)
    if hint := getattr(error, "hint", None) or _of_a_value(error):
        return str(hint)
    if ctx is None:
        return None
    return f"{ctx.command_path} {help_of(ctx)} lists all options"


def _of_a_value(error: click.ClickException) -> str | None:
    """What helps where an option has a value that it does not take."""
    if not isinstance(error, click.BadParameter) or error.param is None:
        return None
    if isinstance(error.param.type, click.Path):
        return "check the path"
    if isinstance(error.param.type, click.Choice):
        given = error.message.partition(" is not one of ")[0].strip("'")
        close = close_to(given, map(str, error.param.type.choices))
        return f"did you mean {close[0]}?" if close else None
    return None


def help_of(ctx: click.Context) -> str:
    """The option that shows all options of a command."""
    return "--help-all" if getattr(ctx.command, "is_long", False) else "--help"


def with_command(words: str | None, arguments: Sequence[str]) -> str | None:
    """Words, and behind them a whole command line where it is short enough."""
    command = shlex.join(["featviz", *arguments])
    if len(command) > _LONGEST_COMMAND:
        return words
    between = " " if words and words.endswith("?") else ": "
    return f"{words}{between}{command}" if words else command


def _amended(
    arguments: Sequence[str], add: tuple[str, ...], replace: tuple[str, str] | None
) -> list[str] | None:
    """The arguments as an error says; None where it says nothing, or its words are not there (a
    file of --config has them)."""
    if not (add or replace):
        return None
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    again = [*words[:end], *add, *words[end:]]
    if replace is None:
        return again
    old, new = replace
    where = next((i for i, word in enumerate(again) if word in (old, f"--arch={old}")), None)
    if where is None:
        return None
    again[where] = again[where].removesuffix(old) + new
    return again


def close_to(name: str, names: Iterable[str], least: float = LIKE) -> list[str]:
    """The name that a misspelt one is most like, in a list; empty where none is like it."""
    import difflib

    return difflib.get_close_matches(name[:_LONGEST_NAME].lower(), list(names), 1, least)
