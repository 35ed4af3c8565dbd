"""Renders HTML from dataclasses, by Jinja templates that escape all texts.

A template gets a dataclass of its own as `page`, and as `site` what all pages of the report
share."""

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
"""The files of a report: the name of each, and its content in pieces."""


@dataclass(frozen=True)
class Site:
    """What the pages of a report share."""

    links: Links
    model: str
    """The name of the model, for the head of each page."""
    home: str
    """The address of the first page."""
    assets: Sequence[str] = REPORT_ASSETS
    """The names of the files in `assets/` that all pages load."""
    asset_folder: str = ""
    """The address of the folder of these files, with a slash at the end; empty for the
    folder of the page."""
    places: str = ""
    """The script with the index of places; empty for a report without places."""
    options: Mapping[bool, Mapping[str, Any]] = field(default_factory=dict)
    """The options in run.json: by False those of this run, by True those of the run that
    it is compared with."""
    labels: Mapping[bool, str] = field(default_factory=dict)
    """The names of both runs, by the same keys; empty without a comparison."""
    anchors: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """The beginning of the ids of a tensor's channels, by the id of the layer's page and
    the stem of the tensor."""

    def color_key(self, figure: Figure) -> ColorKey:
        """The colour key of a figure, of either run."""
        return color_keys.color_key(figure.row, self.options[figure.is_other])

    def anchor(self, group: Group, channel: int | str) -> str:
        """The id of a channel on the page of its layer.

        Args:
            group: the tensor.
            channel: the number of the channel. An empty text gives the beginning of the
                ids of all channels.
        """
        return f"{self.anchors[group.page, group.stem]}c{channel}"


class NotebookFigure(NamedTuple):
    """A picture in a notebook."""

    address: str
    """A data URI; empty for a text without a picture."""
    text: str
    size: tuple[int, int]
    """The shown width and height, in CSS pixels."""


@dataclass(frozen=True)
class NotebookPage:
    """What a notebook shows of a result."""

    figures: Sequence[NotebookFigure] = ()
    table: TextTable | None = None
    lines: Sequence[str] = ()
    """Lines of text."""
    table_first: bool = False
    """Whether the table stands above the figures, not below them."""
    link: str = ""
    """The path of a page to link to; empty for none."""


@dataclass(frozen=True)
class Document:
    """A complete HTML document around an article."""

    article: Iterable[Markup]
    """The article in pieces."""
    title: str = ""
    scripts: Sequence[str] = ()
    """The names of the scripts with the grids of the page."""
    data: str = ""
    """The text of a script with grids, for a report in one file."""


def asset(name: str) -> str:
    """The text of a file in `assets/`, such as `style.css`."""
    return (files("featviz.report") / "assets" / name).read_text("utf-8")


def asset_files(site: Site) -> ReportFiles:
    """The assets of a report as files. A report in one file gets none, since its page
    contains them."""
    if not site.links.inline:
        for name in site.assets:
            yield name, [asset(name)]


@cache
def _engine() -> jinja2.Environment:
    """Jinja with featviz's templates, and the functions that templates call; made once."""
    engine = jinja2.Environment(
        loader=jinja2.PackageLoader("featviz.report"),
        # names of files, layers and classes may contain markup
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        # a misspelt field raises an error, instead of leaving an empty place on a page
        undefined=jinja2.StrictUndefined,
    )
    # Functions that write numbers and names: a template says which are shown, and Python
    # how they are written.
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
    """Fill a template, and yield its pieces. All texts in it are escaped.

    Args:
        template: the name of the template without `.html`.
        page: the dataclass of the template. If it lacks an attribute that the template
            uses, an error is raised.
    """
    # In pieces, so that a page of thousands of channels is never in memory as a whole. As
    # Markup, so that the document around an article does not escape it again.
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
    """Render a report of one page, such as that of an audit.

    Args:
        model: the name of the model, for the head of the page.
        template: the name of the article's template, without `.html`.
        title: the title of the document.
        page: the dataclass of the template.
        links: the addresses, which fit the form of the report.
        assets: the names of the files in `assets/` that the page loads.
    """
    site = Site(links, model, links.page(RUN_PAGE), assets)
    yield from asset_files(site)
    document = Document(render(template, site, page), title)
    yield f"{RUN_PAGE}.html", render("document", site, document)


def render_notebook(page: NotebookPage) -> str:
    """The HTML that a notebook shows. It needs no other file."""
    return _engine().get_template("notebook.html").render(page=page)
