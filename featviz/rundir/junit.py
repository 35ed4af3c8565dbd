"""JUnit XML, as CI servers read it: a suite for each model, a test case for each gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from featviz.records import Verdict


def document(verdicts: Mapping[str, Sequence[Verdict]], command: str = "audit") -> bytes:
    """The report on the gates of each model, UTF-8; nothing of when and where."""
    root = ElementTree.Element("testsuites", name=f"featviz {command}")
    for model, rows in verdicts.items():
        failures = str(sum(not verdict.held for verdict in rows))
        counts = {"tests": str(len(rows)), "failures": failures, "errors": "0", "skipped": "0"}
        suite = ElementTree.SubElement(root, "testsuite", {"name": _legal(model), **counts})
        for verdict in rows:
            name = {"classname": _legal(f"featviz.{command}.{model}"), "name": _legal(verdict.gate)}
            case, words = ElementTree.SubElement(suite, "testcase", name), _legal(verdict.words)
            if verdict.held:
                ElementTree.SubElement(case, "system-out").text = words
            else:
                ElementTree.SubElement(case, "failure", message=words).text = words
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, "utf-8", xml_declaration=True)) + b"\n"


def _legal(text: str) -> str:
    """Without the characters that XML 1.0 cannot hold (file names may)."""
    return "".join(c if c.isprintable() or c in "\t\n\r" else "\ufffd" for c in text)
