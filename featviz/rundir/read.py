"""Run directories, read back: the one reader of all commands. Nothing here needs torch.

A run directory comes from anywhere. What is in its files is held against `schema`; every file is
opened by a name inside its folder, following no link, and is as large as the manifest says. An
image that does not fit is left out and named.
"""

from __future__ import annotations

import io
import math
import os
import re
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from featviz import files
from featviz.errors import FileError, StoreError
from featviz.files import Folder
from featviz.records import FORMATS, STAT_COLUMNS, Bytes, Floats, GridPlan, PictureFormat, Place
from featviz.rundir import AUDIT_FILE, INPUT_FILE, MANIFEST_FILE, RUN_FILE, STATS_FILE, schema
from featviz.rundir.schema import Audit, CaptureRow, Manifest, RunRecord
from featviz.text import by, quoted, safe_way

MOST_RECORD = 64 * 2**20
"""Bytes of run.json or of a manifest: half a million images, or rows."""
MOST_STATS = 256 * 2**20
"""Bytes of the statistics of an image: ten million channels."""
MOST_HELD = 8 * 2**30
"""Bytes of the statistics of a run that are held at once."""
MOST_TENSOR = 4 * 2**30
"""Bytes of a kept tensor."""
DEEPEST = 100
"""Folders inside one another in which images are looked for."""

_LEVELS = ("L", "P")
"""Pillow's modes of pictures whose pixels are levels."""
_PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
"""How every PNG begins (https://www.w3.org/TR/png-3/#11IHDR)."""
_PNG_HEAD = len(_PNG) + 8
_UNFINISHED = re.compile(r"\..*\.(part|old)")
"""Files and folders that were being written when their run was killed."""

_NPY = re.compile(
    rb"\{'descr': '([<>|][biufc]\d+)', 'fortran_order': (True|False), "
    rb"'shape': \((?:(\d{1,18}(?:, \d{1,18})*),?)?\), \} *\n"
)
"""The header of an array as numpy writes it; it is not evaluated."""
_NPY_HEAD = 2048
"""Bytes of an array in which its header must end: numpy's own take 128."""
_ENCRYPTED = 1
_ROW_BYTES = 4 * len(STAT_COLUMNS)
_MEMBER_BYTES = 4096
"""What an array of a few rows may take in an npz, with its name twice, headers and padding."""

