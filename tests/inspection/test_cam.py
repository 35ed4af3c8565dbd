"""`featviz cam`: pictures, titles, files and messages."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from borrowed import assert_same, state_of
from conftest import DIGITS, DIGITS_MODEL, Run
from networks import Net, attend
from PIL import Image
from pixels import assert_same_pixels, pixels_of
from runs import refused, tree
from torch import Tensor, nn

import featviz as fv
from featviz.errors import FeatvizError
from featviz.inspection.cam import picture_files, target_probability
from featviz.models import preprocess, presets
from featviz.records import ATTENTION_MAPS, CLASS_MAPS, ClassScore, Outcome, Sample

FIVE = DIGITS / "00-5.png"
SEVEN = DIGITS / "05-7.png"


TITLE = "00-5.png: class 5 (99.6 %); Grad-CAM for class 5 at layer 7 (ReLU)"


@pytest.mark.medium
def test_one_picture_an_image_names_prediction_target_and_layer(
    featviz: Run, tmp_path: Path
) -> None:
    """It lies in the current folder, under the image's name, and says the same inside."""
    done = featviz("cam", DIGITS_MODEL, FIVE)
    assert (done.code, done.out) == (0, "")
    warning, title, end = done.err.splitlines()
    assert warning.startswith("warning: preprocessing is a guess, --preset none")
    assert title == TITLE
    assert end == "1 picture in cam-00-5.png"
    assert [path.name for path in tmp_path.iterdir()] == ["cam-00-5.png"]
    with Image.open("cam-00-5.png") as opened:
        assert opened.info == {"Software": "featviz cam", "Title": TITLE}


@pytest.mark.medium
def test_a_paper_gets_text_that_is_text(featviz: Run) -> None:
    """An SVG has the title, the layer and the colour bar's note, and two pictures and the
    bar; a PDF is one. Nothing else is written."""
    for name in ("five.svg", "five.pdf"):
        assert featviz("cam", DIGITS_MODEL, FIVE, "--out", name, "-q").code == 0
    assert sorted(tree(Path())) == ["five.pdf", "five.svg"]
    text = Path("five.svg").read_text("utf-8")
    words = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    assert {TITLE.partition(" at ")[0], "layer 7 (ReLU)", "evidence (Grad-CAM)"} <= {
        *words
    }
    assert text.count("<image") == 3
    data = Path("five.pdf").read_bytes()
    assert data.startswith(b"%PDF-")
    assert data.count(b"/Subtype /Image") == 3


def test_a_picture_of_its_own_is_drawn_again(featviz: Run) -> None:
    """The second command says what the first one said."""
    first = featviz("cam", DIGITS_MODEL, FIVE)
    assert featviz("cam", DIGITS_MODEL, FIVE) == first


@pytest.mark.medium
def test_a_result_names_the_target_and_its_score() -> None:
    """It has the layer, the likeliest class, and the number that gradients were taken
    of."""
    result = fv.cam(DIGITS_MODEL, SEVEN)
    (image,) = result.images
    likeliest = image.prediction[0]
    assert result.maps[0].layer == "7"
    assert image.target == "class 7"
    assert image.path is None
    assert likeliest.index == 7
    assert image.outcome.target == pytest.approx(likeliest.score)


@pytest.mark.medium
def test_a_title_says_that_weights_are_random() -> None:
    """A reader of the picture alone would take noise for evidence."""
    result = fv.cam("squeezenet1_1", FIVE, "class:3", weights="none", size=64)
    (image,) = result.images
    title = r"00-5\.png: class \d+ \(.* %\); Grad-CAM \(random weights\) for class 3 \("
    assert re.match(title, image.title)


@pytest.mark.medium
def test_the_map_lies_where_the_evidence_is() -> None:
    """A seven's evidence lies around its ink."""
    result = fv.cam(DIGITS_MODEL, SEVEN)
    values = result.tensor.numpy()
    photo = Image.open(SEVEN).convert("L")
    ink = np.asarray(photo.resize((7, 7), Image.Resampling.BOX))
    assert values[ink > 40].mean() > 2 * values[ink < 5].mean()
    assert result.maps[0].limits == pytest.approx((values.min(), values.max()))


