"""Files, here, in archives and in stores, to pictures of mode L or RGB, as a person
sees them."""

from __future__ import annotations

import hashlib
import io
import logging
import lzma
import os
import re
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy as np
from PIL import Image, ImageColor, ImageOps, UnidentifiedImageError

from featviz import files
from featviz.errors import FileError, ImageError, UsageError
from featviz.files import npy, urls
from featviz.files.urls import Url
from featviz.images import arrays
from featviz.images.arrays import ExpectedImage, Frames
from featviz.records import Raster, Sample
from featviz.text import counted

log = logging.getLogger(__name__)

FilePath: TypeAlias = Path | Url
"""A file of this machine or in a store, on its own or in an archive."""

SEPARATOR = "::"
"""Between an archive and a file in it: `photos.tar::a/b.jpg`."""
_SUFFIX = r"\.(?:tar|tar\.gz|tgz|tar\.bz2|tbz2|tar\.xz|txz|zip)"
ARCHIVE_NAME = re.compile(rf".*{_SUFFIX}", re.IGNORECASE | re.DOTALL)
"""Names of archives of files. A file in an archive, which may be an archive itself, is
not asked about."""
_MEMBER = re.compile(rf"(.+?{_SUFFIX}){SEPARATOR}(.+)", re.IGNORECASE | re.DOTALL)

MAX_MEMBER_BYTES = 512 * 2**20
"""A member that unpacks to more is not a picture, but a bomb."""

MAX_FILE_BYTES = 2**30
"""A larger file is not a picture that Pillow would open."""

_MODES: Any = {b"\x1f\x8b": "r:gz", b"BZ": "r:bz2", b"\xfd7": "r:xz"}
"""How tarfile opens a compressed file, by its first two bytes."""

_READING = Lock()
"""One thread at a time reads from the archives that are open."""

DAMAGED = (
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    RuntimeError,
    ValueError,
    FileError,
)
"""What the readers of archives raise, beside OSError."""


FORMATS: dict[str, tuple[str, ...]] = {
    "PNG": (".png",),
    "JPEG": (".jpg", ".jpeg", ".jfif"),
    "GIF": (".gif",),
    "BMP": (".bmp",),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
    "TIFF": (".tif", ".tiff"),
    "WEBP": (".webp",),
    "JPEG2000": (".jp2",),
    "AVIF": (".avif",),
    "DIB": (),
    "ICO": (),
    "PCX": (),
    "QOI": (),
    "SGI": (),
    "TGA": (".tga",),
}
"""Pillow's formats that are read, in the order in which they are tried, and the
suffixes by which folders and archives are searched. Pillow knows the first five without
importing all its plugins; TGA has no mark. Of the others EPS starts Ghostscript."""

SUFFIXES = frozenset(suffix for suffixes in FORMATS.values() for suffix in suffixes)
"""Names that count as images in a folder or an archive; arrays are read where they are
named."""

_READERS = {"NPY": npy.read_npy, "NPZ": npy.read_npz}

EXPECTED = (
    "give an image"
    f" ({', '.join(name for name, suffixes in FORMATS.items() if suffixes)}) or an"
    " array (.npy, .npz, .pt)"
)
"""What a file that is not an image should have been."""

_LOOKS = {
    b"%!PS": "PostScript",
    b"%PDF": "PDF",
    b"<": "SVG or HTML",
    b"PK\3\4": "a zip file",
}
_MARKS = {
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"II+\0": "TIFF",  # of more than 4 GiB
    b"MM\0+": "TIFF",
    npy.MAGIC: "NPY",
    b"\x1aE\xdf\xa3": "matroska",
}
"""The first bytes of a file."""
_HEIC = (b"ftypheic", b"ftypheix", b"ftypmif1", b"ftypmsf1")
_MOV = (b"moov", b"mdat", b"wide", b"free")
_STILL = (b"avi", b"hei", b"hev", b"mif", b"msf", b"jxl", b"jp2")
"""Brands of pictures in the container of MP4."""

VIDEOS = ("mov", "avi", "matroska")
"""Containers, as ffmpeg calls them."""
VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi")
"""Endings of the files of which `--frames N` takes N stills."""


_open = Image.open
"""Ultralytics puts a function in its place that installs packages for what Pillow does
not read."""


