"""Hostile pickles in model files, made from opcodes: calls, constructors, states,
disguised names; and how a model file is given to every command that takes one."""

from __future__ import annotations

import io
import json
import pickle
import re
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from hostile_audit import MARKER
from hostile_harness import TITLE, Attack, Sandbox
from hostile_images import png, saved_bytes, zipped
from torch import nn


class Opcodes(bytes):
    """Instructions that leave one value on the stack."""


def opcodes(value: Any) -> Opcodes:
    """The instructions that make a value, in which there may be others."""
    if isinstance(value, Opcodes):
        return value
    if isinstance(value, tuple):
        return Opcodes(b"(" + _joined(value) + b"t")
    if isinstance(value, list):
        return Opcodes(b"](" + _joined(value) + b"e")
    if isinstance(value, dict):
        return Opcodes(b"}(" + _joined(chain(*value.items())) + b"u")
    if isinstance(value, str):
        data = value.encode("utf-8", "surrogatepass")
        return Opcodes(b"X" + len(data).to_bytes(4, "little") + data)
    return Opcodes(pickle.dumps(value, protocol=2)[2:-1])


def _joined(values: Iterable[Any]) -> bytes:
    return b"".join(map(opcodes, values))


def named(name: str) -> Opcodes:
    """What has this name: `os.path:join`."""
    return Opcodes("c{}\n{}\n".format(*name.split(":", 1)).encode())


def call(function: Opcodes | str, *arguments: Any) -> Opcodes:
    """A call of what has this name, or of what these instructions make."""
    if isinstance(function, str):
        function = named(function)
    return Opcodes(function + opcodes(arguments) + b"R")


LINEAR = "torch.nn.modules.linear:Linear"


def dumped(value: Any) -> bytes:
    return b"\x80\x02" + opcodes(value) + b"."


def around(value: Any, **more: bytes) -> bytes:
    """The zip file that torch.save would make around a pickle, with 64 bytes of data."""
    return wrapped(dumped(value), **more)


def wrapped(code: bytes, **more: bytes) -> bytes:
    records = {
        "data.pkl": code,
        "byteorder": b"little",
        "data/0": bytes(64),
        "version": b"3\n",
        **more,
    }
    members = [(f"a/{name}", data) for name, data in records.items()]
    return zipped(*members, packed=False)


NET = """from torch import nn


def make():
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU())

"""


def everywhere(name: str) -> list[str]:
    """The commands that read a model file; all by one reader, so that an attack needs
    one."""
    file = f"{{given}}/{name}"
    return [
        f"layers {file}",
        f"run {file} {{given}}/photo.png --out out{{n}}",
        f"identify {file}",
        f"layers {{given}}/net.py:make --weights {file}",
        "layers {given}/net.py:make --weights {given}/all.index.json",
    ]


def attack(name: str, data: bytes, expect: str = "refused") -> Attack:
    """A model file of these bytes, in one command or the other, on its own or as a
    shard."""

    def place(box: Sandbox) -> None:
        surroundings(box, "model.pth")
        (box.given / "model.pth").write_bytes(data)

    lines = everywhere("model.pth")
    line = lines[zlib.crc32(name.encode()) % len(lines)]
    return Attack(name, place, [line], expect, own_code=("given/net.py",))


def surroundings(box: Sandbox, file: str) -> None:
    """A photo, an index that names the file, a factory that takes weights, and a trap
    to import."""
    (box.given / "photo.png").write_bytes(png())
    (box.given / "net.py").write_text(NET)
    index = {"weight_map": {"0.weight": file, "0.bias": file}}
    (box.given / "all.index.json").write_text(json.dumps(index))
    trap = f"open({str(box.marker)!r}, 'w')\nclass Net: ...\n"
    (box.given / f"{MARKER}_trap.py").write_text(trap)