def cam_of_bias(bias: float, weight: float = 1.0) -> fv.CamResult:
    """Grad-CAM for class 0 at a layer whose one map is a ramp above a bias."""
    layer = nn.Conv2d(1, 1, 1)
    nn.init.ones_(layer.weight)
    nn.init.constant_(layer.bias, bias)
    head = nn.Linear(1, 2)
    nn.init.constant_(head.weight, weight)
    pool = nn.AdaptiveAvgPool2d(1)
    ramp = torch.linspace(0, 1, 256).view(1, 16, 16)
    model = nn.Sequential(layer, pool, nn.Flatten(), head)
    options = {"overlay": 1, "cmap": "grey", "preset": "none"}
    return fv.cam(model, ramp, "class:0", layers="0", **options)


@pytest.mark.medium
def test_a_map_without_negative_values_begins_at_zero() -> None:
    """Its least value is not the darkest colour, which means no evidence."""
    result = cam_of_bias(1.0)
    values = result.tensor.numpy()
    assert values.min() == pytest.approx(values.max() / 2)
    assert result.maps[0].limits == pytest.approx((0.0, values.max()))
    levels = pixels_of(result.image.convert("L"))
    assert levels.min() == pytest.approx(128, abs=1)
    assert levels.max() == 255


@pytest.mark.medium
def test_a_map_of_zeros_says_so() -> None:
    """Its caption does, where Grad-CAM has nothing for the class."""
    (layer_map,) = cam_of_bias(-2.0).maps
    assert not layer_map.tensor.any()
    assert layer_map.caption == "layer 0 (Conv2d): zero everywhere"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("weight", "ending"), [(1e-20, "): practically zero"), (1e-3, ")")]
)
def test_a_map_of_rounding_noise_says_so(weight: float, ending: str) -> None:
    """Its colours are those of a map that means something; its caption tells them apart."""
    (layer_map,) = cam_of_bias(1.0, weight).maps
    assert layer_map.caption == f"layer 0 (Conv2d{ending}"


@pytest.mark.medium
def test_an_overlay_of_nothing_is_the_image() -> None:
    """With alpha 0 no map is seen."""
    picture = fv.cam(DIGITS_MODEL, SEVEN, overlay=0).image
    assert_same_pixels(picture, Image.open(SEVEN).convert("RGB"))


@pytest.mark.medium
def test_an_overlay_of_all_is_the_map() -> None:
    """With alpha 1 it is the map, enlarged by Pillow, in its colours."""
    result = fv.cam(DIGITS_MODEL, SEVEN, overlay=1, cmap="grey")
    values = result.tensor.numpy()
    enlarged = Image.fromarray(values).resize((28, 28), Image.Resampling.BILINEAR)
    drawn = pixels_of(result.image.convert("L")) / 255 * values.max()
    assert np.abs(drawn - pixels_of(enlarged)).max() < 0.01 * values.max()


@pytest.fixture
def lines(featviz: Run) -> list[dict[str, Any]]:
    """What --json says of two images, class 3 and two layers."""
    options = ("--target", "class:3", "--method", "gradxact", "--layers", "1,7")
    done = featviz(
        "cam", DIGITS_MODEL, FIVE, SEVEN, *options, "--out", "cams", "--json"
    )
    assert done.code == 0
    assert done.err.endswith("2 pictures in cams\n")
    return [json.loads(line) for line in done.out.splitlines()]


@pytest.mark.medium
def test_json_has_a_line_for_each_image(lines: list[dict[str, Any]]) -> None:
    """Each names its file in a folder, the method and the target with its score."""
    files = ["cams/cam-00-5-class3.png", "cams/cam-05-7-class3.png"]
    assert [line["file"] for line in lines] == files
    first = lines[0]
    scores = {guess["index"]: guess["score"] for guess in first["prediction"]}
    assert first["method"] == "gradxact"
    assert first["target"]["of"] == "class 3"
    assert first["target"]["value"] == pytest.approx(scores[3])