def open_image(file: BinaryIO) -> Image.Image:
    """Open an image in one of FORMATS; UnidentifiedImageError says what another looks
    like."""
    head = file.read(64)
    try:
        return _open(file, formats=[*FORMATS])
    except UnidentifiedImageError:
        raise UnidentifiedImageError(_what_else(head)) from None


def _what_else(head: bytes) -> str:
    """What the first bytes of a file that is not an image look like."""
    if not head:
        return "is empty"
    refused = "is no image that featviz reads: it looks like"
    if head[4:12] in _HEIC:
        return f"{refused} HEIC, which has to be converted"
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    for mark, name in _LOOKS.items():
        if start.startswith(mark):
            return f"{refused} {name}"
    return "is no image that Pillow can read"


def format_of(data: bytes) -> str | None:
    """What a file is, by its first bytes, if not a picture for Pillow.

    Returns:
        TIFF, NPY, NPZ or PT, which may have any number of channels; one of VIDEOS; None
        for any other.
    """
    for mark, name in _MARKS.items():
        if data.startswith(mark):
            return name
    if data.startswith(b"PK\3\4"):
        return _format_of_zip(data)
    # a box of MP4 is its size, its type and, of the first box, the brand
    box_type = data[4:8]
    brand = data[8:12]
    if data.startswith(b"RIFF") and brand == b"AVI ":
        return "avi"
    is_film = box_type == b"ftyp" and not brand.lower().startswith(_STILL)
    if is_film or box_type in _MOV:
        return "mov"
    return None


def _format_of_zip(data: bytes) -> str | None:
    """Whether numpy or torch wrote a zip file; None for any other, and a damaged one."""
    try:
        names = zipfile.ZipFile(io.BytesIO(data)).namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError):
        return None
    for suffix, name in ((".npy", "NPZ"), ("data.pkl", "PT")):
        if any(member_name.endswith(suffix) for member_name in names):
            return name
    return None


# Images inside tar and zip files, here or in stores: `photos.tar` holds images like a
# folder, `photos.tar::a/b.jpg` is one of them. Nothing is unpacked: a member is read
# when its turn comes.


def split_member(path: FilePath) -> tuple[FilePath, str] | None:
    """Split the path of a file in an archive into the archive and the member's name;
    None where it is the path of a plain file."""
    if isinstance(path, Url):
        if path.member is None:
            return None
        return replace(path, member=None), path.member
    match = _MEMBER.fullmatch(str(path))
    # a plain file may be called `x.tar::y.png`
    if match is None or os.path.lexists(path):
        return None
    return Path(match[1]), member_name(match[2])


def member(archive: FilePath, name: str) -> FilePath:
    """The path of a file in an archive."""
    if isinstance(archive, Url):
        return replace(archive, member=member_name(name))
    return Path(f"{archive}{SEPARATOR}{name}")


def members(path: FilePath) -> list[str]:
    """Names of the files in an archive, in their order; OSError or one of DAMAGED if it
    cannot be read. An archive in a store is opened anew, and taken to stay as it is
    until the next call."""
    if isinstance(path, Url):
        _opened.cache_clear()
        _content.cache_clear()
    return [*_opened(path, *_version(path)).members]


def read(path: FilePath) -> bytes:
    """The bytes of a file, on its own or in an archive.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: Or one of DAMAGED, where it cannot be read.
    """
    inside = split_member(path)
    if inside is not None:
        archive, name = inside
        with _READING:
            return _content(archive, name, *_version(archive))
    if isinstance(path, Url):
        return urls.read(path, MAX_FILE_BYTES)
    with files.open_regular(path) as file:
        # a file that grows meanwhile is read as far as it went
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise OSError(
                f"it has {size} bytes, more than the {MAX_FILE_BYTES} of any image"
            )
        return file.read(size)


def member_name(name: str) -> str:
    """One spelling for `a/b.jpg`, `./a/b.jpg`, `/a//b.jpg` and `a\\b.jpg`."""
    return PurePosixPath(name.replace("\\", "/").lstrip("/")).as_posix()


def is_hidden(name: str) -> bool:
    """Whether a file, or a folder that holds it, is hidden or one that macOS adds."""
    return any(
        part.startswith(".") or part == "__MACOSX"
        for part in name.split("/")
        if part != ".."
    )


