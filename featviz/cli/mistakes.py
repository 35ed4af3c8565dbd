"""What people type by mistake, and the command that they meant.

What knows models and images is imported when a mistake is looked at, since --help waits for this.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click

from featviz.errors import FeatvizError
from featviz.text import quoted

_LONGEST_COMMAND = 500
"""Characters of a command that a hint shows: a glob that the shell has expanded may have more."""

_LONGEST_NAME = 80
"""Letters of a name that are compared with others."""

_LIKE, _ALMOST = 0.6, 0.85
"""How like a name must be, as difflib counts, to be meant: perhaps, and almost certainly."""

_SYNONYMS = {
    "--gpu": "--device=cuda",
    "--cuda": "--device=cuda",
    "--batch": "--batch-size",
    "--colormap": "--cmap",
    "--colourmap": "--cmap",
    "--model": "--arch",
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


# The command that was meant


def remedy(error: FeatvizError, arguments: Sequence[str]) -> str | None:
    """The error's hint, and behind it the command to go on with, where the error knows it and it
    fits on a line."""
    again = _amended(arguments, error.add, error.replace)
    return error.hint if again is None else _with_command(error.hint, again)


def click_remedy(error: click.ClickException) -> str | None:
    """The hint of an error of the command line."""
    ctx: click.Context | None = getattr(error, "ctx", None)
    if hint := getattr(error, "hint", None) or _of_a_value(error):
        return str(hint)
    if ctx is None:
        return None
    return f"{ctx.command_path} {_help_of(ctx)} lists all options"


def _of_a_value(error: click.ClickException) -> str | None:
    """What helps where an option has a value that it does not take."""
    if not isinstance(error, click.BadParameter) or error.param is None:
        return None
    if isinstance(error.param.type, click.Path):
        return "check the path"
    if isinstance(error.param.type, click.Choice):
        given = error.message.partition(" is not one of ")[0].strip("'")
        close = close_to(given, map(str, error.param.type.choices))
        return f"did you mean {close[0]}?" if close else None
    return None


def _help_of(ctx: click.Context) -> str:
    return "--help-all" if getattr(ctx.command, "is_long", False) else "--help"


def _with_command(words: str | None, arguments: Sequence[str]) -> str | None:
    command = shlex.join(["featviz", *arguments])
    if len(command) > _LONGEST_COMMAND:
        return words
    between = " " if words and words.endswith("?") else ": "
    return f"{words}{between}{command}" if words else command


def _amended(
    arguments: Sequence[str], add: tuple[str, ...], replace: tuple[str, str] | None
) -> list[str] | None:
    """The arguments as an error says; None where it says nothing, or its words are not there (a
    file of --config has them)."""
    if not (add or replace):
        return None
    words = list(arguments)
    end = words.index("--") if "--" in words else len(words)
    again = [*words[:end], *add, *words[end:]]
    if replace is None:
        return again
    old, new = replace
    where = next((i for i, word in enumerate(again) if word in (old, f"--arch={old}")), None)
    if where is None:
        return None
    again[where] = again[where].removesuffix(old) + new
    return again


def _replaced(words: Sequence[str], new: Mapping[str, str]) -> list[str]:
    return [new.get(word, word) for word in words]


def _in(ctx: click.Context) -> list[str]:
    """The words in front of a command's own: `run`."""
    return ctx.command_path.split()[1:]


def close_to(name: str, names: Iterable[str], least: float = _LIKE) -> list[str]:
    """The name that a misspelt one is most like, in a list; empty where none is like it."""
    import difflib

    return difflib.get_close_matches(name[:_LONGEST_NAME].lower(), list(names), 1, least)


# Commands


