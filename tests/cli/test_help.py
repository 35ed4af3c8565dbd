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
LONG = [name for name, command in COMMANDS.items() if command.is_long]
SHORT = [name for name in COMMANDS if name not in LONG]


def options_of(command: click.Command) -> list[click.Option]:
    """The options of a command."""
    return [param for param in command.params if isinstance(param, click.Option)]


OPTIONS = {
    f"{name} {option.opts[-1]}": option
    for name, command in COMMANDS.items()
    for option in options_of(command)
}
WIDTH = 80
SCREEN = 42

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


def is_sentence(text: str) -> bool:
    """It begins with a capital, ends with a full stop, and needs no other text."""
    if not re.fullmatch(r"[A-Z].*\.", text, re.DOTALL) or text.startswith("Of "):
        return False
    return not any(fragment in text for fragment in FRAGMENTS)


def test_an_option_is_a_sentence() -> None:
    """It is one in --help, and in the part of its text that is for --help-all alone."""
    for name, option in OPTIONS.items():
        for text in (option.help or "").split("\f "):
            assert is_sentence(text), name


def test_metavars_are_upper_case() -> None:
    """Those that come from a type are, too: it has a name of its own."""
    for name, option in OPTIONS.items():
        metavar = option.metavar or option.type.name.upper()
        assert metavar == metavar.upper() or metavar.startswith("["), name
        assert metavar not in {"INTEGER", "INTEGER RANGE", "FLOAT"}, name


def test_defaults_stand_in_brackets() -> None:
    """Click writes them, not the text."""
    for name, option in OPTIONS.items():
        assert not DEFAULTS.search(option.help or ""), name
        is_value = isinstance(option.default, (str, int, float, Path))
        if is_value and not option.is_flag:
            assert option.show_default, name


def flowing(text: str) -> str:
    """A text on one line."""
    return " ".join(text.split())


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_command_is_a_sentence(name: str, featviz: Run) -> None:
    """Its line in the list of commands is one, too."""
    sentence = featviz(name, "--help").out.split("\n\n")[1]
    for text in (cli.COMMANDS[name], sentence):
        assert re.fullmatch(r"[A-Z].*\.", flowing(text))


TAKING_MODEL = [
    name
    for name, command in COMMANDS.items()
    if "model" in {param.name for param in command.params}
]


@pytest.mark.parametrize("name", TAKING_MODEL)
def test_a_command_lists_every_form_of_model(name: str, featviz: Run) -> None:
    """A source that is added to SOURCES appears in the help of each command that takes
    MODEL."""
    text = flowing(featviz(name, "--help").out)
    assert "{MODEL}" not in text
    for source in SOURCES:
        assert source.spelling in text


@pytest.mark.parametrize("name", TAKING_MODEL)
def test_the_first_options_pass_arguments_to_a_model(name: str, featviz: Run) -> None:
    """Most classes of one's own have some."""
    assert "--model-arg" in options_in(featviz(name, "--help").out)


def differ_by_one_letter(name: str, second: str) -> bool:
    """Whether one letter is another, or too many."""
    shorter, longer = sorted((name, second), key=len)
    if len(shorter) == len(longer):
        return sum(a != b for a, b in zip(name, second, strict=True)) == 1
    return shorter in {longer[:i] + longer[i + 1 :] for i in range(len(longer))}


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_no_two_options_differ_by_one_letter(command: str) -> None:
    """A slip of the finger is an error, and not another option."""
    flags: list[str] = []
    for option in options_of(COMMANDS[command]):
        flags += [*option.opts, *option.secondary_opts]
    names = [flag for flag in flags if flag.startswith("--")]
    pairs = combinations(names, 2)
    assert [pair for pair in pairs if differ_by_one_letter(*pair)] == []


def options_in(text: str) -> list[str]:
    """The options that a help lists, in its order: the last name of each."""
    rows = re.findall(r"^  (-[^\n]*?)(?:  |\n)", text, re.MULTILINE)
    return [re.findall(r"--?[\w-]+", row)[0] for row in rows]


