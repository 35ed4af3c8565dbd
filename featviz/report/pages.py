"""From views to HTML, by Jinja templates that escape whatever they are given, and to scripts.

Geometry and statistics of grids (those of stats.npz bit for bit) stand in scripts, which work from
file:// where JSON does not: in one those of up to 16 grids, which pages of images and layers load.
"""

from __future__ import annotations

import base64
import gc
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
import msgspec
import numpy as np
from markupsafe import Markup

from featviz.diff.comparison import Comparison
from featviz.files import real
from featviz.layout.layouts import LAYOUTS
from featviz.records import STAT_COLUMNS, Floats, GridPlan
from featviz.report import network, words
from featviz.report.beside import AuditViews, Extra
from featviz.report.network import ChannelTotals, is_numbers
from featviz.report.views import (
    MOST_IMAGES,
    Figure,
    Group,
    Links,
    PictureView,
    ReportPage,
    figures_of,
)
from featviz.rundir import DIFF_GRIDS, INPUT_FILE, REPORT_ASSETS
from featviz.rundir.read import ReadRun
from featviz.text import by
from featviz.version import __version__

RUN_PAGE = "index"
PICTURED = 60
"""Layers of a comparison with their pictures: the first that differs, and the most changed."""
_TOLD = ("out", "ablate", "edit")  # options that a comparison tells elsewhere

Files = Iterator[tuple[str, Iterable[str]]]
"""The name of each file of a report, and its text in pieces."""


def render_alone(
    links: Links,
    template: str,
    model: str,
    title: str,
    views: Any,
    assets: Sequence[str] = REPORT_ASSETS,
    **values: Any,
) -> Files:
    """The files of a report that is one page, as of an audit; of one file, the page alone."""
    shared = shared_values(links, names=assets, model=model)
    if not links.inline:
        yield from ((name, [asset(name)]) for name in assets)
    article = pieces(shared, template, views=views, pages={}, **values)
    yield f"{RUN_PAGE}.html", document(shared, article, title=title)


def render_comparison(
    found: Comparison, base: ReadRun, new: ReadRun, page: Path, maps: Path
) -> tuple[str, Mapping[str, str]]:
    """The page of a comparison, and the files that are to lie with the maps, by name."""
    runs = base, new
    beside = f"{Path(os.path.relpath(maps, page.parent)).as_posix()}/"
    short = [run.root.absolute().name for run in runs]
    names = short if len(set(short)) > 1 else [str(run.place) for run in runs]
    options = [run.record.get("options") or {} for run in runs]
    ranked = sorted(found.differing, key=lambda one: -one.severity)
    shown = {id(layer) for layer in ranked[: PICTURED - 1]} | {id(found.first)}
    layers, grids = [], {}
    for n, layer in enumerate(found.layers):
        figures, difference = [], layer.difference if id(layer) in shown else None
        for other, run in enumerate(runs if id(layer) in shown else ()):
            image = run.images[layer.image]
            alt, row = f"What the model saw of {image.name}", image.captures[layer.place]
            seen = PictureView(f"i{other}-{n}", image, INPUT_FILE, image.input_size, alt)
            figures.append(Figure.of(f"g{other}-{n}", row, seen, DIFF_GRIDS, bool(other)))
            stats, (*_, grey) = image.stats()[layer.place.stats_key], words.key(row, options[other])
            grids[f"g{other}-{n}"] = figure_entry(figures[-1], stats, grey, layer.change)
        if difference is not None:
            unknown = np.full((len(layer.change), len(STAT_COLUMNS)), np.nan, np.float32)
            parts = (difference.plan, difference.slices, unknown, layer.change)
            grids[f"d-{n}"] = entry(*parts, channels=difference.channels)
        about = {"id": f"layer-{n:03d}", "layer": layer, "first": layer is found.first}
        layers.append({**about, "figures": figures, "difference": difference})
    old, now = (
        dict(words.run_facts(run.record))
        | {name: words.setting(own) for name, own in its.items() if name not in _TOLD}
        for run, its in zip(runs, options, strict=True)
    )
    pairs = ((name, old.get(name, "–"), now.get(name, "–")) for name in {**old, **now})
    limits = [layer.difference.limit for layer in found.layers if layer.difference]
    end = words.number(max(limits, default=1.0))
    scale = "NEW − BASE, relative; one scale for all layers"
    shared = shared_values(
        Links(page.absolute().parent),
        home=quote(os.fsencode(page.name)),
        model=" → ".join(names),
        beside=quote(os.fsencode(beside)),
        key_of=lambda figure: words.key(figure.row, options[figure.other]),
        link_of=lambda name: quote(os.fsencode(beside + name)),
    )
    article = pieces(
        shared,
        "compare",
        found=found,
        layers=layers,
        runs=runs,
        settings=[(name, a, b) for name, a, b in pairs if a != b],
        signed=(f"−{end}", f"+{end}", scale, words.scale("coolwarm"), False),
    )
    assets = {name: asset(name) for name in REPORT_ASSETS}
    text = "".join(document(shared, article, scripts=[DIFF_GRIDS]))
    return text, {**assets, DIFF_GRIDS: script(grids)}


