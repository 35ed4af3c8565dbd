"""Tables, as the command line prints them and a notebook shows them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from featviz.text import printable


class TextTable(NamedTuple):
    """A table of words."""

    headings: Sequence[str]
    numbers: Collection[str]
    """Headings of the columns that are set flush right."""
    rows: Sequence[Sequence[str]]
    totals: Sequence[Sequence[str]] = ()
    """Further rows, at the end."""
    footer: Sequence[str] = ()
    """Lines below the table."""
    above: Sequence[str] = ()
    """Lines above the table."""

    def __str__(self) -> str:
        """All of it as plain text, columns apart by two spaces; control characters are escaped."""
        cells = [[printable(str(c)) for c in row] for row in self._all]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        right = [heading in self.numbers for heading in self.headings]
        lines = [
            "  ".join(
                words.rjust(width) if flush else words.ljust(width)
                for words, width, flush in zip(row, widths, right, strict=True)
            ).rstrip()
            for row in cells
        ]
        return "\n".join([*map(printable, self.above), *lines, *map(printable, self.footer)])

    @property
    def _all(self) -> list[Sequence[str]]:
        return [self.headings, *self.rows, *self.totals]
