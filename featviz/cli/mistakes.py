"""What people type by mistake, and what helps: a hint, mostly with the whole corrected
command. Modules that know models and images are imported late, since --help waits for
this one."""

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

# Characters of a command line that a hint shows: one with an expanded glob may have more.
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
"""What options of other tools are called here, where the spelling does not lead to it.
"""

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
"""What commands of other tools, and words for what commands do, are called here."""

# without .pt, which tensors that are images may have
_WEIGHTS = (".pth", ".ckpt", ".safetensors", ".bin")
# Arguments before and behind a wrong one that may be pieces of the same path.
_NEIGHBOURS = 5
# options that take a list
_LISTS = ("--layers", "--capture", "--size", "--crop", "--mean", "--std")


class Advice(NamedTuple):
    """What is said of an error of click's."""

    message: str
    hint: str | None


def hint_of(error: FeatvizError, arguments: Sequence[str]) -> str | None:
    """What helps with an error: its hint, and where a change of the command would help,
    the whole corrected command.

    Args:
        arguments: the command line, without `featviz`.

    Returns:
        None where there is nothing to advise.
    """
    if isinstance(error, UsageError):
        # first, since the error may have taken a piece of a list or path for an image
        other_hint = _joined_words(error.message, arguments) or _run_to_report(
            arguments
        )
        if other_hint is not None:
            return other_hint
    if not error.add and error.replace is None:
        return error.hint
    corrected = list(arguments)
    if error.replace is not None:
        # replaced where it was typed, alone or behind `--option=`: all else stays
        wrong, right = error.replace
        pattern = re.compile(f"(--[a-z-]+=)?{re.escape(wrong)}")
        typed = next(filter(pattern.fullmatch, corrected), None)
        if typed is None:  # a file of --config has it
            return error.hint
        corrected[corrected.index(typed)] = typed.removesuffix(wrong) + right
    hint = error.hint or ""
    if not error.instead:
        return _with_command(hint, _added(corrected, error.add)) or None
    # each of the two remedies gets its command
    remedy, _, other_remedy = hint.partition("; ")
    first = _with_command(remedy, _added(corrected, error.add))
    second = _with_command(other_remedy, _added(corrected, error.instead))
    return f"{first}; {second}"


def as_typed(error: FeatvizError) -> str:
    """The message of an error, with its options as one types them: `--size big` for
    `size=big`."""
    from featviz.options import flag

    message = error.message
    for name in error.options:
        # only once: what follows may be a value that the user typed
        message = message.replace(f"{name}=", f"{name} ", 1)
        message = message.replace(name, flag(name), 1)
    return message


