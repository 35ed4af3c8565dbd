"""`featviz identify`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from featviz.cli import options as opts
from featviz.cli import output
from featviz.cli.command import Command
from featviz.cli.values import EXISTING_FILE
from featviz.options import ModelOptions, declared


@click.command("identify", cls=Command)
@click.argument("file", type=EXISTING_FILE)
@opts.json_option()
@opts.options_of(ModelOptions, but=set(declared(ModelOptions)) - {"key", "strip_prefix", "ema"})
@opts.general_options
def command(file: Path, as_json: bool, **given: Any) -> int:
    """Say what a file of weights is run as, and with which --arch.

    Names and shapes of the tensors tell the torchvision architecture; names
    alone, the class in .py files of this folder or beside the file; a whole
    model needs neither. The exit code is 0 if the file is run as it stands,
    else 1.

    \b
    Examples:
      featviz identify weights.pth
      featviz identify checkpoint.ckpt --key state_dict --json
    """
    from featviz.models.requirements import require_torch

    require_torch(alone=True)
    from featviz.models import identify

    identified = identify.identify_file(file, given["key"], given["strip_prefix"], given["ema"])
    if as_json:
        output.document(identified.as_json())
    else:
        output.line(identified.words)
    return 0 if identified.known else 1
