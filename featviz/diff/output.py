"""The result of a comparison as a table, and as verdicts for JUnit."""

from __future__ import annotations

from collections import Counter

from featviz.diff.comparison import ComparedTensor, Comparison
from featviz.records import Verdict
from featviz.text import TextTable, counted, listed

# at most this many changed predictions are listed, each on a line
_NAMED = 10
# columns that are left out if all of their cells are empty
_OPTIONAL = ("SQNR", "newly dead", "in NEW")
_NUMBERS = ("images", "channels", "absolute", "relative", "cosine", "SQNR")


def diff_table(result: Comparison) -> TextTable:
    """The comparison for people: a row for each tensor that differs, and closing lines. If
    no tensor differs, there are only the closing lines."""
    rows = [tensor.cells for tensor in result.differing]
    headings = []
    for heading in rows[0] if rows else ():
        if heading not in _OPTIONAL or any(row[heading] for row in rows):
            headings.append(heading)
    cells = []
    for row in rows:
        cells.append([row[heading] for heading in headings])
    return TextTable(
        headings=headings,
        numbers=_NUMBERS,
        rows=cells,
        footer=_closing_lines(result),
    )


def _closing_lines(result: Comparison) -> list[str]:
    """The lines below the table: what only one run has, changed predictions, pairings, the
    summary, and the gates."""
    lines = [f"only in BASE: {line}" for line in result.only_in_base.lines]
    lines += [f"only in NEW: {line}" for line in result.only_in_new.lines]
    if result.predictions:
        changed = [change.text for change in result.changed_predictions]
        predictions = counted(len(result.predictions), "prediction")
        end = ":" if changed else ""
        lines.append(f"{len(changed)} of {predictions} changed{end}")
        lines += [f"  {text}" for text in changed[:_NAMED]]
        if len(changed) > _NAMED:
            lines.append(f"  and {len(changed) - _NAMED:,} more")
    lines += _pairing_lines(result)
    lines.append(result.summary)
    for verdict in result.gates:
        state = "held" if verdict.held else "failed"
        lines.append(f"gate {verdict.gate} {state}: {verdict.message}")
    return lines


def _pairing_lines(result: Comparison) -> list[str]:
    """How many tensors each rule of `diff.pairing` has paired, and which layers were left
    out; no lines for two runs of one runtime."""
    pairs = [tensor.pair for tensor in result.layers if tensor.pair is not None]
    counts = Counter(pair.found_by for pair in pairs)
    lines = []
    if counts:
        found = ", ".join(f"{count} by {rule}" for rule, count in counts.most_common())
        lines.append(f"paired: {found}")
    if result.folded:
        names = listed(result.folded, 3)
        lines.append(f"inside another layer: {names}")
    return lines


def verdicts(result: Comparison) -> list[Verdict]:
    """The test cases of the JUnit file. If there are gates, these are the test cases, since
    only they decide the exit code. If not, there is a verdict for each tensor, one on what
    only BASE has, and one on what only NEW has."""
    if result.gates:
        return list(result.gates)
    checks = [_tensor_verdict(tensor, result.within) for tensor in result.layers]
    removed = result.only_in_base.lines
    added = result.only_in_new.lines
    added_held = not added or result.thresholds.ignore_added
    checks.append(Verdict("only in BASE", not removed, "; ".join(removed) or "nothing"))
    checks.append(Verdict("only in NEW", added_held, "; ".join(added) or "nothing"))
    return checks


def _tensor_verdict(tensor: ComparedTensor, is_within: bool) -> Verdict:
    """The verdict on a tensor: passed if it does not differ, or if the runs as a whole are
    within their limit.

    Args:
        is_within: whether no more channels differ than --max-diff-ratio allows. If so,
            every tensor passes, so that JUnit agrees with the exit code.
    """
    differing, total = tensor.count
    message = f"{differing:,} of {counted(total, 'channel')} differ"
    if tensor.reason is not None:
        message += f": {tensor.reason}"
    else:
        absolute = tensor.channels.absolute.max(initial=0)
        relative = tensor.channels.relative.max(initial=0)
        message += f"; largest difference {absolute:.3g} ({relative:.3g} relative)"
    has_passed = is_within or not tensor.differs
    return Verdict(f"{tensor.label} {tensor.key.stem}", has_passed, message)