YOLO = "ultralytics.nn.tasks:DetectionModel"
TORCHVISION = "ultralytics.nn.modules.block:TorchVision"
QAT = "torch.ao.nn.qat.modules.linear:Linear"
SUBCLASS = "torch._tensor:_rebuild_from_type_v2"
BOX_IOU = "torchvision.ops.boxes:box_iou"
SYSTEM = "os:system"
PARTIAL = "functools:partial"
SET = "builtins:set"
FORMAT = "timm.layers.format:Format"
COMPOSE = "torchvision.transforms.transforms:Compose"
V2 = "torch._utils:_rebuild_tensor_v2"
V3 = "torch._utils:_rebuild_tensor_v3"
FROM_BYTES = "torch.storage:_load_from_bytes"
FLOATS = named("torch:FloatStorage")


def new(name: str, *arguments: Any) -> Opcodes:
    """`cls.__new__(cls, *arguments)` of the class of this name."""
    return Opcodes(named(name) + opcodes(arguments) + b"\x81")


def built(target: Opcodes, state: Any) -> Opcodes:
    return Opcodes(target + opcodes(state) + b"b")


def storage(*identity: Any) -> Opcodes:
    return Opcodes(opcodes(identity) + b"Q")


def ordered(**items: Any) -> Opcodes:
    made = call("collections:OrderedDict")
    if items:
        made = Opcodes(made + opcodes(items)[1:])
    return made


def floats(size: tuple[int, ...], stride: tuple[int, ...], key: str = "0") -> Opcodes:
    """A tensor on a storage of 16 floats."""
    data = storage("storage", FLOATS, key, "cpu", 16)
    return call(V2, data, 0, size, stride, False, ordered())


def partial(name: str, *arguments: Any) -> Opcodes:
    target = call(PARTIAL, named(name))
    return built(target, (named(name), arguments, {}, None))


def state_of(module: nn.Module) -> dict[str, Any]:
    """The state of a module without parameters."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()} or ordered()
        if isinstance(value, set):
            return call(SET, list(value))
        return value

    return plain(vars(module))


def module(name: str, **state: Any) -> Opcodes:
    """A module as torch pickles it, with some of its state replaced."""
    return built(new(name), {**state_of(nn.Identity()), **state})


RELU = "torch.nn.modules.activation:ReLU"
CONV = "torch.nn.modules.conv:Conv2d"


def relu(**state: Any) -> Opcodes:
    return module(RELU, **{"inplace": False, **state})


SHELL = f"touch ../{MARKER}"
"""A command that would leave the marker, from the current folder."""
PYTHON = f"open('../{MARKER}', 'w')"
"""Code that would leave the marker."""
SYSTEM_CALL = call("posix:system", SHELL)


def legacy(code: bytes) -> bytes:
    """torch's format before 1.6 around a pickle without tensors."""
    head = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True, "type_sizes": {}}]
    start = b"".join(pickle.dumps(part, protocol=2) for part in head)
    return start + code + pickle.dumps([], protocol=2)


RECIPE = {
    "activation": PYTHON,
    "backbone": [[-1, 1, "nn.Identity", []]],
    "nc": 1,
    "head": [],
}
"""What Ultralytics builds a model of: its activation is evaluated."""


def _hole(kept: str, weight: Any) -> Opcodes:
    """A layer whose forward calls a class that it keeps, with its weight."""
    return module(QAT, weight_fake_quant=named(kept), weight=weight, bias=None)


def attribute(value: Any, name: str) -> Opcodes:
    """`getattr(value, name)`."""
    return call("builtins:getattr", value, name)


IMPORTED = attribute(call("builtins:__import__", "os"), "mkdir")
MAKES_FOLDER = partial("posix:mkdir", f"../{MARKER}")


def _late_hooks() -> tuple[Opcodes, Opcodes]:
    """A dict of a module's is filled after the module was built."""
    made = Opcodes(ordered() + b"q\x07")
    filled = Opcodes(b"h\x07" + opcodes("x") + named(BOX_IOU) + b"s")
    return relu(_forward_hooks=made), filled


def _own_child() -> Opcodes:
    target = Opcodes(new(RELU) + b"q\x07")
    return built(target, {**state_of(nn.ReLU()), "_modules": {"a": Opcodes(b"h\x07")}})


