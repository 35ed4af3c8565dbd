"""`--classes`: names of classes from a file, and what is no such file."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import DIGITS, DIGITS_MODEL, Run
from torch import nn

import featviz as fv
from featviz.errors import UsageError
from featviz.inspection.cam import ImageCam
from featviz.models.load import adopt
from featviz.options import InputOptions

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
NUMBERED = {str(number): name for number, name in enumerate(NAMES)}
FILES = {
    "names.txt": "\n  \n\n ".join(NAMES) + "\n",
    "list.json": json.dumps(NAMES),
    "LIST.JSON": json.dumps(NAMES),
    "config.json": json.dumps({"id2label": NUMBERED}),
    "data.yaml": "path: digits\nnames:\n"
    + "".join(f"  {n}: {w}\n" for n, w in NUMBERED.items()),
    "LIST.YML": "".join(f"- {name}\n" for name in NAMES),
}


def answer(model: Path | nn.Module, *target: str, **options: Any) -> ImageCam:
    """The class activation map of a five."""
    return fv.cam(model, DIGITS / "00-5.png", *target, **options).images[0]


@pytest.mark.medium
@pytest.mark.parametrize("name", FILES)
def test_names_are_those_of_the_file(name: str, tmp_path: Path) -> None:
    """In the prediction and in `class:NAME`, whatever format the file has."""
    if name.endswith((".yaml", ".YML")):
        pytest.importorskip("yaml")
    path = tmp_path / name
    path.write_text(FILES[name])
    image = answer(DIGITS_MODEL, "class:three", classes=path)
    assert image.prediction[0].name == "five"
    assert image.target == "three"


@pytest.mark.parametrize("is_file", [True, False])
def test_names_of_a_module_are_a_list_or_a_file(is_file: bool, tmp_path: Path) -> None:
    """As for a MODEL string: in the prediction and in `class:NAME`."""
    path = tmp_path / "names.txt"
    path.write_text(FILES["names.txt"])
    module = torch.load(DIGITS_MODEL, weights_only=False)

    image = answer(module, "class:three", classes=path if is_file else NAMES)

    assert image.prediction[0].name == "five"
    assert image.target == "three"


def test_a_list_of_too_few_names_is_refused() -> None:
    """No name would be used; the line has both numbers."""
    module = torch.load(DIGITS_MODEL, weights_only=False)
    with pytest.raises(
        UsageError, match=r"\['a', \.\.\.\] has 2 names, and the model 10"
    ):
        answer(module, classes=["a", "b"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("empty.txt", "", "holds no names"),
        ("word.json", '"dog"', "holds str, not a list"),
        ("gap.json", '{"0": "cat", "2": "dog"}', "the numbers are not 0 to 1"),
        ("below.json", '{"-1": "cat", "0": "dog"}', "the numbers are not 0 to 1"),
        ("broken.json", "[", "cannot be read"),
        ("broken.yaml", "names: [cat", "cannot be read"),
        ("tagged.yaml", "!!python/object/apply:os.system [x]", "cannot be read"),
    ],
)
def test_files_without_names_are_refused(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    """The hint says what such a file holds."""
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UsageError, match=message) as caught:
        answer(DIGITS_MODEL, classes=path)
    assert "a name on each line" in str(caught.value.hint)


def test_another_number_of_names_is_refused(featviz: Run, tmp_path: Path) -> None:
    """No name would be used. Nothing is drawn; the line has both numbers."""
    path = tmp_path / "names.txt"
    path.write_text("cat\ndog\nbird\n")
    out = tmp_path / "out"
    image = DIGITS / "00-5.png"
    done = featviz("run", DIGITS_MODEL, image, "--classes", path, "--out", out)
    assert done.code == 2
    assert done.err.splitlines()[-2:] == [
        f"error: --classes {path} has 3 names, and the model 10 classes",
        "hint: a name for each class, in their order",
    ]
    assert not out.exists()


def test_a_missing_file_is_a_usage_error(featviz: Run) -> None:
    """It ends with 2 and one line."""
    done = featviz("cam", DIGITS_MODEL, DIGITS / "00-5.png", "--classes", "nowhere.txt")
    assert done.code == 2
    assert "nowhere.txt" in done.err


CHECKPOINTS = {
    "names": NAMES,
    "classes": ["0", *NAMES[1:]],
    "class_names": tuple(NAMES),
    "idx_to_class": dict(enumerate(NAMES)),
    "class_to_idx": dict(reversed([*zip(NAMES, range(10), strict=True)])),
}


@pytest.fixture(scope="module")
def digits() -> nn.Module:
    model: nn.Module = torch.load(DIGITS_MODEL, weights_only=False)
    return model


FACTORY = f"""
import torch

