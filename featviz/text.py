"""Text that somebody else wrote, made fit for a message, a table or a terminal."""

from __future__ import annotations

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


def quoted(words: str, longest: int = LONGEST) -> str:
    """Words from a file as a message may show them: printable, on one line, not too long."""
    return printable(words[:longest]) + ("…" if len(words) > longest else "")
