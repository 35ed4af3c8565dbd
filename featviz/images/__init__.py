"""IMAGE arguments to samples, and files to pictures as a person would see them."""

from __future__ import annotations

import glob
import hashlib
import io
import logging
import os
import struct
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageColor, ImageOps, UnidentifiedImageError

from featviz.errors import ImageError, UsageError
from featviz.images import archives
from featviz.records import Sample

log = logging.getLogger(__name__)

SUFFIXES = frozenset(
    [
        ".jpg",
        ".jpeg",
        ".png",
        ".webp",
        ".bmp",
        ".gif",
        ".tif",
        ".tiff",
        ".ppm",
        ".pgm",
        ".pbm",
        ".pnm",
        ".tga",
        ".jp2",
        ".avif",
        ".jfif",
    ]
)
"""What counts as an image in a folder; a file that is named is tried whatever it is called."""

_BROKEN = (
    OSError,
    RuntimeError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    TypeError,
    KeyError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    MemoryError,
    *archives.DAMAGED,
)
"""What Pillow's decoders raise on broken files."""


@dataclass(frozen=True)
class Picture:
    """A decoded sample: its images, mode L or RGB, upright, and what identifies its files."""

    images: tuple[Image.Image, ...]
    sha256: str
    """Of the file's bytes; of several files, one after the other."""

    @property
    def size(self) -> tuple[int, int]:
        """Width and height in pixels, as decoded; of several images, those of the first."""
        return self.images[0].size


def find_samples(
    arguments: Sequence[str], stdin: BinaryIO | None = None, nul_separated: bool = False
) -> list[Sample]:
    """Turn files, folders (recursively), globs and `-` (a list on stdin) into named samples.

    A sample is called by its path relative to the argument; names that clash are told apart by
    as many parent folders as it takes.

    Raises:
        UsageError: nothing there, or nothing in it.
    """
    found: list[tuple[str, Path]] = []
    for argument in arguments:
        found += _expand(argument, stdin, nul_separated)
    unique: dict[str, tuple[str, Path]] = {}
    for name, path in found:
        unique.setdefault(os.path.realpath(path), (name, path))
    if len(unique) < len(found):
        log.info("%d images were named more than once", len(found) - len(unique))
    return _name_apart(unique.values())


def decode(
    sample: Sample, exif: bool = True, background: str = "white", frames: int | None = None
) -> Picture:
    """Read a sample's images as they are meant to be seen.

    EXIF orientation is applied (unless `exif` is false), alpha is composited on `background`, 16
    bits are scaled by their range, and CMYK and palettes become RGB.

    Args:
        frames: take so many images, evenly spread over the sample's files or over an animation
            (some twice where there are fewer). Without it every file, and of an animation the
            first frame, with a warning.

    Raises:
        ImageError: no file, no image, truncated, or too large; names the file.
    """
    files = [_Encoded(sample, path) for path in sample.paths]
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.data)
    if len(files) == 1:
        found = files[0].images(exif, background, frames)
    else:
        chosen = range(len(files)) if frames is None else _spread(len(files), frames)
        found = [files[i].images(exif, background, None)[0] for i in chosen]
    return Picture(tuple(found), digest.hexdigest())


def digest(sample: Sample) -> str:
    """sha256 of a sample's files, as `decode` gives it.

    Raises:
        ImageError: a file cannot be read.
    """
    found = hashlib.sha256()
    for path in sample.paths:
        found.update(_Encoded(sample, path).data)
    return found.hexdigest()


class _Encoded:
    """The bytes of one file."""

    def __init__(self, sample: Sample, path: Path) -> None:
        self.path = path
        self.name = sample.name if len(sample.paths) == 1 else f"{sample.name}: {path.name}"
        with self._blamed():
            if not archives.exists(path):
                raise ImageError(f"{self.name} is no file", None)
            self.data = archives.read(path)

    def images(self, exif: bool, background: str, frames: int | None) -> list[Image.Image]:
        """The image; with `frames`, so many of the animation that it is."""
        with self._blamed(), Image.open(io.BytesIO(self.data)) as opened:
            held = 1 if opened.format == "MPO" else getattr(opened, "n_frames", 1)
            if frames is None and held > 1:
                log.warning("%s has %d frames; the first is taken", self.path, held)
            return [
                self._one(opened, index, exif, background)
                for index in ([0] if frames is None else _spread(held, frames))
            ]

    def _one(self, opened: Image.Image, index: int, exif: bool, background: str) -> Image.Image:
        if index:
            opened.seek(index)
        opened.load()
        return _flatten(ImageOps.exif_transpose(opened) if exif else opened, background)

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        try:
            yield
        except UnidentifiedImageError as error:
            raise ImageError(f"{self.name} is no image that Pillow can read", None) from error
        except _BROKEN as error:
            reason = str(error) or type(error).__name__
            raise ImageError(f"{self.name} cannot be read: {reason}", None) from error


def _spread(held: int, count: int) -> list[int]:
    """`count` indices into `held` images, evenly spread, the first and the last among them."""
    return [round(index) for index in np.linspace(0, held - 1, count)]


def check_background(color: str) -> None:
    """Say so early where the background is no colour.

    Raises:
        UsageError: the name or code is none that Pillow knows.
    """
    try:
        ImageColor.getrgb(color)
    except ValueError:
        raise UsageError(
            f"--background {color!r} is no colour", "for example white or #808080"
        ) from None


