"""What is put into a run directory so that it does not fit, and what must be said of it."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rundirs import Drawn

Attack = Callable[[Path], object]
GRIDS = (Drawn("conv1", index=1, type="Conv2d"), Drawn("relu", index=2))
DEEP = "[" * 5000 + "]" * 5000


def manifest(at: str, value: Any) -> Attack:
    """Put a value at `captures.0.grid.nrow` of the first image's manifest."""
    return lambda root: edit(root / "cat.jpg" / "manifest.json", at, value)


def record(at: str, value: Any) -> Attack:
    """Put a value into run.json."""
    return lambda root: edit(root / "run.json", at, value)


def edit(path: Path, at: str, value: Any) -> None:
    content = json.loads(path.read_text())
    *way, last = [int(part) if part.isdecimal() else part for part in at.split(".")]
    place = content
    for part in way:
        place = place[part]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    path.write_text(json.dumps(content))


def raw(name: str, data: bytes) -> Attack:
    """Other bytes in a file of the first image."""
    return lambda root: (root / "cat.jpg" / name).write_bytes(data)


def linked(name: str, target: str) -> Attack:
    """A symbolic link to one of the secrets in the place of a file or folder."""

    def attack(root: Path) -> None:
        path = root / name
        if path.is_dir():
            path.rename(root.parent / "moved")
        else:
            path.unlink(missing_ok=True)
        path.symlink_to(root.parent / target)

    return attack


def other(name: str, make: Callable[[Path], object]) -> Attack:
    """Something that is no regular file in the place of one."""

    def attack(root: Path) -> None:
        (root / name).unlink()
        make(root / name)

    return attack


def stats(compression: int = zipfile.ZIP_STORED, **arrays: Any) -> Attack:
    """Another stats.npz: arrays, or the bytes of members."""

    def attack(root: Path) -> None:
        path = root / "cat.jpg" / "stats.npz"
        with np.load(path) as arrays_before:
            members = {key: arrays_before[key] for key in arrays_before.files}
        members |= {key.replace("_", "|"): value for key, value in arrays.items()}
        with zipfile.ZipFile(path, "w", compression) as file:
            for key, value in members.items():
                file.writestr(f"{key}.npy", value if isinstance(value, bytes) else npy(value))

    return attack


def npy(array: np.ndarray) -> bytes:
    data = io.BytesIO()
    np.save(data, array)
    return data.getvalue()


