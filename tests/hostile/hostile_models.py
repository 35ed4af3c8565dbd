"""Hostile model files: programs, pickles, safetensors, shards, and what lies beside them."""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import struct
import tarfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from hostile_audit import MARKER
from hostile_harness import TITLE, Attack, Sandbox
from PIL import Image
from torch import nn

Records = dict[str, bytes]
"""Name to content, in the order in which they stand in the zip."""

NET = """from torch import nn


def make():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())

"""


def everywhere(name: str) -> list[str]:
    """The command lines that take a model file."""
    file = f"{{given}}/{name}"
    return [
        f"layers {file}",
        f"summary {file}",
        f"run {file} {{given}}/photo.png --out out{{n}}",
        f"identify {file}",
        f"audit {file} {{given}}/photo.png --out out{{n}}",
        f"kernels {file} --out out{{n}}",
        f"layers {{given}}/net.py:make --weights {file}",
        "layers {given}/net.py:make --weights {given}/all.index.json",
    ]


def attack(
    name: str, make: Callable[[Sandbox], bytes], expect: str = "refused", file: str = "model.pth"
) -> Attack:
    """A model file of these bytes, in every command, on its own and as a shard."""

    def place(box: Sandbox) -> None:
        surroundings(box, file)
        (box.given / file).write_bytes(make(box))

    return Attack(name, place, everywhere(file), expect, own_code=("given/net.py",))


def surroundings(box: Sandbox, file: str) -> None:
    """A photo, an index that names the file, a factory that takes weights, and a trap to import."""
    Image.new("RGB", (20, 16), "red").save(box.given / "photo.png")
    (box.given / "net.py").write_text(NET)
    index = {"weight_map": {"0.weight": file, "0.bias": file}}
    (box.given / "all.index.json").write_text(json.dumps(index))
    (box.given / f"{MARKER}_trap.py").write_text(
        f"open({str(box.marker)!r}, 'w')\nclass Net: ...\n"
    )


def zipped(records: Mapping[str, bytes] | list[tuple[str, bytes]], packed: bool = False) -> bytes:
    """A zip file; a list may name a record twice."""
    file = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    pairs = records.items() if isinstance(records, Mapping) else records
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", kind) as archive:
        warnings.simplefilter("ignore")
        for name, data in pairs:
            archive.writestr(zipfile.ZipInfo(name), data, kind)
    return file.getvalue()


def unzipped(data: bytes) -> Records:
    """The records of a zip file."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


# Pickles by hand ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Global:
    """A name, `module:attribute`."""

    name: str


@dataclass(frozen=True)
class Reduce:
    """A call of something with arguments."""

    function: Any
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class NewObj:
    """`cls.__new__(cls, *arguments)`."""

    cls: Any
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Build:
    """An object whose state is put back."""

    target: Any
    state: Any


@dataclass(frozen=True)
class Persistent:
    """What stands for a storage."""

    identity: Any


@dataclass(frozen=True)
class Raw:
    """Opcodes as they are."""

    code: bytes


def dumped(value: Any) -> bytes:
    """The pickle of a value with such nodes in it, protocol 2."""
    return b"\x80\x02" + b"".join(_ops(value)) + b"."


def _ops(value: Any) -> Iterator[bytes]:
    if isinstance(value, Raw):
        yield value.code
    elif isinstance(value, Global):
        module, _, name = value.name.partition(":")
        yield f"c{module}\n{name}\n".encode()
    elif isinstance(value, (Reduce, NewObj)):
        yield from _ops(value.function if isinstance(value, Reduce) else value.cls)
        yield from _ops(value.arguments)
        yield b"R" if isinstance(value, Reduce) else b"\x81"
    elif isinstance(value, Build):
        yield from _ops(value.target)
        yield from _ops(value.state)
        yield b"b"
    elif isinstance(value, Persistent):
        yield from _ops(value.identity)
        yield b"Q"
    elif isinstance(value, tuple):
        yield b"("
        for item in value:
            yield from _ops(item)
        yield b"t"
    elif isinstance(value, list):
        yield b"]("
        for item in value:
            yield from _ops(item)
        yield b"e"
    elif isinstance(value, dict):
        yield b"}("
        for key, item in value.items():
            yield from _ops(key)
            yield from _ops(item)
        yield b"u"
    else:
        yield from _scalar(value)


def _scalar(value: Any) -> Iterator[bytes]:
    if value is None:
        yield b"N"
    elif isinstance(value, bool):
        yield b"\x88" if value else b"\x89"
    elif isinstance(value, int):
        data = pickle.encode_long(value)
        long = (
            b"\x8b" + struct.pack("<i", len(data)) if len(data) > 255 else bytes((0x8A, len(data)))
        )
        yield long + data
    elif isinstance(value, float):
        yield b"G" + struct.pack(">d", value)
    elif isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        yield b"X" + struct.pack("<I", len(data)) + data
    else:
        raise TypeError(value)


def ordered(**items: Any) -> Any:
    """An OrderedDict."""
    made = Reduce(Global("collections:OrderedDict"))
    return Raw(b"".join((*_ops(made), b"(", *_pairs(items), b"u"))) if items else made


def _pairs(items: Mapping[Any, Any]) -> Iterator[bytes]:
    for key, value in items.items():
        yield from _ops(key)
        yield from _ops(value)


def floats(size: tuple[int, ...], stride: tuple[int, ...], **more: Any) -> Any:
    """A tensor on storage `0`, which has 16 floats unless `held` says otherwise."""
    kind, offset = more.get("kind", "FloatStorage"), more.get("offset", 0)
    place, key = more.get("place", "cpu"), more.get("key", "0")
    storage = ("storage", Global(f"torch:{kind}"), key, place, more.get("held", 16))
    arguments = (Persistent(storage), offset, size, stride, False, ordered())
    return Reduce(Global("torch._utils:_rebuild_tensor_v2"), arguments)


def around(value: Any, **more: bytes) -> bytes:
    """The zip file that torch.save would make around a pickle, with 64 bytes of data."""
    return wrapped(dumped(value), **more)


def wrapped(code: bytes, **more: bytes) -> bytes:
    """The same for opcodes."""
    data = {"a/data.pkl": code, "a/byteorder": b"little", "a/data/0": bytes(64)}
    return zipped({**data, "a/version": b"3\n", **{f"a/{name}": own for name, own in more.items()}})


def legacy(code: bytes) -> bytes:
    """torch's format before 1.6 around a pickle without tensors."""
    head = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True, "type_sizes": {}}]
    start = b"".join(pickle.dumps(part, protocol=2) for part in head)
    return start + code + pickle.dumps([], protocol=2)


