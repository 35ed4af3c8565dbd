"""One image of a run directory, read back: its manifest, and files that fit it. Every
file is opened by a name inside the image's folder, following no link, and is as large
as the manifest says. Nothing here needs torch."""

from __future__ import annotations

import math
import os
import struct
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Annotated, BinaryIO, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from PIL import Image

from featviz.errors import FileError, StoreError
from featviz.files import ReadFolder, npy, parse_json
from featviz.files.npy import read_arrays
from featviz.records import (
    CLASS_MAPS,
    FORMATS,
    STAT_COLUMNS,
    Bytes,
    CaptureKey,
    ClassScore,
    Detection,
    Floats,
    PictureFormat,
    Skip,
)
from featviz.rundir import INPUT_FILE, MANIFEST_FILE, SCHEMA_VERSION, STATS_FILE, schema
from featviz.rundir.schema import (
    MOST_RECORD,
    Capture,
    Channel,
    Count,
    SizeFields,
    Text,
)
from featviz.text import by, percent, quoted

_PNG = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR"
"""How every PNG begins (https://www.w3.org/TR/png-3/#11IHDR)."""
_PNG_HEAD = len(_PNG) + 8
"""Bytes up to the end of its width and height."""
MOST_STATS = 256 * 2**20
"""Bytes of the statistics of an image: ten million channels."""
MOST_TENSOR = 4 * 2**30
"""Bytes of a kept tensor."""
BROKEN = (
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
    Image.DecompressionBombError,
)
"""What zipfile, numpy and Pillow raise on broken files; Pillow's PNG reader raises
SyntaxError."""


@dataclass(frozen=True, slots=True)
class ImageFields:
    """`image` of a manifest."""

    path: Annotated[str, Meta(min_length=1, max_length=4096)]
    """Relative to the argument that it came from; it is a name, and nothing is opened
    by it."""
    sha256: Text
    size: SizeFields | None = None
    files: list[Text] | None = None


@dataclass(frozen=True)
class Input:
    """`input` of a manifest."""

    shape: Annotated[
        list[Count | Annotated[list[Count], Meta(max_length=64)]], Meta(max_length=4096)
    ]
    """[1, C, H, W], or several of these."""
    preprocessing: Text
    frames: Count | None = None
    """The number of frames T of a clip [1, T, C, H, W]; None for a clip [1, C, T, H, W],
    and for an image."""
    window: Annotated[list[int], Meta(min_length=4, max_length=4)] | None = None
    """Top, left, height and width of the whole image in the input, in pixels. If the
    image was cropped, the window reaches beyond the input. None for an image without
    detections."""

    @property
    def shapes(self) -> list[list[int]]:
        """The shapes of the inputs of the model, one or several."""
        several = [size for size in self.shape if isinstance(size, list)]
        return several or [[size for size in self.shape if isinstance(size, int)]]

    @property
    def shown(self) -> tuple[int, int] | None:
        """Width and height that input.png must have: it shows frames, and several inputs,
        side by side. None where the size is not known: an input is not a picture, or
        inputs differ in another axis than height and width."""
        first = self.shapes[0]
        for shape in self.shapes:
            is_picture = len(shape) in (4, 5) and shape[-2:] != [1, 1]
            if not is_picture or shape[:-2] != first[:-2]:
                return None
        # [1, C, H, W] has one frame, [1, C, T, H, W] has T
        frames = [self.frames or math.prod(shape[2:-2]) for shape in self.shapes]
        width = sum(n * shape[-1] for n, shape in zip(frames, self.shapes, strict=True))
        return width, max(shape[-2] for shape in self.shapes)


@dataclass(frozen=True)
class TargetFields:
    """`target` of a manifest: the number of which gradients were taken."""

    of: Text | None
    """The target, as --target takes it."""
    value: float | None
    grad_rule: Text
    """The value of --grad-rule."""


