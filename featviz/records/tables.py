"""Tables, as the command line prints them and a notebook shows them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple


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