def _version(path: FilePath) -> tuple[int, ...]:
    """Numbers that change when a file of this machine is written anew; none for one in
    a store."""
    if isinstance(path, Url):
        return ()
    state = path.stat()
    return state.st_mtime_ns, state.st_size, state.st_ino


class _Archive(NamedTuple):
    """An open tar or zip file."""

    file: Any
    members: dict[str, Any]
    """The files in it, TarInfo or ZipInfo, by their names; of two of one name the later
    one."""


@lru_cache(maxsize=4)
def _opened(path: FilePath, *state: int) -> _Archive:
    """An archive, which stays open.

    Args:
        path: A tar or zip file, here or in a store.
        state: `_version` of the file: where it is another one, the file is opened anew.

    Raises:
        OSError: Or one of DAMAGED, where it cannot be read.
    """
    file = urls.open_parts(path) if isinstance(path, Url) else files.open_regular(path)
    if path.name.lower().endswith(".zip"):
        archive = zipfile.ZipFile(file)
        infos = [info for info in archive.infolist() if not info.is_dir()]
        return _Archive(archive, {member_name(info.filename): info for info in infos})
    mode = _MODES.get(file.read(2), "r:")
    file.seek(0)
    tar = tarfile.open(fileobj=file, mode=mode)  # noqa: SIM115 - stays as long as cached
    return _Archive(tar, _members_of_tar(tar, path))


def _members_of_tar(tar: Any, path: FilePath) -> dict[str, Any]:
    """The files in a tar archive by their names; links are left out with a warning.

    Raises:
        tarfile.ReadError: Where a header is damaged.
    """
    links = 0
    members: dict[str, Any] = {}
    for info in tar:
        links += info.issym() or info.islnk()
        if info.isfile():
            # of two of one name the later one counts, also for the order
            members.pop(member_name(info.name), None)
            members[member_name(info.name)] = info
    # tarfile takes a damaged header for the end of the file, which is a block of zeros
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(512).strip(b"\0"):
        raise tarfile.ReadError(f"damaged at byte {tar.offset}")
    if links:
        log.warning("%s: %d links are left out", path, links)
    return members


@lru_cache(maxsize=1)
def _content(path: FilePath, name: str, *state: int) -> bytes:
    """A member of an archive; the last one is kept, since going back in a compressed tar
    means starting anew.

    Args:
        path: Of the archive, as for `_opened`.
        name: Of the member, as `members` has it.
        state: As `_opened` takes it.

    Raises:
        FileNotFoundError: The archive has no such member.
        OSError: Or one of DAMAGED, where it cannot be read.
    """
    archive = _opened(path, *state)
    if name not in archive.members:
        raise FileNotFoundError(name)
    info = archive.members[name]
    is_tar = isinstance(info, tarfile.TarInfo)
    size = info.size if is_tar else info.file_size
    if size > MAX_MEMBER_BYTES:
        raise OSError(
            f"it unpacks to {size} bytes, more than the {MAX_MEMBER_BYTES} of any image"
        )
    if is_tar:
        opened = archive.file.extractfile(info)
    elif info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        # zipfile reads no more than the size that was compared above
        opened = archive.file.open(info)
    else:
        raise NotImplementedError("it is neither stored nor deflated")
    with opened:
        return opened.read()  # type: ignore[no-any-return]


# Files to pictures
# ---------------------------------------------------------------------------

_BROKEN = (
    OSError,
    SyntaxError,
    MemoryError,
    IndexError,
    TypeError,
    KeyError,
    struct.error,
    *DAMAGED,
)
"""What Pillow's decoders raise on broken files."""

_OF_16_BITS = ("PNG", "PPM")
"""Formats of 16 bits at most; Pillow holds some of their files as 32."""

_RGB = ExpectedImage(3)

# what matters of a broken file is raised
warnings.filterwarnings("ignore", module=r"PIL\.")


ReadTensor = Callable[[bytes], np.ndarray]
"""Reads the tensor in a file of torch.save."""


class _Decoding(NamedTuple):
    """How the files of a sample are decoded."""

    expected: ExpectedImage
    background: str
    """A colour, which shows where a picture is transparent."""
    frames: int | None
    """How many of an animation are taken, evenly spread; None for the first."""
    still: tuple[int, int] | None
    """For a frame of a video: its number, and how many evenly spread ones there are."""
    read_tensor: ReadTensor | None


