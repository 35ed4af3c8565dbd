"""Commands of the command line, and their options: made of the records of `featviz.options`, beside
the few that only the command line has.

`--help` of a long command shows the options that a newcomer needs, `--help-all` all in groups.
"""

from __future__ import annotations

import inspect
import logging
import os
import tomllib
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem
from msgspec import NODEFAULT, Struct

from featviz.cli import mistakes
from featviz.drawing.normalize import in_full
from featviz.errors import FileError, UsageError
from featviz.files import hint_of, misspelt, read_text
from featviz.files.urls import Url, is_url, refuse_url
from featviz.models.sources import MODEL_HELP
from featviz.options import (
    GENERAL,
    GROUPS,
    LISTS,
    OPTIONS,
    OUTPUT,
    ModelOptions,
    Option,
    every_option,
    read_from,
)
from featviz.text import quoted

_MOST = 15  # options that a command shows all at once; one that has more is long
_WHOLE = "featviz.help_all"


class ClickOption(click.Option):
    """An option with its help, which of GROUPS it stands in, whether `--help` of a long command
    shows it, and its default in words; a flag, unless it has a type."""

    def __init__(
        self,
        words: str,
        *names: str,
        group: str = OPTIONS,
        first: bool = False,
        usual: str = "",
        **settings: Any,
    ) -> None:
        settings |= {} if "type" in settings else {"is_flag": True}
        super().__init__(names, help=words, **settings)
        self.group, self.first, self.usual = group, first, f"  [default: {usual}]" * bool(usual)


class Command(click.Command):
    """A command whose options stand in groups; help behind a form feed is for `--help-all`."""

    @property
    def is_long(self) -> bool:
        """Whether `--help` leaves options to `--help-all`."""
        return len(self.params) > _MOST

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """What the command does, and the groups of its options; of a long command only the first
        options, unless all is asked for."""
        whole = not self.is_long or _WHOLE in ctx.meta
        text, _, more = inspect.cleandoc(self.help or "").partition("\f")
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        sections = {"First options": [p for p in options if getattr(p, "first", False)]}
        if whole:  # click's own options, such as --help, are general
            groups = [(p, getattr(p, "group", GENERAL)) for p in options]
            sections = {title: [p for p, group in groups if group == title] for title in GROUPS}
        self.format_usage(ctx, formatter)
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(text + more if whole else text)
        for title, own in sections.items():
            rows = []
            for option in own:
                flags, words = option.get_help_record(ctx) or ("", "")
                brief, _, rest = words.partition("\f")
                usual = getattr(option, "usual", "")
                rows.append((flags, brief + rest * whole + usual))
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
        if not whole:
            examples = ", and more examples" if "xamples:" in more else ""
            formatter.write_paragraph()
            formatter.write_text(
                f"`{ctx.command_path} --help-all` shows all {len(options)} options{examples}."
            )


def _general(ctx: click.Context, param: click.Parameter, given: bool) -> None:
    """--quiet, --verbose and --help-all."""
    if given and param.name == "help_all" and not ctx.resilient_parsing:
        ctx.meta[_WHOLE] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()
    if given:
        level = logging.ERROR if param.name == "quiet" else logging.DEBUG
        logging.getLogger("featviz").setLevel(level)


def _file(text: str) -> Path:
    """A file of this machine that is there; a folder is refused by who reads it."""
    return _there(text, "File")


def _run(text: str) -> Path | Url:
    """A run directory that is there, or the URL of one; the reader of runs refuses a file."""
    return Url.of_run(text) if is_url(text) else _there(text, "Directory")


def _there(text: str, noun: str) -> Path:
    refuse_url(text)
    path = Path(text)
    if not path.exists():
        hint = "check the path" if os.path.lexists(path) else hint_of(path, misspelt(path))
        raise UsageError(f"{noun} {quoted(text)!r} does not exist.", hint)
    return path


_LARGEST_CONFIG = 2**13
"""Bytes of a TOML file: of a long dotted key Python's reader takes the square."""


