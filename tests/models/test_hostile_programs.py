"""Hostile .pt2 files: nothing in them runs, hangs or fills the memory."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import pickle
import signal
import struct
import sys
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Outcome
from exported import CONSTANTS, INPUTS, PROGRAM, WEIGHTS, Net, Records, edit, packed, records
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchvision import models

from featviz.errors import LoadError
from featviz.models.files import exported, exported_archive, exported_json, exported_sizes

LONGEST = 20
"""Seconds that any of these may take; each takes well under one on an idle machine."""


@pytest.fixture(autouse=True)
def _deadline() -> Iterator[None]:
    """A hang is a failure."""

    def late(*args: object) -> None:
        pytest.fail(f"no answer within {LONGEST} seconds")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


Change = Callable[[Records, Path], object]
"""Makes a harmless program hostile; a payload would make the folder that is named."""


def _made(change: Change, folder: Path, dynamic: bool = False) -> Path:
    contents = records(dynamic)
    change(contents, folder / "marker")
    return packed(folder / "evil.pt2", contents)


def _refused(path: Path) -> LoadError:
    """The one line that refuses a file; nothing has run."""
    with pytest.raises(LoadError) as caught:
        exported.read(path)
    assert caught.value.message.isprintable() and path.name in caught.value.message
    assert not path.with_name("marker").exists()
    return caught.value


class Mkdir:
    """Pickles as a call of os.mkdir."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def _pickled(marker: Path) -> bytes:
    file = io.BytesIO()
    torch.save(((Mkdir(marker),), {}), file)
    return file.getvalue()


def _inputs(contents: Records, marker: Path) -> None:
    contents["data/sample_inputs/model.pt"] = _pickled(marker)


def _weight(contents: Records, marker: Path) -> None:
    edit(contents, WEIGHTS, lambda d: d["config"]["conv.weight"].update(use_pickle=True))
    contents["data/weights/weight_0"] = _pickled(marker)


def _old_weights(contents: Records, marker: Path) -> None:
    contents["data/weights/model.pt"] = _pickled(marker)


def _opaque(contents: Records, marker: Path) -> None:
    own = json.loads(contents[WEIGHTS])["config"]["conv.weight"]
    entry = {**own, "path_name": "opaque_obj_0", "use_pickle": True}
    edit(contents, CONSTANTS, lambda d: d["config"].update(evil=entry))
    contents["data/constants/opaque_obj_0"] = pickle.dumps(Mkdir(marker))


