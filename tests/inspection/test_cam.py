"""`featviz cam`: pictures, words, files and messages."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from borrowed import assert_same, state_of
from conftest import DIGITS, DIGITS_MODEL, Run
from PIL import Image
from torch import nn

import featviz as fv
from featviz.errors import FeatvizError
from featviz.inspection.cam import picture_files
from featviz.records import Sample

FIVE, SEVEN = DIGITS / "00-5.png", DIGITS / "05-7.png"


def test_one_picture_an_image_names_prediction_target_and_layer(
    featviz: Run, tmp_path: Path
) -> None:
    """In the current folder, under the image's name; drawn again without a word."""
    words = "00-5.png: class 5 99.6 %; Grad-CAM for class 5"
    for _ in range(2):
        done = featviz("cam", DIGITS_MODEL, FIVE)
        assert done.code == 0 and done.out == ""
        assert done.err == f"{words} at 7\n1 picture in cam-00-5.png\n"
    assert [path.name for path in tmp_path.iterdir()] == ["cam-00-5.png"]
    with Image.open("cam-00-5.png") as opened:
        assert opened.info == {"Software": "featviz cam", "Title": f"{words} at 7"}


def test_the_map_lies_over_the_image_where_the_evidence_is() -> None:
    """A seven's evidence lies around its ink; alpha 0 is the image, 1 the map in its
    colours."""
    found = fv.cam(DIGITS_MODEL, SEVEN)
    (one,), (image,) = found.maps, found.images
    assert (one.layer, image.target, image.path) == ("7", "class 7", None)
    guess = image.prediction[0]
    assert guess.index == 7 and image.outcome.target == pytest.approx(guess.score)
    ink = np.asarray(
        Image.open(SEVEN).convert("L").resize((7, 7), Image.Resampling.BOX)
    )
    values = found.tensor.numpy()
    assert values[ink > 40].mean() > 2 * values[ink < 5].mean()
    assert one.limits == pytest.approx((values.min(), values.max()))
    alone = np.asarray(fv.cam(DIGITS_MODEL, SEVEN, overlay=0).image)
    assert np.array_equal(alone, np.asarray(Image.open(SEVEN).convert("RGB")))
    large = Image.fromarray(values).resize((28, 28), Image.Resampling.BILINEAR)
    drawn = fv.cam(DIGITS_MODEL, SEVEN, overlay=1, cmap="grey").image
    grey = np.asarray(drawn.convert("L")) / 255 * values.max()
    assert np.abs(grey - np.asarray(large)).max() < 0.01 * values.max()


def test_json_has_a_line_for_each_image(featviz: Run) -> None:
    """With the target's value and the maps' layers, shapes and ranges; a folder for the
    files."""
    words = (
        "--target",
        "class:3",
        "--method",
        "gradxact",
        "--layers",
        "1,7",
        "--out",
        "cams",
    )
    done = featviz("cam", DIGITS_MODEL, FIVE, SEVEN, *words, "--json")
    assert done.code == 0 and done.err.endswith("2 pictures in cams\n")
    first, second = map(json.loads, done.out.splitlines())
    assert (first["file"], second["file"]) == (
        "cams/cam-00-5-class3.png",
        "cams/cam-05-7-class3.png",
    )
    assert (first["method"], first["target"]["of"]) == ("gradxact", "class 3")
    scores = {guess["index"]: guess["score"] for guess in first["prediction"]}
    assert first["target"]["value"] == pytest.approx(scores[3])
    assert [(row["layer"], row["shape"]) for row in first["maps"]] == [
        ("1", [28, 28]),
        ("7", [7, 7]),
    ]
    assert all(row["range"][0] == -row["range"][1] for row in first["maps"])


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("class:3", "cam-00-5-class3.png"),
        ("class:tabby", "cam-00-5-class-tabby.png"),
        ("box:0", "cam-00-5-box0.png"),
        ("sum", "cam-00-5-sum.png"),
        (None, "cam-00-5.png"),
    ],
)
def test_a_file_is_called_by_the_image_and_the_target(
    target: str | None, name: str
) -> None:
    """So maps for several targets lie in one folder; nothing is added for the predicted
    class."""
    files = picture_files([Sample(FIVE.name, (FIVE,))], Path("cams"), target)
    assert files == {FIVE.name: Path("cams") / name}


def test_the_title_says_how_probable_the_target_is(featviz: Run) -> None:
    """By torch's softmax, of a class that is not among the five likeliest, too."""
    for number in (3, 0, 5):
        found = fv.cam(DIGITS_MODEL, FIVE, f"class:{number}").images[0]
        guess = {score.index: score.probability for score in found.prediction}
        pixels = np.asarray(Image.open(FIVE).convert("L"), np.float32)[None, None] / 255
        with torch.no_grad():
            model = torch.load(DIGITS_MODEL, weights_only=False).eval()
            wanted = model(torch.from_numpy(pixels)).softmax(1)[0, number]
        assert found.target_probability == pytest.approx(float(wanted), rel=1e-4)
        assert number not in guess or guess[number] == pytest.approx(
            float(wanted), rel=1e-4
        )
    featviz("cam", DIGITS_MODEL, FIVE, "--target", "class:3", "--json")
    with Image.open("cam-00-5-class3.png") as opened:
        title = opened.info["Title"]
    assert title == "00-5.png: class 5 99.6 %; Grad-CAM for class 3 0.3 % at 7"


