"""What commands print: names from outside never reach a terminal with their control characters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from featviz.text import printable, printable_json


def document(content: Mapping[str, Any], indent: int | None = 1) -> None:
    """Print one JSON document on stdout; without `indent`, on one line."""
    click.echo(printable_json(content, indent))


def line(words: str) -> None:
    """Print one line on stdout."""
    click.echo(printable(words))


def error(message: str, hint: str | None = None) -> None:
    """Say on stderr what went wrong, and what helps."""
    click.echo(f"error: {printable(message)}", err=True)
    if hint:
        click.echo(f"hint: {printable(hint)}", err=True)
