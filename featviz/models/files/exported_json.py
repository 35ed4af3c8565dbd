"""The JSON of torch.export programs: checked value by value, and built anew.

`torch.export.load` evaluates sizes as Python, resolves operators attribute by attribute, imports
the modules that enumerations name, writes names into code that it executes, and sets attributes by
names (torch 2.15: `torch/_export/serde/serialize.py`, `torch/export/unflatten.py`). So each value
is held against the type that torch's own schema gives it and against what `torch.export.save`
writes there; what is not needed to run the program is left out.
"""

from __future__ import annotations

import functools
import itertools
import json
import keyword
import math
import re
import types
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Any

import torch
from torch import nn

from featviz.files import parse_json
from featviz.models.files import exported_sizes
from featviz.models.files.module_state import LONGEST_PATH
from featviz.models.requirements import require_torchvision

_LENGTH = 80
"""Characters of a fault that are shown."""

_MOST_DIMENSIONS = 64
"""Dimensions of a tensor; torch's own iterators take no more."""

_MOST_ELEMENTS = 2**50
"""Numbers in a tensor: more than any memory holds."""

_DEEPEST = 64
"""Modules inside one another: beyond, what goes through them recursively fails."""

_MOST_CALLS = 1_000
"""Calls of one module that export keeps apart; torch compares each with each."""

_PLAIN = re.compile(r"[\w.@+-]*", re.ASCII)
"""Names of devices, verifiers, versions; nothing that could be more than a name in code."""

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)
"""Names of nodes, which torch writes into code."""

_ARGUMENT = re.compile(r"([A-Za-z_]\w*)?", re.ASCII)
"""Names of operators' arguments, where `from` is one, and none is one too."""

_COMPONENT = re.compile(r"(?!__)[\w+-]+(@\d{1,6})?", re.ASCII)
"""One name in the path of a module, and which call of it."""

_KEY = re.compile(r"[\w.@+\[\]'\"-]*", re.ASCII)
_TYPE = re.compile(r"[\w.@<>]*", re.ASCII)
"""Parts of `key,path,class`, one for each module around an operation."""

_RESERVED = frozenset((*dir(nn.Module()), "_ty"))
"""Attributes of every module: a path through `forward` or `_modules` would change them."""

_OPERATOR = re.compile(
    r"torch\.ops\.(aten|torchvision)\.(?!(from_file|save|_print|warn)\.)\w+\.\w+"
    r"|torch\.ops\.higher_order\.wrap_with_(set_grad_enabled|autocast)"
    r"|_operator\.(getitem|eq|ne|le|ge|lt|gt|neg|pos|mul|add|sub|floordiv|mod|pow|truediv|and_|or_)"
    r"|math\.(trunc|ceil|floor)"
    r"|torch\.sym_(float|int|ite|max|min|not|sqrt|sum)",
    re.ASCII,
)
"""Operators on tensors and sizes. `aten.from_file` and `aten.save` reach the file system, and
`_operator.call` with `_operator.attrgetter` anything at all."""

_FOREIGN = re.compile(
    r"\b(t|t1|t2|tVal|Any|AnyEnumType|Dict|Future|RRef|Storage|Stream|__torch__)\b", re.ASCII
)
"""Types of arguments that no operator has which torch.export writes."""

_ABOUT_SIZES = (
    "aten::sym_constrain_range",
    "aten::sym_constrain_range_for_size",
    "aten::_assert_scalar",
)
"""Operators without tensors that torch.export writes."""

_DEVICES = ("cpu", "cuda", "mps", "xpu", "meta")

