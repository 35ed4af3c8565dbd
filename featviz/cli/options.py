"""Commands of the command line, and their options. Options are made from the records of
`featviz.options`; a few are only for the command line.

`--help` of a long command shows the options that a newcomer needs; `--help-all` shows all
options in groups."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem
from msgspec import NODEFAULT, Struct

from featviz.cli import mistakes
from featviz.cli.config import read_config
from featviz.drawing.normalize import with_tables
from featviz.files import check_exists
from featviz.files.urls import Url, is_url, refuse_url
from featviz.models.sources import MODEL_HELP
from featviz.options import (
    GENERAL,
    GROUPS,
    OPTIONS,
    OUTPUT,
    ModelOptions,
    Option,
    every_option,
    read_from,
)

# A command with more options than this is long: --help shows only the first of them.
_LONG = 15
# This key is in the `meta` of a context of click if help is to show all options.
_SHOW_ALL = "featviz.help_all"


class ClickOption(click.Option):
    """An option of click that knows its place in the help. Without a `type` in `settings` it
    is a flag.

    Args:
        help_text: what the option does; text after a form feed is only for --help-all.
        *flags: the names of the option, such as `-o` and `--out`.
        group: one of GROUPS, the heading under which --help-all lists the option.
        first: whether `--help` of a long command lists the option.
        default_text: the default as help shows it; empty for none.
        **settings: further arguments of click.Option.
    """

    def __init__(
        self,
        help_text: str,
        *flags: str,
        group: str = OPTIONS,
        first: bool = False,
        default_text: str = "",
        **settings: Any,
    ) -> None:
        if "type" not in settings:
            settings["is_flag"] = True
        super().__init__(flags, help=help_text, **settings)
        self.group = group
        self.first = first
        self.default_text = default_text


class Command(click.Command):
    """A command whose help lists options in groups. Text after a form feed in its docstring
    is only for --help-all."""

    @property
    def is_long(self) -> bool:
        """Whether `--help` shows only the first options."""
        return len(self.params) > _LONG + 1  # one more for --help-all

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the command does, and its options in groups. For a long command without
        --help-all, write only the first options."""
        show_all = _SHOW_ALL in ctx.meta or not self.is_long
        brief, _, rest = inspect.cleandoc(self.help or "").partition("\f")
        self.format_usage(ctx, formatter)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(brief + rest if show_all else brief)

        options = [
            param for param in self.get_params(ctx) if isinstance(param, click.Option)
        ]
        if show_all:
            for title in GROUPS:  # click's own options, such as --help, are general
                in_group = [o for o in options if getattr(o, "group", GENERAL) == title]
                _write_options(ctx, formatter, title, in_group)
            return
        first = [option for option in options if getattr(option, "first", False)]
        _write_options(ctx, formatter, "First options", first)
        examples = ", and more examples" if "xamples:" in rest else ""
        formatter.write_paragraph()
        formatter.write_text(
            f"`{ctx.command_path} --help-all` shows all {len(options)}"
            f" options{examples}."
        )


def _write_options(
    ctx: click.Context,
    formatter: click.HelpFormatter,
    title: str,
    options: Sequence[click.Option],
) -> None:
    """Write a section of a command's help, unless all of its options are hidden.

    Args:
        title: the title of the section.
        options: the options to list, in this order. Text after a form feed in their help is
            only for --help-all.
    """
    rows = []
    for option in options:
        record = option.get_help_record(ctx)
        if record is None:  # the option is hidden
            continue
        flags, text = record
        brief, _, rest = text.partition("\f")
        default_text = getattr(option, "default_text", "")
        text = brief + rest if _SHOW_ALL in ctx.meta else brief
        if default_text:
            text += f"  [default: {default_text}]"
        rows.append((flags, text))
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows)


def show_all_help(ctx: click.Context, param: click.Parameter, is_given: bool) -> None:
    """The callback of --help-all: print the whole help, and exit. For the group, print also
    the whole help of every command."""
    if not is_given or ctx.resilient_parsing:
        return
    # the contexts of commands inherit `meta` from that of the group
    ctx.meta[_SHOW_ALL] = True
    texts = [ctx.get_help()]
    if isinstance(ctx.command, click.Group):
        for name in ctx.command.list_commands(ctx):
            command = ctx.command.get_command(ctx, name)
            if command is not None:
                texts.append(command.get_help(click.Context(command, ctx, name)))
    click.echo("\n\n".join(texts), color=ctx.color)
    ctx.exit()


def _set_level(ctx: click.Context, param: click.Parameter, is_given: bool) -> None:
    """The callback of --quiet and --verbose: set the level of the log."""
    if is_given:
        level = logging.ERROR if param.name == "quiet" else logging.DEBUG
        logging.getLogger("featviz").setLevel(level)


def _existing_file(text: str) -> Path:
    """A path that exists. A folder is not refused here, but when it is read.

    Raises:
        UsageError: the path does not exist, or `text` is a URL.
    """
    return _existing_path(text, "File")


