"""Forward and backward passes: what they leave behind, whatever happens; predictions; refusals."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from borrowed import assert_same, state_of
from conftest import DIGITS, DIGITS_MODEL, SCENES, Outcome
from oracle import assert_close, input_of, inputs, saved
from PIL import Image
from torch import Tensor, nn
from torchvision import models

import featviz as fv
from featviz.errors import ForwardError, UsageError
from featviz.gradients import predictions
from featviz.models.load import adopt
from featviz.models.preprocess import InputOptions
from featviz.pipeline import run
from featviz.pipeline.options import RunOptions
from featviz.records import PassOptions
from featviz.rundir.read import read_json

SPHERES = SCENES / "spheres.jpg"


def everything_of(model: nn.Module) -> dict[str, Any]:
    """What may be borrowed of a model and of torch, and every hook there can be."""
    state = state_of(model)
    modules, parameters = list(model.modules()), list(model.parameters())
    return {
        **state,
        "values": [p.detach().clone() for p in parameters],
        "versions": [p._version for p in parameters],
        "tensor hooks": [p._backward_hooks for p in parameters],
        "backward hooks": [
            len(m._backward_hooks) + len(m._backward_pre_hooks) + len(m._forward_hooks_with_kwargs)
            for m in modules
        ],
        "attributes": [sorted(vars(m)) for m in modules],
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "function modes": torch._C._len_torch_function_stack(),
    }


def assert_untouched(before: dict[str, Any], after: dict[str, Any]) -> None:
    pairs = zip(before.pop("values"), after.pop("values"), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert_same(before, after)


class Explode(torch.autograd.Function):
    """Raises on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise ValueError("no way\nback")


class Restless(nn.Module):
    """Draws random numbers, changes its buffers, gives its parameter, keeps its features, and
    fails where it is told to."""

    def __init__(self, fails: str = "") -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.relu, self.fc = nn.ReLU(inplace=True), nn.Linear(4, 5)
        self.given = Given()
        self.fails, self.features = fails, None
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        x = self.relu(self.norm(self.conv(x))) + torch.rand(1)
        self.features = x
        if self.fails == "forward":
            raise ValueError("no way")
        if self.fails == "interrupt":
            raise KeyboardInterrupt
        x = Explode.apply(x) if self.fails == "backward" else x
        return self.fc(x.mean((2, 3))) * self.given()


class Given(nn.Module):
    """Gives its parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(1, 5))

    def forward(self) -> Tensor:
        return self.value


FAILURES: dict[str, tuple[type[BaseException], str] | None] = {
    "": None,
    "forward": (ForwardError, r"the model failed in Restless: no way$"),
    "backward": (ForwardError, r"the backward pass failed: no way$"),
    "interrupt": (KeyboardInterrupt, "^$"),
    "sink": (ZeroDivisionError, "ours"),
}


@pytest.mark.parametrize("fails", FAILURES)
@pytest.mark.parametrize("rule", ["plain", "guided"])
def test_the_model_is_as_before_whatever_happens(
    fails: str, rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters, buffers, requires_grad, .grad, training flags, hooks of modules and tensors,
    RNG state and modes, after gradients and interventions, also after a raise."""
    torch.manual_seed(0)
    model = Restless(fails).train()
    model.norm.eval()
    model.conv.requires_grad_(False)
    model.fc.weight.grad = torch.ones_like(model.fc.weight)
    if fails == "sink":
        from featviz.drawing.drawer import Drawer

        monkeypatch.setattr(Drawer, "draw", _broken)
    before = everything_of(model)
    options = {
        "capture": "output,input,grad,grad-input", "target": "layer:fc:1", "grad_rule": rule,
        "ablate": "conv:1", "noise": "norm:0.1", "grad_scale": "given:2", "clamp": "fc:-1,1",
    }  # fmt: skip
    expected = FAILURES[fails]
    if expected is None:
        result = fv.run(model, SPHERES, "*,fn:mean", tmp_path / "out", **options, **inputs(12))
        assert result.exit_code == 0
        skipped = [(skip.layer, skip.kind) for skip in result.images[0].skipped]
        none = [("given", "input"), ("given", "grad-input")]
        assert skipped == [*none, ("given", "grad"), ("", "grad")]  # the last are behind the target
        assert model.features._backward_hooks in (None, {})
    else:
        with pytest.raises(expected[0], match=expected[1]):
            fv.run(model, SPHERES, "*", tmp_path / "out", **options, **inputs(12))
    assert_untouched(before, everything_of(model))


