""".pt2 files: the original's layers and pictures."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

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
from featviz.models.load import LoadedModel
from featviz.models.weights import read_program
from featviz.options import InputOptions
from featviz.records import CaptureSite
from models.loading import load_whole

pytestmark = pytest.mark.medium


def load(path: Path, inputs: InputOptions | None = None, **options: Any) -> LoadedModel:
    return load_whole(path, inputs, trust=True, **options)


CaptureKey = tuple[str, int, str]
"""Name of the layer, call, key."""


def captured(module: nn.Module, image: Tensor) -> dict[CaptureKey, Tensor]:
    """What every layer gives."""
    tensors: dict[CaptureKey, Tensor] = {}

    def keep(site: CaptureSite, tensor: Tensor) -> None:
        tensors[site.layer.name, site.call, site.key] = tensor.clone()

    with in_eval_mode(module), hooked(module, list_layers(module), keep):
        module(image)
    return tensors


@pytest.fixture
def exported(tiny: nn.Module, tmp_path: Path) -> Path:
    return export(tiny, tmp_path / "tiny.pt2")


class ExportedSwin(NamedTuple):
    """A Swin transformer of one block a stage, and its program."""

    eager: nn.Module
    program: nn.Module


@pytest.fixture(scope="module")
def swin(tmp_path_factory: pytest.TempPathFactory) -> ExportedSwin:
    torch.manual_seed(0)
    eager = models.SwinTransformer([4, 4], 16, [1, 1], [2, 2], [4, 4]).eval()
    path = export(eager, tmp_path_factory.mktemp("swin") / "m.pt2", 1, 3, 32, 32)
    return ExportedSwin(eager, load(path).module)


@pytest.mark.slow
def test_every_call_of_every_layer_is_the_eager_models(swin: ExportedSwin) -> None:
    """Calls and feature maps are those of the model that was exported, but for what
    does nothing in eval mode."""
    image = torch.randn(1, 3, 32, 32)
    expected = captured(swin.eager, image)
    of_program = captured(swin.program, image)
    idle = {swin.eager.get_submodule(name) for name, *_ in expected.keys() - of_program}
    assert of_program.keys() <= expected.keys()
    assert all(
        isinstance(module, models.swin_transformer.StochasticDepth) for module in idle
    )
    for key, tensor in of_program.items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_layers_have_the_eager_models_classes(swin: ExportedSwin) -> None:
    """Those that run, and the classes above them, which selectors match."""
    ran = {name for name, *_ in captured(swin.program, torch.randn(1, 3, 32, 32))}
    originals = {layer.name: layer for layer in list_layers(swin.eager)}
    for layer in list_layers(swin.program):
        if layer.name in ran:
            assert layer.type == originals[layer.name].type
            assert layer.classes == originals[layer.name].classes


@pytest.mark.parametrize(
    ("shape", "description"),
    [
        ((1, 3, 16, 20), "RGB, resize to 16×20 (bilinear), normalise by"),
        ((1, 3, 56, 56), "resize shorter side to 64 (bilinear), centre crop 56×56"),
        ((1, 1, 28, 28), "greyscale, resize to 28×28 (bilinear), values 0..1"),
    ],
)
def test_the_exported_shape_decides_the_size(
    shape: tuple[int, ...], description: str, tmp_path: Path
) -> None:
    """An image of any size becomes what the program takes."""
    program = export(nn.Conv2d(shape[1], 2, 3), tmp_path / "m.pt2", *shape)
    preprocess = load(program).preprocess
    assert description in preprocess.words_for()
    assert preprocess.tensor(Image.new("RGB", (90, 70))).shape == shape
    assert preprocess.blank()[0].shape == shape


def test_a_program_is_whole_beside_a_config_of_timm(
    exported: Path, tiny: nn.Module
) -> None:
    """The config.json names the architecture of weights, of which a program needs none."""
    (exported.parent / "config.json").write_text('{"architecture": "test_resnet"}')
    names = [name for name, _ in load(exported).module.named_parameters()]
    assert names == [name for name, _ in tiny.named_parameters()]


def test_a_dynamic_program_takes_any_size(tmp_path: Path) -> None:
    """Where height and width are free, the usual preprocessing decides."""
    free = torch.export.Dim.AUTO
    sizes = ({0: free, 2: free, 3: free},)
    conv = nn.Conv2d(3, 2, 3)
    path = export(conv, tmp_path / "m.pt2", 2, 3, 16, 20, dynamic=sizes)
    model = load(path, InputOptions(size=(40, 30)))
    output = captured(model.module, model.preprocess.blank()[0])["", 0, ""]
    assert output.shape == (1, 2, 38, 28)
    assert load(path).preprocess.blank()[0].shape == (1, 3, 224, 224)


def test_a_program_runs_on_another_device(tmp_path: Path) -> None:
    """Devices written into the program move with it; meta stands in for a GPU here."""
    ramp = Net(lambda self, x: x + torch.arange(20, device=x.device))
    path = export(ramp, tmp_path / "m.pt2")
    image = torch.zeros(1, 3, 16, 20, device="meta")
    module = read_program(path, True, image.device)[0]
    assert module(image).device == image.device
    with pytest.raises(RuntimeError, match="device"):
        read_program(path, True)[0](image)


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


def lacking(member: str, data: bytes) -> bytes:
    """An archive without one of its members."""
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as archive,
        zipfile.ZipFile(file, "w") as new,
    ):
        for name in archive.namelist():
            if not name.endswith(member):
                new.writestr(name, archive.read(name))
    return file.getvalue()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[: len(data) // 2], "truncated or damaged"),
        (
            partial(lacking, "archive_version"),
            r"tiny\.pt2 cannot be loaded: .*deserializing",
        ),
    ],
)
def test_a_damaged_program_is_refused_in_one_line(
    change: Callable[[bytes], bytes], message: str, exported: Path, capfd: Any
) -> None:
    """It says what is missing, and none of torch's own tracebacks come on stderr."""
    exported.write_bytes(change(exported.read_bytes()))
    with pytest.raises(LoadError, match=message) as caught:
        load(exported)
    assert "\n" not in caught.value.message
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
    marker = Path("marker").absolute()
    evil = io.BytesIO()
    torch.save(((Evil(),), {}), evil)
    program = exported.read_bytes()
    exported.write_bytes(lacking("data/sample_inputs/model.pt", program))
    with zipfile.ZipFile(exported, "a") as archive:
        archive.writestr(f"tiny/data/sample_inputs/{name}", evil.getvalue())
    done = featviz(*line.format(exported).split())
    message = "error: tiny.pt2 is an exported program, and torch reads it by running"
    assert done.code == 1
    assert not marker.exists()
    assert message in done.err
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
    assert loaded.scores == "logits"
    assert "transformers.modeling_outputs" in imported


@pytest.mark.parametrize(
    "make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.zeros(1, 3, 8, 8))]
)
def test_torchscript_has_a_way_out(make: Any, tiny: nn.Module, tmp_path: Path) -> None:
    """It takes no hooks; the hint has the line that saves its state dict."""
    script = tmp_path / "script.pt"
    torch.jit.save(make(tiny), script)
    message = "is TorchScript, which takes no hooks"
    with pytest.raises(LoadError, match=message) as caught:
        load(script)
    assert "torch.jit.load(FILE).state_dict()" in str(caught.value.hint)
