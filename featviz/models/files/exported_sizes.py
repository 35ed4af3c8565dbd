"""Expressions of sizes in torch.export programs, as `sympy.srepr` writes them: parsed, bounded and
written anew.

torch evaluates them with `sympy.sympify`, which is Python's `eval`. What leaves this module is text
that was built from a tree of known functions, small numbers and symbols.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any

SYMBOL = re.compile(r"(s|u|zf|zuf)\d{1,6}", re.ASCII)
"""Names of sizes; torch counts up to the number behind a `u`, so it has few digits."""

_MOST_CHARACTERS = 10_000
_MOST_PARTS = 1_000
_DEEPEST = 60
"""Bounds of an expression; those of programs with three free sizes stay below 300 characters."""

_MOST_EVALUATED = 40
"""Parts of an expression that sympy may have to evaluate: few enough for any of them."""

_LARGEST = 2**63
_LARGEST_POWER = 8
_MOST_BITS = 1_024
"""Bits that a number may get to when powers and products are worked out."""

_MOST_PRECISION = 200
"""Bits of a Float; torch writes 53."""

_DECIMAL = re.compile(r"-?\d+(\.\d*)?([eE][+-]?\d{1,3})?", re.ASCII)
"""What `Float` takes as text."""

_DIVISIONS = {
    *("FloorDiv", "ModularIndexing", "Mod", "PythonMod"),
    *("CleanDiv", "CeilDiv", "FloatTrueDiv", "IntTrueDiv"),
}
_POWERS = {"Pow", "PowByNatural", "FloatPow"}
_FUNCTIONS = {
    *_DIVISIONS,
    *_POWERS,
    *("Eq", "Ne", "Equality", "Unequality"),
    *("StrictLessThan", "LessThan", "StrictGreaterThan", "GreaterThan"),
    *("Add", "Mul", "Max", "Min", "Abs", "And", "Or", "Not", "Where", "Identity"),
    *("CeilToInt", "FloorToInt", "TruncToFloat", "TruncToInt", "RoundToInt", "ToFloat"),
}
"""Functions of sympy and of torch's own in sizes, as `sympy.srepr` writes them."""

_ASSUMPTIONS = {"integer", "positive", "nonnegative", "negative", "real", "finite", "nonzero"}


def rewritten(text: str) -> str:
    """The same expression, built anew from what is known and bounded in it.

    Raises:
        ValueError: it is no arithmetic on sizes, or could take long to evaluate.

    Example:
        >>> rewritten("Add(Symbol('s0',integer=True), Integer(1))")
        "Add(Symbol('s0', integer=True), Integer(1))"
    """
    expression = _SizeWriter().part(_parsed(text))
    if expression.bits > _MOST_BITS:
        raise ValueError("too large a number")
    return expression.text


def is_quick(text: str) -> bool:
    """Whether a rewritten expression is so short that sympy cannot take long over it."""
    return text.count("(") <= _MOST_EVALUATED


def symbols(text: str) -> set[str]:
    """Names of the symbols in a rewritten expression."""
    return set(re.findall(r"Symbol\('(\w+)'", text))


def _parsed(text: str) -> ast.expr:
    """Python's parser reads it, once it cannot be too much for it."""
    depth = deepest = 0
    for character in text[: _MOST_CHARACTERS + 1]:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    repeated = re.search(r"[-+~]\s*[-+~]|not\s+not", text[: _MOST_CHARACTERS + 1])
    if len(text) > _MOST_CHARACTERS or deepest > _DEEPEST or repeated:
        raise ValueError("too long or too deep")
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError("no expression") from error


@dataclass(frozen=True)
class _Part:
    """A part of an expression, written anew."""

    text: str
    bits: float = 64
    """Bits that its value may have when all that is known is worked out."""
    number: int | float | None = None
    """The value of a literal."""


