"""The web console in a real Chromium, with a real broker and real apps on Spark."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from playwright.sync_api import sync_playwright

from keylane import App, Message, Poison, Retry, Telemetry, Transient
from keylane.console.server import ConsoleServer
from keylane.dlq.headers import dead_letter_headers
from keylane.kafka.cluster import Cluster
from keylane.lanes.lane_record import LaneRecord, LaneStatus
from keylane.policies.failure_info import FailedAttempt, FailureInfo
from keylane.state.labels import Labels
from keylane.telemetry.lane_wall import STATES
from support.browser import MISSING, Visitor, find
from support.tasks import note_plan
from support.topics import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, FloatRect, Route
    from pyspark.sql import SparkSession

    from keylane.spark.query import LaneQuery
    from support.topics import Log

pytestmark = pytest.mark.timeout(150)
"""The first test starts a broker, Spark, two apps and a browser; the race starts a second set of them."""
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
            if msg.value == b"slow":
                await asyncio.sleep(8)
            elif msg.value.startswith(b"load"):
                await asyncio.sleep(0.3)
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
        wait_until(lambda: log.lag("orders", "orders.in") == 0, 90, "the app works")
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
        # Without the traceback, which has paths of this machine in it.
        height = {"lane": 790, "letter": 430}.get(name.partition("-")[0], 900)
        clip: FloatRect = {"x": 0, "y": 0, "width": 1280, "height": height}
        visitor.page.screenshot(path=str(Path(PICTURES) / f"{name}.png"), clip=clip)


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


def test_dead_letters_are_redriven_by_filter_with_a_dry_run(
    shop: Shop, visitor: Visitor, browser: Browser, links: list[str]
) -> None:
    shop.post.touch()
    shop.log.send(
        "mail.in",
        [
            {"key": b"user-%d" % (n % 50), "value": b'{"n": %d}' % n, "headers": [("trace", b"t%d" % n)]}
            for n in range(500)
        ],
    )
    page = visitor.open("/apps/mail/letters")
    page.locator("h1", has_text="500 dead letters of 50 lanes").wait_for(timeout=20_000)
    picture(visitor, "letters")
    shop.post.unlink()
    with Visitor(browser, links[-1]) as other:
        other.open("/apps/mail/letters")
        other.page.locator("h1", has_text="500 dead letters of 50 lanes").wait_for()
        page.get_by_label("Stage").select_option("send")
        page.locator("text=clear").wait_for()
        page.get_by_role("button", name="Redrive all of these").click()
        page.locator("dialog", has_text="500 dead letters of 50 lanes would be redriven").wait_for()
        assert "keylane dlq redrive mail --stage send" in visitor.text("dialog")
        assert page.locator("dialog tbody tr").count() == 50
        picture(visitor, "dry-run")
        page.locator("dialog").get_by_role("button", name="Redrive 500 dead letters").click()
        assert page.locator("dialog[open]").count() == 1  # not without a reason
        page.get_by_label("Reason").fill("the post is open again")
        page.locator("dialog").get_by_role("button", name="Redrive 500 dead letters").click()
        done = "500 through, 0 dead again, 0 still parked"
        for window in (visitor, other):
            window.page.locator("section", has_text=done).first.wait_for(timeout=30_000)
            window.page.locator("h1", has_text="No dead letters").wait_for(timeout=10_000)
        assert other.errors == []
    visitor.open("/apps/mail/audit")
    page.locator("text=the post is open again").first.wait_for()
    picture(visitor, "audit")


def test_contents_are_hidden_until_asked_for(shop: Shop, visitor: Visitor) -> None:
    shop.post.touch()
    try:
        (sent,) = shop.log.send(
            "mail.in", [{"key": b"ada", "value": b'{"card": "4111"}', "headers": [("secret", b"s3cr3t")]}]
        )
        page = visitor.open("/apps/mail/letters/list?key=ada")
        page.locator("td", has_text="ada").first.wait_for(timeout=20_000)
        page.locator("tbody a.row").first.click()
        page.locator("text=hidden").first.wait_for()
        assert f"address {sent.offset} is unknown" in visitor.text()
        assert "4111" not in page.content()
        assert "s3cr3t" not in page.content()
        page.get_by_role("button", name="Show the contents").click()
        page.locator("#value").wait_for()
        assert json.loads(visitor.text("#value")) == {"card": "4111"}
        assert "s3cr3t" in page.content()
        picture(visitor, "letter")
        page.get_by_role("button", name="Hex").click()
        assert "7b 22 63 61 72 64" in visitor.text("#value")
    finally:
        shop.post.unlink()


def ask(console: ConsoleServer, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """A request made by hand."""
    connection = http.client.HTTPConnection("127.0.0.1", console.port, timeout=20)
    try:
        content = None if body is None else json.dumps(body)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, content, given)
        response = connection.getresponse()
        text = response.read()
        cookie = response.getheader("set-cookie")
        return response.status, cookie.partition(";")[0] if cookie else json.loads(text)
    finally:
        connection.close()


def test_read_only_console_rejects_requests_made_by_hand(shop: Shop) -> None:
    shop.bank.touch()
    links: list[str] = []
    with ConsoleServer(shop.log.settings, ["orders"], port=0, announce=links.append) as console:
        _, cookie = ask(console, "GET", console.link.removeprefix(console.address))
        origin = {"origin": console.address, "content_type": "application/json", "cookie": cookie}
        shop.order(b"k7", b"bad")
        stopped: list[Any] = []

        def blocked() -> bool:
            _, found = ask(console, "GET", "/api/apps/orders/lanes", cookie=cookie)
            stopped[:] = found.get("lanes", [])
            return bool(stopped)

        try:
            wait_until(blocked, 20, "the lane is blocked")
            lane = {name: stopped[0][name] for name in ("partition", "offset", "key")}
            move = {**lane, "reason": "I want to"}
            before = ask(console, "GET", "/api/apps/orders/audit", cookie=cookie)[1]["found"]
            for do in ("release", "skip"):
                status, found = ask(console, "POST", f"/api/apps/orders/lane/{do}", move, **origin)
                assert (status, "may only read" in found["error"]) == (403, True)
            plan = ask(console, "POST", "/api/apps/orders/redrive/plan", {}, **origin)
            assert plan[0] == 200
            status, _ = ask(
                console,
                "POST",
                "/api/apps/orders/redrive",
                {"plan": plan[1]["plan"], "reason": "x"},
                **origin,
            )
            assert status == 403
            assert ask(console, "POST", "/api/apps/orders/lane/release", move)[0] == 403  # no origin
            assert (
                ask(console, "POST", "/api/apps/orders/lane/release", move, **{**origin, "cookie": "x=y"})[0]
                == 401
            )
            assert ask(console, "GET", "/api/me", host="evil.example", cookie=cookie)[0] == 421
            assert ask(console, "GET", "/api/apps/orders/audit", cookie=cookie)[1]["found"] == before
            assert blocked()
        finally:
            shop.bank.unlink()
    with ConsoleServer(shop.log.settings, ["orders"], port=0, allow_actions=True) as console:
        _, cookie = ask(console, "GET", console.link.removeprefix(console.address))
        origin = {"origin": console.address, "content_type": "application/json", "cookie": cookie}
        wait_until(
            lambda: ask(console, "GET", "/api/apps/orders/lanes", cookie=cookie)[1].get("lanes"),
            20,
            "it has read",
        )
        status, found = ask(
            console, "POST", "/api/apps/orders/lane/release", {**move, "reason": "  "}, **origin
        )
        assert (status, "expected a reason" in found["error"]) == (400, True)
        assert ask(console, "POST", "/api/apps/orders/lane/release", move, **origin)[0] == 200
        wait_until(
            lambda: not ask(console, "GET", "/api/apps/orders/lanes", cookie=cookie)[1]["lanes"],
            20,
            "the lane is released",
        )


def test_lane_wall_shows_every_lane_while_somebody_looks(shop: Shop, visitor: Visitor) -> None:
    page = visitor.open("/apps/orders/lanes")
    page.locator("canvas.wall").wait_for()
    shop.log.send("orders.in", [{"key": b"slow-%d" % n, "value": b"slow"} for n in range(300)])
    wait_until(lambda: page.evaluate(LANES_DRAWN) >= 300, 20, "the lanes are on the wall")
    assert "300 lanes with messages" in visitor.text()


def test_wall_draws_twenty_thousand_lanes_smoothly(shop: Shop, visitor: Visitor) -> None:
    """Each second all lanes have other states; the frames are counted in the browser."""
    rounds = 0

    def lanes(route: Route) -> None:
        nonlocal rounds
        rounds += 1
        content = b"".join(
            (n * 13 % 65_536).to_bytes(2, "little") + bytes([(n * 7 + rounds) % 7]) for n in range(20_000)
        )
        halves = [base64.b64encode(half).decode() for half in (content[:30_000], content[30_000:])]
        tasks = [{"task": task, "at": rounds, "lanes": half} for task, half in enumerate(halves)]
        route.fulfill(json={"states": [state.value for state in STATES], "tasks": tasks})

    visitor.page.route("**/api/apps/orders/wall", lanes)
    page = visitor.open("/apps/orders/lanes")
    wait_until(lambda: page.evaluate(LANES_DRAWN) == 20_000, 20, "the lanes are on the wall")
    page.wait_for_timeout(2_000)
    costs = page.evaluate(FRAME_COSTS)
    page.wait_for_timeout(100)
    picture(visitor, "wall")
    assert rounds >= 3
    assert sorted(costs)[len(costs) // 2] < 1000 / 60, costs  # half of the frames are on time, on any machine


LANES_DRAWN = "Number(document.querySelector('canvas.wall')?.dataset.lanes || 0)"
"""Not with Playwright's own waiting, which evaluates text in the page: the policy forbids that."""
FRAME_COSTS = """
() => new Promise((resolve) => {
  const found = [];
  const draw = CanvasRenderingContext2D.prototype.drawImage;
  let began = 0;
  const create = CanvasRenderingContext2D.prototype.createImageData;
  CanvasRenderingContext2D.prototype.createImageData = function (...given) {
    began = performance.now();
    return create.apply(this, given);
  };
  CanvasRenderingContext2D.prototype.drawImage = function (...given) {
    draw.apply(this, given);
    found.push(performance.now() - began);
    if (found.length === 60) resolve(found);
  };
})
"""
"""The milliseconds that each of 60 frames of the wall takes to draw."""


