"""A run directory, read back into records: run.json, manifests, statistics. Nothing needs torch."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from featviz.errors import StoreError
from featviz.records import STAT_COLUMNS, Capture, Floats, GridPlan, Layer, Site, Skip
from featviz.store import MANIFEST_FILE, RUN_FILE, STATS_FILE, read_json, safe_name

AUDIT_FILE = "audit.json"
INPUT_FILE = "input.png"
_CAPTURE_FIELDS = {field.name for field in fields(Capture)}


@dataclass(frozen=True)
class Grid:
    """One drawn tensor of one image: its picture, geometry and numbers."""

    capture: Capture
    site: Site
    plan: GridPlan
    stats: Floats
    """[maps, 6], in the order of `records.STAT_COLUMNS`, of all maps, drawn or not."""
    path: Path

    @property
    def channels(self) -> list[int]:
        """The drawn channels, in tile order."""
        own = self.capture.channels
        return list(range(self.capture.maps)) if own is None else own

    @property
    def slices(self) -> int:
        """Tiles side by side for each channel."""
        return self.capture.slices[0] if self.capture.slices else 1


@dataclass(frozen=True)
class Image:
    """A complete image of a run."""

    name: str
    folder: Path
    input_size: tuple[int, int]
    """Width and height of the picture of what the model saw."""
    manifest: Mapping[str, Any]
    grids: tuple[Grid, ...]
    skipped: tuple[Skip, ...]
    never_ran: tuple[str, ...]

    @property
    def input(self) -> Path:
        """The picture of what the model saw."""
        return self.folder / INPUT_FILE


@dataclass(frozen=True)
class Run:
    """A run directory."""

    root: Path
    record: Mapping[str, Any]
    """run.json."""
    images: tuple[Image, ...]
    incomplete: Mapping[str, str]
    """Folder, or name, of what is not whole, and why."""
    audit: Mapping[str, Any] | None
    """audit.json, where there is one."""

    @property
    def failures(self) -> list[tuple[str, str]]:
        """Images that failed, and why."""
        return [(row["image"], row["error"]) for row in self.record.get("failures", ())]


def read_run(root: Path, audit: Path | None = None) -> Run:
    """Read a run directory.

    An image that lacks its manifest, or whose files are damaged, is named in `incomplete`.

    Args:
        audit: an audit.json or its folder; without it, one in the run directory is taken.

    Raises:
        StoreError: `root` is no run directory, or run.json or the audit cannot be read.
    """
    record = read_json(root / RUN_FILE)
    if record.get("kind", "run") != "run":
        raise StoreError(
            f"{root} holds {record['kind']}, not the feature maps of a run",
            "give a folder that featviz run wrote",
        )
    images, incomplete = [], {}
    for folder, complete in _image_folders(root):
        try:
            if not complete:
                raise StoreError("it has no manifest.json")
            images.append(_read_image(folder))
        except StoreError as error:
            incomplete[folder.relative_to(root).as_posix()] = error.message
    names = {name: n for n, name in enumerate(_complete(record, root))}
    incomplete |= _missing(names, images, incomplete)
    images.sort(key=lambda image: (names.get(image.name, len(names)), image.name))
    return Run(root, record, tuple(images), dict(sorted(incomplete.items())), _audit(root, audit))


def _complete(record: Mapping[str, Any], root: Path) -> list[str]:
    try:
        return [str(name) for name in record["images"]["complete"]]
    except (KeyError, TypeError) as error:
        raise StoreError(f"{root / RUN_FILE} cannot be read: it has no list of images") from error


def _missing(
    names: Mapping[str, int], images: list[Image], incomplete: Mapping[str, str]
) -> dict[str, str]:
    """Images that run.json calls complete and that are nowhere."""
    there = {image.name for image in images}
    return {
        name: "run.json calls it complete, its folder is missing"
        for name in names
        if name not in there and "/".join(map(safe_name, name.split("/"))) not in incomplete
    }


def _image_folders(root: Path) -> Iterator[tuple[Path, bool]]:
    """Folders of images below `root`, and whether they have their manifest.

    Images may lie in folders of their own. A folder with the model's input, or with a file that
    was being written, but no manifest is incomplete.
    """
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        if folder.name.startswith("."):
            continue
        if (folder / MANIFEST_FILE).is_file():
            yield folder, True
        elif (folder / INPUT_FILE).is_file() or any(folder.glob(".*.part")):
            yield folder, False
        else:
            yield from _image_folders(folder)


def _read_image(folder: Path) -> Image:
    manifest = read_json(folder / MANIFEST_FILE)
    try:
        stats = read_stats(folder / STATS_FILE)
        grids = tuple(_grid(row, stats, folder) for row in manifest["captures"])
        skipped = tuple(Skip(**row) for row in manifest["skipped"])
        name, never_ran = manifest["image"]["path"], tuple(manifest["never_ran"])
        size = _png_size(folder / INPUT_FILE)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StoreError(f"its {MANIFEST_FILE} cannot be read: {error!r}") from error
    return Image(name, folder, size, manifest, grids, skipped, never_ran)


def _grid(row: Mapping[str, Any], stats: Mapping[str, Floats], folder: Path) -> Grid:
    capture = Capture(**{key: value for key, value in row.items() if key in _CAPTURE_FIELDS})
    path = folder / capture.file
    if not path.is_file():
        raise StoreError(f"{capture.file} is missing")
    layer = Layer(capture.index, capture.layer, capture.type)
    site = Site(layer, capture.kind, capture.call, capture.key)
    return Grid(capture, site, _plan(capture), stats[site.stats_key], path)


def _plan(capture: Capture) -> GridPlan:
    """The geometry of a picture, from the manifest's `grid`."""
    grid: Mapping[str, Any] = capture.grid
    count = len(capture.channels) if capture.channels else capture.maps
    count *= capture.slices[0] if capture.slices else 1
    scale = grid["scale"]
    down, across = (scale, scale) if isinstance(scale, int) else scale
    (height, width), columns = grid["tile"], grid["nrow"]
    size = (height // down, width // across)
    return GridPlan(count, columns, -(-count // columns), size, (down, across), grid["padding"])


def _png_size(path: Path) -> tuple[int, int]:
    """Width and height, from the first chunk (https://www.w3.org/TR/png-3/#11IHDR)."""
    try:
        with path.open("rb") as file:
            return struct.unpack(">II", file.read(24)[16:])
    except (OSError, struct.error) as error:
        raise StoreError(f"its {path.name} cannot be read: {error}") from error


def read_stats(path: Path) -> dict[str, Floats]:
    """Read a stats.npz: `layer|kind|call|key` to float32 [channels, 6].

    A quarter of the time of `np.load`, which parses each array's header anew.

    Raises:
        StoreError: no such file, or it is no stats.npz.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(path.read_bytes())) as archive:
            names = archive.namelist()
            return {name.removesuffix(".npy"): _array(archive.read(name)) for name in names}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise StoreError(f"its {path.name} cannot be read: {error}") from error


def _array(data: bytes) -> Floats:
    end = 10 + int.from_bytes(data[8:10], "little")
    return np.frombuffer(data, np.float32, offset=end).reshape(_shape(data[8:end]))


@lru_cache(maxsize=1024)
def _shape(header: bytes) -> tuple[int, ...]:
    """Of an array in a stats.npz, from its header."""
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(io.BytesIO(header))
    if fortran or dtype != np.float32 or len(shape) != 2 or shape[1] != len(STAT_COLUMNS):
        raise ValueError(f"{dtype} {shape} is not float32 [channels, {len(STAT_COLUMNS)}]")
    return shape


def _audit(root: Path, given: Path | None) -> Mapping[str, Any] | None:
    """The audit that was asked for, or the run's own; None where it has none."""
    path = given if given is not None else root / AUDIT_FILE
    path = path / AUDIT_FILE if path.is_dir() else path
    if given is None and not path.is_file():
        return None
    try:
        content: Mapping[str, Any] = json.loads(path.read_text("utf-8"))
        for row in content["layers"]:
            _ = row["label"], row["channels"], [list(own) for own in row["findings"].values()]
        _ = content["images"]["seen"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{path} is no audit.json: {error}", "give one that featviz audit wrote"
        ) from error
    return content