def state_of(module: nn.Module) -> dict[str, Any]:
    """The state of a module without parameters, as nodes."""
    return {name: _node(value) for name, value in vars(module).items()}


def _node(value: Any) -> Any:
    if isinstance(value, dict):
        return ordered(**value) if not value else {k: _node(v) for k, v in value.items()}
    if isinstance(value, set):
        return Reduce(Global("builtins:set"), (list(value),))
    return value


def module(name: str, **state: Any) -> Build:
    """A module as torch pickles it, with some of its state replaced."""
    return Build(NewObj(Global(name)), {**state_of(nn.Identity()), **state})


RELU = "torch.nn.modules.activation:ReLU"
LINEAR = "torch.nn.modules.linear:Linear"
LSTM = "torch.nn.modules.rnn:LSTM"
CONV = "torch.nn.modules.conv:Conv2d"


def relu(**state: Any) -> Build:
    """A ReLU."""
    return module(RELU, **{"inplace": False, **state})


def shell(box: Sandbox) -> str:
    """A command that would leave the marker."""
    return f"touch '{box.marker}'"


def python(box: Sandbox) -> str:
    """Code that would leave the marker."""
    return f"open({str(box.marker)!r}, 'w')"


def _system(box: Sandbox) -> Reduce:
    return Reduce(Global("posix:system"), (shell(box),))


def _mkdir(box: Sandbox) -> Any:
    """A callable that leaves the marker whatever it is called with: a partial of a partial."""
    return _partial("posix:mkdir", str(box.marker))


def _partial(name: str, *arguments: Any) -> Build:
    target = Reduce(Global("functools:partial"), (Global(name),))
    return Build(target, (Global(name), tuple(arguments), {}, None))


CALLS: dict[str, Callable[[Sandbox], Any]] = {
    "os.system": _system,
    "exec": lambda b: Reduce(Global("builtins:exec"), (python(b),)),
    "eval inside a dict": lambda b: {"a": [Reduce(Global("builtins:eval"), (python(b),))]},
    "eval under its name of Python 2": lambda b: Reduce(Global("__builtin__:eval"), (python(b),)),
    "getattr of an import": lambda b: Reduce(
        Reduce(
            Global("builtins:getattr"),
            (Reduce(Global("builtins:__import__"), ("os",)), "mkdir"),
        ),
        (str(b.marker),),
    ),
    "a dotted name through torch": lambda b: Reduce(
        Global("torch.serialization:os.system"), (shell(b),)
    ),
    "functools.partial of mkdir": lambda b: Reduce(_mkdir(b)),
    "torch.hub.load": lambda b: Reduce(Global("torch.hub:load"), (str(b.given), "entry")),
    "torch.load again": lambda b: Reduce(Global("torch.serialization:load"), (str(b.secret),)),
    "a storage from bytes": lambda b: Reduce(
        Global("torch.storage:_load_from_bytes"), (Reduce(Global("builtins:bytes")),)
    ),
    "a download as a weight": lambda b: {
        "w": Reduce(
            Global("torchvision.datasets.utils:download_url"),
            (b.secret.as_uri(), str(b.root), "x"),
        )
    },
    "a graph module from source": lambda b: Reduce(
        Global("torch.fx.graph_module:reduce_graph_module"),
        ({"_code": "def forward(self): pass", "_graphmodule_cls_name": "G"}, python(b)),
    ),
    "a tensor subclass made by a function": lambda b: Reduce(
        Global("torch._tensor:_rebuild_from_type_v2"),
        (Global("posix:mkdir"), Global("torch:Tensor"), (str(b.marker),), {}),
    ),
    "a class of a module beside the file": lambda b: NewObj(Global(f"{MARKER}_trap:Net")),
    "an import on sight": lambda b: Global("antigravity:fly"),
    "a dotted import by torch": lambda b: Reduce(
        Global("torch._utils:_import_dotted_name"), ("antigravity.fly",)
    ),
    "torch.ops.load_library": lambda b: Reduce(
        Global("torch._ops:_Ops.load_library"), (str(b.secret),)
    ),
    "copyreg": lambda b: Reduce(
        Global("copyreg:_reconstructor"),
        (Global("collections:OrderedDict"), Global("builtins:dict"), _system(b)),
    ),
    "a numpy object array": lambda b: Reduce(
        Global("numpy.core.multiarray:_reconstruct"), (Global("numpy:ndarray"), (0,), "b")
    ),
    "inspect through torch.nn": lambda b: Reduce(
        Global("torch.nn.modules.module:torch.os.system"), (shell(b),)
    ),
    "mmap of a file": lambda b: Reduce(
        Global("torch:UntypedStorage.from_file"), (str(b.secret), True, 8)
    ),
}
"""Calls of what is no part of a model."""

