"""The values that options parse into."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from featviz.records.checking import read_numbers, read_size

if TYPE_CHECKING:  # generic from click 8.4 on, and only for type checkers
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType

FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
PATH = click.Path(path_type=Path)


class SizeType(_ParamType):
    """`224`, or `HEIGHTxWIDTH`."""

    name = "pixels"

    def convert(self, value: Any, param: Any, ctx: Any) -> int | tuple[int, int]:
        """Read pixels."""
        if (size := read_size(value)) is None:
            self.fail(f"{value!r} is no size: a number of pixels, or HEIGHTxWIDTH", param, ctx)
        return size


class NumbersType(_ParamType):
    """Numbers separated by commas."""

    name = "N,N,N"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[float, ...]:
        """Read floats."""
        if (numbers := read_numbers(value)) is None:
            self.fail(f"{value!r} is not numbers separated by commas", param, ctx)
        return numbers


class AutoInt(_ParamType):
    """A whole number, or `auto` (None)."""

    name = "n"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        """Read a number; `auto` stays a word until `no_auto`, since click takes None for unset."""
        if value == "auto" or isinstance(value, int):
            return value
        try:
            return int(value)
        except ValueError:
            self.fail(f"{value!r} is neither a whole number nor auto", param, ctx)


class BytesType(_ParamType):
    """`500MB`, `2GB`, or a number of bytes."""

    name = "bytes"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        """Read bytes."""
        from featviz.errors import UsageError
        from featviz.pipeline.limits import parse_bytes

        try:
            return value if isinstance(value, int) else parse_bytes(value)
        except UsageError as error:
            self.fail(f"{error.message}; {error.hint}", param, ctx)


def no_auto(value: Any) -> Any:
    """`auto` is None in the records."""
    return None if value == "auto" else value
