"""The command `featviz field`: how far layers look."""

from __future__ import annotations

import logging
from pathlib import Path

from featviz.cli import output
from featviz.cli.options import IMAGES, MODEL, ClickOption, Values, command
from featviz.options import OUTPUT, ModelOptions, read_from
from featviz.options.commands import FieldOptions
from featviz.text import counted, layer_named

log = logging.getLogger(__name__)


@command(
    FieldOptions,
    ModelOptions,
    arguments=[MODEL, IMAGES],
    flags=[ClickOption("Open the picture.", "--open", group=OUTPUT, first=True)],
)
def field(values: Values) -> int:
    """Measure how far layers look: their effective receptive fields.

    A field is the mean over images of the size of the gradient of a layer's middle
    unit at each pixel. The picture shows it on a logarithmic scale, with the
    theoretical field as a frame, and the squares that hold 20, 30, 50 and 99 % of it.

    {MODEL}

    \b
    Examples:
      featviz field resnet18 photos/
      featviz field resnet50 photos/ --layers 'layer?' --also convnext_tiny
      featviz field model.pth photos/ --json | jq '.layers[].sides'
    \f
    A few dozen images give a smooth field; their inputs must be of one size.

    Exit codes: 0 done, 1 failed, 2 usage, 3 some images failed.
    """
    from featviz.inspection.field import measure_fields, picture_name

    # in Python no file is written without `out`; a command has nothing else to give
    if values["out"] is None:
        values["out"] = Path(picture_name(values["source"].spec))
    result = measure_fields(
        values["source"], values["images"], read_from(FieldOptions, dict(values))
    )
    if values["json"]:
        output.document(result.as_json())
    for image, message in result.failures.items():
        output.image_error(image, message)
    output.left_out(result.skipped)
    for layer in result.layers:
        squares = [f"{100 * share:g} % {size}" for share, size in layer.sides.items()]
        log.info(
            "%s %s: %s px", layer.model, layer_named(layer.title), ", ".join(squares)
        )
    fields = counted(len(result.layers), "field")
    assert result.path is not None, "a name was given above"
    output.written(fields, result.path, values["open"])
    return 3 if result.failures else 0
