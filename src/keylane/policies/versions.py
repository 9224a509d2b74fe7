"""Version ordering: which message of a lane is next, by the version number that its producer wrote.

A producer numbers the messages of an entity one after another. The next version runs, a lower one is stale, a higher
one waits for the missing versions. The log decides the order of arrival, the versions decide the order of processing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from keylane.errors import SettingsError
from keylane.strict_json import MalformedRecordError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

MAX_VERSION = 2**63 - 1


TRAIL_MAX = 10
"""Messages listed in a mark: how far back a rewind can restore the exact state."""
_LOST_MAX = 16
"""Ranges of lost versions in a mark. One more merges the two lowest."""


class VersionFit(Enum):
    """How a message's version fits the versions that its lane has processed."""

    NEXT = "next"
    STALE = "stale"
    GAP = "gap"
    LATE = "late"
    """It was given up before it arrived, and never ran."""
    FAR = "far"
    """More than ``max_gap`` versions are missing before it: it cannot be right."""


class VersionMark(NamedTuple):
    """An entity's progress.

    ``passed`` is its last done version, dead letters included, ``applied`` the last one that succeeded (-1: none).
    ``offset`` is the highest and ``began`` the lowest offset of the messages that set the mark; -1: none of this
    partition. ``trail`` lists the last of these messages by ascending versions: ``3:17,4!18`` means that version 3 at
    offset 17 succeeded and version 4 at offset 18 did not. ``lost`` are versions that were given up before they
    arrived: ``5-7,9-9``. ``ahead``, in the format of the trail, are done versions above ``passed``: they do not run
    again although versions below them do.

    A ``passed`` below -1 means -2 - *version*: the progress is unknown, but any version up to that one is next.

    A named tuple, unlike other values, because a restart may create a million of them.
    """

    passed: int
    applied: int
    offset: int = -1
    began: int = -1
    trail: bytes = b""
    lost: bytes = b""
    ahead: bytes = b""

    def encode(self) -> bytes:
        """The mark as a value of the state topic, for :func:`decode_mark`."""
        parts = self.trail or b"-", self.lost or b"-", self.ahead or b"-"
        return b"%d %d %d %d %b %b %b" % (self.passed, self.applied, self.offset, self.began, *parts)

    def facts(self) -> dict[str, Any]:
        """The mark as JSON values for users: next version, last applied, given up, failed, done ahead."""
        return {
            "next": self.passed + 1 if self.passed >= -1 else None,
            "applied": self.applied if self.applied >= 0 else None,
            "given_up": [list(stretch) for stretch in _lost(self.lost)],
            "failed": [step.version for step in _steps(self.trail) + _steps(self.ahead) if not step.applied],
            "ahead": [step.version for step in _steps(self.ahead)],
        }

    def gave_up(self, version: int) -> bool:
        """Whether this version was given up before it arrived."""
        return any(first <= version <= last for first, last in _lost(self.lost))

    def moved(self) -> VersionMark:
        """The same mark for another partition, without offsets."""
        steps = [_VersionStep(step.version, -1, step.applied) for step in _steps(self.ahead)]
        return self._replace(offset=-1, began=-1, trail=b"%d:-1" % self.passed, ahead=_trail(steps))


def mark_at(version: int) -> VersionMark:
    """The mark that an operator sets: the version after this one is next."""
    return VersionMark(version, version, trail=b"%d:-1" % version)


_NUMBER, _STEP, _STRETCH = rb"(-1|\d{1,19})", rb"\d{1,19}[:!](?:-1|\d{1,19})", rb"\d{1,19}-\d{1,19}"
_LONG = re.compile(rb"\d{19}")
_MARK = re.compile(
    rb"(\d{1,19}) %b %b %b (?:-|(%b)) (?:-|(%b)) (?:-|(%b))"
    % (_NUMBER, _NUMBER, _NUMBER, *(rb"%b(?:,%b){0,99}" % (one, one) for one in (_STEP, _STRETCH, _STEP)))
)


def decode_mark(value: bytes) -> VersionMark:
    """A mark from the state topic. Raises MalformedRecordError."""
    found = _MARK.fullmatch(value)
    if found is None or any(int(number) > MAX_VERSION for number in _LONG.findall(value)):
        raise MalformedRecordError(f"expected a version mark, got {value[:60]!r}")
    passed, applied, offset, began = map(int, found.group(1, 2, 3, 4))
    return VersionMark(passed, applied, offset, began, found[5] or b"", found[6] or b"", found[7] or b"")


