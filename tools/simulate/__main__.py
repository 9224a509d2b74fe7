"""The simulation's command line."""

from __future__ import annotations

import argparse
import sys

from simulate.table import print_table

ABOUT = """\
Measures what limits an app with very many partitions and tasks, on this machine: the real planner, the sizes of what is
written for each epoch, commits of simulated tasks to a real broker, restoring, telemetry, and Spark's time per task.
docs/scale.md says what follows from the figures."""

MORE = """\
for example:
  python -m simulate planner                           10,000 partitions for 20,000 tasks
  python -m simulate planner --partitions 1000 --tasks 2000
  python -m simulate sizes                             plans, offset log, pickles
  python -m simulate commits --counts 10,50,100,300    transactional clients against an embedded broker
  python -m simulate commits --interval 0              without a pause between commits
  python -m simulate restore --counts 100000,1000000
  python -m simulate telemetry --tasks 2000
  python -m simulate jobs --counts 100,1000

It needs src/ and tools/ on PYTHONPATH. More: tools/simulate/README.md."""


def main(given: list[str] | None = None) -> int:
    """Measure what was asked for."""
    args = _parser().parse_args(given)
    # Each of them imports only what it needs: Spark and the Kafka client take seconds.
    if args.what == "planner":
        from simulate import planner  # noqa: PLC0415

        rows = planner.measure(args.partitions, args.tasks)
        print_table(f"Planner: {args.partitions:,} partitions for {args.tasks:,} tasks", rows)
    elif args.what == "sizes":
        from simulate import sizes  # noqa: PLC0415

        rows = sizes.measure(args.partitions, args.tasks)
        print_table(f"Sizes: {args.partitions:,} partitions for {args.tasks:,} tasks", rows)
    elif args.what == "commits":
        from simulate import commits  # noqa: PLC0415

        rows = commits.measure(_numbers(args.counts), args.seconds, args.interval)
        print_table(f"Commits: each task every {args.interval:g} s, one broker", rows)
    elif args.what == "restore":
        from simulate import restore  # noqa: PLC0415

        print_table("Restore", restore.measure(_numbers(args.counts), _numbers(args.partitions)))
    elif args.what == "telemetry":
        from simulate import telemetry  # noqa: PLC0415

        rows = telemetry.measure(args.tasks, args.partitions)
        print_table(f"Telemetry: {args.tasks:,} tasks with {args.partitions} partitions each", rows)
    else:
        from simulate import jobs  # noqa: PLC0415

        rows = jobs.measure(_numbers(args.counts), args.kilobytes)
        print_table(f"Spark jobs on local[2], {args.kilobytes} KB for each task", rows)
    return 0


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m simulate",
        description=ABOUT,
        epilog=MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    every = parser.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name, about in (
        ("planner", "times of the real planner"),
        ("sizes", "sizes of what is written for each epoch"),
    ):
        one = every.add_parser(name, help=about)
        one.add_argument("--partitions", type=int, default=10_000, metavar="N", help="of the source (10,000)")
        one.add_argument(
            "--tasks",
            type=int,
            default=20_000 if name == "planner" else 2000,
            metavar="N",
            help="(%(default)s)",
        )
    one = every.add_parser("commits", help="transactions per second of one broker")
    one.add_argument("--counts", default="10,50,100,200,300", metavar="N,N", help="tasks (%(default)s)")
    one.add_argument("--seconds", type=float, default=15.0, metavar="S", help="of each round (%(default)s)")
    one.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="S",
        help="seconds between a task's commits (%(default)s)",
    )
    one = every.add_parser("restore", help="time to read the state topic")
    one.add_argument("--counts", default="10000,100000,500000", metavar="N,N", help="records (%(default)s)")
    one.add_argument(
        "--partitions", default="100,1000", metavar="N,N", help="of empty state topics (%(default)s)"
    )
    one = every.add_parser("telemetry", help="records per second of one reader")
    one.add_argument("--tasks", type=int, default=2000, metavar="N", help="(%(default)s)")
    one.add_argument("--partitions", type=int, default=5, metavar="N", help="of each task (%(default)s)")
    one = every.add_parser("jobs", help="Spark's own time per task")
    one.add_argument("--counts", default="100,1000,2000", metavar="N,N", help="tasks (%(default)s)")
    one.add_argument(
        "--kilobytes", type=int, default=1, metavar="N", help="of data for each task (%(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
