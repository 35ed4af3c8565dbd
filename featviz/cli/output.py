"""What commands print: names from outside never reach a terminal with their control
characters."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featviz.errors import FeatvizError, StoreError
from featviz.text import gaps, of_image, printable, printable_json

if TYPE_CHECKING:
    from featviz.records import Skip

log = logging.getLogger(__name__)


waiting: list[str] = []
"""Warnings that are printed with the first result."""
image_hints: set[str] = set()
"""Hints of images that failed, each of which is printed once: all images of a folder may
fail alike."""


def print_waiting() -> None:
    """Print the warnings that wait for the first result."""
    for warning in waiting:
        click.echo(f"warning: {printable(warning)}", err=True)
    waiting.clear()


def document(content: Mapping[str, Any], indent: int | None = 1) -> None:
    """Print one JSON document on stdout.

    Args:
        indent: spaces a level; None puts it on one line, for what prints several.
    """
    text(printable_json(content, indent))


def text(message: str = "") -> None:
    """Print our own text on stdout, and hand all to the system, so that a disk that is
    full, or a reader that has gone, shows here and not at Python's end.

    Args:
        message: without control characters from outside; it gets a line end where it has
            none. Empty text prints nothing.

    Raises:
        BrokenPipeError: the reader has gone.
        StoreError: stdout cannot be written.
    """
    if message:
        print_waiting()
    try:
        click.echo(message, nl=message[-1:] not in ("", "\n"))
    except BrokenPipeError:
        raise
    except OSError as error:
        drop_stdout()
        raise StoreError(
            f"stdout cannot be written: {error.strerror or error}"
        ) from error


def drop_stdout() -> None:
    """Let what is still to be printed lead nowhere, or Python would fail on it at its
    end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def error(message: str, hint: str | None = None) -> None:
    """Print on stderr what went wrong, and what helps.

    Args:
        message: may hold anything: control characters are escaped.
        hint: empty or None prints no second line.
    """
    click.echo(f"error: {printable(message)}", err=True)
    if hint:
        click.echo(f"hint: {printable(hint)}", err=True)


def image_error(image: str, message: str, hint: str | None = None) -> None:
    """Print on stderr what went wrong with an image, which is named once; the hint where
    no other image had it."""
    error(of_image(image, message), None if hint in image_hints else hint)
    image_hints.add(hint or "")


def left_out(skipped: Iterable[Skip], never_ran: Collection[str] = ()) -> None:
    """Warn of what could not be drawn, and of layers that did not run."""
    for line in gaps({skip.label: skip.reason for skip in skipped}, never_ran):
        log.warning("%s", line)


def to_look_at(what: str, *arguments: object) -> str:
    """A hint with the command `featviz report` that shows a result.

    Args:
        what: is shown: `them`, `the findings`.
        *arguments: of the command.
    """
    command_line = shlex.join(["featviz", "report", *map(str, arguments)])
    return f"to look at {what}: {command_line}"


def written(what: str, page: Path, show: bool) -> None:
    """Say where a report or a picture is, and open it in the user's browser if that is
    asked.

    Args:
        what: was written, as the message begins: `report`, `3 layers`.
        page: the file, or a folder of several.
        show: whether to open it; without a browser the message has its address.
    """
    import webbrowser

    address = page.absolute().as_uri() if show else ""
    if not show:
        log.info("%s in %s", what, page)
    elif webbrowser.open(address):
        log.info("%s in %s, opened in the browser", what, page)
    else:
        log.warning(
            "%s in %s; no browser could be started: open %s", what, page, address
        )


@contextmanager
def progress_bar() -> Iterator[Callable[[int], None]]:
    """A progress bar over images, on a terminal only; call it with how many there are
    in all."""
    # a log or a pipe gets lines alone: a bar would fill it with control characters
    if not sys.stderr.isatty():
        yield lambda total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("images", total=None)
        yield lambda total: bar.update(task, total=total, advance=1)


@contextmanager
def batch_progress() -> Iterator[Callable[[str, FeatvizError | None, int], None]]:
    """Progress of a `run.study.Study`: what goes wrong with an image, and a bar on a
    terminal."""
    with progress_bar() as advance:

        def report(image: str, fault: FeatvizError | None, total: int) -> None:
            advance(total)
            if fault is None:
                print_waiting()
            else:
                image_error(image, fault.message, fault.hint)

        yield report