def _hidden_child() -> Opcodes:
    """A dict's method hides a child."""
    methods = {"values": named(SET), "items": named(SET)}
    return relu(_modules=built(ordered(a=relu(forward=named(BOX_IOU))), methods))


def _parameter(attributes: Any, hooks: Any) -> Opcodes:
    rebuild = "torch._utils:_rebuild_parameter_with_state"
    return call(rebuild, floats((1,), (1,)), True, hooks, attributes)


NAMES = (
    "torch.hub:load",
    "torch.serialization:load",
    "torch.nn.modules.module:Module.compile",
    "torchvision.models.resnet:resnet18",
    "torch.fx.graph_module:reduce_graph_module",
    "torch.nn.utils.weight_norm:WeightNorm",
    "torch.nn.parameter:UninitializedParameter",
    "torch.nn.cpp:ModuleWrapper",
    "torch.jit._script:ScriptModule",
    "torchvision.models.feature_extraction:DualGraphModule",
    "torch.nn.functional:relu6",
    "torch.nn..modules:Linear",
    "torch.nn.\x1b[31m:Linear",
    "torch.nn.modules/../../../evil:Net",
    "torch.nn.modules.activation:ＲeLU",
)
"""Names near those that are listed; none may be imported or called."""

CALLS: dict[str, Any] = {
    "os.system": SYSTEM_CALL,
    "eval under its name of Python 2": call("__builtin__:eval", PYTHON),
    "getattr of an import": call(IMPORTED, f"../{MARKER}"),
    "a dotted name through torch": call("torch.serialization:os.system", SHELL),
    "a partial of mkdir": call(MAKES_FOLDER),
    "a tensor subclass made by mkdir": call(
        SUBCLASS,
        named("posix:mkdir"),
        named("torch:Tensor"),
        (f"../{MARKER}",),
        {},
    ),
    "a class beside the file": new(f"{MARKER}_trap:Net"),
    "an import on sight": named("antigravity:fly"),
    "an import by torch": call("torch._utils:_import_dotted_name", "antigravity.fly"),
    "a name that sets a terminal's title": call(f"os:{TITLE}"),
    **{f"the name {name!a}": call(name) for name in NAMES},
    # hole 1.1, and its relatives
    "a kept class that evaluates": _hole(YOLO, RECIPE),
    "a kept class that downloads": _hole(TORCHVISION, "resnet18"),
    # constructors
    "Linear(30000, 30000)": call(LINEAR, 30000, 30000),
    "Linear by NEWOBJ with arguments": new(LINEAR, 30000, 30000),
    "a class through a tensor subclass": call(
        SUBCLASS, named(TORCHVISION), named("torch:Tensor"), ("resnet18",), {}
    ),
    "a partial, called": call(partial(LINEAR, 30000, 30000)),
    "an enumeration of other values": call(FORMAT, "wild"),
}
"""Names, calls and constructors: what is attempted."""

HOOKS = {
    "_forward_hooks": named(BOX_IOU),
    "_forward_pre_hooks": partial(LINEAR, 3, 3),
    "_backward_hooks": relu(),
    "_load_state_dict_post_hooks": named(SET),
}
_METHODS_TEXT = """
    forward _call_impl state_dict register_forward_hook __class__ __call__ __dict__ __setattr__
    _apply to named_modules extra_repr children _compiled_call_impl
"""
METHODS = tuple(_METHODS_TEXT.split())
STATES: dict[str, Any] = {
    **{
        f"{name} is replaced by a class": relu(**{name: named(LINEAR)})
        for name in METHODS
    },
    "forward is another module's": relu(forward=attribute(relu(), "forward")),
    "__setstate__ is replaced, then called": built(
        relu(__setstate__=partial(LINEAR)), {}
    ),
    **{
        f"{name} are filled": relu(**{name: ordered(x=hook)})
        for name, hook in HOOKS.items()
    },
    "hooks that come late": _late_hooks(),
    "a partial that becomes another": relu(
        f=built(partial(LINEAR), (named("_codecs:encode"), ("x",), {}, None))
    ),
    "a namespace that turns into a class": built(
        new("argparse:Namespace"), ({}, {"__class__": named(LINEAR)})
    ),
    "a module is its own child": _own_child(),
    "a dict's method hides a child": _hidden_child(),
    "a child's name is half a letter": relu(_modules={"\ud800": relu()}),
    "a parameter is a module": relu(_parameters={"a": relu()}),
    "a convolution without its settings": module(CONV, groups=1),
    "a weight of 2**40 floats with stride 0": {"w": floats((2**20, 2**20), (0, 0))},
    "a storage of another record": {"w": floats((16,), (1,), "../../secret/id_secret")},
}
"""States of modules and tensors that mean no good."""

