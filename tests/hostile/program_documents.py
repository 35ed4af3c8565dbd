"""Hostile documents of exported programs: sizes, weights, names and operators out of place."""

from __future__ import annotations

import functools
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from exported import PROGRAM, WEIGHTS, Net, Records, edit
from hostile_payloads import saved_bytes
from program_archives import Change, pickled


def program_with(change: Callable[[Any], object]) -> Change:
    """A change of the program's document."""
    return lambda contents, marker: edit(contents, PROGRAM, change)


def graph_with(change: Callable[[Any], object]) -> Change:
    """A change of the program's graph."""
    return program_with(lambda document: change(document["graph_module"]["graph"]))


def expression(text: str) -> Change:
    """A size of the image."""
    size = {"as_expr": {"expr_str": text, "hint": {"as_int": 16}}}
    return graph_with(lambda graph: graph["tensor_values"]["image"]["sizes"].__setitem__(2, size))


def _node(**values: Any) -> Change:
    return graph_with(lambda graph: graph["nodes"][0].update(values))


def _stack(text: str) -> Change:
    return graph_with(lambda graph: graph["nodes"][0]["metadata"].update(nn_module_stack=text))


def _signature(key: str, text: str) -> Change:
    """A string of the signature of the program's own call."""

    def change(document: Any) -> None:
        document["graph_module"]["module_call_graph"][0]["signature"][key] = text

    return program_with(change)


def _weights(**values: Any) -> Change:
    """What is said of the weight of the convolution."""
    return lambda contents, marker: edit(
        contents, WEIGHTS, lambda document: document["config"]["conv.weight"].update(values)
    )


def _tensor(**values: Any) -> Change:
    return lambda contents, marker: edit(
        contents,
        WEIGHTS,
        lambda document: document["config"]["conv.weight"]["tensor_meta"].update(values),
    )


def _ints(*values: int) -> list[dict[str, int]]:
    return [{"as_int": value} for value in values]


def _shaped(sizes: list[int], strides: list[int], offset: int = 0) -> Change:
    return _tensor(sizes=_ints(*sizes), strides=_ints(*strides), storage_offset={"as_int": offset})


def _empty(contents: Records, marker: Path) -> None:
    """Weights without bytes, of which torch makes zeros."""
    contents["data/weights/weight_0"] = b""
    _shaped([10**5, 10**5, 100], [10**7, 100, 1])(contents, marker)


def _views(contents: Records, marker: Path) -> None:
    """Thousands of weights in the same bytes, each of which torch clones."""
    contents["data/weights/weight_0"] = bytes(400_000)

    def change(document: Any) -> None:
        weight = document["config"]["conv.weight"]
        for n in range(2_000):
            meta = {**weight["tensor_meta"], "sizes": _ints(100_000 - n), "strides": _ints(1)}
            document["config"][f"conv.w{n}"] = {**weight, "tensor_meta": meta}

    edit(contents, WEIGHTS, change)


def _renamed(old: str, new: str) -> Change:
    """A name of a parameter, wherever it is."""

    def make(contents: Records, marker: Path) -> None:
        for name in (PROGRAM, WEIGHTS):
            text = contents[name].decode()
            contents[name] = text.replace(json.dumps(old), json.dumps(new)).encode()

    return make


def _doubling(contents: Records, marker: Path) -> None:
    """Paths of which each level doubles how many modules torch makes of the next."""
    path = ""

    def change(document: Any, name: str) -> None:
        document["config"][name] = document["config"]["conv.weight"]

    for level in range(24):
        for part in (f"x{level}", f"x{level}@1"):
            name = f"{path}{part}.w"
            edit(contents, WEIGHTS, functools.partial(change, name=name))
        path += f"x{level}."


