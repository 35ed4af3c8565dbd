"""Checks of option records: types, choices, ranges, and options that contradict each other.

The annotation of a field says what it takes, and the method `contradictions` of a record, if it has
one, which values do not go together. The command line and the Python API both check here, so they
refuse the same values, with click's words where click has some.
"""

from __future__ import annotations

import difflib
import math
import numbers
import operator
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from featviz.errors import UsageError
from featviz.files.urls import refuse_url
from featviz.records import AUTO, OneOf, Within
from featviz.text import is_number, quoted

T = TypeVar("T")

_FLAGS = {
    "bytes": "--max-output-size",
    "files": "--max-files",
    "nul_separated": "--null",
    "model_args": "--model-arg",
    "allow_globals": "--allow-global",
    "spec": "MODEL",
}
"""Options whose field has another name."""


def filled(kind: type[T], given: Mapping[str, Any]) -> T:
    """A record of plain values from options as one gives them in Python, lists and numpy's numbers
    included.

    Raises:
        UsageError: an option that does not exist, or a value that it does not take.
    """
    hints = _hints(kind)
    if wrong := [name for name in given if name not in hints]:
        raise no_option(wrong, hints)
    return kind(**{name: _read(hints[name], flag(name), value) for name, value in given.items()})


def no_option(wrong: Iterable[str], known: Iterable[str]) -> UsageError:
    """What to say of keywords that do not exist."""
    names, there = list(wrong), sorted(known)
    close = difflib.get_close_matches(names[0], there, 1)
    hint = f"did you mean {close[0]}?" if close else f"there is {', '.join(there)}"
    return UsageError(f"no option {', '.join(names)}", hint)


def check(record: Any) -> None:
    """Refuse bad values of a record, and of the records in it.

    Raises:
        UsageError: names the option, its value and what it takes; or two options that do not go
            together.
    """
    hints = _hints(type(record))
    for field in fields(record):
        value = getattr(record, field.name)
        if is_dataclass(hints[field.name]) and is_dataclass(value):
            check(value)
        else:
            _read(hints[field.name], flag(field.name), value)
    contradictions: Iterable[tuple[str, str]] = getattr(record, "contradictions", tuple)()
    for message, hint in contradictions:
        raise UsageError(message, hint)


def check_field(kind: type, name: str, value: Any) -> None:
    """Refuse a bad value of one field of a record, which may not be whole yet.

    Raises:
        UsageError: names the option, its value and what it takes.
    """
    _read(_hints(kind)[name], flag(name), value)


def choices(kind: type, name: str) -> list[str]:
    """The words that a field takes."""
    return [str(choice) for choice in _choices(_hints(kind)[name])]


def flag(name: str) -> str:
    """What an option is called on the command line."""
    return _FLAGS.get(name, f"--{name.replace('_', '-')}")


def whole_number(name: str, value: Any, least: int = 0) -> int:
    """A keyword's value as Python's int; whole numbers of numpy and torch are numbers, too.

    Raises:
        UsageError: it is no whole number, or below `least`.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        raise UsageError(
            f"{name} {_shown(value)} is no whole number of {least} or more",
            f"for example {least + 1}",
        )
    return number


def read_size(value: Any) -> int | tuple[int, int] | None:
    """Pixels: `224`, (height, width), `"HEIGHTxWIDTH"`; None for what is no size."""
    if isinstance(value, str):
        value = [int(side) if is_number(side) else 0 for side in value.lower().split("x")]
    sides = list(value) if isinstance(value, (list, tuple)) else [value]
    if len(sides) not in (1, 2) or not all(_is_whole(side) and side >= 1 for side in sides):
        return None
    return int(sides[0]) if len(sides) == 1 else (int(sides[0]), int(sides[1]))


def read_numbers(value: Any) -> tuple[float, ...] | None:
    """Numbers: `0.5`, a sequence, `"0.5,0.25"`; None where it is none."""
    if isinstance(value, str):
        value = value.split(",")
    try:
        values = tuple(float(number) for number in ([value] if _is_real(value) else value))
    except (TypeError, ValueError):
        return None
    return values if all(map(math.isfinite, values)) else None


def read_texts(option: str, value: Any) -> tuple[str, ...]:
    """One text, or a sequence of them; None is none.

    Raises:
        UsageError: it is something else.
    """
    texts = () if value is None else (value,) if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise UsageError(f"{option} {_shown(value)} is not a text", "give one, or a list of them")
    return tuple(texts)


def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _choices(hint: Any) -> list[Any]:
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    if isinstance(hint, OneOf):
        return list(hint.names)
    return [choice for part in get_args(hint) for choice in _choices(part)]


def _read(hint: Any, option: str, value: Any) -> Any:
    """The value as the record holds it."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated and isinstance(inside[1], OneOf):
        return _word(inside[1].names, option, value)
    if origin is Annotated:
        return _bounded(inside[0], inside[1:], option, value)
    if origin in (Union, types.UnionType):
        return _optional(hint, option, value)
    if origin is Literal:
        return _word(inside, option, value)
    if origin is Mapping and not isinstance(value, Mapping):
        raise UsageError(f"{option} {_shown(value)} is no mapping", "{'key': value}")
    if origin is tuple:
        return _tuple(inside[0], option, value)
    if hint is Path:
        refuse_url(value, option)
    return _PLAIN[hint].read(option, value) if hint in _PLAIN else value


