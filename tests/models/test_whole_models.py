"""Whole models of torch and torchvision, saved with torch.save, load safely and unchanged."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision import models

from featviz.errors import LoadError
from featviz.models.files import checkpoint, rebuilding, torch_save
from models.loading import load, same_weights, skeleton, uninitialised

pytestmark = pytest.mark.usefixtures("imports_undone")

FAMILIES = [
    "resnet18",
    pytest.param("vgg11", marks=pytest.mark.slow),
    "densenet121",
    "mobilenet_v3_small",
    "efficientnet_b0",
    pytest.param("convnext_tiny", marks=pytest.mark.slow),
    "swin_t",
    pytest.param("vit_b_32", marks=pytest.mark.slow),
    "squeezenet1_0",
    "regnet_y_400mf",
]


def repeated(name: str) -> nn.Module:
    """A torchvision model whose tensors repeat one number: its file is small."""
    parameters = inspect.signature(models.get_model_builder(name)).parameters
    options: dict[str, Any] = {"weights": None}
    options |= {"weights_backbone": None} if "weights_backbone" in parameters else {}
    options |= {"init_weights": False} if "inception" in name or "googlenet" in name else {}
    meta = nullcontext() if "regnet" in name or "raft" in name else torch.device("meta")
    with uninitialised(), meta:  # two copy out of meta
        module = models.get_model(name, **options)
    for part in module.modules():
        for key, tensor in part._parameters.items():
            if tensor is not None:
                one = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
                part._parameters[key] = nn.Parameter(one, tensor.requires_grad)
        for key, tensor in part._buffers.items():
            if tensor is not None:
                part._buffers[key] = torch.ones((), dtype=tensor.dtype).expand(tensor.shape)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", models.list_models())
def test_a_whole_torchvision_model_loads_safely(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.save(model) of every builder loads without flags, modules and tensors equal."""
    plenty = rebuilding.Budget(2**40)  # the file repeats one number
    monkeypatch.setattr(torch_save, "Budget", lambda size: plenty)
    module = repeated(name)
    torch.save(module, tmp_path / "whole.pth")
    loaded = load(tmp_path / "whole.pth")
    assert [(n, type(m)) for n, m in loaded.named_modules()] == [
        (n, type(m)) for n, m in module.named_modules()
    ]
    expected = module.state_dict()
    assert {k: (v.shape, v.dtype) for k, v in loaded.state_dict().items()} == {
        k: (v.shape, v.dtype) for k, v in expected.items()
    }
    assert not loaded._forward_hooks and "forward" not in vars(loaded)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_a_whole_model_keeps_its_numbers(name: str, tmp_path: Path) -> None:
    """Tensors of a whole model are those that were saved."""
    module = skeleton(name)
    torch.save(module, tmp_path / "whole.pth")
    assert same_weights(load(tmp_path / "whole.pth"), module)


def _tied() -> nn.Module:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    return nn.Sequential(first, second)


def _buffered() -> nn.Module:
    layer = nn.Conv2d(3, 2, 1)
    layer.register_buffer("scale", nn.Buffer(torch.ones(2)))
    layer.weight.note = "kept by torch, of no use here"  # type: ignore[attr-defined]
    return layer


WHOLE_MODELS: dict[str, Callable[[], nn.Module]] = {
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(nn.Conv2d(3, 2, 1)),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, activation=nn.functional.gelu),
    "recurrent": lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    "parallel": lambda: nn.DataParallel(nn.Conv2d(3, 2, 1)),
    "tied": _tied,
    "buffered": _buffered,
    "half": lambda: nn.Conv2d(3, 2, 1).half(),
    "spectral": lambda: nn.Sequential(nn.Conv2d(3, 2, 1), nn.Upsample(scale_factor=2)),
}


