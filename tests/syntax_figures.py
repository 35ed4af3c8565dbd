"""How much Python code says, and how tightly: counted from its syntax, not from its
lines.

Lines can be packed; a syntax tree cannot. A function costs the same number of nodes
however it is laid out, so a budget of nodes rewards saying less, and nodes per line
show where too much is said at once. Docstrings cost nothing."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

HEAVY_NODES = 300
"""Nodes above which a function is too much for one reading."""
MOST_BRANCHES = 15
"""Cyclomatic complexity above which a function should be a table, or several functions.
"""
DEEPEST = 3
"""Blocks inside blocks that a reader can keep in mind."""
IN_SIGHT = 10
"""Lines of a function in which the subject of a vague name is still in sight."""
_VAGUE = """
    all_of asked beside both each find form forms found give given gives ground grounds held hold
    kind kinds known least left lent many mine more most much noted one ones other others own part
    parts place places room said say side sides some taken theirs thing things told wanted way ways
    what which whole word words
"""
VAGUE_NAMES = frozenset(_VAGUE.split())
"""Names that would fit anything."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, ast.ClassDef, ast.Lambda)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_BRANCHES = (
    *_LOOPS,
    ast.If,
    ast.IfExp,
    ast.ExceptHandler,
    ast.Assert,
    ast.comprehension,
    ast.match_case,
)
_BLOCKS = (*_LOOPS, ast.If, ast.With, ast.AsyncWith, ast.Try, ast.Match)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_FORMAT_OFF = re.compile(r"#\s*fmt:\s*(off|skip)")


@dataclass
class SyntaxFigures:
    """What is counted over several files."""

    nodes: int = 0
    """Of the syntax trees, without docstrings."""
    code_lines: int = 0
    """Lines that are neither blank, nor a comment, nor of a docstring."""
    comment_lines: int = 0
    docstring_lines: int = 0
    pair_assignments: int = 0
    """`a, b = x, y`."""
    ternaries: int = 0
    comprehensions: int = 0
    literal_splats: int = 0
    """`f(*(a, b))`."""
    wide_tuples: int = 0
    """Annotations such as `tuple[int, str, float]`: fixed tuples of more than two
    types."""
    formatting_off: int = 0
    heavy_functions: int = 0
    branching_functions: int = 0
    deep_functions: int = 0
    names: int = 0
    """Parameters and local variables of all functions."""
    vague_names: int = 0
    complexities: list[int] = field(default_factory=list)
    """Of each function."""

    def per_line(self, count: int) -> float:
        """A count for each code line."""
        return count / max(1, self.code_lines)

    def complexity_90(self) -> int:
        """The complexity that nine functions of ten do not exceed."""
        if not self.complexities:
            return 0
        return sorted(self.complexities)[int(0.9 * (len(self.complexities) - 1))]

    def limited(self) -> dict[str, float]:
        """The figures that should be low, by the names under which they are limited."""
        return {
            "nodes": self.nodes,
            "nodes a code line": round(self.per_line(self.nodes), 2),
            "functions over 300 nodes": self.heavy_functions,
            "functions of complexity over 15": self.branching_functions,
            "complexity, 90th percentile": self.complexity_90(),
            "functions nested over 3 deep": self.deep_functions,
            "pair assignments in 1,000 lines": round(
                1000 * self.per_line(self.pair_assignments), 1
            ),
            "ternaries in 1,000 lines": round(1000 * self.per_line(self.ternaries), 1),
            "comprehensions in 1,000 lines": round(
                1000 * self.per_line(self.comprehensions), 1
            ),
            "splats of literals": self.literal_splats,
            "fixed tuples of three types": self.wide_tuples,
            "formatting switched off": self.formatting_off,
            "vague names in 100": round(100 * self.vague_names / max(1, self.names), 1),
        }

    def wanted(self) -> dict[str, float]:
        """The figures that should be high."""
        return {
            "comment lines in 1,000 lines": round(
                1000 * self.per_line(self.comment_lines), 1
            ),
            "docstring lines a code line": round(
                self.per_line(self.docstring_lines), 2
            ),
        }


def measure(paths: Iterable[Path]) -> SyntaxFigures:
    """Count the syntax of some files."""
    figures = SyntaxFigures()
    for path in paths:
        text = path.read_text("utf-8")
        tree = ast.parse(text)
        _count_lines(figures, text, tree)
        for node in ast.walk(tree):
            _count_node(figures, node)
            if isinstance(node, _FUNCTIONS):
                _count_function(figures, node)
    return figures


