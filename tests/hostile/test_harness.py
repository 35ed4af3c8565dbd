"""The harness of hostile inputs: each planted fault is found, and honest work is let
through."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from hostile_harness import Attack, Sandbox, attempt
from hostile_pickles import ARMED, surroundings
from planted_faults import FAULTS, Fault


def _innocent(box: Sandbox) -> None:
    (box.given / "innocent.py").write_text("x = 1\n")


@pytest.fixture
def box(tmp_path: Path) -> Sandbox:
    return Sandbox(tmp_path / "box")


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found(fault: Fault, box: Sandbox) -> None:
    """The harness names the fault, and what the fault would have done is not done."""
    attack = Attack("a fault", _innocent, [["plant", *fault.arguments]])
    faults = attempt(attack, box, cpu=1)
    assert any(fault.message in message for message in faults), faults
    assert not box.marker.exists()
    assert box.bystander.read_text() == "mine"


@pytest.mark.slow
def test_honest_work_is_let_through(box: Sandbox) -> None:
    """A call that writes where it may, and ends well, has no fault."""
    attack = Attack("well", _innocent, ["plant well", "--version"], "good")
    assert attempt(attack, box) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expect", "message", "fault"),
    [
        ("plant well", "refused", "", "TAKEN: exit code 0"),
        ("layers nothing.pth", "good", "", "honest input refused: "),
        ("layers nothing.pth", "refused", "is a FIFO", "'is a FIFO' is not said"),
    ],
)
def test_what_was_expected_must_come(
    line: str,
    expect: str,
    message: str,
    fault: str,
    box: Sandbox,
) -> None:
    """An input that is taken though it should not be is a fault, and so are the
    reverse, another exit code and another message."""
    faults = attempt(Attack("", _innocent, [line], expect, message), box)
    assert any(fault in text for text in faults)


@pytest.mark.parametrize("data", ARMED.values(), ids=ARMED)
def test_hostile_files_are_armed(
    data: bytes,
    box: Sandbox,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Loaded without care they leave the marker: the corpus can fail."""
    surroundings(box, "model.pth")
    monkeypatch.syspath_prepend(box.given)
    monkeypatch.chdir(box.work)
    (box.given / "model.pth").write_bytes(data)
    with contextlib.suppress(Exception):
        torch.load(box.given / "model.pth", weights_only=False)
    assert box.marker.exists()
