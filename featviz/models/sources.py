"""What a MODEL string can name. A source is a record of SOURCES, and a function in the file that it
names, which is imported when a model is loaded: help and completion import no torch."""

from __future__ import annotations

import difflib
import hashlib
import importlib.util
import os
import re
import struct
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from featviz.errors import LoadError, UsageError
from featviz.files import misspelt, real
from featviz.options import ModelOptions
from featviz.text import quoted

if TYPE_CHECKING:
    from torch import nn


FORM = re.compile(r"(?P<where>.+\.py|[A-Za-z_][\w.]*):(?P<attribute>[A-Za-z_][\w.]*)")
"""`pkg.mod:name` or `file.py:name`."""

SUFFIXES = (".pth", ".pt", ".ckpt", ".bin", ".safetensors", ".pkl", ".npz", ".pt2")
"""File names of models; a file of another name is read by its content all the same."""

_LOOKS = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"\x89HDF": "an HDF5 file (Keras?)",
    b"version https://git-lfs": "a Git LFS pointer, not the file itself (git lfs pull)",
    b"<": "a web page",
    b"{": "a JSON file",
    **{bytes((8, version, 18)): "an ONNX model" for version in (3, 4, 7, 8)},
}
"""What a file looks like that begins so."""

_MOST_UNPACKED = 20
"""A zip that unpacks to more times its size is a bomb; torch.save does not compress at all."""

_EXPORTED_NAMES = ("/archive_format", "serialized_exported_program.json")
"""In lower case: torch's reader of archives makes no difference."""

ZIP = "zip"
PICKLE = "pickle"
ARRAYS = "npz"
SAFETENSORS = "safetensors"
SHARDS = "shards"
TORCHSCRIPT = "torchscript"
EXPORTED = "pt2"
KINDS = (ZIP, PICKLE, ARRAYS, SAFETENSORS, SHARDS, TORCHSCRIPT, EXPORTED)


Fixed = tuple[int | None, tuple[int, int] | None]
"""Channels, and height and width in pixels, of the one input that a model takes; None for any."""

ANY: Fixed = (None, None)


class Loaded(NamedTuple):
    """A model as its source gives it."""

    module: nn.Module
    record: Mapping[str, Any]
    """For run.json; no absolute path."""
    entry: Any = None
    """What is known of its preprocessing: torchvision's weights entry, or a Chain."""
    input: Fixed = ANY


@dataclass(frozen=True)
class ModelSource:
    """One kind of thing that a MODEL string can name."""

    kind: str
    file: str
    """The module of `featviz.models` that has `load_KIND`."""
    form: str
    weights: str
    """What `--weights` takes; empty where the model has its own."""
    prefix: str = ""
    recognises: Callable[[str], bool] = lambda spec: False
    """Whether a MODEL string without a source's prefix is of this kind."""

    def name(self, spec: str) -> str:
        """The name in run.json of what a MODEL string names, without folders."""
        is_path = spec.startswith("hf:") or ".py:" in spec or Path(spec).exists()
        name = spec.removeprefix(self.prefix)
        return Path(name).name if is_path else name


_ENTRY = "default, an entry such as IMAGENET1K_V1, a file, or none (random)"
_TAG = "default, a tag such as a1_in1k, a file, or none (random)"

SOURCES = (
    ModelSource(
        "torchvision",
        "load",
        "a torchvision name",
        _ENTRY,
        "torchvision:",
        lambda spec: (
            not (
                set(spec) & {"/", ":"}
                or Path(spec).suffix.lower() in SUFFIXES
                or Path(spec).exists()
            )
        ),
    ),
    ModelSource("timm", "load", "timm:NAME", _TAG, "timm:"),
    ModelSource(
        "huggingface",
        "huggingface",
        "a Hugging Face folder (hf:DIR)",
        "a file in place of its own",
        "hf:",
        lambda spec: Path(spec).is_dir(),
    ),
    ModelSource(
        "file", "load", f"a file ({' '.join(SUFFIXES)})", "", "", lambda spec: Path(spec).is_file()
    ),
    ModelSource(
        "factory",
        "load",
        "a factory (pkg.mod:factory, file.py:factory)",
        "a file, or none (as the factory makes them)",
        recognises=lambda spec: FORM.fullmatch(spec) is not None,
    ),
)
"""In the order of help, in which they are asked: files before factories."""

