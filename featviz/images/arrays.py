"""Arrays as images: which axis counts channels, and how numbers become values. TIFF files that
Pillow reads in part or not at all (many channels, colour of 16 bits or of floats, as satellites and
microscopes write them) are read as arrays by tifffile."""

from __future__ import annotations

import io
import logging
import re
import struct
from typing import NamedTuple

import numpy as np
from PIL import Image

from featviz.errors import ImageError
from featviz.records import Raster
from featviz.text import counted

MOST_VALUES = 2**28
"""Numbers of an image: as float32 they take one gibibyte."""

_PACKINGS = (1, 8, 32946, 5, 32773)
"""Numbers of the compressions of TIFF that are read: none, Deflate, LZW and PackBits."""
_MOST_CHANNELS = 4096
_INSTALL = "pip install 'featviz[tiff]'"


class Wanted(NamedTuple):
    """What a model takes."""

    channels: int
    volume: bool = False
    """Whether it takes [C, D, H, W], not [C, H, W]."""
    raw: bool = False
    """Whether a function of the user's own prepares it, which gets arrays as they are."""

    @property
    def shapes(self) -> str:
        """The arrays that fit, for messages."""
        c = self.channels
        if self.volume:
            return f"[{c}, D, H, W]" + (" or [D, H, W]" if c == 1 else "")
        return ("[H, W], " if c in (1, 3) else "") + f"[H, W, {c}] or [{c}, H, W]"


def to_image(array: np.ndarray, wanted: Wanted) -> Image.Image | Raster:
    """An array as the model takes it: 8 bits of grey or RGB as the picture that they are, other
    unsigned integers of 8 and 16 bits scaled to 0..1 by their range, all others as they are. The
    axis of channels is the first or the last, whichever has as many as the model takes."""
    if array.dtype.kind not in "biuf":
        raise ImageError(f"holds {array.dtype}, which are no values of an image", None)
    if array.ndim < 2 - wanted.raw or not array.size:
        raise ImageError(f"has the shape {list(array.shape)}, which is none of an image", None)
    if array.size > MOST_VALUES:
        raise ImageError(f"has {array.size:,} values, more than the {MOST_VALUES:,} of any image")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ImageError("holds NaN or infinite values", "np.nan_to_num takes them out")
    if wanted.raw:
        return Raster(array, f"{array.dtype} as it is")
    values = _channels_first(array, wanted)
    if values.dtype == np.uint8 and not wanted.volume and {len(values), wanted.channels} <= {1, 3}:
        pixels = values[0] if len(values) == 1 else values.transpose(1, 2, 0)
        return Image.fromarray(np.ascontiguousarray(pixels))
    if len(values) != wanted.channels:
        values = np.repeat(values, wanted.channels, axis=0)
    dtype = values.dtype
    if dtype.kind == "u" and dtype.itemsize <= 2:
        most = np.iinfo(dtype).max
        scaled, words = values.astype(np.float32) / np.float32(most), f"{dtype} / {most}"
    else:
        with np.errstate(over="ignore"):
            scaled, words = values.astype(np.float32), f"{dtype} values as they are"
        if not np.isfinite(scaled).all():
            raise ImageError(f"holds {dtype} beyond what float32 can hold", None)
    slices = f"volume of {values.shape[1]} slices, " if wanted.volume else ""
    return Raster(np.ascontiguousarray(scaled), slices + words)


def _channels_first(array: np.ndarray, wanted: Wanted) -> np.ndarray:
    """The array as [C, H, W], or [C, D, H, W] for a volume."""

    def fits(count: int) -> bool:  # as it is, or made so: grey becomes RGB, a picture grey
        to_grey = array.dtype == np.uint8 and not wanted.volume
        made_so = ((1, 3), (3, 1)) if to_grey else ((1, 3),)
        return count == wanted.channels or (count, wanted.channels) in made_so

    shape, whole = array.shape, 4 if wanted.volume else 3
    first, last = True, False
    if array.ndim == whole + 1 and len(array) == 1:  # a batch of one: [1, C, H, W]
        array = array[0]
    elif array.ndim == whole - 1:
        array = array[None]
    elif array.ndim == whole and not wanted.volume:
        first, last = fits(shape[0]), fits(shape[-1])
        if first == last:
            first, last = (shape[axis] == wanted.channels for axis in (0, -1))
    if first and last:
        raise ImageError(
            f"has the shape {list(shape)}, and both its first and its last axis could be "
            f"the {wanted.channels} channels",
            "save it as [1, C, H, W], which says that the channels come first",
        )
    first = first and fits(len(array))
    if array.ndim != whole or not (first or last):
        raise ImageError(
            f"has the shape {list(shape)}, and the model takes "
            f"{counted(wanted.channels, 'channel')}: {wanted.shapes}",
            "--channels says another number, --transform makes what the model takes",
        )
    return array if first else np.moveaxis(array, -1, 0)


def read_tiff(data: bytes) -> np.ndarray:
    """The first page of a TIFF, [H, W, C], of the file's own type; ImageError without the package
    tifffile."""
    try:
        import tifffile
    except ImportError as error:
        words = "is a damaged TIFF, or one of more channels or bits than Pillow reads"
        raise ImageError(words, _INSTALL) from error
    log = logging.getLogger("tifffile")
    log.disabled = True  # it reports what is raised as well
    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            page = file.pages.first
            if page.dtype is None or page.axes not in ("YX", "YXS", "SYX"):
                words = f"is a TIFF of {page.bitspersample} bits a channel, which is not read"
                raise ImageError(words, "8, 16 or 32 bits, the same for all channels")
            if page.samplesperpixel > _MOST_CHANNELS or page.size > MOST_VALUES:
                size = f"{page.imagewidth}×{page.imagelength}"
                raise ImageError(f"has {size} pixels of {page.samplesperpixel} channels: too many")
            if page.compression not in _PACKINGS:
                words = f"is a TIFF packed by method {int(page.compression)}, which is not read"
                raise ImageError(words, "save it without compression, or packed by Deflate")
            image: np.ndarray = page.asarray(maxworkers=1)
            return np.moveaxis(image, 0, -1) if page.axes == "SYX" else np.atleast_3d(image)
    except ImageError:
        raise
    except Exception as error:  # the file decides what is raised
        hint = _INSTALL if "imagecodecs" in str(error) else None
        raise ImageError(f"is a TIFF that cannot be read: {reason(error)}", hint) from error
    finally:
        log.disabled = False


def reason(error: Exception) -> str:
    """What a decoder says of a broken file, unless that is a number or of its own code."""
    words = str(error).partition("\n")[0]
    own = isinstance(error, (IndexError, KeyError, TypeError, struct.error))
    return "it is damaged" if own or re.fullmatch(r"(decoder error )?-?\d*", words) else words
