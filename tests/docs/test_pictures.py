"""The pictures of the README and of docs/ are what scripts/make_pictures.py makes of
commands that the pages show."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from conftest import ROOT
from documents import PAGES, commands, read
from PIL import Image

PICTURES = ROOT / "docs" / "pictures"


def make_script() -> ModuleType:
    path = ROOT / "scripts" / "make_pictures.py"
    spec = importlib.util.spec_from_file_location("make_pictures", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["make_pictures"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = make_script()


def test_pictures_are_small() -> None:
    """The first one at most 300 KB, all together at most 1.4 MB."""
    sizes = {path.stem: path.stat().st_size for path in PICTURES.iterdir()}
    assert sizes["first"] <= 300_000
    assert sum(sizes.values()) <= 1_400_000


@pytest.mark.parametrize("name", SCRIPT.TABLE)
def test_a_picture_stands_beside_its_commands(name: str) -> None:
    """It is committed, and some page shows it with the very commands that made it."""
    assert (PICTURES / f"{name}.webp").is_file()
    wanted = set(SCRIPT.TABLE[name].commands)
    showing = [page for page in PAGES if f"pictures/{name}.webp" in read(page)]
    assert any(wanted <= {line for line, _ in commands(page)} for page in showing)


def test_no_picture_is_left_over() -> None:
    """Some page shows each picture, and those that this script does not make are of the
    report's page (scripts/make_report_pictures.py)."""
    names = {path.stem for path in PICTURES.iterdir()}
    shown = "".join(map(read, PAGES))
    assert all(f"pictures/{name}.webp" in shown for name in names)
    assert all(name.startswith("report-") for name in names - set(SCRIPT.TABLE))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first", "kernels", "gradient"])
def test_committed_pictures_are_what_the_script_makes(
    name: str, tmp_path: Path
) -> None:
    """The same size, and the same pixels but for what WebP and another machine's digits
    change."""
    made = SCRIPT.make(name, tmp_path)
    with Image.open(PICTURES / f"{name}.webp") as opened:
        committed = opened.convert("RGB")
    assert committed.size == made.size
    apart = np.abs(np.asarray(made, int) - np.asarray(committed, int))
    assert apart.mean() < 5
