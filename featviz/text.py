"""Words of messages: lists, ranges and sizes in one form; and text that somebody else
wrote, made fit for a message, a terminal, or the name of a file."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple


def printable(text: str) -> str:
    r"""The same text with every control character, line break and lone surrogate
    escaped: a name from outside could else set a terminal's title, colour the screen or
    forge lines of output."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable_json(content: Any, indent: int | None = None) -> str:
    """A JSON document that can be shown: what `printable` escapes, JSON escapes too.

    Args:
        content: what `json.dumps` takes.
        indent: spaces for each level; None puts all on one line.
    """
    text = json.dumps(content, indent=indent, ensure_ascii=False)
    if text.replace("\n", "").isprintable():
        return text
    return "".join(
        c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text
    )


def percent(share: float, space: str = " ") -> str:
    """A share 0..1 with one decimal; `< 0.1 %` and `> 99.9 %` unless 0 and 100 are
    exact."""
    if 0 < share < 0.0005:
        return f"<{space}0.1{space}%"
    if 0.9995 <= share < 1:
        return f">{space}99.9{space}%"
    return f"{100 * share:.1f}{space}%"


def is_number(text: str) -> bool:
    """Whether Python makes a number of this text: of `²` and of 5,000 digits it makes
    none."""
    return text.isdecimal() and len(text) < 1000


def quoted(value: object, limit: int = 160) -> str:
    """A text from a file, a path or an error as a message may show it: printable, on one
    line, and of at most `limit` characters."""
    text = str(value)
    return printable(text[:limit]) + ("…" if len(text) > limit else "")


def listed(
    texts: Sequence[str],
    limit: int,
    separator: str = ", ",
    remaining: int | None = None,
) -> str:
    """The first texts, and how many more there are: `conv1, conv2 and 1 more`.

    Args:
        texts: All of them.
        limit: How many are named.
        separator: Between them.
        remaining: How many more there are; give it where each text stands for several
            things. By default the number of texts that are not named.
    """
    if remaining is None:
        remaining = max(0, len(texts) - limit)
    return separator.join(texts[:limit]) + (
        f" and {remaining} more" if remaining else ""
    )


def did_you_mean(
    name: str, names: Iterable[str], otherwise: str = "", most: int = 1
) -> str:
    """A hint with the names that a misspelt one is most like.

    Args:
        otherwise: the hint where none is like it.
        most: names of the hint.
    """
    close = difflib.get_close_matches(name, list(names), most)
    return f"did you mean {' or '.join(close)}?" if close else otherwise


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class where it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def layer_named(label: str) -> str:
    """A layer's label within a sentence: `layer 4`, where a number begins it, as in
    nn.Sequential; the label alone where it is read as a name."""
    return f"layer {label}" if label[:1].isdecimal() else label


def of_image(image: str, message: str) -> str:
    """A message with the name of its image, which some begin with already."""
    if message.startswith((f"{image} ", f"{image}:")):
        return message
    return f"{image}: {message}"


def gaps(
    skipped: Mapping[str, str],
    never_ran: Collection[str],
    others: Mapping[str, Collection[str]] | None = None,
) -> list[str]:
    """What a message says of layers that have no result, a line for each kind, with the
    first three layers of a reason, which is said once.

    Args:
        skipped: reasons, by the label of the layer.
        never_ran: labels.
        others: texts that begin with a label, by what is said of them.
    """
    labels: dict[str, list[str]] = {}
    for label, reason in skipped.items():
        labels.setdefault(reason, []).append(layer_named(label))
    reasons = [f"{listed(names, 3)} ({reason})" for reason, names in labels.items()]
    beyond = sum(map(len, [*labels.values()][3:]))
    lines = {
        "never ran": listed([*map(layer_named, never_ran)], 3),
        "skipped": listed(reasons, 3, remaining=beyond),
    }
    for title, texts in (others or {}).items():
        lines[title] = listed([*map(layer_named, texts)], 3)
    return [f"{title}: {line}" for title, line in lines.items() if line]


def cut(text: str, limit: int) -> str:
    """A text of more than `limit` characters as its beginning and its end, `limit` of
    them in all, around a `…`: `laye…onv1`."""
    if len(text) <= limit:
        return text
    head = limit // 2
    return f"{text[:head]}…{text[len(text) - (limit - head) :]}"


def by(sizes: Iterable[object]) -> str:
    """Sizes as one speaks of them: `1×64×56×56`."""
    return "×".join(map(str, sizes))


