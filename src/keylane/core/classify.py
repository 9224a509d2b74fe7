"""What kind of failure an exception is, and how long it asks to wait.

This is the one place where that is decided, in this order:

1. what the stage said itself: :class:`Poison`, then :class:`Transient`;
2. the app's rules, the first that has an opinion;
3. a group: transient only when everything in it is;
4. what is known of the usual clients, by the names of their classes, so that none of them is imported;
5. an HTTP status that the error carries;
6. Python's own time-outs and network errors.

Everything else is poison: an unexpected exception is a bug or a bad message, and neither gets better by waiting.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, timedelta
from email.utils import parsedate_to_datetime
from math import inf
from typing import TYPE_CHECKING, TypeAlias

from keylane.core.clients import Failure, attribute, item, kind_of
from keylane.errors import Poison, Transient

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Failure", "Rule", "Verdict", "classify"]

log = logging.getLogger("keylane.classify")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What :func:`classify` made of an exception."""

    failure: Failure
    delay: float | None = None
    """Seconds, 0 or more, that a transient error asks to wait; None when it does not say."""


Rule: TypeAlias = Callable[[BaseException], Failure | str | BaseException | type[BaseException] | None]
"""An app's own classification: None for no opinion, else ``"transient"`` or ``"poison"``, a :class:`Failure`, or a
:class:`Transient` or :class:`Poison`, as a class or an instance. A ``Transient`` may carry a ``retry_after``."""

_POISON = Verdict(failure=Failure.POISON)


def classify(
    error: BaseException, rules: Sequence[Rule] = (), *, now: Callable[[], float] = time.time
) -> Verdict:
    """The kind of failure ``error`` is, and the wait it asks for.

    Of a group the rules are asked first, then of everything in it; ``delay`` is the longest wait in it.
    Never raises because of a rule or of what the error carries: a rule that raises or gives no answer of the agreed
    kind is logged and passed over. ``now``, seconds since 1970, is read only for a ``Retry-After`` that is a date.
    """
    delay: float | None = None
    rest = [error]
    while rest:
        one = rest.pop()
        verdict = _said(one) or _ruled(one, rules)
        if verdict is None:
            if isinstance(one, BaseExceptionGroup):
                rest.extend(one.exceptions)
                continue
            verdict = Verdict(failure=kind_of(one))
        if verdict.failure is Failure.POISON:
            return _POISON
        asked = _asked(one, now) if verdict.delay is None else verdict.delay
        if asked is not None:
            delay = asked if delay is None else max(delay, asked)
    return Verdict(failure=Failure.TRANSIENT, delay=delay)


# What the stage or the app said.


def _said(error: BaseException) -> Verdict | None:
    if isinstance(error, Poison):
        return _POISON
    if isinstance(error, Transient):
        return Verdict(failure=Failure.TRANSIENT, delay=_seconds(error.retry_after))
    return None


def _ruled(error: BaseException, rules: Sequence[Rule]) -> Verdict | None:
    for rule in rules:
        try:
            answer = rule(error)
        except Exception:
            log.exception("classification rule %s raised; it is passed over", _name(rule))
            continue
        if answer is None:
            continue
        verdict = _meant(answer)
        if verdict is not None:
            return verdict
        # Not the answer itself: its repr() may fail in turn.
        log.error(
            "classification rule %s answered with a %s; it is passed over. "
            'It should return "transient", "poison" or None',
            _name(rule),
            answer if isinstance(answer, str) else type(answer).__name__,
        )
    return None


def _meant(answer: object) -> Verdict | None:
    if isinstance(answer, BaseException):
        return _said(answer)
    if isinstance(answer, type):
        if issubclass(answer, Poison):
            return _POISON
        return Verdict(failure=Failure.TRANSIENT) if issubclass(answer, Transient) else None
    if isinstance(answer, Failure | str):
        try:
            return Verdict(failure=Failure(answer))
        except ValueError:
            pass
    return None


def _name(rule: Rule) -> str:
    return str(getattr(rule, "__qualname__", type(rule).__name__))


# How long it asks to wait.


def _asked(error: BaseException, now: Callable[[], float]) -> float | None:
    own = _seconds(attribute(error, "retry_after"))
    if own is not None:
        return own
    response = attribute(error, "response")
    for headers in (
        attribute(response, "headers"),
        attribute(error, "headers"),
        item(response, "ResponseMetadata", "HTTPHeaders"),
    ):
        for name in ("Retry-After", "retry-after"):  # plain dicts know one spelling only
            try:
                value = headers.get(name)
                seconds = None if value is None else _header_seconds(value, now)
            except Exception:  # headers of a kind of their own, or no date at all
                seconds = None
            if seconds is not None:
                return seconds
    return None


def _header_seconds(value: object, now: Callable[[], float]) -> float | None:
    text = value.decode("latin-1") if isinstance(value, bytes) else str(value)
    text = text.strip()
    if re.fullmatch(r"[+-]?\d+(\.\d*)?", text, re.ASCII):
        return _seconds(float(text))
    date = parsedate_to_datetime(text)
    if date.tzinfo is None:  # «-0000»: a time in UTC of an unknown place
        date = date.replace(tzinfo=UTC)
    return _seconds(date.timestamp() - now())


def _seconds(value: object) -> float | None:
    """A number of seconds from 0 on; None for what is no number of seconds."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float) or not -inf < value < inf:
        return None
    try:
        return max(0.0, float(value))
    except OverflowError:
        return None
