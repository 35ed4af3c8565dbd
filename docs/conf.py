"""The site of these pages: `python -m sphinx -W docs OUT`."""

project = "featviz"
copyright = "the authors of featviz"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "featviz"
exclude_patterns = ["ci"]
myst_heading_anchors = 3
highlight_language = "none"  # of blocks that name no language, such as trees of files