def _calls(count: int, parameters: int) -> Change:
    """Calls of one module, each of which gets all parameters."""

    def make(contents: Records, marker: Path) -> None:
        def change(document: Any) -> None:
            graph, signature = (document["graph_module"][key] for key in ("graph", "signature"))
            first = graph["nodes"][0]
            for n in range(count):
                stack = f"L__self__,,a.N;c{n},conv@{n},a.C"
                node = {**first, "metadata": {"nn_module_stack": stack}}
                graph["nodes"].append(node)
            spec = signature["input_specs"][0]["parameter"]
            for n in range(parameters):
                new = {**spec, "parameter_name": f"conv.c.p{n}"}
                signature["input_specs"].append({"parameter": new})

        edit(contents, PROGRAM, change)

    return make


def nested(depth: int, start: str = "[", end: str = "]") -> str:
    """Brackets inside brackets."""
    return start * depth + end * depth


def _tree(depth: int) -> str:
    tree: Any = {"type": None, "context": None, "children_spec": []}
    for _ in range(depth):
        tree = {"type": "builtins.list", "context": "null", "children_spec": [tree]}
    return json.dumps([1, tree])


def _state(content: bytes) -> Change:
    """Weights as torch 2.8 wrote them."""

    def make(contents: Records, marker: Path) -> None:
        contents["data/weights/model.pt"] = content

    return make


class Reserve:
    """Pickles as a call that torch's careful reader makes: a bytearray of any size."""

    def __reduce__(self) -> tuple[Any, ...]:
        return bytearray, (10**11,)