_CALLABLE_TEXT = """
    builtins:exec builtins:type builtins:map types:FunctionType types:CodeType
    operator:attrgetter functools:reduce importlib:import_module runpy:run_path ctypes:CDLL
    pickle:loads marshal:loads torch:load numpy:load pydoc:locate subprocess:Popen shutil:rmtree
    torch.jit:load torch._utils:_rebuild_qtensor torch._utils:_rebuild_nested_tensor
    torch._utils:_rebuild_sparse_tensor torch._utils:_rebuild_wrapper_subclass
    torch.nn.parameter:Parameter torch.nn.parameter:UninitializedParameter
"""
CALLABLE = tuple(_CALLABLE_TEXT.split())
"""What would do something, or make something that is no plain tensor."""

IDENTITIES: dict[str, Any] = {
    "nothing": (),
    "a word": ("storage",),
    "a module that is a text": ("module", "os", "net.py", "import os"),
    "a storage of a class": ("storage", named(LINEAR), "0", "cpu", 16),
    "a key that is a number": ("storage", FLOATS, 0, "cpu", 16),
    "a key that cannot be hashed": ("storage", FLOATS, [], "cpu", 16),
    "a length below zero": ("storage", FLOATS, "0", "cpu", -16),
    "a length that is a class": ("storage", FLOATS, "0", "cpu", named(LINEAR)),
    "a length of a terabyte": ("storage", FLOATS, "0", "cpu", 2**40),
    "a device that is a class": ("storage", FLOATS, "0", named(LINEAR), 16),
    "a view of a view": ("storage", FLOATS, "0", "cpu", 16, ("1", 0, 2**40)),
}
"""Persistent ids, which torch takes apart itself."""

SIXTEEN = storage("storage", FLOATS, "0", "cpu", 16)


def rebuilt(offset: Any, size: Any, stride: Any, *more: Any, by: str = V2) -> Opcodes:
    return call(by, SIXTEEN, offset, size, stride, False, ordered(), *more)


TENSORS: dict[str, Any] = {
    "one float beyond": rebuilt(0, (17,), (1,)),
    "an offset at the end": rebuilt(16, (1,), (1,)),
    "an offset before the beginning": rebuilt(-1, (4,), (1,)),
    "a stride that leads back": rebuilt(15, (4,), (-1,)),
    "a stride that leads out": rebuilt(0, (2, 2), (1, 15)),
    "no stride": rebuilt(0, (4,), ()),
    "a size that is a fraction": rebuilt(0, (4.0,), (1,)),
    "a size that is true": rebuilt(0, (True,), (1,)),
    "a size that is a class": rebuilt(0, named(LINEAR), (1,)),
    "sizes that overflow": rebuilt(0, (2**62, 2**62), (0, 0)),
    "sizes that overflow beside none": rebuilt(0, (2**62, 2**62, 0), (0, 0, 0)),
    "doubles on floats": rebuilt(0, (16,), (1,), named("torch:float64"), by=V3),
    "a dtype that is a function": rebuilt(0, (16,), (1,), named("torch:load"), by=V3),
    "marked as negated": rebuilt(0, (16,), (1,), {"neg": True}),
    "a storage that is a class": call(V2, named(LINEAR), 0, (1,), (1,), False, {}),
    "a storage that is a mark": call(V2, FLOATS, 0, (1,), (1,), False, {}),
    "a parameter of a dict": call("torch._utils:_rebuild_parameter", {}, True, {}),
    "a maker that is a module": call(
        SUBCLASS, named(LINEAR), named("torch:Tensor"), (), {"in_features": 1}
    ),
    "a file in the file that is none": call(FROM_BYTES, "x"),
}


