"""The formats of image files that are read, none of which starts a program or is one; and files to
pictures of mode L or RGB, as a person sees them."""

from __future__ import annotations

import hashlib
import io
import logging
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageColor, ImageOps, UnidentifiedImageError

from featviz.errors import FileError, ImageError, UsageError
from featviz.files import npy
from featviz.images import archives, arrays
from featviz.images.archives import Place
from featviz.images.arrays import Wanted
from featviz.records import Raster, Sample

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ImageFormat:
    """A format of image files that is read."""

    name: str
    """Pillow's name where Pillow reads it."""
    suffixes: tuple[str, ...] = ()
    """By which folders and archives are searched; without any it is read where a file is named."""
    common: bool = False
    """Whether Pillow knows it without importing all of its plugins."""
    pillow: bool = True
    is_mine: Callable[[bytes], bool] | None = None
    """Knows a file of the format that may hold any number of channels."""
    read: Callable[[bytes], np.ndarray] | None = None
    """Reads such a file as an array; None where only torch can, whose reader the caller has."""


def _is_zip_with(suffix: str, data: bytes) -> bool:
    """Whether a file is a zip in which a name ends so."""
    if not data.startswith(b"PK\3\4"):
        return False
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return any(name.endswith(suffix) for name in archive.namelist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError):
        return False


