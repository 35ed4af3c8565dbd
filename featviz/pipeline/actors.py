"""Actors of Ray hold the model, and draw the images of a run that this process hands them."""

from __future__ import annotations

import collections
import json
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from time import monotonic
from typing import Any

from featviz.errors import FeatvizError, UsageError
from featviz.hooks.eval_mode import in_eval_mode
from featviz.models.load import LoadedModel, ModelOptions
from featviz.pipeline import Errand, shared_cores
from featviz.pipeline.dealing import hands
from featviz.pipeline.prepare import prepare
from featviz.pipeline.resume import RunDocument, run_record
from featviz.pipeline.session import Session
from featviz.records import ImageResult
from featviz.rundir.unlike import differences
from featviz.rundir.write import RunDirectory

log = logging.getLogger(__name__)

MOST_DEATHS = 2
"""Actors that die over an image before it counts as failed; and for each actor that was asked for,
those that may die for no image's sake."""
PATIENCE = 10.0
"""Seconds without any actor that has begun after which it is said what they may wait for."""
_POLL = 0.2
"""Seconds after which a signal is heeded."""

Lend = Callable[[], AbstractContextManager[ModelOptions | LoadedModel]]
"""Gives the model for as long as a block lasts."""


@dataclass(frozen=True)
class Crew:
    """How many actors there are, and what each of them takes of the cluster."""

    lend: Lend
    actors: int = 2
    cpus: float = 1
    gpus: float = 0

    def check(self) -> None:
        """Refuse a bad number, or a Python without Ray.

        Raises:
            UsageError: names it.
        """
        if self.actors < 1:
            raise UsageError(f"--actors {self.actors} is below 1", "give a whole number")
        for name, value in (("cpus", self.cpus), ("gpus", self.gpus)):
            if not value >= 0:
                raise UsageError(f"--{name} {value:g} is below 0", "give a number")
        try:
            import ray  # noqa: F401 - whether it is there
        except ImportError:
            raise UsageError("ray is not installed", "pip install 'featviz[ray]'") from None

    def draw(
        self, errand: Errand, report: Callable[[ImageResult], None], stopped: Callable[[], bool]
    ) -> None:
        """Let the actors draw all images; results are reported in the order of the images.

        Raises:
            FeatvizError: what an actor raised, or the actors die before they have drawn anything.
        """
        import ray

        ray.init(ignore_reinit_error=True, log_to_driver=False)
        _Handing(self, errand, report, stopped).go_on()


