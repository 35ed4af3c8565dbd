"""What a MODEL string can name: a model of torchvision or timm, a folder, a file, a factory.

A source is one record of SOURCES, and a function in the file that it names, which is imported when
a model is loaded: the records are for help and completion, too, and those import no torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from featviz.errors import UsageError
from featviz.files.missing import misspelt
from featviz.models import code
from featviz.models.files import sniff
from featviz.options import ModelOptions
from featviz.text import quoted

if TYPE_CHECKING:
    from torch import nn

    from featviz.models.preprocess import FixedInput


@dataclass(frozen=True)
class Loaded:
    """A module as a source loads it, how to feed it where that is known, and a record."""

    module: nn.Module
    entry: Any = None
    """torchvision's weights entry, or the chain of another library."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """The model for run.json: kind, name or file, weights; no absolute path."""
    fixed: FixedInput | None = None
    """The input that the module was made for; None where it takes others."""


@dataclass(frozen=True)
class ModelSource:
    """One kind of thing that a MODEL string can name."""

    kind: str
    """The name in run.json; `load_KIND` makes the model."""
    file: str
    """The module of `featviz.models` that has `load_KIND`."""
    form: str
    recognises: Callable[[str], bool]
    """Whether a MODEL string without a source's prefix is of this kind."""
    weights: str
    """What `--weights` takes, for help and errors; empty where the model has its own."""
    prefix: str = ""
    """Begins a MODEL string that is certainly of this kind."""
    takes_arch: bool = False
    """Whether `--arch` may say what it belongs to."""
    certain: bool = True
    """Whether the MODEL string, its files and its weights decide what the model is; code does
    not, as it may change."""

    def name(self, spec: str) -> str:
        """The name in run.json of what a MODEL string names, without folders."""
        is_path = spec.startswith("hf:") or ".py:" in spec or Path(spec).exists()
        name = spec.removeprefix(self.prefix)
        return Path(name).name if is_path else name


def _looks_like_a_file(spec: str) -> bool:
    path = Path(spec)
    return path.suffix.lower() in sniff.SUFFIXES or "/" in spec or path.exists()


def _is_adapter(spec: str) -> bool:
    """Whether a folder holds an adapter, and not the model itself beside it."""
    return Path(spec, "adapter_config.json").is_file() and not Path(spec, "config.json").exists()


SOURCES = (
    ModelSource(
        "torchvision",
        "zoo",
        "a torchvision name",
        recognises=lambda spec: not (_looks_like_a_file(spec) or code.FORM.fullmatch(spec)),
        weights="default, an entry such as IMAGENET1K_V1, a file, or none (random)",
        prefix="torchvision:",
    ),
    ModelSource(
        "timm",
        "zoo",
        "timm:NAME",
        recognises=lambda spec: False,
        weights="default, a tag such as a1_in1k, a file, or none (random)",
        prefix="timm:",
    ),
    ModelSource(
        "adapter",
        "huggingface",
        "the folder of a LoRA adapter",
        recognises=_is_adapter,
        weights="those of the model that --arch names, as for that model",
        takes_arch=True,
    ),
    ModelSource(
        "huggingface",
        "huggingface",
        "a Hugging Face folder (hf:DIR)",
        recognises=lambda spec: Path(spec).is_dir(),
        weights="a file in place of its own",
        prefix="hf:",
        certain=False,
    ),
    ModelSource(
        "file",
        "load",
        f"a file ({' '.join(sniff.SUFFIXES)})",
        recognises=lambda spec: Path(spec).is_file(),
        weights="",
        takes_arch=True,
    ),
    ModelSource(
        "factory",
        "factory",
        "a factory (pkg.mod:factory, file.py:factory)",
        recognises=lambda spec: code.FORM.fullmatch(spec) is not None,
        weights="a file, or none (as the factory makes them)",
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
        raise UsageError(
            f"{option} {spec!r} is code",
            f"name the class or function that makes the model: {quoted(spec)}:NAME",
        )
    for source in SOURCES:
        if source.prefix and spec.startswith(source.prefix):
            return source
    for source in SOURCES:
        if source.recognises(spec):
            return source
    if (near := misspelt(Path(spec))) is not None:
        hint, again = f"did you mean {quoted(str(near))}?", (spec, str(near))
        raise UsageError(f"no model file {spec!r}", hint, replace=again)
    raise UsageError(f"no model file {spec!r}", download_hint(spec))


def download_hint(spec: str) -> str:
    """What to do where there is no such file or folder: it may be a model id of Hugging Face's."""
    is_id = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", spec)
    if is_id is None or Path(spec).suffix.lower() in sniff.SUFFIXES:
        return "check the path"
    name = spec.rpartition("/")[2]
    return (
        f"check the path; a model id of Hugging Face is downloaded first: "
        f"hf download {spec} --local-dir {name}, and MODEL is hf:{name}"
    )


def load_source(options: ModelOptions) -> Loaded:
    """Load from where the MODEL string says.

    Raises:
        UsageError: no such name or file.
        LoadError: there is something, but no model can be made of it.
    """
    source = _accepted(options)
    module = import_module(f"featviz.models.{source.file}")
    loaded: Loaded = getattr(module, f"load_{source.kind}")(options)
    return loaded


def check_words(options: ModelOptions) -> None:
    """Refuse a MODEL or `arch` that is not there, as far as that is known without torch.

    A name of torchvision's is one of our list of names, or of a function in the files of the
    torchvision that is installed, which may be a newer one.

    Raises:
        UsageError: no such name or file, or options that do not go with it.
    """
    _accepted(options)
    listed = (Path(__file__).parent / "names.txt").read_text("utf-8").split()
    for spec in filter(None, (options.spec, options.arch)):
        source = source_of(spec, "MODEL" if spec == options.spec else "--arch")
        name = spec.removeprefix(source.prefix)
        if source.kind != "torchvision" or name in listed:
            continue
        if (found := find_spec("torchvision")) is None or found.origin is None:
            continue
        files = (Path(found.origin).parent / "models").rglob("*.py")
        named = re.compile(rf"def {re.escape(name)}\(|[\"']{re.escape(name)}[\"']")
        if not any(named.search(file.read_text("utf-8")) for file in files):
            raise no_builder(name, listed)


def no_builder(name: str, names: Sequence[str]) -> UsageError:
    """What to say of a name that torchvision has not, with the nearest that it has."""
    close = difflib.get_close_matches(name.lower(), names, 3)
    return UsageError(
        f"torchvision has no model {name!r}, and no file is called so",
        f"did you mean {', '.join(close)}?" if close else "a file, or a name such as resnet18",
        replace=(name, close[0]) if close else None,
    )


def _accepted(options: ModelOptions) -> ModelSource:
    """The source of a model; refuses options that do not go with it."""
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
    return source
