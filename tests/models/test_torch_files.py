"""Files of torch.save: whole models load unchanged, and nothing that a file names is
called."""

from __future__ import annotations

import argparse
import importlib
import io
import pickle
import re
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hostile_pickles
import numpy as np
import pytest
import torch
from conftest import DIGITS_MODEL
from hostile_harness import Sandbox
from hostile_pickles import around
from torch import nn
from torchvision import models

from featviz.errors import LoadError
from featviz.models import inert, rebuild, weights
from featviz.models.weights import find_weights
from models.loading import (
    load,
    nothing_fetched,
    on_meta,
    same_modules,
    same_weights,
    uninitialised,
)

from .test_zoo import RUN

pytestmark = pytest.mark.usefixtures("imports_undone")

ATTACKS = {**hostile_pickles.CALLS, **hostile_pickles.STATES, **hostile_pickles.MODULES}

INERT = (
    inert.Name,
    inert.Made,
    inert.Storage,
    list,
    tuple,
    torch.serialization.StorageType,
)
PLAIN = (bool, int, float, str, bytes, type(None))
HARMLESS = ("object.__getattr__", "object.__setattr__", "sys._getframe")
EVENTS: list[str] = []
"""What happened while a pickle was read; a hook of audits cannot be taken away again.
"""
_reading: list[bool] = []


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if _reading and event not in HARMLESS:
        EVENTS.append(f"{event} {arguments}")


sys.addaudithook(_note)