@pytest.mark.parametrize("old", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("kind", WHOLE_MODELS)
def test_whole_models_of_torch_load_without_flags(kind: str, old: bool, tmp_path: Path) -> None:
    """What torch.nn and its helpers make, in both formats."""
    module = WHOLE_MODELS[kind]()
    torch.save(module, tmp_path / "whole.pth", _use_new_zipfile_serialization=not old)
    loaded, expected = checkpoint.read(tmp_path / "whole.pth"), module.state_dict()
    assert type(loaded) is type(module) and list(loaded.state_dict()) == list(expected)
    assert all(torch.equal(v, expected[k]) for k, v in loaded.state_dict().items())
    if kind == "tied":
        assert loaded[0].weight is loaded[1].weight


@pytest.mark.parametrize("unsafe", [False, True])
@pytest.mark.parametrize("depth", ["alone", "in a dict"])
def test_a_compiled_whole_model_is_taken_out_of_its_wrapping(
    unsafe: bool, depth: str, tiny: nn.Module, tmp_path: Path
) -> None:
    """torch.compile's wrapper ignores hooks; the module inside it is what is looked at."""
    compiled = torch.compile(tiny)
    content = compiled if depth == "alone" else {"epoch": 3, "model": compiled}
    torch.save(content, tmp_path / "compiled.pth")
    loaded = load(tmp_path / "compiled.pth", trust=unsafe)
    assert type(loaded) is nn.Sequential
    assert same_weights(loaded, tiny)


def test_a_factory_may_compile(tmp_path: Path) -> None:
    """A model that a factory compiled is taken out of its wrapping, too."""
    (tmp_path / "user_compiled.py").write_text(
        "import torch\ndef make():\n    return torch.compile(torch.nn.Conv2d(3, 2, 1))\n"
    )
    assert type(load(f"{tmp_path / 'user_compiled.py'}:make")) is nn.Conv2d


@pytest.mark.slow
def test_detection_models_that_ran_load(tmp_path: Path) -> None:
    """A forward pass leaves a LevelMapper behind; the model still loads, and says the same."""
    module = models.get_model(
        "fasterrcnn_mobilenet_v3_large_320_fpn", weights=None, weights_backbone=None
    ).eval()
    with torch.inference_mode():
        expected = module([torch.ones(3, 64, 64)])
    torch.save(module, tmp_path / "ran.pth")
    with torch.inference_mode():
        boxes = load(tmp_path / "ran.pth").eval()([torch.ones(3, 64, 64)])
    assert torch.equal(boxes[0]["boxes"], expected[0]["boxes"])


def test_hooks_of_classes_that_the_user_allows_load(tmp_path: Path) -> None:
    """weight_norm keeps an object of its class as a hook; --allow-global lets it in."""
    module = nn.utils.weight_norm(nn.Conv2d(3, 2, 1))
    torch.save(nn.Sequential(module), tmp_path / "norm.pth")
    with pytest.raises(LoadError, match=r"needs torch\.nn\.utils\.weight_norm\.WeightNorm"):
        load(tmp_path / "norm.pth")
    loaded = load(tmp_path / "norm.pth", allow_globals=("torch.nn.utils.weight_norm.WeightNorm",))
    image = torch.rand(1, 3, 4, 4)
    assert torch.equal(loaded(image), module(image))


@pytest.mark.parametrize("unsafe", [False, True])
def test_a_whole_quantised_model_gets_one_line(unsafe: bool, tmp_path: Path) -> None:
    """torch writes statically quantised convolutions in a way that it cannot read."""
    from torch.ao import quantization

    module = nn.Sequential(quantization.QuantStub(), nn.Conv2d(3, 2, 1)).eval()
    module.qconfig = quantization.get_default_qconfig("x86")
    prepared = quantization.prepare(module)
    prepared(torch.rand(1, 3, 4, 4))
    torch.save(quantization.convert(prepared), tmp_path / "static.pth")
    with pytest.raises(
        LoadError, match=r"static\.pth is a .*quantised model saved whole"
    ) as caught:
        load(tmp_path / "static.pth", trust=unsafe)
    assert "state_dict()" in str(caught.value.hint)


def test_checksums_may_be_left_out(tmp_path: Path) -> None:
    """torch.save can leave out the sums over records, and torch.load does not look at them."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(nn.Conv2d(3, 2, 1), tmp_path / "a.pth")
    finally:
        torch.serialization.set_crc32_options(before)
    assert load(tmp_path / "a.pth").out_channels == 2


def test_a_whole_model_in_the_legacy_format_loads(tmp_path: Path) -> None:
    """Before torch 1.6 a model was kept with the source of its classes, which nobody runs."""
    module = skeleton("resnet18")
    torch.save(module, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert same_weights(load(tmp_path / "old.pth"), module)
    assert same_weights(load(tmp_path / "old.pth", trust=True), module)


def test_weights_in_the_legacy_format_load(tmp_path: Path) -> None:
    """A state dict in the old format is as safe as in the new one."""
    module = skeleton("resnet18")
    torch.save(module.state_dict(), tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert same_weights(load(tmp_path / "old.pth", arch="resnet18"), module)


def test_a_safe_load_leaves_no_globals_allowed(tiny_file: Path) -> None:
    """What one file was allowed is not allowed afterwards."""
    before = set(torch.serialization.get_safe_globals())
    load(tiny_file)
    assert set(torch.serialization.get_safe_globals()) == before
