"""Gates, the baseline and the JUnit report: what breaks, with which figure and exit
code."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from conftest import Run

from featviz.audit import findings
from featviz.audit.gates import Evidence, correlated, parse_gate
from featviz.errors import UsageError
from featviz.options.commands import Thresholds
from featviz.records import Verdict
from featviz.rundir.studies import junit

from .audited import COLOURS, PLANTED, read_audit


def layer(
    label: str, channels: int, type: str = "ReLU", **findings: list[int]
) -> dict[str, Any]:
    """A row of audit.json."""
    return {
        "layer": label.removesuffix(".call1"),
        "label": label,
        "type": type,
        "channels": channels,
        "findings": findings,
    }


LAYERS = [
    layer("layer1.relu", 20, dead=[3], constant=[], nonfinite=[]),
    layer("layer1.relu.call1", 20, dead=[0, 1], constant=[5], nonfinite=[]),
    layer("layer3/fn:relu", 60, "fn:relu", dead=[], constant=[1, 2, 3], nonfinite=[]),
    layer("layer4.act", 100, "GELU", constant=[], nonfinite=[7]),
]


def test_the_total_of_apoz_is_that_of_all_channels() -> None:
    """A layer counts by its channels; one without APoZ does not."""
    shares = zip(LAYERS, (0.5, 0.25, None, 0.125), strict=True)
    total = findings.total_row([{**row, "apoz": share} for row, share in shares])
    assert total["apoz"] == pytest.approx((20 * 0.5 + 20 * 0.25 + 100 * 0.125) / 140)


def test_a_total_of_layers_without_apoz_has_none() -> None:
    """Not 0 %, which would say that each value is above zero."""
    assert findings.total_row([{**row, "apoz": None} for row in LAYERS])["apoz"] is None


@pytest.mark.parametrize(
    ("text", "held", "message"),
    [
        # layer4.act is not judged for it
        ("dead>3", True, "3 of 100 channels dead (3.00 %)"),
        ("dead>2", False, "3 of 100 channels dead (3.00 %)"),
        ("dead>=3%", False, "3 of 100 channels dead (3.00 %)"),
        ("dead>2.9%", False, "3 of 100 channels dead (3.00 %)"),
        ("dead>=100%", True, "3 of 100 channels dead (3.00 %)"),
        (" constant > 2 % ", True, "4 of 200 channels constant (2.00 %)"),
        ("nonfinite>0", False, "1 of 200 channels nonfinite (0.50 %)"),
        ("layer3*:constant>2", False, "3 of 60 channels constant (5.00 %)"),
        ("layer1.relu:dead>2", False, "3 of 40 channels dead (7.50 %)"),
        ("layer1.relu.call1:dead>1", False, "2 of 20 channels dead (10.00 %)"),
        ("layer3/fn:relu:dead>0", True, "0 of 60 channels dead (0.00 %)"),
        ("GELU:nonfinite>0", False, "1 of 100 channels nonfinite (1.00 %)"),
        (
            "any:dead>2",
            True,
            "at most 2 of 20 channels dead (10.00 %) in layer1.relu.call1",
        ),
        ("any:dead>=10%", False, "layer1.relu.call1: 2 of 20 channels dead (10.00 %)"),
        (
            "any:layer3*:dead>0",
            True,
            "at most 0 of 60 channels dead (0.00 %) in layer3/fn:relu",
        ),
    ],
)
def test_gates_count_what_they_say(text: str, held: bool, message: str) -> None:
    """A percentage is a share of the channels that are judged, a plain number a count."""
    verdict = findings.check_gate(parse_gate(text), LAYERS)
    assert verdict == Verdict(text.strip(), held, message)


@pytest.mark.parametrize(("values", "is_judged"), [(9, False), (10, True)])
def test_ten_values_tell_whether_channels_correlate(
    values: int, is_judged: bool
) -> None:
    """Of fewer any two look alike."""
    counts = np.full(2, float(values))
    evidence = Evidence(
        count=counts,
        low=counts * 0,
        high=counts,
        nonfinite=counts * 0,
        correlation=np.ones((2, 2)),
    )
    linked = correlated(evidence, Thresholds(redundant_at=0.9))
    assert linked is not None
    assert linked.any() == is_judged


def test_a_baseline_of_another_model_holds_nothing_up() -> None:
    """Its layers could get as bad as they like."""
    verdict = findings.check_baseline(LAYERS, {"conv": {"dead": [1]}})
    assert verdict == Verdict("baseline", False, "it has none of these layers")


def test_the_hint_names_eight_layers() -> None:
    """Of a thousand it would be a page."""
    rows = [{**LAYERS[0], "label": f"relu{n}"} for n in range(9)]
    with pytest.raises(UsageError) as caught:
        findings.check_gate(parse_gate("conv:dead>0"), rows)
    assert str(caught.value.hint).endswith("relu6, relu7")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("layer9.*:dead>0", "no audited layer is called 'layer9.*'", "layer1.relu"),
        ("layer4.*:dead>0", "no layer here can be judged for dead", "constant suits"),
        ("redundant>0", "can be judged for redundant", "--redundant-at 0.98"),
        ("dead>100%", "'dead>100%' can never fail", "at most 100%"),
        ("any:dead>=100.5%", "can never fail", "at most 100%"),
    ],
)
def test_a_gate_that_could_never_break_is_refused(
    text: str, message: str, hint: str
) -> None:
    """A misspelt layer would otherwise hold for ever."""
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        findings.check_gate(parse_gate(text), LAYERS)
    assert hint in str(caught.value.hint)


BASELINE = {row["label"]: row["findings"] for row in LAYERS}


def compared(label: str, **changed: Sequence[int]) -> Verdict:
    """The layers, one with other findings, against the baseline."""
    layers = copy.deepcopy(LAYERS)
    for row in layers:
        if row["label"] == label:
            row["findings"].update(changed)
    return findings.check_baseline(layers, BASELINE)


@pytest.mark.parametrize("dead", [[3], [4], []], ids=["same", "another", "fewer"])
def test_no_more_than_the_baseline_is_not_worse(dead: list[int]) -> None:
    """Another channel is no more of them, and fewer is better."""
    assert compared("layer1.relu", dead=dead).held


def test_worse_than_the_baseline_names_the_new_channels() -> None:
    """More of a finding in a layer is worse, wherever else it got better."""
    verdict = compared("layer1.relu.call1", dead=[], constant=[5, 8, 9])
    assert not verdict.held
    assert verdict.message == (
        "layer1.relu.call1: 3 constant, 1 in the baseline (new: 8, 9)"
    )


def test_of_many_new_channels_eight_are_named() -> None:
    """The others are counted."""
    message = compared("layer4.act", nonfinite=range(50)).message
    assert "new: 0, 1, 2, 3, 4, 5, 6, 8 and 41 more" in message


def test_only_what_both_have_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    """A new layer is named as not comparable; a finding the baseline was not asked is
    left out."""
    assert findings.check_baseline(LAYERS, {"layer1.relu": {"dead": [3]}}).held
    assert caplog.messages == ["the baseline lacks 3 layers, layer1.relu.call1 first"]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def check(featviz: Run, noise: Path, out: Path) -> Run:
    """Audit the planted model on pictures of noise, with more options."""
    call = ["audit", f"{PLANTED}:make", noise, *COLOURS, "--out", out]
    return lambda *options: featviz(*call, "--max-suspects", 0, "--overwrite", *options)


@pytest.mark.medium
def test_exit_code_4_and_the_gate_on_stderr(check: Run, out: Path) -> None:
    """Every gate with its figure, whether it failed or held; results are written."""
    gates = ["dead>5%", "dead>50%", "act2:constant>1"]
    done = check(*(f"--fail-on={gate}" for gate in gates))
    assert done.code == 4
    assert "error: gate dead>5% failed: 2 of 16 channels dead (12.50 %)" in done.err
    assert "gate act2:constant>1 failed: 2 of 8 channels constant (25.00 %)" in done.err
    assert "gate dead>50% held: 2 of 16 channels dead (12.50 %)" in done.err
    assert "act2" in done.out
    assert (out / "audit.json").is_file()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("gates", "code"),
    [(["dead>2", "nonfinite>20%"], 3), (["dead>1"], 4)],
    ids=["held", "failed"],
)
def test_a_failed_gate_goes_before_a_broken_image(
    gates: list[str], code: int, check: Run, noise: Path, out: Path
) -> None:
    """A broken image alone gives 3, with a failed gate 4."""
    (noise / "bad.png").write_bytes(b"")
    assert check(*(f"--fail-on={gate}" for gate in gates)).code == code
    assert (out / "audit.json").is_file()


@pytest.mark.medium
def test_dead_channels_are_named(check: Run, out: Path) -> None:
    """Below the table, by layer and number; the last line has the command that shows
    them."""
    done = check()
    assert done.out.splitlines()[-2:] == [
        "dead in act: channel 0",
        "dead in act2: channel 6",
    ]
    assert f"featviz report {out} --open" in done.err.splitlines()[-1]


@pytest.mark.medium
def test_a_gate_on_any_layer_looks_at_each_by_itself(check: Run) -> None:
    """One dead channel of eight in either layer is 12.5 % of it; the message names the
    layers beyond the limit, or the largest share."""
    done = check("--fail-on", "any:dead>12%", "--fail-on", "any:dead>1")
    assert done.code == 4
    failed = "any:dead>12% failed: act: 1 of 8 channels dead (12.50 %); act2: 1 of 8"
    assert failed in done.err
    assert "any:dead>1 held: at most 1 of 8 channels dead (12.50 %)" in done.err


@pytest.mark.medium
@pytest.mark.parametrize(
    ("gate", "code"), [("any:act2:dead>=1", 4), ("any:conv9:dead>1", 2)]
)
def test_a_gate_on_any_layer_of_a_name(gate: str, code: int, check: Run) -> None:
    """A name that no layer has is a usage error."""
    assert check("--fail-on", gate).code == code


@pytest.fixture
def audited(check: Run, out: Path) -> dict[str, Any]:
    """audit.json of the planted model."""
    assert check().code == 0
    return read_audit(out)


@pytest.mark.medium
def test_verdicts_are_in_junit(
    audited: dict[str, Any], check: Run, tmp_path: Path
) -> None:
    """Whether gates hold or not; the same model against its own audit holds."""
    report = tmp_path / "ci" / "audit.xml"
    baseline = tmp_path / "baseline.json"
    baseline.write_text(json.dumps(audited))
    gates = ["--baseline", baseline, "--fail-on", "dead>1", "--fail-on", "dead>2"]
    assert check(*gates, "--junit", report).code == 4
    (suite,) = ElementTree.parse(report).getroot()
    failed = {case.attrib["name"]: case.find("failure") is not None for case in suite}
    assert failed == {"dead>1": True, "dead>2": False, "baseline": False}
    assert suite.attrib["name"] == "planted.py:make"
    assert [path.name for path in report.parent.iterdir()] == ["audit.xml"]


@pytest.mark.parametrize("name", ["relu", "bell\a", "lone\ud800", "\x00<&\"'>"])
def test_junit_is_xml_whatever_the_names(name: str) -> None:
    """A name may have characters that XML cannot hold; the suite counts its cases."""
    verdicts = [Verdict(name, held, name) for held in (True, False, False)]
    (suite,) = ElementTree.fromstring(junit({name: verdicts}))
    shown = re.sub("[\a\x00\ud800]", "\ufffd", name)
    assert (suite.get("name"), suite.get("tests"), suite.get("failures")) == (
        shown,
        "3",
        "2",
    )
    cases = [(case.get("name"), case[0].tag, case[0].text) for case in suite]
    tags = ("system-out", "failure", "failure")
    assert cases == [(shown, tag, shown) for tag in tags]


@pytest.mark.medium
def test_a_healthier_baseline_fails(
    audited: dict[str, Any], check: Run, tmp_path: Path
) -> None:
    """The channels that it lacks are named."""
    audited["layers"][1]["findings"]["constant"] = []
    baseline = tmp_path / "baseline.json"
    baseline.write_text(json.dumps(audited))
    done = check("--baseline", baseline)
    message = "gate baseline failed: act2: 2 constant, 0 in the baseline (new: 0, 1)"
    assert done.code == 4
    assert f"error: {message}" in done.err
