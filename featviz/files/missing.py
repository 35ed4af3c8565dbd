"""Paths at which there is nothing: what they may mean, and how far they lead."""

from __future__ import annotations

import difflib
import os
from itertools import islice
from pathlib import Path, PurePath

from featviz.text import quoted

_MOST_NAMES, _LONGEST_NAME = 5000, 80
"""Entries of a folder among which a name is looked for, and letters of it that are compared: this
takes 2 seconds at worst."""


def misspelt(path: Path) -> Path | None:
    """The file or folder that a path may mean: one of a like name in its folder; None where there
    is none.

    Example:
        >>> misspelt(Path("photos/Cta.jpg"))  # doctest: +SKIP
        PosixPath('photos/cat.jpg')
    """
    try:
        with os.scandir(path.parent) as entries:
            names = {entry.name.lower(): entry.name for entry in islice(entries, _MOST_NAMES)}
    except (OSError, ValueError):
        return None
    wanted = path.name[:_LONGEST_NAME].lower()
    close = difflib.get_close_matches(wanted, names, 1, 0.75)
    close = close or sorted(name for name in names if PurePath(name).stem == wanted)
    near = path.parent / names[close[0]] if wanted and close else path
    return None if near == path else near


def hint_of(path: Path, near: Path | None) -> str:
    """What helps: the path that was meant, or where the way to this one ends.

    Args:
        near: what `misspelt` says of it.
    """
    if near is not None:
        return f"did you mean {quoted(str(near))}?"
    folders = [one for one in path.parents if os.path.isdir(one)]  # noqa: PTH112
    folder = folders[0] if folders else Path()
    missing = path.relative_to(folder).parts[0] if folders else str(path)
    if os.path.lexists(folder / missing):
        return f"check the path: {quoted(str(folder / missing))!r} is no folder"
    where = "the current folder" if folder == Path() else f"the folder {quoted(str(folder))!r}"
    return f"check the path: {where} has no {quoted(missing)!r}"
