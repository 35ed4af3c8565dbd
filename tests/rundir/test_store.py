"""The run directory: names, atomic writes, what is refused, and what comes back."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rundirs import Drawn, write_run
from runs import tree

from featviz.errors import StoreError
from featviz.records import CaptureKey, CaptureSite, Layer, Skip
from featviz.rundir import SCHEMA_VERSION, schema, write
from featviz.rundir.folder import Folder, hidden_name
from featviz.rundir.place import write_file
from featviz.rundir.read import read_run
from featviz.rundir.schema import Capture, read_json
from featviz.rundir.write import RunDirectory
from featviz.text import safe_name

ROW = {
    "layer": "conv",
    "type": "Conv2d",
    "index": 1,
    "kind": "output",
    "call": 0,
    "key": "",
    "shape": [1, 2, 3, 3],
    "layout": "nchw",
    "maps": 2,
    "file": "001_conv/output.png",
    "grid": {"nrow": 2},
    "normalize": "layer",
    "range": [-0.1, 1 / 3],
    "min": -0.1,
    "max": 1 / 3,
    "mean": None,
    "std": 1e-45,
    "zero_fraction": 0.5,
    "nonfinite": 0,
}
CAPTURE = Capture(**ROW)  # type: ignore[arg-type]

ODD = [
    "..",
    "con.txt",
    "Com1",
    "trailing.",
    "<img src=x onerror=alert(1)>.png",
    "a:b.png",
    "a*b.png",
    "a\nb.png",
    "a\x7fb.png",
    "\udcff\udc80.png",
    "層" * 90 + ".png",
    "x" * 300 + ".jpeg",
    "x" * 301 + ".jpeg",
    "x" * 50 + "." + "y" * 200,
]


@pytest.mark.parametrize(
    "name",
    ["img 1 (copy).png", "Größe.png", "日本.jpg", "a'b&c;d.png", "consul.txt"],
)
def test_portable_names_are_kept(name: str) -> None:
    """A name that every system takes stays as it is, Unicode included."""
    assert safe_name(name) == name


RESERVED = {"con", "prn", "aux", "nul", "com1", "com9", "lpt1", "lpt9"}
"""Names that Windows keeps for devices, whatever their extension."""


@pytest.mark.parametrize("name", ODD, ids=lambda name: ascii(name)[:20])
def test_odd_names_become_portable(tmp_path: Path, name: str) -> None:
    """What is left is short, has nothing that a system refuses, and can be made as a
    file."""
    portable = safe_name(name)
    assert len(portable) <= 100
    assert len(portable.encode()) <= 200
    assert re.search(r'[\x00-\x1f<>:"/\\|?*\x7f]|[. ]$', portable) is None
    assert portable.partition(".")[0].lower() not in RESERVED
    assert safe_name(portable) == portable
    (tmp_path / portable).write_bytes(b"")
    assert [path.name for path in tmp_path.iterdir()] == [portable]


def test_changed_names_keep_their_extension_and_stay_apart() -> None:
    """Names that become alike differ by 8 hex digits, and those of any run are the
    same."""
    names = {safe_name(name).casefold() for name in ODD}
    assert len(names) == len(ODD)
    digest = hashlib.sha256(b"a:b.png").hexdigest()[:8]
    assert safe_name("a:b.png") == f"a_b-{digest}.png"
    assert safe_name("x" * 300 + ".jpeg").endswith(".jpeg")


LAYER = Layer(4, "layer1.0.conv1", "Conv2d")


def test_the_folder_of_an_image_keeps_its_parents() -> None:
    """Its path is its name below the run's."""
    folder = RunDirectory(Folder.open(Path("out"))).image("sub/cat.jpg")
    assert (folder.name, folder.path) == ("sub/cat.jpg", Path("out/sub/cat.jpg"))


@pytest.mark.parametrize(
    ("layer", "name", "path"),
    [
        (LAYER, "output.png", r"004_layer1\.0\.conv1/output\.png"),
        (Layer(0, "", "Net"), "output.png", r"000_Net/output\.png"),
        (LAYER, "output.a/b.png", r"004_layer1\.0\.conv1/[^/]+\.png"),
    ],
)
def test_the_folder_of_a_layer_has_its_position(
    layer: Layer, name: str, path: str
) -> None:
    """Its name follows, or the type of a layer without one."""
    folder = RunDirectory(Folder.open(Path("out"))).image("cat.jpg")
    assert re.fullmatch(path, folder.file(layer, name))