CONSTRUCTORS: dict[str, Any] = {
    "Linear(30000, 30000) from 365 bytes": Reduce(Global(LINEAR), (30000, 30000)),
    "a Transformer of 10**7 layers": Reduce(
        Global("torch.nn.modules.transformer:Transformer"), (8, 2, 10**7, 1)
    ),
    "an Embedding of 10**9 rows": Reduce(Global("torch.nn.modules.sparse:Embedding"), (10**9, 8)),
    "an LSTM of 10**6 layers": Reduce(Global(LSTM), (4, 4, 10**6)),
    "Conv2dNormActivation with a function of the file's": Reduce(
        Global("torchvision.ops.misc:Conv2dNormActivation"),
        (3, 4, 3, 1, 1, 1, Raw(b"".join(_ops(_partial("posix:mkdir", "/nowhere"))))),
    ),
    "a Linear by NEWOBJ with arguments": NewObj(Global(LINEAR), (30000, 30000)),
    "ModuleWrapper by REDUCE": Reduce(Global("torch.nn.cpp:ModuleWrapper"), (1,)),
    "ModuleWrapper by NEWOBJ": Build(
        NewObj(Global("torch.nn.cpp:ModuleWrapper")), {"cpp_module": relu()}
    ),
    "a ResNet of given blocks": Reduce(
        Global("torchvision.models.resnet:ResNet"),
        (Global("torchvision.models.resnet:Bottleneck"), [10**5] * 4),
    ),
    "a builder of torchvision": Reduce(Global("torchvision.models.resnet:resnet152"), ()),
    "Sequential by REDUCE": Reduce(Global("torch.nn.modules.container:Sequential"), (relu(),)),
    "Parameter of 10**10 elements": Reduce(
        Global("torch.nn.parameter:Parameter"), (Reduce(Global("torch:Tensor"), (10**10,)),)
    ),
    "bytearray(3000000000)": Reduce(Global("builtins:bytearray"), (3_000_000_000,)),
    "a storage of 10**10": Reduce(Global("torch:UntypedStorage"), (10**10,)),
    "a class called twice": Reduce(Reduce(Global(RELU), ()), (1,)),
}
"""Constructors with arguments from the file."""


def _conv(**state: Any) -> Build:
    """A convolution of one pixel, three channels to four."""
    pair, weight = (1, 1), floats((4, 3, 1, 1), (3, 1, 1, 1))
    sides = {"kernel_size": pair, "stride": pair, "dilation": pair, "padding": (0, 0)}
    plain = {"in_channels": 3, "out_channels": 4, "groups": 1, "transposed": False}
    named = {"padding_mode": "zeros", "_parameters": {"weight": weight, "bias": None}}
    return module(
        "torch.nn.modules.conv:Conv2d",
        **{**sides, **plain, **named, "output_padding": (0, 0), **state},
    )


def _shadow(name: str) -> Callable[[Sandbox], Any]:
    return lambda box: relu(**{name: _mkdir(box)})


def _quiet_shadow(name: str) -> Callable[[Sandbox], Any]:
    """Without any code of others: a class of torch's own in the place of a method."""
    return lambda box: relu(**{name: Global(LINEAR)})


STATES: dict[str, Callable[[Sandbox], Any]] = {
    **{f"{name} is replaced by a function": _shadow(name) for name in ("forward", "parameters")},
    **{
        f"{name} is replaced by a class": _quiet_shadow(name)
        for name in (
            "forward",
            "register_forward_hook",
            "_call_impl",
            "state_dict",
            "eval",
            "to",
            "named_modules",
            "_apply",
        )
    },
    "a hook calls mkdir": lambda b: relu(_forward_hooks=ordered(h=_mkdir(b))),
    "a hook is a module": lambda b: relu(_forward_hooks=ordered(h=relu())),
    "a pre-hook is a partial of a class": lambda b: relu(
        _forward_pre_hooks=ordered(h=_partial(LINEAR, 30000, 30000))
    ),
    "hooks are a list": lambda b: relu(_forward_hooks=[relu()]),
    "hooks are text": lambda b: relu(_forward_pre_hooks="abc"),
    "hooks are a Counter": lambda b: relu(
        _forward_hooks=Reduce(Global("collections:Counter"), ({},))
    ),
    "hooks are a module": lambda b: relu(_forward_hooks=relu()),
    "the class is replaced": lambda b: relu(__class__=Global(LINEAR)),
    "the state is a list": lambda b: Build(NewObj(Global(RELU)), [1, 2]),
    "the state is a pair of dicts": lambda b: Build(
        NewObj(Global(RELU)), (state_of(nn.ReLU()), {"forward": relu()})
    ),
    "a module is its own child": lambda b: Build(
        Raw(b"".join((*_ops(NewObj(Global(RELU))), b"q\x07"))),
        {**state_of(nn.ReLU()), "_modules": {"a": Raw(b"h\x07")}},
    ),
    "groups of a convolution are text": lambda b: _conv(groups=f"a{TITLE}"),
    "channels of a convolution are 10**6": lambda b: _conv(in_channels=10**6),
    "channels of a convolution are a tuple doubled 60 times": lambda b: _conv(
        in_channels=_doubled(60, b"\x86")
    ),
    "a child's name is a lone surrogate": lambda b: relu(_modules={"\ud800": relu()}),
    "a child's name is a file of ours": lambda b: relu(_modules={"run.json": relu()}),
    "a child is a number": lambda b: relu(_modules={"a": 5}),
    "a child's name has dots and controls": lambda b: relu(_modules={f"a.b{TITLE}": 5}),
    "a parameter is a number": lambda b: relu(_parameters={"a": 5}),
    "a parameter is a module": lambda b: relu(_parameters={"a": relu()}),
    "a buffer is text": lambda b: relu(_buffers={"a": "x"}),
    "an LSTM of 10**12 layers": lambda b: module(
        LSTM, num_layers=10**12, _all_weights=[], bidirectional=False, mode="LSTM", bias=True
    ),
    "an old LSTM state of 10**12 layers": lambda b: module(
        LSTM, num_layers=10**12, all_weights=[], bidirectional=False, mode="LSTM", bias=True
    ),
    "an LSTM with weights that are not there": lambda b: module(
        LSTM, num_layers=1, _all_weights=[["forward", "to"]], bidirectional=False, mode="LSTM"
    ),
    "an LSTM without anything": lambda b: Build(NewObj(Global(LSTM)), {}),
    "a Transformer's old state": lambda b: Build(
        NewObj(Global("torch.nn.modules.transformer:TransformerEncoderLayer")), {"linear1": 5}
    ),
    "a module without a state": lambda b: NewObj(Global(CONV)),
}
"""States of modules that mean no good. ReLUs alone would else be fine."""

HARMLESS = {
    "a hook is a module",
    "a pre-hook is a partial of a class",
    "the class is replaced",
    "groups of a convolution are text",
    "channels of a convolution are 10**6",
}
"""Of these, nothing but classes of torch's own comes into play."""