@dataclass(frozen=True)
class InterventionFields:
    """A row of `interventions`."""

    kind: Text
    what: Text
    layers: dict[Text, Count] = field(default_factory=dict)
    """The layers that it changes, with their positions in the model."""
    zeroed: list[Channel] = field(default_factory=list)
    """The channels of these layers that it sets to zero."""


class InputBox(NamedTuple):
    """A box in input.png, in pixels."""

    left: float
    top: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class FileSum:
    """A row of `files`."""

    file: Text
    bytes: Count
    sha256: Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]


@dataclass(frozen=True)
class Manifest:
    """manifest.json; fields of a later featviz are left out."""

    schema_version: int
    image: ImageFields
    input: Input
    captures: list[Capture]
    skipped: list[Skip]
    never_ran: list[Text]
    files: list[FileSum]
    fingerprint: Text | None = None
    prediction: list[ClassScore] = field(default_factory=list)
    detections: list[Detection] = field(default_factory=list)
    """Their boxes are in pixels of the image file, not of input.png."""
    target: TargetFields | None = None
    interventions: list[InterventionFields] = field(default_factory=list)

    @property
    def target_title(self) -> str:
        """What gradients were taken of: `tabby (43.1 %)` for a class of the prediction, else
        `class 7`, `box 0`. Empty where none were taken."""
        of = self.target.of if self.target is not None else None
        for rank, guess in enumerate(self.prediction):
            targets = {f"class:{guess.index}", f"class:{guess.name}"}
            if of in targets or (of == "top1" and rank == 0):
                return f"{guess.title} ({percent(guess.probability)})"
        return (of or "").replace(":", " ", 1)

    @property
    def boxes(self) -> list[InputBox]:
        """The boxes of the detections, in pixels of input.png. Empty where the manifest
        has no window of the image in it, or no size of the image."""
        size = self.image.size
        if self.input.window is None or size is None:
            return []
        top, left, height, width = self.input.window
        across = width / size["width"]
        down = height / size["height"]
        boxes = []
        for detection in self.detections:
            x0, y0, x1, y1 = detection.box
            boxes.append(
                InputBox(
                    left=left + x0 * across,
                    top=top + y0 * down,
                    width=(x1 - x0) * across,
                    height=(y1 - y0) * down,
                )
            )
        return boxes

    @property
    def named(self) -> list[str]:
        """All files that belong to the image, but for the manifest itself."""
        names = [INPUT_FILE]
        for row in self.captures:
            names += row.files
        return [*dict.fromkeys([*names, STATS_FILE])]


_MANIFESTS = msgspec.json.Decoder(Manifest)


def read_manifest(data: bytes) -> Manifest:
    """Check the content of a manifest.json.

    Args:
        data: all of the file, from anywhere.

    Returns:
        A manifest whose fields have their types and agree with one another. The files
        that it lists are not looked at: `read_image` checks them.

    Raises:
        ValueError: the message names the first misfit.
    """
    # The decoder of msgspec is fast. If it refuses the content, `convert` reads it once
    # more: the message of `convert` says what does not fit.
    manifest = None
    with suppress(msgspec.MsgspecError, ValueError, RecursionError):
        manifest = _MANIFESTS.decode(data)
    if manifest is None or manifest.schema_version != SCHEMA_VERSION:
        # Python's own JSON reads names that are not UTF-8
        try:
            content = parse_json(data.decode("utf-8"))
        except ValueError as error:
            raise ValueError(f"cannot be read: {quoted(error)}") from None
        schema.check_version(content)
        manifest = schema.convert(content, Manifest)
    schema.check_rows(manifest.captures)
    # a file that is not listed has no checksum, and --overwrite would not remove it
    listed = [row.file for row in manifest.files]
    for name in sorted(set(manifest.named) ^ set(listed)):
        verb = "lists" if name in listed else "lacks"
        raise ValueError(f"files {verb} {quoted(name)}")
    if len(set(listed)) < len(listed):
        raise ValueError("files lists a file twice")
    return manifest


