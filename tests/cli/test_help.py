"""Help: each option is a sentence that is understood alone, what a newcomer needs
stands on the first screen, everything under --help-all, and nothing heavy is imported
for it."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import click
import pytest
from conftest import Outcome, Run

from featviz import __version__, cli
from featviz.models.sources import SOURCES
from featviz.options import GROUPS

from .outcomes import apart

GROUP = click.Context(cli.group)
COMMANDS = {name: cli.group.get_command(GROUP, name) for name in cli.COMMANDS}
LONG = [
    name for name, command in COMMANDS.items() if getattr(command, "is_long", False)
]
OPTIONS = {
    f"{name} {param.opts[-1]}": param
    for name, command in COMMANDS.items()
    for param in (command.params if command else [])
    if isinstance(param, click.Option)
}
WIDTH = 80
SCREEN = 40

FRAGMENTS = (
    "Its ",
    "Which ",
    "What ",
    "Where ",
    "Without ",
    "Under ",
    "For ",
    "Those ",
    "these,",
    "says so itself",
    "The same ",
    "so many",
)
"""Beginnings and phrases that need the option above, or that leave out who does what.
"""

DEFAULTS = re.compile(
    r"\(default|default\)|by default|\[default|without it", re.IGNORECASE
)
"""Defaults belong in click's `[default: …]`, not in the sentence."""


EVERY_OPTION = pytest.mark.parametrize("option", OPTIONS.values(), ids=OPTIONS)


@EVERY_OPTION
def test_an_option_is_a_sentence(option: click.Option) -> None:
    """It begins with a capital, ends with a full stop, and needs no other option's
    text; so does what is for --help-all alone."""
    for text in (option.help or "").split("\f "):
        assert re.fullmatch(r"[A-Z].*\.", text, re.DOTALL), text
        assert not text.startswith("Of ")
        assert not [fragment for fragment in FRAGMENTS if fragment in text], text


@EVERY_OPTION
def test_metavars_are_upper_case(option: click.Option) -> None:
    """Also those that come from a type, which has a name of its own."""
    metavar = option.metavar or option.type.name.upper()
    assert metavar == metavar.upper() or metavar.startswith("[")
    assert metavar not in {"INTEGER", "INTEGER RANGE", "FLOAT"}, (
        "it has no name of its own"
    )


@EVERY_OPTION
def test_defaults_stand_in_brackets(option: click.Option) -> None:
    """Click writes them, not the text."""
    assert not DEFAULTS.search(option.help or "")
    has_default = (
        isinstance(option.default, (str, int, float, Path)) and not option.is_flag
    )
    assert option.show_default or not has_default, "its default is not shown"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_command_is_a_sentence_and_lists_every_form_of_model(
    name: str, featviz: Run
) -> None:
    """So is its line in the list of commands. A source that is added to SOURCES appears
    in the help of each command that takes MODEL."""
    text = featviz(name, "--help").out
    for line in (cli.COMMANDS[name], text.split("\n\n")[1].strip()):
        assert re.fullmatch(r"[A-Z].*\.", " ".join(line.split())), line
    flowing = " ".join(text.split())
    command = COMMANDS[name]
    assert command is not None
    assert "{MODEL}" not in flowing
    if "model" in {param.name for param in command.params}:
        assert not [
            source.spelling for source in SOURCES if source.spelling not in flowing
        ]


def _differ_by_one_letter(name: str, other: str) -> bool:
    shorter, longer = sorted((name, other), key=len)
    if len(shorter) == len(longer):
        return sum(a != b for a, b in zip(name, other, strict=True)) == 1
    return shorter in {longer[:i] + longer[i + 1 :] for i in range(len(longer))}


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_no_two_options_differ_by_one_letter(command: str) -> None:
    """A slip of the finger is an error, and not another option."""
    names = [
        name
        for key, option in OPTIONS.items()
        for name in (*option.opts, *option.secondary_opts)
        if key.split()[0] == command and name.startswith("--")
    ]
    assert [
        pair for pair in combinations(names, 2) if _differ_by_one_letter(*pair)
    ] == []


