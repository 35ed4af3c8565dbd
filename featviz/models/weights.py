"""Files of weights, whole models and programs; tensors by name, and from these into a module."""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from featviz.errors import FeatvizError, FileError, LoadError
from featviz.files import open_regular, read_json
from featviz.models import sources, torch_files
from featviz.models.requirements import first_line
from featviz.models.sources import Fixed, importable
from featviz.models.torch_files import RefusedError, nested
from featviz.options import ModelOptions
from featviz.text import listed, quoted

log = logging.getLogger(__name__)

_SHOWN = 4

# Files -------------------------------------------------------------------------------------------


def record(path: Path) -> dict[str, Any]:
    """What run.json says of a file: its name and sha256, no folder."""
    with path.open("rb") as file:
        return {"file": path.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def read(path: Path, unsafe: bool = False) -> Any:
    """Read what a file holds: a module, or a mapping with tensors somewhere in it; LoadError for no
    checkpoint, a truncated one, or a pickle that needs more than is allowed."""
    try:
        kind = sources.sniff(path)
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror}", None) from error
    if kind == sources.TORCHSCRIPT:
        hint = "torch.save(torch.jit.load(FILE).state_dict(), 'weights.pth') and --arch MODEL"
        raise LoadError(f"{path.name} is TorchScript, which takes no hooks on its layers", hint)
    if kind == sources.EXPORTED:
        return read_program(path, unsafe)[0]
    if kind == sources.SHARDS:
        return _read_shards(path, unsafe)
    if kind not in sources.KINDS:
        words = f"{path.name} is no checkpoint: it is {kind}"
        raise LoadError(words, "a file that torch.save wrote")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about old ways to save, which a reader cannot change
            if kind == sources.SAFETENSORS:
                from safetensors.torch import load_file

                return load_file(path)
            if unsafe:
                with importable(path.parent):
                    content = torch.load(path, "cpu", weights_only=False)
                return unwrapped(content) if isinstance(content, nn.Module) else content
            with open_regular(path) as file:
                return torch_files.load(file)
    except FeatvizError:
        raise
    except RefusedError as error:
        if lacking := [name for name in error.names if torch_files.lacks(name)]:
            package = lacking[0].partition(".")[0]
            raise LoadError(
                f"{path.name} needs the package {package} for {listed([*map(quoted, lacking)], 3)}",
                f"pip install {package}, or a newer one (-U) if it is there",
            ) from error
        trust = "if you trust the file, --trust"
        remedy = trust if error.names else f"save the state_dict() of a model that runs; {trust}"
        raise LoadError(f"{path.name} {error}", remedy, add=("--trust",)) from error
    except Exception as error:  # a broken pickle decides itself what it makes torch raise
        raise _damaged(path, error) from error


