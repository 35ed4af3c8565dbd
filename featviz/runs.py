"""A run directory, read back. Nothing here needs torch."""

from __future__ import annotations

import filecmp
import os
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, TypeVar

import numpy as np
from PIL import Image

from featviz.errors import StoreError
from featviz.records import STAT_COLUMNS, Bytes, Capture, Floats, Skip
from featviz.store import MANIFEST_FILE, RUN_FILE, STATS_FILE, read_json

_Row = TypeVar("_Row", Capture, Skip)
_LEVELS = ("L", "P")
"""Pillow's modes of pictures whose pixels are levels."""

_BROKEN = (
    OSError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    EOFError,
    SyntaxError,
    zipfile.BadZipFile,
)
"""What json, numpy and Pillow raise on broken files."""


class Place(NamedTuple):
    """Where in a run's image a tensor was met: what two runs are matched by."""

    layer: str
    kind: str
    call: int
    key: str

    @property
    def stats_key(self) -> str:
        """Its key in stats.npz."""
        return "|".join(map(str, self))

    @property
    def stem(self) -> str:
        """`output`, `output.call1`, `output.call1.boxes`."""
        call = f".call{self.call}" if self.call else ""
        return f"{self.kind}{call}" + (f".{self.key}" if self.key else "")


@dataclass(frozen=True)
class ReadImage:
    """A complete image of a run; its arrays are read when they are asked for."""

    name: str
    """Its path relative to the argument it came from."""
    folder: str
    """Relative to the run directory, with forward slashes."""
    path: Path
    sha256: str
    input_shape: tuple[Any, ...]
    """[1, C, H, W]; several of these where the model takes several images."""
    preprocessing: str
    captures: Mapping[Place, Capture]
    """In the order in which the model came to them."""
    skipped: tuple[Skip, ...]
    never_ran: tuple[str, ...]

    def stats(self) -> Mapping[str, Floats]:
        """All statistics, float32 [channels, 6] under `Place.stats_key`.

        Raises:
            StoreError: stats.npz is missing, broken or lacks a capture.
        """
        path = self.path / STATS_FILE
        with _blamed(path), np.load(path) as opened:
            found = {key: opened[key] for key in opened.files}
        for place, row in self.captures.items():
            shape = found[place.stats_key].shape if place.stats_key in found else None
            if shape != (row.maps, len(STAT_COLUMNS)):
                raise StoreError(
                    f"{path} cannot be read: {place.stats_key} is {shape or 'missing'}"
                )
        return found

    def tensor(self, row: Capture) -> np.ndarray | None:
        """The kept tensor, in the shape in which the layer gave it; None where there is none.

        Raises:
            StoreError: it is missing, broken, or of another shape than the manifest says.
        """
        if row.tensor is None:
            return None
        path = self.file(row.tensor)
        with _blamed(path):
            array: np.ndarray = np.load(path)
        if list(array.shape) != row.shape:
            raise StoreError(f"{path} has shape {list(array.shape)}, the manifest {row.shape}")
        return array

    def levels(self, relative: str) -> tuple[Bytes, str] | None:
        """The pixels of a PNG, uint8 [height, width], and `L` or `P`; None for what has colours
        (other formats among them), or is too large for Pillow.

        Raises:
            StoreError: it is missing or broken.
        """
        path = self.file(relative)
        with _blamed(path), warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            try:
                with Image.open(path) as opened:
                    plain = opened.format == "PNG" and opened.mode in _LEVELS
                    return (np.asarray(opened), opened.mode) if plain else None
            except (Image.DecompressionBombWarning, Image.DecompressionBombError):
                return None

    def shown(self) -> np.ndarray:
        """What the model saw: the pixels of input.png."""
        path = self.path / "input.png"
        with _blamed(path), Image.open(path) as opened:
            return np.asarray(opened)

    def file(self, relative: str) -> Path:
        """A file of this image.

        Raises:
            StoreError: a manifest from elsewhere that points out of its folder.
        """
        inside = PurePosixPath(relative)
        if inside.is_absolute() or ".." in inside.parts:
            raise StoreError(f"{self.path / MANIFEST_FILE} names {relative!r}, outside its folder")
        return self.path / inside


