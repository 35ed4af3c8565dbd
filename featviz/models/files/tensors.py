"""A tensor in a file of torch.save, as an array: nothing that the file names is run."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import torch
from torch import Tensor

from featviz.errors import FileError
from featviz.files import npy
from featviz.models.files import pickles, torch_save
from featviz.models.files.rebuilding import RefusedError
from featviz.text import listed, quoted

_TENSORS = re.compile(r"torch\._utils\._rebuild_\w+|torch\.\w+Storage|collections\.OrderedDict")
"""The names that files of plain tensors need."""


def read_tensor(data: bytes) -> np.ndarray:
    """The one tensor that the bytes of a file of torch.save hold, or the one that is called
    `image`; what numpy lacks (bfloat16) becomes float32.

    Raises:
        FileError: it holds something else or several, names what could run code, or is broken.
    """
    content = _content(data)
    if isinstance(content, dict):
        tensors = {str(k): value for k, value in content.items() if isinstance(value, Tensor)}
        content = npy.only(tensors, "tensors", "torch.save(tensors[NAME], 'image.pt')")
    if not isinstance(content, Tensor):
        raise FileError(f"holds a {type(content).__name__}, and no tensor", _REMEDY)
    if content.layout != torch.strided or content.is_quantized or content.is_complex():
        raise FileError(f"holds a tensor that is {_kind(content)}, and no plain one", _REMEDY)
    dense = content.detach().resolve_neg()
    try:
        array: np.ndarray = dense.numpy()
    except TypeError:
        array = dense.float().numpy()
    return array


_REMEDY = "torch.save(tensor, 'image.pt') of a plain tensor [C, H, W]"


def _content(data: bytes) -> Any:
    if not data.startswith(b"PK"):
        raise FileError(
            "is of the older format of torch.save", "torch.save(torch.load(FILE), 'image.pt')"
        )
    vocabulary = pickles.Vocabulary({}, _TENSORS)
    content = None
    try:
        content = torch_save.load_record(data, vocabulary)
    except Exception as error:  # a broken pickle decides itself what it raises
        words = quoted(str(error)) or type(error).__name__
        if not vocabulary.unknown and isinstance(error, RefusedError):
            raise FileError(words, _REMEDY) from error
        if not vocabulary.unknown:
            raise FileError(f"is no whole file of torch.save: {words}") from error
    if vocabulary.unknown:
        names = listed(sorted(map(quoted, vocabulary.unknown)), 3)
        raise FileError(f"holds more than tensors ({names}); nothing was executed", _REMEDY)
    return content


def _kind(tensor: Tensor) -> str:
    if tensor.is_quantized:
        return "quantised"
    return "complex" if tensor.is_complex() else str(tensor.layout).removeprefix("torch.")
