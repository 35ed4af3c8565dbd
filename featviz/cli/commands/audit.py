"""`featviz audit`."""

from __future__ import annotations

import logging
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from featviz.cli import complete, echo, tables
from featviz.cli import options as opts
from featviz.errors import FeatvizError
from featviz.records.findings import FINDINGS, Thresholds

if TYPE_CHECKING:
    from featviz.audit import AuditResult
    from featviz.audit.model_audit import Progress

log = logging.getLogger(__name__)

audit_options = opts.stacked(
    [
        click.option(
            "--model",
            "more_models",
            multiple=True,
            metavar="MODEL",
            help="A further model; repeatable, or a quoted glob. The table gets a column for each.",
        ),
        click.option(
            "--batch-size",
            type=int,
            default=1,
            show_default=True,
            help="Images of one shape that go through together.",
        ),
        click.option(
            "--eps",
            type=float,
            default=0.0,
            show_default=True,
            help="A channel is dead if never above this, constant if its values are within it.",
        ),
        click.option(
            "--saturated-at",
            type=float,
            default=0.99,
            show_default=True,
            help="A channel is saturated if more than this share of its values is at a bound.",
        ),
        click.option(
            "--redundant-at",
            type=float,
            help="Look for channels that correlate with another above this.",
        ),
        click.option(
            "--fail-on",
            multiple=True,
            metavar="GATE",
            help="dead>5%, nonfinite>0, 'layer3.*:constant>2'; repeatable. Broken: exit code 4.",
        ),
        click.option(
            "--baseline",
            type=click.Path(dir_okay=False, path_type=Path),
            help="An earlier audit.json; what is worse than it: exit code 4.",
        ),
        click.option(
            "--junit",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Write the verdicts as JUnit XML.",
        ),
        click.option(
            "--prune-out",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Write the channels that can be cut out: {layer: [channels]}.",
        ),
        click.option(
            "--verify",
            is_flag=True,
            help="Run again without the channels that can be cut out, and say what changes.",
        ),
        click.option(
            "--max-suspects",
            type=int,
            default=48,
            show_default=True,
            help="Channels with a finding that are drawn at most.",
        ),
    ]
)


def _definitions() -> str:
    """A paragraph of the help, with a finding on each line."""
    lines = [
        textwrap.fill(
            finding.definition, 78, initial_indent=f"{name:<11}", subsequent_indent=" " * 11
        )
        for name, finding in FINDINGS.items()
    ]
    return "\b\n" + "\n".join(lines)


_HELP = f"""Stream images through a model, and find channels that do nothing for them.

Without --layers all activations are looked at, functions included. A verdict holds for these
images: a channel that is dead on them may live on others.

{_definitions()}

\b
Examples:
  featviz audit resnet18 photos/
  featviz audit model.pth photos/ --fail-on 'dead>5%' --fail-on 'nonfinite>0'
  featviz audit model.pth photos/ --prune-out prune.json --verify
  featviz audit new.pth photos/ --baseline featviz-audit/audit.json --out new
  featviz audit 'runs/epoch_*.pth' photos/ --out history
  torchrun --nproc-per-node 4 -m featviz audit resnet18 photos/   # each counts its share

Exit codes: 0 done, 1 failed, 2 usage, 3 some images failed, 4 a gate is broken.
"""


@click.command("audit", help=_HELP)
@click.argument("model", required=False, shell_complete=complete.models)
@click.argument("images", nargs=-1, metavar="IMAGE...", shell_complete=complete.paths)
@opts.layer_options("all activations, functions included")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("featviz-audit"),
    show_default=True,
    help="The folder of the results.",
)
@click.option("--overwrite", is_flag=True, help="Replace the audit in --out.")
@click.option("-0", "--null", "nul", is_flag=True, help="With IMAGE -: paths end with NUL.")
@click.option("--json", "as_json", is_flag=True, help="audit.json on stdout.")
@audit_options
@opts.input_options
@opts.model_options
@opts.config_option
@opts.verbosity_options
@click.pass_context
def command(ctx: click.Context, /, model: str | None, images: Sequence[str], **given: Any) -> int:
    """Audit the models, print the table, and return the exit code."""
    models = _models(ctx, model, given["more_models"])
    images = opts.given_or_config(ctx, "images", images)
    from featviz.models.requirements import require_torch

    require_torch()
    from featviz import audit
    from featviz.pipeline import processes

    sources = [opts.to_model_options(name, given) for name in models]
    with _progress() as progress, processes.world() as team:
        result = audit.audit(sources, images, _audit_options(given), progress, team=team)
        if not team.first:
            return 0
    if given["as_json"]:
        echo.document(result.as_json())
    else:
        _table(result)
    _conclude(result)
    return result.exit_code


