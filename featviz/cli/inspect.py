"""The commands that look into a model: `featviz layers`, `kernels` and `identify`;
`look` and `cam` of images; `audit` and `exemplars`, which count over many of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from featviz.audit.gates import parse_gate
from featviz.cli import output
from featviz.cli.options import (
    FILE,
    IMAGES,
    MODEL,
    ClickOption,
    Values,
    click_option,
    command,
)
from featviz.options import OUTPUT, ModelOptions, declared_options, read_from
from featviz.options.commands import (
    AuditOptions,
    CamOptions,
    ExemplarOptions,
    KernelOptions,
    ListOptions,
    LookOptions,
)
from featviz.records import UNLIKE_OUTPUTS
from featviz.rundir import AUDIT_FILE, EXEMPLARS_FILE, RUN_FILE
from featviz.text import counted, gaps, listed, printable

log = logging.getLogger(__name__)


@command(ListOptions, ModelOptions, arguments=[MODEL])
def layers(values: Values) -> int:
    """List a model's modules: output shapes, parameters, multiply-accumulates.

    Figures come from one forward pass on zeros. Those of a module include the
    modules inside it. A star marks what the selectors take.

    \b
    parameters   each counts once, also where it is shared
    MACs         multiply-accumulates in convolutions, matrix products and
                 attention; 1 MAC = 2 FLOP; operators from outside torch are named
    activations  output bytes of leaf modules, each call counted

    {MODEL}

    \b
    Examples:
      featviz layers model.pth --layers 'Conv2d@layer3.*' --size 512
      featviz layers inception_v3 --weights none --functions
      featviz layers weights.safetensors --json | jq .totals
    """
    from featviz.inspection.layers import list_model

    listing = list_model(values["source"], read_from(ListOptions, dict(values)))
    if values["json"]:
        output.document(listing.document)
    else:
        output.text(str(listing.table))
    return 0


@command(
    KernelOptions,
    ModelOptions,
    arguments=[MODEL],
    but=("overlay", "reduce", "figure", "flat", "tensors"),
    result=RUN_FILE,
)
def kernels(values: Values) -> int:
    """Draw the kernels of a model's convolutions, one picture for each.

    kernels.png shows the first kernels of each convolution, with their numbers and
    values. In the picture of a convolution, tile i is output channel i. Kernels of
    three inputs are in colour. Of others, a tile is the mean over the inputs. Zero
    is mid-grey. 1-D kernels are strips; the time steps of 3-D kernels stand side by
    side.

    {MODEL}

    \b
    Examples:
      featviz kernels resnet18
      featviz kernels model.pth --layers 'Conv2d#0' --out first
      featviz kernels model.pth --layers 'layer4.*' --all-slices --channels 0-31
    """
    from featviz.inspection.kernels import draw_kernels

    document, skipped = draw_kernels(
        values["source"], read_from(KernelOptions, dict(values))
    )
    output.left_out(skipped)
    log.info(
        "kernels of %s in %s, the first ones in kernels.png; %s",
        counted(len(document["captures"]), "layer"),
        document["out"],
        output.to_look_at("them", document["out"], "--open"),
    )
    if values["json"]:
        output.document(document)
    return 0


@command(
    arguments=[FILE],
    flags=[
        click_option(declared_options(ModelOptions)[name])
        for name in ("key", "strip_prefix", "ema")
    ],
)
def identify(values: Values) -> int:
    """Say what a file of weights is run as, and with which --arch.

    featviz recognises torchvision's architectures by the names and shapes of their
    tensors. If none fits, it names the nearest ones. A whole model needs no --arch.

    \b
    Examples:
      featviz identify weights.pth
      featviz identify checkpoint.ckpt --key state_dict --json
    """
    from featviz.models.requirements import require_torch

    require_torch(is_command=True)
    from featviz.models.identify import identify_file
    from featviz.models.load import architecture_beside

    path = values["file"]
    # a config.json or args.yaml beside the file may name the architecture
    message, document = identify_file(
        path,
        architecture_beside(path),
        values["key"],
        values["strip_prefix"],
        values["ema"],
    )
    if values["json"]:
        output.document(document)
    else:
        output.text(printable(message))
    return 0


@command(
    LookOptions,
    ModelOptions,
    arguments=[MODEL, IMAGES],
    flags=[ClickOption("Open the picture.", "--open", group=OUTPUT, first=True)],
)
def look(values: Values) -> int:
    """Draw one quick picture of what a model makes of an image.

    The picture has the input, the prediction, and a row for each layer: the maps that
    vary most, with their channels and values.

    {MODEL}

    \b
    Examples:
      featviz look resnet18 cat.jpg
      featviz look model.pth cat.jpg --layers 'layer1.*' --maps 12
      featviz look vit_b_16 cat.jpg --out vit.png --open
    \f
    IMAGE is what `featviz run` takes; of several images, the first is shown.
    Each map runs from its least value (dark) to its greatest (bright), both without
    the border that padding makes.

    Exit codes: 0 done, 1 failed, 2 usage, 130 interrupted.
    """
    from featviz.inspection.look import look

    result = look(
        values["source"], values["images"], read_from(LookOptions, dict(values))
    )
    if values["json"]:
        output.document(result.as_json())
    output.left_out(result.skipped, result.never_ran)
    if result.prediction:
        scores = ", ".join(score.text for score in result.prediction)
        log.info("%s: %s", result.name, scores)
    if result.remark:
        log.info("%s: %s", result.name, result.remark)
    # a layer that ends two stages has two rows
    layers = {row.layer for row in result.layers}
    output.log_written(counted(len(layers), "layer"), result.path, values["open"])
    return 0


@command(
    CamOptions,
    ModelOptions,
    arguments=[MODEL, IMAGES],
    flags=[ClickOption("Open the first picture.", "--open", group=OUTPUT, first=True)],
    json="one JSON line for each image",
    out=Path(),
)
def cam(values: Values) -> int:
    """Show where in an image the evidence for a class, box or region lies.

    A class activation map weighs a layer's output by the gradient of the
    target's score, and lies over the image: bright places raise the score.

    {MODEL}

    \b
    Examples:
      featviz cam resnet18 cat.jpg
      featviz cam resnet18 cat.jpg --target class:tabby --method layercam
      featviz cam yolo11n.pt street.jpg --target box:2
      featviz cam model.pth photos/ --layers layer3,layer4 --out cams
    \f
    IMAGE is what `featviz run` takes. Without --target it is the predicted
    class, the most confident box, or the largest region besides the background.
    Without --layers it is what enters a detector's head, the last map before
    the logits of a segmentation, or else the last layer whose output has places
    of the image that the target depends on. `featviz run --reduce gradcam` draws
    the same maps into a run directory.

    Exit codes: 0 done, 1 failed, 2 usage, 3 some images failed.
    """
    from featviz.inspection.cam import cam

    pictures = []
    failed = 0
    for result in cam(
        values["source"], values["images"], read_from(CamOptions, dict(values))
    ):
        if values["json"]:
            output.document(result.as_json(), indent=None)
        if result.error is not None:
            failed += 1
            output.image_error(result.image, result.error.message, result.error.hint)
            continue
        output.left_out(result.skipped)
        layers = [class_map.caption for class_map in result.maps]
        log.info("%s at %s", result.title, listed(layers, 3))
        if result.path is not None:
            pictures.append(result.path)
    if not pictures:  # each image has said why
        return 1
    noun = counted(len(pictures), "picture")
    path = pictures[0]
    if len(pictures) > 1 and values["open"]:
        noun = f"the first of {noun}"
    elif len(pictures) > 1:
        path = path.parent
    output.log_written(noun, path, values["open"])
    return 3 if failed else 0


def _check_gates(values: Values) -> None:
    """Check the gates of --fail-on, before torch is imported.

    Raises:
        UsageError: a gate cannot be read.
    """
    for text in values["fail_on"]:
        parse_gate(text)


@command(
    AuditOptions,
    ModelOptions,
    arguments=[MODEL, IMAGES],
    json="audit.json",
    result=AUDIT_FILE,
    check=_check_gates,
)
def audit(values: Values) -> int:
    """Stream images through a model, and find channels that do nothing for them.

    Findings are dead, constant, saturated, nonfinite and redundant. A verdict
    holds for these images: a channel that is dead on them may live on others.

    \b
    Examples:
      featviz audit model.pth photos/ --fail-on 'any:dead>5%'
      featviz audit model.pth photos/ --prune-out prune.json --prove
      featviz audit new.pth photos/ --baseline old/audit.json --out new

    {MODEL}
    \f
    Exit codes: 0 done, 1 failed, 2 usage, 3 some images failed, 4 a gate failed.
    """
    from featviz.audit.audit import audit
    from featviz.audit.output import audit_table

    with output.batch_progress() as progress:
        options = read_from(AuditOptions, dict(values))
        document, verdicts, code = audit(
            values["source"], values["images"], options, progress
        )
    if values["json"]:
        output.document(document)
    else:
        output.text(str(audit_table(document)))
    # people overlook that `dead` means dead for these images
    log.info(
        "%s seen; another set of images may give other findings",
        counted(document["images"]["seen"], "image"),
    )
    if document["verify"] is not None:
        _log_proof(document["verify"])
    for verdict in verdicts:
        if verdict.held:
            log.info("gate %s held: %s", verdict.gate, verdict.message)
        else:
            log.error("gate %s failed: %s", verdict.gate, verdict.message)
    hint = output.to_look_at("the findings", options.out, "--open")
    log.info("results in %s; %s", options.out, hint)
    return code


def _log_proof(proof: Mapping[str, Any]) -> None:
    """Log how much the output changes without the channels that can be cut out.

    Args:
        proof: the entry `verify` of audit.json.
    """
    if not proof["channels"]:
        log.info("nothing to verify: no channel can be cut out")
        return
    channels = counted(proof["channels"], "channel")
    # None if outputs cannot be compared, since their shapes differ
    if proof["largest_change"] is None:
        effect = f"cannot be compared: {UNLIKE_OUTPUTS}"
    else:
        effect = f"changes by {proof['largest_change']:g} at most"
    if proof.get("nonfinite", 0):
        effect += (
            f", and {proof['nonfinite']} of its values become, or cease to be, NaN or"
            " infinite"
        )
    log.info(
        "without the %s that can be cut out the output %s (%s)",
        channels,
        effect,
        counted(proof["images"], "image"),
    )


@command(
    ExemplarOptions,
    ModelOptions,
    arguments=[MODEL, IMAGES],
    json="exemplars.json",
    result=EXEMPLARS_FILE,
)
def exemplars(values: Values) -> int:
    """Show the images, and the places in them, that excite each channel most.

    Each image is cut to the receptive field of the strongest unit. --out holds
    a sheet for each layer, a picture for each channel, and exemplars.json.

    {MODEL}

    \b
    Examples:
      featviz exemplars resnet18 photos/ --layers layer4 --top 9
      featviz exemplars model.pth photos/ --layers 'Conv2d#:3' --batch-size 16
      featviz exemplars model.pth train/ --layers layer3 --per-class --top 4
    \f
    Exit codes: 0 done, 1 failed, 2 usage, 3 some images failed.
    """
    from featviz.exemplars.exemplars import exemplar_table, find_exemplars

    with output.batch_progress() as progress:
        options = read_from(ExemplarOptions, dict(values))
        record = find_exemplars(values["source"], values["images"], options, progress)
    if values["json"]:
        output.document(record.as_json())
    else:
        output.text(str(exemplar_table(record)))
    skipped = {skip["layer"]: skip["reason"] for skip in record.skipped}
    for line in gaps(skipped, record.never_ran):
        log.warning("%s", line)
    log.info("%s seen", counted(record.images.seen, "image"))
    hint = output.to_look_at(
        "them beside RUN, a folder of featviz run", "RUN", "--exemplars", options.out
    )
    log.info("results in %s; %s", options.out, hint)
    return 3 if record.images.failures else 0