def _is_docstring(node: ast.AST) -> bool:
    """Whether a statement is a text alone."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
        return False
    return isinstance(node.value.value, str)


def _count_lines(figures: SyntaxFigures, text: str, tree: ast.Module) -> None:
    """Count nodes, and lines of code, comments and docstrings."""
    docstrings = set[int]()
    for node in ast.walk(tree):
        figures.nodes += 1
        if _is_docstring(node):
            figures.nodes -= 2  # the expression and its constant
            docstrings.update(range(node.lineno, node.end_lineno + 1))
    figures.docstring_lines += len(docstrings)
    _count_comments(figures, text)
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if stripped and number not in docstrings and not stripped.startswith("#"):
            figures.code_lines += 1


def _count_comments(figures: SyntaxFigures, text: str) -> None:
    """Count comments, of which a line has at most one."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            figures.comment_lines += 1
            figures.formatting_off += bool(_FORMAT_OFF.match(token.string))


def _count_node(figures: SyntaxFigures, node: ast.AST) -> None:
    """Count what a reader stumbles over, wherever it stands."""
    figures.ternaries += isinstance(node, ast.IfExp)
    figures.comprehensions += isinstance(node, _COMPREHENSIONS)
    if isinstance(node, ast.Starred):
        figures.literal_splats += isinstance(node.value, (ast.Tuple, ast.List))
    elif isinstance(node, ast.Assign):
        is_pair = isinstance(node.value, ast.Tuple)
        figures.pair_assignments += is_pair and isinstance(node.targets[0], ast.Tuple)
        figures.wide_tuples += _is_wide_tuple(node.value)
    annotations = (getattr(node, "annotation", None), getattr(node, "returns", None))
    for annotation in annotations:
        if annotation is not None:
            figures.wide_tuples += sum(map(_is_wide_tuple, ast.walk(annotation)))


def _is_wide_tuple(node: ast.AST) -> bool:
    """Whether an annotation is a fixed tuple of more than two different types."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Tuple):
        return False
    if ast.unparse(node.value).rpartition(".")[2] not in ("tuple", "Tuple"):
        return False
    types = {ast.unparse(element) for element in node.slice.elts}
    return "..." not in types and len(types) > 2


def _count_function(figures: SyntaxFigures, function: _Function) -> None:
    """Count one function, without the functions and classes inside it."""
    nodes = list(_nodes_of(function))
    complexity = 1 + sum(map(_branches, nodes))
    figures.complexities.append(complexity)
    figures.heavy_functions += len(nodes) > HEAVY_NODES
    figures.branching_functions += complexity > MOST_BRANCHES
    figures.deep_functions += _depth(function) > DEEPEST
    names = {arg.arg for arg in (*function.args.args, *function.args.kwonlyargs)}
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    figures.names += len(names)
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if lines > IN_SIGHT:
        figures.vague_names += len(names & VAGUE_NAMES)


def _branches(node: ast.AST) -> int:
    """How many ways a node adds to those through its function."""
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    if isinstance(node, ast.comprehension):
        return 1 + len(node.ifs)
    return isinstance(node, _BRANCHES)


def _nodes_of(function: _Function) -> Iterator[ast.AST]:
    waiting: list[ast.AST] = [*ast.iter_child_nodes(function)]
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, _SCOPES):
            waiting.extend(ast.iter_child_nodes(node))


def _depth(node: ast.AST) -> int:
    """How deep blocks stand inside each other; an `elif` stands as deep as its `if`."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*_FUNCTIONS, ast.ClassDef)):
            continue
        is_elif = (
            isinstance(node, ast.If)
            and node.orelse == [child]
            and isinstance(child, ast.If)
        )
        deepest = max(
            deepest, _depth(child) + (isinstance(child, _BLOCKS) and not is_elif)
        )
    return deepest


def within(
    limits: dict[str, float], figures: dict[str, float], fits: Callable[..., bool]
) -> None:
    """Fail with all figures that do not fit their limits, as {name: (figure, limit)}."""
    beyond = {
        name: (figures[name], limit)
        for name, limit in limits.items()
        if not fits(figures[name], limit)
    }
    assert beyond == {}, beyond
