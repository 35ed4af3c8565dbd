"""The site of these pages: `python -m sphinx -W docs OUT`."""

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


def setup(app: object) -> None:
    """Called by Sphinx."""
    for part in ("description", "options"):
        app.connect(f"sphinx-click-process-{part}", escape)
