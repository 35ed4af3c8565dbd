"""Tables for people whose rows are lines for grep and awk."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from featviz.text import by, printable

if TYPE_CHECKING:
    from rich.text import Text


def print_table(
    headings: Sequence[str],
    numbers: Collection[str],
    rows: Iterable[Sequence[str]],
    footer: Iterable[str],
) -> None:
    """Print a table and lines below it on stdout; in a pipe a row is one line, however long.

    Args:
        numbers: headings of the columns that are set flush right; the others fold on a narrow
            terminal.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console()
    piped = not console.is_terminal
    if piped:
        console = Console(width=max(console.width, 400))
    table = Table(box=None, pad_edge=False)
    for name in headings:
        if name in numbers:
            table.add_column(name, justify="right")
        else:
            table.add_column(name, overflow="fold", no_wrap=piped)
    for row in rows:
        table.add_row(*map(cell, row))
    console.print(table)
    for line in footer:
        console.print(printable(line), markup=False, highlight=False)


def cell(words: str) -> Text:
    """A cell of a table: brackets in a name are no markup, and control characters are escaped."""
    from rich.text import Text

    return Text(printable(words))


def shape(sizes: Sequence[int] | None) -> str:
    """`1×64×56×56`; nothing where there is no shape."""
    return by(sizes or ())