@pytest.mark.medium
def test_json_has_a_row_for_each_map(lines: list[dict[str, Any]]) -> None:
    """It names layer and shape, and a range around zero, since values have signs."""
    maps = lines[0]["maps"]
    shapes = [(row["layer"], row["shape"]) for row in maps]
    assert shapes == [("1", [28, 28]), ("7", [7, 7])]
    for row in maps:
        low, high = row["range"]
        assert low == -high < 0


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


def test_a_folder_may_be_called_like_a_picture() -> None:
    """One that is there holds the pictures; else the name is that of the picture."""
    samples = [Sample(FIVE.name, (FIVE,))]
    out = Path("maps.png")
    assert picture_files(samples, out, None) == {FIVE.name: out}
    out.mkdir()
    assert picture_files(samples, out, None) == {
        FIVE.name: out / f"cam-{FIVE.stem}.png"
    }


@pytest.mark.medium
@pytest.mark.parametrize("number", [3, 0, 5])
def test_a_target_has_the_probability_of_torchs_softmax(number: int) -> None:
    """A class that is not among the five likeliest has it, too."""
    model = torch.load(DIGITS_MODEL, weights_only=False).eval()
    pixels = torch.from_numpy(np.array(Image.open(FIVE).convert("L")))
    with torch.no_grad():
        probabilities = model(pixels[None, None] / 255).softmax(1)[0]
    expected = pytest.approx(float(probabilities[number]), rel=1e-4)

    (image,) = fv.cam(DIGITS_MODEL, FIVE, f"class:{number}").images

    assert image.target_probability == expected
    listed = {score.index: score.probability for score in image.prediction}
    assert listed.get(number, image.target_probability) == expected


def test_a_class_of_another_head_has_no_probability() -> None:
    """The prediction is of the scores, and says nothing of a tensor beside them."""
    likeliest = ClassScore(index=0, name=None, score=2.0, probability=0.9)
    outcome = Outcome(prediction=(likeliest,), target=1.0)

    of_scores = target_probability("class:1", outcome)
    of_other = target_probability("output[other]:class:1", outcome)

    assert of_scores == pytest.approx(0.9 / math.e)
    assert of_other is None


@pytest.mark.medium
def test_the_title_says_how_probable_the_target_is() -> None:
    """It stands behind the target, where that is not the likeliest class."""
    (image,) = fv.cam(DIGITS_MODEL, FIVE, "class:3").images
    assert image.title == "00-5.png: class 5 (99.6 %); Grad-CAM for class 3 (0.3 %)"


@pytest.mark.medium
def test_a_target_that_is_no_class_has_no_probability() -> None:
    """The sum of the scores is a number, and no class."""
    (image,) = fv.cam(DIGITS_MODEL, FIVE, "sum").images
    assert image.target_probability is None
    assert image.title.endswith("Grad-CAM for sum")


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """The first bytes of a picture."""
    path = tmp_path / "broken.png"
    path.write_bytes(FIVE.read_bytes()[:99])
    return path


@pytest.mark.medium
def test_an_image_that_fails_says_so_in_its_line(featviz: Run, broken: Path) -> None:
    """The others are drawn, and the exit code is 3."""
    done = featviz("cam", DIGITS_MODEL, FIVE, broken, "--out", "cams", "--json")
    assert done.code == 3
    drawn, failed = map(json.loads, done.out.splitlines())
    assert drawn["image"] == FIVE.name
    assert "error" not in drawn
    assert failed["image"] == "broken.png"
    assert "broken.png" in failed["error"]


@pytest.mark.medium
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


@pytest.mark.medium
def test_a_broken_image_alone_is_a_failure(
    featviz: Run, broken: Path, tmp_path: Path
) -> None:
    """The command exits with 1 and draws nothing; Python raises."""
    assert featviz("cam", DIGITS_MODEL, broken).code == 1
    assert not (tmp_path / "cam-broken.png").exists()
    with pytest.raises(FeatvizError, match=r"cannot be read|truncated"):
        fv.cam(DIGITS_MODEL, broken)


