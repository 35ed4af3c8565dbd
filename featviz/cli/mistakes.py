"""What people type by mistake, and what helps: a hint, with the whole command where
words of it are to be replaced. What knows models and images is imported late, since
--help waits for this."""

from __future__ import annotations

import difflib
import os
import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import click

from featviz.errors import FeatvizError, UsageError
from featviz.text import quoted

# Characters that a hint shows: an expanded glob may have more.
_LONGEST_COMMAND = 500
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
"""Options of other tools, which no likeness of letters leads to, and what they are
called here."""

_COMMANDS_ELSEWHERE = {
    "show": "look",
    "view": "look",
    "plot": "look",
    "visualize": "run",
    "draw": "run",
    "summary": "layers",
    "gradcam": "cam",
    "compare": "diff",
}
"""Words for what commands do, and the commands."""

# tensors that are images may have .pt
_WEIGHTS = (".pth", ".ckpt", ".safetensors", ".bin")
# Words before and behind a wrong one that may belong to the same path.
_NEIGHBOURS = 5
_LISTS = ("--layers", "--capture", "--size", "--crop", "--mean", "--std")


class Advice(NamedTuple):
    """An error of click's, for people."""

    message: str
    hint: str | None


def hint_of(error: FeatvizError, arguments: Sequence[str]) -> str | None:
    """The error's hint, and behind it the command to go on with, where the error knows
    it.

    Args:
        arguments: the command line, without `featviz`.

    Returns:
        None where there is nothing to advise.
    """
    if isinstance(error, UsageError):
        # before what the error itself takes for it: `mix` of `edges, mix` is no image
        joined = _joined_words(error.message, arguments) or _run_to_report(arguments)
        if joined is not None:
            return joined
    if not error.add and error.replace is None:
        return error.hint
    corrected = list(arguments)
    # What is wrong is replaced where it stands, so that all else that was typed stays
    if error.replace is not None:
        old, new = error.replace
        wrong = re.compile(f"(--[a-z-]+=)?{re.escape(old)}")
        typed = [word for word in corrected if wrong.fullmatch(word)]
        if not typed:  # a file of --config has it
            return error.hint
        corrected[corrected.index(typed[0])] = typed[0].removesuffix(old) + new
    remedy, _, other_remedy = (error.hint or "").partition("; ")
    if error.instead:
        hints = [
            _with_command(remedy, _added(corrected, error.add)),
            _with_command(other_remedy, _added(corrected, error.instead)),
        ]
        return "; ".join(hints)
    return _with_command(error.hint or "", _added(corrected, error.add)) or None


def as_typed(error: FeatvizError) -> str:
    """The error's message, which names options as one types them: `--size big` for
    `size=big`."""
    from featviz.options import flag

    message = error.message
    for name in error.options:
        # the first time alone: what follows may be what somebody typed
        message = message.replace(f"{name}=", f"{name} ", 1)
        message = message.replace(name, flag(name), 1)
    return message


