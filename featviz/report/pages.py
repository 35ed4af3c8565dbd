"""From views to HTML, by Jinja templates that escape whatever they are given."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from featviz.report import words
from featviz.report.data import (
    DarkChannels,
    Numbers,
    entries,
    figures,
    read_numbers,
    script,
    scripts_of,
)
from featviz.report.legend import legend
from featviz.report.views import Group, ImagePage, LayerPage, PictureView, ReportViews
from featviz.rundir import INPUT_FILE, REPORT_ASSETS
from featviz.rundir.image import format_of
from featviz.version import __version__

RUN_PAGE = "index"


class Links(Protocol):
    """Where pages and pictures are."""

    inline: bool
    """Whether all pages are one file, in which a picture stands only on its image's page."""

    def page(self, id: str) -> str:
        """The address of a page."""

    def picture(self, view: PictureView) -> str:
        """The address of a picture."""


class FolderLinks:
    """Pages are files in a folder, and pictures stay where they are."""

    inline = False

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ways: dict[tuple[Path, str], str] = {}

    def page(self, id: str) -> str:
        """`image-004.html`."""
        return f"{id}.html"

    def picture(self, view: PictureView) -> str:
        """Relative to the folder, quoted."""
        home = (view.image.root, view.image.folder)
        if home not in self._ways:
            way = Path(os.path.relpath(view.image.path, self.folder)).as_posix()
            self._ways[home] = quote(os.fsencode(way))
        return f"{self._ways[home]}/{_quoted(view.file)}"


@lru_cache(maxsize=4096)
def _quoted(file: str) -> str:
    """The name of a file in an image's folder, which most images of a run have too."""
    return quote(os.fsencode(file))


class InlineLinks:
    """Everything is one file."""

    inline = True

    def page(self, id: str) -> str:
        """`#image-004`."""
        return f"#{id}"

    def picture(self, view: PictureView) -> str:
        """The picture itself, in base64."""
        kind = format_of(view.file).mime
        return f"data:{kind};base64,{base64.b64encode(view.image.content(view.file)).decode()}"


