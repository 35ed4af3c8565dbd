"""Expressions of sizes in torch.export programs: parsed, bounded and written anew.

torch evaluates them with `sympy.sympify`, which is Python's `eval`. What leaves this module is text
that was built from a tree of known functions, small numbers and symbols.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
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

_DIVISIONS = {
    "FloorDiv",
    "ModularIndexing",
    "Mod",
    "PythonMod",
    "CleanDiv",
    "CeilDiv",
    "FloatTrueDiv",
    "IntTrueDiv",
}
_POWERS = {"Pow", "PowByNatural", "FloatPow"}
_RELATIONS = {
    "Eq",
    "Ne",
    "Equality",
    "Unequality",
    "StrictLessThan",
    "LessThan",
    "StrictGreaterThan",
    "GreaterThan",
}
_FUNCTIONS = {
    *_DIVISIONS,
    *_POWERS,
    *_RELATIONS,
    *("Add", "Mul", "Max", "Min", "Abs", "And", "Or", "Not", "Where", "Identity"),
    *("CeilToInt", "FloorToInt", "TruncToFloat", "TruncToInt", "RoundToInt", "ToFloat"),
}
"""Functions of sympy and of torch's own in sizes, as `sympy.srepr` writes them."""

_ASSUMPTIONS = {"integer", "positive", "nonnegative", "negative", "real", "finite", "nonzero"}

_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "Add",
    ast.Mult: "Mul",
    ast.Pow: "Pow",
    ast.FloorDiv: "FloorDiv",
    ast.Mod: "Mod",
    ast.Eq: "Equality",
    ast.NotEq: "Unequality",
    ast.Lt: "StrictLessThan",
    ast.LtE: "LessThan",
    ast.Gt: "StrictGreaterThan",
    ast.GtE: "GreaterThan",
}
"""How `str` writes what `srepr` gives a name; older versions of torch saved the former."""


def rewritten(text: str) -> str:
    """The same expression, built anew from what is known and bounded in it.

    Raises:
        ValueError: it is no arithmetic on sizes, or could take long to evaluate.

    Example:
        >>> rewritten("2*s0 + 1")
        "Add(Mul(Integer(2), Symbol('s0', integer=True, positive=True)), Integer(1))"
    """
    expression = _parsed(text)
    if _bits(expression, 0) > _MOST_BITS:
        raise ValueError("too large a number")
    return _SizeWriter().written(expression, 0)


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


class _SizeWriter:
    """Writes one expression; counts its parts on the way."""

    def __init__(self) -> None:
        self.parts = 0

    def written(self, node: ast.expr, depth: int) -> str:
        self.parts += 1
        if self.parts > _MOST_PARTS or depth > _DEEPEST:
            raise ValueError("too long or too deep")
        return self._kind(node, depth + 1)

    def _kind(self, node: ast.expr, depth: int) -> str:
        if isinstance(node, ast.Constant):
            return _constant(node.value)
        if isinstance(node, ast.Name):
            return _name(node.id)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self._call(node.func.id, node, depth)
        return self._infix(node, depth)

    def _call(self, name: str, node: ast.Call, depth: int) -> str:
        if name in _ATOMS:
            return _ATOMS[name](node)
        if name not in _FUNCTIONS or node.keywords:
            raise ValueError("an unknown function")
        return self._function(name, node.args, depth)

    def _function(self, name: str, args: list[ast.expr], depth: int) -> str:
        if name in _POWERS:
            _check_power(args)
        if name in _DIVISIONS and any(_number(arg) == 0 for arg in args[1:]):
            raise ValueError("a division by zero")
        return f"{name}({', '.join(self.written(arg, depth) for arg in args)})"

    def _infix(self, node: ast.expr, depth: int) -> str:
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            number = _number(node)
            if number is not None:
                return _constant(number)
            return f"Mul(Integer(-1), {self.written(node.operand, depth)})"
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub):
            minus = ast.UnaryOp(ast.USub(), node.right)
            return self._function("Add", [node.left, minus], depth)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            return self._function(_OPERATORS[type(node.op)], [node.left, node.right], depth)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            name = _OPERATORS.get(type(node.ops[0]))
            if name is not None:
                return self._function(name, [node.left, node.comparators[0]], depth)
        raise ValueError("no arithmetic")


def _check_power(args: list[ast.expr]) -> None:
    """Exponents are numbers, and small."""
    exponent = _number(args[1]) if len(args) == 2 else None
    if exponent is None or abs(exponent) > _LARGEST_POWER:
        raise ValueError("a power that could be huge")