class DamagedError(StoreError):
    """A file of an image cannot be read, though the image was complete when it was read.
    A command goes on with the other images."""

    def __init__(self, image: ReadImage, message: str) -> None:
        """Make the error; `image` is the image to leave out."""
        super().__init__(message)
        self.image = image


@dataclass(frozen=True)
class ReadImage:
    """A complete image of a run: when it was read, all its files were there and fitted
    its manifest. A method that reads a file raises DamagedError if the file no longer
    fits."""

    root: Path
    """The run directory."""
    folder: str
    """The image's folder, relative to `root`; empty where the files lie in `root`."""
    manifest: Manifest
    input_size: tuple[int, int]
    """Width and height of input.png; (0, 0) where there is none."""
    sizes: Mapping[str, int]
    """Bytes of its pictures and tensors, by their names in the folder."""
    kept_stats: Mapping[str, Floats] | None = None
    """What `stats` returns; None if `stats` reads the file at each call."""
    pixels: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Width and height of pictures, by name; only `read_pictures` fills it."""

    @property
    def name(self) -> str:
        """The path of the image's file, relative to the argument that it came from."""
        return self.manifest.image.path

    @property
    def path(self) -> Path:
        """The image's folder."""
        return self.root / self.folder

    @cached_property
    def captures(self) -> Mapping[CaptureKey, Capture]:
        """The captures of the manifest by their keys, in the order in which the layers ran;
        gradients in the order in which they came, from the output to the input."""
        rows = self.manifest.captures
        # a class activation map is of an output, and is drawn when the gradient comes
        if all(row.reduce in CLASS_MAPS for row in rows):
            rows = rows[::-1]
        return {row.capture_key: row for row in rows}

    def stats(self) -> Mapping[str, Floats]:
        """The statistics of all captures.

        Returns:
            Under `CaptureKey.stats_key` float32 [maps, 6], the columns STAT_COLUMNS;
            under `CaptureKey.deviations_key` float32 [maps], the standard deviations
            without the border of each map.
        """
        if self.kept_stats is not None:
            return self.kept_stats
        with self._opened() as folder:
            return stats_of(folder, self.manifest.captures)

    def tensor(self, row: Capture) -> np.ndarray | None:
        """The tensor of a capture as the layer gave it, of the shape `row.shape`; None
        where the run did not keep the tensor."""
        if row.tensor is None:
            return None
        with self._reading(row.tensor) as file:
            size = os.fstat(file.fileno()).st_size
            # the header of an npy file may claim any shape
            if size > MOST_TENSOR:
                raise ValueError(
                    f"it has {size:,} bytes, more than the {MOST_TENSOR:,} of any tensor"
                )
            array = npy.read_npy(file)
            shape = list(array.shape)
            if shape != row.shape:
                raise ValueError(f"its shape is {shape}, by the manifest {row.shape}")
            return array

    def levels(self, row: Capture) -> tuple[Bytes, Bytes | None] | None:
        """The levels of a capture's picture.

        Returns:
            The levels, uint8 [height, width], and the palette, uint8 [colours, 3]; the
            palette of a grey picture is None. None instead of both if the picture is not
            a PNG, has full colours instead of levels, or is too large for Pillow.
        """
        limit = Image.MAX_IMAGE_PIXELS
        is_too_large = limit is not None and row.plan.pixels > limit
        if is_too_large or not format_of(row.file).levels:
            return None
        picture = self.picture(row.file)
        if picture.mode not in ("L", "P"):  # full colours
            return None
        colors = picture.getpalette()
        # Pillow has a flat list: red, green and blue of each level
        palette = None
        if colors is not None:
            palette = np.array(colors, np.uint8).reshape(-1, 3)
        return np.asarray(picture), palette

    def picture(self, relative: str) -> Image.Image:
        """Decode a picture of this image.

        Args:
            relative: the path of the picture in the image's folder.

        Raises:
            DamagedError: it cannot be read.
            KeyError: the ending of the path is not that of a picture.
        """
        # Only this format: Pillow would start Ghostscript for an EPS file named .png.
        formats = [format_of(relative).pillow]
        with (
            self._reading(relative) as file,
            Image.open(file, formats=formats) as picture,
        ):
            picture.load()
            return picture

    def shown(self) -> np.ndarray:
        """What the model saw: the pixels of input.png, uint8 [height, width] or
        [height, width, 3]."""
        return np.asarray(self.picture(INPUT_FILE))

    def content(self, relative: str) -> bytes:
        """The bytes of a picture.

        Args:
            relative: the path of the picture in the image's folder, a key of `sizes`.

        Raises:
            DamagedError: the file is gone, a link, or larger than when the image was
                read.
        """
        with self._opened() as folder:
            return folder.read(relative, self.sizes[relative])

    @contextmanager
    def open(self, relative: str) -> Iterator[BinaryIO]:
        """Open a file of this image for the block. No link is followed below the run
        directory.

        Args:
            relative: the path of the file in the image's folder, with forward slashes.

        Raises:
            DamagedError: the file is gone, or has become a link.
        """
        with self._opened() as folder:
            file = folder.open(relative)
        with file:
            yield file

    @contextmanager
    def _reading(self, relative: str) -> Iterator[BinaryIO]:
        """Open a file as `open` does. An error of the block, which reads the content,
        becomes a DamagedError that names the file."""
        with self.open(relative) as file:
            try:
                yield file
            except BROKEN as error:
                where = quoted(f"{self.folder}/{relative}")
                raise DamagedError(
                    self, f"{where} cannot be read: {quoted(error)}"
                ) from error

    @contextmanager
    def _opened(self) -> Iterator[ReadFolder]:
        """Open the image's folder for the block.

        Raises:
            DamagedError: the folder, or a file that the block opens in it, is gone or a
                link.
        """
        try:
            with (
                _errors_named(self.folder),
                ReadFolder.below(self.root, self.folder) as folder,
            ):
                yield folder
        except StoreError as error:
            raise DamagedError(self, error.message) from error