@pytest.mark.medium
def test_a_broken_image_among_others_is_a_failure_of_the_result(broken: Path) -> None:
    """The short form and the page name it beside the map of the other."""
    result = fv.cam(DIGITS_MODEL, [broken, FIVE])
    ((image, reason),) = result.failures.items()
    assert image == "broken.png"
    assert reason == str(result.images[0].error)
    assert len(result.maps) == 1
    assert result.image == result.maps[0].image
    assert repr(result) == "<ClassMaps, Grad-CAM of 2 images, 1 failed: 1 map>"
    html = result._repr_html_()
    assert "broken.png failed: " in html
    assert "data:image/png" in html


NO_PLACES = "layer 9 (has no places of the image: its output has the layout"
BAD = [
    (("--target", "class:10"), 2, "target 'class:10': there are 10 classes, 0 to 9"),
    (("--method", "gradcan"), 2, "rollout, attention\nhint: did you mean gradcam?"),
    (("--layers", "9"), 1, f"{NO_PLACES} vector [N, F])"),
    (("--out", "cam.jpg"), 2, "--out cam.jpg: cam writes PNG, PDF, SVG\nhint: --out"),
    (("--out", "notes"), 2, "--out notes is no folder"),
    (
        ("--out", "foreign.png"),
        1,
        "foreign.png is there and is no picture that says featviz cam drew it",
    ),
    ((SEVEN, "--out", "one.png"), 2, "would hold several images in one picture"),
]


@pytest.mark.parametrize(
    ("options", "code", "message"), BAD, ids=[bad[2] for bad in BAD]
)
def test_bad_input_gets_one_line(
    options: tuple[object, ...], code: int, message: str, featviz: Run, tmp_path: Path
) -> None:
    """It says what is wrong, and nothing is written."""
    (tmp_path / "notes").write_text("mine")
    Image.new("L", (4, 4)).save(tmp_path / "foreign.png")
    before = tree(tmp_path)
    refused(featviz("cam", DIGITS_MODEL, FIVE, *options), code, message)
    assert tree(tmp_path) == before


@pytest.mark.medium
def test_overwrite_and_the_image_itself(featviz: Run) -> None:
    """--overwrite replaces a foreign file, and never the image."""
    Image.open(FIVE).save("cam.png")
    options = ("--out", "cam.png", "--overwrite")
    refused(featviz("cam", DIGITS_MODEL, "cam.png", *options), 2, "is the input")
    assert featviz("cam", DIGITS_MODEL, FIVE, *options).code == 0
    assert Image.open("cam.png").info["Software"] == "featviz cam"


@pytest.mark.medium
@pytest.mark.parametrize(
    ("target", "code", "message"),
    [
        ([], 0, "red.png; Grad-CAM for norm at layer 2 (Conv2d)"),
        (["--target", "sum"], 0, "red.png; Grad-CAM for sum at layer 2 (Conv2d)"),
        (["--target", "class:1"], 2, "needs scores of classes [1, K]"),
    ],
)
def test_an_output_that_is_no_classification(
    target: list[str], code: int, message: str, featviz: Run
) -> None:
    """A map of features is explained by its norm; asked for a class, the message names
    targets."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
    torch.save(net, "net.pth")
    Image.new("RGB", (16, 16), "red").save("red.png")
    done = featviz("cam", "net.pth", "red.png", "--size", "16", *target)
    assert done.code == code
    assert message in done.err


def test_a_module_is_given_back_as_it_was() -> None:
    """It is in training mode, without hooks and gradients, and its buffers are
    untouched."""
    head = nn.Linear(784, 2)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), head)
    image = torch.rand(3, 16, 16)
    before = state_of(net)
    result = fv.cam(net, image, size=16)
    assert result.tensor.shape == (14, 14)
    assert_same(before, state_of(net))


@pytest.mark.parametrize("method", [*CLASS_MAPS, *ATTENTION_MAPS])
def test_maps_stand_in_the_order_in_which_layers_run(method: str) -> None:
    """The order of the model's own hooks, whatever the maps are made of."""
    net = nn.Sequential(*(Net(attend) for _ in range(3)))
    ran: list[str] = []
    for name, layer in net.named_children():
        layer.register_forward_hook(lambda *_, name=name: ran.append(name))

    result = fv.cam(net, torch.rand(3, 6, 6), None, method, "2,0,1", preset="none")

    assert ran[:3] == ["0", "1", "2"]
    assert [layer_map.layer for layer_map in result.maps] == ran[:3]


