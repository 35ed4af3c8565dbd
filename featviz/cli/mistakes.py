"""What people type by mistake, and what helps: a hint, with the whole command where one word of it
is to be replaced.

What knows models and images is imported when a mistake is looked at, since --help waits for this.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from featviz.errors import FeatvizError
from featviz.text import quoted

_LONGEST_COMMAND = 500
"""Characters of a command that a hint shows: a glob that the shell has expanded may have more."""
_LONGEST_NAME = 80
"""Letters of a name that are compared with others."""
_LIKE = 0.6
"""How like a name must be, as difflib counts, to be meant."""

_SYNONYMS = {
    "--gpu": "--device=cuda",
    "--cuda": "--device=cuda",
    "--batch": "--batch-size",
    "--colormap": "--cmap",
    "--colourmap": "--cmap",
    "--checkpoint": "--weights",
    "--pretrained": "--weights",
    "--save": "--out",
    "--dir": "--out",
    "--force": "--overwrite",
    "--topk": "--max-maps",
    "--class": "--target",
    "--show": "--open",
    "--alpha": "--overlay",
    "--image-size": "--size",
    "--resize": "--size",
}
"""Options of other tools, which no likeness of letters leads to, and what they are called here."""


class MistakeError(click.UsageError):
    """A command line that cannot be read, with what helps."""

    def __init__(self, message: str, ctx: click.Context | None, hint: str) -> None:
        super().__init__(message, ctx)
        self.hint = hint


class BadValueError(click.BadParameter):
    """A value that an option does not take, with what helps."""

    def __init__(
        self, message: str, hint: str | None, param: click.Parameter | None, ctx: Any
    ) -> None:
        super().__init__(message, ctx, param)
        self.hint = hint


# Hints


def hint_of(error: FeatvizError, arguments: Sequence[str]) -> str | None:
    """The error's hint, and behind it the command to go on with, where the error knows it."""
    if not (error.add or error.replace):
        return error.hint
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    words[end:end] = error.add
    if error.replace is not None:
        old, new = error.replace
        where = [i for i, word in enumerate(words) if word in (old, f"--arch={old}")]
        if not where:  # a file of --config has it
            return error.hint
        words[where[0]] = words[where[0]].removesuffix(old) + new
    return _with_command(error.hint or "", words) or None


def hint_of_click(error: click.ClickException) -> str | None:
    """The hint of an error of the command line."""
    if isinstance(error, click.BadParameter) and error.param is not None:
        kind = error.param.type
        if isinstance(kind, click.Choice) and not getattr(error, "hint", None):
            given = error.message.partition(" is not one of ")[0].strip("'")
            if close := close_to(given, map(str, kind.choices), 0.65):
                return f"did you mean {close[0]}?"
        if isinstance(kind, click.Path) and not getattr(error, "hint", None):
            return "check the path"
    ctx: click.Context | None = getattr(error, "ctx", None)
    if hint := getattr(error, "hint", None):
        return str(hint)
    return None if ctx is None else _list_of_options(ctx)


def close_to(name: str, names: Iterable[str], least: float = _LIKE) -> list[str]:
    """The name that a misspelt one is most like, in a list; empty where none is like it."""
    import difflib

    return difflib.get_close_matches(name[:_LONGEST_NAME].lower(), list(names), 1, least)


def _list_of_options(ctx: click.Context) -> str:
    option = "--help-all" if getattr(ctx.command, "is_long", False) else "--help"
    return f"{ctx.command_path} {option} lists all options"


def _with_command(words: str, arguments: Sequence[str]) -> str:
    """Words, and behind them a whole command line where it is short enough."""
    command = shlex.join(["featviz", *arguments])
    if len(command) > _LONGEST_COMMAND:
        return words
    return f"{words}{' ' if words.endswith('?') else ': '}{command}" if words else command


# Commands and options


def unknown_command(
    ctx: click.Context, words: Sequence[str], commands: Sequence[str]
) -> MistakeError:
    """The error for a first word that is no command; a model or an image may stand there."""
    name, *rest = words
    message = f"No such command {quoted(name)!r}."
    if close := close_to(name, commands if name.isalpha() else []):
        hint = _with_command(f"did you mean {close[0]}?", [close[0], *rest])
    elif looks_like_model(name):
        command = "run" if any(map(looks_like_image, rest)) else "layers"
        hint = _with_command(f"did you mean {command}?", [command, *words])
    elif looks_like_image(name):
        hint = "did you mean run? featviz run MODEL IMAGE..."
    else:
        hint = "featviz --help describes them: " + ", ".join(commands)
    return MistakeError(message, ctx, hint)


