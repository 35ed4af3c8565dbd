"""The harness of hostile inputs: each planted fault is found, and honest work is let
through."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from hostile_harness import Attack, Sandbox, attempt
from hostile_pickles import ARMED, surroundings
from planted_faults import FAULTS


def _innocent(box: Sandbox) -> None:
    (box.given / "innocent.py").write_text("x = 1\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAULTS if name != "well"])
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    """The harness names the fault, and what the fault would have done is not done."""
    _, place, words = FAULTS[name]
    box = Sandbox(tmp_path / "box")
    attack = Attack(name, _innocent, [["plant", name, *place.split()]])
    faults = attempt(attack, box, cpu=1)
    assert any(words in fault for fault in faults), faults
    assert not box.marker.exists()
    assert box.bystander.read_text() == "mine"


@pytest.mark.slow
def test_honest_work_is_let_through(tmp_path: Path) -> None:
    """A call that writes where it may, and ends well, has no fault."""
    attack = Attack("well", _innocent, ["plant well", "--version"], "good")
    assert attempt(attack, Sandbox(tmp_path / "box")) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expect", "words", "fault"),
    [
        ("plant well", "refused", "", "TAKEN: exit code 0"),
        ("layers nothing.pth", "good", "", "honest input refused: "),
        ("layers nothing.pth", "refused", "is a FIFO", "'is a FIFO' is not said"),
    ],
)
def test_what_was_expected_must_come(
    line: str, expect: str, words: str, fault: str, tmp_path: Path
) -> None:
    """An input that is taken though it should not be is a fault, and so are the
    reverse, another exit code and other words."""
    attack = Attack("", _innocent, [line], expect, words)
    assert any(fault in found for found in attempt(attack, Sandbox(tmp_path / "box")))


@pytest.mark.parametrize("name", ARMED)
def test_hostile_files_are_armed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loaded without care they leave the marker: the corpus can fail."""
    box = Sandbox(tmp_path / "box")
    surroundings(box, "model.pth")
    monkeypatch.syspath_prepend(box.given)
    (box.given / "model.pth").write_bytes(ARMED[name](box))
    with contextlib.suppress(Exception):
        torch.load(box.given / "model.pth", weights_only=False)
    assert box.marker.exists()
