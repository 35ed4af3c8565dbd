"""Images that are no photographs: arrays, tensors and TIFF files of any number of
channels."""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pixels import assert_same_pixels

from featviz.errors import ImageError
from featviz.images import decode
from featviz.images.arrays import ExpectedImage
from featviz.models.weights import read_saved_tensor
from featviz.records import Sample


def numbers(*shape: int, dtype: str = "u2") -> np.ndarray:
    """An array of this shape, of numbers from 0 to 199."""
    return np.random.default_rng(0).integers(0, 200, shape).astype(dtype)


def npy(array: np.ndarray) -> bytes:
    """The file of numpy.save."""
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(**arrays: np.ndarray) -> bytes:
    """The file of numpy.savez_compressed."""
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def pt(value: Any) -> bytes:
    """The file of torch.save."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


Read = Callable[..., Any]
"""Decodes bytes for a model of so many channels: the fixture `read`."""


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Give the one image."""
    path = tmp_path / "scan"
    sample = Sample("scan", (path,))

    def read(data: bytes, channels: int, **options: Any) -> Any:
        path.write_bytes(data)
        expected = ExpectedImage(channels, **options)
        (image,) = decode.decode(sample, expected=expected, tensors=read_saved_tensor)[
            0
        ]
        return image

    return read


@pytest.mark.parametrize(
    ("dtype", "divisor", "description"),
    [
        ("u1", 255, "uint8 / 255"),
        (">u2", 65535, ">u2 / 65535"),
        ("i2", 1, "int16 values as they are"),
        ("f8", 1, "float64 values as they are"),
    ],
)
def test_unsigned_integers_are_scaled_by_their_range(
    read: Read, dtype: str, divisor: int, description: str
) -> None:
    """They have 8 or 16 bits; all other numbers are left as they are, and the
    description says which."""
    array = numbers(5, 4, 6, dtype=dtype)
    image = read(npy(array), 5)
    np.testing.assert_allclose(image.values, array.astype("f4") / divisor, rtol=1e-6)
    assert image.values.dtype == np.float32
    assert image.description == description
    assert image.size == (6, 4)


@pytest.mark.parametrize("shape", [(13, 4, 6), (4, 6, 13), (1, 13, 4, 6)])
def test_channels_are_the_axis_that_has_as_many_as_the_model_takes(
    read: Read, shape: tuple[int, ...]
) -> None:
    """It is the first or the last one, and behind a batch of one the first; in either
    order of memory."""
    array = numbers(*shape, dtype="f4")
    expected = np.moveaxis(array, shape.index(13), 0).reshape(13, 4, 6)
    for stored in (array, np.asfortranarray(array)):
        np.testing.assert_array_equal(read(npy(stored), 13).values, expected)


@pytest.mark.parametrize(
    ("shape", "channels", "expected"),
    [((4, 6), 3, (3, 4, 6)), ((4, 6, 1), 1, (1, 4, 6)), ((3, 1, 6), 3, (3, 1, 6))],
)
def test_grey_becomes_what_the_model_takes(
    read: Read,
    shape: tuple[int, ...],
    channels: int,
    expected: tuple[int, ...],
) -> None:
    """[H, W] is one channel; a model of RGB gets it three times."""
    array = numbers(*shape, dtype="f4")
    values = read(npy(array), channels).values
    first_channels = array.reshape(-1, *expected[1:])
    np.testing.assert_array_equal(values, np.broadcast_to(first_channels, expected))


@pytest.mark.parametrize("shape", [(4, 6, 3), (3, 4, 6), (4, 6)])
@pytest.mark.parametrize("channels", [1, 3])
def test_bytes_of_a_picture_are_that_picture(
    read: Read, shape: tuple[int, ...], channels: int
) -> None:
    """uint8 of grey or RGB is read as the PNG with these pixels."""
    array = numbers(*shape, dtype="u1")
    pixels = array.transpose(1, 2, 0) if shape[0] == 3 else array
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    of_array = read(npy(array), channels)
    of_picture = read(file.getvalue(), channels)
    assert of_array.mode == of_picture.mode
    assert_same_pixels(of_array, of_picture)


@pytest.mark.parametrize(
    "arrays", [{"x": None}, {"label": np.ones(2), "image": None}], ids=["x", "image"]
)
def test_an_npz_has_one_array_or_one_called_image(
    read: Read, arrays: dict[str, Any]
) -> None:
    """It is the image."""
    array = numbers(5, 4, 6, dtype="f4")
    named = {name: array if value is None else value for name, value in arrays.items()}
    np.testing.assert_array_equal(read(npz(**named), 5).values, array)


