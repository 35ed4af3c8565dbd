"""Commands and options as --help shows them: in groups, and of a long command the first ones.

The declaration of an option says in which group it stands and whether a newcomer needs it, and
nothing else lists options. `--help` of a long command shows the first ones, `--help-all` all.
"""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Sequence
from typing import Any

import click

from featviz.cli.mistakes import refuse_spaces_in_a_list, refuse_swapped, unknown_option
from featviz.options import GENERAL, GROUPS, OPTIONS

_MOST = 15
"""Options that a command shows all at once; one that has more is long."""

_WHOLE = "featviz.help_all"


class ClickOption(click.Option):
    """An option with its place in help.

    Args:
        group: the heading under which it stands, one of GROUPS.
        first: whether `--help` of a long command shows it, or the words that stand there in place
            of a long help text.
        usual: the default in words.
    """

    def __init__(
        self,
        *names: Any,
        group: str | None = None,
        first: bool | str = False,
        usual: str = "",
        **settings: Any,
    ) -> None:
        super().__init__(*names, **settings)
        self.group, self.first, self.usual = group, first, usual

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Its flags, and its help with the default."""
        record = super().get_help_record(ctx)
        if record is None or not self.usual:
            return record
        return record[0], f"{record[1]}  [default: {self.usual}]"

    def brief(self) -> ClickOption:
        """The option as `--help` of a long command shows it."""
        if not isinstance(self.first, str):
            return self
        shown = copy.copy(self)
        shown.help = self.first
        return shown


class Formatter(click.HelpFormatter):
    """Click's formatter, with headings and options set off; click drops that where no terminal is.

    https://no-color.org: a terminal whose user has set NO_COLOR gets none.
    """

    def write_heading(self, heading: str) -> None:
        """A heading in bold."""
        super().write_heading(_styled(heading, bold=True))

    def write_dl(self, rows: Any, col_max: int = 26, col_spacing: int = 2) -> None:
        """A list of options or commands, whose names are cyan."""
        super().write_dl([(_styled(a, fg="cyan"), b) for a, b in rows], col_max, col_spacing)


def _styled(words: str, **style: Any) -> str:
    return words if os.environ.get("NO_COLOR") else click.style(words, **style)


class Context(click.Context):
    """What a command line is read in."""

    formatter_class = Formatter


class Command(click.Command):
    """A command whose options stand in groups.

    The part of its help behind a form feed is for `--help-all`.
    """

    context_class = Context

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if self.is_long:
            self.params.append(_help_all())

    @property
    def is_long(self) -> bool:
        """Whether --help shows only the first options."""
        return len(self.params) > _MOST

    @property
    def _behind(self) -> str:
        return (self.help or "").partition("\f")[2]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read a command line; what is a known mistake is refused with the command that was meant.

        Raises:
            click.UsageError: it cannot be read.
        """
        words = list(args)
        if not ctx.resilient_parsing:
            refuse_spaces_in_a_list(ctx, words)
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise unknown_option(error, ctx, words) from error
        refuse_swapped(ctx, words)
        return rest

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """What the command does; all that there is to say, where no option is left out."""
        if _whole(ctx):
            formatter.write_paragraph()
            with formatter.indentation():
                formatter.write_text(inspect.cleandoc(self.help or "").replace("\f", ""))
        else:
            super().format_help_text(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The groups of options, or of a long command the first options."""
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        if not _whole(ctx):
            first = [p.brief() for p in options if isinstance(p, ClickOption) and p.first]
            _section(ctx, formatter, "First options", first)
            return
        for group in GROUPS:
            _section(ctx, formatter, group, [p for p in options if _group_of(p) == group])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Where the rest is."""
        if not _whole(ctx):
            params = self.get_params(ctx)
            options = sum(isinstance(p, click.Option) and not p.hidden for p in params)
            formatter.write_paragraph()
            more = ", and more examples" if "xamples:" in self._behind else ""
            formatter.write_text(
                f"`{ctx.command_path} --help-all` shows all {options} options{more}."
            )


def _whole(ctx: click.Context) -> bool:
    return not getattr(ctx.command, "is_long", False) or _WHOLE in ctx.meta


def _group_of(param: click.Parameter) -> str:
    """Click's own options, such as --help, are general."""
    return param.group or OPTIONS if isinstance(param, ClickOption) else GENERAL


def _section(
    ctx: click.Context, formatter: click.HelpFormatter, title: str, params: Sequence[Any]
) -> None:
    records = [record for p in params if (record := p.get_help_record(ctx)) is not None]
    if records:
        with formatter.section(title):
            formatter.write_dl(records)


def _help_all() -> ClickOption:
    def show(ctx: click.Context, param: click.Parameter, given: bool) -> None:
        if given and not ctx.resilient_parsing:
            ctx.meta[_WHOLE] = True
            click.echo(ctx.get_help(), color=ctx.color)
            ctx.exit()

    return ClickOption(
        ["--help-all"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        group=GENERAL,
        help="Show all options in groups and exit.",
    )
