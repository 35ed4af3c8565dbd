"""Hostile inputs, one by one, through every command that takes them: nothing but an
answer or one `error:` line may come of it (see hostile_harness.py for what is
watched)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import broken_checkpoints
import hostile_configs
import hostile_images
import hostile_onnx
import hostile_pickles
import hostile_rundirs
import hostile_writing
import pytest
from conftest import Run
from hostile_harness import Attack, Sandbox, attempt

# a process that has used every command takes its time to begin
pytestmark = pytest.mark.slow

KINDS = (
    hostile_pickles,
    broken_checkpoints,
    hostile_rundirs,
    hostile_images,
    hostile_onnx,
    hostile_configs,
    hostile_writing,
)
CORPUS = [attack for kind in KINDS for attack in kind.all_attacks()]


@pytest.mark.parametrize("attack", CORPUS, ids=[attack.name for attack in CORPUS])
def test_a_hostile_input_does_no_harm(attack: Attack, tmp_path: Path) -> None:
    """It ends well or in one line, within its bounds, and touches nothing that is not
    its own."""
    assert attempt(attack, Sandbox(tmp_path / "box")) == []


def test_a_link_that_takes_a_pictures_place_is_not_merged(
    featviz: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the reading and the linking: what was open is what is merged."""
    box = Sandbox(tmp_path / "box")
    hostile_rundirs.place(box)
    path = box.given / "run" / hostile_rundirs.PICTURE
    real = os.link
    before = path.read_bytes()

    def late(source: Path, target: Path, **options: Any) -> None:
        if Path(source) == path:
            path.unlink()
            path.symlink_to(box.secret.with_suffix(".png"))
        real(source, target, **options)

    monkeypatch.setattr(os, "link", late)
    assert featviz("merge", box.given / "run", "--out", box.work / "merged").code == 0
    merged = box.work / "merged" / hostile_rundirs.PICTURE
    assert not merged.is_symlink()
    assert merged.read_bytes() == before
