"""`featviz identify`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from featviz.cli import echo
from featviz.cli import options as opts


@click.command("identify")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option("--key", metavar="KEY", help="Where in a checkpoint the weights are.")
@click.option("--strip-prefix", metavar="P", help="What to take off their names.")
@click.option("--ema/--no-ema", default=None, help="Averaged weights, or plain ones (default).")
@opts.verbosity_options
def command(file: Path, as_json: bool, **given: Any) -> int:
    """Say which torchvision architecture a file of weights belongs to, by names and shapes.

    Exit code 0 if one was found, 1 if none fits entirely.

    \b
    Examples:
      featviz identify weights.pth
      featviz identify checkpoint.ckpt --key state_dict --json
    """
    from featviz.models.requirements import require_torch

    require_torch()
    from featviz.models import identify

    found = identify.identify_file(file, given["key"], given["strip_prefix"], given["ema"])
    if as_json:
        echo.document(found.as_json())
    else:
        echo.line(found.words)
    return 0 if found.known else 1
