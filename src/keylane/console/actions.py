"""Operators' actions from the page: written in one place, which refuses them in a console that may only read."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from keylane.errors import KeylaneError, SettingsError
from keylane.key_text import printable, show_key
from keylane.lanes.lane_record import LaneStatus
from keylane.state.admin import AdminClient
from keylane.state.answers import RedriveCounts
from keylane.state.commands import check_reason, operator_name
from keylane.state.lane_moves import plan_move
from keylane.state.redrive_choice import RedrivePlan, choose
from keylane.state.stopped_lanes import stopped_lanes
from keylane.wording import counted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from keylane.kafka.settings import KafkaSettings
    from keylane.state.admin import CommandResults
    from keylane.state.commands import Command
    from keylane.state.redrive_choice import RedriveWay

log = logging.getLogger("keylane.console")

JOBS_KEPT = 50
PLANS_KEPT = 20
PLAN_SECONDS = 900.0
"""Time for which a dry run can be carried out. It names its dead letters, so later ones are not in it."""
LANES_SHOWN = 50
_POSITIONS_SHOWN = 8
_ANSWER_SECONDS = 10.0
"""Time to wait for the answer to a release or a skip."""
_SILENCE_SECONDS = 10.0
"""A redrive is waited for as long as the app gives signs of life; without one, for this time."""
_WORKERS = 4

LaneAction = Literal["release", "skip"]


class ReadOnlyError(KeylaneError):
    """This console may only read."""


class CommandWriter:
    """The only place of the console that writes commands."""

    def __init__(self, *, allowed: bool) -> None:
        self.allowed = allowed

    def check(self) -> None:
        """Raise ReadOnlyError if this console may only read."""
        if not self.allowed:
            raise ReadOnlyError("this console may only read: start it with --allow-actions to give commands")

    def give(self, operator: AdminClient, commands: Sequence[Command]) -> None:
        """Write these commands. Raises ReadOnlyError, and BrokerError if they could not be written."""
        self.check()
        if not all(command.reason for command in commands):
            raise SettingsError("expected a reason: it is kept in the audit")
        operator.give(commands)


@dataclass(slots=True, kw_only=True)
class Job:
    """One action and how far it is. Its thread writes it, others read it."""

    id: str
    app: str
    do: str
    what: str
    who: str
    reason: str
    began: float
    total: int = 0
    """Commands; for a redrive, one for each lane."""
    letters: int = 0
    """Dead letters that a redrive is about."""
    answered: int = 0
    redriven: int = 0
    """Dead letters that were redriven so far."""
    ended: float | None = None
    ok: bool | None = None
    outcome: str = ""
    failures: list[str] = field(default_factory=list)

    def facts(self) -> dict[str, Any]:
        """The job for the page."""
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    app: str
    way: RedriveWay
    plan: RedrivePlan
    made: float
    what: str


class Actions:
    """Dry runs and jobs of one console. Thread-safe."""

    def __init__(self, settings: KafkaSettings, writer: CommandWriter) -> None:
        self.writer = writer
        self._settings = settings
        self._lock = threading.Lock()
        self._jobs: dict[str, Job] = {}
        self._plans: dict[str, _Plan] = {}
        self._pool = ThreadPoolExecutor(_WORKERS, thread_name_prefix="keylane-console-job")

    def close(self) -> None:
        """Give up the waiting; commands that were given remain."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def jobs(self, app: str) -> list[dict[str, Any]]:
        """The app's newest jobs, the newest first."""
        with self._lock:
            found = [job for job in self._jobs.values() if job.app == app]
        return [job.facts() for job in found[-10:][::-1]]

    def job(self, job_id: str) -> Job | None:
        """One job."""
        return self._jobs.get(job_id)

    def move(
        self,
        app: str,
        do: LaneAction,
        *,
        partition: int,
        key: bytes | None,
        offset: int,
        reason: str,
        who: str,
    ) -> Job:
        """Release or skip the lane that is blocked there. Raises KeylaneError if it is not, or without a reason."""
        reason = self._checked(reason)
        operator = AdminClient(self._settings, app)
        try:
            lanes = [
                lane
                for lane in stopped_lanes(operator.lanes(), operator.open_commands())
                if (lane.partition, lane.key, lane.offset) == (partition, key, offset)
            ]
            if not lanes or lanes[0].record is None or lanes[0].record.stop is not LaneStatus.BLOCKED:
                raise SettingsError(
                    f"the lane is not blocked at {partition}@{offset} any more; somebody else may have moved it"
                )
            move = plan_move(do, lanes[0], reason=reason, who=_named(who))
            if move.fresh:
                self.writer.give(operator, move.fresh)
        except BaseException:
            operator.close()
            raise
        job = self._job(app, do, f"{do} {lanes[0].name} at {lanes[0].position}", who, reason, total=1)
        self._pool.submit(self._follow_move, job, operator, move.command)
        return job

    def plan_redrive(self, app: str, way: RedriveWay, what: str) -> dict[str, Any]:
        """A dry run: what would be redriven. Writes nothing."""
        with AdminClient(self._settings, app) as operator:
            plan = RedrivePlan.of(operator, choose(self._settings, way, operator), whole=way.whole)
        plan_id = secrets.token_hex(8)
        with self._lock:
            self._plans[plan_id] = _Plan(app=app, way=way, plan=plan, made=time.monotonic(), what=what)
            while len(self._plans) > PLANS_KEPT:
                del self._plans[next(iter(self._plans))]
        choice, lots = plan.choice, plan.lots
        return {
            "plan": plan_id,
            "letters": sum(lot.chosen for lot in lots),
            "lanes": len(lots),
            "parked": sum(lot.parked for lot in lots),
            "sample": [
                {
                    "key": None if lot.key is None else show_key(lot.key),
                    "partition": lot.partition,
                    "letters": lot.chosen,
                    "parked": lot.parked,
                    "order": [f"{lot.partition}@{source}" for source in lot.sources()[:_POSITIONS_SHOWN]],
                }
                for lot in lots[:LANES_SHOWN]
            ],
            "left_out": {
                "redriven": choice.redriven,
                "archived": choice.archived,
                "blocked": choice.blocked.total(),
                "unreadable": choice.unreadable,
            },
        }

    def redrive(self, app: str, plan_id: str, *, reason: str, who: str) -> Job:
        """Carry out a dry run. Raises KeylaneError if it is too old, or without a reason."""
        reason = self._checked(reason)
        with self._lock:
            planned = self._plans.pop(plan_id, None)
        if planned is None or planned.app != app or time.monotonic() - planned.made > PLAN_SECONDS:
            raise SettingsError("this dry run was carried out already, or is too old: make a new one")
        operator = AdminClient(self._settings, app)
        try:
            # Planned again for the commands' names, reason and author; the choice is the one that was shown.
            plan = RedrivePlan.of(
                operator, planned.plan.choice, whole=planned.way.whole, reason=reason, who=_named(who)
            )
            before = _redriven(operator)
            self.writer.give(operator, plan.fresh)
        except BaseException:
            operator.close()
            raise
        letters = sum(lot.chosen for lot in plan.lots)
        job = self._job(app, "redrive", planned.what, who, reason, total=len(plan.lots), letters=letters)
        self._pool.submit(self._follow_redrive, job, operator, plan, before)
        return job

    def _checked(self, reason: str) -> str:
        self.writer.check()
        text = check_reason(reason)
        if not text:
            raise SettingsError("expected a reason: it is kept in the audit")
        return text

    def _job(
        self, app: str, do: str, what: str, who: str, reason: str, *, total: int, letters: int = 0
    ) -> Job:
        job = Job(
            id=secrets.token_hex(8),
            app=app,
            do=do,
            what=what,
            who=_named(who),
            reason=reason,
            began=time.time(),
            total=total,
            letters=letters,
        )
        with self._lock:
            self._jobs[job.id] = job
            while len(self._jobs) > JOBS_KEPT:
                del self._jobs[next(iter(self._jobs))]
        log.info("command given app=%s do=%s who=%s what=%s", app, do, job.who, printable(what))
        return job

    def _follow_move(self, job: Job, operator: AdminClient, command: Command) -> None:
        def follow() -> None:
            heard = operator.wait([command], timeout=_ANSWER_SECONDS)
            answer = heard.answers.get(command.id)
            job.answered = len(heard.answers)
            if answer is not None:
                job.ok = answer.ok
                job.outcome = answer.result
            elif heard.lost:
                job.ok, job.outcome = False, "no task answered, and the message is gone from the source"
            else:
                job.outcome = "no answer yet: the app carries it out when it runs"

        self._finish(job, operator, follow)

    def _follow_redrive(self, job: Job, operator: AdminClient, plan: RedrivePlan, before: int) -> None:
        def tell(answered: int) -> None:
            job.answered = answered
            job.redriven = _redriven(operator) - before

        def follow() -> None:
            heard = operator.wait(plan.commands, silence=_SILENCE_SECONDS, tell=tell)
            tell(len(heard.answers))
            self._conclude(job, plan, heard)

        self._finish(job, operator, follow)

    def _conclude(self, job: Job, plan: RedrivePlan, heard: CommandResults) -> None:
        answers = heard.answers
        total = RedriveCounts.total(one.counts for one in answers.values() if one.counts is not None)
        waiting = len(plan.commands) - len(answers) - len(heard.lost)
        parts = [str(total)] if answers else []
        if waiting:
            parts.append(
                f"{counted(waiting, 'command')} not answered yet: the app carries them out when it runs"
            )
        if heard.lost:
            parts.append(f"{counted(len(heard.lost), 'command')} ended without an answer")
        job.ok = None if waiting else not heard.lost and all(one.ok for one in answers.values())
        job.outcome = "; ".join(parts)
        job.failures = [
            f"{lot.name}: {printable(answers[command.id].result)}"
            for lot, command in zip(plan.lots, plan.commands, strict=True)
            if command.id in answers and not answers[command.id].ok
        ][:LANES_SHOWN]

    def _finish(self, job: Job, operator: AdminClient, follow: Any) -> None:
        try:
            follow()
        except Exception as error:
            log.warning("a command could not be followed app=%s: %r", job.app, error)
            job.outcome = f"the command was given, but its answer could not be read: {error}"
        finally:
            job.ended = time.time()
            operator.close()


def _named(who: str) -> str:
    return f"{who} (console)" if who else f"{operator_name()} (console)"


def _redriven(operator: AdminClient) -> int:
    return sum(len(ranges) for ranges in operator.redriven().values())
