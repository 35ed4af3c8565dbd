"""The site of these pages: `python -m sphinx -W docs OUT`."""

import contextlib
import re
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
default_role = "literal"  # `featviz run` in --help
smartquotes = False  # --help has two hyphens
autodoc_typehints = "description"
autodoc_member_order = "bysource"


def escape(app: object, context: object, lines: list[str]) -> None:
    """Words of --help are plain text: stars and bars mean nothing. Lines that stay lines
    there (examples, tables), which sphinx-click marks with bars, are shown as code."""
    escaped: list[str] = []
    in_code = False
    for line in lines:
        kept = LINE_THAT_STAYS.fullmatch(line)
        if kept is None:
            in_code = False
            escaped.append(escape_words(line))
            continue
        if not in_code:
            escaped.extend([f"{kept['indent']}::", ""])
            in_code = True
        escaped.append(f"{kept['indent']}    {kept['text']}")
    lines[:] = escaped


LINE_THAT_STAYS = re.compile(r"(?P<indent> *)\| (?P<text>.*)")
"""As sphinx-click writes a line of a paragraph behind a backspace."""


def escape_words(line: str) -> str:
    """A line in which stars and bars mean nothing; a directive is left as it is."""
    if line.lstrip().startswith(".."):
        return line
    return line.replace("*", r"\*").replace("|", r"\|")


PAGES = """
```{toctree}
:glob:
:hidden:
:maxdepth: 1

tutorial
cookbook
layers
drawing
figures
models
gradients
audit
report
places
exemplars
diff
parity
comparison
pipelines
operations
python
training
run-directory
*
```
"""
"""The list at the side of the site; index.md has a list of links."""

COMMANDS = """
## All options of all commands

```{eval-rst}
.. click:: featviz.cli:group
   :prog: featviz
   :nested: full
```
"""
FUNCTIONS = """
## All arguments of all functions

```{eval-rst}
.. automodule:: featviz.api
   :members:
   :imported-members:

.. automodule:: featviz.errors
   :members:
```
"""
GENERATED = {"index": PAGES, "commands": COMMANDS, "api": FUNCTIONS}
"""What Sphinx makes at the end of pages. Where the repository is read, it would be shown
as these bare lines."""


def add_generated(app: object, page: str, source: list[str]) -> None:
    """Give a page what Sphinx makes at its end."""
    source[0] += GENERATED.get(page, "")


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
    app.connect("source-read", add_generated)
    app.connect("build-finished", make_report)
    for part in ("description", "options"):
        app.connect(f"sphinx-click-process-{part}", escape)
