"""Reading an .onnx file that somebody else wrote: a graph with all of its weights.

    .onnx ──parse──► graph ──inline local functions──► nodes of known operators
    weights beside it ──checked one by one──► tensors of the graph

ONNX Runtime gets the result as bytes, so it opens no file, whatever the graph says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from featviz.errors import FileError, LoadError
from featviz.files import ReadFolder, read_bytes
from featviz.models.requirements import import_library
from featviz.text import counted, listed, quoted

MOST_BYTES = 2**31 - 1
"""Of a graph with its weights: protobuf, in which it reaches ONNX Runtime, takes no
more."""

MOST_NODES = 200_000
"""Of a graph whose local functions are inlined; the largest vision models have 10,000."""

DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")
"""Of operators that ONNX Runtime has itself."""

_FOUR_BITS = ("UINT4", "INT4", "FLOAT4E2M1")
"""Types of which two values share a byte."""


def require_onnx(file_name: str) -> None:
    """Import onnx and ONNX Runtime; LoadError where one is missing."""
    for package in ("onnx", "onnxruntime"):
        try:
            import_library(package)
        except ImportError as error:
            raise LoadError(
                f"{file_name} needs the package {package}: {error}",
                "pip install 'featviz[onnx]'",
            ) from error


def read_graph(path: Path) -> Any:
    """Read a file, and what lies beside it of its weights.

    Returns:
        The ModelProto, without local functions and without external data.

    Raises:
        LoadError: It is not an ONNX model, is too large, names data outside of its
            folder, or needs operators that ONNX Runtime has not.
    """
    import onnx.inliner
    from google.protobuf.message import DecodeError

    model = onnx.ModelProto()
    try:
        model.ParseFromString(read_bytes(path, MOST_BYTES))
        if not model.graph.node:  # a text may be read as a message without fields
            raise DecodeError("no nodes")
    except DecodeError as error:
        raise LoadError(
            f"{path.name} is no ONNX model, or not the whole of one",
            "export or fetch it again",
        ) from error
    # before inlining, which would not end
    if model.functions:
        _check_functions(model, path.name)
        model = onnx.inliner.inline_local_functions(model)
    _check_operators(model, path.name)
    folder = ReadFolder(path.parent)
    # what protobuf takes in one piece counts the graph and all weights together
    total_bytes = model.ByteSize()
    for tensor in _tensors(model.graph):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            total_bytes += _take_in(tensor, folder, MOST_BYTES - total_bytes, path.name)
    return model


def all_nodes(nodes: Sequence[Any]) -> Iterator[Any]:
    """Nodes, and those of the graphs inside them (the branches of an If)."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from all_nodes(graph.node)


def _tensors(graph: Any) -> Iterator[Any]:
    """All tensors of a graph that hold values."""
    yield from graph.initializer
    for sparse in graph.sparse_initializer:
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for sparse in (attribute.sparse_tensor, *attribute.sparse_tensors):
                yield from (sparse.values, sparse.indices)
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)


class _FunctionKey(NamedTuple):
    """What a node calls, where it calls a local function."""

    domain: str
    name: str
    overload: str


def _function_key(proto: Any, name: str) -> _FunctionKey:
    """The key of a function, or of a node that may call one."""
    # onnx takes these two domains for one
    domain = "" if proto.domain == "ai.onnx" else proto.domain
    return _FunctionKey(domain, name, proto.overload)


def _check_functions(model: Any, file_name: str) -> None:
    """Refuse functions that call one another in a circle, or become too many nodes:
    thirty of which each calls the next one twice would become 2^30. LoadError.

    Args:
        model: The content of the file, onnx.ModelProto.
        file_name: For messages.
    """
    bodies = {_function_key(f, f.name): f.node for f in model.functions}
    counts: dict[_FunctionKey, int] = {}
    open_calls: set[_FunctionKey] = set()

    def count(nodes: Sequence[Any]) -> int:
        """How many nodes these become when all functions are inlined.

        Raises:
            LoadError: Where a function calls itself.
        """
        total = 0
        for node in all_nodes(nodes):
            key = _function_key(node, node.op_type)
            if key not in bodies:
                total += 1
                continue
            # it is counted right now, further out
            if key in open_calls:
                raise LoadError(
                    f"{file_name}: the function {quoted(key.name)} calls itself", None
                )
            if key not in counts:
                open_calls.add(key)
                counts[key] = count(bodies[key])
                open_calls.remove(key)
            total += counts[key]
        return total

    total = count(model.graph.node)
    if total > MOST_NODES:
        raise LoadError(
            f"{file_name}: its functions become {total:,} nodes",
            f"at most {MOST_NODES:,}",
        )


