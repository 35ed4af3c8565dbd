"""Hostile pickles by hand: each asks for more than data, and gets one line within bounds.

A file may take four times its size and 64 MB; what is read here is below 1 MB, in a process that
may grow by MOST bytes. A hang or a payload's marker fails the test.
"""

from __future__ import annotations

import resource
import signal
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from featviz.errors import LoadError
from featviz.models.files import checkpoint
from featviz.models.files.state_dict import unwrap
from featviz.models.weights import digest

MOST = 400 * 2**20
LONGEST = 20  # seconds; more is a hang

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


# An assembler ------------------------------------------------------------------------------


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
    """A tensor; the storage has 16 numbers unless told."""
    data = storage() if data is None else data
    return call(REBUILD, data, offset, size, stride, False, call(ORDERED))


Maker = Callable[[Path], Path]


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


# What they attempt -------------------------------------------------------------------------


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
    return b"".join(get(9) + value(own) + b"RN" for own in numbers)


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


def _late(field: str, key: str, late: bytes) -> bytes:
    """A container is filled after the module that has it was built."""
    container = call(ORDERED) + put(7)
    return module(**{field: container}) + get(7) + value(key) + late + b"s0"


def _quantised(size: tuple[int, ...], scheme: str, *parameters: object) -> bytes:
    told = (name(f"torch:{scheme}"), *parameters)
    return call(
        "torch._utils:_rebuild_qtensor",
        storage(64, "QInt8"),
        0,
        size,
        (1,) * len(size),
        told,
        False,
        call(ORDERED),
    )


def _sparse(size: tuple[int, ...]) -> bytes:
    layout = call("torch.serialization:_get_layout", "torch.sparse_coo")
    indices = tensor((1, 1), (1, 1), 0, storage(8, "Long"))
    values = tensor((1,), (1,))
    return call("torch._utils:_rebuild_sparse_tensor", layout, (indices, values, size))


def _recurrent(**more: object) -> bytes:
    state = {"_all_weights": [[None]], "num_layers": 1, "bidirectional": False, "bias": True}
    return module("torch.nn.modules.rnn:LSTM", **{**state, "proj_size": 0, **more})


def _partial(kind: str = "torch.nn.modules.normalization:LayerNorm", **keywords: object) -> bytes:
    state = value((name(kind), (), keywords, None))
    return call(PARTIAL, name(kind)) + state + b"b"


LARGE = _partial(LINEAR, in_features=30_000, out_features=30_000)
MANY = "than a file of its size needs"
REPLACES = "whose state replaces its"
NAMES = "which could run any code; nothing was executed"
WRONG = "where torch.save writes something else"
NOT_SAVED = "in a way that torch.save does not"
KEPT = "which torch.save only keeps"
IMPOSSIBLE = "with a module of an impossible name"
BROKEN = "lacks parts of an nn.Module"
SIZES = "with sizes, strides or an offset that no tensor has"


def _renamed(folder: Path, old: str, new_name: str) -> Path:
    with zipfile.ZipFile(folder / "model.pth", "w") as archive:
        archive.writestr(new_name, b"\x80\x02}.")
    return folder / "model.pth"