@contextmanager
def noted_events() -> Iterator[None]:
    """Whatever happens in the block is added to EVENTS."""
    EVENTS.clear()
    _reading.append(True)
    try:
        yield
    finally:
        _reading.clear()


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """Where a file is and where its payload would leave a marker; there is no network."""
    made = Sandbox(tmp_path / "box")
    monkeypatch.chdir(made.work)
    recipe = "activation: open('marker', 'w')\nnc: 1\nbackbone: []\nhead: []\n"
    (made.work / "evil.yaml").write_text(recipe)

    def refuse(*args: object, **more: object) -> None:
        pytest.fail("asked the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    return made


@pytest.mark.parametrize("attempt", ATTACKS)
def test_a_pickle_that_asks_for_more_is_refused(attempt: str, box: Sandbox) -> None:
    """One printable line says what it does, or that Ultralytics is missing; nothing
    runs."""
    path = box.given / "model.pth"
    path.write_bytes(around(ATTACKS[attempt]))
    before = sorted(box.root.rglob("*"))
    with pytest.raises(LoadError) as caught:
        find_weights(weights.read(path), name="model.pth")
    message = caught.value.message
    if find_spec("ultralytics") or "ultralytics" not in message:
        assert hostile_pickles.REASONS.search(message)
    assert message.isprintable()
    assert len(message) < 600
    assert sorted(box.root.rglob("*")) == before


def parts_of(value: Any) -> list[Any]:
    """What a value of a pickle is made of."""
    if type(value) in (list, tuple):
        return list(value)
    if type(value) is inert.Made:
        pairs = [part for pair in value.pairs for part in pair]
        return [value.maker, *value.arguments, *value.states, *value.items, *pairs]
    return []


def all_within(value: Any) -> list[Any]:
    """A value and all that it is made of, but for plain values: each once."""
    waiting = [value]
    reached: dict[int, Any] = {}
    while waiting:
        part = waiting.pop()
        if type(part) not in PLAIN and id(part) not in reached:
            reached[id(part)] = part
            waiting += parts_of(part)
    return list(reached.values())


@pytest.mark.medium
@pytest.mark.parametrize("attempt", ATTACKS)
def test_whatever_is_read_is_inert(attempt: str, box: Sandbox) -> None:
    """Nothing is imported, opened, compiled or looked up, and nothing on the stack can
    be called or has attributes of its own."""
    # torch imports at first
    inert.read(io.BytesIO(around({"w": hostile_pickles.SIXTEEN})))
    file = io.BytesIO(around(ATTACKS[attempt]))
    content: Any = None
    with suppress(Exception), noted_events():
        content = inert.read(file)
    assert EVENTS == []
    for value in all_within(content):
        assert type(value) in INERT
        assert not callable(value)
        assert type(value) is not inert.Made or not hasattr(value, "__dict__")


UNREAL = re.compile(
    "float beyond|an offset|a stride|no stride|fraction|is true|overflow$|doubles"
)
"""Tensors that no storage holds."""
VALUES = hostile_pickles.VALUES
UNREAL_VALUES = [name for name in VALUES if UNREAL.search(name)]
REAL_VALUES = [name for name in VALUES if name not in UNREAL_VALUES]


def beside(name: str, box: Sandbox) -> Path:
    """A file of weights with something beside them."""
    content = {
        "w": hostile_pickles.SIXTEEN,
        "weight": hostile_pickles.rebuilt(0, (16,), (1,)),
        "beside": VALUES[name],
    }
    path = box.given / "model.pth"
    path.write_bytes(around(content))
    return path


@pytest.mark.parametrize("name", UNREAL_VALUES)
def test_a_tensor_without_its_data_refuses_the_file(name: str, box: Sandbox) -> None:
    """In one line, and nothing is written."""
    path = beside(name, box)
    before = sorted(box.root.rglob("*"))
    with pytest.raises(LoadError, match="holds a tensor"):
        weights.read(path)
    assert sorted(box.root.rglob("*")) == before


@pytest.mark.parametrize("name", REAL_VALUES)
def test_weights_are_found_beside_anything(name: str, box: Sandbox) -> None:
    """What is beside them is left out, and nothing is written."""
    path = beside(name, box)
    before = sorted(box.root.rglob("*"))
    assert torch.equal(weights.read(path)["weight"], torch.zeros(16))
    assert sorted(box.root.rglob("*")) == before


def repeated(name: str) -> nn.Module:
    """A torchvision model whose tensors repeat one number: its file is small."""
    with uninitialised(), on_meta(name):
        module = models.get_model(name, **nothing_fetched(name))
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    for path, tensor in [*parameters, *buffers]:
        owner, _, name = path.rpartition(".")
        number = torch.ones((), dtype=tensor.dtype).expand(tensor.shape)
        if isinstance(tensor, nn.Parameter):
            number = nn.Parameter(number, tensor.requires_grad)
        setattr(module.get_submodule(owner), name, number)
    return module


@pytest.mark.slow
@pytest.mark.parametrize("name", [*RUN, "quantized_resnet18"])
def test_a_whole_torchvision_model_loads_safely(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch.save(model) of each family loads without flags, modules and tensors equal."""
    monkeypatch.setattr(rebuild, "_BYTES_BESIDE", 2**40)  # the file repeats one number
    module = repeated(name)
    torch.save(module, tmp_path / "whole.pth")
    same_modules(load(tmp_path / "whole.pth"), module)


@pytest.mark.medium
@pytest.mark.parametrize(
    "make",
    [
        lambda: models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1]),
        lambda: models.VisionTransformer(64, 32, 2, 2, 8, 16),
    ],
)
def test_a_whole_model_says_what_it_said_before(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    """Numbers and output of a model that keeps a class, or a partial of one."""
    module = make().eval()
    torch.save(module, tmp_path / "whole.pth")
    loaded = load(tmp_path / "whole.pth").eval()
    image = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        assert same_weights(loaded, module)
        assert torch.equal(loaded(image), module(image))


def test_a_partial_keeps_its_arguments(tmp_path: Path) -> None:
    """Those by position and those by name."""
    module = nn.ReLU()
    module.named = partial(nn.LayerNorm, eps=0.25)
    module.counted = partial(nn.LayerNorm, 3)
    torch.save(module, tmp_path / "whole.pth")
    loaded = load(tmp_path / "whole.pth")
    assert loaded.named.keywords == {"eps": 0.25}
    assert loaded.counted.args == (3,)


def test_a_storage_of_the_older_format_is_no_longer_than_the_file(
    tmp_path: Path,
) -> None:
    """Memory for numbers that are not there is not reserved."""
    path = tmp_path / "old.pth"
    weights = {"w": torch.arange(16.0)}
    torch.save(weights, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    short = pickle.BININT1 + b"\x10" + pickle.NONE
    terabytes = pickle.LONG1 + b"\x06" + (2**40).to_bytes(6, "little") + pickle.NONE
    assert data.count(short) == 1
    path.write_bytes(data.replace(short, terabytes))
    with pytest.raises(LoadError, match="a storage of 1,099,511,627,776 numbers"):
        load("resnet18", weights=str(path))


def _tied() -> nn.Module:
    first = nn.Linear(3, 3)
    second = nn.Linear(3, 3)
    second.weight = first.weight
    return nn.Sequential(first, second)


def _noted() -> nn.Module:
    layer = nn.Conv2d(3, 2, 1)
    layer.register_buffer("scale", nn.Buffer(torch.ones(2)))
    layer.weight.note = "kept by torch, of no use here"
    return layer


WHOLE: dict[str, Callable[[], nn.Module]] = {
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(nn.Conv2d(3, 2, 1)),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, activation=nn.functional.gelu),
    "recurrent": lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    "tied": _tied,
    "noted": _noted,
}


SAVED: list[dict[str, Any]] = [
    {},
    {"pickle_protocol": 4},
    {"_use_new_zipfile_serialization": False},
    {"_use_new_zipfile_serialization": False, "pickle_protocol": 5},
]


@pytest.mark.medium
@pytest.mark.parametrize("options", SAVED, ids=str)
@pytest.mark.parametrize("name", WHOLE)
def test_whole_models_of_torch_load_without_flags(
    name: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """What torch.nn and its helpers make, in the format of today and of before torch
    1.6, in each protocol."""
    module = WHOLE[name]()
    torch.save(module, tmp_path / "whole.pth", **options)
    loaded = weights.read(tmp_path / "whole.pth")
    assert type(loaded) is type(module)
    assert same_weights(loaded, module)


def test_tensors_that_were_one_are_one(tmp_path: Path) -> None:
    """Tied weights stay tied."""
    torch.save(_tied(), tmp_path / "whole.pth")
    loaded = weights.read(tmp_path / "whole.pth")
    assert loaded[0].weight is loaded[1].weight


@pytest.mark.medium
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda net: nn.Sequential(nn.utils.weight_norm(net[0])),
            r"needs torch\.nn\.utils\.weight_norm\.WeightNorm",
        ),
        pytest.param(torch.compile, r"needs .*torch\._dynamo", marks=pytest.mark.slow),
    ],
)
def test_what_needs_trust_says_so(
    change: Callable[[nn.Module], nn.Module], reason: str, tmp_path: Path
) -> None:
    """The line names the reason and --trust, which loads the model with the same
    output."""
    net = nn.Sequential(nn.Conv2d(3, 2, 1))
    image = torch.rand(1, 3, 4, 4)
    expected = net(image)
    torch.save(change(net), tmp_path / "whole.pth")
    with pytest.raises(LoadError, match=reason) as caught:
        load(tmp_path / "whole.pth")
    loaded = load(tmp_path / "whole.pth", trust=True)
    assert "--trust" in str(caught.value.hint)
    assert type(loaded) is nn.Sequential
    torch.testing.assert_close(loaded(image), expected)


@pytest.mark.parametrize(
    ("namespace", "zipped"), [(argparse.Namespace, True), (SimpleNamespace, False)]
)
def test_arguments_of_a_script_load_as_data(
    namespace: Callable[..., Any], zipped: bool, tmp_path: Path
) -> None:
    """Beside the weights, nested and with paths."""
    content = {
        "model": {"w": torch.ones(2)},
        "args": namespace(lr=1e-3, data=Path("runs/a"), more=namespace(depth=2)),
    }
    torch.save(content, tmp_path / "c.pth", _use_new_zipfile_serialization=zipped)
    read = weights.read(tmp_path / "c.pth")
    arguments = read["args"]
    assert torch.equal(read["model"]["w"], torch.ones(2))
    assert arguments.lr == 1e-3
    assert arguments.data == "runs/a"
    assert arguments.more.depth == 2


class Meter:
    """A class of nobody's list, which is made with a keyword."""

    def __new__(cls, *, window: int) -> Meter:
        """One with this window."""
        return super().__new__(cls)

    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, int]]:
        """What is pickled."""
        return (), {"window": 20}