def _array(code: Any, shape: Any, data: Any) -> Opcodes:
    dtype = call("numpy:dtype", code, False, True)
    dtype = built(dtype, (3, "<", None, None, None, -1, -1))
    rebuild = "numpy.core.multiarray:_reconstruct"
    array = call(rebuild, named("numpy:ndarray"), (0,), "b")
    return built(array, (1, shape, dtype, False, data))


VALUES: dict[str, Any] = {
    **{f"a tensor, {name}": value for name, value in TENSORS.items()},
    **{f"a call of {name}": call(name, "x") for name in CALLABLE},
    **{f"an object of {name}": built(new(name), {"x": 1}) for name in CALLABLE[:12]},
    "an array of objects": _array("O", (1,), [named(SYSTEM)]),
    "an array of a made-up type": _array("V8", (1,), "12345678"),
    "an array of a type that is a class": _array(named(LINEAR), (1,), "1234"),
    "an array of another shape": _array("f4", (2**40,), "1234"),
    "an array of two free axes": _array("f4", (-1, -1), "1234"),
    "a number of objects": call("numpy.core.multiarray:scalar", "O", "x"),
    "a set of lists": call(SET, [[1]]),
    "a set of itself": Opcodes(b"]q\x09" + call(SET, Opcodes(b"h\x09")) + b"a"),
    "a key that is a list": Opcodes(b"}" + opcodes([1]) + opcodes(2) + b"s"),
    "a namespace of methods": built(
        new("types:SimpleNamespace"), {"keys": named(SYSTEM)}
    ),
    "a namespace of numbers": built(new("argparse:Namespace"), 5),
    "a path of a class": call("pathlib:PosixPath", named(SYSTEM)),
    "a device of a class": call("torch:device", named(LINEAR)),
    "a size of texts": call("torch:Size", ["a"]),
    "an attribute of an enumeration": attribute(named(FORMAT), "__class__"),
    "an enumeration of a class": call(FORMAT, named(LINEAR)),
    "what a hidden module computes": attribute(relu(), "forward_fuse"),
    "a method of a class": attribute(named(LINEAR), "forward"),
    "a function of a module": attribute(named("torch:hub"), "load"),
    "a partial of itself": partial(PARTIAL, named(LINEAR)),
    "a partial of a call": built(call(PARTIAL, named(LINEAR)), (relu(), (), {}, None)),
    "a call of what was called": call(attribute(relu(), "forward"), "x"),
    "a helper that keeps a function": built(
        new(COMPOSE),
        {"transforms": [named(SYSTEM)]},
    ),
    "a helper with another call": built(
        new(COMPOSE),
        {"__call__": named(BOX_IOU)},
    ),
    "a lazy module": module("torch.nn.modules.lazy:LazyModuleMixin"),
    "a graph of somebody's": new(
        "torchvision.models.feature_extraction:DualGraphModule"
    ),
}
"""What may lie beside weights, where it is left out, and what no module may keep."""

KEPT: dict[str, Any] = {
    **{f"a module keeps {name}": relu(kept=value) for name, value in VALUES.items()},
    **{
        f"a persistent id, {name}": storage(*value)
        for name, value in IDENTITIES.items()
    },
}
"""What is read by one function, which the tests of models try in their own process."""


def _shared(depth: int) -> Opcodes:
    """Each module has the next one twice: 2 to the power of the depth."""
    inner = relu()
    for number in range(100, 100 + depth):
        memo = Opcodes(inner + b"q" + bytes([number]))
        again = Opcodes(b"h" + bytes([number]))
        inner = relu(_modules={"a": memo, "b": again})
    return inner


