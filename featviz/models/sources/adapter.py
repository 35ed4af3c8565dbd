"""A folder with a LoRA adapter as peft saves it, over the model that `--arch` names."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from featviz.errors import UsageError
from featviz.models.files import checkpoint, lora
from featviz.models.sources import Loaded, ModelOptions, load_source

log = logging.getLogger(__name__)


def load(options: ModelOptions) -> Loaded:
    """Load the base model, and merge the adapter into its weights.

    Raises:
        UsageError: no base model is named, or there is no such name.
        LoadError: the adapter is no plain LoRA, or is not for this model.
    """
    folder = Path(options.spec)
    adapter = lora.read(folder, options.allow_globals, options.trust)
    if options.arch is None:
        raise UsageError(
            f"{folder.name} is a LoRA adapter, and needs the model that it was made for: "
            f"{adapter.base}",
            "--arch names it: any other form of MODEL, with its weights",
        )
    base = load_source(replace(options, spec=options.arch, arch=None))
    log.info("%s: %s", folder.name, words := adapter.merge(base.module))
    record = {**checkpoint.record(adapter.file), "base": dict(base.source), "taken": [words]}
    return replace(base, source={"kind": "adapter", **record})