def unknown_command(
    ctx: click.Context, words: Sequence[str], commands: Sequence[str]
) -> MistakeError:
    """The error for a first word that is no command; a model or an image may stand there."""
    name, *rest = words
    message = f"No such command {quoted(name)!r}."
    if name == "help":
        asked = [word for word in rest if word in commands][:1]
        return MistakeError(message, ctx, shlex.join(["featviz", *asked, "--help"]))
    if close := close_to(name, commands):
        return MistakeError(message, ctx, _did_you_mean(close[0], [close[0], *rest]))
    if again := _without_command(name, rest):
        return MistakeError(message, ctx, _did_you_mean(again[0], again))
    return MistakeError(message, ctx, f"one of {', '.join(commands)}")


def _did_you_mean(name: str, arguments: Sequence[str]) -> str:
    return str(_with_command(f"did you mean {name}?", arguments))


def _without_command(first: str, rest: list[str]) -> list[str] | None:
    """What a command line without a command stands for."""
    if looks_like_image(first):
        model = next((word for word in rest if looks_like_model(word)), None)
        others = [word for word in rest if word != model]
        return ["run", model or "resnet18", first, *others]
    if looks_like_model(first):
        return ["run" if any(map(looks_like_image, rest)) else "layers", first, *rest]
    return None


# Options


def unknown_option(
    error: click.NoSuchOption, ctx: click.Context, words: Sequence[str]
) -> MistakeError:
    """The error for an option that a command lacks: the nearest one, or a command that has it."""
    name = next((word for word in words if _stands_for(word, error.option_name)), error.option_name)
    option, equals, value = name.partition("=")
    message = f"No such option {quoted(option)!r}."
    if isinstance(ctx.command, click.Group):
        return MistakeError(message, ctx, _behind_the_command(ctx, ctx.command, words))
    known = _options_of(ctx.command)
    meant = _by_another_name(option, known) or _like(option, known, _ALMOST)
    if meant is None and (others := _commands_with(option, ctx)):
        have = "has" if len(others) == 1 else "have"
        return MistakeError(message, ctx, f"{' and '.join(others)} {have} it")
    meant = meant or _like(option, known, _LIKE)
    if meant is not None:
        again = _replaced(words, {name: f"{meant}{equals}{value}"})
        return MistakeError(message, ctx, _did_you_mean(meant, [*_in(ctx), *again]))
    return MistakeError(message, ctx, f"{ctx.command_path} {_help_of(ctx)} lists all options")


def _behind_the_command(ctx: click.Context, group: click.Group, words: Sequence[str]) -> str:
    """Options in front of the command, in their place."""
    command = next((word for word in words if word in group.list_commands(ctx)), None)
    rest = list(words)
    if command is not None:
        rest.remove(command)
    again = [command or "run", *rest]
    return str(_with_command("options stand behind the command", again))


def _stands_for(word: str, option: str) -> bool:
    """Click takes `-layers` for several short options, the first of which it names."""
    if word.partition("=")[0] == option:
        return True
    return not option.startswith("--") and word.startswith(option) and not word.startswith("--")


def _by_another_name(option: str, known: Sequence[str]) -> str | None:
    """The option that another tool, or another way to write it, calls so."""
    long = f"--{option.lstrip('-')}".replace("_", "-")
    synonym = _SYNONYMS.get(long, long)
    return synonym if synonym.partition("=")[0] in known else None


def _like(option: str, known: Sequence[str], least: float) -> str | None:
    names = [name.removeprefix("--") for name in known]
    close = close_to(option.lstrip("-"), names, least=least)
    return f"--{close[0]}" if close else None


def _options_of(command: click.Command | None) -> list[str]:
    params = command.params if command is not None else []
    return [opt for p in params for opt in (*p.opts, *p.secondary_opts) if opt.startswith("--")]


def _commands_with(option: str, ctx: click.Context) -> list[str]:
    parent = ctx.parent if ctx.parent is not None else ctx
    group = parent.command
    if not isinstance(group, click.Group):
        return []
    names = group.list_commands(parent)
    return [
        f"featviz {name}"
        for name in names
        if option in _options_of(group.get_command(parent, name))
    ]