HOSTILE: dict[str, tuple[Maker, str]] = {
    # constructors and calls
    "allocate by a constructor": (zipped(call(LINEAR, 30_000, 30_000)), "calls Linear"),
    "loop in a constructor": (
        zipped(call("torch.nn.modules.transformer:Transformer", 8, 2, 10**7)),
        "calls Transformer",
    ),
    "a constructor that calls its argument": (
        zipped(call("torchvision.ops.misc:Conv2dNormActivation", 3, 3, 1, 1, 0, 1, LARGE)),
        "calls Conv2dNormActivation",
    ),
    "arguments to __new__": (zipped(new(LINEAR, None, 30_000, 30_000)), NOT_SAVED),
    "call a partial": (zipped(call(LARGE)), "calls partial"),
    "call a stored function": (zipped(call(BOX_IOU, 1, 2)), KEPT),
    "call a builtin": (zipped(call(GELU, 1)), KEPT),
    "make a stored function": (zipped(new(BOX_IOU)), NOT_SAVED),
    "call a helper": (zipped(call(MATCHER, 0.7, 0.3)), "calls Matcher"),
    "call a type": (zipped(call("torch:float32")), "calls dtype"),
    "call a storage": (zipped(call("torch:FloatStorage", 10**12)), "calls StorageType"),
    "call a tensor class": (zipped(call("torch:Tensor", 10**6, 10**6)), "calls Tensor"),
    "call an old tensor class": (zipped(call("torch:FloatTensor", 10**12)), NAMES),
    "call an instance": (zipped(call(module(), 1)), "calls ReLU"),
    "a partial of a function": (zipped(call(PARTIAL, name(BOX_IOU))), "functools.partial of some"),
    "a partial of a partial": (zipped(call(PARTIAL, _partial())), "functools.partial of some"),
    "a partial with a class": (
        zipped(_partial(eps=name(LINEAR))),
        "functools.partial with other arguments",
    ),
    "a partial that becomes another": (
        zipped(call(PARTIAL, name(RELU)) + value((name(LINEAR), (1, 1), {}, None)) + b"b"),
        "functools.partial with other arguments",
    ),
    "a partial with attributes": (
        zipped(call(PARTIAL, name(RELU)) + value((name(RELU), (), {}, {"func": 1})) + b"b"),
        "functools.partial with other arguments",
    ),
    "range as a source": (
        zipped(call("collections:Counter", call("builtins:range", 10**12))),
        NAMES,
    ),
    "a generator of bytes": (zipped(call("builtins:bytearray", 10**12)), WRONG),
    "decompress while encoding": (zipped(call("_codecs:encode", "x", "zlib")), "encodes text"),
    "import by a codec": (zipped(call("_codecs:encode", "x", "marker")), "encodes text"),
    "a tensor of a class": (
        zipped(
            call(
                "torch._tensor:_rebuild_from_type_v2",
                name(LINEAR),
                name("torch:Tensor"),
                (9, 9),
                {},
            )
        ),
        WRONG,
    ),
    "a wrapper subclass": (zipped(call("torch._utils:_rebuild_wrapper_subclass")), NAMES),
    "a tensor from numpy": (zipped(call("torch._utils:_rebuild_device_tensor_from_numpy")), NAMES),
    "an extra state by a call": (
        zipped(module(note=call("torch.hub:load", "x"))),
        "needs torch.hub.load",
    ),
    "a class of torch.nn.cpp": (
        zipped(new("torch.nn.cpp:ModuleWrapper", {"cpp_module": 1})),
        "needs torch.nn.cpp.ModuleWrapper",
    ),
    "a class that joins a process group": (
        zipped(new("torch.nn.parallel.distributed:DistributedDataParallel", {})),
        "needs torch.nn.parallel.distributed.DistributedDataParallel",
    ),
    "a class that packs weights": (
        zipped(new("torch.ao.nn.quantized.modules.conv:Conv2d", (1, 2))),
        "is a statically quantised model saved whole, which torch cannot load",
    ),
    "a graph": (zipped(new("torch.fx.graph_module:GraphModule", {})), NAMES),
    "a script": (zipped(new("torch.jit._script:ScriptModule", {})), NAMES),
    "a lazy parameter": (zipped(call("torch.nn.parameter:UninitializedParameter", True)), NAMES),
    "hide behind a compiler": (
        zipped(
            call(
                "torch._dynamo.eval_frame:OptimizedModule",
                module(note=call("os:mkdir", "marker")),
                None,
            )
        ),
        "needs os.mkdir",
    ),
    "a compiled number": (
        zipped(call("torch._dynamo.eval_frame:OptimizedModule", 5, None)),
        WRONG,
    ),
    # state
    "replace forward by a function": (zipped(module(forward=name(BOX_IOU))), f"{REPLACES} forward"),
    "replace forward by a class": (zipped(module(forward=name(LINEAR))), f"{REPLACES} forward"),
    "replace forward by a number": (zipped(module(forward=5)), f"{REPLACES} forward"),
    "replace register_forward_hook": (
        zipped(module(register_forward_hook=LARGE)),
        f"{REPLACES} register_forward_hook",
    ),
    "replace state_dict": (zipped(module(state_dict=LARGE)), f"{REPLACES} state_dict"),
    "replace __class__": (zipped(module(__class__=name(LINEAR))), f"{REPLACES} __class__"),
    "replace a dunder": (
        zipped(module(__torch_function__=LARGE)),
        f"{REPLACES} __torch_function__",
    ),
    "replace the compiled call": (
        zipped(module(_compiled_call_impl=LARGE)),
        f"{REPLACES} _compiled_call_impl",
    ),
    "replace a call of a helper": (
        zipped(new(MATCHER, {"__call__": LARGE})),
        f"{REPLACES} __call__",
    ),
    "replace a property": (
        zipped(module("torch.nn.modules.activation:MultiheadAttention", merge_masks=LARGE)),
        f"{REPLACES} merge_masks",
    ),
    "a name of two lines": (zipped(module(**{"__a\nerror: b": 1})), "its __a\\nerror: b"),
    "a function as a hook": (
        zipped(module(_forward_hooks={1: name(BOX_IOU)})),
        "with _forward_hooks, which would call",
    ),
    "a class as a hook": (
        zipped(module(_backward_hooks={1: name(LINEAR)})),
        "with _backward_hooks, which would call",
    ),
    "a partial as a hook": (
        zipped(module(_state_dict_hooks={1: LARGE})),
        "with _state_dict_hooks, which would call",
    ),
    "a module as a hook": (
        zipped(module(_load_state_dict_pre_hooks={1: module()})),
        "with _load_state_dict_pre_hooks, which would call",
    ),
    "hooks of another type": (zipped(module(_forward_hooks=[])), BROKEN),
    "hooks that come late": (
        zipped(_late("_forward_hooks", "x", name(BOX_IOU))),
        "with _forward_hooks, which would call",
    ),
    "parts that come late": (zipped(_late("_modules", "x", value(5))), BROKEN),
    "a mode that is a word": (zipped(module(training="no")), BROKEN),
    "a set that is a list": (zipped(module(_non_persistent_buffers_set=[])), BROKEN),
    "a module for a parameter": (zipped(module(_parameters={"w": module()})), BROKEN),
    "a storage for a buffer": (zipped(module(_buffers={"b": storage()})), BROKEN),
    "a helper for a module": (zipped(module(_modules={"m": new(MATCHER, {})})), BROKEN),
    "a part without a name": (zipped(module(_modules={5: module()})), BROKEN),
    "state that is a tuple": (zipped(new(RELU, (1, 2))), "its state is no dict"),
    "state without names": (zipped(new(RELU, {1: 2})), "its state is no dict"),
    "no state at all": (zipped(new(RELU)), BROKEN),
    "state of a tensor": (zipped(tensor((1,), (1,)) + value({}) + b"b"), "a Tensor takes no state"),
    "layers without end": (zipped(_recurrent(num_layers=10**12)), BROKEN),
    "layers that are words": (zipped(_recurrent(num_layers="9")), BROKEN),
    "weights of no name": (zipped(_recurrent(_flat_weights_names=[1])), BROKEN),
    "weights of no list": (zipped(_recurrent(_all_weights=5)), BROKEN),
    # bounds
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
        zipped(_partial(**{f"a{n}": 1 for n in range(1000)})),
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
"""What each attempts, and what the line says of it."""


KEPT_AS_DATA: dict[str, tuple[Maker, str]] = {
    "methods of a dict replaced": (
        zipped(call(ORDERED) + value({"items": LARGE, "keys": LARGE}) + b"b"),
        "holds no weights: nothing",
    ),
    "attributes of a parameter": (
        zipped(
            call(
                "torch._utils:_rebuild_parameter_with_state",
                tensor((1,), (1,)),
                True,
                call(ORDERED),
                {"data": LARGE, "note": name(BOX_IOU)},
            )
        ),
        "holds no weights: a Parameter",
    ),
    "hooks of a tensor": (
        zipped(
            call(REBUILD, storage(), 0, (1,), (1,), True, call(ORDERED, [["x", name(BOX_IOU)]]))
        ),
        "holds no weights: a Tensor",
    ),
    "a pickle in another case beside it": (
        zipped(b"}", **{"a/DATA.PKL": b"\x80\x02" + call("os:mkdir", "marker") + b"."}),
        "holds no weights: nothing",
    ),
    "constants in another case": (
        zipped(b"}", **{"a/CONSTANTS.PKL": b"x", "a/code/x.py": b"x"}),
        "holds no weights: nothing",
    ),
    "a function kept in a list": (zipped(value([name(BOX_IOU)])), "holds no weights: a list"),
}
"""What harms nobody is read, and is no model."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, where a payload would leave its marker."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(autouse=True)
def _bounds() -> Iterator[None]:
    """A hang, or memory beyond MOST, is a failure."""

    def late(*args: object) -> None:
        pytest.fail(f"no answer within {LONGEST} seconds")

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + MOST
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    handler = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("attempt", HOSTILE)
def test_a_pickle_that_asks_for_more_is_refused(attempt: str, folder: Path) -> None:
    """One line says what it does; nothing runs, nothing grows, nothing hangs."""
    make, words = HOSTILE[attempt]
    path = make(folder)
    with pytest.raises(LoadError) as caught:
        checkpoint.read(path)
    assert words in caught.value.message
    assert caught.value.message.startswith("model.pth ")
    assert caught.value.message.isprintable() and len(caught.value.message) < 600
    assert [entry.name for entry in folder.iterdir()] == ["model.pth"]


@pytest.mark.parametrize("attempt", KEPT_AS_DATA)
def test_what_a_pickle_keeps_is_never_called(attempt: str, folder: Path) -> None:
    """Such files are read to the end, and what they hold is no model."""
    make, words = KEPT_AS_DATA[attempt]
    with pytest.raises(LoadError) as caught:
        unwrap(checkpoint.read(make(folder)), name="model.pth")
    assert words in caught.value.message
    assert [entry.name for entry in folder.iterdir()] == ["model.pth"]


def test_the_assembler_makes_models(folder: Path) -> None:
    """The modules that are attacked above do load when nothing is wrong with them."""
    inner = module(
        LINEAR,
        _parameters={
            "weight": call(
                "torch._utils:_rebuild_parameter", tensor((2, 2), (2, 1)), True, call(ORDERED)
            ),
            "bias": None,
        },
        in_features=2,
    )
    path = zipped(
        module(
            SEQUENTIAL, _modules={"0": inner, "1": module(inplace=False, norm=_partial(eps=0.1))}
        )
    )(folder)
    found = checkpoint.read(path)
    assert [type(part) for part in found] == [nn.Linear, nn.ReLU]
    assert found[1].norm.keywords == {"eps": 0.1}
    assert torch.equal(found(torch.ones(1, 2)), torch.zeros(1, 2))
    assert len(digest(found)) == 64
