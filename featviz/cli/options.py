"""Options of the command line: made of the records of `featviz.options`, and those that only the
command line has."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem
from msgspec import Struct

from featviz.cli import values
from featviz.cli.command import ClickOption
from featviz.cli.values import EXISTING_FILE
from featviz.drawing.normalize import in_full
from featviz.models.sources import MODEL_HELP
from featviz.options import (
    GENERAL,
    HPARAMS,
    LISTS,
    OUTPUT,
    ModelOptions,
    Option,
    declared,
)

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R", bound=Struct)

_CHECKS = {
    "normalize": "featviz.drawing.normalize:parse_scale",
    "cmap": "featviz.drawing.colormap:check_cmap",
    "layers": "featviz.hooks.selectors:parse",
    "device": "featviz.models.requirements:check_device",
    "background": "featviz.images.decode:check_background",
    "target": "featviz.gradients.targets:parse",
    "tensor_layout": "featviz.layout.guess:parse_override",
    "ablate": "featviz.gradients.interventions:parse_ablate",
    "edit": "featviz.gradients.interventions:parse_edit",
    "out": "featviz.cli.values:lasting",
    "compare": "featviz.cli.values:lasting",
    "fail_on": "featviz.records.findings:parse_gate",
}
"""What refuses values that have a grammar of their own while the command line is read: before torch
is imported, which takes seconds; and imported only for a value, since --help waits for no numpy."""


def _check(name: str, value: Any) -> None:
    module, function = _CHECKS[name].split(":")
    check = getattr(import_module(module), function)
    for one in value if isinstance(value, tuple) else (value,):
        check(one)


def paths(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """What a shell offers for a value that may be a path."""
    return [CompletionItem(incomplete, type="file")]


def _offered(option: Option) -> Any:
    """What a shell offers for the value of an option."""
    if option.choices:
        return lambda ctx, param, incomplete: [
            CompletionItem(word) for word in option.choices if word.startswith(incomplete)
        ]
    is_path = Path in option.kinds or option.name in ("arch", "weights", "transform")
    return paths if is_path else None


def click_option(option: Option) -> Callable[[F], F]:
    """An option of click: flags, help and what it takes are the field's."""

    def read(ctx: click.Context, param: click.Parameter, given: Any) -> Any:
        source = ctx.get_parameter_source(option.name)
        if source is ParameterSource.DEFAULT or ctx.resilient_parsing:
            return option.default
        value = option.value(list(given) if isinstance(given, tuple) else given)
        if option.name in _CHECKS and value is not None:
            _check(option.name, value)
        return value

    help, usual = in_full(option.words), option.usual or option.default
    flags, settings = list(option.flags), dict[str, Any](is_flag=True)
    if isinstance(usual, (str, int, float, Path)) and not isinstance(usual, bool):
        settings["usual"] = str(usual)
    if bool not in option.kinds:
        several = option.many or option.read in LISTS
        metavar = option.metavar or f"[{'|'.join(option.choices)}]" * bool(option.choices) or None
        del settings["is_flag"]
        settings |= {"type": str, "multiple": several, "metavar": metavar}
        settings |= {"shell_complete": _offered(option), "required": not option.has_default}
    elif option.default is not False:
        flags[-1] += f"/--no-{option.name}"
        settings["default"] = option.default
    settings |= {"group": option.group, "first": option.first, "help": help, "callback": read}
    return click.option(*flags, option.name, cls=ClickOption, **settings)


def options_of(
    *kinds: type[Struct], but: Collection[str] = (), **defaults: Any
) -> Callable[[F], F]:
    """The options of records as one decorator, without those named, with defaults of a command."""
    chosen = {name: one for kind in kinds for name, one in declared(kind).items()}
    chosen |= {name: replace(chosen[name], default=value) for name, value in defaults.items()}

    def decorate(function: F) -> F:
        for name in reversed(chosen):
            if name not in but:
                function = click_option(chosen[name])(function)
        return function

    return decorate


def record(kind: type[R], given: dict[str, Any], **further: Any) -> R:
    """A record of the values of a command line, which `options_of` has read."""
    return kind(**{name: given[name] for name in declared(kind) if name in given}, **further)


def own_option(*names: str, help: str, **settings: Any) -> Callable[[F], F]:
    """A flag, or another option, that only the command line has."""
    settings = {"is_flag": "type" not in settings, **settings}
    return click.option(*names, cls=ClickOption, help=help, **settings)


def model_argument(function: F) -> F:
    """MODEL, whose forms stand in the command's help where it says {MODEL}."""
    function.__doc__ = str(function.__doc__).replace("{MODEL}", MODEL_HELP)
    return click.argument("model", required=False, metavar="MODEL", shell_complete=paths)(function)


images_argument = click.argument("images", nargs=-1, metavar="IMAGE...", shell_complete=paths)


def json_option(what: str = "one JSON document") -> Callable[[F], F]:
    """`--json`; `what` is printed on stdout."""
    return own_option("--json", "as_json", group=OUTPUT, help=f"Print {what} on stdout.")


def open_option(help: str) -> Callable[[F], F]:
    """`--open`, which shows a page in the user's browser."""
    return own_option("--open", group=OUTPUT, first=True, help=help)


no_shard_option = own_option(
    "--shard", type=str, hidden=True, help="Is refused: images are not divided here."
)
"""For commands that refuse it, and say why: see `share.refuse_shares`."""


def _set_level(level: int) -> Callable[[click.Context, click.Parameter, bool], None]:
    def set_level(ctx: click.Context, param: click.Parameter, given: bool) -> None:
        if given:
            logging.getLogger("featviz").setLevel(level)

    return set_level


def general_options(function: F) -> F:
    """`--config`, `-q` and `-v`, which every command has."""
    for names, level, help in (
        (("-v", "--verbose"), logging.DEBUG, "Print more details, and tracebacks, on stderr."),
        (("-q", "--quiet"), logging.ERROR, "Print only errors on stderr."),
    ):
        settings: Any = {"expose_value": False, "callback": _set_level(level), "group": GENERAL}
        function = own_option(*names, help=help, **settings)(function)
    return own_option(
        "--config",
        type=EXISTING_FILE,
        callback=values.read_config,
        is_eager=True,
        expose_value=False,
        group=GENERAL,
        help="Read values of options from this TOML file; the command line wins over it.",
    )(function)


def images_of(ctx: click.Context, given: dict[str, Any]) -> Any:
    """The words of IMAGE, of the command line or of --config."""
    return values.given_or_config(ctx, "images", given["images"])


def to_model_options(ctx: click.Context, given: dict[str, Any]) -> ModelOptions:
    """The options of the model, as a record; a MODEL or IMAGE that is not there is refused before
    torch is imported.

    Raises:
        FeatvizError: there is none; or torch is missing, or cannot be loaded.
    """
    from featviz.images.find import check_arguments
    from featviz.models.requirements import require_torch
    from featviz.models.sources import check_words

    arguments = dict(given["model_args"])
    options = record(
        ModelOptions,
        {**given, "model_args": arguments},
        spec=values.given_or_config(ctx, "model", given["model"]),
        hparams=bool(arguments.pop(HPARAMS, False)),
    )
    images = images_of(ctx, given) if "images" in given else ()
    check_words(options)
    check_arguments(images)
    require_torch(alone=True)
    return options