def _is_torch(data: bytes) -> bool:
    """Whether a file is one of torch.save, as it is written now or was before torch 1.6."""
    old = data.startswith(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.")
    return old or _is_zip_with("data.pkl", data)


IMAGE_FORMATS = (
    ImageFormat("PNG", (".png",), common=True),
    ImageFormat("JPEG", (".jpg", ".jpeg", ".jfif"), common=True),
    ImageFormat("GIF", (".gif",), common=True),
    ImageFormat("BMP", (".bmp",), common=True),
    ImageFormat("PPM", (".ppm", ".pgm", ".pbm", ".pnm"), common=True),
    ImageFormat("DIB"),
    ImageFormat("TIFF", (".tif", ".tiff"), is_mine=arrays.is_tiff, read=arrays.read_tiff),
    ImageFormat("WEBP", (".webp",)),
    ImageFormat("JPEG2000", (".jp2",)),
    ImageFormat("AVIF", (".avif",)),
    ImageFormat("ICO"),
    ImageFormat("PCX"),
    ImageFormat("QOI"),
    ImageFormat("SGI"),
    ImageFormat("TGA", (".tga",)),
    ImageFormat("NPY", pillow=False, is_mine=lambda d: d.startswith(npy.MAGIC), read=npy.read_npy),
    ImageFormat("NPZ", pillow=False, is_mine=partial(_is_zip_with, ".npy"), read=npy.read_npz),
    ImageFormat("PT", pillow=False, is_mine=_is_torch),
)
"""In the order in which they are tried: TGA has no mark by which it is known, and comes last of
Pillow's. Arrays may hold anything, and are read where they are named, not found in folders. Of
Pillow's formats that are not here EPS starts Ghostscript, and the rest are of fonts, films, screens
and telescopes."""

SUFFIXES = frozenset(suffix for known in IMAGE_FORMATS for suffix in known.suffixes)
"""File names, in lower case, that count as images in a folder or an archive."""

EXPECTED = (
    f"give an image ({', '.join(one.name for one in IMAGE_FORMATS if one.suffixes)}) or an array "
    f"({', '.join(f'.{one.name.lower()}' for one in IMAGE_FORMATS if not one.pillow)}); "
    "--forward-arg passes other arguments of the model"
)
"""What a file that is no image should have been."""

_LOOKS = {
    b"%!PS": "PostScript",
    b"%PDF": "PDF",
    b"<svg": "SVG",
    b"<?xml": "XML or SVG",
    b"<!DOCTYPE": "HTML or SVG",
    b"<html": "HTML",
    b"8BPS": "Photoshop",
    b"PK\3\4": "a zip file",
}


def open_image(file: BinaryIO) -> Image.Image:
    """Open an image in one of IMAGE_FORMATS; its pixels are read later.

    Raises:
        UnidentifiedImageError: the file is no such image; the message says what it looks like.
        OSError: or whatever else Pillow raises on broken files.
    """
    head = file.read(64)
    file.seek(0)
    common, others = (
        [one.name for one in IMAGE_FORMATS if one.pillow and one.common == first]
        for first in (True, False)
    )
    try:
        try:
            return Image.open(file, formats=common)
        except UnidentifiedImageError:
            Image.init()  # imports all of Pillow's plugins; it may have been built without some
            return Image.open(file, formats=[name for name in others if name in Image.OPEN])
    except UnidentifiedImageError:
        looks = _looks_like(head)
        words = f"that featviz reads: it looks like {looks}" if looks else "that Pillow can read"
        raise UnidentifiedImageError(f"is no image {words}" if head else "is empty") from None


def of_channels(data: bytes) -> ImageFormat | None:
    """The format of a file that may hold any number of channels; None for any other file."""
    return next((one for one in IMAGE_FORMATS if one.is_mine and one.is_mine(data)), None)


def _looks_like(head: bytes) -> str | None:
    """What a file that is none of IMAGE_FORMATS looks like, by its first bytes."""
    if head[4:8] == b"ftyp" and head[8:12] in (b"heic", b"heix", b"mif1", b"msf1"):
        return "HEIC, which has to be converted"
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    known = next((words for mark, words in _LOOKS.items() if start.startswith(mark)), None)
    text = head.decode("utf-8", "ignore")
    whole = len(head) - len(text.encode()) < 4  # the last letter may be cut
    plain = whole and text and all(c.isprintable() or c in "\t\r\n\ufeff" for c in text)
    return known or ("text" if plain else None)


# Files to pictures ---------------------------------------------------------------------------

_BROKEN = (
    *(OSError, SyntaxError, MemoryError, IndexError, TypeError, KeyError, struct.error),
    *archives.DAMAGED,
)
"""What Pillow's decoders raise on broken files."""

_OF_16_BITS = ("PNG", "PPM")
"""Formats of 16 bits at most; Pillow holds some of their files as 32."""

_RGB = Wanted(3)

warnings.filterwarnings("ignore", module=r"PIL\.")  # what matters of a broken file is raised


@dataclass(frozen=True)
class DecodedImage:
    """A decoded sample: its images, and what identifies its files."""

    images: tuple[Image.Image | Raster, ...]
    """Pictures of mode L or RGB, upright; or numbers of other channels, or volumes."""
    sha256: str
    """Digest of the bytes of the sample's files, one after the other."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, as decoded; of several images, those of the first."""
        return self.images[0].size

    @property
    def words(self) -> str:
        """How an array's numbers became values; empty for pictures."""
        return next((image.words for image in self.images if isinstance(image, Raster)), "")


def decode(
    sample: Sample,
    background: str = "white",
    frames: int | None = None,
    wanted: Wanted = _RGB,
    tensors: Callable[[bytes], np.ndarray] | None = None,
    quiet: bool = False,
) -> DecodedImage:
    """Read a sample's images as they are meant to be seen.

    EXIF orientation is applied, alpha is composited on `background`, and CMYK and palettes become
    RGB. Grey of 16 or 32 bits or of floats becomes numbers, as an array of these does; a function
    of the user's own gets it as 8 bits. Where the model takes neither grey nor RGB, the channels
    are those of the file.

    Args:
        wanted: what the model takes.
        tensors: reads the tensor in the bytes of a file of torch.save; without it these are
            refused. Raises FileError where there is none.
        frames: take so many images, evenly spread over the sample's files or over an animation
            (some twice where there are fewer). Without it every file, and of an animation the
            first frame, with a warning.
        quiet: without that warning.

    Raises:
        ImageError: no file, no image, truncated, or too large; names the file.
    """
    data = [_read(sample, path) for path in sample.paths]
    alone = len(data) == 1
    chosen = range(len(data)) if alone or frames is None else _spread(len(data), frames)
    images: list[Image.Image | Raster] = []
    for index in chosen:
        path = sample.paths[index]
        with _errors_named(sample, path):
            array = _array(data[index], wanted, tensors)
            if array is not None:
                images.append(arrays.to_image(array, wanted))
                continue
            with open_image(io.BytesIO(data[index])) as opened:
                count = 1 if opened.format == "MPO" else getattr(opened, "n_frames", 1)
                numbers = _spread(count, frames) if frames and alone else [0]
                if count > 1 and not (frames and alone) and not quiet:
                    log.warning("%s has %d frames; the first is taken", path, count)
                images += [_frame(opened, number, background, wanted) for number in numbers]
    return DecodedImage(tuple(images), _sha256(data))


def digest(sample: Sample) -> str:
    """sha256 of a sample's files, without decoding them: as in `DecodedImage`.

    Raises:
        ImageError: a file cannot be read.
    """
    return _sha256(_read(sample, path) for path in sample.paths)


def _read(sample: Sample, path: Place) -> bytes:
    with _errors_named(sample, path):
        if not archives.exists(path):
            odd = isinstance(path, Path) and (path.is_fifo() or path.is_char_device())
            raise ImageError("is no file" + ", but a FIFO or a device" * odd)
        return archives.read(path)


def _sha256(data: Iterable[bytes]) -> str:
    sha256 = hashlib.sha256()
    for part in data:
        sha256.update(part)
    return sha256.hexdigest()


@contextmanager
def _errors_named(sample: Sample, path: Place) -> Iterator[None]:
    """Errors of a file of a sample, which name both."""
    name = sample.name if len(sample.paths) == 1 else f"{sample.name}: {path.name}"
    try:
        yield
    except ImageError as error:
        raise ImageError(f"{name} {error.message}", error.hint) from error
    except UnidentifiedImageError as error:
        raise ImageError(f"{name} {error}", EXPECTED) from error
    except Image.DecompressionBombError:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        words = f"{name} has more pixels than the {most:,} that an image may have"
        raise ImageError(words, "cut it into parts, or make it smaller") from None
    except _BROKEN as error:
        raise ImageError(f"{name} cannot be read: {arrays.reason(error)}") from error


def _array(
    data: bytes, wanted: Wanted, tensors: Callable[[bytes], np.ndarray] | None
) -> np.ndarray | None:
    """The numbers in the bytes of a file that are no picture for this model; None for a picture."""
    known = of_channels(data)
    as_stored = wanted.channels not in (1, 3) and (known or not wanted.raw)
    if known is None and not as_stored:
        return None
    if known is None or known.pillow:
        try:
            with open_image(io.BytesIO(data)) as opened:
                if not as_stored:
                    return None
                if arrays.is_whole_tiff(opened):  # the channels as they are, alpha among them
                    upright = ImageOps.exif_transpose(opened)
                    plain = upright.convert("RGBA") if upright.mode == "P" else upright
                    return _ready(np.asarray(plain), wanted)
        except UnidentifiedImageError:
            if known is None:
                raise
    assert known is not None
    reader = known.read or tensors
    if reader is None:
        raise UnidentifiedImageError("is a file of torch.save, which is no image here")
    try:
        array = reader(data)
    except FileError as error:
        raise ImageError(error.message, error.hint) from error
    return _ready(array, wanted) if known.pillow else array


def _frame(
    opened: Image.Image, number: int, background: str, wanted: Wanted
) -> Image.Image | Raster:
    """A picture, or one frame of an animation."""
    if number:
        opened.seek(number)
    opened.load()
    upright = ImageOps.exif_transpose(opened)
    if not _is_wide(upright) or wanted.raw:
        return _flatten(upright, background)
    # the format tells 16 bits: two images of one series are never read in two ways
    values = np.asarray(upright)
    of_16 = upright.mode == "I" and opened.format in _OF_16_BITS
    values = values.astype(np.uint16 if of_16 else values.dtype.newbyteorder("="))
    return arrays.to_image(_ready(values, wanted), wanted)


def _ready(picture: np.ndarray, wanted: Wanted) -> np.ndarray:
    """The channels of a picture [H, W, C] or [H, W] as an array that nobody takes for something
    else: [1, C, H, W]."""
    if wanted.raw:
        return picture
    if wanted.volume:
        raise ImageError(
            f"is a picture of shape {list(picture.shape)}, and the model takes volumes",
            f"an array {wanted.shapes}",
        )
    return np.moveaxis(np.atleast_3d(picture), -1, 0)[None]


def _spread(total: int, count: int) -> list[int]:
    """`count` indices into `total` images, evenly spread, the first and the last among them."""
    return [round(index) for index in np.linspace(0, total - 1, count)]


def check_background(color: str) -> None:
    """Refuse a background that is no colour.

    Raises:
        UsageError: the name or code is none that Pillow knows.
    """
    try:
        ImageColor.getrgb(color)
    except ValueError:
        words = f"--background {color!r} is no colour"
        raise UsageError(words, "for example white or #808080") from None


def _flatten(image: Image.Image, background: str) -> Image.Image:
    """Any mode to L or RGB of 8 bits."""
    if _is_wide(image):
        return _from_wide(image)
    if image.has_transparency_data:
        channels = ImageColor.getrgb(background)[:3]
        behind = Image.new("RGBA", image.size, channels)
        over = Image.alpha_composite(behind, image.convert("RGBA")).convert("RGB")
        grey = image.mode in ("1", "L", "LA", "La") and len(set(channels)) == 1
        return over.convert("L") if grey else over
    if image.mode in ("L", "RGB"):
        return image.copy()
    return image.convert("L" if image.mode == "1" else "RGB")


def _is_wide(image: Image.Image) -> bool:
    """Whether it is grey of more than 8 bits."""
    return image.mode.startswith(("I", "F"))


def _from_wide(image: Image.Image) -> Image.Image:
    """16-bit integers are scaled by 65535, 32-bit ones by their own range's power of two, floats
    in 0..1 by 255; other floats by their minimum and maximum."""
    values = np.asarray(image).astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError("it holds NaN or infinite values")
    low, high = float(values.min()), float(values.max())
    if image.mode.startswith("I"):
        low, high = 0.0, 65535.0 if high <= 65535 else 2.0**31 - 1
    elif low >= 0 and high <= 1:
        low, high = 0.0, 1.0
    elif high == low:
        high = low + 1
    scaled = (values - low) * (255.0 / (high - low))
    return Image.fromarray(np.clip(scaled + 0.5, 0, 255).astype(np.uint8))
