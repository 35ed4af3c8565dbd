"""Hostile torch.export programs (.pt2): archives of one honest program with one thing changed."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from exported import CONSTANTS, INPUTS, PROGRAM, WEIGHTS
from hostile_audit import MARKER
from hostile_harness import TITLE, Attack, Sandbox
from hostile_models import Records, attack, control, unzipped, zipped
from hostile_nodes import Global, Reduce, around, dumped, python, system_call
from torch import nn


class Net(nn.Module):
    """Its input has a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        activation: torch.Tensor = torch.relu(self.conv(image))
        return activation


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
    contents = unzipped(program())
    root = next(iter(contents)).split("/")[0]
    return root, {name.removeprefix(f"{root}/"): data for name, data in contents.items()}


def rezipped(change: Callable[[Records], object], root: str | None = None) -> bytes:
    """The honest program with some records changed."""
    folder, contents = records()
    change(contents)
    return zipped({f"{folder if root is None else root}/{name}": d for name, d in contents.items()})


def evil_inputs(box: Sandbox) -> bytes:
    """A pickle that torch.load would run, as example inputs."""
    return around(((Reduce(Global("builtins:eval"), (python(box),)),), {}))


Change = Callable[[Records, Sandbox], object]


def _put(name: str, make: Callable[[Sandbox], bytes], drop: str | None = None) -> Change:
    def change(contents: Records, box: Sandbox) -> None:
        if drop:
            del contents[drop]
        contents[name] = make(box)

    return change


def edited(name: str, edit: Callable[[Any], object]) -> Change:
    """A record of JSON, changed."""

    def change(contents: Records, box: Sandbox) -> None:
        document = json.loads(contents[name])
        edit(document)
        contents[name] = json.dumps(document).encode()

    return change


def _filled(value: Any, box: Sandbox) -> Any:
    """MARKER in strings becomes the path of the marker."""
    text = json.dumps(value).replace("@MARKER", str(box.marker)).replace("@SECRET", str(box.secret))
    return json.loads(text)


def _size(value: Any, index: int = 2) -> Change:
    """A size of the input."""

    def change(contents: Records, box: Sandbox) -> None:
        def edit(document: Any) -> None:
            sizes = document["graph_module"]["graph"]["tensor_values"]["image"]["sizes"]
            sizes[index] = _filled(value, box)

        edited(PROGRAM, edit)(contents, box)

    return change


def _expression(text: str) -> Change:
    return _size({"as_expr": {"expr_str": text, "hint": {"as_int": 16}}})


def _replaced(key: str, value: Any, everywhere: bool = False) -> Change:
    """The first value under a key anywhere in the program, replaced."""

    def change(contents: Records, box: Sandbox) -> None:
        document = json.loads(contents[PROGRAM])
        assert _swap(document, key, _filled(value, box)), key
        contents[PROGRAM] = json.dumps(document).encode()

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
        entry = document["config"]["conv.weight"]
        for name, value in fields.items():
            target = entry if name in entry else entry["tensor_meta"]
            target[name] = value

    return edited(WEIGHTS, edit)


def _pickled_weight(contents: Records, box: Sandbox) -> None:
    _weight(use_pickle=True)(contents, box)
    contents["data/weights/weight_0"] = evil_inputs(box)


def _pickled_constant(name: str) -> Change:
    def change(contents: Records, box: Sandbox) -> None:
        weight = json.loads(contents[WEIGHTS])["config"]["conv.weight"]
        entry = {**weight, "path_name": name, "use_pickle": True}
        edited(CONSTANTS, lambda d: d["config"].update(evil=entry))(contents, box)
        contents[f"data/constants/{name}"] = dumped(system_call(box))

    return change


def _call(target: str, **arguments: Any) -> Change:
    """A node before all others that calls `target`."""
    kinds = {bool: "as_bool", int: "as_int", str: "as_string", list: "as_ints"}

    def change(contents: Records, box: Sandbox) -> None:
        inputs = [
            {"name": name, "arg": {kinds[type(value)]: _filled(value, box)}, "kind": 2}
            for name, value in arguments.items()
        ]

        def edit(document: Any) -> None:
            graph = document["graph_module"]["graph"]
            new = {"target": target, "inputs": inputs, "outputs": [{"as_tensor": {"name": "evil"}}]}
            graph["nodes"].insert(0, {**graph["nodes"][0], **new})
            graph["tensor_values"]["evil"] = graph["tensor_values"]["conv2d"]

        edited(PROGRAM, edit)(contents, box)

    return change


def _renamed_input(new: str) -> Change:
    def change(contents: Records, box: Sandbox) -> None:
        name = json.dumps(_filled(new, box)).encode()
        contents[PROGRAM] = contents[PROGRAM].replace(b'"image"', name)

    return change


def _spec(tree: Any) -> Change:
    def edit(document: Any) -> None:
        signature = document["graph_module"]["module_call_graph"][0]["signature"]
        signature["out_spec"] = json.dumps([1, tree])

    return edited(PROGRAM, edit)


def _enumeration(contents: Records, box: Sandbox) -> None:
    context = json.dumps({"__enum__": True, "fqn": f"{MARKER}_trap:Net", "name": "Y"})
    _spec({"type": "builtins.dict", "context": context, "children_spec": []})(contents, box)


def _many_nodes(document: Any) -> None:
    nodes = document["graph_module"]["graph"]["nodes"]
    nodes.extend([nodes[-1]] * 1000)


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
    "1,000 copies of a node": (edited(PROGRAM, _many_nodes), "any"),
    "a byte order of its own": (_put("byteorder", lambda b: b"middle"), "any"),
    "an archive of a version of its own": (_put("archive_version", lambda b: b"9" * 99), "any"),
    "no weights' table": (lambda contents, box: contents.pop(WEIGHTS), "refused"),
    "weights 500 times the same": (
        edited(
            WEIGHTS,
            lambda d: d["config"].update({f"w{n}": d["config"]["conv.weight"] for n in range(500)}),
        ),
        "any",
    ),
}
"""Archives of torch.export with one thing changed."""

LONG = {"1,000 copies of a node", "weights 500 times the same"}
"""Those whose reading takes some tenths of a second."""


def _program(change: Change, root: str | None = None) -> Callable[[Sandbox], bytes]:
    return lambda box: rezipped(lambda contents: change(contents, box), root)


def _twice(first: bool) -> Callable[[Sandbox], bytes]:
    """Two records of example inputs, one good and one evil."""

    def make(box: Sandbox) -> bytes:
        root, contents = records()
        pairs = [(f"{root}/{name}", data) for name, data in contents.items()]
        evil = (f"{root}/{INPUTS}", evil_inputs(box))
        return zipped([evil, *pairs] if first else [*pairs, evil])

    return make


def _two_roots(box: Sandbox) -> bytes:
    root, contents = records()
    evil = {f"other/{INPUTS}": evil_inputs(box)}
    return zipped({**{f"{root}/{name}": data for name, data in contents.items()}, **evil})


def _packed_program(box: Sandbox) -> bytes:
    root, contents = records()
    contents["data/weights/weight_9"] = bytes(10**9)
    return zipped({f"{root}/{name}": data for name, data in contents.items()}, packed=True)


def all_attacks() -> Iterator[Attack]:
    """All of this file, and an honest program."""
    for name, (change, expect) in PROGRAMS.items():
        file = "evil.pth" if "model.PT" in name else "model.pt2"
        yield attack(f"pt2: {name}", _program(change), expect, file, name in LONG)
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
    yield control("honest.pt2", program)