@dataclass(frozen=True)
class ReadRun:
    """A run directory; images in the order of the run."""

    root: Path
    record: Mapping[str, Any]
    """The content of run.json."""
    images: Mapping[str, ReadImage]
    failures: Mapping[str, str]
    """Images that failed, with what was said of each."""
    incomplete: tuple[str, ...]
    """Images, or folders, without a manifest: their run was killed, or they were copied in part."""

    @property
    def missing(self) -> int:
        """Images that the run was to have and that it neither has nor names."""
        known = len(self.images) + len(self.failures) + len(self.incomplete)
        return max(0, int(self.record["images"]["total"]) - known)


def read_run(root: Path) -> ReadRun:
    """Read a run directory: run.json and all manifests.

    Raises:
        StoreError: it is none, or something in it cannot be read; names the file.
    """
    path = root / RUN_FILE
    record = read_json(path)
    if "kind" in record:
        raise StoreError(
            f"{root} holds {record['kind']}, not the feature maps of a run",
            "give a folder that featviz run wrote",
        )
    with _blamed(path):
        order = [str(name) for name in record["images"]["complete"]]
        failures = {str(row["image"]): str(row["error"]) for row in record["failures"]}
        int(record["images"]["total"])
    complete, unfinished = _folders(root)
    found = {image.name: image for image in (_read_image(root, folder) for folder in complete)}
    lost = [name for name in order if name not in found and name not in unfinished]
    known = {name: place for place, name in enumerate(order)}
    names = sorted(found, key=lambda name: (known.get(name, len(order)), PurePosixPath(name)))
    images = {name: found[name] for name in names}
    return ReadRun(root, record, images, failures, tuple(sorted([*unfinished, *lost])))


def same_content(first: Path, second: Path) -> bool:
    """Whether two files hold the same bytes.

    Raises:
        StoreError: one of them cannot be read.
    """
    with _blamed(first), _blamed(second):
        return filecmp.cmp(first, second, shallow=False)


def _folders(root: Path) -> tuple[list[str], list[str]]:
    """Folders of images with a manifest, and of those without, relative to the run directory."""
    complete, unfinished = [], []
    for place, folders, files in os.walk(root):
        relative = Path(place).relative_to(root).as_posix()
        if MANIFEST_FILE in files:
            complete.append(relative)
        elif relative != "." and ("input.png" in files or STATS_FILE in files):
            unfinished.append(relative)
        else:
            continue
        folders.clear()
    return sorted(complete), sorted(unfinished)


def _read_image(root: Path, folder: str) -> ReadImage:
    path = root / folder / MANIFEST_FILE
    content = read_json(path)
    with _blamed(path):
        rows = [_row(Capture, row) for row in content["captures"]]
        return ReadImage(
            name=str(content["image"]["path"]),
            folder=folder,
            path=root / folder,
            sha256=str(content["image"]["sha256"]),
            input_shape=tuple(content["input"]["shape"]),
            preprocessing=str(content["input"]["preprocessing"]),
            captures={Place(row.layer, row.kind, row.call, row.key): row for row in rows},
            skipped=tuple(_row(Skip, row) for row in content["skipped"]),
            never_ran=tuple(content["never_ran"]),
        )


def _row(kind: type[_Row], row: Mapping[str, Any]) -> _Row:
    """A record from its JSON; fields of a later featviz are left out."""
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in row.items() if name in known})


@contextmanager
def _blamed(path: Path) -> Iterator[None]:
    """Turn what goes wrong inside into a StoreError that names the file."""
    try:
        yield
    except FileNotFoundError:
        raise StoreError(
            f"{path} is missing", "the run directory is not whole; copy or run it again"
        ) from None
    except _BROKEN as error:
        raise StoreError(f"{path} cannot be read: {error!r}") from error