MODEL_HELP = "MODEL is one of: " + ", ".join(source.form for source in SOURCES) + "."

WEIGHTS_HELP = "With " + "; with ".join(
    f"{source.form.partition(' (')[0]}: {source.weights}" for source in SOURCES if source.weights
)


def source_of(spec: str, option: str = "MODEL") -> ModelSource:
    """The source that a MODEL string belongs to; `option` is where it stands, for messages."""
    if spec.endswith(".py") and Path(spec).is_file():
        hint = f"name the class or function that makes the model: {quoted(spec)}:NAME"
        raise UsageError(f"{option} {spec!r} is code", hint)
    for source in SOURCES:
        if source.prefix and spec.startswith(source.prefix):
            return source
    for source in SOURCES:
        if source.recognises(spec):
            return source
    near = misspelt(Path(spec))
    words = f"no model file {spec!r}"
    hint = f"did you mean {quoted(str(near))}?" if near else download_hint(spec)
    raise UsageError(words, hint, replace=(spec, str(near)) if near else None)


def download_hint(spec: str) -> str:
    """What to do where there is no such file or folder: it may be a model id of Hugging Face's."""
    is_id = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", spec)
    if is_id is None or Path(spec).suffix.lower() in SUFFIXES:
        return "check the path"
    name = spec.rpartition("/")[2]
    first = f"hf download {spec} --local-dir {name}, and MODEL is hf:{name}"
    return f"check the path; a model id of Hugging Face is downloaded first: {first}"


def load_source(options: ModelOptions) -> Loaded:
    """Load from where the MODEL string says."""
    source = check_words(options)
    module: Any = import_module(f"featviz.models.{source.file}")
    return getattr(module, f"load_{source.kind}")(options)  # type: ignore[no-any-return]


def check_words(options: ModelOptions) -> ModelSource:
    """The source of a model. Refuses options that do not go with it, and a MODEL or `arch` that is
    not there, without torch: names of torchvision's are those of our list, or of functions in the
    files of the one that is installed, which may be newer."""
    source = source_of(options.spec)
    if options.arch and source.kind != "file":
        words = f"--arch is for files of weights, and {options.spec!r} is none"
        raise UsageError(words, f"--weights FILE with MODEL {options.arch} gives weights")
    if options.weights and not source.weights:
        words = f"--weights does not go with a model file ({Path(options.spec).name})"
        raise UsageError(words, "the file has the weights itself")
    if options.hparams and source.kind not in ("file", "factory"):
        words = f"--model-arg @hparams is for a class of your own, and {options.spec!r} is none"
        raise UsageError(words, "--arch net.py:CLASS names it")
    listed = (Path(__file__).parent / "names.txt").read_text("utf-8").split()
    for spec in filter(None, (options.spec, options.arch)):
        other = source_of(spec, "MODEL" if spec == options.spec else "--arch")
        name = spec.removeprefix(other.prefix)
        found = find_spec("torchvision") if other.kind == "torchvision" else None
        if name in listed or found is None or found.origin is None:
            continue
        files = (Path(found.origin).parent / "models").rglob("*.py")
        named = re.compile(rf"def {re.escape(name)}\(|[\"']{re.escape(name)}[\"']")
        if not any(named.search(file.read_text("utf-8")) for file in files):
            raise unknown_name("torchvision", name, listed)
    return source


def unknown_name(library: str, name: str, names: Sequence[str]) -> UsageError:
    """The error for a model that torchvision or timm has not, with the nearest that it has."""
    prefix, file = ("timm:", "") if library == "timm" else ("", " or file")
    such = f"a name such as {prefix}resnet18"
    if file and name.isidentifier():
        such += f", or FILE.py:{name} for a class of your own"
    near = difflib.get_close_matches(name.lower(), sorted(names, reverse=True), 3)
    close = [f"{prefix}{other}" for other in near]
    module, _, attribute = name.rpartition(".")
    file_of_module = Path(f"{module.replace('.', '/')}.py")
    if file and file_of_module.is_file():  # net.Net, as one would write it in Python
        close = [f"{file_of_module}:{attribute}"]
    return UsageError(
        f"no {library} model{file} named {name!r}",
        f"did you mean {', '.join(close)}?" if close else such,
        replace=(f"{prefix}{name}", close[0]) if close else None,
    )


