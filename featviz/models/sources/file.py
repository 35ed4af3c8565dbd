"""A file: a whole model, an exported program, or weights and the architecture they belong to."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import nn

from featviz.errors import LoadError, UsageError
from featviz.models import identify, own_classes
from featviz.models.devices import pick_device
from featviz.models.files import checkpoint, exported, sniff
from featviz.models.files.state_dict import stripped_forms, unwrap
from featviz.models.hf.config import architecture_beside
from featviz.models.presets import from_ultralytics
from featviz.models.sources import (
    Loaded,
    ModelOptions,
    load_source,
    source_of,
    timm,
    torchvision,
)
from featviz.models.weights import put_into, read_file

log = logging.getLogger(__name__)


def load(options: ModelOptions) -> Loaded:
    """Load a file; weights into `options.arch`, else into what a config.json beside the file names,
    else into the architecture whose tensors they are.

    Raises:
        UsageError: the architecture is a file, or there is no such name.
        LoadError: the file holds no model, or weights that fit no known architecture.
    """
    path = Path(options.spec)
    if options.arch is None and (beside := timm.named_beside(path)):
        log.info("%s: config.json beside it says timm:%s", path.name, beside)
        options = replace(options, arch=f"timm:{beside}")
    if options.arch is None and (name := _of_transformers(path)):
        log.info("%s: config.json beside it says %s", path.name, name)
        options = replace(options, arch=f"hf:{path.parent}")
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
    arch = options.arch if source.certain or source.name is None else source.name(options.arch)
    base = load_source(replace(options, spec=options.arch, arch=None, weights=str(path)))
    return replace(base, source={**base.source, "kind": "file", "arch": arch})


def _of_transformers(path: Path) -> str | None:
    """The class of transformers whose weights a file is; a program is a model of its own."""
    name = architecture_beside(path)
    return name if name and sniff.sniff(path) != sniff.EXPORTED else None


def _from_content(path: Path, options: ModelOptions) -> Loaded:
    """A whole model as it is; weights in the architecture that they say they belong to."""
    record = {"kind": "file", **checkpoint.record(path)}
    if sniff.sniff(path) == sniff.EXPORTED:
        program = exported.read(path, options.trust, pick_device(options.device))
        return Loaded(program.module, None, record, program.fixed)
    content = read_file(path, options)
    if isinstance(content, nn.Module) and options.key is None:
        return Loaded(content, None, record)
    weights = unwrap(content, options.key, options.strip_prefix, options.ema, path.name)
    if weights.module is not None:
        arguments = content.get("train_args") if isinstance(content, Mapping) else None
        entry = from_ultralytics(weights.module, arguments)
        return Loaded(weights.module, entry, {**record, "taken": list(weights.steps)})
    forms = stripped_forms(weights)
    known = identify.identify_forms(forms)
    if known.name is None:
        error = own_classes.unknown_weights(path, content, [form.tensors for form in forms])
        if error is not None and not options.partial:
            raise error
        known = _nearest(path, known, options.partial)
    arguments = known.arguments
    module, entry = torchvision.build(
        str(known.name), None, options.seed, {**arguments, **options.model_args}
    )
    log.info("%s: %s", path.name, "; ".join((*known.form.steps, known.words)))
    fit = put_into(
        module, known.form.tensors, f"{path.name} does not fit {known.name}", options.partial
    )
    taken = [*known.form.steps, f"loaded {fit.fitting} of {fit.total}"]
    return Loaded(module, entry, {**record, "arch": known.name, **arguments, "taken": taken})


def _nearest(path: Path, known: identify.Known, partial: bool) -> identify.Known:
    """The nearest architecture as a match, for --partial.

    Raises:
        LoadError: without --partial; lists the nearest architectures.
    """
    near = known.nearest
    if partial and near:
        return replace(known, names=(near[0].name,))
    raise LoadError(
        f"{path.name} holds weights of an architecture that torchvision has not"
        + (f"; nearest: {', '.join(n.words for n in near)}" if near else ""),
        "--arch says what they belong to (a name, timm:NAME, or file.py:factory)"
        + ("; --partial loads what fits into the nearest" if near else ""),
    )