def _added(arguments: Sequence[str], options: Sequence[str]) -> list[str]:
    """A command line with further options, which stand before `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:end], *options, *arguments[end:]]


def _joined_words(message: str, arguments: Sequence[str]) -> str | None:
    """A hint with the corrected command where a space has cut a word off, from the path
    of a file or from the list that an option takes; None where that is not what
    happened.

    Args:
        message: the error, which quotes the word that leads to nothing.
        arguments: the command line, of which the first is the command's name.
    """
    position = 0
    for index, argument in enumerate(arguments):
        if f" {argument!r}" in message:
            position = index
    # `my cat.jpg` arrived as two arguments. The join that begins farthest to the left
    # and is a path is the likeliest.
    for first in range(max(1, position - _NEIGHBOURS), position + 1):
        for end in range(position + 1, min(position + _NEIGHBOURS, len(arguments)) + 1):
            path = " ".join(arguments[first:end])
            if " " in path and _exists(path):
                corrected = [*arguments[:first], path, *arguments[end:]]
                return _with_command("a path with spaces stands in quotes", corrected)
    # `--layers conv1 conv2`: the option, the value that it took, and one that became an
    # image
    if position < 2 or arguments[position - 2] not in _LISTS:
        return None
    if looks_like_image(arguments[position]):
        return None
    items = takewhile(
        lambda word: word[:1] != "-" and not _exists(word), arguments[position:]
    )
    values = [word.strip(",") for word in (arguments[position - 1], *items)]
    rest = arguments[position - 1 + len(values) :]
    corrected = [*arguments[: position - 1], ",".join(values), *rest]
    return _with_command("a list has commas", corrected)


def _exists(path: str) -> bool:
    return os.path.exists(path)  # noqa: PTH110 - takes any name, also one that is too long


def of_click(
    error: click.ClickException, arguments: Sequence[str], group: click.Group
) -> Advice:
    """What to say of an error that click has found: the nearest option, or command.

    Args:
        arguments: the command line, without `featviz`, for the corrected one.
        group: all commands.
    """
    from featviz.options import InputOptions, declared

    ctx: click.Context | None = getattr(error, "ctx", None)
    # click's own likenesses, for which there is a hint
    message = re.split(r" \(?Did you mean", error.format_message())[0]
    # one without its value, which click does not say whose it is
    if isinstance(error, click.BadOptionUsage):
        return Advice(message, _help_of(error.option_name, arguments[0], group))
    if ctx is None:
        return Advice(message, None)
    if isinstance(error, click.MissingParameter) and isinstance(
        error.param, click.Argument
    ):
        lacking = missing(str(error.param.name), ctx)
        return Advice(lacking.message, lacking.hint)
    hint = None
    if isinstance(error, click.NoSuchOption):
        hint = _option_hint(error.option_name, ctx.command, arguments)
        if ctx.command.name == "kernels" and hint is None:
            name = error.option_name.lstrip("-").replace("-", "_")
            if name in declared(InputOptions):
                hint = "kernels takes no images, and no options for them"
    elif isinstance(ctx.command, click.Group) and message.startswith("No such command"):
        hint = _command_hint(arguments, ctx.command.list_commands(ctx))
    elif message.startswith("Got unexpected extra argument"):
        hint = _run_to_report(arguments)
    # the short help of a long command leaves options out: all are in the long one
    if hint is None:
        option = "--help"
        if getattr(ctx.command, "is_long", False):
            option = "--help-all"
        hint = f"{ctx.command_path} {option} lists all options"
    return Advice(message, hint)


def _help_of(option: str, command_name: str, group: click.Group) -> str | None:
    """An option's line of `--help`; None where the command has none."""
    ctx = click.Context(group)
    command = group.get_command(ctx, command_name)
    for param in [] if command is None else command.params:
        record = param.get_help_record(ctx)
        if option in param.opts and record is not None:
            brief, _, _ = record[1].partition("\f")
            return f"{record[0]}: {brief}"
    return None


def _run_to_report(arguments: Sequence[str]) -> str | None:
    """The run to make where `report` was given a model and an image; else None."""
    if list(arguments[:1]) != ["report"] or len(arguments) < 3:
        return None
    model, image = arguments[1:3]
    if Path(model).is_dir() or not looks_like_image(image):
        return None
    corrected = ["run", *arguments[1:], "--report"]
    return _with_command("a report is made of a run", corrected)


def _option_hint(
    wrong: str, command: click.Command, arguments: Sequence[str]
) -> str | None:
    """The option that a wrong one stands for; None where none is near.

    Args:
        wrong: as it was typed, with its dashes.
        arguments: the command line, in which it is replaced.
    """
    # click takes `-layers` for `-l ayers`
    for argument in arguments:
        if len(wrong) == 2 and argument.startswith(wrong):
            wrong = argument.partition("=")[0]
    meant = _meant_option(wrong, command)
    if meant is None:
        return None
    corrected = []
    for argument in arguments:
        if argument.partition("=")[0] == wrong:
            argument = meant + argument[len(wrong) :]
        corrected.append(argument)
    return _with_command(f"did you mean {meant}?", corrected)


def _meant_option(wrong: str, command: click.Command) -> str | None:
    """The option of a command that is most like a wrong one; None where none is near."""
    option_names = ["--help"]
    for param in command.params:
        flags = [*param.opts, *param.secondary_opts]
        option_names += [flag for flag in flags if flag.startswith("--")]
    name = wrong.lstrip("-").replace("_", "-")
    meant = _SYNONYMS.get(f"--{name}", f"--{name}")
    if meant.partition("=")[0] in option_names:
        return meant
    # without dashes, which are alike in all; and nobody should trust a file by mistake
    names = [option[2:] for option in option_names if option != "--trust"]
    close = []
    if len(name) > 2:  # one or two letters begin too many options
        close = [option for option in names if option.startswith(name)]
    # the beginning of one option alone means that one, else likeness decides
    if len(close) != 1:
        close = close_to(name, names, 0.7)
    return f"--{close[0]}" if close else None