def _deflated(content: bytes, rename: Callable[[str], str] = str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(file, "w", 8) as new:
        for name in old.namelist():
            new.writestr(rename(name), old.read(name))
    return file.getvalue()


BROKEN: dict[str, tuple[Change, str]] = {
    # Sizes, which torch gives to sympify
    "a tower of powers": (expression("9**9**9**9"), "expr_str '9**9**9**9'"),
    "a tower in srepr": (
        expression("Pow(Integer(9), Pow(Integer(9), Pow(Integer(9), Integer(9))))"),
        "expr_str",
    ),
    "powers of powers": (expression("Pow(" * 40 + "Integer(9)" + ", Integer(8))" * 40), "expr_"),
    "products of powers": (
        expression(f"Mul({', '.join(['Pow(Integer(9), Integer(8))'] * 200)})"),
        "expr_str",
    ),
    "a shift": (expression("1<<99999999999"), "expr_str '1<<99999999999'"),
    "a shift in srepr": (expression("LShift(Integer(1), Integer(99999999999))"), "expr_str"),
    "a division by zero": (expression("Mod(1,0)"), "expr_str 'Mod(1,0)'"),
    "a division by Integer(0)": (expression("FloorDiv(Symbol('s0'), Integer(0))"), "expr_str"),
    "a million digits": (expression("9" * 10**6), "expr_str"),
    "four thousand digits": (expression(f"Integer({'9' * 4000})"), "expr_str"),
    "a number of a million digits": (
        lambda contents, marker: contents.update(
            {PROGRAM: contents[PROGRAM].replace(b'"as_int": 16', b'"as_int": 1' + b"0" * 10**6)}
        ),
        "integer string conversion",
    ),
    "an endless exponent": (expression("Float('1e999999999', precision=53)"), "expr_str"),
    "an endless precision": (expression("Float('0.5', precision=9999999999)"), "expr_str"),
    "a binomial": (expression("binomial(Integer(999999), Integer(499999))"), "expr_str"),
    "a factorial": (expression("factorial(Integer(9999999))"), "expr_str"),
    "a wild symbol": (expression("Symbol('s0', cls=exec)"), "expr_str"),
    "a symbol of a long number": (expression("Symbol('u99999999999')"), "expr_str"),
    "many brackets": (expression(nested(4_000, "(", ")")), "expr_str"),
    "many signs": (expression("-" * 9_000 + "1"), "expr_str"),
    "a long sum": (expression(f"Add({', '.join(['true'] * 1_500)})"), "expr_str"),
    "a chain of comparisons": (expression("<".join(["true"] * 2_000)), "expr_str"),
    # Weights, which torch makes before it looks at the program
    "weights without bytes": (_empty, "lies beyond the 0 bytes"),
    "weights by expansion": (_shaped([10**5, 10**5], [0, 0]), "its tensors would take"),
    "weights beyond their bytes": (_shaped([2, 4], [4, 1]), "lies beyond the 24 bytes"),
    "weights behind their bytes": (_shaped([2], [1], 10**15), "lies beyond the 24 bytes"),
    "weights before their bytes": (_shaped([2], [-1], 1), "has no shape"),
    "weights of a negative size": (_shaped([-2], [1]), "has no shape"),
    "weights with a stride too few": (_shaped([2, 3], [1]), "has no shape"),
    "weights with symbolic sizes": (
        _tensor(sizes=[{"as_expr": {"expr_str": "Symbol('s0')", "hint": None}}]),
        "has no shape",
    ),
    "thousands of views": (_views, "its tensors would take"),
    "two types in the same bytes": (
        lambda contents, marker: edit(
            contents,
            WEIGHTS,
            lambda d: d["config"]["conv.bias"].update(
                path_name="weight_0",
                tensor_meta={**d["config"]["conv.bias"]["tensor_meta"], "dtype": 5},
            ),
        ),
        "two types of numbers",
    ),
    "weights without memory": (_tensor(device={"type": "meta", "index": None}), "no plain tensor"),
    "weights on a device of its own": (
        _tensor(device={"type": "privateuseone", "index": 0}),
        "type 'privateuseone'",
    ),
    "weights of an unknown type": (_tensor(dtype=999), "dtype is '999', not ScalarType"),
    "weights of no type": (_tensor(dtype=0), "cannot be loaded"),
    "sparse weights": (_tensor(layout=2), "no plain tensor"),
    "weights of ten thousand dimensions": (_shaped([1] * 10**4, [1] * 10**4), "not a shape"),
    "weights without a description": (_weights(tensor_meta=None), "no plain tensor"),
    "weights in another folder": (_weights(path_name="../../models/model.json"), "path_name"),
    "weights in a custom object": (_weights(path_name="custom_obj_0"), "a pickle for"),
    "weights that are not there": (_weights(path_name="weight_7"), "it lacks the record"),
    "a pickle by another name": (_weights(use_pickle=1), "use_pickle is '1', not true or false"),
    "a pickle by omission": (_weights(use_pickle=None), "use_pickle is 'None', not true or false"),
    # Weights as torch 2.8 wrote them
    "a bytearray of 100 GB": (
        _state(saved_bytes({"conv.weight": Reserve()})),
        "objects in data/weights",
    ),
    "a compressed pickle": (_state(_deflated(saved_bytes(Net().state_dict()))), "is compressed"),
    "a pickle in other letters": (
        _state(
            _deflated(saved_bytes({}), lambda name: name.replace("data.pkl", "DATA.pkl")),
        ),
        "is none that torch writes",
    ),
    "a list of weights": (_state(saved_bytes([torch.zeros(1)])), "objects in data/weights"),
    "weights of any name": (
        _state(saved_bytes({"__class__.x": torch.zeros(1)})),
        "objects in data",
    ),
    "expanded weights in a pickle": (
        _state(saved_bytes({"conv.weight": torch.zeros(1).expand(10**5, 10**5)})),
        "holds a tensor of shape [100000, 100000] without its data",
    ),
    "a pickle that is none": (_state(b"\x80\x02c"), "cannot be loaded"),
    # Names, which become attributes and code
    "a parameter of the class": (_renamed("conv.weight", "__class__.forward"), "__class__"),
    "a parameter among the modules": (_renamed("conv.weight", "_modules.weight"), "_modules"),
    "a parameter for a method": (_renamed("conv.weight", "conv.forward"), "conv.forward"),
    "a parameter for a hook": (_renamed("conv.weight", "_forward_hooks"), "_forward_hooks"),
    "a parameter without a name": (_renamed("conv.weight", ""), "parameter_name ''"),
    "a thousand levels": (_renamed("conv.weight", "a." * 1_000 + "w"), "parameter_name"),
    "modules by the million": (_doubling, "the name 'x0@1.w'"),
    "a module for an attribute": (_stack("L,,a.N;M,conv.__class__,a.C"), "nn_module_stack"),
    "a module for a method": (_stack("L,,a.N;M,forward,a.C"), "nn_module_stack"),
    "a module without an end": (_stack("L,,a.N;M," + "x." * 500 + "y,a.C"), "nn_module_stack"),
    "calls without number": (_calls(3_000, 0), "calls of modules"),
    "calls by parameters": (_calls(900, 900), "cannot be loaded"),
    "a keyword for a name": (_node(name="lambda"), "name 'lambda'"),
    "an attribute for a name": (_node(name="self.forward"), "name 'self.forward'"),
    "an argument with a default": (
        program_with(
            lambda d: d["graph_module"]["module_call_graph"][0]["signature"].update(
                forward_arg_names=["x=print()"]
            )
        ),
        "forward_arg_names 'x=print()'",
    ),
    # Operators, which are looked up attribute by attribute
    **{
        target: (_node(target=target), f"target '{target}'")
        for target in (
            "torch.ops.aten.__class__.mro",
            "torch.ops.aten.__init__.__call__",
            "torch.ops.aten.relu.__setattr__",
            "torch.ops.aten.relu.__call__",
            "torch.ops.aten.manual_seed.default",
            "torch.ops.aten.set_grad_enabled.default",
            "torch.ops.aten._cufft_set_plan_cache_max_size.default",
            "torch.ops.aten.append.t",
            "torch.ops.aten.to_here.default",
            "torch.ops.aten.mul.left_t",
            "torch.sym_fresh_size",
            "_operator.lshift",
            "_operator.setitem",
        )
    },
    "an object for an argument": (
        graph_with(
            lambda graph: graph["nodes"][0]["inputs"][0].update(
                arg={"as_custom_obj": {"name": "x", "class_fqn": "os.system"}}
            )
        ),
        "as_custom_obj for 'arg'",
    ),
    # Documents
    "brackets without end": (
        lambda contents, marker: contents.update({PROGRAM: nested(10**5).encode()}),
        "more than 100 levels",
    ),
    "NaN": (
        lambda contents, marker: contents.update(
            {PROGRAM: contents[PROGRAM].replace(b'"as_int": 16', b'"as_int": NaN')}
        ),
        "JSON has no number NaN",
    ),
    "no UTF-8": (
        lambda contents, marker: contents.update({PROGRAM: b'{"graph_module": "\xff"}'}),
        "cannot be loaded",
    ),
    "no object": (
        lambda contents, marker: contents.update({PROGRAM: b"[]"}),
        "not ExportedProgram",
    ),
    "nothing": (lambda contents, marker: contents.update({PROGRAM: b"{}"}), "it lacks"),
    "a text for a list": (graph_with(lambda graph: graph.update(nodes="x")), "nodes is"),
    "two kinds of argument": (
        graph_with(lambda graph: graph["inputs"][0].update(as_int=1)),
        "not Argument",
    ),
    "an unknown kind of argument": (
        graph_with(lambda graph: graph["inputs"].__setitem__(0, {"as_code": "x"})),
        "'as_code'",
    ),
    "no values": (graph_with(lambda graph: graph.pop("tensor_values")), "it lacks"),
    "a deep tree": (_signature("out_spec", _tree(60)), "out_spec"),
    "a wide float": (
        graph_with(
            lambda graph: graph["nodes"][0]["inputs"][0].update(arg={"as_float": "1" * 10**5})
        ),
        "not a number",
    ),
    "another version of the format": (
        lambda contents, marker: contents.update({"archive_version": b"1"}),
        "'archive_version' is not '0'",
    ),
    "another format": (
        lambda contents, marker: contents.update({"archive_format": b"aoti"}),
        "'archive_format' is not 'pt2'",
    ),
    "another version of the schema": (
        program_with(lambda document: document.update(schema_version={"major": 99, "minor": 0})),
        "cannot be loaded",
    ),
    "the same name twice": (
        graph_with(lambda graph: graph["inputs"].append(graph["inputs"][0])),
        "4 inputs where 3",
    ),
    "no signature": (
        program_with(lambda d: d["graph_module"]["module_call_graph"][0].update(signature=None)),
        "it lacks the signature of its own call",
    ),
    "a value of a negative size": (
        graph_with(lambda g: g["tensor_values"]["conv2d"].update(sizes=_ints(1, -2, 4, 4))),
        "'conv2d' has the shape",
    ),
    "an operator that is not there": (
        _node(target="torch.ops.aten.no_such.default"),
        "We failed to resolve torch.ops.aten.no_such.default",
    ),
    "a value too large for any memory": (
        graph_with(lambda g: g["tensor_values"]["conv2d"].update(sizes=_ints(2**62, 2**62, 4, 4))),
        "'conv2d' has the shape",
    ),
}
"""What is done to a program, and words of the line that refuses it."""


_SUMS = (f"Add(Symbol('s{n}'), Symbol('s{n + 1}'))" for n in range(15))
PRODUCT = f"Mul({', '.join(_SUMS)})"
"""More parts than `exported_sizes.is_quick` allows, and few enough to be rewritten."""

HARMLESS: dict[str, Change] = {
    "a bound of a size that torch would count up to": program_with(
        lambda document: document["range_constraints"].update(
            {f"u{10**12}": {"min_val": 0, "max_val": None}}
        )
    ),
    "a bound that is code": program_with(
        lambda document: document["range_constraints"].update(
            {"__import__('os')": {"min_val": 0, "max_val": None}}
        )
    ),
    "guards that are code": program_with(
        lambda document: document.update(guards_code=["__import__('os').mkdir('marker')"])
    ),
    "classes for named tuples": program_with(
        lambda document: document["graph_module"].update(
            treespec_namedtuple_fields={"os.system": {"field_names": ["x"]}}
        )
    ),
    "notes that are deep": graph_with(
        lambda graph: graph["nodes"][0]["metadata"].update(custom=nested(10**5))
    ),
    "notes that name functions": graph_with(
        lambda graph: graph["nodes"][0]["metadata"].update(source_fn_stack="x,torch.hub.load")
    ),
    "notes on the program": program_with(
        lambda document: document["graph_module"].update(metadata={"custom": nested(10**5)})
    ),
    "a product that sympy would expand": graph_with(
        lambda graph: graph["tensor_values"]["conv2d"]["sizes"].__setitem__(
            2, {"as_expr": {"expr_str": PRODUCT}}
        )
    ),
    "an image with such a product": expression(PRODUCT),
    "a field of a later torch": program_with(lambda document: document.update(evil="import os")),
    "extra files": lambda contents, marker: contents.update(
        {"extra/../../marker": b"x", "extra/model.pt": pickled(marker)}
    ),
    "bytes that nothing names": lambda contents, marker: contents.update(
        {"data/weights/weight_99": pickled(marker), "data/constants/opaque_obj_7": b"x"}
    ),
}
"""What is left out, so that the program is as good as without it."""


def swapped(key: str, value: str) -> Change:
    """The first string under a key anywhere in the program, replaced."""

    def make(contents: Records, marker: Path) -> None:
        document = json.loads(contents[PROGRAM])
        assert _swap(document, key, value)
        contents[PROGRAM] = json.dumps(document).encode()

    return make


def _swap(value: Any, key: str, new: str) -> bool:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, item in items:
        if name == key and isinstance(item, str):
            value[name] = new
            return True
        if isinstance(item, (dict, list)) and _swap(item, key, new):
            return True
    return False
