"""Names of modules and functions, the same in a model and in a program exported from one.

A program's modules are torch.export's InterpreterModules, which know by name the class that they
stand for, and its functions are operators such as `aten.relu_.default`. Whoever asks for a class or
a function by name asks here, so that both kinds of model give the same answer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx, nn

_EXPORTED = "torch.export.unflatten"

_OPERATORS = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "div": "div",
    "truediv": "div",
    "floordiv": "floor_divide",
    "mod": "remainder",
    "pow": "pow",
    "matmul": "matmul",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "lshift": "bitwise_left_shift",
    "rshift": "bitwise_right_shift",
    "invert": "bitwise_not",
    "pos": "positive",
}
"""The function that does what an operator does; `__radd__` and `__iadd__` are `__add__`."""

_ALIASES = {
    "absolute": "abs",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "numpy_T": "T",
    "rsub": "sub",
    "subtract": "sub",
    "true_divide": "div",
}
"""Functions that torch has under two names."""


def class_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the module's class and its bases, or of those that an exported one stands for.

    The class is looked up among the modules already imported, and nothing is imported for it; of
    one that is not there, the name alone is known.
    """
    original = _class_of(module)
    if isinstance(original, str):
        return (original.rpartition(".")[2], nn.Module.__name__)
    return tuple(c.__name__ for c in original.__mro__ if c is not object)


def home_of(module: nn.Module) -> str:
    """The Python module in which the forward of a module, or of what it stands for, is written."""
    original = _class_of(module)
    if isinstance(original, str):
        return original.rpartition(".")[0]
    return str(getattr(original, "forward", original).__module__)


def is_exported(module: nn.Module) -> bool:
    """Whether a module is one of a program's, and stands for one of another class."""
    return type(module).__module__ == _EXPORTED


def _class_of(module: nn.Module) -> type | str:
    """What a module is, or stands for; the full name of a class that is not imported."""
    # (the root of an unflattened program has no type_name before torch 2.10)
    original = getattr(module, "type_name", lambda: None)() if is_exported(module) else None
    if not original:
        return type(module)
    home, _, name = str(original).rpartition(".")
    imported = vars(sys.modules.get(home, object)).get(name)
    return imported if isinstance(imported, type) else str(original)


@lru_cache(maxsize=1024)
def function_name(function: Callable[..., Any]) -> str:
    """One name for a function, its tensor method, its in-place variant and its operator.

    `torch.relu`, `torch.nn.functional.relu`, `Tensor.relu_` are all `relu`; `+`, `+=` and
    `Tensor.add_` are `add`, and so is `aten.add.Tensor` in an exported program. A property such as
    `Tensor.shape` has its own name.
    """
    raw = getattr(function, "__name__", "")
    if raw == "__get__":
        raw = getattr(getattr(function, "__self__", None), "__name__", "")
    raw = raw.partition(".")[0]
    name = raw.strip("_")
    if raw.startswith("__") and raw.endswith("__"):
        sided = name[1:] if name[:1] in ("i", "r") else ""
        return _OPERATORS.get(name) or _OPERATORS.get(sided) or name
    return _ALIASES.get(name, name)


def is_in_place(function: Callable[..., Any]) -> bool:
    """Whether a function's name says that it changes what it is given: `relu_`, not `__add__`."""
    name = getattr(function, "__name__", "").partition(".")[0]
    return name.endswith("_") and not name.endswith("__")


def gives_tensors(result: Any) -> bool:
    """Whether a function's result is a tensor or holds some: only such calls are reported, and that
    of `x.shape` is not."""
    if isinstance(result, (tuple, list)):
        return any(isinstance(item, Tensor) for item in result)
    return isinstance(result, Tensor)


@dataclass(frozen=True)
class Operation:
    """A call of an operator in the graph of an exported module."""

    name: str
    """`conv2d`, as `function_name` gives it."""
    arguments: Mapping[str, Any]
    """By the names of the operator's schema, defaults included; what is computed is an fx.Node."""


def operation(module: nn.Module, *names: str) -> Operation | None:
    """The first call of one of these functions in the graph of an exported module.

    Returns:
        None for a module that is not exported, or calls none of them itself.
    """
    graph = getattr(module, "graph", None) if is_exported(module) else None
    for node in graph.nodes if isinstance(graph, fx.Graph) else ():
        if node.op == "call_function" and function_name(node.target) in names:
            return Operation(function_name(node.target), _by_name(node))
    return None


def constant(module: nn.Module, node: fx.Node) -> Any:
    """The value of a node that depends on parameters and buffers, not on the module's input.

    Raises:
        ValueError: it depends on the input.
    """
    needed = _behind(node)
    if any(each.op == "placeholder" for each in needed):
        raise ValueError(f"{node.name} depends on the module's input")
    interpreter = fx.Interpreter(module, graph=node.graph)
    for each in node.graph.nodes:
        if each in needed:
            interpreter.env[each] = interpreter.run_node(each)
    return interpreter.env[node]


def _by_name(node: fx.Node) -> dict[str, Any]:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return dict(node.kwargs)
    schema = target._schema.arguments
    given = dict(zip((argument.name for argument in schema), node.args, strict=False))
    return {a.name: a.default_value for a in schema} | given | dict(node.kwargs)


def _behind(node: fx.Node) -> set[fx.Node]:
    """The node, and all that it is computed from."""
    nodes, waiting = set[fx.Node](), [node]
    while waiting:
        at = waiting.pop()
        if at not in nodes:
            nodes.add(at)
            waiting += at.all_input_nodes
    return nodes
