"""Pipeline of one engine: what every message passes, from the bytes of its value to the output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from keylane.engine.delivery import Delivery, Routed, StatefulDelivery, StatefulRouted
from keylane.engine.dispatch import Dispatcher
from keylane.engine.results import ResultMaker, is_several
from keylane.engine.stages import decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from keylane.engine.output import Output
    from keylane.engine.stages import Step
    from keylane.spec import AppSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """The steps of one engine, and what is before and behind them."""

    delivery: type[Delivery]
    """What the engine makes of a record."""
    decode: Callable[[bytes], Any] | None
    steps: tuple[Step, ...]
    """What each message passes; with handlers the dispatcher is the first, in place of them."""
    opened: tuple[Step, ...]
    """All stages and handlers, and the sink if it is a step."""
    hand_over: Callable[[Any, bytes], None] | None
    """Hands a message's result to the output if it is bytes: the hot path. None: results are dropped."""
    deliver: Callable[[Any, Any], None]
    """Hands everything else that the last step returned to the output."""
    dispatcher: Dispatcher | None

    def step_of(self, delivery: Delivery) -> Step:
        """The stage or handler that the message is at."""
        if self.dispatcher is not None and delivery.stage == 0:
            return self.dispatcher.step_of(delivery)  # type: ignore[arg-type]  # it makes no others then
        return self.steps[min(delivery.stage, len(self.steps) - 1)]

    def decode_value(self, delivery: Delivery) -> None:
        """Decode the message's value, unless that has happened."""
        if not delivery.decoded:
            if self.decode is not None and delivery.value is not None:
                delivery.value = self.decode(delivery.value)
            delivery.decoded = True


def pipeline_of(app: AppSpec, steps: Sequence[Step], output: Output) -> Pipeline:
    """The pipeline of an app with these opened steps."""
    handlers = Dispatcher(app, steps[: len(app.stages)]) if app.dispatches else None
    written = app.sink is not None or app.commit == "epoch"
    return Pipeline(
        delivery=_delivery_class(routed=handlers is not None, stateful=bool(app.states)),
        decode=decoder(app),
        # Behind the dispatcher there is only the sink, if it is a step.
        steps=tuple(steps) if handlers is None else (handlers.step, *steps[len(app.stages) :]),
        opened=tuple(steps),
        hand_over=output.result if written else None,
        deliver=output.all_results if handlers is not None else _delivering(app, output),
        dispatcher=handlers,
    )


def _delivery_class(*, routed: bool, stateful: bool) -> type[Delivery]:
    if stateful:
        return StatefulRouted if routed else StatefulDelivery
    return Routed if routed else Delivery


def _delivering(app: AppSpec, output: Output) -> Callable[[Delivery, Any], None]:
    """Hands over what the last stage of a message returned: one value, a Result, or several."""
    maker, stage = ResultMaker(app), app.stages[-1].name if app.stages else ""

    def deliver(delivery: Delivery, returned: Any) -> None:
        if not is_several(returned) and (value := maker.encode(returned, stage)) is not None:
            output.result(delivery, value)
        elif records := maker.records(delivery, returned, stage):
            output.all_results(delivery, records)
        else:  # a generator that yielded nothing
            delivery.engine.acknowledge(delivery)

    return deliver
