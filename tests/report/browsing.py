"""A browser's view of a report, and the run that it shows."""

from __future__ import annotations

import functools
import http.server
import io
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

STATS = np.random.default_rng(1).normal(size=(6, 6)).astype(np.float32)
STATS[:, 3] = abs(STATS[:, 3])
STATS[:, 4:] = 0
DARK = np.zeros((6, 6), np.float32)
DARK[:, 1] = np.arange(6)
DARK[[0, 4], 4] = 1
DARK[[0, 4], 1] = 0


class Page:
    """A page of the report in the browser."""

    def __init__(self, browser: Any, run: Path, scripts: bool = True) -> None:
        self.browser = browser
        self.run = run
        self.scripts = scripts

    def open(self, name: str) -> Page:
        """Load a page of the folder; its name may end in a query and a fragment."""
        if "#" in name:  # a fragment of the page that is open would load nothing
            self.browser.get("about:blank")
        self.browser.get(f"{(self.run / 'report').as_uri()}/{name}")
        if self.scripts:  # before its first picture a page gets no keys
            self.until("return performance.getEntriesByType('paint').length > 0")
        return self

    def settle(self) -> None:
        """Wait for what the page has queued: a changed fragment is an event of its
        own."""
        if not self.scripts:
            return
        queued = (
            "new Promise(requestAnimationFrame), new Promise(f => setTimeout(f, 100))"
        )
        then = "then(() => setTimeout(arguments[0]))"
        self.browser.execute_async_script(f"Promise.race([{queued}]).{then}")

    def js(self, code: str, *arguments: Any) -> Any:
        """What a piece of JavaScript returns."""
        return self.browser.execute_script(code, *arguments)

    def all(self, css: str) -> list[Any]:
        """Elements, in the page's order."""
        self.settle()
        return self.browser.find_elements("css selector", css)

    def one(self, css: str) -> Any:
        """The first element."""
        self.settle()
        return self.browser.find_element("css selector", css)

    def shown(self, css: str) -> list[Any]:
        """Those that are seen."""
        return [element for element in self.all(css) if element.is_displayed()]

    def texts(self, css: str) -> list[str]:
        """The texts of elements."""
        return [element.text for element in self.all(css)]

    def layers(self, css: str) -> list[str]:
        """The layers of the elements that are seen."""
        return [element.get_attribute("data-layer") for element in self.shown(css)]

    def until(self, code: str, *arguments: Any) -> None:
        """Wait for what a piece of JavaScript returns to be true."""
        from selenium.webdriver.support.wait import WebDriverWait

        waiting = WebDriverWait(self.browser, 20, poll_frequency=0.02)
        waiting.until(lambda _: self.js(code, *arguments))

    def painted(self, frame: Any) -> None:
        """Bring a grid into sight, and wait until its picture and canvases are drawn."""
        self.js("arguments[0].scrollIntoView({block: 'center'})", frame)
        self.js("return arguments[0].querySelector('img').decode()", frame)
        if self.js("return typeof Grid !== 'undefined'"):
            seen = "return frames.get(arguments[0])?.visible ?? true"
            self.until(seen, frame)
        self.settle()

    def at(self, frame: Any, tile: int, click: bool = False) -> None:
        """Move the pointer to the middle of the n-th tile of a grid of six tiles."""
        from selenium.webdriver import ActionChains

        self.painted(frame)
        box = frame.rect
        x, y = self.middle(frame, tile, box["width"], box["height"])
        chain = ActionChains(self.browser)
        # offsets count from the middle of the element
        chain.move_to_element_with_offset(
            frame, x - box["width"] / 2, y - box["height"] / 2
        )
        if click:
            chain.click()
        chain.perform()

    def keys(self, *keys: str) -> None:
        """Press keys where the focus is."""
        from selenium.webdriver import ActionChains

        for key in keys:
            ActionChains(self.browser).send_keys(key).perform()
            self.settle()

    def choose(self, css: str, value: str) -> None:
        """Choose in a list, as a person would."""
        from selenium.webdriver.support.select import Select

        Select(self.one(css)).select_by_value(value)

    def screenshot(self, frame: Any) -> Image.Image:
        """What is seen of an element, in colour."""
        return Image.open(io.BytesIO(frame.screenshot_as_png)).convert("RGB")

    def colors(self, frame: Any, *tiles: int) -> list[tuple[int, ...]]:
        """The colours in the middle of tiles of a grid of six tiles: pixels of a
        screenshot, no canvas read."""
        self.painted(frame)
        picture = self.screenshot(frame)
        points = [self.middle(frame, tile, *picture.size) for tile in tiles]
        return [picture.getpixel((int(x), int(y))) for x, y in points]  # type: ignore[misc]

    def greys(self, frame: Any, *tiles: int) -> list[int]:
        """The greys of tiles, without what the pointer or the focus adds."""
        self.at(frame, tiles[0])
        self.js("document.activeElement.blur()")
        self.js("arguments[0].dispatchEvent(new PointerEvent('pointerleave'))", frame)
        return [red for red, *_ in self.colors(frame, *tiles)]

    def middle(
        self, frame: Any, tile: int, width: float, height: float
    ) -> tuple[float, float]:
        """Where the middle of a tile lies in a grid of six tiles of this size, from the
        left and the top."""
        # without the scripts the picture itself is seen, with three tiles in a row
        script = "return frames.get?.(arguments[0])?.view.nrow ?? 3"
        columns = self.js(script, frame)
        row, column = divmod(tile, columns)
        rows = math.ceil(6 / columns)
        return (column + 0.5) / columns * width, (row + 0.5) / rows * height

    def emulate(self, width: int) -> None:
        """Look through a window of this width, until `emulate_nothing`."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def emulate_nothing(self) -> None:
        """Look through the window as it is."""
        self.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@contextmanager
def served(run: Path, policy: str) -> Iterator[str]:
    """The address of a run's report on a server with a Content-Security-Policy."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def end_headers(self) -> None:
            self.send_header("Content-Security-Policy", policy)
            super().end_headers()

        def log_message(self, *_: object) -> None:
            pass

    handler = functools.partial(Handler, directory=str(run.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/{run.name}/report"
        server.shutdown()


def missing_pictures(page: Page) -> list[str]:
    """Pictures without pixels after everything was scrolled through."""
    return page.browser.execute_async_script(
        """
        const done = arguments[arguments.length - 1];
        (async () => {
          document.querySelectorAll("details").forEach((d) => { d.open = true; });
          const images = [...document.images].filter((i) => i.checkVisibility());
          for (const image of images) {
            image.scrollIntoView();
            for (let n = 0; n < 100 && !image.complete; n++)
              await new Promise((go) => setTimeout(go, 20));
          }
          done(images.filter((i) => !i.naturalWidth).map((i) => i.src || i.alt));
        })();
        """
    )