def _broken(*arguments: object) -> None:
    raise ZeroDivisionError("ours")


def test_a_failing_image_leaves_nothing_and_the_others_go_on(
    tmp_path: Path, featviz: Callable[..., Outcome]
) -> None:
    """A model that fails for one picture only: exit 3, nothing of it is written."""
    code = (
        "import torch\nfrom torch import nn\n"
        "class Picky(torch.autograd.Function):\n"
        "    @staticmethod\n"
        "    def forward(ctx, x):\n"
        "        ctx.bad = bool(x.max() > 0.9)\n"
        "        return x.clone()\n"
        "    @staticmethod\n"
        "    def backward(ctx, g):\n"
        "        if ctx.bad: raise RuntimeError('too bright')\n"
        "        return g\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.conv = nn.Conv2d(1, 2, 1)\n"
        "    def forward(self, x):\n"
        "        return self.conv(Picky.apply(x)).mean((2, 3))\n"
    )
    (tmp_path / "picky_nets.py").write_text(code)
    (tmp_path / "in").mkdir()
    for name, level in (("a.png", 10), ("b.png", 255), ("c.png", 20)):
        Image.new("L", (5, 5), level).save(tmp_path / "in" / name)
    done = featviz(
        "run", f"{tmp_path}/picky_nets.py:Net", tmp_path / "in", "--capture", "output,grad",
        "--layers", "conv", "--out", tmp_path / "out",
    )  # fmt: skip
    assert done.code == 3
    assert "error: b.png: the backward pass failed: too bright\n" in done.err
    assert "hint: without grad and grad-input in --capture none is needed" in done.err
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "a.png", "c.png", "run.json",
    ]  # fmt: skip
    assert read_json(tmp_path / "out" / "run.json")["failures"] == [
        {"image": "b.png", "error": "the backward pass failed: too bright"}
    ]


class Moody(nn.Module):
    """Gives scores of dark pictures, and two maps of bright ones."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act = nn.Conv2d(1, 3, 1), Shy()

    def forward(self, x: Tensor) -> Any:
        x = self.act(self.conv(x))
        return x.mean((2, 3)) if x.mean() < 100 else {"maps": x}


class Shy(nn.Module):
    """Multiplies by a hundred what is bright."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.max() < 0.9 else x * 1000


def test_an_output_that_fits_for_some_images_fails_for_the_others(tmp_path: Path) -> None:
    """The trial on zeros cannot know: exit code 3, and the others are complete."""
    model = Moody()
    nn.init.ones_(model.conv.weight)
    nn.init.zeros_(model.conv.bias)
    for name, level in (("a.png", 10), ("b.png", 255), ("c.png", 20)):
        Image.new("L", (5, 5), level).save(tmp_path / name)
    result = fv.run(model, str(tmp_path / "*.png"), "conv", tmp_path / "out", capture="grad")
    assert result.exit_code == 3
    assert [image.error for image in result.images] == [
        None,
        "--target 'top1': the output is no tensor; the model gives output[maps] [1, 3, 5, 5]",
        None,
    ]
    assert not (tmp_path / "out" / "b.png").exists()