def test_a_target_that_is_no_class_has_no_probability() -> None:
    """The sum of the scores is a number, and no class."""
    found = fv.cam(DIGITS_MODEL, FIVE, "sum").images[0]
    assert found.target_probability is None and found.title.endswith("Grad-CAM for sum")


def test_an_image_that_fails_says_so_in_its_line(featviz: Run, tmp_path: Path) -> None:
    """The others are drawn, and the exit code is 3."""
    (tmp_path / "broken.png").write_bytes(b"no image")
    done = featviz(
        "cam", DIGITS_MODEL, FIVE, tmp_path / "broken.png", "--out", "cams", "--json"
    )
    lines = {line["image"]: line for line in map(json.loads, done.out.splitlines())}
    assert done.code == 3 and len(lines) == 2 and "error" not in lines[FIVE.name]
    assert "broken.png is no image that Pillow can read" in lines["broken.png"]["error"]


def test_images_of_one_name_have_pictures_of_their_own(
    featviz: Run, tmp_path: Path
) -> None:
    """a/x.png, b/x.png and b/x.bmp are three images."""
    for name in ("a/x.png", "b/x.png", "b/x.bmp"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.open(FIVE).save(path)
    assert featviz("cam", DIGITS_MODEL, "in", "--out", "out").code == 0
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == ["cam-a__x.png", "cam-b__x.bmp.png", "cam-b__x.png.png"]


def test_a_broken_image_fails_alone(featviz: Run, tmp_path: Path) -> None:
    """Exit code 3 beside one that is whole, 1 by itself; Python says so in `failures`."""
    (tmp_path / "broken.png").write_bytes(FIVE.read_bytes()[:99])
    done = featviz("cam", DIGITS_MODEL, FIVE, "broken.png")
    assert done.code == 3 and "error: broken.png: " in done.err
    assert featviz("cam", DIGITS_MODEL, "broken.png").code == 1
    assert not (tmp_path / "cam-broken.png").exists()
    found = fv.cam(DIGITS_MODEL, ["broken.png", FIVE])
    assert list(found.failures) == ["broken.png"] and len(found.maps) == 1
    assert repr(found) == "<ClassMaps, Grad-CAM of 2 images, 1 failed: 1 map>"
    assert (
        "broken.png failed: " in found._repr_html_()
        and "data:image/png" in found._repr_html_()
    )
    with pytest.raises(FeatvizError, match=r"cannot be read|truncated"):
        fv.cam(DIGITS_MODEL, "broken.png")


BAD = [
    (("--target", "class:10"), 2, "target 'class:10': there are 10 classes, 0 to 9"),
    (("--method", "gradcan"), 2, "rollout, attention\nhint: did you mean gradcam?"),
    (
        ("--layers", "9"),
        1,
        (
            "layer 9 (Flatten) has no places of the image: its output has the layout"
            " vector [N, F]"
        ),
    ),
    (("--out", "cam.jpg"), 2, "--out cam.jpg: cam writes PNG\nhint: --out cam.png"),
    (("--out", "notes"), 2, "--out notes is no folder"),
    (
        ("--out", "foreign.png"),
        1,
        "foreign.png is there and is no picture of featviz cam",
    ),
    ((SEVEN, "--out", "one.png"), 2, "would hold several images in one picture"),
]


@pytest.mark.parametrize(
    ("options", "code", "message"), BAD, ids=[bad[2] for bad in BAD]
)
def test_bad_input_gets_one_line(
    options: tuple[object, ...], code: int, message: str, featviz: Run, tmp_path: Path
) -> None:
    """And nothing is written."""
    (tmp_path / "notes").write_text("mine")
    Image.new("L", (4, 4)).save(tmp_path / "foreign.png")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    done = featviz("cam", DIGITS_MODEL, FIVE, *options)
    assert message in done.err and "Traceback" not in done.err
    assert done.code == code and done.err.lower().count("error: ") == 1
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_overwrite_and_the_image_itself(featviz: Run, tmp_path: Path) -> None:
    """--overwrite replaces a foreign file, and never the image."""
    Image.open(FIVE).save(tmp_path / "cam.png")
    done = featviz("cam", DIGITS_MODEL, "cam.png", "--out", "cam.png", "--overwrite")
    assert done.code == 2 and "--out cam.png is the input" in done.err
    assert (
        featviz("cam", DIGITS_MODEL, FIVE, "--out", "cam.png", "--overwrite").code == 0
    )
    assert Image.open("cam.png").info["Software"] == "featviz cam"


def test_an_output_that_is_no_classification(featviz: Run, tmp_path: Path) -> None:
    """A map of features is explained by its norm; asked for a class, the message names
    targets."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    torch.save(net, tmp_path / "net.pth")
    Image.new("RGB", (16, 16), "red").save(tmp_path / "red.png")
    words = ("cam", "net.pth", "red.png", "--size", "16", "--trust")
    done = featviz(*words)
    assert done.code == 0 and "red.png; Grad-CAM for norm at 2" in done.err
    done = featviz(*words, "--target", "class:1")
    assert done.code == 2 and "needs scores of classes [1, K]" in done.err
    done = featviz(*words, "--target", "sum")
    assert done.code == 0 and "red.png; Grad-CAM for sum at 2" in done.err


def test_a_module_is_given_back_as_it_was() -> None:
    """In training mode, without hooks and gradients, and its buffers untouched."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(784, 2)
    )
    image = torch.rand(3, 16, 16)
    before = state_of(net)
    assert fv.cam(net, image, size=16).tensor.shape == (14, 14)
    assert_same(before, state_of(net))