def _expand(argument: str, stdin: BinaryIO | None, nul: bool) -> list[tuple[str, Path]]:
    if argument == "-":
        return [(path.name, path) for path in _listed(stdin or sys.stdin.buffer, nul)]
    path = Path(argument)
    if path.is_dir():
        return _in_folder(path)
    if archives.is_member(path):
        return _in_archive(path, archives.SEPARATOR)
    if archives.is_archive(path) and path.exists():
        return _whole_archive(path)
    if path.exists():
        return [(path.name, path)]
    if glob.has_magic(argument):
        return _globbed(argument)
    raise UsageError(f"no image {argument!r}: no such file or folder", "check the path")


def _listed(stdin: BinaryIO, nul: bool) -> list[Path]:
    separator = b"\0" if nul else b"\n"
    lines = (line.rstrip(b"\r") if not nul else line for line in stdin.read().split(separator))
    paths = [Path(os.fsdecode(line)) for line in lines if line]
    if not paths:
        raise UsageError("stdin lists no images", "one path a line, or NUL-separated with -0")
    return paths


def _in_folder(folder: Path) -> list[tuple[str, Path]]:
    inside = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    files = [
        file
        for file in inside
        if file.suffix.lower() in SUFFIXES
        and not any(part.startswith(".") for part in file.parts)
        and not (folder / file).is_dir()
    ]
    if not files:
        raise UsageError(
            f"no images in folder {str(folder)!r}", f"it has no {' '.join(sorted(SUFFIXES))} files"
        )
    return [(file.as_posix(), folder / file) for file in files]


def _whole_archive(path: Path) -> list[tuple[str, Path]]:
    try:
        names = archives.members(path)
    except (OSError, *archives.DAMAGED) as error:
        raise UsageError(
            f"archive {str(path)!r} cannot be read: {error}", "is it whole?"
        ) from error
    images = [name for name in names if PurePath(name).suffix.lower() in SUFFIXES]
    if not images:
        raise UsageError(f"no images in archive {str(path)!r}", f"it has {len(names)} other files")
    return [(_tidy(name), archives.member(path, name)) for name in images]


def _in_archive(path: Path, separator: str) -> list[tuple[str, Path]]:
    archive, _, name = str(path).partition(separator)
    if not Path(archive).is_file():
        raise UsageError(f"no archive {archive!r} for {str(path)!r}", "check the path")
    return [(_tidy(name), path)]


def _tidy(name: str) -> str:
    """A member's name without what would lead out of the run directory."""
    parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".", "..")]
    return "/".join(parts) or "image"


def _globbed(pattern: str) -> list[tuple[str, Path]]:
    parts = PurePath(pattern).parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    base = Path(*parts[:fixed])
    paths = [Path(p) for p in sorted(glob.glob(pattern, recursive=True))]
    files = [path for path in paths if path.is_file()]
    if not files:
        raise UsageError(f"no image matches {pattern!r}", "check the pattern")
    return [(path.relative_to(base).as_posix(), path) for path in files]


def _name_apart(found: Iterable[tuple[str, Path]]) -> list[Sample]:
    """Lengthen names that clash (also on file systems without case) by one real parent a round;
    files that only case tells apart are numbered."""
    first = {path: name for name, path in found}
    parts = {path: Path(os.path.realpath(path)).parts[1:] for path in first}
    alike = set(_clashing({path: "/".join(parts[path]) for path in first}))
    names, turn = dict(first), 0
    while clashing := _clashing(names):
        turn += 1
        for index, path in enumerate(clashing):
            tail = parts[path][-(first[path].count("/") + 1 + turn) :]
            names[path] = f"{index + turn}/{first[path]}" if path in alike else "/".join(tail)
    return [Sample(name, (path,)) for path, name in names.items()]


def _clashing(names: Mapping[Path, str]) -> list[Path]:
    counts = Counter(name.casefold() for name in names.values())
    return [path for path, name in names.items() if counts[name.casefold()] > 1]


def _flatten(image: Image.Image, background: str) -> Image.Image:
    """Any mode to L or RGB of 8 bits."""
    if image.mode.startswith(("I", "F")):
        return _from_wide(image)
    if image.has_transparency_data:
        return _composite(image, background)
    if image.mode in ("L", "RGB"):
        return image.copy()
    return image.convert("L" if image.mode == "1" else "RGB")


def _composite(image: Image.Image, background: str) -> Image.Image:
    grey = image.mode in ("1", "L", "LA", "La")
    ground = Image.new("RGBA", image.size, ImageColor.getrgb(background)[:3])
    over = Image.alpha_composite(ground, image.convert("RGBA")).convert("RGB")
    channels = ImageColor.getrgb(background)[:3]
    return over.convert("L") if grey and len(set(channels)) == 1 else over


def _from_wide(image: Image.Image) -> Image.Image:
    """16-bit integers are scaled by 65535, 32-bit ones by their own range's power of two, floats
    in 0..1 by 255; other floats by their minimum and maximum."""
    values = np.asarray(image).astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError("it holds NaN or infinite values")
    low, high = _wide_range(image.mode, values)
    scaled = (values - low) * (255.0 / (high - low))
    return Image.fromarray(np.clip(scaled + 0.5, 0, 255).astype(np.uint8))


def _wide_range(mode: str, values: np.ndarray) -> tuple[float, float]:
    least, most = float(values.min()), float(values.max())
    if mode.startswith("I"):
        return 0.0, 65535.0 if most <= 65535 else 2.0**31 - 1
    if least >= 0 and most <= 1:
        return 0.0, 1.0
    return least, most if most > least else least + 1
