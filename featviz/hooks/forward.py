"""Calling a model, with errors that name the module in which it failed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from featviz.errors import FeatvizError, ForwardError
from featviz.hooks.capture import Recorder, tensors
from featviz.hooks.layers import class_names, modules_by_name


def forward(
    model: nn.Module,
    args: Sequence[Any],
    recorder: Recorder | None = None,
    call: Callable[..., Any] | None = None,
) -> Any:
    """Call the model, or what calls it for the caller.

    Raises:
        ForwardError: the model raised; the message names the innermost module at fault.
    """
    try:
        return (call or model)(*args)
    except FeatvizError:
        raise
    except Exception as error:
        if recorder is not None and recorder.fault is error:
            raise
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors(list(args)))
        raise ForwardError(
            f"the model failed in {_where(model, error)}: {_first_line(error)}",
            f"the input was {shapes}; --size, --crop and --channels change it, "
            "-v shows the traceback",
        ) from error


def back(target: Tensor, inputs: Sequence[Tensor], recorder: Recorder) -> None:
    """Go back from a target to the inputs, as `Recorder.back`."""
    try:
        recorder.back(target, inputs)
    except Exception as error:
        if recorder.fault is error:
            raise
        raise ForwardError(
            f"the backward pass failed: {_first_line(error)}",
            "without grad and grad-input in --capture none is needed; -v shows the traceback",
        ) from error


def _where(model: nn.Module, error: BaseException) -> str:
    """Name the innermost module on the traceback; costs nothing as long as nothing fails."""
    names: dict[int, list[str]] = {}
    for name, module in modules_by_name(model).items():
        names.setdefault(id(module), []).append(name)
    at, place, trace = "", class_names(model)[0], error.__traceback__
    while trace is not None:
        owner = trace.tb_frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and any(known := names.get(id(owner), [])):
            at = next((name for name in known if name.startswith(f"{at}.")), known[0])
            place = f"{at} ({class_names(owner)[0]})"
        trace = trace.tb_next
    return place


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