def read_image(root: Path, folder: str, keep_stats: bool = False) -> ReadImage:
    """Read a complete image. The sizes of the files, the headers of the pictures and the
    shapes of the statistics are compared with the manifest. Checksums are not compared.

    Args:
        root: the run directory.
        folder: the image's folder in it, with forward slashes.
        keep_stats: whether the statistics stay in memory. If not, `ReadImage.stats`
            reads them at each call.

    Raises:
        StoreError: a file is missing, cannot be read, or does not fit.
    """
    with _errors_named(folder), ReadFolder.below(root, folder) as opened:
        try:
            manifest = read_manifest(opened.read(MANIFEST_FILE, MOST_RECORD))
        except ValueError as error:
            raise StoreError(f"{quoted(folder)}/{MANIFEST_FILE}: {error}") from error
        stats = stats_of(opened, manifest.captures)
        headers = _headers(opened, manifest)
        sizes = {name: header.bytes for name, header in headers.items()}
        for row in manifest.captures:
            if row.tensor is not None:
                sizes[row.tensor] = opened.size(row.tensor)
        sizes_on_disk = {**sizes, STATS_FILE: opened.size(STATS_FILE)}
    # cheaper than checksums, and finds every file that was cut off
    for entry in manifest.files:
        size = sizes_on_disk[entry.file]  # read_manifest has compared the names
        if size != entry.bytes:
            where = quoted(f"{folder}/{entry.file}")
            raise StoreError(
                f"{where} has {size:,} bytes, by its {MANIFEST_FILE} {entry.bytes:,}"
            )
    return ReadImage(
        root=root,
        folder=folder,
        manifest=manifest,
        input_size=headers[INPUT_FILE].pixels,
        sizes=sizes,
        kept_stats=stats if keep_stats else None,
    )


