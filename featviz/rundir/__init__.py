"""The names of the files that featviz writes into a run directory. The functions of this
package raise a StoreError for a file that cannot be read or written."""

import re

SCHEMA_VERSION = 2
"""The version of run.json and manifest.json."""
RUN_FILE, MANIFEST_FILE, STATS_FILE = "run.json", "manifest.json", "stats.npz"
INPUT_FILE = "input.png"
LOCK_FILE = ".featviz.lock"
"""The lock file in a folder that a process is writing into."""
SHARDS_LOCK = ".featviz.shards.lock"
"""The lock file that a shard holds while it begins or ends."""
SHARD_LOCKS = re.compile(r"\.featviz\.(?:\d+-of-(?P<count>\d+)|shards)\.lock")
"""The names of the lock files of shards: the first of four shards holds
`.featviz.1-of-4.lock` while it draws."""
AUDIT_FILE, DIFF_FILE = "audit.json", "diff.json"
APOZ_FILE = "apoz.png"
"""The chart of an audit."""
EXEMPLARS_FILE = "exemplars.json"
REPORT, REPORT_FILE, INDEX_FILE = "report", "report.html", "index.html"
REPORT_ZIP = "report.zip"
REPORT_RECORD = "report.json"
"""The record of a report in a folder, which lists its files."""
DIFF_GRIDS = "grids.js"
"""The script with the grids of the page of a comparison."""
REPORT_ASSETS = (
    "style.css",
    "icon.svg",
    "tiles.js",
    "floating.js",
    "channel.js",
    "report.js",
)
"""The files that every report has, but for that of a series."""
SERIES_ASSETS = ("style.css", "icon.svg", "tiles.js", "series.js")
"""The files that the report of a series has."""
