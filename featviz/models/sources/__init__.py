"""What a MODEL string can be: a name of torchvision or timm, a file, a factory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from featviz.errors import LoadError, UsageError
from featviz.models import identify
from featviz.models.devices import pick_device
from featviz.models.files import checkpoint, exported, sniff
from featviz.models.files.state_dict import Unwrapped, strip, stripped_forms, unwrap
from featviz.models.presets import FixedInput
from featviz.models.sources import factory
from featviz.models.sources import timm as timm_models
from featviz.models.sources import torchvision as torchvision_models
from featviz.models.weights import digest, put_into
from featviz.records import Seed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and how it is loaded."""

    spec: str
    """MODEL: a torchvision name, `timm:NAME`, a file, or a factory (`pkg.mod:f`, `file.py:f`)."""
    arch: str | None = None
    """For a file of weights: any other form of MODEL."""
    weights: str | None = None
    """`default`, a weights entry (timm: a tag), a file, or `none`."""
    seed: Seed = 0
    """Seeds the initialisation of random weights."""
    model_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of a factory, a torchvision builder or `timm.create_model`."""
    allow_globals: tuple[str, ...] = ()
    """Names that a pickled model may use beside the classes of torch and torchvision."""
    unsafe_load: bool = False
    """Let a pickled model run whatever it holds."""
    key: str | None = None
    """Where in a checkpoint the weights are; None looks in the usual places."""
    strip_prefix: str | None = None
    """What to take off the names of weights; None takes off the usual prefixes."""
    ema: bool | None = None
    """Averaged weights (True) or plain ones (False); None takes plain ones if there are any."""
    partial: bool = False
    """Load what fits of weights that fit in part."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""


@dataclass(frozen=True)
class Loaded:
    """What a source gives: a module, how to feed it where that is known, and a record."""

    module: nn.Module
    entry: Any = None
    """torchvision's weights entry, or the Preprocess."""
    source: Mapping[str, Any] = field(default_factory=dict)
    fixed: FixedInput | None = None
    """What the module leaves no choice in."""


def load_source(options: ModelOptions) -> Loaded:
    """Load from where the MODEL string says.

    Raises:
        UsageError: no such name or file.
        LoadError: there is something, but no model can be made of it.
    """
    kind = kind_of(options.spec)
    if options.arch and kind != "file":
        raise UsageError(
            f"--arch is for files of weights, and {options.spec!r} is none",
            f"leave it out, or give the weights: --weights FILE with MODEL {options.arch}",
        )
    return SOURCES[kind](options)


def kind_of(spec: str) -> str:
    """Which of SOURCES a MODEL string belongs to: torchvision, timm, file or factory.

    Raises:
        UsageError: it looks like a file, and there is none.
    """
    prefix, colon, _ = spec.partition(":")
    if colon and prefix in ("torchvision", "timm"):
        return prefix
    path = Path(spec)
    if path.is_file():
        return "file"
    if factory.is_spec(spec):
        return "factory"
    if path.suffix.lower() in checkpoint.SUFFIXES or "/" in spec or path.exists():
        raise UsageError(f"no model file {spec!r}", "check the path")
    return "torchvision"


def _from_torchvision(options: ModelOptions) -> Loaded:
    name = options.spec.removeprefix("torchvision:")
    weights = options.weights or "default"
    if Path(weights).is_file():
        module, entry = torchvision_models.build(name, None, options.seed, options.model_args)
        record = _load_weights(module, Path(weights), options)
        return Loaded(module, entry, _record("torchvision", name, record))
    module, entry = torchvision_models.build(name, weights, options.seed, options.model_args)
    seed = {"seed": options.seed} if weights == "none" else {}
    return Loaded(module, entry, _record("torchvision", name, {"weights": weights, **seed}))


def _from_timm(options: ModelOptions) -> Loaded:
    name = options.spec.removeprefix("timm:")
    weights = options.weights or "default"
    if Path(weights).is_file():
        return _timm_with(name, Path(weights), options)
    module, preprocess = timm_models.build(name, weights, options.seed, options.model_args)
    seed = {"seed": options.seed} if weights == "none" else {}
    return Loaded(module, preprocess, _record("timm", name, {"weights": weights, **seed}))


def _timm_with(name: str, path: Path, options: ModelOptions) -> Loaded:
    """A timm model with a file's weights, which say how many classes and channels it has."""
    found = unwrap(_read(path, options), options.key, options.strip_prefix, options.ema, path.name)
    read = timm_models.arguments_of(name, [form.tensors for form in stripped_forms(found)])
    arguments = {**read, **options.model_args}
    module, preprocess = timm_models.build(name, None, options.seed, arguments)
    record = {**checkpoint.record(path), **_put(module, found, path, options)}
    return Loaded(module, preprocess, _record("timm", name, {**read, **record}))