def _word(words: Sequence[str], option: str, value: Any) -> str:
    if not isinstance(value, str) or value not in words:
        raise UsageError(
            f"{option} {_shown(value)} is not {_one_of(words)}", "--help tells what it is for"
        )
    return value


def _bounded(hint: Any, rules: Sequence[Any], option: str, value: Any) -> Any:
    if AUTO in rules:
        if value is None or value == "auto":
            return None
        if not _is_whole(value):
            raise UsageError(
                f"{option} {_shown(value)} is neither a whole number nor auto", "for example 4"
            )
    read = _read(hint, option, value)
    for rule in rules:
        if isinstance(rule, Within) and read is not None:
            _within(rule, option, read)
    return read


def _within(rule: Within, option: str, value: Any) -> None:
    if rule.most is None and not value >= rule.least:
        raise UsageError(f"{option} {value} is below {rule.least}", rule.hint)
    if rule.most is not None and not rule.least <= value <= rule.most:
        raise UsageError(f"{option} {value} is outside {rule.least}..{rule.most}", rule.hint)


def _one_of(values: Sequence[Any]) -> str:
    return ("one of " if len(values) > 1 else "") + ", ".join(map(repr, values))


def _optional(hint: Any, option: str, value: Any) -> Any:
    """None, or the other kind of value; sizes and numbers have two forms."""
    parts = [part for part in get_args(hint) if part is not type(None)]
    if value is None and len(parts) < len(get_args(hint)):
        return None
    if int in parts and len(parts) > 1:
        return _size(option, value)
    return _read(parts[0], option, value)


def _size(option: str, value: Any) -> int | tuple[int, int]:
    size = read_size(value)
    if size is None:
        raise UsageError(
            f"{option} {_shown(value)} is no size: a number of pixels, or HEIGHTxWIDTH",
            "for example 224, or 224x320",
        )
    sides = (size,) if isinstance(size, int) else size
    if max(sides) > _LONGEST_SIDE:
        raise UsageError(f"{option} {max(sides)} is above {_LONGEST_SIDE}", "give pixels")
    return size


_LONGEST_SIDE = 2**16
"""Pixels; no image is larger, and its tensor would not fit into memory."""


def _tuple(hint: Any, option: str, value: Any) -> Any:
    if hint is float:
        if (values := read_numbers(value)) is None:
            raise UsageError(
                f"{option} {_shown(value)} is not numbers separated by commas",
                "for example 0.5,0.5,0.5",
            )
        return values
    if hint is str:
        return read_texts(option, value)
    return tuple(value)


def _shown(value: Any) -> str:
    """A value in a message: on one line, and not too long."""
    return quoted(repr(value))


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _is_truth(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ == "bool"  # numpy's


def _is_text(value: Any) -> bool:
    return isinstance(value, (str, PurePath))


@dataclass(frozen=True)
class _PlainKind:
    """A kind of value without choices or bounds."""

    fits: Callable[[Any], bool]
    convert: Callable[[Any], Any]
    words: str
    hint: str

    def read(self, option: str, value: Any) -> Any:
        """The value as the record holds it."""
        if not self.fits(value):
            raise UsageError(f"{option} {_shown(value)} is not {self.words}", self.hint)
        return self.convert(value)


_PLAIN: dict[Any, _PlainKind] = {
    int: _PlainKind(_is_whole, int, "a valid integer", "give a whole number"),
    float: _PlainKind(_is_real, float, "a valid float", "give a number"),
    bool: _PlainKind(_is_truth, bool, "a valid boolean", "True or False"),
    str: _PlainKind(_is_text, str, "a text", "give it in quotes"),
    Path: _PlainKind(_is_text, Path, "a text", "give it in quotes"),
}
