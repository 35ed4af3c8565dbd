"""What a MODEL string can name: a model of torchvision or timm, a folder, a file, a factory.

A source is one record of SOURCES and one file of this folder, which is imported when a model is
loaded: the records are for help and completion, too, and those import no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featviz.errors import UsageError
from featviz.files.missing import misspelt
from featviz.models import outline
from featviz.models.files import sniff
from featviz.records import Seed
from featviz.text import quoted

if TYPE_CHECKING:
    from torch import nn

    from featviz.models.presets import FixedInput


@dataclass(frozen=True)
class ModelOptions:
    """The model, and how it is loaded."""

    spec: str
    """MODEL, in one of the forms of SOURCES."""
    arch: str | None = None
    """The architecture of a file of weights: any form of MODEL but a file."""
    weights: str | None = None
    """What `ModelSource.weights` says for the source; None is `ModelSource.default_weights`."""
    seed: Seed = 0
    """Seeds the initialisation of random weights."""
    model_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of a factory, a torchvision builder or `timm.create_model`, or values of a
    Hugging Face config."""
    hparams: bool = False
    """Pass a Lightning checkpoint's hyper_parameters to the factory, too; `model_args` win."""
    allow_globals: tuple[str, ...] = ()
    """Names that a pickled model may use beside the classes of torch, torchvision and
    Ultralytics."""
    trust: bool = False
    """Let a pickled model run any code that its file holds."""
    key: str | None = None
    """Where in a checkpoint the weights are; None looks in the usual places."""
    strip_prefix: str | None = None
    """Prefix to remove from the names of weights; None removes the usual ones."""
    ema: bool | None = None
    """Averaged weights (True) or plain ones (False); None takes plain ones if there are any."""
    partial: bool = False
    """Load the weights that fit, and leave out the others."""
    device: str = "auto"
    """auto, cpu, cuda, cuda:N or mps."""


@dataclass(frozen=True)
class Loaded:
    """A module as a source loads it, how to feed it where that is known, and a record."""

    module: nn.Module
    entry: Any = None
    """torchvision's weights entry, or the Preprocess."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """The model for run.json: kind, name or file, weights; no absolute path."""
    fixed: FixedInput | None = None
    """The input that the module was made for; None where it takes others."""


@dataclass(frozen=True)
class ModelSource:
    """One kind of thing that a MODEL string can name."""

    kind: str
    """The name in run.json, and of the file in this folder whose `load` makes the model."""
    form: str
    """How MODEL is written, for help."""
    recognises: Callable[[str], bool]
    """Whether a MODEL string without a source's prefix is of this kind."""
    weights: str
    """What `--weights` takes, for help and errors; empty where the model has its own."""
    prefix: str = ""
    """Begins a MODEL string that is certainly of this kind."""
    default_weights: str | None = None
    name: Callable[[str], str] | None = None
    """From a MODEL string to the name in run.json; None where a file is recorded instead."""
    takes_arch: bool = False
    """Whether `--arch` may say what it belongs to."""
    certain: bool = True
    """Whether the MODEL string, its files and its weights decide what the model is; code does
    not, as it may change."""

    def load(self, options: ModelOptions) -> Loaded:
        """Load a model of this kind.

        Raises:
            UsageError: no such name or file.
            LoadError: there is something, but no model can be made of it.
        """
        loaded: Loaded = import_module(f"{__name__}.{self.kind}").load(options)
        return loaded

    def record(self, options: ModelOptions) -> dict[str, Any]:
        """What run.json will certainly say of a model, beside its files: known before loading."""
        if self.name is None or not self.certain:
            return {"kind": self.kind}
        weights = options.weights or self.default_weights
        named = {"kind": self.kind, "name": self.name(options.spec)}
        return named if Path(str(weights)).is_file() else {**named, "weights": weights}


FACTORY_FORM = re.compile(r"(?P<where>.+\.py|[A-Za-z_][\w.]*):(?P<attribute>[A-Za-z_][\w.]*)")


def _factory_name(spec: str) -> str:
    """The factory without the folder of its file."""
    where, _, attribute = spec.rpartition(":")
    return f"{Path(where).name}:{attribute}" if where.endswith(".py") else spec


def _looks_like_a_file(spec: str) -> bool:
    path = Path(spec)
    return path.suffix.lower() in sniff.SUFFIXES or "/" in spec or path.exists()


