"""torch.export archives (.pt2), read by featviz and written anew for torch to load.

`torch.export.load` unpickles example inputs and whatever constants are no plain tensors, and its
reader of archives finds records that a checker with another reader does not (it ignores case). So
nothing of a file reaches torch as it is: the records of a list of exact names are read, each once,
their JSON is checked and built anew (`exported_json`), weights are held against the bytes that are
there, and torch loads the archive that is written of this.
"""

from __future__ import annotations

import io
import json
import math
import re
import struct
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO

import torch
from torch import Tensor

from featviz.errors import FeatvizError, LoadError
from featviz.files import open_regular
from featviz.models.files import exported_json, pickles, torch_save
from featviz.models.files.exported_json import shown
from featviz.models.files.rebuilding import RefusedError
from featviz.text import listed, quoted

_UNREADABLE = (
    zipfile.BadZipFile,
    struct.error,
    EOFError,
    NotImplementedError,
    ValueError,
    KeyError,
)
"""What a broken archive, or a document that is none, raises here."""

_SHOWN = 3
"""Faults that an error names before it says how many more there are."""

_IN_MEMORY = 64 * 2**20
"""Bytes of the new archive that are kept in memory; beyond, it is a private temporary file."""

_MOST_JSON = 64 * 2**20
"""Bytes of a program's graph; the largest of torchvision have two million."""

_SHORT = 20
"""Bytes of the records that name the format and its version."""

_MOST_REPEATED, _ALWAYS_REPEATED = 4, 16 * 2**20
"""Tensors may be as large as this many times the archive, and these bytes (`expand`)."""

_PROGRAM = "models/model.json"
_STATES = (("weights", "weight_"), ("constants", "tensor_"))
"""What an archive has beside the program, and what begins the names of its plain tensors."""

_PAYLOAD = re.compile(r"(weight|tensor)_\d{1,9}", re.ASCII)
"""Records of plain tensors; `custom_obj_N` and `opaque_obj_N` are pickles."""

_RECORDS = re.compile(
    r"archive_format|archive_version|byteorder|version|\.data/(version|serialization_id)"
    r"|models/model\.json|data/sample_inputs/model\.pt|extra/.+"
    r"|data/weights/(model_weights_config\.json|model\.pt|weight_\d{1,9})"
    r"|data/constants/(model_constants_config\.json|model\.pt|(tensor|custom_obj|opaque_obj)_\d{1,9})",
    re.ASCII,
)
"""What torch.export.save writes. Of these, example inputs and extra files are never read."""

_INNER_RECORDS = re.compile(
    r"data\.pkl|data/\d{1,9}|version|byteorder|\.format_version|\.storage_alignment"
    r"|\.data/serialization_id",
    re.ASCII,
)
"""What torch.save writes into torch 2.8's archives."""

_PLAIN_NAMES = re.compile(
    r"torch\._utils\._rebuild_(tensor_v2|parameter)|collections\.OrderedDict|torch\.\w+Storage",
    re.ASCII,
)
"""Names that a pickle of named tensors needs."""

_ENCRYPTED = 0x1 | 0x40 | 0x2000


class Records:
    """The records of an archive: each there once, uncompressed, under a name that is expected."""

    def __init__(self, file: IO[bytes], expected: re.Pattern[str]) -> None:
        """
        Raises:
            ValueError: the archive is not as torch writes it.
            zipfile.BadZipFile: it is damaged.
        """
        self._archive = zipfile.ZipFile(file)
        self.size = file.seek(0, io.SEEK_END)
        infos = self._archive.infolist()
        self._infos: dict[str, zipfile.ZipInfo] = {}
        root = infos[0].filename.partition("/")[0] + "/" if infos else ""
        for info in infos:
            name = info.filename.removeprefix(root)
            outside = info.filename != info.orig_filename or not info.filename.startswith(root)
            packed = info.compress_type or info.compress_size != info.file_size
            for wrong, words in (
                (outside, f"is not in {shown(root)}"),
                (not expected.fullmatch(name), "is none that torch writes"),
                (info.flag_bits & _ENCRYPTED, "is encrypted"),
                (packed, "is compressed"),
                (name in self._infos, "is there twice"),
            ):
                if wrong:
                    raise ValueError(f"the record {shown(info.orig_filename)} {words}")
            self._infos[name] = info
        self._check_places()

    def _check_places(self) -> None:
        """Records lie one behind the other, from the first byte on."""
        end = 0
        for info in sorted(self._infos.values(), key=lambda info: info.header_offset):
            if info.header_offset < end or (end == 0 and info.header_offset):
                name = shown(info.orig_filename)
                raise ValueError(f"the record {name} lies where another one does")
            end = info.header_offset + 30 + len(info.orig_filename) + info.file_size
        if end > self.size or self._archive.comment:
            raise ValueError("something follows its records")

    def __contains__(self, name: str) -> bool:
        return name in self._infos

    def length(self, name: str) -> int:
        """Bytes of a record.

        Raises:
            ValueError: there is none of this name.
        """
        if name not in self._infos:
            raise ValueError(f"it lacks the record {shown(name)}")
        return self._infos[name].file_size

    def read(self, name: str) -> bytes:
        """Read a record; what its own header calls it and its checksum are checked.

        Raises:
            ValueError: there is none of this name.
            zipfile.BadZipFile: it is damaged.
        """
        self.length(name)
        return self._archive.read(self._infos[name])

    def text(self, name: str) -> str:
        """Read a record of JSON.

        Raises:
            ValueError: there is none of this name, it is too large, or no UTF-8.
        """
        if self.length(name) > _MOST_JSON:
            raise ValueError(f"{shown(name)} has {self.length(name):,} bytes")
        return self.read(name).decode("utf-8")


