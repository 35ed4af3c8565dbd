"""The run directory: the names of the files that featviz writes."""

RUN_FILE, MANIFEST_FILE, STATS_FILE = "run.json", "manifest.json", "stats.npz"
INPUT_FILE, BASES_FILE = "input.png", "bases.npz"
LOCK_FILE = ".featviz.lock"
"""Is in a folder for as long as a process writes it."""
AUDIT_FILE, MODELS_FILE, DIFF_FILE = "audit.json", "models.json", "diff.json"
EXEMPLARS_FILE = "exemplars.json"
REPORT, REPORT_FILE, INDEX_FILE = "report", "report.html", "index.html"
REPORT_ZIP = "report.zip"
DIFF_GRIDS = "grids.js"
"""The numbers of the grids on the page of a comparison."""
REPORT_ASSETS = ("style.css", "icon.svg", "tiles.js", "floating.js", "channel.js", "report.js")
"""Files that every report of a run has, whatever it shows."""
SERIES_ASSETS = ("style.css", "icon.svg", "series.js")
"""Those of the report of a series."""