def render_notebook(content: Mapping[str, Any]) -> str:
    """What a notebook shows: `figures` (address, words, size), a `table`, and `lines`."""
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


def shared_values(links: Links, **values: Any) -> dict[str, Any]:
    """What all templates of a report may use."""

    def channels_of(extra: Extra) -> str:
        """As JSON: where channels are in a picture, or their own ones, which one file has not."""
        found: dict[int, Any] = {}
        for channel, own in extra["channels"].items():
            if not isinstance(own, PictureView):
                found[channel] = own
            elif not links.inline:
                size = dict(zip(("width", "height"), own.size, strict=True))
                found[channel] = {"src": links.picture(own), "alt": own.alt, **size}
        return msgspec.json.encode(found).decode()

    return {
        "version": __version__,
        "beside": "",
        "home": links.page(RUN_PAGE),
        "links": links,
        "names": REPORT_ASSETS,
        "asset": lambda name: Markup(asset(name)),
        "words": words,
        "by": by,
        "badges": network.badges,
        "layouts": LAYOUTS,
        "channels_of": channels_of,
        **values,
    }


def pieces(shared: Mapping[str, Any], template: str, **values: Any) -> Iterator[Markup]:
    """A filled template, piece by piece; it raises on what it lacks, and has escaped everything."""
    return map(Markup, _engine().get_template(f"{template}.html").generate({**shared, **values}))


def document(
    shared: Mapping[str, Any],
    article: Iterable[Markup],
    page: ReportPage | None = None,
    title: str = "",
    scripts: Iterable[str] = (),
    data: str = "",
) -> Iterator[Markup]:
    """A whole HTML document around an article, in pieces, with scripts or their data."""
    if page is not None:
        title, scripts = page.name, dict.fromkeys(own.script for own in figures_of(page.groups))
    about = {"title": title, "scripts": scripts, "data": Markup(data)}
    return pieces(shared, "document", article=article, **about)


