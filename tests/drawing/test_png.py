"""The PNG encoder, read back by Pillow and chunk by chunk."""

from __future__ import annotations

import io

import numpy as np
import pytest
from drawn_maps import chunks
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from featviz.drawing import loops
from featviz.drawing.picture import write_png


def encoded(
    pixels: np.ndarray,
    cuts: int = 1,
    colors: bytes | None = None,
    text: dict[str, str] | None = None,
) -> bytes:
    """A PNG of pixels [H, W] or [H, W, 3] that arrive in `cuts` pieces."""
    height, width = pixels.shape[:2]
    rows = pixels.reshape(height, -1)
    file = io.BytesIO()
    pieces = [piece for piece in np.array_split(rows, cuts) if len(piece)]
    write_png(file, (height, width), iter(pieces), colors=colors, text=text)
    return file.getvalue()


def opened(data: bytes) -> Image.Image:
    """The picture, decoded; Pillow checks the checksums."""
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


@settings(max_examples=80, deadline=None)
@given(
    st.integers(1, 60),
    st.integers(1, 60),
    st.sampled_from([1, 3]),
    st.integers(1, 6),
    st.integers(0, 2**32 - 1),
)
def test_pixels_come_back_exactly(
    height: int, width: int, channels: int, cuts: int, seed: int
) -> None:
    """Grey and RGB pictures of any size, in any number of pieces, decode to the same
    pixels."""
    shape = (height, width) if channels == 1 else (height, width, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    image = opened(encoded(pixels, cuts))
    assert image.mode == ("L" if channels == 1 else "RGB")
    assert np.array_equal(np.asarray(image), pixels)


def test_chunks_are_in_order_and_whole() -> None:
    """Header first, then text and palette, data together, end last; every checksum is
    right."""
    pixels = np.zeros((4, 4), np.uint8)
    kinds = [
        k
        for k, _ in chunks(
            encoded(pixels, 2, colors=bytes(768), text={"Layer": "conv"})
        )
    ]
    data = [kind for kind in kinds if kind == b"IDAT"]
    assert kinds == [b"IHDR", b"tEXt", b"PLTE", *data, b"IEND"]
    assert data


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("layer1.0.conv1 (Conv2d)", b"tEXt"),
        ("café ±3 µ", b"tEXt"),
        ("層1.畳み込み → Größe", b"iTXt"),
        ("x" * 100_000, b"tEXt"),
    ],
    ids=["ascii", "latin1", "unicode", "long"],
)
def test_text_is_read_back(value: str, kind: bytes) -> None:
    """Latin-1 goes to tEXt, other text to iTXt, and Pillow reads both back."""
    data = encoded(
        np.zeros((2, 2), np.uint8), text={"Layer": value, "Software": "featviz"}
    )
    assert opened(data).info == {"Layer": value, "Software": "featviz"}
    assert (
        next(k for k, content in chunks(data) if content.startswith(b"Layer\0")) == kind
    )


@pytest.mark.parametrize("depth", [1, 3])
def test_rows_take_the_filter_that_leaves_less(depth: int) -> None:
    """Rows equal to the one above are zeros behind filter 2 (up), rows that rise evenly
    take filter 1 (sub); the row above the first is black."""
    rng = np.random.default_rng(4)
    noise = rng.integers(0, 256, (3, 9 * depth), dtype=np.uint8).repeat(
        [1, 3, 1], axis=0
    )
    ramp = np.arange(9, dtype=np.uint8).repeat(depth)[None] * np.uint8([[1], [2]])
    piece = np.concatenate([noise, ramp, np.zeros((2, 9 * depth), np.uint8)])
    for above in (np.zeros(9 * depth, np.uint8), piece[0].copy(), piece[1].copy()):
        before = above.copy()
        rows = np.empty((9, 1 + 9 * depth), np.uint8)
        loops.filter_rows(piece, above, depth, rows)
        assert np.array_equal(above, piece[-1])
        up = piece - np.vstack([before, piece[:-1]])
        sub = piece - np.pad(piece, ((0, 0), (depth, 0)))[:, :-depth]
        assert set(rows[:, 0].tolist()) == {1, 2}
        assert np.array_equal(rows[:, 1:], np.where(rows[:, :1] == 1, sub, up))
        assert rows[2:4, 0].tolist() == [2, 2]
        assert rows[5:, 0].tolist() == [1, 1, 1, 2]
        assert rows[0, 0] == 2 or not np.array_equal(before, piece[0])
