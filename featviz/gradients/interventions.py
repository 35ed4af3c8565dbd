"""Interventions: changes to a layer's output before it is captured. Reading them needs
no torch.

    --ablate  SELECTORS:CHANNELS              channels become 0: conv1:0-3
    --edit    SELECTORS:channel CHANNELS*X    channels are multiplied by X
              SELECTORS:clamp=LOW,HIGH        values are limited
              SELECTORS:noise=DEVIATION       normal noise is added
              SELECTORS:grad*X                the gradient is multiplied by X

A kind of intervention is one entry of `INTERVENTIONS`.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from featviz.errors import UsageError
from featviz.text import listed, quoted, read_ranges

if TYPE_CHECKING:
    from torch import Generator, Tensor


def refusal(option: str, text: str, message: str, hint: str | None) -> UsageError:
    """The error for a value of an option.

    Args:
        option: the name of the option, without dashes.
        text: the value as the user typed it.
        message: what is wrong, as the end of a sentence that begins with option and value:
            ` cannot be read`.
        hint: what helps.
    """
    return UsageError(
        f"{option} {quoted(repr(text))}{message}",
        hint,
        options=(option,),
    )


@dataclass(frozen=True)
class Intervention:
    """A change as the user asked for it."""

    option: str
    """`ablate` or `edit`."""
    text: str
    """As the user typed it: `conv1:5`."""
    operation: str
    """A key of `INTERVENTIONS`."""
    selectors: str
    """The layers, as in `--layers`."""
    channels: tuple[int, ...]
    """Indices, each once; empty for a change of all channels."""
    numbers: tuple[float, ...]
    """A factor, a standard deviation, or the lower and the upper limit; empty for
    `ablate`."""

    @property
    def title(self) -> str:
        """For messages: `ablate 'conv1:5'`."""
        return f"{self.option} {quoted(repr(self.text))}"

    @property
    def zeroed(self) -> tuple[int, ...]:
        """The channels that the change sets to zero, by `ablate` or by a factor of 0."""
        if self.operation == "ablate":
            return self.channels
        return self.channels if self.numbers[:1] == (0,) else ()

    def error(self, message: str, hint: str | None = None) -> UsageError:
        """The error for this change; `message` is the end of a sentence that begins with the
        title."""
        return refusal(self.option, self.text, message, hint)


# The functions of `InterventionKind.apply`. None of them changes a tensor in place, since
# the model may also use it elsewhere.


def _set_to_zero(
    change: Intervention, output: Tensor, axis: int, noise: Generator
) -> Tensor:
    """Set the channels to 0. A product with 0 would not do: NaN would stay NaN."""
    return output.index_fill(axis, _indices(change, output), 0)


def _scale(change: Intervention, output: Tensor, axis: int, noise: Generator) -> Tensor:
    """Multiply the channels by the factor."""
    # a factor for each channel of the output, which is 1 for channels that are not named
    factors = output.new_ones(output.shape[axis])
    factors = factors.index_fill(0, _indices(change, output), change.numbers[0])
    shape = [1] * output.ndim
    shape[axis] = -1
    return output * factors.view(shape)


def _indices(change: Intervention, output: Tensor) -> Tensor:
    """The channels as index_fill takes them, on the output's device."""
    import torch

    return torch.tensor(change.channels, device=output.device)


def _clamp(change: Intervention, output: Tensor, axis: int, noise: Generator) -> Tensor:
    """Limit all values to the range of the two numbers of the change; NaN stays NaN."""
    return output.clamp(*change.numbers)


def _add_noise(
    change: Intervention, output: Tensor, axis: int, noise: Generator
) -> Tensor:
    """Add normal noise, whose standard deviation is the number of the change."""
    import torch

    # drawn on the CPU in float32, so that the noise is the same for each device and type
    return output + change.numbers[0] * torch.randn(output.shape, generator=noise).to(
        output
    )


def _scale_gradient(
    change: Intervention, output: Tensor, axis: int, noise: Generator
) -> Tensor:
    """Multiply the gradient by the number of the change, in the backward pass. Values stay
    as they are."""
    # on a copy: a hook on the output itself would also act where it is used elsewhere
    if output.requires_grad:
        output = output.clone()
        output.register_hook(partial(operator.mul, change.numbers[0]))  # type: ignore[no-untyped-call]
    return output


@dataclass(frozen=True)
class InterventionKind:
    """A kind of change."""

    option: str
    """The option that takes it: `ablate` or `edit`."""
    pattern: str
    """A regular expression for the text behind the selectors, without spaces."""
    example: str
    apply: Callable[[Intervention, Tensor, int, Generator], Tensor]
    """Takes the change, the output, the channel axis of the output (-1 if the change names
    no channels), and a source of noise. Returns the changed output as a new tensor."""


