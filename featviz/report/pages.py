"""From views to HTML, by Jinja templates that escape whatever they are given, and to scripts.

Geometry and statistics of grids stand in JavaScript files, which work from file:// where fetching
JSON does not: in one script those of up to 16 grids, a few images by a few layers, which the pages
of both load. Statistics are those of stats.npz bit for bit.
"""

from __future__ import annotations

import base64
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import jinja2
import msgspec
import numpy as np
from markupsafe import Markup

from featviz.layout.layouts import LAYOUTS
from featviz.records import Floats, GridPlan
from featviz.report import channels, words
from featviz.report.beside import Extra
from featviz.report.channels import ChannelTotals
from featviz.report.network import is_numbers, network
from featviz.report.views import (
    Figure,
    Group,
    ImagePage,
    LayerPage,
    Links,
    PictureView,
    ReportViews,
    figures_of,
)
from featviz.rundir import REPORT_ASSETS
from featviz.text import by
from featviz.version import __version__

RUN_PAGE = "index"


def render(views: ReportViews, links: Links) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the name of each file of a report, and its text in pieces, one by one: no more is held
    than the numbers of a few images, and no page as a whole, since that of a layer shows all
    images. Of one file, the one document with everything inside."""
    write = _RunPages(views, links)
    grids: dict[str, dict[str, str]] = {}
    articles: list[Iterable[Markup]] = []
    yield from write.assets()
    for n, page in enumerate(views.images, 1):
        article, scripts = write.image(page)
        for name, own in scripts.items():
            grids.setdefault("" if links.inline else name, {}).update(own)
        if links.inline:
            articles.append([article])
            continue
        yield f"{page.id}.html", write.document([article], page)
        if n % views.together == 0 or n == len(views.images):
            yield from ((name, [script(own)]) for name, own in grids.items())
            grids.clear()
            gc.collect()  # templates leave cycles, which hold the findings of thousands of channels
    layers = ((layer, write.layer(layer)) for layer in views.layers)
    if not links.inline:
        for layer, pieces in layers:
            yield f"{layer.id}.html", write.document(pieces, layer)
        yield f"{RUN_PAGE}.html", write.document(write.run())
        return
    parts = [write.run(), *articles, *(list(pieces) for _, pieces in layers)]
    whole = (piece for pieces in parts for piece in pieces)
    yield f"{RUN_PAGE}.html", write.document(whole, data=script(grids.get("", {})))


def render_alone(
    links: Links,
    template: str,
    model: str,
    title: str,
    views: Any,
    assets: Sequence[str] = REPORT_ASSETS,
    **values: Any,
) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the name of each file of a report that is one page, as of an audit, and its text in
    pieces; of one file, the page alone."""
    pages = Pages(links, assets, model=model)
    yield from pages.assets()
    article = pages.pieces(template, views=views, pages={}, **values)
    yield f"{RUN_PAGE}.html", pages.document(article, title=title)


def render_notebook(content: Mapping[str, Any]) -> str:
    """What a notebook shows of a result: a part of a page.

    Args:
        content: `figures` (address, words, (width, height)), `lines`, `table` (a `TextTable` or
            None) and `link`.
    """
    return _engine().get_template("notebook.html").render(content)


def asset(name: str) -> str:
    """The text of a file that all reports have."""
    return (files("featviz.report") / "assets" / name).read_text("utf-8")


