"""Pickles that ask for more memory, depth or time than their size needs, in both formats."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

from pickle_assembler import (
    BROKEN,
    CONV,
    LINEAR,
    NAMES,
    ORDERED,
    RELU,
    SEQUENTIAL,
    WRONG,
    Maker,
    call,
    filled,
    get,
    legacy,
    module,
    name,
    old_storage,
    partial,
    put,
    storage,
    tensor,
    value,
    zipped,
)


def _deep_modules(levels: int) -> bytes:
    made = module()
    state = filled()
    del state["_modules"]
    common = value(state)
    for _ in range(levels):
        made = (
            name(SEQUENTIAL)
            + b")\x81"
            + common
            + value("_modules")
            + b"}"
            + value("0")
            + made
            + b"ssb"
        )
    return made


def _doubled_modules(times: int) -> bytes:
    made = module() + put(0)
    for place in range(times):
        twins = {"a": get(place), "b": get(place)}
        made += b"0" + module(SEQUENTIAL, _modules=twins) + put(place + 1)
    return made


def _doubled(times: int, kind: bytes) -> bytes:
    made = value(("a",) if kind == b"\x86" else ["a"]) + put(0)
    for place in range(times):
        pair = get(place) * 2 + b"\x86" if kind == b"\x86" else value([get(place), get(place)])
        made += b"0" + pair + put(place + 1)
    return made


_PRIME = 2**61 - 1
"""Python's hash of a number is what is left of a division by it."""


def _complex_keys(count: int) -> bytes:
    """Python adds the hash of the imaginary part, 1,000,003 times, to that of the real one."""
    numbers = ((float(2**52 - 1_000_003 * n), float(n)) for n in range(count))
    return b"".join(get(9) + value(number) + b"RN" for number in numbers)


def _many_views(count: int) -> bytes:
    views = b"".join(value(str(n)) + tensor((250_000,), (1,), 0, get(9)) for n in range(count))
    return storage(250_000) + put(9) + b"0}(" + views + b"u"


def _many_buffers(count: int) -> bytes:
    buffer = tensor((250_000,), (1,), 0, storage(250_000)) + put(9) + b"0"
    children = {str(n): module(_buffers={"b": get(9)}) for n in range(count)}
    return buffer + module(SEQUENTIAL, _modules=children)


def _shared_state(count: int) -> bytes:
    made = name(RELU) + b")\x81" + get(1) + b"b"
    return value(filled()) + put(1) + b"0](" + made * count + b"e"


def _quantised(size: tuple[int, ...], scheme: str, *parameters: object) -> bytes:
    quantiser = (name(f"torch:{scheme}"), *parameters)
    return call(
        "torch._utils:_rebuild_qtensor",
        storage(64, "QInt8"),
        0,
        size,
        (1,) * len(size),
        quantiser,
        False,
        call(ORDERED),
    )


def _sparse(size: tuple[int, ...]) -> bytes:
    layout = call("torch.serialization:_get_layout", "torch.sparse_coo")
    indices = tensor((1, 1), (1, 1), 0, storage(8, "Long"))
    values = tensor((1,), (1,))
    return call("torch._utils:_rebuild_sparse_tensor", layout, (indices, values, size))


MANY = "than a file of its size needs"
IMPOSSIBLE = "with a module of an impossible name"
SIZES = "with sizes, strides or an offset that no tensor has"


def _renamed(folder: Path, old: str, new_name: str) -> Path:
    with zipfile.ZipFile(folder / "model.pth", "w") as archive:
        archive.writestr(new_name, b"\x80\x02}.")
    return folder / "model.pth"


