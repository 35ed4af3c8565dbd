"""Arrays as images: which axis counts channels, and how numbers become values; TIFF
files that Pillow does not read, and videos, by their libraries; images in memory as
files for a run."""

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

MAX_VALUES = 2**28
"""Numbers of an image: as float32 they take one gibibyte."""

_NARROW = 0.1
"""An image of 16 bits that uses less of their range (12 bits in a 16-bit file) is
nearly black."""

_PACKINGS = (1, 8, 32946, 5, 32773)
"""Numbers of the compressions of TIFF that are read: none, Deflate, LZW and PackBits.
"""
_MAX_CHANNELS = 4096
_MAX_FRAME_BYTES = 2**30
"""Of all frames that are kept, as RGB."""
_INSTALL = "pip install 'featviz[tiff]'"


class Wanted(NamedTuple):
    """What a model takes."""

    channels: int
    volume: bool = False
    """Whether it takes [C, D, H, W], not [C, H, W]."""
    raw: bool = False
    """Whether a function of the user's own prepares it, which gets arrays as they are.
    """

    @property
    def shapes(self) -> str:
        """The arrays that fit, for messages."""
        channels = self.channels
        if self.volume:
            with_channels = f"[{channels}, D, H, W]"
            return f"{with_channels} or [D, H, W]" if channels == 1 else with_channels
        with_channels = f"[H, W, {channels}] or [{channels}, H, W]"
        return f"[H, W], {with_channels}" if channels in (1, 3) else with_channels


def to_image(array: np.ndarray, wanted: Wanted) -> Image.Image | Raster:
    """An array as the model takes it.

    Returns:
        8 bits of grey or RGB as a picture; other unsigned integers of 8 and 16 bits
        scaled to 0..1, all others as they are. The axis of channels is the first or the
        last.
    """
    _check_array(array, wanted)
    if wanted.raw:
        return Raster(array, f"{array.dtype} as it is")
    values = _channels_first(array, wanted)
    if (
        values.dtype == np.uint8
        and not wanted.volume
        and {len(values), wanted.channels} <= {1, 3}
    ):
        pixels = values[0] if len(values) == 1 else values.transpose(1, 2, 0)
        return Image.fromarray(np.ascontiguousarray(pixels))
    if len(values) != wanted.channels:
        values = np.repeat(values, wanted.channels, axis=0)
    dtype = values.dtype
    narrow_range = None
    if dtype.kind == "u" and dtype.itemsize <= 2:
        largest = np.iinfo(dtype).max
        scaled = values.astype(np.float32) / np.float32(largest)
        words = f"{dtype} / {largest}"
        low, high = int(values.min()), int(values.max())
        if dtype.itemsize == 2 and 0 < high - low < largest * _NARROW:
            narrow_range = low, high
    else:
        with np.errstate(over="ignore"):
            scaled = values.astype(np.float32)
        words = f"{dtype} values as they are"
        if not np.isfinite(scaled).all():
            raise ImageError(f"holds {dtype} beyond what float32 can hold", None)
    if wanted.volume:
        words = f"volume of {values.shape[1]} slices, {words}"
    return Raster(np.ascontiguousarray(scaled), words, narrow_range)


