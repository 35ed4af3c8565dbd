"""Hostile inputs, one by one, through every command that takes them: nothing but an answer or one
`error:` line may come of it (see hostile_harness.py for what is watched)."""

from __future__ import annotations

from pathlib import Path

import hostile_bounds
import hostile_configs
import hostile_images
import hostile_pickles
import hostile_programs
import hostile_rundirs
import hostile_weights
import hostile_writing
import pytest
from hostile_harness import SHARED, Attack, Sandbox, attempt

KINDS = (
    *(hostile_pickles, hostile_bounds, hostile_programs, hostile_weights),
    *(hostile_rundirs, hostile_images, hostile_configs, hostile_writing),
)
CORPUS = [attack for kind in KINDS for attack in kind.all_attacks()]

QUICK = {
    "control: honest.pth goes through every command",
    "control: an honest run in every command",
    "control: an honest run is resumed",
    "control: an honest photo",
    "pt2: example inputs under the name data/sample_inputs/model.PT",
    "pt2: the size 9**9**9**9",
    "pt2: a name that sets a terminal's title",
    "pickle: os.system",
    "constructor: Linear(30000, 30000) from 365 bytes",
    "state: register_forward_hook is replaced by a class",
    "bounds: 40 weights expanded from 64 bytes to 80 GB",
    "bounds: a tuple doubled 60 times as a key",
    "shards: an index that is a FIFO",
    "rundir: manifest: a picture at @SECRET",
    "rundir: manifest: captures.0.grid.nrow is 0",
    "rundir: a.png/001_0/output.png is a link to a secret picture",
    "resumed rundir: an image's folder is a link",
    "image: PostScript under the name of a PNG",
    "archive: a tar with run.json",
    "toml: an unknown table",
    "writing: run into a project with a run.json of another program",
    "writing: .report.html.part links outside",
}
"""Those that run between edits; all others are slow."""


def _parameter(attack: Attack) -> object:
    marks = () if attack.name in QUICK else (pytest.mark.slow,)
    return pytest.param(attack, id=attack.name, marks=marks)


@pytest.mark.parametrize("attack", [_parameter(attack) for attack in CORPUS])
def test_a_hostile_input_does_no_harm(attack: Attack, tmp_path: Path) -> None:
    """It ends well or in one line, within its bounds, and touches nothing that is not its own."""
    assert attempt(SHARED, attack, Sandbox.make(tmp_path / "box")) == []


def test_the_corpus_is_large_and_its_names_are_distinct() -> None:
    """At least 200 inputs, each with a line of its own that says what it attempts."""
    names = [attack.name for attack in CORPUS]
    assert len(set(names)) == len(names) >= 200
    assert set(names) >= QUICK
