"""Runs in parts: --shard, and processes of torchrun."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Outcome
from runs import SMALL, refused

Run = Callable[..., Outcome]


@pytest.mark.parametrize(
    "text", ["²/4", "1/²", "٣/4", "1/" + "9" * 5000, "0/4", "5/4", "1/0", "/", ""]
)
def test_odd_shards_are_usage_errors(
    text: str, featviz: Run, tiny_file: Path, photos: Path, tmp_path: Path
) -> None:
    """Digits of other kinds are no numbers, and neither are five thousand nines."""
    done = featviz("run", tiny_file, photos, "--shard", text, "--out", tmp_path / "out")
    refused(done, 2, "is no part of a whole", "I/N with I from 1 to N")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("rank", "size", "says"), [("0", "2", True), ("1", "2", False)])
def test_a_dry_run_under_torchrun_is_said_once(
    rank: str,
    size: str,
    says: bool,
    featviz: Run,
    tiny_file: Path,
    photos: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first process speaks for all."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    done = featviz("run", tiny_file, photos, "--dry-run", *SMALL)
    assert done.code == 0 and ("2 images: " in done.out) == says and bool(done.out) == says