@pytest.mark.parametrize("protocol", [2, 4])
def test_an_object_that_is_made_with_keywords_may_lie_beside_weights(
    protocol: int, tmp_path: Path
) -> None:
    """Newer protocols have an instruction of their own for it."""
    content = {"w": torch.ones(2), "loss": Meter(window=20)}
    torch.save(content, tmp_path / "c.pth", pickle_protocol=protocol)
    read = weights.read(tmp_path / "c.pth")
    assert read.keys() == {"w"}
    assert torch.equal(read["w"], torch.ones(2))


def test_modules_that_share_what_cannot_be_made_are_not_made(tmp_path: Path) -> None:
    """Neither the first of them nor the others."""
    first, second = nn.Conv2d(3, 2, 1), nn.Conv2d(3, 2, 1)
    first.beside = second.beside = [Note(3, 2, 1)]
    torch.save({"first": first, "second": second}, tmp_path / "c.pth")
    read = weights.read(tmp_path / "c.pth")
    assert [type(value).__name__ for value in read.values()] == ["UnbuiltModule"] * 2


def pickled(content: object, protocol: int, folder: Path) -> Path:
    (folder / "w.pkl").write_bytes(pickle.dumps(content, protocol))
    return folder / "w.pkl"


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "content_of",
    [
        lambda module: module.state_dict(),
        lambda module: {
            "model": {k: v.numpy() for k, v in module.state_dict().items()}
        },
        lambda module: {
            k: v.numpy().astype(">f4") for k, v in module.state_dict().items()
        },
        lambda module: {
            k: np.asfortranarray(v.numpy()) for k, v in module.state_dict().items()
        },
        lambda module: module,
    ],
    ids=["tensors", "arrays", "swapped arrays", "Fortran's arrays", "module"],
)
def test_plain_pickles_are_read(
    content_of: Callable[[nn.Module], object], protocol: int, tmp_path: Path
) -> None:
    """Of any protocol: tensors, which lie in files of torch.save within, arrays, and
    modules."""
    module = nn.Conv2d(3, 2, 1)
    path = pickled(content_of(module), protocol, tmp_path)
    assert same_weights(load(path, arch=_code(tmp_path)), module)


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_pickled_module_is_a_whole_model(protocol: int, tmp_path: Path) -> None:
    """Of protocols 0 and 1, which call a function of copyreg, only weights are read."""
    module = nn.Conv2d(3, 2, 1)
    assert same_weights(load(pickled(module, protocol, tmp_path)), module)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_weights_are_arrays_of_numpy(save: Callable[..., None], tmp_path: Path) -> None:
    """An npz, compressed or not, in either order of bytes."""
    state = nn.Conv2d(3, 2, 1).state_dict()
    arrays = {name: tensor.numpy().astype(">f4") for name, tensor in state.items()}
    save(tmp_path / "w.npz", **arrays)
    assert same_weights(load(tmp_path / "w.npz", arch=_code(tmp_path)), state)


