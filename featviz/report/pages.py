"""From views to HTML, by Jinja templates that escape whatever they are given."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.resources import files
from types import CodeType
from typing import Any

import jinja2
import msgspec
from jinja2.bccache import Bucket
from markupsafe import Markup

from featviz.records import Floats
from featviz.report import channels, words
from featviz.report.audited import AuditViews
from featviz.report.data import (
    Numbers,
    entries,
    figures,
    geometry,
    read_numbers,
    script,
    scripts_of,
)
from featviz.report.excited import ExemplarView
from featviz.report.kernels import KernelPage
from featviz.report.legend import Key, key, legend, strip_keys
from featviz.report.links import InlineLinks, Links
from featviz.report.network import Stage, network
from featviz.report.views import Figure, Group, ImagePage, LayerPage, PictureView, ReportViews
from featviz.rundir import INPUT_FILE, REPORT_ASSETS
from featviz.version import __version__

RUN_PAGE = "index"


def render_folder(views: ReportViews, links: Links) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the name of each file of a report that is a folder, and its text in pieces, one by one:
    no more is held than the numbers of a few images, and no page as a whole, since that of a layer
    shows all images."""
    write = _PageWriter(views, links)
    for name in REPORT_ASSETS:
        yield name, [asset(name)]
    known: dict[str, dict[str, str]] = {}
    for n, page in enumerate(views.images, 1):
        article, scripts = write.image(page)
        scripts_too = scripts_of(page.groups)
        yield f"{page.id}.html", write.document(page.id, page.name, [article], scripts_too)
        for name, grids in scripts.items():
            known.setdefault(name, {}).update(grids)
        if n % views.together == 0 or n == len(views.images):
            yield from ((name, [script(grids)]) for name, grids in known.items())
            known.clear()
            gc.collect()  # templates leave cycles, which hold the findings of thousands of channels
    for layer in views.layers:
        pieces, scripts_too = write.layer(layer), scripts_of(layer.groups)
        yield f"{layer.id}.html", write.document(layer.id, layer.name, pieces, scripts_too)
    yield f"{RUN_PAGE}.html", write.document(RUN_PAGE, "", write.run())


def render_single(views: ReportViews) -> str:
    """The report as one HTML document with everything inside."""
    write = _PageWriter(views, InlineLinks())
    known: dict[str, str] = {}
    articles = []
    for page in views.images:
        article, scripts = write.image(page)
        articles.append(article)
        for grids in scripts.values():
            known |= grids
    articles += [piece for layer in views.layers for piece in write.layer(layer)]
    inside = _inside(script(known))
    return "".join(write.document(RUN_PAGE, "", [*write.run(), *articles], inside=inside))


