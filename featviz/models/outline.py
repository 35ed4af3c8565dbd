"""What a file of Python code defines, read from its syntax tree: nothing of it runs."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from featviz.errors import FileError, LoadError, UsageError
from featviz.files import read_text
from featviz.text import listed, quoted

_LARGEST = 2**20
"""Bytes that are read of a file of code, and of all that are looked through for a hint: to parse
them takes about a second."""

_MOST_FILES = 200
"""Files of code that are read of a folder."""

_SHOWN = 8
"""Names that a message lists before it says how many more there are."""

_GIVES_MODULES = (
    "torch.nn.",
    "torch.hub.load",
    "torchvision.models.",
    "timm.create_model",
    "timm.models.",
    "transformers.",
    "segmentation_models_pytorch.",
    "monai.networks.",
    "open_clip.create_model",
)
"""Names that are, or make, modules; also those of which this is the beginning."""

_NO_MODULES = ("torch.nn.functional.", "torch.nn.init.", "torch.nn.utils.", "torch.nn.Parameter")

_SAME_MODULE = ("to", "eval", "train", "cuda", "cpu", "half", "float", "requires_grad_")
"""Methods of a module that give the module itself."""

_REGISTER = ("register_buffer", "register_parameter", "register_module", "add_module")

_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class ModuleMaker:
    """A class or function that gives a module."""

    name: str
    needs: tuple[str, ...] = ()
    """Arguments without a default."""
    takes: tuple[str, ...] = ()
    """All arguments that have a name."""
    parts: frozenset[str] = frozenset()
    """Attributes that a class's __init__ sets; its modules and parameters are among them."""

    def words(self, file: str) -> str:
        """How MODEL names it: `net.py:Net (--model-arg depth=...)`."""
        needs = " ".join(f"--model-arg {name}=..." for name in self.needs)
        return f"{file}:{self.name}" + (f" ({needs})" if needs else "")


def makers(path: Path) -> list[ModuleMaker]:
    """The classes and functions at the top of a file that give a module, those first that no
    other of them uses.

    A class counts if it has a forward, or derives from a module of torch, torchvision, timm or the
    file; a function if it returns what one of these gives.

    Raises:
        FileError: it cannot be read, is larger than a megabyte, or is no Python code.
    """
    outline = Outline(parsed(path))
    nodes = [node for node in outline.tree.body if outline.gives_module(node)]
    used = {
        name.id
        for node in nodes
        for name in ast.walk(node)
        if isinstance(name, ast.Name) and name.id != getattr(node, "name", None)
    }
    public = [n for n in nodes if isinstance(n, _Definition) and not n.name.startswith("_")]
    public.sort(key=lambda node: node.name in used)
    return [outline.maker(node) for node in public]


def defining(name: str, folders: Iterable[Path]) -> list[Path]:
    """The files of code in these folders that define this class or function at the top."""
    return [
        path
        for path in _code_in(folders)
        if any(isinstance(n, _Definition) and n.name == name for n in _body(path))
    ]


def models_in(folders: Iterable[Path]) -> list[tuple[Path, ModuleMaker]]:
    """The classes and functions that give a module, in the files of code in these folders."""
    classes: list[tuple[Path, ModuleMaker]] = []
    for path in _code_in(folders):
        try:
            classes += [(path, maker) for maker in makers(path)]
        except FileError:
            continue
    return classes


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
        return UsageError(f"{what}{quoted(spec)}:NAME", _why_none(Path(spec)))
    again = (spec, f"{spec}:{choices[0].name}")
    shown = listed([maker.words(spec) for maker in choices], _SHOWN)
    needs = tuple(f"--model-arg={name}=..." for name in choices[0].needs)
    return UsageError(f"{what}{quoted(spec)}:CLASS", f"it has {shown}", replace=again, add=needs)


def _why_none(path: Path) -> str:
    if not path.stat().st_size:
        return "the file is empty"
    return "none of its classes and functions is seen to give one"


