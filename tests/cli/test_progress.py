"""The progress bar: on a terminal alone, and one step an image."""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

import pytest
from conftest import DIGITS, DIGITS_MODEL, Run
from rich.progress import Progress, TaskID

pytestmark = pytest.mark.medium


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Two digits and a broken file between them."""
    folder = tmp_path / "digits"
    folder.mkdir()
    for name, file in zip("ac", sorted(DIGITS.iterdir()), strict=False):
        shutil.copy(file, folder / f"{name}.png")
    (folder / "b.png").write_bytes(b"no picture")
    return folder


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """Each step of bars from now on: how many images it takes, and their total."""
    noted: list[tuple[float, float]] = []
    update = Progress.update

    def note(bar: Progress, task: TaskID, *, total: float, advance: float) -> None:
        noted.append((advance, total))
        update(bar, task, total=total, advance=advance)

    monkeypatch.setattr(Progress, "update", note)
    return noted


@pytest.mark.parametrize(
    ("command", "bars"),
    [
        (("run", DIGITS_MODEL, "digits", "--jobs", "1"), 1),
        (("run", DIGITS_MODEL, "digits", "--jobs", "2"), 1),
        (("audit", DIGITS_MODEL, "digits"), 1),
        (("exemplars", DIGITS_MODEL, "digits", "--layers", "Conv2d"), 1),
        (("diff", DIGITS_MODEL, DIGITS_MODEL, "digits"), 2),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_a_bar_takes_a_step_an_image(
    command: tuple[object, ...],
    bars: int,
    featviz: Run,
    images: Path,
    steps: list[tuple[float, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of those that fail, too, and of each model that runs; it is seen at its end."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert featviz(*command).code == 3
    assert steps == [(1, 3)] * 3 * bars
    assert terminal.getvalue().count("100%") >= bars


def test_a_log_has_no_bar(
    featviz: Run, images: Path, steps: list[tuple[float, float]]
) -> None:
    """A pipe gets lines alone."""
    done = featviz("run", DIGITS_MODEL, images)
    assert done.code == 3
    assert not steps
    assert "%" not in done.err


def test_verify_takes_a_step_an_image(
    featviz: Run,
    images: Path,
    steps: list[tuple[float, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the complete ones, which are those that it reads."""
    featviz("run", DIGITS_MODEL, images)
    monkeypatch.setattr(sys, "stderr", Terminal())
    featviz("verify", "featviz-out")
    assert steps == [(1, 2)] * 2
