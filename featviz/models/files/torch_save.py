"""The two formats of torch.save, read by this program alone: a zip of records, and the older one
of several pickles with the storages behind them. No other reader sees the file."""

from __future__ import annotations

import mmap
import pickle
import sys
import zipfile
from collections.abc import Mapping
from contextlib import closing
from io import BytesIO
from pathlib import Path
from struct import unpack
from typing import Any, BinaryIO

import torch

from featviz.files import open_regular
from featviz.models.files import module_state, pickles
from featviz.models.files.rebuilding import Budget, RefusedError, Storage, StorageType
from featviz.models.files.unpickler import Unpickler

_PICKLE = "data.pkl"
_CHUNK = 2**22
"""Bytes that are read at once."""

_MAGIC = 0x1950A86A20F9469CFC6C
_PROTOCOL = 1001
"""What the older format begins with."""


def load(path: Path, allowed: Mapping[str, Any]) -> Any:
    """Read what torch.save wrote, tensors on the CPU.

    Args:
        allowed: what the file may use beyond this program's own lists, by name.

    Raises:
        LoadError: the file names something that may not be used.
        RefusedError: it asks for more than data, or for too much of it.
        Exception: it is broken.
    """
    vocabulary = pickles.Vocabulary(allowed)
    with open_regular(path) as file:
        budget = Budget(path.stat().st_size)
        read = _load_zip if zipfile.is_zipfile(file) and _is_zip(file) else _load_pickles
        try:
            unpickler, content = read(file, vocabulary, budget)
        except Exception as error:
            if vocabulary.unknown:
                raise pickles.refusal(path, vocabulary.unknown) from error
            raise
    if unknown := unpickler.unknown_in(content):
        raise pickles.refusal(path, unknown)
    unpickler.finish()
    module_state.check(content, unpickler.made, vocabulary, budget)
    return content


def load_record(content: bytes, vocabulary: pickles.Vocabulary) -> Any:
    """Read what torch.save wrote into an archive.

    Raises:
        RefusedError: it asks for more than data, or for too much of it.
        Exception: it is broken.
    """
    budget = Budget(len(content))
    unpickler, loaded = _load_zip(BytesIO(content), vocabulary, budget)
    unpickler.finish()
    module_state.check(loaded, unpickler.made, vocabulary, budget)
    return loaded


def _is_zip(file: BinaryIO) -> bool:
    """Whether the file begins as a zip, too: a zip behind something else is not what it seems."""
    file.seek(0)
    return file.read(4) == b"PK\x03\x04"


def _load_zip(
    file: BinaryIO, vocabulary: pickles.Vocabulary, budget: Budget
) -> tuple[Unpickler, Any]:
    with zipfile.ZipFile(file) as archive:
        records = _Records(archive, budget)
        source = BytesIO(bytes(_bytes_of(records.read(_PICKLE, budget.pickle))))
        unpickler = Unpickler(source, vocabulary, budget, records.storage)
        content = unpickler.load()
    return unpickler, content


class _Records:
    """The records of a zip of torch.save: each once, all in one folder."""

    def __init__(self, archive: zipfile.ZipFile, budget: Budget) -> None:
        self._archive = archive
        self._infos: dict[str, zipfile.ZipInfo] = {}
        for info in archive.infolist():
            if info.filename in self._infos:
                raise RefusedError(f"holds two records of one name, {ascii(info.filename)[:80]}")
            self._infos[info.filename] = info
        unpacked = sum(info.file_size for info in archive.infolist())
        if unpacked > budget.most:
            raise RefusedError(f"would unpack to {unpacked:,} bytes")
        tops = [name for name in self._infos if name.split("/", 1)[1:] == [_PICKLE]]
        if len(tops) != 1:
            raise RefusedError(f"holds {len(tops)} records {_PICKLE}, expected 1")
        self._folder = tops[0].removesuffix(_PICKLE)
        self._swapped = self._is_swapped()
        self._storages: dict[str, torch.UntypedStorage] = {}

    def read(self, name: str, most: int) -> torch.Tensor:
        """A record's bytes, uint8 [N]."""
        info = self._infos.get(f"{self._folder}{name}")
        if info is None:
            raise RefusedError(f"lacks its record {ascii(name)[:80]}")
        if info.file_size > most:
            raise RefusedError(f"holds a record {name} of {info.file_size:,} bytes")
        content = torch.empty(info.file_size, dtype=torch.uint8)
        if hasattr(info, "CRC"):
            del info.CRC  # torch.save may leave it out (set_crc32_options), and does not check it
        with self._archive.open(info) as record:
            _fill(content, record)
            if record.read(1):
                raise RefusedError(f"holds a record {name} that is longer than it says")
        return content

    def storage(self, reference: tuple[Any, ...]) -> Storage:
        """What ("storage", type, key, device, elements) refers to; it comes to the CPU."""
        kind, key, count = _referred(reference, 5)
        if key not in self._storages:
            content = self.read(f"data/{key}", sys.maxsize)
            if self._swapped and kind.dtype.itemsize > 1 and content.numel():
                content.untyped_storage().byteswap(kind.dtype)  # type: ignore[no-untyped-call]
            self._storages[key] = content.untyped_storage()
        untyped, size = self._storages[key], count * kind.dtype.itemsize
        if untyped.nbytes() != size:
            raise RefusedError(
                f"holds {untyped.nbytes():,} bytes of a tensor's data, expected {size:,}"
            )
        return Storage(untyped, kind.dtype)

    def _is_swapped(self) -> bool:
        """Whether numbers have the other byte order than this machine's."""
        if f"{self._folder}byteorder" not in self._infos:
            return sys.byteorder != "little"
        order = bytes(_bytes_of(self.read("byteorder", 16)))
        if order not in (b"little", b"big"):
            raise RefusedError(f"is of an unknown byte order, {order!a}")
        return order.decode() != sys.byteorder


