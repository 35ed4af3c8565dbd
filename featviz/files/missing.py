"""Paths at which there is nothing: what they may mean, and how far they lead."""

from __future__ import annotations

import difflib
import os
from itertools import islice
from pathlib import Path, PurePath

from featviz.text import quoted

_MOST_NAMES = 5000
"""Entries of a folder among which a misspelt name is looked for."""
_LONGEST_NAME = 80
"""Letters of a name that are compared: 5000 names of so many take 2 seconds at worst."""
_LIKE = 0.75
"""How like a name must be, as difflib counts, to be meant."""


def misspelt(path: Path) -> Path | None:
    """The file or folder that a path may mean, by the entries of the folders on its way that have
    like names; None where there is none.

    Example:
        >>> misspelt(Path("photso/Cta.jpg"))  # doctest: +SKIP
        PosixPath('photos/cat.jpg')
    """
    near = Path(path.anchor)
    *folders, name = path.relative_to(near).parts or ("",)
    for part in folders:
        found = part if _is_folder(near / part) else _like(part, near, folders=True)
        if found is None:
            return None
        near /= found
    last = _like(name, near, folders=False)
    return None if last is None or near / last == path else near / last


def hint_of(path: Path, near: Path | None) -> str:
    """What helps: the path that was meant, or where the way to this one ends.

    Args:
        near: what `misspelt` says of it.
    """
    return f"check the path: {_end(path)}" if near is None else f"did you mean {quoted(str(near))}?"


def _end(path: Path) -> str:
    """Where the way to a path ends: `the folder 'photos' has no 'cat.jpg'`."""
    folder, missing = next(
        ((one, path.relative_to(one).parts[0]) for one in path.parents if _is_folder(one)),
        (Path(), str(path)),
    )
    if os.path.lexists(folder / missing):
        return f"{quoted(str(folder / missing))!r} is no folder"
    where = "the current folder" if folder == Path() else f"the folder {quoted(str(folder))!r}"
    return f"{where} has no {quoted(missing)!r}"


def _is_folder(path: Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 - takes any name


def _like(name: str, folder: Path, folders: bool) -> str | None:
    """The entry of a folder that a name is most like, or that it is without its ending.

    Args:
        folders: whether only folders will do.
    """
    try:
        with os.scandir(folder) as entries:
            some = islice(entries, _MOST_NAMES)
            names = {one.name.lower(): one.name for one in some if not folders or one.is_dir()}
    except (OSError, ValueError):
        return None
    wanted = name[:_LONGEST_NAME].lower()
    close = difflib.get_close_matches(wanted, names, 1, _LIKE)
    close = close or sorted(other for other in names if PurePath(other).stem == wanted)
    return names[close[0]] if close else None