class _SizeWriter:
    """Writes one expression; counts its parts on the way."""

    def __init__(self) -> None:
        self.parts = 0

    def part(self, node: ast.expr, depth: int = 0) -> _Part:
        self.parts += 1
        if self.parts > _MOST_PARTS or depth > _DEEPEST:
            raise ValueError("too long or too deep")
        match node:
            case ast.Constant(value):
                return _constant(value)
            case ast.Name("true" | "false" as name):
                return _Part(name)
            case ast.Call(ast.Name(name)) if name in _ATOMS:
                return _ATOMS[name](node)
            case ast.Call(ast.Name(name), args, []) if name in _FUNCTIONS:
                return self._function(name, args, depth + 1)
        raise ValueError("no arithmetic")

    def _function(self, name: str, args: list[ast.expr], depth: int) -> _Part:
        parts = [self.part(arg, depth) for arg in args]
        if name in _DIVISIONS and any(part.number == 0 for part in parts[1:]):
            raise ValueError("a division by zero")
        text = f"{name}({', '.join(part.text for part in parts)})"
        if name in _POWERS:
            return _Part(text, max(1, _exponent(parts)) * parts[0].bits)
        inner = [part.bits for part in parts]
        return _Part(text, sum(inner) if name == "Mul" else max(inner, default=64) + len(inner))


def _exponent(parts: list[_Part]) -> float:
    """How large an exponent is, which must be a number, and small."""
    exponent = parts[1].number if len(parts) == 2 else None
    if exponent is None or abs(exponent) > _LARGEST_POWER:
        raise ValueError("a power that could be huge")
    return abs(exponent)


def _constant(value: object) -> _Part:
    if value is True or value is False:
        return _Part("true" if value else "false")
    if type(value) is int and abs(value) <= _LARGEST:
        return _Part(f"Integer({value})", value.bit_length(), value)
    if type(value) is float and abs(value) <= _LARGEST:
        return _Part(f"Float('{value!r}', precision=53)", 64, value)
    raise ValueError("no number")


# What `sympy.srepr` writes for the leaves of an expression ----------------------------------


def _symbol(node: ast.Call) -> _Part:
    (name,) = map(_literal, node.args)
    if not isinstance(name, str) or not SYMBOL.fullmatch(name):
        raise ValueError("an unknown name")
    assumed = _keywords(node)
    if not assumed.keys() <= _ASSUMPTIONS or not all(type(v) is bool for v in assumed.values()):
        raise ValueError("an unknown assumption")
    return _Part(f"Symbol({', '.join((repr(name), *(f'{k}={v}' for k, v in assumed.items())))})")


def _integer(node: ast.Call) -> _Part:
    (value,) = map(_literal, node.args)
    if type(value) is not int or node.keywords:
        raise ValueError("no number")
    return _constant(value)


def _rational(node: ast.Call) -> _Part:
    top, bottom = map(_literal, node.args)
    for value in (top, bottom):
        if type(value) is not int or abs(value) > _LARGEST or bottom == 0 or node.keywords:
            raise ValueError("no number")
    return _Part(f"Rational({top}, {bottom})", 64, top / bottom)


def _float(node: ast.Call) -> _Part:
    """A number that a double can hold; a longer exponent is a loop in sympy."""
    (text,) = map(_literal, node.args)
    settings = _keywords(node)
    bits = settings.pop("precision", 53)
    if settings or type(bits) is not int or not 1 <= bits <= _MOST_PRECISION:
        raise ValueError("no number")
    if not isinstance(text, str) or len(text) > _MOST_PRECISION or not _DECIMAL.fullmatch(text):
        raise ValueError("no number")
    return _constant(float(text))


def _keywords(node: ast.Call) -> dict[str | None, Any]:
    return {keyword.arg: _literal(keyword.value) for keyword in node.keywords}


def _literal(node: ast.expr) -> Any:
    """The value of a literal, a negative number included; None for anything else."""
    match node:
        case ast.Constant(value):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return -value
    return None


_ATOMS = {"Symbol": _symbol, "Integer": _integer, "Rational": _rational, "Float": _float}
