"""An assembler of pickles: instructions one by one, and the files of torch.save around them."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

from hostile_payloads import Maker
from torch import nn

PARTIAL, LINEAR, RELU = (
    "functools:partial",
    "torch.nn.modules.linear:Linear",
    "torch.nn.modules.activation:ReLU",
)
BOX_IOU, GELU = "torchvision.ops.boxes:box_iou", "torch._C._nn:gelu"
CONV = "torch.nn.modules.conv:Conv2d"
SEQUENTIAL, MATCHER = (
    "torch.nn.modules.container:Sequential",
    "torchvision.models.detection._utils:Matcher",
)
ORDERED, REBUILD = "collections:OrderedDict", "torch._utils:_rebuild_tensor_v2"


def name(where: str) -> bytes:
    """GLOBAL: `torch.nn:Linear`."""
    module, _, attribute = where.partition(":")
    return f"c{module}\n{attribute}\n".encode()


def value(what: object) -> bytes:
    """A plain value; bytes are instructions and stay as they are."""
    if isinstance(what, bytes):
        return what
    if what is None or isinstance(what, bool):
        return {None: b"N", True: b"\x88", False: b"\x89"}[what]
    if isinstance(what, int):
        data = what.to_bytes((what.bit_length() + 8) // 8, "little", signed=True)
        return b"\x8a" + bytes([len(data)]) + data
    if isinstance(what, float):
        return b"G" + struct.pack(">d", what)
    if isinstance(what, str):
        data = what.encode("utf-8", "surrogatepass")
        return b"X" + struct.pack("<I", len(data)) + data
    if isinstance(what, tuple):
        return b"(" + b"".join(map(value, what)) + b"t"
    if isinstance(what, list):
        return b"](" + b"".join(map(value, what)) + b"e"
    assert isinstance(what, dict)
    return b"}(" + b"".join(value(k) + value(v) for k, v in what.items()) + b"u"


def call(where: str | bytes, *arguments: object) -> bytes:
    """REDUCE."""
    function = where if isinstance(where, bytes) else name(where)
    return function + value(arguments) + b"R"


def new(where: str, state: object = None, *arguments: object) -> bytes:
    """NEWOBJ, and BUILD where there is a state."""
    made = name(where) + value(arguments) + b"\x81"
    return made if state is None else made + value(state) + b"b"


def put(place: int) -> bytes:
    """Into the memo."""
    return b"r" + struct.pack("<I", place)


def get(place: int) -> bytes:
    """Out of the memo."""
    return b"j" + struct.pack("<I", place)


def filled(**more: object) -> dict[object, object]:
    """The state of a module without anything in it."""
    hooks = [n for n, v in vars(nn.Module()).items() if isinstance(v, dict)]
    state: dict[object, object] = {"training": True, "_is_full_backward_hook": None}
    state |= {hook: call(ORDERED) for hook in hooks}
    state |= {"_non_persistent_buffers_set": b"\x8f"}
    return state | more


def module(where: str = RELU, **more: object) -> bytes:
    """A module with some of its state replaced."""
    return new(where, filled(**more))


def storage(count: int = 16, kind: str = "Float", key: object = "0") -> bytes:
    """A reference to a storage."""
    return value(("storage", name(f"torch:{kind}Storage"), key, "cpu", count)) + b"Q"


def tensor(size: object, stride: object, offset: object = 0, data: bytes | None = None) -> bytes:
    """A tensor; its storage has 16 numbers unless `data` is another."""
    data = storage() if data is None else data
    return call(REBUILD, data, offset, size, stride, False, call(ORDERED))


def zipped(pickled: bytes, how: int = zipfile.ZIP_STORED, **records: bytes) -> Maker:
    """A file of torch.save around a pickle, with 64 bytes of data."""

    def make(folder: Path) -> Path:
        with zipfile.ZipFile(folder / "model.pth", "w", how) as archive:
            archive.writestr("a/data.pkl", b"\x80\x02" + pickled + b".")
            archive.writestr("a/version", b"3\n")
            for record, data in {"a/data/0": bytes(64), **records}.items():
                archive.writestr(record, data)
        return folder / "model.pth"

    return make


def legacy(pickled: bytes, keys: object = (), data: bytes = b"") -> Maker:
    """A file in the format of before torch 1.6."""
    head = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True}]

    def make(folder: Path) -> Path:
        pickles = [*map(value, head), pickled, value(keys)]
        (folder / "model.pth").write_bytes(
            b"".join(b"\x80\x02" + part + b"." for part in pickles) + data
        )
        return folder / "model.pth"

    return make


def old_storage(count: int, view: object = None, key: str = "0") -> bytes:
    """A reference to a storage in the older format."""
    return value(("storage", name("torch:FloatStorage"), key, "cpu", count, view)) + b"Q"


def partial(kind: str = "torch.nn.modules.normalization:LayerNorm", **keywords: object) -> bytes:
    """A functools.partial of a class, as torch.save writes it."""
    state = value((name(kind), (), keywords, None))
    return call(PARTIAL, name(kind)) + state + b"b"


LARGE = partial(LINEAR, in_features=30_000, out_features=30_000)

BROKEN = "lacks parts of an nn.Module"
NAMES = "which could run any code; nothing was executed"
WRONG = "where torch.save writes something else"