class _VersionStep(NamedTuple):
    """One message of a trail."""

    version: int
    offset: int
    applied: bool


def _steps(trail: bytes) -> list[_VersionStep]:
    found = []
    for step in trail.split(b",") if trail else ():
        version, ran, offset = step.partition(b":") if b":" in step else step.partition(b"!")
        found.append(_VersionStep(int(version), int(offset), ran == b":"))
    return found


def _trail(steps: Iterable[_VersionStep]) -> bytes:
    return b",".join(b"%d%b%d" % (s.version, b":" if s.applied else b"!", s.offset) for s in steps)


def _lost(lost: bytes) -> list[tuple[int, int]]:
    stretches = (stretch.split(b"-") for stretch in lost.split(b",")) if lost else ()
    return [(int(first), int(last)) for first, last in stretches]


def _encode_lost(stretches: list[tuple[int, int]]) -> bytes:
    while len(stretches) > _LOST_MAX:
        stretches[:2] = [(stretches[0][0], stretches[1][1])]
    return b",".join(b"%d-%d" % stretch for stretch in stretches)


def set_back(mark: VersionMark, is_done: Callable[[int], bool]) -> VersionMark | None:
    """The mark as it was before the messages that run again after a rewind; None if all of them run again.

    ``is_done`` tells whether the message at an offset is done and does not run again. If more than the trail runs
    again, whichever version arrives first is the next.
    """
    steps = _steps(mark.trail) + _steps(mark.ahead)
    again = [step for step in steps if not is_done(step.offset)]
    if not again:
        return mark
    low = again[0].version
    done = [step for step in steps if is_done(step.offset)]
    below = [step for step in done if step.version < low]
    if below:
        passed = below[-1].version
        ran = [step.version for step in below if step.applied]
        applied = ran[-1] if ran else below[0].version - 1
    elif not is_done(mark.began) or mark.began in [step.offset for step in steps]:
        if not done:
            return None
        passed, applied = low - 1, -1
    else:
        return VersionMark(-2 - min(low, MAX_VERSION - 1), -1, began=mark.began)
    lost = [(first, min(last, passed)) for first, last in _lost(mark.lost) if first <= passed]
    return VersionMark(
        passed,
        min(mark.applied, applied),
        max((step.offset for step in done), default=-1),
        mark.began,
        _trail(below),
        _encode_lost(lost),
        _trail(step for step in done if step.version > low),
    )


