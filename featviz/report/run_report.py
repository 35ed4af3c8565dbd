"""The report of a run: a page for the run, for each image, and for each layer."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import quote

import numpy as np
from markupsafe import Markup

from featviz.diff.comparison import Comparison
from featviz.files import real
from featviz.records import Floats
from featviz.report.audits import AuditView
from featviz.report.color_keys import ColorKey, LegendEntry, legend, strip_key
from featviz.report.companions import Companions
from featviz.report.comparison_page import (
    COMPARISON_PAGE,
    ComparisonPage,
    comparison_page,
    data_address,
)
from featviz.report.descriptions import model_title
from featviz.report.engine import (
    RUN_PAGE,
    Document,
    ReportFiles,
    Site,
    asset_files,
    render,
)
from featviz.report.extras import Extra
from featviz.report.figures import (
    IMAGES_PER_SCRIPT,
    Group,
    MissingLayer,
    ReportPage,
    ReportPages,
    figures_of,
)
from featviz.report.grids import figure_grid, script
from featviz.report.links import Links
from featviz.report.places import INDEX_SCRIPT, PLACES_ASSET, PlaceScripts
from featviz.report.stages import NetworkStage, network
from featviz.report.totals import (
    ChannelFindings,
    ChannelRow,
    ChannelTotals,
    channel_rows,
    dead_summary,
)
from featviz.rundir import REPORT_ASSETS
from featviz.rundir.read import ReadRun

_COMPARISON_GRIDS = "grids-comparison.js"
"""The script with the grids of the page of a comparison."""


class LayerFinding(NamedTuple):
    """One finding of a tensor, over all images."""

    group: Group
    name: str
    """The name of the finding: `all zero`."""
    channels: Sequence[int]
    is_dead: bool
    """Whether the channels are dead: the tensor is an activation, and they are all zero."""


class TensorRow(NamedTuple):
    """A tensor in the table of all layers."""

    group: Group
    totals: ChannelTotals


@dataclass(frozen=True)
class RunComparison:
    """The comparison of a run with an earlier run."""

    other: ReadRun
    """The earlier run."""
    result: Comparison | None = None
    """The differences; None if the runs cannot be compared."""
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    """The difference maps on the page of the comparison: the bytes of PNG, by file."""
    reason: str = ""
    """Why the runs cannot be compared; empty if they can."""


@dataclass(frozen=True)
class RunPage:
    """What the template of a run shows."""

    run: ReadRun
    pages: ReportPages
    first: ReportPage | None
    """The page of the first image, whose maps are shown; None in a run without images."""
    stages: Sequence[NetworkStage]
    strip_keys: Sequence[ColorKey]
    """What the colours of the maps in `stages` mean."""
    dead: str
    """How many channels are dead, in words."""
    findings: Sequence[LayerFinding]
    rows: Sequence[TensorRow]
    """The tensors of all layers, in the order in which they ran."""
    missing_layers: Mapping[MissingLayer, int]
    """For each layer without a picture, and each reason, the number of images."""
    comparison: RunComparison | None
    audit: AuditView | None
    max_maps: int | None
    """The most maps that a layer shows, so that a report in one file stays small; None if
    all maps are shown."""

    @property
    def is_dead_by_audit(self) -> bool:
        """Whether `dead` comes from an audit."""
        return self.audit is not None and self.audit.dead_summary is not None

    @property
    def failed(self) -> list[tuple[str, str]]:
        """The names of images that failed, are incomplete or damaged, each with the
        reason."""
        failed = list(self.run.failures.items())
        for name, reason in self.run.left_out.items():
            failed.append((name, f"incomplete: {reason}"))
        return failed

    @property
    def picture_count(self) -> int:
        """How many pictures of tensors the run has."""
        return sum(len(image.captures) for image in self.run.images.values())

    def page_of(self, layer: str) -> str | None:
        """The id of a layer's page; None for a layer without one."""
        return next((page.id for page in self.pages.layers if page.name == layer), None)


class Neighbours(NamedTuple):
    """The pages before and after a page; None at the first and the last page."""

    before: ReportPage | None
    after: ReportPage | None


@dataclass(frozen=True)
class ImagePage:
    """What the template of an image shows."""

    image: ReportPage
    neighbours: Neighbours
    legend: Sequence[LegendEntry]
    stages: Sequence[NetworkStage]
    strip_keys: Sequence[ColorKey]
    all_zero: Mapping[str, Sequence[int]]
    """The channels that are all zero in this image, by the id of the picture."""


