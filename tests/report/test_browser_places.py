"""Places in a real browser: what lights up, where the links lead, and how fast."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from selenium.webdriver import ActionChains, Keys
from torch import nn

import featviz as fv
from featviz.report import places

from .browsing import Page, served
from .test_browser_axe import AXE, RUN

pytestmark = pytest.mark.slow
POLICY = "default-src 'none'; script-src 'self'; img-src 'self'; style-src 'self'"
CENTRES = [(16, 12), (44, 16), (20, 44), (48, 48)]
"""Column and row in pixels of the patches in the first image."""
ADDRESS = "#2@0.26,0.20"
"""The middle of the place at the first patch's centre, in the second convolution."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Noise with four equal patches, and two images of noise alone; six layers."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (3, 64, 64, 3), np.uint8)
    patch = rng.integers(0, 256, (12, 12, 3), np.uint8)
    for x, y in CENTRES:
        noise[0, y - 6 : y + 6, x - 6 : x + 6] = patch
    torch.manual_seed(1)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.Conv2d(32, 32, 1),
        nn.Conv2d(32, 32, 1),
        nn.Conv2d(32, 32, 1),
    )
    out = tmp_path_factory.mktemp("planted") / "run"
    images = [Image.fromarray(pixels) for pixels in noise]
    fv.run(net, images, "*", out, size=(64, 64), crop=(64, 64))
    fv.report(out)
    return out


@pytest.fixture
def page(browser: Any, run: Path) -> Iterator[Page]:
    """Opens pages from file://; the console stays silent."""
    browser.get_log("browser")
    opened = Page(browser, run)
    yield opened
    assert browser.get_log("browser") == []


def answered(page: Page) -> None:
    """Wait until all images have answered."""
    page.until("return lens.panel?.thumbs.children.length === 2")


def lit(page: Page) -> list[tuple[int, int, int]]:
    """Image, column and row of the places that are bright."""
    code = """
        return lens.answer.cosines.flatMap((cosines, image) => {
          const {columns} = lens.grid(image);
          const bright = [...cosines.keys()].filter((n) => lens.answer.light(cosines[n]) > 0.9);
          return bright.map((n) => [image, n % columns, Math.floor(n / columns)]);
        });
    """
    return [tuple(place) for place in page.js(code)]


def click_input(page: Page, x: int, y: int) -> None:
    """Click a pixel of the input of 64×64, which is shown as large as fits."""
    shown = page.one(".seen img")
    width = shown.rect["width"]
    height = shown.rect["height"]
    pixel = min(width, height) / 64
    # offsets count from the middle of the element, the picture from its left upper corner
    across = (x * pixel) - width / 2
    down = (y * pixel) - height / 2
    chain = ActionChains(page.browser)
    chain.move_to_element_with_offset(shown, across, down).click().perform()
    page.settle()


def ask_for_a_patch(page: Page) -> None:
    """Click one of the four equal patches of the first image, in the layer 2."""
    page.open("image-000.html")
    page.one("[data-places]").click()
    answered(page)
    page.choose(".places select", "2")  # in the order in which layers ran
    click_input(page, 17, 13)


def test_a_second_call_has_one_name_in_the_list_of_layers(page: Page) -> None:
    """It is that of the rest of the report; an address tells it from a layer inside."""
    page.open("index.html")
    call = '{name: "relu", stem: "output.call1"}'
    names = page.js(f"return [layerName({call}), layerKey({call})]")
    assert names == ["relu.call1", "relu/output.call1"]


