"""Pipeline of one engine: what every message passes, from the bytes of its value to the output."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from keylane.engine.delivery import Delivery, Routed, StatefulDelivery, StatefulRouted
from keylane.engine.dispatch import Dispatcher
from keylane.engine.results import ResultMaker, is_several
from keylane.engine.stages import decoder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from keylane.engine.output import Output
    from keylane.engine.pauses import Pauses
    from keylane.engine.stages import Step
    from keylane.message import Message
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
    timers: Mapping[str, Step]
    """The handlers of timers, by the timers' names."""

    def step_of(self, delivery: Delivery) -> Step:
        """The stage or handler that the message is at."""
        if delivery.timer is not None and delivery.stage == 0:
            return self.timers[delivery.timer]
        if self.dispatcher is not None and delivery.stage == 0:
            return self.dispatcher.step_of(delivery)  # type: ignore[arg-type]  # it makes no others then
        return self.steps[min(delivery.stage, len(self.steps) - 1)]

    def decode_value(self, delivery: Delivery) -> None:
        """Decode the message's value, unless that has happened."""
        if not delivery.decoded:
            if self.decode is not None and delivery.value is not None:
                delivery.value = self.decode(delivery.value)
            delivery.decoded = True


def pipeline_of(app: AppSpec, steps: Sequence[Step], output: Output, pauses: Pauses) -> Pipeline:
    """The pipeline of an app with these opened steps."""
    opened = tuple(steps)
    timers = {step.timer: step for step in opened if step.timer is not None}
    steps = [step for step in opened if step.timer is None]
    handlers = Dispatcher(app, steps[: len(app.stages)], pauses) if app.dispatches else None
    written = app.sink is not None or app.commit == "epoch"
    return Pipeline(
        delivery=_delivery_class(routed=handlers is not None, stateful=app.keeps_state),
        decode=decoder(app),
        # Behind the dispatcher there is only the sink, if it is a step.
        steps=with_timers(
            steps if handlers is None else [handlers.step, *steps[len(app.stages) :]],
            timers,
            stages=1 if handlers is not None else len(app.stages),
            maker=None if handlers is None else ResultMaker(app),
        ),
        opened=opened,
        hand_over=output.result if written else None,
        deliver=output.all_results if handlers is not None else _delivering(app, output),
        dispatcher=handlers,
        timers=timers,
    )


def with_timers(
    steps: Sequence[Step], timers: Mapping[str, Step], *, stages: int, maker: ResultMaker | None
) -> tuple[Step, ...]:
    """The steps, of which a timer that fires passes its handler instead of the first ``stages``.

    ``maker`` makes results as handlers by type return them; without it a handler's value is passed on.
    """
    if not timers:
        return tuple(steps)

    async def handle(message: Message) -> Any:
        delivery: Delivery = message  # type: ignore[assignment]  # the engine passes its own objects
        step = timers[delivery.timer or ""]
        value = await step.call(message)
        if maker is None or value is None:
            return value
        return maker.records(delivery, value, step.name, "") or None

    async def pass_on(message: Message) -> Any:
        return message.value

    def around(number: int, step: Step) -> Step:
        other = handle if number == 0 else pass_on

        def call(message: Message) -> Awaitable[Any]:
            return step.call(message) if message.timer is None else other(message)  # type: ignore[attr-defined]

        return replace(step, call=call)

    return tuple(around(number, step) if number < stages else step for number, step in enumerate(steps))


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
