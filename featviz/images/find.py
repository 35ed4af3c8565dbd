"""IMAGE arguments to samples: files, folders, globs, archives, URLs; clips and groups of images."""

from __future__ import annotations

import glob
import io
import itertools
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath, PurePosixPath
from typing import BinaryIO, TypeAlias, TypeVar

from featviz.errors import FileError, UsageError
from featviz.files import hint_of, misspelt, real, urls
from featviz.files.urls import Url, is_url
from featviz.images import decode
from featviz.images.decode import SUFFIXES, VIDEO_SUFFIXES, Place, split
from featviz.records import Sample
from featviz.text import is_number, quoted, safe_way

Key = TypeVar("Key")
Named: TypeAlias = tuple[str, Place]
"""A file and its name within the argument."""


def find_samples(
    arguments: Sequence[str],
    stdin: BinaryIO | None = None,
    nul_separated: bool = False,
    outside: Path | None = None,
) -> list[Sample]:
    """Turn files, folders, archives, globs, URLs and `-` (a list on stdin) into samples; UsageError
    where an argument leads to no image. A name is the path relative to the argument, lengthened by
    as many folders as make it unique. Nothing in `outside`, the run directory, is taken."""
    unique: dict[str, Named] = {}
    for argument in arguments:
        for name, path in _expand(argument, stdin, nul_separated, outside):
            unique.setdefault(_identity(path), ("/".join(_tidy(name)) or "image", path))

    def parts(path: Place) -> list[str]:
        far = path.place.replace("::", "/") if isinstance(path, Url) else _identity(path)
        return _tidy(far)

    names = told_apart({path: name for name, path in unique.values()}, parts)
    inside = {path: split(path) for path in names}
    return [
        Sample(name, (path,), _identity(archive[0]) if (archive := inside[path]) else None)
        for path, name in names.items()
    ]


def check_arguments(arguments: Sequence[str]) -> None:
    """Refuse paths that are not there, before any work."""
    for argument in arguments:
        if argument != "-" and not is_url(argument) and not os.path.exists(argument):  # noqa: PTH110 - takes any name
            _expand(argument, None, False, None)


def _tidy(name: str) -> list[str]:
    """The parts of a name but for those that would lead out of the run directory."""
    return [part for part in name.split("/") if part not in ("", "..")]


def _identity(path: Place) -> str:
    """One spelling for one file; links that lead nowhere are as many failures."""
    if isinstance(path, Url):
        return f"{path.protocol}://{path.key}::{path.member or ''}"
    if inside := split(path):
        return f"{os.path.realpath(str(inside[0]))}/{inside[1]}"
    return os.path.realpath(path) if os.path.exists(path) else str(path.absolute())  # noqa: PTH110


def _expand(argument: str, stdin: BinaryIO | None, nul: bool, outside: Path | None) -> list[Named]:
    """The files that an argument stands for, at least one."""
    found: list[Named] = []
    if argument == "-":
        lines = (stdin or sys.stdin.buffer).read().split(b"\0" if nul else b"\n")
        texts = [os.fsdecode(line if nul else line.rstrip(b"\r")) for line in lines]
        places = [Url.of_file(text) if is_url(text) else Path(text) for text in texts if text]
        if not places:
            raise UsageError("stdin lists no images", "one path a line, or NUL-separated with -0")
        for place in places:
            inside = split(place)
            found.append((inside[1].rpartition("/")[2] if inside else place.name, place))
        return found
    path = Path(argument)
    there = os.path.exists(path)  # noqa: PTH110 - takes any name
    if is_url(argument):
        try:
            return _in_store(argument)
        except FileError as error:
            raise FileError(f"{quoted(str(Url(argument)))}: {error.message}", error.hint) from error
    if there and path.is_dir():
        return _in_folder(path, outside)
    if inside := split(path):
        return _in_archive(argument, *inside)
    if there and decode.is_archive(path):
        return _in_archive(argument, path)
    if there:
        return [(path.name, path)]
    if glob.has_magic(argument):
        fixed = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), path.parts))
        files = map(Path, sorted(glob.glob(argument, recursive=True)))
        found = [(file.relative_to(fixed).as_posix(), file) for file in files if file.is_file()]
        if not found:
            raise UsageError(f"no image matches {quoted(argument)!r}", "check the pattern")
        return found
    near = misspelt(path)
    words, hint = f"no image {argument!r}: no such file or folder", hint_of(path, near)
    raise UsageError(words, hint, replace=(argument, str(near)) if near else None)