def read_config(ctx: click.Context, param: click.Parameter, path: Path | None) -> None:
    """Take values of options from a TOML file: top-level keys, or those in a table of the command.
    Values are what one would type; the command line wins over them."""
    if path is None:
        return
    try:
        content = tomllib.loads(read_text(path, _LARGEST_CONFIG))
    except (OSError, FileError, ValueError, RecursionError) as error:
        words = "too many levels" if isinstance(error, RecursionError) else quoted(str(error))
        hint = 'lines of TOML say OPTION = VALUE, such as layers = "ReLU", below [COMMAND] or alone'
        raise UsageError(f"{quoted(str(path))} cannot be read: {words}", hint) from error
    own, group = str(ctx.info_name), ctx.parent.command if ctx.parent else None
    commands = group.list_commands(ctx) if isinstance(group, click.Group) else [own]
    params: dict[str, click.Parameter] = {}
    for one in ctx.command.params:
        names = [name.removeprefix("--") for name in one.opts if name.startswith("--")]
        params |= dict.fromkeys(names or [str(one.name)], one)
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    given = {key: value for key, value in content.items() if key not in tables}
    given |= tables.get(own, {})
    for key in [*tables, *given]:
        known = commands if key in tables else list(params)
        name = key if key in tables else key.replace("_", "-")
        if name not in known:
            what = "no command has" if key in tables else f"{ctx.command_path} lacks"
            close = mistakes.close_to(name, known)
            meant = f"did you mean {close[0]}?" if close else f"one of {', '.join(sorted(known))}"
            raise UsageError(
                f"{path} has {quoted(repr(key))}, which {what}; {meant}",
                "a key is an option's long name without dashes, or model or images; "
                "a table is named as a command is",
            )
    defaults: dict[str, Any] = {}
    for key, value in given.items():
        option = params[key.replace("_", "-")]
        # a list is a list for repeatable options, and one comma-separated value for others
        many = option.multiple if isinstance(option, click.Option) else option.nargs == -1
        if isinstance(value, list) and not many:
            value = ",".join(map(str, value))
        elif isinstance(option, click.Option) and option.is_flag and not isinstance(value, bool):
            value = str(value)  # click reads words
        defaults[str(option.name)] = [value] if many and not isinstance(value, list) else value
    ctx.default_map = {**(ctx.default_map or {}), **defaults}


_CHECKS = {
    "normalize": "featviz.drawing.normalize:parse_scale",
    "cmap": "featviz.drawing.colormap:check_cmap",
    "layers": "featviz.hooks.selectors:parse",
    "device": "featviz.models.requirements:check_device",
    "background": "featviz.images.decode:check_background",
    "target": "featviz.gradients.targets:parse",
    "tensor_layout": "featviz.layout.tracing.guess:parse_override",
    "ablate": "featviz.gradients.targets:parse_ablate",
    "edit": "featviz.gradients.targets:parse_edit",
    "fail_on": "featviz.audit.gates:parse_gate",
}
"""What refuses values that have a grammar of their own while the command line is read: before torch
is imported, which takes seconds; and imported only for a value, since --help waits for no numpy."""


Given = dict[str, Any]
"""What a command line gave: values of options and arguments by name, and `source`, the options of
the model."""


def command(
    *records: type[Struct],
    arguments: Sequence[click.Argument] = (),
    flags: Sequence[click.Option] = (),
    json: str = "one JSON document",
    but: Collection[str] = (),
    first: Collection[str] = (),
    check: Callable[[Given], object] | None = None,
    **defaults: Any,
) -> Callable[[Callable[[Given], int]], Command]:
    """Make a command of a function that takes what was given and returns an exit code.

    Args:
        *records: its options are the fields of these records, and of those nested in them, `but`
            for some; `flags` are options that only the command line has.
        json: what --json prints on stdout.
        first: fields whose options `--help` shows, beside those that it shows of each command.
        check: refuses options that cannot go together, before torch is imported.
        **defaults: of this command, where they are not those of the record.
    """
    options = every_option(*records)
    options |= {name: replace(options[name], default=value) for name, value in defaults.items()}
    options |= {name: replace(options[name], first=True) for name in first}
    general: dict[str, Any] = {"group": GENERAL, "expose_value": False, "callback": _general}
    params = [
        *arguments,
        *(click_option(one) for name, one in options.items() if name not in but),
        *flags,
        ClickOption(f"Print {json} on stdout.", "--json", group=OUTPUT),
        ClickOption(
            "Read values of options from this TOML file; the command line wins over it.",
            "--config",
            **(general | {"callback": read_config, "is_eager": True, "type": _file}),
            metavar="FILE",
            shell_complete=_paths,
        ),
        ClickOption("Print only errors on stderr.", "-q", "--quiet", **general),
        ClickOption("Print more details, and tracebacks, on stderr.", "-v", "--verbose", **general),
    ]
    if len(params) > _MOST:
        words = "Show all options in groups and exit."
        params.append(ClickOption(words, "--help-all", is_eager=True, **general))

    def decorate(function: Callable[[Given], int]) -> Command:
        words = str(function.__doc__).replace("{MODEL}", MODEL_HELP)
        call = partial(_call, function, check)
        return Command(function.__name__, params=params, callback=call, help=words)

    return decorate


