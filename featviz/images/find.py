"""IMAGE arguments to samples: files, folders, globs and archives, here or in stores; and lists."""

from __future__ import annotations

import glob
import logging
import os
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import BinaryIO, TypeAlias

from featviz.errors import FileError, UsageError
from featviz.files import fetch, listing
from featviz.files.missing import hint_of, misspelt
from featviz.files.stores import Remote
from featviz.files.urls import Url, is_url, local_path
from featviz.images import archives
from featviz.images.archives import Place
from featviz.images.formats import SUFFIXES
from featviz.records import Sample
from featviz.text import expand_braces, quoted

log = logging.getLogger(__name__)

Named: TypeAlias = tuple[str, Place]
"""A file and its name within the argument."""


def find_samples(
    arguments: Sequence[str],
    stdin: BinaryIO | None = None,
    nul_separated: bool = False,
    outside: Path | None = None,
) -> list[Sample]:
    """Turn files, folders (recursively), archives, globs, URLs, `{000..063}` for several of these,
    and `-` (a list on stdin) into samples.

    A sample's name is its path relative to the argument, lengthened by as many parent folders as
    make it unique. A file that is named is taken whatever its suffix; folders and archives give
    the files with one of `formats.SUFFIXES`.

    Args:
        outside: a folder that is passed over when it lies in a folder that is searched: the run
            directory, whose pictures would otherwise be images of the next run.

    Raises:
        UsageError: an argument leads to no file, or to a folder, archive or list without images.
    """
    named: list[Named] = []
    for argument in arguments:
        named += _expand(argument, stdin, nul_separated, outside)
    unique: dict[str, Named] = {}
    for name, path in named:
        unique.setdefault(_identity(path), (name, path))
    if len(unique) < len(named):
        log.info("%d images were named more than once", len(named) - len(unique))
    return _named_apart(unique.values())


def files_of(samples: Iterable[Sample]) -> list[Path]:
    """The files on disk that hold samples: their own, or the archives in which they are."""
    paths = dict.fromkeys(path for sample in samples for path in sample.paths)
    files = dict.fromkeys((archives.split(path) or (path,))[0] for path in paths)
    return [file for file in files if isinstance(file, Path)]


def _identity(path: Place) -> str:
    """One spelling for one file; links that lead nowhere are as many failures."""
    if isinstance(path, Remote):
        return f"{path.protocol}://{path.path}::{path.member or ''}"
    place = archives.split(path)
    if place is None:
        return os.path.realpath(path) if _is_there(path) else str(path.absolute())
    return f"{os.path.realpath(str(place[0]))}/{place[1]}"


def _parts(path: Place) -> tuple[str, ...]:
    """The folders and the name by which a file is told from others of its name."""
    way = path.place.replace("::", "/") if isinstance(path, Remote) else _identity(path)
    return PurePath(_tidy(way)).parts


def _expand(argument: str, stdin: BinaryIO | None, nul: bool, outside: Path | None) -> list[Named]:
    if argument == "-":
        return [(_file_name(path), path) for path in _listed(stdin or sys.stdin.buffer, nul)]
    if (parts := expand_braces(argument)) != [argument] and not _is_there(Path(argument)):
        return [named for part in parts for named in _expand(part, stdin, nul, outside)]
    if is_url(argument):
        local = local_path(argument)
        return _of_store(argument) if local is None else _expand(local, None, nul, outside)
    path = Path(argument)
    if _is_there(path) and path.is_dir():
        return _in_folder(path, outside)
    if (place := archives.split(path)) is not None:
        return _in_archive(argument, *place)
    if archives.is_archive(path) and _is_there(path):
        return _whole_archive(path)
    if _is_there(path):
        return [(path.name, path)]
    if glob.has_magic(argument):
        return _globbed(argument)
    raise _no_image(argument)


def _no_image(argument: str) -> UsageError:
    path, message = Path(argument), f"no image {argument!r}: no such file or folder"
    near = misspelt(path)
    again = None if near is None else (argument, str(near))
    return UsageError(message, hint_of(path, near), replace=again)


