"""Read files (on this machine, in archives, in stores) as pictures of mode L or RGB, as a
person sees them, or as numbers."""

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
"""A file on this machine or in a store; it may be a file in an archive."""

SEPARATOR = "::"
"""Separates an archive and a file in it: `photos.tar::a/b.jpg`."""
_SUFFIX = r"\.(?:tar|tar\.gz|tgz|tar\.bz2|tbz2|tar\.xz|txz|zip)"
ARCHIVE_NAME = re.compile(rf".*{_SUFFIX}", re.IGNORECASE | re.DOTALL)
"""Matches names of archives. It is not used for files in an archive: an archive in an
archive is not opened."""
_MEMBER = re.compile(rf"(.+?{_SUFFIX}){SEPARATOR}(.+)", re.IGNORECASE | re.DOTALL)

MAX_MEMBER_BYTES = 512 * 2**20
"""A file in an archive that unpacks to more is refused: it would fill the memory."""

MAX_FILE_BYTES = 2**30
"""A larger file is refused: Pillow would not open such a picture."""

_MODES: Any = {b"\x1f\x8b": "r:gz", b"BZ": "r:bz2", b"\xfd7": "r:xz"}
"""Modes in which tarfile opens a compressed file, by the first two bytes of the file."""

_READING = Lock()
"""Lets only one thread at a time read from the open archives."""

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
"""What the readers of archives raise, besides OSError, for a damaged archive."""


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
"""The formats of Pillow that are read, and the suffixes by which folders and archives are
searched. They are tried in this order: Pillow reads the first five without importing all
its plugins, and TGA, which has no mark, comes last. Other formats are left out, since
Pillow starts Ghostscript for EPS."""

SUFFIXES = frozenset(suffix for suffixes in FORMATS.values() for suffix in suffixes)
"""Suffixes of the images in a folder or an archive. Arrays there are only read if the user
names the file."""

_READERS = {"NPY": npy.read_npy, "NPZ": npy.read_npz}

EXPECTED = (
    "give an image"
    f" ({', '.join(name for name, suffixes in FORMATS.items() if suffixes)}) or an"
    " array (.npy, .npz, .pt)"
)
"""The hint for a file that is not an image."""

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
"""Formats by the first bytes of a file."""
_HEIC = (b"ftypheic", b"ftypheix", b"ftypmif1", b"ftypmsf1")
_MOV = (b"moov", b"mdat", b"wide", b"free")
_STILL = (b"avi", b"hei", b"hev", b"mif", b"msf", b"jxl", b"jp2")
"""The beginnings of brands of pictures (not videos) in the container of MP4."""

VIDEOS = ("mov", "avi", "matroska")
"""Formats of videos, by ffmpeg's names."""
VIDEO_SUFFIXES = (".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi")
"""Endings of the files of which `--frames N` takes N stills."""


_open = Image.open
"""Pillow's own function, kept since Ultralytics replaces it by one that installs packages
for files that Pillow does not read."""


def open_image(file: BinaryIO) -> Image.Image:
    """Open an image in one of FORMATS.

    Raises:
        UnidentifiedImageError: Where the file has another format. The message says what
            the file looks like.
    """
    head = file.read(64)
    try:
        return _open(file, formats=[*FORMATS])
    except UnidentifiedImageError:
        raise UnidentifiedImageError(_describe_unknown(head)) from None


def _describe_unknown(head: bytes) -> str:
    """A message that says what a file looks like which is not an image.

    Args:
        head: The first bytes of the file.
    """
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
    """The format of a file, found by its content, if other libraries than Pillow may have to
    read it.

    Returns:
        TIFF, NPY, NPZ or PT, which may have any number of channels; one of VIDEOS; or None
        for any other file.
    """
    for mark, name in _MARKS.items():
        if data.startswith(mark):
            return name
    if data.startswith(b"PK\3\4"):
        return _format_of_zip(data)
    # MP4 begins with a box: 4 bytes of its size, 4 of its type, 4 of the brand
    box_type = data[4:8]
    brand = data[8:12]
    if data.startswith(b"RIFF") and brand == b"AVI ":
        return "avi"
    is_film = box_type == b"ftyp" and not brand.lower().startswith(_STILL)
    if is_film or box_type in _MOV:
        return "mov"
    return None


def _format_of_zip(data: bytes) -> str | None:
    """NPZ for a zip file that numpy wrote, PT for one that torch wrote; None for any other,
    or a damaged one."""
    try:
        names = zipfile.ZipFile(io.BytesIO(data)).namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError):
        return None
    for suffix, name in ((".npy", "NPZ"), ("data.pkl", "PT")):
        if any(member_name.endswith(suffix) for member_name in names):
            return name
    return None


