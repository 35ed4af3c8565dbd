"""Options of gradients on the command line, in --dry-run and in a config file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Outcome
from gradient_models import SPHERES

from featviz.rundir.read import read_json


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (("--target", "sum"), "target does nothing without gradients",
         "add --capture output,grad, or --reduce gradcam"),
        (("--grad-rule", "guided", "--capture", "input"),
         "grad_rule does nothing without gradients",
         "add --capture output,grad, or --reduce gradcam"),
        (("--edit", "conv1:grad*2"), "edit=grad does nothing without gradients",
         "add --capture output,grad, or --reduce gradcam"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(
    arguments: tuple[str, ...],
    message: str,
    hint: str,
    tiny_file: Path,
    featviz: Callable[..., Outcome],
) -> None:
    """Options of gradients without gradients."""
    done = featviz("run", tiny_file, SPHERES, *arguments)
    assert (done.code, done.err) == (2, f"error: {message}\nhint: {hint}\n")


def test_dry_run_lists_what_is_captured(
    tiny_file: Path, tmp_path: Path, featviz: Callable[..., Outcome]
) -> None:
    """All kinds, with the files that a run then writes; skipped ones with their reasons."""
    fixed = ("--size", "16x16", "--mean", "0,0,0", "--std", "1,1,1", "--out", tmp_path / "out",
             "--capture", "input,output,grad,grad-input", "--target", "layer:1",
             "--layers", "Conv2d,ReLU,Linear", "--json")  # fmt: skip
    planned = json.loads(featviz("run", tiny_file, SPHERES, "--dry-run", *fixed).out)
    assert not (tmp_path / "out").exists()
    done = json.loads(featviz("run", tiny_file, SPHERES, *fixed).out)
    names = sorted(f"{row['layer']}/{row['file']}" for row in planned["per_image"])
    assert names == sorted(file.split("_", 1)[1] for file in done["files"])
    assert {name.split("/")[1] for name in names if name.startswith("0/")} == {
        "input.png", "output.png", "grad.png", "grad-input.png", "grad-input.saliency.png",
    }  # fmt: skip
    reason = "has no gradient: the target does not depend on it"
    view = f"{reason}, or it is a view that was changed in place"  # what Flatten gives
    assert planned["skipped"] == [{"layer": "4", "reason": view}, {"layer": "4", "reason": reason}]
    assert done["skipped"] == 2


def test_options_come_from_a_config_file(
    tiny_file: Path, tmp_path: Path, featviz: Callable[..., Outcome]
) -> None:
    """Lists for what may be several, and for --capture."""
    (tmp_path / "c.toml").write_text(
        'capture = ["output", "grad"]\ntarget = "class:2"\nablate = ["0:1", "0:2"]\n'
        'grad-rule = "guided"\nsize = 16\n'
    )
    done = featviz(
        "run", "--config", tmp_path / "c.toml", tiny_file, SPHERES, "--out", tmp_path / "out"
    )
    assert done.code == 0
    manifest = read_json(tmp_path / "out" / "spheres.jpg" / "manifest.json")
    assert manifest["target"]["of"] == "class:2"
    assert manifest["target"]["grad_rule"] == "guided"
    assert [row["what"] for row in manifest["interventions"]] == ["0:1", "0:2"]
    assert {row["kind"] for row in manifest["captures"]} == {"output", "grad"}