_CHANNELS = r"(?P<channels>\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*)"
_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?"

INTERVENTIONS = {
    "ablate": InterventionKind(
        option="ablate",
        pattern=_CHANNELS,
        example="'layer3.*.relu:5,17' or 'conv1:0-3'",
        apply=_set_to_zero,
    ),
    "channel": InterventionKind(
        option="edit",
        pattern=rf"channels?{_CHANNELS}\*(?P<numbers>{_NUMBER})",
        example="'conv1:channel 3*2.0'",
        apply=_scale,
    ),
    "clamp": InterventionKind(
        option="edit",
        pattern=rf"clamp=(?P<numbers>{_NUMBER},{_NUMBER})",
        example="'relu:clamp=0,6'",
        apply=_clamp,
    ),
    "noise": InterventionKind(
        option="edit",
        pattern=rf"noise=(?!-)(?P<numbers>{_NUMBER})",
        example="'conv1:noise=0.1'",
        apply=_add_noise,
    ),
    "grad": InterventionKind(
        option="edit",
        pattern=rf"grad\*(?P<numbers>{_NUMBER})",
        example="'layer4:grad*0.5'",
        apply=_scale_gradient,
    ),
}


def parse(option: str, text: str) -> Intervention:
    """Read a change.

    Args:
        option: `ablate` or `edit`.
        text: a value of this option, such as `SELECTORS:5,17` or `SELECTORS:clamp=0,6`.

    Raises:
        UsageError: the text has another form, or the lower limit is above the upper one.
    """
    # the last colon, since selectors may have colons (`re:`, `fn:`), and changes have none
    selectors, _, change_text = text.rpartition(":")
    change_text = re.sub(r"\s", "", change_text)
    examples = []
    for operation, change_kind in INTERVENTIONS.items():
        if change_kind.option != option:
            continue
        examples.append(change_kind.example)
        match = re.fullmatch(change_kind.pattern, change_text, re.ASCII | re.IGNORECASE)
        if match is None or not selectors.strip():
            continue
        groups = match.groupdict(default="")
        texts = groups.get("numbers", "").split(",")
        numbers = tuple(float(number) for number in texts if number)
        channels: Sequence[int] = ()
        if "channels" in groups:
            try:
                channels = read_ranges(groups["channels"])
            except ValueError:  # 3-1, or too many channels
                continue
        change = Intervention(
            option=option,
            text=text,
            operation=operation,
            selectors=selectors,
            channels=tuple(channels),
            numbers=numbers,
        )
        if operation == "clamp" and numbers[0] > numbers[1]:
            raise change.error(
                f": {numbers[0]:g} is above {numbers[1]:g}", "clamp=LOW,HIGH"
            )
        return change
    raise refusal(
        option, text, _fault_of_text(option, text), f"for example {', '.join(examples)}"
    )


def _fault_of_text(option: str, text: str) -> str:
    """What is wrong with a text that no kind of change matches, for `refusal`."""
    if re.fullmatch("[^:]*:?", text) is None:
        return " cannot be read"
    lacking = "channels" if option == "ablate" else "change"
    return f" has no {lacking} behind a colon"


parse_ablate = partial(parse, "ablate")
parse_edit = partial(parse, "edit")


def intervene(
    changes: Sequence[Intervention],
    layer: str,
    output: Any,
    axis_of: Callable[[Tensor, Intervention], int],
    noise: Generator,
) -> Any:
    """Make some changes to a layer's output, one after the other.

    Args:
        changes: the changes of this layer, in their order; may be empty.
        layer: the layer's name, for messages.
        output: what the layer returned, of any type; it is not changed in place.
        axis_of: takes a tensor and a change, and returns the axis of the tensor that
            counts channels; raises UsageError if that is not known.
        noise: the source of noise, on the CPU.

    Returns:
        The changed output; `output` itself if there are no changes.

    Raises:
        UsageError: the output is not a tensor, or does not have one of the channels.
    """
    from torch import Tensor

    for change in changes:
        if not isinstance(output, Tensor):
            type_name = type(output).__name__
            raise change.error(f": {layer} gives a {type_name}, not a tensor")
        axis = -1
        if change.channels:
            axis = axis_of(output, change)
            _check_channels(change, layer, output.shape[axis])
        output = INTERVENTIONS[change.operation].apply(change, output, axis, noise)
    return output


def _check_channels(change: Intervention, layer: str, count: int) -> None:
    """Refuse a change of channels that are not in an output of `count` channels.

    Args:
        layer: the layer's name, for the message.

    Raises:
        UsageError: there are such channels.
    """
    beyond = [str(channel) for channel in change.channels if channel >= count]
    if beyond:
        raise change.error(
            f": {layer} has channels 0 to {count - 1}, not {listed(beyond, 3)}",
            "`featviz layers MODEL` shows the channels of each layer",
        )
