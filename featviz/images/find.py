"""Find the samples of IMAGE arguments: files, folders, globs, archives and URLs; join
samples to clips and groups."""

from __future__ import annotations

import glob
import io
import itertools
import logging
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath, PurePosixPath
from typing import NamedTuple, TypeVar

from featviz.errors import FileError, UsageError
from featviz.files import missing_file, real, urls
from featviz.files.urls import Url, is_url
from featviz.images import decode
from featviz.images.decode import SUFFIXES, VIDEO_SUFFIXES, FilePath, split_member
from featviz.records import Sample
from featviz.text import counted, is_number, quoted, safe_path

log = logging.getLogger(__name__)

Key = TypeVar("Key")


class Named(NamedTuple):
    """A file that an argument leads to."""

    name: str
    """Its path relative to the argument, with forward slashes."""
    path: FilePath


def find_samples(
    arguments: Sequence[str],
    nul_separated: bool = False,
    outside: Path | None = None,
) -> list[Sample]:
    """Find the images that files, folders, archives, globs, URLs and `-` (a list on stdin)
    lead to. The name of a sample is its path relative to the argument; if that is not
    unique, folders before it are added.

    Args:
        arguments: The arguments in the user's order. A file that is named twice counts
            once.
        nul_separated: Whether NUL instead of the end of a line separates the list on
            stdin.
        outside: A run directory; images in it are left out.

    Raises:
        UsageError: Where an argument leads to no image.
        FileError: Where a store does not answer, or refuses.
    """
    # by the file that a path leads to: `a.png ./a.png link-to-a.png` is one image
    named: dict[str, Named] = {}
    for argument in arguments:
        for name, path in _files_of_argument(argument, nul_separated, outside):
            tidy_name = "/".join(_safe_parts(name)) or "image"
            named.setdefault(_identity(path), Named(tidy_name, path))

    def full_path(path: FilePath) -> list[str]:
        if isinstance(path, Url):
            return _safe_parts(path.shown_path.replace("::", "/"))
        return _safe_parts(_identity(path))

    names = make_unique({path: name for name, path in named.values()}, full_path)
    samples = []
    for path, name in names.items():
        inside = split_member(path)
        archive = _identity(inside[0]) if inside is not None else None
        samples.append(Sample(name, (path,), archive))
    return samples


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise a UsageError, before any other work, for a path that leads to no file."""
    for argument in arguments:
        if argument != "-" and not is_url(argument) and not os.path.exists(argument):  # noqa: PTH110 - takes any name
            _files_of_argument(argument, False, None)


def _safe_parts(name: str) -> list[str]:
    """The parts of a name, without `..` and empty ones: a name becomes a path in the run
    directory."""
    return [part for part in name.split("/") if part not in ("", "..")]


def _identity(path: FilePath) -> str:
    """A text that is the same for all paths that lead to the same file, also through links.
    Each link that leads nowhere has its own text, so that each is reported."""
    if isinstance(path, Url):
        return f"{path.protocol}://{path.key}::{path.member or ''}"
    inside = split_member(path)
    if inside is not None:
        archive, member = inside
        return f"{os.path.realpath(str(archive))}/{member}"
    return os.path.realpath(path) if os.path.exists(path) else str(path.absolute())  # noqa: PTH110


def _files_of_argument(
    argument: str, nul_separated: bool, outside: Path | None
) -> list[Named]:
    """The files that an argument stands for, at least one. The other parameters are those of
    `find_samples`.

    Raises:
        UsageError: Where there is no such file, or no image in it.
        FileError: Where a store does not answer, or refuses.
    """
    if argument == "-":
        return _listed_on_stdin(nul_separated)
    if is_url(argument):
        try:
            return _files_in_store(argument)
        except FileError as error:
            url = quoted(str(Url(argument)))
            raise FileError(f"{url}: {error.message}", error.hint) from error
    path = Path(argument)
    inside = split_member(path)
    if inside is not None:
        return _files_in_archive(argument, *inside)
    if os.path.exists(path):  # noqa: PTH110 - takes any name
        if path.is_dir():
            return _images_in_folder(path, outside)
        if decode.ARCHIVE_NAME.fullmatch(path.name):
            return _files_in_archive(argument, path)
        return [Named(path.name, path)]
    if glob.has_magic(argument):
        return _files_of_glob(argument, path)
    raise missing_file(f"no image {argument!r}: no such file or folder", argument)


def _listed_on_stdin(nul_separated: bool) -> list[Named]:
    """The files that the list on stdin names. The name of each is the last part of its path.

    Raises:
        UsageError: Where the list is empty.
    """
    lines = sys.stdin.buffer.read().split(b"\0" if nul_separated else b"\n")
    named: list[Named] = []
    for line in lines:
        # names of files are bytes, and may not be UTF-8
        text = os.fsdecode(line if nul_separated else line.rstrip(b"\r"))
        if not text:
            continue
        path: FilePath = Path(text)
        if is_url(text):
            path = Url.of_file(text)
        inside = split_member(path)
        name = path.name
        if inside is not None:
            name = inside[1].rpartition("/")[2]
        named.append(Named(name, path))
    if not named:
        raise UsageError(
            "stdin lists no images", "one path a line, or NUL-separated with -0"
        )
    return named


def _files_of_glob(pattern: str, path: Path) -> list[Named]:
    """The files that a glob matches. Their names are relative to the folders before the first
    wildcard: `a.png` for `photos/*.png`.

    Args:
        pattern: The glob, as the user typed it.
        path: The same glob as a Path.

    Raises:
        UsageError: Where it matches no file.
    """
    fixed = Path(
        *itertools.takewhile(lambda part: not glob.has_magic(part), path.parts)
    )
    # sorted, since the order of file systems differs, and two runs are compared
    files = map(Path, sorted(glob.glob(pattern, recursive=True)))
    named = [
        Named(file.relative_to(fixed).as_posix(), file)
        for file in files
        if file.is_file()
    ]
    if not named:
        raise UsageError(f"no image matches {quoted(pattern)!r}", "check the pattern")
    return named


def _files_in_store(text: str) -> list[Named]:
    """The files that a URL leads to. It may be the URL of a file, a folder, a glob, an
    archive, or a file in an archive.

    Raises:
        UsageError: Where it leads to no image, or is a page of a web server.
        FileError: Where the store does not answer, or refuses.
    """
    # `s3://bucket/a.tar::b.png`; other URLs with `::` chain protocols of fsspec
    archive_text, separator, member = text.partition(decode.SEPARATOR)
    if separator and is_url(archive_text):
        archive = Url.of_file(archive_text)
        if decode.ARCHIVE_NAME.fullmatch(archive.name):
            inside = decode.member(archive, member)
            return _files_in_archive(str(inside), archive, decode.member_name(member))
    url = Url.of_file(text)
    if decode.ARCHIVE_NAME.fullmatch(url.name):
        return _files_in_archive(str(url), url)
    # a web server has no list of files, and `?` in its URLs is no wildcard
    if url.is_web:
        if text.endswith("/"):
            raise UsageError(
                f"{str(url)!r} is a page of a web server", "give the files on it"
            )
        return [Named(url.name, url)]
    if glob.has_magic(url.shown_path):
        named = [Named(name, file) for name, file in urls.files_matching(url)]
        if not named:
            raise UsageError(
                f"no image matches {quoted(str(url))!r}", "check the pattern"
            )
        return named
    if not _is_folder_of_store(text, url):
        return [Named(url.name, url)]
    visible = [
        Named(name, file)
        for name, file in urls.files_below(url)
        if not decode.is_hidden(name)
    ]
    return _only_images(f"folder {str(url)!r}", visible)


def _is_folder_of_store(text: str, url: Url) -> bool:
    """Whether a URL leads to a folder. The store is only asked if the name shows neither a
    folder (a slash at the end) nor a file (a suffix).

    Args:
        text: The URL as the user typed it.
        url: The same URL.
    """
    if text.endswith("/"):
        return True
    # one request for each file of a list would be slow
    if "/" in url.shown_path and PurePath(url.name).suffix:
        return False
    is_folder: bool = urls.ask(url, lambda: url.filesystem().isdir(url.key))
    return is_folder


def _only_images(title: str, named: Sequence[Named]) -> list[Named]:
    """The files that have a suffix of images.

    Args:
        title: The folder or archive of the files, for the message.
        named: All files in it.

    Raises:
        UsageError: Where no file has such a suffix.
    """
    images = [file for file in named if PurePath(file.name).suffix.lower() in SUFFIXES]
    if not images:
        raise UsageError(
            f"no images in {title}",
            f"it has no {' '.join(sorted(SUFFIXES))} files; arrays and videos are read"
            " where they are named ('*.npy', quoted)",
        )
    return images


def _images_in_folder(folder: Path, outside: Path | None) -> list[Named]:
    """The images in a folder and in all folders below it. Left out are those in the run
    directory, and links to files outside of the folder, which a stranger may have put
    there.

    Args:
        folder: The folder.
        outside: The run directory; None if there is none.

    Raises:
        UsageError: Where no image is left.
    """
    base = real(folder)
    left_out = None if outside is None else real(outside)
    if left_out is not None and base.is_relative_to(left_out):
        # the images lie in the run directory, which is refused later
        left_out = None
    named = []
    links = []
    for path in sorted(folder.rglob("*")):
        file = path.relative_to(folder)
        if file.suffix.lower() not in SUFFIXES or decode.is_hidden(file.as_posix()):
            continue
        if left_out is not None and (base / file).is_relative_to(left_out):
            continue
        if _leads_out(path, base):
            links.append(file)
        # a link that leads nowhere is taken, and fails later when it is read
        elif os.path.isfile(path) or not os.path.exists(path):  # noqa: PTH110, PTH113
            named.append(Named(file.as_posix(), path))
    if links:
        log.warning(
            "%s that lead out of folder %r are left out, such as %s; a glob takes them"
            " ('%s/*')",
            counted(len(links), "link"),
            str(folder),
            links[0].as_posix(),
            folder,
        )
    return _only_images(f"folder {str(folder)!r}", named)


def _leads_out(path: Path, folder: Path) -> bool:
    """Whether a path is a link to a file that is not below a folder."""
    is_link_to_file = path.is_symlink() and os.path.isfile(path)  # noqa: PTH113
    return is_link_to_file and not real(path).is_relative_to(folder)


def _files_in_archive(
    argument: str, archive: FilePath, name: str | None = None
) -> list[Named]:
    """One file of an archive, or all its images.

    Args:
        argument: The argument as the user typed it, for messages.
        archive: A tar or zip file, on this machine or in a store.
        name: The name of a file in it; None for all images.

    Raises:
        UsageError: Where the archive is missing or damaged, or has no such file, or no
            image.
    """
    if isinstance(archive, Path) and not archive.is_file():
        raise missing_file(
            f"no archive {str(archive)!r} for {argument!r}", str(archive)
        )
    try:
        names = decode.members(archive)
    except (OSError, *decode.DAMAGED) as error:
        message = f"archive {str(archive)!r} cannot be read: {error}"
        # the FileError of a store has a better hint
        remedy = getattr(error, "hint", None) or "is it whole?"
        raise UsageError(message, remedy) from error
    if name is None:
        named = [
            Named(member, decode.member(archive, member))
            for member in names
            if not decode.is_hidden(member)
        ]
        return _only_images(f"archive {str(archive)!r}", named)
    if name not in names:
        message = f"no image {argument!r}: nothing in the archive is called so"
        raise UsageError(message, f"{str(archive)!r} alone takes all its images")
    return [Named(name, decode.member(archive, name))]


def make_unique(
    names: Mapping[Key, str], full_path: Callable[[Key], Sequence[str]]
) -> dict[Key, str]:
    """Make names unique, also if upper and lower case do not count. In each round, names that
    are not unique get one more folder in front; files whose whole paths differ only in case
    get a number instead.

    Args:
        names: The name of each file.
        full_path: A function that returns the parts of a file's full path, the file's own
            name last. It is only called if names are not unique.

    Returns:
        The new names of the same files, in the same order.
    """
    unique = dict(names)
    if len({name.casefold() for name in names.values()}) == len(names):
        return unique
    paths = {key: full_path(key) for key in names}
    # for each whole path, how many are the same if case does not count
    alike = Counter("/".join(path).casefold() for path in paths.values())
    added = 0  # how many folders were added in front
    while True:
        counts = Counter(name.casefold() for name in unique.values())
        clashing = [key for key, name in unique.items() if counts[name.casefold()] > 1]
        if not clashing:
            return unique
        added += 1
        for index, key in enumerate(clashing):
            path = paths[key]
            # as many parts as the name had at first, plus one for each round
            unique[key] = "/".join(path[-(names[key].count("/") + 1 + added) :])
            if alike["/".join(path).casefold()] > 1:
                unique[key] = f"{index + added}/{names[key]}"


# Samples of several files
# ---------------------------------------------------------------------


def join_clips(samples: Sequence[Sample]) -> list[Sample]:
    """Join samples to clips. The pictures of a folder become the frames of one clip, in the
    order of the numbers in their names. A video or an animation stays a clip of its own,
    and an array a volume."""
    folders: dict[PurePath, list[Sample]] = {}
    joined = []
    for sample in samples:
        if _is_whole_clip(sample.path):
            joined.append(sample)
        else:
            folders.setdefault(_absolute_path(sample.path).parent, []).append(sample)
    for folder, frames in folders.items():
        ordered = sorted(frames, key=_numbers_of)
        # the folder's path within the argument; if the argument is the folder, its name
        name = PurePosixPath(frames[0].name).parent.as_posix()
        if name == ".":
            name = frames[0].name if len(frames) == 1 else folder.name
        joined.append(Sample(name or "clip", tuple(frame.path for frame in ordered)))

    def full_path(index: int) -> tuple[str, ...]:
        """The parts of the path of a clip's folder, or of its only file."""
        path = _absolute_path(joined[index].path)
        is_folder = len(joined[index].paths) > 1
        return (path.parent if is_folder else path).parts[1:]

    names = make_unique(
        {index: clip.name for index, clip in enumerate(joined)}, full_path
    )
    return [replace(clip, name=names[index]) for index, clip in enumerate(joined)]