def test_a_click_lights_up_the_equal_patches_and_no_other(page: Page) -> None:
    """Four places of the image are lit, and none of the others."""
    ask_for_a_patch(page)
    assert set(lit(page)) == {(0, x // 2, y // 2) for x, y in CENTRES}
    assert page.js("return location.hash") == "#2@0.27,0.20"


def test_the_nearest_places_begin_with_the_equal_ones(page: Page) -> None:
    """They are the three that were not clicked, and no more of this image."""
    ask_for_a_patch(page)
    cosines = page.texts(".crops small")
    assert len(cosines) == 9
    assert cosines[:3] == ["1.00"] * 3
    nearest = page.js("return lens.answer.nearest(9)")
    assert [near["image"] for near in nearest].count(0) == 3
    clicked = page.js("return lens.grid().at(lens.spot)")
    assert clicked not in [near["place"] for near in nearest if near["image"] == 0]


def test_the_address_opens_a_place_and_keys_move_it(page: Page) -> None:
    """On the first page, an image's and a layer's; Escape closes the panel."""
    for name in ("index.html", "image-000.html", "layer-003.html"):
        page.open(f"{name}{ADDRESS}")
        answered(page)
        assert page.js("return lens.index.layers[lens.layer].name") == "2"
        page.js("document.querySelector('.spot').focus()")
        page.keys(Keys.ARROW_RIGHT, Keys.ARROW_DOWN)
        assert page.js("return location.hash") == "#2@0.30,0.23"
        page.keys(Keys.ESCAPE)
        assert not page.shown(".places")
        assert page.js("return location.hash") == ""


def test_thumbnails_lead_to_the_best_place_of_another_image(page: Page) -> None:
    """The address says which image; its own page is linked."""
    page.open(f"image-000.html{ADDRESS}")
    answered(page)
    assert page.texts(".thumbs button") == ["image-1.png", "image-2.png"]
    best = page.js("return lens.answer.best(2)")
    page.all(".thumbs button")[1].click()
    page.settle()
    assert page.js("return lens.image") == 2
    assert page.js("return lens.grid().at(lens.spot)") == best
    assert page.js("return location.hash").endswith(",2")
    link = page.one(".asked figcaption a")
    assert link.get_attribute("href").endswith("image-002.html")


def test_keys_go_on_from_a_crop_that_was_clicked(page: Page) -> None:
    """The new answer replaces the crop; arrow keys and Escape work as before."""
    page.open(f"image-000.html{ADDRESS}")
    answered(page)
    page.all(".crops button")[1].click()
    page.settle()
    before = page.js("return lens.spot.x")
    page.keys(Keys.ARROW_LEFT)
    assert page.js("return lens.spot.x") != before
    page.keys(Keys.ESCAPE)
    assert not page.shown(".places")


def test_no_cosine_is_greater_than_1(page: Page) -> None:
    """Vectors of eight bits may be longer than 1."""
    page.open(f"image-000.html{ADDRESS}")
    answered(page)
    cosines = page.js("return lens.answer.cosines.flatMap((row) => [...row])")
    assert max(cosines) == pytest.approx(1, abs=1e-6)
    assert max(cosines) <= 1


@pytest.mark.parametrize(
    ("layer", "field"),
    [
        ("0", [31, 19, 4, 4]),
        ("2", [30, 18, 5, 5]),
    ],
)
def test_a_place_sees_what_all_its_values_see(
    layer: str, field: list[int], page: Page
) -> None:
    """Of 64×64 values four are one place, at the columns 32 and 33 and the rows 20
    and 21: with 3×3 around each that are four pixels. A stride makes a place of one
    value that sees five."""
    page.open(f"image-000.html#{layer}@0.51,0.33")
    answered(page)
    seen = page.js("return lens.grid().seen(lens.grid().at(lens.spot), [64, 64])")
    assert seen == field


def test_channels_are_linked_and_the_field_is_a_box(page: Page) -> None:
    """Those that stand out, by numpy over all places; what the place sees is 5 pixels
    wide and 5 high."""
    page.open(f"index.html{ADDRESS}")
    answered(page)
    links = page.all(".asked .bars a")
    assert len(links) == 8
    assert "/layer-002.html#c" in links[0].get_attribute("href")
    cells = page.texts(".asked .bars td.n")
    sizes = [float(text.replace("−", "").split()[0]) for text in cells]
    assert sizes == sorted(sizes, reverse=True)
    seen = "const g = lens.grid(); return g.seen(g.at(lens.spot), [64, 64])"
    assert page.js(seen) == [14, 10, 5, 5]


def test_channels_near_their_means_do_not_stand_out(page: Page) -> None:
    """Those a standard deviation away or farther are listed; if there are none, a
    sentence says so."""
    page.open(f"index.html{ADDRESS}")
    answered(page)
    show = "lens.grid().values.set(arguments[0], 8 * lens.grid().at(lens.spot));"
    page.js(f"{show} lens.panel.show()", [20, -10, 9, 8, 7, 6, 5, 4])
    assert page.texts(".asked .bars td.n") == ["2 σ", "−1 σ"]
    page.js(f"{show} lens.panel.show()", [9, 8, 7, 6, 5, 4, 3, 2])
    assert page.texts(".asked .bars td.n") == []
    assert page.one(".asked caption").text.startswith("No channel stands out here")


def test_one_image_has_all_nine_crops(browser: Any, tmp_path: Path) -> None:
    """Of two images each has at most five."""
    for images, most in ((1, 9), (2, 5)):
        out = tmp_path / f"{images}"
        net = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1))
        fv.run(net, torch.rand(images, 3, 20, 20), "Conv2d", out, preset="none")
        fv.report(out)
        page = Page(browser, out).open("image-000.html#0@0.50,0.50")
        page.until("return !!lens.answer")
        page.until(f"return lens.answer.cosines.filter(Boolean).length === {images}")
        nearest = page.js("return lens.answer.nearest(9)")
        assert len(nearest) == 9
        assert [near["image"] for near in nearest].count(0) <= most