def _models(ctx: click.Context, model: str | None, more: Sequence[str]) -> list[str]:
    """The MODEL argument, then those of --model; those of a config file only where none is given
    on the command line."""
    configured = ctx.get_parameter_source("more_models") is ParameterSource.DEFAULT_MAP
    found = [model] if model else []
    if not (found and configured):
        found += more
    if not found:
        raise click.UsageError("Missing argument 'MODEL'.", ctx)
    return found


def _audit_options(given: dict[str, Any]) -> Any:
    from featviz.audit import AuditOptions
    from featviz.audit.model_audit import AuditRequest

    asked = AuditRequest(
        layers=",".join(given["layers"]) or None,
        inputs=opts.to_input_options(given),
        thresholds=Thresholds(given["eps"], given["saturated_at"], given["redundant_at"]),
        **{name: given[name] for name in ("batch_size", "verify", "max_suspects")},
    )
    names = ("out", "overwrite", "fail_on", "baseline", "junit", "prune_out")
    return AuditOptions(asked, nul_separated=given["nul"], **{name: given[name] for name in names})


@contextmanager
def _progress() -> Iterator[Progress]:
    """Failures on stderr; a bar only on a terminal."""
    with opts.bar() as advance:

        def report(image: str, error: FeatvizError | None, total: int) -> None:
            advance(total)
            if error is not None:
                echo.error(f"{image}: {error.message}", error.hint)

        yield report


def _table(result: AuditResult) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    fill = _one_model if len(result.models) == 1 else _several_models
    table.add_column("layer", overflow="fold", no_wrap=not sys.stdout.isatty())
    fill(table, result)
    console = Console()
    if not console.is_terminal:  # for grep and awk: a line is a line
        console = Console(width=max(console.width, 400))
    console.print(table)


def _one_model(table: Any, result: AuditResult) -> None:
    document = result.models[0].document
    total = document["total"]
    asked = [name for name in FINDINGS if name in total["findings"]]
    table.add_column("type")
    for name in ("channels", "APoZ", *asked):
        table.add_column(name, justify="right")
    for row in document["layers"]:
        cells = (row["label"], row["type"], *_cells(row, row["findings"], asked))
        table.add_row(*map(tables.cell, cells))
    counts = {name: range(count) for name, count in total["findings"].items()}
    table.add_row("total", "", *_cells(total, counts, asked), style="bold")


def _cells(
    row: Mapping[str, Any], found: Mapping[str, Sequence[int]], asked: Sequence[str]
) -> list[str]:
    apoz = "-" if row["apoz"] is None else f"{100 * row['apoz']:.1f}%"
    return [str(row["channels"]), apoz] + [
        str(len(found[name])) if name in found else "-" for name in asked
    ]


def _several_models(table: Any, result: AuditResult) -> None:
    """A column for each model: how many channels of a layer have which finding."""
    columns = []
    for model in result.models:
        table.add_column(tables.cell(model.label))
        columns.append({row["label"]: row for row in model.document["layers"]})
    for label in dict.fromkeys(label for column in columns for label in column):
        cells = (label, *(_words(column.get(label)) for column in columns))
        table.add_row(*map(tables.cell, cells))
    totals = [model.document["total"] for model in result.models]
    for name in FINDINGS:
        if any(name in total["findings"] for total in totals):
            table.add_row(f"total {name}", *(_share(total, name) for total in totals), style="bold")


def _words(row: Mapping[str, Any] | None) -> str:
    if row is None:
        return "-"
    found = [f"{len(own)} {name}" for name, own in row["findings"].items() if own]
    return ", ".join(found) or "0"


def _share(total: Mapping[str, Any], name: str) -> str:
    count, channels = total["findings"].get(name), total["judged"].get(name)
    return "-" if not channels else f"{count} of {channels} ({100 * count / channels:.1f}%)"


def _conclude(result: AuditResult) -> None:
    """On stderr: what was seen, what a verification gave, and the broken gates."""
    for model in result.models:
        named = f"{model.label}: " if len(result.models) > 1 else ""
        images = model.document["images"]
        log.info("%s%d images seen; the verdicts hold for these images", named, images["seen"])
        if (proof := model.document["verify"]) is not None:
            log.info("%s%s", named, _proof(proof))
        for verdict in model.verdicts:
            if not verdict.held:
                log.error("%sgate %s is broken: %s", named, verdict.gate, verdict.words)
    log.info("results in %s", result.out)


def _proof(proof: Mapping[str, Any]) -> str:
    if not proof["channels"]:
        return "nothing to verify: no channel can be cut out"
    change, nonfinite = proof["largest_change"], proof.get("nonfinite", 0)
    words = "has another shape" if change is None else f"changes by {change:g} at most"
    if nonfinite:
        words += f", and {nonfinite} of its values become, or cease to be, NaN or infinite"
    return (
        f"without the {proof['channels']} channels that can be cut out the output {words} "
        f"({proof['images']} images)"
    )
