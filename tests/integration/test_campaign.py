"""A few seeds of the fault campaign, and the judge put to the test by an app that is broken on purpose.

More of it: `make soak`, or `python -m campaign --help`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from campaign.controls import COMMIT_AHEAD
from campaign.fleet import Fleet
from campaign.plan import Kind, Plan
from campaign.report import story
from campaign.runner import run

if TYPE_CHECKING:
    from collections.abc import Iterator

DELIVERY = "at_least_once"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("campaign")) as running:
        yield running


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("kind", "delivery"),
    [
        pytest.param(Kind.WORKER, "exactly_once", marks=pytest.mark.slow),
        pytest.param(Kind.DRIVER, "at_least_once", marks=pytest.mark.slow),
        (Kind.ZOMBIE, "at_least_once"),
    ],
    ids=lambda value: getattr(value, "label", value),
)
def test_a_fault_under_load_breaks_no_promise(fleet: Fleet, kind: Kind, delivery: str) -> None:
    plan = Plan.of(kind.ending)
    outcome = run(plan, delivery, fleet)
    assert outcome.ruling.ok, story(outcome)
    assert outcome.ruling.facts["sent"] == plan.messages
    assert outcome.ruling.facts["samples"] > 20


@pytest.mark.slow
@pytest.mark.timeout(150)
def test_a_commit_rule_that_is_switched_off_is_found(fleet: Fleet) -> None:
    """Progress that runs ahead of what is done: seen at once in the group, and as a loss after a crash."""
    plan = replace(Plan.of(Kind.WORKER.ending), messages=1600, rate=800.0)
    outcome = run(plan, DELIVERY, fleet, breaks=COMMIT_AHEAD)
    assert {"commit ahead", "lost", "sink lost"} <= set(outcome.ruling.rules), story(outcome)
