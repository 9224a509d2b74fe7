"""The web console in a real Chromium, with a real broker and real apps on Spark."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from keylane import App, Message, Poison, Retry, Telemetry, Transient
from keylane.console.server import ConsoleServer
from support.browser import MISSING, Visitor, find
from support.topics import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser
    from pyspark.sql import SparkSession

    from keylane.spark.query import LaneQuery
    from support.topics import Log

PICTURES = os.environ.get("KEYLANE_PICTURES")
"""A folder for screenshots: docs/console is made so."""


class Shop:
    """Two apps that run on Spark. Their handlers fail while a file exists."""

    def __init__(self, log: Log, spark: SparkSession, folder: Path) -> None:
        self.log = log
        self.bank, self.post = folder / "bank-is-down", folder / "post-is-closed"
        bank, post = str(self.bank), str(self.post)
        self.orders = App(
            "orders",
            source="orders.in",
            sink="orders.out",
            on_failure="block",
            retry=Retry(attempts=3, wait_initial=0.05, wait_max=0.1),
            commit_interval=0.2,
            telemetry=Telemetry(interval=0.5),
        )

        @self.orders.stage
        async def charge(msg: Message) -> Any:
            if msg.value == b"bad" and os.path.exists(bank):  # noqa: ASYNC240, PTH110 - shipped to a worker
                raise Transient("the bank does not answer")
            return msg.value

        self.mail = App(
            "mail",
            source="mail.in",
            commit_interval=0.2,
            telemetry=Telemetry(interval=0.5),
            failure_guard=None,
        )

        @self.mail.stage
        async def send(msg: Message) -> None:
            if msg.value.startswith(b"{") and os.path.exists(post):  # noqa: ASYNC240, PTH110
                raise Poison(f"address {msg.offset} is unknown")

        log.create("orders.in", "orders.out", partitions=4)
        log.create("mail.in", partitions=2)
        self.queries: list[LaneQuery] = [
            app.start(
                spark,
                bootstrap=log.bootstrap,
                tasks=1,
                epoch=600,
                checkpoint_location=str(folder / app.name),
            )
            for app in (self.orders, self.mail)
        ]

    def order(self, key: bytes, value: bytes) -> None:
        self.log.send("orders.in", [{"key": key, "value": value}])

    def stop(self) -> None:
        for query in self.queries:
            query.stop()


@pytest.fixture(scope="module")
def shop(log: Log, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    made = Shop(log, spark, tmp_path_factory.mktemp("shop"))
    try:
        log.send("orders.in", [{"key": b"k%d" % (n % 60), "value": b"%d" % n} for n in range(600)])
        wait_until(lambda: log.lag("orders", "orders.in") == 0, 50, "the app works")
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def links() -> list[str]:
    return []


@pytest.fixture(scope="module")
def console(shop: Shop, links: list[str]) -> Iterator[ConsoleServer]:
    with ConsoleServer(
        shop.log.settings, ["orders", "mail"], port=0, allow_actions=True, announce=links.append
    ) as made:
        links.append(made.link)
        wait_until(
            lambda: all(
                app.get("lag") is not None for app in json.loads(made.hub.overview())["apps"] or [{}]
            ),
            20,
            "the console has read both apps",
        )
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = find()
    if found is None:
        pytest.skip(MISSING)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=["--no-sandbox", "--disable-gpu"])
        yield running
        running.close()


@pytest.fixture
def visitor(browser: Browser, console: ConsoleServer, links: list[str]) -> Iterator[Visitor]:
    with Visitor(browser, links[-1]) as made:
        yield made
        assert made.errors == []


def picture(visitor: Visitor, name: str) -> None:
    if PICTURES:
        visitor.page.wait_for_timeout(300)
        visitor.page.screenshot(path=str(Path(PICTURES) / f"{name}.png"))


def test_blocked_lane_is_shown_and_released(shop: Shop, visitor: Visitor) -> None:
    page = visitor.page
    page.locator("text=keeping up").or_(page.locator("text=idle")).first.wait_for()
    shop.bank.touch()
    try:
        shop.log.send(
            "orders.in",
            [{"key": b"k42", "value": b"bad"}, *({"key": b"k42", "value": b"next"} for _ in range(9))],
        )
        began = time.monotonic()
        page.locator("text=stuck on lane k42").wait_for(timeout=15_000)
        took = time.monotonic() - began
        picture(visitor, "overview")
        page.get_by_role("link", name="orders", exact=True).click()
        page.locator("h1", has_text="orders").wait_for()
        page.get_by_role("link", name="Lanes").click()
        page.get_by_label("Find the lane of a key").fill("k42")
        picture(visitor, "lanes")
        page.get_by_role("button", name="Open the lane").click()
        page.locator("#attempts").wait_for()
        assert "Transient: the bank does not answer" in visitor.text()
        assert page.locator("#attempts tbody tr").count() == 3
        assert "10 messages of this key" in visitor.text()
        assert "keylane lanes release orders k42" in visitor.text()
        picture(visitor, "lane")
    finally:
        shop.bank.unlink()
    page.get_by_role("button", name="Release").click()
    page.get_by_label("Reason").fill("the bank answers again")
    picture(visitor, "release")
    page.locator("dialog").get_by_role("button", name="Release").click()
    page.locator("text=This lane is not stopped").wait_for()
    page.get_by_role("link", name="Keylane, overview").click()
    page.locator("text=stuck on lane").wait_for(state="detached")
    visitor.open("/apps/orders/audit")
    page.locator("text=the bank answers again").wait_for()
    assert took < 5