def _damaged(path: Path, error: Exception) -> LoadError:
    if isinstance(error, ModuleNotFoundError):  # of a file that is trusted
        words = f"{path.name} needs the module {str(error.name)!r}, which cannot be found"
        return LoadError(words, "PYTHONPATH=FOLDER adds the folder that has it")
    cause: BaseException = error
    if isinstance(error, pickle.UnpicklingError) and error.__context__ is not None:
        cause = error.__context__  # the same without torch's advice to load the file unsafely
    words = quoted(re.split(r"(?<=\w)\. |\n", str(cause).strip())[0])
    message = f"{path.name} cannot be loaded: {type(cause).__name__}: {words}".removesuffix(": ")
    if "Unsupported operand" in str(error):  # of a pickle protocol that is not torch.save's own
        return LoadError(message, "if you trust the file, --trust", add=("--trust",))
    if isinstance(cause, AttributeError) and "__main__" in words:
        hint = "save its state_dict(), and give --arch SCRIPT.py:CLASS"
        return LoadError(f"{path.name} was saved by the script of its class: {words}", hint)
    return LoadError(message, "is the file whole, and from this torch or older?")


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside torch.compile's, DataParallel's or DistributedDataParallel's wrapper."""
    inner = getattr(module, "_orig_mod", None)
    if inner is None and isinstance(module, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        inner = module.module
    return unwrapped(inner) if isinstance(inner, nn.Module) else module


def _read_shards(path: Path, unsafe: bool) -> Any:
    """The files that an index.json names, which must lie beside it."""
    try:
        shards = sorted({Path(str(n)).name for n in read_json(path)["weight_map"].values()})
    except (FileError, ValueError, KeyError, TypeError, AttributeError) as error:
        words = f"{path.name} is no index of shards: {error}"
        raise LoadError(words, "it lacks a weight_map") from error
    tensors: dict[str, Any] = {}
    for name in shards:
        words, shard = f"{path.name} names {quoted(name)}", path.with_name(name)
        is_index = name.endswith(".index.json")  # which could name itself
        if is_index or not os.path.isfile(shard):  # noqa: PTH113 - takes names of any length
            raise LoadError(f"{words}, which is not beside it", "fetch it")
        part = read(shard, unsafe)
        if not isinstance(part, dict):
            raise LoadError(f"{words}, which holds no dict of tensors")
        tensors |= part
    return tensors


# torch.export programs, .pt2, as modules whose layers take hooks ---------------------------------

Shape = tuple[int | None, ...]

_NEEDED = re.compile(rb'\\"type\\": \\"([\w.]+)\.\w+\\"|torch\.ops\.(torchvision)\.')
"""Classes of outputs, and operators, whose package must be imported first."""


def read_program(
    path: Path, trust: bool = False, device: torch.device | None = None
) -> tuple[nn.Module, Fixed]:
    """Read a .pt2 file with `torch.export.load`, which can run whatever code it holds: the program
    as a tree of modules by the original's names, and the channels and the size of its input."""
    if not trust:
        words = "is an exported program, and torch reads it by running what it holds"
        words = f"{quoted(path.name)} {words}; nothing was executed"
        raise LoadError(words, "if you trust the file, --trust", add=("--trust",))
    heard = logging.root.manager.disable
    logging.disable(logging.ERROR)  # torch logs tracebacks, and raises
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("models/model.json")]
            texts = [archive.read(name) for name in names]
        with importable(path.parent), path.open("rb") as file:
            for one, other in [found for text in texts for found in _NEEDED.findall(text)]:
                import_module((one or other).decode())
            program = torch.export.load(file)
        if device is not None and device.type != "cpu":
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device)
        module = torch.export.unflatten(program)
    except Exception as error:  # the file decides what torch raises
        cause: BaseException = error
        while cause.__cause__ is not None:  # torch says last what it was doing
            cause = cause.__cause__
        words = f"{quoted(path.name)} cannot be loaded: {quoted(first_line(cause))}"
        hint = "is the file whole, as torch.export.save wrote it, and from this torch or older?"
        raise LoadError(words, hint) from error
    finally:
        logging.disable(heard)
    shape = _input_shape(path, program)

    def refuse_others(module: nn.Module, args: Sequence[Any]) -> None:
        got = tuple(args[0].shape)
        if any(want not in (None, size) for want, size in zip(shape, got, strict=False)):
            raise ValueError(f"it was exported for inputs {_words(shape)}, not {_words(got)}")

    module.register_forward_pre_hook(refuse_others)
    _, channels, *size = shape
    return module, (channels, None if None in size else tuple(size))  # type: ignore[return-value]


def _input_shape(path: Path, program: Any) -> Shape:
    names = program.graph_signature.user_inputs
    values = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    value = values.get(names[0]) if len(names) == 1 else None
    shape = tuple(size if isinstance(size, int) else None for size in getattr(value, "shape", ()))
    one = torch.utils._pytree.tree_structure(((0,), {}))
    plain = program.module_call_graph[0].signature.in_spec == one
    dtype = getattr(value, "dtype", None)
    if not plain or len(shape) != 4 or shape[0] not in (1, None) or dtype != torch.float32:
        given = ", ".join(map(str, names)) or "no input"
        raise LoadError(
            f"{path.name} takes {f'{dtype} {_words(shape)}' if plain else given}, not one image",
            "export it for one positional argument, an image torch.float32 [1, C, H, W]",
        )
    return shape


def _words(shape: Sequence[int | None]) -> str:
    return f"[{', '.join('any' if size is None else str(size) for size in shape)}]"


# Digests -----------------------------------------------------------------------------------------

ADDRESS = re.compile(r"0x[0-9a-fA-F]{6,}")


