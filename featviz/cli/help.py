"""Commands and options as --help shows them: in groups, and of a long command the first ones.

The declaration of an option says in which group it stands and whether a newcomer needs it, and
nothing else lists options. `--help` of a long command shows the first ones, `--help-all` all.
"""

from __future__ import annotations

import inspect
from typing import Any

import click

from featviz.cli import mistakes
from featviz.options import GENERAL, GROUPS, OPTIONS

_MOST = 15
"""Options that a command shows all at once; one that has more is long."""

_WHOLE = "featviz.help_all"


class ClickOption(click.Option):
    """An option with its place in help.

    Args:
        group: the heading under which it stands, one of GROUPS.
        first: whether `--help` of a long command shows it.
        usual: the default in words.
        is_list: whether it takes a list, whose parts a space would cut.
    """

    def __init__(
        self,
        *names: str,
        group: str = OPTIONS,
        first: bool = False,
        usual: str = "",
        is_list: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(names, **settings)
        self.group, self.first, self.usual, self.is_list = group, first, usual, is_list

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        """Its flags, and its help with the default; what stands behind a form feed is for
        `--help-all`."""
        record = super().get_help_record(ctx)
        if record is None:
            return None
        brief, _, more = record[1].partition("\f")
        words = brief + more if shows_all(ctx) else brief
        return record[0], words + f"  [default: {self.usual}]" * bool(self.usual)


def shows_all(ctx: click.Context) -> bool:
    """Whether help leaves nothing out: that of a short command, and `--help-all`."""
    return not getattr(ctx.command, "is_long", False) or _WHOLE in ctx.meta


class Command(click.Command):
    """A command whose options stand in groups.

    The part of its help behind a form feed is for `--help-all`.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.is_long = len(self.params) > _MOST
        if self.is_long:
            words = "Show all options in groups and exit."
            flag: dict[str, Any] = {"is_flag": True, "is_eager": True, "expose_value": False}
            self.params.append(
                ClickOption("--help-all", help=words, group=GENERAL, callback=_show_all, **flag)
            )

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read a command line."""
        if not ctx.resilient_parsing:
            mistakes.refuse_spaces(ctx, args)
        try:
            return super().parse_args(ctx, args)
        except click.MissingParameter as error:
            if not isinstance(error.param, click.Argument):
                raise
            raise mistakes.missing(str(error.param.name), ctx) from None

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """What the command does; all that there is to say, where no option is left out."""
        if not shows_all(ctx):
            super().format_help_text(ctx, formatter)
            return
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text(inspect.cleandoc(self.help or "").replace("\f", ""))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The groups of options, or of a long command the first options."""
        options = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        sections = {"First options": [p for p in options if getattr(p, "first", False)]}
        if shows_all(ctx):  # click's own options, such as --help, are general
            groups = [(p, getattr(p, "group", GENERAL)) for p in options]
            sections = {title: [p for p, group in groups if group == title] for title in GROUPS}
        for title, own in sections.items():
            if own:
                with formatter.section(title):
                    formatter.write_dl([r for p in own if (r := p.get_help_record(ctx))])

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Where the rest is."""
        if shows_all(ctx):
            return
        count = sum(isinstance(p, click.Option) for p in self.get_params(ctx))
        behind = (self.help or "").partition("\f")[2]
        more = ", and more examples" if "xamples:" in behind else ""
        formatter.write_paragraph()
        formatter.write_text(f"`{ctx.command_path} --help-all` shows all {count} options{more}.")


def _show_all(ctx: click.Context, param: click.Parameter, given: bool) -> None:
    if given and not ctx.resilient_parsing:
        ctx.meta[_WHOLE] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()
