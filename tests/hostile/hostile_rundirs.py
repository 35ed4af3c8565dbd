"""Hostile run directories: an honest run with one thing changed, in every command that reads it."""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bombs import packing_quickly
from hostile_audit import MARKER
from hostile_harness import MARKUP, MEMORY, SHARED, TITLE, Attack, Sandbox, run
from hostile_images import giant_png, text_bomb_png
from PIL import Image
from torch import nn

DRAWING = ["--layers", "Conv2d,ReLU", "--size", "29x45", "--scale", "1"]
"""Makes grids of just the size of the secret picture."""

READING = [
    "report {given}/run --out out{n}",
    "report {given}/run --single-file --out page{n}.html",
    "sheet {given}/run --layer 0 --out sheet{n}.png",
    "sheet {given}/run --layer 1 --transpose --out sheet{n}.png",
    "diff {given}/run {given}/other --out out{n}",
    "diff {given}/other {given}/run --html page{n}.html --junit junit{n}.xml",
    "merge {given}/run {given}/other --out out{n}",
    "report {given}/other --compare {given}/run --out out{n}",
]
BRIEFLY = [READING[0], READING[2], READING[4], READING[6]]
"""One command for each reader, where a field has several bad values."""
RESUMING = [
    ["run", "{given}/net.pth", "{given}/photos", *DRAWING, "--out", "{given}/run", "--resume"]
]