_TREE_TYPES = (None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict")

_MODEL_OUTPUT = re.compile(
    r"transformers\.(modeling_outputs|models(\.\w+)+)\.\w*Output\w*", re.ASCII
)
"""Outputs of transformers' models: dicts with attributes, which are written as plain dicts, so that
torch looks for no class of that name."""

_KEPT_METADATA = ("nn_module_stack", "torch_fn")
"""What is kept of a node's metadata: in which module it is, and which function it was."""

_EMPTIED: dict[str, Any] = {
    "guards_code": list,
    "treespec_namedtuple_fields": dict,
    "custom_obj_values": dict,
}
"""Fields that a program runs without; torch would evaluate the first."""

_REFUSED = ("as_custom_obj", "custom_obj", "as_string_to_argument", "token")
"""Kinds of arguments that only pickled objects and other people's operators take."""

_WORDS = ("Infinity", "-Infinity", "NaN")
"""How torch writes the floats that JSON has not."""

_UNKNOWN_SIZE = 2
"""Stands for a size that is known only when the program runs."""


class BrokenError(ValueError):
    """The document is not of the form that torch.export.save writes."""


@dataclass(frozen=True)
class Checked:
    """A document built anew, and what could not be taken over."""

    value: Any
    faults: list[str]
    """Strings out of place, in words for people; with any, the document must not be loaded."""


def program(text: str) -> Checked:
    """Check a program (`models/NAME.json`).

    Raises:
        ValueError: no JSON, or not of the form that torch's schema describes.
    """
    checked = _checked(text, "ExportedProgram")
    if not checked.faults:
        _settle(checked.value)
        _check_calls(checked.value)
    return checked


def payload(text: str) -> Checked:
    """Check which record each weight or constant lies in (`..._config.json`).

    Raises:
        ValueError: no JSON, or not of the form that torch's schema describes.
    """
    return _checked(text, "PayloadConfig")


def shown(text: str) -> str:
    """A string from a file, in quotes, short and printable."""
    return ascii(text[:_LENGTH] + ("…" if len(text) > _LENGTH else ""))


def _checked(text: str, name: str) -> Checked:
    from torch._export.serde import schema

    reader = _Reader()
    try:
        return Checked(reader.read(getattr(schema, name), parse_json(text), ""), reader.faults)
    except RecursionError as error:
        raise BrokenError("too deep") from error


# Values against torch's schema --------------------------------------------------------------


class _Reader:
    """Builds a document anew after torch's annotations, and collects its faults."""

    def __init__(self) -> None:
        self.faults: list[str] = []

    def read(self, annotation: Any, value: Any, key: str) -> Any:
        reader, kind = _form(annotation)
        return reader(self, kind, value, key)

    def optional(self, inner: Any, value: Any, key: str) -> Any:
        return None if value is None else self.read(inner, value, key)

    def record(self, kind: type, value: Any, key: str) -> Any:
        _expect(isinstance(value, dict), key, kind.__name__, value)
        if kind.__name__ == "GraphModule":
            value = {**value, "metadata": {}}
        inner = _fields(kind)
        keys = {"name": "argument"} if kind.__name__ == "NamedArgument" else {}
        record = {
            name: _EMPTIED[name]()
            if name in _EMPTIED
            else self.read(inner[name], item, keys.get(name, name))
            for name, item in value.items()
            if name in inner
        }
        if kind.__name__ == "TensorMeta":
            _check_tensor(record)
        return record

    def union(self, kind: type, value: Any, key: str) -> Any:
        inner = _fields(kind)
        _expect(isinstance(value, dict) and len(value) == 1, key, kind.__name__, value)
        ((name, item),) = value.items()
        _expect(name in inner, key, kind.__name__, name)
        if name in _REFUSED:
            self.faults.append(f"{name} for {shown(key)}")
            return {"as_none": True}
        return {name: self.read(inner[name], item, name)}

    def items(self, inner: Any, value: Any, key: str) -> Any:
        _expect(isinstance(value, list), key, "a list", value)
        return [self.read(inner, item, key) for item in value]

    def mapping(self, inner: Any, value: Any, key: str) -> Any:
        _expect(isinstance(value, dict), key, "an object", value)
        mapping = {}
        for name, item in value.items():
            if key == "range_constraints" and not exported_sizes.SYMBOL.fullmatch(name):
                continue  # bounds of an expression: those of its symbols do
            if not _NAMES.get(key, _is_identifier)(name):
                self.faults.append(f"the name {shown(name)}")
            elif key == "metadata" and name not in _KEPT_METADATA:
                self.text(str(item), name)
            else:
                mapping[name] = self.read(inner, item, name)
        return mapping

    def member(self, kind: type[IntEnum], value: Any, key: str) -> Any:
        _expect(type(value) is int and value in tuple(kind), key, kind.__name__, value)
        return value

    def plain(self, kind: type, value: Any, key: str) -> Any:
        what, fits = _PLAIN_VALUES[kind]
        _expect(fits(value), key, what, value)
        return self.text(value, key) if kind is str else value

    def text(self, value: str, key: str) -> str:
        """A string as it may be taken over."""
        try:
            if key in _REWRITTEN:
                return _REWRITTEN[key](value)
            if _RULES.get(key, _PLAIN.fullmatch)(value):
                return value
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
        self.faults.append(f"{key} {shown(value)}")
        return ""


@functools.cache
def _form(annotation: Any) -> tuple[Callable[[_Reader, Any, Any, str], Any], Any]:
    """What reads a value that torch annotates so; and its class, or the annotation of what lies
    inside."""
    from torch._export.serde.union import _Union

    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _Reader.optional, next(arg for arg in args if arg is not type(None))
    if origin is not None:
        return {list: _Reader.items, dict: _Reader.mapping}[origin], args[-1]
    if annotation in _PLAIN_VALUES:
        return _Reader.plain, annotation
    if issubclass(annotation, IntEnum):
        return _Reader.member, annotation
    return _Reader.union if issubclass(annotation, _Union) else _Reader.record, annotation


@functools.cache
def _fields(kind: type) -> dict[str, Any]:
    """The fields of one of torch's records, and how they are annotated."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


_PLAIN_VALUES: dict[type, tuple[str, Callable[[Any], bool]]] = {
    bool: ("true or false", lambda value: type(value) is bool),
    int: ("a whole number", lambda value: type(value) is int and -(2**63) <= value < 2**64),
    float: (
        "a number",
        lambda value: value in _WORDS or (type(value) in (int, float) and abs(value) < 2**1024),
    ),
    str: ("text", lambda value: isinstance(value, str)),
}
"""By its type, what a value is called, and whether one is fit."""


def _expect(fits: bool, key: str, what: str, value: Any) -> None:
    if not fits:
        raise BrokenError(f"{key or 'the document'} is {shown(repr(value))}, not {what}")


def _check_tensor(meta: dict[str, Any]) -> None:
    for key in ("sizes", "strides"):
        _expect(len(meta.get(key, ())) <= _MOST_DIMENSIONS, key, "a shape", meta.get(key))


# Strings and names --------------------------------------------------------------------------


def _is_identifier(text: str) -> bool:
    return _IDENTIFIER.fullmatch(text) is not None and not keyword.iskeyword(text)


def _is_path(text: str) -> bool:
    """Whether it names a module, or something in one; each name will be an attribute."""
    if text == "":
        return True
    parts = text.split(".")
    return (
        len(text) <= LONGEST_PATH
        and len(parts) <= _DEEPEST
        and all(
            _COMPONENT.fullmatch(part) and part.partition("@")[0] not in _RESERVED for part in parts
        )
    )


def is_state(text: str) -> bool:
    """Whether a string names a parameter, a buffer or a constant, for all calls of its module."""
    return text != "" and "@" not in text and _is_path(text)


def _is_stack(text: str) -> bool:
    """Whether each module around an operation is `key,path,class`."""
    modules = [module.split(",") for module in text.split(";")]
    return all(
        len(parts) == 3
        and _KEY.fullmatch(parts[0])
        and _is_path(parts[1])
        and _TYPE.fullmatch(parts[2])
        for parts in modules
    )


def _is_note(text: str) -> bool:
    """What torch keeps as it is, or writes into code only as a quoted string or a comment."""
    return text.replace("\n", "").isprintable()


@functools.lru_cache(4096)
def _is_operator(text: str) -> bool:
    """Whether torch finds an operator under the name, or nothing at all."""
    if not _OPERATOR.fullmatch(text):
        return False
    if not text.startswith(("torch.ops.aten.", "torch.ops.torchvision.")):
        return True
    _, _, space, name, overload = text.split(".")
    if space == "torchvision":
        require_torchvision()  # which registers them
    operator = getattr(getattr(getattr(torch.ops, space), name, None), overload, None)
    return operator is None or (
        isinstance(operator, torch._ops.OpOverload) and _takes_tensors(operator)
    )


def _takes_tensors(operator: torch._ops.OpOverload) -> bool:
    """Whether it computes with tensors; those on lists, texts or settings are TorchScript's."""
    schema = operator._schema
    types = {str(value.real_type) for value in (*schema.arguments, *schema.returns)}
    return not any(map(_FOREIGN.search, types)) and (
        any("Tensor" in kind for kind in types) or schema.name in _ABOUT_SIZES
    )


def _tree(text: str) -> str:
    """How inputs or outputs are built of tuples, lists and dicts with plain keys; an output of
    transformers is a dict."""
    protocol, tree = parse_json(text)
    if protocol != 1:
        raise BrokenError("an unknown protocol")
    return json.dumps([1, _tree_node(tree)])


def _tree_node(tree: dict[str, Any]) -> dict[str, Any]:
    kind, context = tree["type"], tree["context"]
    keys = parse_json(context) if context is not None else None
    named = isinstance(keys, list) and all(isinstance(k, str) and _PLAIN.fullmatch(k) for k in keys)
    if isinstance(kind, str) and _MODEL_OUTPUT.fullmatch(kind) and isinstance(keys, list):
        _expect(len(keys) == len(tree["children_spec"]), kind, "a name for each output", keys)
        kind = "builtins.dict"
    if kind not in _TREE_TYPES or not (keys is None or named):
        raise BrokenError("an unknown type")
    return {
        "type": kind,
        "context": None if context is None else json.dumps(keys),
        "children_spec": [_tree_node(child) for child in tree["children_spec"]],
    }


_REWRITTEN: dict[str, Callable[[str], str]] = {
    "expr_str": exported_sizes.rewritten,
    "in_spec": _tree,
    "out_spec": _tree,
}
"""What is written anew of the strings under a key."""

_RULES: dict[str, Callable[[str], object]] = {
    "type": _DEVICES.__contains__,
    "argument": _ARGUMENT.fullmatch,
    "fqn": _is_path,
    "nn_module_stack": _is_stack,
    **dict.fromkeys(("target", "as_operator"), _is_operator),
    **dict.fromkeys(("name", "as_name", "user_input_name", "forward_arg_names"), _is_identifier),
    **dict.fromkeys(("parameter_name", "buffer_name", "tensor_constant_name"), is_state),
    **dict.fromkeys(("stack_trace", "torch_fn", "source_fn_stack", "custom"), _is_note),
    **dict.fromkeys(("from_node", "as_string", "as_strings"), _is_note),
}
"""What other strings under a key may be; those under any other key are plain names."""

_NAMES: dict[str, Callable[[str], object]] = {
    "config": is_state,
    "metadata": _PLAIN.fullmatch,
    "opset_version": _PLAIN.fullmatch,
}
"""What the names in an object may be; those of other objects are names of nodes."""


# A whole program ----------------------------------------------------------------------------


def _settle(document: dict[str, Any]) -> None:
    """Put numbers for all sizes but those of the one input.

    torch needs them only to describe values inside the program, and has sympy work on them.
    """
    try:
        module = document["graph_module"]
        for ends in ("input", "output"):
            values = module["graph"][f"{ends}s"]
            specs = module["signature"][f"{ends}_specs"]
            if len(values) != len(specs):
                raise BrokenError(f"{len(values)} {ends}s where {len(specs)} are described")
        if not (module["module_call_graph"] and module["module_call_graph"][0].get("signature")):
            raise BrokenError("it lacks the signature of its own call")
        image = _image(module["signature"]["input_specs"])
        outer = module["graph"]
        live = {
            symbol
            for graph in _graphs(outer)
            for symbol in _settle_graph(graph, image if graph is outer else None)
        }
        ranges = document["range_constraints"]
        document["range_constraints"] = {
            name: ranges[name] for name in sorted(live) if name in ranges
        }
    except KeyError as error:
        raise BrokenError(f"it lacks {error}") from error


def _image(specs: list[dict[str, Any]]) -> str | None:
    """The name of the one tensor that the program takes; None if it takes more or others."""
    taken = [spec["user_input"]["arg"] for spec in specs if "user_input" in spec]
    if len(taken) == 1 and "as_tensor" in taken[0]:
        return str(taken[0]["as_tensor"]["name"])
    return None


def _settle_graph(graph: dict[str, Any], image: str | None) -> set[str]:
    """Put numbers for sizes; gives the symbols that are left."""
    left: set[str] = set()
    for name, meta in graph["tensor_values"].items():
        texts = list(_expressions(meta))
        if name == image and all(map(exported_sizes.is_quick, texts)) and len(meta["sizes"]) <= 8:
            left = set().union(*map(exported_sizes.symbols, texts))
        else:
            for key in ("sizes", "strides"):
                meta[key] = [_settled(value, "as_int", _UNKNOWN_SIZE) for value in meta[key]]
        meta["storage_offset"] = _settled(meta["storage_offset"], "as_int", 0)
        known = [value.get("as_int", 1) for value in meta["sizes"]]
        if min(known, default=0) < 0 or math.prod(known) > _MOST_ELEMENTS:
            raise BrokenError(f"{shown(name)} has the shape {shown(str(known))}")
    for key, kind, unknown in _SYMBOLIC:
        values = graph.get(key, {})
        values.update({name: _settled(v, kind, unknown) for name, v in values.items()})
    return left


def _graphs(graph: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A graph, and those that its operations take as arguments, at any depth."""
    yield graph
    for node in graph["nodes"]:
        for argument in node["inputs"]:
            if "as_graph" in argument["arg"]:
                yield from _graphs(argument["arg"]["as_graph"]["graph"])


_SYMBOLIC: tuple[tuple[str, str, Any], ...] = (
    ("sym_int_values", "as_int", _UNKNOWN_SIZE),
    ("sym_float_values", "as_float", 1.0),
    ("sym_bool_values", "as_bool", True),
)


def _expressions(meta: dict[str, Any]) -> Iterator[str]:
    for value in (*meta["sizes"], *meta["strides"]):
        if "as_expr" in value:
            yield value["as_expr"]["expr_str"]


def _settled(value: dict[str, Any], kind: str, unknown: Any) -> dict[str, Any]:
    """The size that it had when the program was exported."""
    if "as_expr" not in value:
        return value
    hint = value["as_expr"].get("hint") or {}
    return {kind: hint.get(kind, unknown)}


def _check_calls(document: dict[str, Any]) -> None:
    """Bound how many modules torch makes: a parameter goes into each call of its module.

    Raises:
        BrokenError: there are more than any program of this many operations has.
    """
    calls: dict[str, set[str]] = defaultdict(set)
    module = document["graph_module"]
    nodes = [node for graph in _graphs(module["graph"]) for node in graph["nodes"]]
    paths = {
        item.split(",")[1]
        for node in nodes
        if (stack := node.get("metadata", {}).get("nn_module_stack"))
        for item in stack.split(";")
    }
    for path in paths:
        for base, part in zip(_bases(path), path.split("."), strict=True):
            calls[base].add(part)
    most = max(map(len, calls.values()), default=0)
    made = sum(_copies(name, calls) for name in _states(module["signature"]["input_specs"]))
    if most > _MOST_CALLS or made > 10_000 + 16 * len(nodes):
        raise BrokenError(f"{max(most, made):,} calls of modules for {len(nodes):,} operations")


def _copies(name: str, calls: dict[str, set[str]]) -> int:
    """Modules that a parameter goes into: each call of each module around it."""
    return math.prod(max(1, len(calls.get(base, ()))) for base in [*_bases(name)][:-1])


def _bases(path: str) -> Iterator[str]:
    """The way to each module on a path, for all calls of it: `a.b@2.c` has a, a.b and a.b.c."""
    names = (part.partition("@")[0] for part in path.split("."))
    return itertools.accumulate(names, "{}.{}".format)


def _states(specs: list[dict[str, Any]]) -> Iterator[str]:
    """Names of parameters, buffers and constants among the inputs."""
    for value in (value for spec in specs for value in spec.values()):
        for key in ("parameter_name", "buffer_name", "tensor_constant_name"):
            if isinstance(value.get(key), str):
                yield value[key]
