"""Programs whose outputs are ModelOutputs of transformers: dicts, whatever they are called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exported import PROGRAM, packed, records

from featviz.errors import LoadError
from featviz.models.files import exported
from featviz.models.load import ModelOptions, load_model
from featviz.models.preprocess import InputOptions

LEAF = {"type": None, "context": None, "children_spec": []}
OUTPUT = "transformers.modeling_outputs.ImageClassifierOutput"


def program(folder: Path, tree: Any) -> Path:
    """Net as a program whose one output is said to be built like this."""
    contents = records()
    document = json.loads(contents[PROGRAM])
    signature = document["graph_module"]["module_call_graph"][0]["signature"]
    signature["out_spec"] = json.dumps([1, tree])
    contents[PROGRAM] = json.dumps(document).encode()
    return packed(folder / "net.pt2", contents)


def node(kind: str, keys: Any, *children: Any) -> dict[str, Any]:
    return {"type": kind, "context": json.dumps(keys), "children_spec": list(children)}


@pytest.mark.parametrize(
    "family",
    ["dinov2", *(pytest.param(n, marks=pytest.mark.slow) for n in ("vit", "segformer", "detr"))],
)
def test_a_model_of_transformers_gives_what_its_program_gives(family: str, tmp_path: Path) -> None:
    """Bit for bit by the names of the outputs, and a classifier is known by its class."""
    folders = pytest.importorskip(
        "models.hf_folders", reason="transformers is not installed", exc_type=ImportError
    )
    name, config = folders.MODELS[family]
    model = getattr(folders.transformers, name)(config()).eval()
    side = 32 if family in ("vit", "dinov2") else 64
    image = torch.rand(1, 3, side, side, generator=torch.Generator().manual_seed(0))
    saved = torch.export.export(model, (image,))
    torch.export.save(saved, tmp_path / "m.pt2")
    found = load_model(ModelOptions(str(tmp_path / "m.pt2"), device="cpu"), InputOptions())
    with torch.no_grad():
        got, want = found.module(image), saved.module()(image)
    assert type(got) is dict and list(got) == list(want)
    assert all(torch.equal(got[key], want[key]) for key in want)
    assert found.scores == ("logits" if family == "vit" else None)


def test_nothing_is_looked_up_under_the_name(tmp_path: Path) -> None:
    """An output class that no version of transformers has is a dict just as well."""
    tree = node("transformers.models.no.such.NoSuchOutput", ["logits"], LEAF)
    got = exported.read(program(tmp_path, tree)).module(torch.zeros(1, 3, 16, 20))
    assert type(got) is dict and got["logits"].shape == (1, 2, 16, 20)


@pytest.mark.parametrize(
    "tree",
    [
        node("os.system", ["logits"], LEAF),
        node("transformers.utils.Output", ["logits"], LEAF),
        node("transformers.models.x.y.Cache", ["logits"], LEAF),
        node("evil.transformers.modeling_outputs.Output", ["logits"], LEAF),
        node(f"{OUTPUT}\n", ["logits"], LEAF),
        node(OUTPUT, ["logits", "loss"], LEAF),
        node(OUTPUT, ["__import__('os')"], LEAF),
        node(OUTPUT, {"__enum__": True, "fqn": "os:x", "name": "Y"}, LEAF),
        node(OUTPUT, None, LEAF),
        node(OUTPUT, ["logits"], node("os.system", None, LEAF)),
    ],
    ids=lambda tree: f"{tree['type'].strip()} {tree['context']}",
)
def test_other_trees_are_refused_in_one_line(tree: Any, tmp_path: Path) -> None:
    """Other classes, names that are none, an enumeration, more names than outputs."""
    with pytest.raises(LoadError, match=r"holds out_spec .*nothing was executed") as caught:
        exported.read(program(tmp_path, tree))
    assert "\n" not in caught.value.message