def render_alone(
    title: str, template: str, views: AuditViews | KernelPage, links: Links
) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of each file of a report that is one page, of an audit or of kernels, and its
    text in pieces; of one file, the page alone."""
    engine = templates()
    engine.globals |= {
        "links": links,
        "model": views.name,
        "words": words,
        "home": links.page(RUN_PAGE),
        "badges": channels.badges,
    }
    macros: Any = engine.get_template("picture.html").module
    engine.globals |= {"picture": lambda view, page: macros.picture(view, False, view.alt)}
    article = fill(engine, template, views=views, pages={})
    inside = _inside("") if links.inline else None
    if not links.inline:
        yield from ((name, [asset(name)]) for name in REPORT_ASSETS)
    values = {"articles": [article], "assets": REPORT_ASSETS, "scripts": [], "inside": inside}
    yield f"{RUN_PAGE}.html", [fill(engine, "document", name=title, **values)]


def _inside(data: str) -> dict[str, Markup]:
    """What a report of one file has inside: our own files, not to be escaped, and the grids."""
    return {**{name: Markup(asset(name)) for name in REPORT_ASSETS}, "data": Markup(data)}


def render_notebook(content: Mapping[str, Any]) -> str:
    """What a notebook shows of a result: a part of a page.

    Args:
        content: `figures` (address, words, (width, height)), `lines`, `table` (a `TextTable` or
            None) and `link`.
    """
    return str(templates().get_template("notebook.html").render(content))


def asset(name: str) -> str:
    """The text of a file that all reports have."""
    return (files("featviz.report") / "assets" / name).read_text("utf-8")


def fill(engine: jinja2.Environment, template: str, **values: Any) -> Markup:
    """A filled template, which has escaped everything: its text must not be escaped again."""
    return Markup(engine.get_template(f"{template}.html").render(values))


class _CompiledTemplates(jinja2.BytecodeCache):
    """The templates that this process has compiled, which takes longer than to fill them: each
    report has globals of its own, and so an environment, but shares their code."""

    def __init__(self) -> None:
        self.codes: dict[tuple[str, str], CodeType | None] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        """Put in the code of a template, None if it is new."""
        bucket.code = self.codes.get((bucket.key, bucket.checksum))

    def dump_bytecode(self, bucket: Bucket) -> None:
        """Keep the code of a template."""
        self.codes[bucket.key, bucket.checksum] = bucket.code


_COMPILED = _CompiledTemplates()


def templates() -> jinja2.Environment:
    """Templates that escape what they are given, and raise on what they are not given."""
    engine = jinja2.Environment(
        loader=jinja2.PackageLoader("featviz.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        bytecode_cache=_COMPILED,
    )
    engine.globals |= {"version": __version__, "beside": ""}
    return engine


class _PageWriter:
    """Fills the templates of one report: all images first, whose numbers the others count."""

    def __init__(self, views: ReportViews, links: Links) -> None:
        self.views, self.links = views, links
        self.totals = channels.RunTotals()
        self._first: Mapping[str, Floats] = {}
        """The statistics of the first image, which the page of the run shows."""
        self._inputs: dict[tuple[str, bool], Markup] = {}
        runs = {False: views.run, True: views.other}
        self._options = {o: (run.record.get("options") or {}) for o, run in runs.items() if run}
        if views.form.tiles is not None:
            self._options = {o: {**own, "max_size": 1} for o, own in self._options.items()}
        self._around = {**_around(views.images), **_around(views.layers)}
        self._tensors = {
            (layer.id, group.stem): f"t{n}-" if n else ""
            for layer in views.layers
            for n, group in enumerate(layer.groups)
        }
        self.templates = templates()
        self.templates.globals |= {
            "links": links,
            "model": words.model_name(views.run),
            "labels": views.labels,
            "form": views.form,
            "words": words,
            "home": links.page(RUN_PAGE),
            "totals_of": self.totals.of,
            "dark_count": self.totals.dark_count,
            "badges": channels.badges,
            "explanations": channels.EXPLANATIONS,
            "audit": views.audit,
            "key_of": self._key,
            "strip_keys_of": self._strip_keys,
            "spot": self.spot,
        }
        macros: Any = self.templates.get_template("picture.html").module
        self._draw = macros.picture
        self.templates.globals |= {"picture": self.picture, "cut": self.cut}

    def document(
        self,
        id: str,
        name: str,
        articles: Iterable[Markup],
        scripts: Sequence[str] = (),
        inside: dict[str, Markup] | None = None,
    ) -> Iterator[Markup]:
        """A whole HTML document, in pieces, around pages, whole or in pieces; it loads scripts or
        has everything inside."""
        values = {"id": id, "name": name, "scripts": scripts, "inside": inside}
        return self._pieces("document", articles=articles, assets=REPORT_ASSETS, **values)

    def picture(self, view: PictureView, page: str) -> Markup:
        """A picture on a page.

        In a report of one file a picture stands on its image's page; elsewhere the script shows it.
        """
        elsewhere = self.links.inline and view.home != page
        if view.file != INPUT_FILE:
            drawn: Markup = self._draw(view, elsewhere, view.alt)
            return drawn
        key = (view.id, elsewhere)  # on every layer's page
        if key not in self._inputs:
            self._inputs[key] = self._draw(view, elsewhere, view.alt)
        return self._inputs[key]

    def cut(self, figure: Figure) -> Markup:
        """A grid of which a tile is shown; in a report of one file it stands elsewhere too."""
        drawn: Markup = self._draw(figure.picture, self.links.inline, f"Maps of {figure.row.label}")
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
        return self._pieces(
            "run",
            views=views,
            run=run,
            pages={page.name: page.id for page in views.layers},
            first=first,
            dead=self._dead(),
            stages=network(first, self._first, over) if first else [],
        )

    def _dead(self) -> str:
        """How many channels are dead: as an audit found, which saw more images than most runs, or
        as the run itself shows."""
        audited = self.views.audit.dead if self.views.audit else None
        return audited or self.totals.dead(self.views.layers)

    def image(self, page: ImagePage) -> tuple[Markup, dict[str, dict[str, str]]]:
        """The page of an image, and its grids for the scripts (`data.entries`)."""
        numbers = read_numbers(page)
        self.totals.add(page.groups, numbers.stats)
        if page is self.views.images[0]:
            self._first = numbers.stats
        stages = network(page, numbers.stats)
        values = self._values(page, facts_of=self._facts(page, numbers), stages=stages)
        return fill(self.templates, "image", **values), entries(page, numbers, self._options)

    def layer(self, page: LayerPage) -> Iterator[Markup]:
        """The page of a layer, in pieces."""
        audited = self.views.audit.of(page.name) if self.views.audit else {}
        rows = {
            group.id: channels.channel_rows(self.totals.of(group), audited) for group in page.groups
        }
        kernels = self.views.kernels.get(page.name)
        beside = {} if kernels is None else {"tiles": geometry(kernels.row)}
        values = self._values(
            page,
            rows=rows,
            audited=audited,
            suspects=self.views.audit.suspects(page.name, page.id) if self.views.audit else [],
            kernels=kernels,
            exemplars_of=lambda group: self.views.exemplars.get((page.id, group.stem), ()),
            channels_of=self._exemplars,
            **beside,
        )
        return self._pieces("layer", **values)

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

    def _facts(self, page: ImagePage, numbers: Numbers) -> dict[str, words.Facts]:
        """What is said of each picture, by its id."""
        return {
            f.picture.id: words.grid_facts(
                f.row, numbers.dark[f.picture.id], self._options[f.other]
            )
            for f in figures(page.groups)
        }

    def _key(self, figure: Figure) -> Key:
        return key(figure.row, self._options[figure.other])

    def _strip_keys(self, stages: Sequence[Stage]) -> list[Key]:
        rows = (step.figure.row for stage in stages for step in stage.steps if step.tiles)
        return strip_keys(rows, self._options[False])

    def _values(self, page: ImagePage | LayerPage, **more: Any) -> dict[str, Any]:
        around, colors = self._around[page.id], self._legend(page.groups)
        return {"page": page, "around": around, "legend": colors, **more}

    def _legend(self, groups: Sequence[Group]) -> Any:
        options = self.views.run.record.get("options") or {}
        return legend(options, (figure.row for figure in figures(groups)))

    def _pieces(self, template: str, **values: Any) -> Iterator[Markup]:
        """A filled template, piece by piece as somebody asks for it."""
        return map(Markup, self.templates.get_template(f"{template}.html").generate(values))


def _around(pages: Sequence[Any]) -> dict[str, tuple[Any, Any]]:
    """The pages before and after each, None at the ends, by its id."""
    pairs = zip([None, *pages[:-1]], [*pages[1:], None], strict=True) if pages else ()
    return {page.id: pair for page, pair in zip(pages, pairs, strict=True)}
