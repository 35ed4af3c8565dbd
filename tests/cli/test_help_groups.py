"""Options in groups: what a newcomer needs on the first screen, everything under --help-all."""

from __future__ import annotations

import re

import click
import pytest

from featviz import cli
from featviz.cli.help import ClickOption, Command
from featviz.options import GENERAL, GROUPS, OPTIONS

from .outcomes import Run

GROUP = click.Context(cli.group)
COMMANDS = {name: cli.group.get_command(GROUP, name) for name in cli.COMMANDS}
LONG = [name for name, command in COMMANDS.items() if getattr(command, "is_long", False)]
WIDTH, SCREEN = 80, 40


def options_in(text: str) -> list[str]:
    """The options that a help lists, in its order: the last name of each."""
    rows = re.findall(r"^  (-[^\n]*?)(?:  |\n)", text, re.MULTILINE)
    return [re.findall(r"--?[\w-]+", row)[0] for row in rows]


@pytest.mark.parametrize("name", ["", *cli.COMMANDS])
@pytest.mark.parametrize("option", ["--help", "--help-all"])
def test_no_line_is_longer_than_a_terminal(
    name: str, option: str, featviz: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 80 columns, on any terminal that has them."""
    if option == "--help-all" and name not in LONG:
        pytest.skip("it has no --help-all")
    monkeypatch.setenv("COLUMNS", "200")
    text = featviz(*filter(None, [name]), option).out
    assert text and not [line for line in text.splitlines() if len(line) > WIDTH]


def test_the_first_screen_of_run_holds_what_a_newcomer_needs(
    featviz: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 lines: the forms of MODEL, five examples, ten options, and how to see the others."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    lines = featviz("run", "--help").out.splitlines()
    first = "\n".join(lines[:SCREEN])
    assert len(lines) <= SCREEN
    assert len(re.findall(r"^    featviz run ", first, re.MULTILINE)) == 5
    needed = ["--layers", "-o", "--overwrite", "--normalize", "--cmap", "--max-maps"]
    assert options_in(first) == [*needed, "--size", "--arch", "--weights", "--open"]
    count = re.search(r"`featviz run --help-all` shows all (\d+) options", first)
    assert count and int(count[1]) <= 66


@pytest.mark.parametrize("name", LONG)
def test_a_long_help_begins_on_one_screen(
    name: str, featviz: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first options begin on the first screen, and it says how to see the others."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    text = featviz(name, "--help").out
    assert "First options:" in text.splitlines()[:SCREEN]
    assert len(text.splitlines()) <= SCREEN + 2 and f"`featviz {name} --help-all`" in text


@pytest.mark.parametrize("name", LONG)
def test_help_all_shows_every_option_once_in_its_group(name: str, featviz: Run) -> None:
    """The headings are those of GROUPS in their order; the count of --help is theirs."""
    text = featviz(name, "--help-all").out
    shown = options_in(text)
    command = COMMANDS[name]
    assert command is not None
    options = [p for p in command.params if isinstance(p, click.Option)]
    expected = [p.opts[0] for p in options if not p.hidden]
    assert sorted(shown) == sorted([*expected, "-h"])
    assert f"shows all {len(shown)} options" in featviz(name, "--help").out
    headings = [line.rstrip(":") for line in text.splitlines() if line.rstrip(":") in GROUPS]
    assert headings == [group for group in GROUPS if group in headings] and len(headings) >= 5


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_option_is_declared_with_its_group(name: str) -> None:
    """Only a short command has options of its own without one; verbosity is always general."""
    command = COMMANDS[name]
    assert isinstance(command, Command)
    options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    assert all(isinstance(p, ClickOption) and (p.group or OPTIONS) in GROUPS for p in options)
    groups = {p.opts[-1]: p.group for p in options if isinstance(p, ClickOption)}
    assert groups["--quiet"] == groups["--verbose"] == GENERAL
    assert name not in LONG or None not in groups.values()


def test_what_stands_behind_a_form_feed_is_for_help_all(featviz: Run) -> None:
    """The further examples are in --help-all alone, and the form feed is in neither."""
    brief, whole = featviz("run", "--help").out, featviz("run", "--help-all").out
    assert "More examples:" in whole and "More examples:" not in brief
    assert "\f" not in whole + brief


def test_a_terminal_gets_bold_headings_unless_it_wants_no_colour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Escape sequences are in what click prints on a terminal, and NO_COLOR leaves them out."""
    command = COMMANDS["report"]
    assert command is not None
    for value, styled in (("", True), ("1", False)):
        monkeypatch.setenv("NO_COLOR", value)
        text = command.get_help(command.make_context("report", [], resilient_parsing=True))
        assert ("\x1b[1mGeneral" in text) is styled
        assert ("\x1b[36m--open\x1b[0m" in text) is styled
