"""Honest files, changed a little: bytes, records of zips, values of JSON, opcodes of pickles.

Each strategy gives a function from bytes to bytes, so that one honest file serves all examples.
"""

from __future__ import annotations

import copy
import io
import json
import pickletools
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

from hostile_harness import MARKUP, TITLE
from hypothesis import strategies as st

Mutation = Callable[[bytes], bytes]

VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 3, 255, 65_536, 2**31, 2**63, -(2**63), 10**30, 10**400),
    *(
        0.5,
        -0.0,
        1e308,
        -1e308,
        "",
        " ",
        "0",
        "a" * 10_000,
        "../../../secret/id_secret",
        "/etc/passwd",
    ),
    *(MARKUP, TITLE, "a\nerror: b", "\ud800", "\0", [], {}, [[]], [None], {"a": None}, [0] * 1000),
]
"""What may stand in JSON in place of something else."""

OPCODES = [op.code.encode("latin-1") for op in pickletools.opcodes]
shares = st.floats(0, 1, exclude_max=True)


@st.composite
def bytes_changed(draw: st.DrawFn) -> Mutation:
    """One to four changes: a bit, a byte, a piece that is cut, doubled, zeroed or cut off."""
    steps = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["flip", "set", "insert", "delete", "double", "zero", "end"]),
                shares,
                st.integers(0, 255),
                st.integers(1, 40),
            ),
            min_size=1,
            max_size=4,
        )
    )
    return lambda data: _stepped(data, steps)


def _stepped(data: bytes, steps: list[tuple[str, float, int, int]]) -> bytes:
    for kind, share, value, length in steps:
        at = int(share * len(data))
        head, piece, tail = data[:at], data[at : at + length], data[at + length :]
        if kind == "flip":
            piece = bytes([piece[0] ^ (1 << value % 8)]) + piece[1:] if piece else piece
        elif kind == "set":
            piece = bytes([value]) + piece[1:]
        elif kind == "insert":
            piece = bytes([value]) * length + piece
        elif kind == "delete":
            piece = b""
        elif kind == "double":
            piece = piece * 2
        elif kind == "zero":
            piece = bytes(len(piece))
        else:
            piece, tail = piece, b""
        data = head + piece + tail
    return data