def _deep(depth: int) -> Opcodes:
    inner = relu()
    for _ in range(depth):
        inner = relu(_modules={"a": inner})
    return inner


STRUCTURES: dict[str, Any] = {
    "BUILD twice": built(relu(), {"inplace": True}),
    "BUILD of a class": built(named(LINEAR), {"forward": named(BOX_IOU)}),
    "BUILD of a list": built(opcodes([1]), {"append": named(SYSTEM)}),
    "BUILD of a mark of torch's": built(FLOATS, {"_dtype": named(SYSTEM)}),
    "BUILD of a storage": built(SIXTEEN, {"_untyped_storage": named(SYSTEM)}),
    "EXT1": Opcodes(b"\x82\x01"),
    "EXT2": Opcodes(b"\x83\x01\x01"),
    "EXT4": Opcodes(b"\x84\x01\x01\x01\x01"),
    "a persistent id in text": Opcodes(b"Pos.system\n"),
    "arguments that are a list": Opcodes(named(SYSTEM) + opcodes(["x"]) + b"R"),
    "a class by OBJ": Opcodes(b"(" + named(SYSTEM) + opcodes(SHELL) + b"o"),
    "another's forward": relu(forward=attribute(relu(), "forward")),
    "no method as forward": relu(forward=attribute(named(RELU), "__init__")),
    "children that are a list": relu(_modules=[relu()]),
    "a parameter of two names": relu(_parameters={"a.b": floats((1,), (1,))}),
    "a child in shared children without end": _shared(60),
    "tuples in tuples": Opcodes(b")" + b"\x85" * 200_000),
    "lists in lists": Opcodes(b"]" * 100_000 + b"a" * 99_999),
    "a key that is tuples in tuples": Opcodes(b"})" + b"\x85" * 200_000 + b"Ns"),
    "calls in calls": Opcodes(named(SET) + b")R" * 100_000),
    "modules in modules": _deep(500),
    "bytes that are not there": Opcodes(b"\x96" + (2**40).to_bytes(8, "little")),
    "a memo of 2**31": Opcodes(named(SYSTEM) + b"r\xff\xff\xff\x7f"),
}
"""Instructions that build, call or nest in ways that no honest file has."""
MODULES: dict[str, Any] = {**KEPT, **STRUCTURES}


REASONS = re.compile(
    "which could run any code; nothing was executed|a way that torch.save does not"
    "|whose state replaces its|which would call|holds a functools.partial of"
    "|with a module of an impossible name|lacks parts of an nn.Module|contains itself"
    "|without its data|beyond its data|of an impossible shape|'wild' is not a valid"
    "|holds a (broken|type|key|tensor)|of too many modules|nests values in values"
    "|record size|PytorchStreamReader failed|no weights: a (tuple|list|Storage)"
    "|UnpicklingError: (a persistent id|a storage|a state|an instr|the arg)|EOFError"
)
"""Why these are refused, in words: none of them is merely a file that is broken."""


TRANSFORMER = "torch.nn.modules.transformer:TransformerEncoderLayer"
TAKEN: dict[str, Any] = {
    "a class kept as an activation": module(TRANSFORMER, activation=named(YOLO)),
    "hooks of a tensor": {"w": _parameter({}, ordered(x=named(BOX_IOU)))},
    "attributes of a parameter in the place of methods": relu(
        _parameters={"w": _parameter({"note": named(LINEAR)}, ordered())}
    ),
}
"""What loads, and does no harm when it is used."""


def _swapped_names() -> bytes:
    """STACK_GLOBAL, whose names come from the memo in the wrong order."""
    names = opcodes("system") + b"\x94" + opcodes("posix") + b"\x940"
    return b"\x80\x04" + names + b"0h\x01h\x00\x93" + opcodes(SHELL) + b"\x85R."


def _two_pickles() -> bytes:
    good = ("a/data.pkl", b"\x80\x02}.")
    bad = ("a/data.pkl", dumped(SYSTEM_CALL))
    return zipped(bad, good, ("a/version", b"3\n"), packed=False)