# Images inside tar and zip files, on this machine or in stores: `photos.tar` stands for
# all images in it, `photos.tar::a/b.jpg` for one. Nothing is unpacked to the disk: each
# file in an archive (a member) is read when it is drawn.


def split_member(path: FilePath) -> tuple[FilePath, str] | None:
    """Split the path of a file in an archive into the archive and the member's name; None
    for the path of a file that is in no archive."""
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
    """The names of the files in an archive, in the archive's order. An archive in a store is
    opened anew here; until the next call, `read` assumes that it does not change.

    Raises:
        OSError: The archive cannot be read; or one of DAMAGED.
    """
    if isinstance(path, Url):
        _open_archive.cache_clear()
        _read_member.cache_clear()
    return [*_open_archive(path, *_file_version(path)).members]


def read(path: FilePath) -> bytes:
    """The bytes of a file, which may be in an archive.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: The file cannot be read; or one of DAMAGED.
    """
    inside = split_member(path)
    if inside is not None:
        archive, name = inside
        with _READING:
            return _read_member(archive, name, *_file_version(archive))
    if isinstance(path, Url):
        return urls.read(path, MAX_FILE_BYTES)
    with files.open_regular(path) as file:
        # if the file grows meanwhile, only its first `size` bytes are read
        size = os.fstat(file.fileno()).st_size
        if size > MAX_FILE_BYTES:
            raise OSError(
                f"it has {size} bytes, more than the {MAX_FILE_BYTES} of any image"
            )
        return file.read(size)


def member_name(name: str) -> str:
    """The name of a file in an archive in one spelling: `a/b.jpg` for `./a/b.jpg`,
    `/a//b.jpg` and `a\\b.jpg`."""
    return PurePosixPath(name.replace("\\", "/").lstrip("/")).as_posix()


def is_hidden(name: str) -> bool:
    """Whether a path has a part that is hidden (`.git`), or a folder that macOS adds to zip
    files."""
    return any(
        part.startswith(".") or part == "__MACOSX"
        for part in name.split("/")
        if part != ".."
    )


def _file_version(path: FilePath) -> tuple[int, ...]:
    """Numbers that change when a file on this machine is written anew; empty for a file in
    a store."""
    if isinstance(path, Url):
        return ()
    state = path.stat()
    return state.st_mtime_ns, state.st_size, state.st_ino


class _Archive(NamedTuple):
    """An open tar or zip file."""

    file: Any
    members: dict[str, Any]
    """The files in it, TarInfo or ZipInfo, by their names; if two have the same name, the
    later one."""


@lru_cache(maxsize=4)
def _open_archive(path: FilePath, *state: int) -> _Archive:
    """Open an archive. It stays open as long as the cache holds it.

    Args:
        path: A tar or zip file, on this machine or in a store.
        state: `_file_version` of the file. If it has changed, the file is opened anew.

    Raises:
        OSError: The archive cannot be read; or one of DAMAGED.
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
            # if two have the same name, the later one counts, also for the order
            members.pop(member_name(info.name), None)
            members[member_name(info.name)] = info
    # the end of a tar file is a block of zeros; tarfile also stops at a damaged header
    tar.fileobj.seek(tar.offset)
    if tar.fileobj.read(512).strip(b"\0"):
        raise tarfile.ReadError(f"damaged at byte {tar.offset}")
    if links:
        log.warning("%s: %d links are left out", path, links)
    return members


@lru_cache(maxsize=1)
def _read_member(path: FilePath, name: str, *state: int) -> bytes:
    """The bytes of a file in an archive. The last file is cached, since going back in a
    compressed tar means unpacking it again from the start.

    Args:
        path: The archive.
        name: The name of the file, as `members` returns it.
        state: `_file_version` of the archive.

    Raises:
        FileNotFoundError: The archive has no such file.
        OSError: The file cannot be read; or one of DAMAGED.
        NotImplementedError: The file is packed by a method that is not read.
    """
    archive = _open_archive(path, *state)
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
        # zipfile reads no more bytes than `size`, which was checked above
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
"""What Pillow's decoders raise for broken files."""

_OF_16_BITS = ("PNG", "PPM")
"""Formats of at most 16 bits, although Pillow reads some of their files as 32 bits."""

_RGB = ExpectedImage(3)

# Pillow's warnings say no more than its exceptions
warnings.filterwarnings("ignore", module=r"PIL\.")


ReadTensor = Callable[[bytes], np.ndarray]
"""Reads the tensor in a file of torch.save."""