def refuse_spaces_in_a_list(ctx: click.Context, words: Sequence[str]) -> None:
    """Refuse `--layers Conv2d, ReLU`: the shell makes two words of it, and the second would be an
    image.

    Raises:
        MistakeError: the value of an option ends with a comma, and a word follows.
    """
    known = _options_of(ctx.command)
    for at in range(len(words) - 1):
        before = words[at - 1] if at else ""
        option = words[at].partition("=")[0] if "=" in words[at] else before
        if option in known and words[at].endswith(",") and _goes_on(words[at + 1]):
            parts = list(_list_from(words[at:]))
            again = [*words[:at], "".join(parts), *words[at + len(parts) :]]
            value = quoted(words[at].removeprefix(f"{option}="))
            raise MistakeError(
                f"{option} {value!r} ends with a comma: a space cuts the list in two",
                ctx,
                str(_with_command("write the list without spaces", [*_in(ctx), *again])),
            )


def _goes_on(word: str) -> bool:
    return not (word.startswith("-") or looks_like_image(word))


def _list_from(words: Sequence[str]) -> Iterable[str]:
    """The words of a list that spaces cut, from its first on."""
    for word in words:
        yield word
        if not word.endswith(","):
            return


# MODEL and IMAGE


def missing(argument: str, ctx: click.Context) -> MistakeError:
    """The error for MODEL or IMAGE that is not there, with an example."""
    name = {"images": "IMAGE"}.get(argument, argument.upper())
    model = ctx.params.get("model") or "resnet18"
    images = ["photo.jpg"] if "images" in ctx.params else []
    hint = _with_command("for example", [*_in(ctx), model, *images])
    return MistakeError(f"Missing argument '{name}'.", ctx, str(hint))


def refuse_swapped(ctx: click.Context, words: Sequence[str]) -> None:
    """Refuse an image where MODEL stands and a model where IMAGE stands, or no model at all.

    Raises:
        MistakeError: with the command that was meant.
    """
    model, images = ctx.params.get("model"), ctx.params.get("images")
    if ctx.resilient_parsing or images is None or model is None or not looks_like_image(model):
        return
    other = next((image for image in images if looks_like_model(image)), None)
    if other is not None:
        again = _replaced(words, {model: other, other: model})
        message = f"MODEL {quoted(model)!r} is {_what(model)}, and IMAGE {quoted(other)!r} a model"
        raise MistakeError(message, ctx, str(_with_command("swap them", [*_in(ctx), *again])))
    if not images and not (ctx.default_map or {}).get("images"):
        again = [word for old in words for word in (("resnet18", old) if old == model else (old,))]
        message = f"Missing argument 'MODEL': {quoted(model)!r} is {_what(model)}"
        raise MistakeError(message, ctx, str(_with_command("for example", [*_in(ctx), *again])))


def _what(image: str) -> str:
    return "a folder of images" if Path(image).is_dir() else "an image"


def looks_like_model(word: str) -> bool:
    """Whether a word is a form of MODEL, by its letters and by what lies there."""
    from featviz.cli.complete import NAMES
    from featviz.models.files import sniff
    from featviz.models.sources import FACTORY_FORM, SOURCES

    if any(source.prefix and word.startswith(source.prefix) for source in SOURCES):
        return True
    if Path(word).suffix.lower() in (*sniff.SUFFIXES, ".py") or FACTORY_FORM.fullmatch(word):
        return True
    return word in NAMES.read_text("utf-8").split() and not Path(word).exists()


def looks_like_image(word: str) -> bool:
    """Whether a word names an image, or a folder that holds no model."""
    from featviz.images.formats import SUFFIXES

    path = Path(word)
    if path.suffix.lower() in SUFFIXES:
        return True
    is_model = any((path / name).exists() for name in ("config.json", "adapter_config.json"))
    return path.is_dir() and not is_model