def _in_store(url: str) -> list[Named]:
    """A file in an archive, an archive, a glob, a folder or a file."""
    archive, separator, member = url.partition(decode.SEPARATOR)
    if separator and is_url(archive) and decode.is_archive(Url.of_file(archive)):
        inside = decode.member(Url.of_file(archive), member)
        return _in_archive(str(inside), *(split(inside) or (inside,)))
    place = Url.of_file(url)
    if decode.is_archive(place):
        return _in_archive(str(place), place)
    if glob.has_magic(place.place) and not place.is_web:
        found: list[Named] = [*urls.matching(place)]
        if not found:
            raise UsageError(f"no image matches {quoted(str(place))!r}", "check the pattern")
        return found
    plain = "/" in place.place and PurePath(place.name).suffix
    if place.is_web and url.endswith("/"):
        raise UsageError(f"{str(place)!r} is a page of a web server", "give the files on it")
    if url.endswith("/") or (
        not (plain or place.is_web)
        and urls.asked(place, lambda: place.filesystem().isdir(place.key))
    ):
        below = [pair for pair in urls.below(place) if not decode.is_hidden(pair[0])]
        return _images(f"folder {str(place)!r}", below)
    return [(place.name, place)]


def _images(where: str, files: Sequence[Named]) -> list[Named]:
    """Those files whose names are of images, at least one."""
    found = [pair for pair in files if PurePath(pair[0]).suffix.lower() in SUFFIXES]
    if not found:
        hint = f"it has no {' '.join(sorted(SUFFIXES))} files; arrays and videos are read where "
        raise UsageError(f"no images in {where}", f"{hint}they are named ('*.npy', quoted)")
    return found


def _in_folder(folder: Path, outside: Path | None) -> list[Named]:
    """The images in a folder, but for those in `outside`. A link that leads nowhere fails later."""
    base, apart = real(folder), real(outside or folder)
    left_out = apart.relative_to(base) if apart != base and apart.is_relative_to(base) else None
    files = [
        (file.as_posix(), folder / file)
        for file in sorted(path.relative_to(folder) for path in folder.rglob("*"))
        if file.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in file.parts)
        and not (left_out and file.is_relative_to(left_out))
        and (os.path.isfile(folder / file) or not os.path.exists(folder / file))  # noqa: PTH110, PTH113
    ]
    return _images(f"folder {str(folder)!r}", files)


def _in_archive(argument: str, archive: Place, name: str | None = None) -> list[Named]:
    """One file of an archive, or all its images."""
    if isinstance(archive, Path) and not archive.is_file():
        hint = hint_of(archive, misspelt(archive))
        raise UsageError(f"no archive {str(archive)!r} for {argument!r}", hint)
    try:
        names = decode.members(archive)
    except (OSError, *decode.DAMAGED) as error:
        known = error.hint if isinstance(error, FileError) else None
        words = f"archive {str(archive)!r} cannot be read: {error}"
        raise UsageError(words, known or "is it whole?") from error
    if name is None:
        files = [(n, decode.member(archive, n)) for n in names if not decode.is_hidden(n)]
        return _images(f"archive {str(archive)!r}", files)
    if name not in names:
        words = f"no image {argument!r}: nothing in the archive is called so"
        raise UsageError(words, f"{str(archive)!r} alone takes all its images")
    return [(name, decode.member(archive, name))]


def told_apart(
    first: Mapping[Key, str], parts_of: Callable[[Key], Sequence[str]]
) -> dict[Key, str]:
    """Lengthen names that clash (also on file systems without case) by one real parent a round, of
    the components that `parts_of` gives; what only case tells apart is numbered."""
    names, parts, turn = dict(first), dict[Key, Sequence[str]](), 0
    whole: dict[Key, str] = {}
    while True:
        counts = Counter(name.casefold() for name in names.values())
        keys = [key for key, name in names.items() if counts[name.casefold()] > 1]
        if not keys:
            return names
        if not turn:
            parts = {key: parts_of(key) for key in first}
            whole = {key: "/".join(parts[key]).casefold() for key in first}
        turn += 1
        alike = Counter(whole.values())
        for index, key in enumerate(keys):
            tail = parts[key][-(first[key].count("/") + 1 + turn) :]
            numbered = f"{index + turn}/{first[key]}"
            names[key] = numbered if alike[whole[key]] > 1 else "/".join(tail)


