"""Handlers by event type: the handlers of a type are the stages of its messages.

To the engine the dispatcher is one stage. It knows which of a message's handlers is next, so that a retry resumes
there, and collects what they return.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from keylane.engine.results import ResultMaker
from keylane.engine.stages import Step
from keylane.errors import Poison
from keylane.message import EVENT_TYPE
from keylane.outcome import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from keylane.engine.delivery import Routed
    from keylane.engine.pauses import Pauses
    from keylane.engine.results import ResultRecord
    from keylane.message import Message
    from keylane.spec import AppSpec

DISPATCH = "(dispatch)"
"""Where a message failed that no handler was found for."""


class Dispatcher:
    """Of one engine; used on its loop only."""

    def __init__(self, app: AppSpec, steps: Sequence[Step], pauses: Pauses) -> None:
        self._app = app
        self._pauses = pauses
        self._maker = ResultMaker(app)
        self._routes: dict[str, tuple[Step, ...]] = {}
        self._otherwise: tuple[Step, ...] | None = None
        for stage, step in zip(app.stages, steps, strict=True):
            if stage.types == ():
                self._otherwise = (step,)
            for name in stage.types or ():
                self._routes[name] = (*self._routes.get(name, ()), step)
        self._type_of = _reader(app)
        self.step = Step(
            name=DISPATCH,
            call=self._call,
            retry=app.retry,
            rules=() if app.classify is None else (app.classify,),
            gate=None,
            threads=set(),
        )

    def step_of(self, delivery: Routed) -> Step:
        """The handler that the message is at."""
        if not delivery.route:
            return self.step
        return delivery.route[min(delivery.handler, len(delivery.route) - 1)]

    async def _call(self, message: Message) -> list[ResultRecord] | None:
        """Run the message's handlers from the one it is at; what they returned."""
        delivery: Routed = message  # type: ignore[assignment]  # the engine passes its own objects
        route = delivery.route
        if route is None:
            route = delivery.route = self._choose(delivery)
            self._count_attempts(delivery)
        while delivery.handler < len(route):
            step = route[delivery.handler]
            if self._pauses.active:
                self._pauses.check(delivery, step.name)
            value = await step.call(delivery)
            if value is not None:
                # The first handler's results have the app's name alone in their ids.
                handler = step.name if delivery.handler else ""
                delivery.results += self._maker.records(delivery, value, step.name, handler)
            delivery.handler += 1
            self._count_attempts(delivery)
        return delivery.results or None

    def _choose(self, delivery: Routed) -> tuple[Step, ...]:
        found = self._type_of(delivery)
        if found is not None and not isinstance(found, str):
            raise Poison(f"the event type must be a text, got {found!r}")
        delivery.kind = found
        route = self._routes.get(found) if found else None
        if route is None:
            route = self._otherwise
        if route is not None:
            return route
        if self._app.unhandled == "ignore":
            delivery.outcome = Outcome.IGNORED
            return ()
        known = ", ".join(sorted(self._routes))
        what = (
            f"no handler for event type {found!r}" if found else f"no event type ({self._where()} is missing)"
        )
        raise Poison(f"{what}; there are handlers for: {known}")

    def _where(self) -> str:
        named = self._app.event_type
        return repr(named) if callable(named) else f"header {named or EVENT_TYPE!r}"

    @staticmethod
    def _count_attempts(delivery: Routed) -> None:
        """The next handler's attempts are its own; some may be from before a restart."""
        delivery.attempt = 1
        if delivery.failure_state is not None and delivery.handler < len(delivery.route or ()):
            delivery.attempt = delivery.failure_state.attempt_at(delivery.route[delivery.handler].name)  # type: ignore[index]


def _reader(app: AppSpec) -> Callable[[Message], Any]:
    named = app.event_type
    if callable(named):
        return named
    header = named or EVENT_TYPE
    return lambda msg: msg.header(header)
