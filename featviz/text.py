"""Writes lists, ranges and sizes for messages; and makes text from files and paths fit for
a message, a terminal, or the name of a file."""

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
    r"""The text with every control character, line break and lone surrogate escaped.
    Without this, the name of a file could set the title of a terminal, colour the screen
    or forge lines of output."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def printable_json(content: Any, indent: int | None = None) -> str:
    """A JSON document in which all characters that `printable` escapes are escaped, as JSON
    writes them.

    Args:
        content: any value that `json.dumps` takes.
        indent: how many spaces each level has; None puts all on one line.
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
    """Whether a text is a whole number of less than 1,000 decimal digits: `int` fails for
    `²`, and for 5,000 digits."""
    return text.isdecimal() and len(text) < 1000


def quoted(value: object, limit: int = 160) -> str:
    """A text from a file, a path or an error, made fit for a message: printable, on one
    line, and cut to `limit` characters."""
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
    """A hint with the names that are most like a misspelt one.

    Args:
        name: the misspelt name.
        names: the possible names.
        otherwise: the hint if no name is like it.
        most: the most names in the hint.
    """
    close = difflib.get_close_matches(name, list(names), most)
    return f"did you mean {' or '.join(close)}?" if close else otherwise


def first_line(error: BaseException) -> str:
    """The first line of an error's message; for an empty message, the name of the error's
    class."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def layer_named(label: str) -> str:
    """A layer's label for a sentence: `layer 4` for a label that begins with a digit, as in
    nn.Sequential; any other label as it is."""
    return f"layer {label}" if label[:1].isdecimal() else label


def of_image(image: str, message: str) -> str:
    """A message that begins with the name of its image. Nothing is added to a message that
    begins with it already."""
    if message.startswith((f"{image} ", f"{image}:")):
        return message
    return f"{image}: {message}"


def gaps(
    skipped: Mapping[str, str],
    never_ran: Collection[str],
    others: Mapping[str, Collection[str]] | None = None,
) -> list[str]:
    """Lines for a message on layers without a result: one for layers that never ran, one
    for skipped layers by reason, and one for each of `others`. A line names the first three
    layers, or the first three reasons with three layers each.

    Args:
        skipped: the reasons why layers were skipped, by their labels.
        never_ran: the labels of layers that never ran.
        others: further texts that begin with a label, by the title of their line.
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
    """Cut a text of more than `limit` characters in its middle: `laye…onv1`. `limit`
    characters are left, besides the `…`."""
    if len(text) <= limit:
        return text
    head = limit // 2
    return f"{text[:head]}…{text[len(text) - (limit - head) :]}"


def by(sizes: Iterable[object]) -> str:
    """Sizes for people: `1×64×56×56`."""
    return "×".join(map(str, sizes))


def read_ranges(text: str) -> list[int]:
    """Read numbers and ranges, such as `0-2,5`.

    Returns:
        The numbers in the order of the text, each once.

    Raises:
        ValueError: a term is neither a number nor a range, or its range runs backwards or
            has more than a million numbers. The message is the term.
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
    """Write numbers, with successive ones as ranges: `0-2,5`. `read_ranges` reads this back.

    Args:
        numbers: the numbers; their order is kept.
        limit: the most ranges that are written; the text then ends with the number of
            left out numbers. None writes all ranges.
        comma: the text between ranges.
        dash: the text between the ends of a range.
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
    """A table of text."""

    headings: Sequence[str]
    numbers: Collection[str]
    """The headings of the columns with numbers, which are aligned to the right."""
    rows: Sequence[Sequence[str]]
    totals: Sequence[Sequence[str]] = ()
    """Rows at the end, with the sums of the rows above."""
    footer: Sequence[str] = ()
    """Lines below the table."""

    def __str__(self) -> str:
        """The table with two spaces between columns, then the footer. A table without rows
        has only the footer. Control characters are escaped."""
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
"""The most characters of a safe name; of a longer one the end is replaced by a hash."""
_LONGEST_PATH = 1000
"""The most bytes in the path of an image's folder in a run."""
_DEEPEST = 32
"""The most folders in the path of an image in a run."""
_UNPORTABLE = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f\ud800-\udfff]|[. ]$')
_RESERVED = re.compile(
    r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?"  # on Windows
    r"|run\.json|manifest\.json|audit\.json|stats\.npz"  # our own
    r"|\..*",  # hidden, as only what is not finished is
    re.IGNORECASE | re.DOTALL,
)


@lru_cache(4096)
def safe_name(name: str) -> str:
    """Make a name fit for a file: every system allows it, no other file of featviz has it,
    and it is not hidden. A name that is changed for this gets 8 hex digits of a hash."""
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
    """The path of an image's folder in a run, by the image's name: each part of the name is
    made safe by `safe_name`. If the path would be too long or too deep, the whole name
    becomes one part."""
    path = "/".join(safe_name(part) for part in name.split("/"))
    if path.count("/") < _DEEPEST and len(path.encode()) <= _LONGEST_PATH:
        return path
    return safe_name(name)


def counted(count: int, noun: str) -> str:
    """A number with its noun: `1 image`, `2,000 images`, `3 classes`."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}" + ("" if count == 1 else ending)


def size_text(count: float) -> str:
    """A number of bytes for people: `1.3 MB`; below 0.1 MB, `52 kB`."""
    if count >= 100_000:
        return f"{count / 1e6:.1f} MB"
    digits = 0 if count >= 10_000 else 1
    return f"{count / 1e3:.{digits}f} kB"
