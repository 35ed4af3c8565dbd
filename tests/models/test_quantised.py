"""What torch.ao.quantization.quantize_dynamic and torchao save."""

from __future__ import annotations

import io
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli.outcomes import Run, refused
from torch import nn

from featviz.models.files.effective import unpacked

pytestmark = [
    pytest.mark.usefixtures("imports_undone"),
    pytest.mark.filterwarnings("ignore"),  # torch's own, about what is to take their place
]

CODE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    ).eval()

def quantised():
    import torch.ao.quantization as q
    return q.quantize_dynamic(make(), {nn.Linear}, dtype=torch.qint8)
"""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    last = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), *last).eval()


def quantised(module: nn.Module, kind: type = nn.Linear, dtype: Any = torch.qint8) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made: nn.Module = torch.ao.quantization.quantize_dynamic(module, {kind}, dtype=dtype)
    return made


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "user_net.py"
    path.write_text(CODE)
    return path


@pytest.mark.parametrize(("dtype", "error"), [(torch.qint8, 0.002), (torch.float16, 0.001)])
def test_a_state_dict_loads_into_the_float_model(
    featviz: Run, code: Path, picture: Path, dtype: Any, error: float
) -> None:
    """The drawn layer is that of the dequantised weights, and a line says what was done."""
    module = quantised(net(), dtype=dtype)
    path, out = code.parent / "weights.pth", code.parent / "out"
    torch.save(module.state_dict(), path)
    done = featviz(
        *("run", path, picture, "--arch", f"{code}:make", "--preset", "none", "--out", out),
        *("--layers", "Linear,Conv2d", "--tensors", "npy"),
    )
    assert done.code == 0 and "weights.pth: dequantised 1 weight" in done.err
    (file,) = out.glob("*/*_3/output.npy")
    from PIL import Image

    pixels = np.asarray(Image.open(picture).convert("RGB")).astype("f4") / 255
    with torch.no_grad():
        features = net()[:3](torch.from_numpy(pixels).permute(2, 0, 1)[None])
        weight, bias = module[3]._weight_bias()  # type: ignore[index]
        plain = weight.dequantize() if weight.is_quantized else weight.float()
        expected = features @ plain.T + bias
    np.testing.assert_allclose(np.load(file), expected.numpy(), atol=1e-5)
    assert float((plain - net()[3].weight).abs().max()) < error


def test_an_architecture_is_found_behind_packed_weights(featviz: Run, tmp_path: Path) -> None:
    """The head's size is read off the dequantised weights."""
    from torchvision.models import resnet18

    torch.save(quantised(resnet18(num_classes=7)).state_dict(), tmp_path / "weights.pth")
    done = featviz("identify", tmp_path / "weights.pth")
    assert done.code == 0 and "resnet18" in done.out and "7" in done.out


def test_other_contents_stay_as_they_are() -> None:
    """Statically quantised ones, and what only has the name."""
    tensor = torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8)
    for content in (
        {"a._packed_params._packed_params": (tensor, None), "conv.weight": tensor},
        {"a._packed_params._packed_params": "text", "a.scale": torch.ones(1)},
        {"a._packed_params._packed_params": (tensor, None, None)},
        {"a.scale": torch.ones(1)},
        [1],
    ):
        assert unpacked(content) == (content, [])


def test_a_quantised_model_is_drawn_where_its_code_makes_it(
    featviz: Run, code: Path, picture: Path
) -> None:
    """torch hooks its layers as any others."""
    out = code.parent / "out"
    done = featviz("run", f"{code}:quantised", picture, "--out", out, "--layers", "Linear,Conv2d")
    assert done.code == 0, done.err
    assert len(list(out.glob("*/*/output.png"))) == 2


def test_weights_do_not_go_into_a_quantised_architecture(
    featviz: Run, code: Path, picture: Path
) -> None:
    """One line instead of torch's KeyError, with the remedy."""
    path = code.parent / "weights.pth"
    torch.save(quantised(net()).state_dict(), path)
    done = featviz("run", path, picture, "--arch", f"{code}:quantised", "--out", code.parent / "o")
    assert done.code == 1 and "the architecture is quantised" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("whole", [True, False])
def test_packed_script_objects_get_one_line(
    featviz: Run, tmp_path: Path, picture: Path, whole: bool
) -> None:
    """A whole model, and the state dict of an LSTM: nothing is executed."""
    module = quantised(net()) if whole else quantised(nn.Sequential(nn.LSTM(4, 4)), nn.LSTM)
    torch.save(module if whole else module.state_dict(), tmp_path / "model.pth")
    done = featviz("run", tmp_path / "model.pth", picture, "-q", "--out", tmp_path / "out")
    refused(done, 1, "model.pth is a model that was quantised dynamically")
    assert "torch.save(model.state_dict(), FILE) and --arch" in done.err


def test_a_whole_model_is_drawn_if_it_is_trusted(
    featviz: Run, tmp_path: Path, picture: Path
) -> None:
    """--trust lets torch unpack it."""
    torch.save(quantised(net()), tmp_path / "model.pth")
    out = tmp_path / "out"
    done = featviz("run", tmp_path / "model.pth", picture, "--trust", "--out", out)
    assert done.code == 0, done.err
    assert list(out.glob("*/*/output.png"))


def test_weights_of_torchao_get_one_line(featviz: Run, tmp_path: Path, picture: Path) -> None:
    """The classes that the file names, and how to save floats."""
    file, path = io.BytesIO(), tmp_path / "weights.pth"
    torch.save({"weight": torch.ones(2)}, file)
    name = b"ctorchao.quantization\nInt8Tensor\n."
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(path, "w") as new:
        for info in old.infolist():
            is_pickle = info.filename.endswith("data.pkl")
            new.writestr(info.filename, b"\x80\x02" + name if is_pickle else old.read(info))
    done = featviz("run", path, picture, "-q", "--out", tmp_path / "out")
    refused(done, 1, r"weights.pth holds weights of torchao \(torchao.quantization.Int8Tensor\)")
    assert "tensor.dequantize()" in done.err