def test_race_finishes_with_the_keyed_trace_in_order(browser: Browser, tmp_path: Path) -> None:
    # Python ignores an interrupt if its parent does, as a job in a shell's background.
    interruptible = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = [sys.executable, "-c", f"{interruptible}; from keylane.cli.main import main; main()"]
    arguments = ["race", "--web", "--port", "0", "--messages", "120", "--keys", "6", "--work-ms", "20"]
    with (tmp_path / "said").open("w+") as said:
        running = subprocess.Popen([*program, *arguments], stdout=said, stderr=said)
        try:

            def link() -> str:
                found = re.search(r"the race: (http\S+)", (tmp_path / "said").read_text())
                return found[1] if found else ""

            wait_until(lambda: bool(link()) or running.poll() is not None, 100, "the race serves its page")
            with Visitor(browser, link()) as visitor:
                page = visitor.open("/race")
                for _round in range(2):
                    page.locator("#again:not([disabled])").click()
                    page.locator("#again[disabled]").wait_for()
                    page.locator("#over").wait_for(timeout=30_000)
                    traces = {
                        order: [int(number) for number in str(page.get_attribute(box, "data-trace")).split()]
                        for order in ("none", "global", "key")
                        if (box := f"[data-order={order}]")
                    }
                    assert all(sorted(trace) == list(range(120)) for trace in traces.values())
                    assert traces["global"] == list(range(120))
                    for key in range(6):
                        of_key = [number for number in traces["key"] if number % 6 == key]
                        assert of_key == sorted(of_key)
                    assert traces["key"] != sorted(traces["key"])
                picture(visitor, "race")
                assert visitor.errors == []
        finally:
            running.send_signal(signal.SIGINT)
            assert running.wait(30) == 0, (tmp_path / "said").read_text()


HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m\u202e\x00<script>alert(2)</script>"


@pytest.fixture(scope="module")
def evil(log: Log) -> str:
    """An app that does not run, whose topics somebody has filled with the worst."""
    app = App("evil", source="evil.in", on_failure="block")
    log.create("evil.in", partitions=2)
    Cluster(log.settings).prepare(app.spec)
    note_plan(log, app)
    labels = Labels(log.cluster.identity("evil.in", "evil.dlq"))
    now = time.time()
    why = FailureInfo(
        stage=HOSTILE,
        error=HOSTILE,
        message=HOSTILE,
        traceback=HOSTILE * 50,
        attempts=3,
        failed_at=now,
        failures=(FailedAttempt(stage=HOSTILE, attempt=1, at=now, error=HOSTILE),),
    )
    log.send("evil.in", [{"key": HOSTILE.encode(), "value": b"x", "partition": n % 2} for n in range(10)])
    stopped = []
    for number in range(10_000):
        key = HOSTILE.encode() if not number else b"%s-%d" % (HOSTILE.encode(), number)
        one = LaneRecord(
            stop=LaneStatus.BLOCKED,
            key=key,
            partition=number % 2,
            offset=number // 2,
            since=now - number,
            letter=why,
        )
        stopped.append(
            {
                "partition": one.partition,
                "key": one.name,
                "value": one.encode(),
                "headers": [*labels.of(one.name)],
            }
        )
    log.send("evil.state", stopped)
    identity = log.cluster.identity("evil.in").source
    context = dead_letter_headers("evil", None, "dead", identity, 0, 0, None, why)
    letters = []
    for number in range(100_000):
        headers = [
            (name, b"%d" % number if name == "keylane-offset" else value)
            for name, value in context
            if name != "keylane-traceback" or number < 100
        ]
        letters.append(
            {
                "partition": 0,
                "key": HOSTILE.encode() if number % 10 else b"\xff\x00%d" % number,
                "value": HOSTILE.encode() * 13_000 if number == 99_999 else HOSTILE.encode(),
                "headers": [(HOSTILE, HOSTILE.encode()), *headers],
            }
        )
    log.send("evil.dlq", letters)
    return "evil"


