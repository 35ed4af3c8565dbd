"""Whether a file of code defines what MODEL names, with the arguments that are given: read from its
syntax tree, so that a command that is refused runs nothing of it."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Collection, Iterator
from pathlib import Path

from featviz.errors import FileError, UsageError
from featviz.models.outline import Outline, parsed
from featviz.text import quoted

_DYNAMIC = {"*", "globals", "exec", "eval", "setattr", "__getattr__"}
"""With one of these a file may define names that are not to be seen in it."""


def check(spec: str, arguments: Collection[str]) -> None:
    """Refuse a name that a file cannot have, and an argument that a class or function of it does
    not take; what the tree does not tell is let through, and so is a file that cannot be read.

    Args:
        spec: `file.py:name`.

    Raises:
        UsageError: names what there is.
    """
    where, _, dotted = spec.rpartition(":")
    name = dotted.partition(".")[0]
    try:
        tree = parsed(Path(where))
    except FileError:
        return
    seen = {*_names(tree)}
    if name not in seen and not seen & _DYNAMIC:
        tops = [n.name for n in tree.body if isinstance(n, _DEFINITIONS) and n.name[0] != "_"]
        raise no_attribute(spec, dotted, tops)
    if (takes := _arguments(Outline(tree), dotted)) is not None:
        check_arguments(dotted, arguments, takes)


def no_attribute(spec: str, dotted: str, there: Collection[str]) -> UsageError:
    """The error for a name that a module does not have."""
    names = ", ".join(map(quoted, there)) or "nothing"
    return UsageError(f"{spec!r}: there is no {dotted!r}", f"there is {names}")


def check_arguments(name: str, given: Collection[str], takes: Collection[str]) -> None:
    """Refuse the first argument that a class or function does not take.

    Raises:
        UsageError: names the nearest one, else all.
    """
    wrong = [argument for argument in given if argument not in takes]
    if not wrong:
        return
    close = difflib.get_close_matches(wrong[0], takes, 1)
    raise UsageError(
        f"--model-arg {quoted(wrong[0])}: {name} takes no such argument",
        f"did you mean {close[0]}?" if close else f"it takes {', '.join(takes) or 'none'}",
    )


_DEFINITIONS = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _names(tree: ast.Module) -> Iterator[str]:
    """Every name and every text of a file: what it may define is among them."""
    for node in ast.walk(tree):
        if isinstance(node, _DEFINITIONS):
            yield node.name
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _arguments(outline: Outline, name: str) -> tuple[str, ...] | None:
    """The arguments of a class or function; None where they are not to be seen."""
    node = outline.definitions.get(name)
    if node is None or node.decorator_list:
        return None
    made = outline.init(node) if isinstance(node, ast.ClassDef) else node
    if made is None or made.decorator_list or made.args.kwarg is not None:
        return None
    return outline.maker(node).takes