def _headers(folder: ReadFolder, manifest: Manifest) -> dict[str, PictureHeader]:
    """The headers of all pictures that a manifest names, by file. `picture_header` raises
    StoreError for a size other than that in the manifest."""
    headers = {}
    for row in manifest.captures:
        headers[row.file] = picture_header(folder, row.file, row.size)
        if row.figure is not None:
            headers[row.figure] = picture_header(folder, row.figure)
    headers[INPUT_FILE] = picture_header(folder, INPUT_FILE, manifest.input.shown)
    return headers


def read_pictures(
    root: Path,
    name: str,
    files: Iterable[str],
    rows: Sequence[Capture] = (),
    may_be_missing: bool = False,
) -> ReadImage:
    """Read the headers of the pictures of an audit, of exemplars or of kernels.

    Args:
        root: the folder that holds the pictures.
        name: the name of the returned image.
        files: the pictures, relative to the folder.
        rows: the captures of the grids among the pictures; a grid must have the size in
            its row.
        may_be_missing: leave out missing pictures instead of an error.

    Returns:
        An image that has only `captures`, `sizes` and `pixels`.

    Raises:
        StoreError: a file is not a picture, or a grid has another size than its row.
        FileNotFoundError: a picture is missing, without `may_be_missing`.
        FileError: a picture cannot be opened, or is a link.
    """
    sizes = {}
    pixels = {}
    expected = {row.file: row.size for row in rows}
    # an audit may have been copied without its pictures
    ignored_errors = [FileNotFoundError] if may_be_missing else []
    with ReadFolder(root) as folder:
        for file in files:
            with suppress(*ignored_errors):
                header = picture_header(folder, file, expected.get(file))
                sizes[file] = header.bytes
                pixels[file] = header.pixels
    manifest = Manifest(
        schema_version=1,
        image=ImageFields(name, sha256=""),
        input=Input(shape=[], preprocessing=""),
        captures=[*rows],
        skipped=[],
        never_ran=[],
        files=[],
    )
    return ReadImage(
        root=root,
        folder="",
        manifest=manifest,
        input_size=(0, 0),
        sizes=sizes,
        pixels=pixels,
    )


def same_content(first: tuple[ReadImage, str], second: tuple[ReadImage, str]) -> bool:
    """Whether two files hold the same bytes; DamagedError where one cannot be opened.

    Args:
        first, second: an image, and the path of the file in its folder.
    """
    first_image, first_name = first
    second_image, second_name = second
    with first_image.open(first_name) as old, second_image.open(second_name) as new:
        if os.fstat(old.fileno()).st_size != os.fstat(new.fileno()).st_size:
            return False
        while True:
            piece = old.read(2**20)
            if piece != new.read(2**20):
                return False
            if not piece:
                return True


class PictureHeader(NamedTuple):
    """The size of a picture, in pixels and in bytes."""

    pixels: tuple[int, int]
    """Width and height."""
    bytes: int
    """The size of the file."""


def picture_header(
    folder: ReadFolder, name: str, expected: tuple[int, int] | None = None
) -> PictureHeader:
    """Read the header of a picture.

    Args:
        folder: the open folder that the picture is in.
        name: the path of the picture in the folder.
        expected: width and height in the manifest; None allows any size.

    Raises:
        StoreError: the name does not end as that of a picture, the file has another
            format than its name says, or another size than `expected`.
        FileNotFoundError: there is no such file.
        FileError: it cannot be opened, or is a link.
    """
    where = quoted(f"{folder.name}/{name}")
    format = FORMATS.get(PurePosixPath(name).suffix[1:])
    if format is None:
        raise StoreError(f"{where} cannot be read: it is no PNG")
    if format.pillow == "PNG":
        header = _png_header(folder, name)
    else:
        header = _pillow_header(folder, name, format.pillow)
    if header is None:
        raise StoreError(f"{where} cannot be read: it is no {format.pillow}")
    if expected is not None and header.pixels != expected:
        raise StoreError(
            f"{where} has {by(header.pixels)} pixels, by its {MANIFEST_FILE}"
            f" {by(expected)}"
        )
    return header