@pytest.mark.parametrize(
    "key",
    [
        CaptureKey("conv", "output", 2, "0"),
        CaptureSite(Layer(4, "conv", "Conv2d"), "output", 2, "0"),
    ],
    ids=["read back", "captured"],
)
def test_a_capture_key_is_a_name(key: CaptureKey | CaptureSite) -> None:
    """Layer, kind, call and key are in the names of arrays and files; a tensor inside
    another has a longer key."""
    assert (key.stats_key, key.stem) == ("conv|output|2|0", "output.call2.0")
    assert key.inside("x").stats_key == "conv|output|2|0.x"
    assert key.inside("") == key


@pytest.mark.parametrize("name", ["../x.png", "a/../../x.png", "./x.png"])
def test_no_name_leaves_the_run_directory(name: str, tmp_path: Path) -> None:
    """A name cannot climb out of the folder."""
    path = RunDirectory(Folder.open(tmp_path)).image(name).path
    assert tmp_path in path.parents
    assert ".." not in path.parts


# Atomic writes


def test_atomic_writes_beside_and_moves(tmp_path: Path) -> None:
    """Under the final name there is the old content until all of the new one is."""
    path = tmp_path / "sub" / "f.bin"
    with write_file(path) as file:
        file.write(b"old")
    with write_file(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert [p.name for p in path.parent.iterdir()] == ["f.bin"]


@pytest.mark.parametrize("before", [{}, {"f.bin": b"old"}])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_failure_inside_leaves_nothing_new(
    tmp_path: Path, before: dict[str, bytes], error: type[BaseException]
) -> None:
    """After an exception there is neither a new file nor a part; old content stays."""
    for name, data in before.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(error), write_file(tmp_path / "f.bin") as file:
        file.write(b"half")
        raise error
    assert tree(tmp_path) == before


@pytest.mark.parametrize("method", ["open", "replace", "mkdir"])
def test_no_permission_names_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Whichever step is refused, the message names what the user knows: no hidden part."""
    path = tmp_path / "sub" / "f.bin"

    def refuse(*args: object, **options: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(args[0]))

    monkeypatch.setattr(os, method, refuse)
    denied = r"sub.* cannot be written: Permission denied"
    with pytest.raises(StoreError, match=denied) as caught, write_file(path) as file:
        file.write(b"x")
    assert ".part" not in caught.value.message
    assert "--resume" in str(caught.value.hint)
    monkeypatch.undo()
    assert tree(tmp_path) == {}


# Reading back


def test_run_json_comes_back(tmp_path: Path) -> None:
    """What is written is read, with the version first; odd characters survive."""
    run = RunDirectory(Folder.open(tmp_path / "out"))
    content = {
        "model": "Größe 層",
        "path": "\udcff.png",
        "floats": [0.1, 1e-45, None],
        "list": [],
    }
    run.write_run(content)
    record = read_json(run.root / "run.json")
    assert list(record.items()) == [
        ("schema_version", SCHEMA_VERSION),
        *content.items(),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is no run directory: it has no run.json"),
        ('{"schema_version": 99}', "has schema version 99, this featviz reads 2"),
        ("[1]", "cannot be read"),
        ("{}", "cannot be read.*schema_version"),
        ("\udcff", "cannot be read"),
    ],
)
def test_unreadable_run_json(tmp_path: Path, text: str | None, message: str) -> None:
    """No file, no JSON, no version or a later one is a StoreError that names the path."""
    path = tmp_path / "run.json"
    if text is not None:
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(StoreError, match=message) as caught:
        read_json(path)
    assert str(tmp_path) in caught.value.message


def test_manifest_comes_back_with_its_floats(tmp_path: Path) -> None:
    """Floats come back to the last bit, None as null; fields that are not set are left
    out."""
    folder = RunDirectory(Folder.open(tmp_path / "out")).new_image("cat.jpg")
    skip = Skip("x", "X", 2, "output", 0, "", "is None")
    rows = write.manifest_rows([CAPTURE], [skip])
    folder.finish({"image": {"path": "cat.jpg"}, **rows, "never_ran": []}, {})
    path = folder.path / "manifest.json"
    manifest = read_json(path)
    assert manifest["captures"] == [ROW]
    assert manifest["skipped"][0]["reason"] == "is None"
    # one line for each row
    lines = [
        line for line in path.read_text("utf-8").splitlines() if '"layer": ' in line
    ]
    assert len(lines) == 2


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"channels": [2]}, "channels"),
        ({"channels": [1, 1]}, "channels"),
        ({"slices": [3, 2]}, "slices"),
        ({"slices": [2, 3], "steps": [0, 3]}, "steps"),
        ({"collapsed": {"0": [2]}}, "collapsed"),
        ({"file": "../output.png"}, "file"),
    ],
)
def test_fields_of_a_row_that_contradict_each_other(
    fields: dict[str, Any], field: str
) -> None:
    """Of two maps there is no third one, of three slices no fourth."""
    with pytest.raises(ValueError, match=rf"captures\[0\]\.{field} is .*, expected "):
        schema.check_rows([replace(CAPTURE, **fields)])


@pytest.mark.parametrize("file", ["stats.npz", "001_relu/output.png", "input.png"])
def test_a_file_of_another_length_does_not_fit(tmp_path: Path, file: str) -> None:
    """One that has grown is as damaged as one that was cut."""
    root = write_run(tmp_path / "out", {"a.png": [Drawn("relu")]})
    with (root / "a.png" / file).open("ab") as grown:
        grown.write(b"x")
    assert f"a.png/{file} has " in read_run(root).damaged["a.png"]


def test_an_image_that_is_not_what_it_says_does_not_fit(tmp_path: Path) -> None:
    """Statistics of fewer maps than the manifest has, and a folder with another's name."""
    images = {
        "a.png": [Drawn("relu", stats=np.zeros((5, 6)))],
        "b.png": [Drawn("relu")],
    }
    root = write_run(tmp_path / "out", images)
    (root / "b.png").rename(root / "c.png")
    damaged = read_run(root).damaged
    assert "is float32 [5, 6], expected float32 [6, 6]" in damaged["a.png"]
    assert "image.path is b.png, expected 'c.png'" in damaged["c.png"]


def test_images_that_the_record_does_not_name_come_last(tmp_path: Path) -> None:
    """In the order of their paths, folder by folder; the others as they were named."""
    names = ["z.png", "b.png", "a-b/x.png", "a/x.png"]
    root = write_run(tmp_path / "out", {name: [Drawn("relu")] for name in names})
    record = read_json(root / "run.json")
    record["images"]["complete"] = names[:2]
    write.write_json(Folder.open(root), "run.json", record)
    images = list(read_run(root).images)
    assert images == ["z.png", "b.png", "a/x.png", "a-b/x.png"]


def test_a_hidden_folder_is_no_complete_image(tmp_path: Path) -> None:
    """It has a manifest where a process was killed just before it got its name."""
    root = write_run(tmp_path / "out", {"in/a.png": [Drawn("relu")]})
    for hidden in (hidden_name("b.png"), f"in/{hidden_name('b.png')}"):
        shutil.copytree(root / "in" / "a.png", root / hidden)
    assert RunDirectory(Folder.open(root)).complete == ["in/a.png"]


def test_what_tells_two_runs_apart() -> None:
    """Options as one types them come first; what one of the two lacks counts."""
    old = {"model": {"name": "a"}, "options": {"nrow": 1, "size": [2, 3]}}
    new = {"model": {"name": "b"}, "options": {"nrow": 1, "cmap": "grey"}}
    assert schema.differences(old, new) == [
        "there --size 2x3, here the default",
        "there the default, here --cmap grey",
        'its model.name is "a", this one\'s "b"',
    ]
    assert schema.differences(old, dict(old)) == []


def test_long_values_are_shown_where_they_differ() -> None:
    """Not from their beginning, which may be the same for hundreds of letters."""
    old, new = ({"repr": f"{'a' * 200}{n}{'b' * 200}"} for n in "12")
    (text,) = schema.differences(old, new)
    assert "aa1bb" in text
    assert "aa2bb" in text
    assert len(text) < 200


def test_short_values_are_shown_from_their_beginning() -> None:
    """However late they differ."""
    (text,) = schema.differences({"file": f"{'a' * 40}1"}, {"file": f"{'a' * 40}2"})
    assert text == f'its file is "{"a" * 40}1", this one\'s "{"a" * 40}2"'


def test_nan_is_no_json(tmp_path: Path) -> None:
    """A NaN in a manifest would be no JSON: it fails, and leaves no manifest."""
    folder = RunDirectory(Folder.open(tmp_path / "out")).new_image("x")
    with pytest.raises(ValueError, match="JSON"):
        folder.finish({"mean": float("nan")}, {})
    assert not (folder.path / "manifest.json").exists()


def test_arrays_of_any_name_are_written_as_numpy_writes_them(tmp_path: Path) -> None:
    """`np.savez` takes no array called `file`, which a layer may be."""
    with (tmp_path / "c.npz").open("wb") as file:
        write.write_arrays(file, {"file": np.ones(3)})
    with np.load(tmp_path / "c.npz") as arrays:
        assert arrays["file"].tolist() == [1, 1, 1]
