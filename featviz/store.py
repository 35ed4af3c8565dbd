"""The run directory: names, atomic writes, manifests.

Every file is written beside its final name and moved there, and an image's manifest is written
last, so what has a manifest is complete. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from featviz.errors import StoreError
from featviz.records import Capture, Floats, Layer, Skip, Written

SCHEMA_VERSION = 1
"""Of run.json and manifest.json. 1: first release."""

OPTIONAL = ("channels", "slices", "tensor", "collapsed", "reduce", "overlay", "figure")
"""Fields of a row of `captures` that are there only where they have a value."""

RUN_FILE = "run.json"
MANIFEST_FILE = "manifest.json"
STATS_FILE = "stats.npz"

_BUFFER = 2**20
"""Bytes of a file's write buffer: most pictures go to the system at once."""

_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip file can hold: no time of ours is in it."""

_LONGEST = 100
"""Characters of one file or folder name; the rest is cut and a hash put in its place."""
_UNPORTABLE = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f\ud800-\udfff]|[. ]$')
_RESERVED = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE)


class RunDirectory:
    """A run directory that is being written."""

    def __init__(self, root: Path) -> None:
        self.root = root

    @classmethod
    def create(cls, root: Path, overwrite: bool = False) -> RunDirectory:
        """Make the folder, or empty the run that it holds where `overwrite` says so.

        Raises:
            StoreError: it holds another run, or something that is none, or cannot be written.
        """
        with _reported(root):
            if root.exists() and not root.is_dir():
                raise StoreError(f"--out {root} is a file, not a folder", "name another with --out")
            if root.is_dir() and set(root.iterdir()) - {_part(root / RUN_FILE)}:
                _make_way(root, overwrite)
            root.mkdir(parents=True, exist_ok=True)
        return cls(root)

    def image(self, name: str) -> ImageFolder:
        """The folder of the image with this relative name."""
        safe = "/".join(safe_name(part) for part in name.split("/"))
        return ImageFolder(self.root, safe)

    def write_run(self, content: Mapping[str, Any]) -> None:
        """Write run.json."""
        write_json(self.root / RUN_FILE, {"schema_version": SCHEMA_VERSION, **content})


class ImageFolder:
    """The folder of one image."""

    def __init__(self, root: Path, name: str) -> None:
        self.root, self.name = root, name
        """The run directory, and relative to it, with forward slashes, the folder."""
        self.path = root / name

    def file(self, layer: Layer, name: str) -> str:
        """A layer's file, relative to this folder: `004_layer1.0.conv1/output.png`."""
        folder = safe_name(f"{layer.index:03d}_{layer.name or layer.type}")
        return f"{folder}/{safe_name(name)}"

    @contextmanager
    def writing(self, relative: str) -> Iterator[BinaryIO]:
        """Open a file of this folder for atomic writing."""
        with atomic(self.path / relative) as file:
            yield file

    def finish(self, manifest: Mapping[str, Any], stats: Mapping[str, Floats]) -> None:
        """Write the statistics, then the manifest: from now on the image is complete."""
        with self.writing(STATS_FILE) as file:
            np.savez(file, **stats)  # type: ignore[arg-type]
        write_json(self.path / MANIFEST_FILE, {"schema_version": SCHEMA_VERSION, **manifest})

    @property
    def is_complete(self) -> bool:
        """Whether the manifest is there."""
        return (self.path / MANIFEST_FILE).is_file()

    @property
    def size(self) -> Written:
        """Its files, and their bytes."""
        with _reported(self.path):
            sizes = [path.stat().st_size for path in self.path.rglob("*") if path.is_file()]
        return Written(len(sizes), sum(sizes))

    def discard(self) -> None:
        """Remove what was written of an image that failed, with folders that this empties.

        The manifest goes first: killed in between, this leaves an incomplete image.
        """
        with _reported(self.path):
            (self.path / MANIFEST_FILE).unlink(missing_ok=True)
            shutil.rmtree(self.path, ignore_errors=True)
            for parent in list(self.path.parents)[: self.name.count("/")]:
                if parent.is_dir() and not any(parent.iterdir()):
                    parent.rmdir()


