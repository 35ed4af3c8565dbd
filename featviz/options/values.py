"""The values of options: how a value is read from text or from Python, and what help
calls it.

A reader raises ValueError, TypeError or AttributeError for a value that it cannot read;
`Option.value` turns all three into one message. A reader that can say more exactly what is
wrong raises UsageError."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from os import PathLike, fspath
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from featviz.errors import UsageError
from featviz.files.urls import Url, is_url, refuse_url
from featviz.records.tables import KINDS
from featviz.records.types import Shard
from featviz.text import quoted, ranges, read_ranges

LONGEST_SIDE = 2**16
"""Pixels of a side at most. No real image is larger, and its tensor would not fit into
memory."""
HPARAMS = "@hparams"
"""Stands for all arguments of a model that a Lightning checkpoint holds."""


@dataclass(frozen=True)
class ValueReader:
    """How the values of a type are read, and what they are called."""

    expects: str
    """What a value is, for messages: `a file, not a folder`."""
    read: Callable[[Any], Any]
    """Takes what a user typed (a text, or a list of texts for a repeatable option), what a
    TOML file holds, or what a program passes. Returns the value. Raises as the module's
    docstring says."""
    metavar: str = ""
    """Stands for a value in help: `FILE`."""
    repeatable: bool = False
    """Whether the value is a list, and the option may be given once for each item."""
    is_path: bool = False
    """Whether a shell completes the value with names of files."""


def convert(value: Any, value_type: Any) -> Any:
    """Convert a value to a type. Numbers of numpy and torch become Python's.

    Args:
        value: a text from the command line (`.5`, `true`), or any object that a program
            passes.
        value_type: an annotation that msgspec understands; it may have bounds.

    Raises:
        ValueError: the value is a float that is not finite.
        msgspec.ValidationError: the value is of another type, or out of bounds.
    """
    # a number of numpy or torch is an array without axes, which msgspec does not know
    plain = value
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        plain = value.item()
    if isinstance(plain, str):
        plain = _number_or_text(plain)
    # a text may stand for another type (`true`), an object of a program may not
    converted = msgspec.convert(plain, value_type, strict=not isinstance(plain, str))
    if isinstance(converted, float) and not math.isfinite(converted):
        raise ValueError(value)
    return converted


def _number_or_text(text: str) -> int | float | str:
    """The number that a text is for Python, else the text itself. msgspec does not read
    `.5`."""
    # int first: as a float, a large seed would lose its last digits
    for number_type in (int, float):
        try:
            return number_type(text)
        except ValueError:
            continue
    return text


def split_list(value: Any) -> list[Any]:
    """The items of a list.

    Args:
        value: a text (`224x224`, `.5,.5`, `1 2`), a number, or a sequence of texts and
            numbers, each of which may hold several items. An empty text is one empty
            item, and after a comma at the end comes one more.
    """
    # people type x between two sides, and messages show ×
    if isinstance(value, str):
        return re.split(r"\s*[\s,x×]\s*", value.strip().lower())
    if _is_number(value):
        return [value]
    items = []
    for item in value:
        if isinstance(item, str):
            items += split_list(item)
        else:
            items.append(item)
    return items


def _is_number(value: Any) -> bool:
    """Whether a value is one number, not a sequence of numbers. An array or tensor without
    axes is one number."""
    return not hasattr(value, "__len__") or getattr(value, "ndim", 1) == 0


def _read_size(value: Any) -> int | tuple[int, int]:
    """Read a size in pixels.

    Args:
        value: one or two numbers, in a form that `split_list` takes.

    Returns:
        One number, for the shorter side; or two numbers, height and width.

    Raises:
        ValueError: there are more than two numbers, or one is not a whole number from 1 to
            LONGEST_SIDE (msgspec.ValidationError is a ValueError).
    """
    pixels = Annotated[int, Meta(ge=1, le=LONGEST_SIDE)]
    numbers = [convert(item, pixels) for item in split_list(value)]
    if len(numbers) == 1:
        return int(numbers[0])
    height, width = numbers  # ValueError for more
    return height, width


def _read_numbers(value: Any) -> tuple[float, ...]:
    """Read a list of finite numbers."""
    return tuple(convert(item, float) for item in split_list(value))


def _read_captures(value: Any) -> tuple[str, ...]:
    """Read names of `KINDS`: each once, in the user's order. ValueError for other names,
    and for none."""
    names = [name for name in split_list(value) if name]  # a comma may end the list
    if not names or not set(names) <= set(KINDS):
        raise ValueError(value)
    return tuple(dict.fromkeys(names))


CHANNEL_RULES = ("top", "varied", "first", "spread")
"""Rules that choose channels: those with the highest mean, those that vary most, the
first ones, and evenly spread ones."""
CHOSEN_UNLESS_COUNTED = 16
"""How many channels a rule without a number chooses."""
# at most nine digits: int() of thousands of digits takes long, or raises
_CHANNEL_RULE = re.compile(rf"({'|'.join(CHANNEL_RULES)})(?::([1-9][0-9]{{0,8}}))?")


class ChannelChoice(NamedTuple):
    """Which channels of a tensor are drawn."""

    rule: str
    """One of CHANNEL_RULES; empty if channels are named by number."""
    most: int
    """How many channels the rule chooses at most."""
    numbers: tuple[int, ...] = ()
    """The named channels, in the order of the text."""


@lru_cache(64)
def channel_choice(text: str) -> ChannelChoice:
    """Read which channels are drawn.

    Args:
        text: `12,40-43`, `top` or `varied:16`, in small letters.

    Returns:
        The choice. Whether a tensor has these channels is not checked here.

    Raises:
        ValueError: the text is neither numbers nor a rule, or a rule has the number 0.
    """
    # cached, since a run reads the same text for each picture
    match = _CHANNEL_RULE.fullmatch(text)
    if match is None:
        return ChannelChoice("", 0, tuple(read_ranges(text)))
    return ChannelChoice(match[1], int(match[2] or CHOSEN_UNLESS_COUNTED))


def _read_channels(value: Any) -> str:
    """Turn a text, a number or several numbers into a text that `channel_choice` reads.
    ValueError if it cannot read the text."""
    if isinstance(value, str):
        text = value.strip().lower()
    else:
        numbers = [value] if _is_number(value) else value
        text = ranges(convert(number, NonNegativeInt) for number in numbers)
    channel_choice(text)  # only for its ValueError
    return text


def _read_names(value: Any) -> tuple[str, ...]:
    """Read names or globs from one or several texts; each may hold several names with
    commas between them. Empty names are left out."""
    names = []
    for text in read_texts(value):
        names += [name.strip() for name in text.split(",") if name.strip()]
    return tuple(names)


def _read_auto(value: Any) -> int | None:
    """Read a whole number ≥ 1; None for `auto`."""
    if str(value).lower() == "auto":
        return None
    return int(convert(value, PositiveInt))


def _read_path(value: Any) -> Path:
    """Read a local path. Nothing need exist there.

    Raises:
        ValueError: the value is neither text nor a path; or it contains NUL, which is not
            allowed in paths.
        UsageError: the value is a URL.
    """
    if not isinstance(value, (str, PathLike)) or "\0" in str(value):
        raise ValueError(value)
    refuse_url(fspath(value))  # Path would turn it into a folder `s3:`
    return Path(value)


def _read_place(value: Any, is_folder: bool) -> Path:
    """Read the path of a folder or of a file. Nothing need exist there.

    Args:
        is_folder: True expects a folder, False a file.

    Raises:
        ValueError: a file exists where a folder is expected, or a folder where a file is
            expected; or `_read_path` raises.
        UsageError: the value is a URL; or the system cannot look at the path, since a name
            is too long, or a folder may not be searched.
    """
    path = _read_path(value)
    try:
        if path.exists() and path.is_dir() != is_folder:
            raise ValueError(value)
    except OSError as error:
        raise UsageError(
            f"{quoted(str(path))}: {error.strerror}", "name another path"
        ) from error
    return path


def _read_run_location(value: Any) -> Path | Url:
    """Read where a run directory is, or will be: a path, or the URL of a folder in an
    object store."""
    if isinstance(value, Url):
        return value
    if isinstance(value, str) and is_url(value):
        return Url.of_run(value)
    return _read_path(value)


def _read_shard(value: Any) -> Shard:
    """Read a shard: `2/8` is the second of eight, with index 1. ValueError for another
    text."""
    # [0-9], since \d also matches digits of other scripts
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", str(value))
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise ValueError(value)
    return Shard(int(match[1]) - 1, int(match[2]))


_INDEXED = re.compile(
    r"(?<![^,!\s])([A-Z]\w*|fn:\w+)\[(-?\d{1,9}|[-\d]*:[-:\d]*)\](?=\s*(?:,|$))"
)
"""A class or function with an index as in Python: `Conv2d[0]`. featviz writes this
`Conv2d#0`."""


def _read_selectors(value: Any) -> str:
    """Read selectors as one text. `hooks.selectors.parse` will check it when the layers
    are known."""
    # `Conv2d[0]` would be a glob that matches nothing. A program may pass a list.
    text = value if isinstance(value, str) else ",".join(value)
    return _INDEXED.sub(r"\1#\2", text)


def _read_target(value: Any) -> str:
    """Read a target as text. `gradients.targets.parse` will check it. A plain number is a
    class, as in other tools."""
    if not isinstance(value, str):
        value = convert(value, NonNegativeInt)
    text = str(value).strip()
    if re.fullmatch(r"[0-9]{1,9}", text):
        return f"class:{text}"
    return text


def _read_weights(value: Any) -> str:
    """Read `none` or `default`, in small or capital letters; or a file, or the name of an
    entry."""
    text: str = fspath(value)
    # anything else may be a path: its letters stay as they are
    if text.lower() in ("none", "default"):
        return text.lower()
    return text


def _read_arguments(value: Any) -> Mapping[str, Any]:
    """Read keyword arguments.

    Args:
        value: a mapping; or one or several texts `KEY=VALUE`. VALUE is a Python literal,
            or else a text. `@hparams` stands for the arguments in a checkpoint.

    Returns:
        The values by name. If a name comes twice, the later value counts.

    Raises:
        ValueError: a text has no `=`, or its key is not a name in Python.
    """
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return value
    pairs = [value] if isinstance(value, str) else value
    arguments: dict[str, Any] = {}
    for pair in pairs:
        if pair == HPARAMS:
            arguments[HPARAMS] = True
            continue
        key, equals, text = str(pair).partition("=")
        if not equals or not key.isidentifier():
            raise ValueError(value)
        try:
            arguments[key] = ast.literal_eval(text)
        # a text without quotes, as in `--model-arg act=gelu`, or one that nests too deep
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            arguments[key] = text
    return arguments


def read_texts(value: Any) -> tuple[str, ...]:
    """Read the texts of an option that may be repeated.

    Args:
        value: one text, or a tuple or list of texts, which may be empty.

    Raises:
        TypeError: the value is something else.
        msgspec.ValidationError: an item is not a text.
    """
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (tuple, list)):
        raise TypeError(value)
    return tuple(msgspec.convert(list(value), list[str]))


def read_text(value: Any) -> str:
    """Read a text, or a path as text."""
    return msgspec.convert(fspath(value), str)


# The types of options. msgspec knows plain types and their bounds, which `options.fields`
# reads; other types have a reader in their annotation.


def _with_reader(
    expects: str, read: Callable[[Any], Any], metavar: str = "", **flags: bool
) -> Meta:
    """Annotate a type with its ValueReader, for `options.fields`. The arguments are the
    fields of ValueReader."""
    return Meta(extra={"reader": ValueReader(expects, read, metavar, **flags)})


PositiveInt = Annotated[int, Meta(ge=1)]
NonNegativeInt = Annotated[int, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Fraction = Annotated[float, Meta(gt=0, lt=1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Texts = tuple[str, ...]

Size = Annotated[
    int | tuple[int, int],  # the shorter side; or height and width
    _with_reader(
        f"pixels from 1 to {LONGEST_SIDE}, such as 224 or 224x320",
        _read_size,
        "PIXELS",
        repeatable=True,
    ),
]
Numbers = Annotated[
    tuple[float, ...],
    _with_reader(
        "numbers, such as 0.5,0.5,0.5",
        _read_numbers,
        "N,N,N",
        repeatable=True,
    ),
]
AutoInt = Annotated[
    int | None,  # None is auto
    _with_reader("an integer ≥ 1, or auto", _read_auto, "N"),
]
RunLocation = Annotated[
    Any,  # a Path, or the `files.urls.Url` of a folder in an object store
    _with_reader(
        "a path, or a URL of a store",
        _read_run_location,
        "PATH",
        is_path=True,
    ),
]
AnyPath = Annotated[Path, _with_reader("a path", _read_path, "PATH", is_path=True)]
File = Annotated[
    Path,
    _with_reader(
        "a file, not a folder",
        partial(_read_place, is_folder=False),
        metavar="FILE",
        is_path=True,
    ),
]
Folder = Annotated[
    Path,
    _with_reader(
        "a folder, not a file",
        partial(_read_place, is_folder=True),
        metavar="FOLDER",
        is_path=True,
    ),
]
Selectors = Annotated[
    str,
    _with_reader(
        "selectors, such as Conv2d,layer1.*",
        _read_selectors,
        "SELECTORS",
        repeatable=True,
    ),
]
Target = Annotated[
    str, _with_reader("a target, such as class:281 or mean", _read_target, "TARGET")
]
Captures = Annotated[
    Texts,
    _with_reader(
        f"some of {', '.join(KINDS)}",
        _read_captures,
        "KINDS",
        repeatable=True,
    ),
]
Names = Annotated[Texts, _with_reader("names or globs", _read_names, repeatable=True)]
Channels = Annotated[
    str,  # of which `channel_choice` makes a record
    _with_reader(
        "numbers such as 12,40-43, or top:9, varied:16, first:16 or spread:16",
        _read_channels,
        "CHANNELS",
    ),
]
WeightsSource = Annotated[
    str,
    _with_reader(
        "default, none, a weights entry or a file",
        _read_weights,
        "WEIGHTS",
        is_path=True,
    ),
]
Arguments = Annotated[
    Mapping[str, Any],
    _with_reader(
        "KEY=VALUE, such as num_classes=7",
        _read_arguments,
        "KEY=VALUE",
        repeatable=True,
    ),
]
ShardNumber = Annotated[
    Shard, _with_reader("I/N with I from 1 to N, such as 2/8", _read_shard, "I/N")
]
