"""Transcripts: commands, and exactly what each of them shows.

A story is a text file. A line `$ COMMAND` is followed by what the command prints: stdout,
then stderr with `! ` before each line, then the exit code in parentheses where it is not
0. `COMMAND < FILE` has a file on stdin; `pages COMMAND` also shows what is written on the
pages that it draws. Lines that begin with `# ` say what is to be seen. Beside featviz
there are the words of `_WORDS`, which show files."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import papers
import shown
import shown_pages
from conftest import Outcome

from featviz import __version__

_NOTE = "# "
_COMMAND = "$ "
_WORDS = shown.WORDS | {"page": shown_pages.page, "script": shown_pages.script}


@dataclass
class Step:
    """A command of a story, and the notes above it."""

    line: str
    notes: list[str] = field(default_factory=list)


def read(text: str) -> list[Step]:
    """The commands of a story, without what they print."""
    steps = []
    notes: list[str] = []
    for line in text.splitlines():
        if line.startswith(_NOTE):
            notes.append(line)
        elif line.startswith(_COMMAND):
            steps.append(Step(line.removeprefix(_COMMAND), notes))
            notes = []
    return steps


def played(steps: list[Step], featviz: Callable[..., Outcome], folder: Path) -> str:
    """The story as it goes now.

    Args:
        featviz: runs a command line.
        folder: in which all commands run.
    """
    parts = []
    for step in steps:
        lines = [*step.notes, _COMMAND + step.line, *_printed(step.line, featviz)]
        parts.append("\n".join(_without_volatile(line, folder) for line in lines))
    return "\n\n".join(parts) + "\n"


def _printed(line: str, featviz: Callable[..., Outcome]) -> Iterator[str]:
    """The lines that a command prints."""
    line, _, stdin = line.partition(" < ")
    word, *arguments = shlex.split(line)
    if word in _WORDS:
        try:
            yield from _WORDS[word](*arguments)
        except FileNotFoundError as error:
            yield f"(no file {error.filename})"
        return
    pages: list[papers.Paper] = []
    with ExitStack() as around:
        if word == "pages":
            pages = around.enter_context(papers.noted())
            word, *arguments = arguments
        assert word == "featviz", f"unknown word: {word}"
        around.enter_context(_stdin_of(stdin))
        done = featviz(*arguments)
    yield from _of_stdout(done.out)
    yield from _of_stderr(done.err)
    if done.code:
        yield f"(exit {done.code})"
    for page in pages:
        yield from page.told()


@contextmanager
def _stdin_of(file: str) -> Iterator[None]:
    """Have a file on stdin; nothing without a name."""
    before = sys.stdin
    with Path(file or os.devnull).open() as sys.stdin:
        try:
            yield
        finally:
            sys.stdin = before


def _of_stdout(out: str) -> Iterator[str]:
    """What stands on stdout; JSON as `json` shows it, be it one document or one a line."""
    if not out.startswith("{"):
        yield from out.splitlines()
        return
    try:
        documents = [json.loads(out)]
    except json.JSONDecodeError:
        documents = [json.loads(line) for line in out.splitlines()]
    for document in documents:
        yield from shown.pretty(shown.without_volatile(document))


def _of_stderr(err: str) -> Iterator[str]:
    """What stands on stderr; of a traceback, whose lines are indented, the last one."""
    lines = err.splitlines()
    for number, line in enumerate(lines):
        is_within = line[:1] == " " and lines[number + 1 : number + 2]
        if not is_within or lines[number + 1][:1] != " ":
            yield f"! {line}"


def _without_volatile(line: str, folder: Path) -> str:
    """A line without what differs from day to day and from machine to machine."""
    line = line.replace(str(folder), "/story").replace(__version__, "VERSION")
    line = re.sub(r"\b(torch|torchvision) \d[\w.+]*", r"\1 VERSION", line)
    # what some releases of torch put before a mismatch of shapes
    line = line.replace("addmm: mat1", "mat1")
    # what Python 3.13 adds to a TypeError
    line = re.sub(r"\. Did you mean '\w+'\?$", "", line)
    line = re.sub(r"\b[0-9a-f]{64}\b", "DIGEST", line)
    # other versions of Pillow and torch write some bytes more or less
    line = re.sub(r"files, \d+(\.\d+)? kB: ", "files, N kB: ", line)
    return re.sub(r"\b\d+(\.\d+)? (ms|s)\b", "N s", line)