def test_hostile_content_neither_runs_nor_hangs(evil: str, log: Log, browser: Browser) -> None:
    links: list[str] = []
    with (
        ConsoleServer(log.settings, [evil], port=0, announce=links.append) as console,
        Visitor(browser, console.link) as visitor,
    ):
        page = visitor.page
        page.locator("article", has_text="evil").wait_for()
        visitor.wait_for("10,000 blocked", 60.0)

        def quick(path: str, text: str, most: float = 20.0) -> None:
            visitor.open(path)
            visitor.wait_for(text, most)
            assert (
                page.evaluate("document.images.length + document.querySelectorAll('main script').length") == 0
            )

        quick("/apps/evil", "evil")
        quick("/apps/evil/lanes", "10,000 blocked")
        page.locator("tbody tr").nth(99).wait_for()
        assert page.locator("tbody tr").count() == 100
        page.get_by_role("button", name="Older").click()
        page.locator("text=page 2 of 100").wait_for()
        page.locator("tbody a.row").first.click()
        page.locator("text=Attempts of its head").wait_for()
        assert "\\x1b[31m" in visitor.text()
        quick("/apps/evil/letters", "100,000 dead letters", 40.0)
        quick("/apps/evil/letters/list", "0@99999")
        quick("/apps/evil/letters/0/99999", "hidden")
        page.get_by_role("button", name="Show the contents").click()
        page.locator("text=Only the beginning is shown").wait_for()
        quick("/apps/evil/pictures", "Watermarks")
        quick(f"/apps/evil/lane?key={quote(HOSTILE)}", "Lane")
        first = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        assert first < 1000
        assert visitor.errors == []