def digest(module: nn.Module) -> str | None:
    """sha256 of a module: names, classes and settings (`extra_repr`) of what it consists of,
    parameters and buffers, not code; None where a tensor does not tell its values."""
    sha256 = hashlib.sha256()
    for name, part in module.named_modules():
        try:
            settings = ADDRESS.sub("0x", str(part.extra_repr()))
        except Exception:  # the user's own code
            settings = ""
        words = f"{name}: {type(part).__qualname__}({settings})\n"
        sha256.update(words.encode("utf-8", "backslashreplace"))
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        sha256.update(f"{name}: {tensor.dtype}\n".encode())
        if is_lazy(tensor) or tensor.is_meta:
            continue
        sha256.update(f"{list(tensor.shape)}\n".encode())
        try:
            add_values(tensor, sha256)
        except Exception:  # a tensor of somebody else's class
            return None
    return sha256.hexdigest()


def add_values(tensor: Tensor, sha256: Any) -> None:
    """Add a tensor's bytes, or those of the tensors that it consists of (torchao's)."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, settings = tensor.__tensor_flatten__()
        sha256.update(ADDRESS.sub("0x", repr(settings)).encode())
        for name in names:
            add_values(getattr(tensor, name), sha256)
        return
    tensor = tensor.detach().cpu()
    tensor = tensor.int_repr() if tensor.is_quantized else tensor
    tensor = tensor.to_dense() if tensor.layout != torch.strided else tensor
    sha256.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)


# From what a training script saved to tensors by name ---------------------------------------------
_PLAIN = (
    *("state_dict", "model_state_dict", "model", "net", "network", "module", "weights"),
    "params",
)
_AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema_model", "ema", "params_ema")
"""Keys under which checkpoints keep weights; the second are exponential moving averages."""

_PREFIXES = (
    *("module.", "_orig_mod.", "model.", "net.", "network.", "encoder.", "backbone."),
    "timm_model.",
)
"""What wrappers and training scripts put before names."""

_MOST = 0.8
"""Share of the keys that must have a prefix: losses may stand beside the model."""

_WRAPPERS = (
    re.compile(r"_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\."),
    re.compile(r"(?<=\.)module\."),
)
"""What wrappers of parts put into names; the last may also be a module's own name."""

_DEEPEST = 4


Form = tuple[dict[str, Tensor], tuple[str, ...]]
"""Tensors by name, and what was done to find them, in words."""


def read_weights(path: Path, options: ModelOptions) -> Form:
    """The tensors of a file by name."""
    content = read(path, options.trust)
    return unwrap(content, options.key, options.strip_prefix, options.ema, path.name)[0]


def unwrap(
    content: Any,
    key: str | None = None,
    prefix: str | None = None,
    ema: bool | None = None,
    name: str = "the checkpoint",
) -> tuple[Form, nn.Module | None]:
    """Find the state dict in a checkpoint, and the module that it is of, if any: under `key`
    (`models.generator`), else in the usual places; averaged weights (`ema`), plain ones (False), or
    plain ones if there are any (None). A `prefix` is stripped from names."""
    steps: list[str] = []
    inner = content
    if key:
        there = isinstance(content, Mapping) and key in content
        for part in [key] if there else key.split("."):
            if not isinstance(inner, Mapping) or part not in inner:
                message = f"--key {key!r}: there is no {part!r}"
                raise LoadError(message, f"there is {_describe(inner)}")
            inner = inner[part]
        steps.append(f"took {key!r}")
    else:
        inner = _dig(content, ema, steps)
    tensors = _tensors(inner)
    if not tensors:
        what = "averaged weights (--ema)" if ema and not key else "weights"
        under = f" under {key!r}" if key else ""
        hint = "leave out --ema for the plain ones" if ema else "--key says where they are"
        raise LoadError(f"{name} holds no {what}{under}: {_describe(content)}", hint)
    found = tensors, tuple(steps)
    module = inner if isinstance(inner, nn.Module) else None
    return _without(found, prefix) if prefix else found, module


def _dig(content: Any, ema: bool | None, steps: list[str], depth: int = _DEEPEST) -> Any:
    """What lies under the first usual key with more tensors than lie beside it."""
    if not isinstance(content, Mapping) or not depth:
        return content
    places = {True: _AVERAGED, False: _PLAIN, None: (*_PLAIN, *_AVERAGED)}
    beside = len(_tensors(content))  # a loss, a running mean
    for name in places[ema]:
        inner = content.get(name)
        if any(len(_tensors(value)) > beside for value in nested(inner)):
            steps.append(f"took {name!r}")
            return _dig(inner, ema if name in _PLAIN else None, steps, depth - 1)
    return content


