"""The result of a comparison as a table, and as verdicts for JUnit."""

from __future__ import annotations

from featviz.diff.comparison import Comparison
from featviz.records import Verdict
from featviz.text import TextTable, counted


def diff_table(result: Comparison) -> TextTable:
    """A row for each layer that differs, for people."""
    rows = [layer.cells for layer in result.differing]
    footer = [f"only in BASE: {line}" for line in result.only_in_base.lines]
    footer += [f"only in NEW: {line}" for line in result.only_in_new.lines]
    return TextTable(
        headings=tuple(rows[0]) if rows else (),
        numbers=("images", "channels", "absolute", "relative", "cosine"),
        rows=[tuple(row.values()) for row in rows],
        footer=[*footer, result.summary],
    )


def verdicts(result: Comparison) -> list[Verdict]:
    """One for each layer, and one each for what only one run has."""
    checks = []
    for layer in result.layers:
        differing, total = layer.count
        message = f"{differing:,} of {counted(total, 'channel')} differ"
        if layer.reason:
            message += f": {layer.reason}"
        else:
            absolute = layer.channels.absolute.max(initial=0)
            relative = layer.channels.relative.max(initial=0)
            message += f"; largest difference {absolute:.3g} ({relative:.3g} relative)"
        held = result.within or not layer.differs
        checks.append(Verdict(f"{layer.label} {layer.key.stem}", held, message))
    removed = result.only_in_base.lines
    added = result.only_in_new.lines
    added_held = not added or result.thresholds.ignore_added
    checks.append(Verdict("only in BASE", not removed, "; ".join(removed) or "nothing"))
    checks.append(Verdict("only in NEW", added_held, "; ".join(added) or "nothing"))
    return checks
