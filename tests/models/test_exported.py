""".pt2 files: the original's layers and pictures."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import export
from networks import Net
from PIL import Image
from torch import Tensor, nn
from torchvision import models

from featviz.errors import LoadError
from featviz.hooks.capture import hooked
from featviz.hooks.eval_mode import in_eval_mode
from featviz.hooks.layers import list_layers
from featviz.models import weights
from featviz.models.load import LoadedModel, load_model
from featviz.models.weights import read_program
from featviz.options import InputOptions, ModelOptions
from featviz.records import CaptureSite


def load(
    path: object, inputs: InputOptions | None = None, **options: Any
) -> LoadedModel:
    chosen = ModelOptions(str(path), device="cpu", trust=True, **options)
    return load_model(chosen, inputs or InputOptions())


def captured(module: nn.Module, image: Tensor) -> dict[tuple[str, int, str], Tensor]:
    """What every layer gives, by name, call and key."""
    found: dict[tuple[str, int, str], Tensor] = {}

    def keep(site: CaptureSite, tensor: Tensor) -> None:
        found[site.layer.name, site.call, site.key] = tensor.clone()

    with in_eval_mode(module), hooked(module, list_layers(module), keep):
        module(image)
    return found


@pytest.fixture
def exported(tiny: nn.Module, tmp_path: Path) -> Path:
    return export(tiny, tmp_path / "tiny.pt2")


@pytest.mark.parametrize(
    "make",
    [lambda: models.SwinTransformer([4, 4], 16, [2, 2], [2, 2], [4, 4])],
    ids=["swin"],
)
@pytest.mark.slow
def test_every_call_of_every_layer_is_the_eager_models(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """Names, classes, aliases, calls and feature maps are those of the model that was
    exported."""
    torch.manual_seed(0)
    eager = make().eval()
    module = load(export(eager, tmp_path / "m.pt2", 1, 3, 64, 64)).module
    image = torch.randn(1, 3, 64, 64)
    expected, found = captured(eager, image), captured(module, image)
    layers, originals = ({x.name: x for x in list_layers(m)} for m in (module, eager))
    idle = {originals[site[0]].type for site in expected.keys() - found.keys()}
    # eval: it does nothing
    assert found.keys() <= expected.keys() and idle <= {"StochasticDepth"}
    for site, tensor in found.items():
        torch.testing.assert_close(tensor, expected[site], rtol=1e-4, atol=1e-5)
        layer, original = layers[site[0]], originals[site[0]]
        assert (layer.type, layer.classes) == (original.type, original.classes)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ((1, 3, 16, 20), "RGB, resize to 16×20 (bilinear), normalise by"),
        ((1, 3, 56, 56), "resize shorter side to 64 (bilinear), centre crop 56×56"),
        ((1, 1, 28, 28), "greyscale, resize to 28×28 (bilinear), values 0..1"),
    ],
)
def test_the_exported_shape_decides_the_size(
    shape: tuple[int, ...], words: str, tmp_path: Path
) -> None:
    """An image of any size becomes what the program takes."""
    program = export(nn.Conv2d(shape[1], 2, 3), tmp_path / "m.pt2", *shape)
    preprocess = load(program).preprocess
    assert words in preprocess.words_for()
    assert preprocess.tensor(Image.new("RGB", (90, 70))).shape == shape
    assert preprocess.blank()[0].shape == shape


def test_a_dynamic_program_takes_any_size(tmp_path: Path) -> None:
    """Where height and width are free, the usual preprocessing decides."""
    free = torch.export.Dim.AUTO
    path = export(
        nn.Conv2d(3, 2, 3),
        tmp_path / "m.pt2",
        2,
        3,
        16,
        20,
        dynamic=({0: free, 2: free, 3: free},),
    )
    model = load(path, InputOptions(size=(40, 30)))
    assert captured(model.module, model.preprocess.blank()[0])["", 0, ""].shape == (
        1,
        2,
        38,
        28,
    )
    assert load(path).preprocess.blank()[0].shape == (1, 3, 224, 224)


def test_a_program_runs_on_another_device(tmp_path: Path) -> None:
    """Devices written into the program move with it; meta stands in for a GPU here."""
    ramp = Net(lambda self, x: x + torch.arange(20, device=x.device))
    path, device = export(ramp, tmp_path / "m.pt2"), torch.device("meta")
    module = read_program(path, True, device)[0]
    assert module(torch.zeros(1, 3, 16, 20, device=device)).device == device
    with pytest.raises(RuntimeError, match="device"):
        read_program(path, True)[0](torch.zeros(1, 3, 16, 20, device=device))


@pytest.mark.parametrize(
    ("module", "example", "message"),
    [
        (
            nn.Bilinear(4, 4, 2),
            (torch.zeros(1, 4),) * 2,
            "takes input1, input2, not one image",
        ),
        (
            nn.Conv2d(3, 2, 1),
            (torch.zeros(8, 3, 4, 4),),
            r"takes torch.float32 \[8, 3, 4, 4\]",
        ),
        (
            nn.ReLU(),
            (torch.zeros(1, 3, 4, 4).half(),),
            r"takes torch.float16 \[1, 3, 4, 4\]",
        ),
    ],
)
def test_a_program_that_takes_no_image(
    module: nn.Module, example: Any, message: str, tmp_path: Path, capfd: Any
) -> None:
    """It is told when the file is read; torch's own words on stdout never come."""
    torch.export.save(torch.export.export(module, example), tmp_path / "m.pt2")
    with pytest.raises(LoadError, match=message):
        load(tmp_path / "m.pt2")
    assert capfd.readouterr().out == ""