def existing_run(text: str) -> Path | Url:
    """A path that exists, or a URL. Whether it is a run directory is checked when it is
    read.

    Raises:
        UsageError: the path does not exist.
    """
    return Url.of_run(text) if is_url(text) else _existing_path(text, "Directory")


def _existing_path(text: str, noun: str) -> Path:
    """A path that exists.

    Args:
        noun: what should be there, for the message: `Directory`.

    Raises:
        UsageError: the path does not exist, or `text` is a URL.
    """
    refuse_url(text)
    path = Path(text)
    check_exists(path, noun)
    return path


_CHECKS = {
    "normalize": "featviz.drawing.normalize:parse_scale",
    "cmap": "featviz.drawing.colormap:check_cmap",
    "layers": "featviz.hooks.selectors:parse",
    "device": "featviz.models.requirements:check_device",
    "background": "featviz.images.decode:check_background",
    "target": "featviz.gradients.targets:parse",
    "tensor_layout": "featviz.layout.tracing.guess:parse_override",
    "similar_to": "featviz.drawing.place_tiles:parse_place",
    "ablate": "featviz.gradients.interventions:parse_ablate",
    "edit": "featviz.gradients.interventions:parse_edit",
}
"""For options whose values have a grammar: `module:function` of the function that refuses a
bad value. It is called while the command line is read, before torch is imported, which takes
seconds. It is imported only if there is a value, so that --help need not import numpy."""


Values: TypeAlias = dict[str, Any]
"""A command line as it was read: values of options and arguments by name. For a command with
a MODEL, `source` has the options of the model."""


def command(
    *records: type[Struct],
    arguments: Sequence[click.Argument] = (),
    flags: Sequence[click.Option] = (),
    json: str = "one JSON document",
    but: Collection[str] = (),
    result: str = "",
    check: Callable[[Values], object] | None = None,
    **defaults: Any,
) -> Callable[[Callable[[Values], int]], Command]:
    """Make a decorator that turns a function into a command. The function takes the
    values of the command line and returns an exit code.

    Args:
        *records: the options are the fields of these records, and of the records in them.
        arguments: the arguments of the command.
        flags: further options, which only the command line has.
        json: what --json prints on stdout, for its help.
        but: names of fields that are no options of this command.
        result: if --out is the folder of the result, the name of the record in it, such as
            `run.json`; else empty.
        check: called with the values before torch is imported; raises UsageError for
            options that contradict each other.
        **defaults: defaults of options that differ from those of the records.
    """
    options = every_option(*records)
    for name, value in defaults.items():
        options[name] = replace(options[name], default=value)
    params: list[click.Parameter] = [
        *arguments,
        *(click_option(option) for name, option in options.items() if name not in but),
        *flags,
        ClickOption(f"Print {json} on stdout.", "--json", group=OUTPUT),
        *_general_options(),
    ]

    def decorate(function: Callable[[Values], int]) -> Command:
        """Make the command, with the function's name and its docstring as help."""
        made = Command(
            function.__name__,
            params=params,
            callback=partial(_call, function, result, check),
            # its docstring is its help
            help=str(function.__doc__).replace("{MODEL}", MODEL_HELP),
        )
        # hidden if --help shows all options already
        made.params.append(
            ClickOption(
                "Show all options in groups and exit.",
                "--help-all",
                group=GENERAL,
                expose_value=False,
                callback=show_all_help,
                is_eager=True,
                hidden=len(params) <= _LONG,
            )
        )
        return made

    return decorate


def _general_options() -> list[ClickOption]:
    """The options of every command."""
    level = partial(ClickOption, group=GENERAL, expose_value=False, callback=_set_level)
    return [
        ClickOption(
            "Read values of options from this TOML file; the command line wins"
            " over it.",
            "--config",
            group=GENERAL,
            expose_value=False,
            callback=read_config,
            # read before all others, since it sets their defaults
            is_eager=True,
            type=_existing_file,
            metavar="FILE",
            shell_complete=_complete_paths,
        ),
        level("Print only errors on stderr.", "-q", "--quiet"),
        level("Print more details, and tracebacks, on stderr.", "-v", "--verbose"),
    ]


def _call(
    function: Callable[[Values], int],
    result: str,
    check: Callable[[Values], object] | None,
    **values: Any,
) -> int:
    """Call the function of a command with the values of a command line. If the command has
    a MODEL, first set `source` to the options of the model, and check the values: all that
    can be refused without torch is refused before torch is imported.

    Args:
        function: the function of the command.
        result: as in `command`.
        check: as in `command`.

    Raises:
        UsageError: a value cannot be used, or an argument is missing.
        StoreError: --out holds files of others.
    """
    if "model" not in values:
        return function(values)
    # before the imports below, which import numpy
    if result:
        _check_out(values, result)
    if check is not None:
        check(values)
    from featviz.images.find import check_arguments
    from featviz.models.requirements import check_current_folder, require_torch
    from featviz.models.sources import check_source

    check_current_folder()
    ctx = click.get_current_context()
    model = values["model"]
    images = images_of(values)
    if model and "images" in values:
        mistakes.refuse_swapped(ctx, model, images)
    if not model:
        raise mistakes.missing_argument("model", ctx)
    if "images" in values and not images and not values["input"]:
        raise mistakes.missing_argument("images", ctx)
    values["source"] = read_from(ModelOptions, dict(values), spec=model)
    values["images"] = images
    check_source(values["source"])
    check_arguments(images)
    require_torch(is_command=True)
    return function(values)


