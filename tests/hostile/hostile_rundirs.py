"""Hostile run directories: an honest run with one thing changed, in every command that
reads it."""

from __future__ import annotations

import functools
import io
import json
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from hostile_audit import MARKER
from hostile_harness import MARKUP, TITLE, Attack, Sandbox, attempt
from hostile_images import EPS, giant_png, zipped
from PIL import Image
from rundirs import summed_anew
from torch import nn

DRAWING = ["--layers", "Conv2d,ReLU", "--size", "29x45", "--scale", "1"]
"""Makes grids of just the size of the secret picture."""
READING = [
    "report {given}/run --out out{n}",
    "report {given}/run --single-file --out page{n}.html",
    "report {given}/other --compare {given}/run --out out{n}",
    "sheet {given}/run --layers 0 --out sheet{n}.png",
    "diff {given}/other {given}/run --html page{n}.html --junit junit{n}.xml",
    "merge {given}/run {given}/other --out out{n}",
]
LEFT_OUT = (0, 0, 0, 0, 4, 1)
"""Exit codes of these where an image does not fit: the other one is shown, merge alone
refuses."""
REFUSED = (1,) * 6
"""Where run.json does not fit."""
RESUMING = [
    [
        "run",
        "{given}/net.pth",
        "{given}/photos",
        *DRAWING,
        "--out",
        "{given}/run",
        "--resume",
    ]
]


@functools.cache
def honest() -> dict[str, bytes]:
    """The files of an honest run, of its model and of its photos, by path below
    `given/`."""

    def make(box: Sandbox) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()).eval()
        torch.save(net, box.given / "net.pth")
        (box.given / "photos").mkdir()
        for seed, name in enumerate(("a.png", "b.png")):
            noise = np.random.default_rng(seed).integers(
                0, 255, (20, 24, 3), dtype=np.uint8
            )
            Image.fromarray(noise).save(box.given / "photos" / name)

    with tempfile.TemporaryDirectory() as folder:
        box = Sandbox(Path(folder) / "box")
        line = [argument for argument in RESUMING[0] if argument != "--resume"]
        assert (
            attempt(Attack("", make, [line], "good", may_change=("given/run",)), box)
            == []
        )
        files = [path for path in box.given.rglob("*") if path.is_file()]
        return {
            path.relative_to(box.given).as_posix(): path.read_bytes() for path in files
        }


def place(box: Sandbox) -> None:
    """The honest run twice, as `run` and `other`, its model and its photos."""
    for name, data in honest().items():
        for copy in {name, name.replace("run/", "other/", 1)}:
            (box.given / copy).parent.mkdir(parents=True, exist_ok=True)
            (box.given / copy).write_bytes(data)


Change = Callable[[Path], object]
"""Changes the run directory at a path."""
MANIFEST = "a.png/manifest.json"
STATS = "a.png/stats.npz"
INPUT = "a.png/input.png"
PICTURE = "a.png/001_0/output.png"


def edit(path: Path, where: str, value: Any) -> None:
    """Set a value at `captures.0.grid.nrow` of a JSON file; KeyError takes it away."""
    content = json.loads(path.read_text())
    *parents, last = [
        int(step) if step.isdecimal() else step for step in where.split(".")
    ]
    holder = content
    for step in parents:
        holder = holder[step]
    if value is KeyError:
        del holder[last]
    else:
        holder[last] = value
    path.write_text(json.dumps(content))


def _filled(value: Any, root: Path) -> Any:
    return (
        value.replace("{root}", str(root.parent.parent))
        if isinstance(value, str)
        else value
    )


def at(where: str, value: Any, name: str = MANIFEST) -> Change:
    return lambda root: edit(root / name, where, _filled(value, root))


def raw(name: str, data: bytes | Callable[[], bytes]) -> Change:
    return lambda root: (root / name).write_bytes(
        data if isinstance(data, bytes) else data()
    )


def other(name: str, make: Callable[[Path], object]) -> Change:
    def change(root: Path) -> None:
        path = root / name
        if path.is_dir():
            path.rename(root.parent / "moved")
        else:
            path.unlink(missing_ok=True)
        make(path)

    return change


def link(name: str, target: str) -> Change:
    return lambda root: other(
        name, lambda path: path.symlink_to(_filled(target, root))
    )(root)


