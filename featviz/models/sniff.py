"""What a file is, by its first bytes: so that an error can say what it looks like."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

SUFFIXES = (".pth", ".pt", ".ckpt", ".bin", ".safetensors", ".pt2")
"""File names of models; a file of another name is read by its content all the same."""

_MAGIC = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"\x89HDF": "an HDF5 file (Keras?)",
    b"\x1f\x8b": "a gzip archive; unpack it first",
    b"version https://git-lfs": "a Git LFS pointer, not the file itself (git lfs pull)",
    **{bytes((8, version, 18)): "an ONNX model" for version in (3, 4, 7, 8)},
}

_MOST_UNPACKED = 20
"""A zip that unpacks to more times its size is a bomb; torch.save does not compress at all."""

_EXPORTED_NAMES = ("/archive_format", "serialized_exported_program.json")
"""In lower case: torch's reader of archives makes no difference, so no other reader gets these."""

KINDS = ("zip", "pickle", "safetensors", "shards", "torchscript", "pt2")

ZIP, PICKLE, SAFETENSORS, SHARDS, TORCHSCRIPT, EXPORTED = KINDS


def sniff(path: Path) -> str:
    """One of KINDS, or words for people that say what the file looks like."""
    if not path.is_file():
        return "no regular file"
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        return "empty"
    if head.startswith(b"PK\x03\x04"):
        return _zip_kind(path)
    if head[257:262] == b"ustar":
        return "a tar archive; unpack it first"
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**40:
        return SAFETENSORS  # a header of 640 bytes begins as a pickle does
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return PICKLE
    if path.name.endswith(".index.json"):
        return SHARDS
    start = head.lstrip().lower()
    if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<head")):
        return "a web page"
    if start.startswith((b"{", b"[")):
        return "a JSON file"
    known = (words for magic, words in _MAGIC.items() if head.startswith(magic))
    is_text = all(byte in b"\t\r\n" or 32 <= byte < 127 for byte in head)
    return next(known, "a text file" if is_text else "no format that featviz knows")


def _zip_kind(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names, unpacked = archive.namelist(), sum(i.file_size for i in archive.filelist)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error):
        return "a zip archive that is truncated or damaged"
    if unpacked > _MOST_UNPACKED * path.stat().st_size:
        return f"a zip archive that would unpack to {unpacked:,} bytes"
    if any(name.endswith("/constants.pkl") or name.startswith("constants.pkl") for name in names):
        return TORCHSCRIPT
    if any(name.casefold().endswith(_EXPORTED_NAMES) for name in names):
        return EXPORTED
    if any(name.endswith("/data.pkl") for name in names):
        return ZIP
    return "a zip archive that is no checkpoint"