def unknown_option(
    error: click.NoSuchOption, ctx: click.Context, words: Sequence[str]
) -> MistakeError:
    """The error for an option that a command lacks: the nearest one that it has."""
    name = next((word for word in words if _stands_for(word, error.option_name)), error.option_name)
    option, equals, value = name.partition("=")
    message = f"No such option {quoted(option)!r}."
    if isinstance(ctx.command, click.Group):
        return MistakeError(
            message, ctx, "options stand behind the command: featviz COMMAND --help"
        )
    known = _options_of(ctx.command)
    long = f"--{option.lstrip('-')}".replace("_", "-")
    meant = _SYNONYMS.get(long, long)
    if meant.partition("=")[0] not in known:
        close = close_to(long, (one for one in known if one != "--trust"), 0.7)
        if not close:
            return MistakeError(message, ctx, _list_of_options(ctx))
        meant = close[0]
    again = [f"{meant}{equals}{value}" if word == name else word for word in words]
    hint = _with_command(f"did you mean {meant}?", [*_in(ctx), *again])
    return MistakeError(message, ctx, hint)


def _stands_for(word: str, option: str) -> bool:
    """Click takes `-layers` for several short options, the first of which it names."""
    if word.partition("=")[0] == option:
        return True
    return not option.startswith("--") and word.startswith(option) and not word.startswith("--")


def _in(ctx: click.Context) -> list[str]:
    """The words in front of a command's own: `run`."""
    return ctx.command_path.split()[1:]


def _options_of(command: click.Command) -> list[str]:
    names = (name for p in command.params for name in (*p.opts, *p.secondary_opts))
    return [name for name in names if name.startswith("--")]


def refuse_spaces_in_a_list(ctx: click.Context, words: Sequence[str]) -> None:
    """Refuse `--layers Conv2d, ReLU`: the shell makes two words of it, and the second would be an
    image.

    Raises:
        MistakeError: the value of an option ends with a comma, and a word follows that is neither
            an option nor MODEL nor IMAGE.
    """
    known = _options_of(ctx.command)
    for before, word, after in zip(["", *words], words, words[1:], strict=False):
        option, equals, value = word.partition("=")
        option, value = (option, value) if equals else (before, word)
        if not (option in known and value.endswith(",")) or after.startswith("-"):
            continue
        is_place = "/" in after or Path(after).exists() or looks_like_image(after)
        is_selector = after.startswith(("fn:", "re:"))
        if is_selector or not (is_place or looks_like_model(after)):
            raise MistakeError(
                f"{option} {quoted(value)!r} ends with a comma: a space cuts the list in two",
                ctx,
                f"write the list without spaces: {option} {value}{after}",
            )


# MODEL and IMAGE


def missing(argument: str, ctx: click.Context) -> MistakeError:
    """The error for MODEL or IMAGE that is not there, with an example."""
    name = {"images": "IMAGE"}.get(argument, argument.upper())
    model = ctx.params.get("model") or "resnet18"
    images = ["photo.jpg"] if "images" in ctx.params else []
    hint = _with_command("for example", [*_in(ctx), model, *images])
    return MistakeError(f"Missing argument '{name}'.", ctx, hint)


def refuse_swapped(ctx: click.Context, words: Sequence[str]) -> None:
    """Refuse an image where MODEL stands.

    Raises:
        MistakeError: with an example.
    """
    model, images = ctx.params.get("model"), ctx.params.get("images")
    if ctx.resilient_parsing or images is None or model is None or not looks_like_image(model):
        return
    other = next((image for image in images if looks_like_model(image)), None)
    alone = not (images or (ctx.default_map or {}).get("images"))
    if other is not None or Path(model).is_file() or alone:
        what = "a folder of images" if Path(model).is_dir() else "an image"
        hint = _with_command("MODEL comes first", [*_in(ctx), other or "resnet18", model])
        raise MistakeError(f"MODEL {quoted(model)!r} is {what}", ctx, hint)


def looks_like_model(word: str) -> bool:
    """Whether a word is a form of MODEL, by its letters and by what lies there."""
    from featviz.models import code
    from featviz.models.files import sniff
    from featviz.models.sources import SOURCES

    names = Path(__file__).parent.parent / "models" / "names.txt"  # of torchvision
    if any(source.prefix and word.startswith(source.prefix) for source in SOURCES):
        return True
    if Path(word).suffix.lower() in (*sniff.SUFFIXES, ".py") or code.FORM.fullmatch(word):
        return True
    return word in names.read_text("utf-8").split() and not Path(word).exists()


def looks_like_image(word: str) -> bool:
    """Whether a word names an image, or a folder that holds no model."""
    from featviz.images.formats import SUFFIXES
    from featviz.models.files import sniff

    path = Path(word)
    if path.suffix.lower() in SUFFIXES:
        return not (path.is_file() and sniff.sniff(path) in sniff.KINDS)
    is_model = any((path / name).exists() for name in ("config.json", "adapter_config.json"))
    return path.is_dir() and not is_model
