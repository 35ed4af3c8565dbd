"""Hostile pickles in model files: calls, constructors, states of modules, disguised names."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
from hostile_audit import MARKER
from hostile_harness import TITLE, Attack, Sandbox
from hostile_models import attack, control, zipped
from hostile_nodes import (
    CONV,
    LINEAR,
    LSTM,
    RELU,
    Build,
    Global,
    NewObj,
    Raw,
    Reduce,
    around,
    doubled,
    dumped,
    floats,
    legacy,
    module,
    opcodes,
    ordered,
    partial,
    python,
    relu,
    scalar,
    shell,
    state_of,
    system_call,
    wrapped,
)
from torch import nn


def _mkdir(box: Sandbox) -> Any:
    """A callable that leaves the marker whatever it is called with: a partial of a partial."""
    return partial("posix:mkdir", str(box.marker))


CALLS: dict[str, Callable[[Sandbox], Any]] = {
    "os.system": system_call,
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
        (Global("collections:OrderedDict"), Global("builtins:dict"), system_call(b)),
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
        (3, 4, 3, 1, 1, 1, Raw(b"".join(opcodes(partial("posix:mkdir", "/nowhere"))))),
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
        _forward_pre_hooks=ordered(h=partial(LINEAR, 30000, 30000))
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
        Raw(b"".join((*opcodes(NewObj(Global(RELU))), b"q\x07"))),
        {**state_of(nn.ReLU()), "_modules": {"a": Raw(b"h\x07")}},
    ),
    "groups of a convolution are text": lambda b: _conv(groups=f"a{TITLE}"),
    "channels of a convolution are 10**6": lambda b: _conv(in_channels=10**6),
    "channels of a convolution are a tuple doubled 60 times": lambda b: _conv(
        in_channels=doubled(60, b"\x86")
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


def _saved(module: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(module, file)
    return file.getvalue()


def _tar(box: Sandbox) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for name in ("sys", "storages", "tensors", "pickle"):
            member, data = tarfile.TarInfo(name), dumped(system_call(box))
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return file.getvalue()


def _swapped_names(box: Sandbox) -> bytes:
    """STACK_GLOBAL, whose names come from the memo in the wrong order."""
    system, posix = (b"".join(scalar(word)) for word in ("system", "posix"))
    argument = b"".join(scalar(shell(box)))
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
    "a class by INST": lambda b: b"\x80\x02(" + b"".join(scalar(shell(b))) + b"iposix\nsystem\n.",
    "a class by OBJ": lambda b: b"\x80\x02(cposix\nsystem\n" + b"".join(scalar(shell(b))) + b"o.",
    "an extension code": lambda b: wrapped(b"\x80\x02\x82\x01)R."),
    "NEWOBJ_EX of a module": lambda b: wrapped(
        b"\x80\x04" + b"".join((*opcodes(Global(LINEAR)), *opcodes((30000, 30000)), b"}\x92."))
    ),
    "two records data.pkl": lambda b: zipped(
        [
            ("a/data.pkl", dumped(system_call(b))),
            ("a/data.pkl", b"\x80\x02}."),
            ("a/version", b"3\n"),
        ]
    ),
    "data.pkl and DATA.PKL": lambda b: zipped(
        {"a/DATA.PKL": dumped(system_call(b)), "a/data.pkl": b"\x80\x02}.", "a/version": b"3\n"}
    ),
    "a good zip behind a bad pickle": lambda b: dumped(system_call(b)) + wrapped(b"\x80\x02}."),
    "a tar": _tar,
    "a record that climbs out": lambda b: around({}, **{f"../../{MARKER}": b"x"}),
    "a pickle of protocol 0": lambda b: f"cposix\nsystem\n(V{shell(b)}\ntR.".encode(),
    "a second pickle behind the first": lambda b: legacy(b"\x80\x02}." + dumped(system_call(b))),
    "TorchScript": lambda b: wrapped(
        b"\x80\x02}.", **{"constants.pkl": dumped(system_call(b)), "code/x.py": python(b).encode()}
    ),
    "a zip of encrypted records": lambda b: wrapped(b"\x80\x02}.").replace(
        b"PK\x01\x02\x14\x03\x14\x00\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01\x00"
    ),
}
"""Ways to name a function so that a checker overlooks it."""


def all_attacks() -> Iterator[Attack]:
    """All of this file, and an honest model."""
    for name, value in CALLS.items():
        yield attack(f"pickle: {name}", lambda b, value=value: around(value(b)))
        yield attack(f"legacy pickle: {name}", lambda b, value=value: legacy(dumped(value(b))))
    for name, value in CONSTRUCTORS.items():
        yield attack(f"constructor: {name}", lambda b, value=value: around(value))
    in_legacy = legacy(dumped(Reduce(Global(LINEAR), (30000, 30000))))
    yield attack("constructor: Linear in the legacy format", lambda b: in_legacy)
    for name, value in STATES.items():
        expect = "any" if name in HARMLESS else "refused"
        yield attack(f"state: {name}", lambda b, value=value: around(value(b)), expect)
    title = "state: a child's name sets a terminal's title"
    yield attack(title, lambda b: around(_named(b)), "any")
    for name, make in DISGUISES.items():
        yield attack(f"disguise: {name}", make)
    yield control("honest.pth", lambda: _saved(nn.Sequential(nn.Conv2d(3, 4, 1))))
