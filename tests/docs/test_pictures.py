"""The pictures of the README and of docs/ are what scripts/make_pictures.py makes of
commands that the pages show."""

from __future__ import annotations

import importlib
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT
from documents import PAGES, blocks, commands, read
from pixels import pixels_of

PICTURES = ROOT / "docs" / "pictures"


with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / "scripts")
    make_pictures = importlib.import_module("make_pictures")


def test_pictures_are_small() -> None:
    """The first one has at most 300 KB, all together have at most 1.4 MB."""
    sizes = {path.stem: path.stat().st_size for path in PICTURES.iterdir()}
    assert sizes["cat"] <= 300_000
    assert sum(sizes.values()) <= 1_400_000


@pytest.mark.parametrize("name", make_pictures.TABLE)
def test_a_picture_stands_beside_its_commands(name: str) -> None:
    """It is committed, and some page shows it with the very commands that made it."""
    assert (PICTURES / f"{name}.webp").is_file()
    showing = [page for page in PAGES if f"pictures/{name}.webp" in read(page)]
    shown = [{command.line for command in commands(page)} for page in showing]
    made_by = make_pictures.TABLE[name].commands
    assert any(lines.issuperset(made_by) for lines in shown)


@pytest.mark.parametrize("name", make_pictures.FROM_PYPI)
def test_a_page_says_how_a_picture_from_packages_was_made(name: str) -> None:
    """It is committed, and a page has its network's code and its commands, which no test
    runs."""
    picture = make_pictures.FROM_PYPI[name]
    page = " ".join(read(picture.page).replace("\\\n", " ").split())
    assert (PICTURES / f"{name}.webp").is_file()
    assert any(picture.code in code for code in blocks(picture.page, "python"))
    assert all(line in page for line in picture.commands)


def test_no_picture_is_left_over() -> None:
    """Some page shows each picture, and those that this script does not make are of the
    report's page (scripts/make_report_pictures.py)."""
    names = {path.stem for path in PICTURES.iterdir()}
    shown = "".join(map(read, PAGES))
    for name in names:
        assert f"pictures/{name}.webp" in shown
        made = make_pictures.TABLE | make_pictures.FROM_PYPI
        assert name in made or name.startswith("report-")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first", "kernels", "gradient"])
def test_committed_pictures_are_what_the_script_makes(
    name: str, tmp_path: Path
) -> None:
    """They have the same size, and the same pixels but for what WebP and another
    machine's digits change."""
    made = np.asarray(make_pictures.make(name, tmp_path), int)
    committed = pixels_of(PICTURES / f"{name}.webp")
    assert committed.shape == made.shape
    assert np.abs(made - committed).mean() < 5