def _bits(node: ast.expr, depth: int) -> float:
    """Bits that the number may have when all that is known is worked out."""
    if depth > _DEEPEST:
        raise ValueError("too deep")
    number = _number(node)
    if number is not None:
        return abs(number).bit_length() if isinstance(number, int) else 64
    args = _arguments(node)
    if not args:
        return 64
    name, inner = _operation(node), [_bits(arg, depth + 1) for arg in args]
    if name in _POWERS:
        return inner[0] * max(1, abs(_number(args[-1]) or 1))
    return sum(inner) if name == "Mul" else max(inner) + len(inner)


def _arguments(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.Call) and _operation(node) not in _ATOMS:
        return node.args
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    return []


def _operation(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return node.func.id if isinstance(node.func, ast.Name) else ""
    return _OPERATORS.get(type(node.op), "") if isinstance(node, ast.BinOp) else ""


def _number(node: ast.expr) -> int | float | None:
    """The value of a literal, in infix or as srepr writes it; None for anything else."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = _number(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _small(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
        literal = node.args[0]
        if node.func.id == "Integer":
            return _number(literal)
        if node.func.id == "Float":
            return _decimal(_literal(literal))
        if node.func.id == "Rational" and len(node.args) == 2:
            top, bottom = _number(literal), _number(node.args[1])
            return top / bottom if top is not None and bottom else None
    return None


def _small(value: Any) -> int | float:
    if not abs(value) <= _LARGEST:
        raise ValueError("too large a number")
    return value  # type: ignore[no-any-return]


def _decimal(text: object) -> float:
    """A finite number that a double can hold; a longer exponent is a loop in sympy."""
    if not isinstance(text, str) or len(text) > _MOST_PRECISION:
        raise ValueError("no number")
    if not re.fullmatch(r"-?\d+(\.\d*)?([eE][+-]?\d{1,3})?", text, re.ASCII):
        raise ValueError("no number")
    return float(text)


def _constant(value: object) -> str:
    if value is True or value is False:
        return "true" if value else "false"
    if type(value) is int and abs(value) <= _LARGEST:
        return f"Integer({value})"
    if type(value) is float and abs(value) < float("inf"):
        return f"Float('{value!r}', precision=53)"
    raise ValueError("no number")


def _name(name: str) -> str:
    if name in ("true", "false"):
        return name
    if not SYMBOL.fullmatch(name):
        raise ValueError("an unknown name")
    assumed = {"s": "integer=True, positive=True", "u": "integer=True"}
    return f"Symbol('{name}', {assumed.get(name.rstrip('0123456789'), 'real=True')})"


def _symbol(node: ast.Call) -> str:
    name = _literal(node.args[0]) if len(node.args) == 1 else None
    if not isinstance(name, str) or not SYMBOL.fullmatch(name):
        raise ValueError("an unknown name")
    assumed = dict(_assumptions(node))
    return f"Symbol({', '.join((repr(name), *(f'{k}={v}' for k, v in assumed.items())))})"


def _assumptions(node: ast.Call) -> Iterator[tuple[str, bool]]:
    for keyword in node.keywords:
        value = _literal(keyword.value)
        if keyword.arg not in _ASSUMPTIONS or not isinstance(value, bool):
            raise ValueError("an unknown assumption")
        yield keyword.arg, value


def _integer(node: ast.Call) -> str:
    number = _number(node.args[0]) if len(node.args) == 1 and not node.keywords else None
    if type(number) is not int:
        raise ValueError("no number")
    return _constant(number)


def _rational(node: ast.Call) -> str:
    parts = [_number(arg) for arg in node.args]
    whole = all(type(part) is int and abs(part) <= _LARGEST for part in parts)
    if len(parts) != 2 or not whole or not parts[1] or node.keywords:
        raise ValueError("no number")
    return f"Rational({parts[0]}, {parts[1]})"


def _float(node: ast.Call) -> str:
    value = _decimal(_literal(node.args[0]) if len(node.args) == 1 else None)
    precision = {keyword.arg: _literal(keyword.value) for keyword in node.keywords}
    bits = precision.get("precision", 53)
    if set(precision) - {"precision"} or type(bits) is not int or not 1 <= bits <= _MOST_PRECISION:
        raise ValueError("no number")
    return _constant(value)


def _literal(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


_ATOMS = {"Symbol": _symbol, "Integer": _integer, "Rational": _rational, "Float": _float}
"""What `sympy.srepr` writes for the leaves of an expression."""
