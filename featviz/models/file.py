"""A file: a whole model, an exported program, or weights and the architecture they belong to."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from msgspec import structs
from torch import nn

from featviz.errors import LoadError, UsageError
from featviz.models import identify, zoo
from featviz.models.factory import unknown_weights
from featviz.models.files import checkpoint, exported, sniff
from featviz.models.files.state_dict import stripped_forms, unwrap
from featviz.models.huggingface import architecture_beside
from featviz.models.presets import from_ultralytics
from featviz.models.requirements import pick_device
from featviz.models.sources import Loaded, load_source, source_of
from featviz.models.weights import put_into
from featviz.options import ModelOptions

log = logging.getLogger(__name__)


def load_file(options: ModelOptions) -> Loaded:
    """Load a file; weights into `options.arch`, else into what a config.json beside the file names,
    else into the architecture whose tensors they are.

    Raises:
        UsageError: the architecture is a file, or there is no such name.
        LoadError: the file holds no model, or weights that fit no known architecture.
    """
    path = Path(options.spec)
    if options.arch is None and (beside := zoo.timm_name_beside(path)):
        log.info("%s: config.json beside it says timm:%s", path.name, beside)
        options = structs.replace(options, arch=f"timm:{beside}")
    if options.arch is None and (name := architecture_beside(path)):
        log.info("%s: config.json beside it says %s", path.name, name)
        if sniff.sniff(path) != sniff.EXPORTED:  # a program is a model of its own
            options = structs.replace(options, arch=f"hf:{path.parent}")
    if options.arch is None and options.hparams:
        raise UsageError(
            f"--model-arg @hparams is for a class of your own, and none is named for {path.name}",
            "--arch net.py:CLASS names it",
        )
    if options.arch is None:
        return _from_content(path, options)
    source = source_of(options.arch, "--arch")
    if source.kind == "file":
        raise UsageError(
            f"--arch {options.arch!r} is a file of its own", "give a name or a factory"
        )
    arch = options.arch if source.certain else source.name(options.arch)
    base = load_source(structs.replace(options, spec=options.arch, arch=None, weights=str(path)))
    return replace(base, source={**base.source, "kind": "file", "arch": arch})


def _from_content(path: Path, options: ModelOptions) -> Loaded:
    """A whole model as it is; weights in the architecture that they say they belong to."""
    record = {"kind": "file", **checkpoint.record(path)}
    if sniff.sniff(path) == sniff.EXPORTED:
        program, fixed = exported.read(path, options.trust, pick_device(options.device))
        return Loaded(program, None, record, fixed)
    content = checkpoint.read(path, options.trust)
    if isinstance(content, nn.Module) and options.key is None:
        return Loaded(content, None, record)
    weights = unwrap(content, options.key, options.strip_prefix, options.ema, path.name)
    if weights.module is not None:
        arguments = content.get("train_args") if isinstance(content, Mapping) else None
        entry = from_ultralytics(weights.module, arguments)
        return Loaded(weights.module, entry, {**record, "taken": list(weights.steps)})
    forms = stripped_forms(weights)
    known = identify.identify_forms(forms)
    if known.name is None and known.nearest and options.partial:
        known = replace(known, names=(known.nearest[0].name,))
    elif known.name is None:
        near = f"; nearest: {', '.join(n.words for n in known.nearest)}" if known.nearest else ""
        raise unknown_weights(path.name, content) or LoadError(
            f"{path.name} holds weights of an architecture that torchvision has not{near}",
            "--arch says what they belong to (a name, timm:NAME, or file.py:factory)"
            + ("; --partial loads what fits into the nearest" if near else ""),
        )
    arguments = known.arguments
    module, entry = zoo.build_torchvision(
        str(known.name), None, options.seed, {**arguments, **options.model_args}
    )
    log.info("%s: %s", path.name, "; ".join((*known.form.steps, known.words)))
    fit = put_into(
        module, known.form.tensors, f"{path.name} does not fit {known.name}", options.partial
    )
    taken = [*known.form.steps, f"loaded {fit.fitting} of {fit.total}"]
    return Loaded(module, entry, {**record, "arch": known.name, **arguments, "taken": taken})
