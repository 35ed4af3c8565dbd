"""JUnit XML, as CI servers read it: a suite for each model, a test case for each gate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from featviz.records import Verdict


def document(verdicts: Mapping[str, Sequence[Verdict]]) -> bytes:
    """The report on the gates of each model, UTF-8; nothing of when and where."""
    root = ElementTree.Element("testsuites", name="featviz audit")
    for model, own in verdicts.items():
        failures = str(sum(not verdict.held for verdict in own))
        counts = {"tests": str(len(own)), "failures": failures, "errors": "0", "skipped": "0"}
        suite = ElementTree.SubElement(root, "testsuite", {"name": model, **counts})
        for verdict in own:
            _case(suite, model, verdict)
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, "utf-8", xml_declaration=True)) + b"\n"


def _case(suite: ElementTree.Element, model: str, verdict: Verdict) -> None:
    name = {"classname": f"featviz.audit.{model}", "name": verdict.gate}
    case = ElementTree.SubElement(suite, "testcase", name)
    if verdict.held:
        ElementTree.SubElement(case, "system-out").text = verdict.words
    else:
        ElementTree.SubElement(case, "failure", message=verdict.words).text = verdict.words
