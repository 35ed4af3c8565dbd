"""What a torch.export archive (.pt2) would run when it is loaded, found out without loading it.

`torch.export.load` unpickles example inputs and whatever constants are no plain tensors, evaluates
sizes as Python (`sympy.sympify`), resolves operators attribute by attribute, imports the modules
that enumerations name, and writes names into code that it executes (torch 2.15:
`torch/export/pt2_archive/_package.py`, `torch/_export/serde/serialize.py`, `torch/fx/graph.py`).
So every string in the archive is held against what `torch.export.save` writes there, the archive is
read by torch's own reader, and one string too many refuses the whole file.
"""

from __future__ import annotations

import ast
import io
import json
import pickle
import re
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from featviz.errors import LoadError

_UNREADABLE = (
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    EOFError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    KeyError,
    IndexError,
)
"""What torch.load raises for a pickle that is damaged or holds more than tensors."""

_SHOWN = 3
"""Faults that an error names before it says how many more there are."""

_LENGTH = 60
"""Characters of a fault that are shown."""

_PLAIN = re.compile(r"[\w.@+-]*", re.ASCII)
"""Names of nodes, arguments and parameters; nothing that could be more than a name in code."""

_PAYLOAD = re.compile(r"(weight|tensor)_\d+", re.ASCII)
"""Files of plain tensors; `custom_obj_N` and `opaque_obj_N` are pickles."""

_STACK_ITEM = r"[\w.@+\[\]'\"-]*,[\w.@+-]*,[\w.@<>]*"
_STACK = re.compile(f"{_STACK_ITEM}(;{_STACK_ITEM})*", re.ASCII)
"""`key,qualified name,class`, one for each module around an operation."""

_OPERATOR = re.compile(
    r"torch\.ops\.(aten|torchvision)\.(?!(from_file|save|_print|warn)\.)\w+\.\w+"
    r"|torch\.ops\.higher_order\.wrap_with_(set_grad_enabled|autocast)"
    r"|_operator\.(getitem|eq|ne|le|ge|lt|gt|neg|pos|mul|add|sub|floordiv|mod|pow|truediv|and_|or_)"
    r"|math\.(trunc|ceil|floor)"
    r"|torch\.sym_\w+",
    re.ASCII,
)
"""Operators on tensors and sizes. `aten.from_file` and `aten.save` reach the file system, and
`_operator.call` with `_operator.attrgetter` anything at all."""

