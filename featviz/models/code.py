"""The user's own code: what it defines, read from syntax trees without running it; to which of its
classes weights seem to belong; and its import, where MODEL or a trusted pickle names it."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from featviz.errors import FileError, LoadError, UsageError
from featviz.files import read_text, real
from featviz.text import listed, quoted

log = logging.getLogger(__name__)

SCRIPT = "__main__"
"""The module that Python calls a script in which a class was defined, whatever its file."""

HPARAMS = "hyper_parameters"
"""Where Lightning keeps the arguments of a class that called save_hyperparameters()."""

_LARGEST = 2**20
"""Bytes that are read of a file of code, and of all that are looked through for a hint: to parse
them takes about a second."""

_MOST_FILES = 200
"""Files of code that are read of a folder."""

_SHOWN = 8
"""Names that a message lists before it says how many more there are."""


# What files of code define --------------------------------------------------------------------


@dataclass(frozen=True)
class ModuleMaker:
    """A class of modules, or a function that returns one."""

    name: str
    needs: tuple[str, ...] = ()
    """Arguments without a default."""
    takes: tuple[str, ...] = ()
    parts: frozenset[str] = frozenset()
    """Names that a class uses; those of its modules and parameters are among them."""

    def words(self, file: str) -> str:
        """How MODEL names it: `net.py:Net (--model-arg depth=...)`."""
        needs = " ".join(f"--model-arg {name}=..." for name in self.needs)
        return f"{file}:{self.name}" + (f" ({needs})" if needs else "")


def makers(path: Path) -> list[ModuleMaker]:
    """The classes of modules at the top of a file, and the functions that return one; those first
    that no other of them uses.

    A class counts if it has a forward, or derives from a Module, a Sequential or such a class of
    the file; a function if it returns such a class's object, or says so.

    Raises:
        FileError: it cannot be read, is larger than a megabyte, or is no Python code.
    """
    known: dict[str, ModuleMaker] = {}
    used: set[str] = set()
    for node in _parsed(path).body:
        if isinstance(node, ast.ClassDef) and _is_module(node, known):
            known[node.name] = _of_class(node, known)
        elif isinstance(node, ast.FunctionDef) and _returns_module(node, known):
            known[node.name] = _of_function(node)
        else:
            continue
        used |= {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} - {node.name}
    public = [maker for maker in known.values() if not maker.name.startswith("_")]
    return sorted(public, key=lambda maker: maker.name in used)


def models_in(*folders: Path) -> list[tuple[Path, ModuleMaker]]:
    """The classes and functions that make a module, in the files of code in these folders."""
    found: list[tuple[Path, ModuleMaker]] = []
    for path in _code_in(folders):
        try:
            found += [(path, maker) for maker in makers(path)]
        except FileError:
            continue
    return found


def which_of(spec: str, option: str = "MODEL") -> UsageError | LoadError:
    """The error for a file of code that is named without one of its classes or functions.

    Args:
        option: where it is named, for the message.
    """
    try:
        choices = makers(Path(spec))
    except FileError as error:
        return LoadError(error.message, error.hint)
    what = f"{option} {spec!r} is code: name the class or function that makes the model, "
    if not choices:
        return UsageError(f"{what}{quoted(spec)}:NAME", "no class of modules is seen in it")
    again = (spec, f"{spec}:{choices[0].name}")
    shown = listed([maker.words(spec) for maker in choices], _SHOWN)
    needs = tuple(f"--model-arg={name}=..." for name in choices[0].needs)
    return UsageError(f"{what}{quoted(spec)}:CLASS", f"it has {shown}", replace=again, add=needs)


def _parsed(path: Path) -> ast.Module:
    try:
        return ast.parse(read_text(path, _LARGEST))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        words = quoted(str(getattr(error, "msg", error)) or type(error).__name__)
        raise FileError(f"{quoted(str(path))}{line} is no Python code: {words}") from error


def _code_in(folders: Iterable[Path]) -> Iterator[Path]:
    """The files of code in these folders, as far as they are few and small."""
    seen: set[Path] = set()
    left = _LARGEST
    for folder in folders:
        for path in sorted(folder.glob("*.py"))[:_MOST_FILES]:
            if path.is_file() and (place := real(path)) not in seen:
                seen.add(place)
                if (size := path.stat().st_size) <= left:
                    left -= size
                    yield path


def _is_module(node: ast.ClassDef, known: Mapping[str, ModuleMaker]) -> bool:
    bases = [_dotted(base) for base in node.bases]
    if any(base.endswith(("Function", "DataModule")) for base in bases):
        return False
    derived = any(b in known or b.endswith(("Module", "Sequential")) for b in bases)
    methods = [n.name for n in node.body if isinstance(n, ast.FunctionDef)]
    return derived or (bool(bases) and "forward" in methods)


def _returns_module(node: ast.FunctionDef, known: Mapping[str, ModuleMaker]) -> bool:
    def makes(value: ast.expr | None) -> bool:
        return isinstance(value, ast.Call) and _dotted(value.func) in known

    inside = [*ast.walk(node)]
    targets = [n.targets for n in inside if isinstance(n, ast.Assign) and makes(n.value)]
    made = {_dotted(target) for several in targets for target in several}
    returned = [n.value for n in inside if isinstance(n, ast.Return)]
    return _dotted(node.returns).endswith("Module") or any(
        makes(value) or (isinstance(value, ast.Name) and value.id in made) for value in returned
    )


def _of_class(node: ast.ClassDef, known: Mapping[str, ModuleMaker]) -> ModuleMaker:
    bases = [known[base] for base in map(_dotted, node.bases) if base in known]
    names = [
        part.attr if isinstance(part, ast.Attribute) else part.value
        for part in ast.walk(node)
        if isinstance(part, (ast.Attribute, ast.Constant))  # register_buffer("mean", ...), too
    ]
    parts = frozenset(name for name in names if isinstance(name, str))
    parts = parts.union(*(base.parts for base in bases))
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            init = _of_function(method)
            return ModuleMaker(node.name, init.needs[1:], init.takes[1:], parts)
    return replace(bases[0] if bases else ModuleMaker(""), name=node.name, parts=parts)


def _of_function(node: ast.FunctionDef) -> ModuleMaker:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    free = positional[: len(positional) - len(arguments.defaults)]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    needs = [*free, *(argument for argument, default in keywords if default is None)]
    takes = [*positional, *arguments.kwonlyargs]
    return ModuleMaker(node.name, tuple(a.arg for a in needs), tuple(a.arg for a in takes))


def _dotted(node: ast.expr | None) -> str:
    """`nn.Module` of an expression or of a quoted annotation; empty for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ast.unparse(node) if isinstance(node, (ast.Attribute, ast.Name)) else ""