def _png_header(folder: ReadFolder, name: str) -> PictureHeader | None:
    """The header of a PNG; None where the file is not a PNG."""
    # A run has thousands of PNG. Width and height stand in the first bytes, and Pillow
    # would read more than these.
    head, size = folder.head(name, _PNG_HEAD)
    if len(head) < _PNG_HEAD or not head.startswith(_PNG):
        return None
    width = int.from_bytes(head[-8:-4], "big")
    height = int.from_bytes(head[-4:], "big")
    return PictureHeader((width, height), size)


def _pillow_header(folder: ReadFolder, name: str, format: str) -> PictureHeader | None:
    """The header of a picture, as Pillow reads it; None where the file does not have the
    format.

    Args:
        folder: the open folder that the picture is in.
        name: the path of the picture in the folder.
        format: Pillow's name of the format, such as `WEBP`.
    """
    with folder.open(name) as file, warnings.catch_warnings():
        # the warning is about memory for the pixels, which are not decoded here
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        size = os.fstat(file.fileno()).st_size
        try:
            with Image.open(file, formats=[format]) as picture:
                return PictureHeader(picture.size, size)
        except BROKEN:
            return None


def format_of(name: str) -> PictureFormat:
    """The format of a picture, by the ending of its file's name; KeyError for any other
    ending."""
    return FORMATS[PurePosixPath(name).suffix[1:]]


@contextmanager
def _errors_named(folder: str) -> Iterator[None]:
    """Turn the errors of a `ReadFolder`, which name only the file, into StoreErrors that
    also name the image's folder."""
    try:
        yield
    except FileNotFoundError as error:
        raise StoreError(
            f"{quoted(f'{folder}/{error.filename}')} is missing",
            "the run directory is not whole; copy or run it again",
        ) from None
    except FileError as error:
        raise StoreError(f"{quoted(folder)}/{error.message}") from error


def stats_of(folder: ReadFolder, rows: Sequence[Capture]) -> dict[str, Floats]:
    """The statistics of all rows of an image's manifest, as `ReadImage.stats` has them.

    Raises:
        StoreError: the file does not have the arrays of all rows.
        FileNotFoundError: there is no such file.
        FileError: it has more than MOST_STATS bytes, or cannot be read.
    """
    data = folder.read(STATS_FILE, MOST_STATS)
    where = quoted(f"{folder.name}/{STATS_FILE}")
    # Arrays may overlap in a zip file: a small file could then fill the memory.
    if len(data) < sum(row.maps for row in rows) * 4 * len(STAT_COLUMNS):
        raise StoreError(
            f"{where} has {len(data):,} bytes, too few for the maps of its manifest"
        )
    stats: dict[str, Floats] = {}
    try:
        arrays = read_arrays(data, MOST_STATS)
        for row in rows:
            stats |= _stats_of_row(arrays, row)
    except BROKEN as error:
        raise StoreError(f"{where} cannot be read: {quoted(error)}") from error
    return stats


def _stats_of_row(arrays: Mapping[str, np.ndarray], row: Capture) -> dict[str, Floats]:
    """The two arrays of a row, by their keys, as `ReadImage.stats` has them.

    Args:
        arrays: all arrays of the file, by key.
        row: the row of the manifest.

    Raises:
        ValueError: the statistics of the row are missing, or an array has another shape
            or type.
    """
    key = row.capture_key.stats_key
    array = arrays.get(key)
    if array is None:
        raise ValueError(f"it has no {key}")
    shape = [row.maps, len(STAT_COLUMNS)]
    if array.dtype != np.float32 or list(array.shape) != shape:
        raise ValueError(
            f"{key} is {array.dtype} {list(array.shape)}, expected float32 {shape}"
        )
    deviations_key = row.capture_key.deviations_key
    deviations = arrays.get(deviations_key)
    if deviations is None:  # kernels have no border
        deviations = array[:, STAT_COLUMNS.index("std")]
    if deviations.dtype != np.float32 or len(deviations) != row.maps:
        raise ValueError(f"{key} has {len(deviations)} deviations")
    return {key: array, deviations_key: deviations}