@st.composite
def json_changed(draw: st.DrawFn) -> Mutation:
    """One to three values replaced, removed, doubled, wrapped, or nested deep."""
    steps = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["put", "put", "put", "drop", "double", "wrap", "nest", "rename"]),
                shares,
                st.sampled_from(VALUES),
            ),
            min_size=1,
            max_size=3,
        )
    )

    def change(data: bytes) -> bytes:
        document = json.loads(data)
        for step in steps:
            _edit(document, *step)
        with_numbers = json.dumps(document)
        return with_numbers.encode()

    return change


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container and key in it, however deep."""
    found: list[tuple[Any, Any]] = []
    left = [value]
    while left:
        holder = left.pop()
        for key in holder.keys() if isinstance(holder, dict) else range(len(holder)):
            found.append((holder, key))
            if isinstance(holder[key], (dict, list)):
                left.append(holder[key])
    return found


def _edit(document: Any, kind: str, share: float, value: Any) -> None:
    places = _places(document)
    if not places:
        return
    holder, key = places[int(share * len(places))]
    if kind == "put":
        holder[key] = copy.deepcopy(value)
    elif kind == "drop":
        del holder[key]
    elif kind == "double" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(holder[key]))
    elif kind == "wrap":
        holder[key] = [holder[key]]
    elif kind == "rename" and isinstance(holder, dict):
        holder[value if isinstance(value, str) else f"{key}x"] = holder.pop(key)
    elif kind == "nest":
        deep: Any = holder[key]
        for _ in range(150):
            deep = [deep]
        holder[key] = deep


@st.composite
def opcodes_changed(draw: st.DrawFn) -> Mutation:
    """One to three opcodes of a pickle removed, doubled, swapped with the next, or replaced."""
    steps = draw(
        st.lists(
            st.tuples(
                st.sampled_from(["drop", "double", "swap", "code", "number"]),
                shares,
                st.sampled_from(OPCODES),
            ),
            min_size=1,
            max_size=3,
        )
    )

    def change(data: bytes) -> bytes:
        for step in steps:
            data = _reordered(data, *step)
        return data

    return change


def _reordered(data: bytes, kind: str, share: float, code: bytes) -> bytes:
    try:
        starts = [at for _, _, at in pickletools.genops(data) if at is not None]
    except ValueError:  # an earlier step has broken it
        return _stepped(data, [("set", share, code[0], 1)])
    ends = [*starts[1:], len(data)]
    parts = [data[a:b] for a, b in zip(starts, ends, strict=True)]
    at = int(share * len(parts))
    if kind == "drop":
        del parts[at]
    elif kind == "double":
        parts.insert(at, parts[at])
    elif kind == "swap":
        parts[at : at + 2] = reversed(parts[at : at + 2])
    elif kind == "code":
        parts[at] = code + parts[at][1:]
    else:
        parts[at] = parts[at][:1] + b"\xff" * (len(parts[at]) - 1)
    return b"".join(parts)


@st.composite
def zip_changed(draw: st.DrawFn) -> Mutation:
    """Records renamed, doubled, dropped, swapped, or changed in their own way."""
    kind = draw(st.sampled_from(["rename", "double", "drop", "swap", "inside", "inside", "inside"]))
    which, other = draw(shares), draw(shares)
    suffix = draw(st.sampled_from(["upper", "x", "../", "/", "\0", "dot"]))
    inner = {
        "json": draw(json_changed()),
        "pickle": draw(opcodes_changed()),
        "bytes": draw(bytes_changed()),
    }
    plain = draw(st.booleans())

    def change(data: bytes) -> bytes:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = [(name, archive.read(name)) for name in archive.namelist()]
        return _packed(_records(records, kind, which, other, suffix, inner, plain))

    return change


def _records(
    records: list[tuple[str, bytes]],
    kind: str,
    which: float,
    other: float,
    suffix: str,
    inner: dict[str, Mutation],
    plain: bool,
) -> list[tuple[str, bytes]]:
    at, to = int(which * len(records)), int(other * len(records))
    name, content = records[at]
    if kind == "rename":
        new = {"upper": name.upper(), "../": f"../{name}", "/": f"/{name}", "dot": f"./{name}"}
        records[at] = (new.get(suffix, name + suffix), content)
    elif kind == "double":
        records.append((name, records[to][1]))
    elif kind == "drop":
        del records[at]
    elif kind == "swap":
        records[at], records[to] = (name, records[to][1]), (records[to][0], content)
    elif name.endswith(".json") and not plain:
        records[at] = (name, inner["json"](content))
    elif name.endswith(".pkl") and not plain:
        records[at] = (name, inner["pickle"](content))
    else:
        records[at] = (name, inner["bytes"](content))
    return records


def _packed(records: list[tuple[str, bytes]]) -> bytes:
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w") as archive:
        warnings.simplefilter("ignore")
        for name, content in records:
            archive.writestr(zipfile.ZipInfo(name), content)
    return file.getvalue()


@st.composite
def header_changed(draw: st.DrawFn) -> Mutation:
    """The JSON at the head of a safetensors file, with its length set right or wrong."""
    inner, wrong = draw(json_changed()), draw(st.sampled_from([0, 0, 0, 1, -1, 2**20, 2**62]))

    def change(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        header = inner(data[8 : 8 + size])
        length = max(0, len(header) + wrong)
        return length.to_bytes(8, "little") + header + data[8 + size :]

    return change


any_zip = st.one_of(zip_changed(), zip_changed(), bytes_changed())
"""Of an archive."""
any_json = st.one_of(json_changed(), json_changed(), bytes_changed())
"""Of a JSON document."""
any_pickle = st.one_of(opcodes_changed(), bytes_changed())
"""Of a bare pickle."""
any_header = st.one_of(header_changed(), bytes_changed())
"""Of safetensors."""
