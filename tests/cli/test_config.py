"""Configuration: values of a TOML file, and which win over which."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from runs import complete, refused

from featviz.options import InputOptions, read


def options_used(out: Path) -> dict[str, Any]:
    options: dict[str, Any] = json.loads((out / "run.json").read_text())["options"]
    return options


def config(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "featviz.toml"
    path.write_text(text)
    return path


def test_values_come_from_the_config_and_the_command_line_wins(
    featviz: Run, tiny_file: Path, picture: Path, tmp_path: Path, out: Path
) -> None:
    """A TOML value stands in for an option; one on the command line wins over it."""
    file = config(
        tmp_path,
        'layers = ["Conv2d", "ReLU"]\nnrow = 3\npadding = 5\nmean = [0.1, 0.2, 0.3]\n'
        'size = "40x50"\npad_value = 0.5\ncmap = "viridis"\nscale = "auto"\n',
    )
    outcome = featviz(
        "run",
        tiny_file,
        picture,
        "--out",
        out,
        "--config",
        file,
        "--padding",
        1,
        "--scale",
        2,
    )
    assert outcome.code == 0, outcome.err
    used = options_used(out)
    expected = {
        "layers": "Conv2d,ReLU",
        "nrow": 3,
        "padding": 1,
        "mean": [0.1, 0.2, 0.3],
    }
    expected |= {"size": [40, 50], "pad_value": 0.5, "cmap": "viridis", "scale": 2}
    assert {name: used[name] for name in expected} == expected


def test_a_table_is_for_the_command_of_its_name(
    featviz: Run, tiny_file: Path, picture: Path, tmp_path: Path, out: Path
) -> None:
    """[run] applies to run and wins over the top level; another's table does not
    concern it."""
    file = config(
        tmp_path,
        'layers = "ReLU"\n[run]\nnrow = 7\nlayers = "Conv2d"\n[audit]\nx = 1\n',
    )
    outcome = featviz("run", tiny_file, picture, "--out", out, "--config", file)
    assert outcome.code == 0, outcome.err
    assert (options_used(out)["nrow"], options_used(out)["layers"]) == (7, "Conv2d")


@pytest.mark.parametrize("many", [True, False])
def test_model_and_images_come_from_the_config(
    many: bool, featviz: Run, tiny_file: Path, picture: Path, tmp_path: Path, out: Path
) -> None:
    """`model` and `images` stand for the arguments, as one path or a list."""
    paths = json.dumps([str(picture)] if many else str(picture))
    text = (
        f"model = {json.dumps(str(tiny_file))}\nimages = {paths}\nout ="
        f" {json.dumps(str(out))}"
    )
    outcome = featviz("run", "--config", config(tmp_path, text), "--layers", "ReLU")
    assert outcome.code == 0, outcome.err
    assert complete(out) == ["picture.png"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("paddin = 3", "has 'paddin', which featviz run lacks; did you mean padding"),
        (
            "[run]\nno_such_thing_at_all = 3",
            "has 'no_such_thing_at_all', which featviz run lacks",
        ),
        ("padding = ", "cannot be read"),
        ('padding = "wide"', "padding=wide: expected an integer"),
    ],
)
def test_a_config_with_mistakes(
    text: str,
    message: str,
    featviz: Run,
    tiny_file: Path,
    picture: Path,
    tmp_path: Path,
) -> None:
    """An unknown key names the nearest, bad TOML its place, a bad value what is taken."""
    refused(
        featviz("run", tiny_file, picture, "--config", config(tmp_path, text)),
        2,
        message,
    )


def test_a_size_is_height_and_width() -> None:
    """Read once, as Python gives it."""
    assert read(InputOptions, {"size": "40x50"}).size == (40, 50)
