"""Files to pictures of mode L or RGB, as a person sees them."""

from __future__ import annotations

import hashlib
import io
import logging
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageColor, ImageOps, UnidentifiedImageError

from featviz.errors import FileError, ImageError, UsageError
from featviz.images import archives, arrays
from featviz.images.archives import Place
from featviz.images.arrays import Wanted
from featviz.images.formats import EXPECTED, of_channels, open_image
from featviz.records import Raster, Sample

log = logging.getLogger(__name__)

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