class Wordy(nn.Module):
    """Gives a word beside its scores."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Words()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]


class Words(nn.Module):
    """A tensor and a word."""

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return x.mean((2, 3)), "word"


def test_what_is_no_tensor_is_skipped_for_each_kind(tmp_path: Path) -> None:
    """Also where only gradients are captured, nothing is lost without a word."""
    result = fv.run(
        Wordy(), SPHERES, "inner", tmp_path / "out", capture="output,grad", **inputs(8)
    )  # fmt: skip
    found = [(skip.kind, skip.key, skip.reason) for skip in result.images[0].skipped]
    assert found == [(kind, "1", "is a str, not a tensor") for kind in ("output", "grad")]
    assert [row.kind for row in result.images[0].captures] == ["output", "grad"]


def test_nan_effects_are_json(tmp_path: Path, featviz: Callable[..., Outcome]) -> None:
    """An intervention that turns the output into NaN: null would say that its shape changed."""
    code = (
        "import torch\nfrom torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.one = nn.Identity()\n"
        "    def forward(self, x):\n"
        "        x = self.one(x * 0 + 1).mean((2, 3))\n"
        "        return x / x\n"
    )
    (tmp_path / "nan_nets.py").write_text(code)
    done = featviz(
        "run", f"{tmp_path}/nan_nets.py:Net", SPHERES, "--layers", "one", "--ablate", "one:0",
        "--size", "8x8", "--mean", "0,0,0", "--std", "1,1,1", "--out", tmp_path / "out", "--json",
    )  # fmt: skip
    assert done.code == 0
    effect = json.loads(done.out, parse_constant=pytest.fail)["effect"]
    assert (effect["largest_change"], effect["nonfinite"]) == (0.0, 1)
    assert (
        "spheres.jpg: the output changed by at most 0, and 1 of its values became NaN or infinite, "
        "or ceased to be\n"
    ) in done.err


def test_a_model_that_undoes_its_graph_in_place_is_told_by_torchs_words(tmp_path: Path) -> None:
    """torch refuses x.sigmoid_().mul_(x), and so do we, in one line."""

    class Undone(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.sigmoid()
            x.add_(1)
            return x.mean((2, 3))

    with pytest.raises(ForwardError) as caught:
        fv.run(Undone(), SPHERES, "*", tmp_path / "out", capture="grad", **inputs(8))
    assert caught.value.message.startswith(
        "the backward pass failed: one of the variables needed for gradient computation has been "
        "modified by an inplace operation"
    )
    assert "\n" not in caught.value.message
    assert not (tmp_path / "out").exists()


# --- memory


@pytest.mark.slow
def test_nothing_of_a_graph_outlives_its_image(tmp_path: Path) -> None:
    """After the eighth image there are no more tensors than after the third."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3),
        nn.Flatten(),
        nn.LazyLinear(5),
    )
    model(torch.zeros(1, 3, 16, 16))
    for index in range(8):
        (tmp_path / f"{index}.jpg").write_bytes(SPHERES.read_bytes())
    alive: list[int] = []
    seen: list[object] = []

    def count(image: object, total: int) -> None:
        seen.append(image)
        if len(seen) in (3, 8):
            gc.collect()
            alive.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))

    options = InputOptions(**inputs(16))
    passes = PassOptions(
        ("output", "input", "grad", "grad-input"), None, "guided", (("noise", "0:0.1"),)
    )
    drawn = RunOptions("*", tmp_path / "out", inputs=options, passes=passes)
    run(adopt(model, options), [str(tmp_path / "*.jpg")], drawn, count)
    assert len(alive) == 2
    assert alive[1] <= alive[0]


@pytest.mark.slow
def test_memory_stays_flat_over_100_images_with_gradients(tmp_path: Path) -> None:
    """The process grows by less than 30 MB after the tenth image; 90 graphs of resnet18 at this
    size would take more than 150 MB."""
    (tmp_path / "in").mkdir()
    for index in range(100):
        (tmp_path / "in" / f"{index:03d}.jpg").write_bytes(SPHERES.read_bytes())
    resident: list[int] = []

    def watch(image: object, total: int) -> None:
        resident.append(int(Path("/proc/self/statm").read_text().split()[1]) * 4096)

    options = InputOptions(**inputs(64))
    passes = PassOptions(("output", "grad"), None, "guided", (("ablate", "layer1:0"),))
    drawn = RunOptions("ReLU", tmp_path / "out", inputs=options, passes=passes)
    model = adopt(models.resnet18().eval(), options)
    run(model, [str(tmp_path / "in")], drawn, watch)
    assert len(resident) == 100
    assert max(resident[10:]) - resident[9] < 30e6


# --- predictions