def test_every_page_works_in_light_and_dark_and_on_narrow_screens(
    shop: Shop, console: ConsoleServer, browser: Browser, links: list[str]
) -> None:
    ended = threading.Event()

    def load() -> None:
        number = 0
        while not ended.wait(0.1):
            rows = [
                {"key": b"chat-%d" % ((number + n) % 400), "value": b"load%d" % (number + n)}
                for n in range(40)
            ]
            shop.log.send("orders.in", rows)
            number += 40

    sender = threading.Thread(target=load)
    sender.start()
    shop.bank.touch()
    shop.post.touch()
    try:
        shop.order(b"k42", b"bad")
        shop.log.send(
            "mail.in", [{"key": b"user-%d" % (n % 30), "value": b'{"n": %d}' % n} for n in range(120)]
        )
        pages = {
            "overview": ("/", "stuck on lane k42"),
            "app": ("/apps/orders", "Hot keys"),
            "lanes": ("/apps/orders/lanes", "k42"),
            "lane": ("/apps/orders/lane?key=k42", "Attempts of its head"),
            "letters": ("/apps/mail/letters", "dead letter"),
            "pictures": ("/apps/orders/pictures", "Watermarks"),
            "audit": ("/apps/mail/audit", "Commands given"),
        }
        for mode in ("light", "dark"):
            with Visitor(browser, links[-1], dark=mode == "dark") as visitor:
                page = visitor.page
                page.locator("text=stuck on lane k42").wait_for(timeout=20_000)
                if PICTURES and mode == "light":
                    page.wait_for_timeout(12_000)  # so that the charts have something to show
                for name, (path, text) in pages.items():
                    visitor.open(path)
                    page.locator("main", has_text=text).wait_for(timeout=20_000)
                    if PICTURES:
                        page.wait_for_timeout(2_500)
                        picture(visitor, f"{name}-{mode}")
                if mode == "dark":
                    page.set_viewport_size({"width": 390, "height": 800})
                    for path, text in pages.values():
                        visitor.open(path)
                        page.locator("main", has_text=text).wait_for(timeout=20_000)
                        assert page.evaluate("document.documentElement.scrollWidth") <= 390, path
                assert visitor.errors == []
    finally:
        ended.set()
        sender.join()
        shop.bank.unlink()
        shop.post.unlink()


def test_keyboard_moves_and_opens(shop: Shop, visitor: Visitor) -> None:
    page = visitor.page
    page.locator("a.row").first.wait_for()
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.className") == "row name"
    page.keyboard.press("Enter")
    page.locator("nav.tabs").wait_for()
    page.keyboard.press("2")
    page.get_by_label("Find the lane of a key").wait_for()
    page.keyboard.press("/")
    page.keyboard.type("k1")
    page.keyboard.press("Enter")
    page.locator("h1", has_text="Lane k1").wait_for()
    page.keyboard.press("o")
    page.locator("article").first.wait_for()
    page.keyboard.press("?")
    page.locator("dialog", has_text="Keyboard").wait_for()


def test_page_says_when_no_data_comes(shop: Shop, browser: Browser) -> None:
    with (
        ConsoleServer(shop.log.settings, ["orders"], port=0) as console,
        Visitor(browser, console.link) as visitor,
    ):
        visitor.page.locator("text=● live").wait_for()
        console.close()
        visitor.page.locator("text=/no data for \\d+ s/").first.wait_for(timeout=15_000)
