"""Tensors and containers from what a pickle says of them: checked, and paid for from a budget.

These take the place of torch's `_rebuild_*` functions and of the constructors of containers, so
that nothing which a file names is called with arguments of the file.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

_TIMES = 4
_BESIDE = 64 * 2**20
"""A file may ask for so many times its size, and for so many bytes beside."""

_MOST_DIMENSIONS = 16
_LARGEST = 2**48
"""Elements along a dimension, and strides; beyond it products overflow in torch."""

_MOST_IN_KEY = 50
"""Values in a tuple that is a key: hashing walks through all of them, with repetitions."""

_LARGEST_KEY = 2**63
_MOST_ODD_KEYS = 2000
"""Keys that are neither texts nor whole numbers up to the one above. Hashes of numbers and tuples
are no secret: a file can choose keys that all have the same one, and each is compared with each."""

_DEEPEST_TUPLE = 100
_MOST_ARGUMENTS = 50

_set_bits: Any = torch._utils.set_tensor_metadata
_rebuild_quantised: Any = torch._utils._rebuild_qtensor
_typed_storage: Any = torch.storage.TypedStorage
_named_layout: Any = torch.serialization._get_layout
_storage_names: Any = torch.storage._dtype_to_storage_type_map
"""Functions of torch that have no type hints."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class RefusedError(Exception):
    """What a file asks for, in words that follow on its name: `holds a tensor ...`."""


class _Purse:
    """How much of something is left, and what is said of a file that wants more."""

    def __init__(self, left: int, complaint: str) -> None:
        self.left, self.complaint = left, complaint

    def take(self, count: int = 1, complaint: str = "") -> None:
        """Pay for so much.

        Raises:
            RefusedError: there is less left.
        """
        self.left -= count
        if self.left < 0:
            raise RefusedError(complaint or self.complaint)