def test_the_weights_of_a_class_that_is_not_there(tmp_path: Path) -> None:
    """`--arch` takes them out of a whole model, whose class is neither imported nor
    needed."""
    note = Note(3, 2, 1)
    torch.save({"model": note}, tmp_path / "whole.pth")
    with pytest.raises(LoadError, match=r"needs .*Note, which could") as caught:
        load(tmp_path / "whole.pth")
    assert "for the weights in it, --arch FILE.py:CLASS" in str(caught.value.hint)
    assert same_weights(load(tmp_path / "whole.pth", arch=_code(tmp_path)), note)


@pytest.mark.parametrize("module", ["/etc/net", "**", "net\0"])
def test_a_module_of_an_odd_name_is_no_pattern(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search for the code of a class ends, and the message is that of any class."""
    odd = type("Net", (nn.Module,), {"__module__": module})
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, module, SimpleNamespace(Net=odd))
        torch.save(odd(), tmp_path / "odd.pth")
    with pytest.raises(LoadError, match=r"needs .*Net, which could") as caught:
        load(tmp_path / "odd.pth")
    assert "--arch FILE.py:CLASS" in str(caught.value.hint)


class Note(nn.Conv2d):
    """A class of nobody's list."""


class Outer(nn.Module):
    """A class of nobody's list, with layers of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2))
        self.register_buffer("hidden", torch.ones(1), persistent=False)


def test_layers_in_a_class_that_is_not_there_keep_their_names(tmp_path: Path) -> None:
    """The tensors are those of the module's own state dict, in its order, though its
    layers could be made."""
    outer = Outer()
    torch.save(outer, tmp_path / "whole.pth")
    content = weights.read(tmp_path / "whole.pth", complete=False)
    tensors = dict(find_weights(content).tensors)
    assert same_weights(outer, tensors)


def test_a_module_that_lies_beside_is_the_one_in_the_model(tmp_path: Path) -> None:
    """What a file shares is shared again."""
    layer = nn.Conv2d(3, 2, 1)
    torch.save({"model": nn.Sequential(layer), "ema": layer}, tmp_path / "both.pth")
    content = weights.read(tmp_path / "both.pth")
    assert content["model"][0] is content["ema"]


def _code(folder: Path) -> str:
    (folder / "user_conv.py").write_text(
        "from torch import nn\ndef net(): return nn.Conv2d(3, 2, 1)"
    )
    return f"{folder / 'user_conv.py'}:net"


@pytest.fixture
def model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A whole model of a class whose module lies beside it, and is imported from
    nowhere else."""
    folder = tmp_path / "models"
    elsewhere = tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    code = "from torch import nn\nclass Net(nn.Sequential):\n    pass\n"
    (folder / "user_beside.py").write_text(code)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(folder)
        net = importlib.import_module("user_beside").Net
        torch.save(net(nn.Conv2d(3, 2, 1)), folder / "net.pth")
    del sys.modules["user_beside"]
    importlib.invalidate_caches()
    monkeypatch.chdir(elsewhere)
    return folder


@pytest.mark.medium
@pytest.mark.parametrize("in_current_folder", [True, False])
def test_modules_are_found_here_and_beside_the_file(
    in_current_folder: bool, model_folder: Path
) -> None:
    """--trust, for which the refusal asks, finds the class in the current folder and in
    the folder of the file; without it nothing is imported."""
    if in_current_folder:
        (model_folder / "user_beside.py").rename(Path.cwd() / "user_beside.py")
    message = r"needs user_beside\.Net, which could"
    with pytest.raises(LoadError, match=message) as caught:
        load(model_folder / "net.pth")
    assert "--trust" in str(caught.value.hint)
    assert "user_beside" not in sys.modules
    model = load(model_folder / "net.pth", trust=True)
    assert type(model).__name__ == "Net"
    assert model[0].out_channels == 2


def test_a_module_that_is_not_found_is_named(model_folder: Path) -> None:
    """The module, and PYTHONPATH; sys.path is as before."""
    (model_folder / "user_beside.py").unlink()
    before = list(sys.path)
    with pytest.raises(LoadError, match="user_beside") as caught:
        load(model_folder / "net.pth", trust=True)
    assert "PYTHONPATH" in str(caught.value.hint)
    assert sys.path == before


def test_a_process_that_has_compiled_reads_models_too() -> None:
    """torch.compile puts a `__setstate__` of its own in front of that of nn.Module."""
    from torch._dynamo.mutation_guard import install_generation_tagging_init

    install_generation_tagging_init()
    assert type(weights.read(DIGITS_MODEL, trust=False)) is nn.Sequential