_MODEL_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def download_hint(spec: str) -> str:
    """What to do where there is no such file or folder: it may be a model id of Hugging Face's."""
    if _MODEL_ID.fullmatch(spec) and Path(spec).suffix.lower() not in sniff.SUFFIXES:
        name = spec.rpartition("/")[2]
        return (
            f"check the path; a model id of Hugging Face is downloaded first: "
            f"hf download {spec} --local-dir {name}, and MODEL is hf:{name}"
        )
    return "check the path"


def _is_adapter(spec: str) -> bool:
    """Whether a folder holds an adapter, and not the model itself beside it."""
    folder = Path(spec)
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").exists()


SOURCES = (
    ModelSource(
        "torchvision",
        "a torchvision name",
        recognises=lambda spec: not (_looks_like_a_file(spec) or FACTORY_FORM.fullmatch(spec)),
        weights="default, an entry such as IMAGENET1K_V1, a file, or none (random)",
        prefix="torchvision:",
        default_weights="default",
        name=lambda spec: spec.removeprefix("torchvision:"),
    ),
    ModelSource(
        "timm",
        "timm:NAME",
        recognises=lambda spec: False,
        weights="default, a tag such as a1_in1k, a file, or none (random)",
        prefix="timm:",
        default_weights="default",
        name=lambda spec: spec.removeprefix("timm:"),
    ),
    ModelSource(
        "adapter",
        "the folder of a LoRA adapter",
        recognises=_is_adapter,
        weights="those of the model that --arch names, as for that model",
        takes_arch=True,
    ),
    ModelSource(
        "huggingface",
        "a Hugging Face folder (hf:DIR)",
        recognises=lambda spec: Path(spec).is_dir(),
        weights="a file in place of its own",
        prefix="hf:",
        name=lambda spec: Path(spec.removeprefix("hf:")).name,
        certain=False,
    ),
    ModelSource(
        "file",
        f"a file ({' '.join(sniff.SUFFIXES)})",
        recognises=lambda spec: Path(spec).is_file(),
        weights="",
        takes_arch=True,
    ),
    ModelSource(
        "factory",
        "a factory (pkg.mod:factory, file.py:factory)",
        recognises=lambda spec: FACTORY_FORM.fullmatch(spec) is not None,
        weights="a file, or none (as the factory makes them)",
        name=_factory_name,
        certain=False,
    ),
)
"""Help lists them in this order, and `source_of` asks them in it: the folder of an adapter comes
before other folders, and a file that exists before a factory."""

MODEL_HELP = "MODEL is one of: " + ", ".join(source.form for source in SOURCES) + "."
"""A sentence for help."""

WEIGHTS_HELP = "With " + "; with ".join(
    f"{source.form.partition(' (')[0]}: {source.weights}" for source in SOURCES if source.weights
)
"""A sentence for help."""


def source_of(spec: str, option: str = "MODEL") -> ModelSource:
    """The source that a MODEL string belongs to.

    Args:
        option: where the string stands, for messages.

    Raises:
        UsageError: it looks like a file, and there is none; or it is a file of code, of which a
            class or function must be named.
    """
    if spec.endswith(".py") and Path(spec).is_file():
        raise outline.which_of(spec, option)
    for source in SOURCES:
        if source.prefix and spec.startswith(source.prefix):
            return source
    for source in SOURCES:
        if source.recognises(spec):
            return source
    if (near := misspelt(Path(spec))) is not None:
        raise UsageError(
            f"no model file {spec!r}",
            f"did you mean {quoted(str(near))}?",
            replace=(spec, str(near)),
        )
    raise UsageError(f"no model file {spec!r}", download_hint(spec))


def load_source(options: ModelOptions) -> Loaded:
    """Load from where the MODEL string says.

    Raises:
        UsageError: no such name or file.
        LoadError: there is something, but no model can be made of it.
    """
    source = source_of(options.spec)
    if options.arch and not source.takes_arch:
        raise UsageError(
            f"--arch is for files of weights and adapters, and {options.spec!r} is neither",
            f"leave it out, or give the weights: --weights FILE with MODEL {options.arch}",
        )
    if options.weights and not source.weights:
        raise UsageError(
            f"--weights does not go with a model file ({Path(options.spec).name})",
            "the file has the weights itself",
        )
    if options.hparams and not (source.takes_arch or source.kind == "factory"):
        raise UsageError(
            f"--model-arg @hparams is for a class of your own, and {options.spec!r} is none",
            "--arch net.py:CLASS names it",
        )
    return source.load(options)