def test_marks_stand_in_every_map_and_go(page: Page) -> None:
    """In the strips of the first page, and over the grids of an image's."""
    page.open(f"index.html{ADDRESS}")
    answered(page)
    maps = len(page.all(".strip[data-scene] svg"))
    assert len(page.all(".strip circle.dot")) == maps > 0
    page.one(".places .close").click()
    assert page.all(".strip circle") == []
    page.open(f"image-000.html{ADDRESS}")
    answered(page)
    page.painted(page.all(".frame")[0])
    assert page.js("return document.querySelector('.frame canvas.spots').width") > 0


def test_a_layer_without_all_channels_says_so(browser: Any, tmp_path: Path) -> None:
    """In place of similar places."""
    out = tmp_path / "few"
    net = nn.Sequential(nn.Conv2d(3, 12, 3))
    fv.run(net, torch.rand(2, 3, 20, 20), "*", out, channels="0-3", preset="none")
    fv.report(out)
    page = Page(browser, out).open("index.html")
    page.one("[data-places]").click()
    page.until("return !!document.querySelector('.places .note')?.textContent")
    assert "its grid has 4 of 12 channels" in page.one(".places .note").text


@pytest.mark.parametrize(
    ("module", "sizes", "reason"),
    [
        (nn.Identity(), [(20, 20), (24, 24)], "images of the first one’s size alone"),
        (
            nn.Upsample(scale_factor=2),
            [(20, 20)] * 2,
            "not be worked out for this layer",
        ),
    ],
)
def test_a_field_that_is_not_known_has_a_reason(
    browser: Any,
    tmp_path: Path,
    module: nn.Module,
    sizes: list[tuple[int, int]],
    reason: str,
) -> None:
    """In place of the box, on the page of the second image."""
    net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), module, nn.Conv2d(8, 8, 1))
    images = [torch.rand(3, *size) for size in sizes]
    fv.run(net, images, "Conv2d", tmp_path, preset="none")
    fv.report(tmp_path)
    page = Page(browser, tmp_path).open("image-001.html#2@0.50,0.50")
    page.until("return lens.panel?.thumbs.children.length === 1")
    assert reason in page.one(".places .note").text


