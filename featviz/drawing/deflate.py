"""Deflate for filtered rows of pictures: single bytes, and runs of zeros.

In filtered feature maps no strings of bytes repeat but zeros. So this looks for no
other matches: it codes bytes by how often they occur (Huffman), and runs of zeros by
their lengths. Measured on the pictures of resnet50 it takes half the time of ISA-L's
level 1, and 94 % of its bytes.

The format is RFC 1951's (https://www.rfc-editor.org/rfc/rfc1951), inside that of RFC
1950:

    stream   78 01 | block | block | ... | empty last block | Adler-32 of all bytes
    block    head: 3 bits (0, and 2 for codes of its own), then the length of each symbol's code
             symbols, each by its code, without gaps between bytes
             symbol 256, the end

    symbol      0..255    a byte
                256       the end of the block
                257..285  a match: copy 3 to 258 bytes; behind it come some extra bits, which tell
                          lengths of one symbol apart, and one bit for the distance,
                          which is always 1: the byte before, a zero, again

    0 0 0 0 0 0 0 0 7 0 0 0 ...   becomes   0 | match of 7 | 7 | 0 | 0 | 0 ...

Bits fill a byte from its lowest on, and codes are written with their first bit first,
so tables have codes mirrored. Rows are read in units of eight bytes: a run of zeros
begins where a whole unit is zero, and ends with the last such unit.

Three loops do the work, compiled by numba. For each block:

    count       how often does each symbol occur?
    find_codes  which code has each symbol? Frequent ones get short codes; none is longer than
                _MAX_BITS, so that four codes fit the 57 bits that one store can take
    put         write the symbols' codes
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple, no_type_check

import numpy as np
from isal import isal_zlib

from featviz.drawing.loops import compiled, part
from featviz.records import Bytes

_SYMBOLS = 286
_END = 256
_SHORTEST = 3
"""Bytes of a match."""
_LONGEST = 258
_MAX_BITS = 14
"""Of a code: four of them fit 57 bits."""
_SAMPLE = 64
"""Units of eight bytes in a row that are counted as one sample of a long block."""
_EVERY = 16
"""Of how many samples of a long block one is counted, at most."""
_DENSE = 4096
"""Blocks of fewer units are counted whole."""
_BLOCK = 2**20
"""Bytes that share their codes at most."""
_HEAD = (
    2 << 1 | (_SYMBOLS - 257) << 3 | 0 << 8 | (19 - 4) << 13 | int("100" * 16, 2) << 26
)
"""The head of a block that is not the last one (RFC 1951, 3.2.7): its codes' lengths,
and that of one distance, take four bits each, and nothing is repeated. From the lowest
bit on: not the last; own codes; 286 symbols; 1 distance; 19 lengths of codes for
lengths, of which the first three, for repetitions, are 0 and the others 4."""
_HEAD_BITS = 17 + 19 * 3
_LAST = 0b011
"""The first bits of ten that are a last block without data, by RFC 1951's own codes."""

_U = np.uint64
_BYTE = _U(255)
"""Of a unit: its lowest byte."""
_LENGTH = _U(63)
"""Of an entry in a table of codes: the code's length in bits. The code itself stands
above."""
_CODE = _U(8)
"""How far above."""


def _mirrored(bits: int) -> np.ndarray:
    """Each number of so many bits with its first bit last, uint64 [2 ** bits]."""
    numbers = np.arange(1 << bits, dtype=np.uint64)
    mirrored = np.zeros(1 << bits, np.uint64)
    for bit in range(bits):
        mirrored |= (numbers >> _U(bit) & _U(1)) << _U(bits - 1 - bit)
    return mirrored


_MIRRORED = _mirrored(_MAX_BITS)
_MIRRORED_LENGTHS = _mirrored(4).astype(np.uint8)
"""The lengths of codes are themselves written by codes of four bits."""
_ONE_DISTANCE = bytes([_MIRRORED_LENGTHS[1]])
"""The length of the one distance's code: a bit."""
_UNSEEN = np.arange(_SYMBOLS) | 1 << 9
"""A key (see `find_codes`) for each symbol that adds one to its count: what was not
seen in the samples may occur."""


