"""Deflate for filtered rows of pictures: single bytes, and runs of zeros.

In filtered feature maps, hardly any string of bytes repeats except zeros. So this encoder
looks for no other matches: it codes bytes by how often they occur (Huffman), and runs of
zeros by their lengths. On the pictures of resnet50, it takes half of the time of ISA-L's
level 1, and writes 94 % of its bytes.

The format is RFC 1951's (https://www.rfc-editor.org/rfc/rfc1951), inside that of RFC
1950:

    stream   78 01 | block | block | ... | empty last block | Adler-32 of all bytes
    block    head: 3 bits (0, and 2 for codes of its own), then the length of each
             symbol's code
             the code of each symbol, without gaps between bytes
             symbol 256, the end

    symbol      0..255    a byte
                256       the end of the block
                257..285  a match: copy 3 to 258 bytes. Extra bits follow, which tell
                          the lengths of one symbol apart; then one bit for the
                          distance, which is always 1: the byte before, a zero, again

    0 0 0 0 0 0 0 0 7 0 0 0 ...   becomes   0 | match of 7 | 7 | 0 | 0 | 0 ...

A byte is filled from its lowest bit on, and a code is written with its first bit first,
so tables hold mirrored codes:

    a: 10, b: 0, c: 111           the bytes of "abc", with bit 7 on the left:
                                  . . 1 1 1 0 0 1
                                      c c c b a a      the next code fills the dots

Rows are read in units of eight bytes. A run of zeros consists of whole units that are
zero.

Three loops do the work, compiled by numba. For each block:

    count_symbols  how often does each symbol occur?
    find_codes     which code has each symbol? Frequent symbols get short codes; no code
                   is longer than _MAX_BITS, so that four codes fit the 57 bits that are
                   stored at a time
    write_block    write the symbols' codes

In all tables, an entry is one number of 64 bits, a code above the code's length:

    ........ .....ccc cccccccc cccccccc llllllll      c: the code, mirrored
                                                      l: its length in bits, at most 63
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
"""Bits of a code at most. Four codes fit the 57 bits that are free after an unfinished
byte. RFC 1951 allows 15 bits."""
_SAMPLE = 64
"""Units in one sample of a long block."""
_EVERY = 16
"""In a long block, at least one of so many samples is counted."""
_COUNTED = 4096
"""About how many units of a block are counted at least. A block with fewer is counted
wholly."""
_BLOCK = 2**20
"""Bytes of a block at most: all bytes of a block have the same codes."""
_HEAD = (
    2 << 1 | (_SYMBOLS - 257) << 3 | 0 << 8 | (19 - 4) << 13 | int("100" * 16, 2) << 26
)
"""The head of a block that is not the last one (RFC 1951, 3.2.7). It says that the
length of each symbol's code, and of the one distance's, is written in four bits. From the
lowest bit on: not the last block; codes of its own; 286 symbols; 1 distance; and the 19
lengths of the codes for lengths: the first three, for repetitions, are 0, the others 4."""
_HALF_HEAD = (17 + 19 * 3) // 2
"""Half of the bits of the head, since at most 57 bits are stored at a time."""
_LAST = 0b011
"""A last block without data, with RFC 1951's fixed codes: ten bits, of which the others
are 0."""

# numba turns an int64 and an uint64 into a float, so all numbers for units are uint64
_U = np.uint64
_BYTE = _U(255)
"""The mask of a unit's lowest byte."""
_LENGTH = _U(63)
"""The mask of the bits of an entry that hold the code's length."""
_CODE = _U(8)
"""The number of the lowest bit of an entry's code."""


def _mirrored(bits: int) -> np.ndarray:
    """All numbers of `bits` bits, each with its bits in reverse order, uint64 [2 **
    bits]."""
    numbers = np.arange(1 << bits, dtype=np.uint64)
    mirrored = np.zeros(1 << bits, np.uint64)
    for bit in range(bits):
        mirrored |= (numbers >> _U(bit) & _U(1)) << _U(bits - 1 - bit)
    return mirrored


_MIRRORED = _mirrored(_MAX_BITS)
_LENGTHS = _mirrored(4) << _CODE | _U(4)
"""Entries with which the lengths 0..15 of codes are written, four bits each: uint64
[16]."""
_UNSEEN = np.arange(_SYMBOLS) | 1 << 9
"""A key (see `find_codes`) with weight 1 for each symbol, so that symbols that are not in
the samples have codes, too. An occurrence weighs 16."""
_HEADS = np.array([_HEAD & (1 << _HALF_HEAD) - 1, _HEAD >> _HALF_HEAD], np.uint64)
_HEADS = _HEADS << _CODE | _U(_HALF_HEAD)
"""A block's head as two entries, uint64 [2]."""


