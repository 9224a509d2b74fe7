"""Results to an HTTP server: a sink of your own, in order for each account, none lost and none applied twice.

The server is sometimes busy, loses some answers, and refuses one receipt. What it did not answer is sent again under
the same idempotency key; the lane waits meanwhile. The refused receipt is a dead letter.

    python examples/http_sink.py
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import urllib.error
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from playground import Playground, command, verdict

from keylane import App, Message, Poison, Publisher, Retry, Transient

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import SparkSession

    from keylane import SinkResult


class HttpSink:
    """Posts each result. A server that is busy or away is asked again, a result that it refuses is poison."""

    def __init__(self, url: str) -> None:
        self.url = url

    async def open(self) -> None:
        """``urllib`` needs no client; others make it here."""

    async def write(self, results: Sequence[SinkResult], /) -> None:
        for result in results:
            await asyncio.to_thread(self._post, result)

    async def close(self) -> None:
        """Nothing to close either."""

    def _post(self, result: SinkResult) -> None:
        headers = {"X-Account": (result.key or b"").decode(), "Idempotency-Key": result.event_id}
        request = urllib.request.Request(self.url, data=result.value, headers=headers)  # noqa: S310 - http, ours
        try:
            with urllib.request.urlopen(request, timeout=5):  # noqa: S310
                return
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (408, 429) or error.code >= 500:
                raise Transient(f"the server answered {error.code}") from error
            raise Poison(f"the server answered {error.code}") from error
        except OSError as error:
            raise Transient(f"the server did not answer: {error}") from error


class Server:
    """Stores what it receives, once per idempotency key; every fifth request fails before that, every seventh after."""

    def __init__(self) -> None:
        self.accounts: dict[str, list[int]] = {}
        self.answers: Counter[int] = Counter()
        self.repeats = 0
        self._known: set[str] = set()
        self._lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                status = server.take(self.headers["X-Account"], self.headers["Idempotency-Key"], body)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """The example prints what matters."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}/receipts"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def take(self, account: str, key: str, body: dict[str, Any]) -> int:
        """The status to answer."""
        with self._lock:
            number = self.answers.total()
            if number % 5 == 4:
                status = 503
            elif body["number"] == 11:
                status = 422
            else:
                self.repeats += key in self._known
                if key not in self._known:
                    self._known.add(key)
                    self.accounts.setdefault(account, []).append(body["number"])
                status = 504 if number % 7 == 6 else 204
            self.answers[status] += 1
            return status

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


def shop(url: str) -> App:
    """Writes a receipt for every payment."""
    app = App(
        "example-http",
        source="example-http.in",
        sink=HttpSink(url),
        decode="json",
        retry=Retry(attempts=20, wait_initial=0.01, wait_max=0.1),
    )

    @app.stage
    async def receipt(msg: Message) -> dict[str, Any]:
        return {"number": msg.value["number"], "text": f"paid {msg.value['amount']}"}

    return app


def main(messages: int = 2000, bootstrap: str | None = None, spark: SparkSession | None = None) -> bool:
    """Whether the server has every receipt once, in the order of its account."""
    accounts = 40
    expected: dict[str, list[int]] = {}
    server = Server()
    try:
        with Playground(bootstrap, spark) as place:
            app = shop(server.url)
            place.topics(app.source)
            with Publisher(app.source, bootstrap=place.bootstrap, type="Paid") as payments:
                for number in range(messages):
                    key = f"account-{number % accounts}"
                    payments.send(
                        {"number": number, "amount": number % 100 + 1}, key=key, event_id=f"p-{number}"
                    )
                    if number != 11:
                        expected.setdefault(key, []).append(number)
            place.run(app)
            letters = [json.loads(letter.value)["number"] for letter in place.read(app.dlq, 1)]
    finally:
        server.close()
    busy, lost = server.answers[503], server.answers[504]
    print(
        f"{messages:,} payments; busy {busy:,} times, lost {lost:,} answers, knew {server.repeats:,} already"
    )
    return verdict(
        the_server_was_busy_and_lost_answers=busy > 0 and lost > 0 and server.repeats > 0,
        every_receipt_is_there_once_in_the_order_of_its_account=server.accounts == expected,
        the_refused_receipt_is_the_one_dead_letter=letters == [11],
    )


if __name__ == "__main__":
    sys.exit(command(main, messages=2000))