KEY = "0|output|0|"


def stats(content: bytes | Callable[[], bytes], packed: bool = False) -> Change:
    """Another stats.npz, in which the first array is of these bytes."""

    def change(root: Path) -> None:
        with np.load(root / STATS) as before:
            arrays = {name: npy(before[name]) for name in before.files}
        arrays[KEY] = content if isinstance(content, bytes) else content()
        members = ((f"{name}.npy", data) for name, data in arrays.items())
        (root / STATS).write_bytes(zipped(*members, packed=packed))

    return change


def npy(array: np.ndarray) -> bytes:
    data = io.BytesIO()
    np.save(data, array)
    return data.getvalue()


def header(text: str) -> bytes:
    return (
        b"\x93NUMPY\x01\x00"
        + (len(text) + 1).to_bytes(2, "little")
        + text.encode()
        + b"\n"
    )


class Evil:
    """Pickles as a call that leaves the marker in the current folder."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (MARKER,)


FORGED = f"{MARKUP}{TITLE}\nerror: b"
"""A text that would run in a page, set a terminal's title, and look like a line of
featviz."""
GRID = "captures.0.grid"
FILE = "captures.0.file"
INSIDE = "expected a file inside the image's folder"
FIELDS: list[tuple[str, Any, str]] = [
    (f"{GRID}.nrow", 0, "Expected `int` >= 1 - at `$.captures[0].grid.nrow`"),
    (f"{GRID}.nrow", 4, "output.png has 96×64 pixels, by its manifest.json 190×33"),
    (f"{GRID}.tile", [2**31 - 1] * 2, "expected a picture of at most 2147483647"),
    ("captures.0.maps", 10**9, "Expected `int` <= 16777216 - at `$.captures[0].maps`"),
    ("captures.0.maps", 3, f"{KEY} is float32 [4, 6], expected float32 [3"),
    ("captures.0.shape", [10**18] * 4, "Expected `int` <= 9007199254740992"),
    ("captures.0.layer", "x" * 5000, "Expected `str` of length <= 4096"),
    ("captures", KeyError, "missing required field `captures`"),
    ("image.path", "../../../x", "a.png"),
    (FILE, "{root}/secret/id_secret.png", INSIDE),
    *(
        (FILE, path, INSIDE)
        for path in (
            "../../../secret/id_secret.png",
            "..\\..\\..\\secret\\id_secret.png",
            "../b.png/001_0/output.png",
            "001_0/a\0.png",
            "https://evil.example/x.png",
            "",
        )
    ),
    (FILE, "x" * 4000 + ".png", "cannot be read: File name too long"),
    ("captures.0.tensor", "../../../secret/id_secret.npy", "captures[0].tensor is "),
    ("captures.0.tensor", "x.npy", "a.png/x.npy is missing"),
    *(
        (where, FORGED, "")
        for where in (
            *(
                f"captures.0.{name}"
                for name in ("normalize", "layout", "key", "layer", "type")
            ),
            "image.sha256",
            "input.preprocessing",
        )
    ),
    ("captures.0.kind", FORGED, "Expected `str` matching regex"),
    (FILE, FORGED, INSIDE),
    ("image.path", FORGED, "expected 'a.png'"),
    ("skipped", [{"layer": FORGED, "type": FORGED, "index": 1, "reason": FORGED}], ""),
    ("never_ran", [FORGED], ""),
]
"""Where in a manifest, what stands there, and what is said of it: nothing if it may be
shown."""

RECORDS: list[tuple[str, Any, str]] = [
    ("failures", [{"image": FORGED, "error": FORGED}], ""),
    ("images.complete", ["../../x", "x" * 10**5], ""),
    ("options", {"normalize": [1], "layers": {}}, ""),
    ("layers", [FORGED], ""),
    ("model", {"kind": FORGED, "file": FORGED, "arch": 5}, ""),
    ("kind", TITLE, r"holds \x1b]0;featviz_hostile\x07"),
]
"""The same of run.json."""

JSONS: dict[str, tuple[bytes, str]] = {
    "no JSON": (b"\x89PNG", "cannot be read: "),
    "100,000 levels": (b'{"captures": ' + b"[" * 100_000, "more than 100 levels"),
}

NO_FILE = "it is no regular file"
LINKED = "is a symbolic link"
SECRET = "{root}/secret/id_secret"
SECRET_PICTURE = "{root}/secret/id_secret.png"
FILES: dict[str, tuple[Change, str]] = {
    "run.json is a FIFO": (other("run.json", os.mkfifo), NO_FILE),
    "run.json is a device": (link("run.json", "/dev/zero"), "is a link"),
    "run.json is a link to a secret": (link("run.json", SECRET), "is a link"),
    f"{MANIFEST} is a folder": (other(MANIFEST, Path.mkdir), ""),
    **{
        f"{name} is {kind}": (make(name), words)
        for name in (MANIFEST, STATS, INPUT, PICTURE)
        for kind, make, words in (
            ("a FIFO", lambda name: other(name, os.mkfifo), NO_FILE),
            ("a device", lambda name: link(name, "/dev/zero"), LINKED),
            ("a link to a secret", lambda name: link(name, SECRET), LINKED),
        )
    },
    **{
        f"{name} is a folder": (other(name, Path.mkdir), NO_FILE)
        for name in (STATS, INPUT)
    },
    f"{INPUT} is a link to a secret picture": (link(INPUT, SECRET_PICTURE), LINKED),
    f"{PICTURE} is a link to a secret picture": (link(PICTURE, SECRET_PICTURE), LINKED),
    "a layer's folder links to secrets": (link("a.png/001_0", "{root}/secret"), LINKED),
    f"{MANIFEST} has 40 MB": (
        raw(MANIFEST, b'{"schema_version": 2, "x": "%040000000d"}' % 0),
        "missing required field",
    ),
    "an image's folder is a link to a whole one": (link("a.png", "../other/a.png"), ""),
    "a folder that links to the root": (link("all", "/"), ""),
    "a picture of 60,000 by 60,000": (
        raw(PICTURE, giant_png),
        "output.png has 60000×60000 pixels, by its manifest.json 96×64",
    ),
    "PostScript for a picture": (raw(PICTURE, EPS), "no PNG"),
    "statistics that unpack to many": (
        stats(npy(np.zeros((4, 600_000), np.float32)), packed=True),
        "it unpacks to more than",
    ),
    "code in a header": (
        stats(header(f"__import__('os').mkdir('{MARKER}')") + bytes(96)),
        "it is no array as numpy writes it",
    ),
    "statistics that are a pickle": (
        raw(STATS, pickle.dumps(Evil())),
        "too few for the maps",
    ),
}
"""What is put in the place of a file, and what must be said of it."""


def _pickled(root: Path) -> None:
    """Both runs keep a tensor, of which only `diff` reads; that of the hostile one is a
    pickle."""
    for run in (root, root.parent / "other"):
        edit(run / MANIFEST, "captures.0.tensor", "001_0/output.npy")
        (run / "a.png/001_0/output.npy").write_bytes(
            npy(np.zeros((1, 4, 29, 45), "<f4"))
        )
        summed_anew(run / "a.png")
    (root / "a.png/001_0/output.npy").write_bytes(npy(np.array([Evil()], object)))


ROW = {"label": FORGED, "type": FORGED, "channels": 4, "findings": {"dead": [0]}}
AUDITS: dict[str, tuple[bytes | Any, str]] = {
    "text for a channel": (
        {"images": {"seen": 1}, "layers": [{**ROW, "findings": {"x": ["</"]}}]},
        "Expected `int`, got `str` - at `$.layers[0].findings[...][0]`",
    ),
    "10,000 levels": (b"[" * 10_000, "more than 100 levels"),
    "a FIFO": (other("audit.json", os.mkfifo), NO_FILE),
    "a link to a secret": (link("audit.json", SECRET), "audit.json"),
}
AUDITED = [
    "report {given}/run --out out",
    "report {given}/other --audit {given}/run/audit.json --out b",
]


def _twice(root: Path) -> None:
    edit((root / "a.png").rename(root / "aaa") / "manifest.json", "image.path", "b.png")


def _renamed(root: Path) -> None:
    """The arrays of statistics are called as the rows of the manifest are, whatever
    these say."""
    with suppress(ValueError, KeyError, TypeError, OSError):
        rows = json.loads((root / MANIFEST).read_text())["captures"]
        keys = [
            "|".join(str(row[n]) for n in ("layer", "kind", "call", "key"))
            for row in rows
        ]
        with np.load(root / STATS) as before:
            arrays = [npy(before[name]) for name in before.files]
        if len(keys) == len(arrays):
            members = zip((f"{key}.npy" for key in keys), arrays, strict=True)
            (root / STATS).write_bytes(zipped(*members, packed=False))


def changed(*changes: Change) -> Callable[[Sandbox], None]:
    """The honest runs, one of them changed, with checksums made anew, as its author
    would."""

    def make(box: Sandbox) -> None:
        place(box)
        for change in changes:
            change(box.given / "run")
        summed_anew(box.given / "run" / "a.png")

    return make


def _some(number: int, codes: tuple[int, ...]) -> tuple[list[str], Any]:
    """Two of the commands, one after the other, and merge, with their exit codes."""
    chosen = (number % 5, 5)
    return [READING[n] for n in chosen], [codes[n] for n in chosen]


class Tampering(NamedTuple):
    """A run directory that was changed."""

    name: str
    changes: tuple[Change, ...]
    message: str
    """What the error says; empty where any end will do."""
    codes: tuple[int, ...]
    """The exit code of each command of READING, and of merge."""


def all_attacks() -> Iterator[Attack]:
    tables: list[Tampering] = []
    # there is one reader of manifests
    for number, (where, value, message) in enumerate(FIELDS):
        name = f"rundir: manifest: {where} is {ascii(value)[:40]}"
        make = at(where, value)
        lines, codes = _some(number, LEFT_OUT)
        lines, codes = (
            (lines[:1], codes[:1]) if message else (READING[:2] + lines, "any")
        )
        yield Attack(name, changed(make, _renamed), lines, codes, message)
    for where, value, message in RECORDS:
        name = f"run.json: {where} is {ascii(value)[:40]}"
        tables.append(
            Tampering(name, (at(where, value, "run.json"),), message, REFUSED)
        )
    for name, (data, message) in JSONS.items():
        tables.append(
            Tampering(f"manifest: {name}", (raw(MANIFEST, data),), message, LEFT_OUT)
        )
        tables.append(
            Tampering(f"run.json: {name}", (raw("run.json", data),), message, REFUSED)
        )
    for name, (change, message) in FILES.items():
        codes = REFUSED if name.startswith("run.json") else LEFT_OUT
        tables.append(Tampering(name, (change,), message, codes))
    for number, (name, changes, message, all_codes) in enumerate(tables):
        make, (lines, codes) = changed(*changes), _some(number, all_codes)
        yield Attack(
            f"rundir: {name}", make, lines, codes if message else "any", message
        )
        if " MB" not in name and (number % 3 == 0 or "an image's folder" in name):
            yield Attack(
                f"resumed rundir: {name}", make, RESUMING, may_change=("given/run",)
            )
    message = "a.png/001_0/output.npy cannot be read: "
    yield Attack("tensor: a pickle", changed(_pickled), READING[4:5], (4,), message)
    for name, (content, message) in AUDITS.items():
        change = content
        if not callable(content):
            data = (
                content if isinstance(content, bytes) else json.dumps(content).encode()
            )
            change = raw("audit.json", data)
        yield Attack(
            f"audit.json: {name}", changed(change), AUDITED, "refused", message
        )
    shown = {"schema_version": 1, "layers": [ROW], "images": {"seen": 1}}
    forged = changed(raw("audit.json", json.dumps(shown).encode()))
    yield Attack("audit.json: forged texts", forged, AUDITED)
    lines = ["merge {given}/run --out alone"]
    linked = changed(link("a.png", "../other/a.png"))
    message = "a.png is incomplete (it has no manifest), and left out"
    yield Attack(
        "rundir: an image's folder is a link, merged alone",
        linked,
        lines,
        (3,),
        message,
    )
    message = "image.path is b.png, expected 'aaa'"
    yield Attack(
        "rundir: an image is there twice", changed(_twice), READING, "any", message
    )
    yield Attack("control: an honest run in every command", place, READING, "good")
    resumed = ("given/run",)
    yield Attack(
        "control: an honest run is resumed", place, RESUMING, "good", may_change=resumed
    )