def _added(arguments: Sequence[str], options: Sequence[str]) -> list[str]:
    """A command line with further options, before `--` if it has that."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:end], *options, *arguments[end:]]


def _joined_words(message: str, arguments: Sequence[str]) -> str | None:
    """The hint where a space has cut a path or a list into several arguments: the command
    with these joined. None where that is not what happened.

    Args:
        message: of the error; it quotes the argument that it is about.
        arguments: the command line, of which the first is the command's name.
    """
    position = 0
    for index, argument in enumerate(arguments):
        if f" {argument!r}" in message:
            position = index
    return _joined_path(arguments, position) or _joined_list(arguments, position)


def _joined_path(arguments: Sequence[str], position: int) -> str | None:
    """The hint where arguments together are a path that exists, `my cat.jpg`; else None.

    Args:
        position: of an argument that is a piece of it.
    """
    # of several such paths the one that begins farthest to the left is the likeliest
    for first in range(max(1, position - _NEIGHBOURS), position + 1):
        for end in range(position + 1, min(position + _NEIGHBOURS, len(arguments)) + 1):
            path = " ".join(arguments[first:end])
            if " " in path and _exists(path):
                corrected = [*arguments[:first], path, *arguments[end:]]
                return _with_command("a path with spaces stands in quotes", corrected)
    return None


def _joined_list(arguments: Sequence[str], position: int) -> str | None:
    """The hint where a list has spaces, as `--layers conv1 conv2`; else None.

    Args:
        position: of the second item, which was taken for an image.
    """
    if position < 2 or arguments[position - 2] not in _LISTS:
        return None
    if looks_like_image(arguments[position]):
        return None
    items = takewhile(
        lambda text: text[:1] != "-" and not _exists(text), arguments[position:]
    )
    values = [text.strip(",") for text in (arguments[position - 1], *items)]
    rest = arguments[position - 1 + len(values) :]
    corrected = [*arguments[: position - 1], ",".join(values), *rest]
    return _with_command("a list has commas", corrected)


def _exists(path: str) -> bool:
    return os.path.exists(path)  # noqa: PTH110 - takes any name, also one that is too long


def of_click(
    error: click.ClickException, arguments: Sequence[str], group: click.Group
) -> Advice:
    """The message and the hint for an error that click has found.

    Args:
        arguments: the command line, without `featviz`.
        group: all commands.
    """
    ctx: click.Context | None = getattr(error, "ctx", None)
    # without click's own suggestions: the hint has ours
    message = re.split(r" \(?Did you mean", error.format_message())[0]
    # an option without its value; click does not say of which command
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
    elif isinstance(ctx.command, click.Group) and message.startswith("No such command"):
        hint = _command_hint(arguments, ctx.command.list_commands(ctx))
    elif message.startswith("Got unexpected extra argument"):
        hint = _run_to_report(arguments)
    if hint is None:
        # the short help of a long command leaves options out
        option = "--help-all" if getattr(ctx.command, "is_long", False) else "--help"
        hint = f"{ctx.command_path} {option} lists all options"
    return Advice(message, hint)


def _help_of(option: str, command_name: str, group: click.Group) -> str | None:
    """The line of `--help` about an option; None where the command has no such option."""
    ctx = click.Context(group)
    command = group.get_command(ctx, command_name)
    for param in [] if command is None else command.params:
        record = param.get_help_record(ctx)
        if option in param.opts and record is not None:
            brief, _, _ = record[1].partition("\f")
            return f"{record[0]}: {brief}"
    return None


def _run_to_report(arguments: Sequence[str]) -> str | None:
    """The hint where `report` was given a model and an image: a run with `--report`. Else
    None."""
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
    """The hint for an option that does not exist; None where no option is like it.

    Args:
        wrong: the option as click names it, with its dashes.
        command: the command that lacks it.
        arguments: the command line, for the corrected one.
    """
    from featviz.options import InputOptions, declared

    # of `-layers`, click names `-l`
    for argument in arguments:
        if len(wrong) == 2 and argument.startswith(wrong):
            wrong = argument.partition("=")[0]
    meant = _meant_option(wrong, command)
    if meant is None:
        name = wrong.lstrip("-").replace("-", "_")
        if command.name == "kernels" and name in declared(InputOptions):
            return "kernels takes no images, and no options for them"
        return None
    corrected = []
    for argument in arguments:
        if argument.partition("=")[0] == wrong:
            argument = meant + argument[len(wrong) :]
        corrected.append(argument)
    return _with_command(f"did you mean {meant}?", corrected)


def _meant_option(wrong: str, command: click.Command) -> str | None:
    """The option of a command that a wrong one is most like, maybe with a value
    (`--device=cuda`); None where none is like it."""
    option_names = ["--help"]
    for param in command.params:
        flags = [*param.opts, *param.secondary_opts]
        option_names += [flag for flag in flags if flag.startswith("--")]
    name = wrong.lstrip("-").replace("_", "-")
    meant = _SYNONYMS.get(f"--{name}", f"--{name}")
    if meant.partition("=")[0] in option_names:
        return meant
    # Without dashes, which would make all alike. And never --trust: it must not be switched
    # on by mistake.
    names = [option[2:] for option in option_names if option != "--trust"]
    close = []
    if len(name) > 2:  # one or two letters begin too many options
        close = [option for option in names if option.startswith(name)]
    # the beginning of only one option means that option
    if len(close) != 1:
        close = close_to(name, names, 0.7)
    return f"--{close[0]}" if close else None


def _command_hint(arguments: Sequence[str], commands: Sequence[str]) -> str:
    """The hint for a command that does not exist: the one that is meant, or all.

    Args:
        arguments: the command line, of which the first is the wrong name.
        commands: all names.
    """
    # `featviz version` and `featviz help run` are what other tools have
    name, *rest = arguments
    if name in ("version", "help"):
        return _with_command(f"did you mean --{name}?", [*rest, f"--{name}"])
    if name.isalpha():
        meant = _COMMANDS_ELSEWHERE.get(name) or "".join(close_to(name, commands))
        if meant:
            return _with_command(f"did you mean {meant}?", [meant, *rest])
    # a name with a digit, a dot or a colon is mostly one of a model, without `run`
    elif any(looks_like_image(argument) for argument in rest):
        return _with_command("did you mean run?", ["run", *arguments])
    return f"featviz --help describes them: {', '.join(commands)}"


def close_to(name: str, names: Iterable[str], likeness: float = 0.6) -> list[str]:
    """The one of some names that a misspelt name is most like; an empty list where none
    is like it.

    Args:
        name: in any case; only its first 80 letters count.
        names: in lower case.
        likeness: difflib's ratio, 0..1, that a name must reach.
    """
    return difflib.get_close_matches(name[:80].lower(), list(names), 1, likeness)


def _with_command(hint: str, arguments: Sequence[str]) -> str:
    """A hint, and behind it a command line, unless that is too long.

    Args:
        arguments: of the command line, without `featviz`.
    """
    command_line = shlex.join(["featviz", *arguments])
    if len(command_line) > _LONGEST_COMMAND:
        return hint
    if not hint:
        return command_line
    return f"{hint} {command_line}" if hint.endswith("?") else f"{hint}: {command_line}"


def missing(argument: str, ctx: click.Context) -> UsageError:
    """The error for an argument that was left out.

    Args:
        argument: its name, `model` or `images`.
        ctx: of the command; its `obj` is the command line.
    """
    hint = f"{ctx.command_path} --help has examples"
    if argument == "images":
        line = [*(ctx.obj or ()), "photo.jpg"]
        hint = _with_command("an image stands behind the model", line)
    name = argument.upper().removesuffix("S")
    return UsageError(f"{ctx.command_path} needs {name}", hint)


def refuse_swapped(ctx: click.Context, model: str, images: Sequence[str]) -> None:
    """Refuse an image in the place of MODEL, and a file of weights in the place of an
    image.

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
    """Refuse a file of weights among the images, as of `resnet18 weights.pth cat.jpg`.

    Args:
        images: the arguments in the place of images.
        model: the argument in the place of MODEL.
        arguments: the whole command line.

    Raises:
        UsageError: with the command that has `--weights` as its hint.
    """
    weights = [image for image in images if Path(image).suffix.lower() in _WEIGHTS]
    # not where MODEL is a file, which has weights of its own, or MODEL and IMAGE are one
    # path with a space
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
    """The command line with a model before the image in the place of MODEL.

    Args:
        image: the argument in the place of MODEL.
        models: arguments that may be meant as the model. The first is taken, or
            `resnet18` where there are none.
    """
    model = next(iter(models), "resnet18")
    corrected = [word for word in arguments if word != model]
    corrected.insert(corrected.index(image), model)
    return corrected


def looks_like_image(text: str) -> bool:
    """Whether an argument names an image (by its suffix), or a folder that holds no model."""
    from featviz.images.decode import SUFFIXES
    from featviz.models import sources

    path = Path(text)
    if path.suffix.lower() in SUFFIXES:
        return not (path.is_file() and sources.sniff(path) in sources.FILE_FORMATS)
    is_model = any(
        (path / name).exists() for name in ("config.json", "adapter_config.json")
    )
    return path.is_dir() and not is_model
