"""A reader of pickles that builds data, and modules as data, and calls nothing that a file names.

It checks and reads in one go: what is refused is never made. The instructions are those that
torch.save writes, and the few of later protocols that take the place of others.
"""

from __future__ import annotations

import functools
from collections import Counter, OrderedDict
from collections.abc import Callable
from pickle import UnpicklingError, decode_long
from struct import unpack
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from featviz.models.files.kept_values import GETATTR, NumberType, attribute
from featviz.models.files.pickles import Unknown, Vocabulary, is_helper, is_module_class
from featviz.models.files.rebuilding import (
    COMPILED,
    MAKERS,
    Budget,
    Maker,
    RefusedError,
    Tuples,
    check_sparse,
    fill_partial,
)


class Source(Protocol):
    """What an unpickler reads from: at most as much as there is."""

    def read(self, n: int, /) -> bytes:
        """The next n bytes, or fewer at the end."""

    def readline(self) -> bytes:
        """The bytes up to a line break, which is included."""


class Unpickler:
    """One pickle to what it holds.

    Args:
        file: where the pickle begins.
        storage: makes a Storage of what the pickle says of it.
    """

    def __init__(
        self,
        file: Source,
        vocabulary: Vocabulary,
        budget: Budget,
        storage: Callable[[tuple[Any, ...]], Any],
    ) -> None:
        self.made: list[Any] = []
        """Modules and helpers in the order of their making: no method of theirs has run."""
        self._file, self._storage = file, storage
        self._vocabulary, self._budget = vocabulary, budget
        self._fillable: set[int] = set()
        self._sparse: list[Tensor] = []
        self._tuples = Tuples()
        self._memo: dict[int, Any] = {}
        self._marks: list[list[Any]] = []
        self._stack: list[Any] = []
        self._compiled = False

    def load(self) -> Any:
        """Read the pickle.

        Raises:
            RefusedError: it asks for more than data, or for too much of it.
            UnpicklingError, EOFError, LookupError, TypeError, ValueError: it is broken.
        """
        read, budget = self._file.read, self._budget
        while (key := read(1)) != b".":
            if not key:
                raise EOFError
            budget.steps.take()
            operation = _OPERATIONS.get(key)
            if operation is None:
                raise UnpicklingError(f"Unsupported operand {key[0]}")
            operation(self)
        return self._stack.pop()

    def finish(self) -> None:
        """Check what could not be checked before all data were there."""
        for tensor in self._sparse:
            check_sparse(tensor)

    def unknown_in(self, content: Any) -> set[str]:
        """Names that may not be used, of those that what was loaded depends on.

        A compiled model drops its compiler, and all names with it; in any other file each name
        counts, wherever it went.
        """
        if not self._compiled:
            return self._vocabulary.unknown
        names: set[str] = set()
        reached, seen = [content], {id(content)}
        for value in reached:
            if isinstance(value, Unknown) and value.name is not None:
                names.add(value.name)
            for inner in parts(value):
                if id(inner) not in seen:
                    seen.add(id(inner))
                    reached.append(inner)
        return names

    def _take(self, count: int) -> bytes:
        data = self._file.read(count)
        if len(data) < count:
            raise EOFError
        return data

    def _top(self, count: int) -> list[Any]:
        items = self._stack[-count:]
        if len(items) < count:
            raise IndexError("pop from empty list")
        del self._stack[-count:]
        return items

    def _pop_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._marks.pop()
        return items

    # What makes or fills objects --------------------------------------------------------------

    def _global(self) -> None:
        module, name = (self._file.readline() for _ in range(2))
        if not name.endswith(b"\n"):
            raise EOFError
        self._stack.append(self._vocabulary.find(module[:-1].decode(), name[:-1].decode()))

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise UnpicklingError("a name is no text")
        self._stack.append(self._vocabulary.find(module, name))

    def _reduce(self) -> None:
        arguments, function = self._stack.pop(), self._stack.pop()
        self._stack.append(self._called(function, arguments))

    def _called(self, function: Any, arguments: Any) -> Any:
        if type(arguments) is not tuple:
            raise UnpicklingError("arguments are no tuple")
        if isinstance(function, Unknown):
            return Unknown(None, (function, arguments))
        self._budget.objects.take()
        if function is GETATTR and attribute(*arguments) is None:
            return self._vocabulary.refused("builtins.getattr", arguments)
        if isinstance(function, Maker):
            self._compiled |= function is MAKERS[COMPILED]
            return self._noted(function.make(self._budget, *arguments))
        if self._vocabulary.trusts(function):
            return self._trusted(function, arguments)
        name = getattr(function, "__name__", type(function).__name__)
        raise RefusedError(f"calls {name}, which torch.save only keeps: it could run code")

    def _trusted(self, function: Any, arguments: tuple[Any, ...]) -> Any:
        """What the user allows to be made, unless the file will be refused for another name."""
        if self._vocabulary.unknown:
            return Unknown(None, arguments)
        return self._vocabulary.trust(function(*arguments))

    def _noted(self, value: Any) -> Any:
        if isinstance(value, (functools.partial, SimpleNamespace)):
            self._fillable.add(id(value))
            self.made.append(value)
        elif isinstance(value, Tensor) and value.layout is not torch.strided:
            self._sparse.append(value)
        return value

    def _new_object(self) -> None:
        arguments, kind = self._stack.pop(), self._stack.pop()
        if isinstance(kind, (Maker, Unknown)):
            self._stack.append(self._called(kind, arguments))
        elif self._vocabulary.trusts(kind):
            self._stack.append(self._trusted(kind.__new__, (kind, *arguments)))
        elif (is_module_class(kind) or is_helper(kind)) and arguments == ():
            self._budget.modules.take()
            self._stack.append(object.__new__(kind))
            self.made.append(self._stack[-1])
            self._fillable.add(id(self._stack[-1]))
        else:
            name = getattr(kind, "__name__", type(kind).__name__)
            raise RefusedError(
                f"makes a {name} in a way that torch.save does not: it could run code"
            )

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, (Unknown, OrderedDict, NumberType)):  # metadata, the byte order
            return
        if isinstance(target, functools.partial) and id(target) in self._fillable:
            fill_partial(target, state)
        elif id(target) in self._fillable:
            if type(state) is not dict or not all(type(name) is str for name in state):
                raise RefusedError(f"holds a broken {type(target).__name__}: its state is no dict")
            self._budget.objects.take(1 + len(state))
            vars(target).update(state)
        elif self._vocabulary.trusts(target):
            if not self._vocabulary.unknown:
                _fill_as_pickle_does(target, state)
        else:
            raise UnpicklingError(f"a {type(target).__name__} takes no state")

    def _reference(self) -> None:
        reference = self._stack.pop()
        if type(reference) is not tuple or not reference:
            raise UnpicklingError("a reference is no tuple")
        self._stack.append(self._storage(reference))

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is list:
            target.extend(items)
        elif not isinstance(target, Unknown):
            raise UnpicklingError(f"cannot append to a {type(target).__name__}")

    def _set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if isinstance(target, Unknown):
            return
        if type(target) not in (dict, OrderedDict, Counter):
            raise UnpicklingError(f"cannot set items of a {type(target).__name__}")
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._budget.take_key(key)
            target[key] = value

    def _add_items(self) -> None:
        items, target = self._pop_mark(), self._stack[-1]
        if type(target) is not set:
            raise UnpicklingError(f"cannot add to a {type(target).__name__}")
        for item in items:
            self._budget.take_key(item)
            target.add(item)

    def _container(self, value: Any) -> None:
        self._budget.objects.take()
        self._stack.append(value)

    def _tuple(self, items: list[Any]) -> None:
        self._container(self._tuples.made(tuple(items)))

    # What only moves values -------------------------------------------------------------------

    def _mark(self) -> None:
        self._marks.append(self._stack)
        self._stack = []

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> None:
        self._stack.pop()

    def _put(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    def _get(self, place: int) -> None:
        self._stack.append(self._memo[place])

    def _number(self, form: str, count: int) -> Any:
        return unpack(form, self._file.read(count))[0]


def parts(value: Any) -> list[Any]:
    """What a container, a module or a helper holds, at its first level."""
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set)):
        return list(value)
    if isinstance(value, Unknown):
        return list(value.parts)
    if type(value) is SimpleNamespace or is_module_class(type(value)) or is_helper(type(value)):
        return list(vars(value).values())
    return []