@pytest.mark.parametrize(
    "line",
    [
        "--help",
        *(f"{name} --help" for name in SHORT),
        *(f"{name} --help-all" for name in LONG),
    ],
)
def test_no_line_is_longer_than_a_terminal(
    line: str, featviz: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Help has at most 80 columns, on any terminal that has them."""
    monkeypatch.setenv("COLUMNS", "200")
    lines = featviz(*line.split()).out.splitlines()
    assert len(lines) > 5
    assert max(map(len, lines)) <= WIDTH


def test_the_first_screen_of_run_holds_what_a_newcomer_needs(
    featviz: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 42 lines it has the forms of MODEL, five examples, sixteen options, and how to
    see the others."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    text = featviz("run", "--help").out
    assert len(text.splitlines()) <= SCREEN
    assert len(re.findall(r"^    featviz run ", text, re.MULTILINE)) == 5
    needed = ["--layers", "-o", "--overwrite", "--resume", "--normalize", "--cmap"]
    needed += ["--channels", "--labels"]
    model = ["--preset", "--size", "--arch", "--weights", "--model-arg", "--trust"]
    assert options_in(text) == [*needed, *model, "--open", "--report"]
    count = re.search(r"`featviz run --help-all` shows all (\d+) options", text)
    assert count
    assert int(count[1]) <= 66


@pytest.mark.parametrize("name", LONG)
def test_a_long_help_begins_on_one_screen(
    name: str, featviz: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--help has the first options, and says how many there are."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    text = featviz(name, "--help").out
    lines = text.splitlines()
    assert "First options:" in lines[:SCREEN]
    assert len(lines) <= SCREEN + 2
    count = len(options_of(COMMANDS[name])) + 1  # --help is click's
    assert f"`featviz {name} --help-all` shows all {count} options" in text


@pytest.mark.parametrize("name", LONG)
def test_what_a_model_of_ones_own_needs_is_among_the_first(
    name: str, featviz: Run
) -> None:
    """--help has how images are prepared, whether code may run, and which channels
    are shown, wherever the command has the option."""
    flags = [option.opts[0] for option in options_of(COMMANDS[name])]
    needed = {"--preset", "--trust"} & set(flags)
    if name == "look":
        needed.add("--channels")
    assert needed <= set(options_in(featviz(name, "--help").out))


@pytest.mark.parametrize("name", LONG)
def test_help_all_shows_every_option(name: str, featviz: Run) -> None:
    """Each stands there once, under the headings of GROUPS in their order."""
    text = featviz(name, "--help-all").out
    flags = [option.opts[0] for option in options_of(COMMANDS[name])]
    assert sorted(options_in(text)) == sorted([*flags, "-h"])
    headings = [line[:-1] for line in text.splitlines() if line[:-1] in GROUPS]
    assert headings == sorted(headings, key=list(GROUPS).index)
    assert len(headings) >= 5


def test_what_stands_behind_a_form_feed_is_for_help_all(featviz: Run) -> None:
    """--help ends before it."""
    brief = featviz("run", "--help").out
    complete = featviz("run", "--help-all").out
    assert "More examples:" in complete
    assert "More examples:" not in brief
    assert "\f" not in complete + brief


@pytest.mark.parametrize("name", SHORT)
def test_help_all_of_a_short_command_is_its_help(name: str, featviz: Run) -> None:
    """--help shows everything already, and --help-all is no error."""
    assert featviz(name, "--help-all") == featviz(name, "--help")


@pytest.mark.medium
def test_help_all_of_the_group_has_every_command_in_full(featviz: Run) -> None:
    """Each stands there with all its options, under its own usage line."""
    done = featviz("--help-all")
    assert done.code == 0
    sections = re.split(r"^Usage: featviz ", done.out, flags=re.MULTILINE)
    assert [section.split()[0] for section in sections[2:]] == list(cli.COMMANDS)
    assert "--strip-prefix PREFIX" in sections[2 + list(cli.COMMANDS).index("run")]


def test_the_group_lists_every_command(featviz: Run) -> None:
    """--help has each command with its line, and an example."""
    text = featviz("--help").out
    assert re.search(r"Examples:\n +featviz \w+", text)
    for name, sentence in cli.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(sentence)}$", text, re.M)


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version_is_one_line(flag: str, featviz: Run) -> None:
    """It names the program."""
    assert featviz(flag) == Outcome(0, f"featviz, version {__version__}\n", "")


@pytest.mark.medium
def test_help_imports_nothing_heavy(tmp_path: Path) -> None:
    """Help comes at once, for a command of each file, too."""
    lines = ["--help", "--help-all", "run --help", "look --help", "report --help"]
    for line, done in zip(lines, apart(lines, tmp_path), strict=True):
        assert done.code == 0, line
        assert done.imported == [], line
        assert len(done.out) > 10, line


@pytest.mark.parametrize(
    ("flag", "default"),
    [
        ("--padding N", "4"),
        ("--pad-value GREY", "1.0"),
        ("--normalize MODE", "symmetric"),
        ("--max-slices N", "16"),
    ],
)
def test_a_default_is_that_of_the_command(
    flag: str, default: str, featviz: Run
) -> None:
    """`kernels` has others than `run`, whose words do not hold for it."""
    text = " ".join(featviz("kernels", "--help-all").out.split())
    (help_text,) = re.findall(rf" {flag} (.*?) --\w", text)
    assert help_text.endswith(f"[default: {default}]")