def _tensors(content: Any) -> dict[str, Tensor]:
    """The tensors of a module or mapping; other things beside them (an epoch) do not matter."""
    if isinstance(content, nn.Module):
        content = content.state_dict()
    if not isinstance(content, Mapping):
        return {}
    return {str(k): v.data for k, v in content.items() if isinstance(v, Tensor)}


def _describe(content: Any) -> str:
    if not isinstance(content, Mapping):
        return f"a {type(content).__name__}"
    keys = [quoted(repr(key)) for key in content if isinstance(key, (str, int))]
    return f"keys {listed(keys, 8)}" if keys else "nothing"


def _without(form: Form, prefix: str) -> Form:
    """The tensors whose names begin with a prefix, without it."""
    tensors, steps = form
    kept = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    if not kept:
        message = f"--strip-prefix {prefix!r}: no name begins with it"
        raise LoadError(message, f"names: {', '.join([*tensors][:3])}")
    others = len(tensors) - len(kept)
    step = f"stripped {prefix!r}" + (f", leaving {others} others out" if others else "")
    return kept, (*steps, step)


def stripped_forms(weights: Form) -> list[Form]:
    """The tensors as they are, then without one usual prefix after the other, and without
    wrappers."""
    form, forms = weights, [weights]
    while True:
        names, most = [*form[0]], _MOST * len(form[0])
        common = [p for p in _PREFIXES if sum(name.startswith(p) for name in names) >= most]
        if not common:
            break
        form = _without(form, common[0])
        forms.append(form)
    for wrapper in _WRAPPERS:
        for tensors, steps in [*forms]:
            found = sorted({part for name in tensors for part in wrapper.findall(name)})
            renamed = {wrapper.sub("", name): tensor for name, tensor in tensors.items()}
            if found and len(renamed) == len(tensors):  # else two names became one
                step = f"took {', '.join(map(repr, found))} out of names"
                forms.append((renamed, (*steps, step)))
    return forms


def put_weights(module: nn.Module, form: Form, path: Path, options: ModelOptions) -> dict[str, Any]:
    """Load the tensors of a file into a module; returns what run.json says of them."""
    names = set(module.state_dict())
    tensors, steps = max(stripped_forms(form), key=lambda form: len(names & form[0].keys()))
    if steps:
        log.info("%s: %s", path.name, "; ".join(steps))
    what = f"{path.name} does not fit {options.spec}"
    return {**record(path), "taken": [*steps, put_into(module, tensors, what, options.partial)]}


def put_into(
    module: nn.Module, tensors: Mapping[str, Tensor], what: str, partial: bool = False
) -> str:
    """Load tensors into a module, cast to its own precision; returns how many of its tensors there
    were. `what` begins the message; `partial` loads what fits."""
    own = module.state_dict()
    expected = {k: v for k, v in own.items() if isinstance(v, Tensor)}
    # BatchNorm's step counter: old checkpoints lack it, and nothing depends on it here
    total = [k for k in expected if k in tensors or not k.endswith("num_batches_tracked")]
    chosen = OrderedDict(
        (k, v) for k, v in tensors.items() if k in expected and expected[k].shape == v.shape
    )
    odd = {
        "missing ": [quoted(key) for key in total if key not in tensors],
        "unexpected ": [quoted(key) for key in tensors if key not in expected],
        "": [
            f"{quoted(key)} is {list(tensors[key].shape)}, not {list(expected[key].shape)}"
            for key in total
            if key in tensors and key not in chosen
        ],
    }
    words = "; ".join(word + listed(keys, _SHOWN) for word, keys in odd.items() if keys)
    if words and not (partial and chosen):
        raise LoadError(
            f"{what}: {len(chosen)} of {len(total)} tensors; {words}",
            "another --arch, --model-arg (for example num_classes=10), or --partial for what fits",
        )
    # MNASNet loads no unknown version
    vars(chosen)["_metadata"] = getattr(own, "_metadata", {})
    try:
        module.load_state_dict(chosen, strict=False)
    except (RuntimeError, KeyError) as error:  # of sparse and quantised tensors and modules
        words = f"{what}: {quoted(str(error).strip().splitlines()[-1].strip())}"
        raise LoadError(words, "save the weights as plain dense tensors") from error
    loaded = f"loaded {len(chosen)} of {len(total)}"
    if words:
        log.warning("%s tensors (--partial): %s", loaded, words)
    return loaded