def test_a_run_of_vectors_has_no_places(browser: Any, tmp_path: Path) -> None:
    """The button says so when it is pressed."""
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
    fv.run(net, torch.rand(3, 2, 2), "Linear", tmp_path, preset="none")
    fv.report(tmp_path)
    page = Page(browser, tmp_path).open("index.html")
    page.one("[data-places]").click()
    page.until("return document.querySelector('[data-places]').disabled")
    assert page.one("[data-places]").text == "No layer has places"


def test_an_image_that_is_not_compared_answers_too(
    browser: Any, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does on its own page, among the first images; the page says how many these
    are."""
    monkeypatch.setattr(places, "COMPARED_IMAGES", 1)
    fv.report(run, tmp_path / "report")
    page = Page(browser, tmp_path).open(f"image-002.html{ADDRESS}")
    page.until("return lens.panel?.thumbs.children.length === 1")
    assert page.js("return lens.image") == 2
    assert page.js("return lens.answer.best(2) === lens.grid().at(lens.spot)")
    assert "Of 3 images, the first 1 are compared" in page.one(".places .note").text


def test_a_layer_without_vectors_is_answered_by_another(
    browser: Any, tmp_path: Path
) -> None:
    """The panel says which; the address keeps the layer that was asked."""
    out = tmp_path / "deep"
    net = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(9)))
    fv.run(net, torch.rand(3, 20, 20), "Conv2d", out, preset="none")
    fv.report(out)
    page = Page(browser, out).open("layer-003.html")
    page.one("[data-places]").click()
    page.until("return !!lens.answer")
    layer = page.js("return lens.index.layers[lens.asked]")
    answering = page.js("return lens.index.layers[lens.layer].name")
    assert layer["name"] == "3"
    assert layer["stand_in"] is not None
    sentence = page.one(".places > header + p").text
    assert sentence == f"3 has no places of its own: {answering} answers."
    assert page.js("return location.hash").startswith("#3@")


def test_under_a_policy_places_are_asked_for(browser: Any, run: Path) -> None:
    """Where scripts of the site itself may run."""
    browser.get_log("browser")
    page = Page(browser, run)
    with served(run, POLICY) as home:
        browser.get(f"{home}/image-000.html{ADDRESS}")
        answered(page)
        assert len(lit(page)) == 4
    assert browser.get_log("browser") == []


def test_axe_finds_nothing_in_the_panel(browser: Any, run: Path) -> None:
    """It looks at names, roles, contrast and order, light and dark."""
    if not AXE.is_file():
        pytest.skip("no axe-core here: npm install --no-save axe-core")
    page = Page(browser, run).open(f"image-000.html{ADDRESS}")
    answered(page)
    browser.execute_script(AXE.read_text("utf-8"))
    for scheme in ("light", "dark"):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        assert browser.execute_async_script(RUN) == [], scheme
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_an_answer_takes_less_than_50_ms(browser: Any, tmp_path: Path) -> None:
    """For six layers of 20 images, whose scripts have come. The best of twelve counts:
    other work on the machine disturbs some."""
    layers = [nn.Conv2d(3, 64, 3, padding=1)]
    layers += [nn.Conv2d(64, 64, 1) for _ in range(5)]
    out = tmp_path / "many"
    images = list(torch.rand(20, 3, 28, 28))
    fv.run(nn.Sequential(*layers), images, "Conv2d", out, preset="none")
    fv.report(out)
    page = Page(browser, out).open("image-000.html#0@0.4,0.6")
    page.until("return lens.panel?.thumbs.children.length === 19")
    code = """
        const time = (layer) => {
          lens.layer = layer;
          const begin = performance.now();
          lens.show();
          return performance.now() - begin;
        };
        const twelve = (layer) => Array.from({length: 12}, () => time(layer));
        return [0, 1, 2, 3, 4, 5].map((layer) => Math.min(...twelve(layer)));
    """
    assert max(page.js(code)) < 50
