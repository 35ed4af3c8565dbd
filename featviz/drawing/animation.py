"""Animations: pictures of one size, one after the other, as GIF, WebP or MP4."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, BinaryIO

import numpy as np
from PIL import Image

from featviz.errors import UsageError
from featviz.records import Bytes

FORMATS = ("gif", "webp", "mp4")
_CODEC = "libx264"
"""H.264, which every browser and slide program plays."""


def check_format(format: str) -> None:
    """Check before the work whether a format can be written here.

    Args:
        format: one of FORMATS; other formats are not checked.

    Raises:
        UsageError: the format is `mp4`, and the package av is not installed.
    """
    if format == "mp4":
        _import_av()


def _import_av() -> Any:
    """Import PyAV, with which featviz also reads videos. Another writer, such as
    imageio-ffmpeg, would bring a second FFmpeg of 30 MB.

    Raises:
        UsageError: PyAV is not installed.
    """
    try:
        return importlib.import_module("av")
    except ImportError as error:
        message = f"an animation as .mp4 needs the package av: {error}"
        raise UsageError(
            message, "pip install 'featviz[video]', or --out with .gif or .webp"
        ) from error


def write_animation(
    frames: Iterable[Bytes], file: BinaryIO, format: str, fps: float
) -> None:
    """Write frames to an open file. GIF and WebP are repeated for ever, MP4 is not.

    Args:
        frames: uint8 [H, W, 3] each, at least one, all of one size.
        format: one of FORMATS, which `check_format` has accepted.
        fps: frames in a second, above 0.
    """
    if format == "mp4":
        _write_video(frames, file, fps)
        return
    pictures = map(Image.fromarray, frames)
    first = next(pictures)
    first.save(
        file,
        format,
        save_all=True,
        append_images=pictures,
        duration=round(1000 / fps),  # milliseconds
        loop=0,  # for ever
        quality=90,  # of WebP
    )


def _write_video(frames: Iterable[Bytes], file: BinaryIO, fps: float) -> None:
    """Write frames uint8 [H, W, 3] of one size as MP4, at `fps` frames in a second."""
    av = _import_av()
    with av.open(file, "w", format="mp4") as container:
        # encoders count time in fractions: 12.5 frames a second are 25 / 2
        rate = Fraction(fps).limit_denominator(1000)
        stream = container.add_stream(_CODEC, rate=rate, options={"crf": "18"})
        # the one pixel format of H.264 that every browser plays
        stream.pix_fmt = "yuv420p"
        for number, pixels in enumerate(_of_even_size(frames)):
            if number == 0:
                stream.height, stream.width = pixels.shape[:2]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        container.mux(stream.encode())  # frames that the encoder still holds back


def _of_even_size(frames: Iterable[Bytes]) -> Iterator[Bytes]:
    """Yield the frames with even sides: an odd side gets one more white pixel. The format
    yuv420p has one colour for each two by two pixels."""
    for pixels in frames:
        height, width = pixels.shape[:2]
        margins = ((0, height % 2), (0, width % 2), (0, 0))
        yield np.pad(pixels, margins, constant_values=255)