def _is_there(path: Path) -> bool:
    """Whether there is such a file or folder; no name is too long to be asked for."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _file_name(path: Place) -> str:
    place = archives.split(path)
    return path.name if place is None else _tidy(place[1]).rpartition("/")[2]


def _listed(stdin: BinaryIO, nul: bool) -> list[Place]:
    separator = b"\0" if nul else b"\n"
    lines = (line.rstrip(b"\r") if not nul else line for line in stdin.read().split(separator))
    paths = [_named_file(os.fsdecode(line)) for line in lines if line]
    if not paths:
        raise UsageError("stdin lists no images", "one path a line, or NUL-separated with -0")
    return paths


def _named_file(line: str) -> Place:
    """A path or URL of a file that a list names."""
    if not is_url(line):
        return Path(line)
    local = local_path(line)
    return Remote.at(line) if local is None else Path(local)


def _of_store(url: str) -> list[Named]:
    try:
        return _in_store(url)
    except FileError as error:
        raise FileError(f"{quoted(str(Url(url)))}: {error.message}", error.hint) from error


def _in_store(url: str) -> list[Named]:
    """What a URL stands for: a file in an archive, an archive, a glob, a folder or a file. Whether
    a file is there shows when its turn comes."""
    archive, separator, member = url.partition(archives.SEPARATOR)
    if separator and is_url(archive) and archives.is_archive(Remote.at(archive)):
        place = Remote.at(archive)
        return _in_archive(str(replace(place, member=member)), place, member)
    place = Remote.at(url)
    if archives.is_archive(place):
        return _whole_archive(place)
    if glob.has_magic(place.place):
        return _globbed_in_store(place)
    plain = "/" in place.place and PurePath(place.name).suffix
    if url.endswith("/") or (not plain and fetch.is_folder(place)):
        return _in_folder_of_store(place)
    return [(_tidy(place.name), place)]


def _in_folder_of_store(folder: Remote) -> list[Named]:
    found: list[Named] = [
        (_tidy(name), file)
        for name, file in listing.below(folder)
        if PurePath(name).suffix.lower() in SUFFIXES and not archives.is_hidden(name)
    ]
    if not found:
        raise _without_images(str(folder))
    return found


def _globbed_in_store(pattern: Remote) -> list[Named]:
    found: list[Named] = [(_tidy(name), file) for name, file in listing.matching(pattern)]
    if not found:
        raise UsageError(f"no image matches {quoted(str(pattern))!r}", "check the pattern")
    return found


def _in_folder(folder: Path, outside: Path | None) -> list[Named]:
    inside = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    files = [
        file
        for file in _without(folder, inside, outside)
        if file.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in file.parts)
        and not (folder / file).is_dir()
        and not _is_special(folder / file)
    ]
    if not files:
        raise _without_images(str(folder))
    return [(file.as_posix(), folder / file) for file in files]


def _without_images(folder: str) -> UsageError:
    return UsageError(
        f"no images in folder {folder!r}",
        f"it has no {' '.join(sorted(SUFFIXES))} files; arrays are read where they are named, "
        "for example by a quoted '*.npy'",
    )


def _is_special(path: Path) -> bool:
    """Whether what stands there is a FIFO, device or socket: no image, and not even opened."""
    try:
        special = not stat.S_ISREG(path.stat().st_mode)
    except OSError:  # a link that leads nowhere is an image that fails
        return False
    if special:
        log.warning("%s is no regular file, and left out", quoted(str(path)))
    return special


def _without(folder: Path, inside: Sequence[Path], outside: Path | None) -> Iterator[Path]:
    """The folder's content, but for what lies in `outside`, a folder below it."""
    base, apart = Path(os.path.realpath(folder)), Path(os.path.realpath(outside or folder))
    below = apart != base and apart.is_relative_to(base)
    for path in inside:
        if not (below and path.is_relative_to(apart.relative_to(base))):
            yield path


def _whole_archive(path: Place) -> list[Named]:
    names = _members(path)
    images = [name for name in names if PurePath(name).suffix.lower() in SUFFIXES]
    if not images:
        raise UsageError(f"no images in archive {str(path)!r}", f"it has {len(names)} other files")
    return [(_tidy(name), archives.member(path, name)) for name in images]


def _no_archive(argument: str, archive: Path, name: str) -> UsageError:
    message, near = f"no archive {str(archive)!r} for {argument!r}", misspelt(archive)
    if near is None or not archives.is_archive(near):
        return UsageError(message, hint_of(archive, None))
    meant = f"{near}{archives.SEPARATOR}{name}"
    return UsageError(message, f"did you mean {quoted(meant)}?", replace=(argument, meant))


def _in_archive(argument: str, archive: Place, name: str) -> list[Named]:
    if isinstance(archive, Path) and not archive.is_file():
        raise _no_archive(argument, archive, name)
    names, path = _members(archive), archives.member(archive, name)
    if name not in names and not archives.exists(path):
        raise UsageError(
            f"no image {argument!r}: nothing in the archive is called so",
            f"{str(archive)!r} alone takes all its images",
        )
    return [(_tidy(name), path)]


def _members(path: Place) -> list[str]:
    try:
        if isinstance(path, Path) and path.is_file() and not path.stat().st_size:
            raise UsageError(f"archive {str(path)!r} is empty", "is it whole?")
        return archives.members(path)
    except (OSError, *archives.DAMAGED) as error:
        known = error.hint if isinstance(error, FileError) else None
        words = f"archive {str(path)!r} cannot be read: {error}"
        raise UsageError(words, known or "is it whole?") from error


def _tidy(name: str) -> str:
    """A name without what would lead out of the run directory."""
    return "/".join(part for part in name.split("/") if part not in ("", "..")) or "image"


def _globbed(pattern: str) -> list[Named]:
    parts = PurePath(pattern).parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    base = Path(*parts[:fixed])
    paths = [Path(p) for p in sorted(glob.glob(pattern, recursive=True))]
    files = [path for path in paths if path.is_file()]
    if not files:
        raise UsageError(f"no image matches {pattern!r}", "check the pattern")
    return [(path.relative_to(base).as_posix(), path) for path in files]


def _named_apart(named: Iterable[Named]) -> list[Sample]:
    """Lengthen names that clash (also on file systems without case) by one real parent a round;
    files that only case tells apart are numbered."""
    first = {path: name for name, path in named}
    if not _clashing(first):
        return [Sample(name, (path,), _archive_of(path)) for path, name in first.items()]
    parts = {path: _parts(path) for path in first}
    alike = set(_clashing({path: "/".join(parts[path]) for path in first}))
    names, turn = dict(first), 0
    while clashing := _clashing(names):
        turn += 1
        for index, path in enumerate(clashing):
            tail = parts[path][-(first[path].count("/") + 1 + turn) :]
            names[path] = f"{index + turn}/{first[path]}" if path in alike else "/".join(tail)
    return [Sample(name, (path,), _archive_of(path)) for path, name in names.items()]


def _archive_of(path: Place) -> str | None:
    place = archives.split(path)
    return None if place is None else _identity(place[0])


def _clashing(names: Mapping[Place, str]) -> list[Place]:
    counts = Counter(name.casefold() for name in names.values())
    return [path for path, name in names.items() if counts[name.casefold()] > 1]
