"""What people type by mistake, and what helps: a hint, usually with the whole corrected
command. Modules about models and images are imported late, since --help imports this
one."""

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

# A hint shows a command line of at most this many characters; an expanded glob has more.
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
"""Options of other tools, and what they are called here. Options of similar spelling are
found without this table."""

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
"""Commands of other tools and other words for commands, and what they are called here."""

# without .pt: such a file may be an image as a tensor
_WEIGHTS = (".pth", ".ckpt", ".safetensors", ".bin")
# At most this many arguments before a wrong one, and as many behind it, are tried as pieces
# of the same path.
_NEIGHBOURS = 5
# options that take a list
_LISTS = ("--layers", "--capture", "--size", "--crop", "--mean", "--std")


class Advice(NamedTuple):
    """What is printed for an error that click has found."""

    message: str
    hint: str | None


def hint_of(error: FeatvizError, arguments: Sequence[str]) -> str | None:
    """The hint for an error, with the whole corrected command if a change of the command
    would help.

    Args:
        arguments: the command line, without `featviz`.

    Returns:
        None if there is no hint.
    """
    if isinstance(error, UsageError):
        # before the error's own hint: a piece of a list or path may be taken for an image
        other_hint = _hint_to_join(error.message, arguments) or _hint_to_run(arguments)
        if other_hint is not None:
            return other_hint
    if not error.add and error.replace is None:
        return error.hint
    corrected = list(arguments)
    if error.replace is not None:
        # the argument is the wrong text, or `--option=` and the wrong text
        wrong, right = error.replace
        pattern = re.compile(f"(--[a-z-]+=)?{re.escape(wrong)}")
        typed = next(filter(pattern.fullmatch, corrected), None)
        if typed is None:  # the text stands in a file of --config
            return error.hint
        corrected[corrected.index(typed)] = typed.removesuffix(wrong) + right
    hint = error.hint or ""
    if not error.instead:
        return _with_command(hint, _with_options(corrected, error.add)) or None
    # the hint has two remedies, and each gets its command
    remedy, _, other_remedy = hint.partition("; ")
    first = _with_command(remedy, _with_options(corrected, error.add))
    second = _with_command(other_remedy, _with_options(corrected, error.instead))
    return f"{first}; {second}"


def as_typed(error: FeatvizError) -> str:
    """The message of an error, with options as they are typed: `--size big` for
    `size=big`."""
    from featviz.options import flag

    message = error.message
    for name in error.options:
        # only once: what follows may be a value that the user typed
        message = message.replace(f"{name}=", f"{name} ", 1)
        message = message.replace(name, flag(name), 1)
    return message