def test_predictions_are_softmax_and_topk(tmp_path: Path, featviz: Callable[..., Outcome]) -> None:
    """Manifest, --json and stderr say the five likeliest classes, as torch counts them."""
    model = torch.load(DIGITS_MODEL, weights_only=False).eval()
    files = sorted(DIGITS.iterdir())[:3]
    done = featviz(
        "run", DIGITS_MODEL, *files, "--layers", "Linear", "--out", tmp_path / "out", "--json"
    )
    lines = [json.loads(line) for line in done.out.splitlines()]
    for file, line in zip(files, lines, strict=True):
        with torch.no_grad():
            scores = model(input_of(model, file, {}))[0]
        shares, order = scores.softmax(0).topk(5)
        assert [guess["index"] for guess in line["prediction"]] == order.tolist()
        assert line["prediction"][0]["index"] == int(file.stem[-1])
        probabilities = [guess["probability"] for guess in line["prediction"]]
        assert probabilities == pytest.approx(shares.tolist(), rel=1e-4, abs=1e-7)
        assert [g["score"] for g in line["prediction"]] == pytest.approx(
            scores[order].tolist(), rel=1e-4
        )
        manifest = read_json(tmp_path / "out" / file.name / "manifest.json")
        assert manifest["prediction"] == line["prediction"]
        words = ", ".join(
            f"class {i} {100 * share:.1f} %"
            for i, share in zip(order.tolist(), probabilities, strict=True)
        )
        assert f"{file.name}: {words}\n" in done.err


def test_predictions_have_names_only_of_their_own_classes() -> None:
    """Names of 3 classes are not put on 4; of outputs that are no scores there is no prediction."""
    scores = torch.tensor([[0.0, 2.0, 1.0]])
    named = predictions.top_classes(scores, ("a", "b", "c"))
    assert [guess.name for guess in named] == ["b", "c", "a"]
    assert named[0].words == "b 66.5 %"
    other = predictions.top_classes(torch.zeros(1, 4), ("a", "b", "c"))
    assert {guess.name for guess in other} == {None}
    assert other[0].words.startswith("class ")
    nothing = [scores[0], scores[:, :1], torch.zeros(2, 3), scores / 0, {"out": scores}, None]
    assert [predictions.top_classes(output) for output in nothing] == [()] * 6


def test_torchvisions_names_come_with_its_weights(tmp_path: Path) -> None:
    """Random weights have no names of classes, and the built entry has a thousand."""
    from featviz.models.load import Loaded, _categories

    entry = models.ResNet18_Weights.DEFAULT
    module = nn.Identity()
    assert _categories(Loaded(module, entry, {"weights": "default"})) == tuple(
        entry.meta["categories"]
    )
    assert _categories(Loaded(module, entry, {"weights": "none"})) == ()
    assert _categories(Loaded(module, None, {})) == ()


# --- the command line


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        (("--capture", "output,gard"), "--capture 'gard' is nothing to capture",
         "give some of output, input, grad, grad-input, separated by commas"),
        (("--capture", " , "), "--capture is empty",
         "give some of output, input, grad, grad-input, separated by commas"),
        (("--target", "sum"), "--target does nothing without gradients",
         "add --capture output,grad"),
        (("--grad-rule", "guided", "--capture", "input"),
         "--grad-rule does nothing without gradients", "add --capture output,grad"),
        (("--grad-scale", "conv1:2"), "--grad-scale does nothing without gradients",
         "add --capture output,grad"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(
    arguments: tuple[str, ...], message: str, hint: str, featviz: Callable[..., Outcome]
) -> None:
    """Before any model is loaded."""
    done = featviz("run", "no_such_model", SPHERES, *arguments)
    assert (done.code, done.err) == (2, f"error: {message}\nhint: {hint}\n")


def test_unknown_rule_is_clicks_own_usage_error(featviz: Callable[..., Outcome]) -> None:
    """With the choices."""
    done = featviz("run", "no_such_model", SPHERES, "--capture", "grad", "--grad-rule", "guide")
    assert done.code == 2
    assert "'guide' is not one of 'plain', 'guided', 'deconv'" in done.err


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
        "input.png", "output.png", "grad.png", "grad-input.png",
    }  # fmt: skip
    reason = "has no gradient: the target does not depend on it"
    view = f"{reason}, or it is a view that was changed in place"  # what Flatten gives
    assert planned["skipped"] == [
        {"layer": "4", "reason": view},
        {"layer": "4", "reason": reason},
    ]
    assert done["skipped"] == 2