@dataclass
class RunReport:
    """The report of a run: all images first, whose numbers the other pages count."""

    run: ReadRun
    other: ReadRun | None
    images: Sequence[ReportPage]
    layers: Sequence[ReportPage]
    verdict: Comparison | None = None
    not_compared: str = ""
    audit: AuditViews | None = None
    extras: Mapping[str, Sequence[Extra]] = field(default_factory=dict)
    """By the id of the group of a layer's page with which they stand."""
    tiles: int | None = None
    """The most maps that a layer shows, where they are fewer so that one file stays small."""
    totals: dict[tuple[str, str], ChannelTotals] = field(default_factory=dict)
    _first: Mapping[str, Floats] = field(default_factory=dict)
    """The statistics of the first image, which the page of the run shows."""

    def render(self, links: Links) -> Files:
        """The files of the report, one by one: no more is held than the numbers of a few images,
        and no page as a whole. Of one file, the one document with everything inside."""
        shared = self._shared(links)
        grids: dict[str, dict[str, str]] = {}
        articles: list[Iterable[Markup]] = []
        if not links.inline:
            yield from ((name, [asset(name)]) for name in REPORT_ASSETS)
        for n, page in enumerate(self.images, 1):
            article, scripts = self._image(page, shared)
            for name, own in scripts.items():
                grids.setdefault("" if links.inline else name, {}).update(own)
            if links.inline:
                articles.append([article])
                continue
            yield f"{page.id}.html", document(shared, [article], page)
            if n % MOST_IMAGES == 0 or n == len(self.images):
                yield from ((name, [script(own)]) for name, own in grids.items())
                grids.clear()
                gc.collect()  # templates leave cycles, which hold findings of thousands of channels
        layers = ((layer, self._layer(layer, shared)) for layer in self.layers)
        if not links.inline:
            for layer, parts in layers:
                yield f"{layer.id}.html", document(shared, parts, layer)
            yield f"{RUN_PAGE}.html", document(shared, self._index(shared))
            return
        every = [self._index(shared), *articles, *(list(parts) for _, parts in layers)]
        whole = (piece for parts in every for piece in parts)
        yield f"{RUN_PAGE}.html", document(shared, whole, data=script(grids.get("", {})))

    def _shared(self, links: Links) -> dict[str, Any]:
        runs = [self.run, *([self.other] if self.other else [])]
        labels = tuple(real(run.root).name for run in runs) + ("",) * (2 - len(runs))
        if labels[0] == labels[1]:
            labels = f"{labels[0]} (this)", f"{labels[1]} (other)"
        options = [run.record.get("options") or {} for run in runs]
        tensors = {
            (layer.id, group.stem): f"t{n}-" if n else ""
            for layer in self.layers
            for n, group in enumerate(layer.groups)
        }

        def strip_keys_of(stages: Sequence[Mapping[str, Any]]) -> list[words.Key]:
            steps = (step for stage in stages for step in stage["steps"] if step["tiles"])
            keys = (words.key(step["figure"].row, options[0], strip=True) for step in steps)
            return [key for key in dict.fromkeys(keys) if key[3]]

        return shared_values(
            links,
            model=words.name_of(self.run.record.get("model") or {}),
            views=self,
            labels=labels,
            totals_of=self.totals_of,
            dark_count=lambda page: sum(int(self.totals_of(g).dark.sum()) for g in page.groups),
            explanations=network.EXPLANATIONS,
            options=options,
            key_of=lambda figure: words.key(figure.row, options[figure.other]),
            strip_keys_of=strip_keys_of,
            # the name of a channel's place on the page of its layer, or how all these names begin
            spot=lambda group, channel: f"{tensors[group.page, group.stem]}c{channel}",
        )

    def totals_of(self, group: Group) -> ChannelTotals:
        """The totals of a tensor over all images of this run."""
        return self.totals.setdefault((group.page, group.stem), ChannelTotals())

    def _index(self, shared: Mapping[str, Any]) -> Iterator[Markup]:
        first = self.images[0] if self.images else None
        over = [self.totals_of(group) for group in first.groups] if first else []
        audited = self.audit.dead if self.audit else None  # of more images than most runs have
        apart: tuple[Figure, ...] = ()
        if self.verdict is not None and (one := self.verdict.first) is not None:
            groups = (g for page in self.images if page.name == one.image for g in page.groups)
            own = (g.figures for g in groups if g.figures[0].row.place == one.place)
            apart = next((figures for figures in own if len(figures) > 1), ())
        return pieces(
            shared,
            "run",
            run=self.run,
            pages={page.name: page.id for page in self.layers},
            first=first,
            apart=apart,
            dead=audited or network.dead(self.layers, self.totals_of),
            stages=network.network(first, self._first, over) if first else [],
            silent=Counter(pair for image in self.images for pair in dict.fromkeys(image.silent)),
        )

    def _image(
        self, page: ReportPage, shared: Mapping[str, Any]
    ) -> tuple[Markup, dict[str, dict[str, str]]]:
        """The page of an image, and its grids as JSON, by script and by picture's id."""
        held = {other: view.image.stats() for other, view in page.inputs.items()}
        stats, scripts = {}, dict[str, dict[str, str]]()
        for group in page.groups:
            for figure in group.figures:
                id, row = figure.picture.id, figure.row
                stats[id] = held[figure.other][row.place.stats_key]
                *_, grey = shared["key_of"](figure)
                scripts.setdefault(figure.script, {})[id] = figure_entry(figure, stats[id], grey)
            figure = group.figures[0]
            self.totals_of(group).add(figure.row, stats[figure.picture.id])
        self._first = self._first or stats
        values = self._values(page, self.images, shared, stages=network.network(page, stats))
        values["dark_of"] = lambda figure: np.flatnonzero(
            (stats[figure.picture.id][:, 4:] == (1, 0)).all(1)
        ).tolist()
        return Markup("".join(pieces(shared, "image", **values))), scripts

    def _layer(self, page: ReportPage, shared: Mapping[str, Any]) -> Iterator[Markup]:
        audited = self.audit.of(page.name) if self.audit else {}
        rows = {g.id: network.channel_rows(self.totals_of(g), audited) for g in page.groups}
        values = self._values(page, self.layers, shared, rows=rows, audited=audited)
        return pieces(shared, "layer", **values)

    def _values(
        self,
        page: ReportPage,
        pages: Sequence[ReportPage],
        shared: Mapping[str, Any],
        **more: Any,
    ) -> dict[str, Any]:
        """What a template of a page is given: the page, those around it, and the legend."""
        at = int(page.id.split("-")[1])
        around = pages[at - 1] if at else None, pages[at + 1] if at + 1 < len(pages) else None
        rows = (figure.row for figure in figures_of(page.groups))
        legend = words.legend(shared["options"][0], rows)
        return {"page": page, "around": around, "legend": legend, **more}


def script(entries: Mapping[str, str]) -> str:
    """A script that puts some grids into `window.FEATVIZ`, beside those of other scripts."""
    lines = ",\n".join(f'"{id}":{entry}' for id, entry in entries.items())
    return f"window.FEATVIZ = Object.assign(window.FEATVIZ || {{}}, {{\n{lines}\n}});\n"


def figure_entry(figure: Figure, stats: Floats, grey: bool, change: Floats | None = None) -> str:
    """The grid of a figure as JSON; a `grey` one may be shown in other colours."""
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
    """What the scripts know of a grid. A column of the statistics [maps, 6] is base64 of
    little-endian float32, of one number where all are the same; so is the `change` of maps."""
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
