"""Errors and warnings in the words of Python: keywords, where the command line has options."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

from featviz.errors import FeatvizError

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
    "reduce pca",
    "weights none",
}
"""Options with a value, as messages name them; elsewhere the word after an option is no value."""

_OPTION = re.compile(r"(?<![\w'\"/-])--([a-z]+(?:-[a-z]+)*)( [a-z]+\b)?")
_COMMAND = re.compile(r"\bfeatviz (audit|diff|exemplars|kernels|layers|look|report|run|summary)\b")
_VERBOSE = re.compile(r"(?<!\S)-v shows the traceback")


class _KeywordRecords:
    """A factory of log records, on top of another: those of featviz speak of keywords, in whatever
    thread they are logged and by whatever handlers they are shown."""

    def __init__(self) -> None:
        self._usual = logging.getLogRecordFactory()
        self._is_on = True
        logging.setLogRecordFactory(self)

    def __call__(self, *args: Any, **keywords: Any) -> logging.LogRecord:
        record: logging.LogRecord = self._usual(*args, **keywords)
        if self._is_on and record.name.partition(".")[0] == "featviz":
            record.msg, record.args = of_keywords(record.getMessage()), None
        return record

    def end(self) -> None:
        """Take it away; where the caller has put another factory on top, it does nothing more."""
        self._is_on = False
        if logging.getLogRecordFactory() is self:
            logging.setLogRecordFactory(self._usual)


class _RunningFunctions:
    """Counts the functions of the API that run, in all threads: while any does, warnings speak of
    keywords."""

    def __init__(self) -> None:
        self._lock, self._count = Lock(), 0
        self._records: _KeywordRecords | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1
            self._records = self._records or _KeywordRecords()

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._count -= 1
            if self._records is not None and not self._count:
                self._records.end()
                self._records = None


_running = _RunningFunctions()


@contextmanager
def keyword_errors() -> Iterator[None]:
    """Let errors and warnings of a block, or of a function that this decorates, speak of keywords;
    the hint of an error becomes a note, which tracebacks show."""
    try:
        with _running:
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