_BROKEN = (
    ArithmeticError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""What zipfile, numpy and Pillow raise on broken files; Pillow's PNG reader raises SyntaxError."""


class DamagedError(StoreError):
    """A file of an image that seemed whole cannot be read; the other images go on."""

    def __init__(self, image: ReadImage, message: str) -> None:
        super().__init__(message)
        self.image = image


@dataclass(frozen=True)
class DrawnGrid:
    """One drawn tensor of one image: its picture, geometry and numbers."""

    capture: CaptureRow
    stats: Floats
    """[maps, 6], in the order of `records.STAT_COLUMNS`, of all maps, drawn or not."""
    path: Path
    size: int
    """Bytes of the picture."""

    @cached_property
    def plan(self) -> GridPlan:
        """The geometry of the picture."""
        return self.capture.plan

    @cached_property
    def channels(self) -> list[int]:
        """The channels with a tile of their own, in tile order; none where all became one."""
        return self.capture.drawn

    @property
    def slices(self) -> int:
        """Tiles side by side for each channel."""
        return self.capture.side

    @property
    def label(self) -> str:
        """The layer, for people."""
        return self.capture.label

    @property
    def stem(self) -> str:
        """`output`, `output.call1`."""
        return self.capture.place.stem


@dataclass(frozen=True)
class ReadImage:
    """A complete image of a run, all of whose files are there and fit its manifest."""

    root: Path
    """The run directory."""
    folder: str
    """Relative to the run directory, with forward slashes."""
    manifest: Manifest
    input_size: tuple[int, int]
    """Width and height of input.png."""
    sizes: Mapping[str, int]
    """Bytes of its pictures, by their names in the folder."""
    held: Mapping[str, Floats] | None = None
    """Its statistics, where all of a run are held."""

    @property
    def name(self) -> str:
        """Its path relative to the argument it came from."""
        return self.manifest.image.path

    @property
    def path(self) -> Path:
        """Its folder."""
        return self.root / self.folder

    @property
    def files(self) -> list[str]:
        """All that the manifest names, and itself, which comes last."""
        named = [name for row in self.manifest.captures for name in row.files]
        return [*dict.fromkeys([INPUT_FILE, *named, STATS_FILE]), MANIFEST_FILE]

    @cached_property
    def captures(self) -> Mapping[Place, CaptureRow]:
        """In the order in which the model came to them."""
        return {row.place: row for row in self.manifest.captures}

    @cached_property
    def grids(self) -> tuple[DrawnGrid, ...]:
        """Its pictures, with their statistics."""
        numbers = self.stats()
        return tuple(
            DrawnGrid(row, numbers[place.stats_key], self.path / row.file, self.sizes[row.file])
            for place, row in self.captures.items()
        )

    def stats(self) -> Mapping[str, Floats]:
        """All statistics, float32 [maps, 6] under `Place.stats_key`.

        Raises:
            DamagedError: they have been damaged since the image was read.
        """
        if self.held is not None:
            return self.held
        with self._damaged(), Folder(self.root, self.folder) as folder:
            return _read_stats(folder, self.manifest)

    def tensor(self, row: CaptureRow) -> np.ndarray | None:
        """The kept tensor, in the shape in which the layer gave it; None where there is none.

        Raises:
            DamagedError: it is missing, broken, or of another shape than the manifest says.
        """
        if row.tensor is None:
            return None
        with self._at(row.tensor), self.open(row.tensor) as file:
            return _read_tensor(file, row.shape)

    def levels(self, row: CaptureRow) -> tuple[Bytes, Bytes | None] | None:
        """The pixels of a PNG, uint8 [height, width], and its palette, uint8 [colours, 3], or None
        where it is grey; None for what has colours (other formats among them), or is too large for
        Pillow.

        Raises:
            DamagedError: it is missing or broken.
        """
        if not (format := format_of(row.file)).levels:
            return None
        with self._at(row.file), warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            try:
                with (
                    self.open(row.file) as file,
                    Image.open(file, formats=[format.pillow]) as opened,
                ):
                    if opened.mode not in _LEVELS:
                        return None
                    pixels, colors = np.asarray(opened), opened.getpalette()
            except (Image.DecompressionBombWarning, Image.DecompressionBombError):
                return None
            return pixels, None if colors is None else np.array(colors, np.uint8).reshape(-1, 3)

    def picture(self, relative: str) -> Image.Image:
        """A picture of this image, decoded.

        Raises:
            DamagedError: it is missing, broken or too large.
        """
        kind = format_of(relative).pillow
        with self._at(relative), self.open(relative) as file:
            try:
                with Image.open(file, formats=[kind]) as opened:
                    opened.load()
                    return opened
            except Image.DecompressionBombError as error:
                raise ValueError(str(error)) from error

    def shown(self) -> np.ndarray:
        """What the model saw: the pixels of input.png.

        Raises:
            DamagedError: it is missing or broken.
        """
        return np.asarray(self.picture(INPUT_FILE))

    def content(self, relative: str) -> bytes:
        """A picture's bytes, as many as there were when the image was read at most.

        Raises:
            DamagedError: it is missing, or has grown.
        """
        with self._damaged(), Folder(self.root, self.folder) as folder:
            return folder.read(relative, self.sizes[relative])

    @contextmanager
    def open(self, relative: str) -> Iterator[BinaryIO]:
        """Open a file of this image; no link is followed below the run directory.

        Raises:
            DamagedError: it is missing, no regular file, or reached through a link.
        """
        with self._damaged(), Folder(self.root, self.folder) as folder:
            file = folder.open(relative)
        with file:
            yield file

    @contextmanager
    def _at(self, relative: str) -> Iterator[None]:
        """Turn what goes wrong with the content of a file into an error that names it."""
        try:
            yield
        except _BROKEN as error:
            where = quoted(f"{self.folder}/{relative}")
            raise DamagedError(self, f"{where} cannot be read: {quoted(str(error))}") from error

    @contextmanager
    def _damaged(self) -> Iterator[None]:
        try:
            with _blamed(self.folder):
                yield
        except DamagedError:
            raise
        except StoreError as error:
            raise DamagedError(self, error.message) from error


@dataclass(frozen=True)
class ReadRun:
    """A run directory; images in the order of the run."""

    root: Path
    record: Mapping[str, Any]
    """The content of run.json; what `schema.RunRecord` names of it fits."""
    images: Mapping[str, ReadImage]
    incomplete: Mapping[str, str]
    """Images without a manifest, by name, or folder where no name is known, and what is missing:
    their run was killed, or they were copied in part."""
    damaged: Mapping[str, str]
    """Images with a manifest that does not fit, or that their files do not fit; and why."""

    @property
    def failures(self) -> dict[str, str]:
        """Images that failed, with what was said of each."""
        return {row["image"]: row["error"] for row in self.record["failures"]}

    @property
    def left_out(self) -> dict[str, str]:
        """All images that are not whole, sorted, and why."""
        return dict(sorted({**self.incomplete, **self.damaged}.items()))

    @property
    def missing(self) -> int:
        """Images that the run was to have and that it neither has nor names."""
        known = len(self.images) + len(self.failures) + len(self.left_out)
        return max(0, int(self.record["images"]["total"]) - known)


def read_run(root: Path, hold: bool = False) -> ReadRun:
    """Read a run directory: run.json, all manifests, and of all other files whether they fit.

    An image that is not whole is named in `incomplete` or `damaged`, and left out.

    Args:
        hold: keep all statistics in memory, for whoever needs them all.

    Raises:
        StoreError: it is none, or its run.json does not fit; names the file.
    """
    record, known = _read_record(root)
    folders = {safe_way(name): name for name in known.images.complete}
    found: dict[str, ReadImage] = {}
    incomplete: dict[str, str] = {}
    damaged: dict[str, str] = {}
    room = MOST_HELD
    for folder, reason in _folders(root, folders):
        name = folders.get(folder, folder)
        if reason is not None:
            incomplete[name] = reason
            continue
        try:
            image = _read_image(root, folder, hold)
            _check_name(image, folders.get(folder), found)
            room -= sum(own.nbytes for own in (image.held or {}).values())
            if room < 0:
                raise StoreError(f"{quoted(folder)}: the run has too many statistics to hold")
        except StoreError as error:
            damaged[name] = error.message
        else:
            found[image.name] = image
    listed = {name: n for n, name in enumerate(known.images.complete)}
    for name in listed.keys() - found.keys() - incomplete.keys() - damaged.keys():
        incomplete[name] = "run.json calls it complete, its folder is missing"
    order = sorted(found, key=lambda name: (listed.get(name, len(listed)), PurePosixPath(name)))
    images = {name: found[name] for name in order}
    return ReadRun(root, record, images, dict(sorted(incomplete.items())), damaged)


def read_json(path: Path) -> dict[str, Any]:
    """The content of a run.json or manifest, of whatever kind it is.

    Raises:
        StoreError: no such file, no JSON, or written by a later featviz.
    """
    try:
        content = files.read_json(path, MOST_RECORD)
    except FileNotFoundError:
        raise StoreError(
            f"{quoted(str(path.parent))} is no run directory: it has no {path.name}"
        ) from None
    except FileError as error:
        where = f"{quoted(str(path))} cannot be read"
        said = error.message.removeprefix(f"{where}: ")
        raise StoreError(f"{where}: {said}", error.hint) from error
    try:
        schema.check_version(content)
    except ValueError as error:
        raise StoreError(f"{quoted(str(path))} {error}") from None
    found: dict[str, Any] = content
    return found


def read_manifest(folder: Folder) -> Manifest:
    """The manifest of an image.

    Raises:
        StoreError: there is none, it was written by a later featviz, or does not fit: with the
            field, its value and what was expected.
    """
    with _blamed(folder.name):
        data = folder.read(MANIFEST_FILE, MOST_RECORD)
    try:
        return schema.read_manifest(data)
    except ValueError as error:
        raise StoreError(f"{quoted(folder.name)}/{MANIFEST_FILE}: {error}") from error


def read_kept(root: Path, folder: str) -> Manifest:
    """The manifest of an image that a run need not draw again, since its files are all there.

    Raises:
        StoreError: there is no such image, or it is not whole; says why.
    """
    return _read_image(root, folder, False).manifest


def read_stats(root: Path, folder: str) -> Mapping[str, Floats]:
    """The statistics of a complete image, float32 [maps, 6] under `Place.stats_key`.

    Raises:
        StoreError: there is no such image, or it is not whole; says why.
    """
    return _read_image(root, folder, True).stats()


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """The arrays of an npz file that was written without compression, as numpy does by default.

    Raises:
        StoreError: it cannot be read.
    """
    try:
        arrays = _Npz(files.read_bytes(path, MOST_STATS))
        keys = [name.removesuffix(".npy") for name in arrays.members]
        return {key: arrays[key] for key in keys}
    except FileNotFoundError:
        raise StoreError(f"{quoted(str(path))} is missing") from None
    except (*_BROKEN, FileError) as error:
        raise StoreError(f"{quoted(str(path))} cannot be read: {quoted(str(error))}") from error


def read_audit(root: Path, given: Path | None) -> Audit | None:
    """The audit that was asked for, a file or its folder, or the run's own; None where it has none.

    Raises:
        StoreError: it is no audit.json.
    """
    path = root / AUDIT_FILE if given is None else given
    if given is not None and path.is_dir():
        path /= AUDIT_FILE
    try:
        below = root if given is None else None
        return schema.check_audit(files.read_json(path, MOST_RECORD, below))
    except FileNotFoundError as error:
        if given is None:
            return None
        reason = str(error.strerror)
    except (FileError, ValueError) as error:
        reason = str(error)
    raise StoreError(
        f"{quoted(str(path))} is no audit.json: {reason}", "give one that featviz audit wrote"
    )


def same_content(first: tuple[ReadImage, str], second: tuple[ReadImage, str]) -> bool:
    """Whether two files, each an image's, hold the same bytes.

    Raises:
        StoreError: one of them cannot be read.
    """
    with first[0].open(first[1]) as one, second[0].open(second[1]) as two:
        if os.fstat(one.fileno()).st_size != os.fstat(two.fileno()).st_size:
            return False
        while piece := one.read(2**20):
            if piece != two.read(2**20):
                return False
    return True


def _read_record(root: Path) -> tuple[dict[str, Any], RunRecord]:
    content = read_json(root / RUN_FILE)
    kind = content.get("kind", "run")
    if kind != "run":
        raise StoreError(
            f"{quoted(str(root))} holds {quoted(str(kind))}, not the feature maps of a run",
            "give a folder that featviz run wrote",
        )
    try:
        return content, schema.check_record(content)
    except ValueError as error:
        raise StoreError(f"{quoted(str(root / RUN_FILE))}: {error}") from error


def _folders(root: Path, listed: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    """Folders of images, relative to the run directory, and what those that are not whole lack.

    Images may lie in folders of their own. A folder with the model's input, with statistics, or
    with a file that was being written, but without a manifest, is incomplete. Links are not
    followed.
    """
    waiting = [""]
    while waiting:
        here = waiting.pop()
        try:
            with os.scandir(root / here) as scanned:
                entries = sorted(scanned, key=lambda entry: entry.name, reverse=True)
        except OSError as error:
            if here:
                yield here, f"its folder cannot be read: {error.strerror}"
                continue
            raise StoreError(f"{quoted(str(root))} cannot be read: {error.strerror}") from error
        found = {entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)}
        if here and MANIFEST_FILE in found:
            yield here, None
        elif here and (found & {INPUT_FILE, STATS_FILE} or any(map(_UNFINISHED.fullmatch, found))):
            yield here, f"it has no {MANIFEST_FILE}"
        elif here.count("/") < DEEPEST:
            for entry in entries:
                inner = f"{here}/{entry.name}".lstrip("/") if here else entry.name
                if entry.is_dir(follow_symlinks=False) and not _UNFINISHED.fullmatch(entry.name):
                    waiting.append(inner)
                elif inner in listed and entry.is_symlink():
                    yield inner, "its folder is a symbolic link, which is not followed"


def _read_image(root: Path, folder: str, hold: bool) -> ReadImage:
    """An image, if all that its manifest names is there and fits.

    Raises:
        StoreError: names what does not fit.
    """
    with _blamed(folder), Folder(root, folder) as opened:
        manifest = read_manifest(opened)
        numbers = _read_stats(opened, manifest)
        sizes = {}
        for row in manifest.captures:
            plan = row.plan
            sizes[row.file] = _check_picture(opened, row.file, (plan.width, plan.height))
            for name in row.files[1:]:
                opened.size(name)
        head, sizes[INPUT_FILE] = opened.head(INPUT_FILE, _PNG_HEAD)
        shown = _png_size(opened, INPUT_FILE, head)
        if (expected := manifest.input.shown) is not None and shown != expected:
            raise _wrong_size(opened, INPUT_FILE, shown, expected)
    return ReadImage(root, folder, manifest, shown, sizes, numbers if hold else None)


def _check_name(image: ReadImage, listed: str | None, found: Mapping[str, ReadImage]) -> None:
    """Whether an image is the one that run.json has in this folder, and no other one's double."""
    where, name = f"{quoted(image.folder)}/{MANIFEST_FILE}: ", image.name
    if listed is not None and name != listed:
        raise StoreError(where + schema.misfit("image.path", name, f"{quoted(listed)!r}"))
    if name in found:
        other = quoted(found[name].folder)
        raise StoreError(where + schema.misfit("image.path", name, f"another than in {other}"))


def _check_picture(folder: Folder, name: str, expected: tuple[int, int]) -> int:
    """Bytes of a picture whose header says what its grid says."""
    if name.endswith(".png"):
        head, size = folder.head(name, _PNG_HEAD)
        found = _png_size(folder, name, head)
    else:
        found, size = _other_size(folder, name)
    if found != expected:
        raise _wrong_size(folder, name, found, expected)
    return size


def format_of(name: str) -> PictureFormat:
    """The format of a picture, by the ending of its file's name, which Pillow is told to expect: it
    tries no other."""
    return FORMATS[PurePosixPath(name).suffix[1:]]


def _png_size(folder: Folder, name: str, head: bytes) -> tuple[int, int]:
    """Width and height, from the first chunk."""
    if len(head) < _PNG_HEAD or not head.startswith(_PNG):
        raise StoreError(f"{quoted(f'{folder.name}/{name}')} cannot be read: it is no PNG")
    return int.from_bytes(head[-8:-4], "big"), int.from_bytes(head[-4:], "big")


def _other_size(folder: Folder, name: str) -> tuple[tuple[int, int], int]:
    kind = format_of(name).pillow
    with folder.open(name) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        try:
            with Image.open(file, formats=[kind]) as opened:
                return opened.size, os.fstat(file.fileno()).st_size
        except (*_BROKEN, Image.DecompressionBombError) as error:
            where = quoted(f"{folder.name}/{name}")
            raise StoreError(f"{where} cannot be read: it is no {kind}") from error


def _wrong_size(
    folder: Folder, name: str, found: tuple[int, int], expected: tuple[int, int]
) -> StoreError:
    where = quoted(f"{folder.name}/{name}")
    return StoreError(f"{where} has {by(found)} pixels, by its {MANIFEST_FILE} {by(expected)}")


def _read_stats(folder: Folder, manifest: Manifest) -> dict[str, Floats]:
    """The statistics of all rows; as large as the manifest says."""
    rows = manifest.captures
    most = sum(2 * row.maps * _ROW_BYTES + _MEMBER_BYTES + 16 * len(row.layer) for row in rows)
    data = folder.read(STATS_FILE, min(most + _MEMBER_BYTES, MOST_STATS))
    where = quoted(f"{folder.name}/{STATS_FILE}")
    if len(data) < sum(row.maps for row in rows) * _ROW_BYTES:  # arrays may overlap in a zip file
        raise StoreError(f"{where} has {len(data):,} bytes, too few for the maps of its manifest")
    found: dict[str, Floats] = {}
    try:
        arrays = _Npz(data)
        for row in rows:
            key = row.place.stats_key
            found[key] = array = arrays[key]
            if array.dtype != np.float32 or array.shape != (row.maps, len(STAT_COLUMNS)):
                raise ValueError(
                    f"{key} is {array.dtype} {list(array.shape)}, expected float32 "
                    f"{[row.maps, len(STAT_COLUMNS)]}"
                )
    except _BROKEN as error:
        raise StoreError(f"{where} cannot be read: {quoted(str(error))}") from error
    return found


class _Npz:
    """The arrays of an npz file in memory, without copies: compressed ones, which could be of any
    size, are refused, as is what featviz does not write.

    A seventh of the time of `np.load`, which evaluates each array's header.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            self.members = {info.filename: info for info in archive.infolist()}

    def __getitem__(self, key: str) -> np.ndarray:
        info = self.members.get(f"{key}.npy")
        if info is None:
            raise ValueError(f"it has no {key}")
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & _ENCRYPTED:
            raise ValueError(f"{key} is compressed, which featviz does not write")
        name, extra = struct.unpack_from("<HH", self.data, info.header_offset + 26)
        start = info.header_offset + 30 + name + extra
        stored = memoryview(self.data)[start : start + info.file_size]
        if zlib.crc32(stored) != info.CRC:
            raise ValueError(f"{key} has another check sum than it should")
        dtype, shape, order, offset = _npy_header(bytes(stored[:_NPY_HEAD]))
        if len(stored) - offset != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{key} has {len(stored) - offset} bytes, not those of {shape}")
        array: np.ndarray = np.frombuffer(stored, dtype, offset=offset).reshape(shape, order=order)
        return array


def _npy_header(data: bytes) -> tuple[np.dtype[Any], tuple[int, ...], Any, int]:
    """Type, shape, order and where the numbers begin
    (https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html, version 1.0)."""
    start = 10 + int.from_bytes(data[8:10], "little")
    if not data.startswith(b"\x93NUMPY\x01\x00"):
        raise ValueError("it is no array as numpy writes it")
    return *_parse_header(data[10:start]), start


@lru_cache(maxsize=1024)
def _parse_header(header: bytes) -> tuple[np.dtype[Any], tuple[int, ...], Any]:
    parts = _NPY.fullmatch(header)
    if parts is None:
        raise ValueError("its header is not as numpy writes it")
    shape = tuple(map(int, parts[3].decode().split(", "))) if parts[3] else ()
    return np.dtype(parts[1].decode()), shape, "F" if parts[2] == b"True" else "C"


def _read_tensor(file: BinaryIO, expected: list[int]) -> np.ndarray:
    size = os.fstat(file.fileno()).st_size
    dtype, shape, order, start = _npy_header(file.read(_NPY_HEAD))
    if list(shape) != expected:
        raise ValueError(f"its shape is {list(shape)}, by the manifest {expected}")
    if size - start != math.prod(shape) * dtype.itemsize or size > MOST_TENSOR:
        raise ValueError(f"it has {size - start:,} bytes, not those of {dtype} {list(shape)}")
    file.seek(start)
    flat: np.ndarray = np.fromfile(file, dtype, math.prod(shape))
    return flat.reshape(shape, order=order)


@contextmanager
def _blamed(folder: str) -> Iterator[None]:
    """Turn what is said of a file of an image into a StoreError that names both."""
    try:
        yield
    except FileNotFoundError as error:
        raise StoreError(
            f"{quoted(f'{folder}/{error.filename}')} is missing",
            "the run directory is not whole; copy or run it again",
        ) from None
    except FileError as error:
        raise StoreError(f"{quoted(folder)}/{error.message}") from error
