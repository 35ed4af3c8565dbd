"""The tests that a run of pytest skipped, one a line: python scripts/skipped.py
RESULTS.xml

The file is one of `pytest --junitxml RESULTS.xml -o junit_family=xunit1`; `pytest
@FILE` runs what is printed. A file that was skipped whole stands there by its path."""

from __future__ import annotations

import sys
from xml.etree import ElementTree

for case in ElementTree.parse(sys.argv[1]).iter("testcase"):
    if case.find("skipped") is not None:
        file, name, place = (case.get(key, "") for key in ("file", "name", "classname"))
        classes = place.removeprefix(file.removesuffix(".py").replace("/", ".")).split(
            "."
        )[1:]
        print(file, *classes, *[name] * bool(place), sep="::")
