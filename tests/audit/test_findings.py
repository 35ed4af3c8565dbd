"""Gates, the baseline and the JUnit report: what breaks, with which figure and exit
code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from conftest import Run

from featviz.audit import findings
from featviz.audit.gates import parse_gate
from featviz.errors import UsageError
from featviz.records import Verdict

from .audited import COLOURS, PLANTED


def layer(
    name: str, channels: int, call: int = 0, type: str = "ReLU", **found: Any
) -> Any:
    label = f"{name}.call{call}" if call else name
    return {
        "layer": name,
        "label": label,
        "type": type,
        "channels": channels,
        "findings": found,
    }


LAYERS = [
    layer("layer1.relu", 20, dead=[3], constant=[], nonfinite=[]),
    layer("layer1.relu", 20, call=1, dead=[0, 1], constant=[5], nonfinite=[]),
    layer(
        "layer3/fn:relu", 60, type="fn:relu", dead=[], constant=[1, 2, 3], nonfinite=[]
    ),
    layer("layer4.act", 100, type="GELU", constant=[], nonfinite=[7]),
]


def test_the_total_of_apoz_is_that_of_all_channels() -> None:
    """A layer counts by its channels; one without APoZ does not."""
    shares = zip(LAYERS, (0.5, 0.25, None, 0.125), strict=True)
    found = findings.total_row([{**one, "apoz": share} for one, share in shares])
    assert found["apoz"] == pytest.approx((20 * 0.5 + 20 * 0.25 + 100 * 0.125) / 140)


@pytest.mark.parametrize(
    ("text", "held", "words"),
    [
        # layer4.act is not judged for it
        ("dead>3", True, "3 of 100 channels dead (3.00 %)"),
        ("dead>2", False, "3 of 100 channels dead (3.00 %)"),
        ("dead>=3%", False, "3 of 100 channels dead (3.00 %)"),
        ("dead>2.9%", False, "3 of 100 channels dead (3.00 %)"),
        (" constant > 2 % ", True, "4 of 200 channels constant (2.00 %)"),
        ("nonfinite>0", False, "1 of 200 channels nonfinite (0.50 %)"),
        ("layer3*:constant>2", False, "3 of 60 channels constant (5.00 %)"),
        ("layer1.relu.call1:dead>1", False, "2 of 20 channels dead (10.00 %)"),
        ("layer3/fn:relu:dead>0", True, "0 of 60 channels dead (0.00 %)"),
        ("GELU:nonfinite>0", False, "1 of 100 channels nonfinite (1.00 %)"),
    ],
)
def test_gates_count_what_they_say(text: str, held: bool, words: str) -> None:
    """A percentage is a share of the channels that are judged, a plain number a count."""
    assert findings.check_gate(parse_gate(text), LAYERS) == Verdict(
        text.strip(), held, words
    )


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("layer9.*:dead>0", "no audited layer is called 'layer9.*'", "layer1.relu"),
        ("layer4.*:dead>0", "no layer here can be judged for dead", "constant suits"),
        ("redundant>0", "can be judged for redundant", "--redundant-at 0.98"),
    ],
)
def test_a_gate_that_could_never_break_is_refused(
    text: str, message: str, hint: str
) -> None:
    """A misspelt layer would otherwise hold for ever."""
    with pytest.raises(UsageError) as error:
        findings.check_gate(parse_gate(text), LAYERS)
    assert message in error.value.message
    assert hint in str(error.value.hint)


def replaced(index: int, **found: Sequence[int]) -> list[Any]:
    changed = [dict(row) for row in LAYERS]
    changed[index]["findings"] = {**changed[index]["findings"], **found}
    return changed


def worse(layers: list[Any], baseline: list[Any]) -> Verdict:
    return findings.check_baseline(
        layers, {row["label"]: row["findings"] for row in baseline}
    )


def test_worse_than_the_baseline_names_the_new_channels() -> None:
    """More of a finding in a layer is worse, wherever else it got better; fewer is not."""
    assert worse(LAYERS, LAYERS).held
    assert worse(replaced(0, dead=[4]), LAYERS).held  # another channel, but no more
    assert worse(replaced(0, dead=[]), LAYERS).held
    verdict = worse(replaced(1, dead=[], constant=[5, 8, 9]), LAYERS)
    assert not verdict.held
    assert verdict.message == (
        "layer1.relu.call1: 3 constant, 1 in the baseline (new: 8, 9)"
    )
    many = worse(replaced(3, nonfinite=list(range(50))), LAYERS).message
    assert "new: 0, 1, 2, 3, 4, 5, 6, 8 and 41 more" in many


def test_only_what_both_have_is_compared(caplog: pytest.LogCaptureFixture) -> None:
    """A new layer is named as not comparable; a finding the baseline was not asked is
    left out."""
    assert worse(LAYERS, [layer("layer1.relu", 20, dead=[3])]).held
    assert caplog.messages == ["the baseline lacks 3 layers, layer1.relu.call1 first"]


@pytest.fixture
def call(noise: Path, tmp_path: Path) -> list[object]:
    """An audit of the planted model on pictures of noise."""
    return [
        "audit",
        f"{PLANTED}:make",
        noise,
        *COLOURS,
        "--max-suspects",
        0,
        "--overwrite",
        "--out",
        tmp_path / "out",
    ]


@pytest.mark.slow
def test_exit_code_4_and_the_gate_on_stderr(featviz: Run, call: list[object]) -> None:
    """Every gate with its figure, whether it failed or held; results are written. A
    broken image alone gives 3, with a failed gate 4."""
    done = featviz(
        *call,
        "--fail-on",
        "dead>5%",
        "--fail-on",
        "dead>50%",
        "--fail-on",
        "act2:constant>1",
    )
    assert done.code == 4
    assert "error: gate dead>5% failed: 2 of 16 channels dead (12.50 %)" in done.err
    assert "gate act2:constant>1 failed: 2 of 8 channels constant (25.00 %)" in done.err
    assert "gate dead>50% held: 2 of 16 channels dead (12.50 %)" in done.err
    assert "act2" in done.out
    (Path(str(call[2])) / "bad.png").write_bytes(b"")
    assert featviz(*call, "--fail-on", "dead>2", "--fail-on", "nonfinite>20%").code == 3
    assert featviz(*call, "--fail-on", "dead>1").code == 4
    assert (Path(str(call[-1])) / "audit.json").is_file()


def test_dead_channels_are_named(featviz: Run, call: list[object]) -> None:
    """Below the table, by layer and number; the last line has the command that shows
    them."""
    done = featviz(*call)
    assert done.out.splitlines()[-2:] == ["dead in act: 0", "dead in act2: 6"]
    assert f"featviz report {call[-1]} --open" in done.err.splitlines()[-1]


def test_a_gate_on_any_layer_looks_at_each_by_itself(
    featviz: Run, call: list[object]
) -> None:
    """One dead channel of eight in either layer is 12.5 % of it; the message names the
    layers beyond the limit, or the largest share."""
    done = featviz(*call, "--fail-on", "any:dead>12%", "--fail-on", "any:dead>1")
    assert done.code == 4
    failed = "any:dead>12% failed: act: 1 of 8 channels dead (12.50 %); act2: 1 of 8"
    assert failed in done.err
    assert "any:dead>1 held: at most 1 of 8 channels dead (12.50 %)" in done.err
    assert featviz(*call, "--fail-on", "any:act2:dead>=1").code == 4
    assert featviz(*call, "--fail-on", "any:conv9:dead>1").code == 2


def test_baseline_and_junit(featviz: Run, call: list[object], tmp_path: Path) -> None:
    """The same model against its own audit holds; against a healthier one channels are
    named. The verdicts are in JUnit, whether gates hold or not."""
    report = tmp_path / "ci" / "audit.xml"
    baseline = tmp_path / "baseline.json"
    assert featviz(*call).code == 0
    content = json.loads((Path(str(call[-1])) / "audit.json").read_text())
    baseline.write_text(json.dumps(content))
    call = [*call, "--baseline", baseline]
    gates = ["--junit", report, "--fail-on", "dead>1", "--fail-on", "dead>2"]
    assert featviz(*call, *gates).code == 4
    (suite,) = ElementTree.parse(report).getroot()
    broken = {case.attrib["name"]: case.find("failure") is not None for case in suite}
    assert broken == {"dead>1": True, "dead>2": False, "baseline": False}
    assert suite.attrib["name"] == "planted.py:make"
    assert [path.name for path in report.parent.iterdir()] == ["audit.xml"]
    content["layers"][1]["findings"]["constant"] = []
    baseline.write_text(json.dumps(content))
    done = featviz(*call)
    message = "gate baseline failed: act2: 2 constant, 0 in the baseline (new: 0, 1)"
    assert done.code == 4
    assert f"error: {message}" in done.err