BOUNDS: dict[str, tuple[Maker, str]] = {
    "expand halves": (
        zipped(
            value(
                {
                    str(n): tensor((1000, 1000, 1000), (0, 0, 0), 0, storage(32, "Half"))
                    for n in range(40)
                }
            )
        ),
        "of shape [1000, 1000, 1000] without its data",
    ),
    "expand a little, often": (
        zipped(value({str(n): tensor((10**6,), (0,)) for n in range(100)})),
        "of shape [1000000] without its data",
    ),
    "look at one storage often": (
        zipped(_many_views(100), **{"a/data/0": bytes(10**6)}),
        "of shape [250000] without its data",
    ),
    "copy one buffer often": (
        zipped(_many_buffers(100), **{"a/data/0": bytes(10**6)}),
        "repeats its parts beyond all bounds",
    ),
    "nest tuples": (zipped(b")" + b"\x85" * 200_000), "holds tuples more than 100 levels"),
    "nest lists": (zipped(b"]" * 200_000 + b"a" * 199_999), "levels of containers"),
    "nest dicts": (
        zipped((b"}" + value("model")) * 60_000 + b"N" + b"s" * 60_000),
        "levels of containers",
    ),
    "nest modules": (zipped(_deep_modules(300)), "levels of containers"),
    "double modules": (zipped(_doubled_modules(60)), "repeats its parts beyond all bounds"),
    "double tuples in a key": (
        zipped(b"}" + _doubled(60, b"\x86") + b"Ns"),
        "holds a key of too many values",
    ),
    "double tuples in a set": (
        zipped(call("builtins:set", [_doubled(60, b"\x86")])),
        "holds a key of too many values",
    ),
    "a module within itself": (
        zipped(
            module(SEQUENTIAL, _modules=call(ORDERED) + put(7))
            + put(8)
            + get(7)
            + value("x")
            + get(8)
            + b"s0"
        ),
        BROKEN,
    ),
    "double lists": (zipped(_doubled(60, b"e")), "holds a list that repeats its parts"),
    "double tuples": (zipped(_doubled(60, b"\x86")), "holds a tuple that repeats its parts"),
    "double a number of channels": (
        zipped(_doubled(60, b"\x86") + put(99) + b"0" + module(CONV, in_channels=get(99))),
        "holds a tuple that repeats its parts",
    ),
    "keys that are numbers of one hash": (
        zipped(b"}(" + b"".join(value(n * _PRIME) + b"N" for n in range(1, 70_000)) + b"u"),
        "a key that is too large a number",
    ),
    "a set of numbers of one hash": (
        zipped(b"\x8f(" + b"".join(value(n * _PRIME) for n in range(1, 70_000)) + b"\x90"),
        "a key that is too large a number",
    ),
    "keys that are complex numbers of one hash": (
        zipped(name("builtins:complex") + put(9) + b"0}(" + _complex_keys(20_000) + b"u"),
        "more keys that are no texts",
    ),
    "keys that are tuples": (
        zipped(b"}(" + b"".join(value((n,)) + b"N" for n in range(20_000)) + b"u"),
        "more keys that are no texts",
    ),
    "pairs that are a tensor of millions": (
        zipped(call(ORDERED, (tensor((16_000_000,), (0,)),))),
        WRONG,
    ),
    "a module without a name": (zipped(module(_modules={"": module()})), IMPOSSIBLE),
    "a module's name with a dot": (zipped(module(_modules={"a.b": module()})), IMPOSSIBLE),
    "a module's name with a NUL": (zipped(module(_modules={"a\0": module()})), IMPOSSIBLE),
    "a module's name of half a letter": (
        zipped(module(_modules={"\ud800": module()})),
        IMPOSSIBLE,
    ),
    "a module's name of 70,000 letters": (
        zipped(module(_modules={"x" * 70_000: module()})),
        "under a name of 70,001 characters",
    ),
    "a million dicts": (zipped(b"(" + b"}" * 900_000 + b"t"), MANY),
    "a million steps": (zipped(b"N0" * 900_000, zipfile.ZIP_DEFLATED), "bytes"),
    "a million modules": (zipped(_shared_state(70_000)), MANY),
    "a pickle that unpacks": (
        zipped(b"N0" * 5_000_000, zipfile.ZIP_DEFLATED),
        "would unpack to 10,000,",
    ),
    "encode one text often": (
        zipped(
            value("x" * 500_000)
            + put(9)
            + b"0("
            + (name("_codecs:encode") + get(9) + value("latin1") + b"\x86R") * 3000
            + b"t"
        ),
        "copies more bytes",
    ),
    "sort one list of pairs often": (
        zipped(
            value([[n, None] for n in range(20_000)])
            + put(9)
            + b"0("
            + (name(ORDERED) + get(9) + b"\x85R") * 5000
            + b"t"
        ),
        MANY,
    ),
    "count one dict often": (
        zipped(
            value(dict.fromkeys(range(20000), 1))
            + put(9)
            + b"0("
            + (name("collections:Counter") + get(9) + b"\x85R") * 5000
            + b"t"
        ),
        MANY,
    ),
    "one large state for many": (
        zipped(
            value({f"a{n}": None for n in range(20_000)})
            + put(9)
            + b"0("
            + (name(RELU) + b")\x81" + get(9) + b"b") * 5000
            + b"t"
        ),
        MANY,
    ),
    "one large dict of parameters for many": (
        zipped(
            value({f"a{n}": None for n in range(20_000)})
            + put(9)
            + b"0("
            + module(_parameters=get(9)) * 400
            + b"t"
        ),
        MANY,
    ),
    "one large dict of flags for many": (
        zipped(
            value(dict.fromkeys(range(20000), True))
            + put(9)
            + b"0("
            + module(_forward_hooks_with_kwargs=get(9)) * 400
            + b"t"
        ),
        MANY,
    ),
    "one large partial for many": (
        zipped(partial(**{f"a{n}": 1 for n in range(1000)})),
        "more arguments than a layer has",
    ),
    "scales that double": (
        zipped(_quantised((2,), "per_channel_affine", _doubled(40, b"e"), [0, 0], 0)),
        WRONG,
    ),
    "thousands of names to import": (
        zipped(b"(" + b"".join(name(f"torchvision.a{n}:B") for n in range(30_000)) + b"t"),
        "and 29980 more, which could run any code",
    ),
    "a chain of unknown calls": (
        zipped(
            b"("
            + b"".join(name(f"m{n}:f") for n in range(5000))
            + b"t"
            + put(9)
            + b"0"
            + name("os:system")
            + (get(9) + b"R") * 50_000
        ),
        NAMES,
    ),
    "a tensor on no device": (
        zipped(
            call(
                "torch._utils:_rebuild_meta_tensor_no_storage",
                name("torch:float32"),
                (10**12,),
                (1,),
                False,
            )
        ),
        "of shape [1000000000000] without its data",
    ),
    "a sparse giant": (zipped(_sparse((10**12,))), "of shape [1000000000000] without its data"),
    "a sparse index outside": (
        zipped(_sparse((4,)), **{"a/data/0": b"\xff" * 64}),
        "found negative index -1",
    ),
    "a quantised giant": (
        zipped(_quantised((10**12,), "per_tensor_affine", 1.0, 0)),
        "lies outside of its data",
    ),
    "a quantised axis outside": (
        zipped(_quantised((4,), "per_channel_affine", [1.0], [0], 7)),
        "per_channel axis 7 is out of range",
    ),
    "a size of a million": (zipped(call("torch:Size", (1,) * 100_000)), "no short list"),
    "a size of 2^400": (zipped(tensor((2**400,), (1,))), SIZES),
    "a size of minus one": (zipped(tensor((-1,), (1,))), SIZES),
    "a size of a half": (zipped(tensor((0.5,), (1,))), SIZES),
    "a size that is true": (zipped(tensor((True,), (1,))), SIZES),
    "a size that is a word": (zipped(tensor("aa", (1, 1))), "no short list"),
    "more strides than sizes": (zipped(tensor((1,), (1, 1))), "1 sizes and 2 strides"),
    "more dimensions than there are": (zipped(tensor((1,) * 70, (1,) * 70)), "no short list"),
    "a stride beyond the data": (zipped(tensor((2, 2), (100, 1))), "lies outside of its data"),
    "an offset beyond the data": (zipped(tensor((1,), (1,), 16)), "lies outside of its data"),
    "a storage of another type": (
        zipped(tensor((16,), (1,), 0, storage(16, "Double"))),
        "holds 64 bytes of a tensor's data, expected 128",
    ),
    "a storage of a negative size": (zipped(storage(-1)), "a storage of no size"),
    "a storage elsewhere": (
        zipped(storage(16, "Float", "../../../../etc/passwd")),
        "lacks its record 'data/../../../../etc/passwd'",
    ),
    "a storage by a number": (
        zipped(storage(16, "Float", 0)),
        "a reference to a storage of no type",
    ),
    "a reference to a class": (zipped(value(("module", name(RELU), "f", "x")) + b"Q"), "reference"),
    "a key of a list": (zipped(b"}" + value([1]) + b"Ns"), "unhashable"),
    "items in pairs of one": (zipped(b"}(NNNu"), "cannot be loaded: zip() argument 2 is shorter"),
    "items of a module": (zipped(module() + value("a") + b"Ns"), "cannot set items of a ReLU"),
    "a list that is a tuple": (zipped(b")Na"), "cannot append to a tuple"),
    "out of an empty memo": (zipped(get(2**31)), "KeyError"),
    "marks that do not match": (zipped(b"(((ttttt"), "is broken"),
    "a device of no kind": (
        zipped(call("torch:device", "marker")),
        "cannot be loaded: Expected one of cpu",
    ),
    "a layout of no kind": (zipped(call("torch.serialization:_get_layout", "x")), "KeyError"),
    "another byte order": (zipped(b"}", **{"a/byteorder": b"x" * 100}), "byteorder of 100 bytes"),
    "a record in another case": (
        lambda folder: _renamed(folder, "a/data.pkl", "a/DATA.PKL"),
        "a zip archive that is no checkpoint",
    ),
    "two folders": (zipped(b"}", **{"b/data.pkl": b"\x80\x02}."}), "holds 2 records data.pkl"),
    # the older format
    "older: a terabyte": (
        legacy(tensor((1,), (1,), 0, old_storage(10**12))),
        "refers to more data than it holds",
    ),
    "older: a view outside": (
        legacy(tensor((1,), (1,), 0, old_storage(4, ("v", 3, 2)))),
        "refers to data that lie outside",
    ),
    "older: a view of minus one": (
        legacy(tensor((1,), (1,), 0, old_storage(4, ("v", -1, 2)))),
        "a storage of no size",
    ),
    "older: data left out": (
        legacy(tensor((4,), (1,), 0, old_storage(4)), []),
        "lists other data than it refers to",
    ),
    "older: data twice": (
        legacy(tensor((4,), (1,), 0, old_storage(4)), ["0", "0"]),
        "lists other data than it refers to",
    ),
    "older: data of another size": (
        legacy(tensor((4,), (1,), 0, old_storage(4)), ["0"], struct.pack("<q", 10**9)),
        "data of another size",
    ),
    "older: a view that is a tensor of millions": (
        legacy(
            tensor((1,), (1,), 0, old_storage(4, tensor((16_000_000,), (0,), 0, old_storage(4))))
        ),
        "a view that is no tuple",
    ),
    "older: a list of data that doubles": (
        legacy(
            tensor((4,), (1,), 0, old_storage(4)),
            _doubled(60, b"\x86") + put(98) + b"0" + value([get(98)]),
        ),
        "a list of data that is none of names",
    ),
    "older: data cut": (
        legacy(tensor((4,), (1,), 0, old_storage(4)), ["0"], struct.pack("<q", 4) + bytes(9)),
        "ends 7 bytes too early",
    ),
    "older: a class by its source": (
        legacy(value(("module", name("os:system"), "f", "import os")) + b"Q"),
        "needs os.system",
    ),
    "older: a call in what lists data": (
        legacy(b"}", call(LINEAR, 30_000, 30_000)),
        "calls Linear",
    ),
}
"""Sizes, depths, keys and copies: what each attempts, and what the line says of it."""
