"""Arrays as images: which axis has the channels, and how numbers become values. TIFF
files that Pillow does not read, and videos, read by their libraries. Images in memory,
written to files for a run."""

from __future__ import annotations

import io
import logging
import re
import struct
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from featviz.errors import ImageError, UsageError
from featviz.records import Raster
from featviz.text import counted

MAX_VALUES = 2**28
"""The most numbers of an image: as float32 they take one gibibyte."""

_NARROW = 0.1
"""A share of the range of 16 bits. An image that uses less of it is nearly one colour to a
model: an image of 12 bits in a 16-bit file is black."""

_PACKINGS = (1, 8, 32946, 5, 32773)
"""TIFF's numbers of the compressions that are read: none, Deflate (two numbers), LZW and
PackBits."""
_MAX_CHANNELS = 4096
_MAX_FRAME_BYTES = 2**30
"""The most bytes of all frames that are kept, as RGB."""
_INSTALL = "pip install 'featviz[tiff]'"


class ExpectedImage(NamedTuple):
    """The images that a model takes."""

    channels: int
    volume: bool = False
    """Whether it takes [C, D, H, W] instead of [C, H, W]."""
    raw: bool = False
    """Whether the user's own function prepares images; it gets arrays unchanged."""

    @property
    def shapes(self) -> str:
        """The shapes of arrays that fit, for messages."""
        channels = self.channels
        if self.volume:
            with_channels = f"[{channels}, D, H, W]"
            if channels == 1:
                return f"{with_channels} or [D, H, W]"
            return with_channels
        with_channels = f"[H, W, {channels}] or [{channels}, H, W]"
        if channels in (1, 3):
            return f"[H, W], {with_channels}"
        return with_channels


def to_image(array: np.ndarray, expected: ExpectedImage) -> Image.Image | Raster:
    """Turn an array into an image for the model.

    Args:
        array: Numbers of any type, as they stand in a file. The channels are the first or
            the last axis.
        expected: The images that the model takes.

    Returns:
        A picture, if the array is grey or RGB of 8 bits. Otherwise a Raster: unsigned
        integers of 8 and 16 bits are scaled to 0..1, all other numbers stay as they are.
        If `expected.raw`, a Raster with the array itself.

    Raises:
        ImageError: Where the array is not an image, or does not fit the model.
    """
    _check_array(array, expected)
    if expected.raw:
        return Raster(array, f"{array.dtype} as it is")
    values = _channels_first(array, expected)
    is_8_bits = values.dtype == np.uint8 and not expected.volume
    if is_8_bits and {len(values), expected.channels} <= {1, 3}:
        pixels = values[0] if len(values) == 1 else values.transpose(1, 2, 0)
        return Image.fromarray(np.ascontiguousarray(pixels))
    if len(values) != expected.channels:  # grey, for a model of RGB
        values = np.repeat(values, expected.channels, axis=0)
    raster = _scale_integers(values)
    if not expected.volume:
        return raster
    description = f"volume of {values.shape[1]} slices, {raster.description}"
    return replace(raster, description=description)


def _scale_integers(values: np.ndarray) -> Raster:
    """Numbers as float32: unsigned integers of 8 and 16 bits are scaled to 0..1, all other
    numbers stay as they are.

    Raises:
        ImageError: Where a value is NaN, infinite, or too large for float32.
    """
    dtype = values.dtype
    # the range that other integers and floats fill is not known
    if dtype.kind != "u" or dtype.itemsize > 2:
        with np.errstate(over="ignore"):
            numbers = np.ascontiguousarray(values.astype(np.float32))
        if not np.isfinite(numbers).all():
            raise ImageError(f"holds {dtype} beyond what float32 can hold", None)
        return Raster(numbers, f"{dtype} values as they are")
    largest = np.iinfo(dtype).max
    scaled = values.astype(np.float32) / np.float32(largest)
    narrow_range = None
    low, high = int(values.min()), int(values.max())
    if dtype.itemsize == 2 and 0 < high - low < largest * _NARROW:
        narrow_range = low, high
    return Raster(np.ascontiguousarray(scaled), f"{dtype} / {largest}", narrow_range)


