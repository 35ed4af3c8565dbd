"""Help texts: each option is a sentence that is understood alone, in one form everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from conftest import Outcome

from featviz import cli
from featviz.models.sources import SOURCES

GROUP = click.Context(cli.group)
OPTIONS = {
    f"{name} {param.opts[-1]}": param
    for name in cli.COMMANDS
    if (command := cli.group.get_command(GROUP, name)) is not None
    for param in command.params
    if isinstance(param, click.Option)
}

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
"""Beginnings and phrases that need the option above, or that leave out who does what."""

DEFAULTS = re.compile(r"\(default|default\)|by default|\[default|without it", re.IGNORECASE)
"""Defaults belong in click's `[default: …]`, not in the sentence."""


@pytest.mark.parametrize("name", OPTIONS)
def test_an_option_is_a_sentence(name: str) -> None:
    """It begins with a capital, ends with a full stop, and needs no other option's text; so does
    what --help of a long command shows in its place. Metavars are upper case, also those that come
    from a type; defaults stand in brackets."""
    option = OPTIONS[name]
    for text in (option.help or "").split("\f "):
        assert re.fullmatch(r"[A-Z].*\.", text, re.DOTALL), text
        assert not text.startswith("Of ")
        assert not [words for words in FRAGMENTS if words in text]
    metavar = option.metavar or option.type.name.upper()
    assert metavar == metavar.upper() or metavar.startswith("[")
    assert metavar not in {"INTEGER", "INTEGER RANGE", "FLOAT"}, "it has no name of its own"
    assert not DEFAULTS.search(option.help or "")
    has_default = isinstance(option.default, (str, int, float, Path)) and not option.is_flag
    assert option.show_default or not has_default, "its default is not shown"


@pytest.mark.parametrize("option", ["--overwrite", "--json", "--null", "--config", "--quiet"])
def test_a_shared_option_reads_alike_everywhere(option: str) -> None:
    """One text, up to the noun that names the command's result."""
    texts = {param.help for name, param in OPTIONS.items() if name.endswith(f" {option}")}
    assert len({(text or "").split(" ")[0] for text in texts}) == 1
    assert len(texts) == 1 or option in ("--overwrite", "--json")


def _takes_model(name: str) -> bool:
    command = cli.group.get_command(GROUP, name)
    return command is not None and "model" in {param.name for param in command.params}


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if _takes_model(name)])
def test_a_command_that_takes_a_model_lists_every_form(
    name: str, featviz: Callable[..., Outcome]
) -> None:
    """A source that is added to SOURCES appears in the help of each command that takes MODEL."""
    words = " ".join(featviz(name, "--help").out.split())
    assert "{MODEL}" not in words
    assert not [source.form for source in SOURCES if source.form not in words]


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_a_command_is_a_sentence(name: str, featviz: Callable[..., Outcome]) -> None:
    """Its line in the list of commands and the first line of its own help are sentences."""
    first = featviz(name, "--help").out.split("\n\n")[1].strip()
    for text in (cli.COMMANDS[name], first):
        assert re.fullmatch(r"[A-Z].*\.", " ".join(text.split())), text
