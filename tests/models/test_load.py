"""MODEL strings to modules: sources, options that fit, devices, and files that are no model."""

from __future__ import annotations

import gc
import io
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from hostile_payloads import saved_bytes
from PIL import Image
from torch import nn
from torchvision import models

import featviz
from featviz.errors import LoadError, UsageError
from featviz.models import requirements
from featviz.models.load import pick_device
from models.loading import OLD, SMALL, WHOLE, load

pytestmark = pytest.mark.usefixtures("imports_undone")


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("resnet18", {"arch": "resnet18"}, "--arch is for files of weights and adapters"),
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


def _png() -> bytes:
    file = io.BytesIO()
    Image.new("L", (4, 4)).save(file, "png")
    return file.getvalue()


def _zip(**members: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in members.items():
            archive.writestr(name.replace("__", "/"), text)
    return file.getvalue()


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
        (saved_bytes(torch.zeros(3)), "holds no weights: a Tensor"),
        (saved_bytes([1, 2]), "holds no weights: a list"),
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
    """A TorchScript file is distinguished from a checkpoint, with the reason."""
    torch.jit.trace(tiny, torch.zeros(1, 3, 8, 8)).save(tmp_path / "script.pt")
    with pytest.raises(LoadError, match=r"script\.pt is TorchScript, which takes no hooks"):
        load(tmp_path / "script.pt")


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"depth": 3}, "refused its arguments: .*depth"), ({"version": "9"}, "refused .*version")],
)
def test_arguments_that_a_builder_refuses(arguments: dict[str, Any], message: str) -> None:
    """A --model-arg that torchvision does not take is passed on in one line."""
    with pytest.raises(LoadError, match=message):
        load(SMALL, weights="none", model_args=arguments)


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


@pytest.fixture
def unfit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A torchvision that was built for another torch, and net.py whose class imports it."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')"
    )
    versions = {"torch": "9.1", "torchvision": "8.2"}
    monkeypatch.setattr(requirements.metadata, "version", versions.__getitem__)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "class Plain(nn.Sequential):\n"
        "    def __init__(self):\n        super().__init__(nn.Conv2d(3, 4, 3))\n"
        "class Late(Plain):\n"
        "    def __init__(self):\n        import torchvision\n"
    )
    return tmp_path / "net.py"


@pytest.mark.parametrize(
    ("model", "where"), [(SMALL, ""), ("NET:Late", r"NET:Late raised RuntimeError: ")]
)
def test_torch_and_torchvision_that_do_not_fit_end_in_one_line(
    model: str, where: str, unfit: Path, featviz: Callable[..., Any]
) -> None:
    """The operator error at import becomes one line with both versions, and a hint, also where the
    user's code imports torchvision."""
    outcome = featviz("layers", model.replace("NET", str(unfit)))
    assert outcome.code == 1 and outcome.out == ""
    line, hint = outcome.err.splitlines()
    assert line == (
        "error: torch 9.1 and torchvision 8.2 cannot be used together: "
        f"{where.replace('NET', str(unfit))}operator torchvision::nms does not exist"
    )
    assert hint.startswith("hint: ") and "pip install" in hint


def test_who_does_without_torchvision_does_not_mind_that_it_does_not_fit(
    unfit: Path, tmp_path: Path, featviz: Callable[..., Any]
) -> None:
    """A network of one's own is drawn beside a torchvision that cannot be imported."""
    Image.new("RGB", (40, 30), "teal").save(tmp_path / "teal.png")
    out = tmp_path / "out"
    done = featviz("run", f"{unfit}:Plain", tmp_path / "teal.png", "--out", out)
    assert done.code == 0, done.err
    assert (out / "teal.png" / "001_0" / "output.png").is_file()


@pytest.fixture
def resnet_file(tmp_path: Path) -> Path:
    """A whole model of torchvision's classes."""
    torch.save(models.resnet18(weights=None), tmp_path / "whole.pth")
    return tmp_path / "whole.pth"


def test_a_file_of_torchvisions_classes_imports_it(
    resnet_file: Path, unfit: Path, featviz: Callable[..., Any]
) -> None:
    """A whole model that needs torchvision is refused with the same line."""
    outcome = featviz("layers", resnet_file)
    assert outcome.code == 1
    assert "torch 9.1 and torchvision 8.2 cannot be used together" in outcome.err


def test_every_source_is_one_record_and_one_file(tiny_file: Path, tmp_path: Path) -> None:
    """A source's file has the `load` that its record calls; help names its form and weights."""
    from importlib import import_module

    from featviz.models import sources

    for source in sources.SOURCES:
        assert callable(import_module(f"featviz.models.sources.{source.kind}").load)
        assert source.form in sources.MODEL_HELP
        assert source.weights in sources.WEIGHTS_HELP
    (tmp_path / "lora").mkdir()
    (tmp_path / "lora" / "adapter_config.json").touch()
    specs = ["resnet18", "timm:resnet18", str(tmp_path / "lora"), "hf:vit", str(tiny_file)]
    specs.append(f"{__file__}:make")
    assert [sources.source_of(spec).kind for spec in specs] == [
        source.kind for source in sources.SOURCES
    ]


def test_versions_are_those_that_are_imported() -> None:
    """What records name is what computes, with the build's suffix."""
    assert requirements.versions() == {
        "featviz": featviz.__version__,
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
    }


@pytest.mark.slow
@pytest.mark.parametrize("alone", [True, False])
def test_garbage_is_collected_again_once_torch_is_there(alone: bool) -> None:
    """A command sets aside what it has imported; a caller's own process is left as it was."""
    code = (
        "import gc; from featviz.models.requirements import require_torch; "
        f"require_torch(alone={alone}); print(gc.isenabled(), gc.get_freeze_count() > 100_000)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", str(alone)] and done.stderr == ""


def test_who_collects_no_garbage_goes_on_so() -> None:
    """Where torch is there already nothing is set aside, and the caller's choice stays."""
    frozen = gc.get_freeze_count()
    gc.disable()
    try:
        requirements.require_torch(alone=True)
        assert not gc.isenabled() and gc.get_freeze_count() == frozen
    finally:
        gc.enable()
