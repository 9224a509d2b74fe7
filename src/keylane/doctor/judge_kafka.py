"""From facts to findings: an app's topics, its progress, its rights. Nothing here asks anybody."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keylane.doctor.finding import Finding, counted, fault, note, ok, unknown, warning
from keylane.doctor.judge import SKEW
from keylane.kafka.cluster import DEAD_LETTER_ROOM
from keylane.worker.progress import OFFSET_REFRESH_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from keylane.doctor.facts import AppFacts, ClusterFacts, GroupPosition, TopicFacts

_HALF, _NEARLY = 0.5, 0.9
"""Shares of the retention that a lag may use up."""
_DAY, _WEEK = 86_400.0, 7 * 86_400.0
_ABSENT = ("absent", "DEAD", "ConsumerGroupState.DEAD")
"""What a broker says of a group that nobody has used."""


def judge_topics(app: AppFacts, cluster: ClusterFacts) -> Iterator[Finding]:
    """The topics that the app reads, writes and owns."""
    source = cluster.topics.get(app.source or "")
    if app.source is not None and source is None:
        yield fault(
            "source", f"topic {app.source!r} does not exist", "create it, or correct the app's source"
        )
    if source is not None and app.source is not None:
        yield from _health("source", app.source, source, cluster.brokers)
        yield from _source(app.source, source)
    if app.sink is not None:
        sink = cluster.topics.get(app.sink)
        if sink is None:
            yield fault("sink", f"topic {app.sink!r} does not exist", "create it, or correct the app's sink")
        else:
            yield from _health("sink", app.sink, sink, cluster.brokers)
            yield from _smaller("sink", app.sink, sink, source, 0)
    yield from _own_topics(app, cluster, source)


def _own_topics(app: AppFacts, cluster: ClusterFacts, source: TopicFacts | None) -> Iterator[Finding]:
    names = {"dead letters": app.dlq, "state": app.state}
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
                "nothing to do: it grows when the app starts, if the app may alter it",
            )
        if check == "state" and cluster.malformed:
            kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(cluster.malformed.items()))
            yield warning(
                check,
                f"topic {name!r} has {counted(sum(cluster.malformed.values()), 'malformed record')}, ignored: {kinds}",
                "find out who writes into it: only the app and Keylane's own tools may",
            )
        cleanup = (topic.settings or {}).get("cleanup.policy", "")
        if check == "state" and cleanup and cleanup != "compact":
            yield fault(
                check,
                f"topic {name!r} has cleanup.policy={cleanup}: what the app knows of its lanes is deleted in time",
                "set its cleanup.policy=compact (kafka-configs.sh --alter --entity-type topics …)",
            )
        if check == "dead letters":
            yield from _smaller(check, name, topic, source, DEAD_LETTER_ROOM)
            kept = topic.number("retention.ms")
            if kept is not None and 0 <= kept / 1000 < _WEEK:
                yield warning(
                    check,
                    f"topic {name!r} keeps dead letters for {_age(kept / 1000)} only",
                    "raise its retention.ms: a letter that is deleted cannot be redriven",
                )
            if "compact" in cleanup:
                yield fault(
                    check,
                    f"topic {name!r} is compacted: of the dead letters of a key only the last is kept",
                    "set its cleanup.policy=delete",
                )


def _health(check: str, name: str, topic: TopicFacts, brokers: int) -> Iterator[Finding]:
    sound = True
    if topic.leaderless:
        sound = False
        yield fault(
            check,
            f"{counted(topic.leaderless, 'partition')} of topic {name!r} have no leader: nobody can read or write them",
            "bring their brokers back",
        )
    if topic.behind:
        sound = False
        yield warning(
            check,
            f"{counted(topic.behind, 'partition')} of topic {name!r} have replicas that are not in sync",
            "look at the brokers that hold them",
        )
    if topic.replicas < 2 <= brokers:
        sound = False
        yield warning(
            check,
            f"topic {name!r} has one replica on {brokers} brokers: one disk that fails loses it",
            "give it 3 replicas (kafka-reassign-partitions.sh)",
        )
    insync = topic.number("min.insync.replicas")
    if insync is not None and insync < 2 <= topic.replicas:
        sound = False
        yield warning(
            check,
            f"topic {name!r} has min.insync.replicas={insync}: a result counts as written when one broker has it",
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


def _source(name: str, topic: TopicFacts) -> Iterator[Finding]:
    if "compact" in (topic.settings or {}).get("cleanup.policy", ""):
        yield warning(
            "source",
            f"topic {name!r} is compacted: of the messages of a key that wait, all but the last may be removed "
            "before they are processed",
            "set its cleanup.policy=delete; or let messages carry whole states, so that the last one is enough",
        )


def _smaller(
    check: str, name: str, topic: TopicFacts, source: TopicFacts | None, room: int
) -> Iterator[Finding]:
    mine, theirs = topic.number("max.message.bytes"), source and source.number("max.message.bytes")
    if mine is not None and theirs and mine < theirs + room:
        yield warning(
            check,
            f"topic {name!r} takes messages of {mine:,} bytes, the source of {theirs:,}",
            f"set its max.message.bytes to {theirs + room} or more",
        )


def judge_progress(app: AppFacts, cluster: ClusterFacts) -> Iterator[Finding]:
    """The group, the lag and the retention."""
    group = cluster.group
    if group is not None:
        if group.unread:
            denied = "authoriz" in group.unread.lower()
            yield unknown(
                "group",
                f"group {app.name!r} could not be described: {group.unread}",
                "allow DESCRIBE on it" if denied else "ask again; the broker may just be starting",
            )
        elif group.state in _ABSENT:
            yield ok("group", f"group {app.name!r} does not exist yet: the app's first commit creates it")
        elif group.members:
            yield fault(
                "group",
                f"group {app.name!r} has members that are not Keylane's: {', '.join(group.members[:3])}. "
                "They commit where the app does",
                "stop them, or give them another group.id: the app's name is its group",
            )
        else:
            yield ok("group", f"group {app.name!r} is used by nobody else")
    yield from _offsets_kept(cluster)
    if cluster.owners:
        yield note(
            "run",
            f"{counted(len(cluster.owners), 'task')} of the app own partitions, for example {cluster.owners[0]}",
            "a run that is started now takes over from it",
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
            f"idle partition again after {_age(OFFSET_REFRESH_SECONDS)}",
            "raise the brokers' offsets.retention.minutes to 10080 (7 days): without its offset a partition runs again",
        )
    elif kept < _DAY:
        yield warning(
            "offsets",
            f"the cluster deletes an offset {_age(kept)} after its last commit: an app that is stopped for longer "
            "forgets what is done",
            "raise the brokers' offsets.retention.minutes to 10080 (7 days), or do not stop the app for longer",
        )
    else:
        yield ok("offsets", f"the offsets of an app that is stopped are kept for {_age(kept)}")


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
            "lag", f"{counted(lag, 'message')} of {app.source!r} not done, none near the end of its retention"
        )
    future = [at for at in cluster.positions if at.newest is not None and at.newest > cluster.now + SKEW]
    if future:
        ahead = max((at.newest or 0) - cluster.now for at in future)
        whose = (
            "the broker's clock"
            if (source.settings or {}).get("message.timestamp.type") == "LogAppendTime"
            else "the clock of who wrote them"
        )
        yield warning(
            "clocks",
            f"messages in {app.source!r} are {ahead:.0f} s in the future: {whose} is ahead, or this one behind",
            "let all machines follow a time server (chrony, ntpd): retention and latency count by these times",
        )
    elif any(at.newest is not None for at in cluster.positions):
        yield ok("clocks", f"no message of {app.source!r} is in the future")
    else:
        yield unknown("clocks", f"{app.source!r} is empty: there is no timestamp to compare")


def _position(at: GroupPosition, source: TopicFacts, now: float) -> Iterator[Finding]:
    where = f"partition {at.partition}"
    if at.committed is not None and at.committed < at.beginning:
        yield fault(
            "lag",
            f"{where}: {at.beginning - at.committed:,} messages were deleted before they were done",
            "raise the source's retention above the longest lag; what is gone is gone",
        )
    if at.committed is not None and at.committed > at.end:
        yield fault(
            "lag",
            f"{where}: the group is at {at.committed:,} and the log ends at {at.end:,}: "
            "the topic was made anew, or lost its end",
            "set the group's offset if not all of it is to run (kafka-consumer-groups.sh --reset-offsets)",
        )
    kept = source.number("retention.ms")
    if kept is None or kept <= 0 or at.waiting_since is None:
        return
    share = (now - at.waiting_since) / (kept / 1000)
    if share > _HALF:
        which = fault if share > _NEARLY else warning
        yield which(
            "lag",
            f"{where}: the oldest message that is not done is {_age(now - at.waiting_since)} old, and the source keeps "
            f"messages for {_age(kept / 1000)}",
            "raise the source's retention.ms, or process faster: what is deleted is lost",
        )


def judge_rights(app: AppFacts, cluster: ClusterFacts) -> Iterator[Finding]:
    """What the app may do there."""
    if cluster.secured is False:
        yield ok("rights", "the cluster has no authorizer, or no rules in it: nothing is restricted")
        return
    needed = {
        app.source: {"READ", "DESCRIBE_CONFIGS"},
        app.sink: {"WRITE", "DESCRIBE_CONFIGS"},
        app.dlq: {"READ", "WRITE"},
        app.state: {"READ", "WRITE"},
    }
    hidden = []
    sound = True
    for name, wanted in needed.items():
        topic = cluster.topics.get(name) if name else None
        if topic is None:
            continue
        if topic.rights is None:
            hidden.append(str(name))
            continue
        missing = sorted(wanted - topic.rights)
        if missing:
            sound = False
            yield fault(
                "rights",
                f"no {' and '.join(missing)} on topic {name!r}",
                f"allow it to the app's user on {name!r}",
            )
    absent = [name for name in (app.dlq, app.state) if name not in cluster.topics]
    if absent and cluster.rights is not None and "CREATE" not in cluster.rights:
        sound = False
        yield fault(
            "rights",
            f"{', '.join(map(repr, absent))} must be created, and CREATE on the cluster is not allowed",
            "allow it, or create them with as many partitions as the source (the state topic compacted)",
        )
    group = cluster.group
    if group is not None and group.rights is not None and "READ" not in group.rights:
        sound = False
        yield fault("rights", f"no READ on group {app.name!r}", "allow it: progress is committed there")
    if cluster.transactional is False:
        sound = False
        yield fault(
            "rights",
            f"no rule allows WRITE on transactional ids that begin with {app.name + '.'!r}",
            "allow WRITE and DESCRIBE on them: progress is written in transactions",
        )
    elif cluster.transactional is None:
        yield unknown(
            "rights",
            "rights on transactional ids could not be read",
            "allow DESCRIBE on the cluster to see them",
        )
    if hidden:
        yield unknown("rights", f"the broker does not say what is allowed on {', '.join(hidden)}")
    if sound:
        yield ok("rights", "what could be seen is allowed")


def _age(seconds: float) -> str:
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