def test_an_npz_of_several_arrays_is_refused(read: Read) -> None:
    """The line names them."""
    data = npz(a=np.ones((5, 4, 6)), b=np.ones((5, 4, 6)))
    message = r"^scan holds 2 arrays \(a, b\), and none is called image"
    with pytest.raises(ImageError, match=message):
        read(data, 5)
    many = npz(**{name: np.ones((5, 4, 6)) for name in "abcdefgh"})
    with pytest.raises(ImageError, match=r"holds 8 arrays \(a, b, c, d, e, f\)"):
        read(many, 5)


@pytest.mark.parametrize("shape", [(4,), (1, 4), (5, 4, 6), (2, 5, 4, 6)])
def test_a_function_of_the_users_gets_arrays_as_they_are(
    read: Read, shape: tuple[int, ...]
) -> None:
    """Of any number of axes, also a vector."""
    values = numbers(*shape)
    image = read(npy(values), 3, raw=True)
    assert image.values.dtype == np.uint16
    assert np.array_equal(image.values, values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_a_tensor_of_torch_save(read: Read, dtype: torch.dtype) -> None:
    """It stands alone, or in a dict as the only one or under the name image."""
    tensor = torch.from_numpy(numbers(5, 4, 6, dtype="u1")).to(dtype)
    expected = tensor.float() / (255 if dtype == torch.uint8 else 1)
    only_one = {"x": tensor, "name": "scan"}
    by_name = {"image": tensor, "mask": tensor[0]}
    for value in (tensor, only_one, by_name):
        np.testing.assert_allclose(read(pt(value), 5).values, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"a": torch.ones(1), "b": torch.ones(1)},
            "holds 2 tensors .* none is called image",
        ),
        ([1, 2], "holds a list, and no tensor"),
        (torch.nn.Linear(2, 2), "is a checkpoint, the weights of a model, and no"),
        ({"epoch": torch.ones(1), "model": torch.nn.Linear(2, 2).state_dict()}, "is a"),
        ({"0.weight": torch.ones(4, 3, 1, 1)}, "is a checkpoint"),
        (torch.ones(3, 4, dtype=torch.complex64), "holds a complex tensor"),
        (torch.eye(4).to_sparse(), "holds a tensor that is not plain"),
    ],
)
def test_what_is_no_tensor_is_said(read: Read, value: Any, message: str) -> None:
    """The line has the name of the file; nothing that it names is run."""
    with pytest.raises(ImageError, match=rf"^scan .*({message})"):
        read(pt(value), 3)