def _with_options(arguments: Sequence[str], options: Sequence[str]) -> list[str]:
    """A command line with further options, at its end or before `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return [*arguments[:end], *options, *arguments[end:]]


def _hint_to_join(message: str, arguments: Sequence[str]) -> str | None:
    """The hint if a space has cut a path or a list into several arguments: the command with
    these arguments joined. None if there is no such cut.

    Args:
        message: the message of the error; it quotes the wrong argument.
        arguments: the command line; the first argument is the command's name.
    """
    position = 0
    for index, argument in enumerate(arguments):
        if f" {argument!r}" in message:
            position = index
    return _hint_to_join_path(arguments, position) or _hint_to_join_list(
        arguments, position
    )


def _hint_to_join_path(arguments: Sequence[str], position: int) -> str | None:
    """The hint if several arguments, joined by spaces, are a path that exists, `my cat.jpg`;
    else None.

    Args:
        position: the index of an argument that is a piece of the path.
    """
    # of several such paths, the one that begins first
    for first in range(max(1, position - _NEIGHBOURS), position + 1):
        for end in range(position + 1, min(position + _NEIGHBOURS, len(arguments)) + 1):
            path = " ".join(arguments[first:end])
            if " " in path and _exists(path):
                corrected = [*arguments[:first], path, *arguments[end:]]
                return _with_command("a path with spaces stands in quotes", corrected)
    return None


def _hint_to_join_list(arguments: Sequence[str], position: int) -> str | None:
    """The hint if a list was typed with spaces, as `--layers conv1 conv2`; else None.

    Args:
        position: the index of the list's second item, which was taken for an image.
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
        group: the group of all commands.
    """
    ctx: click.Context | None = getattr(error, "ctx", None)
    # without click's suggestions, since the hint has better ones
    message = re.split(r" \(?Did you mean", error.format_message())[0]
    # an option without its value; this error of click has no context
    if isinstance(error, click.BadOptionUsage):
        return Advice(message, _help_line(error.option_name, arguments[0], group))
    if ctx is None:
        return Advice(message, None)
    if isinstance(error, click.MissingParameter) and isinstance(
        error.param, click.Argument
    ):
        lacking = missing_argument(str(error.param.name), ctx)
        return Advice(lacking.message, lacking.hint)
    hint = None
    if isinstance(error, click.NoSuchOption):
        hint = _option_hint(error.option_name, ctx.command, arguments)
    elif isinstance(ctx.command, click.Group) and message.startswith("No such command"):
        hint = _command_hint(arguments, ctx.command.list_commands(ctx))
    elif message.startswith("Got unexpected extra argument"):
        hint = _hint_to_run(arguments)
    if hint is None:
        # the short help of a long command does not list all options
        option = "--help-all" if getattr(ctx.command, "is_long", False) else "--help"
        hint = f"{ctx.command_path} {option} lists all options"
    return Advice(message, hint)


def _help_line(option: str, command_name: str, group: click.Group) -> str | None:
    """The line of `--help` about an option; None if the command has no such option."""
    ctx = click.Context(group)
    command = group.get_command(ctx, command_name)
    for param in [] if command is None else command.params:
        record = param.get_help_record(ctx)
        if option in param.opts and record is not None:
            brief, _, _ = record[1].partition("\f")
            return f"{record[0]}: {brief}"
    return None


def _hint_to_run(arguments: Sequence[str]) -> str | None:
    """The hint if `report` was given a model and an image: the command `run` with
    `--report`. Else None."""
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
    """The hint for an option that does not exist; None if no option is like it.

    Args:
        wrong: the option as click names it, with its dashes.
        command: the command that was given this option.
        arguments: the command line, for the corrected one.
    """
    from featviz.options import InputOptions, declared_options

    # click names only the first letter: `-l` for `-layers`
    for argument in arguments:
        if len(wrong) == 2 and argument.startswith(wrong):
            wrong = argument.partition("=")[0]
    meant = _meant_option(wrong, command)
    if meant is None:
        name = wrong.lstrip("-").replace("-", "_")
        if command.name == "kernels" and name in declared_options(InputOptions):
            return "kernels takes no images, and no options for them"
        return None
    corrected = []
    for argument in arguments:
        if argument.partition("=")[0] == wrong:
            argument = meant + argument[len(wrong) :]
        corrected.append(argument)
    return _with_command(f"did you mean {meant}?", corrected)


def _meant_option(wrong: str, command: click.Command) -> str | None:
    """The option of a command that is most like a wrong one; it may have a value
    (`--device=cuda`). None if no option is like it."""
    option_names = ["--help"]
    for param in command.params:
        flags = [*param.opts, *param.secondary_opts]
        option_names += [flag for flag in flags if flag.startswith("--")]
    name = wrong.lstrip("-").replace("_", "-")
    meant = _SYNONYMS.get(f"--{name}", f"--{name}")
    if meant.partition("=")[0] in option_names:
        return meant
    # Names without dashes, which would make all names alike. --trust is never suggested: it
    # must not be switched on by mistake.
    names = [option[2:] for option in option_names if option != "--trust"]
    close = []
    if len(name) > 2:  # too many options begin with one or two letters
        close = [option for option in names if option.startswith(name)]
    # take an option by its beginning only if no other option begins so
    if len(close) != 1:
        close = close_to(name, names, 0.7)
    return f"--{close[0]}" if close else None


def _command_hint(arguments: Sequence[str], commands: Sequence[str]) -> str:
    """The hint for a command that does not exist: the likeliest command, or a list of all.

    Args:
        arguments: the command line; the first argument is the wrong name.
        commands: the names of all commands.
    """
    # other tools have `version` and `help run` as commands
    name, *rest = arguments
    if name in ("version", "help"):
        return _with_command(f"did you mean --{name}?", [*rest, f"--{name}"])
    if name.isalpha():
        meant = _COMMANDS_ELSEWHERE.get(name) or "".join(close_to(name, commands))
        if meant:
            return _with_command(f"did you mean {meant}?", [meant, *rest])
    # a name with a digit, a dot or a colon is probably a model's: `run` was left out
    elif any(looks_like_image(argument) for argument in rest):
        return _with_command("did you mean run?", ["run", *arguments])
    return f"featviz --help describes them: {', '.join(commands)}"


def close_to(name: str, names: Iterable[str], likeness: float = 0.6) -> list[str]:
    """The name that is most like a misspelt one, as a list of one; an empty list if no name
    is like it.

    Args:
        name: the misspelt name, in upper or lower case; only 80 letters are read.
        names: the names to choose from, in lower case.
        likeness: difflib's ratio, 0..1, that a name must reach.
    """
    return difflib.get_close_matches(name[:80].lower(), list(names), 1, likeness)


def _with_command(hint: str, arguments: Sequence[str]) -> str:
    """A hint, followed by a command line unless that is too long.

    Args:
        arguments: the command line, without `featviz`.
    """
    command_line = shlex.join(["featviz", *arguments])
    if len(command_line) > _LONGEST_COMMAND:
        return hint
    if not hint:
        return command_line
    return f"{hint} {command_line}" if hint.endswith("?") else f"{hint}: {command_line}"


def missing_argument(argument: str, ctx: click.Context) -> UsageError:
    """The error for an argument that was left out.

    Args:
        argument: the name of the argument, `model` or `images`.
        ctx: the context of the command; its `obj` is the command line.
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
        ctx: the context of the command; its `obj` is the command line.
        model: MODEL, as it was typed.
        images: as they were typed, or as TOML has them.

    Raises:
        UsageError: one is in the place of the other; the hint has the corrected command.
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
        _with_command("MODEL comes first", _with_model_first(arguments, model, models)),
    )


def _refuse_weights_among(
    images: Sequence[str], model: str, arguments: Sequence[str]
) -> None:
    """Refuse a file of weights among the images, as in `resnet18 weights.pth cat.jpg`.

    Args:
        images: the arguments in the place of images.
        model: the argument in the place of MODEL.
        arguments: the whole command line.

    Raises:
        UsageError: there is such a file; the hint has the command with `--weights`.
    """
    weights = [image for image in images if Path(image).suffix.lower() in _WEIGHTS]
    # A MODEL that is a file has weights of its own. And `MODEL IMAGE` may be one path with
    # a space.
    if not weights or _exists(model) or _exists(f"{model} {images[0]}"):
        return
    corrected = [text for text in arguments if text != weights[0]]
    raise UsageError(
        f"{quoted(weights[0])!r} is a file of a model, where an image stands",
        _with_command(
            "its weights are an option",
            _with_options(corrected, ["--weights", weights[0]]),
        ),
    )


def _with_model_first(
    arguments: Sequence[str], image: str, models: Collection[str]
) -> list[str]:
    """The command line with a model put before the image that was typed in place of MODEL.

    Args:
        image: the argument in place of MODEL.
        models: the arguments that may be the model. The first one is taken; if there are
            none, `resnet18` is.
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
