"""`--classes`: names of classes from a file, and what is no such file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import DIGITS, DIGITS_MODEL, Run

import featviz as fv
from featviz.errors import UsageError

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
NUMBERED = {str(number): name for number, name in enumerate(NAMES)}
FILES = {
    "names.txt": "\n".join(NAMES) + "\n",
    "list.json": json.dumps(NAMES),
    "config.json": json.dumps({"id2label": NUMBERED}),
    "data.yaml": "path: digits\nnames:\n"
    + "".join(f"  {n}: {w}\n" for n, w in NUMBERED.items()),
}


@pytest.mark.parametrize("name", FILES)
def test_names_are_those_of_the_file(name: str, tmp_path: Path) -> None:
    """In the prediction and in `class:NAME`, whatever form the file has."""
    if name.endswith(".yaml"):
        pytest.importorskip("yaml")
    path = tmp_path / name
    path.write_text(FILES[name])
    found = fv.cam(
        DIGITS_MODEL, DIGITS / "00-5.png", "class:three", classes=path
    ).images[0]
    assert found.prediction[0].name == "five"
    assert found.target == "three"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("empty.txt", "", "holds no names"),
        ("word.json", '"dog"', "holds str, not a list"),
        ("gap.json", '{"0": "cat", "2": "dog"}', "the numbers are not 0 to 1"),
        ("broken.json", "[", "cannot be read"),
    ],
)
def test_files_without_names_are_refused(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    """The hint says what such a file holds."""
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        fv.cam(DIGITS_MODEL, DIGITS / "00-5.png", classes=path)
    assert "a name on each line" in str(caught.value.hint)


def test_a_missing_file_is_a_usage_error(featviz: Run) -> None:
    """It ends with 2 and one line."""
    done = featviz("cam", DIGITS_MODEL, DIGITS / "00-5.png", "--classes", "nowhere.txt")
    assert done.code == 2
    assert "nowhere.txt" in done.err


CHECKPOINTS = {
    "names": NAMES,
    "classes": NAMES,
    "class_names": tuple(NAMES),
    "idx_to_class": dict(enumerate(NAMES)),
    "class_to_idx": {name: number for number, name in enumerate(NAMES)},
}


@pytest.mark.parametrize("key", CHECKPOINTS)
def test_a_checkpoint_may_have_names_of_its_own(key: str, tmp_path: Path) -> None:
    """Beside its weights, under each usual key; they are read without --trust."""
    content = torch.load(DIGITS_MODEL, weights_only=False)
    state = content if isinstance(content, dict) else content.state_dict()
    torch.save({"state_dict": state, key: CHECKPOINTS[key]}, tmp_path / "net.pth")
    torch.save(content, tmp_path / "whole.pth")
    factory = tmp_path / "net.py"
    factory.write_text(
        "import torch\n\n\ndef make():\n    return torch.load("
        f"{str(tmp_path / 'whole.pth')!r}, weights_only=False)\n"
    )
    found = fv.cam(
        tmp_path / "net.pth", DIGITS / "00-5.png", "class:three", arch=f"{factory}:make"
    ).images[0]
    assert found.prediction[0].name == "five"
    assert found.target == "three"


@pytest.mark.parametrize("value", [10, [0, 1, 2], {"a": "b"}, None, ["one"]])
def test_what_is_no_list_of_names_names_nothing(value: object, tmp_path: Path) -> None:
    """A number of classes, mere numbers, a mapping without numbers, or too few names."""
    torch.save(
        {"model": torch.load(DIGITS_MODEL, weights_only=False), "classes": value},
        tmp_path / "net.pth",
    )
    found = fv.cam(tmp_path / "net.pth", DIGITS / "00-5.png").images[0]
    assert found.prediction[0].name is None
