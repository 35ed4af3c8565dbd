"""Pickles read as inert stand-ins: what a file names is noted, never imported, made or
called.

A pickle is a program for a machine with a stack. Here the machine is pickle's own
reader in Python, in which every instruction that would touch something real makes a
note instead:

    instructions                          pickle                          here
    GLOBAL, STACK_GLOBAL                  imports what is named           Name
    REDUCE, NEWOBJ, NEWOBJ_EX, OBJ, INST  calls it                        Made(maker, arguments)
    EMPTY_DICT, DICT, EMPTY_SET, ...      a dict or set, hashing keys     Made, with pairs or items
    BUILD                                 __setstate__ or __dict__        one of Made.states
    APPENDS, ADDITEMS, SETITEMS           methods of the object           Made.items, Made.pairs
    BINPERSID                             torch reads numbers of tensors  Storage around them
    EXT1, EXT2, EXT4, PERSID              looks into a registry           an error

Numbers, texts, bytes, lists and tuples are what they are. So nothing on the stack can
be called, and the order of instructions makes no difference: `models.rebuild` makes
values of the notes afterwards. (The reader in C is no basis: it takes classes of the
EXT registry unseen, and one instruction makes it fill 64 GB.)"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, ClassVar

import torch

_RENAMED_MODULES = {
    "__builtin__": "builtins",  # of Python 2
    "copy_reg": "copyreg",
    "numpy.core.multiarray": "numpy._core.multiarray",  # of numpy 1
    "numpy.core.numeric": "numpy._core.numeric",
}
_UNTYPED_STORAGE = "torch.storage.UntypedStorage"


class Name:
    """The name of a class or function in a file: `torch.nn.modules.linear.Linear`."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        """The name with its module."""
        self.text = text


@dataclass(slots=True, eq=False)
class Made:
    """An object that a file would make by a call, and what it would put into the object."""

    maker: Name
    """What would be called."""
    arguments: tuple[Any, ...] = ()
    """The arguments of the call."""
    states: list[Any] = field(default_factory=list)
    """What each BUILD would hand to the object's `__setstate__`."""
    items: list[Any] = field(default_factory=list)
    """What would be appended or added to it."""
    pairs: list[tuple[Any, Any]] = field(default_factory=list)
    """What would be set in it, as in a dict: keys and values."""

    def append(self, item: Any) -> None:
        """Note an item: for the instructions APPEND, APPENDS and ADDITEMS."""
        self.items.append(item)

    add = append

    def __setitem__(self, key: Any, value: Any) -> None:
        """Note a pair: for the instructions SETITEM and SETITEMS."""
        self.pairs.append((key, value))


@dataclass(slots=True, eq=False)
class Storage:
    """The storage that has the numbers of a tensor."""

    data: Any
    """A torch.TypedStorage."""


