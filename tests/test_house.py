"""The house: which module may import which, read from the sources."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pytest

import featviz

PACKAGE = Path(featviz.__file__).parent


def name_of(path: Path) -> str:
    """`featviz.drawing.grid` of its file, `featviz.cli` of `cli/__init__.py`."""
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


FILES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}

FLOORS = (
    "__init__ __main__ lightning ray transformers",
    "cli api",
    "report",
    "audit diff exemplars inspection sheets",
    "run",
    "drawing gradients",
    "rundir layout",
    "hooks models images",
    "options",
    "records errors files text version",
)
"""From the roof down: a file imports from its own wing and from floors below. On the
ground, which is the last line, each may know the others."""

FLOOR = {wing: floor for floor, wings in enumerate(FLOORS) for wing in wings.split()}
GROUND = len(FLOORS) - 1


@functools.cache
def trees() -> dict[str, ast.Module]:
    """The syntax of each module. Processes that run other tests need not parse it."""
    return {name: ast.parse(path.read_text("utf-8")) for name, path in FILES.items()}


def wing(name: str) -> str:
    """`drawing` of `featviz.drawing.grid`."""
    return (*name.split("."), "__init__")[1]


def _inside(*wings: str) -> list[str]:
    return [name for name in FILES if wing(name) in wings]


DRAWING = "animation channels colormap figure grid normalize page picture place_tiles"
TORCHLESS = [
    *_inside("rundir", "report", "diff", "sheets", "options", *FLOORS[GROUND].split()),
    *(f"featviz.drawing.{name}" for name in DRAWING.split()),
    "featviz.drawing.readback",
    "featviz.drawing.sheet",
    "featviz.drawing.vector",
    "featviz.audit.findings",
    "featviz.audit.gates",
    "featviz.hooks.selectors",
    "featviz.images.arrays",
    "featviz.images.decode",
    "featviz.images.find",
]
COMMANDS = [f"featviz.cli.{name}" for name in ("run", "inspect", "report", "sheet")]


def _nodes(tree: ast.AST, typing: bool) -> Iterator[ast.AST]:
    """All nodes, without those of `if TYPE_CHECKING:` unless asked for."""
    for node in ast.iter_child_nodes(tree):
        is_guard = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if is_guard and not typing:
            continue
        yield node
        yield from _nodes(node, typing)


@functools.cache
def imported(name: str, typing: bool = True) -> set[str]:
    """Full names of all modules that a module imports, at the top or inside a function."""
    modules = set()
    for node in _nodes(trees()[name], typing):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= _modules_of(node)
    return modules


def _modules_of(statement: ast.ImportFrom) -> set[str]:
    """`from featviz.drawing import grid` imports `featviz.drawing.grid`, and `from
    featviz.drawing.grid import draw` the same."""
    package = statement.module
    assert package is not None, "a relative import"
    names = {f"{package}.{alias.name}" for alias in statement.names}
    modules = names & {*FILES, "matplotlib.pyplot"}
    return modules if modules == names else {package, *modules}


def of_featviz(name: str, typing: bool = True) -> set[str]:
    """The modules of featviz among them."""
    modules = imported(name, typing)
    return {module for module in modules if module.split(".")[0] == "featviz"}


def roots(name: str) -> set[str]:
    """Top-level packages that a module imports."""
    return {module.split(".")[0] for module in imported(name)}


def test_the_sources_are_seen() -> None:
    """The reader above finds the package and the imports that are known to be there."""
    assert {"featviz.cli", "featviz.run.run", "featviz.models.load"} <= set(FILES)
    assert "featviz.run.run" in of_featviz("featviz.cli.run")
    assert "featviz.models.weights" in of_featviz("featviz.models.load")
    assert "torch" in roots("featviz.hooks.capture")
    assert set(TORCHLESS) <= set(FILES)


def _goes_down(name: str, other: str) -> bool:
    floor = FLOOR[wing(name)]
    below = FLOOR[wing(other)]
    return below > floor or floor == GROUND == below or wing(other) == wing(name)


@pytest.mark.medium
def test_imports_go_down() -> None:
    """A file imports from its own wing and from floors below; no exceptions."""
    for name in FILES:
        upwards = [other for other in of_featviz(name) if not _goes_down(name, other)]
        assert upwards == [], name


def _with_packages(name: str) -> set[str]:
    """The modules that a module imports, and the packages whose own names it imports. A
    file of a package that imports another of its files imports no name of the
    package."""
    packages = {
        node.module
        for node in _nodes(trees()[name], typing=False)
        if isinstance(node, ast.ImportFrom) and node.module
        if not name.startswith(f"{node.module}.")
        or any(f"{node.module}.{alias.name}" not in FILES for alias in node.names)
    }
    return (of_featviz(name, typing=False) | packages) & set(FILES) - {name, "featviz"}


@pytest.mark.slow
def test_no_import_cycles() -> None:
    """Imports go one way inside a wing, too, those inside functions included.

    The package itself is left out: it imports `api` when one of its functions is used.
    """
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for other in sorted(_with_packages(name)):
                visit(other, (*trail, name))
            done.add(name)

    for name in FILES:
        visit(name, ())


def test_the_roof_is_low() -> None:
    """At most seven files stand beside the wings, and a door for each library that
    holds us."""
    doors = {"lightning.py", "ray.py", "transformers.py"}
    assert len({path.name for path in PACKAGE.iterdir() if path.is_file()} - doors) <= 7


@pytest.mark.medium
def test_no_class_name_stands_twice() -> None:
    """A class that is found by its name is the one that is meant."""
    names = Counter(
        node.name
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def _using(names: Iterable[str], *libraries: str) -> list[str]:
    return [name for name in names if roots(name) & set(libraries)]


@pytest.mark.medium
def test_click_stays_in_the_command_line() -> None:
    """What is below the commands knows nothing of click."""
    assert _using((n for n in FILES if wing(n) != "cli"), "click") == []


@pytest.mark.medium
def test_what_reads_a_run_directory_needs_no_torch() -> None:
    """It imports neither torch nor torchvision, not even inside a function."""
    assert _using(TORCHLESS, "torch", "torchvision") == []


@pytest.mark.medium
def test_pyplot_is_used_nowhere() -> None:
    """matplotlib gives colours; its global state and windows stay out."""
    for name in FILES:
        assert "matplotlib.pyplot" not in imported(name), name


def test_commands_have_no_tensors() -> None:
    """A command parses, calls and echoes."""
    assert _using(COMMANDS, "torch", "torchvision", "numpy") == []


def _public(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if node.name.startswith("_"):
                continue
            yield f"{prefix}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from _public(node.body, f"{prefix}.{node.name}")


def test_everything_public_says_what_it_is() -> None:
    """Each module and every public function, class and method have a docstring."""
    for name, tree in trees().items():
        for place, node in ((name, tree), *_public(tree.body, name)):
            assert ast.get_docstring(node), place


_WRITING_TEXT = """
    os.open os.replace os.rename os.unlink os.remove os.rmdir os.removedirs os.mkdir os.makedirs
    os.link os.symlink os.truncate os.chmod shutil.rmtree shutil.move shutil.copy
    shutil.copyfile shutil.copytree