class Evil:
    """Would write a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("hacked", "w")


OBJECTS = np.array([Evil()], dtype=object)


@pytest.mark.parametrize(
    "data",
    [pt(Evil()), npy(OBJECTS), npz(x=OBJECTS), pickle.dumps(Evil())],
    ids=["torch.save", "npy", "npz", "pickle"],
)
def test_nothing_is_unpickled(read: Read, data: bytes, tmp_path: Path) -> None:
    """Neither a file of torch.save nor an array of objects runs what it names."""
    with pytest.raises(ImageError, match=r"^scan "):
        read(data, 3)
    assert not (tmp_path / "hacked").exists()


def header(descr: str, shape: str) -> bytes:
    """A file of numpy.save that ends behind its header."""
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    line = text.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(line)) + line


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header("<f4", "(9, 9)"), "expected 324 bytes got 0"),
        (header("<f4", "exit()"), "as numpy writes it"),
        (header("|O", "(1,)"), "Object arrays cannot be loaded"),
        (header("<f4", "(-2, -2)") + b"0" * 16, "scan"),
        (b"\x93NUMPY\x03\x00" + b"\0" * 30, "no array as numpy writes it"),
        (npy(np.ones((3, 4, 5)))[:-1], "expected 480 bytes got 479"),
        (npy(np.ones((3, 4, 5)) * 1j), "holds complex128"),
        (npy(np.full((3, 4, 5), np.nan)), "NaN or infinite"),
        (npy(np.full((3, 4, 5), 1e300)), "beyond what float32"),
        (npy(np.ones(7)), r"shape \[7\]"),
        (npy(np.ones((3, 0, 5))), r"shape \[3, 0, 5\]"),
        (npz(x=np.ones((3, 4)))[:-30], "scan"),
    ],
)
def test_a_hostile_or_broken_array_gets_one_line(
    read: Read, data: bytes, message: str
) -> None:
    """The header is a literal, not evaluated, and the bytes must be those it speaks of."""
    with pytest.raises(ImageError, match=f"^scan .*{message}|^{message}"):
        read(data, 3)


@pytest.mark.parametrize(
    ("shape", "channels", "message"),
    [
        ((5, 4, 5), 5, "of which two axes could be the 5 channels"),
        (
            (4, 6, 7),
            13,
            r"\[4, 6, 7\], and the model takes 13 channels: .* or \[13, H, W\]",
        ),
        ((13, 4, 6), 3, r"takes 3 channels"),
    ],
)
def test_channels_that_do_not_fit(
    read: Read, shape: tuple[int, ...], channels: int, message: str
) -> None:
    """The line has the shape, the channels and a remedy."""
    with pytest.raises(ImageError, match=message) as caught:
        read(npy(numbers(*shape, dtype="f4")), channels)
    assert caught.value.hint


def test_volumes(read: Read) -> None:
    """[D, H, W] is one channel; [C, D, H, W] has as many as the model takes."""
    grey = numbers(7, 4, 6, dtype="f4")
    four = numbers(4, 7, 5, 6, dtype="i2")
    image = read(npy(grey), 1, volume=True)
    np.testing.assert_array_equal(image.values, grey[None])
    assert image.description == "volume of 7 slices, float32 values as they are"
    for array in (four, four[None]):
        np.testing.assert_array_equal(read(npy(array), 4, volume=True).values, four)
    with pytest.raises(ImageError, match=r"takes 2 channels: \[2, D, H, W\]"):
        read(npy(four), 2, volume=True)


def tiff(array: np.ndarray, **options: Any) -> bytes:
    """The bytes of a TIFF of an array [H, W, C], as tifffile writes it."""
    tifffile = pytest.importorskip("tifffile", reason="tifffile is not installed")
    options = {"planarconfig": "contig", "photometric": "minisblack", **options}
    if options["planarconfig"] == "separate":
        array = np.moveaxis(array, -1, 0)
    file = io.BytesIO()
    tifffile.imwrite(file, array, metadata=None, **options)
    return file.getvalue()


@pytest.mark.parametrize("dtype", ["u2", "f4"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rowsperstrip": 3, "compression": "zlib"},
        {"compression": "zlib", "predictor": True},
        {"tile": (16, 16), "planarconfig": "separate"},
        {"compression": "lzw"},
    ],
    ids=str,
)
def test_tiff_of_many_channels(read: Read, dtype: str, options: dict[str, Any]) -> None:
    """It has strips or tiles, all channels together or one by one, packed or not."""
    if "lzw" in options.values() or ("predictor" in options and dtype == "f4"):
        pytest.importorskip("imagecodecs", reason="imagecodecs is not installed")
    array = numbers(7, 11, 6, dtype=dtype)
    divisor = np.float32(65535 if dtype == "u2" else 1)
    expected = np.moveaxis(array, -1, 0).astype("f4") / divisor
    np.testing.assert_array_equal(read(tiff(array, **options), 6).values, expected)


@pytest.mark.parametrize("packing", ["tiff_lzw", "packbits"])
def test_tiff_as_pillow_packs_it(
    read: Read, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of Pillow's with four channels has its pixels, and needs no other package."""
    monkeypatch.setitem(sys.modules, "tifffile", None)
    array = numbers(70, 90, 4, dtype="u1")
    file = io.BytesIO()
    Image.fromarray(array).save(file, "TIFF", compression=packing)
    expected = np.moveaxis(array, -1, 0).astype("f4") / 255
    np.testing.assert_array_equal(read(file.getvalue(), 4).values, expected)


def test_without_tifffile_one_line_names_the_extra(
    read: Read, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What Pillow reads in part is not read at all."""
    data = tiff(numbers(4, 5, 6))
    monkeypatch.setitem(sys.modules, "tifffile", None)
    message = r"^scan is a damaged TIFF, or one of more channels or bits"
    with pytest.raises(ImageError, match=message) as caught:
        read(data, 6)
    assert caught.value.hint == "pip install 'featviz[tiff]'"


def changed(data: bytes, tags: dict[int, int]) -> bytes:
    """The bytes of a TIFF with other numbers in its tags, one in each."""
    (start,) = struct.unpack_from("<I", data, 4)
    (count,) = struct.unpack_from("<H", data, start)
    entries = bytearray(data)
    first = start + 2
    for offset in range(first, first + 12 * count, 12):
        (tag,) = struct.unpack_from("<H", data, offset)
        if tag in tags:
            struct.pack_into("<HII", entries, offset + 2, 4, 1, tags[tag])
    return bytes(entries)


@pytest.mark.parametrize(
    ("compression", "tags", "message"),
    [
        (None, {259: 7}, "packed by method 7"),
        (None, {256: 10**9}, "too many"),
        (None, {273: 10**8}, "cannot be read: "),
        ("zlib", {279: 5}, "cannot be read: "),
        (None, {257: 0}, "scan"),
    ],
)
def test_a_hostile_tiff_gets_one_line(
    read: Read, compression: Any, tags: dict[int, int], message: str
) -> None:
    """What its tags claim is bounded, and held against what is there."""
    with pytest.raises(ImageError, match=f"^scan .*{message}|^{message}") as caught:
        read(changed(tiff(numbers(4, 5, 6), compression=compression), tags), 6)
    assert "\n" not in caught.value.message
