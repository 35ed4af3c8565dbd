"""Graphs of ONNX that mean harm: data from elsewhere, operators of somebody's own,
shapes beyond all memory, functions without end, files that are none."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hostile_harness import TITLE, Attack, Sandbox

Change = Callable[[Any, Path], None]
"""Changes a ModelProto, and the folder in which it will lie."""

COMMAND = "layers {given}/model.onnx"
RUN = "run {given}/model.onnx {given}/photo.png --layers * --out out{n}"


def _model() -> Any:
    """A convolution and a ReLU."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    weights = numpy_helper.from_array(np.ones((2, 3, 3, 3), np.float32), "weight")
    conv = helper.make_node("Conv", ["x", "weight"], ["a"], "conv")
    relu = helper.make_node("Relu", ["a"], ["y"], "relu")
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 8, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph([conv, relu], "graph", [x], [y], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    model.ir_version = 9
    return model


def _external(location: str, **numbers: str) -> Change:
    """Lets the weights lie in another file."""

    def change(model: Any, folder: Path) -> None:
        (folder / "inside").mkdir(exist_ok=True)
        (folder / "weights.bin").write_bytes(bytes(216))
        (folder / "link.bin").symlink_to("../secret/id_secret")
        (folder / "linked").symlink_to("../secret")
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = 1
        for key, value in {"location": location, **numbers}.items():
            tensor.external_data.add(key=key, value=value)

    return change


def _sparse(model: Any, folder: Path) -> None:
    """Adds sparse weights whose values lie in another file."""
    (folder / "weights.bin").write_bytes(bytes(216))
    sparse = model.graph.sparse_initializer.add(dims=[2])
    sparse.values.MergeFrom(model.graph.initializer[0])
    sparse.values.data_location = 1
    sparse.values.external_data.add(key="location", value="weights.bin")


def _nodes(*nodes: str, **fields: Any) -> Change:
    """Puts other nodes in the place of the model's: `Add x y > z`."""

    def change(model: Any, folder: Path) -> None:
        from onnx import helper

        del model.graph.node[:]
        for node in nodes:
            operator, *inputs, _, output = node.split()
            made = helper.make_node(operator, inputs, [output], **fields)
            model.graph.node.append(made)

    return change


def _shape(*sizes: int) -> Change:
    """A value of this shape, which depends on the image."""

    def change(model: Any, folder: Path) -> None:
        import numpy as np
        from onnx import numpy_helper

        shape = numpy_helper.from_array(np.array(sizes, np.int64), "shape")
        model.graph.initializer.append(shape)
        _nodes("Relu x > r", "Expand r shape > y")(model, folder)

    return change


def _functions(count: int, last: str) -> Change:
    """Functions of which each calls the next one twice."""

    def change(model: Any, folder: Path) -> None:
        from onnx import helper

        opsets = [helper.make_opsetid("", 18), helper.make_opsetid("f", 1)]
        for number in range(count):
            name = f"F{number}"
            callee = last if number + 1 == count else f"F{number + 1}"
            domain = "f" if callee.startswith("F") else ""
            first = helper.make_node(callee, ["a"], ["b"], domain=domain)
            second = helper.make_node(callee, ["b"], ["c"], domain=domain)
            calls = [first, second]
            function = helper.make_function("f", name, ["a"], ["c"], calls, opsets)
            model.functions.append(function)
        model.opset_import.append(opsets[1])
        _nodes("F0 x > y", domain="f")(model, folder)

    return change


def _initializer(**fields: Any) -> Change:
    """Says something else of the weights."""

    def change(model: Any, folder: Path) -> None:
        from onnx import TensorProto

        tensor = model.graph.initializer[0]
        for name in fields:
            tensor.ClearField(name)
        tensor.MergeFrom(TensorProto(**fields))

    return change


def _names(name: str) -> Change:
    def change(model: Any, folder: Path) -> None:
        for node in model.graph.node:
            node.name = name

    return change


def _scopes(text: str) -> Change:
    def change(model: Any, folder: Path) -> None:
        for node in model.graph.node:
            node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=text)

    return change


REFUSED: dict[str, Change] = {
    "data of a parent folder": _external("../secret/id_secret"),
    "data by an absolute path": _external("/etc/passwd"),
    "data through a link": _external("link.bin"),
    "data through a linked folder": _external("linked/id_secret"),
    "data in a folder": _external("inside"),
    "data beyond the end of the file": _external("weights.bin", offset="100"),
    "data of a negative offset": _external("weights.bin", offset="-100"),
    "data longer than its shape": _external("weights.bin", length="217"),
    "data of sparse weights in another file": _sparse,
    "data in this process's memory": _external("*/_ORT_MEM_ADDR_/*", offset="4096"),
    "an operator of a library": _nodes("Run x > y", domain="com.evil"),
    "an operator that is not there": _nodes("Evil x > y"),
    "nodes in a circle": _nodes("Add x y > b", "Relu b > y"),
    "a value from nowhere": _nodes("Add x nowhere > y"),
    "a value that is made twice": _nodes("Relu x > y", "Abs x > y"),
    "a function that calls itself": _functions(1, "F0"),
    "functions that become 2^40 nodes": _functions(40, "Relu"),
    "weights of 10^12 values that are not there": _initializer(
        dims=[10**6, 10**6, 3, 3], raw_data=b""
    ),
    "weights of a negative size": _initializer(dims=[-2, 3, 3, 3]),
    "weights of no type": _initializer(data_type=99),
    "a value of 4 TB": _shape(1, 10**4, 10**4, 10**4),
}
"""Each ends in one line."""

ANSWERED: dict[str, Change] = {
    "a name of 10,000 folders": _names("a." * 10_000),
    "a name that sets a terminal's title": _names(TITLE),
    "a name that leads out": _names("../../../secret/id_secret"),
    "modules that are code": _scopes("__import__('os').system('id')"),
    "modules inside 10,000 modules": _scopes(str(["a"] * 10_000)),
    "brackets without end": _scopes("[" * 10_000),
}
"""What a file says of its names; the graph itself is whole."""


def _placed(change: Change) -> Callable[[Sandbox], None]:
    def make(box: Sandbox) -> None:
        from hostile_images import png

        model = _model()
        change(model, box.given)
        (box.given / "model.onnx").write_bytes(model.SerializeToString())
        (box.given / "photo.png").write_bytes(png())

    return make


def _truncated(box: Sandbox) -> None:
    content = _model().SerializeToString()
    (box.given / "model.onnx").write_bytes(content[: len(content) // 2])


def all_attacks() -> Iterator[Attack]:
    """The attacks, where the packages are that read such files."""
    if importlib.util.find_spec("onnxruntime") is None:
        return
    yield Attack("onnx: half of a file", _truncated, [COMMAND], "refused")
    for name, change in REFUSED.items():
        yield Attack(f"onnx: {name}", _placed(change), [RUN], "refused")
    for name, change in ANSWERED.items():
        yield Attack(f"onnx: {name}", _placed(change), [COMMAND, RUN], "any")