@contextmanager
def rewritten(path: Path) -> Iterator[BinaryIO]:
    """An archive for `torch.export.load` that holds what is safe of the file, built anew.

    Its example inputs, extra files and the notes on its operations are left out. Memory: the
    largest weight, and up to 64 MB; a larger archive is in a temporary file until it is loaded.

    Raises:
        LoadError: no archive that torch can read, compiled code, torch's format before 2.8, or
            something that could run code; nothing of it has been executed.
    """
    try:
        with open_regular(path) as file, tempfile.SpooledTemporaryFile(_IN_MEMORY) as target:
            _rewrite(path, file, target)
            target.seek(0)
            yield target  # type: ignore[misc]
    except OSError as error:
        raise LoadError(
            f"{quoted(path.name)} cannot be loaded: {error.strerror or quoted(str(error))}",
            f"a copy of its weights is made in {tempfile.gettempdir()}; TMPDIR names another place",
        ) from error


def _rewrite(path: Path, file: IO[bytes], target: IO[bytes]) -> None:
    _check_format(path, file)
    from torch.export.pt2_archive._package import PT2ArchiveWriter

    try:
        records = Records(file, _RECORDS)
        _check_version(records)
        program = exported_json.program(records.text(_PROGRAM))
        states = [_State(records, *names) for names in _STATES]
        faults = [*program.faults, *(fault for state in states for fault in state.faults)]
        if not faults:
            _check_sizes(records, states)
    except FeatvizError:
        raise
    except _UNREADABLE as error:
        line = quoted(str(error)) or type(error).__name__
        raise LoadError(
            f"{quoted(path.name)} cannot be loaded: {line}; nothing was executed",
            "is the file whole, and as torch.export.save wrote it? if you trust the file: --trust",
            add=("--trust",),
        ) from error
    if faults:
        raise _refusal(path, faults)
    with PT2ArchiveWriter(target) as writer:
        writer.write_bytes(_PROGRAM, json.dumps(program.value).encode())
        writer.write_bytes("data/sample_inputs/model.pt", b"")  # as save writes it for none
        for state in states:
            state.write(writer)


def _refusal(path: Path, faults: list[str]) -> LoadError:
    return LoadError(
        f"{quoted(path.name)} holds {listed(faults, _SHOWN)}, which could run any code; "
        "nothing was executed",
        "if you trust the file: --trust",
        add=("--trust",),
    )


def _check_format(path: Path, file: IO[bytes]) -> None:
    try:
        names = [name.casefold() for name in zipfile.ZipFile(file).namelist()]
    except _UNREADABLE as error:
        raise LoadError(f"{quoted(path.name)} is truncated or damaged", None) from error
    if "version" in names:  # torch.export.load falls back to this format, which is all pickles
        raise LoadError(
            f"{quoted(path.name)} is a torch.export program in the format before torch 2.8",
            "save it again with a newer torch (torch.export.load, then torch.export.save), "
            "or --trust if you trust it",
        )
    if any("/data/aotinductor/" in name for name in names):
        raise LoadError(
            f"{quoted(path.name)} is compiled by AOTInductor: machine code, which takes no hooks "
            "on layers",
            "the program as torch.export.save wrote it, or the model itself",
        )


def _check_version(records: Records) -> None:
    from torch.export.pt2_archive import constants

    for name, expected in (
        (constants.ARCHIVE_FORMAT_PATH, constants.ARCHIVE_FORMAT_VALUE),
        (constants.ARCHIVE_VERSION_PATH, constants.ARCHIVE_VERSION_VALUE),
    ):
        if records.length(name) > _SHORT or records.read(name).decode("ascii") != expected:
            raise ValueError(f"{shown(name)} is not {expected!r}")


# Weights and constants ----------------------------------------------------------------------


