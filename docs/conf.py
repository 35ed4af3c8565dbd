"""The site of these pages: `python -m sphinx -W docs OUT`."""

import contextlib
from pathlib import Path
from typing import Any

from featviz import cli

project = "featviz"
copyright = "the authors of featviz"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
]
html_theme = "furo"
html_title = "featviz"
# a line above each page; pages on GitHub have no report to link
TRY = "try/report/image-000.html#encoder.layers.encoder_layer_3@0.15,0.5"
html_theme_options = {
    "announcement": f'<a href="{TRY}">Try a report</a> of a vision transformer'
}
exclude_patterns = ["ci"]
myst_heading_anchors = 3
highlight_language = "none"  # of blocks that name no language, such as trees of files
smartquotes = False  # --help has two hyphens
autodoc_typehints = "description"
autodoc_member_order = "bysource"


def escape(app: object, context: object, lines: list[str]) -> None:
    """Words of --help are plain text: stars and bars mean nothing."""
    words = (line.replace("*", r"\*").replace("|", r"\|") for line in lines)
    lines[:] = [
        line if line.lstrip().startswith("..") else new
        for line, new in zip(lines, words, strict=True)
    ]


def make_report(app: Any, error: Exception | None) -> None:
    """Make the report that each page of the site offers for a try."""
    if error is not None or app.builder.format != "html":
        return
    run = Path(app.outdir) / "try"
    with contextlib.chdir(Path(__file__).parent.parent):
        for command in (
            ["run", "--config", "configs/pairs.toml", "--out", str(run), "--quiet"],
            ["report", str(run), "--quiet"],
        ):
            code = cli.guarded(command)
            if code != 0:
                raise RuntimeError(f"featviz {' '.join(command)}: exit code {code}")


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("build-finished", make_report)
    for part in ("description", "options"):
        app.connect(f"sphinx-click-process-{part}", escape)