def _from_factory(options: ModelOptions) -> Loaded:
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(options.seed)
        module = factory.build(options.spec, options.model_args)
    record: Mapping[str, Any] = {"seed": options.seed}
    if options.weights not in (None, "none"):
        path = Path(str(options.weights))
        if not path.is_file():
            raise UsageError(
                f"no weights file {options.weights!r}", "a factory takes a file, or none"
            )
        record = _load_weights(module, path, options)
    record = {**record, "parameters": digest(module)}
    return Loaded(module, None, _record("factory", factory.label(options.spec), record))


def _from_file(options: ModelOptions) -> Loaded:
    path = Path(options.spec)
    if options.weights:
        raise UsageError(
            f"--weights does not go with a model file ({path.name})",
            "the file has the weights itself",
        )
    if options.arch is None and (beside := timm_models.named_beside(path)):
        log.info("%s: config.json beside it says timm:%s", path.name, beside)
        options = replace(options, arch=f"timm:{beside}")
    if options.arch is None:
        return _from_content(path, options)
    if kind_of(options.arch) == "file":
        raise UsageError(
            f"--arch {options.arch!r} is a file of its own", "give a name or a factory"
        )
    arch = factory.label(options.arch) if kind_of(options.arch) == "factory" else options.arch
    base = load_source(replace(options, spec=options.arch, arch=None, weights=str(path)))
    return replace(base, source={**base.source, "kind": "file", "arch": arch})


def _from_content(path: Path, options: ModelOptions) -> Loaded:
    """A whole model as it is; weights in the architecture that they say they belong to."""
    record = {"kind": "file", **checkpoint.record(path)}
    if sniff.sniff(path) == sniff.EXPORTED:
        program = exported.read(path, options.unsafe_load, pick_device(options.device))
        return Loaded(program.module, None, record, program.fixed)
    content = _read(path, options)
    if isinstance(content, nn.Module) and options.key is None:
        return Loaded(content, None, record)
    found = unwrap(content, options.key, options.strip_prefix, options.ema, path.name)
    if found.module is not None:
        return Loaded(found.module, None, {**record, "taken": list(found.steps)})
    known = identify.identify_forms(stripped_forms(found))
    if known.name is None:
        known = _nearest(path, known, options.partial)
    own = known.arguments
    module, entry = torchvision_models.build(
        str(known.name), None, options.seed, {**own, **options.model_args}
    )
    log.info("%s: %s", path.name, "; ".join((*known.form.steps, known.words)))
    fit = put_into(
        module, known.form.tensors, f"{path.name} does not fit {known.name}", options.partial
    )
    taken = [*known.form.steps, f"loaded {fit.fitting} of {fit.total}"]
    return Loaded(module, entry, {**record, "arch": known.name, **own, "taken": taken})


def _nearest(path: Path, known: identify.Known, partial: bool) -> identify.Known:
    """With --partial the nearest architecture; else an error that lists the nearest."""
    near = known.nearest
    if partial and near:
        return replace(known, names=(near[0].name,))
    raise LoadError(
        f"{path.name} holds weights of an architecture that torchvision has not"
        + (f"; nearest: {', '.join(n.words for n in near)}" if near else ""),
        "--arch says what they belong to (a name, timm:NAME, or file.py:factory)"
        + ("; --partial loads what fits into the nearest" if near else ""),
    )


def _load_weights(module: nn.Module, path: Path, options: ModelOptions) -> dict[str, Any]:
    """Load a file's weights into a module; returns what run.json says of them."""
    found = unwrap(_read(path, options), options.key, options.strip_prefix, options.ema, path.name)
    return {**checkpoint.record(path), **_put(module, found, path, options)}


def _put(module: nn.Module, found: Unwrapped, path: Path, options: ModelOptions) -> dict[str, Any]:
    fitting = strip(found, module.state_dict())
    if fitting.steps:
        log.info("%s: %s", path.name, "; ".join(fitting.steps))
    what = f"{path.name} does not fit {options.spec}"
    fit = put_into(module, fitting.tensors, what, options.partial)
    return {"taken": [*fitting.steps, f"loaded {fit.fitting} of {fit.total}"]}


def _read(path: Path, options: ModelOptions) -> Any:
    return checkpoint.read(path, options.allow_globals, options.unsafe_load)


def _record(kind: str, name: str, more: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": kind, "name": name, **more}


SOURCES: dict[str, Callable[[ModelOptions], Loaded]] = {
    "torchvision": _from_torchvision,
    "timm": _from_timm,
    "file": _from_file,
    "factory": _from_factory,
}
