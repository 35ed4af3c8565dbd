"""Folders of models of the library transformers (extra `featviz[hf]`)."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from featviz.errors import LoadError, UsageError
from featviz.models.files import checkpoint
from featviz.models.files.state_dict import Unwrapped
from featviz.models.hf import build, processor, seeing
from featviz.models.hf.config import FILE, Config, read
from featviz.models.presets import FixedInput
from featviz.models.sources import Loaded, ModelOptions, download_hint, load_source, timm
from featviz.models.weights import read_weights

log = logging.getLogger(__name__)

_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Files of weights as transformers writes them, the first that exists is taken."""


def load(options: ModelOptions) -> Loaded:
    """Load the model of a folder, with its weights or those of a file.

    Raises:
        UsageError: no such folder.
        LoadError: it holds no model of transformers, or one that takes no image.
    """
    folder = Path(options.spec.removeprefix("hf:"))
    if not folder.is_dir():
        raise UsageError(f"no folder {str(folder)!r}", download_hint(str(folder)))
    path = _weights(folder, options.weights)
    if path is not None and (name := timm.named_beside(folder / FILE)):
        loaded = load_source(replace(options, spec=str(path), weights=None, arch=f"timm:{name}"))
        return replace(loaded, source={**loaded.source, "kind": "huggingface"})
    config = _asked(read(folder), options)
    if path is None:
        raise LoadError(
            f"{folder} has no weights: none of {', '.join(_WEIGHTS)}", "--weights FILE names them"
        )
    tensors = read_weights(path, options)
    module = build.build(config, tensors.tensors, path.name, options.partial, options.seed)
    seen = seeing.for_images(module)
    log.info("%s: %s", folder.name, config.architecture)
    record = {"name": folder.resolve().name, "arch": config.architecture}
    return Loaded(
        seen,
        processor.read(config),
        {"kind": "huggingface", **record, **checkpoint.record(path), **_taken(tensors)},
        FixedInput(None, processor.image_size(config)),
    )


def _weights(folder: Path, given: str | None) -> Path | None:
    """The file of weights.

    Raises:
        UsageError: there is no such file.
    """
    if given is None:
        return next((folder / name for name in _WEIGHTS if (folder / name).is_file()), None)
    if not Path(given).is_file():
        raise UsageError(f"--weights {given!r} is no file", "leave it out, or give a file")
    return Path(given)


def _asked(config: Config, options: ModelOptions) -> Config:
    """The config with the user's `--model-arg`.

    Raises:
        UsageError: attention in a way that is none of torch's.
    """
    ways = ("eager", "sdpa")
    if (way := options.model_args.get("attn_implementation", "eager")) not in ways:
        raise UsageError(
            f"--model-arg attn_implementation={way} is none of {', '.join(ways)}", None
        )
    return replace(config, fields={**config.fields, **options.model_args})


def _taken(tensors: Unwrapped) -> dict[str, Any]:
    return {"taken": list(tensors.steps)} if tensors.steps else {}