class _State:
    """Weights or constants: where each lies, and the bytes there."""

    def __init__(self, records: Records, kind: str, prefix: str) -> None:
        """
        Args:
            kind: `weights` or `constants`.
            prefix: begins the names of plain tensors' records.
        """
        self.faults: list[str] = []
        self._records, self._folder = records, f"data/{kind}/"
        self._config_name = f"{self._folder}model_{kind}_config.json"
        self._unpickled: dict[str, bytes] = {}
        pickled = f"{self._folder}model.pt"  # of torch 2.8
        if pickled in records:
            tensors = _unpickled(pickled, records.read(pickled), self.faults)
            self._config, self._unpickled = _unshared(tensors, prefix)
        else:
            checked = exported_json.payload(records.text(self._config_name))
            self.faults += checked.faults
            self._config = checked.value["config"]
        for name, entry in self._config.items():
            if entry["use_pickle"] is not False or not _PAYLOAD.fullmatch(entry["path_name"]):
                self.faults.append(f"a pickle for {shown(name)}")

    def views(self) -> Iterator[tuple[str, str, Any, int]]:
        """Of each tensor its name, its record, what is said of it, and the bytes of the record."""
        for name, entry in self._config.items():
            record = self._folder + entry["path_name"]
            content = self._unpickled.get(entry["path_name"])
            length = self._records.length(record) if content is None else len(content)
            yield name, record, entry["tensor_meta"], length

    def write(self, writer: Any) -> None:
        for name in dict.fromkeys(entry["path_name"] for entry in self._config.values()):
            record, content = self._folder + name, self._unpickled.get(name)
            writer.write_bytes(record, self._records.read(record) if content is None else content)
        writer.write_bytes(self._config_name, json.dumps({"config": self._config}).encode())


def _check_sizes(records: Records, states: list[_State]) -> None:
    """Hold each tensor against the bytes of its record, and all against the archive.

    Raises:
        ValueError: a tensor reaches beyond its record, or they repeat few bytes to many.
        KeyError: a type of numbers that torch serialises no tensor of.
    """
    from torch._export.serde.serialize import _SERIALIZE_TO_TORCH_DTYPE

    sizes: dict[tuple[object, ...], int] = {}
    dtypes: dict[str, int] = {}
    for state in states:
        for name, record, meta, length in state.views():
            shape, strides, offset = _layout(name, meta)
            if dtypes.setdefault(record, meta["dtype"]) != meta["dtype"]:
                raise ValueError(f"two types of numbers are in {shown(record)}")
            count, width = math.prod(shape), _SERIALIZE_TO_TORCH_DTYPE[meta["dtype"]].itemsize
            last = sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + offset
            if length % width or (count and (last + 1) * width > length):
                raise ValueError(
                    f"{shown(name)} of shape {shown(str(shape))} lies beyond the {length:,} bytes "
                    f"of {shown(record)}"
                )
            sizes[record, shape, strides, offset] = count * width
    if sum(sizes.values()) > _MOST_REPEATED * records.size + _ALWAYS_REPEATED:
        raise ValueError(f"its tensors would take {sum(sizes.values()):,} bytes")


def _layout(name: str, meta: Any) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Sizes, strides and offset, in elements; none of them negative, dense in memory."""
    if meta is None or meta["layout"] != 7 or meta["device"]["type"] == "meta":
        raise ValueError(f"{shown(name)} is no plain tensor with its data")
    values = [[v.get("as_int", -1) for v in meta[key]] for key in ("sizes", "strides")]
    offset = meta["storage_offset"].get("as_int", -1)
    shape, strides = (tuple(v) for v in values)
    if len(shape) != len(strides) or min((*shape, *strides, offset)) < 0:
        raise ValueError(f"{shown(name)} has no shape")
    return shape, strides, offset


# Torch 2.8 ----------------------------------------------------------------------------------


def _unpickled(name: str, content: bytes, faults: list[str]) -> dict[str, Tensor]:
    """Named plain tensors that torch.save wrote; anything else is a fault."""
    if not content:
        return {}
    Records(io.BytesIO(content), _INNER_RECORDS)
    vocabulary = pickles.Vocabulary({}, _PLAIN_NAMES)
    tensors: Any = None
    try:
        tensors = torch_save.load_record(content, vocabulary)
    except Exception as error:  # a broken pickle decides itself what it raises
        if not vocabulary.unknown:
            reason = error if isinstance(error, RefusedError) else "is no pickle of tensors"
            raise ValueError(f"{shown(name)} {reason}") from error
    if vocabulary.unknown or not _are_tensors(tensors):
        faults.append(f"objects in {name}")
        return {}
    return dict(tensors)


def _are_tensors(content: object) -> bool:
    return isinstance(content, dict) and all(
        isinstance(name, str)
        and exported_json.is_state(name)
        and type(value) in (Tensor, torch.nn.Parameter)
        and value.layout == torch.strided
        for name, value in content.items()
    )


def _unshared(
    tensors: dict[str, Tensor], prefix: str
) -> tuple[dict[str, dict[str, Any]], dict[str, bytes]]:
    """Tensors as the format of today has them: a record for each storage, and where each lies."""
    from torch._export.serde import serialize

    to_dict: Any = serialize._dataclass_to_dict  # without type hints
    names: dict[int | str, str] = {}
    config: dict[str, dict[str, Any]] = {}
    contents: dict[str, bytes] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        address = storage.data_ptr() or name  # empty ones have none
        if address not in names:
            names[address] = f"{prefix}{len(names)}"
            flat = torch.empty(0, dtype=torch.uint8).set_(storage)
            contents[names[address]] = flat.numpy().tobytes()
        config[name] = {
            "path_name": names[address],
            "is_param": isinstance(tensor, torch.nn.Parameter),
            "use_pickle": False,
            "tensor_meta": to_dict(serialize.serialize_tensor_meta(tensor)),
        }
    return config, contents