def _hidden_tar() -> bytes:
    """A tar file whose first name begins as a pickle, and which unpacks to a link."""
    link = tarfile.TarInfo("storages")
    link.type = tarfile.LNKTYPE
    link.linkname = "../secret/id_secret"
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        archive.encoding = "latin-1"
        archive.addfile(tarfile.TarInfo("\x80\x02}."))
        archive.addfile(link)
    return file.getvalue()


TORCHSCRIPT = {
    "constants.pkl": dumped(SYSTEM_CALL),
    "code/x.py": PYTHON.encode(),
}
PICKLED_CALL = dumped(SYSTEM_CALL).decode("latin1")
LINKED_SOURCE = ("module", named(LINEAR), "../secret/id_secret", "source")
TERABYTE = ("storage", FLOATS, "0", "cpu", 2**40, None)
VIEW = ("storage", FLOATS, "0", "cpu", 4, ("1", 0, 2**40))
SET_STATE = STATES["__setstate__ is replaced, then called"]

DISGUISES: dict[str, bytes] = {
    "a global by STACK_GLOBAL": _swapped_names(),
    "a class by INST": b"\x80\x02(" + opcodes(SHELL) + b"iposix\nsystem\n.",
    "NEWOBJ_EX of a module": wrapped(
        b"\x80\x04" + named(LINEAR) + opcodes((30000, 30000)) + b"}\x92."
    ),
    "two pickles, data.pkl and data.pkl": _two_pickles(),
    "a good zip behind a bad pickle": dumped(SYSTEM_CALL) + around({}),
    "a second pickle behind the first": legacy(dumped({}) + dumped(SYSTEM_CALL)),
    "TorchScript": around({}, **TORCHSCRIPT),
    "TorchScript that torch alone sees": around({}, **{"CONSTANTS.PKL": b"\x80\x02}."}),
    "a tar file in disguise": _hidden_tar(),
    "a class with its source, before torch 1.6": legacy(
        dumped(storage(*LINKED_SOURCE))
    ),
    "a terabyte before torch 1.6": legacy(dumped(storage(*TERABYTE))),
    "a view before torch 1.6": legacy(dumped(storage(*VIEW))),
    "another order of bytes": around({"w": SIXTEEN}, byteorder=b"middle"),
    "an alignment that is none": around({}, **{".storage_alignment": b"x"}),
    "a pickle of protocol 0": b"\x80\x02cposix\nsystem\n(S'touch x'\ntR.",
    "a plain pickle that calls": dumped(SYSTEM_CALL),
    "a storage that is a pickle": dumped({"w": call(FROM_BYTES, PICKLED_CALL)}),
    "the format before torch 1.6, os.system": legacy(dumped(SYSTEM_CALL)),
    "the format before torch 1.6, __setstate__": legacy(dumped(SET_STATE)),
}
"""Ways to name a function so that a checker overlooks it."""

_ARMED = (
    "os.system",
    "getattr of an import",
    "a partial of mkdir",
    "a class beside the file",
    "eval under its name of Python 2",
    "a tensor subclass made by mkdir",
)
ARMED: dict[str, bytes] = {
    **{name: around(CALLS[name]) for name in _ARMED},
    "a class by INST": DISGUISES["a class by INST"],
    "a good zip behind a bad pickle": DISGUISES["a good zip behind a bad pickle"],
}
"""Those that plainly leave the marker where they are loaded without care."""


def all_attacks() -> Iterator[Attack]:
    for name, value in {**CALLS, **STATES, **STRUCTURES}.items():
        yield attack(f"pickle: {name}", around(value))
    for name, value in TAKEN.items():
        yield attack(f"taken: {name}", around(value), "any")
    for name, data in DISGUISES.items():
        yield attack(f"disguise: {name}", data)
    honest = attack("", saved_bytes(nn.Sequential(nn.Conv2d(3, 4, 1))))
    name = "control: an honest model goes through every command"
    yield Attack(name, honest.make, everywhere("model.pth")[:3], "good")
