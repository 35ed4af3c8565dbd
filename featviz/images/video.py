"""Frames of video files, which the libraries of ffmpeg decode through PyAV: where it is installed,
and by three demultiplexers that open no other file."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from PIL import Image

from featviz.errors import ImageError

SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi")
"""Of the files of which `--frames N` takes N stills."""

_MOST_BYTES = 2**30
"""Of all frames that are kept, as RGB."""


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