def make():
    return torch.load({str(DIGITS_MODEL)!r}, weights_only=False)
"""


@pytest.mark.medium
@pytest.mark.parametrize("key", CHECKPOINTS)
def test_a_checkpoint_may_have_names_of_its_own(
    key: str, digits: nn.Module, tmp_path: Path
) -> None:
    """Beside its weights, under each usual key; they are read without --trust."""
    content = {"state_dict": digits.state_dict(), key: CHECKPOINTS[key]}
    torch.save(content, tmp_path / "net.pth")
    (tmp_path / "user_net.py").write_text(FACTORY)
    arch = f"{tmp_path / 'user_net.py'}:make"
    image = answer(tmp_path / "net.pth", "class:three", arch=arch)
    assert image.prediction[0].name == "five"
    assert image.target == "three"


def test_a_whole_model_may_have_names_beside_it(
    digits: nn.Module, tmp_path: Path
) -> None:
    """As weights may."""
    torch.save({"model": digits, "names": NAMES}, tmp_path / "net.pth")
    image = answer(tmp_path / "net.pth", "class:three")
    assert image.prediction[0].name == "five"
    assert image.target == "three"


def test_names_of_the_user_win_over_those_of_the_file(
    digits: nn.Module, tmp_path: Path
) -> None:
    """Whatever the training called its classes."""
    torch.save({"model": digits, "names": NAMES[::-1]}, tmp_path / "net.pth")
    (tmp_path / "names.txt").write_text(FILES["names.txt"])
    image = answer(tmp_path / "net.pth", classes=tmp_path / "names.txt")
    assert image.prediction[0].name == "five"


@pytest.mark.medium
@pytest.mark.parametrize("value", [10, [0, 1, 2], {"a": "b"}, None, ["one"]])
def test_what_is_no_list_of_names_names_nothing(
    value: object, digits: nn.Module, tmp_path: Path
) -> None:
    """A number of classes, mere numbers, a mapping without numbers, or too few names."""
    torch.save({"model": digits, "classes": value}, tmp_path / "net.pth")
    assert answer(tmp_path / "net.pth").prediction[0].name is None


def named(package: str, name: str, **attributes: Any) -> nn.Module:
    """A module of a library's class."""
    module_class = type(name, (nn.Module,), {"__module__": package})
    module: nn.Module = module_class()
    vars(module).update(attributes)
    return module


ULTRALYTICS = ("ultralytics.nn.others", "DetectionModel")
TRANSFORMERS = ("transformers.models.vit", "ViTForImageClassification")
WORDS = {1: "dog", 0: "cat\x1b"}


@pytest.mark.parametrize(
    ("module", "scores", "categories"),
    [
        (named(*ULTRALYTICS, names=WORDS), None, ("cat\\x1b", "dog")),
        (named(*ULTRALYTICS, names={0: "0", 1: "1"}), None, ()),
        (named(*ULTRALYTICS, names={0: "0", 1: "dog"}), None, ("0", "dog")),
        (named(*ULTRALYTICS, names={1: "dog"}), None, ()),
        (named(*ULTRALYTICS, names=["cat"]), None, ()),
        (named("ultralytics.nn.others", "ClassificationModel"), "1", ()),
        (
            named(*TRANSFORMERS, config=SimpleNamespace(id2label=WORDS)),
            "logits",
            ("cat\\x1b", "dog"),
        ),
        (
            named(*TRANSFORMERS, config=SimpleNamespace(id2label={0: "LABEL_0"})),
            "logits",
            (),
        ),
        (named("transformers.models.vit", "ViTModel"), None, ()),
        (named("timm.models.vit", "VisionTransformer", num_classes=0), None, ()),
        (named("timm.models.vit", "VisionTransformer", num_classes=7), "", ()),
        (nn.ReLU(), "", ()),
    ],
)
def test_what_a_library_says_of_classes(
    module: nn.Module, scores: str | None, categories: tuple[str, ...]
) -> None:
    """Names that libraries make up, or that leave a number out, are none."""
    model = adopt(module, InputOptions())
    assert (model.scores, model.categories) == (scores, categories)
