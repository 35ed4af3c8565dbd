"""How long do featviz and four other tools take for the same job?

    pip install torchlens torchcam grad-cam captum
    python benchmarks/others.py [--rounds 9]

One photograph of 224 x 224 pixels and torchvision's ResNet-18 with random weights, on a
CPU. Each job runs once before it is timed; the tools take turns in rounds, in one
process. Medians in milliseconds:

  pictures  every channel of the 37 outputs of Conv2d and ReLU as PNG files
  tensors   the outputs of all modules, kept as tensors
  cam       Grad-CAM of the predicted class at `layer4`, laid over the photograph

`cam` of Captum ends with the map, which it does not draw. A tool that is not installed
is left out."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision import models
from torchvision.transforms.functional import to_pil_image, to_tensor
from torchvision.utils import save_image

import featviz

PHOTO = Path(__file__).parent.parent / "sample_images" / "scenes" / "landscape.jpg"
LAYERS = "Conv2d,ReLU"
Job = Callable[[], object]


def pictures_by_hooks(model: nn.Module, image: Tensor) -> None:
    """What people write: a hook for each layer, and save_image."""
    outputs: list[Tensor] = []

    def keep(module: nn.Module, inputs: object, output: Tensor) -> None:
        outputs.append(output.clone())

    handles = [
        module.register_forward_hook(keep)
        for module in model.modules()
        if isinstance(module, nn.Conv2d | nn.ReLU)
    ]
    with torch.inference_mode():
        model(image)
    for handle in handles:
        handle.remove()
    with tempfile.TemporaryDirectory() as folder:
        for number, output in enumerate(outputs):
            maps = output.permute(1, 0, 2, 3)
            file = Path(folder) / f"{number}.png"
            save_image(maps, file, normalize=True, scale_each=True)


def pictures_by_featviz(model: nn.Module, photo: Image.Image) -> None:
    """The same layers, in a run directory."""
    featviz.run(model, photo, LAYERS, preset="none")


def tensors_by_featviz(model: nn.Module, image: Tensor) -> None:
    """Copies of all outputs."""
    with torch.inference_mode(), featviz.capture(model, "*"):
        model(image)


def jobs_of_featviz(
    model: nn.Module, image: Tensor, photo: Image.Image
) -> dict[str, Job]:
    """All three."""
    return {
        "pictures": lambda: pictures_by_featviz(model, photo),
        "tensors": lambda: tensors_by_featviz(model, image),
        "cam": lambda: featviz.cam(model, photo, layers="layer4", preset="none").image,
    }


def jobs_of_hooks(
    model: nn.Module, image: Tensor, photo: Image.Image
) -> dict[str, Job]:
    """Pictures alone."""
    return {"pictures": lambda: pictures_by_hooks(model, image)}


def jobs_of_torchlens(
    model: nn.Module, image: Tensor, photo: Image.Image
) -> dict[str, Job]:
    """A trace has the output of every operation."""
    import torchlens

    def cam() -> object:
        target = int(model(image).argmax())
        attribute = torchlens.attribution.grad_cam
        return attribute(model, image, target=target, layer="layer4", image=photo)

    return {"tensors": lambda: torchlens.trace(model, image), "cam": cam}


def jobs_of_captum(
    model: nn.Module, image: Tensor, photo: Image.Image
) -> dict[str, Job]:
    """LayerActivation takes a list of modules; LayerGradCam returns a map."""
    from captum.attr import LayerActivation, LayerAttribution, LayerGradCam

    layers = [module for name, module in model.named_modules() if name]
    activation = LayerActivation(model, layers)
    grad_cam = LayerGradCam(model, model.layer4)

    def cam() -> object:
        target = int(model(image).argmax())
        evidence = grad_cam.attribute(image, target=target, relu_attributions=True)
        return LayerAttribution.interpolate(evidence, image.shape[-2:], "bilinear")

    return {"tensors": lambda: activation.attribute(image), "cam": cam}


def jobs_of_torchcam(
    model: nn.Module, image: Tensor, photo: Image.Image
) -> dict[str, Job]:
    """As its README shows."""
    from torchcam.methods import GradCAM
    from torchcam.utils import overlay_mask

    def cam() -> object:
        with GradCAM(model, "layer4") as extractor:
            scores = model(image)
            (evidence,) = extractor(int(scores.argmax()), scores)
        mask = to_pil_image(evidence.squeeze(0), mode="F")
        return overlay_mask(photo, mask, alpha=0.5)

    return {"cam": cam}


def jobs_of_grad_cam(
    model: nn.Module, image: Tensor, photo: Image.Image
) -> dict[str, Job]:
    """As its README shows."""
    from pytorch_grad_cam import GradCAM
    from pytorch_grad_cam.utils.image import show_cam_on_image

    pixels = np.asarray(photo, np.float32) / 255

    def cam() -> object:
        with GradCAM(model=model, target_layers=[model.layer4]) as extractor:
            evidence = extractor(input_tensor=image, targets=None)[0]
        return show_cam_on_image(pixels, evidence, use_rgb=True)

    return {"cam": cam}


TOOLS = {
    "featviz": jobs_of_featviz,
    "hooks": jobs_of_hooks,
    "torchlens": jobs_of_torchlens,
    "captum": jobs_of_captum,
    "torchcam": jobs_of_torchcam,
    "pytorch_grad_cam": jobs_of_grad_cam,
}
"""A package for each tool, but for `hooks`, which are a script of one's own."""


def all_jobs() -> dict[tuple[str, str], Job]:
    """The jobs of the tools that are installed, by job and tool."""
    torch.manual_seed(0)
    with Image.open(PHOTO) as opened:
        photo = opened.convert("RGB").resize((224, 224))
    image = to_tensor(photo)[None]
    jobs: dict[tuple[str, str], Job] = {}
    for tool, jobs_of_tool in TOOLS.items():
        if tool == "hooks" or find_spec(tool) is not None:
            model = models.resnet18().eval()
            for name, job in jobs_of_tool(model, image, photo).items():
                jobs[name, tool] = job
    return dict(sorted(jobs.items()))


def main() -> None:
    """Time the jobs in turns, and print their medians."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    jobs = all_jobs()
    for job in jobs.values():
        job()
    times: dict[tuple[str, str], list[float]] = {key: [] for key in jobs}
    for _ in range(rounds):
        for key, job in jobs.items():
            start = time.perf_counter()
            job()
            times[key].append(time.perf_counter() - start)
    for (name, tool), seconds in times.items():
        print(f"{name:9} {tool:17} {1000 * statistics.median(seconds):7.1f} ms")


if __name__ == "__main__":
    main()