@dataclass(frozen=True, slots=True)
class VersionOrdering:
    """Processing of a key's messages in the order of their versions; see docs/events.md.

    ``version_from`` is where the version is found: the name of a header, :class:`keylane.Field`, or a function of the
    message. The function may return None for a message without a version, which runs in its log order.

    ``on_stale`` applies to a version that is done: ``"skip"`` it, with an outcome of its own, or ``"fail"``.
    ``on_gap`` applies to a version that arrives before lower ones: ``"wait"`` for them up to ``wait`` seconds,
    ``"process"`` it as if nothing were missing, or ``"fail"``. ``on_timeout`` applies when that wait ends in vain:
    ``"fail"`` or ``"process"``. ``max_waiting`` is how many messages of a key may wait; one more ends the wait of the
    lowest.

    ``max_gap`` is how many versions may be missing before one. A version further ahead cannot be right: it fails at
    once and changes nothing for its entity. None: no limit, for versions that do not increase by one.

    ``first`` is an entity's first version; None if it may be any, because the log no longer has the first ones.
    Raises :class:`SettingsError` for invalid values.
    """

    version_from: str | Callable[[Any], Any] = "event-version"
    on_stale: Literal["skip", "fail"] = "skip"
    on_gap: Literal["wait", "process", "fail"] = "wait"
    wait: float = 30.0
    on_timeout: Literal["fail", "process"] = "fail"
    max_waiting: int = 100
    max_gap: int | None = 1000
    first: int | None = 1

    def __post_init__(self) -> None:
        given: object = self.version_from
        if not callable(given) and (not isinstance(given, str) or not given):
            raise SettingsError(
                f"VersionOrdering({self.version_from!r}): expected a header's name or a function of a message"
            )
        _one_of("on_stale", self.on_stale, "skip", "fail")
        _one_of("on_gap", self.on_gap, "wait", "process", "fail")
        _one_of("on_timeout", self.on_timeout, "fail", "process")
        if type(self.wait) not in (int, float) or not 0 < self.wait < inf:
            raise SettingsError(f"VersionOrdering(wait={self.wait!r}): expected seconds, more than 0")
        if type(self.max_waiting) is not int or self.max_waiting < 1:
            raise SettingsError(
                f"VersionOrdering(max_waiting={self.max_waiting!r}): expected a whole number of messages, at least 1"
            )
        if self.max_gap is not None and (
            type(self.max_gap) is not int or not 1 <= self.max_gap <= MAX_VERSION
        ):
            raise SettingsError(
                f"VersionOrdering(max_gap={self.max_gap!r}): expected a whole number of versions, at least 1, or None"
            )
        if self.first is not None and (type(self.first) is not int or not 0 <= self.first <= MAX_VERSION):
            raise SettingsError(
                f"VersionOrdering(first={self.first!r}): expected a version of at least 0, or None"
            )

    def judge(self, version: int, mark: VersionMark | None, *, redriven: bool = False) -> VersionFit:
        """How this version fits. A redriven dead letter is stale only if a newer version was applied."""
        missing = self.missing(mark)
        if missing is None:
            return VersionFit.NEXT
        if mark is not None and mark.passed >= -1:
            if version <= (mark.applied if redriven else mark.passed):
                late = not redriven and mark.lost and mark.gave_up(version)
                return VersionFit.LATE if late else VersionFit.STALE
            if mark.ahead and any(step.version == version for step in _steps(mark.ahead)):
                return VersionFit.STALE
        if version <= missing:
            return VersionFit.NEXT
        return (
            VersionFit.FAR
            if self.max_gap is not None and version - missing > self.max_gap
            else VersionFit.GAP
        )

    def missing(self, mark: VersionMark | None) -> int | None:
        """The next version; None if it may be any."""
        if mark is None:
            return self.first
        return mark.passed + 1 if mark.passed >= -1 else -2 - mark.passed

    def after(self, mark: VersionMark | None, version: int, offset: int, *, applied: bool) -> VersionMark:
        """The mark after the message with this version, at this offset, is done."""
        missing = self.missing(mark)
        if mark is None:
            mark = VersionMark(-1, -1, began=offset)
        ran = max(mark.applied, version) if applied else mark.applied
        if version <= mark.passed:
            lost = mark.lost and _without(mark.lost, version)
            return mark._replace(applied=ran, lost=lost)
        lost, passed, trail, ahead = mark.lost, version, mark.trail, mark.ahead
        if not applied and missing is not None and version > missing:
            lost = _encode_lost([*_lost(lost), (missing, version - 1)])
        step = b"%d%b%d" % (version, b":" if applied else b"!", offset)
        trail = trail + b"," + step if trail else step
        if ahead:
            steps, above = _steps(trail), _steps(ahead)
            while above and above[0].version <= passed + 1:
                passed = max(passed, above[0].version)
                ran = max(ran, above[0].version) if above[0].applied else ran
                lost = _without(lost, above[0].version)
                steps.append(above.pop(0))
            trail, ahead = _trail(sorted(steps)[-TRAIL_MAX:]), _trail(above)
        elif trail.count(b",") >= TRAIL_MAX:
            trail = trail[trail.index(b",") + 1 :]
        began = min(mark.began, offset) if mark.began >= 0 else mark.began
        return VersionMark(passed, ran, max(mark.offset, offset), began, trail, lost, ahead)


def parse_version(found: object) -> int:
    """The version in a value that was read. Raises ValueError, with a message for users."""
    number = found
    if isinstance(found, str | bytes):
        text = found.decode("ascii", "replace") if isinstance(found, bytes) else found
        number = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
    if type(number) is not int or not 0 <= number <= MAX_VERSION:
        raise ValueError(f"expected the version to be a whole number of at least 0, got {found!r:.80}")
    return number


def _without(lost: bytes, version: int) -> bytes:
    """The lost versions without this one, which has arrived."""
    left = []
    for first, last in _lost(lost):
        if first <= version <= last:
            left += [(a, b) for a, b in ((first, version - 1), (version + 1, last)) if a <= b]
        else:
            left.append((first, last))
    return _encode_lost(left)


def _one_of(name: str, value: object, *known: str) -> None:
    if value not in known:
        raise SettingsError(f"VersionOrdering({name}={value!r}): expected {' or '.join(map(repr, known))}")
