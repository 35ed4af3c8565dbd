"""A run in a zip file: written as a folder first, then packed."""

from __future__ import annotations

import shutil
import zipfile
from contextlib import suppress
from pathlib import Path

from featviz import files
from featviz.errors import FileError, StoreError
from featviz.rundir import ownership
from featviz.rundir.atomic import atomic, part_name, part_of, remove, remove_empty, reported

ROOM = "run"
"""In the hidden folder beside an archive: the run that it will hold."""

_BUFFER = 2**20
"""Bytes that are copied into an archive at a time."""

_MAGIC = b"PK\x03\x04"
"""With which a zip file begins."""

_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip file can hold: no time of ours is in it."""


def check_archive(archive: Path, overwrite: bool) -> None:
    """Say before the work that a run cannot become this file.

    Raises:
        StoreError: there is such a file already, and it is not to be replaced or holds no run.
    """
    if not archive.exists():
        return
    if not overwrite:
        raise StoreError(f"--archive {archive} exists", "--overwrite replaces a run in a zip file")
    if not ownership.is_archive_of_run(archive):
        raise StoreError(
            f"--archive {archive} exists and holds no run of featviz",
            "name another file with --archive",
        )


def room_for_archive(archive: Path, overwrite: bool, resume: bool = False) -> Path:
    """Make a hidden folder beside an archive for the run that it will hold, and return it.

    What a killed run left there is removed.

    Args:
        resume: take the latest folder that a killed run left, or that could not be packed.

    Raises:
        StoreError: there is such an archive already, or the folder cannot be made.
    """
    check_archive(archive, overwrite)
    with reported(archive):
        place = archive.absolute().parent
        place.mkdir(parents=True, exist_ok=True)
        room = place / part_name(archive.name)
        # a very long name is cut
        left = [path for path in place.iterdir() if part_of(path.name) == part_of(room.name)]
        runs = [path for path in left if _holds_run(path)]
        latest = max(runs, key=lambda path: path.stat().st_mtime) if resume and runs else None
        for path in left:
            if latest is None or path not in runs:
                clear_room(path)
        if latest is None:
            room.mkdir()
    return latest or room


def _holds_run(room: Path) -> bool:
    return not room.is_symlink() and ownership.holds_run(room / ROOM)


def clear_room(room: Path) -> None:
    """Remove a run from the hidden folder in which it was to become an archive, run.json last, so
    that the rest is known as ours if this is killed; or what a killed process has left of the
    archive itself. A folder in which there is anything else stays."""
    with suppress(StoreError, FileError, OSError):
        if _is_part_of_archive(room):
            room.unlink()
        elif not room.is_symlink():
            if (earlier := ownership.of_run(room / ROOM)) is not None:
                remove(room / ROOM, earlier.files())
            remove_empty(room)


def _is_part_of_archive(path: Path) -> bool:
    """Whether a file with a hidden name of ours is the beginning of a zip file, or empty."""
    if path.is_symlink() or not path.is_file():
        return False
    with files.open_regular(path) as file:
        return file.read(len(_MAGIC)) in (b"", _MAGIC)


def pack(root: Path, archive: Path) -> None:
    """Pack a folder into a zip file; the same content gives the same bytes.

    Pictures are compressed already and stored as they are.

    Raises:
        StoreError: it cannot be written.
    """
    with atomic(archive) as file, zipfile.ZipFile(file, "w") as packed:
        for path in sorted(path for path in root.rglob("*") if path.is_file()):
            name = path.relative_to(root).as_posix()
            info = zipfile.ZipInfo(name, _EPOCH)
            text = path.suffix in (".json", ".npz", ".npy")
            info.compress_type = zipfile.ZIP_DEFLATED if text else zipfile.ZIP_STORED
            info.external_attr = 0o644 << 16
            info.file_size = path.stat().st_size  # decides on the fields for large files
            with path.open("rb") as source, packed.open(info, "w") as target:
                shutil.copyfileobj(source, target, _BUFFER)


def add(packed: zipfile.ZipFile, name: str, content: bytes, compress: bool) -> None:
    """Put a file into a zip file; the same content gives the same bytes."""
    info = zipfile.ZipInfo(name, _EPOCH)
    info.compress_type = zipfile.ZIP_DEFLATED if compress else zipfile.ZIP_STORED
    info.external_attr = 0o644 << 16
    packed.writestr(info, content)
