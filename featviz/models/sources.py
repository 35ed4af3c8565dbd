"""The sources of models: what a MODEL string can name. Each source is a record in SOURCES,
and a function of another module that loads its models. That module is only imported when a
model is loaded, so that help and completion do not import torch."""

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from featviz.errors import LoadError, UsageError
from featviz.files import missing_file, real, similar_path
from featviz.options import ModelOptions
from featviz.text import did_you_mean, listed, quoted

if TYPE_CHECKING:
    from torch import nn


CODE_REFERENCE = re.compile(
    r"(?P<module>.+\.py|[A-Za-z_][\w.]*):(?P<attribute>[A-Za-z_][\w.]*)"
)
"""`pkg.mod:name` or `file.py:name`."""

SUFFIXES = (
    ".pth",
    ".pt",
    ".ckpt",
    ".bin",
    ".safetensors",
    ".pkl",
    ".npz",
    ".pt2",
    ".onnx",
)
"""Suffixes of model files. Files with other suffixes are read, too: the content decides."""

_LOOKS = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"\x89HDF": "an HDF5 file (Keras?)",
    b"version https://git-lfs": "a Git LFS pointer, not the file itself (git lfs pull)",
    b"<": "a web page",
    b"{": "a JSON file",
}
"""Descriptions of files that are no models, by their first bytes."""

_MAX_RATIO = 20
"""A zip file that unpacks to more than this many times its size is refused: it would fill
the memory. torch.save does not compress at all."""

_LONGEST_CODE = 1_000_000
"""The most bytes of a Python file that is searched for classes."""

_EXPORTED_NAMES = ("/archive_format", "serialized_exported_program.json")
"""Endings of names in the archive of an exported program. They are in lower case, since
torch's reader of archives ignores case."""

ZIP = "zip"
PICKLE = "pickle"
ARRAYS = "npz"
SAFETENSORS = "safetensors"
SHARDS = "shards"
TORCHSCRIPT = "torchscript"
EXPORTED = "pt2"
ONNX = "onnx"
FILE_FORMATS = (ZIP, PICKLE, ARRAYS, SAFETENSORS, SHARDS, TORCHSCRIPT, EXPORTED)
"""The formats that `sniff` returns for files with a model or its weights, except ONNX."""


class FixedInput(NamedTuple):
    """The images that a model takes, as far as its file says it."""

    channels: int | None = None
    """The only number of channels that it takes; None if any, or the file does not say."""
    size: tuple[int, int] | None = None
    """The only height and width in pixels that it takes; None likewise."""


ANY_INPUT = FixedInput()


class Loaded(NamedTuple):
    """A model that was loaded, before it is put on a device."""

    module: nn.Module
    record: Mapping[str, Any]
    """What run.json says of it; without absolute paths."""
    entry: Any = None
    """How its source prepares images: torchvision's weights entry, a Chain, or None if it does
    not say."""
    input: FixedInput = ANY_INPUT
    classes: tuple[str, ...] = ()
    """The names of the model's classes, if a checkpoint has a list of them."""


@dataclass(frozen=True)
class ModelSource:
    """A source of models, and how a MODEL string names it."""

    name: str
    """The source's name in run.json; the function that loads its models is `load_NAME`."""
    file: str
    """The module of `featviz.models` that has this function."""
    spelling: str
    """How a MODEL string is spelled, for help."""
    weights: str
    """The values of `--weights`, for help; empty if the option does not go with the source."""
    prefix: str = ""
    """The prefix of MODEL strings that name this source; others may name it, too."""
    recognises: Callable[[str], bool] = lambda spec: False
    """Whether a MODEL string without a source's prefix names this source."""

    def model_name(self, spec: str) -> str:
        """The name of a model in run.json: its MODEL string without the prefix, and without
        folders."""
        is_path = spec.startswith("hf:") or ".py:" in spec or Path(spec).exists()
        name = spec.removeprefix(self.prefix)
        if is_path:
            return Path(name).name
        return name