def _named(box: Sandbox) -> Any:
    """A module whose child's name sets a terminal's title."""
    return module("torch.nn.modules.container:Sequential", _modules={f"a{TITLE}": relu()})


def _doubled(depth: int, close: bytes) -> Raw:
    """t = (t, t), so often: a few bytes, 2**depth leaves."""
    return Raw(b")" + b"".join(b"q\x08" + b"h\x08" + close for _ in range(depth)))


def _nested(opening: bytes, closing: bytes, depth: int) -> bytes:
    return wrapped(b"\x80\x02" + opening * depth + b"N" + closing * depth + b".")


def _nested_modules(depth: int) -> bytes:
    child = b"X\x08\0\0\0_modules}(X\1\0\0\0a"
    opening = b"".join(_ops(NewObj(Global(RELU)))) + b"}(" + child
    return wrapped(b"\x80\x02" + opening * depth + b"N" + b"uub" * depth + b".")


def _expanded(box: Sandbox) -> bytes:
    """40 half-precision weights of 2 GB each on 16 floats."""
    made = floats((10**9, 1), (0, 1), kind="HalfStorage", held=32)
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
        lambda b: around({"w": floats((1,), (1,), held=10**12)}),
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
    "200,000 nested lists": (lambda b: _nested(b"](", b"e", 200_000), "refused"),
    "100,000 nested dicts": (lambda b: _nested(b"}(X\1\0\0\0a", b"u", 100_000), "refused"),
    "20,000 nested modules": (lambda b: _nested_modules(20_000), "refused"),
    "a tuple doubled 60 times": (lambda b: around({"model": _doubled(60, b"\x86")}), "refused"),
    "a tuple doubled 60 times as a key": (
        lambda b: around({_doubled(60, b"\x86"): 1}),
        "refused",
    ),
    "a dict of a list doubled 60 times": (
        lambda b: around({"state_dict": [_doubled(60, b"\x86")] * 3}),
        "refused",
    ),
    "an integer of 500,000 bytes as a key": (
        lambda b: around({2**4_000_000 - 1: 1}),
        "refused",
    ),
    "100,000 names of globals": (
        lambda b: wrapped(
            b"\x80\x02" + b"".join(f"cm\nf{n}\n0".encode() for n in range(60_000)) + b"N."
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
                "a/data.pkl": dumped({"w": floats((10**9,), (1,), kind="ByteStorage", held=10**9)}),
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
                            floats((2, 4), (4, 1), kind="LongStorage", held=8),
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


def _saved(module: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(module, file)
    return file.getvalue()


def _tar(box: Sandbox) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in ("sys", "storages", "tensors", "pickle"):
            member, data = tarfile.TarInfo(name), dumped(_system(box))
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def _swapped_names(box: Sandbox) -> bytes:
    """STACK_GLOBAL, whose names come from the memo in the wrong order."""
    system, posix = (b"".join(_scalar(word)) for word in ("system", "posix"))
    argument = b"".join(_scalar(shell(box)))
    return (
        b"\x80\x04"
        + system
        + b"\x94"
        + posix
        + b"\x940"
        + b"0h\x01h\x00\x93"
        + argument
        + b"\x85R."
    )


DISGUISES: dict[str, Callable[[Sandbox], bytes]] = {
    "a global by STACK_GLOBAL": _swapped_names,
    "a class by INST": lambda b: b"\x80\x02(" + b"".join(_scalar(shell(b))) + b"iposix\nsystem\n.",
    "a class by OBJ": lambda b: b"\x80\x02(cposix\nsystem\n" + b"".join(_scalar(shell(b))) + b"o.",
    "an extension code": lambda b: wrapped(b"\x80\x02\x82\x01)R."),
    "NEWOBJ_EX of a module": lambda b: wrapped(
        b"\x80\x04" + b"".join((*_ops(Global(LINEAR)), *_ops((30000, 30000)), b"}\x92."))
    ),
    "two records data.pkl": lambda b: zipped(
        [
            ("a/data.pkl", dumped(_system(b))),
            ("a/data.pkl", b"\x80\x02}."),
            ("a/version", b"3\n"),
        ]
    ),
    "data.pkl and DATA.PKL": lambda b: zipped(
        {"a/DATA.PKL": dumped(_system(b)), "a/data.pkl": b"\x80\x02}.", "a/version": b"3\n"}
    ),
    "a good zip behind a bad pickle": lambda b: dumped(_system(b)) + wrapped(b"\x80\x02}."),
    "a tar": _tar,
    "a record that climbs out": lambda b: around({}, **{f"../../{MARKER}": b"x"}),
    "a pickle of protocol 0": lambda b: f"cposix\nsystem\n(V{shell(b)}\ntR.".encode(),
    "a second pickle behind the first": lambda b: legacy(b"\x80\x02}." + dumped(_system(b))),
    "TorchScript": lambda b: wrapped(
        b"\x80\x02}.", **{"constants.pkl": dumped(_system(b)), "code/x.py": python(b).encode()}
    ),
    "a zip of encrypted records": lambda b: wrapped(b"\x80\x02}.").replace(
        b"PK\x01\x02\x14\x03\x14\x00\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01\x00"
    ),
}
"""Ways to name a function so that a checker overlooks it."""


# Exported programs ----------------------------------------------------------------------------

PROGRAM = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"
CONSTANTS = "data/constants/model_constants_config.json"
INPUTS = "data/sample_inputs/model.pt"


class Net(nn.Module):
    """Its input has a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.relu(self.conv(image))
        return found


@functools.cache
def program() -> bytes:
    """An honest program of free height and width."""
    free = torch.export.Dim.DYNAMIC
    made = torch.export.export(
        Net().eval(), (torch.zeros(1, 3, 16, 20),), dynamic_shapes=({2: free, 3: free},)
    )
    file = io.BytesIO()
    torch.export.save(made, file)
    return file.getvalue()


def records() -> tuple[str, Records]:
    """The folder that all records are in, and the records without it."""
    found = unzipped(program())
    root = next(iter(found)).split("/")[0]
    return root, {name.removeprefix(f"{root}/"): data for name, data in found.items()}


def rezipped(change: Callable[[Records], object], root: str | None = None) -> bytes:
    """The honest program with some records changed."""
    own, found = records()
    change(found)
    return zipped({f"{own if root is None else root}/{name}": d for name, d in found.items()})


def evil_inputs(box: Sandbox) -> bytes:
    """A pickle that torch.load would run, as example inputs."""
    return around(((Reduce(Global("builtins:eval"), (python(box),)),), {}))


Change = Callable[[Records, Sandbox], object]


def _put(name: str, make: Callable[[Sandbox], bytes], drop: str | None = None) -> Change:
    def change(found: Records, box: Sandbox) -> None:
        if drop:
            del found[drop]
        found[name] = make(box)

    return change


def edited(name: str, edit: Callable[[Any], object]) -> Change:
    """A record of JSON, changed."""

    def change(found: Records, box: Sandbox) -> None:
        document = json.loads(found[name])
        edit(document)
        found[name] = json.dumps(document).encode()

    return change


def _filled(value: Any, box: Sandbox) -> Any:
    """MARKER in strings becomes the path of the marker."""
    text = json.dumps(value).replace("@MARKER", str(box.marker)).replace("@SECRET", str(box.secret))
    return json.loads(text)


def _size(value: Any, index: int = 2) -> Change:
    """A size of the input."""

    def change(found: Records, box: Sandbox) -> None:
        def edit(document: Any) -> None:
            sizes = document["graph_module"]["graph"]["tensor_values"]["image"]["sizes"]
            sizes[index] = _filled(value, box)

        edited(PROGRAM, edit)(found, box)

    return change


def _expression(text: str) -> Change:
    return _size({"as_expr": {"expr_str": text, "hint": {"as_int": 16}}})


def _replaced(key: str, value: Any, everywhere: bool = False) -> Change:
    """The first value under a key anywhere in the program, replaced."""

    def change(found: Records, box: Sandbox) -> None:
        document = json.loads(found[PROGRAM])
        assert _swap(document, key, _filled(value, box)), key
        found[PROGRAM] = json.dumps(document).encode()

    return change


def _swap(value: Any, key: str, new: Any) -> bool:
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    for name, item in items:
        if name == key:
            value[name] = new
            return True
        if isinstance(item, (dict, list)) and _swap(item, key, new):
            return True
    return False


def _weight(**fields: Any) -> Change:
    """Fields of the convolution's weight."""

    def edit(document: Any) -> None:
        own = document["config"]["conv.weight"]
        for name, value in fields.items():
            target = own if name in own else own["tensor_meta"]
            target[name] = value

    return edited(WEIGHTS, edit)


def _pickled_weight(found: Records, box: Sandbox) -> None:
    _weight(use_pickle=True)(found, box)
    found["data/weights/weight_0"] = evil_inputs(box)


def _pickled_constant(name: str) -> Change:
    def change(found: Records, box: Sandbox) -> None:
        own = json.loads(found[WEIGHTS])["config"]["conv.weight"]
        entry = {**own, "path_name": name, "use_pickle": True}
        edited(CONSTANTS, lambda d: d["config"].update(evil=entry))(found, box)
        found[f"data/constants/{name}"] = dumped(_system(box))

    return change


def _call(target: str, **arguments: Any) -> Change:
    """A node before all others that calls `target`."""
    kinds = {bool: "as_bool", int: "as_int", str: "as_string", list: "as_ints"}

    def change(found: Records, box: Sandbox) -> None:
        inputs = [
            {"name": name, "arg": {kinds[type(value)]: _filled(value, box)}, "kind": 2}
            for name, value in arguments.items()
        ]

        def edit(document: Any) -> None:
            graph = document["graph_module"]["graph"]
            new = {"target": target, "inputs": inputs, "outputs": [{"as_tensor": {"name": "evil"}}]}
            graph["nodes"].insert(0, {**graph["nodes"][0], **new})
            graph["tensor_values"]["evil"] = graph["tensor_values"]["conv2d"]

        edited(PROGRAM, edit)(found, box)

    return change


def _renamed_input(new: str) -> Change:
    def change(found: Records, box: Sandbox) -> None:
        name = json.dumps(_filled(new, box)).encode()
        found[PROGRAM] = found[PROGRAM].replace(b'"image"', name)

    return change


def _spec(tree: Any) -> Change:
    def edit(document: Any) -> None:
        signature = document["graph_module"]["module_call_graph"][0]["signature"]
        signature["out_spec"] = json.dumps([1, tree])

    return edited(PROGRAM, edit)


def _enumeration(found: Records, box: Sandbox) -> None:
    context = json.dumps({"__enum__": True, "fqn": f"{MARKER}_trap:Net", "name": "Y"})
    _spec({"type": "builtins.dict", "context": context, "children_spec": []})(found, box)


def _many_nodes(document: Any) -> None:
    nodes = document["graph_module"]["graph"]["nodes"]
    nodes.extend([nodes[-1]] * 2000)


_CODE = "__import__('os').mkdir('@MARKER')"
PROGRAMS: dict[str, tuple[Change, str]] = {
    f"example inputs under their own name {INPUTS}": (_put(INPUTS, evil_inputs, INPUTS), "any"),
    **{
        f"example inputs under the name {name}": (_put(name, evil_inputs, INPUTS), "refused")
        for name in (
            "data/sample_inputs/model.PT",
            "Data/sample_inputs/model.pt",
            "data/Sample_inputs/MODEL.Pt",
            "data//sample_inputs/model.pt",
            "data/./sample_inputs/model.pt",
            "data\\sample_inputs\\model.pt",
            "data/sample_inputs/../sample_inputs/model.pt",
            "data/sample_inputs/evil.pt",
        )
    },
    "example inputs of another case beside good ones": (
        _put("data/sample_inputs/model.PT", evil_inputs),
        "refused",
    ),
    "an extra file that is Python": (_put(f"extra/{MARKER}.py", lambda b: b"x"), "any"),
    "a record of no known name": (_put(f"data/{MARKER}.py", lambda b: b"x"), "refused"),
    "a record that climbs out": (_put(f"../../{MARKER}", lambda b: b"x"), "refused"),
    "a compiled library": (_put("data/aotinductor/model/x.so", lambda b: b"\x7fELF"), "refused"),
    "a second program": (_put("models/other.json", lambda b: b"{}"), "refused"),
    "weights as a pickle": (_put("data/weights/model.pt", evil_inputs), "refused"),
    "a pickled weight": (_pickled_weight, "refused"),
    "an opaque constant": (_pickled_constant("opaque_obj_0"), "refused"),
    "a custom object": (_pickled_constant("custom_obj_0"), "refused"),
    "a weight from outside": (_weight(path_name="../../secret/id_secret"), "refused"),
    "a weight that is the program": (_weight(path_name="../../models/model.json"), "refused"),
    "a size that is code": (_expression(_CODE), "refused"),
    **{
        f"the size {text[:40]}": (_expression(text), "refused")
        for text in (
            "9**9**9**9",
            "Pow(Integer(9), Pow(Integer(9), Pow(Integer(9), Integer(9))))",
            "1<<99999999999",
            "Mod(1,0)",
            "FloorDiv(Integer(1), Integer(0))",
            "Integer('9**9**9**9')",
            "Symbol('9**9**9**9')",
            "Float('1e999999999')",
            "Rational(1, 0)",
            "Symbol('s0').__class__",
            "(lambda: 0)()",
            "factorial(10**9)",
            "s0 if True else 1",
            "Max()",
            "",
        )
    },
    "a size of a million digits": (_expression("9" * 1_000_000), "refused"),
    "a size of a million digits in Integer": (
        _expression(f"Integer({'9' * 1_000_000})"),
        "refused",
    ),
    "a size in 100,000 brackets": (_expression("(" * 100_000 + "1" + ")" * 100_000), "refused"),
    "a size with 100,000 signs": (_expression("-" * 100_000 + "1"), "refused"),
    "a size with 100,000 operands": (_expression("+".join(["s0"] * 100_000)), "refused"),
    "a size of Max of Max": (_expression("Max(" * 500 + "1" + ")" * 500), "refused"),
    "a negative size": (_size({"as_int": -5}), "refused"),
    "a size of 2**70": (_size({"as_int": 2**70}), "refused"),
    "a size that is text": (_size({"as_int": "16"}), "refused"),
    "a size that is nothing": (_size(None), "refused"),
    "a weight of 10**12 elements": (
        _weight(sizes=[{"as_int": 10**6}, {"as_int": 10**6}, {"as_int": 1}, {"as_int": 1}]),
        "refused",
    ),
    "a weight expanded by strides of 0": (
        _weight(
            sizes=[{"as_int": 10**6}, {"as_int": 10**6}, {"as_int": 1}, {"as_int": 1}],
            strides=[{"as_int": 0}] * 4,
        ),
        "refused",
    ),
    "a weight at an offset of 2**60": (_weight(storage_offset={"as_int": 2**60}), "refused"),
    "a weight of no dtype": (_weight(dtype=99), "refused"),
    "a weight of no layout": (_weight(layout=99), "any"),
    "a weight with no bytes": (_put("data/weights/weight_0", lambda b: b""), "refused"),
    "a target that saves": (_call("torch.ops.aten.save.default", filename="@MARKER"), "refused"),
    "a target that maps a file": (
        _call("torch.ops.aten.from_file.default", filename="@SECRET", shared=True, size=4),
        "refused",
    ),
    **{
        f"the target {target}": (_call(target, a="@MARKER"), "refused")
        for target in (
            "posix.system",
            "torch.serialization.os.mkdir",
            "torch.ops.load_library",
            "torch.ops.image.write_file.default",
            "torch.ops.aten.relu.default.__call__",
            "_operator.call",
            "_operator.attrgetter",
            "builtins.eval",
            "torch.hub.load",
            "math.__loader__.load_module",
            "torch.ops.higher_order.flat_apply",
            "#evil:op",
        )
    },
    "a name that is code": (_renamed_input(f"x={_CODE}"), "refused"),
    "a name that is two lines": (_renamed_input(f"x\n    {_CODE}"), "refused"),
    "a name that sets a terminal's title": (_renamed_input(f"x{TITLE}"), "refused"),
    "a stack of modules that is code": (
        _replaced("nn_module_stack", f'L__self__,,a;L__self__x,x"),{_CODE}("x,b'),
        "refused",
    ),
    "a stack of modules that sets a terminal's title": (
        _replaced("nn_module_stack", f"L__self__,,a.B;L__self___conv,conv{TITLE},a.C{TITLE}"),
        "refused",
    ),
    "a stack trace of two lines of code": (
        _replaced("stack_trace", f"# x\r{_CODE}"),
        "any",
    ),
    "an enumeration": (_enumeration, "refused"),
    "a namedtuple as output": (
        _spec({"type": "collections.namedtuple", "context": "null", "children_spec": []}),
        "refused",
    ),
    "a tree of outputs 20,000 deep": (
        edited(
            PROGRAM,
            lambda d: d["graph_module"]["module_call_graph"][0]["signature"].update(
                out_spec='[1, {"type": "builtins.tuple", "context": null, "children_spec": ['
                * 20_000
            ),
        ),
        "refused",
    ),
    "JSON 100,000 deep": (_put(PROGRAM, lambda b: b"[" * 100_000 + b"]" * 100_000), "refused"),
    "JSON that ends early": (_put(PROGRAM, lambda b: b'{"graph_module": '), "refused"),
    "JSON that is no UTF-8": (_put(PROGRAM, lambda b: b"\xff\xfe{}"), "refused"),
    "JSON that is a list": (_put(PROGRAM, lambda b: b"[]"), "refused"),
    "a program of a later schema": (
        _replaced("schema_version", {"major": 999, "minor": 0}),
        "refused",
    ),
    "a program without nodes": (_replaced("nodes", []), "refused"),
    "nodes that are numbers": (_replaced("nodes", [1, 2, 3]), "refused"),
    "2,000 copies of a node": (edited(PROGRAM, _many_nodes), "any"),
    "a byte order of its own": (_put("byteorder", lambda b: b"middle"), "any"),
    "an archive of a version of its own": (_put("archive_version", lambda b: b"9" * 99), "any"),
    "no weights' table": (lambda found, box: found.pop(WEIGHTS), "refused"),
    "weights 100,000 times the same": (
        edited(
            WEIGHTS,
            lambda d: d["config"].update(
                {f"w{n}": d["config"]["conv.weight"] for n in range(2_000)}
            ),
        ),
        "any",
    ),
}
"""Archives of torch.export with one thing changed."""


def _program(change: Change, root: str | None = None) -> Callable[[Sandbox], bytes]:
    return lambda box: rezipped(lambda found: change(found, box), root)


def _twice(first: bool) -> Callable[[Sandbox], bytes]:
    """Two records of example inputs, one good and one evil."""

    def make(box: Sandbox) -> bytes:
        root, found = records()
        pairs = [(f"{root}/{name}", data) for name, data in found.items()]
        evil = (f"{root}/{INPUTS}", evil_inputs(box))
        return zipped([evil, *pairs] if first else [*pairs, evil])

    return make


def _two_roots(box: Sandbox) -> bytes:
    root, found = records()
    evil = {f"other/{INPUTS}": evil_inputs(box)}
    return zipped({**{f"{root}/{name}": data for name, data in found.items()}, **evil})


def _packed_program(box: Sandbox) -> bytes:
    root, found = records()
    found["data/weights/weight_9"] = bytes(10**9)
    return zipped({f"{root}/{name}": data for name, data in found.items()}, packed=True)


def _programs() -> Iterator[Attack]:
    for name, (change, expect) in PROGRAMS.items():
        file = "evil.pth" if "model.PT" in name else "model.pt2"
        yield attack(f"pt2: {name}", _program(change), expect, file)
    yield attack("pt2: example inputs twice, evil first", _twice(True), file="model.pt2")
    yield attack("pt2: example inputs twice, evil last", _twice(False), file="model.pt2")
    yield attack("pt2: example inputs in another root", _two_roots, file="model.pt2")
    yield attack("pt2: a record of a gigabyte of zeros", _packed_program, file="model.pt2")
    yield attack(
        "pt2: half of the file", lambda b: program()[: len(program()) // 2], file="model.pt2"
    )
    yield attack(
        "pt2: the format before torch 2.8",
        lambda b: zipped({"serialized_exported_program.json": b"{}", "version": b"8.1"}),
        file="model.pt2",
    )


# safetensors, shards, and what lies beside ------------------------------------------------------


def safetensors(header: Any, data: bytes = bytes(64), length: int | None = None) -> bytes:
    """A file of these bytes; `length` is what it says of its header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    return struct.pack("<Q", size) + text + data


def entry(begin: int = 0, end: int = 64, dtype: str = "F32", shape: Any = (16,)) -> dict[str, Any]:
    """A tensor in the header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


SAFETENSORS: dict[str, tuple[bytes, str]] = {
    "a header of 2**39 bytes": (safetensors({"w": entry()}, length=2**39), "refused"),
    "a header beyond the end": (safetensors({"w": entry()}, length=2**20), "refused"),
    "a header cut short": (safetensors({"w": entry()}, length=20), "refused"),
    "a header 100,000 deep": (safetensors(b'{"w":' + b"[" * 100_000), "refused"),
    "a header of a list": (safetensors([1, 2]), "refused"),
    "a header that is no UTF-8": (safetensors(b'{"\xff": 1}'), "refused"),
    "a tensor backwards": (safetensors({"w": entry(64, 0)}), "refused"),
    "a tensor outside": (safetensors({"w": entry(0, 2**40)}), "refused"),
    "tensors that overlap": (safetensors({"a": entry(), "b": entry()}), "refused"),
    "a tensor of too many elements": (
        safetensors({"w": entry(shape=[2**40, 2**40])}),
        "refused",
    ),
    "a tensor of no elements and a huge side": (
        safetensors({"0.weight": entry(0, 0, shape=[0, 2**62])}, b""),
        "any",
    ),
    "a tensor of a negative side": (safetensors({"w": entry(shape=[-16])}), "refused"),
    "a tensor of no dtype": (safetensors({"w": entry(dtype="F31")}), "refused"),
    "a tensor of 4 bits": (safetensors({"0.weight": entry(dtype="F4", shape=[128])}), "any"),
    "a shape that is text": (safetensors({"w": entry(shape="16")}), "refused"),
    "metadata of numbers": (safetensors({"__metadata__": {"a": 1}, "w": entry()}), "refused"),
    "names that set a terminal's title": (safetensors({f"a{TITLE}": entry()}), "any"),
    "50,000 tensors of nothing": (
        safetensors({f"w{n}": entry(0, 0, shape=[0]) for n in range(10_000)}, b""),
        "any",
    ),
}


def _shards(index: Any, **others: bytes) -> Callable[[Sandbox], None]:
    def make(box: Sandbox) -> None:
        surroundings(box, "nothing.pth")
        for name, data in others.items():
            (box.given / name.replace("__", ".")).write_bytes(data)
        text = index if isinstance(index, bytes) else json.dumps(index).encode()
        (box.given / "model.index.json").write_bytes(text)

    return make


def _linked(name: str, target: str) -> Callable[[Sandbox], None]:
    """A link beside the index, under a name that it lists."""

    def make(box: Sandbox) -> None:
        _shards({"weight_map": {"w": name}})(box)
        (box.given / name).symlink_to(box.filled(target))

    return make


def _fifo(name: str, first: Callable[[Sandbox], None]) -> Callable[[Sandbox], None]:
    def make(box: Sandbox) -> None:
        first(box)
        (box.given / name).unlink(missing_ok=True)
        os.mkfifo(box.given / name)

    return make


def _device(name: str, first: Callable[[Sandbox], None]) -> Callable[[Sandbox], None]:
    def make(box: Sandbox) -> None:
        first(box)
        (box.given / name).unlink(missing_ok=True)
        (box.given / name).symlink_to("/dev/zero")

    return make


def _weights() -> bytes:
    weights = {"0.weight": torch.zeros(4, 3, 3, 3), "0.bias": torch.zeros(4)}
    file = io.BytesIO()
    torch.save(weights, file)
    return file.getvalue()


def _map(name: Any) -> Callable[[Sandbox], None]:
    return _shards({"weight_map": {"w": name}})


SHARDS: dict[str, Callable[[Sandbox], None]] = {
    "a shard outside": _map("../secret/id_secret"),
    "an absolute shard": _map("/etc/passwd"),
    "a shard that is its index": _map("model.index.json"),
    "a shard that is a number": _map(7),
    "a shard that is a list": _map(["a"]),
    "a shard with a NUL": _map("a\0b"),
    "a shard of a name that sets a terminal's title": _map(f"a{TITLE}"),
    "a shard of a name of 5,000 characters": _map("a" * 5000),
    "an index of a list": _shards([1]),
    "an index of nothing": _shards({}),
    "an index 100,000 deep": _shards(b"[" * 100_000),
    "an index with a number of 10,000 digits": _shards(b'{"weight_map": ' + b"9" * 10_000 + b"}"),
    "an index that is no UTF-8": _shards(b"\xff\xfe{}"),
    "an index that is a FIFO": _fifo("model.index.json", _shards({})),
    "an index that is a device": _device("model.index.json", _shards({})),
    "a shard that is a FIFO": _fifo("a.pth", _map("a.pth")),
    "a shard that is a device": _device("a.pth", _map("a.pth")),
    "a shard that links to a secret": _linked("a.pth", "{root}/secret/id_secret"),
    "a shard that calls": _shards(
        {"weight_map": {"w": "a.pth"}}, a__pth=around(CONSTRUCTORS[next(iter(CONSTRUCTORS))])
    ),
    "one shard 200 times": _shards(
        {"weight_map": {f"w{n}": f"{'./' * n}a.pth" for n in range(200)}},
        a__pth=around({"w": floats((16,), (1,))}),
    ),
}
INDEX_COMMANDS = [
    "layers {given}/model.index.json",
    "run {given}/model.index.json {given}/photo.png --out out{n}",
    "identify {given}/model.index.json",
    "layers {given}/net.py:make --weights {given}/model.index.json",
]


def _beside(make: Callable[[Sandbox], object]) -> Callable[[Sandbox], None]:
    """Honest weights, with a config.json of somebody else's beside them."""

    def place(box: Sandbox) -> None:
        surroundings(box, "model.pth")
        (box.given / "model.pth").write_bytes(_weights())
        make(box)

    return place


def _config(content: Any) -> Callable[[Sandbox], object]:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return _beside(lambda box: (box.given / "config.json").write_bytes(text))


CONFIGS: dict[str, Callable[[Sandbox], object]] = {
    "a config.json that is a FIFO": _beside(lambda b: os.mkfifo(b.given / "config.json")),
    "a config.json that is a device": _device("config.json", _beside(lambda b: None)),
    "a config.json that is a folder": _beside(lambda b: (b.given / "config.json").mkdir()),
    "a config.json 100,000 deep": _config(b'{"a":' + b"[" * 100_000),
    "a config.json of 40 MB": _config(b'{"a": "' + b"x" * 40_000_000 + b'"}'),
    "a config.json that is no UTF-8": _config(b"\xff\xfe{}"),
    "a config.json of a list": _config([1]),
    "a config.json with a number of 10,000 digits": _config(b'{"a": ' + b"9" * 10_000 + b"}"),
    "an architecture that is a list": _config({"architecture": ["resnet18"]}),
    "an architecture of 10**6 characters": _config({"architecture": "a" * 10**6}),
    "an architecture that sets a terminal's title": _config({"architecture": TITLE}),
    "an architecture that is a path": _config({"architecture": "../../secret/id_secret"}),
    "an architecture from a hub": _config({"architecture": "hf-hub:evil/model"}),
    "10**12 classes": _config({"architecture": "resnet18", "num_classes": 10**12}),
}


def _kept(make: Callable[[], bytes]) -> Callable[[Sandbox], bytes]:
    return lambda box: make()


def all_attacks() -> Iterator[Attack]:
    """All of this file."""
    yield from _programs()
    for name, own in CALLS.items():
        yield attack(f"pickle: {name}", lambda b, own=own: around(own(b)))
        yield attack(f"legacy pickle: {name}", lambda b, own=own: legacy(dumped(own(b))))
    for name, value in CONSTRUCTORS.items():
        yield attack(f"constructor: {name}", lambda b, value=value: around(value))
    yield attack(
        "constructor: Linear in the legacy format",
        lambda b: legacy(dumped(Reduce(Global(LINEAR), (30000, 30000)))),
    )
    for name, own in STATES.items():
        expect = "any" if name in HARMLESS else "refused"
        yield attack(f"state: {name}", lambda b, own=own: around(own(b)), expect)
    yield attack(
        "state: a child's name sets a terminal's title", lambda b: around(_named(b)), "any"
    )
    for name, (make, expect) in BOUNDS.items():
        yield attack(f"bounds: {name}", make, expect)
    for name, make in DISGUISES.items():
        yield attack(f"disguise: {name}", make)
    for name, (data, expect) in SAFETENSORS.items():
        yield attack(f"safetensors: {name}", lambda b, data=data: data, expect, "model.safetensors")
    for name, place in SHARDS.items():
        expect = "any" if name in ("one shard 200 times",) else "refused"
        yield Attack(f"shards: {name}", place, INDEX_COMMANDS, expect, own_code=("given/net.py",))
    for name, place in CONFIGS.items():
        lines = everywhere("model.pth")
        yield Attack(f"beside: {name}", place, lines, "any", own_code=("given/net.py",))
    honest = {
        "honest.pt2": program,
        "honest.pth": lambda: _saved(nn.Sequential(nn.Conv2d(3, 4, 1))),
    }
    for file, content in honest.items():
        yield Attack(
            f"control: {file} goes through every command",
            attack("", _kept(content), file=file).make,
            everywhere(file)[:3],
            "good",
        )