def _command_hint(arguments: Sequence[str], commands: Sequence[str]) -> str:
    """The command that a wrong one stands for, or all commands."""
    # people type `featviz version` and `featviz help run` as with other tools
    name, *rest = arguments
    if name in ("version", "help"):
        return _with_command(f"did you mean --{name}?", [*rest, f"--{name}"])
    # the name of a model mostly has a digit, a dot or a colon
    if not name.isalpha():
        if any(looks_like_image(argument) for argument in rest):
            return _with_command("did you mean run?", ["run", *arguments])
    elif name in _COMMANDS_ELSEWHERE:
        meant = _COMMANDS_ELSEWHERE[name]
        return _with_command(f"did you mean {meant}?", [meant, *rest])
    elif close_to(name, commands):
        (meant,) = close_to(name, commands)
        return _with_command(f"did you mean {meant}?", [meant, *rest])
    return f"featviz --help describes them: {', '.join(commands)}"


def close_to(name: str, names: Iterable[str], likeness: float = 0.6) -> list[str]:
    """The name that a misspelt one is most like, in a list; empty where none is like
    it.

    Args:
        name: in any case; of a long one the first 80 letters count.
        names: in lower case.
        likeness: 0..1: difflib's ratio from which on a name is like it.
    """
    return difflib.get_close_matches(name[:80].lower(), list(names), 1, likeness)


def _with_command(hint: str, arguments: Sequence[str]) -> str:
    """A hint, and behind it a whole command line where it is short enough."""
    command_line = shlex.join(["featviz", *arguments])
    if len(command_line) > _LONGEST_COMMAND:
        return hint
    if not hint:
        return command_line
    return f"{hint} {command_line}" if hint.endswith("?") else f"{hint}: {command_line}"


def missing(argument: str, ctx: click.Context) -> UsageError:
    """The error for an argument that is not there.

    Args:
        argument: its name, `model` or `images`.
    """
    hint = f"{ctx.command_path} --help has examples"
    if argument == "images":
        line = [*(ctx.obj or ()), "photo.jpg"]
        hint = _with_command("an image stands behind the model", line)
    name = argument.upper().removesuffix("S")
    return UsageError(f"{ctx.command_path} needs {name}", hint)


def refuse_swapped(ctx: click.Context, model: str, images: Sequence[str]) -> None:
    """Refuse an image where MODEL stands, and weights of a model of code where IMAGE
    does.

    Args:
        ctx: its `obj` is the command line.
        model: as it was typed.
        images: as they were typed, or as TOML has them.

    Raises:
        UsageError: with the corrected command as its hint.
    """
    arguments: list[str] = list(ctx.obj or ())
    _refuse_weights_among(images, model, arguments)
    if not looks_like_image(model):
        return
    models = [image for image in images if not looks_like_image(image)]
    if images and not models and not Path(model).is_file():
        return
    noun = "an image"
    if Path(model).is_dir():
        noun = "a folder of images"
    raise UsageError(
        f"MODEL {quoted(model)!r} is {noun}",
        _with_command("MODEL comes first", _swapped(arguments, model, models)),
    )


def _refuse_weights_among(
    images: Sequence[str], model: str, arguments: Sequence[str]
) -> None:
    """Refuse a file of weights among the images, as of `resnet18 weights.pth cat.jpg`;
    the hint is the command with `--weights`.

    Args:
        images: the arguments in the place of images, at least one.
        model: the argument in the place of MODEL.
        arguments: the whole command line.
    """
    weights = [image for image in images if Path(image).suffix.lower() in _WEIGHTS]
    # MODEL and IMAGE may be one path with a space
    if not weights or _exists(model) or _exists(f"{model} {images[0]}"):
        return
    corrected = [text for text in arguments if text != weights[0]]
    raise UsageError(
        f"{quoted(weights[0])!r} is a file of a model, where an image stands",
        _with_command(
            "its weights are an option", _added(corrected, ["--weights", weights[0]])
        ),
    )


def _swapped(
    arguments: Sequence[str], image: str, models: Collection[str]
) -> list[str]:
    """A command line in which a model stands before an image.

    Args:
        models: arguments that may be meant as the model, of which the first is taken;
            without any, a name stands in for it.
    """
    model = next(iter(models), "resnet18")
    corrected = [word for word in arguments if word != model]
    corrected.insert(corrected.index(image), model)
    return corrected


def looks_like_image(text: str) -> bool:
    """Whether an argument names an image, or a folder that holds no model."""
    from featviz.images.decode import SUFFIXES
    from featviz.models import sources

    path = Path(text)
    if path.suffix.lower() in SUFFIXES:
        return not (path.is_file() and sources.sniff(path) in sources.FILE_FORMATS)
    is_model = any(
        (path / name).exists() for name in ("config.json", "adapter_config.json")
    )
    return path.is_dir() and not is_model
