"""docs/featviz.ipynb runs as it stands, and shows what it says."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import featviz as fv

ROOT = Path(fv.__file__).parent.parent
NOTEBOOK = ROOT / "docs" / "featviz.ipynb"
nbformat: Any = pytest.importorskip(
    "nbformat", reason="needs the extra test-ecosystem: nbclient"
)


def _source(notebook: Any) -> str:
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")


def test_the_notebook_is_kept_without_outputs_and_uses_every_function() -> None:
    """What it shows depends on the machine."""
    notebook = nbformat.read(NOTEBOOK, 4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.outputs == [] and cell.execution_count is None for cell in cells)
    functions = [name for name in fv.__all__ if name != "__version__"]
    assert [
        name for name in functions if f"featviz.{name}(" not in _source(notebook)
    ] == []


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures and tables where it promises some, no cell fails, and no page is heavy."""
    nbclient: Any = pytest.importorskip(
        "nbclient", reason="needs the extra test-ecosystem"
    )
    pytest.importorskip("ipykernel", reason="needs the extra test-ecosystem")
    search_path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(search_path))
    notebook = nbformat.read(NOTEBOOK, 4)
    resources = {"metadata": {"path": str(NOTEBOOK.parent)}}
    nbclient.NotebookClient(notebook, timeout=300, resources=resources).execute()
    shown = {
        cell.source.splitlines()[-1]: "".join(
            output.get("data", {}).get("text/html", "") for output in cell.outputs
        )
        for cell in notebook.cells
        if cell.cell_type == "code"
    }
    pages = {line: html for line, html in shown.items() if html}
    assert all(
        len(html) < 2_000_000 and "cannot be read" not in html
        for html in pages.values()
    )
    assert len(re.findall("<img", pages["featviz.look(model, photo, maps=6)"])) == 1
    assert len(re.findall("<img", pages["result"])) == 7
    assert len(re.findall("<img", pages["featviz.kernels(model)"])) == 3
    assert len(re.findall("<img", pages["evidence"])) == 1
    assert "gradient × activation for class 3" in pages["evidence"]
    assert pages["featviz.layers(model, size=28)"].count("<tr>") == 13
    assert "first at 0 (Conv2d)" in pages["featviz.diff(before, after)"]
    text = str(
        [output for cell in notebook.cells for output in cell.get("outputs", ())]
    )
    assert "'error'" not in text
    assert "did you mean Conv2d?" in text