@cache
def _engine() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.PackageLoader("featviz.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


class Pages:
    """Pages of one report, by templates that share some values and raise on what they lack."""

    def __init__(self, links: Links, assets: Sequence[str] = REPORT_ASSETS, **values: Any) -> None:
        self.links = links
        self.shared = {
            "version": __version__,
            "beside": "",
            "home": links.page(RUN_PAGE),
            "links": links,
            "names": assets,
            "asset": lambda name: Markup(asset(name)),
            "words": words,
            "by": by,
            "badges": channels.badges,
            "layouts": LAYOUTS,
            "channels_of": self.channels_of,
            **values,
        }

    def pieces(self, template: str, **values: Any) -> Iterator[Markup]:
        """A filled template, piece by piece as somebody asks for it: it has escaped everything, and
        its text must not be escaped again."""
        found = _engine().get_template(f"{template}.html")
        return map(Markup, found.generate({**self.shared, **values}))

    def document(
        self,
        article: Iterable[Markup],
        page: ImagePage | LayerPage | None = None,
        title: str = "",
        scripts: Iterable[str] = (),
        data: str = "",
    ) -> Iterator[Markup]:
        """A whole HTML document around an article, in pieces; it loads the scripts that hold the
        numbers of the page's grids, or in one file has everything inside, with these `data`."""
        if page is not None:
            title = page.name
            scripts = dict.fromkeys(figure.script for figure in figures_of(page.groups))
        return self.pieces(
            "document", article=article, title=title, scripts=scripts, data=Markup(data)
        )

    def assets(self) -> Iterator[tuple[str, list[str]]]:
        """Yield our own files, with their text; none for one file, which has them inside."""
        for name in () if self.links.inline else self.shared["names"]:
            yield name, [asset(name)]

    def channels_of(self, extra: Extra) -> str:
        """For the script, as JSON: where a channel is in a picture, or its own picture, which one
        file does not have."""
        found: dict[int, Any] = {}
        for channel, own in extra.channels.items():
            if not isinstance(own, PictureView):
                found[channel] = own
            elif not self.links.inline:
                found[channel] = {"src": self.links.picture(own), "alt": own.alt}
                found[channel] |= dict(zip(("width", "height"), own.size, strict=True))
        return msgspec.json.encode(found).decode()


class _RunPages(Pages):
    """The pages of a run: all images first, whose numbers the others count."""

    def __init__(self, views: ReportViews, links: Links) -> None:
        self.views = views
        self.totals: dict[tuple[str, str], ChannelTotals] = {}
        self._first: Mapping[str, Floats] = {}
        """The statistics of the first image, which the page of the run shows."""
        fewer = {} if views.tiles is None else {"fewer": True}
        runs = [views.run, *([views.other] if views.other else [])]
        self._options = [{**(run.record.get("options") or {}), **fewer} for run in runs]
        self._tensors = {
            (layer.id, group.stem): f"t{n}-" if n else ""
            for layer in views.layers
            for n, group in enumerate(layer.groups)
        }
        super().__init__(
            links,
            model=words.name_of(views.run.record.get("model") or {}),
            views=views,
            labels=views.labels,
            totals_of=self.totals_of,
            dark_count=lambda page: sum(int(self.totals_of(g).dark.sum()) for g in page.groups),
            explanations=channels.EXPLANATIONS,
            options=self._options,
            key_of=lambda figure: words.key(figure.row, self._options[figure.other]),
            strip_keys_of=lambda stages: words.strip_keys(
                (step.figure.row for stage in stages for step in stage.steps if step.tiles),
                self._options[0],
            ),
            spot=self.spot,
        )

    def totals_of(self, group: Group) -> ChannelTotals:
        """The totals of a tensor over all images of this run."""
        return self.totals.setdefault((group.page, group.stem), ChannelTotals())

    def spot(self, group: Group, channel: int | str) -> str:
        """The name of a channel's place on the page of its layer; of an empty one, how those of all
        channels begin."""
        return f"{self._tensors[group.page, group.stem]}c{channel}"

    def run(self) -> Iterator[Markup]:
        """The page of the run, in pieces."""
        views = self.views
        first = views.images[0] if views.images else None
        over = [self.totals_of(group) for group in first.groups] if first else []
        audited = views.audit.dead if views.audit else None  # of more images than most runs have
        return self.pieces(
            "run",
            run=views.run,
            pages={page.name: page.id for page in views.layers},
            first=first,
            dead=audited or channels.dead(views.layers, self.totals_of),
            stages=network(first, self._first, over) if first else [],
        )

    def image(self, page: ImagePage) -> tuple[Markup, dict[str, dict[str, str]]]:
        """The page of an image, and its grids as JSON, by the scripts that are to hold them and the
        pictures' ids.
        """
        held = {other: view.image.stats() for other, view in page.inputs.items()}
        stats, scripts = {}, dict[str, dict[str, str]]()
        for group in page.groups:
            for figure in group.figures:
                id, row = figure.picture.id, figure.row
                stats[id] = held[figure.other][row.place.stats_key]
                grey = words.key(row, self._options[figure.other]).grey
                scripts.setdefault(figure.script, {})[id] = figure_entry(figure, stats[id], grey)
            figure = group.figures[0]
            self.totals_of(group).add(figure.row, stats[figure.picture.id])
        if page is self.views.images[0]:
            self._first = stats
        values = self._values(page, self.views.images, stages=network(page, stats))
        values["dark_of"] = lambda figure: words.all_zero(stats[figure.picture.id])
        return Markup("".join(self.pieces("image", **values))), scripts

    def layer(self, page: LayerPage) -> Iterator[Markup]:
        """The page of a layer, in pieces."""
        audited = self.views.audit.of(page.name) if self.views.audit else {}
        rows = {g.id: channels.channel_rows(self.totals_of(g), audited) for g in page.groups}
        values = self._values(page, self.views.layers, rows=rows, audited=audited)
        return self.pieces("layer", **values)

    def _values(
        self, page: ImagePage | LayerPage, pages: Sequence[ImagePage | LayerPage], **more: Any
    ) -> dict[str, Any]:
        """What a template of a page is given: the page, those around it, and the legend."""
        at = int(page.id.split("-")[1])
        around = pages[at - 1] if at else None, pages[at + 1] if at + 1 < len(pages) else None
        legend = words.legend(self._options[0], (f.row for f in figures_of(page.groups)))
        return {"page": page, "around": around, "legend": legend, **more}


def script(entries: Mapping[str, str]) -> str:
    """A script that puts some grids into `window.FEATVIZ`, beside those of other scripts."""
    lines = ",\n".join(f'"{id}":{entry}' for id, entry in entries.items())
    return f"window.FEATVIZ = Object.assign(window.FEATVIZ || {{}}, {{\n{lines}\n}});\n"


def figure_entry(figure: Figure, stats: Floats, grey: bool, change: Floats | None = None) -> str:
    """The grid of a figure as JSON, by `entry`; `grey` tells whether it may be shown in other
    colours."""
    row, layout = figure.row, LAYOUTS.get(figure.row.layout)
    whole = row.reduce is not None
    return entry(
        row.plan,
        row.side,
        stats,
        change,
        channels=[] if whole else row.channels,
        collapsed=row.collapsed,
        over=row.overlay is not None,  # its maps lie over the input already
        grey=grey,
        scene=bool(layout and layout.aligned and not is_numbers(row) and not whole),
    )


def entry(
    plan: GridPlan, slices: int, stats: Floats, change: np.ndarray | None, **more: Any
) -> str:
    """What the scripts know of a grid, as a script may hold it; what is nothing is left out.

    A column of the statistics [maps, 6] is base64 of little-endian float32; of a single number
    where all are the same, bit for bit, as zeros and non-finite values mostly are. `change` [maps]
    is how far each map is from that of another run, 0..1.
    """
    bits = np.ascontiguousarray(stats.astype("<f4").T).view("<u4")
    same = (bits == bits[:, :1]).all(axis=1)
    kept = [column[:1] if one else column for column, one in zip(bits, same, strict=True)]
    content = {
        "nrow": plan.columns,
        "padding": plan.padding,
        "tile": plan.tile,
        "size": (plan.width, plan.height),
        "slices": slices,
        "maps": len(stats),
        "stats": [base64.b64encode(column.tobytes()).decode() for column in kept],
        **{name: own for name, own in more.items() if own is not None and own is not False},
    }
    if change is not None:
        content["change"] = base64.b64encode(change.astype("<f4").tobytes()).decode()
    # no text that ends a script, or that another parser takes for the end of a line
    # (https://html.spec.whatwg.org/#restrictions-for-contents-of-script-elements)
    text = msgspec.json.encode(content).decode()
    for ending in "<>&\u2028\u2029":
        text = text.replace(ending, f"\\u{ord(ending):04x}")
    return text
