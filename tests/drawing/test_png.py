"""The PNG encoder, read back by Pillow and chunk by chunk."""

from __future__ import annotations

import io

import numpy as np
import pytest
from drawn_maps import chunks
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from PIL import Image

from featviz.drawing import loops
from featviz.drawing.picture import write_png

BLACK = np.zeros((4, 4), np.uint8)


def encoded(
    pixels: np.ndarray,
    cuts: int = 1,
    colors: bytes | None = None,
    text: dict[str, str] | None = None,
    repeats: bool = False,
) -> bytes:
    """A PNG of pixels [H, W] or [H, W, 3] that arrive in `cuts` pieces."""
    height, width = pixels.shape[:2]
    rows = pixels.reshape(height, -1)
    pieces = [piece for piece in np.array_split(rows, cuts) if len(piece)]
    file = io.BytesIO()
    write_png(
        file,
        (height, width),
        iter(pieces),
        colors=colors,
        text=text,
        repeats=repeats,
    )
    return file.getvalue()


def opened(data: bytes) -> Image.Image:
    """The picture, decoded; Pillow checks the checksums."""
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


MODES = {"L": (), "RGB": (3,)}


@pytest.mark.medium
@settings(max_examples=80, deadline=None)
@given(
    height=st.integers(1, 60),
    width=st.integers(1, 60),
    mode=st.sampled_from(sorted(MODES)),
    cuts=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
    repeats=st.booleans(),
)
def test_pixels_come_back_exactly(
    height: int,
    width: int,
    mode: str,
    cuts: int,
    seed: int,
    repeats: bool,
) -> None:
    """Grey and RGB pictures of any size, in any number of pieces, decode to the same
    pixels, by either compression."""
    shape = (height, width, *MODES[mode])
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    image = opened(encoded(pixels, cuts, repeats=repeats))
    assert image.mode == mode
    assert_array_equal(image, pixels)


def test_what_repeats_takes_no_more_bytes_than_by_pillow() -> None:
    """Crops of 5 × 7 pixels, enlarged 16 times, of which each stands twice."""
    crops = np.random.default_rng(0).integers(0, 256, (4, 5, 7, 3), dtype=np.uint8)
    large = crops.repeat(16, axis=1).repeat(16, axis=2)
    pixels = np.concatenate(list(np.concatenate([large, large], axis=2)))
    by_pillow = io.BytesIO()
    Image.fromarray(pixels).save(by_pillow, "png", compress_level=1)
    assert len(encoded(pixels, repeats=True)) <= len(by_pillow.getvalue())


def test_chunks_are_in_order_and_whole() -> None:
    """Header first, then text and palette, data together, end last; every checksum is
    right."""
    png = encoded(BLACK, 2, colors=bytes(768), text={"Layer": "conv"})
    names = [chunk.name for chunk in chunks(png)]
    assert names[:3] == [b"IHDR", b"tEXt", b"PLTE"]
    assert set(names[3:-1]) == {b"IDAT"}
    assert names[-1] == b"IEND"


@pytest.mark.parametrize(
    ("value", "name"),
    [
        pytest.param("layer1.0.conv1 (Conv2d)", b"tEXt", id="ascii"),
        pytest.param("café ±3 µ", b"tEXt", id="latin1"),
        pytest.param("層1.畳み込み → Größe", b"iTXt", id="unicode"),
        pytest.param("x" * 100_000, b"tEXt", id="long"),
    ],
)
def test_text_is_read_back(value: str, name: bytes) -> None:
    """Latin-1 goes to tEXt, other text to iTXt, and Pillow reads both back."""
    text = {"Layer": value, "Software": "featviz"}
    png = encoded(BLACK, text=text)
    assert opened(png).info == text
    names = [c.name for c in chunks(png) if c.content.startswith(b"Layer\0")]
    assert names == [name]


@pytest.fixture(params=[1, 3])
def depth(request: pytest.FixtureRequest) -> int:
    """Bytes of a pixel."""
    return int(request.param)


@pytest.fixture
def piece(depth: int) -> np.ndarray:
    """Nine rows: noise, of which the second row is repeated twice, two that rise
    evenly, two of zeros."""
    width = 9 * depth
    noise = np.random.default_rng(4).integers(0, 256, (3, width), dtype=np.uint8)
    ramp = np.arange(9, dtype=np.uint8).repeat(depth)
    zeros = np.zeros(width, np.uint8)
    return np.stack(
        [noise[0], noise[1], noise[1], noise[1], noise[2], ramp, 2 * ramp, zeros, zeros]
    )


@pytest.fixture(params=["black", "its first row", "its second row"])
def above(request: pytest.FixtureRequest, piece: np.ndarray) -> np.ndarray:
    """The row above a piece."""
    rows = {
        "black": np.zeros_like(piece[0]),
        "its first row": piece[0].copy(),
        "its second row": piece[1].copy(),
    }
    return rows[request.param]


def filtered(piece: np.ndarray, above: np.ndarray, depth: int) -> np.ndarray:
    """A piece as it is compressed; the row above the next one is its last."""
    rows = np.empty((len(piece), 1 + piece.shape[1]), np.uint8)
    next_above = above.copy()
    loops.filter_rows(piece, next_above, depth, rows)
    assert_array_equal(next_above, piece[-1])
    return rows


def test_rows_are_differences_from_above_or_before(
    piece: np.ndarray,
    above: np.ndarray,
    depth: int,
) -> None:
    """Filter 1 (sub) subtracts the pixel before, filter 2 (up) the row above."""
    rows = filtered(piece, above, depth)
    before = np.pad(piece, ((0, 0), (depth, 0)))[:, :-depth]
    differences = {
        1: piece - before,
        2: piece - np.vstack([above, piece[:-1]]),
    }
    for number, row in enumerate(rows):
        assert_array_equal(row[1:], differences[int(row[0])][number])


def test_rows_take_the_filter_that_leaves_less(
    piece: np.ndarray,
    above: np.ndarray,
    depth: int,
) -> None:
    """Rows equal to the one above are zeros behind filter 2 (up), rows that rise evenly
    take filter 1 (sub)."""
    filters = filtered(piece, above, depth)[:, 0].tolist()
    assert filters[2:4] == [2, 2]
    assert filters[5:] == [1, 1, 1, 2]
    if np.array_equal(above, piece[0]):
        assert filters[0] == 2
