"""A failure policy of the user's own."""

from __future__ import annotations

import pickle

import pytest

from keylane import App, FailedMessage, FailurePolicy, Message, Poison, SettingsError
from keylane.policies.failure_policy import POLICIES
from keylane.testing import Harness, Release, RunResult

pytestmark = pytest.mark.usefixtures("quiet")


class SkipAndTell(FailurePolicy):
    """Skips, and remembers what."""

    def __init__(self) -> None:
        self.told: list[tuple[bytes | None, str]] = []

    def decide(self, failed: FailedMessage) -> None:
        self.told.append((failed.message.key, failed.info.message))
        failed.skip()


class BlockTheLedger(FailurePolicy):
    """Blocks the lane of one key and skips the messages of others."""

    blocks = True

    def decide(self, failed: FailedMessage) -> None:
        if failed.message.key == b"ledger":
            failed.block()
        else:
            failed.skip()


class Undecided(FailurePolicy):
    """Forgets to decide."""

    def decide(self, failed: FailedMessage) -> None:
        pass


class Twice(FailurePolicy):
    """Decides twice."""

    def decide(self, failed: FailedMessage) -> None:
        failed.skip()
        failed.skip()


class Undeclared(FailurePolicy):
    """Blocks without saying so."""

    def decide(self, failed: FailedMessage) -> None:
        failed.block()


def run(policy: FailurePolicy, *faults: Release) -> RunResult:
    app = App("app", source="in", sink="out", on_failure=policy)

    @app.stage
    def stage(msg: Message) -> bytes:
        if msg.value == b"bad":
            raise Poison("broken")
        return bytes(msg.value)

    harness = Harness(app, faults=faults)
    for key in ("ledger", "mail"):
        harness.send("bad", key=key)
        harness.send("good", key=key)
    return harness.run()


def test_an_own_policy_decides_for_each_message() -> None:
    result = run(policy := SkipAndTell())
    result.verdict.raise_if_bad()
    assert sorted(policy.told) == [(b"ledger", "broken"), (b"mail", "broken")]
    assert len(result.dead) == 2
    assert len(result.results) == 2


def test_an_own_policy_blocks_some_lanes_only() -> None:
    result = run(BlockTheLedger())
    result.verdict.raise_if_bad()
    assert [written.key for written in result.results] == [b"mail"]
    assert len(result.waiting) == 2


@pytest.mark.parametrize(
    ("policy", "why"),
    [
        (Undecided(), "decided nothing"),
        (Twice(), "decided already"),
        (Undeclared(), "not declared"),
        (FailurePolicy(), "needs a method decide"),
    ],
)
def test_a_policy_must_decide_once_as_declared(policy: FailurePolicy, why: str) -> None:
    with pytest.raises(Exception, match=why):
        run(policy)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(SettingsError, match="on_failure must be 'skip'"):
        App("app", source="in", on_failure="retry")  # type: ignore[arg-type]


def test_named_policies_stay_themselves_when_pickled() -> None:
    assert all(pickle.loads(pickle.dumps(one)) is one for one in POLICIES.values())  # noqa: S301
