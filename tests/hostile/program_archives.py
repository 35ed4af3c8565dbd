"""Hostile .pt2 archives: records that would run code, and zips that readers read in two ways."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from exported import CONSTANTS, INPUTS, PROGRAM, WEIGHTS, Records, edit, packed, records
from hostile_payloads import Call, saved_bytes

Change = Callable[[Records, Path], object]
"""Makes a harmless program hostile; a payload would make the folder that is named."""


def made(change: Change, folder: Path, dynamic: bool = False) -> Path:
    """The archive of a changed program."""
    contents = records(dynamic)
    change(contents, folder / "marker")
    return packed(folder / "evil.pt2", contents)


def pickled(marker: Path) -> bytes:
    """Example inputs that make the folder `marker` where they are unpickled."""
    return saved_bytes(((Call(os.mkdir, str(marker)),), {}))


def evil_inputs(contents: Records, marker: Path) -> None:
    """Example inputs that run code."""
    contents["data/sample_inputs/model.pt"] = pickled(marker)


def _weight(contents: Records, marker: Path) -> None:
    edit(contents, WEIGHTS, lambda d: d["config"]["conv.weight"].update(use_pickle=True))
    contents["data/weights/weight_0"] = pickled(marker)


def _old_weights(contents: Records, marker: Path) -> None:
    contents["data/weights/model.pt"] = pickled(marker)


def _opaque(contents: Records, marker: Path) -> None:
    weight = json.loads(contents[WEIGHTS])["config"]["conv.weight"]
    entry = {**weight, "path_name": "opaque_obj_0", "use_pickle": True}
    edit(contents, CONSTANTS, lambda d: d["config"].update(evil=entry))
    contents["data/constants/opaque_obj_0"] = pickle.dumps(Call(os.mkdir, str(marker)))


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
        contents[name] = pickled(marker)

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
    return _zip(lambda archive, contents, marker: archive.writestr(name, pickled(marker)))


def _bytes(change: Callable[[bytes, Path], bytes], **options: Any) -> Callable[[Path], Path]:
    """An archive whose bytes are changed."""

    def make(path: Path) -> Path:
        packed(path, records(), **options)
        path.write_bytes(change(path.read_bytes(), path.with_name("marker")))
        return path

    return make


def _flagged(content: bytes, marker: Path) -> bytes:
    """Every record says that it is encrypted."""
    flagged = bytearray(content)
    for signature, offset in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        at = flagged.find(signature)
        while at >= 0:
            flagged[at + offset] |= 1
            at = flagged.find(signature, at + 1)
    return bytes(flagged)


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
        for name, record in {**records(), INPUTS: pickled(marker)}.items():
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