def _absolute_path(path: FilePath) -> PurePath:
    """The absolute path of a file; for a file in a store, its path in the store."""
    if isinstance(path, Url):
        return PurePosixPath("/", path.shown_path)
    return real(path)


def _numbers_of(frame: Sample) -> list[tuple[int, str]]:
    """The sort key of a frame, by the numbers in its name: frame2, frame10, frames."""
    parts = re.split(r"(\d+)", frame.path.name)
    return [(int(part), "") if is_number(part) else (-1, part) for part in parts]


def split_videos(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Replace each sample that is a video file by `count` samples, each for one of its
    frames: `clip.mp4/00`, `clip.mp4/01`, ..."""
    images = []
    # all numbers have the same count of digits, so that names sort by number
    digits = len(str(count - 1))
    for sample in samples:
        if count == 1 or not any(
            path.name.lower().endswith(VIDEO_SUFFIXES) for path in sample.paths
        ):
            images.append(sample)
            continue
        for index in range(count):
            images.append(
                replace(
                    sample,
                    name=f"{sample.name}/{index:0{digits}d}",
                    still=(index, count),
                )
            )
    return images


def _is_whole_clip(path: FilePath) -> bool:
    """Whether a file is a whole clip or volume. False for one frame of a clip, and for a
    file that cannot be read."""
    try:
        data = decode.read(path)
        if decode.format_of(data) not in (None, "TIFF"):
            return True
        with decode.open_image(io.BytesIO(data)) as image:
            return getattr(image, "n_frames", 1) > 1 and image.format != "MPO"
    except Exception:  # the error is reported when the image is decoded
        return False


def join_groups(samples: Sequence[Sample], count: int) -> list[Sample]:
    """Join each `count` consecutive samples to one, named `a.png+b.png`.

    Raises:
        UsageError: Where the last group is not full.
    """
    if len(samples) % count:
        raise UsageError(
            f"the model takes {count} images at once, not {len(samples)}",
            f"give a multiple of {count}; --images-per-pass says otherwise, and "
            "--forward-arg NAME=VALUE gives an argument that is no image",
        )
    joined = []
    for start in range(0, len(samples), count):
        # only the first name keeps its folder: `a/x.png+y.png`
        group = samples[start : start + count]
        name = group[0].name
        paths = group[0].paths
        for sample in group[1:]:
            name += f"+{PurePosixPath(sample.name).name}"
            paths += sample.paths
        joined.append(Sample(name, paths))
    return joined


def rename_nested(samples: Sequence[Sample]) -> list[Sample]:
    """Rename samples in whose folder the folder of another sample would lie: if there are
    `a` and `a/b`, `a` becomes `a~`."""
    # as they are called on any system: case may not count
    folders = [safe_path(sample.name).casefold() for sample in samples]
    in_use = set(folders)
    holding = {  # folders that have other folders in them
        str(parent) for folder in in_use for parent in PurePosixPath(folder).parents
    }
    renamed = []
    for sample, folder in zip(samples, folders, strict=True):
        name = sample.name
        if folder in holding:
            # the new folder must not contain others either
            while folder in in_use or folder in holding:
                name += "~"
                folder = safe_path(name).casefold()
            in_use.add(folder)
        holding.add(folder)
        renamed.append(replace(sample, name=name))
    return renamed