def _load_pickles(
    file: BinaryIO, vocabulary: pickles.Vocabulary, budget: Budget
) -> tuple[Unpickler, Any]:
    with closing(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) as source:
        storages = _Storages(source.size())

        def one() -> tuple[Unpickler, Any]:
            unpickler = Unpickler(source, vocabulary, budget, storages.storage)
            return unpickler, unpickler.load()

        for expected in (_MAGIC, _PROTOCOL):
            unpickler, number = one()
            if vocabulary.unknown:  # a plain pickle, which is said by what it would call
                return unpickler, number
            if number != expected:
                raise pickle.UnpicklingError("Invalid magic number")
        one()  # about the system that wrote it
        unpickler, content = one()
        storages.fill(source, one()[1])
    return unpickler, content


class _Storages:
    """The storages of the older format, which come behind the pickle that refers to them."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._contents: dict[str, torch.Tensor] = {}
        self._kinds: dict[str, StorageType] = {}

    def storage(self, reference: tuple[Any, ...]) -> Any:
        """What ("storage", type, key, device, elements, view) refers to; it is filled later.

        Classes of whole models stand there with their source, which nobody needs.
        """
        if reference[0] == "module" and len(reference) == 4:  # a class, its file and its source
            return reference[1]
        kind, key, count = _referred(reference, 6)
        size = count * kind.dtype.itemsize
        if key not in self._contents:
            self._left -= size
            if self._left < 0:
                raise RefusedError("refers to more data than it holds")
            self._contents[key] = torch.empty(size, dtype=torch.uint8)
            self._kinds[key] = kind
        content = self._contents[key]
        if content.numel() != size:
            raise RefusedError("refers to the same data with two sizes")
        if reference[5] is None:
            return Storage(content.untyped_storage(), kind.dtype)
        if type(reference[5]) is not tuple:
            raise pickle.UnpicklingError("a view that is no tuple")
        _view, start, length = reference[5]
        begin, end = (n * kind.dtype.itemsize for n in (_count(start), start + _count(length)))
        if end > size:
            raise RefusedError("refers to data that lie outside of it")
        return Storage(content.untyped_storage()[begin:end], kind.dtype)

    def fill(self, source: mmap.mmap, keys: Any) -> None:
        """Read the data of all storages, in the order of the keys."""
        if type(keys) is not list or not all(type(key) is str for key in keys):
            raise pickle.UnpicklingError("a list of data that is none of names")
        if sorted(keys) != sorted(self._contents):
            raise RefusedError("lists other data than it refers to")
        for key in keys:
            content = self._contents[key]
            (count,) = unpack("<q", source.read(8))
            if count * self._kinds[key].dtype.itemsize != content.numel():
                raise RefusedError("holds data of another size than it refers to")
            _fill(content, source)


def _referred(reference: tuple[Any, ...], length: int) -> tuple[StorageType, str, int]:
    if len(reference) != length or reference[0] != "storage":
        raise pickle.UnpicklingError("a reference to something else than a storage")
    kind, key, _device, count = reference[1:5]
    if not isinstance(kind, StorageType) or type(key) is not str:
        raise pickle.UnpicklingError("a reference to a storage of no type")
    return kind, key, _count(count)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise pickle.UnpicklingError("a storage of no size")
    return value


def _fill(content: torch.Tensor, source: Any) -> None:
    """Read as many bytes as there is room for."""
    place = _bytes_of(content)
    at = 0
    while at < len(place):
        part = source.read(min(_CHUNK, len(place) - at))
        if not part:
            raise RefusedError(f"ends {len(place) - at:,} bytes too early")
        place[at : at + len(part)] = part
        at += len(part)


def _bytes_of(content: torch.Tensor) -> memoryview:
    return content.numpy().data
