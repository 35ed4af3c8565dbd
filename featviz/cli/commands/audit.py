"""`featviz audit`."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from featviz.cli import mistakes, output
from featviz.cli import options as opts
from featviz.cli.command import FINDINGS, MODEL, OUTPUT, Command
from featviz.cli.values import FILE, given_or_config
from featviz.models.sources import MODEL_HELP
from featviz.records import UNLIKE_OUTPUTS, gates
from featviz.records.findings import FINDINGS as KNOWN_FINDINGS
from featviz.records.findings import Thresholds
from featviz.text import counted

if TYPE_CHECKING:
    from featviz.audit import AuditResult

log = logging.getLogger(__name__)

audit_options = opts.stacked(
    opts.option(
        "--model",
        "more_models",
        multiple=True,
        metavar="MODEL",
        group=MODEL,
        help="Audit this model, too, in a column of its own; repeatable, or a quoted glob.",
    ),
    opts.batch_size_option,
    opts.field_option(
        Thresholds,
        "--eps",
        "Take values of at most E for zero, and values no further apart than E for equal.",
        metavar="E",
    ),
    opts.field_option(
        Thresholds,
        "--saturated-at",
        "Call a channel saturated where more than this share of its values is at a bound.",
        metavar="SHARE",
    ),
    opts.field_option(
        Thresholds,
        "--redundant-at",
        "Look for redundant channels, whose correlation with another is above R.",
        type=float,
        metavar="R",
    ),
    opts.option(
        "--fail-on",
        multiple=True,
        metavar="GATE",
        callback=opts.checked(opts.each(gates.parse)),
        first=True,
        help="End with exit code 4 where this gate is broken: dead>5%, nonfinite>0, "
        "'layer3.*:constant>2'; repeatable.",
    ),
    opts.option(
        "--baseline",
        type=FILE,
        first=True,
        help="End with exit code 4 where findings are worse than in this earlier audit.json.",
    ),
    opts.junit_option,
    opts.option(
        "--prune-out",
        type=FILE,
        group=OUTPUT,
        first=True,
        help="Write the channels that can be cut out into this JSON file: {layer: [channels]}.",
    ),
    opts.option(
        "--verify",
        is_flag=True,
        first=True,
        help="Run the images again without the channels that can be cut out, and print by how "
        "much the output changes.",
    ),
    opts.option(
        "--max-suspects",
        type=int,
        default=48,
        group=OUTPUT,
        help="Draw at most N of the channels that have a finding.",
    ),
    group=FINDINGS,
)


def _definitions() -> str:
    """A paragraph of the help, with a finding on each line."""
    lines = [
        textwrap.fill(
            finding.definition, 78, initial_indent=f"{name:<11}", subsequent_indent=" " * 11
        )
        for name, finding in KNOWN_FINDINGS.items()
    ]
    return "\b\n" + "\n".join(lines)


_named = ", ".join(KNOWN_FINDINGS)

_HELP = f"""Stream images through a model, and find channels that do nothing for them.

Findings are {_named}. A verdict holds for these images: a channel that is dead on them may live on
others.

\b
Examples:
  featviz audit resnet18 photos/
  featviz audit model.pth photos/ --fail-on 'dead>5%' --fail-on 'nonfinite>0'
  featviz audit model.pth photos/ --prune-out prune.json --verify
  featviz audit new.pth photos/ --baseline old/audit.json --out new

{MODEL_HELP}

Exit codes: 0 done, 1 failed, 2 usage, 3 some images failed, 4 a gate is broken.
\f
What the findings of a channel mean:

{_definitions()}

\b
More examples:
  featviz audit 'runs/epoch_*.pth' photos/ --out history  # a column for each
  torchrun --nproc-per-node 4 -m featviz audit resnet18 photos/
"""


@click.command("audit", cls=Command, help=_HELP)
@opts.model_argument
@opts.images_argument
@opts.layers_option(
    opts.select_layers, default="all activations, functions included", first=opts.select_in_short
)
@opts.out_option("Write the results into this folder.", "featviz-audit")
@opts.overwrite_option("the audit")
@opts.null_option
@opts.json_option("audit.json")
@opts.readers_option
@opts.timeout_option
@audit_options
@opts.input_options
@opts.model_options
@opts.config_option
@opts.verbosity_options
@click.pass_context
def command(ctx: click.Context, /, model: str | None, images: Sequence[str], **given: Any) -> int:
    """Audit the models, print the table, and return the exit code."""
    models = _models(ctx, model, given["more_models"])
    images = given_or_config(ctx, "images", images)
    sources = [opts.to_model_options(name, given) for name in models]
    from featviz.audit import audit
    from featviz.audit.output import audit_table
    from featviz.pipeline import processes

    with output.batch_progress() as progress, processes.world(given["timeout"]) as team:
        result = audit(sources, images, _audit_options(given), progress, team=team)
        if not team.first:
            return 0
    if given["as_json"]:
        output.document(result.as_json())
    else:
        output.table(*audit_table(result))
    _conclude(result)
    return result.exit_code


def _models(ctx: click.Context, model: str | None, more: Sequence[str]) -> list[str]:
    """The MODEL argument, then those of --model; those of a config file only where none is given
    on the command line."""
    configured = ctx.get_parameter_source("more_models") is ParameterSource.DEFAULT_MAP
    models = [model] if model else []
    if not (models and configured):
        models += more
    if not models:
        raise mistakes.missing("model", ctx)
    return models


def _audit_options(given: dict[str, Any]) -> Any:
    from featviz.audit import AuditOptions
    from featviz.audit.model_audit import AuditRequest

    asked = AuditRequest(
        layers=opts.selectors(given),
        inputs=opts.to_input_options(given),
        thresholds=Thresholds(**opts.fields_of(Thresholds, given)),
        **{name: given[name] for name in ("batch_size", "verify", "max_suspects")},
    )
    names = ("out", "overwrite", "fail_on", "baseline", "junit", "prune_out")
    return AuditOptions(asked, nul_separated=given["nul"], **{name: given[name] for name in names})


def _conclude(result: AuditResult) -> None:
    """On stderr: what was seen, what a verification gave, and the broken gates."""
    for model in result.models:
        named = f"{model.label}: " if len(result.models) > 1 else ""
        images = model.document["images"]
        seen = counted(images["seen"], "image")
        log.info("%s%s seen; the verdicts hold for these images", named, seen)
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
    if change is None:
        words = f"cannot be compared: {UNLIKE_OUTPUTS}"
    else:
        words = f"changes by {change:g} at most"
    if nonfinite:
        words += f", and {nonfinite} of its values become, or cease to be, NaN or infinite"
    return (
        f"without the {counted(proof['channels'], 'channel')} that can be cut out the output "
        f"{words} ({counted(proof['images'], 'image')})"
    )
