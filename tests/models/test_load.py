"""MODEL strings to modules: safe loading, weights that fit, and one clear message for the rest."""

from __future__ import annotations

import functools
import importlib
import inspect
import io
import logging
import os
import pickle
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError

import pytest
import torch
import torchvision.datasets.utils
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn
from torchvision import models

from featviz.cli.options import key_values
from featviz.errors import FeatvizError, LoadError, UsageError
from featviz.models import requirements
from featviz.models.files import checkpoint, rebuilding
from featviz.models.load import ModelOptions, load_model, pick_device
from featviz.models.preprocess import InputOptions

SMALL = "squeezenet1_1"
ENTRY = models.SqueezeNet1_1_Weights.IMAGENET1K_V1

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


@pytest.fixture(autouse=True)
def _own_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Importing user code prepends to sys.path and adds modules; take both back."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("user_", "featviz_user_")):
            del sys.modules[name]


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of torch.hub's downloads."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    folder = tmp_path / "home" / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    return folder


def load(spec: object, **options: Any) -> nn.Module:
    return load_model(ModelOptions(str(spec), device="cpu", **options), InputOptions()).module


def skeleton(name: str) -> nn.Module:
    """A torchvision model without the cost of its initialisation: each tensor has its number."""
    if name.startswith("regnet"):  # its initialiser copies out of meta
        module = models.get_model(name, weights=None)
    else:
        with torch.device("meta"):
            module = models.get_model(name, weights=None)
        module.to_empty(device="cpu")
    for number, tensor in enumerate(module.state_dict().values()):
        tensor.fill_(number % 251)
    return module


def same_weights(one: nn.Module, other: nn.Module | dict[str, Tensor]) -> bool:
    a = one.state_dict()
    b = other.state_dict() if isinstance(other, nn.Module) else other
    return list(a) == list(b) and all(torch.equal(a[key], b[key]) for key in a)


# Whole models ------------------------------------------------------------------------------


def repeated(name: str) -> nn.Module:
    """A torchvision model whose tensors repeat one number: its file is small."""
    parameters = inspect.signature(models.get_model_builder(name)).parameters
    options: dict[str, Any] = {"weights": None}
    options |= {"weights_backbone": None} if "weights_backbone" in parameters else {}
    options |= {"init_weights": False} if "inception" in name or "googlenet" in name else {}
    with _uninitialised() if "regnet" in name or "raft" in name else torch.device("meta"):
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


@contextmanager
def _uninitialised() -> Iterator[None]:
    """Initialisers that copy out of meta need a CPU; RegNet's largest are 2.6 GB untouched."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("normal_", "ones_", "zeros_", "kaiming_normal_", "kaiming_uniform_"):
            patch.setattr(nn.init, name, lambda tensor, *args, **more: tensor)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", models.list_models())
def test_a_whole_torchvision_model_loads_safely(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.save(model) of every builder loads without flags, modules and tensors equal."""
    monkeypatch.setattr(rebuilding, "_BESIDE", 2**40)  # the file repeats one number
    module = repeated(name)
    torch.save(module, tmp_path / "whole.pth")
    found = load(tmp_path / "whole.pth")
    assert [(n, type(m)) for n, m in found.named_modules()] == [
        (n, type(m)) for n, m in module.named_modules()
    ]
    own = module.state_dict()
    assert {k: (v.shape, v.dtype) for k, v in found.state_dict().items()} == {
        k: (v.shape, v.dtype) for k, v in own.items()
    }
    assert not found._forward_hooks and "forward" not in vars(found)


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
    found, expected = checkpoint.read(tmp_path / "whole.pth"), module.state_dict()
    assert type(found) is type(module) and list(found.state_dict()) == list(expected)
    assert all(torch.equal(v, expected[k]) for k, v in found.state_dict().items())
    if kind == "tied":
        assert found[0].weight is found[1].weight


@pytest.mark.parametrize("unsafe", [False, True])
@pytest.mark.parametrize("depth", ["alone", "in a dict"])
def test_a_compiled_whole_model_is_taken_out_of_its_wrapping(
    unsafe: bool, depth: str, tiny: nn.Module, tmp_path: Path
) -> None:
    """torch.compile's wrapper ignores hooks; the module inside it is what is looked at."""
    compiled = torch.compile(tiny)
    content = compiled if depth == "alone" else {"epoch": 3, "model": compiled}
    torch.save(content, tmp_path / "compiled.pth")
    found = load(tmp_path / "compiled.pth", unsafe_load=unsafe)
    assert type(found) is nn.Sequential
    assert same_weights(found, tiny)