"""
WRITING = set(_WRITING_TEXT.split())
PATH_METHODS = {
    "unlink",
    "rmdir",
    "mkdir",
    "touch",
    "rename",
    "write_text",
    "write_bytes",
    "symlink_to",
    "hardlink_to",
}
WRITERS = {
    "featviz.rundir.folder": "is the one way to write",
    "featviz.files": "opens for reading",
    "featviz.drawing.animation": "encodes a video into a file that is open",
    "featviz.cli": "opens the null device",
    "featviz.cli.output": "opens the null device",
    "featviz.rundir.locks": (
        "makes the folder for a lock, by filelock, which takes a path"
    ),
    "featviz.rundir.mirror": "copies a run from a store into a temporary folder",
    "featviz.rundir.write": "opens members of a zip that is open",
    "featviz.run.workers": "resets a counter of the system's, in /proc",
    "featviz.api.keywords": "makes temporary folders",
}


def _opens_for_writing(call: ast.Call) -> bool:
    """Whether a call of `open` has such a mode."""
    values = [*call.args[:2], *(keyword.value for keyword in call.keywords)]
    modes = {value.value for value in values if isinstance(value, ast.Constant)}
    return not modes.isdisjoint({"w", "wb", "x", "xb", "a", "ab", "r+b", "w+b"})


def _writes(node: ast.AST) -> bool:
    """Whether a call changes what is on the disk."""
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    method = name.rpartition(".")[2]
    if method == "open" and name not in WRITING:
        return _opens_for_writing(node)
    return name in WRITING or (method in PATH_METHODS and name != f"formatter.{method}")


@pytest.mark.medium
def test_results_are_written_by_folder_alone() -> None:
    """Opening for writing, renaming and removing occur in `rundir/folder.py`, and where
    no result is written; each of these has its reason."""
    writing = {
        name for name, tree in trees().items() if any(map(_writes, ast.walk(tree)))
    }
    assert writing == WRITERS.keys()


NAMED = re.compile(r"`([\w/]+\.py)`?: `?([\w.]+)`")
"""A thing of a file, as CONTRIBUTING.md names it: `run/visit.py: visit`."""


def test_what_contributing_names_is_there() -> None:
    """Each `FILE: NAME` and `FILE: CLASS.METHOD` of CONTRIBUTING.md is defined in that
    file."""
    text = (PACKAGE.parent / "CONTRIBUTING.md").read_text("utf-8")
    named = NAMED.findall(text)
    assert len(named) > 40
    missing = []
    for file, name in named:
        tree = ast.parse((PACKAGE / file).read_text("utf-8"))
        if not is_defined(tree, name.split(".")):
            missing.append(f"{file}: {name}")
    assert not missing


def is_defined(tree: ast.AST, path: Sequence[str]) -> bool:
    """Whether a module or class defines the first name, and that one the next."""
    if not path:
        return True
    first, *others = path
    for node in ast.iter_child_nodes(tree):
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        names = [getattr(target, "id", None) for target in targets]
        if first in (getattr(node, "name", None), *names):
            return is_defined(node, others)
    return False