def decode(
    sample: Sample,
    background: str = "white",
    frames: int | None = None,
    expected: ExpectedImage = _RGB,
    tensors: ReadTensor | None = None,
    quiet: bool = False,
) -> tuple[tuple[Image.Image | Raster, ...], str]:
    """Read a sample's images as they are meant to be seen.

    Args:
        sample: The files.
        background: A colour, which shows where an image is transparent.
        frames: How many images to take, evenly spread over the files or an animation.
            Without it every file, and of an animation the first frame, with a warning
            unless `quiet`.
        expected: What the model takes; of neither grey nor RGB, the channels are those
            of the file.
        tensors: Without it files of torch.save are refused.
        quiet: Warn of nothing.

    Returns:
        Pictures of mode L or RGB, or numbers of other channels, or volumes; and the
        sha256 of the sample's files.

    Raises:
        ImageError: Names the file.
    """
    contents = []
    for path in sample.paths:
        with _errors_named(sample, path):
            contents.append(read(path))
    numbers: Sequence[int] = range(len(contents))
    # --frames divides either the files of a folder, or the frames of one file
    frames_of_file = frames
    if len(contents) > 1:
        frames_of_file = None
        if frames is not None:
            numbers = _spread(len(contents), frames)
    decoding = _Decoding(expected, background, frames_of_file, sample.still, tensors)
    images: list[Image.Image | Raster] = []
    for number in numbers:
        path = sample.paths[number]
        with _errors_named(sample, path):
            decoded = _decoded(contents[number], decoding)
        # a picture of its own in 8 bits, as nearly all are, needs no warning
        is_plain = decoded.total == 1 and isinstance(decoded.images[0], Image.Image)
        if not (quiet or is_plain):
            _warn(path, decoded, decoding)
        images += decoded.images
    return tuple(images), hashlib.sha256(b"".join(contents)).hexdigest()


def _decoded(data: bytes, decoding: _Decoding) -> Frames:
    """What a file shows: frames of a video or an animation, an array, or a picture.

    Args:
        data: the content of the file.

    Raises:
        ImageError: its message goes on from the file's name. Other errors of a broken
            file are those of its library (`_BROKEN`).
    """
    file_format = format_of(data)
    expected = decoding.expected
    if file_format in VIDEOS:
        return _video_frames(data, file_format, decoding)
    if file_format is not None or not (expected.channels in (1, 3) or expected.raw):
        array = _array(data, file_format, decoding)
        if array is not None:
            return Frames([arrays.to_image(array, expected)], total=1)
    with open_image(io.BytesIO(data)) as opened:
        # the further images of MPO are previews and other views
        total = 1 if opened.format == "MPO" else getattr(opened, "n_frames", 1)
        numbers = [0]
        if decoding.frames is not None:
            numbers = _spread(total, decoding.frames)
        return Frames([_frame(opened, number, decoding) for number in numbers], total)


def _video_frames(data: bytes, container: str, decoding: _Decoding) -> Frames:
    """Frames of a video: those that are asked for, else the first.

    Args:
        data: the content of the file.
        container: its format, by PyAV's name.

    Raises:
        ImageError: it cannot be decoded, or the model takes no pictures.
    """
    index, count = decoding.still or (None, decoding.frames or 1)
    video = arrays.read_frames(
        data, container, partial(_spread, count=count, index=index)
    )
    expected = decoding.expected
    if expected.channels not in (1, 3) and not expected.raw:
        raise ImageError(
            f"is a video, and the model takes {counted(expected.channels, 'channel')}"
        )
    return video


def _warn(path: FilePath, decoded: Frames, decoding: _Decoding) -> None:
    """Say that of a video or an animation one frame alone is taken; and that values fill
    little of 16 bits: a model sees 12 bits in them as darkness."""
    total = decoded.total
    if total > 1 and decoding.still is None and not decoding.frames:
        hint = ""
        if path.name.lower().endswith(VIDEO_SUFFIXES):
            hint = " (--frames)"
        log.warning("%s has %d frames; the first is taken%s", path, total, hint)
    for image in decoded.images:
        if isinstance(image, Raster) and image.narrow_range is not None:
            low, high = image.narrow_range
            seen_as = "one grey to the model;"
            # of brighter values no multiple fits into 16 bits, or tells them apart
            if high < 65535 // 5:
                seen_as = f"black to the model; save them times {65535 // high}, or"
            log.warning(
                "%s has values %s to %s of 65,535, nearly %s give --mean and --std of"
                " that range",
                path,
                f"{low:,}",
                f"{high:,}",
                seen_as,
            )


