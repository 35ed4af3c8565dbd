"""The run directory: the names of the files that featviz writes. In this folder, what
cannot be read or written is a StoreError that names it."""

import re

SCHEMA_VERSION = 2
"""The version of run.json and manifest.json."""
RUN_FILE, MANIFEST_FILE, STATS_FILE = "run.json", "manifest.json", "stats.npz"
INPUT_FILE = "input.png"
LOCK_FILE = ".featviz.lock"
"""Is in a folder for as long as a process writes it."""
SHARDS_LOCK = ".featviz.shards.lock"
"""Is there for the moment in which one of several shards begins or ends."""
SHARD_LOCKS = re.compile(r"\.featviz\.(?:\d+-of-(?P<count>\d+)|shards)\.lock")
"""Locks of shards: `.featviz.1-of-4.lock` is there as long as the first of four writes.
"""
AUDIT_FILE, DIFF_FILE = "audit.json", "diff.json"
APOZ_FILE = "apoz.png"
"""The chart of an audit."""
EXEMPLARS_FILE = "exemplars.json"
REPORT, REPORT_FILE, INDEX_FILE = "report", "report.html", "index.html"
REPORT_ZIP = "report.zip"
REPORT_RECORD = "report.json"
"""Lists the files of a report's folder."""
DIFF_GRIDS = "grids.js"
"""The numbers of the grids on the page of a comparison."""
REPORT_ASSETS = (
    "style.css",
    "icon.svg",
    "tiles.js",
    "floating.js",
    "channel.js",
    "report.js",
)
SERIES_ASSETS = ("style.css", "icon.svg", "tiles.js", "series.js")
"""Files that every report of a run has, whatever it shows, and those of the report of a
series."""
