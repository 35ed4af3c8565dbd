"""The command `featviz field`: how far layers look."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from featviz.cli import output
from featviz.cli.options import IMAGES, MODEL, ClickOption, Values, command
from featviz.options import OUTPUT, ModelOptions, read_from
from featviz.options.commands import FieldOptions
from featviz.text import TextTable, by, counted

if TYPE_CHECKING:
    from featviz.inspection.field import FieldResult


@command(
    FieldOptions,
    ModelOptions,
    arguments=[MODEL, IMAGES],
    flags=[ClickOption("Open the picture.", "--open", group=OUTPUT, first=True)],
)
def field(values: Values) -> int:
    """Measure how far layers look: their effective receptive fields.

    The receptive field of a unit is the part of the image that changes its value. It is
    measured as the size of the gradient of a layer's middle unit at each pixel, as
    the mean over images. The picture shows it on a logarithmic scale, with the
    theoretical receptive field as a frame. Bars below show how wide the squares are
    that hold 20, 30, 50 and 99 % of what was measured.

    {MODEL}

    \b
    Examples:
      featviz field resnet18 photos/
      featviz field resnet50 photos/ --layers 'layer?' --also convnext_tiny
      featviz field model.pth photos/ --json | jq '.layers[].sides'
    \f
    A few dozen images give a smooth picture; their inputs must be of one size.

    Exit codes: 0 done, 1 failed, 2 usage, 3 some images failed.
    """
    from featviz.inspection.field import measure_fields, picture_name

    # without --out the command writes a file, too, unlike the function in Python
    if values["out"] is None:
        values["out"] = Path(picture_name(values["source"].spec))
    result = measure_fields(
        values["source"], values["images"], read_from(FieldOptions, dict(values))
    )
    for image, message in result.failures.items():
        output.image_error(image, message)
    output.left_out(result.skipped)
    if values["json"]:
        output.document(result.as_json())
    else:
        output.text(str(_table(result)))
    fields = counted(len(result.layers), "receptive field")
    assert result.path is not None, "a name was given above"
    output.log_written(fields, result.path, values["open"])
    return 3 if result.failures else 0


def _table(result: FieldResult) -> TextTable:
    """The receptive fields for people: the sides of each, measured and theoretical."""
    rows = []
    for layer in result.layers:
        seen = "unknown"
        if layer.theoretical is not None:
            left, top, right, bottom = layer.theoretical
            seen = by((right - left, bottom - top))
        sides = map(str, layer.sides.values())
        rows.append([layer.model, layer.title, *sides, seen])
    shares = [f"{100 * share:g} %" for share in result.layers[0].sides]
    return TextTable(
        headings=("model", "layer", *shares, "theoretical"),
        numbers=(*shares, "theoretical"),
        rows=rows,
        footer=[
            "sides in pixels of the smallest squares that hold a share of the receptive"
            " field; theoretical: what has a path to the unit"
        ],
    )