def _fill_as_pickle_does(target: Any, state: Any) -> None:
    """State of an object whose class the user allows."""
    if hasattr(target, "__setstate__"):
        target.__setstate__(state)
        return
    slots = None
    if isinstance(state, tuple) and len(state) == 2:
        state, slots = state
    if state:
        vars(target).update(state)
    for name, value in (slots or {}).items():
        setattr(target, name, value)


_U = Unpickler
_OPERATIONS: dict[bytes, Callable[[Unpickler], object]] = {
    b"\x80": lambda u: u._take(1),  # the protocol
    b"\x95": lambda u: u._take(8),  # a frame
    b"c": _U._global,
    b"\x93": _U._stack_global,
    b"R": _U._reduce,
    b"\x81": _U._new_object,
    b"b": _U._build,
    b"Q": _U._reference,
    b"a": lambda u: u._extend([u._stack.pop()]),
    b"e": lambda u: u._extend(u._pop_mark()),
    b"s": lambda u: u._set_items(u._top(2)),
    b"u": lambda u: u._set_items(u._pop_mark()),
    b"\x90": _U._add_items,
    b"(": _U._mark,
    b"0": _U._pop,
    b"t": lambda u: u._tuple(u._pop_mark()),
    b"\x85": lambda u: u._tuple(u._top(1)),
    b"\x86": lambda u: u._tuple(u._top(2)),
    b"\x87": lambda u: u._tuple(u._top(3)),
    b")": lambda u: u._push(()),
    b"]": lambda u: u._container([]),
    b"}": lambda u: u._container({}),
    b"\x8f": lambda u: u._container(set()),
    b"N": lambda u: u._push(None),
    b"\x88": lambda u: u._push(True),
    b"\x89": lambda u: u._push(False),
    b"J": lambda u: u._push(u._number("<i", 4)),
    b"K": lambda u: u._push(u._number("<B", 1)),
    b"M": lambda u: u._push(u._number("<H", 2)),
    b"G": lambda u: u._push(u._number(">d", 8)),
    b"\x8a": lambda u: u._push(decode_long(u._take(u._number("<B", 1)))),
    b"X": lambda u: u._push(str(u._take(u._number("<I", 4)), "utf-8", "surrogatepass")),
    b"\x8c": lambda u: u._push(str(u._take(u._number("<B", 1)), "utf-8", "surrogatepass")),
    b"U": lambda u: u._push(u._take(u._number("<B", 1)).decode("utf-8")),
    b"C": lambda u: u._push(u._take(u._number("<B", 1))),
    b"B": lambda u: u._push(u._take(u._number("<I", 4))),
    b"q": lambda u: u._put(u._number("<B", 1)),
    b"r": lambda u: u._put(u._number("<I", 4)),
    b"\x94": lambda u: u._put(len(u._memo)),
    b"h": lambda u: u._get(u._number("<B", 1)),
    b"j": lambda u: u._get(u._number("<I", 4)),
}
"""By its byte, what an instruction does; others are refused."""
