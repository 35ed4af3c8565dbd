"""docs/featviz.ipynb runs as it stands, and shows what it says."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import featviz as fv

ROOT = Path(fv.__file__).parent.parent
NOTEBOOK = ROOT / "docs" / "featviz.ipynb"
NEEDED = "needs the extra test-ecosystem"
nbformat: Any = pytest.importorskip("nbformat", reason=NEEDED)


def code_cells(notebook: Any) -> list[Any]:
    """The cells of a notebook that run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.medium
def test_the_notebook_is_kept_without_outputs() -> None:
    """It is valid, and holds no results: they depend on the machine."""
    notebook = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(notebook)
    for cell in code_cells(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None


@pytest.mark.parametrize("name", [n for n in fv.__all__ if n != "__version__"])
def test_the_notebook_uses_every_function(name: str) -> None:
    """Each function of the API is called in some cell."""
    cells = code_cells(nbformat.read(NOTEBOOK, 4))
    assert any(f"featviz.{name}(" in cell.source for cell in cells)


def execute(path: Path) -> Any:
    """The notebook after a kernel has run all its cells, where it stands."""
    nbclient: Any = pytest.importorskip("nbclient", reason=NEEDED)
    pytest.importorskip("ipykernel", reason=NEEDED)
    notebook = nbformat.read(path, 4)
    resources = {"metadata": {"path": str(path.parent)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    return notebook


def pages_of(cells: list[Any]) -> dict[str, str]:
    """The HTML that each cell shows, by the cell's last line."""
    pages = dict[str, str]()
    for cell in cells:
        last_line = cell.source.splitlines()[-1]
        shown = [output.get("data", {}) for output in cell.outputs]
        pages[last_line] = "".join(data.get("text/html", "") for data in shown)
    return pages


COUNTS = {
    ("featviz.look(model, photo, maps=6)", "<img"): 1,
    ("result", "<img"): 7,
    ("featviz.kernels(model)", "<img"): 3,
    ("evidence", "<img"): 1,
    ("evidence", "gradient × activation for class 3"): 2,
    ("featviz.layers(model, size=28)", "<tr>"): 13,
    ("featviz.diff(before, after)", "first at layer 0 (Conv2d)"): 1,
}
"""How often a text stands in what a cell shows, by the last line of the cell."""


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures and tables stand where it promises some, no cell fails, no page is heavy,
    and none lacks a file."""
    search_path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", search_path.rstrip(os.pathsep))

    cells = code_cells(execute(NOTEBOOK))

    pages = pages_of(cells)
    counts = {(line, text): pages[line].count(text) for line, text in COUNTS}
    assert counts == COUNTS
    for html in pages.values():
        assert len(html) < 2_000_000
        assert "cannot be read" not in html
    outputs = str([cell.outputs for cell in cells])
    assert "did you mean Conv2d?" in outputs
