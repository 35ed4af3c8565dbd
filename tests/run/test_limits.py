"""What --dry-run says of the files and bytes of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import SCENES, Outcome
from runs import tree

Run = Callable[..., Outcome]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--tensors", "npy"]], ids=["pictures", "tensors"])
def test_the_estimate_is_what_is_written(
    more: list[str], featviz: Run, tiny_file: Path, tmp_path: Path
) -> None:
    """Files exactly; bytes within a factor of two, on the safe side. Nothing is written."""
    base = ["run", tiny_file, SCENES, "--layers", "Conv2d,ReLU,Linear", "--size", "96x64", *more]
    out = tmp_path / "out"
    told = json.loads(featviz(*base, "--dry-run", "--json", "--out", out).out)
    assert not out.exists()
    assert featviz(*base, "--out", out).code == 0
    written = {name: data for name, data in tree(out).items() if name != "run.json"}
    assert len(written) == told["all_files"]
    assert 1 <= told["estimated_bytes"] / sum(map(len, written.values())) < 2
