"""From views to HTML, by Jinja templates that escape whatever they are given."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import jinja2
from markupsafe import Markup

from featviz.report import data, words
from featviz.report.legend import legend
from featviz.report.views import ImagePage, LayerPage, PictureView, ReportViews
from featviz.rundir import REPORT_ASSETS
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
        self._ways: dict[Path, str] = {}

    def page(self, id: str) -> str:
        """`image-004.html`."""
        return f"{id}.html"

    def picture(self, view: PictureView) -> str:
        """Relative to the folder, quoted."""
        path = view.path
        above = path.parent.parent
        if above not in self._ways:
            way = Path(os.path.relpath(above, self.folder)).as_posix()
            self._ways[above] = quote(os.fsencode(way))
        return f"{self._ways[above]}/{quote(os.fsencode('/'.join(path.parts[-2:])))}"


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
    """Yield the name and text of each file of a report that will stand in `folder`."""
    write = _PageWriter(views, FolderLinks(folder))
    known = data.entries(group for page in views.images for group in page.groups)
    for name in REPORT_ASSETS:
        yield name, asset(name)
    yield f"{RUN_PAGE}.html", write.document(RUN_PAGE, [write.run()])
    for page, article in write.pages():
        yield f"{page.id}.js", data.script(known, page.groups)
        yield f"{page.id}.html", write.document(page.id, [article])


def render_single(views: ReportViews) -> str:
    """The report as one HTML document with everything inside."""
    write = _PageWriter(views, InlineLinks())
    groups = [group for page in views.images for group in page.groups]
    articles = [write.run(), *(article for _, article in write.pages())]
    inside = {
        name: Markup(asset(name)) for name in REPORT_ASSETS
    }  # our own files, not to be escaped
    inside["data"] = Markup(data.script(data.entries(groups), groups))
    return write.document(RUN_PAGE, articles, inside)


def render_diff(content: Mapping[str, Any]) -> str:
    """The page of a comparison of two runs, readable without script and without style.

    Args:
        content: what `featviz.diff.documents.page` returns.
    """
    return _templates().get_template("diff.html").render(content)


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
    """Fills the templates of one report."""

    def __init__(self, views: ReportViews, links: Links) -> None:
        self.views, self.links = views, links
        self._pictures: dict[tuple[str, bool], Markup] = {}
        self.templates = _templates()
        self.templates.globals |= {
            "links": links,
            "title": words.model_name(views.run),
            "labels": views.labels,
            "words": words,
            "version": __version__,
            "home": links.page(RUN_PAGE),
        }
        macros: Any = self.templates.get_template("picture.html").module
        self._draw = macros.picture
        self.templates.globals["picture"] = self.picture

    def document(
        self, id: str, articles: Sequence[str], inside: dict[str, Markup] | None = None
    ) -> str:
        """A whole HTML document around pages."""
        return self._fill("document", id=id, articles=articles, inside=inside)

    def picture(self, view: PictureView, page: str) -> Markup:
        """A picture on a page.

        In a report of one file a picture stands on its image's page; elsewhere the script shows it.
        """
        elsewhere = self.links.inline and view.home != page
        key = (view.id, elsewhere)
        if key not in self._pictures:
            self._pictures[key] = self._draw(view, elsewhere)
        return self._pictures[key]

    def run(self) -> Markup:
        """The page of the run."""
        views, run = self.views, self.views.run
        pages = {page.name: page.id for page in views.layers}
        return self._fill("run", views=views, run=run, pages=pages, facts=words.run_facts(run))

    def pages(self) -> Iterator[tuple[ImagePage | LayerPage, Markup]]:
        """The pages of the images, then those of the layers."""
        for n, image in enumerate(self.views.images):
            yield image, self._page("image", image, _around(self.views.images, n))
        for n, layer in enumerate(self.views.layers):
            yield layer, self._page("layer", layer, _around(self.views.layers, n))

    def _page(self, kind: str, page: ImagePage | LayerPage, around: Any) -> Markup:
        return self._fill(kind, page=page, around=around, legend=self._legend(page))

    def _legend(self, page: ImagePage | LayerPage) -> Any:
        captures = (figure.grid.capture for figure in data.figures(page.groups))
        return legend(self.views.run, captures)

    def _fill(self, name: str, **values: Any) -> Markup:
        """The template has escaped everything; its text must not be escaped again."""
        return Markup(self.templates.get_template(f"{name}.html").render(values))


def _around(pages: Sequence[Any], n: int) -> tuple[Any, Any]:
    """The pages before and after, None at the ends."""
    return (pages[n - 1] if n else None), (pages[n + 1] if n + 1 < len(pages) else None)
