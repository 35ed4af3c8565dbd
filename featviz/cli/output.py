"""What commands print. Control characters in names from outside are escaped, so that they
never reach a terminal."""

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
"""Hints of failed images that were printed: each is printed once, since all images of a
folder may fail for one reason."""


def print_waiting() -> None:
    """Print the warnings in `waiting`, and forget them."""
    for warning in waiting:
        click.echo(f"warning: {printable(warning)}", err=True)
    waiting.clear()


def document(content: Mapping[str, Any], indent: int | None = 1) -> None:
    """Print one JSON document on stdout.

    Args:
        indent: spaces of a level; None prints one line, for JSON lines.
    """
    text(printable_json(content, indent))


def text(message: str = "") -> None:
    """Print the waiting warnings, and then a text on stdout. stdout is flushed, so that a
    full disk or a closed pipe is an error here, and not when Python ends.

    Args:
        message: printed as it is, with a line end added if it has none. An empty text only
            flushes stdout.

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
    """Send stdout to the null device. Otherwise Python would fail when it ends, and flushes
    stdout."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def error(message: str, hint: str | None = None) -> None:
    """Print an error and a hint on stderr, with control characters escaped.

    Args:
        hint: None or an empty text for no hint.
    """
    click.echo(f"error: {printable(message)}", err=True)
    if hint:
        click.echo(f"hint: {printable(hint)}", err=True)


def image_error(image: str, message: str, hint: str | None = None) -> None:
    """Print on stderr why an image failed, and the hint unless it was printed before."""
    error(of_image(image, message), None if hint in image_hints else hint)
    image_hints.add(hint or "")


def left_out(skipped: Iterable[Skip], never_ran: Collection[str] = ()) -> None:
    """Warn of captures that could not be drawn, and of layers that did not run."""
    for line in gaps({skip.label: skip.reason for skip in skipped}, never_ran):
        log.warning("%s", line)


def to_look_at(noun: str, *arguments: object) -> str:
    """A hint how to look at a result: `to look at them: featviz report maps --open`.

    Args:
        noun: stands for the result: `them`, `the findings`.
        *arguments: the arguments of `featviz report`.
    """
    command_line = shlex.join(["featviz", "report", *map(str, arguments)])
    return f"to look at {noun}: {command_line}"


def log_written(noun: str, page: Path, show: bool) -> None:
    """Log where a report or a picture is, and open it in the user's browser if asked. If
    no browser can be started, warn, with the address to open by hand.

    Args:
        noun: stands for what was written: `report`, `3 layers`.
        page: the file, or the folder of several pages.
        show: whether to open it.
    """
    import webbrowser

    address = page.absolute().as_uri() if show else ""
    if not show:
        log.info("%s in %s", noun, page)
    elif webbrowser.open(address):
        log.info("%s in %s, opened in the browser", noun, page)
    else:
        log.warning(
            "%s in %s; no browser could be started: open %s", noun, page, address
        )


@contextmanager
def progress_bar() -> Iterator[Callable[[int], None]]:
    """A progress bar over images. If stderr is not a terminal there is no bar, since a bar
    would fill a log with control characters.

    Yields:
        A function that moves the bar by one image; it takes the number of all images.
    """
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
    """The `progress` of a `run.study.Study`. It moves a bar on a terminal, prints why an
    image failed, and prints the waiting warnings with the first image that did not fail.

    Yields:
        A function that takes an image's name, its error (None if it did not fail), and the
        number of all images.
    """
    with progress_bar() as advance:

        def report(image: str, fault: FeatvizError | None, total: int) -> None:
            """Move the bar, and print the error of an image or the waiting warnings."""
            advance(total)
            if fault is None:
                print_waiting()
            else:
                image_error(image, fault.message, fault.hint)

        yield report
