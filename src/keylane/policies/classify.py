"""Error classification: transient or poison, and the wait that the error asks for.

The only place that decides this, in this order:

1. what the stage raised itself: :class:`Poison`, then :class:`Transient`;
2. the app's rules: the first one that returns an answer;
3. an exception group: transient only if every error in it is;
4. the known errors of common client libraries, by class name, so that none of them is imported;
5. an HTTP status on the error;
6. Python's own time-outs and network errors.

Everything else is poison: an unexpected exception is a bug or a bad message, and waiting fixes neither.
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

from keylane.errors import Poison, Transient
from keylane.policies.known_errors import FailureKind, attribute, item, kind_of

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Classification", "FailureKind", "Rule", "classify"]

log = logging.getLogger("keylane.classify")


@dataclass(frozen=True, slots=True, kw_only=True)
class Classification:
    """The result of :func:`classify`."""

    failure: FailureKind
    delay: float | None = None
    """Seconds, 0 or more, that a transient error asks to wait; None if it does not say."""


Rule: TypeAlias = Callable[[BaseException], FailureKind | str | BaseException | type[BaseException] | None]
"""An app's own classification: None for no opinion, else ``"transient"`` or ``"poison"``, a :class:`FailureKind`, or a
:class:`Transient` or :class:`Poison`, as a class or an instance. A ``Transient`` may carry a ``retry_after``."""

_POISON = Classification(failure=FailureKind.POISON)


def classify(
    error: BaseException, rules: Sequence[Rule] = (), *, now: Callable[[], float] = time.time
) -> Classification:
    """The kind of failure ``error`` is, and the wait it asks for.

    For an exception group the rules are tried first, then every error in it; ``delay`` is the longest wait in it.
    Never raises because of a rule or an error's attributes: a rule that raises or returns an invalid answer is
    logged and skipped. ``now``, unix time, is read only for a ``Retry-After`` that is a date.
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
            verdict = Classification(failure=kind_of(one))
        if verdict.failure is FailureKind.POISON:
            return _POISON
        asked = _asked(one, now) if verdict.delay is None else verdict.delay
        if asked is not None:
            delay = asked if delay is None else max(delay, asked)
    return Classification(failure=FailureKind.TRANSIENT, delay=delay)


# Answers of the stage and of the app's rules.


def _said(error: BaseException) -> Classification | None:
    if isinstance(error, Poison):
        return _POISON
    if isinstance(error, Transient):
        return Classification(failure=FailureKind.TRANSIENT, delay=_seconds(error.retry_after))
    return None


def _ruled(error: BaseException, rules: Sequence[Rule]) -> Classification | None:
    for rule in rules:
        try:
            answer = rule(error)
        except Exception:
            log.exception("ignoring classification rule %s: it raised an exception", _name(rule))
            continue
        if answer is None:
            continue
        verdict = _meant(answer)
        if verdict is not None:
            return verdict
        # Log only the answer's type: its repr() may raise.
        log.error(
            'ignoring classification rule %s: expected "transient", "poison" or None, got %s',
            _name(rule),
            answer if isinstance(answer, str) else type(answer).__name__,
        )
    return None


def _meant(answer: object) -> Classification | None:
    if isinstance(answer, BaseException):
        return _said(answer)
    if isinstance(answer, type):
        if issubclass(answer, Poison):
            return _POISON
        return Classification(failure=FailureKind.TRANSIENT) if issubclass(answer, Transient) else None
    if isinstance(answer, FailureKind | str):
        try:
            return Classification(failure=FailureKind(answer))
        except ValueError:
            pass
    return None


def _name(rule: Rule) -> str:
    return str(getattr(rule, "__qualname__", type(rule).__name__))


# The wait that an error asks for.


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
        for name in ("Retry-After", "retry-after"):  # a plain dict is case-sensitive
            try:
                value = headers.get(name)
                seconds = None if value is None else _header_seconds(value, now)
            except Exception:  # headers of an unknown type, or an invalid date
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
    if date.tzinfo is None:  # "-0000": UTC, of an unknown time zone
        date = date.replace(tzinfo=UTC)
    return _seconds(date.timestamp() - now())


def _seconds(value: object) -> float | None:
    """The value as seconds, at least 0; None if it is not a number of seconds."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float) or not -inf < value < inf:
        return None
    try:
        return max(0.0, float(value))
    except OverflowError:
        return None
