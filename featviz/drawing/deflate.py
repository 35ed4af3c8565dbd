"""Deflate for filtered rows of pictures: single bytes, and runs of zeros.

In filtered feature maps no strings of bytes repeat but zeros. So this looks for no
other matches: it codes bytes by how often they occur (Huffman), and runs of zeros by
their lengths. Measured on the pictures of resnet50 it takes half the time of ISA-L's
level 1, and 94 % of its bytes.

The format is RFC 1951's (https://www.rfc-editor.org/rfc/rfc1951), inside that of RFC
1950:

    stream   78 01 | block | block | ... | empty last block | Adler-32 of all bytes
    block    head: 3 bits (0, and 2 for codes of its own), then the length of each
             symbol's code
             symbols, each by its code, without gaps between bytes
             symbol 256, the end

    symbol      0..255    a byte
                256       the end of the block
                257..285  a match: copy 3 to 258 bytes; behind it come some extra bits,
                          which tell lengths of one symbol apart, and one bit for the
                          distance, which is always 1: the byte before, a zero, again

    0 0 0 0 0 0 0 0 7 0 0 0 ...   becomes   0 | match of 7 | 7 | 0 | 0 | 0 ...

Bits fill a byte from its lowest on, and codes are written with their first bit first,
so tables have codes mirrored:

    a: 10, b: 0, c: 111           the bytes of "abc", with bit 7 on the left:
                                  . . 1 1 1 0 0 1
                                      c c c b a a      and the next code goes on there

Rows are read in units of eight bytes: a run of zeros begins where a whole unit is zero,
and ends with the last such unit.

Three loops do the work, compiled by numba. For each block:

    count_symbols  how often does each symbol occur?
    find_codes     which code has each symbol? Frequent ones get short codes; none is
                   longer than _MAX_BITS, so that four codes fit the 57 bits that one
                   store can take
    write_block    write the symbols' codes

In all tables an entry is a code above its length in bits, one number of 64 bits:

    ........ .....ccc cccccccc cccccccc llllllll      c: the code, mirrored
                                                      l: its bits, 63 at most
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple, no_type_check

import numpy as np
from isal import isal_zlib

from featviz.drawing.loops import compiled, inlined
from featviz.records import Bytes

_SYMBOLS = 286
_END = 256
"""The symbol that ends a block."""
_SHORTEST = 3
_LONGEST = 258
"""Bytes of the shortest and of the longest match."""
_MAX_BITS = 14
"""The longest code: four of them fit the 57 bits that are free behind an unfinished byte.
RFC 1951 would allow 15."""
_SAMPLE = 64
"""Units in a row that are counted as one sample of a long block."""
_EVERY = 16
"""In a long block at least one of so many samples is counted."""
_COUNTED = 4096
"""Units of a block, about, that are counted at least; of a short block all are."""
_BLOCK = 2**20
"""Bytes that share their codes at most."""
_HEAD = (
    2 << 1 | (_SYMBOLS - 257) << 3 | 0 << 8 | (19 - 4) << 13 | int("100" * 16, 2) << 26
)
"""The head of a block that is not the last one (RFC 1951, 3.2.7): its codes' lengths,
and that of one distance, take four bits each, and nothing is repeated. From the lowest
bit on: not the last; own codes; 286 symbols; 1 distance; 19 lengths of codes for
lengths, of which the first three, for repetitions, are 0 and the others 4."""
_HALF_HEAD = (17 + 19 * 3) // 2
"""Half of its bits, as many as one store can take."""
_LAST = 0b011
"""The first bits of ten that are a last block without data, by RFC 1951's own codes."""

# numba makes a float of an int64 and an uint64, so numbers among units are uint64, too
_U = np.uint64
_BYTE = _U(255)
"""The mask of a unit's lowest byte."""
_LENGTH = _U(63)
"""The mask of an entry's bits that hold the length of its code."""
_CODE = _U(8)
"""How many bits above the length the code of an entry stands."""


