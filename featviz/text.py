"""Text that somebody else wrote, made fit for a message, a table or a terminal."""

from __future__ import annotations

import json
from typing import Any

LONGEST = 160
"""Characters of a file's own words that a message has room for."""


def printable(words: str) -> str:
    r"""The same text with every control character, line break and lone surrogate escaped.

    A name from a model, an image or a run directory could else set a terminal's title, colour the
    screen or forge lines of output.

    Example:
        >>> printable("a\x1b]0;title\x07b")
        'a\\x1b]0;title\\x07b'
    """
    if words.isprintable():
        return words
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in words)


def indented(text: str) -> str:
    """Lines of a traceback, tame: none looks like a message, whatever an exception says."""
    return "\n".join(f"  {printable(line)}".rstrip() for line in text.split("\n"))


def printable_json(content: Any, indent: int | None = None) -> str:
    r"""A JSON document that can be shown: what `printable` escapes, JSON escapes too.

    Example:
        >>> printable_json(["ä\x9b"])
        '["ä\\u009b"]'
    """
    text = json.dumps(content, indent=indent, ensure_ascii=False)
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def is_number(words: str) -> bool:
    """Whether these are digits, few enough to be read at once: of `²` and 5,000 digits, which a
    name may have, Python makes no number."""
    return words.isdecimal() and len(words) < 1000


def quoted(words: str, longest: int = LONGEST) -> str:
    """Words from a file as a message may show them: printable, on one line, not too long."""
    return printable(words[:longest]) + ("…" if len(words) > longest else "")