class Painter:
    """What an actor does: it loads the model once, and draws the images that it is given."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._results: list[ImageResult] = []
        self._session: Session | None = None

    def begin(self, lend: Lend, errand: Errand) -> None:
        """Load the model.

        Raises:
            FeatvizError: it cannot be loaded as in the first process.
        """
        self._session = self._begun(lend, errand)

    def draw(self, numbers: Sequence[int]) -> list[ImageResult]:
        """Draw these images of the run, and return what became of each.

        Raises:
            FeatvizError: they cannot be written.
        """
        session = self._session
        assert session is not None, "an actor begins before it draws"
        samples = [session.prepared.samples[number] for number in numbers]
        for place, sample in enumerate(samples, 1):
            if not (session.prepared.options.resume and session.keep(sample)):
                following = samples[place : place + session.readers]
                session.visit(sample, self._background, following)
        session.settle()
        done, self._results[:] = list(self._results), []
        return done

    def _begun(self, lend: Lend, errand: Errand) -> Session:
        os.chdir(errand.folder)
        model = self._stack.enter_context(lend())
        prepared = prepare(model, errand.images, errand.options)
        record = run_record(prepared)
        _check_same(errand.record, record)
        fingerprint = RunDocument(record, prepared.samples).fingerprint
        folder = RunDirectory(errand.options.out, errand.options.durable)
        session = Session(prepared, folder, fingerprint, self._results.append)
        gradients = errand.options.passes.gradients
        self._stack.enter_context(in_eval_mode(prepared.model.module, gradients))
        self._background = self._stack.enter_context(shared_cores(prepared))
        self._stack.enter_context(session.ahead)
        return session


def _check_same(wanted: Mapping[str, Any], record: Mapping[str, Any]) -> None:
    there, here = (json.loads(json.dumps(r, default=str)) for r in (wanted, record))
    if different := differences(there, here):
        raise FeatvizError(
            f"an actor would draw something else than this process: {different[0]}",
            "all machines need the same versions and files, and the same kind of device",
        )


class _Handing:
    """Images on their way to actors and back. Only actors that have begun are given any: Ray starts
    no more of them than there is room for, and the others may wait for ever."""

    def __init__(
        self,
        crew: Crew,
        errand: Errand,
        report: Callable[[ImageResult], None],
        stopped: Callable[[], bool],
    ) -> None:
        import ray

        self.crew, self.errand, self.report, self.stopped = crew, errand, report, stopped
        self._known = ray.put(crew.lend), ray.put(errand)
        self._hands = deque(map(list, hands(len(errand.samples), crew.actors)))
        self._busy: dict[Any, tuple[Any, list[int]]] = {}
        """The actor of each answer that is awaited, and its images: none while it begins."""
        self._idle: list[Any] = []
        self._deaths: collections.Counter[int] = collections.Counter()
        """How many actors have died over each image."""
        self._finished: dict[int, ImageResult] = {}
        """Results that wait for those of images before them."""
        self._next = self._dead = 0
        self._drawn = False
        self._due: float | None = monotonic() + PATIENCE
        """When it is said that no actor has begun; None if one has, or if it was said."""

    def go_on(self) -> None:
        """Hand out images until all are done, or until it is stopped."""
        import ray

        for _ in range(min(self.crew.actors, len(self._hands))):
            self._begin()
        try:
            while self._drawing or (self._hands and not self.stopped()):
                while self._idle and self._hands and not self.stopped():
                    self._give(self._idle.pop(), self._hands.popleft())
                done, _ = ray.wait(list(self._busy), timeout=_POLL)
                for answer in done:
                    self._take(answer)
                self._warn()
        finally:
            for actor in [*self._idle, *(actor for actor, _ in self._busy.values())]:
                ray.kill(actor)
        for number in sorted(self._finished):
            self.report(self._finished[number])

    @property
    def _drawing(self) -> bool:
        return any(hand for _, hand in self._busy.values())

    def _begin(self) -> None:
        import ray

        each = ray.remote(num_cpus=self.crew.cpus, num_gpus=self.crew.gpus)
        actor: Any = each(Painter).remote()
        self._busy[actor.begin.remote(*self._known)] = (actor, [])

    def _give(self, actor: Any, hand: list[int]) -> None:
        self._busy[actor.draw.remote(hand)] = (actor, hand)

    def _take(self, answer: Any) -> None:
        """Note what an actor has done; where it has died, another one begins."""
        import ray

        actor, hand = self._busy.pop(answer)
        try:
            results = ray.get(answer)
        except ray.exceptions.RayActorError:
            self._lose(hand)
            self._begin()
            return
        except ray.exceptions.RayTaskError as error:
            ray.kill(actor)
            raise (error.cause if isinstance(error.cause, FeatvizError) else error) from None
        self._idle.append(actor)
        self._due = None
        if hand:
            self._drawn, self._dead = True, 0
            self._done(zip(hand, results, strict=True))

    def _lose(self, hand: list[int]) -> None:
        """Have the images of an actor that died done again, one by one: so that one which kills
        every actor is found."""
        self._deaths.update(hand)
        names = [self.errand.samples[number].name for number in hand]
        RunDirectory(self.errand.options.out).clear_images(names)
        self._dead += not (hand and self._drawn)
        if self._dead > MOST_DEATHS * self.crew.actors:
            raise FeatvizError(
                f"{self._dead} actors of Ray have died without drawing an image",
                "see Ray's logs",
            )
        given_up = [number for number in hand if self._deaths[number] >= MOST_DEATHS]
        again = [number for number in hand if self._deaths[number] < MOST_DEATHS]
        self._hands.extendleft([number] for number in reversed(again))
        self._done((number, self._failure(number)) for number in given_up)

    def _warn(self) -> None:
        """Say once that no actor begins, and how much room there is for one."""
        import ray

        if self._due is None or monotonic() < self._due:
            return
        self._due = None
        total: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        log.warning(
            "no actor has begun after %g s: each takes %g CPUs and %g GPUs; %s are free",
            PATIENCE,
            self.crew.cpus,
            self.crew.gpus,
            " and ".join(f"{free.get(k, 0):g} of {total.get(k, 0):g} {k}s" for k in ("CPU", "GPU")),
        )

    def _failure(self, number: int) -> ImageResult:
        name = self.errand.samples[number].name
        folder = RunDirectory(self.errand.options.out).image(name).name
        words = f"{MOST_DEATHS} actors of Ray have died over it"
        return ImageResult(name, folder, error=words, hint="is there enough memory?")

    def _done(self, results: Iterator[tuple[int, ImageResult]]) -> None:
        self._finished |= dict(results)
        while self._next in self._finished:
            self.report(self._finished.pop(self._next))
            self._next += 1