def _is_plain_name(spec: str) -> bool:
    """Whether a MODEL string is neither a path nor a reference to code."""
    path = Path(spec)
    has_mark = "/" in spec or ":" in spec
    return not (has_mark or path.suffix.lower() in SUFFIXES or path.exists())


SOURCES = (
    ModelSource(
        name="torchvision",
        file="load",
        spelling="a torchvision name",
        weights="default, an entry such as IMAGENET1K_V1, a file, or none (random)",
        prefix="torchvision:",
        recognises=_is_plain_name,
    ),
    ModelSource(
        name="timm",
        file="load",
        spelling="timm:NAME",
        weights="default, a tag such as a1_in1k, a file, or none (random)",
        prefix="timm:",
    ),
    ModelSource(
        name="huggingface",
        file="huggingface",
        spelling="a Hugging Face folder (hf:DIR)",
        weights="a file in place of its own",
        prefix="hf:",
        recognises=lambda spec: Path(spec).is_dir(),
    ),
    ModelSource(
        name="file",
        file="load",
        spelling=f"a file ({' '.join(SUFFIXES)})",
        weights="",
        recognises=lambda spec: Path(spec).is_file(),
    ),
    ModelSource(
        name="factory",
        file="load",
        spelling="your class or function (net.py:Net, pkg.mod:make_net)",
        weights="a file, or none (as the code makes them)",
        recognises=lambda spec: CODE_REFERENCE.fullmatch(spec) is not None,
    ),
)
"""The sources in the order of help, in which they are also tried: files before factories,
since the name of a file may have a colon."""

MODEL_HELP = (
    "MODEL is one of: " + ", ".join(source.spelling for source in SOURCES) + "."
)

WEIGHTS_HELP = "With " + "; with ".join(
    f"{source.spelling.partition(' (')[0]}: {source.weights}"
    for source in SOURCES
    if source.weights
)


def source_of(spec: str, option: str = "MODEL") -> ModelSource:
    """The source that a MODEL string belongs to.

    Args:
        spec: The MODEL string.
        option: The argument or option that has it, for messages.

    Raises:
        UsageError: Where it belongs to no source; the hint names a similar file.
    """
    if spec.endswith(".py") and Path(spec).is_file():
        hint = f"name the class or function that makes the model: {quoted(spec)}:NAME"
        raise _unknown_error(
            f"{option} {spec!r} is code", spec, _classes_in(Path(spec)), hint
        )
    # a prefix wins over a file with the same name
    for source in SOURCES:
        if source.prefix and spec.startswith(source.prefix):
            return source
    for source in SOURCES:
        if source.recognises(spec):
            return source
    raise missing_file(f"no model file {spec!r}", spec, download_hint(spec))


def download_hint(spec: str) -> str:
    """The hint for a MODEL that is neither a file nor a folder. If it has the form `user/name`,
    it may be a model id of Hugging Face."""
    is_id = re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", spec)
    if is_id is None or Path(spec).suffix.lower() in SUFFIXES:
        return "check the path"
    name = spec.rpartition("/")[2]
    commands = f"hf download {spec} --local-dir {name}, and MODEL is hf:{name}"
    return f"check the path; a model id of Hugging Face is downloaded first: {commands}"


def load_source(options: ModelOptions) -> Loaded:
    """Load a model from its source.

    Raises:
        UsageError: As from `check_source`, and from the function of the source.
        LoadError: As from the function of the source.
    """
    source = check_source(options)
    module = import_module(f"featviz.models.{source.file}")
    return getattr(module, f"load_{source.name}")(options)  # type: ignore[no-any-return]


def check_source(options: ModelOptions) -> ModelSource:
    """Find the source of a model, without importing torch.

    Raises:
        UsageError: Where options do not go with the source, or MODEL or `arch` names
            something that does not exist.
    """
    source = source_of(options.spec)
    _check_options(options, source)
    _check_name(options.spec, source)
    if options.arch:
        _check_name(options.arch, source_of(options.arch, "--arch"))
    return source