class Unpickler(pickle._Unpickler):
    """Reads a pickle without making anything of it."""

    dispatch: ClassVar[dict[int, Any]] = pickle._Unpickler.dispatch.copy()
    stack: list[Any]
    append: Any
    read: Any
    pop_mark: Any

    def __init__(self, file: io.BytesIO, **options: Any) -> None:
        """Read from `file`; the options are those of pickle's own."""
        super().__init__(file, **options)
        self.size = file.getbuffer().nbytes

    def load(self) -> Any:
        """Read the pickle, and return its value, made of stand-ins.

        Raises:
            Exception: Of any class, where the file is no pickle, or a damaged one.
        """
        try:
            return super().load()
        # an unknown instruction, or one that wants more than is on the stack
        except (KeyError, IndexError) as error:
            raise pickle.UnpicklingError("it is no pickle, or a damaged one") from error

    def find_class(self, module: str, name: str) -> Any:
        """The Name of a class or function; nothing is imported. For the name of a storage
        this is not called: torch's subclass of this unpickler makes a StorageType of it."""
        return Name(f"{_RENAMED_MODULES.get(module, module)}.{name}")

    def _instantiate(self, maker: Any, arguments: Sequence[Any]) -> None:
        """Note a call. pickle itself calls this method for INST and OBJ; here all calls of a
        file come to it."""
        if type(maker) is not Name:
            maker = Name("what another call returns")
        self.append(Made(maker, tuple(arguments)))

    def _call(self) -> None:
        """REDUCE, NEWOBJ: note a call. Its arguments are on top of the stack, and below them
        is the function or class."""
        arguments = self.stack.pop()
        if type(arguments) is not tuple:
            raise pickle.UnpicklingError("the arguments of a call are no tuple")
        self._instantiate(self.stack.pop(), arguments)

    def _call_with_keywords(self) -> None:
        """NEWOBJ_EX: note a call. Its keywords, on top of the stack, are dropped, since
        `models.rebuild` makes no value that needs them."""
        self.stack.pop()
        self._call()

    def _build(self) -> None:
        """BUILD: note a state, on top of the stack, for the object below it."""
        state = self.stack.pop()
        if type(self.stack[-1]) is not Made:
            raise pickle.UnpicklingError("a state for what has none")
        self.stack[-1].states.append(state)

    def _empty_dict(self) -> None:
        """EMPTY_DICT: a new dict."""
        self.append(Made(Name("builtins.dict")))

    def _dict(self) -> None:
        """DICT, of protocols 0 and 1: a new dict. It is empty, since pickle adds the items
        by later instructions."""
        self.pop_mark()
        self._empty_dict()

    def _empty_set(self) -> None:
        """EMPTY_SET: a new set."""
        self.append(Made(Name("builtins.set")))

    def _frozenset(self) -> None:
        """FROZENSET: a new frozenset of all that is on the stack behind the mark."""
        # pop_mark replaces `self.stack`, so `append` comes after it
        items = self.pop_mark()
        self.append(Made(Name("builtins.frozenset"), (items,)))

    def _bytearray(self) -> None:
        """BYTEARRAY8: bytes from the file, instead of a new bytearray."""
        length = int.from_bytes(self.read(8), "little")
        # pickle's own method would allocate memory for any length that the file names
        self.append(self.read(length))

    def _persistent(self) -> None:
        """BINPERSID: replace a persistent id by the storage of a tensor.

        The id is checked before torch's `persistent_load` gets it, which would look up
        the source code of a class, and allocate any length that the file names.

        Raises:
            pickle.UnpicklingError: Where the id is none that `torch.save` writes, or the
                numbers of the storage are not in the file.
        """
        match self.stack.pop():
            case ("module", Name() as name, *_):
                self.append(name)  # before torch 1.6: a class, and its source code
            case ("storage", marker, str(key), str(device), int(length), *view) if (
                view in ([], [None])
            ):
                # Before torch 1.6, which wrote `view` (always None), the bytes come after
                # the pickle: a number has at least one, and the file has `size` of them.
                # In zip files torch compares the length with the bytes that are there.
                if length < 0 or (view and length > self.size):
                    raise pickle.UnpicklingError(
                        f"a storage of {length:,} numbers, which are not there"
                    )
                if type(marker) is Name and marker.text == _UNTYPED_STORAGE:
                    marker = torch.UntypedStorage
                elif type(marker) is not torch.serialization.StorageType:
                    raise pickle.UnpicklingError("a storage of no type of numbers")
                identity = ("storage", marker, key, device, length, *view)
                self.append(Storage(self.persistent_load(identity)))
            case _:
                raise pickle.UnpicklingError(
                    "a persistent id that is none of torch.save's"
                )

    def _refuse(self) -> None:
        """PERSID, EXT1, EXT2, EXT4: refuse."""
        raise pickle.UnpicklingError("an instruction that looks into a registry")

    dispatch |= {
        pickle.REDUCE[0]: _call,
        pickle.NEWOBJ[0]: _call,
        pickle.NEWOBJ_EX[0]: _call_with_keywords,
        pickle.BUILD[0]: _build,
        pickle.EMPTY_DICT[0]: _empty_dict,
        pickle.DICT[0]: _dict,
        pickle.EMPTY_SET[0]: _empty_set,
        pickle.FROZENSET[0]: _frozenset,
        pickle.BYTEARRAY8[0]: _bytearray,
        pickle.BINPERSID[0]: _persistent,
        pickle.PERSID[0]: _refuse,
        pickle.EXT1[0]: _refuse,
        pickle.EXT2[0]: _refuse,
        pickle.EXT4[0]: _refuse,
    }


class Inert:
    """Stands in for the module `pickle` in torch.load."""

    Unpickler = Unpickler

    @staticmethod
    def load(file: io.BytesIO, **options: Any) -> Any:
        """Read one pickle. In a file of torch before 1.6, torch calls this for the pickles
        before and behind the content."""
        return Unpickler(file, **options).load()


def read(file: BinaryIO) -> Any:
    """Read a file of torch.save, of any format but tar, or a plain pickle.

    Args:
        file: The file, open for reading, at its start. Its descriptor is not used.

    Returns:
        Numbers, texts, lists and tuples, and Name, Made and Storage for everything else.

    Raises:
        Exception: Of any class, where the file is broken or is TorchScript.
    """
    is_zip = file.read(4) == b"PK\3\4"
    file.seek(0)
    if not is_zip:
        # A copy in memory has no descriptor. If a file has one, torch first tries to unpack
        # it as tar; a tar file can make links, and open what they lead to.
        return read_pickle(file.read())
    names = torch._C.PyTorchFileReader(file).get_all_records()
    if "constants.pkl" in names:  # torch.load would pass the file to torch.jit.load
        raise pickle.UnpicklingError("it is TorchScript")
    file.seek(0)
    return _load(file)


def read_pickle(data: bytes) -> Any:
    """Read a plain pickle, or a file of torch before 1.6, which is several pickles in a
    row. Returns and raises what `read` does."""
    file = io.BytesIO(data)
    first = Inert.load(file, encoding="latin1")
    # a file of torch before 1.6 begins with a pickle of this number
    if type(first) is not int or first != torch.serialization.MAGIC_NUMBER:
        return first
    file.seek(0)
    return _load(file)


def _load(file: BinaryIO) -> Any:
    """Read a file of torch.save: torch reads the storages, Inert the pickles."""
    return torch.load(file, "cpu", pickle_module=Inert, weights_only=False)
