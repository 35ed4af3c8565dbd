"""Configuration: values of a TOML file, and which win over which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Run
from runs import complete, refused, run_json


def options_used(out: Path) -> dict[str, Any]:
    """The options that run.json records."""
    options: dict[str, Any] = run_json(out)["options"]
    return options


def config(tmp_path: Path, text: str) -> Path:
    """A file of values."""
    path = tmp_path / "featviz.toml"
    path.write_text(text)
    return path


@pytest.mark.medium
def test_values_come_from_the_config_and_the_command_line_wins(
    featviz: Run, tiny_file: Path, picture: Path, tmp_path: Path, out: Path
) -> None:
    """A TOML value stands in for an option; one on the command line wins over it."""
    file = config(
        tmp_path,
        'layers = ["Conv2d", "ReLU"]\nnrow = 3\npadding = 5\nmean = [0.1, 0.2, 0.3]\n'
        'size = "40x50"\npad_value = 0.5\ncmap = "viridis"\nscale = "auto"\n'
        "channels = [1, 0]\n",
    )
    command = ("run", tiny_file, picture, "--out", out, "--config", file)
    done = featviz(*command, "--padding", 1, "--scale", 2)
    assert done.code == 0, done.err
    expected = {
        "layers": "Conv2d,ReLU",
        "nrow": 3,
        "padding": 1,
        "mean": [0.1, 0.2, 0.3],
        "size": [40, 50],
        "pad_value": 0.5,
        "cmap": "viridis",
        "scale": 2,
        "channels": "1,0",
    }
    assert options_used(out).items() >= expected.items()


@pytest.mark.medium
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
    assert options_used(out).items() >= {"nrow": 7, "layers": "Conv2d"}.items()


@pytest.mark.medium
@pytest.mark.usefixtures("tiny_file", "picture")
@pytest.mark.parametrize("images", ['"picture.png"', '["picture.png"]'])
def test_model_and_images_come_from_the_config(
    images: str, featviz: Run, tmp_path: Path
) -> None:
    """`model` and `images` stand for the arguments, as one path or a list."""
    text = f'model = "tiny.pth"\nimages = {images}\nout = "out"'
    done = featviz("run", "--config", config(tmp_path, text), "--layers", "ReLU")
    assert done.code == 0, done.err
    assert complete(tmp_path / "out") == ["picture.png"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("paddin = 3", "has 'paddin', which featviz run lacks; did you mean padding"),
        (
            "[run]\nno_such_thing_at_all = 3",
            "has 'no_such_thing_at_all', which featviz run lacks",
        ),
        ("padding = ", "cannot be read"),
        ('padding = "wide"', "--padding wide: expected an integer"),
        ('figure = "maybe"', "Invalid value for '--figure': 'maybe'"),
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
    file = config(tmp_path, text)
    refused(featviz("run", tiny_file, picture, "--config", file), 2, message)