@functools.cache
def honest() -> dict[str, bytes]:
    """The files of an honest run, of its model and of its photos, by path below `given/`."""
    with tempfile.TemporaryDirectory() as folder:
        box = Sandbox.make(Path(folder) / "box")
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()).eval()
        torch.save(net, box.given / "net.pth")
        (box.given / "photos").mkdir()
        for seed, name in enumerate(("a.png", "b.png")):
            noise = np.random.default_rng(seed).integers(0, 255, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(noise).save(box.given / "photos" / name)
        plan = Attack("", lambda b: None, [], "good", ("given/run",))
        words = ["run", "{given}/net.pth", "{given}/photos", *DRAWING, "--out", "{given}/run"]
        outcome = run(SHARED, box, [box.filled(word) for word in words], plan)
        assert outcome.faults == [], outcome
        files = [path for path in box.given.rglob("*") if path.is_file()]
        return {path.relative_to(box.given).as_posix(): path.read_bytes() for path in files}


def place(box: Sandbox) -> None:
    """The honest run twice, as `run` and `other`, its model and its photos."""
    for name, data in honest().items():
        copies = [name, name.replace("run/", "other/", 1)] if name.startswith("run/") else [name]
        for copy in copies:
            (box.given / copy).parent.mkdir(parents=True, exist_ok=True)
            (box.given / copy).write_bytes(data)


Change = Callable[[Sandbox], object]


def edit(name: str, change: Callable[[Any], object]) -> Change:
    """A JSON file of the run, changed."""

    def make(box: Sandbox) -> None:
        path = box.given / "run" / name
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    return make


def put(document: Any, where: str, value: Any) -> None:
    """Set a value at `captures.0.grid.nrow`."""
    *way, last = where.split(".")
    for step in way:
        document = document[int(step) if step.isdigit() else step]
    document[int(last) if last.isdigit() else last] = value


def at(where: str, value: Any, name: str = "a.png/manifest.json") -> Change:
    """A value of a manifest; `@SECRET` and the like stand for paths."""

    def make(box: Sandbox) -> None:
        own = value
        if isinstance(value, str):
            own = value.replace("@SECRET_PICTURE", str(box.secret_picture))
            own = own.replace("@SECRET", str(box.secret))
        edit(name, lambda document: put(document, where, own))(box)

    return make


def raw(name: str, data: bytes) -> Change:
    """A file of other content."""
    return lambda box: (box.given / "run" / name).write_bytes(data)


def link(name: str, target: str) -> Change:
    """A symbolic link in place of a file or folder."""

    def make(box: Sandbox) -> None:
        path = box.given / "run" / name
        if path.is_dir():
            path.rename(box.given / "moved")
        else:
            path.unlink(missing_ok=True)
        path.symlink_to(box.filled(target))

    return make


def fifo(name: str) -> Change:
    """A FIFO in place of a file."""

    def make(box: Sandbox) -> None:
        (box.given / "run" / name).unlink(missing_ok=True)
        os.mkfifo(box.given / "run" / name)

    return make


def folder(name: str) -> Change:
    """A folder in place of a file."""

    def make(box: Sandbox) -> None:
        (box.given / "run" / name).unlink()
        (box.given / "run" / name).mkdir()

    return make


CAPTURE = "captures.0"
VALUES: dict[str, list[Any]] = {
    f"{CAPTURE}.grid.nrow": [0, -1, 10**9, "2", None, 2.5, [2]],
    f"{CAPTURE}.grid.padding": [-1, 10**9, 1e308, "x"],
    f"{CAPTURE}.grid.tile": ["text", [0, 0], [10**9, 10**9], [1], [-29, 45], None, [29.5, 45]],
    f"{CAPTURE}.grid.scale": [0, -1, "x", [0, 0], [1], 10**6, 0.5],
    f"{CAPTURE}.grid": [5, None, {}, []],
    f"{CAPTURE}.maps": [10**9, -1, 0, "4", None, 4.5, True],
    f"{CAPTURE}.channels": ["x", [10**9], [-1], [MARKUP], [0, 1, 2, 3] * 10_000, {}],
    f"{CAPTURE}.slices": [[0, 0], [10**9, 1], "x", [1]],
    f"{CAPTURE}.normalize": [[1], {}, 5, MARKUP],
    f"{CAPTURE}.range": ["x", [1], [None, None], [1e308, -1e308]],
    f"{CAPTURE}.shape": [[], "x", [-1], [10**18] * 4, None, [1, 4, 29, "45"]],
    f"{CAPTURE}.layout": [5, MARKUP],
    f"{CAPTURE}.index": [-1, "x", 10**30],
    f"{CAPTURE}.call": [-1, "x", 10**9],
    f"{CAPTURE}.kind": [5, "../../x", MARKUP],
    f"{CAPTURE}.key": [{}, "../../../../../x", TITLE],
    f"{CAPTURE}.layer": [5, None, MARKUP, TITLE, "a" * 10**6],
    f"{CAPTURE}.type": [[], MARKUP, TITLE],
    f"{CAPTURE}.min": ["x", None, [1], 1e400],
    f"{CAPTURE}.zero_fraction": ["x", -5, 1e308],
    f"{CAPTURE}.nonfinite": [[1], -1, "x"],
    f"{CAPTURE}.collapsed": [5, [[10**9]], "x"],
    f"{CAPTURE}.reduce": [5, {"a": MARKUP}],
    f"{CAPTURE}.overlay": ["x", [1]],
    f"{CAPTURE}.figure": [5, "../../../secret/id_secret"],
    f"{CAPTURE}.tensor": ["../../../secret/id_secret", "@SECRET", 5],
    f"{CAPTURE}.file": [5, None, "", ".", "..", "a\0b", "x" * 10_000, "manifest.json", MARKUP],
    "captures": [{}, 5, "x", [5], [None], [[]], None],
    "skipped": [5, [5], [{}], [{"layer": MARKUP, "type": TITLE, "reason": MARKUP}]],
    "never_ran": [5, [5], [MARKUP], "x"],
    "image": [5, None, {}, []],
    "image.path": [5, "../../../x", "/x", "", MARKUP, TITLE, "a\nerror: b"],
    "image.sha256": [5, MARKUP, None],
    "image.size": [5, {"width": "x", "height": -1}, {"width": 10**30, "height": 10**30}],
    "input": [5, None, {}],
    "input.shape": [5, "x", [[1, 3], [2]], [10**30]],
    "input.preprocessing": [5, MARKUP, TITLE],
    "schema_version": ["1", None, 999, True, -1, 1.5, []],
    "fingerprint": [5, None],
}
"""Where in a manifest, and what stands there instead."""

RECORDS: dict[str, list[Any]] = {
    "failures": [
        5,
        "x",
        [5],
        [{}],
        [{"image": MARKUP, "error": MARKUP}],
        [{"image": TITLE, "error": 5}],
    ],
    "images": [5, None, [], {}],
    "images.total": ["x", -1, 10**30],
    "images.complete": [5, "x", [5], ["../../x"], ["x" * 10**5], [MARKUP, TITLE], [["a"]]],
    "options": [5, None, {}, {"normalize": [1], "layers": {}}],
    "layers": [5, None, [5], [MARKUP]],
    "model": [5, None, [], {"kind": MARKUP, "file": TITLE, "arch": 5}],
    "preprocessing": [5, MARKUP],
    "device": [5, MARKUP],
    "featviz": [5, MARKUP],
    "kind": ["run", 5, MARKUP, TITLE, ["run"]],
    "schema_version": ["1", 999, True, None, {}],
}
"""The same of run.json."""

PATHS = (
    "@SECRET",
    "@SECRET_PICTURE",
    "../../../secret/id_secret",
    "../../../secret/id_secret.png",
    "001_0/../../../../secret/id_secret.png",
    "..\\..\\..\\secret\\id_secret.png",
    "../b.png/001_0/output.png",
    "file:///etc/passwd",
    "https://evil.example/x.png",
    "javascript:alert(1)",
)
"""What a manifest may call the file of a picture."""


def _npz(arrays: dict[str, bytes], packed: bool = True) -> bytes:
    file = io.BytesIO()
    kind = zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED
    with packing_quickly(), zipfile.ZipFile(file, "w", kind) as archive:
        for name, data in arrays.items():
            archive.writestr(f"{name}.npy", data)
    return file.getvalue()


def _npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + data


def _header(shape: str, dtype: str = "'<f4'", fortran: bool = False) -> str:
    return f"{{'descr': {dtype}, 'fortran_order': {fortran}, 'shape': {shape}}}"


class Evil:
    """Pickles as a call that leaves the marker in the current folder."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (MARKER,)


KEY = "0|output|0|"


@functools.cache
def _large_stats() -> bytes:
    """More than the memory that a command may take."""
    rows = MEMORY // 24 + 5_000_000
    return _npz({KEY: _npy(_header(f"({rows}, 6)"), bytes(24 * rows))})


STATS: dict[str, Callable[[], bytes]] = {
    "1 MB that unpacks to 1.2 GB": _large_stats,
    "a shape of 10**12": lambda: _npz({KEY: _npy(_header("(1000000000000, 6)"))}),
    "a negative shape": lambda: _npz({KEY: _npy(_header("(-1, 6)"), bytes(96))}),
    "objects": lambda: _npz({KEY: _npy(_header("(1, 6)", "'|O'"), pickle.dumps(Evil()))}),
    "code in a header": lambda: _npz({KEY: _npy(f"__import__('os').mkdir('{MARKER}')")}),
    "a header of 9,000 brackets": lambda: _npz({KEY: _npy("(" * 9_000 + ")" * 9_000)}),
    "a header of a power": lambda: _npz({KEY: _npy(_header("(9**9**9, 6)"))}),
    "a header of another length": lambda: _npz({KEY: b"\x93NUMPY\x01\x00\xff\xff{}"}),
    "columns first": lambda: _npz({KEY: _npy(_header("(4, 6)", fortran=True), bytes(96))}),
    "float64": lambda: _npz({KEY: _npy(_header("(4, 6)", "'<f8'"), bytes(192))}),
    "five columns": lambda: _npz({KEY: _npy(_header("(4, 5)"), bytes(80))}),
    "no arrays": lambda: _npz({}),
    "no zip": lambda: b"PK\x03\x04 no zip",
    "nothing": lambda: b"",
    "20,000 arrays": lambda: _npz({f"x{n}": b"" for n in range(20_000)}),
    "an npy": lambda: _npy(_header("(4, 6)"), bytes(96)),
    "a pickle": lambda: pickle.dumps(Evil()),
}
JSONS: dict[str, bytes] = {
    "100,000 levels": b'{"schema_version": 1, "captures": ' + b"[" * 100_000,
    "a number of 10,000 digits": b'{"schema_version": ' + b"9" * 10_000 + b"}",
    "no UTF-8": b"\xff\xfe{}",
    "a list": b"[1]",
    "null": b"null",
    "nothing": b"",
    "NaN": b'{"schema_version": NaN}',
    "40 MB": b'{"schema_version": 1, "x": "' + b"x" * 40_000_000 + b'"}',
    "half of it": b'{"schema_version": 1, "captures": [',
    "the same key twice": b'{"schema_version": 1, "schema_version": 2}',
    "a lone surrogate": b'{"schema_version": 1, "image": {"path": "\\ud800"}}',
}
PLACES = ("run.json", "a.png/manifest.json", "a.png/stats.npz", "a.png/input.png")
PICTURE = "a.png/001_0/output.png"


def _many_folders(box: Sandbox) -> None:
    path = box.given / "run" / "deep"
    for _ in range(300):
        path /= "d"
    path.mkdir(parents=True)


def _same_picture(box: Sandbox) -> None:
    """All captures name one picture, a thousand times."""

    def change(document: Any) -> None:
        row = document["captures"][0]
        document["captures"] = [{**row, "call": n} for n in range(1000)]

    edit("a.png/manifest.json", change)(box)


def _two_of_a_name(box: Sandbox) -> None:
    edit("a.png/manifest.json", lambda d: put(d, "image.path", "b.png"))(box)


def _audit(content: Any) -> Change:
    return lambda box: (box.given / "run" / "audit.json").write_text(json.dumps(content))


ROW = {"label": MARKUP, "type": TITLE, "channels": 4, "findings": {"dead": [0]}}
OTHERS: dict[str, Change] = {
    **{
        f"{name} is a link to a secret": link(name, "{root}/secret/id_secret")
        for name in (*PLACES, PICTURE)
    },
    **{
        f"{name} is a link to a secret picture": link(name, "{root}/secret/id_secret.png")
        for name in ("a.png/input.png", PICTURE)
    },
    **{f"{name} is a FIFO": fifo(name) for name in (*PLACES, PICTURE)},
    **{f"{name} is a device": link(name, "/dev/zero") for name in (*PLACES, PICTURE)},
    **{f"{name} is a folder": folder(name) for name in (*PLACES, PICTURE)},
    **{f"{name} is a link to itself": link(name, "{given}/run/" + name) for name in PLACES},
    "an image's folder is a link": link("a.png", "{given}/moved"),
    "a layer's folder is a link": link("a.png/001_0", "{given}/moved"),
    "a layer's folder links to secrets": link("a.png/001_0", "{root}/secret"),
    "a folder that links to the run": link("loop", "{given}/run"),
    "a folder that links to the root": link("all", "/"),
    "300 folders inside one another": _many_folders,
    "one picture, 1,000 times": _same_picture,
    "two images of one name": _two_of_a_name,
    "a picture of 60,000 by 60,000": lambda b: raw(PICTURE, giant_png())(b),
    "an input of 60,000 by 60,000": lambda b: raw("a.png/input.png", giant_png())(b),
    "a picture with a gigabyte of text": lambda b: raw(PICTURE, text_bomb_png())(b),
    "a picture that is no picture": raw(PICTURE, b"no picture"),
    "a picture that is PostScript": raw(
        PICTURE, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    ),
    "an input that is markup": raw("a.png/input.png", MARKUP.encode()),
    "an audit of markup": _audit({"schema_version": 1, "layers": [ROW], "images": {"seen": TITLE}}),
    "an audit of numbers": _audit({"schema_version": 1, "layers": 5, "images": 5}),
    "an audit 10,000 levels deep": lambda b: raw("audit.json", b"[" * 10_000)(b),
    "an audit that is a FIFO": fifo("audit.json"),
    "an audit that is a link": link("audit.json", "{root}/secret/id_secret"),
}


def _words(value: Any) -> str:
    return ascii(value)[:40]


def values() -> Iterator[tuple[str, Change, bool]]:
    """Values that do not fit, and whether it is the first one of its field."""
    for where, wrong in VALUES.items():
        for number, value in enumerate(wrong):
            yield f"manifest: {where} is {_words(value)}", at(where, value), number == 0
    for where, wrong in RECORDS.items():
        for number, value in enumerate(wrong):
            change = at(where, value, "run.json")
            yield f"run.json: {where} is {_words(value)}", change, number == 0


def changes() -> Iterator[tuple[str, Change]]:
    """What else is changed in the honest run."""
    for path in PATHS:
        yield f"manifest: a picture at {path}", at(f"{CAPTURE}.file", path)
    for name, make in STATS.items():
        yield f"stats.npz: {name}", lambda box, make=make: raw("a.png/stats.npz", make())(box)
    for name, data in JSONS.items():
        for file in ("run.json", "a.png/manifest.json"):
            yield f"{file}: {name}", raw(file, data)
    yield from OTHERS.items()


def _both(change: Change) -> Change:
    def make(box: Sandbox) -> None:
        place(box)
        change(box)

    return make


def all_attacks() -> Iterator[Attack]:
    """All of this file: each change is read by every command, and continued by `run --resume`."""
    for name, change, full in values():
        make = _both(change)
        yield Attack(f"rundir: {name}", make, READING if full else BRIEFLY)
        if full:
            yield Attack(f"resumed rundir: {name}", make, RESUMING, may_change=("given/run",))
    for name, change in changes():
        make = _both(change)
        yield Attack(f"rundir: {name}", make, READING)
        yield Attack(f"resumed rundir: {name}", make, RESUMING, may_change=("given/run",))
    yield Attack("control: an honest run in every command", place, READING, "good")
    yield Attack(
        "control: an honest run is resumed", place, RESUMING, "good", may_change=("given/run",)
    )