def options_in(text: str) -> list[str]:
    """The options that a help lists, in its order: the last name of each."""
    rows = re.findall(r"^  (-[^\n]*?)(?:  |\n)", text, re.MULTILINE)
    return [re.findall(r"--?[\w-]+", row)[0] for row in rows]


@pytest.mark.parametrize(
    "words",
    [[], *([n] for n in cli.COMMANDS), *([n, "--help-all"] for n in LONG)],
    ids=" ".join,
)
def test_no_line_is_longer_than_a_terminal(
    words: list[str], featviz: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 80 columns, on any terminal that has them."""
    monkeypatch.setenv("COLUMNS", "200")
    text = featviz(*words, *([] if "--help-all" in words else ["--help"])).out
    assert text
    assert not [line for line in text.splitlines() if len(line) > WIDTH]


def test_the_first_screen_of_run_holds_what_a_newcomer_needs(
    featviz: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 lines: the forms of MODEL, five examples, twelve options, and how to see the
    others."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    text = featviz("run", "--help").out
    assert len(text.splitlines()) <= SCREEN
    assert len(re.findall(r"^    featviz run ", text, re.MULTILINE)) == 5
    needed = ["--layers", "-o", "--overwrite", "--normalize", "--cmap", "--channels"]
    model = ["--size", "--arch", "--weights", "--model-arg", "--trust"]
    assert options_in(text) == [*needed, *model, "--open"]
    count = re.search(r"`featviz run --help-all` shows all (\d+) options", text)
    assert count
    assert int(count[1]) <= 66


@pytest.mark.parametrize("name", LONG)
def test_a_long_help_begins_on_one_screen_and_help_all_shows_every_option(
    name: str, featviz: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--help has the first options, and says how many there are; --help-all has each
    once, under the headings of GROUPS in their order, and what stands behind a form
    feed."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    brief = featviz(name, "--help").out
    complete = featviz(name, "--help-all").out
    assert "First options:" in brief.splitlines()[:SCREEN]
    shown = options_in(complete)
    assert len(brief.splitlines()) <= SCREEN + 2
    assert f"`featviz {name} --help-all` shows all {len(shown)} options" in brief
    expected = [p.opts[0] for key, p in OPTIONS.items() if key.split()[0] == name]
    assert sorted(shown) == sorted([*expected, "-h"])
    headings = [
        line.rstrip(":") for line in complete.splitlines() if line.rstrip(":") in GROUPS
    ]
    assert headings == [group for group in GROUPS if group in headings]
    assert len(headings) >= 5
    assert "\f" not in complete + brief
    assert name != "run" or (
        "More examples:" in complete and "More examples:" not in brief
    )


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name not in LONG])
def test_help_all_of_a_short_command_is_its_help(name: str, featviz: Run) -> None:
    """--help shows everything already, and --help-all is no error."""
    assert featviz(name, "--help-all") == featviz(name, "--help")


def test_help_all_of_the_group_has_every_command_in_full(featviz: Run) -> None:
    """Each with all its options, under its own usage line."""
    done = featviz("--help-all")
    assert done.code == 0
    sections = re.split(r"^Usage: featviz ", done.out, flags=re.MULTILINE)
    assert [section.split()[0] for section in sections[2:]] == list(cli.COMMANDS)
    assert "--strip-prefix PREFIX" in sections[2 + list(cli.COMMANDS).index("run")]


def test_the_group_lists_every_command(featviz: Run) -> None:
    """--help has each command with its line, and an example; --version says the
    version."""
    for words in ("--version", "-V"):
        assert featviz(words) == Outcome(0, f"featviz, version {__version__}\n", "")
    text = featviz("--help").out
    assert all(
        re.search(rf"^  {n} +{re.escape(h)}$", text, re.M)
        for n, h in cli.COMMANDS.items()
    )
    assert re.search(r"Examples:\n +featviz \w+", text)


def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    """Help comes at once, for a command of each file, too."""
    lines = [
        "--help",
        "--help-all",
        *(f"{name} --help" for name in ("run", "look", "report")),
    ]
    for line, done in zip(lines, apart(lines, tmp_path), strict=True):
        assert (done.code, done.imported) == (0, []), line
        assert len(done.out) > 10, line
