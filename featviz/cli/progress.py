"""What `run` says while it goes on, and at its end."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from featviz.cli import echo
from featviz.cli import options as opts
from featviz.records import Guess, ImageResult, Outcome, RunResult
from featviz.text import listed

if TYPE_CHECKING:
    from featviz.pipeline import Progress

log = logging.getLogger(__name__)

_NAMED = 3
"""Layers without a picture that are named on stderr; the manifests have them all."""


@dataclass
class Unpictured:
    """Layers that gave no picture, over all images."""

    never_ran: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    """By layer: the reason."""

    def add(self, result: ImageResult) -> None:
        """Note those of one image."""
        self.never_ran |= dict.fromkeys(result.never_ran, "")
        self.skipped |= {skip.layer or skip.type: skip.reason for skip in result.skipped}


@contextmanager
def shown_progress(as_json: bool, unpictured: Unpictured) -> Iterator[Progress]:
    """JSON lines on stdout if asked for; failures on stderr; a bar only on a terminal."""
    with opts.bar() as advance:

        def report(result: ImageResult, total: int) -> None:
            advance(total)
            unpictured.add(result)
            _say(result)
            if as_json:
                echo.document(_line(result), indent=None)

        yield report


def _line(result: ImageResult) -> dict[str, Any]:
    if result.error is not None:
        return {"image": result.image, "error": result.error}
    found = result.outcome
    return {
        "image": result.image,
        "folder": result.folder,
        "files": [capture.file for capture in result.captures],
        "skipped": len(result.skipped),
        "never_ran": list(result.never_ran),
        "prediction": [asdict(guess) for guess in found.prediction],
        **({"effect": found.effect} if found.intervened else {}),
        **({"kept": True} if result.kept else {}),
    }


def _say(result: ImageResult) -> None:
    """What went wrong; the prediction, and what interventions made of it."""
    if result.error is not None:
        echo.error(f"{result.image}: {result.error}", result.hint)
    found = result.outcome
    if found.before:
        log.info("%s before: %s", result.image, _words(found.before))
    if found.prediction and not result.kept:
        after = " after" if found.intervened else ""
        log.info("%s%s: %s", result.image, after, _words(found.prediction))
    if found.intervened:
        log.info("%s: %s", result.image, _change(found))


def _change(found: Outcome) -> str:
    if found.largest_change is None:
        return "the shape of the output changed"
    words = f"the output changed by at most {found.largest_change:.4g}"
    if found.nonfinite:
        words += f", and {found.nonfinite} of its values became NaN or infinite, or ceased to be"
    return words


def _words(guesses: Sequence[Guess]) -> str:
    return ", ".join(guess.words for guess in guesses)


def summarise(result: RunResult, unpictured: Unpictured) -> None:
    """Say on stderr what gave no picture, what is missing, and what was written."""
    done = [image for image in result.images if image.error is None]
    _warn("never ran", unpictured.never_ran)
    _warn("skipped", unpictured.skipped)
    if result.missing:
        why = "interrupted" if result.interrupted else "stopped"
        log.warning(
            "%s: %d images are missing, %d are complete; --resume goes on",
            why,
            len(result.missing),
            len(done),
        )
    if done:
        kept = sum(image.kept for image in done)
        before = f" ({kept} were complete before)" if kept else ""
        log.info("%d pictures of %d images in %s%s", result.pictures, len(done), result.out, before)


def _warn(what: str, layers: Mapping[str, str]) -> None:
    """Name the first few layers that gave no picture, and how many there are."""
    if not layers:
        return
    named = [f"{name} ({reason})" if reason else name for name, reason in layers.items()]
    log.warning("%s: %s", what, listed(named, _NAMED))
