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
from featviz.records import STAT_COLUMNS, DifferenceMap, Floats
from featviz.report import channels, words
from featviz.report.beside import AuditViews, ExemplarView, KernelPage
from featviz.report.network import Stage, is_numbers, network
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
from featviz.rundir import INPUT_FILE, REPORT_ASSETS
from featviz.rundir.schema import Capture
from featviz.version import __version__

RUN_PAGE = "index"


def render(views: ReportViews, links: Links) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the name of each file of a report, and its text in pieces, one by one: no more is held
    than the numbers of a few images, and no page as a whole, since that of a layer shows all
    images. Of one file, the one document with everything inside."""
    write = _PageWriter(views, links)
    known: dict[str, dict[str, str]] = {}
    articles = []
    if not links.inline:
        yield from ((name, [asset(name)]) for name in REPORT_ASSETS)
    for n, page in enumerate(views.images, 1):
        article, scripts = write.image(page)
        for name, grids in scripts.items():
            known.setdefault("" if links.inline else name, {}).update(grids)
        if links.inline:
            articles.append(article)
            continue
        yield f"{page.id}.html", write.document(page, [article])
        if n % views.together == 0 or n == len(views.images):
            yield from ((name, [script(grids)]) for name, grids in known.items())
            known.clear()
            gc.collect()  # templates leave cycles, which hold the findings of thousands of channels
    if not links.inline:
        for layer in views.layers:
            yield f"{layer.id}.html", write.document(layer, write.layer(layer))
        yield f"{RUN_PAGE}.html", write.document(None, write.run())
        return
    articles += [piece for layer in views.layers for piece in write.layer(layer)]
    all_inside = inside(REPORT_ASSETS, script(known.get("", {})))
    yield f"{RUN_PAGE}.html", write.document(None, [*write.run(), *articles], all_inside)


def render_alone(
    title: str, template: str, views: AuditViews | KernelPage, links: Links
) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each file of a report that is one page, of an audit or of kernels, and its
    text in pieces; of one file, the page alone."""
    templates = Templates(links, model=views.name, home=links.page(RUN_PAGE))
    templates.shared["picture"] = lambda view, page: templates.draw(view, False, view.alt)
    article = templates.fill(template, views=views, pages={})
    yield from around(templates, title, article, REPORT_ASSETS)


