"""`featviz look` and `featviz cam`."""

from __future__ import annotations

import logging
from pathlib import Path

from featviz.cli import output
from featviz.cli.options import IMAGES, MODEL, Given, command, open_flag
from featviz.options import CamOptions, LookOptions, ModelOptions
from featviz.text import counted, listed

log = logging.getLogger(__name__)


@command(
    *(LookOptions, ModelOptions),
    arguments=[MODEL, IMAGES],
    flags=[open_flag("Open the picture.")],
)
def look(given: Given) -> int:
    """Draw one quick picture of what a model makes of an image.

    It has the input, the prediction, and a row for each layer with the maps
    that tell most, with their channels and values.

    {MODEL}

    \b
    Examples:
      featviz look resnet18 cat.jpg
      featviz look model.pth cat.jpg --layers 'layer1.*' --maps 12
      featviz look vit_b_16 cat.jpg --out vit.png --open
    \f
    IMAGE is what `featviz run` takes; of several images, the first is shown.
    Of maps that look alike one is shown; each runs from its least value (dark)
    to its greatest (bright), and one that is constant is left out.

    Exit codes: 0 done, 1 failed, 2 usage, 130 interrupted.
    """
    from featviz.inspection.look import look

    result = look(given.source, given.images, given.record(LookOptions))
    if given["json"]:
        output.document(result.as_json())
    output.left_out(result.skipped, result.never_ran)
    if result.prediction:
        words = ", ".join(guess.words for guess in result.prediction)
        log.info("%s: %s", result.name, words)
    output.written(counted(len(result.layers), "layer"), result.path, given["open"])
    return 0


@command(
    *(CamOptions, ModelOptions),
    arguments=[MODEL, IMAGES],
    flags=[open_flag("Open the first picture.")],
    json="one JSON line for each image",
    out=Path(),
)
def cam(given: Given) -> int:
    """Show where in an image the evidence for a class lies.

    A class activation map weighs what a layer gives by the gradient of the
    class's score there, and lies over the image: bright places raise the score.
    Each image gets one picture, which names the prediction and the target.

    {MODEL}

    \b
    Examples:
      featviz cam resnet18 cat.jpg
      featviz cam resnet18 cat.jpg --target class:tabby --method layercam
      featviz cam model.pth photos/ --layers layer3,layer4 --out cams
    \f
    IMAGE is what `featviz run` takes. Without --layers the last layer is taken
    whose output has places of the image that the target depends on; of a vision
    transformer this is the norm before the last attention. The same maps come
    into a run directory, with a report, by `featviz run --reduce gradcam`.

    Exit codes: 0 done, 1 failed, 2 usage, 3 some images failed, 130
    interrupted.
    """
    from featviz.inspection.cam import cam

    pictures, failed = [], 0
    for result in cam(given.source, given.images, given.record(CamOptions)):
        if given["json"]:
            output.document(result.as_json(), indent=None)
        if result.error is not None:
            failed += 1
            output.error(f"{result.image}: {result.error.message}", result.error.hint)
            continue
        output.left_out(result.skipped)
        log.info("%s at %s", result.words, listed([one.name for one in result.maps], 3))
        pictures += [result.path] if result.path is not None else []
    if not pictures:
        return 1
    place = pictures[0] if given["open"] or len(pictures) == 1 else pictures[0].parent
    output.written(counted(len(pictures), "picture"), place, given["open"])
    return 3 if failed else 0
