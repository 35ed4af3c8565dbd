"""The measure of the package's own code, on small pieces whose figures are counted by
hand."""

from __future__ import annotations

import ast
import operator
from pathlib import Path

import pytest
from syntax_figures import SyntaxFigures, measure, within

PACKED = '''"""Two functions."""
def spread(found, other):  # why it is done
    """Say something."""
    one, both = found, other
    return one if one else [x for x in f(*(both, one)) if x if both]

def typed(box: tuple[int, str, float], pair: tuple[int, str]) -> tuple[int, ...]:
    # fmt: off
    for side in box:
        if side:
            while pair:
                with open(side) as file: pass
    return ()
'''


def figures_of(text: str, folder: Path) -> SyntaxFigures:
    """The figures of a file of this text."""
    path = folder / "module.py"
    path.write_text(text)
    return measure([path])


def test_each_figure_is_counted(tmp_path: Path) -> None:
    """What a reader stumbles over is seen, once each."""
    figures = figures_of(PACKED, tmp_path)
    assert figures.nodes == sum(1 for _ in ast.walk(ast.parse(PACKED))) - 2 * 2
    figures.nodes = 0
    assert figures == SyntaxFigures(
        code_lines=9,
        comment_lines=2,
        docstring_lines=2,
        pair_assignments=1,
        ternaries=1,
        comprehensions=1,
        literal_splats=1,
        wide_tuples=1,
        formatting_off=1,
        deep_functions=1,
        names=9,
        complexities=[1 + 1 + 1 + 2, 1 + 1 + 1 + 1],
    )


def test_layout_changes_no_nodes(tmp_path: Path) -> None:
    """The same code on more lines costs the same nodes, and fewer of them a line."""
    packed = figures_of("call(first, second, third)\n", tmp_path)
    spread = figures_of("call(\n    first,\n    second,\n    third,\n)\n", tmp_path)
    assert packed.nodes == spread.nodes
    assert packed.per_line(packed.nodes) == 5 * spread.per_line(spread.nodes)


def test_vague_names_count_in_long_functions_only(tmp_path: Path) -> None:
    """In a short function the subject of a name is in sight."""
    short = "def f(found):\n    return found\n"
    long = "def f(found):\n" + "    call(found)\n" * 10
    assert figures_of(short, tmp_path).vague_names == 0
    assert figures_of(long, tmp_path).vague_names == 1


def test_figures_beyond_their_limits_are_named() -> None:
    """The message says which figure it is, what it is, and what it may be."""
    with pytest.raises(AssertionError, match=r"nodes.*12.*11"):
        within({"nodes": 11, "splats": 1}, {"nodes": 12, "splats": 1}, operator.le)