def test_a_factory_may_compile(tmp_path: Path) -> None:
    """A model that a factory compiled is taken out of its wrapping, too."""
    (tmp_path / "user_compiled.py").write_text(
        "import torch\ndef make():\n    return torch.compile(torch.nn.Conv2d(3, 2, 1))\n"
    )
    assert type(load(f"{tmp_path / 'user_compiled.py'}:make")) is nn.Conv2d


def test_detection_models_that_ran_load(tmp_path: Path) -> None:
    """A forward pass leaves a LevelMapper behind; the model still loads, and says the same."""
    module = models.get_model(
        "fasterrcnn_mobilenet_v3_large_320_fpn", weights=None, weights_backbone=None
    ).eval()
    with torch.inference_mode():
        expected = module([torch.ones(3, 64, 64)])
    torch.save(module, tmp_path / "ran.pth")
    with torch.inference_mode():
        found = load(tmp_path / "ran.pth").eval()([torch.ones(3, 64, 64)])
    assert torch.equal(found[0]["boxes"], expected[0]["boxes"])


def test_hooks_of_classes_that_the_user_allows_load(tmp_path: Path) -> None:
    """weight_norm keeps an object of its class as a hook; --allow-global lets it in."""
    module = nn.utils.weight_norm(nn.Conv2d(3, 2, 1))
    torch.save(nn.Sequential(module), tmp_path / "norm.pth")
    with pytest.raises(LoadError, match=r"needs torch\.nn\.utils\.weight_norm\.WeightNorm"):
        load(tmp_path / "norm.pth")
    found = load(tmp_path / "norm.pth", allow_globals=("torch.nn.utils.weight_norm.WeightNorm",))
    image = torch.rand(1, 3, 4, 4)
    assert torch.equal(found(image), module(image))


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
        load(tmp_path / "static.pth", unsafe_load=unsafe)
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
    assert same_weights(load(tmp_path / "old.pth", unsafe_load=True), module)


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


# Hostile pickles ---------------------------------------------------------------------------


class Reduced:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def _mkdir(folder: Path) -> Reduced:
    return Reduced(os.mkdir, str(folder / "marker"))


def _evaluated(folder: Path) -> Reduced:
    return Reduced(eval, f"open({str(folder / 'marker')!r}, 'w')")


def _extracted(folder: Path) -> Reduced:
    with zipfile.ZipFile(folder / "source.zip", "w") as archive:
        archive.writestr("marker", "x")
    function = torchvision.datasets.utils.extract_archive
    return Reduced(function, str(folder / "source.zip"), str(folder))


def _hub(folder: Path) -> Reduced:
    code = f"open({str(folder / 'marker')!r}, 'w')"
    (folder / "hubconf.py").write_text(f"{code}\ndef entry():\n    pass\n")
    return Reduced(functools.partial(torch.hub.load, str(folder), "entry", source="local"))


def _partial(folder: Path) -> Reduced:
    return Reduced(functools.partial(os.mkdir, str(folder / "marker")))


HOSTILE = [
    (_mkdir, f"{os.mkdir.__module__}.mkdir"),
    (_evaluated, "builtins.eval"),
    (_extracted, "torchvision.datasets.utils.extract_archive"),
    (_hub, "torch.hub.load"),
    (_partial, f"{os.mkdir.__module__}.mkdir"),
]


