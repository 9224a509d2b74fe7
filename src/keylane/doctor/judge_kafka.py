"""Findings about an app's topics, progress and rights. Pure functions of facts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keylane.doctor.finding import Finding, counted, fault, note, ok, unknown, warning
from keylane.doctor.judge import MAX_CLOCK_SKEW_SECONDS
from keylane.kafka.cluster import DEAD_LETTER_ROOM_BYTES
from keylane.rights import Operation
from keylane.worker.progress import OFFSET_REFRESH_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from keylane.doctor.facts import AppFacts, ClusterFacts, GroupPosition, TopicFacts
    from keylane.rights import Right

_WARNING_SHARE, _FAULT_SHARE = 0.5, 0.9
"""Shares of the retention that the oldest waiting message has used up."""
_DAY_SECONDS, _WEEK_SECONDS = 86_400.0, 7 * 86_400.0
_ABSENT_STATES = ("absent", "DEAD", "ConsumerGroupState.DEAD")
"""States that brokers report for a group that was never used."""


def judge_topics(app: AppFacts, cluster: ClusterFacts) -> Iterator[Finding]:
    """Check the topics that the app reads, writes and owns."""
    source = cluster.topics.get(app.source or "")
    if app.source is not None and source is None:
        yield fault(
            "source", f"topic {app.source!r} does not exist", "create it, or correct the app's source"
        )
    if source is not None and app.source is not None:
        yield from _health("source", app.source, source, cluster.brokers)
        yield from _compaction(app.source, source)
    for name in app.sinks:
        sink = cluster.topics.get(name)
        if sink is None:
            yield fault("sink", f"topic {name!r} does not exist", "create it, or correct the app's sink")
        else:
            yield from _health("sink", name, sink, cluster.brokers)
            yield from _message_size("sink", name, sink, source, 0)
    yield from _own_topics(app, cluster, source)


def _own_topics(app: AppFacts, cluster: ClusterFacts, source: TopicFacts | None) -> Iterator[Finding]:
    names = {"dead letters": app.dlq, "state": app.state}
    if app.states:
        names["lane state"] = app.lane_state
    if app.ledger:
        names["ledger"] = app.ledger_topic
    for check, name in names.items():
        topic = cluster.topics.get(name)
        if topic is None:
            yield note(check, f"topic {name!r} does not exist yet: the app creates it when it starts")
            continue
        yield from _health(check, name, topic, cluster.brokers)
        if source is not None and check == "dead letters" and topic.partitions < source.partitions:
            yield warning(
                check,
                f"topic {name!r} has {counted(topic.partitions, 'partition')}, the source {source.partitions}",
                "nothing to do if the app may alter it: it adds partitions when it starts",
            )
        if check == "state" and cluster.malformed:
            kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(cluster.malformed.items()))
            yield warning(
                check,
                f"topic {name!r} has {counted(sum(cluster.malformed.values()), 'malformed record')}, ignored: {kinds}",
                "find out what writes to it: only the app and Keylane's own tools may",
            )
        cleanup = (topic.settings or {}).get("cleanup.policy", "")
        if check in {"state", "lane state"} and cleanup and cleanup != "compact":
            yield fault(
                check,
                f"topic {name!r} has cleanup.policy={cleanup}: the state of the app's lanes is deleted in time",
                "set its cleanup.policy=compact (kafka-configs.sh --alter --entity-type topics …)",
            )
        if check == "dead letters":
            yield from _message_size(check, name, topic, source, DEAD_LETTER_ROOM_BYTES)
            kept = topic.number("retention.ms")
            if kept is not None and 0 <= kept / 1000 < _WEEK_SECONDS:
                yield warning(
                    check,
                    f"topic {name!r} keeps dead letters for {_age(kept / 1000)} only",
                    "raise its retention.ms: a deleted dead letter cannot be redriven",
                )
            if "compact" in cleanup:
                yield fault(
                    check,
                    f"topic {name!r} is compacted: of a key's dead letters, only the last is kept",
                    "set its cleanup.policy=delete",
                )


def _health(check: str, name: str, topic: TopicFacts, brokers: int) -> Iterator[Finding]:
    sound = True
    if topic.leaderless:
        sound = False
        yield fault(
            check,
            f"{counted(topic.leaderless, 'partition')} of topic {name!r} have no leader: no reads, no writes",
            "start their brokers again",
        )
    if topic.behind:
        sound = False
        yield warning(
            check,
            f"{counted(topic.behind, 'partition')} of topic {name!r} have replicas that are not in sync",
            "check the brokers that hold them",
        )
    if topic.replicas < 2 <= brokers:
        sound = False
        yield warning(
            check,
            f"topic {name!r} has one replica on {brokers} brokers: the failure of one disk loses it",
            "give it 3 replicas (kafka-reassign-partitions.sh)",
        )
    insync = topic.number("min.insync.replicas")
    if insync is not None and insync < 2 <= topic.replicas:
        sound = False
        yield warning(
            check,
            f"topic {name!r} has min.insync.replicas={insync}: a write is acknowledged when one broker has it",
            "set min.insync.replicas=2",
        )
    if insync is not None and insync > topic.replicas:
        sound = False
        yield fault(
            check,
            f"topic {name!r} has min.insync.replicas={insync} and {counted(topic.replicas, 'replica')}: "
            "nothing can be written to it",
            "lower it, or add replicas",
        )
    if topic.settings is None:
        yield unknown(
            check, f"the settings of topic {name!r} could not be read", "allow DESCRIBE_CONFIGS on it"
        )
    if sound:
        yield ok(
            check,
            f"topic {name!r}: {counted(topic.partitions, 'partition')}, {counted(topic.replicas, 'replica')}",
        )


def _compaction(name: str, topic: TopicFacts) -> Iterator[Finding]:
    if "compact" in (topic.settings or {}).get("cleanup.policy", ""):
        yield warning(
            "source",
            f"topic {name!r} is compacted: all but the last message of a key may be removed before they are "
            "processed",
            "set its cleanup.policy=delete, or put the whole state into every message, so that the last one is enough",
        )


def _message_size(
    check: str, name: str, topic: TopicFacts, source: TopicFacts | None, room: int
) -> Iterator[Finding]:
    own_limit, source_limit = topic.number("max.message.bytes"), source and source.number("max.message.bytes")
    if own_limit is not None and source_limit and own_limit < source_limit + room:
        yield warning(
            check,
            f"topic {name!r} accepts messages of {own_limit:,} bytes, the source of {source_limit:,}",
            f"set its max.message.bytes to {source_limit + room} or more",
        )


def judge_progress(app: AppFacts, cluster: ClusterFacts) -> Iterator[Finding]:
    """Check the group, the lag and the retention."""
    group = cluster.group
    if group is not None:
        if group.unread:
            denied = "authoriz" in group.unread.lower()
            yield unknown(
                "group",
                f"group {app.name!r} could not be described: {group.unread}",
                "allow DESCRIBE on it"
                if denied
                else "run the doctor again; the broker may still be starting",
            )
        elif group.state in _ABSENT_STATES:
            yield ok("group", f"group {app.name!r} does not exist yet: the app's first commit creates it")
        elif group.members:
            yield fault(
                "group",
                f"group {app.name!r} has members outside Keylane: {', '.join(group.members[:3])}. "
                "They commit offsets of the same group",
                "stop them, or give them another group.id: the app's name is its group id",
            )
        else:
            yield ok("group", f"group {app.name!r} has no other members")
    yield from _offsets_kept(cluster)
    if cluster.owners:
        yield note(
            "run",
            f"{counted(len(cluster.owners), 'task')} of the app own partitions, for example {cluster.owners[0]}",
            "a run that starts now takes their partitions over",
        )
    yield from _lag(app, cluster)


def _offsets_kept(cluster: ClusterFacts) -> Iterator[Finding]:
    kept = cluster.offsets_kept
    if kept is None:
        return
    if kept < 2 * OFFSET_REFRESH_SECONDS:
        yield fault(
            "offsets",
            f"the cluster deletes an offset {_age(kept)} after its last commit, and a task commits the offset of an "
            f"idle partition only every {_age(OFFSET_REFRESH_SECONDS)}",
            "raise the brokers' offsets.retention.minutes to 10080 (7 days): a partition without an offset runs "
            "again",
        )
    elif kept < _DAY_SECONDS:
        yield warning(
            "offsets",
            f"the cluster deletes an offset {_age(kept)} after its last commit: an app that is stopped for longer "
            "loses its progress",
            "raise the brokers' offsets.retention.minutes to 10080 (7 days), or do not stop the app for longer",
        )
    else:
        yield ok("offsets", f"the offsets of a stopped app are kept for {_age(kept)}")


def _lag(app: AppFacts, cluster: ClusterFacts) -> Iterator[Finding]:
    source = cluster.topics.get(app.source or "")
    if source is None or not cluster.positions:
        return
    lag, sound = 0, True
    for at in cluster.positions:
        lag += max(0, at.end - max(at.beginning, at.committed or 0))
        for finding in _position(at, source, cluster.now):
            sound = False
            yield finding
    if sound:
        yield ok(
            "lag", f"{counted(lag, 'message')} of {app.source!r} not done, none near the end of the retention"
        )
    newest = max((at.newest for at in cluster.positions if at.newest is not None), default=None)
    if newest is None:
        yield unknown("clocks", f"{app.source!r} is empty: no timestamp to compare")
    elif newest > cluster.now + MAX_CLOCK_SKEW_SECONDS:
        whose = (
            "the broker's clock"
            if (source.settings or {}).get("message.timestamp.type") == "LogAppendTime"
            else "the clock of their producer"
        )
        yield warning(
            "clocks",
            f"messages in {app.source!r} are {newest - cluster.now:.0f} s in the future: {whose} is ahead, or this "
            "one is behind",
            "synchronize all machines with a time server (chrony, ntpd): retention and latency depend on timestamps",
        )
    else:
        yield ok("clocks", f"no message of {app.source!r} is in the future")


def _position(at: GroupPosition, source: TopicFacts, now: float) -> Iterator[Finding]:
    where = f"partition {at.partition}"
    if at.committed is not None and at.committed < at.beginning:
        yield fault(
            "lag",
            f"{where}: {at.beginning - at.committed:,} messages were deleted before they were done",
            "raise the source's retention above the longest lag; the deleted messages cannot be recovered",
        )
    if at.committed is not None and at.committed > at.end:
        yield fault(
            "lag",
            f"{where}: the committed offset is {at.committed:,} and the log ends at {at.end:,}: "
            "the topic was recreated, or lost messages at its end",
            "set the group's offset, unless the whole topic shall run (kafka-consumer-groups.sh --reset-offsets)",
        )
    kept = source.number("retention.ms")
    if kept is None or kept <= 0 or at.waiting_since is None:
        return
    share = (now - at.waiting_since) / (kept / 1000)
    if share > _WARNING_SHARE:
        level = fault if share > _FAULT_SHARE else warning
        yield level(
            "lag",
            f"{where}: the oldest message that is not done is {_age(now - at.waiting_since)} old, and the source keeps "
            f"messages for {_age(kept / 1000)}",
            "raise the source's retention.ms, or process faster: a deleted message is lost",
        )


def judge_rights(app: AppFacts, cluster: ClusterFacts) -> Iterator[Finding]:
    """Check what the app's user may do."""
    if cluster.secured is False:
        yield ok(
            "rights", "the cluster has no authorizer, or an authorizer without rules: nothing is restricted"
        )
        return
    missing: dict[tuple[str, bool], list[Right]] = {}
    hidden = []
    for right in app.rights:
        if cluster.allowed.get(right) is False:
            missing.setdefault((_resource(right), right.optional), []).append(right)
        elif right not in cluster.allowed and _is_needed(right, cluster):
            hidden.append(right)
    for (resource, optional), rights in missing.items():
        operations = " and ".join(right.operation for right in rights)
        purposes = "; ".join(dict.fromkeys(right.why for right in rights))
        level = warning if optional else fault
        yield level(
            "rights", f"no {operations} on {resource}", f"allow this user {operations} on it: {purposes}"
        )
    if hidden:
        yield unknown(
            "rights",
            f"could not be found out: {', '.join(map(str, hidden))}",
            "run the doctor again as the app's user when the topics exist",
        )
    if not missing and not hidden and app.rights:
        yield ok("rights", f"all {len(cluster.allowed)} rights that the app needs now are there")


def _resource(right: Right) -> str:
    return str(right).partition(" on ")[2]


def _is_needed(right: Right, cluster: ClusterFacts) -> bool:
    """Whether its absence would be noticed: creating a topic that exists needs no right."""
    return right.operation not in (Operation.CREATE, Operation.ALTER) or (
        right.operation is Operation.CREATE and right.name not in cluster.topics
    )


def _age(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