def room_for_archive(archive: Path, overwrite: bool) -> Path:
    """Make a hidden folder beside an archive for the run that it will hold, and return it.

    What a killed run left there is removed.

    Raises:
        StoreError: there is such an archive already, or the folder cannot be made.
    """
    with _reported(archive):
        if archive.exists() and not overwrite:
            raise StoreError(f"--archive {archive} exists", "--overwrite replaces it")
        room = archive.absolute().with_name(f".{archive.name}.run")
        shutil.rmtree(room, ignore_errors=True)
        room.mkdir(parents=True)
    return room


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
            info.file_size = (
                path.stat().st_size
            )  # tells whether it takes the fields for large files
            with path.open("rb") as source, packed.open(info, "w") as target:
                shutil.copyfileobj(source, target, _BUFFER)


def manifest_rows(captures: Sequence[Capture], skipped: Sequence[Skip]) -> dict[str, Any]:
    """`captures` and `skipped` as the manifest has them; optional fields only where set."""
    rows = [
        {
            name: value
            for name, value in vars(capture).items()
            if name not in OPTIONAL or value is not None
        }
        for capture in captures
    ]
    return {"captures": rows, "skipped": [vars(skip) for skip in skipped]}


def safe_name(name: str) -> str:
    """A file name that every system takes; what had to be changed gets 8 hex digits of a hash."""
    clean = _UNPORTABLE.sub("_", name)
    if _RESERVED.fullmatch(clean):
        clean = f"_{clean}"
    if clean == name and len(clean) <= _LONGEST and len(os.fsencode(clean)) <= 2 * _LONGEST:
        return clean
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    stem, dot, suffix = clean.rpartition(".")
    if not dot or len(suffix) > 5:
        stem, dot, suffix = clean, "", ""
    short = stem.encode()[: _LONGEST - 16].decode(errors="ignore")
    return f"{short}-{digest}{dot}{suffix}"


@contextmanager
def atomic(path: Path) -> Iterator[BinaryIO]:
    """Open a file beside its final name; move it there if the block succeeds.

    Raises:
        StoreError: the file cannot be written; names it.
    """
    part = _part(path)
    with _reported(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with part.open("wb", buffering=_BUFFER) as file:
                yield file
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def _part(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _make_way(root: Path, overwrite: bool) -> None:
    if not (root / RUN_FILE).is_file():
        raise StoreError(
            f"--out {root} is not empty and holds no run of featviz",
            "name another folder with --out",
        )
    if not overwrite:
        raise StoreError(
            f"--out {root} holds another run", "--overwrite replaces it, --out names another folder"
        )
    _empty(root)


def _empty(root: Path) -> None:
    """Remove a run: manifests first and run.json last, so that what is left of it when this is
    killed neither passes for complete nor for something else."""
    for manifest in root.rglob(MANIFEST_FILE):
        manifest.unlink()
    for path in sorted(root.iterdir(), key=lambda path: path.name == RUN_FILE):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON with a line for each entry and for each item of a list of objects.

    A tenth of the time of `indent`, for which the standard library leaves its C encoder, and a
    diff of two manifests still shows the captures that differ.
    """
    entries = ",\n".join(f" {_dump(key)}: {_value(value)}" for key, value in content.items())
    with atomic(path) as file:
        file.write(f"{{\n{entries}\n}}\n".encode("utf-8", "backslashreplace"))


def _value(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(f"  {_dump(item)}" for item in value) + "\n ]"
    return _dump(value)


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


@contextmanager
def _reported(path: Path) -> Iterator[None]:
    """Turn what the system says of a path into a StoreError that names it."""
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written: {error.strerror or error}",
            "what is complete stays complete; --resume when it works, or another --out",
        ) from error