def around(
    templates: Templates, name: str, article: Markup, assets: Sequence[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield the files of a report that is one page: our own, and the document around the page; of
    one file, the document alone."""
    inline = templates.shared["links"].inline
    if not inline:
        yield from ((own, [asset(own)]) for own in assets)
    values: dict[str, Any] = {"articles": [article], "assets": assets, "scripts": []}
    values["inside"] = inside(assets) if inline else None
    yield f"{RUN_PAGE}.html", [templates.fill("document", name=name, **values)]


def inside(assets: Iterable[str], data: str = "") -> dict[str, Markup]:
    """What a report of one file has inside: our own files, not to be escaped, and the grids."""
    return {**{name: Markup(asset(name)) for name in assets}, "data": Markup(data)}


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


class Templates:
    """Templates that escape what they are given, and raise on what they are not given; those of one
    report share some values."""

    def __init__(self, links: Links, **values: Any) -> None:
        known = {"version": __version__, "beside": "", "words": words, "badges": channels.badges}
        self.shared: dict[str, Any] = {**known, "links": links, **values}
        macros: Any = _engine().get_template("picture.html").make_module({"links": links})
        self.draw = macros.picture

    def pieces(self, template: str, **values: Any) -> Iterator[Markup]:
        """A filled template, piece by piece as somebody asks for it: it has escaped everything, and
        its text must not be escaped again."""
        found = _engine().get_template(f"{template}.html")
        return map(Markup, found.generate({**self.shared, **values}))

    def fill(self, template: str, **values: Any) -> Markup:
        """A filled template as a whole."""
        return Markup("".join(self.pieces(template, **values)))


class _PageWriter:
    """Fills the templates of one report: all images first, whose numbers the others count."""

    def __init__(self, views: ReportViews, links: Links) -> None:
        self.views, self.links = views, links
        self.totals = channels.RunTotals()
        self._first: Mapping[str, Floats] = {}
        """The statistics of the first image, which the page of the run shows."""
        self._inputs: dict[tuple[str, bool], Markup] = {}
        runs = {False: views.run, True: views.other}
        fewer = {} if views.tiles is None else {"fewer": True}
        self._options = {
            other: {**(run.record.get("options") or {}), **fewer}
            for other, run in runs.items()
            if run
        }
        self._around: dict[str, tuple[Any, Any]] = {}
        """The pages before and after each, None at the ends, by its id."""
        every: tuple[Sequence[ImagePage | LayerPage], ...] = (views.images, views.layers)
        for pages in every:
            for before, page, after in zip([None, *pages], pages, [*pages[1:], None], strict=False):
                self._around[page.id] = before, after
        self._tensors = {
            (layer.id, group.stem): f"t{n}-" if n else ""
            for layer in views.layers
            for n, group in enumerate(layer.groups)
        }
        self.templates = Templates(
            links,
            model=words.name_of(views.run.record.get("model") or {}),
            labels=views.labels,
            tiles=views.tiles,
            home=links.page(RUN_PAGE),
            totals_of=self.totals.of,
            dark_count=self.totals.dark_count,
            explanations=channels.EXPLANATIONS,
            audit=views.audit,
            key_of=lambda figure: words.key(figure.row, self._options[figure.other]),
            strip_keys_of=self._strip_keys,
            spot=self.spot,
            picture=self.picture,
            cut=self.cut,
        )

    def document(
        self,
        page: ImagePage | LayerPage | None,
        articles: Iterable[Markup],
        inside: dict[str, Markup] | None = None,
    ) -> Iterator[Markup]:
        """A whole HTML document, in pieces, around a page, of the run if None; it loads the
        scripts that hold the numbers of its grids, or has everything inside."""
        scripts = dict.fromkeys(figure.script for figure in figures_of(page.groups if page else ()))
        values = {"name": page.name if page else "", "scripts": scripts, "inside": inside}
        return self.templates.pieces("document", articles=articles, assets=REPORT_ASSETS, **values)

    def picture(self, view: PictureView, page: str) -> Markup:
        """A picture on a page.

        In a report of one file a picture stands on its image's page; elsewhere the script shows it.
        """
        elsewhere = self.links.inline and view.home != page
        if view.file != INPUT_FILE:
            drawn: Markup = self.templates.draw(view, elsewhere, view.alt)
            return drawn
        key = (view.id, elsewhere)  # on every layer's page
        if key not in self._inputs:
            self._inputs[key] = self.templates.draw(view, elsewhere, view.alt)
        return self._inputs[key]

    def cut(self, figure: Figure) -> Markup:
        """A grid of which a tile is shown; in a report of one file it stands elsewhere too."""
        drawn: Markup = self.templates.draw(
            figure.picture, self.links.inline, f"Maps of {figure.row.label}"
        )
        return drawn

    def spot(self, group: Group, channel: int | str) -> str:
        """The name of a channel's place on the page of its layer; of an empty one, how those of all
        channels begin."""
        return f"{self._tensors[group.page, group.stem]}c{channel}"

    def run(self) -> Iterator[Markup]:
        """The page of the run, in pieces."""
        views, run = self.views, self.views.run
        first = views.images[0] if views.images else None
        over = [self.totals.of(group) for group in first.groups] if first else []
        audited = views.audit.dead if views.audit else None  # of more images than most runs have
        return self.templates.pieces(
            "run",
            views=views,
            run=run,
            pages={page.name: page.id for page in views.layers},
            first=first,
            dead=audited or self.totals.dead(views.layers),
            stages=network(first, self._first, over) if first else [],
        )

    def image(self, page: ImagePage) -> tuple[Markup, dict[str, dict[str, str]]]:
        """The page of an image, and its grids as JSON, by the scripts that are to hold them and the
        pictures' ids.

        Raises:
            DamagedError: its statistics have been damaged since the run was read.
        """
        held = {other: image.stats() for other, image in page.images.items()}
        stats, facts = {}, {}
        scripts: dict[str, dict[str, str]] = {}
        for figure in figures_of(page.groups):
            id, row, options = figure.picture.id, figure.row, self._options[figure.other]
            stats[id] = held[figure.other][row.place.stats_key]
            facts[id] = words.grid_facts(row, words.all_zero(stats[id]), options)
            own = entry(figure, stats[id], words.key(row, options).grey)
            scripts.setdefault(figure.script, {})[id] = own
        self.totals.add(page.groups, stats)
        if page is self.views.images[0]:
            self._first = stats
        values = self._values(page, facts_of=facts, stages=network(page, stats))
        return self.templates.fill("image", **values), scripts

    def layer(self, page: LayerPage) -> Iterator[Markup]:
        """The page of a layer, in pieces."""
        audit, kernels = self.views.audit, self.views.kernels.get(page.name)
        audited = audit.of(page.name) if audit else {}
        values = self._values(
            page,
            rows={g.id: channels.channel_rows(self.totals.of(g), audited) for g in page.groups},
            audited=audited,
            suspects=audit.suspects(page.name, page.id) if audit else [],
            kernels=kernels,
            kernel_tiles=None if kernels is None else geometry(kernels.row),
            exemplars_of=lambda group: self.views.exemplars.get((page.id, group.stem), ()),
            channels_of=self._exemplars,
        )
        return self.templates.pieces("layer", **values)

    def _exemplars(self, shown: Sequence[ExemplarView]) -> str:
        """The pictures of channels for the script, as JSON; none in one file, which has the
        sheets."""
        found: dict[int, list[dict[str, Any]]] = {}
        for one in () if self.links.inline else shown:
            for channel, view in one.channels.items():
                width, height = view.size
                own = {"src": self.links.picture(view), "alt": view.alt, "title": one.title}
                found.setdefault(channel, []).append({**own, "width": width, "height": height})
        return msgspec.json.encode(found).decode()

    def _strip_keys(self, stages: Sequence[Stage]) -> list[words.Key]:
        rows = (step.figure.row for stage in stages for step in stage.steps if step.tiles)
        return words.strip_keys(rows, self._options[False])

    def _values(self, page: ImagePage | LayerPage, **more: Any) -> dict[str, Any]:
        options = self.views.run.record.get("options") or {}
        colors = words.legend(options, (figure.row for figure in figures_of(page.groups)))
        return {"page": page, "around": self._around[page.id], "legend": colors, **more}


def script(entries: Mapping[str, str]) -> str:
    """A script that puts some grids into `window.FEATVIZ`, beside those of other scripts."""
    lines = ",\n".join(f'"{id}":{entry}' for id, entry in entries.items())
    return f"window.FEATVIZ = Object.assign(window.FEATVIZ || {{}}, {{\n{lines}\n}});\n"


class _Entry(msgspec.Struct, omit_defaults=True):
    """What the scripts of a page know of a grid; what is nothing is left out."""

    nrow: int
    padding: int
    tile: tuple[int, int]
    """Height and width."""
    size: tuple[int, int]
    """Width and height."""
    slices: int
    maps: int
    stats: list[str]
    channels: Sequence[int] | None = None
    collapsed: Mapping[str, Sequence[int]] | None = None
    over: bool = False
    """Whether its maps lie over the input already."""
    grey: bool = False
    """Whether the picture is grey, and may be shown in other colours."""
    scene: bool = False
    """Whether its maps show the places of the input, and may be laid over it."""
    change: str | None = None
    """How far each map is from that of another run, 0..1."""


def entry(figure: Figure, stats: Floats, grey: bool, change: np.ndarray | None = None) -> str:
    """A grid as JSON.

    Args:
        stats: [maps, 6].
        grey: whether it may be shown in other colours.
        change: [maps]: how far each map is from that of another run, 0..1.
    """
    row, plan, layout = figure.row, figure.row.plan, LAYOUTS.get(figure.row.layout)
    content = _Entry(
        *(plan.columns, plan.padding, plan.tile, figure.picture.size, row.side, row.maps),
        stats=_columns(stats),
        change=None if change is None else _column(change),
        channels=[] if row.reduce is not None else row.channels,
        collapsed=row.collapsed,
        over=row.overlay is not None,
        grey=grey,
        scene=bool(layout and layout.aligned and not is_numbers(row) and row.reduce is None),
    )
    return _in_script(content)


def difference_entry(drawn: DifferenceMap, change: np.ndarray) -> str:
    """The grid of a map of differences as JSON; `change` as in `entry`."""
    plan = drawn.plan
    unknown = np.full((1, len(STAT_COLUMNS)), np.nan, np.float32)
    size = (plan.width, plan.height)
    content = _Entry(
        *(plan.columns, plan.padding, plan.tile, size, drawn.slices, len(change)),
        stats=_columns(unknown),
        channels=drawn.channels,
        change=_column(change),
    )
    return _in_script(content)


def geometry(row: Capture) -> str:
    """Where the tiles of a picture are, as JSON; without statistics."""
    plan = row.plan
    size = (plan.width, plan.height)
    entry = _Entry(
        *(plan.columns, plan.padding, plan.tile, size, row.side, row.maps, []),
        channels=row.channels,
    )
    return msgspec.json.encode(entry).decode()


def _columns(stats: Floats) -> list[str]:
    """Base64 of little-endian float32 for each column; of a single number where all are the same,
    bit for bit, as zeros and non-finite values mostly are."""
    bits = np.ascontiguousarray(stats.astype("<f4").T).view("<u4")
    same = (bits == bits[:, :1]).all(axis=1)
    kept = (column[:1] if one else column for column, one in zip(bits, same, strict=True))
    return [base64.b64encode(column.tobytes()).decode() for column in kept]


def _column(values: np.ndarray) -> str:
    return base64.b64encode(values.astype("<f4").tobytes()).decode()


def _in_script(content: _Entry) -> str:
    """JSON as a script may hold it: without anything that ends the script, or that another parser
    takes for the end of a line (https://html.spec.whatwg.org/#restrictions-for-contents-of-script-elements)."""
    text = msgspec.json.encode(content).decode()
    for ending in "<>&\u2028\u2029":
        text = text.replace(ending, f"\\u{ord(ending):04x}")
    return text