@pytest.mark.parametrize("make", [make for make, _ in HOSTILE])
def test_the_hostile_pickles_are_armed(
    make: Callable[[Path], Reduced], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each of the payloads below does leave its marker where it is loaded without care."""
    pickle.loads(pickle.dumps(make(tmp_path)))
    assert (tmp_path / "marker").exists()


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("place", ["alone", "in a dict", "in a module"])
@pytest.mark.parametrize(("make", "name"), HOSTILE)
def test_nothing_in_a_hostile_file_runs(
    make: Callable[[Path], Reduced],
    name: str,
    place: str,
    zipped: bool,
    tiny: nn.Module,
    tmp_path: Path,
) -> None:
    """The error lists the global and the option that would allow exactly it; nothing has run."""
    evil = make(tmp_path)
    tiny[0].note = evil
    content = {"alone": evil, "in a dict": {"a": [{"b": evil}]}, "in a module": tiny}[place]
    path = tmp_path / "evil.pth"
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(LoadError) as caught:
        load(path)
    assert name in caught.value.message
    assert f"--allow-global {name}" in str(caught.value.hint)
    assert caught.value.message.count("\n") == 0
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize(
    "name",
    [
        "torchvision.datasets.utils os.system",
        "torchvision.datasets.utils download_url",
        "torch.nn.functional os.system",
        "torchvision.models.resnet nn.modules.module.torch.hub.load",
        "torch.nn.modules.module torch._jit_internal.boolean_dispatch",
    ],
)
@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "legacy"])
def test_a_dotted_name_does_not_borrow_its_modules_trust(
    name: str, zipped: bool, tmp_path: Path
) -> None:
    """os.system reached through a module of torchvision is refused under that name."""
    module, attribute = name.split(" ")
    command = f"touch {tmp_path / 'marker'}".encode()
    called = f"\x80\x02c{module}\n{attribute}\n".encode("latin-1")
    called += b"X" + len(command).to_bytes(4, "little") + command + b"\x85R."
    path = tmp_path / "evil.pth"
    path.write_bytes(called)
    if zipped:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("evil/data.pkl", called)
            archive.writestr("evil/version", b"3\n")
    with pytest.raises(LoadError, match=rf"needs {module}\.{attribute}, which could run any code"):
        load(path)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_plain_pickle_runs_nothing(protocol: int, tmp_path: Path) -> None:
    """A pickle that torch did not write is refused in every protocol."""
    path = tmp_path / "evil.pth"
    path.write_bytes(pickle.dumps(_mkdir(tmp_path), protocol=protocol))
    with pytest.raises(LoadError, match=f"needs {os.mkdir.__module__}.mkdir"):
        load(path)
    assert not (tmp_path / "marker").exists()


@pytest.mark.parametrize("suffix", [".pth", ".pt"])
def test_weights_for_an_arch_are_read_as_carefully(suffix: str, tmp_path: Path) -> None:
    """A hostile value between tensors does not run when the file is read as weights."""
    path = tmp_path / f"evil{suffix}"
    torch.save({"conv.weight": torch.zeros(1), "x": _mkdir(tmp_path)}, path)
    with pytest.raises(LoadError, match="mkdir"):
        load(path, arch=SMALL)
    assert not (tmp_path / "marker").exists()


# What the user allows ----------------------------------------------------------------------


@pytest.fixture
def users_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole model of a class in a module of the user's."""
    (tmp_path / "user_net.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self):\n"
        "        super().__init__(nn.Conv2d(3, 2, 1))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import user_net

    torch.save(user_net.Net(), tmp_path / "net.pth")
    return tmp_path / "net.pth"


def test_a_class_of_the_users_is_refused_by_name(users_file: Path) -> None:
    """Without the option, the file is refused, and the hint has the option to copy."""
    with pytest.raises(LoadError, match=r"needs user_net\.Net") as caught:
        load(users_file)
    assert "--allow-global user_net.Net" in str(caught.value.hint)


def test_allow_global_lets_exactly_that_class_in(users_file: Path) -> None:
    """--allow-global PKG.NAME loads a model of the user's own class."""
    assert type(load(users_file, allow_globals=("user_net.Net",))).__name__ == "Net"


@pytest.mark.parametrize("name", ["user_net.Nat", "user_nothing.Net", "Net", ""])
def test_a_global_that_does_not_exist_is_a_usage_error(name: str, users_file: Path) -> None:
    """A wrong name is named, and nothing is loaded."""
    with pytest.raises(UsageError, match=f"--allow-global '{name}' cannot be found"):
        load(users_file, allow_globals=(name,))


def test_unsafe_load_takes_whatever_the_file_holds(users_file: Path) -> None:
    """--unsafe-load loads the same file without naming the class."""
    assert type(load(users_file, unsafe_load=True)).__name__ == "Net"


def test_allowances_hold_for_weights_too(users_file: Path, tmp_path: Path) -> None:
    """--arch with a whole model of the user's class takes its weights once the class is allowed."""
    arch = f"{tmp_path / 'user_net.py'}:Net"
    found = load(users_file, arch=arch, allow_globals=("user_net.Net",))
    assert same_weights(found, torch.load(users_file, weights_only=False))


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole model of a class whose module lies beside it, and is imported from nowhere else."""
    folder, elsewhere = tmp_path / "models", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (folder / "user_beside.py").write_text(
        "from torch import nn\nclass Net(nn.Sequential):\n    pass\n"
    )
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder)
        import user_beside

        torch.save(user_beside.Net(nn.Conv2d(3, 2, 1)), folder / "net.pth")
    del sys.modules["user_beside"]
    importlib.invalidate_caches()
    monkeypatch.chdir(elsewhere)
    return folder


@pytest.mark.parametrize("place", ["beside the file", "current folder"])
@pytest.mark.parametrize(
    "options", [{"unsafe_load": True}, {"allow_globals": ("user_beside.Net",)}]
)
def test_modules_are_found_here_and_beside_the_file(
    options: dict[str, Any], place: str, beside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both options find the class in the current folder and in the folder of the file."""
    if place == "current folder":
        (beside / "user_beside.py").rename(Path.cwd() / "user_beside.py")
    found = load(beside / "net.pth", **options)
    assert type(found).__name__ == "Net" and found[0].out_channels == 2


@pytest.mark.parametrize(
    ("options", "kind"),
    [({"unsafe_load": True}, LoadError), ({"allow_globals": ("user_beside.Net",)}, UsageError)],
)
def test_a_module_that_is_not_found_is_named_with_where_it_was_looked_for(
    options: dict[str, Any], kind: type[FeatvizError], beside: Path
) -> None:
    """The module, both folders and PYTHONPATH; sys.path is as before."""
    (beside / "user_beside.py").unlink()
    before = list(sys.path)
    with pytest.raises(kind, match="user_beside") as caught:
        load(beside / "net.pth", **options)
    hint = str(caught.value.hint)
    assert all(word in hint for word in (str(beside), str(Path.cwd()), "PYTHONPATH"))
    assert sys.path == before


def test_what_is_installed_wins_over_what_lies_beside_a_file(beside: Path) -> None:
    """A module beside a file does not take the place of one that is installed."""
    (beside / "colorsys.py").write_text("raise RuntimeError('the wrong one')")
    sys.modules.pop("colorsys", None)
    with pytest.raises(LoadError, match="needs user_beside"):
        load(beside / "net.pth", allow_globals=("colorsys.rgb_to_hls",))


# Weights -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    """A state dict of SMALL that no seed gives."""
    return dict(skeleton(SMALL).state_dict())


def _write(path: Path, weights: dict[str, Tensor]) -> Path:
    if path.suffix == ".safetensors":
        save_file(weights, path)
    else:
        torch.save(weights, path)
    return path


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".ckpt", ".bin", ".safetensors"])
def test_weights_for_an_arch_arrive_unchanged(
    suffix: str, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    """FILE --arch NAME gives the architecture with exactly the file's tensors."""
    path = _write(tmp_path / f"weights{suffix}", weights)
    assert same_weights(load(path, arch=SMALL), weights)


def test_weights_as_an_option_are_the_same(weights: dict[str, Tensor], tmp_path: Path) -> None:
    """NAME --weights FILE is FILE --arch NAME, said the other way round."""
    path = _write(tmp_path / "weights.pth", weights)
    assert same_weights(load(SMALL, weights=str(path)), weights)


def test_weights_for_a_factory(tiny: nn.Module, tmp_path: Path) -> None:
    """--arch takes a factory, with its arguments."""
    weights = {f"0.{key}": value for key, value in tiny[0].state_dict().items()}
    path = _write(tmp_path / "weights.pth", weights)
    (tmp_path / "user_a.py").write_text(
        "from torch import nn\ndef make(n):\n    return nn.Sequential(nn.Conv2d(3, n, 3))\n"
    )
    found = load(path, arch=f"{tmp_path / 'user_a.py'}:make", model_args={"n": 4})
    assert same_weights(found, weights)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_weights_of_another_arch_do_not_fit(
    suffix: str, weights: dict[str, Tensor], tmp_path: Path
) -> None:
    """The error counts the tensors that fit and names missing and unexpected keys."""
    path = _write(tmp_path / f"weights{suffix}", weights)
    state = models.shufflenet_v2_x0_5().state_dict()
    own = [key for key in state if not key.endswith("num_batches_tracked")]
    message = (
        rf"weights{suffix} does not fit shufflenet_v2_x0_5: 0 of {len(own)} tensors; "
        rf"missing conv1\.0\.weight, .* and {len(own) - 4} more; "
        rf"unexpected .*features\.0\.weight.* and {len(weights) - 4} more"
    )
    with pytest.raises(LoadError, match=message):
        load(path, arch="shufflenet_v2_x0_5")


def test_one_key_more_and_one_less_are_named(weights: dict[str, Tensor], tmp_path: Path) -> None:
    """A prefix on a single key shows as one missing and one unexpected key."""
    other = dict(weights)
    other["module.classifier.1.bias"] = other.pop("classifier.1.bias")
    path = _write(tmp_path / "weights.pth", other)
    n = len(weights)
    with pytest.raises(
        LoadError,
        match=rf"{n - 1} of {n} tensors; missing classifier\.1\.bias; "
        r"unexpected module\.classifier\.1\.bias$",
    ):
        load(path, arch=SMALL)


def test_another_number_of_classes_is_told_by_shapes(
    weights: dict[str, Tensor], tmp_path: Path
) -> None:
    """The shapes of the head are named, and the hint says how to change the model's."""
    path = _write(tmp_path / "weights.pth", weights)
    n = len(weights)
    match = rf"{n - 2} of {n} tensors; classifier\.1\.weight is \[1000, 512, 1, 1\], not \[10, 512"
    with pytest.raises(LoadError, match=match) as caught:
        load(path, arch=SMALL, model_args={"num_classes": 10})
    assert "num_classes" in str(caught.value.hint)


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_unknown_weights_ask_for_an_arch(suffix: str, tmp_path: Path) -> None:
    """Weights that are nobody's are told so, and the hint names the option."""
    weights = {"mine.weight": torch.ones(3)}
    match = f"weights{suffix} holds weights of an architecture that torchvision has not"
    with pytest.raises(LoadError, match=match) as caught:
        load(_write(tmp_path / f"weights{suffix}", weights))
    assert "--arch" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("resnet18", {"arch": "resnet18"}, "--arch is for files of weights"),
        ("FILE", {"weights": "none"}, "--weights does not go with a model file"),
        ("FILE", {"arch": "FILE"}, "is a file of its own"),
        ("FILE", {"arch": "resnet81"}, "torchvision has no model 'resnet81'"),
        ("nothing.pth", {}, r"no model file 'nothing\.pth'"),
        ("nothing/at/all", {}, "no model file 'nothing/at/all'"),
    ],
)
def test_options_that_do_not_go_together(
    spec: str, options: dict[str, str], message: str, tiny_file: Path
) -> None:
    """Each contradiction is a usage error that names the option."""
    file = str(tiny_file)
    with pytest.raises(UsageError, match=message):
        load(spec.replace("FILE", file), **{k: v.replace("FILE", file) for k, v in options.items()})


