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
from runs import tree
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
RUN = ("given/run",)
"""What a run that is resumed may change."""
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


def _make_inputs(box: Sandbox) -> None:
    """A model and two photos."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU()).eval()
    torch.save(net, box.given / "net.pth")
    (box.given / "photos").mkdir()
    for seed, name in enumerate(("a.png", "b.png")):
        chance = np.random.default_rng(seed)
        noise = chance.integers(0, 255, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(noise).save(box.given / "photos" / name)


@functools.cache
def honest() -> dict[str, bytes]:
    """The files of an honest run, of its model and of its photos, by path below
    `given/`."""
    line = [argument for argument in RESUMING[0] if argument != "--resume"]
    drawing = Attack("", _make_inputs, [line], "good", may_change=RUN)
    with tempfile.TemporaryDirectory() as folder:
        box = Sandbox(Path(folder) / "box")
        assert attempt(drawing, box) == []
        return tree(box.given)


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
    parents, _, last = where.rpartition(".")
    container = content
    for step in filter(None, parents.split(".")):
        container = container[int(step) if step.isdecimal() else step]
    key = int(last) if last.isdecimal() else last
    if value is KeyError:
        del container[key]
    else:
        container[key] = value
    path.write_text(json.dumps(content))


def _filled(value: Any, root: Path) -> Any:
    if isinstance(value, str):
        return value.replace("{root}", str(root.parent.parent))
    return value


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
    """The beginning of a .npy file."""
    size = (len(text) + 1).to_bytes(2, "little")
    return b"\x93NUMPY\x01\x00" + size + text.encode() + b"\n"


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
FOREIGN_FILES = (
    "../../../secret/id_secret.png",
    "..\\..\\..\\secret\\id_secret.png",
    "../b.png/001_0/output.png",
    "001_0/a\0.png",
    "https://evil.example/x.png",
    "",
)
SHOWN_TEXTS = (
    "captures.0.normalize",
    "captures.0.layout",
    "captures.0.key",
    "captures.0.layer",
    "captures.0.type",
    "image.sha256",
    "input.preprocessing",
)
SKIPPED = {"layer": FORGED, "type": FORGED, "index": 1, "reason": FORGED}
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
    *((FILE, path, INSIDE) for path in FOREIGN_FILES),
    (FILE, "x" * 4000 + ".png", "cannot be read: File name too long"),
    ("captures.0.tensor", "../../../secret/id_secret.npy", "captures[0].tensor is "),
    ("captures.0.tensor", "x.npy", "a.png/x.npy is missing"),
    *((where, FORGED, "") for where in SHOWN_TEXTS),
    ("captures.0.kind", FORGED, "Expected `str` matching regex"),
    (FILE, FORGED, INSIDE),
    ("image.path", FORGED, "expected 'a.png'"),
    ("skipped", [SKIPPED], ""),
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
READ = (MANIFEST, STATS, INPUT, PICTURE)
FILES: dict[str, tuple[Change, str]] = {
    "run.json is a FIFO": (other("run.json", os.mkfifo), NO_FILE),
    "run.json is a device": (link("run.json", "/dev/zero"), "is a link"),
    "run.json is a link to a secret": (link("run.json", SECRET), "is a link"),
    f"{MANIFEST} is a folder": (other(MANIFEST, Path.mkdir), ""),
    **{f"{name} is a FIFO": (other(name, os.mkfifo), NO_FILE) for name in READ},
    **{f"{name} is a device": (link(name, "/dev/zero"), LINKED) for name in READ},
    **{f"{name} is a link to a secret": (link(name, SECRET), LINKED) for name in READ},
    f"{STATS} is a folder": (other(STATS, Path.mkdir), NO_FILE),
    f"{INPUT} is a folder": (other(INPUT, Path.mkdir), NO_FILE),
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
        "expected float32 [4, 6]",
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
    tensor = "a.png/001_0/output.npy"
    for run in (root, root.parent / "other"):
        edit(run / MANIFEST, "captures.0.tensor", "001_0/output.npy")
        (run / tensor).write_bytes(npy(np.zeros((1, 4, 29, 45), "<f4")))
        summed_anew(run / "a.png")
    (root / tensor).write_bytes(npy(np.array([Evil()], object)))


ROW = {"label": FORGED, "type": FORGED, "channels": 4, "findings": {"dead": [0]}}
SHOWN_AUDIT = {"schema_version": 1, "layers": [ROW], "images": {"seen": 1}}
BROKEN_AUDIT = {**SHOWN_AUDIT, "layers": [{**ROW, "findings": {"x": ["</"]}}]}


def _audit(content: object) -> Change:
    return raw("audit.json", json.dumps(content).encode())


AUDITS: dict[str, tuple[Change, str]] = {
    "text for a channel": (
        _audit(BROKEN_AUDIT),
        "Expected `int`, got `str` - at `$.layers[0].findings[...][0]`",
    ),
    "10,000 levels": (raw("audit.json", b"[" * 10_000), "more than 100 levels"),
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
    columns = ("layer", "kind", "call", "key")
    with suppress(ValueError, KeyError, TypeError, OSError):
        members = []
        rows = json.loads((root / MANIFEST).read_text())["captures"]
        with np.load(root / STATS) as arrays:
            for row, name in zip(rows, arrays.files, strict=True):
                key = "|".join(str(row[column]) for column in columns)
                members.append((f"{key}.npy", npy(arrays[name])))
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


class Tampering(NamedTuple):
    """A run directory that was changed."""

    name: str
    change: Change
    message: str
    """What the error says; empty where any end will do."""
    codes: tuple[int, ...]
    """The exit code of each command of READING, and of merge."""


def _of_manifests() -> Iterator[Attack]:
    """There is one reader of manifests, so that a command is enough for each refusal."""
    for number, (where, value, message) in enumerate(FIELDS):
        name = f"rundir: manifest: {where} is {ascii(value)[:40]}"
        make = changed(at(where, value), _renamed)
        index = number % 5
        if message:
            yield Attack(name, make, [READING[index]], [LEFT_OUT[index]], message)
        else:
            lines = [*READING[:2], READING[index], READING[5]]
            yield Attack(name, make, lines)


def _tamperings() -> Iterator[Tampering]:
    for where, value, message in RECORDS:
        name = f"run.json: {where} is {ascii(value)[:40]}"
        yield Tampering(name, at(where, value, "run.json"), message, REFUSED)
    for name, (data, message) in JSONS.items():
        manifest = raw(MANIFEST, data)
        record = raw("run.json", data)
        yield Tampering(f"manifest: {name}", manifest, message, LEFT_OUT)
        yield Tampering(f"run.json: {name}", record, message, REFUSED)
    for name, (change, message) in FILES.items():
        codes = REFUSED if name.startswith("run.json") else LEFT_OUT
        yield Tampering(name, change, message, codes)


def _of_files() -> Iterator[Attack]:
    """In two commands, one after the other, of which one is merge; some are resumed,
    too."""
    for number, tampering in enumerate(_tamperings()):
        name = tampering.name
        make = changed(tampering.change)
        indices = (number % 5, 5)
        yield Attack(
            f"rundir: {name}",
            make,
            [READING[index] for index in indices],
            [tampering.codes[index] for index in indices]
            if tampering.message
            else "any",
            tampering.message,
        )
        is_resumed = number % 3 == 0 or "an image's folder" in name
        if is_resumed and " MB" not in name:
            yield Attack(f"resumed rundir: {name}", make, RESUMING, may_change=RUN)


def _of_audits() -> Iterator[Attack]:
    for name, (change, message) in AUDITS.items():
        make = changed(change)
        yield Attack(f"audit.json: {name}", make, AUDITED, "refused", message)
    yield Attack("audit.json: forged texts", changed(_audit(SHOWN_AUDIT)), AUDITED)


def all_attacks() -> Iterator[Attack]:
    yield from _of_manifests()
    yield from _of_files()
    yield from _of_audits()
    yield Attack(
        "tensor: a pickle",
        changed(_pickled),
        READING[4:5],
        [4],
        "a.png/001_0/output.npy cannot be read: ",
    )
    yield Attack(
        "rundir: an image's folder is a link, merged alone",
        changed(link("a.png", "../other/a.png")),
        ["merge {given}/run --out alone"],
        [3],
        "a.png is incomplete (it has no manifest), and left out",
    )
    yield Attack(
        "rundir: an image is there twice",
        changed(_twice),
        READING,
        message="image.path is b.png, expected 'aaa'",
    )
    yield Attack("control: an honest run in every command", place, READING, "good")
    name = "control: an honest run is resumed"
    yield Attack(name, place, RESUMING, "good", may_change=RUN)
