"""The harness of hostile inputs: each planted fault is found, and honest work is let through."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import hostile_harness as harness
import pytest
from hostile_harness import SHARED, Attack, Sandbox

PLANTED: dict[str, str | tuple[str, ...]] = {
    "system {root}/featviz_hostile": "VIOLATION os.system",
    "swallowed {root}/featviz_hostile": "VIOLATION subprocess.Popen",
    "connects": "VIOLATION socket",
    "forks": "VIOLATION os.fork",
    "writes {root}/bystander/new": "VIOLATION open: outside the destination",
    "writes_below {root}/bystander/new": "VIOLATION open: outside the destination",
    "writes_past {root}/bystander/new": "MADE bystander/new",
    "removes {root}/bystander/notes.txt": "VIOLATION os.remove: outside the destination",
    "links {root}/secret/id_secret": "LINK work/link.png was made",
    "evaluates": "VIOLATION compile: foreign source",
    "imports {given}": "VIOLATION open: foreign code",
    "loops": ("TIME", "HANG"),  # whichever comes first on a busy machine
    "waits": "HANG",
    "swells": "TRACEBACK MemoryError",
    "crashes": "SIGNAL 6",
    "raises": "TRACEBACK KeyError",
    "tells {root}/secret/id_secret": "LEAK the secret is on stdout",
    "copies {root}/secret/id_secret": "LEAK the secret is in work/copy.bin",
    "copies {root}/secret/id_secret.png": "LEAK secret pixels are in work/copy.bin",
    "encodes {root}/secret/id_secret": "LEAK the secret is in work/page.html",
    "encodes {root}/secret/id_secret.png": "LEAK the secret is in work/page.html",
    "crops {root}/secret/id_secret.png": "LEAK secret pixels are in work/piece.png",
    "shows_title": "TERMINAL '\\x1b' on stdout",
    "marks_up": "LEAK MARKUP of the input stands raw in work/page.html",
    "says_nothing": "0 error lines",
}
"""What is planted, and the words by which it must be found."""


def _innocent(box: Sandbox) -> None:
    (box.given / "innocent.py").write_text("x = 1\n")


@pytest.mark.parametrize(
    "line",
    [pytest.param(line, marks=pytest.mark.slow if line == "loops" else ()) for line in PLANTED],
)
def test_a_planted_fault_is_found(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The harness names the fault, and what the fault would have done is not done."""
    monkeypatch.setattr(harness, "SECONDS", 1 if line == "waits" else 20)
    monkeypatch.setattr(harness, "CPU_SECONDS", 1)
    box = Sandbox.make(tmp_path / "box")
    attack = Attack(line, _innocent, [f"call:hostile_api:{line}"])
    (found,) = harness.attempt(SHARED, attack, box)
    words = PLANTED[line]
    assert any(word in found for word in ([words] if isinstance(words, str) else words))
    assert not box.marker.exists() and box.bystander.read_text() == "mine"


def test_honest_work_is_let_through(tmp_path: Path) -> None:
    """A call that writes where it may, and ends well, has no fault."""
    attack = Attack("well", _innocent, ["call:hostile_api:well", "--version"], "good")
    assert harness.attempt(SHARED, attack, Sandbox.make(tmp_path / "box")) == []


def test_what_is_to_be_refused_must_be(tmp_path: Path) -> None:
    """An input that is taken though it should not be is a fault, and so is the reverse."""
    taken = Attack("well", _innocent, ["call:hostile_api:well"], "refused")
    (found,) = harness.attempt(SHARED, taken, Sandbox.make(tmp_path / "a"))
    assert "TAKEN: exit code 0" in found
    refused = replace(taken, commands=["layers nothing.pth"], expect="good")
    (found,) = harness.attempt(SHARED, refused, Sandbox.make(tmp_path / "b"))
    assert "honest input refused: hint:" in found or "honest input refused: error:" in found