# Weights of one's own classes -----------------------------------------------------------------


@dataclass(frozen=True)
class Nearby:
    """The classes of the code nearby that weights may belong to."""

    names: tuple[str, ...]
    """As `--arch` takes them, `net.py:Net`, the likeliest first."""
    add: tuple[str, ...]
    """The options with which the file is loaded into the first."""

    @property
    def words(self) -> str:
        """For people."""
        seen = listed(self.names, _SHOWN)
        return f"its tensors have names as in {seen}; {' '.join(self.add)} takes it"


def nearby(path: Path, content: Any, forms: Iterable[Iterable[str]]) -> Nearby | None:
    """The classes in the current folder or the file's folder that use all names at which the
    tensors are, those first that take most of the hyper_parameters; None where there is none.

    Args:
        content: what the file holds.
        forms: names of its tensors, with and without prefixes.
    """
    hparams = {str(name) for name in hparams_of(content)}
    tops = [{key.partition(".")[0] for key in keys} for keys in forms]
    fitting = [
        (f"{file}:{maker.name}", hparams.intersection(maker.takes))
        for file, maker in models_in(Path(), path.parent)
        if any(names <= maker.parts for names in tops)
    ]
    if not fitting:
        return None
    fitting.sort(key=lambda one: -len(one[1]))
    names = tuple(name for name, _ in fitting)
    passed = ("--model-arg", "@hparams") if fitting[0][1] else ()
    return Nearby(names, ("--arch", names[0], *passed))