def _mirrored(bits: int) -> np.ndarray:
    """Each number of `bits` bits with its first bit last, uint64 [2 ** bits]."""
    numbers = np.arange(1 << bits, dtype=np.uint64)
    mirrored = np.zeros(1 << bits, np.uint64)
    for bit in range(bits):
        mirrored |= (numbers >> _U(bit) & _U(1)) << _U(bits - 1 - bit)
    return mirrored


_MIRRORED = _mirrored(_MAX_BITS)
_LENGTHS = _mirrored(4) << _CODE | _U(4)
"""Entries of the lengths of codes, which are themselves written by codes of four bits:
uint64 [16]."""
_UNSEEN = np.arange(_SYMBOLS) | 1 << 9
"""A key (see `find_codes`) of each symbol with a weight of 1, where an occurrence weighs
16: what was not seen in the samples may occur."""
_HEADS = np.array([_HEAD & (1 << _HALF_HEAD) - 1, _HEAD >> _HALF_HEAD], np.uint64)
_HEADS = _HEADS << _CODE | _U(_HALF_HEAD)
"""Entries of a block's head, uint64 [2]."""


def _match_tables() -> tuple[np.ndarray, np.ndarray]:
    """What RFC 1951, 3.2.5, says of matches, by their length 0..258 (below 3 are none),
    uint64 [259] each: the symbol, and the entry of the bits behind the symbol's code."""
    symbols = np.zeros(_LONGEST + 1, np.uint64)
    tails = np.zeros(_LONGEST + 1, np.uint64)
    length = _SHORTEST
    # Symbols 257 to 264 stand for one length each, the next four for two lengths, told
    # apart by one extra bit, the next four for four, and so on.
    for symbol in range(257, _SYMBOLS - 1):
        bits = max(0, (symbol - 261) // 4)
        for extra in range(1 << bits):
            if length <= _LONGEST:
                symbols[length] = symbol
                # the one bit of the distance, which is 0, stands behind
                tails[length] = _U(extra) << _CODE | _U(bits + 1)
                length += 1
    # the longest has a symbol of its own, though 284 could tell it, too
    symbols[_LONGEST] = _SYMBOLS - 1
    tails[_LONGEST] = 1
    return symbols, tails


_MATCH_SYMBOLS, _MATCH_TAILS = _match_tables()


class _Deflated(NamedTuple):
    """What a block became."""

    data: bytes
    """Its whole bytes."""
    bits: int = 0
    """Bits of an unfinished byte, with which the next block goes on; before the first
    block, those of the stream's head."""
    length: int = 0
    """How many bits these are."""


def deflated(pieces: Iterable[Bytes], size: int) -> Iterator[list[bytes]]:
    """Compress a picture's rows.

    Args:
        pieces: uint8 [n]; the memory of each begins at a multiple of eight bytes.
        size: bytes of all pieces together; behind these the stream ends.

    Yields:
        What each piece adds to a zlib stream, in parts.
    """
    chunks = []
    checksum = 1
    # bytes 78 01: deflate, a window of 32 KiB, the fastest of levels
    last = _Deflated(b"", bits=0x0178, length=16)
    out = np.empty(2 * min(size, _BLOCK) + 512, np.uint8)
    for data in pieces:
        size -= len(data)
        checksum = isal_zlib.adler32(data.data, checksum)
        for start in range(0, len(data), _BLOCK):
            block = data[start : start + _BLOCK]
            step = max(1, min(_EVERY, len(block) // 8 // _COUNTED))
            before = last
            last = _deflated_block(block, step, before, out)
            if step > 1 and len(last.data) >= len(block):
                # the samples are unlike the rest: it grew, so count all
                last = _deflated_block(block, 1, before, out)
            chunks.append(last.data)
        if not size:
            end = last.bits | _LAST << last.length
            chunks.append(end.to_bytes((last.length + 17) // 8, "little"))
            chunks.append(checksum.to_bytes(4, "big"))
        yield chunks
        chunks = []


def _deflated_block(
    block: Bytes, step: int, before: _Deflated, out: Bytes
) -> _Deflated:
    """Compress bytes that share their codes.

    Args:
        block: uint8 [n], at a multiple of eight bytes.
        step: one of `step` samples of the block is counted; 1 counts all.
        before: the block before, whose unfinished byte is completed.
        out: uint8 [2 n + 512 or more], to be written over.
    """
    rest_at = len(block) // 8 * 8
    units = block[:rest_at].view(np.uint64)
    rest = block[rest_at:]
    counts = np.zeros((4, _SYMBOLS), np.int64)
    count_symbols(units, rest, step, counts)
    # numpy sorts faster than a loop of ours, and is not compiled on a fresh machine
    keys = counts.sum(0) << 13 | _UNSEEN
    keys[_END] = 1 << 9 | _END
    keys.sort()
    codes = np.empty(_SYMBOLS, np.uint64)
    find_codes(keys, np.zeros((2, 2 * _SYMBOLS), np.int64), _MIRRORED, codes)
    carried = np.array([before.bits, before.length], np.uint64)
    size = write_block(units, rest, codes, carried, out)
    bits, length = carried.tolist()
    return _Deflated(out[:size].tobytes(), bits, length)


@inlined
@no_type_check
def _next_match(run):
    """Bytes of the next match in a run of zeros; what is left may not be shorter than a
    match."""
    if run <= _LONGEST:
        return run
    return min(_LONGEST, run - _SHORTEST)


@partial(compiled, "void(uint64[::1],uint8[::1],int64,int64[:,::1])")
@no_type_check
def count_symbols(units, rest, step, counts):
    """Add how often each symbol occurs.

    A unit that is zero begins a run: its first byte is a symbol, and the bytes behind
    it are matches.

    Args:
        units: uint64 [n], the bytes of the block, eight by eight.
        rest: uint8 [0..7], its last bytes.
        step: one of `step` samples is counted.
        counts: int64 [4, symbols], to be added to. Four rows, so that equal neighbours
            add to different numbers, and none waits for the one before; their sum
            counts.
    """
    for start in range(0, units.size, _SAMPLE * step):
        # a run that goes on behind the sample is cut: counts are estimates then
        at = start
        end = min(start + _SAMPLE, units.size)
        while at < end:
            unit = units[at]
            at += 1
            if unit == 0:
                run = 7  # without the first zero
                while at < end and units[at] == 0:
                    run += 8
                    at += 1
                counts[0, 0] += 1
                while run > 0:
                    length = _next_match(run)
                    counts[0, _MATCH_SYMBOLS[length]] += 1
                    run -= length
            else:
                for row in range(4):
                    counts[row, unit & _BYTE] += 1
                    counts[row, unit >> _U(32) & _BYTE] += 1
                    unit >>= _U(8)
    for i in range(rest.size):
        counts[0, rest[i]] += 1


@inlined
@no_type_check
def _measure_depths(keys, weights, parents):
    """Build Huffman's tree, and measure how far below its top each symbol lies.

    The two lightest nodes get a node above them, with the sum of their weights, until
    one is left. Symbols come sorted, and new nodes come heavier and heavier, so the
    lightest is the first of one of two queues (as van Leeuwen saw in 1976):

        weight   1   1   2   4   7 | 2   4   8   15      symbols | new nodes
        parent   5   5   6   7   8 | 6   7   8
        depth    4   4   3   2   1 | 3   2   1   0

    Args:
        keys: as of `find_codes`.
        weights: zeros [2 · symbols]; afterwards the depth of each node, the symbols
            first, in the order of their keys.
        parents: zeros [2 · symbols], for the number of the node above each.
    """
    size = keys.size
    for symbol in range(size):
        weights[symbol] = keys[symbol] >> 9
    leaf = 0  # the first of the symbols, and of the new nodes, that has no parent
    node = size
    for child in range(2 * size - 2):  # two by two, the lightest first
        parent = size + child // 2
        if leaf < size and (node == parent or weights[leaf] <= weights[node]):
            lightest = leaf
            leaf += 1
        else:
            lightest = node
            node += 1
        weights[parent] += weights[lightest]
        parents[lightest] = parent
    depths = weights
    depths[2 * size - 2] = 0
    for child in range(2 * size - 3, -1, -1):
        depths[child] = depths[parents[child]] + 1


@inlined
@no_type_check
def _count_lengths(depths, size, totals):
    """Count how many codes have each length, none longer than _MAX_BITS.

    A code of n bits takes 2 ** (_MAX_BITS - n) of all numbers of _MAX_BITS bits. Codes
    as long as their depths take all of them, so where long ones are cut, they take more
    numbers than there are. Then one code that is shorter than it may be becomes two of
    one bit more, one of them for a symbol that had the longest:

        lengths  1 2 3 3      3 becomes 2:   1 2 2 2     takes 5/4 of all numbers
                              1 becomes 2:   2 2 2 2     takes 4/4

    Args:
        depths: int64 [size or more], of the symbols.
        totals: int64 [_MAX_BITS + 1 or more], to be filled.
    """
    free = 1 << _MAX_BITS
    for bits in range(_MAX_BITS + 1):
        totals[bits] = 0
    for symbol in range(size):
        bits = min(depths[symbol], _MAX_BITS)
        totals[bits] += 1
        free -= 1 << (_MAX_BITS - bits)
    while free < 0:
        bits = _MAX_BITS - 1
        while totals[bits] == 0:
            bits -= 1
        totals[bits] -= 1
        totals[bits + 1] += 2
        totals[_MAX_BITS] -= 1
        free += 1


@partial(compiled, "void(int64[::1],int64[:,::1],uint64[::1],uint64[::1])")
@no_type_check
def find_codes(keys, nodes, mirrored, entries):
    """Find a code for each symbol: short ones for what occurs often.

    Huffman's tree says how long each code is; codes are then numbered by their lengths,
    and of equal ones by their symbols, as RFC 1951, 3.2.2, says, so that lengths are
    all that a reader must know.

    Args:
        keys: int64 [symbols], of each symbol 512 times its weight (how often it
            occurs), and its number; sorted.
        nodes: zeros int64 [2, 2 · symbols], memory to work with.
        mirrored: uint64 [2 ** _MAX_BITS], each number with its first bit last.
        entries: uint64 [symbols], to be filled.
    """
    size = keys.size
    _measure_depths(keys, nodes[0], nodes[1])
    totals = nodes[1]
    _count_lengths(nodes[0], size, totals)
    lengths = nodes[0, size:]
    bits = _MAX_BITS
    for position in range(size):  # the rarest first, which get the longest codes
        while totals[bits] == 0:
            bits -= 1
        totals[bits] -= 1
        lengths[keys[position] & 511] = bits
    code = 0
    for bits in range(1, _MAX_BITS + 1):
        for symbol in range(size):
            if lengths[symbol] == bits:
                # mirrored as a number of _MAX_BITS bits, a code's first bit is lowest
                entries[symbol] = mirrored[code] << _CODE | _U(bits)
                code += 1 << (_MAX_BITS - bits)


@inlined
@no_type_check
def _write_bits(out, at, carry, carry_bits, code, bits):
    """Write a code of at most 57 bits behind the bits of an unfinished byte.

    Args:
        out: uint8, of which eight bytes are written; the next code writes over those
            that it fills.
        at: where the unfinished byte is.
        carry, carry_bits: its bits, and how many they are.
        code, bits: the code, its first bit lowest, and its length.

    Returns:
        `at`, `carry` and `carry_bits` behind the code.
    """
    carry |= code << carry_bits
    for byte in range(8):  # LLVM makes one store of these
        out[at + _U(byte)] = carry >> _U(8 * byte) & _BYTE
    carry_bits += bits
    return (
        at + (carry_bits >> _U(3)),
        carry >> (carry_bits & _U(56)),
        carry_bits & _U(7),
    )


@inlined
@no_type_check
def _write_entry(out, at, carry, carry_bits, entry):
    """Write the code of one entry of a table; other arguments and the result are those
    of `_write_bits`."""
    code = entry >> _CODE
    return _write_bits(out, at, carry, carry_bits, code, entry & _LENGTH)


@inlined
@no_type_check
def _joined_codes(entries, unit):
    """The codes of a unit's four lowest bytes, one behind the other, and how many bits
    these take together."""
    a = entries[unit & _BYTE]
    b = entries[unit >> _U(8) & _BYTE]
    c = entries[unit >> _U(16) & _BYTE]
    d = entries[unit >> _U(24) & _BYTE]
    first = a >> _CODE | b >> _CODE << (a & _LENGTH)
    second = c >> _CODE | d >> _CODE << (c & _LENGTH)
    # lengths stand in the low bits, and the sum of four fits there
    return first | second << (a + b & _LENGTH), a + b + c + d & _LENGTH


@inlined
@no_type_check
def _write_zeros(out, at, carry, carry_bits, entries, run):
    """Write a zero and the matches of `run` more zeros; the zero goes out with the first
    match. Other arguments and the result are those of `_write_bits`."""
    code = entries[0] >> _CODE
    bits = entries[0] & _LENGTH
    while run > 0:
        length = _next_match(run)
        entry = entries[_MATCH_SYMBOLS[length]]
        code |= entry >> _CODE << bits
        bits += entry & _LENGTH
        tail = _MATCH_TAILS[length]
        code |= tail >> _CODE << bits
        bits += tail & _LENGTH
        at, carry, carry_bits = _write_bits(out, at, carry, carry_bits, code, bits)
        run -= length
        code = _U(0)
        bits = _U(0)
    return at, carry, carry_bits


@partial(compiled, "uint64(uint64[::1],uint8[::1],uint64[::1],uint64[::1],uint8[::1])")
@no_type_check
def write_block(units, rest, entries, carried, out):
    """Write a block: its head, which lists the length of each code, its bytes, and its
    end.

    Bytes go out by fours, whose codes are joined before they are stored.

    Args:
        units: uint64 [n], the bytes of the block, eight by eight.
        rest: uint8 [0..7], its last bytes.
        entries: uint64 [symbols], codes of symbols above their lengths.
        carried: uint64 [2], the bits of an unfinished byte and how many they are:
            before and, afterwards, behind the block. Before the first block they are
            the stream's head, of two bytes.
        out: uint8, twice the bytes of the block and 256 more, to be written over.

    Returns:
        How many bytes of `out` are whole.
    """
    at = _U(0)
    carry = carried[0]
    carry_bits = carried[1]
    # the head: its first bits, the lengths of the symbols' codes, and that of the one
    # distance's code; in one loop, since each call is pasted in and costs compilation
    for i in range(_HEADS.size + _SYMBOLS + 1):
        if i < _HEADS.size:
            entry = _HEADS[i]
        elif i < _HEADS.size + _SYMBOLS:
            entry = _LENGTHS[entries[i - _HEADS.size] & _LENGTH]
        else:
            entry = _LENGTHS[1]
        at, carry, carry_bits = _write_entry(out, at, carry, carry_bits, entry)
    number = _U(0)
    total = _U(units.size)
    while number < total:
        unit = units[number]
        number += _U(1)
        if unit == 0:
            run = 7  # without the first zero
            while number < total and units[number] == 0:
                run += 8
                number += _U(1)
            at, carry, carry_bits = _write_zeros(
                out, at, carry, carry_bits, entries, run
            )
        else:
            for _ in range(2):
                code, bits = _joined_codes(entries, unit)
                at, carry, carry_bits = _write_bits(
                    out, at, carry, carry_bits, code, bits
                )
                unit >>= _U(32)
    # the bytes that fill no unit, and the end
    for i in range(rest.size + 1):
        entry = entries[rest[i]] if i < rest.size else entries[_END]
        at, carry, carry_bits = _write_entry(out, at, carry, carry_bits, entry)
    carried[0] = carry
    carried[1] = carry_bits
    return at