def sniff(path: Path) -> str:
    """One of KINDS, or a description of what the file looks like."""
    if not path.is_file():
        return "no regular file"
    with path.open("rb") as file:
        head = file.read(512)
    if head.startswith(b"PK\x03\x04"):
        return _sniff_zip(path)
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**40:
        return SAFETENSORS  # a header of 640 bytes begins as a pickle does
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return PICKLE
    if path.name.endswith(".index.json") and head:
        return SHARDS
    for mark, description in _LOOKS.items():
        if head.lstrip().startswith(mark):
            return description
    if head[257:262] == b"ustar":
        return "a tar archive (of torch before 0.1.10: load it there, and save it anew)"
    if head and path.suffix.lower() in (".pkl", ".pickle"):
        return PICKLE  # of protocols 0 and 1, which begin as anything may
    if not head:
        return "empty"
    is_text = re.search(rb"[\x00-\x08\x0e-\x1f]", head) is None
    return "a text file" if is_text else "no format that featviz knows"


def _sniff_zip(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            unpacked = sum(member.file_size for member in archive.filelist)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error):
        return "a zip archive that is truncated or damaged"
    if unpacked > _MOST_UNPACKED * path.stat().st_size:
        return f"a zip archive that would unpack to {unpacked:,} bytes"
    if any(name.endswith("/constants.pkl") or name.startswith("constants.pkl") for name in names):
        return TORCHSCRIPT
    if any(name.casefold().endswith(_EXPORTED_NAMES) for name in names):
        return EXPORTED
    if any(name.endswith("/data.pkl") for name in names):
        return ZIP
    if names and all(name.endswith(".npy") for name in names):
        return ARRAYS
    return "a zip archive that is no checkpoint"


# The user's own code, which MODEL, `--transform` or a trusted file names -----------------------


def target(spec: str) -> Any:
    """What `pkg.mod:name` or `file.py:name` names, imported."""
    match = FORM.fullmatch(spec)
    assert match is not None
    found: Any = _imported(match["where"], spec)
    there = [n for n, v in vars(found).items() if not n.startswith("_") and callable(v)]
    for part in match["attribute"].split("."):
        if not hasattr(found, part):
            names = ", ".join(map(quoted, there)) or "nothing"
            raise UsageError(f"{spec!r}: there is no {match['attribute']!r}", f"there is {names}")
        found = getattr(found, part)
    return found


def code_digest(spec: str) -> str | None:
    """sha256 of the file of what `target` has imported; None for a module without one."""
    where = spec.rpartition(":")[0]
    name = where if where.endswith(".py") else getattr(sys.modules.get(where), "__file__", None)
    if name is None or not Path(name).is_file():
        return None
    return hashlib.sha256(Path(name).read_bytes()).hexdigest()


def _imported(where: str, spec: str) -> ModuleType:
    path = Path(where) if where.endswith(".py") else None
    if path and not path.is_file():
        near = misspelt(path)
        meant = f"{near}{spec.removeprefix(where)}" if near and near.suffix == ".py" else None
        words = f"no file {where!r} for {spec!r}"
        hint = f"did you mean {quoted(meant)}?" if meant else "check the path"
        raise UsageError(words, hint, replace=(spec, meant) if meant else None)
    try:
        if path:
            return _from_file(path)
        with importable():
            return import_module(where)
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and where.split(".")[0] == missing.split(".")[0]:
            words = f"no module {where!r} for {spec!r}"
            raise UsageError(words, "run where it can be imported, or name the .py file") from error
        words = f"importing {where} failed: {type(error).__name__}: {error}"
        raise LoadError(words, "-v shows the traceback") from error


@contextmanager
def importable(*folders: Path) -> Iterator[None]:
    """Let modules of the user's be imported, later, too, unless this fails: from the current folder
    first, as with `python -m`, and from `folders` where nothing installed has the name."""
    before = list(sys.path)
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    sys.path.extend(name for name in (str(real(f)) for f in folders) if name not in sys.path)
    try:
        yield
    except BaseException:
        sys.path[:] = before
        raise


def _from_file(path: Path) -> ModuleType:
    """Run a file as a module of its own; two files of one name are two modules."""
    place = hashlib.sha256(os.fsencode(real(path))).hexdigest()[:12]
    name = f"featviz_user_{path.stem}_{place}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    sys.modules[name] = module
    sys.path.insert(0, str(real(path.parent)))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.path[:] = before
        del sys.modules[name]
        raise
    return module