def _check_operators(model: Any, file_name: str) -> None:
    """Refuse operators that are in a library of somebody's own, which would be code; and
    more nodes than MOST_NODES. LoadError.

    Args:
        model: The content of the file, onnx.ModelProto.
        file_name: For messages.
    """
    foreign: dict[str, None] = {}
    count = 0
    for node in all_nodes(model.graph.node):
        count += 1
        if node.domain not in DOMAINS:
            foreign[quoted(f"{node.domain}.{node.op_type}", 60)] = None
    if foreign:
        message = f"{file_name} needs operators that ONNX Runtime has not"
        raise LoadError(
            f"{message}: {listed([*foreign], 3)}",
            "libraries of custom operators are not loaded; export without them",
        )
    if count > MOST_NODES:
        raise LoadError(
            f"{file_name} has {counted(count, 'node')}", f"at most {MOST_NODES:,}"
        )


def _take_in(tensor: Any, folder: ReadFolder, limit: int, file_name: str) -> int:
    """Read the values of a tensor from a file beside the model into it.

    Args:
        folder: The model's. Names that lead out of it, and links, are refused.
        limit: Bytes that it may have.

    Returns:
        How many bytes it has.
    """
    entries = {entry.key: entry.value for entry in tensor.external_data}
    location = entries.get("location", "").removeprefix("./")
    subject = f"{file_name}: the values of {quoted(tensor.name, 60)!r}"
    # offset and length may be left out: then the values are all of the file
    size = _byte_size(tensor)
    offset = _number(entries, "offset", 0)
    length = _number(entries, "length", size)
    if size is None or offset is None or length != size:
        raise LoadError(f"{subject} have no size that fits their shape", None)
    if size > limit:
        raise LoadError(
            f"{file_name} and its weights have more than {MOST_BYTES:,} bytes",
            "ONNX Runtime takes no more in one piece",
        )
    try:
        with folder.open(location) as file:
            file.seek(offset)
            values = file.read(size)
    except FileNotFoundError:
        raise LoadError(
            f"{subject} are in {quoted(location)!r}, which is not beside it",
            "fetch the file",
        ) from None
    except FileError as error:
        hint = "put the file itself, no link, into the folder of the model"
        raise LoadError(f"{subject}: {error.message}", error.hint or hint) from error
    except (OSError, OverflowError) as error:
        raise LoadError(
            f"{subject} cannot be read at {offset:,} of {quoted(location)!r}",
            "fetch the file again",
        ) from error
    if len(values) != size:
        raise LoadError(
            f"{subject} lie beyond the end of {quoted(location)!r}",
            "fetch the file again",
        )
    # with its values inside, the tensor must not name a file any more
    tensor.raw_data = values
    del tensor.external_data[:]
    tensor.ClearField("data_location")
    return size


def _number(entries: Mapping[str, str], key: str, default: int | None) -> int | None:
    """A number of bytes, from an entry of a tensor's external data; None where the
    entry's text is not a number of at most 19 digits.

    Args:
        entries: Texts by key.
        key: `offset` or `length`.
        default: The result where there is no such entry.
    """
    text = entries.get(key)
    if text is None:
        return default
    # 2^63 has 19 digits; int() of thousands takes long, or raises
    if not text.isdecimal() or len(text) >= 20:
        return None
    return int(text)


def _byte_size(tensor: Any) -> int | None:
    """Bytes of a tensor of its shape and type; None where it has no such."""
    import onnx

    if any(side < 0 for side in tensor.dims):
        return None
    try:
        type_name = onnx.TensorProto.DataType.Name(tensor.data_type)
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
    except (ValueError, KeyError):
        return None
    count: int = math.prod(tensor.dims)
    if type_name in _FOUR_BITS:
        return (count + 1) // 2
    return count * int(dtype.itemsize) if dtype.kind != "O" else None
