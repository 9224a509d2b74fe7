"""The limit of a Python Kafka client: a consume(1000) loop that produces every message on, and nothing else.

One process per share of the partitions; order is only what the client gives, and nothing is retried.
Prints "P <time> <done> <worker>" lines.
"""

from __future__ import annotations

import multiprocessing as mp
import signal
import sys
import time
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition


def share(opt: dict[str, str], parts: list[int], n: int) -> None:
    """Process one process's partitions, to the end they have now if ``n`` is given, otherwise endlessly."""
    consumer = Consumer(
        {
            "bootstrap.servers": opt["brokers"],
            "group.id": opt["group"],
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 10,
            "queued.min.messages": 100000,
            "fetch.queue.backoff.ms": 10,
        }
    )
    out = opt["out"]
    producer = Producer(
        {
            "bootstrap.servers": opt["brokers"],
            "linger.ms": float(opt.get("linger", "2")),
            "acks": "all",
            "compression.type": "lz4",
            "queue.buffering.max.messages": 500000,
        }
    )
    start = [TopicPartition(opt["topic"], i, 0) for i in parts]
    want = sum(consumer.get_watermark_offsets(at)[1] for at in start) if n else None
    consumer.assign(start)
    done = [0]

    def acked(err: Any, _msg: Any) -> None:
        if err:
            raise SystemExit(str(err))
        done[0] += 1

    last = 0.0
    while want is None or done[0] < want:
        for m in consumer.consume(1000, 0.01):
            while True:
                try:
                    producer.produce(out, key=m.key(), value=m.value(), on_delivery=acked)
                    break
                except BufferError:
                    producer.poll(0.05)
        producer.poll(0)
        if time.time() - last > 0.2:
            last = time.time()
            print("P", last, done[0], parts[0], flush=True)
    print("P", time.time(), done[0], parts[0], flush=True)
    consumer.commit(offsets=consumer.position(start), asynchronous=False)


def main() -> None:
    """Start the processes and wait for them."""
    opt = dict(a.split("=", 1) for a in sys.argv[1:])
    procs, total = int(opt.get("procs", "2")), int(opt.get("parts", "8"))
    shares = [[i for i in range(total) if i % procs == w] for w in range(procs)]
    workers = [mp.Process(target=share, args=(opt, parts, int(opt.get("n", "0")))) for parts in shares]
    for worker in workers:
        worker.start()

    def stop(*_: Any) -> None:
        for worker in workers:
            worker.terminate()

    signal.signal(signal.SIGTERM, stop)
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