# Samples of several files ---------------------------------------------------------------------


def clips(samples: Sequence[Sample]) -> list[Sample]:
    """Stills of one folder are the frames of one clip, in the order of the numbers in their
    names; an animation is a clip of its own, and so is an array, which is a volume."""

    def place(path: Place) -> PurePath:  # one absolute spelling, also in a store
        return PurePosixPath("/", path.place) if isinstance(path, Url) else real(path)

    def by_numbers(frame: Sample) -> list[tuple[int, str]]:  # frame2 before frame10 before frames
        parts = re.split(r"(\d+)", frame.path.name)
        return [(int(part), "") if is_number(part) else (-1, part) for part in parts]

    folders: dict[PurePath, list[Sample]] = {}
    found: list[Sample] = []
    for sample in samples:
        if _is_whole(sample.path):
            found.append(sample)
        else:
            folders.setdefault(place(sample.path).parent, []).append(sample)
    for folder, frames in folders.items():
        ordered = sorted(frames, key=by_numbers)
        above = PurePosixPath(frames[0].name).parent
        name = frames[0].name if len(frames) == 1 else folder.name
        name = (str(above) if above.name else name) or "clip"
        found.append(Sample(name, tuple(frame.path for frame in ordered)))

    def parts(number: int) -> tuple[str, ...]:
        path = place(found[number].path)
        return (path.parent if len(found[number].paths) > 1 else path).parts[1:]

    names = told_apart({number: clip.name for number, clip in enumerate(found)}, parts)
    return [replace(clip, name=names[number]) for number, clip in enumerate(found)]


def stills(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Video files as so many images each, `clip.mp4/00`, `clip.mp4/01`, ..."""
    found: list[Sample] = []
    for sample in samples:
        files = [path.name.lower() for path in sample.paths]
        is_video = count > 1 and any(name.endswith(VIDEO_SUFFIXES) for name in files)
        names = [f"{sample.name}/{at:0{len(str(count - 1))}d}" for at in range(count)]
        parts = (replace(sample, name=n, still=(at, count)) for at, n in enumerate(names))
        found += parts if is_video else [sample]
    return found


def _is_whole(path: Place) -> bool:
    """Whether a file is a clip or a volume of its own, not one frame of a clip."""
    try:
        data = decode.read(path)
        if decode.format_of(data) not in (None, "TIFF"):
            return True
        with decode.open_image(io.BytesIO(data)) as image:
            return getattr(image, "n_frames", 1) > 1 and image.format != "MPO"
    except Exception:  # whatever is wrong with it, reading it will say so
        return False


def together(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Consecutive images in groups of `count`, named `a.png+b.png`; UsageError if some are left."""
    if len(samples) % count:
        raise UsageError(
            f"the model takes {count} images at once, and there are {len(samples)}",
            f"give a multiple of {count}; --inputs says otherwise, and "
            "--forward-arg NAME=VALUE gives an argument that is no image",
        )
    joined = []
    for group in (samples[i : i + count] for i in range(0, len(samples), count)):
        names = [group[0].name, *(PurePosixPath(sample.name).name for sample in group[1:])]
        joined.append(Sample("+".join(names), tuple(p for sample in group for p in sample.paths)))
    return joined


def unnested(samples: Sequence[Sample]) -> list[Sample]:
    """Rename samples whose folder would lie inside another's: `a` beside `a/b` becomes `a~`."""

    ways = [safe_way(sample.name).casefold() for sample in samples]  # on any system
    taken = set(ways)
    used = {str(parent) for way in taken for parent in PurePosixPath(way).parents}
    renamed: list[Sample] = []
    for sample, way in zip(samples, ways, strict=True):
        name = sample.name
        if way in used:
            while way in taken:
                name += "~"
                way = safe_way(name).casefold()
            taken.add(way)
        used.add(way)
        renamed.append(replace(sample, name=name))
    return renamed
