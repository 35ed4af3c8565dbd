"""What the options of a pass through the model mean together; nothing here needs torch."""

from __future__ import annotations

from msgspec import structs

from featviz.errors import UsageError
from featviz.gradients import interventions, targets
from featviz.options import DrawOptions, PassOptions

PAIRED = ("output", "grad")
"""What is captured for pairs of an output and its gradient."""


def for_drawing(passes: PassOptions, draw: DrawOptions, seed: int) -> PassOptions:
    """What is captured for these pictures: a class activation map is made of an output and its
    gradient, so it captures both in place of the output."""
    if draw.weighs and passes.capture == ("output",):
        passes = structs.replace(passes, capture=PAIRED)
    return structs.replace(passes, seed=seed)


def check_options(options: PassOptions, draw: DrawOptions) -> None:
    """Refuse bad values, and those that would do nothing beside the others, before any work."""
    if draw.weighs and options.capture != PAIRED:
        raise UsageError(
            f"reduce={draw.reduce} is made of a layer's output and its gradient, and capture says "
            f"{','.join(options.capture)}",
            "leave capture out",
        )
    targets.parse(options.target)
    changes = [interventions.parse(*change) for change in options.interventions]
    asked = {
        "target": options.target is not None,
        "grad_rule": options.grad_rule != "plain",
        "edit=grad": any(change.kind == "grad" for change in changes),
    }
    for name, given in asked.items():
        if given and not options.gradients:
            raise UsageError(
                f"{name} does nothing without gradients",
                "add --capture output,grad, or --reduce gradcam",
            )