def _check_array(array: np.ndarray, wanted: Wanted) -> None:
    """Refuse what holds no values of an image, or too many; ImageError."""
    if array.dtype.kind not in "biuf":
        raise ImageError(f"holds {array.dtype}, which are no values of an image", None)
    if array.ndim < (1 if wanted.raw else 2) or not array.size:
        raise ImageError(
            f"has the shape {list(array.shape)}, which is none of an image", None
        )
    if array.size > MAX_VALUES:
        raise ImageError(
            f"has {array.size:,} values, more than the {MAX_VALUES:,} of any image"
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ImageError("holds NaN or infinite values", "np.nan_to_num takes them out")


def _channels_first(array: np.ndarray, wanted: Wanted) -> np.ndarray:
    """The array as [C, H, W], or [C, D, H, W] for a volume."""
    shape = array.shape
    axes = 4 if wanted.volume else 3
    if array.ndim == axes + 1 and len(array) == 1:  # a batch of one: [1, C, H, W]
        array = array[0]
    elif array.ndim == axes - 1:
        array = array[None]
    elif array.ndim == axes and not wanted.volume:
        return _moved_to_the_front(array, wanted)
    if array.ndim != axes or not _fits(len(array), array, wanted):
        raise _no_fit(shape, wanted)
    return array


def _moved_to_the_front(array: np.ndarray, wanted: Wanted) -> np.ndarray:
    """An array [C, H, W] or [H, W, C] with its channels first; ImageError where both
    axes fit, or none does."""
    is_first = _fits(array.shape[0], array, wanted)
    is_last = _fits(array.shape[-1], array, wanted)
    # an exact number tells more than one that can be made to fit
    if is_first == is_last:
        is_first = array.shape[0] == wanted.channels
        is_last = array.shape[-1] == wanted.channels
    if is_first and is_last:
        message = f"has the shape {list(array.shape)}, of which two axes could be the"
        hint = "save it as [1, C, H, W], with the channels first"
        raise ImageError(f"{message} {wanted.channels} channels", hint)
    if not (is_first or is_last):
        raise _no_fit(array.shape, wanted)
    return np.moveaxis(array, -1, 0) if is_last else array


def _no_fit(shape: tuple[int, ...], wanted: Wanted) -> ImageError:
    takes = f"the model takes {counted(wanted.channels, 'channel')}: {wanted.shapes}"
    hint = (
        "--input-channels says another number, --transform makes what the model takes"
    )
    return ImageError(f"has the shape {list(shape)}, and {takes}", hint)


def _fits(count: int, array: np.ndarray, wanted: Wanted) -> bool:
    """Whether so many channels are what the model takes, or become so: grey is repeated
    as RGB, and a picture of 8 bits is made grey."""
    if count == wanted.channels or (count, wanted.channels) == (1, 3):
        return True
    is_picture = array.dtype == np.uint8 and not wanted.volume
    return is_picture and (count, wanted.channels) == (3, 1)


def read_tiff(data: bytes) -> np.ndarray:
    """The first page of a TIFF, [H, W, C], of the file's own type."""
    try:
        import tifffile
    except ImportError as error:
        message = "is a damaged TIFF, or one of more channels or bits than Pillow reads"
        raise ImageError(message, _INSTALL) from error
    log = logging.getLogger("tifffile")
    log.disabled = True  # it reports what is raised as well
    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            page = file.pages.first
            _check_page(page)
            image: np.ndarray = page.asarray(maxworkers=1)
            return (
                np.moveaxis(image, 0, -1)
                if page.axes == "SYX"
                else np.atleast_3d(image)
            )
    except ImageError:
        raise
    except Exception as error:  # the file decides what is raised
        hint = _INSTALL if "imagecodecs" in str(error) else None
        raise ImageError(
            f"is a TIFF that cannot be read: {reason(error)}", hint
        ) from error
    finally:
        log.disabled = False


def _check_page(page: Any) -> None:
    """Refuse a page of a TIFF before its pixels are read; ImageError."""
    if page.dtype is None or page.axes not in ("YX", "YXS", "SYX"):
        message = f"is a TIFF of {page.bitspersample} bits a channel, which is not read"
        raise ImageError(message, "8, 16 or 32 bits, the same for all channels")
    if page.samplesperpixel > _MAX_CHANNELS or page.size > MAX_VALUES:
        size = f"{page.imagewidth}×{page.imagelength}"
        raise ImageError(
            f"has {size} pixels of {page.samplesperpixel} channels: too many"
        )
    if page.compression not in _PACKINGS:
        message = (
            f"is a TIFF packed by method {int(page.compression)}, which is not read"
        )
        raise ImageError(message, "save it without compression, or packed by Deflate")


def reason(error: Exception) -> str:
    """What a decoder says of a broken file, unless that is a number or of its own code."""
    if isinstance(error, (IndexError, KeyError, TypeError, struct.error)):
        return "it is damaged"
    line = str(error).partition("\n")[0]
    return "it is damaged" if re.fullmatch(r"(decoder error )?-?\d*", line) else line


# Frames of videos, decoded by PyAV, by three demultiplexers of ffmpeg that open no
# other file --


class Frames(NamedTuple):
    """Frames of a video."""

    images: list[Image.Image]
    total: int
    """How many the video has."""


class _Packet(NamedTuple):
    """One frame as it lies in a video file."""

    time: int | None
    """When it is shown, in the units of its stream; None where the file does not say.
    """
    is_key: bool
    """Whether it is decoded without those before."""


def read_frames(
    data: bytes, format: str, choose: Callable[[int], Sequence[int]]
) -> Frames:
    """Frames of a video, upright. No others are kept, and as few as its key frames
    allow are decoded.

    Args:
        format: the container, as ffmpeg calls it.
        choose: gives the numbers of the frames, from how many there are.
    """
    try:
        import av
    except ImportError as error:
        raise ImageError("is a video", "pip install 'featviz[video]'") from error
    try:
        with av.open(io.BytesIO(data), mode="r", format=format) as file:
            if not file.streams.video:
                raise ImageError("is a video file without pictures")
            stream: Any = file.streams.video[0]
            packets = [
                _Packet(p.pts, p.is_keyframe) for p in file.demux(stream) if p.size
            ]
            numbers = list(choose(len(packets))) if packets else []
            if not numbers:
                raise ImageError("is a video without frames")
            _check_frames(stream, numbers)
            return Frames(_decoded(file, stream, packets, numbers), len(packets))
    except ImageError:
        raise
    except Exception as error:  # the file decides what is raised
        raise ImageError("is a video that cannot be read: it is damaged") from error


def _check_frames(stream: Any, numbers: Sequence[int]) -> None:
    """Refuse more pixels than fit into memory; ImageError."""
    pixels = stream.width * stream.height
    max_pixels = 2 * (Image.MAX_IMAGE_PIXELS or 0)
    if pixels * 3 * len(set(numbers)) > _MAX_FRAME_BYTES or pixels > max_pixels:
        frames = f"{len(numbers)} frames of {stream.width}×{stream.height} pixels"
        raise ImageError(f"has {frames}, which are too many", "fewer --frames")


def _decoded(
    file: Any, stream: Any, packets: Sequence[_Packet], numbers: Sequence[int]
) -> list[Image.Image]:
    """The frames of these numbers, of which some may stand twice, in their order.

    Frames are decoded one after the other, from the last key frame before the wanted
    one, if that lies ahead. They are told by their times; in a file without times, by
    counting."""
    times = sorted(packet.time for packet in packets if packet.time is not None)
    is_timed = len(times) == len(packets)
    key_times: list[int] = []
    if is_timed:
        key_times = sorted(p.time for p in packets if p.is_key and p.time is not None)
    else:
        times = list(range(len(packets)))
    images: dict[int, Image.Image] = {}
    file.seek(0)
    frames = file.decode(stream)
    frame = None
    time = -1  # of `frame`
    for number in sorted(set(numbers)):
        key = bisect_right(key_times, times[number]) - 1
        if frame is not None and key >= 0 and key_times[key] > time:
            file.seek(key_times[key], stream=stream)
            frames = file.decode(stream)
        while time < times[number]:
            following = next(frames, None)
            if following is None:
                break
            frame = following
            time = frame.pts if is_timed and frame.pts is not None else time + 1
        if frame is None:
            raise ImageError("is a video of which no frame can be decoded")
        images[number] = frame.to_image().rotate(
            getattr(frame, "rotation", 0), expand=True
        )
    return [images[number] for number in numbers]


# Images that a program holds in memory: as Pillow sees them, and as files for a run
# -------------

_KEPT = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I", "F"})
"""Modes that a PNG or TIFF keeps."""
_WITH_ALPHA = {"La": "LA", "RGBa": "RGBA", "PA": "RGBA"}
_VALUES = "uint8, or floats in 0..1"
_COUNTS = (1, 3, 4)
"""Numbers of channels: grey, RGB, RGB with alpha."""


def to_images(value: Any, name: str = "image") -> list[Image.Image]:
    """The images that a value in memory is.

    Args:
        value: a PIL image; a tensor [H, W], [C, H, W] or [N, C, H, W]; an array with C
            at its end. C is 1, 3 or 4; values are uint8, bool or floats in 0..1, of
            grey also uint16.
        name: of the value, for messages.
    """
    if isinstance(value, Image.Image):
        return [value]
    torch = sys.modules.get("torch")
    if torch and isinstance(value, torch.Tensor):
        try:
            dense = value.detach().cpu().resolve_neg()
            dense = dense.float() if dense.dtype.is_floating_point else dense
            value = (dense.movedim(-3, -1) if dense.ndim > 2 else dense).numpy()
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise UsageError(
                f"{name} is no dense tensor with values", _VALUES
            ) from error
    if not isinstance(value, np.ndarray):
        message = f"{name} is of type {type(value).__name__!r}, which is no image"
        hint = "give a path, a PIL image, an array [H, W, C] or a tensor [C, H, W]"
        raise UsageError(message, hint)
    levels = _levels(value, name)
    if levels.ndim < 4:
        levels = levels[None]
    if levels.ndim == 4 and levels.shape[-1] == 1:
        levels = levels[..., 0]
    return [Image.fromarray(np.ascontiguousarray(pixels)) for pixels in levels]


def to_files(images: Iterable[Any], folder: Path) -> list[str]:
    """Paths as they are; images in memory as files `image-0.png`, ... of a folder,
    without loss."""
    paths: list[str] = []
    count = 0
    for number, value in enumerate(images):
        if isinstance(value, (str, PurePath)):
            paths.append(str(value))
            continue
        shape = tuple(getattr(value, "shape", ()))
        is_vector = bool(shape) and shape[:-1] in ((), (1,))
        if is_vector:
            paths.append(to_npy(value, folder / f"image-{count}.npy"))
            count += 1
            continue
        for image in to_images(value, f"image {number}"):
            try:
                paths.append(_saved(image, folder / f"image-{count}"))
            except (OSError, ValueError, SyntaxError) as error:
                message = f"image {number} cannot be read: {error}"
                raise UsageError(message, "is its file whole and open?") from error
            count += 1
    return paths


def _saved(image: Image.Image, path: Path) -> str:
    """The path of an image that was saved without loss, as PNG or TIFF."""
    if not image.width * image.height:
        raise ValueError("it has no pixels")
    options: dict[str, Any] = {}
    exif = image.getexif()
    if exif:
        options["exif"] = exif
    if image.mode in ("I", "F"):
        path = path.with_suffix(".tiff")
    else:
        path = path.with_suffix(".png")
        options["compress_level"] = 1
    if image.mode not in _KEPT:
        image = image.convert(_WITH_ALPHA.get(image.mode, "RGB"))
    image.save(path, **options)
    return str(path)


def to_npy(value: Any, path: Path) -> str:
    """The path of a tensor or an array, as a file of numbers."""
    torch = sys.modules.get("torch")
    if torch and isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = (
            (value.float() if value.dtype == torch.bfloat16 else value)
            .resolve_neg()
            .numpy()
        )
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biufc":
        message = f"{path.stem} is a {type(value).__name__} and no tensor of numbers"
        raise UsageError(message, "torch.randn(1, 128)")
    np.save(path, value)
    return str(path)


def _levels(array: np.ndarray, name: str) -> np.ndarray:
    """An array [H, W], [H, W, C] or [N, H, W, C] as integers that Pillow takes."""
    shape = array.shape
    dtype = array.dtype
    has_channels = array.ndim > 2
    if (
        not array.size
        or array.ndim not in (2, 3, 4)
        or (has_channels and shape[-1] not in _COUNTS)
    ):
        message = f"{name} of height, width and channels {list(shape)} is no image"
        hint = (
            "an array is [H, W] or [H, W, C], a tensor [H, W] or [C, H, W]; C is 1, 3"
            " or 4"
        )
        raise UsageError(message, hint)
    if dtype == np.uint8 or (dtype == np.uint16 and shape[2:] in ((), (1,))):
        return array
    if dtype == np.bool_:
        return array.astype(np.uint8) * np.uint8(255)
    if not np.issubdtype(dtype, np.floating):
        raise UsageError(
            f"{name} holds {dtype}, which are no values of an image", _VALUES
        )
    low, high = float(array.min()), float(array.max())
    if not (low >= 0 and high <= 1):
        message = (
            f"{name} has values from {low:g} to {high:g}, and floats of an image are"
            " 0..1"
        )
        hint = "give it before it is normalised; --mean and --std of the run do that"
        raise UsageError(message, hint)
    return np.asarray((array.astype(np.float32) * 255).round().astype(np.uint8))