def _check_options(options: ModelOptions, source: ModelSource) -> None:
    """Raise a UsageError for options that the model's source would ignore. Also raise one if
    `--weights` is a file that does not exist; other names are those of a library's weights.
    """
    if options.arch and source.name != "file":
        raise UsageError(
            f"--arch is for files of weights, and {options.spec!r} is none",
            f"--weights FILE with MODEL {options.arch} gives weights",
        )
    if options.weights and not source.weights:
        raise UsageError(
            f"--weights does not go with a model file ({Path(options.spec).name})",
            "the file has the weights itself",
        )
    weights = options.weights or "none"
    names_file = source.name == "factory" or Path(weights).suffix in SUFFIXES
    if weights != "none" and names_file and not Path(weights).is_file():
        title = source.spelling.partition(" (")[0]
        raise missing_file(
            f"no weights file {weights!r}", weights, f"{title} takes {source.weights}"
        )
    if options.hparams and source.name not in ("file", "factory"):
        raise UsageError(
            f"--model-arg @hparams is for a class of your own, and {options.spec!r} is"
            " none",
            "--arch net.py:CLASS names it",
        )


def _check_name(spec: str, source: ModelSource) -> None:
    """Raise a UsageError for a name that torchvision does not have. Names of other sources are
    not checked. This is done before torch is imported, which takes seconds.

    Args:
        spec: A MODEL string.
        source: The source of the string.
    """
    package = find_spec("torchvision") if source.name == "torchvision" else None
    if package is None or package.origin is None:
        return
    name = spec.removeprefix(source.prefix)
    typed_prefix = spec.removesuffix(name)
    names = (Path(__file__).parent / "names.txt").read_text("utf-8").split()
    if name in names:
        return
    # a newer torchvision than our list may have more models: search the code of its builders
    builder = re.compile(rf"def {re.escape(name)}\(|[\"']{re.escape(name)}[\"']")
    for file in (Path(package.origin).parent / "models").rglob("*.py"):
        if builder.search(file.read_text("utf-8")):
            return
    raise unknown_name_error("torchvision", name, names, typed_prefix)


def unknown_name_error(
    library: str, name: str, names: Sequence[str], prefix: str = ""
) -> UsageError:
    """The error for a model that a library does not have. Its hint has the most similar names.

    Args:
        library: `torchvision` or `timm`.
        name: The unknown name, without a prefix.
        names: All names of the library.
        prefix: The prefix that the user typed (`timm:`, `torchvision:`), or nothing. It is
            repeated in the corrected command.
    """
    is_timm = library == "timm"
    message = f"no {library} model{'' if is_timm else ' or file'} named {name!r}"
    # 0.65, since somebody who types `Net` does not mean AlexNet
    close_names = difflib.get_close_matches(name.lower(), names, 3, 0.65)
    near = [f"{prefix}{close_name}" for close_name in close_names]
    if not is_timm:
        near = _own_code(name) or near
    hint = f"a name such as {prefix}resnet18"
    if not is_timm and name.isidentifier():
        hint += f", or FILE.py:{name} for a class of your own"
    return _unknown_error(message, f"{prefix}{name}", near, hint)


def _unknown_error(
    message: str, spec: str, near: Sequence[str], otherwise: str
) -> UsageError:
    """The error for an unknown MODEL string.

    Args:
        message: The message of the error.
        spec: The MODEL string.
        near: MODEL strings that may be meant, for the hint, the likeliest first.
        otherwise: The hint if `near` is empty.
    """
    if not near:
        return UsageError(message, otherwise)
    return UsageError(
        message,
        f"did you mean {listed([*map(quoted, near)], 3)}?",
        replace=(spec, near[0]),
    )