def twice(self: nn.Module, x: Tensor) -> Tensor:
    """A way of `Net`: the same layer runs again behind itself."""
    maps = self.again(self.again(self.first(x)))
    return self.head(maps.mean((2, 3)))  # type: ignore[no-any-return]


def test_the_map_is_of_the_last_layer_that_runs_once() -> None:
    """One that runs twice has two outputs, and is taken only where there is no other."""
    first, again = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 1)
    net = Net(twice, first=first, again=again, head=nn.Linear(4, 2))
    image = torch.rand(3, 8, 8)
    (layer_map,) = fv.cam(net, image, "class:1", preset="none").maps
    assert layer_map.layer == "first"


def detect(self: nn.Module, x: Tensor) -> list[dict[str, Tensor]]:
    """A way of `Net`: one box, from column 20 to 36 and row 24 to 40 of the input."""
    score = self.conv(x).mean().sigmoid()
    boxes = torch.tensor([[20.0, 24.0, 36.0, 40.0]])
    return [{"boxes": boxes, "labels": torch.ones(1).long(), "scores": score[None]}]


def segment(self: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """A way of `Net`: half as many scores as pixels; class 1 wins from column 20 to 35
    and row 24 to 39 of the input."""
    scores = self.conv(x)[:, :, ::2, ::2] / 100
    scores[:, 0] += 1
    scores[:, 1, 12:20, 10:18] += 2
    return {"out": scores}


@pytest.fixture
def pads(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Has the preset yolo pad images by so many rows above, and columns to the left."""

    def begin(top: int, left: int) -> None:
        def pad(image: np.ndarray) -> np.ndarray:
            margins = ((top, 0), (left, 0), (0, 0))
            return np.pad(image, margins, constant_values=114)

        # in place of Ultralytics' LetterBox, which takes seconds to import
        for module in (preprocess, presets):
            monkeypatch.setattr(
                module, "import_letterbox", lambda: lambda *_, **__: pad
            )

    return begin


@pytest.mark.parametrize(("top", "left"), [(8, 0), (0, 6), (12, 4)])
def test_the_edge_of_a_region_is_where_it_is_without_the_padding(
    top: int, left: int, pads: Callable[[int, int], None]
) -> None:
    """The white line lies on the outermost pixels of the region, moved by what is padded
    above and to the left."""
    pads(top, left)
    net = Net(segment, conv=nn.Conv2d(3, 2, 1))
    photo = np.full((64 - top, 64 - left, 3), 90, np.uint8)

    result = fv.cam(
        net, photo, "class:1", preset="yolo", size=64, layers="conv", overlay=0
    )

    rows, columns = np.nonzero((np.asarray(result.image) == 255).all(2))
    assert (columns.min(), columns.max()) == (20 - left, 35 - left)
    assert (rows.min(), rows.max()) == (24 - top, 39 - top)


@pytest.mark.parametrize(("top", "left"), [(9, 0), (0, 7), (13, 5)])
def test_a_box_is_marked_where_it_is_without_the_padding(
    top: int, left: int, pads: Callable[[int, int], None]
) -> None:
    """All four edges of its dark line move by what numpy has padded above and to the
    left."""
    pads(top, left)
    net = Net(detect, conv=nn.Conv2d(3, 2, 1))
    photo = np.full((64 - top, 64 - left, 3), 90, np.uint8)

    result = fv.cam(net, photo, preset="yolo", size=64, overlay=0)

    drawn = np.asarray(result.image)
    assert drawn.shape == photo.shape
    rows, columns = np.nonzero((drawn == 0).all(2))
    assert (columns.min(), columns.max()) == (20 - left, 36 - left)
    assert (rows.min(), rows.max()) == (24 - top, 40 - top)
