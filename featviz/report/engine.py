"""From dataclasses to HTML, by Jinja templates that escape whatever they show.

Each template has a dataclass, its `page`; all have the `site`, which holds what the
pages of a report share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from featviz.layout.layouts import LAYOUTS
from featviz.report import color_keys, descriptions, totals
from featviz.report.color_keys import ColorKey
from featviz.report.figures import Figure, Group
from featviz.report.links import Links
from featviz.rundir import REPORT_ASSETS
from featviz.text import TextTable, by, counted
from featviz.version import __version__

RUN_PAGE = "index"

ReportFiles = Iterator[tuple[str, Iterable[str | bytes]]]
"""The name of each file of a report, and its text or content in pieces."""


@dataclass(frozen=True)
class Site:
    """What the pages of a report share."""

    links: Links
    model: str
    home: str
    """The address of the first page."""
    assets: Sequence[str] = REPORT_ASSETS
    """Files that all pages load."""
    asset_folder: str = ""
    """Where these are, with a slash at the end; empty for beside the page."""
    places: str = ""
    """The script that knows which places there are to ask for; empty for none."""
    options: Mapping[bool, Mapping[str, Any]] = field(default_factory=dict)
    """Options of this run (False), and of the one that it is compared with (True)."""
    labels: Mapping[bool, str] = field(default_factory=dict)
    """Names of both runs where there are two; empty for a run alone."""
    anchors: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """How the ids of a tensor's channels begin, by id of the layer's page and stem."""

    def color_key(self, figure: Figure) -> ColorKey:
        """What the colours of a figure mean."""
        return color_keys.color_key(figure.row, self.options[figure.other])

    def anchor(self, group: Group, channel: int | str) -> str:
        """The id of a channel on the page of its layer; how all these begin for an
        empty one.

        Args:
            channel: its number, or the empty text.
        """
        return f"{self.anchors[group.page, group.stem]}c{channel}"


class NotebookFigure(NamedTuple):
    """A picture in a notebook."""

    address: str
    """A data URI; empty for a text alone."""
    text: str
    size: tuple[int, int]
    """Width and height as it is shown, in CSS pixels."""


@dataclass(frozen=True)
class NotebookPage:
    """What a notebook shows of a result."""

    figures: Sequence[NotebookFigure] = ()
    table: TextTable | None = None
    lines: Sequence[str] = ()
    table_first: bool = False
    """Whether the table stands above the figures."""
    link: str = ""
    """The path of a page; empty for none."""


@dataclass(frozen=True)
class Document:
    """A whole HTML document around an article."""

    article: Iterable[Markup]
    title: str = ""
    scripts: Sequence[str] = ()
    """Scripts with the grids of the page, by name."""
    data: str = ""
    """The same of a report of one file, as text."""


def asset(name: str) -> str:
    """The text of a file that all reports have, as `style.css`."""
    return (files("featviz.report") / "assets" / name).read_text("utf-8")


def asset_files(site: Site) -> ReportFiles:
    """The assets as files; none for a report of one file, which has them inside."""
    if not site.links.inline:
        for name in site.assets:
            yield name, [asset(name)]


@cache
def _engine() -> jinja2.Environment:
    """Jinja with featviz's templates, and the functions that they call."""
    engine = jinja2.Environment(
        loader=jinja2.PackageLoader("featviz.report"),
        # names of files, layers and classes are anybody's text
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # a misspelt field is an error, not an empty place on a page
        undefined=jinja2.StrictUndefined,
    )
    # Functions that put numbers and names into words: templates decide what is said, and
    # Python how it is written.
    engine.globals |= {
        "asset": lambda name: Markup(asset(name)),
        "badges": totals.badges,
        "by": by,
        "channel_list": descriptions.channel_list,
        "counted": counted,
        "dotted": descriptions.dotted,
        "explanations": totals.EXPLANATIONS,
        "interventions": descriptions.interventions,
        "layouts": LAYOUTS,
        "map_count": descriptions.map_count,
        "number": descriptions.number,
        "percent": descriptions.percent,
        "run_facts": descriptions.run_facts,
        "setting": descriptions.setting,
        "shared_tiles": descriptions.shared_tiles,
        "slice_list": descriptions.slice_list,
        "span": descriptions.span,
        "tensor_role": descriptions.tensor_role,
        "version": __version__,
    }
    return engine


def render(template: str, site: Site, page: object) -> Iterator[Markup]:
    """A filled template, piece by piece; it raises on what it lacks, and has escaped
    everything.

    Args:
        template: its name without `.html`.
        page: the dataclass of that template.
    """
    # Piece by piece, so that a page of thousands of channels is never in memory as a
    # whole. Each piece is escaped already, and must not be so again inside a document.
    values = {"site": site, "links": site.links, "page": page}
    return map(Markup, _engine().get_template(f"{template}.html").generate(values))


def render_document(site: Site, document: Document) -> Iterator[Markup]:
    """A whole HTML document, piece by piece."""
    return render("document", site, document)


def render_alone(
    model: str,
    template: str,
    title: str,
    page: object,
    links: Links,
    assets: Sequence[str] = REPORT_ASSETS,
) -> ReportFiles:
    """The files of a report that is one page, as of an audit.

    Args:
        model: what the model is called, at the head of the page.
        template: of the article.
        title: of the document.
        page: the dataclass of the template.
        links: of the form in which the report is written.
        assets: names of the files that the page loads.
    """
    site = Site(links, model, links.page(RUN_PAGE), assets)
    yield from asset_files(site)
    document = Document(render(template, site, page), title)
    yield f"{RUN_PAGE}.html", render_document(site, document)


def render_notebook(page: NotebookPage) -> str:
    """What a notebook shows, as HTML that stands by itself."""
    return _engine().get_template("notebook.html").render(page=page)