def _own_code(name: str) -> list[str]:
    """MODEL strings for code in the current folder that a name may mean.

    Args:
        name: `net.Net`, as in Python; `net`, for all classes of the file net.py; or `Net`,
            for a class of any file.
    """
    module, _, attribute = name.rpartition(".")
    file = Path(f"{module.replace('.', '/')}.py")
    if file.is_file():
        return [f"{file}:{attribute}"]
    named = []
    for code in sorted(Path().glob("*.py")):
        for spec in _classes_in(code):
            if name in (code.stem, spec.rpartition(":")[2]):
                named.append(spec)
    return named


def _classes_in(code: Path) -> list[str]:
    """MODEL strings (`net.py:Net`) for the classes with a base class in a Python file. The last
    class comes first, since a network is mostly defined after its blocks."""
    names = re.findall(r"^class (\w+)\(", read_code(code), re.MULTILINE)
    return [f"{code}:{name}" for name in reversed(names)]


def read_code(code: Path) -> str:
    """The text of a Python file; empty if it has more than _LONGEST_CODE bytes, is missing, or
    cannot be read."""
    with suppress(OSError):
        if code.is_file() and code.stat().st_size <= _LONGEST_CODE:
            return code.read_text("utf-8", errors="replace")
    return ""


def sniff(path: Path) -> str:
    """Find the format of a file by its content.

    Returns:
        One of FILE_FORMATS, or ONNX; for any other file a description for messages.

    Raises:
        OSError: Where the file cannot be read.
    """
    if not path.is_file():
        return "no regular file"
    with path.open("rb") as file:
        head = file.read(512)
    if not head:
        return "empty"
    if head.startswith(b"PK\x03\x04"):
        return _sniff_zip(path)
    # safetensors: 8 bytes with the length of a header, and the header in JSON. This comes
    # before pickles, since a length of 640 has the same first bytes as a pickle.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") < 2**40:
        return SAFETENSORS
    if re.match(rb"\x80[\x02-\x05]", head):  # protocols 2 to 5
        return PICKLE
    if path.name.endswith(".index.json"):
        return SHARDS
    for mark, description in _LOOKS.items():
        if head.lstrip().startswith(mark):
            return description
    # ONNX: the version of the format, and then the name of the tool, or the graph
    if re.match(rb"\x08[\x01-\x20][\x12\x3a]", head) or path.suffix == ".onnx":
        return ONNX
    if head[257:262] == b"ustar":
        return "a tar archive (of torch before 0.1.10: load it there, and save it anew)"
    # pickles of protocols 0 and 1 may begin with anything
    if path.suffix.lower() in (".pkl", ".pickle"):
        return PICKLE
    is_text = re.search(rb"[\x00-\x08\x0e-\x1f]", head) is None
    if is_text:
        return "a text file"
    return "no format that featviz knows"


def _sniff_zip(path: Path) -> str:
    """The format of a zip archive, by the names in it, as `sniff` returns it."""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            unpacked = sum(member.file_size for member in archive.filelist)
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error):
        return "a zip archive that is truncated or damaged"
    # these sizes come from the zip's directory; torch reads no more bytes than it names
    if unpacked > _MAX_RATIO * path.stat().st_size:
        return f"a zip archive that would unpack to {unpacked:,} bytes"
    if any(
        name.endswith("/constants.pkl") or name.startswith("constants.pkl")
        for name in names
    ):
        return TORCHSCRIPT
    if any(name.casefold().endswith(_EXPORTED_NAMES) for name in names):
        return EXPORTED
    if any(name.endswith("/data.pkl") for name in names):
        return ZIP
    if names and all(name.endswith(".npy") for name in names):
        return ARRAYS
    return "a zip archive that is no checkpoint"


# The user's own code, which MODEL, `--transform` or a trusted file names
# -----------------------