def header(text: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()


def overlapping(root: Path) -> None:
    """Two arrays of a zip file that are one: as many as one likes from few bytes."""
    path = root / "cat.jpg" / "stats.npz"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("conv1|output|0|.npy", npy(np.zeros((10**5, 6), np.float32)))
        info = file.infolist()[0]
        twin = zipfile.ZipInfo("relu|output|0|.npy")
        for name in ("CRC", "compress_size", "file_size", "header_offset"):
            setattr(twin, name, getattr(info, name))
        file.filelist.append(twin)
    for row in (0, 1):
        manifest(f"captures.{row}.maps", 10**5)(root)


def png(width: int, height: int, data: bytes = b"") -> bytes:
    """A picture that says it is of this size."""
    real = io.BytesIO()
    Image.new("L", (8, 8)).save(real, "png")
    content = real.getvalue()
    size = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    return content[:16] + size + content[24:] + data


def named_twice(root: Path) -> None:
    (root / "cat.jpg").rename(root / "aaa.jpg")
    edit(root / "aaa.jpg" / "manifest.json", "image.path", "dog.jpg")


FILE = "captures.0.file"
GRID = "captures.0.grid"
FIELDS: dict[str, tuple[str, Any, str]] = {
    "nrow 0": (f"{GRID}.nrow", 0, "captures[0].grid.nrow is 0, expected 1 or more"),
    "nrow negative": (f"{GRID}.nrow", -3, "captures[0].grid.nrow is -3, expected 1 or more"),
    "nrow text": (f"{GRID}.nrow", "3", 'captures[0].grid.nrow is "3", expected a whole number'),
    "nrow huge": (f"{GRID}.nrow", 10**18, "grid.nrow is 1000000000000000000, expected 2147483647"),
    "nrow of 5000 digits": (f"{GRID}.nrow", 10**4000, "captures[0].grid.nrow is "),
    "nrow bool": (f"{GRID}.nrow", True, "captures[0].grid.nrow is true, expected a whole number"),
    "nrow script": (f"{GRID}.nrow", "</script><script>alert(1)</script>", "expected a whole numbe"),
    "other nrow": (f"{GRID}.nrow", 2, "output.png has 38×22 pixels, by its manifest.json 26×32"),
    "scale 0": (f"{GRID}.scale", 0, "captures[0].grid.scale is 0, expected 1 or more"),
    "scale text": (f"{GRID}.scale", "2", "expected a whole number or a list"),
    "scale of one": (f"{GRID}.scale", [2], "captures[0].grid.scale is [2], expected 2 or more"),
    "scale beyond tile": (f"{GRID}.scale", 99, "grid.scale is 99, expected no more than the tile"),
    "tile text": (f"{GRID}.tile", "8x10", 'captures[0].grid.tile is "8x10", expected a list'),
    "tile of three": (f"{GRID}.tile", [8, 10, 3], "expected 2 or less entries"),
    "tile 0": (f"{GRID}.tile", [0, 10], "captures[0].grid.tile[0] is 0, expected 1 or more"),
    "tile huge": (f"{GRID}.tile", [2**31 - 1] * 2, "expected a picture of at most 2147483647"),
    "padding 1e308": (f"{GRID}.padding", 1e308, "captures[0].grid.padding is 1e+308, expected"),
    "padding negative": (f"{GRID}.padding", -1, "captures[0].grid.padding is -1, expected 0 or mo"),
    "padding missing": (f"{GRID}.padding", KeyError, "captures[0].grid.padding is missing"),
    "title negative": (f"{GRID}.top", -1, "captures[0].grid.top is -1, expected 0 or more"),
    "title text": (f"{GRID}.top", "13", 'captures[0].grid.top is "13", expected a whole number'),
    "title that is not there": (f"{GRID}.top", 13, "pixels, by its manifest.json"),
    "title beyond all pictures": (f"{GRID}.top", 2**31 - 1, "captures[0].grid is "),
    "grid list": (GRID, [], "captures[0].grid is [], expected an object"),
    "maps 10**9": ("captures.0.maps", 10**9, "captures[0].maps is 1000000000, expected 16777216"),
    "maps 16 million": ("captures.0.maps", 2**24, "stats.npz has"),
    "maps 0": ("captures.0.maps", 0, "captures[0].maps is 0, expected 1 or more"),
    "maps script": ("captures.0.maps", "</script>", "expected a whole number"),
    "fewer maps": ("captures.0.maps", 5, "conv1|output|0| is float32 [6, 6], expected float32 [5"),
    "normalize list": ("captures.0.normalize", ["map"], 'normalize is ["map"], expected text'),
    "range of one": ("captures.0.range", [1], "captures[0].range is [1], expected 2 or more"),
    "range text": ("captures.0.range", "0..1", "expected a list or null"),
    "shares beyond one": ("captures.0.zero_fraction", 7, "captures[0].zero_fraction is 7, expecte"),
    "nonfinite text": ("captures.0.nonfinite", "<b>", "expected a whole number"),
    "mean object": ("captures.0.mean", {}, "captures[0].mean is {}, expected a number or null"),
    "channels script": (
        "captures.0.channels",
        ["</script><script>alert(1)</script>"],
        "captures[0].channels[0] is ",
    ),
    "channels too many": ("captures.0.channels", [0] * 6, "expected each channel once"),
    "channels beyond": ("captures.0.channels", [0, 6], "channels is 6, expected less than maps (6"),
    "channels none": ("captures.0.channels", [], "captures[0].channels is [], expected 1 or more"),
    "slices 0": ("captures.0.slices", [0, 4], "captures[0].slices[0] is 0, expected 1 or more"),
    "steps without slices": ("captures.0.steps", [0, 1], "expected each of the 1 drawn slices"),
    "negative step": ("captures.0.steps", [-1], "captures[0].steps[0] is -1, expected 0 or more"),
    "step that is not held": ("captures.0.steps", [1], "steps is 1, expected less than slices (1)"),
    "constant of two numbers": ("captures.0.constant", [1, 2], "expected 3 or more entries"),
    "slices upside down": ("captures.0.slices", [4, 2], "expected no more drawn than there are"),
    "collapsed list": ("captures.0.collapsed", [1], "collapsed is [1], expected an object or null"),
    "collapsed beyond": ("captures.0.collapsed", {"1": [99]}, "expected less than maps (6)"),
    "collapsed script": ("captures.0.collapsed", {"</script>": [1]}, "expected drawn channels"),
    "reduce": ("captures.0.reduce", "pca", "by its manifest.json 38×12"),
    "reduce list": ("captures.0.reduce", ["pca"], "expected text or null"),
    "overlay 9": ("captures.0.overlay", 9, "captures[0].overlay is 9, expected 1 or less"),
    "layer null": ("captures.0.layer", None, "captures[0].layer is null, expected text"),
    "layer too long": ("captures.0.layer", "x" * 5000, "expected 4096 or less characters"),
    "kind of a path": ("captures.0.kind", "../../x", "captures[0].kind is "),
    "call negative": ("captures.0.call", -1, "captures[0].call is -1, expected 0 or more"),
    "index text": ("captures.0.index", "1", "expected a whole number"),
    "a row twice": ("captures.1.layer", "conv1", "captures[1] is the same tensor as captures[0]"),
    "captures text": ("captures", "all", 'captures is "all", expected a list'),
    "captures missing": ("captures", KeyError, "cat.jpg/manifest.json: captures is missing"),
    "skipped text": ("skipped", "none", 'skipped is "none", expected a list'),
    "skipped rows": ("skipped", [{"layer": "x"}], "skipped[0].type is missing"),
    "never_ran numbers": ("never_ran", [1], "never_ran[0] is 1, expected text"),
    "image text": ("image", "cat.jpg", 'image is "cat.jpg", expected an object'),
    "image empty": ("image.path", "", 'image.path is "", expected 1 or more characters'),
    "another's name": ("image.path", "dog.jpg", "image.path is \"dog.jpg\", expected 'cat.jpg'"),
    "input shape": ("input.shape", [[[1]]], "input.shape[0][0] is [1], expected a whole number"),
    "other input shape": ("input.shape", [1, 3, 9, 9], "input.png has 24×20 pixels, by its manife"),
    "prediction": ("prediction", [{"index": 0, "name": 3}], "prediction[0].name is 3, expected te"),
    "target text": ("target", "x", 'target is "x", expected an object or null'),
    "interventions": ("interventions", [1], "interventions[0] is 1, expected an object"),
    "later version": ("schema_version", 99, "has schema version 99, this featviz reads up to 2"),
    "version text": ("schema_version", "1", "its schema_version is '1'"),
    "file absolute": (FILE, "/etc/passwd", 'captures[0].file is "/etc/passwd", expected a file in'),
    "file above": (FILE, "../../secret.png", "expected a file inside the image's folder"),
    "file beside": (FILE, "../dog.jpg/input.png", "expected a file inside the image's folder"),
    "file by a dot": (FILE, "./001_conv1/output.png", "expected a file inside the image's folder"),
    "file with NUL": (FILE, "001_conv1/a\0.png", "expected a file inside the image's folder"),
    "file with backslash": (FILE, "..\\..\\secret.png", "expected a file inside the image's"),
    "file empty": (FILE, "", "expected a file inside the image's folder"),
    "file no picture": (FILE, "manifest.json", "expected a name that ends in .png or .webp or .jp"),
    "file number": (FILE, 7, "captures[0].file is 7, expected text"),
    "file too long": (FILE, "x" * 4000 + ".png", "cannot be read: File name too long"),
    "file a folder": (FILE, "001_conv1", "expected a name that ends in"),
    "tensor above": ("captures.0.tensor", "../../secret.npy", "captures[0].tensor is "),
    "tensor no array": ("captures.0.tensor", "stats.npz", "expected a name that ends in .npy"),
    "tensor missing": ("captures.0.tensor", "x.npy", "cat.jpg/x.npy is missing"),
    "figure above": ("captures.0.figure", "../../secret.png", "captures[0].figure is "),
}  # fmt: skip
"""What is put where in a manifest, and what must be said of it."""

FLOAT32 = "{'descr': '<f4', 'fortran_order': False, 'shape': (%s), }\n"
FILES: dict[str, tuple[Attack, str]] = {
    "a link for a picture": (
        linked("cat.jpg/001_conv1/output.png", "secret.png"),
        "cat.jpg/001_conv1/output.png cannot be read: it, or a folder on the way to it, is a symb",
    ),
    "a link for a layer": (linked("cat.jpg/001_conv1", "secret"), "is a symbolic link"),
    "a link for the input": (linked("cat.jpg/input.png", "secret.png"), "is a symbolic link"),
    "a link for the manifest": (
        linked("cat.jpg/manifest.json", "secret.txt"),
        "is a symbolic link",
    ),
    "a link for statistics": (linked("cat.jpg/stats.npz", "secret.txt"), "is a symbolic link"),
    "a FIFO for a picture": (
        other("cat.jpg/001_conv1/output.png", os.mkfifo),
        "output.png cannot be read: it is no regular file",
    ),
    "a FIFO for the manifest": (other("cat.jpg/manifest.json", os.mkfifo), "no regular file"),
    "a folder for statistics": (other("cat.jpg/stats.npz", os.mkdir), "it is no regular file"),
    "no JSON": (raw("manifest.json", b"\x89PNG"), "cat.jpg/manifest.json: cannot be read: "),
    "not UTF-8": (raw("manifest.json", b'{"a": "\xff"}'), "manifest.json: cannot be read: "),
    "deep JSON": (raw("manifest.json", DEEP.encode()), "more than 100 levels inside one another"),
    "deep in a field": (
        raw("manifest.json", b'{"schema_version": 1, "x": ' + DEEP.encode() + b"}"),
        "more than 100 levels inside one another",
    ),
    "NaN": (raw("manifest.json", b'{"schema_version": NaN}'), "JSON has no number NaN"),
    "a list": (raw("manifest.json", b"[]"), "its schema_version is None"),
    "a picture of another size": (
        raw("001_conv1/output.png", png(50_000, 50_000)),
        "output.png has 50000×50000 pixels, by its manifest.json 38×22",
    ),
    "an input of another size": (raw("input.png", png(9, 9)), "input.png has 9×9 pixels, by its"),
    "a page for a picture": (raw("001_conv1/output.png", b"<script>alert(1)</script>"), "no PNG"),
    "a zip bomb": (
        stats(zipfile.ZIP_DEFLATED, conv1_output_0_=np.zeros((6, 6), np.float32)),
        "conv1|output|0| is compressed, which featviz does not write",
    ),
    "large statistics": (raw("stats.npz", bytes(10**6)), "stats.npz has more than the "),
    "statistics of objects": (
        stats(conv1_output_0_=np.zeros((6, 6), "<f8")),
        "conv1|output|0| is float64 [6, 6], expected float32 [6, 6]",
    ),
    "other columns": (
        stats(conv1_output_0_=np.zeros((9, 4), "<f4")),
        "is float32 [9, 4], expected",
    ),
    "a header that is code": (
        stats(conv1_output_0_=header("__import__('os').system('touch x')\n") + bytes(144)),
        "its header is not as numpy writes it",
    ),
    "a header that never ends": (
        stats(conv1_output_0_=header(FLOAT32 % ("1" * 1500)) + bytes(144)),
        "its header is not as numpy writes it",
    ),
    "a shape without numbers": (
        stats(conv1_output_0_=header(FLOAT32 % "999999999, 6")),
        "conv1|output|0| has 0 bytes, not those of",
    ),
    "statistics that overlap": (overlapping, "stats.npz has 2,4"),
    "statistics missing": (lambda root: (root / "cat.jpg/stats.npz").unlink(), "npz is missing"),
    "input missing": (lambda root: (root / "cat.jpg/input.png").unlink(), "input.png is missing"),
}
"""What is put in the place of a file, and what must be said of it."""


RECORDS: dict[str, tuple[Attack, str]] = {
    "failures 5": (record("failures", 5), "run.json: failures is 5, expected a list"),
    "failures of text": (record("failures", ["x"]), "failures[0] is \"x\", expected an object"),
    "failures missing": (record("failures", KeyError), "run.json: failures is missing"),
    "images list": (record("images", []), "run.json: images is [], expected an object"),
    "total negative": (record("images.total", -1), "images.total is -1, expected 0 or more"),
    "total text": (record("images.total", "2"), 'images.total is "2", expected a whole number'),
    "complete text": (record("images.complete", "cat"), "images.complete is \"cat\", expected a l"),
    "complete numbers": (record("images.complete", [1]), "images.complete[0] is 1, expected text"),
    "missing text": (record("images.missing", "x"), 'images.missing is "x", expected a list'),
    "options list": (record("options", []), "options is [], expected an object or null"),
    "model text": (record("model", "resnet18"), 'model is "resnet18", expected an object or null'),
    "device number": (record("device", 7), "device is 7, expected text or null"),
    "kernels": (record("kind", "kernels"), "holds kernels, not the feature maps of a run"),
    "kind with an escape": (record("kind", "\x1b]0;x\x07"), r"holds \x1b]0;x\x07, not the feature"),
    "later version": (record("schema_version", 9), "has schema version 9, this featviz reads up t"),
    "deep": (lambda r: (r / "run.json").write_text(DEEP), "more than 100 levels inside one anothe"),
    "no JSON": (lambda r: (r / "run.json").write_bytes(b"\xff"), "run.json cannot be read: "),
    "a FIFO": (other("run.json", os.mkfifo), "run.json cannot be read: it is no regular file"),
    "a folder": (other("run.json", os.mkdir), "run.json cannot be read: it is no regular file"),
}  # fmt: skip


AUDITS: dict[str, tuple[Any, str]] = {
    "a list": ([], "the document is [], expected an object"),
    "layers text": ({"images": {"seen": 1}, "layers": "x"}, 'layers is "x", expected a list'),
    "seen text": ({"images": {"seen": "<b>"}, "layers": []}, "images.seen is "),
    "findings": (
        {
            "images": {"seen": 1},
            "layers": [{"label": "a", "channels": 1, "findings": {"x": ["</"]}}],
        },
        "layers[0].findings[...][0], expected a whole number",
    ),
}  # fmt: skip


TENSORS: dict[str, bytes] = {
    "a pickle": npy(np.array([{"a": 1}], object)),
    "another shape": npy(np.zeros((1, 6, 4, 4), "<f4")),
    "cut off": npy(np.zeros((1, 6, 4, 5), "<f4"))[:-4],
    "code": header("__import__('os').system('touch x')\n"),
    "a later version": npy(np.zeros((1, 6, 4, 5), "<f4")).replace(b"NUMPY\x01", b"NUMPY\x02", 1),
    "a shape beyond all": header(FLOAT32 % "1, 6, 4, 99999999999999999"),
    "empty": b"",
}
