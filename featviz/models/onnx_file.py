"""Read an .onnx file that somebody else wrote: a graph with all of its weights.

    .onnx ──parse──► graph ──inline local functions──► nodes of known operators
    weights beside it ──read by onnx──► tensors of the graph

ONNX Runtime gets the result as bytes, so it opens no file that the graph may name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from featviz.errors import LoadError
from featviz.files import read_bytes
from featviz.models.requirements import import_library
from featviz.text import counted, first_line, listed, quoted

MOST_BYTES = 2**31 - 1
"""The most bytes of a graph with its weights: a larger one cannot be passed to ONNX
Runtime, since protobuf does not take it."""

MOST_NODES = 200_000
"""The most nodes of a graph after its local functions are inlined; large vision models have
10,000."""

DOMAINS = ("", "ai.onnx", "ai.onnx.ml", "com.microsoft")
"""Domains of the operators that are part of ONNX Runtime."""


def require_onnx(file_name: str) -> None:
    """Import onnx and ONNX Runtime.

    Args:
        file_name: The name of the file that needs them, for the message.

    Raises:
        LoadError: Where one of them is not installed.
    """
    for package in ("onnx", "onnxruntime"):
        try:
            import_library(package)
        except ImportError as error:
            raise LoadError(
                f"{file_name} needs the package {package}: {error}",
                "pip install 'featviz[onnx]'",
            ) from error


def read_graph(path: Path) -> Any:
    """Read an .onnx file, and the files of its weights if these are separate.

    Returns:
        The ModelProto, with its local functions inlined and all weights inside.

    Raises:
        FileNotFoundError, FileError: Where the file cannot be read.
        LoadError: Where the file is no ONNX model, is too large, needs operators that ONNX
            Runtime does not have, or names weights that are missing or outside of its
            folder.
    """
    import onnx.inliner
    from google.protobuf.message import DecodeError

    model = onnx.ModelProto()
    try:
        model.ParseFromString(read_bytes(path, MOST_BYTES))
        if not model.graph.node:  # protobuf may read any text as an empty message
            raise DecodeError("no nodes")
    except DecodeError as error:
        raise LoadError(
            f"{path.name} is no ONNX model, or not the whole of one",
            "export or fetch it again",
        ) from error
    # before inlining, which would never end if a function calls itself
    _check_size(model, path.name)
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    _check_operators(model, path.name)
    _check_sparse(model, path.name)
    try:
        # onnx opens only files in the model's folder, and follows no links
        onnx.load_external_data_for_model(model, str(path.parent))
    except Exception as error:  # onnx has several classes without a common base
        raise LoadError(
            f"{path.name}: its weights cannot be read: {quoted(first_line(error))}",
            "the file itself, no link, belongs into the folder of the model",
        ) from error
    # protobuf's limit holds for the graph plus all weights
    if model.ByteSize() > MOST_BYTES:
        raise LoadError(
            f"{path.name} and its weights have more than {MOST_BYTES:,} bytes",
            "ONNX Runtime takes no more in one piece",
        )
    return model


def all_nodes(nodes: Sequence[Any]) -> Iterator[Any]:
    """All nodes, and all nodes of the graphs inside them (the branches of an If)."""
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from all_nodes(graph.node)


def _function_key(proto: Any, name: str) -> str:
    """A key that is the same for a local function and for the nodes that call it.

    Args:
        proto: The FunctionProto or the NodeProto.
        name: The name of the function, or the operator of the node.
    """
    # for onnx, the empty domain and `ai.onnx` are the same
    domain = "" if proto.domain == "ai.onnx" else proto.domain
    return f"{domain}::{name}::{proto.overload}"


def _check_size(model: Any, file_name: str) -> None:
    """Check how large a graph will be after its local functions are inlined. Thirty functions,
    each of which calls the next one twice, would become 2^30 nodes.

    Args:
        model: The content of the file, onnx.ModelProto.
        file_name: The name of the file, for messages.

    Raises:
        LoadError: Where it would have more than MOST_NODES nodes, or functions call one
            another in a circle.
    """
    bodies = {_function_key(f, f.name): f.node for f in model.functions}
    counts = {}
    open_calls = set()

    def count(nodes: Sequence[Any]) -> int:
        """How many nodes there are after the functions that `nodes` call are inlined.

        Raises:
            LoadError: Where a function calls itself.
        """
        total = 0
        for node in all_nodes(nodes):
            key = _function_key(node, node.op_type)
            if key not in bodies:
                total += 1
                continue
            # the count of this function has begun, and is not done: it calls itself
            if key in open_calls:
                raise LoadError(
                    f"{file_name}: the function {quoted(node.op_type)} calls itself",
                    None,
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
            f"{file_name} has {counted(total, 'node')}", f"at most {MOST_NODES:,}"
        )


def _check_operators(model: Any, file_name: str) -> None:
    """Raise a LoadError for custom operators, which are code in a library of their own.

    Args:
        model: The content of the file, onnx.ModelProto.
        file_name: The name of the file, for messages.
    """
    foreign: dict[str, None] = {}
    for node in all_nodes(model.graph.node):
        if node.domain not in DOMAINS:
            foreign[quoted(f"{node.domain}.{node.op_type}", 60)] = None
    if foreign:
        raise LoadError(
            f"{file_name} needs operators that ONNX Runtime has not:"
            f" {listed([*foreign], 3)}",
            "libraries of custom operators are not loaded; export without them",
        )


def _check_sparse(model: Any, file_name: str) -> None:
    """Raise a LoadError for sparse tensors whose values are in another file. onnx does not
    load them, and ONNX Runtime would look for the file in the current folder.

    Args:
        model: The content of the file, onnx.ModelProto.
        file_name: The name of the file, for messages.
    """
    sparse_tensors = [*model.graph.sparse_initializer]
    for node in all_nodes(model.graph.node):
        for attribute in node.attribute:
            sparse_tensors += [attribute.sparse_tensor, *attribute.sparse_tensors]
            for graph in (attribute.g, *attribute.graphs):
                sparse_tensors += graph.sparse_initializer
    for sparse in sparse_tensors:
        if sparse.values.data_location or sparse.indices.data_location:
            raise LoadError(
                f"{file_name} has sparse weights in another file",
                "export it with these inside",
            )
