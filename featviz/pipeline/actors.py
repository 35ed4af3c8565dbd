"""Actors of Ray hold the model, and draw the images of a run that this process hands them."""

from __future__ import annotations

import collections
import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
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

MOST_DEATHS = 2
"""Actors that die over an image before it counts as failed; and for each actor that was asked for,
those that may die before any image is drawn."""
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

    def draw(self, lend: Lend, errand: Errand, numbers: Sequence[int]) -> list[ImageResult]:
        """Draw these images of the run, and return what became of each.

        Raises:
            FeatvizError: the model cannot be loaded as in the first process, or the images not be
                written.
        """
        session = self._session = self._session or self._begun(lend, errand)
        samples = [session.prepared.samples[number] for number in numbers]
        for place, sample in enumerate(samples, 1):
            if not (errand.options.resume and session.keep(sample)):
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
    """Images on their way to actors and back."""

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
        self._deaths: collections.Counter[int] = collections.Counter()
        """How many actors have died over each image."""
        self._finished: dict[int, ImageResult] = {}
        """Results that wait for those of images before them."""
        self._next = self._dead = 0
        self._drawn = False

    def go_on(self) -> None:
        """Hand out images until all are done, or until it is stopped."""
        import ray

        idle = [self._actor() for _ in range(min(self.crew.actors, len(self._hands)))]
        try:
            while self._busy or (self._hands and not self.stopped()):
                while idle and self._hands and not self.stopped():
                    self._give(idle.pop(), self._hands.popleft())
                done, _ = ray.wait(list(self._busy), timeout=_POLL)
                idle += [self._take(answer) for answer in done]
        finally:
            for actor in [*idle, *(actor for actor, _ in self._busy.values())]:
                ray.kill(actor)
        for number in sorted(self._finished):
            self.report(self._finished[number])

    def _actor(self) -> Any:
        import ray

        return ray.remote(num_cpus=self.crew.cpus, num_gpus=self.crew.gpus)(Painter).remote()

    def _give(self, actor: Any, hand: list[int]) -> None:
        self._busy[actor.draw.remote(*self._known, hand)] = (actor, hand)

    def _take(self, answer: Any) -> Any:
        """Note what an actor has done; return it, or where it has died another one."""
        import ray

        actor, hand = self._busy.pop(answer)
        try:
            results = ray.get(answer)
        except ray.exceptions.RayActorError:
            self._lose(hand)
            return self._actor()
        except ray.exceptions.RayTaskError as error:
            ray.kill(actor)
            raise (error.cause if isinstance(error.cause, FeatvizError) else error) from None
        self._drawn = True
        self._done(zip(hand, results, strict=True))
        return actor

    def _lose(self, hand: list[int]) -> None:
        """Have the images of an actor that died done again, one by one: so that one which kills
        every actor is found."""
        self._deaths.update(hand)
        names = [self.errand.samples[number].name for number in hand]
        RunDirectory(self.errand.options.out).clear_images(names)
        self._dead += 1
        if not self._drawn and self._dead > MOST_DEATHS * self.crew.actors:
            raise FeatvizError("the actors die before they have drawn an image", "see Ray's logs")
        given_up = [number for number in hand if self._deaths[number] >= MOST_DEATHS]
        again = [number for number in hand if self._deaths[number] < MOST_DEATHS]
        self._hands.extendleft([number] for number in reversed(again))
        self._done((number, self._failure(number)) for number in given_up)

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
