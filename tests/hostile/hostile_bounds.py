"""Model files that ask for much more memory, depth or time than their own size needs."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from hostile_harness import TITLE, Attack, Sandbox
from hostile_models import attack, zipped
from hostile_nodes import (
    RELU,
    Global,
    NewObj,
    Persistent,
    Reduce,
    around,
    doubled,
    dumped,
    floats,
    opcodes,
    ordered,
    relu,
    wrapped,
)


def _nested(opening: bytes, closing: bytes, depth: int) -> bytes:
    return wrapped(b"\x80\x02" + opening * depth + b"N" + closing * depth + b".")


def _nested_modules(depth: int) -> bytes:
    child = b"X\x08\0\0\0_modules}(X\1\0\0\0a"
    opening = b"".join(opcodes(NewObj(Global(RELU)))) + b"}(" + child
    return wrapped(b"\x80\x02" + opening * depth + b"N" + b"uub" * depth + b".")


def _expanded(box: Sandbox) -> bytes:
    """40 half-precision weights of 2 GB each on 16 floats."""
    made = floats((10**9, 1), (0, 1), kind="HalfStorage", count=32)
    return around({f"w{n}": made for n in range(40)})


BOUNDS: dict[str, tuple[Callable[[Sandbox], bytes], str]] = {
    "40 weights expanded from 64 bytes to 80 GB": (_expanded, "refused"),
    "a weight of 2**40 floats with stride 0": (
        lambda b: around({"w": floats((2**20, 2**20), (0, 0))}),
        "refused",
    ),
    "a weight beyond its storage": (lambda b: around({"w": floats((10**9,), (1,))}), "refused"),
    "a weight with a negative size": (lambda b: around({"w": floats((-1,), (1,))}), "refused"),
    "a weight of 60 dimensions": (lambda b: around({"w": floats((1,) * 600, (1,) * 600)}), "any"),
    "an offset of 2**62": (lambda b: around({"w": floats((1,), (1,), offset=2**62)}), "refused"),
    "a storage of 10**12 floats": (
        lambda b: around({"w": floats((1,), (1,), count=10**12)}),
        "refused",
    ),
    "a storage of another record": (
        lambda b: around({"w": floats((16,), (1,), key="../../secret/id_secret")}),
        "refused",
    ),
    "a storage on a GPU that is not there": (
        lambda b: around({"w": floats((16,), (1,), place="cuda:99")}),
        "any",
    ),
    "a storage on meta": (lambda b: around({"w": floats((16,), (1,), place="meta")}), "any"),
    "200,000 nested tuples": (lambda b: _nested(b"(", b"t", 200_000), "refused"),
    "100,000 nested lists": (lambda b: _nested(b"](", b"e", 100_000), "refused"),
    "50,000 nested dicts": (lambda b: _nested(b"}(X\1\0\0\0a", b"u", 50_000), "refused"),
    "10,000 nested modules": (lambda b: _nested_modules(10_000), "refused"),
    "a tuple doubled 60 times": (lambda b: around({"model": doubled(60, b"\x86")}), "refused"),
    "a tuple doubled 60 times as a key": (
        lambda b: around({doubled(60, b"\x86"): 1}),
        "refused",
    ),
    "a dict of a list doubled 60 times": (
        lambda b: around({"state_dict": [doubled(60, b"\x86")] * 3}),
        "refused",
    ),
    "an integer of 500,000 bytes as a key": (
        lambda b: around({2**4_000_000 - 1: 1}),
        "refused",
    ),
    "20,000 names of globals": (
        lambda b: wrapped(
            b"\x80\x02" + b"".join(f"cm\nf{n}\n0".encode() for n in range(20_000)) + b"N."
        ),
        "refused",
    ),
    "a memo of index 2**31": (
        lambda b: wrapped(b"\x80\x02Nr" + struct.pack("<I", 2**31) + b"."),
        "refused",
    ),
    "a string of 4 GB that is not there": (
        lambda b: wrapped(b"\x80\x02X\xff\xff\xff\xff."),
        "refused",
    ),
    "a frame of 2**62 bytes": (
        lambda b: wrapped(b"\x80\x04\x95" + struct.pack("<Q", 2**62) + b"N."),
        "refused",
    ),
    "a zip bomb of opcodes": (
        lambda b: zipped(
            {"a/data.pkl": b"\x80\x02}" + b"K\0Ns" * 10**7 + b".", "a/version": b"3\n"}, True
        ),
        "refused",
    ),
    "a zip bomb of weights": (
        lambda b: zipped(
            {
                "a/data.pkl": dumped(
                    {"w": floats((10**9,), (1,), kind="ByteStorage", count=10**9)}
                ),
                "a/data/0": bytes(10**9),
                "a/version": b"3\n",
            },
            True,
        ),
        "refused",
    ),
    "a quantised tensor of no scheme": (
        lambda b: around(
            {
                "w": Reduce(
                    Global("torch._utils:_rebuild_qtensor"),
                    (
                        Persistent(("storage", Global("torch:QInt8Storage"), "0", "cpu", 64)),
                        0,
                        (10**9,),
                        (0,),
                        (Global("torch:per_tensor_affine"), 0.0, 10**9),
                        False,
                        ordered(),
                    ),
                )
            }
        ),
        "refused",
    ),
    "a sparse tensor with indices outside": (
        lambda b: around(
            {
                "w": Reduce(
                    Global("torch._utils:_rebuild_sparse_tensor"),
                    (
                        Global("torch:sparse_coo"),
                        (
                            floats((2, 4), (4, 1), kind="LongStorage", count=8),
                            floats((4,), (1,)),
                            (10**9, 10**9),
                        ),
                    ),
                )
            }
        ),
        "refused",
    ),
    "a meta tensor of 10**15": (
        lambda b: around(
            {
                "w": Reduce(
                    Global("torch._utils:_rebuild_meta_tensor_no_storage"),
                    (Global("torch:float32"), (10**15,), (1,), False),
                )
            }
        ),
        "refused",
    ),
    "a parameter with a state": (
        lambda b: around(
            {
                "w": Reduce(
                    Global("torch._utils:_rebuild_parameter_with_state"),
                    (floats((16,), (1,)), True, ordered(), {"detach": relu()}),
                )
            }
        ),
        "any",
    ),
    "names that set a terminal's title": (
        lambda b: around({f"a{TITLE}.weight": floats((16,), (1,))}),
        "any",
    ),
    "a name of 100,000 characters": (
        lambda b: around({"a" * 100_000: floats((16,), (1,))}),
        "any",
    ),
    "names of no text": (lambda b: around({None: floats((16,), (1,)), 1.5: 2}), "any"),
    "names that are no UTF-8": (lambda b: around({"a\udcff": floats((16,), (1,))}), "any"),
}
"""What a file makes featviz allocate, and how deep, is bounded by its size."""

LONG = {
    *("200,000 nested tuples", "100,000 nested lists", "50,000 nested dicts"),
    *("10,000 nested modules", "20,000 names of globals"),
    *("a zip bomb of opcodes", "a zip bomb of weights"),
}
"""Those whose reading takes some tenths of a second."""


def all_attacks() -> Iterator[Attack]:
    """All of this file."""
    for name, (make, expect) in BOUNDS.items():
        yield attack(f"bounds: {name}", make, expect, takes_long=name in LONG)
