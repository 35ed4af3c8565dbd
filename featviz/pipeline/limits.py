"""How much a run may write: bytes and files, before it begins and while it runs."""

from __future__ import annotations

from featviz.errors import StoreError, UsageError
from featviz.records import Limits, Written


def check_plan(limits: Limits, planned: Written) -> None:
    """Stop before the work begins.

    Raises:
        UsageError: the run would write more than it may.
    """
    for option, most, count, unit in _pairs(limits, planned):
        if most is not None and count > most:
            raise UsageError(
                f"the run would write about {_words(count, unit)}, and {option} is "
                f"{_words(most, unit)}",
                "--max-maps, --scale 1, fewer --layers or images; --dry-run shows what takes how "
                "much",
            )


def check_written(limits: Limits, written: Written, image: str) -> None:
    """Stop while it runs.

    Raises:
        StoreError: with this image, the run has written more than it may.
    """
    for option, most, count, unit in _pairs(limits, written):
        if most is not None and count > most:
            raise StoreError(
                f"{image} would take the run over {option} {_words(most, unit)}",
                "what is complete stays complete; --resume with a larger limit goes on",
            )


def _pairs(limits: Limits, counted: Written) -> list[tuple[str, int | None, int, str]]:
    return [
        ("--max-output-size", limits.bytes, counted.bytes, "B"),
        ("--max-files", limits.files, counted.files, "files"),
    ]


def _words(count: int, unit: str) -> str:
    if unit != "B":
        return f"{count} {unit}"
    scale = next((s for s in (10**9, 10**6, 10**3) if count >= s), 1)
    return f"{count / scale:.3g} { {10**9: 'GB', 10**6: 'MB', 10**3: 'kB', 1: 'B'}[scale] }"
