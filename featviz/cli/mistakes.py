"""What people type by mistake, and what helps: a hint, with the whole command where one word of it
is to be replaced. What knows models and images is imported late, since --help waits for this."""

from __future__ import annotations

import difflib
import os
import shlex
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path

import click

from featviz.errors import FeatvizError, UsageError
from featviz.text import quoted

_LONGEST_COMMAND = 500  # characters that a hint shows: an expanded glob may have more
_SYNONYMS = {
    "--gpu": "--device=cuda",
    "--cuda": "--device=cuda",
    "--colormap": "--cmap",
    "--checkpoint": "--weights",
    "--pretrained": "--weights",
    "--force": "--overwrite",
    "--class": "--target",
    "--image-size": "--size",
}
"""Options of other tools, which no likeness of letters leads to, and what they are called here."""

_WEIGHTS = (".pth", ".ckpt", ".safetensors", ".bin")  # tensors that are images may have .pt
_WORDS = 5  # before and behind a wrong one that may belong to the same path
_LISTS = ("--layers", "--capture", "--size", "--crop", "--mean", "--std")


def hint_of(error: FeatvizError, arguments: Sequence[str]) -> str | None:
    """The error's hint, and behind it the command to go on with, where the error knows it."""
    if not (error.add or error.replace):
        return (isinstance(error, UsageError) and _cut(error.message, arguments)) or error.hint
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    words[end:end] = error.add
    if error.replace is not None:
        old, new = error.replace
        place = next((i for i, word in enumerate(words) if word in (old, f"--arch={old}")), None)
        if place is None:  # a file of --config has it
            return error.hint
        words[place] = words[place].removesuffix(old) + new
    return _with_command(error.hint or "", words) or None


def _cut(message: str, arguments: Sequence[str]) -> str | None:
    """For a word that leads to nothing: what a space has cut, a list or the path of a file."""
    place = max((i for i, word in enumerate(arguments) if f" {word!r}" in message), default=0)
    for first in range(max(1, place - _WORDS), place + 1):
        for end in range(place + 1, min(place + _WORDS, len(arguments)) + 1):
            path = " ".join(arguments[first:end])
            if " " in path and os.path.exists(path):  # noqa: PTH110 - takes any name
                again = [*arguments[:first], path, *arguments[end:]]
                return _with_command("a path with spaces stands in quotes", again)
    if place > 1 and arguments[place - 2] in _LISTS and not looks_like_image(arguments[place]):
        parts = takewhile(lambda w: w[:1] != "-" and not os.path.exists(w), arguments[place:])  # noqa: PTH110
        values = [arguments[place - 1], *parts]
        rest = arguments[place - 1 + len(values) :]
        again = [*arguments[: place - 1], ",".join(values), *rest]
        return _with_command("a list has commas", again)
    return None


def of_click(error: click.ClickException, arguments: Sequence[str]) -> tuple[str, str | None]:
    """The words and the hint of an error that click has found: the nearest option, or command."""
    ctx: click.Context | None = getattr(error, "ctx", None)
    words = error.format_message()
    if ctx is None:
        return words, None
    if isinstance(error, click.MissingParameter) and isinstance(error.param, click.Argument):
        lacks = missing(str(error.param.name), ctx)
        return lacks.message, lacks.hint
    if isinstance(error, click.NoSuchOption):
        names = [name for p in ctx.command.params for name in (*p.opts, *p.secondary_opts)]
        option, known = error.option_name, [*(n for n in names if n.startswith("--")), "--help"]
        long = f"--{option.lstrip('-')}".replace("_", "-")
        meant = [_SYNONYMS.get(long, long)]
        if meant[0].partition("=")[0] not in known:
            meant = close_to(long, (one for one in known if one != "--trust"), 0.7)
        if meant:
            again = [
                meant[0] + word[len(option) :] if word.partition("=")[0] == option else word
                for word in arguments
            ]
            return words, _with_command(f"did you mean {meant[0]}?", again)
    elif isinstance(ctx.command, click.Group) and words.startswith("No such command"):
        name, *rest = arguments
        commands = ctx.command.list_commands(ctx)
        if name in ("version", "help"):
            return words, _with_command(f"did you mean --{name}?", [f"--{name}"])
        if close := close_to(name, commands if name.isalpha() else []):
            return words, _with_command(f"did you mean {close[0]}?", [close[0], *rest])
        if any(map(looks_like_image, rest)):
            return words, _with_command("did you mean run?", ["run", *arguments])
        return words, "featviz --help describes them: " + ", ".join(commands)
    option = "--help-all" if getattr(ctx.command, "is_long", False) else "--help"
    return words, f"{ctx.command_path} {option} lists all options"


def close_to(name: str, names: Iterable[str], least: float = 0.6) -> list[str]:
    """The name that a misspelt one is most like, in a list; empty where none is like it."""
    return difflib.get_close_matches(name[:80].lower(), list(names), 1, least)


def _with_command(words: str, arguments: Sequence[str]) -> str:
    """Words, and behind them a whole command line where it is short enough."""
    command = shlex.join(["featviz", *arguments])
    if len(command) > _LONGEST_COMMAND:
        return words
    return f"{words}{' ' if words.endswith('?') else ': '}{command}" if words else command


def missing(argument: str, ctx: click.Context) -> UsageError:
    """The error for an argument that is not there."""
    hint = f"{ctx.command_path} --help has examples"
    return UsageError(f"{ctx.command_path} needs {argument.upper()}", hint)


def refuse_swapped(ctx: click.Context, model: str, images: Sequence[str]) -> None:
    """Refuse an image where MODEL stands, and weights of a model of code where IMAGE does."""
    weights = next((one for one in images if Path(one).suffix.lower() in _WEIGHTS), None)
    if weights and not Path(model).exists() and not Path(f"{model} {images[0]}").exists():
        rest = [image for image in images if image != weights]
        again = [*ctx.command_path.split()[1:], model, *rest, "--weights", weights]
        words = f"{quoted(weights)!r} is a file of a model, where an image stands"
        raise UsageError(words, _with_command("its weights are an option", again))
    if not looks_like_image(model):
        return
    others = [image for image in images if not looks_like_image(image)]
    if others or Path(model).is_file() or not images:
        what = "a folder of images" if Path(model).is_dir() else "an image"
        again = [*ctx.command_path.split()[1:], *(others or ["resnet18"])[:1], model]
        hint = _with_command("MODEL comes first", again)
        raise UsageError(f"MODEL {quoted(model)!r} is {what}", hint)


def looks_like_image(word: str) -> bool:
    """Whether a word names an image, or a folder that holds no model."""
    from featviz.images.decode import SUFFIXES
    from featviz.models import sources

    path = Path(word)
    if path.suffix.lower() in SUFFIXES:
        return not (path.is_file() and sources.sniff(path) in sources.KINDS)
    is_model = any((path / name).exists() for name in ("config.json", "adapter_config.json"))
    return path.is_dir() and not is_model
