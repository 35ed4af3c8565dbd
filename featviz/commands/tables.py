"""Tables for people whose rows are lines for grep and awk."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


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
    from rich.text import Text

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
        table.add_row(*map(Text, row))  # Text: brackets in a name are no markup
    console.print(table)
    for line in footer:
        console.print(line, markup=False, highlight=False)


def shape(sizes: Sequence[int] | None) -> str:
    """`1×64×56×56`; nothing where there is no shape."""
    return "×".join(map(str, sizes or ()))