def _check_array(array: np.ndarray, expected: ExpectedImage) -> None:
    """Check that an array is an image for any model: at least two axes (one if
    `expected.raw`), only finite numbers, and at most MAX_VALUES of them.

    Raises:
        ImageError: Where it is not.
    """
    if array.dtype.kind not in "biuf":
        raise ImageError(f"holds {array.dtype}, which are no values of an image", None)
    if array.ndim < (1 if expected.raw else 2) or not array.size:
        shape = list(array.shape)
        raise ImageError(f"has the shape {shape}, which is none of an image", None)
    # each number becomes a float32, and the model computes many more
    if array.size > MAX_VALUES:
        raise ImageError(
            f"has {array.size:,} values, more than the {MAX_VALUES:,} of any image"
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ImageError("holds NaN or infinite values", "np.nan_to_num takes them out")


def _channels_first(array: np.ndarray, expected: ExpectedImage) -> np.ndarray:
    """An array as [C, H, W], or as [C, D, H, W] if the model takes volumes.

    Raises:
        ImageError: Where its shape does not fit the model.
    """
    shape = array.shape
    axes = 4 if expected.volume else 3
    if array.ndim == axes + 1 and len(array) == 1:  # a batch of one: [1, C, H, W]
        array = array[0]
    elif array.ndim == axes - 1:
        array = array[None]
    elif array.ndim == axes and not expected.volume:
        return _move_channels_first(array, expected)
    if array.ndim != axes or not _fits_channels(len(array), array, expected):
        raise _shape_error(shape, expected)
    return array


def _move_channels_first(array: np.ndarray, expected: ExpectedImage) -> np.ndarray:
    """An array [C, H, W] or [H, W, C] as [C, H, W].

    Raises:
        ImageError: Where neither the first nor the last axis fits the model's channels
            (see `_fits_channels`); or where both have exactly as many, so that it is not clear
            which is meant.
    """
    is_first = _fits_channels(array.shape[0], array, expected)
    is_last = _fits_channels(array.shape[-1], array, expected)
    # if both axes fit, the one with exactly the model's number of channels is meant
    if is_first == is_last:
        is_first = array.shape[0] == expected.channels
        is_last = array.shape[-1] == expected.channels
    if is_first and is_last:
        raise ImageError(
            f"has the shape {list(array.shape)}, of which two axes could be the"
            f" {expected.channels} channels",
            "save it as [1, C, H, W], with the channels first",
        )
    if not (is_first or is_last):
        raise _shape_error(array.shape, expected)
    if is_last:
        return np.moveaxis(array, -1, 0)
    return array


def _shape_error(shape: tuple[int, ...], expected: ExpectedImage) -> ImageError:
    """The error for an array whose shape does not fit the model."""
    channels = counted(expected.channels, "channel")
    return ImageError(
        f"has the shape {list(shape)}, and the model takes {channels}:"
        f" {expected.shapes}",
        "--input-channels says another number, --transform makes what the model takes",
    )


def _fits_channels(count: int, array: np.ndarray, expected: ExpectedImage) -> bool:
    """Whether an array with `count` channels fits the model's channels. It also fits if it
    is grey and the model takes RGB, or if it is an RGB picture of 8 bits and the model takes
    grey."""
    if count == expected.channels or (count, expected.channels) == (1, 3):
        return True
    is_picture = array.dtype == np.uint8 and not expected.volume
    return is_picture and (count, expected.channels) == (3, 1)


def read_tiff(data: bytes) -> np.ndarray:
    """The first page of a TIFF as an array [H, W, C] in the file's own type.

    Raises:
        ImageError: Where the page cannot be read, or tifffile is not installed.
    """
    try:
        import tifffile
    except ImportError as error:
        raise ImageError(
            "is a damaged TIFF, or one of more channels or bits than Pillow reads",
            _INSTALL,
        ) from error
    log = logging.getLogger("tifffile")
    log.disabled = True  # tifffile also logs what it raises
    try:
        with tifffile.TiffFile(io.BytesIO(data)) as file:
            page = file.pages.first
            _check_page(page)
            image: np.ndarray = page.asarray(maxworkers=1)
            if page.axes == "SYX":
                return np.moveaxis(image, 0, -1)
            return np.atleast_3d(image)
    except ImageError:
        raise
    except Exception as error:  # a broken file can raise anything
        hint = _INSTALL if "imagecodecs" in str(error) else None
        raise ImageError(
            f"is a TIFF that cannot be read: {reason(error)}", hint
        ) from error
    finally:
        log.disabled = False


def _check_page(page: Any) -> None:
    """Raise an ImageError for a page of a TIFF that would be read wrongly, or is too large.
    This is done before its pixels are read."""
    # pages with more axes, or with bits that do not fill bytes, would be read wrongly
    if page.dtype is None or page.axes not in ("YX", "YXS", "SYX"):
        raise ImageError(
            f"is a TIFF of {page.bitspersample} bits a channel, which is not read",
            "8, 16 or 32 bits, the same for all channels",
        )
    if page.samplesperpixel > _MAX_CHANNELS or page.size > MAX_VALUES:
        raise ImageError(
            f"has {page.imagewidth}×{page.imagelength} pixels of"
            f" {page.samplesperpixel} channels: too many"
        )
    if page.compression not in _PACKINGS:
        method = int(page.compression)
        raise ImageError(
            f"is a TIFF packed by method {method}, which is not read",
            "save it without compression, or packed by Deflate",
        )


def reason(error: Exception) -> str:
    """The reason why a file could not be decoded: the first line of the error's message.
    It is `it is damaged` if that line says nothing of the file: if it is only a number,
    such as `decoder error -2`, or if the decoder stumbled over a broken value."""
    # such an error names a variable of the decoder's program
    if isinstance(error, (IndexError, KeyError, TypeError, struct.error)):
        return "it is damaged"
    line = str(error).partition("\n")[0]
    if re.fullmatch(r"(decoder error )?-?\d*", line):
        return "it is damaged"
    return line


# Frames of videos, decoded by PyAV. Only three formats are read: their demultiplexers in
# ffmpeg open no other files --


class Frames(NamedTuple):
    """The images that were read from a file: frames of a video or an animation, or one image."""

    images: Sequence[Image.Image | Raster]
    total: int
    """How many frames the file has."""


def read_frames(
    data: bytes, container: str, choose: Callable[[int], Sequence[int]]
) -> Frames:
    """Read some frames of a video, upright. Only these are kept in memory, and key frames
    are used to decode as few others as possible.

    Args:
        data: The content of the file.
        container: The format of the file, by ffmpeg's name.
        choose: A function from the number of frames in the file to the indices of those
            to read.

    Raises:
        ImageError: Where the video is broken, has no frames, or the chosen frames have too
            many pixels; or where PyAV is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise ImageError("is a video", "pip install 'featviz[video]'") from error
    try:
        with av.open(io.BytesIO(data), mode="r", format=container) as file:
            if not file.streams.video:
                raise ImageError("is a video file without pictures")
            stream: Any = file.streams.video[0]
            packets = [
                (packet.pts, packet.is_keyframe)
                for packet in file.demux(stream)
                if packet.size
            ]
            if not packets:
                raise ImageError("is a video without frames")
            numbers = choose(len(packets))
            _check_frames(stream, numbers)
            reader = _FrameReader(file, stream, packets)
            # frames are decoded forwards, so they are read in order, and each only once
            images = {number: reader.frame(number) for number in sorted(set(numbers))}
    except ImageError:
        raise
    except Exception as error:  # a broken file can raise anything
        raise ImageError("is a video that cannot be read: it is damaged") from error
    return Frames([images[number] for number in numbers], len(packets))


def _check_frames(stream: Any, numbers: Sequence[int]) -> None:
    """Raise an ImageError if frames have more pixels than may be kept in memory.

    Args:
        stream: The video stream of PyAV.
        numbers: The indices of the frames to decode; one may occur twice.
    """
    # a video of a few kilobytes may claim any size
    pixels = stream.width * stream.height
    max_pixels = 2 * (Image.MAX_IMAGE_PIXELS or 0)
    if pixels * 3 * len(set(numbers)) > _MAX_FRAME_BYTES or pixels > max_pixels:
        raise ImageError(
            f"has {len(numbers)} frames of {stream.width}×{stream.height} pixels, which"
            " are too many",
            "fewer --frames",
        )


class _FrameReader:
    """Decodes frames of a video in their order. It skips to a key frame if one lies between
    the last frame and the next one."""

    def __init__(
        self, file: Any, stream: Any, packets: Sequence[tuple[Any, bool]]
    ) -> None:
        """Begin at the first frame.

        Args:
            file: An open container of PyAV.
            stream: The video stream in it.
            packets: For each frame, in the order of the file, two values: the time at
                which it is shown, in units of the stream (None if the file does not say),
                and whether it is a key frame, which is decoded without frames before it.
        """
        times = [time for time, _ in packets]
        key_times = [time for time, is_key in packets if is_key]
        self.file = file
        self.stream = stream
        self.is_timed = None not in times
        # sorted, since the file has frames in the order of decoding, not of showing
        self.times = sorted(times) if self.is_timed else range(len(times))
        """The time at which each frame is shown; its index if the file does not say."""
        self.key_times = sorted(key_times) if self.is_timed else []
        file.seek(0)
        self.frames = file.decode(stream)
        self.last: Any = None
        """The frame that was decoded last."""
        self.time = -1
        """The time at which `last` is shown."""

    def frame(self, number: int) -> Image.Image:
        """The frame of an index. From call to call, the index must not become smaller.

        Raises:
            ImageError: Where no frame of the video can be decoded.
        """
        time = self.times[number]
        key = bisect_right(self.key_times, time) - 1
        # before any frame was decoded there is no skip: some files begin before time 0
        if self.last is not None and key >= 0 and self.key_times[key] > self.time:
            self.file.seek(self.key_times[key], stream=self.stream)
            self.frames = self.file.decode(self.stream)
        while self.time < time:
            following = next(self.frames, None)
            if following is None:  # fewer frames than packets: the last frame is taken
                break
            self.last = following
            self.time += 1
            if self.is_timed and following.pts is not None:
                self.time = following.pts
        if self.last is None:
            raise ImageError("is a video of which no frame can be decoded")
        image: Image.Image = self.last.to_image()
        return image.rotate(getattr(self.last, "rotation", 0), expand=True)


# Images in the memory of a program: as pictures of Pillow, and as files for a run
# -------------

_KEPT = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I", "F"})
"""Modes of Pillow that are saved as PNG or TIFF without a conversion."""
_WITH_ALPHA = {"La": "LA", "RGBa": "RGBA", "PA": "RGBA"}
_VALUES = "uint8, or floats in 0..1"
_COUNTS = (1, 3, 4)
"""Numbers of channels: grey, RGB, RGB with alpha."""


def to_images(value: Any, name: str = "image") -> list[Image.Image]:
    """Turn a value in memory into images.

    Args:
        value: A PIL image; a tensor [H, W], [C, H, W] or [N, C, H, W]; an array with C
            at its end. C is 1, 3 or 4; values are uint8, bool or floats in 0..1, of
            grey also uint16.
        name: The name of the value, for messages.

    Raises:
        UsageError: Where the value has another type, shape or range.
    """
    if isinstance(value, Image.Image):
        return [value]
    try:
        array = _as_array(value)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise UsageError(f"{name} is no dense tensor with values", _VALUES) from error
    if not isinstance(array, np.ndarray):
        raise UsageError(
            f"{name} is of type {type(value).__name__!r}, which is no image",
            "give a path, a PIL image, an array [H, W, C] or a tensor [C, H, W]",
        )
    # Pillow takes [H, W] and [H, W, C], one image at a time
    if array is not value and array.ndim > 2:
        array = np.moveaxis(array, -3, -1)
    levels = _to_levels(array, name)
    if levels.ndim < 4:
        levels = levels[None]
    if levels.ndim == 4 and levels.shape[-1] == 1:
        levels = levels[..., 0]
    return [Image.fromarray(np.ascontiguousarray(pixels)) for pixels in levels]


def _as_array(value: Any) -> Any:
    """A tensor as an array of numpy; any other value is returned as it is."""
    # without torch imported, there is no tensor
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    tensor = value.detach().cpu().resolve_neg()
    if tensor.dtype == torch.bfloat16:  # numpy has no bfloat16
        tensor = tensor.float()
    return tensor.numpy()


def to_files(images: Iterable[Any], folder: Path) -> list[str]:
    """Write images in memory into files without loss, and return the paths of all images.

    Args:
        images: Paths, which are returned as they are; images that `to_images` takes; or
            vectors [F] or [1, F].
        folder: The folder, in which `image-0.png`, `image-1.npy`, ... are written.

    Raises:
        UsageError: Where a value is neither a path nor an image, or cannot be read.
    """
    paths = []
    count = 0
    for number, value in enumerate(images):
        if isinstance(value, (str, PurePath)):
            paths.append(str(value))
            continue
        shape = tuple(getattr(value, "shape", ()))
        # a model whose first layer is linear takes vectors
        if shape and shape[:-1] in ((), (1,)):
            paths.append(to_npy(value, folder / f"image-{count}.npy"))
            count += 1
            continue
        for image in to_images(value, f"image {number}"):
            try:
                paths.append(_save_image(image, folder / f"image-{count}"))
            except (OSError, ValueError, SyntaxError) as error:
                raise UsageError(
                    f"image {number} cannot be read: {error}",
                    "is its file whole and open?",
                ) from error
            count += 1
    return paths


def _save_image(image: Image.Image, path: Path) -> str:
    """Save an image without loss, as PNG or TIFF, and return the path of the file.

    Args:
        image: The image.
        path: The path of the file, without a suffix.

    Raises:
        ValueError: Where the image has no pixels.
        OSError, SyntaxError: Where Pillow cannot read or save it.
    """
    if not image.width * image.height:
        raise ValueError("it has no pixels")
    options: dict[str, Any] = {}
    # exif has the orientation, which is applied when the file is read
    exif = image.getexif()
    if exif:
        options["exif"] = exif
    # PNG has at most 16 bits
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
    """Write a tensor or an array into a file, and return the file's path as text.

    Args:
        value: The tensor or array.
        path: The path, which ends in .npy; messages call the value by its stem.

    Raises:
        UsageError: Where the value is neither a tensor nor an array of numbers.
    """
    array = _as_array(value)
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biufc":
        raise UsageError(
            f"{path.stem} is a {type(value).__name__} and no tensor of numbers",
            "give, for example, torch.randn(1, 128)",
        )
    np.save(path, array)
    return str(path)


def _to_levels(array: np.ndarray, name: str) -> np.ndarray:
    """The numbers of an image as integers that Pillow takes. Floats 0..1 and bools become
    0..255; uint8, and uint16 of grey, stay as they are.

    Args:
        array: [H, W], [H, W, C] or [N, H, W, C]; C is 1, 3 or 4.
        name: The name of the value, for messages.

    Raises:
        UsageError: Where the array has another shape, or other values.
    """
    shape = list(array.shape)
    dtype = array.dtype
    channels = shape[-1] if array.ndim > 2 else 1
    if not array.size or array.ndim not in (2, 3, 4) or channels not in _COUNTS:
        raise UsageError(
            f"{name} of height, width and channels {shape} is no image",
            "an array is [H, W] or [H, W, C], a tensor [H, W] or [C, H, W]; C is 1, 3"
            " or 4",
        )
    # Pillow takes 16 bits only for grey
    if dtype == np.uint8 or (dtype == np.uint16 and channels == 1):
        return array
    if dtype == np.bool_:
        return array.astype(np.uint8) * np.uint8(255)
    if not np.issubdtype(dtype, np.floating):
        raise UsageError(
            f"{name} holds {dtype}, which are no values of an image", _VALUES
        )
    array = array.astype(np.float32)
    low, high = float(array.min()), float(array.max())
    # written with `not`, so that NaN is refused, too
    if not (low >= 0 and high <= 1):
        raise UsageError(
            f"{name} has values from {low:g} to {high:g}, and floats of an image are"
            " 0..1",
            "give it before it is normalised; --mean and --std of the run do that",
        )
    return np.asarray((array * 255).round().astype(np.uint8))
