"""Errors in the words of Python: keywords, where the command line has options."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from featviz.errors import FeatvizError
from featviz.records import REDUCTIONS

_KEYWORDS = {
    "allow-global": "allow_globals",
    "help": "help(featviz)",
    "input": "forward_args",
    "model-arg": "model_args",
}
"""Options whose keyword has another name."""
_VALUES = {
    "device auto",
    "format png",
    "preset imagenet",
    "preset none",
    "weights none",
    *(f"reduce {name}" for name in REDUCTIONS),
}
"""Options with a value, as messages name them; elsewhere the word after an option is no value."""

_OPTION = re.compile(r"(?<![\w'\"/-])--([a-z]+(?:-[a-z]+)*)( [a-z]+\b(?:\+\+)?)?")
_COMMAND = re.compile(r"\bfeatviz (audit|cam|diff|exemplars|kernels|layers|report|run|summary)\b")
_VERBOSE = re.compile(r"(?<!\S)-v shows the traceback")


@contextmanager
def keyword_errors() -> Iterator[None]:
    """Let errors of a block, or of a function that this decorates, speak of keywords; the hint
    becomes a note, which tracebacks show."""
    try:
        yield
    except FeatvizError as error:
        error.message = of_keywords(error.message)
        error.args = (error.message,)
        if error.hint is not None and not getattr(error, "__notes__", None):
            error.hint = of_keywords(error.hint)
            error.add_note(f"hint: {error.hint}")
        raise


def of_keywords(words: str) -> str:
    """The words of a message with keywords in place of options.

    Example:
        >>> of_keywords("--pad-value 2 is outside 0..1; see --help")
        'pad_value 2 is outside 0..1; see help(featviz)'
        >>> of_keywords("put it there, or use --weights none")
        "put it there, or use weights='none'"
    """
    words = _VERBOSE.sub("logging at DEBUG shows the traceback", words)
    return _COMMAND.sub(r"featviz.\1", _OPTION.sub(_keyword, words))


def _keyword(option: re.Match[str]) -> str:
    name, value = option.groups()
    keyword = _KEYWORDS.get(name, name.replace("-", "_"))
    if f"{name}{value or ''}" in _VALUES:
        return f"{keyword}={str(value).strip()!r}"
    return keyword + (value or "")