class Outline:
    """The definitions at the top of a file, and what its imported names stand for."""

    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.definitions = {n.name: n for n in tree.body if isinstance(n, _Definition)}
        self._imported = dict(_imports(tree))
        self._asked: dict[str, bool] = {}

    def gives_module(self, node: ast.AST) -> bool:
        """Whether a definition is a class of modules, or a function that returns a module."""
        if not isinstance(node, _Definition):
            return False
        if node.name not in self._asked:
            self._asked[node.name] = False  # while it is found out: it may refer to itself
            self._asked[node.name] = (
                self._derives(node) if isinstance(node, ast.ClassDef) else self._returns(node)
            )
        return self._asked[node.name]

    def maker(self, node: _Definition) -> ModuleMaker:
        """What is known of a class or function that gives a module."""
        if not isinstance(node, ast.ClassDef):
            return ModuleMaker(node.name, _required(node), _named(node))
        init, parts = self.init(node), frozenset(self._parts(node))
        if init is None:
            return ModuleMaker(node.name, parts=parts)
        return ModuleMaker(node.name, _required(init)[1:], _named(init)[1:], parts)

    def init(self, node: ast.ClassDef) -> _Function | None:
        """The __init__ of a class, or of the first of its bases in the file that has one."""
        constructor = next((n for n in _methods(node) if n.name == "__init__"), None)
        if constructor is not None:
            return constructor
        bases = (self.definitions.get(_dotted(base)) for base in node.bases)
        inits = (self.init(b) for b in bases if isinstance(b, ast.ClassDef) and b is not node)
        return next((init for init in inits if init is not None), None)

    def _parts(self, node: ast.ClassDef) -> Iterator[str]:
        """Attributes that the __init__ of a class, or of its bases in the file, sets."""
        for method in _methods(node):
            if method.name == "__init__":
                arguments = [*method.args.posonlyargs, *method.args.args]
                for part in ast.walk(method) if arguments else ():
                    yield from _set_by(part, arguments[0].arg)
        for base in (self.definitions.get(_dotted(base)) for base in node.bases):
            if isinstance(base, ast.ClassDef) and base is not node:
                yield from self._parts(base)

    def _derives(self, node: ast.ClassDef) -> bool:
        names = [self._full(_dotted(base)) for base in node.bases]
        if any(name.endswith((".Function", "DataModule")) for name in names):
            return False
        forward = any(method.name == "forward" for method in _methods(node))
        return (bool(names) and forward) or any(self._is_maker(name) for name in names)

    def _returns(self, node: _Function) -> bool:
        if node.returns is not None and self._is_maker(self._full(_dotted(node.returns))):
            return True
        inside = list(_own_statements(node))
        made = {
            target.id
            for n in inside
            if isinstance(n, ast.Assign) and self._makes(n.value, set())
            for target in n.targets
            if isinstance(target, ast.Name)
        }
        return any(isinstance(n, ast.Return) and self._makes(n.value, made) for n in inside)

    def _makes(self, value: ast.expr | None, made: set[str]) -> bool:
        """Whether an expression gives a module; `made` are variables that hold one."""
        if isinstance(value, ast.Name):
            return value.id in made
        if not isinstance(value, ast.Call):
            return False
        if isinstance(value.func, ast.Attribute) and value.func.attr in _SAME_MODULE:
            return self._makes(value.func.value, made)
        return self._is_maker(self._full(_dotted(value.func)))

    def _is_maker(self, name: str) -> bool:
        if name in self.definitions:
            return self.gives_module(self.definitions[name])
        if name.startswith(_NO_MODULES):
            return False
        return name.startswith(_GIVES_MODULES) or name.rpartition(".")[2].endswith("Module")

    def _full(self, dotted: str) -> str:
        first, dot, rest = dotted.partition(".")
        return f"{self._imported.get(first, first)}{dot}{rest}"


_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file of code.

    Raises:
        FileError: it cannot be read, is larger than a megabyte, or is no Python code.
    """
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
            if path.is_file() and (real := path.resolve()) not in seen:
                seen.add(real)
                size = path.stat().st_size
                if size <= left:
                    left -= size
                    yield path


def _body(path: Path) -> list[ast.stmt]:
    try:
        return parsed(path).body
    except (FileError, OSError):
        return []


def _imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            for name in node.names:
                yield (
                    name.asname or name.name.partition(".")[0],
                    (name.name if name.asname else name.name.partition(".")[0]),
                )
        elif isinstance(node, ast.ImportFrom):
            for name in node.names:
                yield name.asname or name.name, f"{node.module or ''}.{name.name}"


def _dotted(node: ast.expr) -> str:
    """`nn.Module` of an expression or of a quoted annotation; empty for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return f"{inner}.{node.attr}" if inner else ""
    return node.id if isinstance(node, ast.Name) else ""


def _methods(node: ast.ClassDef) -> list[_Function]:
    return [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]


def _set_by(node: ast.AST, self: str) -> Iterator[str]:
    """Attributes that a statement or call sets; `self.register_buffer("x", ...)` sets one, too.

    Args:
        self: what the method calls its object.
    """
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    elif isinstance(node, ast.Call) and node.args and _dotted(node.func) in _registers(self):
        yield _dotted(node.args[0])
    for target in targets:
        if (name := _dotted(target)).startswith(f"{self}."):
            yield name.removeprefix(f"{self}.")


def _registers(self: str) -> list[str]:
    return [f"{self}.{name}" for name in _REGISTER]


def _required(node: _Function) -> tuple[str, ...]:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    free = positional[: len(positional) - len(arguments.defaults)]
    keywords = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return tuple(a.arg for a in (*free, *(a for a, default in keywords if default is None)))


def _named(node: _Function) -> tuple[str, ...]:
    arguments = node.args
    return tuple(a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))


def _own_statements(node: _Function) -> Iterator[ast.AST]:
    """What is inside a function, but not inside functions and classes that it defines."""
    waiting: list[ast.AST] = list(node.body)
    while waiting:
        part = waiting.pop()
        yield part
        if not isinstance(part, _Definition):
            waiting += ast.iter_child_nodes(part)