def _match_tables() -> tuple[np.ndarray, np.ndarray]:
    """Tables of matches by RFC 1951, 3.2.5, uint64 [259] each. The index is the length of
    the match, 0..258; there are no matches below 3. The first table has the symbol, the
    second one an entry with the bits that follow the symbol's code."""
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
                # one more bit, 0, for the distance
                tails[length] = _U(extra) << _CODE | _U(bits + 1)
                length += 1
    # the longest match has a symbol of its own, though symbol 284 could encode it
    symbols[_LONGEST] = _SYMBOLS - 1
    tails[_LONGEST] = 1
    return symbols, tails


_MATCH_SYMBOLS, _MATCH_TAILS = _match_tables()


class _Block(NamedTuple):
    """A compressed block."""

    data: bytes
    """The whole bytes."""
    bits: int = 0
    """The bits after the last whole byte, to which the next block is added. Before the
    first block, the stream's head."""
    length: int = 0
    """The number of bits in `bits`."""


def compress(pieces: Iterable[Bytes], size: int) -> Iterator[list[bytes]]:
    """Compress a picture's rows.

    Args:
        pieces: uint8 [n]; the memory of each begins at a multiple of eight bytes.
        size: bytes of all pieces together, after which the stream ends.

    Yields:
        For each piece, the parts of a zlib stream that it becomes.
    """
    chunks = []
    checksum = 1
    # the bytes 78 01: deflate, a window of 32 KiB, the fastest level
    last = _Block(b"", bits=0x0178, length=16)
    out = np.empty(2 * min(size, _BLOCK) + 512, np.uint8)
    for data in pieces:
        size -= len(data)
        checksum = isal_zlib.adler32(data.data, checksum)
        for start in range(0, len(data), _BLOCK):
            block = data[start : start + _BLOCK]
            step = max(1, min(_EVERY, len(block) // 8 // _COUNTED))
            before = last
            last = _compress_block(block, step, before, out)
            if step > 1 and len(last.data) >= len(block):
                # the samples are unlike the rest, and the block grew: count all units
                last = _compress_block(block, 1, before, out)
            chunks.append(last.data)
        if not size:
            end = last.bits | _LAST << last.length
            chunks.append(end.to_bytes((last.length + 17) // 8, "little"))
            chunks.append(checksum.to_bytes(4, "big"))
        yield chunks
        chunks = []


def _compress_block(block: Bytes, step: int, before: _Block, out: Bytes) -> _Block:
    """Compress the bytes of one block.

    Args:
        block: uint8 [n], whose memory begins at a multiple of eight bytes.
        step: one of `step` samples is counted; 1 counts all.
        before: the block before, whose last bits come first.
        out: memory to work with, uint8 [2 n + 512 or more].
    """
    rest_at = len(block) // 8 * 8
    units = block[:rest_at].view(np.uint64)
    rest = block[rest_at:]
    counts = np.zeros((4, _SYMBOLS), np.int64)
    count_symbols(units, rest, step, counts)
    # numpy sorts faster than our own loop would, and needs no compilation
    keys = counts.sum(0) << 13 | _UNSEEN
    keys[_END] = 1 << 9 | _END
    keys.sort()
    codes = np.empty(_SYMBOLS, np.uint64)
    find_codes(keys, np.zeros((2, 2 * _SYMBOLS), np.int64), _MIRRORED, codes)
    carried = np.array([before.bits, before.length], np.uint64)
    size = write_block(units, rest, codes, carried, out)
    bits, length = carried.tolist()
    return _Block(out[:size].tobytes(), bits, length)


@inlined
@no_type_check
def _next_match(run):
    """The length of the next match in a run of zeros. The rest of the run must be long
    enough for another match, or empty."""
    if run <= _LONGEST:
        return run
    return min(_LONGEST, run - _SHORTEST)


@partial(compiled, "void(uint64[::1],uint8[::1],int64,int64[:,::1])")
@no_type_check
def count_symbols(units, rest, step, counts):
    """Count how often each symbol occurs.

    A unit that is zero begins a run. The first byte of the run is the symbol 0; all
    others become matches.

    Args:
        units: uint64 [n], the bytes of the block, eight in each.
        rest: uint8 [0..7], the bytes after the last whole unit.
        step: one of `step` samples is counted.
        counts: int64 [4, symbols], to which the counts are added; the sum of the four rows
            is the count. With four rows, equal neighbours add to different numbers, and
            the processor does not wait.
    """
    for start in range(0, units.size, _SAMPLE * step):
        # a run that is longer than the sample is cut: the counts are estimates then
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

    The two lightest nodes without a parent get a new parent, whose weight is the sum of
    theirs, until one node is left. Symbols come sorted, and new nodes come heavier and
    heavier. So the lightest node is always the first of the symbols or the first of the
    new nodes (van Leeuwen, 1976):

        weight   1   1   2   4   7 | 2   4   8   15      symbols | new nodes
        parent   5   5   6   7   8 | 6   7   8
        depth    4   4   3   2   1 | 3   2   1   0

    Args:
        keys: see `find_codes`.
        weights: zeros [2 · symbols]. Afterwards they are the depths of all nodes: first
            the symbols, in the order of their keys, then the new nodes.
        parents: zeros [2 · symbols]. Afterwards they are the numbers of the parents.
    """
    size = keys.size
    for symbol in range(size):
        weights[symbol] = keys[symbol] >> 9
    leaf = 0  # the first symbol without a parent
    node = size  # the first new node without a parent
    for child in range(2 * size - 2):  # two children for each parent, lightest first
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
    """Count how many codes have each length, so that none is longer than _MAX_BITS.

    A code of n bits takes 2 ** (_MAX_BITS - n) of all numbers of _MAX_BITS bits. Codes
    that are as long as the depths take exactly all numbers. If deep ones are cut to
    _MAX_BITS, the codes take more numbers than there are. Then a code that is shorter than
    _MAX_BITS is replaced by two that are one bit longer; a symbol with a code of _MAX_BITS
    gets the second one. With 2 in place of _MAX_BITS:

        lengths  1 2 3 3      3 becomes 2:   1 2 2 2     takes 5/4 of all numbers
                              1 becomes 2:   2 2 2 2     takes 4/4

    Args:
        depths: int64 [size or more], depths of the symbols.
        size: number of symbols.
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
    """Find a code for each symbol: short codes for frequent symbols.

    Huffman's tree says how long each code is. The codes themselves are assigned in the
    order of their lengths, and for equal lengths in the order of the symbols (RFC 1951,
    3.2.2): so a decoder needs only the lengths.

    Args:
        keys: int64 [symbols], sorted. A key is 512 times the weight of a symbol (how often
            it occurs) plus the symbol.
        nodes: zeros int64 [2, 2 · symbols], memory to work with.
        mirrored: uint64 [2 ** _MAX_BITS], each number with its bits in reverse order.
        entries: uint64 [symbols], to be filled with the codes.
    """
    size = keys.size
    _measure_depths(keys, nodes[0], nodes[1])
    totals = nodes[1]
    _count_lengths(nodes[0], size, totals)
    lengths = nodes[0, size:]
    bits = _MAX_BITS
    for position in range(size):  # rare symbols come first, and get the longest codes
        while totals[bits] == 0:
            bits -= 1
        totals[bits] -= 1
        lengths[keys[position] & 511] = bits
    code = 0
    for bits in range(1, _MAX_BITS + 1):
        for symbol in range(size):
            if lengths[symbol] == bits:
                # `code` is left-aligned in _MAX_BITS bits: mirrored, it begins at bit 0
                entries[symbol] = mirrored[code] << _CODE | _U(bits)
                code += 1 << (_MAX_BITS - bits)


@inlined
@no_type_check
def _write_bits(out, at, carry, carry_bits, code, bits):
    """Write a code of at most 57 bits after the bits of an unfinished byte.

    Args:
        out: uint8. Eight bytes are always written; those that the code does not fill are
            written over by the next code.
        at: index of the unfinished byte in `out`.
        carry, carry_bits: bits of the unfinished byte, and their number.
        code, bits: the code, whose first bit is the lowest, and its length.

    Returns:
        `at`, `carry` and `carry_bits` for the next code.
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
    """Write the code of an entry. See `_write_bits` for the other arguments and the result."""
    code = entry >> _CODE
    return _write_bits(out, at, carry, carry_bits, code, entry & _LENGTH)


@inlined
@no_type_check
def _joined_codes(entries, unit):
    """Join the codes of a unit's four lowest bytes.

    Returns:
        The joined codes, and the number of their bits.
    """
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
    """Write a zero, and matches for `run` more zeros. The zero is joined to the first
    match. See `_write_bits` for the other arguments and the result."""
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
    """Write a block: its head, which lists the length of each code; its bytes; its end.

    The codes of four bytes are joined before they are stored.

    Args:
        units: uint64 [n], the bytes of the block, eight in each.
        rest: uint8 [0..7], the bytes after the last whole unit.
        entries: uint64 [symbols], the entry of each symbol.
        carried: uint64 [2], the bits of an unfinished byte, and their number: those before
            the block (at the first one, the two bytes of the stream's head), and
            afterwards those at its end.
        out: uint8, to be filled; twice the bytes of the block and 256 more.

    Returns:
        How many bytes of `out` are whole.
    """
    at = _U(0)
    carry = carried[0]
    carry_bits = carried[1]
    # The head: its first bits, then the lengths of the symbols' codes and of the one
    # distance's code. One loop, since each call of `_write_entry` takes compilation time.
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
    # the bytes after the last whole unit, and the end of the block
    for i in range(rest.size + 1):
        entry = entries[rest[i]] if i < rest.size else entries[_END]
        at, carry, carry_bits = _write_entry(out, at, carry, carry_bits, entry)
    carried[0] = carry
    carried[1] = carry_bits
    return at