def _lacking(part: str) -> Callable[[bytes], bytes]:
    def without(data: bytes) -> bytes:
        file = io.BytesIO()
        with (
            zipfile.ZipFile(io.BytesIO(data)) as whole,
            zipfile.ZipFile(file, "w") as left,
        ):
            for name in whole.namelist():
                if not name.endswith(part):
                    left.writestr(name, whole.read(name))
        return file.getvalue()

    return without


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[: len(data) // 2], "truncated or damaged"),
        (_lacking("archive_version"), r"tiny\.pt2 cannot be loaded: .*deserializing"),
    ],
)
def test_a_damaged_program_is_refused_in_one_line(
    change: Callable[[bytes], bytes], message: str, exported: Path, capfd: Any
) -> None:
    """It says what is missing, and none of torch's own tracebacks come on stderr."""
    exported.write_bytes(change(exported.read_bytes()))
    with pytest.raises(LoadError, match=message) as caught:
        load(exported)
    assert caught.value.message.count("\n") == 0
    assert "Traceback" not in capfd.readouterr().err


class Evil:
    """What pickle runs when it reads an object of this class."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("marker").absolute(),)


@pytest.mark.parametrize("line", ["layers {}", "layers resnet18 --weights {}"])
@pytest.mark.parametrize("name", ["model.pt", "model.PT"])
def test_nothing_of_a_program_is_read_without_trust(
    name: str, line: str, exported: Path, featviz: Callable[..., Any]
) -> None:
    """torch unpickles example inputs, whatever the case of their name; a line asks for
    --trust."""
    marker, inputs, file = (
        Path("marker").absolute(),
        "data/sample_inputs/model.pt",
        io.BytesIO(),
    )
    torch.save(((Evil(),), {}), file)
    exported.write_bytes(_lacking(inputs)(exported.read_bytes()))
    with zipfile.ZipFile(exported, "a") as archive:
        archive.writestr(f"tiny/data/sample_inputs/{name}", file.getvalue())
    done = featviz(*line.format(exported).split())
    assert done.code == 1 and not marker.exists()
    assert (
        "error: tiny.pt2 is an exported program, and torch reads it by running"
        in done.err
    )
    assert "--trust" in done.err.partition("hint: ")[2]


@pytest.mark.slow
def test_a_program_of_a_model_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package of its class of outputs is imported first; a classifier is known by
    its class."""
    folders = pytest.importorskip(
        "models.hf_folders",
        reason="transformers is not installed",
        exc_type=ImportError,
    )
    imported: list[str] = []
    monkeypatch.setattr(weights, "import_module", imported.append)
    name, config = folders.MODELS["vit"]
    model = getattr(folders.transformers, name)(config()).eval()
    loaded = load(export(model, tmp_path / "m.pt2", 1, 3, 32, 32))
    image = torch.rand(1, 3, 32, 32)
    torch.testing.assert_close(loaded.module(image).logits, model(image).logits)
    assert loaded.scores == "logits" and "transformers.modeling_outputs" in imported


@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.zeros(1, 3, 8, 8))]
)
def test_torchscript_has_a_way_out(make: Any, tiny: nn.Module, tmp_path: Path) -> None:
    """It takes no hooks; the hint has the line that saves its state dict."""
    script = tmp_path / "script.pt"
    torch.jit.save(make(tiny), script)
    with pytest.raises(
        LoadError, match="is TorchScript, which takes no hooks"
    ) as caught:
        load(script)
    assert "torch.jit.load(FILE).state_dict()" in str(caught.value.hint)
