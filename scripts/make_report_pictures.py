"""Make the pictures of docs/report.md and docs/training.md: a screenshot of each kind
of page.

    python scripts/make_report_pictures.py

It runs the demonstrations (configs/digits.toml, colour.toml, pairs.toml) in a temporary
folder, by names that pages may show, trains a network that reads digits for a moment,
builds their reports, and needs Chromium with chromedriver, and selenium (`pip install
-e '.[test]'`)."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
MOST, MOST_TOGETHER = 150_000, 600_000
"""Bytes of a picture, and of all."""
DIGITS = ("configs/digits_cnn.pth", "sample_images/digits", "--input-channels", "1")


@dataclass(frozen=True)
class Shot:
    """A page to be seen."""

    name: str
    page: str
    """Below the temporary folder, with what is set and the place to show."""
    size: tuple[int, int] = (1280, 900)
    dark: bool = False


SHOTS = (
    Shot("network", "digits/report/index.html"),
    Shot("image", "colour/report/image-000.html?cmap=viridis#image-000-maps"),
    Shot("layer", "digits/report/layer-004.html?zeros=1&sort=max"),
    Shot("channel", "digits/report/layer-003.html#c5"),
    Shot(
        "places",
        "pairs/report/image-000.html#encoder.layers.encoder_layer_3@0.15,0.5",
        (1280, 620),
    ),
    Shot("findings", "digits/report/index.html#findings"),
    Shot("audit", "audit/report/index.html", (1280, 640)),
    Shot("compare", "diff.html?changed=1#compared"),
    Shot("series", "series/report/index.html?step=100#layer-002", (1000, 580)),
    Shot("phone", "colour/report/index.html", (400, 860), dark=True),
)


def featviz(folder: Path, *arguments: str, codes: tuple[int, ...] = (0,)) -> None:
    """Run a command of featviz in a folder that has the demonstrations."""
    command = [sys.executable, "-m", "featviz", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if (
        subprocess.run(command, cwd=folder, env=environment, check=False).returncode
        not in codes
    ):
        raise SystemExit(f"failed: {' '.join(command)}")


def make_reports(folder: Path) -> None:
    """The demonstrations with all that a report can show, and a comparison."""
    for name in ("configs", "sample_images"):
        (folder / name).symlink_to(ROOT / name)
    digits = ("run", "--config", "configs/digits.toml", "-q", "--out")
    featviz(folder, *digits, "digits")
    featviz(
        folder,
        "run",
        "--config",
        "configs/colour.toml",
        "--out",
        "colour",
        "-q",
        "--report",
    )
    featviz(
        folder,
        "run",
        "--config",
        "configs/pairs.toml",
        "--out",
        "pairs",
        "-q",
        "--report",
    )
    featviz(folder, "kernels", DIGITS[0], "--out", "kernels", "-q")
    layers = ("--layers", "Conv2d,ReLU")
    featviz(folder, "exemplars", *DIGITS, *layers, "--out", "exemplars", "-q")
    featviz(folder, "audit", *DIGITS, "--redundant-at", "0.95", "--out", "audit", "-q")
    featviz(folder, "report", "audit")
    beside = [f"--{name}={name}" for name in ("kernels", "exemplars", "audit")]
    featviz(folder, "report", "digits", *beside)
    featviz(folder, *digits, "ablated", "--ablate", "3:5")
    featviz(folder, "diff", "digits", "ablated", "--html", "diff.html", codes=(4,))


def make_series(folder: Path) -> None:
    """Train a small network on drawn digits, at a learning rate that kills some
    channels."""
    import torch
    from torch import nn

    from featviz import Watcher

    sys.path.insert(0, str(ROOT / "configs"))
    from train_digits_cnn import build_model, rendered_split

    pixels, labels = rendered_split(1500, 0, 0)
    torch.manual_seed(0)
    model = build_model(8)
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            layer.reset_parameters()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = [
        str(ROOT / "sample_images/digits" / name) for name in ("00-5.png", "06-4.png")
    ]
    with Watcher(model, images, "ReLU", 50, folder / "series", cmap="magma") as watcher:
        for _ in range(500):
            chosen = torch.randint(0, len(labels), (32,))
            loss = nn.functional.cross_entropy(model(pixels[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watcher.step()
    featviz(folder, "report", "series")


@contextmanager
def browser() -> Iterator[Any]:
    """Chromium without a window."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = (
        shutil.which("chromium") or shutil.which("chromium-browser") or ""
    )
    for flag in (
        "headless=new",
        "no-sandbox",
        "disable-dev-shm-usage",
        "hide-scrollbars",
    ):
        options.add_argument(f"--{flag}")
    driver = webdriver.Chrome(
        options=options, service=Service(shutil.which("chromedriver"))
    )
    try:
        yield driver
    finally:
        driver.quit()


def take(driver: Any, shot: Shot, folder: Path) -> Image.Image:
    """The picture of a page."""
    width, height = shot.size
    metrics = {
        "width": width,
        "height": height,
        "deviceScaleFactor": 1,
        "mobile": False,
    }
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if shot.dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    driver.get("about:blank")
    driver.get(f"{folder.as_uri()}/{shot.page}")
    driver.execute_async_script(
        "const done = arguments[0];const near = [...document.images].filter(i =>"
        " i.checkVisibility() && i.currentSrc && i.getBoundingClientRect().top <"
        " innerHeight && i.getBoundingClientRect().bottom >"
        " 0);Promise.allSettled(near.map(i => i.decode())).then(() => setTimeout(done,"
        " 400));"
    )
    return Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")


def main() -> None:
    """Write all pictures, as WebP."""
    PICTURES.mkdir(exist_ok=True)
    together = 0
    with tempfile.TemporaryDirectory() as name, browser() as driver:
        folder = Path(name)
        make_reports(folder)
        make_series(folder)
        for shot in SHOTS:
            path = PICTURES / f"report-{shot.name}.webp"
            take(driver, shot, folder).save(path, "WEBP", quality=75, method=6)
            size = path.stat().st_size
            together += size
            print(f"{path.relative_to(ROOT)}: {size / 1000:.0f} kB")
            if size > MOST:
                raise SystemExit(f"{path} has {size} bytes, more than {MOST}")
    if together > MOST_TOGETHER:
        raise SystemExit(
            f"the pictures have {together} bytes, more than {MOST_TOGETHER}"
        )


if __name__ == "__main__":
    main()