def _graph(change: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda document: change(document["graph_module"]["graph"])


def _size(contents: Records, marker: Path) -> None:
    size = {"as_expr": {"expr_str": f"__import__('os').mkdir({str(marker)!r})", "hint": None}}

    def change(graph: Any) -> None:
        graph["tensor_values"]["image"]["sizes"][2] = size

    edit(contents, PROGRAM, _graph(change))


def _enumeration(contents: Records, marker: Path) -> None:
    marker.with_name("evil_module.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    context = json.dumps({"__enum__": True, "fqn": "evil_module:X", "name": "Y"})
    tree = {"type": "builtins.dict", "context": context, "children_spec": []}

    def change(document: Any) -> None:
        document["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = json.dumps(
            [1, tree]
        )

    edit(contents, PROGRAM, change)


def _call(target: str, **arguments: Any) -> Callable[[Records, Path], None]:
    """A node that calls `target` for the convolution's input; MARKER stands for the path."""

    def make(contents: Records, marker: Path) -> None:
        inputs = [
            {"name": name, "arg": _argument(str(marker) if a == "MARKER" else a), "kind": 2}
            for name, a in arguments.items()
        ]
        outputs = [{"as_tensor": {"name": "evil"}}]

        def insert(graph: Any) -> None:
            new = {"target": target, "inputs": inputs, "outputs": outputs, "name": "evil"}
            graph["nodes"].insert(0, {**graph["nodes"][0], **new})
            graph["tensor_values"]["evil"] = graph["tensor_values"]["conv2d"]
            graph["nodes"][1]["inputs"][0]["arg"]["as_tensor"]["name"] = "evil"

        edit(contents, PROGRAM, _graph(insert))

    return make


def _argument(value: Any) -> Any:
    kinds = {bool: "as_bool", int: "as_int", str: "as_string"}
    return {kinds[type(value)]: value}


def _name(contents: Records, marker: Path) -> None:
    """The image's own name becomes code with a default that is evaluated."""
    evil = json.dumps(f"x=__import__('os').mkdir({str(marker)!r})").encode()
    contents[PROGRAM] = contents[PROGRAM].replace(b'"image"', evil)


HOSTILE = {
    "a pickled weight": (_weight, "a pickle for 'conv.weight'"),
    "weights as before 2.9": (_old_weights, "objects in data/weights/model.pt"),
    "an opaque constant": (_opaque, "a pickle for 'evil'"),
    "a size": (_size, "expr_str"),
    "an enumeration": (_enumeration, "out_spec"),
    "a file": (
        _call("torch.ops.aten.from_file.default", filename="MARKER", shared=True, size=4),
        "target 'torch.ops.aten.from_file.default'",
    ),
    "a name": (_name, "the name"),
}


def _moved(name: str) -> Change:
    """The example inputs, evil, under a name that torch's reader takes for theirs."""

    def make(contents: Records, marker: Path) -> None:
        del contents[INPUTS]
        contents[name] = _pickled(marker)

    return make


ELSEWHERE = {
    name: (_moved(name), f"the record 'net/{name}' is none that torch writes")
    for name in (
        "data/sample_inputs/model.PT",
        "Data/sample_inputs/model.pt",
        "data/Sample_inputs/MODEL.Pt",
        "DATA/SAMPLE_INPUTS/MODEL.PT",
    )
}
"""Torch's reader of archives makes no difference between large and small letters."""


def _careless(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(folder)
    with contextlib.suppress(Exception):
        torch.export.unflatten(torch.export.load(path))(torch.zeros(1, 3, 16, 20))


@pytest.mark.parametrize("name", [*HOSTILE, *ELSEWHERE])
def test_the_hostile_archives_are_armed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them does leave its marker where it is loaded and run without care."""
    if name == "an opaque constant" and torch.__version__ < "2.13":
        pytest.skip("torch 2.12 loads no opaque constants")
    path = _made((HOSTILE | ELSEWHERE)[name][0], tmp_path)
    _careless(path, tmp_path, monkeypatch)
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("name", [*HOSTILE, *ELSEWHERE])
def test_nothing_in_a_hostile_archive_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says what it holds and the way out; nothing has run, and nothing is imported."""
    make, what = (HOSTILE | ELSEWHERE)[name]
    path = _made(make, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("evil_module", None)
    error = _refused(path)
    assert what in error.message and "nothing was executed" in error.message
    assert "--unsafe-load" in str(error.hint)
    assert "evil_module" not in sys.modules


def _shards(path: Path) -> Path:
    index = path.with_name("model.index.json")
    index.write_text(json.dumps({"weight_map": {"a": path.name}}))
    return index


@pytest.mark.parametrize("name", ELSEWHERE)
def test_no_way_leads_to_a_hostile_archive(
    name: str, tmp_path: Path, picture: Path, featviz: Callable[..., Outcome]
) -> None:
    """Called .pth, as a model, as weights, through an index: refused in one line everywhere."""
    path = _made(ELSEWHERE[name][0], tmp_path).rename(tmp_path / "evil.pth")
    for command in (
        ("layers", path),
        ("run", path, picture, "--out", tmp_path / "out"),
        ("identify", path),
        ("layers", "squeezenet1_1", "--weights", path),
        ("layers", path, "--arch", "squeezenet1_1"),
        ("identify", _shards(path)),
    ):
        done = featviz(*command)
        assert done.code == 1 and done.err.startswith("error: evil.pth cannot be loaded: ")
        assert "Traceback" not in done.err and not (tmp_path / "marker").exists()


def test_example_inputs_are_never_read(tmp_path: Path) -> None:
    """A program with evil example inputs is the program without them."""
    path = _made(_inputs, tmp_path)
    with exported_archive.rewritten(path) as file, zipfile.ZipFile(file) as archive:
        assert archive.read("archive/" + INPUTS) == b""
    assert exported.read(path).module(torch.zeros(1, 3, 16, 20)).shape == (1, 2, 16, 20)
    assert not (tmp_path / "marker").exists()


def test_unsafe_load_skips_the_check(tmp_path: Path) -> None:
    """With --unsafe-load torch reads what it will: here it runs the example inputs."""
    path = _made(_inputs, tmp_path)
    assert exported.read(path, unsafe=True).module is not None
    assert (tmp_path / "marker").exists()


# Archives --------------------------------------------------------------------------------------


def _zip(change: Callable[[zipfile.ZipFile, Records, Path], object]) -> Callable[[Path], Path]:
    """An archive with more than its records."""

    def make(path: Path) -> Path:
        contents = records()
        with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as archive:
            warnings.simplefilter("ignore")  # names that are there twice
            for name, content in contents.items():
                archive.writestr(f"net/{name}", content)
            change(archive, contents, path.with_name("marker"))
        return path

    return make


def _also(name: str) -> Callable[[Path], Path]:
    return _zip(lambda archive, contents, marker: archive.writestr(name, _pickled(marker)))


def _bytes(change: Callable[[bytes, Path], bytes], **options: Any) -> Callable[[Path], Path]:
    """An archive whose bytes are changed."""

    def make(path: Path) -> Path:
        packed(path, records(), **options)
        path.write_bytes(change(path.read_bytes(), path.with_name("marker")))
        return path

    return make


def _flagged(content: bytes, marker: Path) -> bytes:
    """Every record says that it is encrypted."""
    found = bytearray(content)
    for signature, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        at = found.find(signature)
        while at >= 0:
            found[at + offset] |= 1
            at = found.find(signature, at + 1)
    return bytes(found)


def _directory(content: bytes) -> int:
    """Where the directory of an archive begins."""
    begin: int = struct.unpack("<I", content[-6:-2])[0]
    return begin


def _longer(content: bytes, marker: Path) -> bytes:
    """The directory gives the first record a gigabyte."""
    at = _directory(content)
    return content[: at + 20] + struct.pack("<II", 2**30, 2**30) + content[at + 28 :]


def _overlapping(content: bytes, marker: Path) -> bytes:
    """The directory has two records begin at the same place."""
    first = _directory(content)
    second = content.index(b"PK\1\2", first + 4)
    return content[: second + 42] + content[first + 42 : first + 46] + content[second + 46 :]


def _another_behind(content: bytes, marker: Path) -> bytes:
    """A whole archive behind another one: readers differ in which they see."""
    other = io.BytesIO()
    with zipfile.ZipFile(other, "w") as archive:
        for name, record in {**records(), INPUTS: _pickled(marker)}.items():
            archive.writestr(f"net/{name}", record)
    return content + other.getvalue()


ZIPS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "example inputs twice": (_also("net/" + INPUTS), "is there twice"),
    "example inputs in other letters too": (_also("net/data/sample_inputs/MODEL.pt"), "is none"),
    "example inputs in a second folder": (_also("Net/" + INPUTS), "is not in 'net/'"),
    "example inputs above the folder": (_also("net/../" + INPUTS), "is none that torch writes"),
    "example inputs at the root": (_also("/" + INPUTS), "is not in 'net/'"),
    "backslashes": (_also("net/data\\sample_inputs\\model.pt"), "is none that torch writes"),
    "a name that ends in NUL": (_also(f"net/{INPUTS}\0.txt"), "is there twice"),
    "a control character": (_also("net/extra\x1b]0;x\x07"), "is none that torch writes"),
    "a folder": (_also("net/data/weights/"), "is none that torch writes"),
    "a second program": (_also("net/models/other.json"), "is none that torch writes"),
    "compiled code in other letters": (_also("net/data/AOTInductor/m/x.so"), "machine code"),
    "the old format in other letters": (_also("Version"), "before torch 2.8"),
    "another name in the record": (
        _bytes(lambda b, m: b.replace(b"net/models/model.json", b"net/models/modem.json", 1)),
        "File name in directory",
    ),
    "a comment": (
        _zip(lambda archive, contents, marker: setattr(archive, "comment", b"PK\3\4")),
        "something follows its records",
    ),
    "an archive before it": (
        _bytes(lambda b, m: _another_behind(b, m)),
        "lies where another one does",
    ),
    "compressed": (_bytes(lambda b, m: b, compression=zipfile.ZIP_DEFLATED), "is compressed"),
    "a bomb": (
        _zip(
            lambda archive, contents, marker: archive.writestr(
                "net/data/weights/weight_9", bytes(10**8), zipfile.ZIP_LZMA
            )
        ),
        "weight_9' is compressed",
    ),
    "encrypted": (_bytes(_flagged), "is encrypted"),
    "a record longer than the file": (_bytes(_longer), "lies where another one does"),
    "records that overlap": (_bytes(_overlapping), "lies where another one does"),
    "a wrong checksum": (
        _bytes(lambda b, m: b.replace(b'"torch_version"', b'"torch_versiom"', 1)),
        "Bad CRC-32",
    ),
}


@pytest.mark.parametrize("name", ZIPS)
def test_archives_that_readers_may_read_in_two_ways(name: str, tmp_path: Path) -> None:
    """Whatever is not as torch.export.save writes it is refused, and nothing has run."""
    make, words = ZIPS[name]
    assert words in _refused(make(tmp_path / "evil.pt2")).message


# Programs ---------------------------------------------------------------------------------------


def _program(change: Callable[[Any], object]) -> Change:
    return lambda contents, marker: edit(contents, PROGRAM, change)


def _of_graph(change: Callable[[Any], object]) -> Change:
    return _program(lambda document: change(document["graph_module"]["graph"]))


def _expression(text: str) -> Change:
    """A size of the image."""
    size = {"as_expr": {"expr_str": text, "hint": {"as_int": 16}}}
    return _of_graph(lambda graph: graph["tensor_values"]["image"]["sizes"].__setitem__(2, size))


def _node(**values: Any) -> Change:
    return _of_graph(lambda graph: graph["nodes"][0].update(values))


def _stack(text: str) -> Change:
    return _of_graph(lambda graph: graph["nodes"][0]["metadata"].update(nn_module_stack=text))


def _signature(key: str, text: str) -> Change:
    """A string of the signature of the program's own call."""

    def change(document: Any) -> None:
        document["graph_module"]["module_call_graph"][0]["signature"][key] = text

    return _program(change)


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
        own = document["config"]["conv.weight"]
        for n in range(2_000):
            meta = {**own["tensor_meta"], "sizes": _ints(100_000 - n), "strides": _ints(1)}
            document["config"][f"conv.w{n}"] = {**own, "tensor_meta": meta}

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
        own = document["config"]["conv.weight"]
        document["config"][name] = own

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


def _nested(depth: int, start: str = "[", end: str = "]") -> str:
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


def _saved(content: object) -> bytes:
    file = io.BytesIO()
    torch.save(content, file)
    return file.getvalue()


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
    "a tower of powers": (_expression("9**9**9**9"), "expr_str '9**9**9**9'"),
    "a tower in srepr": (
        _expression("Pow(Integer(9), Pow(Integer(9), Pow(Integer(9), Integer(9))))"),
        "expr_str",
    ),
    "powers of powers": (_expression("Pow(" * 40 + "Integer(9)" + ", Integer(8))" * 40), "expr_"),
    "products of powers": (
        _expression(f"Mul({', '.join(['Pow(Integer(9), Integer(8))'] * 200)})"),
        "expr_str",
    ),
    "a shift": (_expression("1<<99999999999"), "expr_str '1<<99999999999'"),
    "a shift in srepr": (_expression("LShift(Integer(1), Integer(99999999999))"), "expr_str"),
    "a division by zero": (_expression("Mod(1,0)"), "expr_str 'Mod(1,0)'"),
    "a division by Integer(0)": (_expression("FloorDiv(Symbol('s0'), Integer(0))"), "expr_str"),
    "a million digits": (_expression("9" * 10**6), "expr_str"),
    "four thousand digits": (_expression(f"Integer({'9' * 4000})"), "expr_str"),
    "a number of a million digits": (
        lambda contents, marker: contents.update(
            {PROGRAM: contents[PROGRAM].replace(b'"as_int": 16', b'"as_int": 1' + b"0" * 10**6)}
        ),
        "integer string conversion",
    ),
    "an endless exponent": (_expression("Float('1e999999999', precision=53)"), "expr_str"),
    "an endless precision": (_expression("Float('0.5', precision=9999999999)"), "expr_str"),
    "a binomial": (_expression("binomial(Integer(999999), Integer(499999))"), "expr_str"),
    "a factorial": (_expression("factorial(Integer(9999999))"), "expr_str"),
    "a wild symbol": (_expression("Symbol('s0', cls=exec)"), "expr_str"),
    "a symbol of a long number": (_expression("Symbol('u99999999999')"), "expr_str"),
    "many brackets": (_expression(_nested(4_000, "(", ")")), "expr_str"),
    "many signs": (_expression("-" * 9_000 + "1"), "expr_str"),
    "a long sum": (_expression(f"Add({', '.join(['true'] * 1_500)})"), "expr_str"),
    "a chain of comparisons": (_expression("<".join(["true"] * 2_000)), "expr_str"),
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
        _state(_saved({"conv.weight": Reserve()})),
        "objects in data/weights",
    ),
    "a compressed pickle": (_state(_deflated(_saved(Net().state_dict()))), "is compressed"),
    "a pickle in other letters": (
        _state(
            _deflated(_saved({}), lambda name: name.replace("data.pkl", "DATA.pkl")),
        ),
        "is none that torch writes",
    ),
    "a list of weights": (_state(_saved([torch.zeros(1)])), "objects in data/weights"),
    "weights of any name": (_state(_saved({"__class__.x": torch.zeros(1)})), "objects in data"),
    "expanded weights in a pickle": (
        _state(_saved({"conv.weight": torch.zeros(1).expand(10**5, 10**5)})),
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
        _program(
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
        _of_graph(
            lambda graph: graph["nodes"][0]["inputs"][0].update(
                arg={"as_custom_obj": {"name": "x", "class_fqn": "os.system"}}
            )
        ),
        "as_custom_obj for 'arg'",
    ),
    # Documents
    "brackets without end": (
        lambda contents, marker: contents.update({PROGRAM: _nested(10**5).encode()}),
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
    "a text for a list": (_of_graph(lambda graph: graph.update(nodes="x")), "nodes is"),
    "two kinds of argument": (
        _of_graph(lambda graph: graph["inputs"][0].update(as_int=1)),
        "not Argument",
    ),
    "an unknown kind of argument": (
        _of_graph(lambda graph: graph["inputs"].__setitem__(0, {"as_code": "x"})),
        "'as_code'",
    ),
    "no values": (_of_graph(lambda graph: graph.pop("tensor_values")), "it lacks"),
    "a deep tree": (_signature("out_spec", _tree(60)), "out_spec"),
    "a wide float": (
        _of_graph(
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
        _program(lambda document: document.update(schema_version={"major": 99, "minor": 0})),
        "cannot be loaded",
    ),
    "the same name twice": (
        _of_graph(lambda graph: graph["inputs"].append(graph["inputs"][0])),
        "4 inputs where 3",
    ),
    "no signature": (
        _program(lambda d: d["graph_module"]["module_call_graph"][0].update(signature=None)),
        "it lacks the signature of its own call",
    ),
    "a value of a negative size": (
        _of_graph(lambda g: g["tensor_values"]["conv2d"].update(sizes=_ints(1, -2, 4, 4))),
        "'conv2d' has the shape",
    ),
    "an operator that is not there": (
        _node(target="torch.ops.aten.no_such.default"),
        "We failed to resolve torch.ops.aten.no_such.default",
    ),
    "a value too large for any memory": (
        _of_graph(lambda g: g["tensor_values"]["conv2d"].update(sizes=_ints(2**62, 2**62, 4, 4))),
        "'conv2d' has the shape",
    ),
}
"""What is done to a program, and words of the line that refuses it."""


@pytest.mark.parametrize("name", BROKEN)
def test_programs_that_run_or_hang_or_fill_the_memory(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line, before torch has seen anything of it; the seed and the modes stay as they are."""
    make, words = BROKEN[name]
    seed = torch.initial_seed()
    error = _refused(_made(make, tmp_path))
    assert words in error.message and len(error.message) < 600
    assert "Traceback" not in capfd.readouterr().err
    assert torch.initial_seed() == seed and torch.is_grad_enabled()
    assert type(nn.Module.forward).__name__ == "function"


_SUMS = (f"Add(Symbol('s{n}'), Symbol('s{n + 1}'))" for n in range(15))
PRODUCT = f"Mul({', '.join(_SUMS)})"
"""More parts than `exported_sizes.is_quick` allows, and few enough to be rewritten."""

HARMLESS: dict[str, Change] = {
    "a bound of a size that torch would count up to": _program(
        lambda document: document["range_constraints"].update(
            {f"u{10**12}": {"min_val": 0, "max_val": None}}
        )
    ),
    "a bound that is code": _program(
        lambda document: document["range_constraints"].update(
            {"__import__('os')": {"min_val": 0, "max_val": None}}
        )
    ),
    "guards that are code": _program(
        lambda document: document.update(guards_code=["__import__('os').mkdir('marker')"])
    ),
    "classes for named tuples": _program(
        lambda document: document["graph_module"].update(
            treespec_namedtuple_fields={"os.system": {"field_names": ["x"]}}
        )
    ),
    "notes that are deep": _of_graph(
        lambda graph: graph["nodes"][0]["metadata"].update(custom=_nested(10**5))
    ),
    "notes that name functions": _of_graph(
        lambda graph: graph["nodes"][0]["metadata"].update(source_fn_stack="x,torch.hub.load")
    ),
    "notes on the program": _program(
        lambda document: document["graph_module"].update(metadata={"custom": _nested(10**5)})
    ),
    "a product that sympy would expand": _of_graph(
        lambda graph: graph["tensor_values"]["conv2d"]["sizes"].__setitem__(
            2, {"as_expr": {"expr_str": PRODUCT}}
        )
    ),
    "an image with such a product": _expression(PRODUCT),
    "a field of a later torch": _program(lambda document: document.update(evil="import os")),
    "extra files": lambda contents, marker: contents.update(
        {"extra/../../marker": b"x", "extra/model.pt": _pickled(marker)}
    ),
    "bytes that nothing names": lambda contents, marker: contents.update(
        {"data/weights/weight_99": _pickled(marker), "data/constants/opaque_obj_7": b"x"}
    ),
}
"""What is left out, so that the program is as good as without it."""


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_not_needed_never_reaches_torch(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program gives what it gave, and the archive that torch reads has no trace of it."""
    monkeypatch.chdir(tmp_path)
    path = _made(HARMLESS[name], tmp_path)
    clean = exported.read(packed(tmp_path / "clean.pt2", records())).module
    image = torch.randn(1, 3, 16, 20)
    assert torch.equal(exported.read(path).module(image), clean(image))
    with exported_archive.rewritten(path) as file, zipfile.ZipFile(file) as archive:
        names = {found.partition("/")[2] for found in archive.namelist()}
        text = archive.read(f"archive/{PROGRAM}").decode()
    assert {found for found in names if found.startswith(("extra", "data/c"))} == {CONSTANTS}
    assert "weight_99" not in str(names) and "os" not in text.replace("cos", "").split("'")
    assert not {"custom", "source_fn_stack", "evil"} & set(_keys(json.loads(text)))
    assert not (tmp_path / "marker").exists()


def _keys(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _keys(item)
    elif isinstance(value, list):
        for item in value:
            yield from _keys(item)


def _swapped(key: str, value: str) -> Change:
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


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("target", "torch.serialization.os.mkdir"),
        ("target", "torch.ops.load_library"),
        ("target", "torch.ops.aten.save.default"),
        ("target", "torch.ops.image.write_file.default"),
        ("target", "torch.ops.higher_order.flat_apply"),
        ("target", "torch.ops.aten.relu.default.__call__"),
        ("target", "torchX.hub.load"),
        ("target", "_operator.call"),
        ("target", "_operator.attrgetter"),
        ("target", "_operatorX.call"),
        ("target", "math.__loader__.load_module"),
        ("target", "#evil:op"),
        ("parameter_name", 'conv.weight")+print("x'),
        ("name", "x = 1\nimport os"),
        ("name", "x;y"),
        ("nn_module_stack", 'L__self__,,a;L__self__x,x"),evil("x,b'),
        ("nn_module_stack", "L__self__,a\\b,c"),
        ("stack_trace", "# x\revil()"),
        (
            "in_spec",
            '[1, {"type": "collections.namedtuple", "context": "null", "children_spec": []}]',
        ),
        ("in_spec", '[1, {"type": "builtins.dict", "context": "[{}]", "children_spec": []}]'),
        ("in_spec", "[2, 3]"),
        ("in_spec", "nonsense"),
    ],
)
def test_one_string_out_of_place_refuses_the_archive(key: str, value: str, tmp_path: Path) -> None:
    """Each string is held against what torch.export.save writes under its key."""
    error = _refused(_made(_swapped(key, value), tmp_path))
    assert "could run any code; nothing was executed" in error.message


@pytest.mark.parametrize(
    "text",
    [
        "exec",
        "exec(1)",
        "Symbol('s0').__class__",
        "s0.a",
        "s0[0]",
        "(lambda: 0)()",
        "[s0]",
        "Add('exec(1)')",
        "Add('a.b')",
        "Symbol(f'{s0}')",
        "(s0 := 1)",
        "Integer(1)(2)",
        "s0 if s0 else s0",
        "s0; s0",
        "2*s77 + 1",
        "",
    ],
)
def test_sizes_that_are_no_arithmetic(text: str) -> None:
    """Sizes are evaluated as Python by sympy, so nothing but arithmetic on symbols passes."""
    with pytest.raises(ValueError, match=r"."):
        exported_sizes.rewritten(text)


@pytest.mark.parametrize(
    "text",
    [
        "Symbol('s77', positive=True, integer=True)",
        "Add(FloorDiv(Add(Symbol('s0', integer=True), Integer(-1)), Integer(8)), Integer(1))",
        "Pow(Max(Integer(1), Symbol('u0')), Integer(2))",
        "Mul(Rational(1, 2), Symbol('s0', positive=True, integer=True))",
        "Float('0.5', precision=53)",
        "StrictLessThan(Symbol('s0', positive=True, integer=True), Integer(7))",
        "true",
    ],
)
def test_sizes_that_torch_writes(text: str) -> None:
    """Expressions keep their value; sympy's is the same."""
    import sympy
    from torch.utils._sympy import functions

    plain = {f"{kind}{n}": sympy.Symbol(f"{kind}{n}") for kind in "su" for n in (0, 1, 77)}
    values = {name: n + 5 for n, name in enumerate(plain)}

    def value(words: str) -> object:
        known = {"FloorDiv": functions.FloorDiv, "Max": sympy.Max, **plain}
        found = sympy.sympify(words, locals=known)
        return found.subs({symbol: values[symbol.name] for symbol in found.free_symbols})

    again = exported_sizes.rewritten(text)
    assert exported_sizes.rewritten(again) == again
    assert value(again) == value(text)


def test_no_other_operator_of_aten_takes_a_file() -> None:
    """Of all operators with a string argument, the two that name files are the two refused."""
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("aten::")]
    names = {s.name.removeprefix("aten::") for s in schemas if "file" in str(s)}
    assert names == {"from_file", "save"}
    for name in names:
        assert not exported_json._is_operator(f"torch.ops.aten.{name}.default")
    assert exported_json._is_operator("torch.ops.aten.conv2d.default")


# Good programs -----------------------------------------------------------------------------------


class Branches(nn.Module):
    """Shared and nested modules, a buffer that is a view, a constant, three kinds of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.again = self.conv
        self.block = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(inplace=True))
        self.register_buffer("row", torch.arange(12.0).reshape(4, 3)[1])
        self.scale = torch.tensor(2.0)
        self.tied = nn.Conv2d(3, 3, 1)
        self.tied.weight = self.conv.weight

    def forward(self, image: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            first = self.block(self.conv(image)) * self.scale
        second = self.tied(self.block(self.again(first))) + self.row[:, None, None]
        return {"sum": second.flatten(1).sum(1), "both": (first, [second.half()])}


GOOD: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "branches": (Branches, (), ()),
    "training mode": (lambda: nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2)), (), ()),
    "free sizes": (lambda: nn.Conv2d(3, 2, 3, stride=2, padding=1), (0, 2, 3), ()),
    "resnet18": (lambda: models.resnet18(weights=None).eval(), (0, 2, 3), ("slow",)),
    "mobilenet_v3_small": (lambda: models.mobilenet_v3_small(weights=None).eval(), (), ("slow",)),
    "vit": (lambda: models.VisionTransformer(64, 16, 2, 4, 64, 128).eval(), (0,), ("slow",)),
    "swin_t": (lambda: models.swin_t(weights=None).eval(), (), ("slow",)),
}
"""Programs by name: how they are made, and which of their sizes are free."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] if marks else []) for n, (*_, marks) in GOOD.items()],
)
def test_what_is_written_anew_gives_what_torchs_own_module_gives(name: str, tmp_path: Path) -> None:
    """Bit for bit, with the same modules, parameters, buffers and sharing."""
    signal.alarm(0)
    torch.manual_seed(0)
    make, free, _ = GOOD[name]
    shapes = (dict.fromkeys(free, torch.export.Dim.AUTO),)
    example = torch.zeros(2 if 0 in free else 1, 3, 64, 64)
    program = torch.export.export(make(), (example,), dynamic_shapes=shapes)
    torch.export.save(program, tmp_path / "m.pt2")
    found = exported.read(tmp_path / "m.pt2").module
    own = torch.export.load(tmp_path / "m.pt2")
    tree = torch.export.unflatten(own)
    assert [n for n, _ in found.named_modules()] == [n for n, _ in tree.named_modules()]
    for mine, theirs in (
        (dict(found.named_parameters()), dict(tree.named_parameters())),
        (dict(found.named_buffers()), dict(tree.named_buffers())),
    ):
        assert list(mine) == list(theirs)
        assert all(torch.equal(mine[n], theirs[n]) for n in mine)
    side = 96 if 2 in free else 64
    image = torch.randn(2 if 0 in free else 1, 3, side, side)
    expected = tree_leaves(own.module()(image))
    for got, want in zip(tree_leaves(found(image)), expected, strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)


def test_weights_as_torch_2_8_wrote_them(tmp_path: Path) -> None:
    """A pickle of named tensors becomes records of plain bytes; what shared memory shares it."""
    module = Net().eval()
    state = module.state_dict(keep_vars=True)
    state = {**state, "conv.twin": state["conv.weight"]}
    contents = records()
    for name in [name for name in contents if name.startswith("data/")]:
        del contents[name]
    contents |= {"data/weights/model.pt": _saved(state), "data/constants/model.pt": _saved({})}
    contents[INPUTS] = _saved(((torch.zeros(1, 3, 16, 20),), {}))
    found = exported.read(packed(tmp_path / "old.pt2", contents)).module
    image = torch.randn(1, 3, 16, 20)
    assert torch.equal(found(image), module(image))
    assert found.conv.twin is found.conv.weight


def test_weights_as_torch_2_8_wrote_them_are_read_by_our_own_reader(tmp_path: Path) -> None:
    """Numbers as keys may all have one hash; no other reader of pickles sees them."""
    contents = records()
    for name in [name for name in contents if name.startswith("data/")]:
        del contents[name]
    state = {2**64: torch.zeros(1)}
    contents |= {"data/weights/model.pt": _saved(state), "data/constants/model.pt": _saved({})}
    contents[INPUTS] = _saved(((torch.zeros(1, 3, 16, 20),), {}))
    with pytest.raises(LoadError, match="holds a key that is too large a number; nothing was"):
        exported.read(packed(tmp_path / "old.pt2", contents))


def test_large_weights_are_not_copied_into_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written anew is in a file of its own, which is gone afterwards."""
    monkeypatch.setattr(exported_archive, "_IN_MEMORY", 100)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "t"))
    (tmp_path / "t").mkdir()
    path = packed(tmp_path / "net.pt2", records())
    with exported_archive.rewritten(path) as file:
        assert isinstance(file.fileno(), int)
    assert exported.read(path).module(torch.zeros(1, 3, 16, 20)).shape == (1, 2, 16, 20)
    assert [*(tmp_path / "t").iterdir()] == []


def test_no_room_for_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line names the place and the way to another one."""

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "SpooledTemporaryFile", full)
    with pytest.raises(LoadError, match=r"net\.pt2 cannot be loaded: No space left") as caught:
        exported.read(packed(tmp_path / "net.pt2", records()))
    assert "TMPDIR" in str(caught.value.hint)
