"""Arrays as images: which axis counts channels, and how numbers become values; TIFF files that
Pillow does not read, and videos, by their libraries; images in memory as files for a run."""

from __future__ import annotations

import io
import logging
import re
import struct
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from featviz.errors import ImageError, UsageError
from featviz.records import Raster
from featviz.text import counted

MOST_VALUES = 2**28
"""Numbers of an image: as float32 they take one gibibyte."""

_PACKINGS = (1, 8, 32946, 5, 32773)
"""Numbers of the compressions of TIFF that are read: none, Deflate, LZW and PackBits."""
_MOST_CHANNELS = 4096
_MOST_BYTES = 2**30
"""Of all frames that are kept, as RGB."""
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
    """An array as the model takes it: 8 bits of grey or RGB as a picture, other unsigned integers
    of 8 and 16 bits scaled to 0..1, all others as they are. The axis of channels is the first or
    the last."""
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
        words = f"has the shape {list(shape)}, of which two axes could be the {wanted.channels}"
        raise ImageError(f"{words} channels", "save it as [1, C, H, W], with the channels first")
    first = first and fits(len(array))
    if array.ndim != whole or not (first or last):
        takes = f"the model takes {counted(wanted.channels, 'channel')}: {wanted.shapes}"
        hint = "--channels says another number, --transform makes what the model takes"
        raise ImageError(f"has the shape {list(shape)}, and {takes}", hint)
    return array if first else np.moveaxis(array, -1, 0)


def read_tiff(data: bytes) -> np.ndarray:
    """The first page of a TIFF, [H, W, C], of the file's own type."""
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


# Frames of videos, decoded by PyAV, by three demultiplexers of ffmpeg that open no other file --


def read_frames(
    data: bytes, format: str, choose: Callable[[int], Sequence[int]]
) -> tuple[list[Image.Image], int]:
    """The frames of a video whose numbers `choose` gives from how many there are, upright, and how
    many it has. No others are kept, and as few as its key frames allow are decoded."""
    try:
        import av
    except ImportError as error:
        raise ImageError("is a video", "pip install 'featviz[video]'") from error
    try:
        with av.open(io.BytesIO(data), mode="r", format=format) as file:
            if not file.streams.video:
                raise ImageError("is a video file without pictures")
            stream: Any = file.streams.video[0]
            packets = [(p.pts, p.is_keyframe) for p in file.demux(stream) if p.size]
            numbers = list(choose(len(packets))) if packets else []
            if not numbers:
                raise ImageError("is a video without frames")
            size, most = stream.width * stream.height, 2 * (Image.MAX_IMAGE_PIXELS or 0)
            if size * 3 * len(set(numbers)) > _MOST_BYTES or size > most:
                words = f"{len(numbers)} frames of {stream.width}×{stream.height} pixels"
                raise ImageError(f"has {words}, which are too many", "fewer --frames")
            return _decoded(file, stream, packets, numbers), len(packets)
    except ImageError:
        raise
    except Exception as error:  # the file decides what is raised
        raise ImageError("is a video that cannot be read: it is damaged") from error


def _decoded(
    file: Any, stream: Any, packets: Sequence[tuple[int | None, bool]], numbers: Sequence[int]
) -> list[Image.Image]:
    """The frames of these numbers, of which some may stand twice, in their order."""
    timed = all(pts is not None for pts, _ in packets)
    times = sorted(pts for pts, _ in packets if pts is not None) if timed else range(len(packets))
    keys = sorted(pts for pts, key in packets if key and pts is not None) if timed else []
    kept: dict[int, Image.Image] = {}
    file.seek(0)
    frames, at, last = file.decode(stream), -1, None
    for number in sorted(set(numbers)):
        before = bisect_right(keys, times[number]) - 1
        if last is not None and before >= 0 and keys[before] > at:
            file.seek(keys[before], stream=stream)
            frames = file.decode(stream)
        while at < times[number] and (frame := next(frames, None)) is not None:
            at, last = (frame.pts if timed and frame.pts is not None else at + 1), frame
        if last is None:
            raise ImageError("is a video of which no frame can be decoded")
        kept[number] = last.to_image().rotate(getattr(last, "rotation", 0), expand=True)
    return [kept[number] for number in numbers]


# Images that a program holds in memory: as Pillow sees them, and as files for a run -------------

