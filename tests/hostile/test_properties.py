"""Honest files changed a little, by Hypothesis: success or one `error:` line, and nothing else.

The examples are the same on every run (`derandomize`); `--hypothesis-seed` has no effect on them.
"""

from __future__ import annotations

import functools
import io
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import hostile_images
import hostile_models
import hostile_mutations as mutations
import hostile_programs
import hostile_rundirs
import pytest
import torch
from hostile_harness import SHARED, Attack, Sandbox, run
from hostile_rundirs import READING
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from torch import nn

ANEW = 100
"""Examples after which the child that runs them makes room for a new one."""

_count = itertools.count()


@dataclass(frozen=True)
class Kind:
    """A kind of file, how it is changed, and what reads it."""

    file: str
    """Below `given/`."""
    honest: Callable[[], bytes]
    changes: st.SearchStrategy[mutations.Mutation]
    commands: tuple[str, ...]
    examples: int
    """In the slow suite."""


def _net() -> nn.Module:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), norm, nn.ReLU()).eval()


def _saved(content: object, zipped: bool = True) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def _of_run(name: str) -> Callable[[], bytes]:
    return lambda: hostile_rundirs.honest()[f"run/{name}"]


TOML = b"""layers = ["Conv2d", "ReLU"]
nrow = 2
[run]
padding = 1
pad-value = 0.5
normalize = "percentile:1,99"
size = "29x45"
"""
SMALL = "--size 16x16 --layers Conv2d --out out"
LAYERS = ("layers {given}/%s", "identify {given}/%s")
READERS = tuple(line.replace("{n}", "") for line in READING)


def _weights() -> bytes:
    return save({"0.weight": torch.zeros(4, 3, 3, 3), "0.bias": torch.zeros(4)})


def _reading(file: str) -> tuple[str, ...]:
    weights = f"layers {{given}}/net.py:make --weights {{given}}/{file}"
    return (*(line % file for line in LAYERS), weights)


KINDS = {
    "pt2": Kind(
        "x.pt2", hostile_programs.program, mutations.any_zip, ("layers {given}/x.pt2",), 400
    ),
    "whole pickle": Kind(
        "x.pth", lambda: _saved(_net()), mutations.any_zip, ("layers {given}/x.pth",), 350
    ),
    "legacy pickle": Kind(
        "y.pth",
        lambda: _saved(_net().state_dict(), zipped=False),
        mutations.any_pickle,
        _reading("y.pth"),
        150,
    ),
    "state dict": Kind(
        "z.pth", lambda: _saved(_net().state_dict()), mutations.any_zip, _reading("z.pth"), 200
    ),
    "safetensors": Kind(
        "x.safetensors", _weights, mutations.any_header, _reading("x.safetensors"), 200
    ),
    "manifest": Kind(
        "run/a.png/manifest.json", _of_run("a.png/manifest.json"), mutations.any_json, READERS, 300
    ),
    "run.json": Kind("run/run.json", _of_run("run.json"), mutations.any_json, READERS, 150),
    "stats.npz": Kind(
        "run/a.png/stats.npz", _of_run("a.png/stats.npz"), mutations.any_zip, READERS, 150
    ),
    "grid": Kind(
        "run/a.png/001_0/output.png",
        _of_run("a.png/001_0/output.png"),
        mutations.bytes_changed(),
        READERS,
        50,
    ),
    "tar": Kind(
        "x.tar",
        lambda: hostile_images.tarred(("a.png", hostile_images.png()), ("b/c.png", b"x")),
        mutations.bytes_changed(),
        (f"run {{given}}/net.pth {{given}}/x.tar {SMALL}",),
        100,
    ),
    "zip": Kind(
        "x.zip",
        lambda: hostile_images.zipped(("a.png", hostile_images.png()), ("b/c.png", b"x")),
        mutations.any_zip,
        (f"run {{given}}/net.pth {{given}}/x.zip {SMALL}",),
        100,
    ),
    "PNG": Kind(
        "x.png",
        hostile_images.png,
        mutations.bytes_changed(),
        (f"run {{given}}/net.pth {{given}}/x.png {SMALL}",),
        75,
    ),
    "JPEG": Kind(
        "x.jpg",
        lambda: hostile_images.encoded("JPEG"),
        mutations.bytes_changed(),
        (f"run {{given}}/net.pth {{given}}/x.jpg {SMALL}",),
        75,
    ),
    "TOML": Kind(
        "x.toml",
        lambda: TOML,
        mutations.bytes_changed(),
        ("run --config {given}/x.toml {given}/net.pth {given}/photos --out out --dry-run",),
        100,
    ),
}
QUICK_EXAMPLES = 8
"""Of each kind, between edits."""


@pytest.fixture(scope="module")
def box() -> Iterator[Sandbox]:
    with tempfile.TemporaryDirectory() as folder:
        box = Sandbox.make(Path(folder) / "box")
        hostile_rundirs.place(box)
        hostile_models.surroundings(box, "x.pth")
        yield box


@functools.cache
def _honest(kind: str) -> bytes:
    return KINDS[kind].honest()


def _holds(name: str, box: Sandbox, examples: int, failed: Path) -> None:
    """Run so many examples of a kind; a file that fails is kept in the folder `failed`."""
    kind = KINDS[name]
    plan = Attack(name, lambda box: None, [], own_code=("given/net.py",))

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # to shrink what hangs takes hours
        suppress_health_check=list(HealthCheck),
    )
    @given(change=kind.changes, line=st.sampled_from(kind.commands))
    def holds(change: mutations.Mutation, line: str) -> None:
        path = box.given / kind.file
        path.write_bytes(change(_honest(name)))
        words = [box.filled(word) for word in line.split()]
        try:
            fresh = next(_count) % ANEW == 0
            faults = run(SHARED, box, words, plan, fresh).faults
            if faults:
                shutil.copy(path, failed / path.name)
            assert faults == [], f"{line}: see {failed / path.name}"
        finally:
            shutil.rmtree(box.work)
            box.work.mkdir()
            path.write_bytes(_honest(name))

    holds()


@pytest.mark.parametrize("kind", KINDS)
def test_a_few_changes_end_well_or_in_one_line(kind: str, box: Sandbox, tmp_path: Path) -> None:
    """A handful of changed files of each kind: success or one line."""
    _holds(kind, box, QUICK_EXAMPLES, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_any_change_ends_well_or_in_one_line(kind: str, box: Sandbox, tmp_path: Path) -> None:
    """Hundreds of changed files of each kind: success or one line."""
    _holds(kind, box, KINDS[kind].examples, tmp_path)


def test_there_are_two_thousand_examples() -> None:
    """The slow suite tries at least 2,000 changed files."""
    assert sum(kind.examples for kind in KINDS.values()) >= 2_000