class _Matches(NamedTuple):
    """What RFC 1951, 3.2.5, says of matches, by their length 0..258; 0 for those below
    3."""

    symbols: np.ndarray
    extra: np.ndarray
    """The extra bits behind the symbol."""
    extra_bits: np.ndarray
    """How many they are, with the one of the distance, which is 0."""


def _match_table() -> _Matches:
    symbols, extra, extra_bits = np.zeros((3, _LONGEST + 1), np.uint64)
    length = _SHORTEST
    for symbol in range(257, _SYMBOLS - 1):
        bits = max(0, (symbol - 261) // 4)
        lengths = slice(length, min(length + (1 << bits), _LONGEST))
        symbols[lengths] = symbol
        extra[lengths] = np.arange(lengths.stop - lengths.start)
        extra_bits[lengths] = bits + 1
        length += 1 << bits
    symbols[_LONGEST] = _SYMBOLS - 1
    extra_bits[_LONGEST] = 1
    return _Matches(symbols, extra, extra_bits)


_MATCHES = _match_table()


def deflated(pieces: Iterable[Bytes], size: int) -> Iterator[bytes]:
    """Compress a picture's rows.

    Args:
        pieces: uint8 [n]; the memory of each begins at a multiple of eight bytes.
        size: bytes of all pieces.

    Yields:
        The parts of a zlib stream, one for each piece.
    """
    chunks = [b"\x78\x01"]  # deflate, a window of 32 KiB, the fastest of levels
    checksum = 1
    carry = 0  # the bits of an unfinished byte
    carry_bits = 0
    out = np.empty(0, np.uint8)
    for data in pieces:
        size -= len(data)
        checksum = isal_zlib.adler32(data.data, checksum)
        capacity = 2 * min(len(data), _BLOCK) + 256
        if len(out) < capacity:
            out = np.empty(capacity, np.uint8)
        for start in range(0, len(data), _BLOCK):
            block = data[start : start + _BLOCK]
            whole = len(block) // 8 * 8
            units = block[:whole].view(np.uint64)
            rest = block[whole:]
            step = max(1, min(_EVERY, len(units) // _DENSE))
            while True:
                codes = _codes(units, rest, step)
                end = carry_bits + _HEAD_BITS + 4 * (_SYMBOLS + 1)
                head = (carry | codes.head << carry_bits).to_bytes(
                    end // 8 + 1, "little"
                )
                carried = np.array([head[-1], end % 8], np.uint64)
                written = put(units, rest, codes.symbols, codes.matches, carried, out)
                if step == 1 or written < len(block):
                    break
                step = 1  # the samples are unlike the rest: it grew, so count all
            carry, carry_bits = carried.tolist()
            chunks += [head[:-1], out[:written].tobytes()]
        if not size:
            chunks.append(
                (carry | _LAST << carry_bits).to_bytes((carry_bits + 17) // 8, "little")
            )
            chunks.append(checksum.to_bytes(4, "big"))
        yield b"".join(chunks)
        chunks = []


class _Codes(NamedTuple):
    """The codes of a block, each above its number of bits."""

    symbols: np.ndarray
    """uint64 [symbols]."""
    matches: np.ndarray
    """By the length of a match: its symbol's code, its extra bits and the distance;
    uint64."""
    head: int
    """The bits of the block's head, which lists the lengths of codes."""


def _codes(units: np.ndarray, rest: Bytes, step: int) -> _Codes:
    """Find codes for a block, of which every `step`-th sample is counted."""
    counts = np.zeros((4, _SYMBOLS), np.int64)
    count(units, rest, step, _MATCHES.symbols, counts)
    keys = counts.sum(0) << 13 | _UNSEEN
    keys[_END] = 1 << 9 | _END
    keys.sort()
    symbols = np.empty(_SYMBOLS, np.uint64)
    find_codes(keys, np.zeros((2, 2 * _SYMBOLS), np.int64), _MIRRORED, symbols)

    of_matches = symbols[_MATCHES.symbols]
    bits = of_matches & _LENGTH
    codes = of_matches >> _CODE | _MATCHES.extra << bits
    matches = codes << _CODE | bits + _MATCHES.extra_bits

    nibbles = _MIRRORED_LENGTHS[symbols & _LENGTH]
    pairs = (nibbles[::2] | nibbles[1::2] << 4).tobytes() + _ONE_DISTANCE
    head = _HEAD | int.from_bytes(pairs, "little") << _HEAD_BITS
    return _Codes(symbols, matches, head)


@part
@no_type_check
def _next_match(run):
    """Bytes of the next match in a run of zeros; what is left may not be shorter than a
    match."""
    if run <= _LONGEST:
        return run
    return _LONGEST if run >= _LONGEST + _SHORTEST else run - _SHORTEST


@partial(compiled, "void(uint64[::1],uint8[::1],int64,uint64[::1],int64[:,::1])")
@no_type_check
def count(units, rest, step, match_symbols, counts):
    """Add how often each symbol occurs.

    Counts [4, symbols] stand in four rows, so that equal neighbours add to different
    numbers, and none waits for the one before. A unit that is zero begins a run: its
    first byte is a symbol, and the bytes behind it are matches.

    Args:
        units: uint64 [n], the bytes of the block, eight by eight.
        rest: its last bytes.
        step: one sample of so many is counted.
        match_symbols: by the length of a match.
    """
    for start in range(0, units.size, _SAMPLE * step):
        at = start
        end = start + _SAMPLE if start + _SAMPLE < units.size else units.size
        while at < end:
            unit = units[at]
            at += 1
            if unit == 0:
                run = 7
                while at < end and units[at] == 0:
                    run += 8
                    at += 1
                counts[0, 0] += 1
                while run > 0:
                    length = _next_match(run)
                    counts[0, match_symbols[length]] += 1
                    run -= length
            else:
                for row in range(4):
                    counts[row, unit & _BYTE] += 1
                    counts[row, unit >> _U(32) & _BYTE] += 1
                    unit >>= _U(8)
    for i in range(rest.size):
        counts[0, rest[i]] += 1


@partial(compiled, "void(int64[::1],int64[:,::1],uint64[::1],uint64[::1])")
@no_type_check
def find_codes(keys, nodes, mirrored, entries):
    """Fill `entries` [symbols] with codes, their first bit lowest, above their lengths.

    Huffman's method: the two lightest nodes get a node above them, with the sum of
    their weights, until one is left; a symbol's code is as long as the way up from it.
    Symbols come sorted, and new nodes come heavier and heavier, so the lightest is the
    first of one of two queues:

        weight   1   1   2   4   7 | 2   4   8   15      symbols | new nodes
        above    5   5   6   7   8 | 6   7   8
        depth    4   4   3   2   1 | 3   2   1   0

    Then codes are cut to _MAX_BITS bits, and numbered by their lengths as RFC 1951,
    3.2.2, says.

    Args:
        keys: of each symbol 512 times how often it occurs, and its number; sorted.
        nodes: zeros [2, 2 · symbols], for the weights of nodes and the node above each.
        mirrored: each number of _MAX_BITS bits with its first bit last.
    """
    size = keys.size
    for symbol in range(size):
        nodes[0, symbol] = keys[symbol] >> 9
    leaf = 0  # the first of the symbols, and of the new nodes, that has none above it
    node = size
    for child in range(2 * size - 2):  # two by two, the lightest first
        parent = size + child // 2
        if leaf < size and (node == parent or nodes[0, leaf] <= nodes[0, node]):
            lightest = leaf
            leaf += 1
        else:
            lightest = node
            node += 1
        nodes[0, parent] += nodes[0, lightest]
        nodes[1, lightest] = parent
    nodes[0, 2 * size - 2] = 0  # from here on depths
    for child in range(2 * size - 3, -1, -1):
        nodes[0, child] = nodes[0, nodes[1, child]] + 1
    # How many codes have each length? A code of n bits takes 2 ** (_MAX_BITS - n) of
    # all numbers, and cutting long codes takes more numbers than there are.
    free = 1 << _MAX_BITS
    totals = nodes[1, :size]
    for bits in range(_MAX_BITS + 1):
        totals[bits] = 0
    for symbol in range(size):
        bits = nodes[0, symbol] if nodes[0, symbol] < _MAX_BITS else _MAX_BITS
        totals[bits] += 1
        free -= 1 << (_MAX_BITS - bits)
    # One code that is shorter than it may be becomes two of one bit more, one of them
    # for a symbol that had the longest: which gives a number back.
    while free < 0:
        bits = _MAX_BITS - 1
        while totals[bits] == 0:
            bits -= 1
        totals[bits] -= 1
        totals[bits + 1] += 2
        totals[_MAX_BITS] -= 1
        free += 1
    bits = _MAX_BITS
    for symbol in range(size):  # the rarest first
        while totals[bits] == 0:
            bits -= 1
        totals[bits] -= 1
        nodes[0, size + (keys[symbol] & 511)] = bits
    code = 0
    for bits in range(1, _MAX_BITS + 1):
        for symbol in range(size):
            if nodes[0, size + symbol] == bits:
                entries[symbol] = mirrored[code] << _CODE | _U(bits)
                code += 1 << (_MAX_BITS - bits)


@part
@no_type_check
def _put(out, at, carry, carry_bits, code, bits):
    """Write a code of at most 57 bits behind the bits of an unfinished byte, as eight
    bytes, of which the next code writes some over."""
    carry |= code << carry_bits
    out[at] = carry & _BYTE  # LLVM makes one store of these
    out[at + _U(1)] = carry >> _U(8) & _BYTE
    out[at + _U(2)] = carry >> _U(16) & _BYTE
    out[at + _U(3)] = carry >> _U(24) & _BYTE
    out[at + _U(4)] = carry >> _U(32) & _BYTE
    out[at + _U(5)] = carry >> _U(40) & _BYTE
    out[at + _U(6)] = carry >> _U(48) & _BYTE
    out[at + _U(7)] = carry >> _U(56) & _BYTE
    carry_bits += bits
    return (
        at + (carry_bits >> _U(3)),
        carry >> (carry_bits & _U(56)),
        carry_bits & _U(7),
    )


@partial(
    compiled,
    "uint64(uint64[::1],uint8[::1],uint64[::1],uint64[::1],uint64[::1],uint8[::1])",
)
@no_type_check
def put(units, rest, entries, matches, carried, out):
    """Write a block's bytes and its end; gives how many bytes of `out` are whole.

    Bytes go out by fours, whose codes are joined before they are stored; a zero and the
    match behind it go out as one.

    Args:
        entries: codes of symbols above their lengths.
        matches: the same of matches, by their length.
        carried: the bits of an unfinished byte and how many they are, before and then
            after.
        out: uint8, twice the bytes of the block and 256 more.
    """
    at = _U(0)
    carry = carried[0]
    carry_bits = carried[1]
    number = _U(0)
    total = _U(units.size)
    while number < total:
        unit = units[number]
        number += _U(1)
        if unit == 0:
            run = 7
            while number < total and units[number] == 0:
                run += 8
                number += _U(1)
            code = entries[0] >> _CODE
            bits = entries[0] & _LENGTH
            while run > 0:
                length = _next_match(run)
                entry = matches[length]
                code |= entry >> _CODE << bits
                bits += entry & _LENGTH
                at, carry, carry_bits = _put(out, at, carry, carry_bits, code, bits)
                run -= length
                code = _U(0)
                bits = _U(0)
        else:
            for _ in range(2):
                a = entries[unit & _BYTE]
                b = entries[unit >> _U(8) & _BYTE]
                c = entries[unit >> _U(16) & _BYTE]
                d = entries[unit >> _U(24) & _BYTE]
                first = a >> _CODE | b >> _CODE << (a & _LENGTH)
                second = c >> _CODE | d >> _CODE << (c & _LENGTH)
                # lengths stand in the low bits, and the sum of four fits there
                code = first | second << (a + b & _LENGTH)
                bits = a + b + c + d & _LENGTH
                at, carry, carry_bits = _put(out, at, carry, carry_bits, code, bits)
                unit >>= _U(32)
    for i in range(rest.size + 1):
        entry = entries[rest[i]] if i < rest.size else entries[_END]
        code = entry >> _CODE
        at, carry, carry_bits = _put(out, at, carry, carry_bits, code, entry & _LENGTH)
    carried[0] = carry
    carried[1] = carry_bits
    return at
