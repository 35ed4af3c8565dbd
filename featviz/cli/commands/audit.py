"""`featviz audit`."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from featviz.cli import options as opts
from featviz.cli import output
from featviz.cli.command import Command
from featviz.models.sources import MODEL_HELP
from featviz.options import AuditOptions, InputOptions, ModelOptions, Thresholds
from featviz.records import UNLIKE_OUTPUTS
from featviz.records.findings import FINDINGS as KNOWN_FINDINGS
from featviz.text import counted

if TYPE_CHECKING:
    from featviz.audit.audit import AuditResult

log = logging.getLogger(__name__)


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
  featviz audit model.pth photos/ --prune-out prune.json --prove
  featviz audit new.pth photos/ --baseline old/audit.json --out new

{MODEL_HELP}

Exit codes: 0 done, 1 failed, 2 usage, 3 some images failed, 4 broken gate.
\f
What the findings of a channel mean:

{_definitions()}
"""


@click.command("audit", cls=Command, help=_HELP)
@opts.model_argument
@opts.images_argument
@opts.options_of(AuditOptions, Thresholds, InputOptions, ModelOptions)
@opts.no_shard_option
@opts.json_option("audit.json")
@opts.general_options
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> int:
    """Audit the model, print the table, and return the exit code."""
    source = opts.to_model_options(ctx, given)
    images = opts.images_of(ctx, given)
    from featviz.audit.audit import audit
    from featviz.audit.output import audit_table
    from featviz.pipeline.share import refuse_shares

    refuse_shares("audit", "its findings hold for all images together", given["shard"])
    with output.batch_progress() as progress:
        result = audit(source, images, _audit_options(given), progress)
    if given["as_json"]:
        output.document(result.as_json())
    else:
        output.table(*audit_table(result.document))
    _conclude(result)
    return result.exit_code


def _audit_options(given: dict[str, Any]) -> AuditOptions:
    inputs, thresholds = opts.record(InputOptions, given), opts.record(Thresholds, given)
    return opts.record(AuditOptions, given, inputs=inputs, thresholds=thresholds)


def _conclude(result: AuditResult) -> None:
    """On stderr: what was seen, what a verification gave, and the broken gates."""
    seen = counted(result.document["images"]["seen"], "image")
    log.info("%s seen; the verdicts hold for these images", seen)
    if (proof := result.document["verify"]) is not None:
        log.info("%s", _proof(proof))
    for verdict in result.verdicts:
        if not verdict.held:
            log.error("gate %s is broken: %s", verdict.gate, verdict.words)
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