def test_dry_run_refuses_as_a_run_does(
    tiny_file: Path, featviz: Callable[..., Outcome], tmp_path: Path
) -> None:
    """Targets and interventions that do not fit."""
    done = featviz("run", tiny_file, SPHERES, "--dry-run", "--ablate", "0:9", "--size", "16")
    assert (done.code, done.err.splitlines()[-1]) == (
        2, "error: --ablate '0:9': 0 has channels 0 to 3, not 9",
    )  # fmt: skip


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


def test_the_same_command_writes_the_same_bytes(tiny: nn.Module, tmp_path: Path) -> None:
    """Gradients, rules and noise included."""
    options = {"capture": "output,grad", "grad_rule": "deconv", "noise": "0:0.3", "seed": 5}
    for name in ("one", "two"):
        fv.run(tiny, SPHERES, "*", tmp_path / name, **options, **inputs(16))
    files = [p for p in (tmp_path / "one").rglob("*") if p.is_file()]
    assert len(files) > 10
    for path in files:
        other = tmp_path / "two" / path.relative_to(tmp_path / "one")
        assert path.read_bytes() == other.read_bytes(), path


# --- models of other kinds


class Clip(nn.Module):
    """A model of clips."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.relu = nn.Conv3d(3, 4, 3, padding=1), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.conv(x)).mean((2, 3, 4))


def test_clips_have_gradients(tmp_path: Path) -> None:
    """[1, C, T, H, W], each channel's steps side by side."""
    torch.manual_seed(0)
    model = Clip().eval()
    (tmp_path / "clip").mkdir()
    rng = np.random.default_rng(0)
    for index in range(4):
        pixels = rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / "clip" / f"{index}.png")
    fv.run(
        model, tmp_path / "clip", "conv", tmp_path / "out", capture="grad,grad-input", target="sum",
        frames=4, tensors="npy", ablate="conv:1", **inputs(8),
    )  # fmt: skip
    got = saved(tmp_path / "out" / "clip")
    assert got["conv", "grad-input"].shape == (1, 3, 4, 8, 8)
    gradient = got["conv", "grad"]
    assert not gradient[0, 1].any()  # relu of a channel that is zero
    assert gradient.unique().tolist() == [0.0, 1 / 256]  # 4 steps of 8×8
    weights = model.conv.weight.clone()
    weights[1] = 0
    want = torch.nn.grad.conv3d_input((1, 3, 4, 8, 8), weights, gradient, padding=1)
    assert_close(got["conv", "grad-input"], want.detach())
    row = read_json(tmp_path / "out" / "clip" / "manifest.json")["captures"][0]
    assert (row["layout"], row["slices"]) == ("ncthw", [4, 4])