@dataclass(frozen=True)
class TensorView:
    """A tensor on the page of its layer."""

    group: Group
    totals: ChannelTotals
    rows: Iterable[ChannelRow]
    extras: Sequence[Extra]
    audited: ChannelFindings
    """The findings of an audit for the call that gave the tensor; empty without one."""


@dataclass(frozen=True)
class LayerPage:
    """What the template of a layer shows."""

    layer: ReportPage
    neighbours: Neighbours
    legend: Sequence[LegendEntry]
    tensors: Sequence[TensorView]
    audit: AuditView | None
    shown_channels: int = 24
    """How many channels of a layer the page shows while the layer is folded."""


class _RenderedImage(NamedTuple):
    """The page of an image, and its data for scripts."""

    article: Markup
    grids: Mapping[str, Mapping[str, str]]
    """The grids as JSON: by the name of the script, then by the id of the picture."""
    stats: Mapping[str, Floats]
    """The statistics of the image in this run, from `ReadImage.stats`."""


@dataclass
class RunReport:
    """Renders the pages of a run. The pages of images must come first: they fill the
    totals, which the pages of layers and of the run show."""

    run: ReadRun
    pages: ReportPages
    companions: Companions
    comparison: RunComparison | None = None
    max_maps: int | None = None
    """The most maps that a layer shows; None if all maps are shown."""
    _totals: dict[tuple[str, str], ChannelTotals] = field(default_factory=dict)
    """The totals of each tensor, by the id of the layer's page and the tensor's stem; see
    `_totals_of`."""
    _first_stats: Mapping[str, Floats] = field(default_factory=dict)
    """The statistics of the first image, [channels, 6] by id of the picture, for the page
    of the run; empty until an image is rendered."""

    def render(self, links: Links) -> ReportFiles:
        """Render the report. This may be called only once, since each rendered image is
        added to the totals. Only the numbers of a few images are in memory at a time.

        Args:
            links: the addresses of pages and pictures, for a folder, a zip file or one
                file.

        Yields:
            The name of each file, and its content in pieces.
        """
        site = self._site(links)
        yield from asset_files(site)
        if links.inline:
            yield f"{RUN_PAGE}.html", self._single_file(site)
            return
        place_scripts = PlaceScripts(self.pages, site)
        yield from self._image_files(site, place_scripts)
        for page in self.pages.layers:
            yield (
                f"{page.id}.html",
                _document(site, page, self._render_layer(page, site)),
            )
        if self.comparison is not None and self.comparison.result is not None:
            yield from self._comparison_files(site, self.comparison)
        yield (
            f"{RUN_PAGE}.html",
            render("document", site, Document(self._render_run_page(site))),
        )
        if site.places:
            yield from place_scripts.index()

    def _image_files(self, site: Site, place_scripts: PlaceScripts) -> ReportFiles:
        """Render the pages of all images, and the scripts with their grids and places."""
        grids: dict[str, dict[str, str]] = {}
        for number, page in enumerate(self.pages.images, 1):
            image = self._render_image(page, site)
            # a script has the grids of several images, and is written after the last one
            for name, entries in image.grids.items():
                grids.setdefault(name, {}).update(entries)
            yield f"{page.id}.html", _document(site, page, [image.article])
            yield from place_scripts.add(page, image.stats)
            if number % IMAGES_PER_SCRIPT == 0 or number == len(self.pages.images):
                for name, entries in grids.items():
                    yield name, [script(entries)]
                grids.clear()
                # templates leave reference cycles, which keep findings in memory
                gc.collect()

    def _single_file(self, site: Site) -> Iterator[Markup]:
        """Render all pages into one document. The page of the run stands first in it, but
        is rendered last."""
        grids: dict[str, str] = {}
        articles = []
        for page in self.pages.images:
            image = self._render_image(page, site)
            articles.append(image.article)
            for entries in image.grids.values():
                grids |= entries
        layers: list[Markup] = []
        for page in self.pages.layers:
            layers.extend(self._render_layer(page, site))
        compared = []
        if self.comparison is not None and self.comparison.result is not None:
            pictures = self.comparison.pictures
            content = self._comparison_page(
                self.comparison, lambda file: data_address(pictures[file])
            )
            compared = list(render("compare", site, content))
            grids |= content.grids
        pieces = [*self._render_run_page(site), *articles, *layers, *compared]
        return render("document", site, Document(pieces, data=script(grids)))

    def _site(self, links: Links) -> Site:
        """What all pages of the report share."""
        # by False for this run, by True for the run that it is compared with
        options = {False: self.run.record.get("options") or {}}
        labels = {}
        if self.comparison is not None:
            compared_run = self.comparison.other
            options[True] = compared_run.record.get("options") or {}
            labels = {
                False: real(self.run.root).name,
                True: real(compared_run.root).name,
            }
            # both names are equal for `monday/out` and `tuesday/out`
            if labels[False] == labels[True]:
                labels = {
                    False: f"{labels[False]} (this)",
                    True: f"{labels[True]} (other)",
                }
        # The id of channel 17 is `c17` in the first tensor of a layer, and `t1-c17` in the
        # second. So links to the first tensor stay the same if others are captured, too.
        anchors = {}
        for layer in self.pages.layers:
            for number, group in enumerate(layer.groups):
                anchors[layer.id, group.stem] = f"t{number}-" if number else ""
        # places would make a report in one file too large
        has_places = bool(self.pages.images) and not links.inline
        return Site(
            links=links,
            model=model_title(self.run.record.get("model") or {}),
            home=links.page(RUN_PAGE),
            assets=(*REPORT_ASSETS, PLACES_ASSET) if has_places else REPORT_ASSETS,
            places=INDEX_SCRIPT if has_places else "",
            options=options,
            labels=labels,
            anchors=anchors,
        )

    def _totals_of(self, group: Group) -> ChannelTotals:
        """The totals of a tensor over the images that were rendered so far. All groups of
        the tensor share one object."""
        return self._totals.setdefault((group.page, group.stem), ChannelTotals())

    # The page of the run

    def _render_run_page(self, site: Site) -> Iterator[Markup]:
        """Render the page of the run. All images must have been rendered before."""
        images, layers = self.pages
        first = images[0] if images else None
        stages = []
        if first is not None:
            totals = [self._totals_of(group) for group in first.groups]
            stages = network(first, self._first_stats, totals)
        # an audit usually has seen more images than the run, so its count is preferred
        groups = self.pages.tensors
        audit = self.companions.audit
        dead = None if audit is None else audit.dead_summary
        page = RunPage(
            run=self.run,
            pages=self.pages,
            first=first,
            stages=stages,
            strip_keys=_strip_keys(stages, site),
            dead=dead or dead_summary(layers, self._totals_of),
            findings=self._findings(groups),
            rows=[TensorRow(group, self._totals_of(group)) for group in groups],
            missing_layers=_missing_layers(images),
            comparison=self.comparison,
            audit=audit,
            max_maps=self.max_maps,
        )
        return render("run", site, page)

    def _findings(self, groups: Iterable[Group]) -> list[LayerFinding]:
        """All findings of some tensors, in the order of the tensors."""
        findings = []
        for group in groups:
            totals = self._totals_of(group)
            for name, channels in totals.findings.items():
                is_dead = name == "all zero" and totals.is_activation
                findings.append(LayerFinding(group, name, channels, is_dead))
        return findings

    # The page of the comparison with another run

    def _comparison_page(
        self, comparison: RunComparison, address: Callable[[str], str]
    ) -> ComparisonPage:
        """The content of the page.

        Args:
            comparison: a comparison with a result.
            address: returns the address of a difference map, for its file.
        """
        assert comparison.result is not None
        inputs = {page.name: page.inputs[False] for page in self.pages.images}
        return comparison_page(
            comparison.result, comparison.other, self.run, inputs, address
        )

    def _comparison_files(self, site: Site, comparison: RunComparison) -> ReportFiles:
        """Render the page, the script with its grids, and its pictures, which have a
        folder.

        Args:
            comparison: a comparison with a result.
        """

        def path_of(file: str) -> str:
            """The path of a difference map in the report."""
            return f"{COMPARISON_PAGE}/{file}"

        content = self._comparison_page(
            comparison, lambda file: quote(os.fsencode(path_of(file)))
        )
        article = render("compare", site, content)
        document = Document(article, "Comparison", [_COMPARISON_GRIDS])
        yield f"{COMPARISON_PAGE}.html", render("document", site, document)
        yield _COMPARISON_GRIDS, [script(content.grids)]
        for file, picture in comparison.pictures.items():
            yield path_of(file), [picture]

    # The pages of images and of layers

    def _render_image(self, page: ReportPage, site: Site) -> _RenderedImage:
        """Render the page of an image, and add the image's statistics to the totals."""
        # The keys are those of `page.inputs`: False for the statistics in this run, True
        # for those in the run that it is compared with.
        stats_of_run = {}
        for is_other, view in page.inputs.items():
            stats_of_run[is_other] = view.image.stats()
        stats = {}
        grids: dict[str, dict[str, str]] = {}
        for group in page.groups:
            for figure in group.figures:
                id = figure.picture.id
                stats_key = figure.row.capture_key.stats_key
                stats[id] = stats_of_run[figure.is_other][stats_key]
                is_grey = site.color_key(figure).is_grey
                grid = figure_grid(figure, stats[id], is_grey)
                grids.setdefault(figure.script, {})[id] = grid
            # the first figure of a group is that of this run
            figure = group.figures[0]
            table = stats[figure.picture.id]
            self._totals_of(group).add(figure.row, table, group.zeroed)
        # the page of the run, which is rendered last, shows the first image
        if not self._first_stats:
            self._first_stats = stats
        stages = network(page, stats)
        all_zero = {}
        for id, table in stats.items():
            *_, zeros, nonfinite = table.T  # as in STAT_COLUMNS
            all_zero[id] = np.flatnonzero((zeros == 1) & (nonfinite == 0)).tolist()
        content = ImagePage(
            image=page,
            neighbours=_neighbours(page, self.pages.images),
            legend=_legend(page, site),
            stages=stages,
            strip_keys=_strip_keys(stages, site),
            all_zero=all_zero,
        )
        article = Markup("".join(render("image", site, content)))
        return _RenderedImage(article, grids, stats_of_run[False])

    def _render_layer(self, page: ReportPage, site: Site) -> Iterator[Markup]:
        """Render the page of a layer. All images must have been rendered before."""
        audit = self.companions.audit
        tensors = []
        for group in page.groups:
            totals = self._totals_of(group)
            audited = {}
            if audit is not None:
                audited = audit.findings_of(page.name, group.call)
            rows = channel_rows(totals, audited)
            extras = self.companions.extras[group.id]
            tensors.append(TensorView(group, totals, rows, extras, audited))
        content = LayerPage(
            layer=page,
            neighbours=_neighbours(page, self.pages.layers),
            legend=_legend(page, site),
            tensors=tensors,
            audit=audit,
        )
        return render("layer", site, content)


