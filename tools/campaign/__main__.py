"""The campaign's command line."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import tempfile
from pathlib import Path

from campaign.fleet import Fleet
from campaign.plan import PAIR_NUMBER, SEED_STEP, Kind, Plan
from campaign.report import as_json, line, story, table
from campaign.runner import Outcome, run
from keylane import App

ABOUT = """\
Injects faults into a real app: starts a broker, Spark and a load, injects faults at moments that a seed decides, and
judges the outcome by the history of every attempt, the group's progress as read from outside, and the topics.
The exit code is 1 when a promise was broken; then the run's story is printed and its folder is kept."""

FAULTS = "\n".join(f"  {kind.ending:02}  {kind.label:<13} {kind.about}" for kind in Kind)

MORE = f"""\
the faults, each with the ending of its seeds (any other ending, such as {PAIR_NUMBER}: two faults, drawn by the seed):
{FAULTS}

for example:
  python -m campaign                                   every fault once
  python -m campaign --seeds 10 --fault worker         ten seeds of a killed worker, another moment each
  python -m campaign --seeds 5 --fault broker --fault driver-edge
  python -m campaign --pairs 60                        sixty times two faults
  python -m campaign --pairs 60 --first 60             the next sixty
  python -m campaign --seed 701 --delivery at_least_once    one of them again, with its story
  python -m campaign --seeds 3 --json found.json --keep /tmp/found

With KEYLANE_CAMPAIGN_PARTITIONS=1 the source has one partition, which two tasks share (4 if it is not set).
It needs src/, tests/ and tools/ on PYTHONPATH; `make soak` and `make replay-fault SEED=701` set it.
More: tools/campaign/README.md."""


def main(given: list[str] | None = None) -> int:
    """Run the requested seeds; 1 when any run was bad."""
    args = _parser().parse_args(given)
    plans = [Plan.of(seed, patient=args.patient) for seed in _seeds(args)]
    outcomes: list[Outcome] = []
    folder = Path(args.keep) if args.keep else Path(tempfile.mkdtemp(prefix="keylane-campaign-"))
    deliveries = _deliveries(args.delivery)
    total = len(plans) * len(deliveries)
    try:
        with Fleet(folder) as fleet:
            for plan in plans:
                for delivery in deliveries:
                    outcome = run(plan, delivery, fleet)
                    outcomes.append(outcome)
                    print(line(len(outcomes), total, outcome), flush=True)
                    if not outcome.ruling.ok or args.seed is not None:
                        print(story(outcome), flush=True)
                    outcome.evidence = None  # a night's worth of them would not fit
    except KeyboardInterrupt:
        print("stopped", flush=True)
    print(table(outcomes))
    if args.json:
        Path(args.json).write_text(json.dumps(as_json(outcomes), indent=1) + "\n")
    return 1 if any(not outcome.ruling.ok for outcome in outcomes) else 0


def _seeds(args: argparse.Namespace) -> list[int]:
    if args.seed is not None:
        return [args.seed]
    kinds = [Kind.named(label) for label in args.fault]
    if not kinds and (args.seeds or not args.pairs):
        kinds = list(Kind)
    numbers = range(args.first, args.first + (args.seeds or 1))
    singles = [number * SEED_STEP + kind.ending for number in numbers for kind in kinds]
    return singles + [
        number * SEED_STEP + PAIR_NUMBER for number in range(args.first, args.first + args.pairs)
    ]


def _deliveries(asked: str) -> list[str]:
    if "delivery" not in inspect.signature(App).parameters:
        if asked != "at_least_once":
            print("this App knows one delivery only: at_least_once", flush=True)
        return ["at_least_once"]
    return ["at_least_once", "exactly_once"] if asked == "both" else [asked]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m campaign",
        description=ABOUT,
        epilog=MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    labels = [kind.label for kind in Kind]
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="replay this seed (same faults, moments and load) and print its story",
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="how many seeds of every chosen fault (1)")
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        choices=labels,
        metavar="NAME",
        help="this fault; repeat the option for more (default: all)",
    )
    parser.add_argument(
        "--pairs", type=int, default=0, metavar="N", help="how many seeds of two faults at once"
    )
    parser.add_argument(
        "--first", type=int, default=0, metavar="N", help="start with the N-th seed of each fault (0)"
    )
    parser.add_argument(
        "--delivery",
        default="both",
        choices=["at_least_once", "exactly_once", "both"],
        help="the app's delivery (both)",
    )
    parser.add_argument(
        "--patient",
        action="store_true",
        help="brokers may be away for up to 20 s instead of 8; changes what seeds mean",
    )
    parser.add_argument("--json", metavar="FILE", help="write all results to this file")
    parser.add_argument(
        "--keep", metavar="FOLDER", help="folder for bad runs and drivers' logs (a temporary one)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