class _Decoding(NamedTuple):
    """How the files of a sample are decoded."""

    expected: ExpectedImage
    background: str
    """The colour behind transparent pixels."""
    frames: int | None
    """How many frames of an animation are taken, evenly spread; None for only the first."""
    still: tuple[int, int] | None
    """If the sample is one of several evenly spread frames of a video: its index among them,
    and their number."""
    read_tensor: ReadTensor | None
    """The reader for files of torch.save; None refuses them."""


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
        sample: The image, with its files.
        background: The colour behind transparent pixels.
        frames: How many images to take, evenly spread over several files or over the
            frames of one file. By default all files are taken, and of an animation only
            the first frame, with a warning.
        expected: The images that the model takes. If that is neither grey nor RGB, all
            channels of the file are kept.
        tensors: The reader for files of torch.save; None refuses them.
        quiet: Log no warnings.

    Returns:
        The images: pictures of mode L or RGB, or numbers of other channels or of a volume;
        and the sha256 of the sample's files.

    Raises:
        ImageError: Where a file cannot be read or does not fit the model. The message
            names the file.
    """
    contents = []
    for path in sample.paths:
        with _name_errors(sample, path):
            contents.append(read(path))
    numbers: Sequence[int] = range(len(contents))
    # --frames chooses either among several files, or among the frames of one file
    frames_of_file = frames
    if len(contents) > 1:
        frames_of_file = None
        if frames is not None:
            numbers = _spread_numbers(len(contents), frames)
    decoding = _Decoding(expected, background, frames_of_file, sample.still, tensors)
    images: list[Image.Image | Raster] = []
    for number in numbers:
        path = sample.paths[number]
        with _name_errors(sample, path):
            decoded = _decode_file(contents[number], decoding)
        # nearly all files are one picture of 8 bits, which needs no warning
        is_plain = decoded.total == 1 and isinstance(decoded.images[0], Image.Image)
        if not (quiet or is_plain):
            _warn(path, decoded, decoding)
        images += decoded.images
    return tuple(images), hashlib.sha256(b"".join(contents)).hexdigest()


def _decode_file(data: bytes, decoding: _Decoding) -> Frames:
    """Decode one file: frames of a video or an animation, an array, or a picture.

    Args:
        data: The content of the file.
        decoding: How the file is decoded.

    Raises:
        ImageError: The message is a predicate, to which `_name_errors` adds the file's
            name. A broken file may also raise any of _BROKEN.
    """
    file_format = format_of(data)
    expected = decoding.expected
    if file_format in VIDEOS:
        return _video_frames(data, file_format, decoding)
    if file_format is not None or not (expected.channels in (1, 3) or expected.raw):
        array = _read_array(data, file_format, decoding)
        if array is not None:
            return Frames([arrays.to_image(array, expected)], total=1)
    with open_image(io.BytesIO(data)) as opened:
        # all images of an MPO but the first are previews and other views
        total = 1 if opened.format == "MPO" else getattr(opened, "n_frames", 1)
        numbers = [0]
        if decoding.frames is not None:
            numbers = _spread_numbers(total, decoding.frames)
        return Frames(
            [_read_frame(opened, number, decoding) for number in numbers], total
        )


def _video_frames(data: bytes, container: str, decoding: _Decoding) -> Frames:
    """Frames of a video: those that `decoding` asks for, by default the first.

    Args:
        data: The content of the file.
        container: The format of the file, one of VIDEOS.
        decoding: How the file is decoded.

    Raises:
        ImageError: Where the video cannot be decoded, or the model does not take pictures.
    """
    index, count = decoding.still or (None, decoding.frames or 1)
    video = arrays.read_frames(
        data, container, partial(_spread_numbers, count=count, index=index)
    )
    expected = decoding.expected
    if expected.channels not in (1, 3) and not expected.raw:
        raise ImageError(
            f"is a video, and the model takes {counted(expected.channels, 'channel')}"
        )
    return video


def _warn(path: FilePath, decoded: Frames, decoding: _Decoding) -> None:
    """Warn if only one frame of a video or an animation is taken. Warn if the values of an
    image fill only a small part of 16 bits: an image of 12 bits in 16 is black to a model.
    """
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
            # brighter values cannot be spread by a multiple that fits into 16 bits
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
    """The sha256 of a sample's files, which are not decoded.

    Raises:
        ImageError: Where a file cannot be read.
    """
    sha256 = hashlib.sha256()
    for path in sample.paths:
        with _name_errors(sample, path):
            sha256.update(read(path))
    return sha256.hexdigest()


@contextmanager
def _name_errors(sample: Sample, path: FilePath) -> Iterator[None]:
    """A context in which errors of reading or decoding a file become ImageErrors. The
    message begins with the sample's name; if the sample has several files, the file's name
    follows."""
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
        # the message for a file on this machine begins with its path, that of a store not
        message, _, reason = error.message.partition(" cannot be read: ")
        message = f"{name} cannot be read: {reason or message}"
        raise ImageError(message, error.hint) from error
    except UnidentifiedImageError as error:
        raise ImageError(f"{name} {error}", EXPECTED) from error
    except Image.DecompressionBombError:
        # Pillow warns at its limit, and raises at twice the limit
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


def _read_array(
    data: bytes, file_format: str | None, decoding: _Decoding
) -> np.ndarray | None:
    """The numbers in a file; None for a picture that the model takes as Pillow reads it.

    Args:
        data: The content of the file.
        file_format: The result of `format_of`; not one of VIDEOS.
        decoding: How the file is decoded.

    Raises:
        UnidentifiedImageError: Where the format is not known, or the file is of
            `torch.save`, and there is no reader for it.
        ImageError: Where the file is damaged, or does not fit the model.
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
    """All channels of a picture, as numbers; None if the model takes grey or RGB, and Pillow
    reads the picture.

    Args:
        data: The content of the file.
        file_format: `TIFF`, which tifffile reads if Pillow does not; None for any other
            format.
        expected: The images that the model takes.

    Raises:
        UnidentifiedImageError: Where Pillow does not know the format, and it is not TIFF.
        ImageError: Where tifffile cannot read the file, or the model takes volumes.
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
    """Whether Pillow has read all values of a picture. Of a TIFF in colour it keeps at most
    four channels of 8 bits."""
    tags = getattr(opened, "tag_v2", {})
    bands = len(opened.getbands())
    bits = max(tags.get(_BITS_PER_SAMPLE, (8,)))
    return bool(tags.get(_SAMPLES_PER_PIXEL, bands) == bands and bits <= 8)


def _read_frame(
    opened: Image.Image, number: int, decoding: _Decoding
) -> Image.Image | Raster:
    """A picture, or one frame of an animation.

    Args:
        opened: The picture or animation, which Pillow has opened.
        number: The index of the frame.
        decoding: How the file is decoded.

    Returns:
        A picture of mode L or RGB, or numbers if it is grey of more than 8 bits.

    Raises:
        ImageError: Where numbers do not fit the model. A broken file may also raise any
            of _BROKEN.
    """
    if number:
        opened.seek(number)
    opened.load()
    image = ImageOps.exif_transpose(opened)
    if image.mode.startswith(("I", "F")):  # grey of more than 8 bits
        if decoding.expected.raw:
            return _as_8_bits(image)
        values = np.asarray(image)
        # the format decides, not the mode, so that images of a series are read alike
        if image.mode == "I" and opened.format in _OF_16_BITS:
            values = values.astype(np.uint16)
        values = values.astype(values.dtype.newbyteorder("="))
        return arrays.to_image(
            _as_model_input(values, decoding.expected), decoding.expected
        )
    if image.has_transparency_data:
        return _over_background(image, decoding.background)
    if image.mode in ("L", "RGB"):
        return image.copy()
    return image.convert("L" if image.mode == "1" else "RGB")


def _as_8_bits(image: Image.Image) -> Image.Image:
    """A grey picture of more than 8 bits as one of 8 bits, for the user's own function.

    Of integers 0..65535 becomes 0..255, or 0..2^31 - 1 if any is larger. Of floats 0..1
    becomes 0..255, or, if any lies outside, the range from the least to the largest value.

    Raises:
        ValueError: Where the picture has NaN or infinite values.
    """
    values = np.asarray(image).astype(np.float64)
    if not np.isfinite(values).all():
        raise ValueError("it holds NaN or infinite values")
    # the range of the type is used if it has one, so that two images are comparable
    low = float(values.min())
    high = float(values.max())
    if image.mode.startswith("I"):
        low = 0.0
        # Pillow reads 16 bits of some formats as 32
        high = 65535.0 if high <= 65535 else 2.0**31 - 1
    elif low >= 0 and high <= 1:
        low = 0.0
        high = 1.0
    scaled = (values - low) * (255.0 / ((high - low) or 1.0))
    return Image.fromarray(np.clip(scaled + 0.5, 0, 255).astype(np.uint8))


def _over_background(image: Image.Image, background: str) -> Image.Image:
    """A transparent image in front of a colour, as a viewer shows it. The result is RGB, or
    grey if image and colour are grey."""
    color = ImageColor.getrgb(background)[:3]
    # the hidden colours of transparent pixels do not show
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


def _spread_numbers(total: int, count: int, index: int | None = None) -> list[int]:
    """`count` evenly spread numbers from 0 to `total` - 1; with `index`, only the one at
    that index among them."""
    numbers = [round(number) for number in np.linspace(0, total - 1, count)]
    if index is None:
        return numbers
    return [numbers[index]]


def check_background(color: str) -> None:
    """Raise a UsageError if a background is not a colour that Pillow knows."""
    try:
        ImageColor.getrgb(color)
    except ValueError:
        raise UsageError(
            f"--background {color!r} is no colour", "for example white or #808080"
        ) from None
