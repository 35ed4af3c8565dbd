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
"""The id of the first page of a report."""

ReportFiles = Iterator[tuple[str, Iterable[str | bytes]]]
"""The files of a report: the name of each, and its text or content in pieces."""


@dataclass(frozen=True)
class Site:
    """What the pages of a report share."""

    links: Links
    model: str
    """What the model is called, at the head of each page."""
    home: str
    """The address of the first page."""
    assets: Sequence[str] = REPORT_ASSETS
    """Files that all pages load, by name in `assets/`."""
    asset_folder: str = ""
    """The address of their folder, with a slash at the end; empty for the folder of the
    page."""
    places: str = ""
    """The script with the index of places; empty for a report without places."""
    options: Mapping[bool, Mapping[str, Any]] = field(default_factory=dict)
    """The options of this run (False), and of the one that it is compared with (True)."""
    labels: Mapping[bool, str] = field(default_factory=dict)
    """What both runs are called, likewise; empty for a run alone."""
    anchors: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """How the ids of a tensor's channels begin, by id of the layer's page and stem of the
    tensor."""

    def color_key(self, figure: Figure) -> ColorKey:
        """What the colours of a figure, of either run, mean."""
        return color_keys.color_key(figure.row, self.options[figure.is_other])

    def anchor(self, group: Group, channel: int | str) -> str:
        """The id of a channel on the page of its layer.

        Args:
            group: the tensor.
            channel: its number; the empty text for what all ids of the tensor begin
                with.
        """
        return f"{self.anchors[group.page, group.stem]}c{channel}"


class NotebookFigure(NamedTuple):
    """A picture in a notebook."""

    address: str
    """A data URI; empty where there is no picture, but the text alone."""
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
    """The names of the scripts with the grids of the page."""
    data: str = ""
    """The text of such a script, in a report of one file."""


def asset(name: str) -> str:
    """The text of a file in `assets/`, such as `style.css`."""
    return (files("featviz.report") / "assets" / name).read_text("utf-8")


def asset_files(site: Site) -> ReportFiles:
    """The assets of a report as files; none for a report in one file, whose page contains
    them."""
    if not site.links.inline:
        for name in site.assets:
            yield name, [asset(name)]


@cache
def _engine() -> jinja2.Environment:
    """Jinja with featviz's templates, and the functions that they call; made once."""
    engine = jinja2.Environment(
        loader=jinja2.PackageLoader("featviz.report"),
        # names of files, layers and classes may hold any text
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
    """Fill a template, piece by piece; all texts in it are escaped.

    Args:
        template: its name without `.html`.
        page: the dataclass of that template; an attribute that it lacks is an error.
    """
    # Piece by piece, so that a page of thousands of channels is never in memory as a
    # whole. As Markup, so that a document around it does not escape it again.
    values = {"site": site, "links": site.links, "page": page}
    return map(Markup, _engine().get_template(f"{template}.html").generate(values))


def render_alone(
    model: str,
    template: str,
    title: str,
    page: object,
    links: Links,
    assets: Sequence[str] = REPORT_ASSETS,
) -> ReportFiles:
    """The files of a report of one page, such as that of an audit.

    Args:
        model: what the model is called, at the head of the page.
        template: of the article, without `.html`.
        title: of the document.
        page: the dataclass of the template.
        links: the form in which the report is written.
        assets: names of the files that the page loads.
    """
    site = Site(links, model, links.page(RUN_PAGE), assets)
    yield from asset_files(site)
    document = Document(render(template, site, page), title)
    yield f"{RUN_PAGE}.html", render("document", site, document)


def render_notebook(page: NotebookPage) -> str:
    """The HTML that a notebook shows, which needs no other file."""
    return _engine().get_template("notebook.html").render(page=page)