def _document(
    site: Site, page: ReportPage, article: Iterable[Markup]
) -> Iterator[Markup]:
    """Render the document of an image's or a layer's page. It loads the scripts with the
    grids of its figures."""
    scripts = dict.fromkeys(figure.script for figure in figures_of(page.groups))
    return render("document", site, Document(article, page.name, list(scripts)))


def _neighbours(page: ReportPage, pages: Sequence[ReportPage]) -> Neighbours:
    """The neighbours of a page in `pages`."""
    number = pages.index(page)
    before = pages[number - 1] if number else None
    after = pages[number + 1] if number + 1 < len(pages) else None
    return Neighbours(before, after)


def _legend(page: ReportPage, site: Site) -> list[LegendEntry]:
    """What single colours in the figures of a page mean."""
    rows = [figure.row for figure in figures_of(page.groups)]
    return legend(site.options[False], rows)


def _strip_keys(stages: Sequence[NetworkStage], site: Site) -> list[ColorKey]:
    """The colour keys of the strips of maps in some stages, each key once."""
    keys: dict[ColorKey, None] = {}
    for stage in stages:
        for step in stage.steps:
            if step.tiles:
                keys[strip_key(step.figure.row, site.options[False])] = None
    return [key for key in keys if key.colors]


def _missing_layers(images: Sequence[ReportPage]) -> Counter[MissingLayer]:
    """The number of images without a picture of a layer, for each layer and reason."""
    counts: Counter[MissingLayer] = Counter()
    for image in images:
        # An image has an entry for each skipped call of a layer; equal ones count once.
        for layer in dict.fromkeys(image.missing_layers):
            counts[layer] += 1
    return counts