def _call(
    function: Callable[[Given], int], check: Callable[[Given], object] | None, **given: Any
) -> int:
    """Call a command; a MODEL or IMAGE that is not there is refused before torch is imported."""
    if "model" not in given:
        return function(given)
    from featviz.images.find import check_arguments
    from featviz.models.requirements import check_current_folder, require_torch
    from featviz.models.sources import check_words

    check_current_folder()
    ctx, model = click.get_current_context(), given["model"]
    images = given.get("images") or (ctx.default_map or {}).get("images", ())
    if model and "images" in given:
        mistakes.refuse_swapped(ctx, model, images)
    if not model or ("images" in given and not images and not given["input"]):
        raise mistakes.missing("images" if model else "model", ctx)
    given |= {"source": read_from(ModelOptions, {**given}, spec=model), "images": images}
    check_words(given["source"])
    check_arguments(images)
    if check is not None:
        check(given)
    require_torch(alone=True)
    return function(given)


def click_option(option: Option) -> ClickOption:
    """An option of click: flags, help and what it takes are the field's."""

    def read(ctx: click.Context, param: click.Parameter, given: Any) -> Any:
        source = ctx.get_parameter_source(option.name)
        if source is ParameterSource.DEFAULT or ctx.resilient_parsing:
            return option.default
        value = option.value(list(given) if isinstance(given, tuple) else given)
        if option.name in _CHECKS and value is not None:
            module, function = _CHECKS[option.name].split(":")
            check = getattr(import_module(module), function)
            for one in value if isinstance(value, tuple) else (value,):
                check(one)
        return value

    def offered(ctx: click.Context, param: click.Parameter, begun: str) -> list[CompletionItem]:
        return [CompletionItem(word) for word in option.choices if word.startswith(begun)]

    usual, flags = option.usual or option.default, list(option.flags)
    settings: dict[str, Any] = {"group": option.group, "first": option.first, "callback": read}
    if isinstance(usual, (str, int, float, Path)) and not isinstance(usual, bool):
        settings["usual"] = str(usual)
    if bool not in option.kinds:
        metavar = option.metavar or f"[{'|'.join(option.choices)}]" * bool(option.choices) or None
        settings |= {"type": str, "multiple": option.many or option.read in LISTS}
        settings |= {"metavar": metavar, "required": option.default is NODEFAULT}
        is_path = Path in option.kinds or option.name in ("arch", "weights", "transform")
        settings["shell_complete"] = _paths if is_path else offered if option.choices else None
    elif option.default is not False:
        flags[-1] += f"/--no-{option.name}"
        settings["default"] = option.default
    return ClickOption(in_full(option.words), *flags, option.name, **settings)


def _paths(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(incomplete, type="file")]


MODEL = click.Argument(["model"], required=False, metavar="MODEL", shell_complete=_paths)
"""Its forms stand in a command's help where that says {MODEL}."""
IMAGES = click.Argument(["images"], nargs=-1, metavar="IMAGE...", shell_complete=_paths)
FILE = click.Argument(["file"], type=_file, shell_complete=_paths)


def run_argument(name: str, metavar: str | None = None) -> click.Argument:
    """A run directory; with a metavar one or more."""
    settings: dict[str, Any] = (
        {"nargs": -1, "required": True, "metavar": metavar} if metavar else {}
    )
    return click.Argument([name], type=_run, shell_complete=_paths, **settings)