class Stereo(nn.Module):
    """Takes two images, one of which it needs twice as much."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return (self.conv(left) + 2 * self.conv(right)).mean((2, 3))


def test_two_images_have_their_own_gradients(tmp_path: Path) -> None:
    """Both inputs require gradients; the model itself shows them as two inputs."""
    files = [SPHERES, SCENES / "landscape.jpg"]
    options = {**inputs(8), "size": (8, 8)}
    fv.run(
        Stereo(), files, "*", tmp_path / "out", capture="input,grad-input,grad", target="sum",
        tensors="npy", **options,
    )  # fmt: skip
    got = saved(tmp_path / "out" / "spheres.jpg+landscape.jpg")
    assert_close(got["", "grad-input.1"], 2 * got["", "grad-input.0"])
    assert torch.equal(got["conv", "grad-input.call1"], got["", "grad-input.1"])
    assert_close(got["conv", "grad.call1"], 2 * got["conv", "grad"])
    assert torch.equal(got["", "input.1"], got["conv", "input.call1"])


def quantised() -> nn.Module:
    """A convolution of eight bits."""
    torch.manual_seed(0)
    torch.backends.quantized.engine = torch.backends.quantized.supported_engines[-1]
    model = nn.Sequential(
        torch.ao.quantization.QuantStub(), nn.Conv2d(3, 2, 1), torch.ao.quantization.DeQuantStub()
    ).eval()
    model.qconfig = torch.ao.quantization.default_qconfig
    torch.ao.quantization.prepare(model, inplace=True)
    model(torch.randn(1, 3, 8, 8))
    return torch.ao.quantization.convert(model)


@pytest.mark.filterwarnings("ignore")
def test_quantised_models_have_no_gradients(tmp_path: Path) -> None:
    """A clear refusal for gradients and interventions, and outputs as ever."""
    model = quantised()
    with pytest.raises(UsageError) as caught:
        fv.run(model, SPHERES, "1", tmp_path / "out", capture="grad", target="sum", **inputs(8))
    assert caught.value.message == "--target 'sum': no gradient flows back from it"
    assert "quantized" in str(caught.value.hint)
    with pytest.raises(UsageError, match=r"--clamp '1:0,1': 1 gives a quantized tensor"):
        fv.run(model, SPHERES, "1", tmp_path / "out", clamp="1:0,1", **inputs(8))
    assert not (tmp_path / "out").exists()
    fv.run(model, SPHERES, "1", tmp_path / "out", capture="output,input", **inputs(8))


@pytest.mark.slow
def test_segmentation_and_detection(tmp_path: Path, featviz: Callable[..., Outcome]) -> None:
    """Dicts and lists: refused with what there is, and reached into when asked for."""
    fixed = ("--weights", "none", "--size", "64", "--capture", "grad", "--out", tmp_path / "out")
    done = featviz("run", "lraspp_mobilenet_v3_large", SPHERES, *fixed)
    assert done.code == 2
    assert "the model gives output[out] [1, 21, 64, 64]\n" in done.err
    assert not (tmp_path / "out").exists()
    done = featviz(
        "run", "lraspp_mobilenet_v3_large", SPHERES, *fixed, "--target", "output[out]:mean",
        "--layers", "classifier.low_classifier",
    )  # fmt: skip
    assert done.code == 0
    rows = read_json(tmp_path / "out" / "spheres.jpg" / "manifest.json")["captures"]
    assert [(row["layer"], row["shape"]) for row in rows] == [
        ("classifier.low_classifier", [1, 21, 8, 8])
    ]
    assert rows[0]["mean"] == pytest.approx(1 / (21 * 8 * 8), rel=1e-3)
    name = "fasterrcnn_mobilenet_v3_large_320_fpn"
    done = featviz("run", name, SPHERES, *fixed, "--overwrite")
    assert done.code == 2
    assert (
        "the model gives output[0][boxes] [0, 4], output[0][labels] [0], output[0][scores] [0]"
        in (done.err)
    )
    done = featviz("run", name, SPHERES, *fixed, "--overwrite", "--target", "output[0][labels]:sum")
    assert "'output[0][labels]:sum': it holds torch.int64, and has no gradient" in done.err


@pytest.mark.slow
def test_optical_flow(tmp_path: Path) -> None:
    """RAFT: two images, twelve outputs, a loop that calls its update block twelve times."""
    torch.manual_seed(0)
    files = [SPHERES, SCENES / "landscape.jpg"]
    options = {"weights": "none", "size": (128, 128), "capture": "grad", "tensors": "npy"}
    with pytest.raises(UsageError, match=r"output\[0\] \[1, 2, 128, 128\].* and 4 more"):
        fv.run("raft_small", files, "*flow_head", tmp_path / "out", **options)
    result = fv.run(
        "raft_small", files, "*.flow_head.conv2,*.convgru1.convq", tmp_path / "out",
        target="output[11]:mean", **options,
    )  # fmt: skip
    calls = [row.layer.rpartition(".")[2] for row in result.images[0].captures]
    assert (calls.count("convq"), calls.count("conv2")) == (12, 1)
    skipped = [(skip.layer.rpartition(".")[2], skip.call) for skip in result.images[0].skipped]
    assert skipped == [("conv2", call) for call in range(11)]  # RAFT detaches earlier flows
    got = saved(next(path for path in (tmp_path / "out").iterdir() if path.is_dir()))
    assert all(bool(gradient.any()) for gradient in got.values())
