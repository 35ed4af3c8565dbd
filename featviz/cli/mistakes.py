"""What people type by mistake, and the command that they meant.

What knows models and images is imported when a mistake is looked at, since --help waits for this.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click

from featviz.cli.remedies import (
    ALMOST,
    LIKE,
    MistakeError,
    close_to,
    help_of,
    with_command,
)
from featviz.text import quoted

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

_ARGUMENTS = {"--model": "MODEL", "--image": "IMAGE", "--images": "IMAGE"}
"""Options of other tools that are arguments here."""


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
    close, again = close_to(name, commands), _without_command(name, rest)
    if close and not (again and set(name) & set("./:")):
        return MistakeError(message, ctx, _did_you_mean(close[0], [close[0], *rest]))
    if again:
        return MistakeError(message, ctx, _did_you_mean(again[0], again))
    return MistakeError(message, ctx, f"one of {', '.join(commands)}")


def _did_you_mean(name: str, arguments: Sequence[str]) -> str:
    return str(with_command(f"did you mean {name}?", arguments))


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
    if argument := _argument(option, ctx.command):
        again = [value if word == name else word for word in words if word != name or value]
        hint = with_command(f"{argument} is written without an option", [*_in(ctx), *again])
        return MistakeError(message, ctx, str(hint))
    known = _options_of(ctx.command)
    meant = _by_another_name(option, known) or _like(option, known, ALMOST)
    if meant is None and (others := _commands_with(option, ctx)):
        have = "has" if len(others) == 1 else "have"
        return MistakeError(message, ctx, f"{' and '.join(others)} {have} it")
    meant = meant or _like(option, known, LIKE)
    if meant is not None:
        again = _replaced(words, {name: f"{meant}{equals}{value}"})
        return MistakeError(message, ctx, _did_you_mean(meant, [*_in(ctx), *again]))
    return MistakeError(message, ctx, f"{ctx.command_path} {help_of(ctx)} lists all options")


def _behind_the_command(ctx: click.Context, group: click.Group, words: Sequence[str]) -> str:
    """Options in front of the command, in their place."""
    command = next((word for word in words if word in group.list_commands(ctx)), None)
    rest = list(words)
    if command is not None:
        rest.remove(command)
    again = [command or "run", *rest]
    return str(with_command("options stand behind the command", again))


def _stands_for(word: str, option: str) -> bool:
    """Click takes `-layers` for several short options, the first of which it names."""
    if word.partition("=")[0] == option:
        return True
    return not option.startswith("--") and word.startswith(option) and not word.startswith("--")


def _argument(option: str, command: click.Command) -> str | None:
    """The argument of a command that another tool has as an option."""
    names = {str(p.metavar).rstrip(".") for p in command.params if isinstance(p, click.Argument)}
    return name if (name := _ARGUMENTS.get(option)) in names else None


def _by_another_name(option: str, known: Sequence[str]) -> str | None:
    """The option that another tool, or another way to write it, calls so."""
    long = f"--{option.lstrip('-')}".replace("_", "-")
    synonym = _SYNONYMS.get(long, long)
    return synonym if synonym.partition("=")[0] in known else None


def _like(option: str, known: Sequence[str], least: float) -> str | None:
    names = [name.removeprefix("--") for name in known]
    close = close_to(option.lstrip("-"), names, least=least)
    return f"--{close[0]}" if close else None


def _in(ctx: click.Context) -> list[str]:
    """The words in front of a command's own: `run`."""
    return ctx.command_path.split()[1:]


def _replaced(words: Sequence[str], new: Mapping[str, str]) -> list[str]:
    return [new.get(word, word) for word in words]


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
                str(with_command("write the list without spaces", [*_in(ctx), *again])),
            )


def _goes_on(word: str) -> bool:
    """Whether a word may belong to a list: it is no option, and neither MODEL nor IMAGE."""
    if word.startswith("-") or "/" in word or looks_like_image(word):
        return False
    return word.startswith(("fn:", "re:")) or not (looks_like_model(word) or Path(word).exists())


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
    hint = with_command("for example", [*_in(ctx), model, *images])
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
        raise MistakeError(message, ctx, str(with_command("swap them", [*_in(ctx), *again])))
    if Path(model).is_file() or not (images or (ctx.default_map or {}).get("images")):
        again = [word for old in words for word in (("resnet18", old) if old == model else (old,))]
        message = f"Missing argument 'MODEL': {quoted(model)!r} is {_what(model)}"
        raise MistakeError(message, ctx, str(with_command("for example", [*_in(ctx), *again])))


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
    from featviz.models.files import sniff

    path = Path(word)
    if path.suffix.lower() in SUFFIXES:
        return not (path.is_file() and sniff.sniff(path) in sniff.KINDS)
    is_model = any((path / name).exists() for name in ("config.json", "adapter_config.json"))
    return path.is_dir() and not is_model