def digest(sample: Sample) -> str:
    """sha256 of a sample's files, without decoding them; ImageError where one cannot be
    read."""
    sha256 = hashlib.sha256()
    for path in sample.paths:
        with _errors_named(sample, path):
            sha256.update(read(path))
    return sha256.hexdigest()


@contextmanager
def _errors_named(sample: Sample, path: FilePath) -> Iterator[None]:
    """Turn errors of reading or decoding a file into ImageErrors with the name of its
    sample, and of several files that of the file."""
    name = sample.name
    if len(sample.paths) > 1:
        name += f": {path.name}"
    try:
        yield
    except ImageError as error:
        raise ImageError(f"{name} {error.message}", error.hint) from error
    except FileNotFoundError:
        raise ImageError(f"{name} is no file") from None
    except FileError as error:
        # the message of a file here names its path, that of a store does not
        message, _, reason = error.message.partition(" cannot be read: ")
        message = f"{name} cannot be read: {reason or message}"
        raise ImageError(message, error.hint) from error
    except UnidentifiedImageError as error:
        raise ImageError(f"{name} {error}", EXPECTED) from error
    except Image.DecompressionBombError:
        # Pillow warns at its limit, and raises at twice as many
        max_pixels = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise ImageError(
            f"{name} has more pixels than the {max_pixels:,} that an image may have",
            "cut it into parts, or make it smaller",
        ) from None
    except _BROKEN as error:
        raise ImageError(
            f"{name} cannot be read: {arrays.reason(error)}",
            "copy or download the file again",
        ) from error


def _array(
    data: bytes, file_format: str | None, decoding: _Decoding
) -> np.ndarray | None:
    """The numbers in a file; None for a picture that the model takes as Pillow reads it.

    Args:
        data: The file.
        file_format: What `format_of` says of it, but for videos.
        decoding: How it is decoded.

    Raises:
        UnidentifiedImageError: Where it is a file of `torch.save`, or of no known
            format.
        ImageError: Where it is damaged, or does not fit the model.
    """
    expected = decoding.expected
    if file_format in (None, "TIFF"):
        return _array_of_picture(data, file_format, expected)
    reader = _READERS.get(file_format, decoding.read_tensor)
    if reader is None:
        raise UnidentifiedImageError("is a file of torch.save, which is no image here")
    try:
        return reader(data)
    except FileError as error:
        raise ImageError(error.message, error.hint) from error


def _array_of_picture(
    data: bytes, file_format: str | None, expected: ExpectedImage
) -> np.ndarray | None:
    """All channels of a picture, or of a TIFF; None where a model of grey or RGB takes
    it as Pillow reads it.

    Args:
        data: the content of the file.
        file_format: `TIFF`, of which tifffile reads what Pillow does not; or None for the
            formats of Pillow.

    Raises:
        UnidentifiedImageError: Pillow does not know it, and `file_format` is None.
        ImageError: its channels do not fit the model.
    """
    try:
        opened = open_image(io.BytesIO(data))
    except UnidentifiedImageError:
        # tifffile reads TIFF files of more bits, channels and compressions
        if file_format is None:
            raise
        return _as_model_input(arrays.read_tiff(data), expected)
    with opened:
        if expected.channels in (1, 3):
            return None
        if not _keeps_all_channels(opened):
            return _as_model_input(arrays.read_tiff(data), expected)
        upright = ImageOps.exif_transpose(opened)
        if upright.mode == "P":  # numbers of colours
            upright = upright.convert("RGBA")
        return _as_model_input(np.asarray(upright), expected)


_SAMPLES_PER_PIXEL, _BITS_PER_SAMPLE = 277, 258
"""Numbers of tags of TIFF."""