# Files that are no checkpoints -------------------------------------------------------------


def _png() -> bytes:
    file = io.BytesIO()
    Image.new("L", (4, 4)).save(file, "png")
    return file.getvalue()


def _saved(content: object, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(content, file, **options)
    return file.getvalue()


def _zip(**members: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in members.items():
            archive.writestr(name.replace("__", "/"), text)
    return file.getvalue()


WHOLE = _saved({"weight": torch.zeros(5000)})
OLD = _saved({"weight": torch.zeros(5000)}, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (_png(), "is no checkpoint: it is a PNG image"),
        (b"\xff\xd8\xff\xe0 jpeg", "it is a JPEG image"),
        (b"<!DOCTYPE html><html>404</html>", "it is a web page"),
        (b"\n <html><body>sign in</body></html>", "it is a web page"),
        (b"", "it is empty"),
        (b"just some words\n", "it is a text file"),
        (b'{"error": "not found"}', "it is a JSON file"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "it is a Git LFS pointer"),
        (b"\x00\x01\x02\x03" * 9, "no format that featviz knows"),
        (WHOLE[: len(WHOLE) // 2], "it is a zip archive that is truncated or damaged"),
        (OLD[: len(OLD) // 2], "refers to more data than it holds"),
        (OLD[:9], "cannot be loaded"),
        (_zip(readme="hello"), "it is a zip archive that is no checkpoint"),
        (_zip(a__data___pkl="x"), "it is a zip archive that is no checkpoint"),
        ((2**20).to_bytes(8, "little") + b'{"a": 1}', "cannot be loaded"),
        ((8).to_bytes(8, "little") + b'{"a": 1}', "cannot be loaded"),
        (_zip(m__archive_format="pt2"), r"cannot be loaded: it lacks the record 'archive_version'"),
        (_saved(torch.zeros(3)), "holds no weights: a Tensor"),
        (_saved([1, 2]), "holds no weights: a list"),
    ],
)
def test_a_file_that_is_no_model_is_called_what_it_is(
    content: bytes, message: str, tmp_path: Path
) -> None:
    """One line that has the file's name and says what it looks like, whatever its suffix."""
    path = tmp_path / "model.pth"
    path.write_bytes(content)
    with pytest.raises(LoadError, match=message) as caught:
        load(path)
    assert caught.value.message.startswith("model.pth")
    assert "\n" not in caught.value.message


def test_a_checkpoint_with_a_broken_pickle(tmp_path: Path) -> None:
    """A whole zip around a pickle that ends early is damaged, not a bug."""
    path = tmp_path / "model.pth"
    path.write_bytes(_zip(**{"a__data.pkl": "garbage", "a__version": "3\n"}))
    with pytest.raises(LoadError, match=r"model\.pth cannot be loaded"):
        load(path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_is_refused_since_it_takes_no_hooks(tiny: nn.Module, tmp_path: Path) -> None:
    """A TorchScript file is told from a checkpoint, with the reason."""
    torch.jit.trace(tiny, torch.zeros(1, 3, 8, 8)).save(tmp_path / "script.pt")
    with pytest.raises(LoadError, match=r"script\.pt is TorchScript, which takes no hooks"):
        load(tmp_path / "script.pt")


# Factories ---------------------------------------------------------------------------------

FACTORY = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, width=2, **more):
        super().__init__(nn.Conv2d(3, width, 1))
        self.more = more

def make(width=3):
    return Net(width)

class Box:
    make = staticmethod(make)

ready = Net(7)
number = 4

def wrong():
    return {"model": 1}

def broken():
    raise ValueError("no such width")
"""


@pytest.fixture
def factory_file(tmp_path: Path) -> Path:
    path = tmp_path / "user_factory.py"
    path.write_text(FACTORY)
    return path


@pytest.mark.parametrize(
    ("attribute", "arguments", "width"),
    [
        ("make", {}, 3),
        ("make", {"width": 5}, 5),
        ("Net", {}, 2),
        ("Net", {"width": 4}, 4),
        ("ready", {}, 7),
        ("Box.make", {"width": 6}, 6),
    ],
)
@pytest.mark.parametrize("form", ["file", "module"])
def test_factories_give_models(
    form: str,
    attribute: str,
    arguments: dict[str, Any],
    width: int,
    factory_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A function, a class, an instance or an attribute of one, from a file or a module."""
    monkeypatch.syspath_prepend(factory_file.parent)
    where = str(factory_file) if form == "file" else "user_factory"
    assert load(f"{where}:{attribute}", model_args=arguments)[0].out_channels == width


def test_a_factory_in_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pkg.mod:factory is found from the current folder, as with python -m."""
    (tmp_path / "user_pkg").mkdir()
    (tmp_path / "user_pkg" / "mod.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    assert load("user_pkg.mod:make")[0].out_channels == 3


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=3", 3),
        ("a=0.5", 0.5),
        ("a=True", True),
        ("a=None", None),
        ("a=(1, 2)", (1, 2)),
        ("a=relu", "relu"),
        ("a='3'", "3"),
        ("a=x=y", "x=y"),
        ("a=", ""),
    ],
)
def test_model_arguments_are_python_literals_else_strings(text: str, value: object) -> None:
    """--model-arg gives values the type that Python would."""
    found = key_values([text])["a"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("attribute", "kind", "message"),
    [
        ("wrong", LoadError, "gave a dict, not an nn.Module"),
        ("broken", LoadError, "raised ValueError: no such width"),
        ("number", LoadError, "is a int, not a factory"),
        ("maek", UsageError, "there is no 'maek'"),
    ],
)
def test_factories_that_fail(
    attribute: str, kind: type[FeatvizError], message: str, factory_file: Path
) -> None:
    """What the user's code did is named in one line; the exit code tells usage from failure."""
    with pytest.raises(kind, match=message) as caught:
        load(f"{factory_file}:{attribute}")
    assert type(caught.value) is kind


def test_a_missing_attribute_lists_what_there_is(factory_file: Path) -> None:
    """The hint for a misspelt factory has the callables of the file."""
    with pytest.raises(UsageError) as caught:
        load(f"{factory_file}:maek")
    assert "make" in str(caught.value.hint) and "number" not in str(caught.value.hint)


def test_arguments_that_a_factory_does_not_take(factory_file: Path) -> None:
    """A wrong --model-arg shows what Python said of the call."""
    with pytest.raises(LoadError, match=r"TypeError: .*unexpected keyword argument 'depth'"):
        load(f"{factory_file}:make", model_args={"depth": 2})


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import user_not_there", "No module named 'user_not_there'"),
        ("def make(:", "SyntaxError"),
    ],
)
def test_factory_files_that_cannot_be_imported(code: str, message: str, tmp_path: Path) -> None:
    """An error while importing is the file's, and is passed on in one line."""
    (tmp_path / "user_bad.py").write_text(code)
    with pytest.raises(LoadError, match=f"importing .*user_bad.py failed.*{message}") as caught:
        load(f"{tmp_path / 'user_bad.py'}:make")
    assert "\n" not in caught.value.message


def test_two_factories_of_one_name_are_two_modules(tmp_path: Path) -> None:
    """The second net.py does not take the place of the first, whose classes still pickle."""
    made = []
    for width in (2, 5):
        folder = tmp_path / str(width)
        folder.mkdir()
        (folder / "net.py").write_text(
            "from torch import nn\n"
            "class Net(nn.Conv2d):\n"
            f"    def __init__(self):\n        super().__init__(3, {width}, 1)\n"
        )
        made.append(load(f"{folder / 'net.py'}:Net"))
    assert [module.out_channels for module in made] == [2, 5]
    for module in made:
        assert sys.modules[type(module).__module__].Net is type(module)
        assert type(pickle.loads(pickle.dumps(module))) is type(module)


def test_a_failed_import_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither a half-loaded module nor its folder on sys.path; mended, the file loads."""
    path = tmp_path / "user_half.py"
    path.write_text("import torch\nmake = torch.nn.ReLU\n1 / 0\n")
    before, modules = list(sys.path), set(sys.modules)
    with pytest.raises(LoadError, match="division by zero"):
        load(f"{path}:make")
    assert sys.path == before
    assert set(sys.modules) == modules
    path.write_text("import torch\nmake = torch.nn.ReLU\n")
    assert type(load(f"{path}:make")) is nn.ReLU


@pytest.mark.parametrize(
    ("spec", "message"),
    [("user_absent.py:make", "no file 'user_absent.py'"), ("user_absent:make", "no module 'user_")],
)
def test_a_factory_that_is_not_there(spec: str, message: str) -> None:
    """A missing file or module is a usage error."""
    with pytest.raises(UsageError, match=message):
        load(spec)


# torchvision -------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ["resnet81", "torchvision:resnet81", "ResNet81"])
def test_an_unknown_torchvision_name_gives_the_nearest(spec: str) -> None:
    """A misspelt name is a usage error whose hint has real names."""
    with pytest.raises(UsageError, match=r"torchvision has no model .*81'") as caught:
        load(spec)
    near = str(caught.value.hint).removeprefix("did you mean ").removesuffix("?").split(", ")
    assert "resnet18" in near or "resnet101" in near
    assert set(near) <= set(models.list_models())
    assert caught.value.exit_code == 2


def test_the_explicit_form_is_the_same_model() -> None:
    """torchvision:NAME is NAME."""
    one, other = (load(f"{p}{SMALL}", weights="none") for p in ("", "torchvision:"))
    assert same_weights(one, other)


def test_a_wrong_weights_entry_lists_the_entries() -> None:
    """--weights with an entry that the model lacks lists those it has."""
    with pytest.raises(UsageError, match="'IMAGENET1K_V9' is neither a file nor an entry") as e:
        load("resnet50", weights="IMAGENET1K_V9")
    assert all(word in str(e.value.hint) for word in ("IMAGENET1K_V1", "IMAGENET1K_V2", "none"))


@pytest.mark.parametrize("choice", [None, "default", "IMAGENET1K_V1"])
def test_weights_that_cannot_be_downloaded(
    choice: str | None, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a network: the file, the folder where to put it, and --weights none."""

    def offline(*args: object, **kwargs: object) -> None:
        raise URLError("Name or service not known")

    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    with pytest.raises(LoadError, match=r"SqueezeNet1_1_Weights\.IMAGENET1K_V1.*not known") as e:
        load(SMALL, weights=choice)
    hint = str(e.value.hint)
    assert Path(ENTRY.url).name in hint and str(hub) in hint and "--weights none" in hint


@pytest.mark.parametrize("choice", [None, "default", "IMAGENET1K_V1"])
def test_weights_in_the_cache_are_used(
    choice: str | None, hub: Path, weights: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file put where the message says is taken, without a network."""
    monkeypatch.setattr(torch.hub, "download_url_to_file", pytest.fail)
    torch.save(weights, hub / Path(ENTRY.url).name)
    assert same_weights(load(SMALL, weights=choice), weights)


@pytest.mark.parametrize(
    "content", [b"", b"<html>", WHOLE[:1000], OLD[:1000]], ids=["empty", "page", "zip", "legacy"]
)
def test_a_corrupt_file_in_the_cache(content: bytes, hub: Path) -> None:
    """A broken download is named with its folder, and ends in one line."""
    (hub / Path(ENTRY.url).name).write_bytes(content)
    with pytest.raises(LoadError, match="could not be loaded") as caught:
        load(SMALL)
    assert "\n" not in caught.value.message
    assert Path(ENTRY.url).name in str(caught.value.hint) and str(hub) in str(caught.value.hint)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"depth": 3}, "refused its arguments: .*depth"), ({"version": "9"}, "refused .*version")],
)
def test_arguments_that_a_builder_refuses(arguments: dict[str, Any], message: str) -> None:
    """A --model-arg that torchvision does not take is passed on in one line."""
    with pytest.raises(LoadError, match=message):
        load(SMALL, weights="none", model_args=arguments)


def test_random_weights_are_announced(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--weights none warns that the weights are random, and by which seed."""
    monkeypatch.setattr(logging.getLogger("featviz"), "propagate", True)
    caplog.set_level(logging.INFO, "featviz")
    load(SMALL, weights="none", seed=3)
    assert f"{SMALL} has random weights (--weights none, --seed 3)" in caplog.text


@pytest.mark.parametrize("form", ["torchvision", "factory"])
def test_the_seed_decides_and_the_global_generator_is_left_alone(
    form: str, factory_file: Path
) -> None:
    """Equal seeds give equal weights, others do not, and torch's own state is as before."""
    spec = SMALL if form == "torchvision" else f"{factory_file}:make"
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    one, again, other = (load(spec, weights="none", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert same_weights(one, again)
    assert not same_weights(one, other)


# Device and environment --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cuda:-1", "", "CPU"])
def test_nonsense_is_no_device(name: str) -> None:
    """--device lists what it takes."""
    with pytest.raises(UsageError, match=f"--device '{name}' is no device"):
        pick_device(name)


@pytest.mark.parametrize(("name", "count"), [("cuda", 0), ("cuda:0", 0), ("cuda:2", 2)])
def test_a_device_that_is_not_here(name: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU beyond those of the machine is a usage error that counts them."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(UsageError, match=f"--device {name}: this machine has {count} cuda devices"):
        pick_device(name)


def test_auto_without_a_gpu_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """--device auto falls back to the CPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device("auto") == torch.device("cpu")


def test_torch_and_torchvision_that_do_not_fit_end_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, featviz: Callable[..., Any]
) -> None:
    """The operator error at import becomes one line with both versions, and a hint."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    versions = {"torch": "9.1", "torchvision": "8.2"}
    monkeypatch.setattr(requirements.metadata, "version", versions.__getitem__)
    monkeypatch.delitem(sys.modules, "torchvision")
    monkeypatch.syspath_prepend(tmp_path)
    found = featviz("layers", SMALL)
    assert found.code == 1 and found.out == ""
    line, hint = found.err.splitlines()
    assert line == (
        "error: torch 9.1 and torchvision 8.2 cannot be used together: "
        "operator torchvision::nms does not exist"
    )
    assert hint.startswith("hint: ") and "pip install" in hint


def test_every_source_is_one_record_and_one_file() -> None:
    """A source's file has the `load` that its record calls; help names its form and weights."""
    from importlib import import_module

    from featviz.models import sources

    for source in sources.SOURCES:
        assert callable(import_module(f"featviz.models.sources.{source.kind}").load)
        assert source.form in sources.MODEL_HELP
        assert source.weights in sources.WEIGHTS_HELP
    specs = ["resnet18", "timm:resnet18", __file__, f"{__file__}:make"]
    assert [sources.source_of(spec).kind for spec in specs] == [
        source.kind for source in sources.SOURCES
    ]