def render_folder(views: ReportViews, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and text of each file of a report that will stand in `folder`, one by one: no
    more is held than the numbers of a few images."""
    write = _PageWriter(views, FolderLinks(folder))
    for name in REPORT_ASSETS:
        yield name, asset(name)
    known: dict[str, dict[str, str]] = {}
    for n, page in enumerate(views.images, 1):
        article, scripts = write.image(page)
        yield f"{page.id}.html", write.document(page.id, [article], scripts_of(page.groups))
        for name, grids in scripts.items():
            known.setdefault(name, {}).update(grids)
        if n % views.together == 0 or n == len(views.images):
            yield from ((name, script(grids)) for name, grids in known.items())
            known.clear()
    for layer in views.layers:
        article = write.layer(layer)
        yield f"{layer.id}.html", write.document(layer.id, [article], scripts_of(layer.groups))
    yield f"{RUN_PAGE}.html", write.document(RUN_PAGE, [write.run()])


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
    articles += [write.layer(layer) for layer in views.layers]
    inside = {
        name: Markup(asset(name)) for name in REPORT_ASSETS
    }  # our own files, not to be escaped
    inside["data"] = Markup(script(known))
    return write.document(RUN_PAGE, [write.run(), *articles], inside=inside)


def render_diff(content: Mapping[str, Any]) -> str:
    """The page of a comparison of two runs, readable without script and without style.

    Args:
        content: what `featviz.diff.documents.page` returns.
    """
    return _templates().get_template("diff.html").render(content)


def render_notebook(content: Mapping[str, Any]) -> str:
    """What a notebook shows of a result: a part of a page.

    Args:
        content: `figures` (address, words, (width, height)), `lines`, `table` (a `TextTable` or
            None) and `link`.
    """
    return _templates().get_template("notebook.html").render(content)


def asset(name: str) -> str:
    """The text of a file that all reports have."""
    return (files("featviz.report") / "assets" / name).read_text("utf-8")


def _templates() -> jinja2.Environment:
    """Templates that escape what they are given, and raise on what they are not given."""
    return jinja2.Environment(
        loader=jinja2.PackageLoader("featviz.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )


class _PageWriter:
    """Fills the templates of one report: all images first, whose numbers the others count."""

    def __init__(self, views: ReportViews, links: Links) -> None:
        self.views, self.links = views, links
        self.dark = DarkChannels()
        self._inputs: dict[tuple[str, bool], Markup] = {}
        runs = {False: views.run, True: views.other}
        self._options = {o: (run.record.get("options") or {}) for o, run in runs.items() if run}
        self._around = {**_around(views.images), **_around(views.layers)}
        self.templates = _templates()
        self.templates.globals |= {
            "links": links,
            "title": words.model_name(views.run),
            "labels": views.labels,
            "words": words,
            "version": __version__,
            "home": links.page(RUN_PAGE),
            "dark_of": self.dark.of,
            "dark_count": self.dark.count,
        }
        macros: Any = self.templates.get_template("picture.html").module
        self._draw = macros.picture
        self.templates.globals["picture"] = self.picture

    def document(
        self,
        id: str,
        articles: Sequence[str],
        scripts: Sequence[str] = (),
        inside: dict[str, Markup] | None = None,
    ) -> str:
        """A whole HTML document around pages, which loads scripts or has everything inside."""
        return self._fill("document", id=id, articles=articles, scripts=scripts, inside=inside)

    def picture(self, view: PictureView, page: str) -> Markup:
        """A picture on a page.

        In a report of one file a picture stands on its image's page; elsewhere the script shows it.
        """
        elsewhere = self.links.inline and view.home != page
        if view.file != INPUT_FILE:
            drawn: Markup = self._draw(view, elsewhere)
            return drawn
        key = (view.id, elsewhere)  # on every layer's page
        if key not in self._inputs:
            self._inputs[key] = self._draw(view, elsewhere)
        return self._inputs[key]

    def run(self) -> Markup:
        """The page of the run."""
        views, run = self.views, self.views.run
        pages = {page.name: page.id for page in views.layers}
        return self._fill("run", views=views, run=run, pages=pages, facts=words.run_facts(run))

    def image(self, page: ImagePage) -> tuple[Markup, dict[str, dict[str, str]]]:
        """The page of an image, and its grids for the scripts (`data.entries`)."""
        numbers = read_numbers(page)
        self.dark.add(page, numbers)
        article = self._page("image", page, facts_of=self._facts(page, numbers))
        return article, entries(page, numbers)

    def layer(self, page: LayerPage) -> Markup:
        """The page of a layer."""
        return self._page("layer", page)

    def _facts(self, page: ImagePage, numbers: Numbers) -> dict[str, words.Facts]:
        """What is said of each picture, by its id."""
        return {
            f.picture.id: words.grid_facts(
                f.row, numbers.dark[f.picture.id], self._options[f.other]
            )
            for f in figures(page.groups)
        }

    def _page(self, kind: str, page: ImagePage | LayerPage, **more: Any) -> Markup:
        around, colors = self._around[page.id], self._legend(page.groups)
        return self._fill(kind, page=page, around=around, legend=colors, **more)

    def _legend(self, groups: Sequence[Group]) -> Any:
        return legend(self.views.run, (figure.row for figure in figures(groups)))

    def _fill(self, name: str, **values: Any) -> Markup:
        """The template has escaped everything; its text must not be escaped again."""
        return Markup(self.templates.get_template(f"{name}.html").render(values))


def _around(pages: Sequence[Any]) -> dict[str, tuple[Any, Any]]:
    """The pages before and after each, None at the ends, by its id."""
    pairs = zip([None, *pages[:-1]], [*pages[1:], None], strict=True) if pages else ()
    return {page.id: pair for page, pair in zip(pages, pairs, strict=True)}
