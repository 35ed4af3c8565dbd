"""What a story shows of the files that commands write, as lines of text."""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

_WIDTH = 100
_VOLATILE = {"featviz", "torch", "torchvision", "fingerprint", "bytes"}
"""Keys of JSON documents: versions, and what depends on them."""
_LONG_NUMBER = re.compile(r"\d+\.\d{6,}")
_DIGEST = re.compile("[0-9a-f]{64}")


def tree(folder: str) -> Iterator[str]:
    """The files below a folder, and its empty folders; without the bytecode that Python
    may write beside a module."""
    root = Path(folder)
    for path in sorted(root.rglob("*")):
        if "__pycache__" in path.parts:
            continue
        name = path.relative_to(root).as_posix()
        if path.is_file():
            yield name
        elif not any(path.iterdir()):
            yield f"{name}/"


def cat(file: str) -> list[str]:
    """The text of a file."""
    return Path(file).read_text("utf-8").splitlines()


def remove(path: str) -> list[str]:
    """Remove a file or a folder."""
    if Path(path).is_dir():
        shutil.rmtree(path)
    else:
        Path(path).unlink()
    return []


def copy(source: str, target: str) -> list[str]:
    """Copy a file or a folder, also into a folder that is not there yet."""
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    if Path(source).is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)
    return []


def edit(file: str, old: str, new: str) -> list[str]:
    """Replace a text that stands in a file once or more, as if some seconds later: Python
    knows a changed module by its time, in seconds, and its size."""
    path = Path(file)
    text = path.read_text("utf-8")
    assert old in text, f"{file} has no {old}"
    changed = path.stat().st_mtime + 10
    path.write_text(text.replace(old, new), "utf-8")
    os.utime(path, (changed, changed))
    return []


# JSON


def json_file(file: str, *keys: str) -> Iterator[str]:
    """A JSON document, or what stands at these keys of it (`images.total`, `rows.0`)."""
    document = without_volatile(json.loads(Path(file).read_text("utf-8")))
    if not keys:
        yield from pretty(document)
    for key in keys:
        first, *more = pretty(_at(document, key.split(".")))
        yield f"{key}: {first}"
        yield from more


def _at(document: Any, keys: list[str]) -> Any:
    """What stands at keys of a document; `None` also where nothing does."""
    value = document
    for key in keys:
        if isinstance(value, list):
            value = value[int(key)] if int(key) < len(value) else None
        elif value is not None:
            value = value.get(key)
    return value


def pretty(value: Any, indent: str = "", key: str = "") -> Iterator[str]:
    """The lines of a value: as much on each as fits.

    Args:
        indent: of its lines.
        key: what stands before it on its first line.
    """
    whole = _written(value)
    if _fits(f"{indent}{key}{whole}") or not isinstance(value, dict | list):
        yield f"{indent}{key}{whole}"
        return
    brackets = "{}" if isinstance(value, dict) else "[]"
    yield f"{indent}{key}{brackets[0]}"
    yield from _filled(_named_parts(value), f"{indent} ")
    yield f"{indent}{brackets[1]}"


def _named_parts(value: Any) -> list[tuple[str, Any]]:
    """What stands in an object or a list, with what stands before each part."""
    if isinstance(value, list):
        return [("", part) for part in value]
    return [(f"{json.dumps(name)}: ", part) for name, part in value.items()]


def _filled(parts: list[tuple[str, Any]], indent: str) -> Iterator[str]:
    """Lines of parts; numbers and short texts stand side by side."""
    line = indent
    for key, part in parts:
        is_short = _is_short(part)
        text = f"{key}{_written(part)}, "
        # numbers and texts share a line
        if is_short and _fits(line + text):
            line += text
            continue
        if line != indent:
            yield line.rstrip(", ")
        line = indent
        if is_short:
            line += text
        else:
            yield from pretty(part, indent, key)
    if line != indent:
        yield line.rstrip(", ")


def _is_short(value: Any) -> bool:
    """Whether it is no object, and at most a list of numbers and texts."""
    if isinstance(value, list):
        whole = _written(value)
        return len(whole) <= _WIDTH // 2 and not re.search(r"[{]|, \[", whole)
    return not isinstance(value, dict) or not value


def _written(value: Any) -> str:
    """A JSON value on one line."""
    return json.dumps(value, ensure_ascii=False)


def _fits(line: str) -> bool:
    return len(line) <= _WIDTH


def without_volatile(value: Any) -> Any:
    """A JSON value without versions and digests, and with floats of six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, str):
        return re.sub(r"sha256 [0-9a-f]{16}", "sha256 ...", value)
    if isinstance(value, list):
        return [without_volatile(part) for part in value]
    if isinstance(value, dict):
        return {name: without_volatile(value[name]) for name in _lasting(value)}
    return value


def _lasting(document: dict[str, Any]) -> Iterator[str]:
    """The names in a document whose values do not change from run to run."""
    for name, value in document.items():
        if name not in _VOLATILE and not _is_digest(value):
            yield name


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


# Arrays and pictures


def arrays(file: str, *names: str) -> Iterator[str]:
    """The arrays of an .npz file, or of an .npy file its one: type, shape and rows."""
    opened = np.load(file)
    contents: Mapping[str, np.ndarray] = opened
    if isinstance(opened, np.ndarray):
        contents = {Path(file).name: opened}
    for name in names or contents:
        array = contents[name]
        yield f"{name} {array.dtype} {list(array.shape)}"
        for row in array.reshape(-1, array.shape[-1] if array.ndim else 1):
            yield "  " + " ".join(f"{float(value):.6g}" for value in row)


def picture(file: str) -> Iterator[str]:
    """Format, mode and size of a picture, and the texts in it."""
    with Image.open(file) as image:
        width, height = image.size
        frames = getattr(image, "n_frames", 1)
        times = f", {frames} frames" if frames > 1 else ""
        yield f"{image.format} {image.mode} {width}x{height}{times}"
        for name, text in getattr(image, "text", {}).items():
            yield f"  {name}: {with_short_numbers(text)}"


def with_short_numbers(text: str) -> str:
    """A text whose numbers have six digits at most."""
    return _LONG_NUMBER.sub(lambda number: f"{float(number[0]):.6g}", text)


def pixels(file: str) -> Iterator[str]:
    """A picture's pixels, too: grey levels or colours in hexadecimal, two signs a level, and
    dots for black; of a large picture a checksum of them."""
    yield from picture(file)
    with Image.open(file) as image:
        image.load()
        is_grey = image.mode in ("L", "1")
        levels = np.asarray(image.convert("L" if is_grey else "RGB"))
    height, width = levels.shape[:2]
    signs = 2 if is_grey else 6
    if width * (signs + 1) > 3 * _WIDTH // 2 or height > _WIDTH // 2:
        yield f"  crc32 {zlib.crc32(np.ascontiguousarray(levels).tobytes()):08x}"
        return
    for row in levels:
        signs = " ".join(bytes(pixel).hex() for pixel in row.reshape(width, -1))
        yield "  " + re.sub(r"\b(00)+\b", lambda zeros: "." * len(zeros[0]), signs)


WORDS: dict[str, Callable[..., Any]] = {
    "tree": tree,
    "cat": cat,
    "rm": remove,
    "cp": copy,
    "edit": edit,
    "json": json_file,
    "arrays": arrays,
    "picture": picture,
    "pixels": pixels,
}