def imported_object(spec: str) -> Any:
    """Import an object of the user's code.

    Args:
        spec: `pkg.mod:name` or `file.py:name`, as CODE_REFERENCE matches it.

    Raises:
        UsageError: Where there is no such module, file or name in it.
        LoadError: Where the import fails.
    """
    match = CODE_REFERENCE.fullmatch(spec)
    assert match is not None
    value = _user_module(match["module"], spec)
    # the names that the module itself defines, for the hint
    public = [
        name
        for name, member in vars(value).items()
        if getattr(member, "__module__", None) == value.__name__ and name[0] != "_"
    ]
    for attribute in match["attribute"].split("."):
        if not hasattr(value, attribute):
            message = f"{spec!r}: there is no {match['attribute']!r}"
            names = ", ".join(map(quoted, public)) or "nothing"
            raise UsageError(
                message, did_you_mean(attribute, public, f"there is {names}")
            )
        value = getattr(value, attribute)
    return value


def code_digest(spec: str) -> str | None:
    """The sha256 of the code file of an object of the user's.

    Args:
        spec: `file.py:name`, or `pkg.mod:name` of a module that has been imported.

    Returns:
        The sha256; None if there is no such file, or the module was not imported.
    """
    module = spec.rpartition(":")[0]
    file = (
        module
        if module.endswith(".py")
        else getattr(sys.modules.get(module), "__file__", None)
    )
    if file is None or not Path(file).is_file():
        return None
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _user_module(module: str, spec: str) -> ModuleType:
    """Import a module of the user's.

    Args:
        module: `pkg.mod` or `file.py`.
        spec: The text that the user typed, which begins with `module`; for messages.

    Raises:
        UsageError: Where there is no such module or file.
        LoadError: Where the import fails.
    """
    is_file = module.endswith(".py")
    if is_file and not Path(module).is_file():
        message = f"no file {module!r} for {spec!r}"
        near = similar_path(Path(module))
        if near is None or near.suffix != ".py":
            raise UsageError(message, "check the path")
        corrected = f"{near}{spec.removeprefix(module)}"
        raise UsageError(
            message, f"did you mean {quoted(corrected)}?", replace=(spec, corrected)
        )
    try:
        if is_file:
            return _run_file(Path(module))
        with importable():
            return import_module(module)
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        # it may also be a module that this one imports
        if missing and module.split(".")[0] == missing.split(".")[0]:
            raise UsageError(
                f"no module {module!r} for {spec!r}",
                "run where it can be imported, or name the .py file",
            ) from error
        message = f"importing {module} failed: {type(error).__name__}: {error}"
        hint = "-v shows the traceback"
        # featviz is often installed in an environment that lacks packages of the user
        if missing:
            hint = f"install {quoted(missing)} where featviz is installed; {hint}"
        raise LoadError(message, hint) from error


@contextmanager
def importable(*folders: Path) -> Iterator[None]:
    """A context in which the user's own modules can be imported: from the current folder, which
    is searched first, as with `python -m`, and from `folders`, which are searched last. The
    folders stay on `sys.path` after the context, since a model may import modules in its
    forward. Only after an error `sys.path` is restored."""
    # the script `featviz` has its own folder on `sys.path`, not the current one
    before = list(sys.path)
    current = str(Path.cwd())
    if current not in sys.path:
        sys.path.insert(0, current)
    for folder in folders:
        if str(real(folder)) not in sys.path:
            sys.path.append(str(real(folder)))
    try:
        yield
    except BaseException:
        sys.path[:] = before
        raise


def _run_file(path: Path) -> ModuleType:
    """Run a Python file, and return it as a module. Each call runs the file again. Files with
    the same name in two folders are two modules. The file's folder stays on `sys.path`.

    Raises:
        BaseException: Whatever the code raises; then `sys.path` is restored.
    """
    path_sha256 = hashlib.sha256(os.fsencode(real(path))).hexdigest()
    name = f"featviz_user_{path.stem}_{path_sha256[:12]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    # this is done before the file runs: dataclasses and pickle look the module up by name,
    # and the file imports modules from its own folder
    sys.modules[name] = module
    sys.path.insert(0, str(real(path.parent)))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.path[:] = before
        del sys.modules[name]
        raise
    return module
