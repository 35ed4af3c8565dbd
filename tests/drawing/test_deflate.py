"""The compiled deflate, against zlib: what it writes comes back, and takes no more than
it may."""

from __future__ import annotations

import heapq
import zlib
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isal import isal_zlib

from featviz.drawing import deflate

SPARSE = 4096 * 8 * 16
"""Bytes of a block of which every sixteenth sample is counted."""


def deflated(data: np.ndarray, cuts: int = 1) -> bytes:
    """A zlib stream of bytes that come in pieces; they must come back."""
    pieces = (piece.copy() for piece in np.array_split(data, cuts))
    stream = b"".join(chain.from_iterable(deflate.compress(pieces, len(data))))
    assert zlib.decompress(stream) == data.tobytes()
    return stream


@pytest.mark.medium
@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(0, 5000),
    symbols=st.integers(1, 256),
    zeros=st.floats(0, 1),
    runs=st.sampled_from([0, 5]),
    cuts=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_is_deflated_is_read_back(
    size: int,
    symbols: int,
    zeros: float,
    runs: int,
    cuts: int,
    seed: int,
) -> None:
    """Any number of bytes with any number of values, zeros, and runs of zeros of any
    length and at any place, in any pieces."""
    chance = np.random.default_rng(seed)
    data = chance.integers(0, symbols, size).astype(np.uint8)
    data[chance.random(size) < zeros] = 0
    for start in chance.integers(0, size + 1, runs):
        data[start : start + chance.integers(0, 1200)] = 0
    deflated(data, cuts)


@pytest.mark.parametrize("symbols", [1, 2, 20, 45])
def test_codes_are_never_longer_than_four_of_them_fit(symbols: int) -> None:
    """Counts that grow as Fibonacci's numbers give the longest of Huffman's codes: they
    are cut to 14 bits, and the bytes come back."""
    counts = [1, 1]
    while len(counts) < symbols and sum(counts) < 2_000_000:
        counts.append(counts[-1] + counts[-2])
    values = np.arange(1, len(counts) + 1, dtype=np.uint8)
    data = np.random.default_rng(0).permutation(np.repeat(values, counts))
    stream = deflated(data)
    assert len(stream) <= 1.02 * len(isal_zlib.compress(data, 1)) + 200


def huffman(data: np.ndarray) -> float:
    """Bytes that Huffman's method gives these at best, without the lengths of its
    codes."""
    _, counts = np.unique(data, return_counts=True)
    heap = counts.tolist()
    heapq.heapify(heap)
    bits = 0
    while len(heap) > 1:
        joined = heapq.heappop(heap) + heapq.heappop(heap)
        bits += joined
        heapq.heappush(heap, joined)
    return bits / 8


def filtered_noise(size: int, spread: float) -> np.ndarray:
    """Bytes around zero, as filters leave them."""
    values = np.random.default_rng(0).normal(0, spread, size)
    return np.round(values).astype(np.int64).astype(np.uint8)


@pytest.mark.parametrize("size", [30_000, SPARSE])
@pytest.mark.parametrize("spread", [0.3, 10.0])
def test_noise_takes_no_more_than_its_best_code(spread: float, size: int) -> None:
    """The head of a block takes 143 bytes, and what samples do not see less than a
    hundredth."""
    data = filtered_noise(size, spread)
    stream = deflated(data)
    best = huffman(data)
    assert len(stream) <= 1.01 * best + 175
    # where zeros stand together runs are shorter
    assert spread < 1 or len(stream) > best


def test_a_block_that_is_unlike_its_samples_is_counted_whole() -> None:
    """Zeros wherever a long block is counted, and noise of the rest's bytes elsewhere."""
    data = np.random.default_rng(0).integers(1, 256, SPARSE, dtype=np.uint8)
    samples = data.reshape(-1, 64 * 8)
    samples[:: len(samples) // 64] = 0
    assert len(deflated(data)) < data.size
