"""The site of these pages: `python -m sphinx -W docs OUT`."""

project = "featviz"
copyright = "the authors of featviz"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "featviz"
exclude_patterns = ["ci"]
myst_heading_anchors = 3
# A console's lexer reads sh; what a page shows as sh is run by tests/docs.
highlight_language = "none"