_KEPT = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I", "F"})
"""Modes that a PNG or TIFF keeps."""
_WITH_ALPHA = {"La": "LA", "RGBa": "RGBA", "PA": "RGBA"}
_VALUES = "uint8, or floats in 0..1"


def to_images(value: Any, name: str = "image") -> list[Image.Image]:
    """The images that a value is: a PIL image; a tensor [H, W], [C, H, W] or [N, C, H, W]; an array
    with C at its end. C is 1, 3 or 4; values are uint8, bool or floats in 0..1, of grey also
    uint16."""
    if isinstance(value, Image.Image):
        return [value]
    torch = sys.modules.get("torch")
    if torch and isinstance(value, torch.Tensor):
        try:
            dense = value.detach().cpu().resolve_neg()
            dense = dense.float() if dense.dtype.is_floating_point else dense
            value = (dense.movedim(-3, -1) if dense.ndim > 2 else dense).numpy()
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise UsageError(f"{name} is no dense tensor with values", _VALUES) from error
    if not isinstance(value, np.ndarray):
        words = f"{name} is of type {type(value).__name__!r}, which is no image"
        hint = "give a path, a PIL image, an array [H, W, C] or a tensor [C, H, W]"
        raise UsageError(words, hint)
    levels = _levels(value, name)
    levels = levels if levels.ndim == 4 else levels[None]
    if levels.ndim == 4 and levels.shape[-1] == 1:
        levels = levels[..., 0]
    return [Image.fromarray(np.ascontiguousarray(one)) for one in levels]


def to_files(images: Iterable[Any], folder: Path) -> list[str]:
    """Paths as they are; images in memory as files `image-0.png`, ... of a folder, without loss."""
    files: list[str] = []
    count = 0
    for number, value in enumerate(images):
        if isinstance(value, (str, PurePath)):
            files.append(str(value))
            continue
        shape = tuple(getattr(value, "shape", ()))
        if shape and shape[:-1] in ((), (1,)):  # a vector
            files.append(to_npy(value, folder / f"image-{count}.npy"))
            count += 1
            continue
        for image in to_images(value, f"image {number}"):
            is_tiff = image.mode in ("I", "F")
            path = folder / f"image-{count}{'.tiff' if is_tiff else '.png'}"
            options: dict[str, Any] = {} if is_tiff else {"compress_level": 1}
            try:
                if not image.width * image.height:
                    raise ValueError("it has no pixels")
                if exif := image.getexif():
                    options["exif"] = exif
                if image.mode not in _KEPT:
                    image = image.convert(_WITH_ALPHA.get(image.mode, "RGB"))
                image.save(path, **options)
            except (OSError, ValueError, SyntaxError) as error:
                words = f"image {number} cannot be read: {error}"
                raise UsageError(words, "is its file whole and open?") from error
            files.append(str(path))
            count += 1
    return files


def to_npy(value: Any, path: Path) -> str:
    """The path of a tensor or an array, as a file of numbers."""
    torch = sys.modules.get("torch")
    if torch and isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (value.float() if value.dtype == torch.bfloat16 else value).resolve_neg().numpy()
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":
        words = f"{path.stem} is a {type(value).__name__} and no tensor of numbers"
        raise UsageError(words, "torch.randn(1, 128)")
    np.save(path, value)
    return str(path)


def _levels(array: np.ndarray, name: str) -> np.ndarray:
    """An array [H, W], [H, W, C] or [N, H, W, C] as integers that Pillow takes."""
    shape, dtype = array.shape, array.dtype
    if not array.size or len(shape) not in (2, 3, 4) or (shape[2:] and shape[-1] not in (1, 3, 4)):
        words = f"{name} of height, width and channels {list(shape)} is no image"
        hint = "an array is [H, W] or [H, W, C], a tensor [H, W] or [C, H, W]; C is 1, 3 or 4"
        raise UsageError(words, hint)
    if dtype == np.uint8 or (dtype == np.uint16 and shape[2:] in ((), (1,))):
        return array
    if dtype == np.bool_:
        return array.astype(np.uint8) * np.uint8(255)
    if not np.issubdtype(dtype, np.floating):
        raise UsageError(f"{name} holds {dtype}, which are no values of an image", _VALUES)
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 1):
        words = f"{name} has values from {low:g} to {high:g}, and floats of an image are 0..1"
        hint = "give it before it is normalised; --mean and --std of the run do that"
        raise UsageError(words, hint)
    return np.asarray((array.astype(np.float32) * 255).round().astype(np.uint8))