def unknown_weights(path: Path, content: Any, forms: Iterable[Iterable[str]]) -> LoadError | None:
    """The error for weights of a class of one's own, with the class that they seem to belong to.

    Args:
        content, forms: as for `nearby`.

    Returns:
        None where it is no Lightning checkpoint, and no class is seen that fits.
    """
    names = [quoted(str(name)) for name in hparams_of(content)]
    known = isinstance(content, Mapping) and "pytorch-lightning_version" in content
    lightning = bool(names) or known
    fitting = nearby(path, content, forms)
    if fitting is None and not lightning:
        return None
    kind = "a Lightning checkpoint" if lightning else "a file of weights"
    message = f"{path.name} is {kind}, and does not say of which class"
    message += f"; it has {HPARAMS}: {listed(names, _SHOWN)}" if names else ""
    if fitting is None:
        more = " --model-arg @hparams" if names else ""
        return LoadError(message, f"name the class: --arch net.py:CLASS{more}")
    return LoadError(message, fitting.words, add=fitting.add)


def hparams_of(content: Any) -> Mapping[Any, Any]:
    """The hyper_parameters of a Lightning checkpoint; empty for anything else."""
    found = content.get(HPARAMS) if isinstance(content, Mapping) else None
    return found if isinstance(found, Mapping) else {}


# Imports --------------------------------------------------------------------------------------


@contextmanager
def importable(*folders: Path) -> Iterator[None]:
    """Let modules of the user's be imported: from the current folder first, as with `python -m`,
    and from `folders` where nothing installed has the name.

    What was imported may import more when it runs, so the folders stay on sys.path; where the
    import fails, sys.path is as it was.
    """
    before = list(sys.path)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    sys.path.extend(name for name in (str(real(f)) for f in folders) if name not in sys.path)
    try:
        yield
    except BaseException:
        sys.path[:] = before
        raise


def from_file(path: Path) -> ModuleType:
    """Run a file as a module of its own; two files of one name are two modules.

    Raises:
        BaseException: whatever the code raises; sys.path and sys.modules are then as before.
    """
    place = hashlib.sha256(os.fsencode(real(path))).hexdigest()[:12]
    name = f"featviz_user_{path.stem}_{place}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    known, before = sys.modules.get(name), list(sys.path)
    sys.modules[name] = module
    sys.path.insert(0, str(real(path.parent)))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.path[:] = before
        del sys.modules[name]
        if known is not None:
            sys.modules[name] = known
        raise
    return module


def from_script(name: str, folder: Path) -> Any:
    """A class or function that was defined in a script, from the one file of code in the current
    folder or in `folder` that defines it at the top. The file is imported once: its classes are the
    same for all that name them.

    Raises:
        AttributeError: no file there defines it, or several do.
        Exception: whatever the file raises when it is imported.
    """
    first, *rest = name.split(".")
    files = [path for path in _code_in([Path.cwd(), folder]) if _defines(path, first)]
    if len(files) != 1:
        names = ", ".join(path.name for path in files) or "no .py file"
        where = ", ".join(dict.fromkeys(str(real(place)) for place in (Path.cwd(), folder)))
        raise AttributeError(
            f"{name!r} was defined in a script, and {names} in {where} "
            f"{'each define it' if files else 'defines it'}"
        )
    log.info("%s: from %s, which is imported", name, files[0].name)
    known = [module for n, module in sys.modules.items() if n.startswith("featviz_user_")]
    same = (m for m in known if real(Path(str(m.__file__))) == real(files[0]))
    target: Any = getattr(next(same, None) or from_file(files[0]), first)
    for part in rest:
        target = getattr(target, part)
    return target


def _defines(path: Path, name: str) -> bool:
    try:
        body = _parsed(path).body
    except (FileError, OSError):
        return False
    kinds = (ast.ClassDef, ast.FunctionDef)
    return any(isinstance(node, kinds) and node.name == name for node in body)