class Budget:
    """What a file may make this program spend before the first forward pass.

    Honest files are far below all of it: each tensor is there once, and pickles are a small part.
    """

    def __init__(self, size: int) -> None:
        self.most = _TIMES * size + _BESIDE
        """Bytes that the file may stand for."""
        self.pickle = max(2**20, _TIMES * size)
        """Bytes of a pickle once unpacked."""
        self.bytes = _Purse(self.most, "copies more bytes than a file of its size needs")
        """Bytes of tensors, in single precision at least, and bytes that are copied."""
        self.steps = _Purse(
            10**6 + size // 2, "holds a pickle of more instructions than a file of its size needs"
        )
        self.objects = _Purse(
            500_000 + size // 8, "makes more objects than a file of its size needs"
        )
        """Containers, and items that are copied into them."""
        self.modules = _Purse(1000 + size // 64, "makes more modules than a file of its size needs")
        self.odd_keys = _Purse(
            _MOST_ODD_KEYS, "holds more keys that are no texts than a file needs"
        )

    def take_tensor(self, size: Sequence[int], width: int) -> None:
        """Pay for a tensor; `width` is the bytes of an element."""
        complaint = f"holds a tensor of shape {list(size)} without its data"
        self.bytes.take(prod(size) * max(width, 4), complaint)

    def take_key(self, key: Any) -> None:
        """Pay for a key of a dict, or an item of a set.

        Raises:
            RefusedError: it takes long to hash, or too many may have the same hash.
        """
        if isinstance(key, (str, bytes)):
            return
        if isinstance(key, int):
            if not -_LARGEST_KEY <= key < _LARGEST_KEY:
                raise RefusedError("holds a key that is too large a number")
            return
        if isinstance(key, tuple):
            _count_in_key(key, _MOST_IN_KEY)
        self.odd_keys.take()


@dataclass(frozen=True, eq=False)
class StorageType:
    """What a file calls `torch.FloatStorage`: the type of the elements."""

    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Storage:
    """Bytes of tensors, and the type that the file gives to them."""

    untyped: torch.UntypedStorage
    dtype: torch.dtype


class Maker:
    """Stands for a function that a file would call; `make` gets the budget and its arguments."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make


def _count_in_key(key: tuple[Any, ...], left: int) -> int:
    for value in key:
        left -= 1
        if isinstance(value, tuple):
            left = _count_in_key(value, left)
        if left < 0:
            raise RefusedError("holds a key of too many values")
    return left


class Tuples:
    """How deep tuples are, so that none is made too deep to be hashed or let go."""

    def __init__(self) -> None:
        self._depths: dict[int, tuple[int, tuple[Any, ...]]] = {}

    def made(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        """Take note of a new tuple.

        Raises:
            RefusedError: it is deeper than any model needs.
        """
        inner = [self._depth(item) for item in value if type(item) is tuple]
        if inner:
            depth = 1 + max(inner)
            if depth > _DEEPEST_TUPLE:
                raise RefusedError(
                    f"holds tuples more than {_DEEPEST_TUPLE} levels inside one another"
                )
            self._depths[id(value)] = depth, value  # kept, so that nothing else gets its id
        return value

    def _depth(self, value: tuple[Any, ...]) -> int:
        return self._depths.get(id(value), (1,))[0]


# Tensors -----------------------------------------------------------------------------------


def _dense(
    budget: Budget,
    storage: Storage,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    requires_grad: bool = False,
    hooks: object = None,
    metadata: Mapping[str, bool] | None = None,
) -> Tensor:
    return _typed(budget, storage, offset, size, stride, requires_grad, hooks, None, metadata)


def _typed(
    budget: Budget,
    storage: Storage,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    requires_grad: bool,
    hooks: object,
    dtype: torch.dtype | None,
    metadata: Mapping[str, bool] | None = None,
) -> Tensor:
    """A view of a storage; hooks, which a file may not have, are left out."""
    kind = _expect(torch.dtype, dtype or _expect(Storage, storage).dtype)
    _check_extent(budget, storage, offset, size, stride, kind.itemsize)
    tensor = torch.empty((0,), dtype=kind)
    tensor.set_(storage.untyped, offset, tuple(size), tuple(stride))
    if metadata and _expect(dict, metadata).keys() <= {"conj", "neg"}:
        _set_bits(tensor, {name: bit is True for name, bit in metadata.items()})
    return tensor.requires_grad_(requires_grad is True)


def _check_extent(
    budget: Budget,
    storage: Storage,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    width: int,
) -> None:
    """Pay for a view of a storage, which must lie inside of it."""
    for sizes in (size, stride, [offset]):
        _check_sizes(sizes)
    if len(size) != len(stride):
        raise RefusedError(f"holds a tensor of {len(size)} sizes and {len(stride)} strides")
    reach = sum((n - 1) * step for n, step in zip(size, stride, strict=True)) + 1
    if (offset + (reach if prod(size) else 0)) * width > storage.untyped.nbytes():
        raise RefusedError(f"holds a tensor of shape {list(size)} that lies outside of its data")
    budget.take_tensor(size, width)


def _check_sizes(sizes: Sequence[int]) -> None:
    if not isinstance(sizes, (tuple, list)) or len(sizes) > _MOST_DIMENSIONS:
        raise RefusedError("holds a tensor whose sizes are no short list")
    for size in sizes:
        if type(size) is not int or not 0 <= size < _LARGEST:
            raise RefusedError("holds a tensor with sizes, strides or an offset that no tensor has")


def _quantised(
    budget: Budget,
    storage: Storage,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
    parameters: tuple[Any, ...],
    requires_grad: bool = False,
    hooks: object = None,
) -> Tensor:
    kind = _expect(Storage, storage).dtype
    _check_extent(budget, storage, offset, size, stride, kind.itemsize)
    for value in _expect(tuple, parameters)[1:5]:
        if isinstance(_expect((int, float, list, Tensor), value), list):
            budget.objects.take(1 + len(value))
            for number in value:
                _expect((int, float), number)
    if len(parameters) == 4:  # per channel: torch before 2.13 believes any axis
        axis = _expect(int, parameters[3])
        if not 0 <= axis < len(size):
            raise RefusedError(
                f"holds a quantised tensor whose per_channel axis {axis} is out of range"
            )
    typed = _typed_storage(wrap_storage=storage.untyped, dtype=kind, _internal=True)
    sizes = (tuple(size), tuple(stride))
    tensor: Tensor = _rebuild_quantised(typed, offset, *sizes, parameters, False, OrderedDict())
    return tensor


def _sparse(budget: Budget, layout: torch.layout, data: tuple[Any, ...]) -> Tensor:
    """A sparse tensor, which is paid for as if it were dense."""
    *parts, size = [part for part in _expect(tuple, data) if not isinstance(part, bool)]
    tensors = [_expect(Tensor, part) for part in parts]
    _check_sizes(size)
    budget.take_tensor(size, tensors[-1].element_size())
    if layout == torch.sparse_coo:
        indices, values = tensors
        return torch.sparse_coo_tensor(indices, values, list(size), check_invariants=False)
    rows, columns, values = tensors
    kind = _expect(torch.layout, layout)
    return torch.sparse_compressed_tensor(
        rows, columns, values, list(size), layout=kind, check_invariants=False
    )


def _without_data(
    budget: Budget, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], *more: object
) -> Tensor:
    _check_sizes(size)
    raise RefusedError(f"holds a tensor of shape {list(size)} without its data")


def _parameter(budget: Budget, data: Tensor, requires_grad: bool = True, *more: object) -> Any:
    """A parameter; hooks and attributes that the file gives to it are left out."""
    return nn.Parameter(_expect(Tensor, data), requires_grad is True)


def _with_attributes(
    budget: Budget, maker: Maker, kind: object, arguments: tuple[Any, ...], *state: object
) -> Any:
    """A tensor that had attributes of its own; they are left out."""
    return _expect(Maker, maker).make(budget, *_expect(tuple, arguments))


def _on_cpu(budget: Budget, data: Tensor, *more: object) -> Any:
    """A tensor of an accelerator, which torch saved from its copy on the CPU."""
    return _expect(Tensor, data)


def check_sparse(tensor: Tensor) -> None:
    """Hold a sparse tensor against its own sizes, once its data are there.

    Raises:
        RuntimeError: an index lies outside.
    """
    if tensor.layout == torch.sparse_coo:
        parts = (tensor._indices(), tensor._values())
        torch.sparse_coo_tensor(*parts, tensor.size(), check_invariants=True)
        return
    rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
    parts = (
        (tensor.crow_indices(), tensor.col_indices())
        if rows
        else (tensor.ccol_indices(), tensor.row_indices())
    )
    torch.sparse_compressed_tensor(
        *parts, tensor.values(), tensor.size(), layout=tensor.layout, check_invariants=True
    )


# Containers and plain values ---------------------------------------------------------------


def _ordered(budget: Budget, pairs: Sequence[Sequence[Any]] = ()) -> OrderedDict[Any, Any]:
    ordered = OrderedDict()
    budget.objects.take(1 + len(_expect((list, tuple), pairs)))
    for pair in pairs:
        key, value = _expect((list, tuple), pair)  # a tensor would come apart into its elements
        budget.take_key(key)
        ordered[key] = value
    return ordered


def _counted(budget: Budget, counts: Mapping[Any, int] | None = None) -> Counter[Any]:
    plain = _expect(dict, {} if counts is None else counts)
    budget.objects.take(1 + len(plain))
    return Counter(plain)


def _set(budget: Budget, items: Sequence[Any] = ()) -> set[Any]:
    budget.objects.take(1 + len(_expect((list, tuple), items)))
    for item in items:
        budget.take_key(item)
    return set(items)


def _size(budget: Budget, sizes: Sequence[int] = ()) -> torch.Size:
    _check_sizes(sizes)
    return torch.Size(sizes)


def _device(budget: Budget, kind: str, index: int | None = None) -> torch.device:
    if index is None:
        return torch.device(_expect(str, kind))
    return torch.device(_expect(str, kind), _expect(int, index))


def _layout(budget: Budget, name: str) -> torch.layout:
    layout: torch.layout = _named_layout(_expect(str, name))
    return layout


def _encoded(budget: Budget, text: str, encoding: str) -> Any:
    """Bytes, which pickles of protocol 2 write as text."""
    if encoding not in ("latin1", "latin-1"):
        raise RefusedError("encodes text in a way that no pickle does")
    budget.bytes.take(len(_expect(str, text)))
    return text.encode("latin-1")


def _bytes(budget: Budget, content: bytes | str = b"", encoding: str = "latin-1") -> bytearray:
    if isinstance(content, str):
        content = _encoded(budget, content, encoding)
    plain: bytes = _expect(bytes, content)
    budget.bytes.take(len(plain))
    return bytearray(plain)


def _complex(budget: Budget, real: float, imaginary: float) -> complex:
    return complex(_expect((int, float), real), _expect((int, float), imaginary))


def _partial(budget: Budget, kind: type[nn.Module]) -> functools.partial[Any]:
    """ViT keeps its norm layer as partial(nn.LayerNorm, eps=...); nothing calls it here."""
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise RefusedError("holds a functools.partial of something that is no class of layers")
    return functools.partial(kind)


def fill_partial(partial: functools.partial[Any], state: Any) -> None:
    """Put arguments into a partial: plain values only.

    Raises:
        RefusedError: it would call something else, or with something else.
    """
    kind, arguments, keywords, attributes = _expect(tuple, state)
    if len(_expect(tuple, arguments)) + len(_expect(dict, keywords)) > _MOST_ARGUMENTS:
        raise RefusedError("holds a functools.partial with more arguments than a layer has")
    values = [*arguments, *keywords.values()]
    if kind is not partial.func or attributes or not all(type(v) in _PLAIN for v in values):
        raise RefusedError("holds a functools.partial with other arguments than plain values")
    partial.__setstate__((kind, arguments, keywords, {}))  # type: ignore[attr-defined]


def _uncompiled(budget: Budget, module: nn.Module, compiler: object) -> Any:
    """The module inside torch.compile's wrapper; the compiler, which would be code, is dropped."""
    return _expect(nn.Module, module)


def _expect(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise RefusedError(f"has a {type(value).__name__} where torch.save writes something else")
    return value


COMPILED = "torch._dynamo.eval_frame.OptimizedModule"

_MAKES: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor": _dense,
    "torch._utils._rebuild_tensor_v2": _dense,
    "torch._utils._rebuild_tensor_v3": _typed,
    "torch._utils._rebuild_qtensor": _quantised,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_meta_tensor_no_storage": _without_data,
    "torch._utils._rebuild_parameter": _parameter,
    "torch._utils._rebuild_parameter_with_state": _parameter,
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": _on_cpu,
    "torch._tensor._rebuild_from_type_v2": _with_attributes,
    "torch.nn.parameter.Parameter": _parameter,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _layout,
    "collections.OrderedDict": _ordered,
    "collections.Counter": _counted,
    "builtins.set": _set,
    "builtins.bytearray": _bytes,
    "builtins.complex": _complex,
    "_codecs.encode": _encoded,
    "functools.partial": _partial,
    COMPILED: _uncompiled,
}
MAKERS = {name: Maker(make) for name, make in _MAKES.items()}
"""By the name in a file: what is made where the file would call it."""

TYPES: dict[str, Any] = {
    **{str(v): v for v in vars(torch).values() if isinstance(v, (torch.dtype, torch.qscheme))},
    **{f"torch.{name}": StorageType(dtype) for dtype, name in _storage_names().items()},
    "torch.storage.UntypedStorage": StorageType(torch.uint8),
}
"""By the name in a file: types of numbers and of storages, quantisation schemes."""