def read_ranges(text: str) -> list[int]:
    """Numbers and ranges (`0-2,5`), in their order and each once.

    Raises:
        ValueError: A term is neither a number nor a range, its range runs backwards, or
            holds more than a million numbers. The message is the term.
    """
    numbers: dict[int, None] = {}
    for term in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,18})(?:-(\d{1,18}))?\s*", term, re.ASCII)
        if ends is None:
            raise ValueError(term)
        run = range(int(ends[1]), int(ends[2] or ends[1]) + 1)
        # `0-999999999` would fill the memory
        if not 0 < len(run) <= 1_000_000:
            raise ValueError(term)
        numbers |= dict.fromkeys(run)
    return list(numbers)


def ranges(
    numbers: Iterable[int],
    limit: int | None = None,
    *,
    comma: str = ",",
    dash: str = "-",
) -> str:
    """Numbers with those that follow one another as ranges (`0-2,5`), which
    `read_ranges` reads back.

    Args:
        numbers: In any order, which stays.
        limit: How many ranges are written; behind them it says how many numbers there
            are more.
        comma: Between ranges.
        dash: Between the ends of a range.
    """
    runs: list[range] = []
    # all channels of a layer: one range, whose numbers need not be counted
    if isinstance(numbers, range) and numbers.step == 1 and numbers:
        runs = [numbers]
        numbers = ()
    for number in numbers:
        if runs and number == runs[-1].stop:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    texts = [
        f"{run[0]}{dash}{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs
    ]
    if limit is None:
        return comma.join(texts)
    return listed(texts, limit, comma, sum(map(len, runs[limit:])))


class TextTable(NamedTuple):
    """A table of text, with numbers to the right."""

    headings: Sequence[str]
    numbers: Collection[str]
    """The headings of columns that hold numbers, which stand to the right."""
    rows: Sequence[Sequence[str]]
    totals: Sequence[Sequence[str]] = ()
    """Rows at the end, which sum up those above."""
    footer: Sequence[str] = ()
    """Lines below the table."""

    def __str__(self) -> str:
        """The table in columns two spaces apart, then the footer; without rows, the
        footer alone. Control characters are escaped."""
        footer = [printable(line) for line in self.footer]
        if not self.rows:
            return "\n".join(footer)
        rows = [self.headings, *self.rows, *self.totals]
        cells = [[printable(str(cell)) for cell in row] for row in rows]
        columns = []
        for heading, column in zip(
            self.headings, zip(*cells, strict=True), strict=True
        ):
            width = max(map(len, column))
            adjust = str.rjust if heading in self.numbers else str.ljust
            columns.append([adjust(cell, width) for cell in column])
        lines = ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
        return "\n".join(lines + footer)


_LONGEST_NAME = 100
"""Characters of one name; the rest is cut, and a hash put in its place."""
_LONGEST_PATH = 1000
"""Bytes of an image's path within a run."""
_DEEPEST = 32
"""Folders of an image's path within a run."""
_UNPORTABLE = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f\ud800-\udfff]|[. ]$')
_RESERVED = re.compile(
    r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?"  # on Windows
    r"|run\.json|manifest\.json|audit\.json|stats\.npz"  # our own
    r"|\..*",  # hidden, as only what is not finished is
    re.IGNORECASE | re.DOTALL,
)


@lru_cache(4096)
def safe_name(name: str) -> str:
    """A file name that every system takes, that featviz writes nothing else under, and
    that is not hidden; a name that had to be changed gets 8 hex digits of a hash."""
    clean = _UNPORTABLE.sub("_", name)
    if _RESERVED.fullmatch(clean):
        clean = f"_{clean}"
    short_enough = (
        len(clean) <= _LONGEST_NAME and len(os.fsencode(clean)) <= 2 * _LONGEST_NAME
    )
    if clean == name and short_enough:
        return clean
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    stem, dot, suffix = clean.rpartition(".")
    # what is not an extension belongs to the name
    if not dot or len(suffix) > 5:
        stem = clean
        dot = suffix = ""
    short = stem.encode()[: _LONGEST_NAME - 16].decode(errors="ignore")
    return f"{short}-{digest}{dot}{suffix}"


def safe_path(name: str) -> str:
    """The folder of an image with this relative name, with forward slashes: each part
    by `safe_name`; all of it as one part where the path would be too long for the
    system."""
    path = "/".join(safe_name(part) for part in name.split("/"))
    if path.count("/") < _DEEPEST and len(path.encode()) <= _LONGEST_PATH:
        return path
    return safe_name(name)


def counted(count: int, noun: str) -> str:
    """`1 image`, `2,000 images`, `3 classes`."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}" + ("" if count == 1 else ending)


def size_text(count: float) -> str:
    """Bytes as one speaks of them: `1.3 MB`, below a tenth of one `52 kB`."""
    if count >= 100_000:
        return f"{count / 1e6:.1f} MB"
    digits = 0 if count >= 10_000 else 1
    return f"{count / 1e3:.{digits}f} kB"