_TREE_TYPES = (None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict")

_SIZE_NAME = re.compile(
    "Symbol|Integer|Float|Rational|Add|Mul|Pow|Max|Min|Mod|Abs|Eq|Ne|And|Or|Not"
    "|Equality|Unequality|StrictLessThan|LessThan|StrictGreaterThan|GreaterThan"
    "|FloorDiv|ModularIndexing|Where|PythonMod|CleanDiv|CeilToInt|FloorToInt|CeilDiv|PowByNatural"
    "|FloatPow|FloatTrueDiv|IntTrueDiv|TruncToFloat|TruncToInt|RoundToInt|ToFloat|Identity"
)
"""Functions of sympy and of torch's own in sizes, as `sympy.srepr` writes them."""

_SIZE_SYMBOL = re.compile(r"(s|u|zf|zuf)\d+", re.ASCII)
_SIZE_TEXT = re.compile(r"[A-Za-z_]\w*|-?\d+(\.\d+)?([eE][+-]?\d+)?", re.ASCII)
_SIZE_NODES = (
    ast.Expression,
    ast.Call,
    ast.Name,
    ast.Load,
    ast.Constant,
    ast.keyword,
    ast.BinOp,
    ast.UnaryOp,
    ast.Compare,
    ast.operator,
    ast.unaryop,
    ast.cmpop,
)


def check(path: Path) -> None:
    """Refuse an archive that holds more than tensors and operations on them.

    Raises:
        LoadError: no archive that torch can read, compiled code, torch's format before 2.8, or
            something that could run code; nothing of it has been executed.
    """
    _check_format(path)
    try:
        faults = list(_faults(_reader(path)))
    except (RuntimeError, AssertionError, ValueError, KeyError, TypeError, RecursionError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        line = line.partition("  (Could this error message")[0]
        raise LoadError(f"{path.name} cannot be loaded: {line}", "is the file whole?") from error
    if faults:
        more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
        raise LoadError(
            f"{path.name} holds {', '.join(faults[:_SHOWN])}{more}, which could run any code; "
            "nothing was executed",
            "if you trust the file: --unsafe-load",
        )


def _check_format(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    if "version" in names:  # torch.export.load falls back to this format, which is all pickles
        raise LoadError(
            f"{path.name} is a torch.export program in the format before torch 2.8",
            "save it again with a newer torch (torch.export.load, then torch.export.save), "
            "or --unsafe-load if you trust it",
        )
    if any("/data/aotinductor/" in name for name in names):
        raise LoadError(
            f"{path.name} is compiled by AOTInductor: machine code, which takes no hooks on layers",
            "the program as torch.export.save wrote it, or the model itself",
        )


def _reader(path: Path) -> Any:
    try:
        from torch.export.pt2_archive import PT2ArchiveReader
    except ImportError as error:
        raise LoadError(
            f"torch {torch.__version__} reads no .pt2 archives that featviz could check",
            "torch 2.8 or newer, or --unsafe-load if you trust the file",
        ) from error
    return PT2ArchiveReader(str(path))


def _faults(reader: Any) -> Iterator[str]:
    for name in reader.get_file_names():
        if name.startswith("data/aotinductor/"):
            yield "compiled code"
        elif name.startswith("models/"):
            yield from _strings(json.loads(reader.read_bytes(name).decode()), "")
        elif name.startswith("data/") and name.endswith(".json"):
            yield from _payload(json.loads(reader.read_bytes(name).decode()))
        elif name.startswith("data/") and name.endswith(".pt"):
            yield from _pickle(name, reader.read_bytes(name))


def _pickle(name: str, content: bytes) -> Iterator[str]:
    """A pickle must need no more than tensors; torch's own reader of weights says so."""
    if not content:
        return
    try:
        torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except _UNREADABLE:
        yield f"objects in {name}"


def _payload(config: dict[str, Any]) -> Iterator[str]:
    """Where weights and constants lie."""
    for name, entry in config["config"].items():
        if entry["use_pickle"] is not False or not _PAYLOAD.fullmatch(entry["path_name"]):
            yield f"a pickle for {_shown(name)}"
    yield from _strings(config, "")


def _strings(value: Any, key: str) -> Iterator[str]:
    """The strings of a JSON document that are not what the key promises."""
    if isinstance(value, dict):
        for name, item in value.items():
            if not _PLAIN.fullmatch(name):
                yield f"the name {_shown(name)}"
            yield from _strings(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item, key)
    elif isinstance(value, str) and not _RULES.get(key, _is_plain)(value):
        yield f"{key} {_shown(value)}"


def _is_plain(text: str) -> bool:
    return _PLAIN.fullmatch(text) is not None


def _is_operator(text: str) -> bool:
    return _OPERATOR.fullmatch(text) is not None


def _is_stack(text: str) -> bool:
    return _STACK.fullmatch(text) is not None


def _is_size(text: str) -> bool:
    """Whether an expression only computes with sizes; sympy evaluates strings inside it too."""
    try:
        nodes = list(ast.walk(ast.parse(text.strip(), mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(isinstance(node, _SIZE_NODES) and _is_size_node(node) for node in nodes)


def _is_size_node(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and bool(_SIZE_NAME.fullmatch(node.func.id))
    if isinstance(node, ast.Name):
        return bool(_SIZE_NAME.fullmatch(node.id) or _SIZE_SYMBOL.fullmatch(node.id))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _SIZE_TEXT.fullmatch(node.value) is not None
    return True


def _is_tree(text: str) -> bool:
    """Whether inputs or outputs are built of tuples, lists and dicts with plain keys."""
    try:
        protocol, tree = json.loads(text)
        return protocol == 1 and _is_tree_node(tree)
    except (ValueError, TypeError, KeyError):
        return False


def _is_tree_node(tree: dict[str, Any]) -> bool:
    keys = json.loads(tree["context"]) if tree["context"] is not None else None
    plain = keys is None or (
        isinstance(keys, list) and all(isinstance(key, str) and _is_plain(key) for key in keys)
    )
    children = [_is_tree_node(child) for child in tree["children_spec"]]
    return tree["type"] in _TREE_TYPES and plain and all(children)


def _is_note(text: str) -> bool:
    """What torch keeps as it is, or writes into code only as a quoted string or a comment."""
    return text.replace("\n", "").isprintable()


def _shown(text: str) -> str:
    return ascii(text[:_LENGTH] + ("…" if len(text) > _LENGTH else ""))


_RULES: dict[str, Callable[[str], bool]] = {
    "target": _is_operator,
    "as_operator": _is_operator,
    "expr_str": _is_size,
    "in_spec": _is_tree,
    "out_spec": _is_tree,
    "nn_module_stack": _is_stack,
    "stack_trace": _is_note,
    "torch_fn": _is_note,
    "source_fn_stack": _is_note,
    "custom": _is_note,
    "from_node": _is_note,
    "guards_code": _is_note,
    "as_string": _is_note,
    "as_strings": _is_note,
}