def _keeps_all_channels(opened: Image.Image) -> bool:
    """Whether Pillow holds all that is in the file: of the colour of a TIFF it keeps
    four channels of 8 bits at most."""
    tags = getattr(opened, "tag_v2", {})
    bands = len(opened.getbands())
    bits = max(tags.get(_BITS_PER_SAMPLE, (8,)))
    return bool(tags.get(_SAMPLES_PER_PIXEL, bands) == bands and bits <= 8)


def _frame(
    opened: Image.Image, number: int, decoding: _Decoding
) -> Image.Image | Raster:
    """A picture, or one frame of an animation.

    Args:
        opened: The file.
        number: Of the frame, from 0.
        decoding: How it is decoded.

    Returns:
        A picture of mode L or RGB; grey of more than 8 bits as numbers.
    """
    if number:
        opened.seek(number)
    opened.load()
    image = ImageOps.exif_transpose(opened)
    if image.mode.startswith(("I", "F")):  # grey of more than 8 bits
        if decoding.expected.raw:
            return _as_8_bits(image)
        values = np.asarray(image)
        # the format tells 16 bits: two images of one series are never read in two ways
        if image.mode == "I" and opened.format in _OF_16_BITS:
            values = values.astype(np.uint16)
        values = values.astype(values.dtype.newbyteorder("="))
        return arrays.to_image(
            _as_model_input(values, decoding.expected), decoding.expected
        )
    if image.has_transparency_data:
        return _over(image, decoding.background)
    if image.mode in ("L", "RGB"):
        return image.copy()
    return image.convert("L" if image.mode == "1" else "RGB")


def _as_8_bits(image: Image.Image) -> Image.Image:
    """Grey of more than 8 bits in 8, for a function of the user's, which gets pictures.

    Integers of 16 bits and floats of 0..1 keep their scale; other floats fill it.

    Raises:
        ValueError: Where it holds NaN or infinite values.
    """
    values = np.asarray(image).astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError("it holds NaN or infinite values")
    # the scale is that of the type where it has one: two images stay comparable
    low = float(values.min())
    high = float(values.max())
    if image.mode.startswith("I"):
        low = 0.0
        # Pillow holds 16 bits of some formats in 32
        high = 65535.0 if high <= 65535 else 2.0**31 - 1
    elif low >= 0 and high <= 1:
        low = 0.0
        high = 1.0
    scaled = (values - low) * (255.0 / ((high - low) or 1.0))
    return Image.fromarray(np.clip(scaled + 0.5, 0, 255).astype(np.uint8))


def _over(image: Image.Image, background: str) -> Image.Image:
    """An image with transparency, over a colour; grey over grey stays grey."""
    color = ImageColor.getrgb(background)[:3]
    # what a viewer shows; the hidden colours of transparent pixels are not meant
    behind = Image.new("RGBA", image.size, color)
    over = Image.alpha_composite(behind, image.convert("RGBA")).convert("RGB")
    is_grey = image.mode in ("1", "L", "LA", "La") and len(set(color)) == 1
    if is_grey:
        return over.convert("L")
    return over


def _as_model_input(picture: np.ndarray, expected: ExpectedImage) -> np.ndarray:
    """A picture as [1, C, H, W], which cannot be mistaken for [H, W, C]. If the user's own
    function prepares the images (`expected.raw`), the picture is returned unchanged.

    Args:
        picture: [H, W, C] or [H, W].

    Raises:
        ImageError: Where the model takes volumes.
    """
    if expected.raw:
        return picture
    if expected.volume:
        shape = list(picture.shape)
        raise ImageError(
            f"is a picture of shape {shape}, and the model takes volumes",
            f"an array {expected.shapes}",
        )
    return np.moveaxis(np.atleast_3d(picture), -1, 0)[None]


def _spread(total: int, count: int, index: int | None = None) -> list[int]:
    """`count` numbers of `total` images, evenly spread; or the one at `index` of them."""
    numbers = [round(number) for number in np.linspace(0, total - 1, count)]
    if index is None:
        return numbers
    return [numbers[index]]


def check_background(color: str) -> None:
    """Refuse a background that is not a colour."""
    try:
        ImageColor.getrgb(color)
    except ValueError:
        raise UsageError(
            f"--background {color!r} is no colour", "for example white or #808080"
        ) from None
