"""The house: which module may import which, read from the sources."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import featviz

PACKAGE = Path(featviz.__file__).parent
FILES = {
    ".".join(("featviz", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
        ".__init__"
    ): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text("utf-8")) for name, path in FILES.items()}

STAGES = [
    "layout",
    "arrangement",
    "limits",
    "stopping",
    "targets",
    "gradient_rules",
    "interventions",
    "stats",
    "scale",
    "palette",
    "mosaic",
    "png",
    "store",
    "background",
    "images",
    "select",
    "hooks",
    "borrowed",
    "meter",
    "filters",
    "activations",
    "calls",
    "channels",
    "charts",
    "findings",
    "follows",
    "gates",
    "junit",
    "staging",
    "apart",
    "targets",
    "interventions",
    "gradient_rules",
    "prediction",
    "flow",
    "diff.comparing",
    "diff.readback",
    "ordering",
    "reduction",
    "overlay",
    "stamps",
    "figures",
    "boards",
]
TORCHLESS = [
    "store",
    "records",
    "errors",
    "select",
    "png",
    "mosaic",
    "palette",
    "images",
    "charts",
    "findings",
    "gates",
    "junit",
    "staging",
    "ownership",
    "writing",
    "flow",
    "rundir",
    *(name.removeprefix("featviz.") for name in FILES if name.startswith("featviz.rundir.")),
    "merge",
    "diff",
    *(name.removeprefix("featviz.") for name in FILES if name.startswith("featviz.diff.")),
    "sheet",
    *(name.removeprefix("featviz.") for name in FILES if name.startswith("featviz.report")),
    "overlay",
    "stamps",
    "figures",
]
BELOW = {
    "featviz.errors",
    "featviz.files",
    "featviz.ownership",
    "featviz.text",
    "featviz.writing",
    "featviz.naming",
    *(name for name in FILES if name.startswith("featviz.records")),
}
COMMANDS = [name for name in FILES if name.startswith("featviz.commands.")]
ABOVE = ("featviz.cli", "featviz.__main__", *COMMANDS)
MODELS = [name for name in FILES if name.startswith("featviz.models")]


def _nodes(tree: ast.AST, typing: bool) -> Iterator[ast.AST]:
    """All nodes, without those of `if TYPE_CHECKING:` unless asked for."""
    for node in ast.iter_child_nodes(tree):
        guard = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        if guard and not typing:
            continue
        yield node
        yield from _nodes(node, typing)


def imported(name: str, typing: bool = True) -> set[str]:
    """Full names of all modules that a module imports, at the top or inside a function."""
    found = set()
    for node in _nodes(TREES[name], typing):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{name}: relative import"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                own_module = full in FILES or (node.module, alias.name) == ("matplotlib", "pyplot")
                found.add(full if own_module else node.module)
    return found


def own(name: str, typing: bool = True) -> set[str]:
    """The modules of featviz among them; `from featviz import __version__` is none."""
    return {m for m in imported(name, typing) if m.startswith("featviz.")}


def roots(name: str) -> set[str]:
    """Top-level packages that a module imports."""
    return {module.split(".")[0] for module in imported(name)}


def test_the_sources_are_seen() -> None:
    """The reader below finds the package and the imports that are known to be there."""
    assert {"featviz.cli", "featviz.pipeline", "featviz.models.load"} <= set(FILES)
    assert "featviz.pipeline" in own("featviz.commands.run")
    assert "featviz.models.zoo" in own("featviz.models.sources")
    assert "torch" in roots("featviz.hooks")
    assert set(STAGES) <= {name.removeprefix("featviz.") for name in FILES}


def test_no_import_cycles() -> None:
    """Imports go one way, those inside functions included."""
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for other in sorted(own(name, typing=False) & set(FILES)):
                visit(other, (*trail, name))
            done.add(name)

    for name in FILES:
        if name not in ("featviz", "featviz.models"):
            visit(name, ())


@pytest.mark.parametrize("stage", STAGES)
def test_stages_import_no_other_stage(stage: str) -> None:
    """A stage knows the records and the errors, and only the story files compose stages."""
    inside = {name for name in FILES if name.startswith(f"featviz.{stage}.")}
    for name in {f"featviz.{stage}", *inside}:
        assert own(name) <= BELOW | inside, name


@pytest.mark.parametrize("name", [n for n in FILES if n not in ABOVE])
def test_click_stays_in_the_command_line(name: str) -> None:
    """What is below the commands knows nothing of click."""
    assert "click" not in roots(name)


@pytest.mark.parametrize("name", TORCHLESS)
def test_what_reads_a_run_directory_needs_no_torch(name: str) -> None:
    """Neither torch nor torchvision, not even inside a function."""
    assert not roots(f"featviz.{name}") & {"torch", "torchvision"}


@pytest.mark.parametrize("name", FILES)
def test_pyplot_is_used_nowhere(name: str) -> None:
    """matplotlib gives colours; its global state and windows stay out."""
    assert not [module for module in imported(name) if module.startswith("matplotlib.pyplot")]


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_have_no_tensors(name: str) -> None:
    """A command parses, calls and echoes."""
    assert not roots(name) & {"torch", "torchvision", "numpy"}


@pytest.mark.parametrize("name", [n for n in FILES if n not in ABOVE])
def test_nothing_below_knows_the_command_line(name: str) -> None:
    """Neither the group nor a command is imported from below."""
    assert not own(name) & {"featviz.cli", "featviz.commands", *COMMANDS}


@pytest.mark.parametrize("name", MODELS)
def test_loading_knows_nothing_of_running(name: str) -> None:
    """Under models/ nothing imports the story of run."""
    assert not own(name) & {"featviz.pipeline", "featviz.probe", "featviz.listing", "featviz.api"}


@pytest.mark.parametrize("name", sorted(BELOW))
def test_the_ground_floor_imports_nothing_of_the_package(name: str) -> None:
    """Records, errors and the files of others know nobody but each other."""
    assert own(name) <= BELOW


def _public(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            if node.name.startswith("_"):
                continue
            yield f"{prefix}.{node.name}", node
            if isinstance(node, ast.ClassDef):
                yield from _public(node.body, f"{prefix}.{node.name}")


@pytest.mark.parametrize("name", FILES)
def test_everything_public_says_what_it_is(name: str) -> None:
    """The module and every public function, class and method have a docstring."""
    things = [(name, TREES[name]), *_public(TREES[name].body, name)]
    assert [where for where, node in things if not ast.get_docstring(node)] == []  # type: ignore[arg-type]
