"""`featviz audit` and `featviz exemplars`, which count over many images."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Mapping
from typing import Any

from featviz.cli import output
from featviz.cli.options import IMAGES, MODEL, Given, command
from featviz.options import AuditOptions, ExemplarOptions, ModelOptions
from featviz.records import UNLIKE_OUTPUTS
from featviz.records.findings import FINDINGS
from featviz.text import counted, listed

log = logging.getLogger(__name__)

_NAMED = 3

_DEFINITIONS = "\n".join(
    textwrap.fill(finding.definition, 78, initial_indent=f"{name:<11}", subsequent_indent=" " * 11)
    for name, finding in FINDINGS.items()
)

_AUDIT = f"""Stream images through a model, and find channels that do nothing for them.

Findings are {", ".join(FINDINGS)}. A verdict holds for these images: a channel that is dead on
them may live on others.

\b
Examples:
  featviz audit resnet18 photos/
  featviz audit model.pth photos/ --fail-on 'dead>5%' --fail-on 'nonfinite>0'
  featviz audit model.pth photos/ --prune-out prune.json --prove
  featviz audit new.pth photos/ --baseline old/audit.json --out new

{{MODEL}}

Exit codes: 0 done, 1 failed, 2 usage, 3 some images failed, 4 broken gate.
\f
What the findings of a channel mean:

\b
{_DEFINITIONS}
"""


@command(AuditOptions, ModelOptions, arguments=[MODEL, IMAGES], json="audit.json", help=_AUDIT)
def audit(given: Given) -> int:
    """Audit the model, print the table, and return the exit code."""
    from featviz.audit.audit import audit
    from featviz.audit.output import audit_table
    from featviz.run.share import refuse_shares

    refuse_shares("audit", "its findings hold for all images together")
    with output.batch_progress() as progress:
        result = audit(given.source, given.images, given.record(AuditOptions), progress)
    if given["json"]:
        output.document(result.as_json())
    else:
        output.table(audit_table(result.document))
    seen = counted(result.document["images"]["seen"], "image")
    log.info("%s seen; the verdicts hold for these images", seen)
    if (proof := result.document["verify"]) is not None:
        log.info("%s", _proof(proof))
    for verdict in result.verdicts:
        if not verdict.held:
            log.error("gate %s is broken: %s", verdict.gate, verdict.words)
    log.info("results in %s", result.out)
    return result.exit_code


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


@command(ExemplarOptions, ModelOptions, arguments=[MODEL, IMAGES], json="exemplars.json")
def exemplars(given: Given) -> int:
    """Show the images, and the places in them, that excite each channel most.

    For each channel the best images are kept, each cut to what the strongest
    unit sees of the input, its receptive field. --out holds a sheet for each
    layer, a picture for each channel, and exemplars.json.

    {MODEL}

    \b
    Examples:
      featviz exemplars resnet18 photos/ --layers layer4 --top 9
      featviz exemplars model.pth photos/ --layers 'Conv2d#:3' --batch-size 16
      featviz exemplars model.pth train/ --layers layer3 --per-class --top 4
    \f
    Any number of images go through the model once. Values that are NaN or
    infinite excite nothing; of equal values the earlier image comes first.

    \b
      featviz exemplars resnet18 photos/ --layers avgpool --pick mean --json

    Exit codes: 0 done, 1 failed, 2 usage, 3 some images failed.
    """
    from featviz.exemplars.exemplars import find_exemplars
    from featviz.run.share import refuse_shares

    refuse_shares("exemplars", "it ranks all images against each other")
    with output.batch_progress() as progress:
        options = given.record(ExemplarOptions)
        result = find_exemplars(given.source, given.images, options, progress)
    record = result.record
    if given["json"]:
        output.document(record.as_json())
    else:
        output.table(result.table)
    skipped = [f"{one.layer} ({one.reason})" for one in record.skipped]
    for what, layers in (("skipped", skipped), ("never ran", record.never_ran)):
        if layers:
            log.warning("%s: %s", what, listed(layers, _NAMED))
    log.info("%s seen", counted(record.images.seen, "image"))
    log.info("results in %s", result.out)
    return result.exit_code