def images_of(values: Values) -> Sequence[str]:
    """The images on the command line, or else those in the file of --config."""
    defaults = click.get_current_context().default_map or {}
    images: Sequence[str] = values.get("images") or defaults.get("images", ())
    return images


def _check_out(values: Values, result: str) -> None:
    """Refuse an --out with files that featviz did not write, which are never replaced. An
    earlier result of the command is refused only when the model is loaded, so that an
    error such as a misspelt layer comes first.

    Args:
        result: the name of the record of the command's result.

    Raises:
        StoreError: there are such files.
    """
    from featviz.rundir.place import check_free

    joins_run = values.get("resume") or values.get("shard") is not None
    out = values["out"]
    if joins_run or not isinstance(out, Path) or not out.is_dir():
        return
    # a folder that holds an input is refused by another check, with a message of its own
    names = [values["model"], values["weights"], *values.get("images", ())]
    inputs = [os.path.realpath(str(name).partition(":")[0]) for name in names if name]
    if not any(Path(path).is_relative_to(os.path.realpath(out)) for path in inputs):
        check_free(out, result, overwrite=True)


def click_option(option: Option) -> ClickOption:
    """Make an option of click from the field of a record."""
    flags = list(option.flags)
    settings: dict[str, Any] = {}
    # click passes on the text, and `_read_value` lets the field read it
    if not option.is_flag:
        metavar = option.metavar
        if not metavar and option.choices:
            metavar = f"[{'|'.join(option.choices)}]"
        settings["type"] = str
        settings["metavar"] = metavar or None
        settings["multiple"] = option.repeatable
        settings["required"] = option.default is NODEFAULT
        settings["shell_complete"] = _completion(option)
    elif option.default is not False:
        flags[-1] += f"/--no-{option.name}"
        settings["default"] = option.default
    return ClickOption(
        with_tables(option.help),
        *flags,
        option.name,
        group=option.group,
        first=option.first,
        default_text=_default_text(option),
        callback=partial(_read_value, option),
        **settings,
    )


def _default_text(option: Option) -> str:
    """The default of an option as help shows it; empty if help shows none."""
    if option.default_text:
        return option.default_text
    # no default is shown for a flag; checked first, since a bool is an int
    if isinstance(option.default, bool):
        return ""
    if isinstance(option.default, (str, int, float, Path)):
        return str(option.default)
    return ""


def _read_value(
    option: Option, ctx: click.Context, param: click.Parameter, value: Any
) -> Any:
    """The callback of an option: let the field read the value, and check it. A default is
    returned as it is.

    Args:
        value: the text as it was typed; a tuple of texts if the option may be repeated; a
            bool for a flag; or a value of TOML.

    Raises:
        UsageError: the field cannot read the value, or the check refuses it.
    """
    # a default needs no check, and shell completion shall give no errors
    source = ctx.get_parameter_source(option.name)
    if source is ParameterSource.DEFAULT or ctx.resilient_parsing:
        return option.default
    read = option.value(list(value) if isinstance(value, tuple) else value)
    # None stands for "not given"; a repeatable option gives a tuple
    if option.name in _CHECKS and read is not None:
        module, _, function = _CHECKS[option.name].partition(":")
        check = getattr(import_module(module), function)
        for item in read if isinstance(read, tuple) else (read,):
            check(item)
    return read


def _completion(option: Option) -> Callable[..., list[CompletionItem]] | None:
    """The function that completes values of an option in a shell, to paths or to the
    option's choices; None for other options."""
    if option.is_path:
        return _complete_paths
    if not option.choices:
        return None

    def complete(
        ctx: click.Context, param: click.Parameter, begun: str
    ) -> list[CompletionItem]:
        """The choices that begin with the text that was typed so far."""
        return [
            CompletionItem(choice)
            for choice in option.choices
            if choice.startswith(begun)
        ]

    return complete


def _complete_paths(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


_argument = partial(click.Argument, shell_complete=_complete_paths)
MODEL = _argument(["model"], required=False, metavar="MODEL")
"""In the docstring of a command, {MODEL} stands for the help text of its forms."""
IMAGES = _argument(["images"], nargs=-1, metavar="IMAGE...")
FILE = _argument(["file"], type=_existing_file)
RUN = _argument(["run"], type=existing_run)
BASE = _argument(["base"])
NEW = _argument(["new"])
"""BASE and NEW are runs; with images they are models."""
ANY_IMAGES = _argument(["images"], nargs=-1, metavar="[IMAGE...]")


def run_arguments(name: str, metavar: str) -> click.Argument:
    """The argument of a command that takes one or more run directories.

    Args:
        name: the name of the argument in `Values`.
        metavar: the name in help.
    """
    return _argument(
        [name], nargs=-1, required=True, metavar=metavar, type=existing_run
    )
