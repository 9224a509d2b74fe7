"""What the console answers: the page, its data as JSON, a stream of events, and actions."""

from __future__ import annotations

import asyncio
import base64
import json
from importlib import resources
from typing import TYPE_CHECKING, Any, Protocol

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from keylane import __version__
from keylane.console.access import Guard
from keylane.console.actions import ReadOnlyError
from keylane.console.history import SPANS
from keylane.console.hub import UnknownAppError
from keylane.console.lane_page import lane_facts_of
from keylane.console.letters import query_of
from keylane.errors import KeylaneError, SettingsError
from keylane.key_text import parse_key, show_key
from keylane.safe_text import cut
from keylane.state.facts import action_facts, lane_facts
from keylane.state.stopped_lanes import totals
from keylane.telemetry.lane_wall import STATES

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from starlette.requests import Request

    from keylane.console.access import Access
    from keylane.console.actions import Actions
    from keylane.console.hub import Hub
    from keylane.console.letters import LetterDesk
    from keylane.state.admin import AdminClient, AuditEntry

STREAMS_MAX = 100
"""Browsers that may follow the console at the same time."""
PAGE_LANES = 100
PAGE_ACTIONS = 100
_TICK_SECONDS = 0.5
_BEAT_TICKS = 4
"""Ticks without news after which the stream says that it is alive."""
_ASK_SECONDS = 15.0
_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


class Json(Response):
    """JSON in ASCII: keys and errors may hold halves of characters, which UTF-8 cannot."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode the content."""
        return json.dumps(content, separators=(",", ":")).encode()


class Race(Protocol):
    """A race that the page can show: :class:`keylane.demo.race_feed.RaceFeed`."""

    def read(self, given: Mapping[str, str]) -> dict[str, Any]:
        """What has finished since the browser last asked."""

    def start(self) -> None:
        """A browser wants a round."""


class Routes:
    """The handlers of one console."""

    def __init__(
        self,
        hub: Hub,
        actions: Actions,
        letters: LetterDesk,
        *,
        race: Race | None = None,
    ) -> None:
        self._hub = hub
        self._actions = actions
        self._letters = letters
        self._race = race
        self._streams = 0
        self._details: dict[str, tuple[object, bytes]] = {}
        self._assets = {
            file.name: file.read_bytes()
            for file in resources.files("keylane.console").joinpath("assets").iterdir()
        }

    def app(self, access: Access, cookie: str) -> Guard:
        """The whole ASGI app, behind its checks."""
        one = "/api/apps/{app}"
        made = Starlette(
            routes=[
                Route("/assets/{name}", self._asset),
                Route("/api/me", self._me),
                Route("/api/stream", self._stream),
                Route(f"{one}/history", self._history),
                Route(f"{one}/wall", self._wall),
                Route(f"{one}/lanes", self._lanes),
                Route(f"{one}/lane", self._lane),
                Route(f"{one}/lane/{{do}}", self._move, methods=["POST"]),
                Route(f"{one}/causes", self._causes),
                Route(f"{one}/letters", self._page),
                Route(f"{one}/letters/{{partition:int}}/{{offset:int}}", self._letter),
                Route(f"{one}/letters/{{partition:int}}/{{offset:int}}/raw", self._raw),
                Route(f"{one}/redrive/plan", self._plan, methods=["POST"]),
                Route(f"{one}/redrive", self._redrive, methods=["POST"]),
                Route(f"{one}/jobs", self._jobs),
                Route(f"{one}/audit", self._audit),
                Route("/api/race", self._read_race),
                Route("/api/race/start", self._start_race, methods=["POST"]),
                Route("/api/{rest:path}", self._nothing),
                Route("/{rest:path}", self._shell),
            ],
            exception_handlers={KeylaneError: self._failed, TimeoutError: self._failed},
        )
        return Guard(made, access, cookie)

    # The page.

    async def _shell(self, _request: Request) -> Response:
        return Response(self._assets["index.html"], media_type=_TYPES["html"])

    async def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        content = self._assets.get(name)
        if content is None:
            return Json({"error": "no such file"}, 404)
        return Response(
            content,
            media_type=_TYPES.get(name.rpartition(".")[2], "application/octet-stream"),
            headers={"cache-control": "no-cache"},
        )

    async def _nothing(self, _request: Request) -> Response:
        return Json({"error": "no such address"}, 404)

    async def _failed(self, _request: Request, error: Exception) -> Response:
        if isinstance(error, TimeoutError):
            return Json({"error": "the app's topics were not read in time; try again in a moment"}, 504)
        status = (
            403 if isinstance(error, ReadOnlyError) else 404 if isinstance(error, UnknownAppError) else 400
        )
        return Json({"error": cut(str(error), 2000)}, status)

    async def _me(self, request: Request) -> Response:
        return Json(
            {
                "who": request.state.who,
                "actions": self._actions.writer.allowed,
                "bootstrap": self._hub.settings.bootstrap,
                "version": __version__,
                "race": self._race is not None,
                "spans": list(SPANS),
            }
        )

    async def _stream(self, request: Request) -> Response:
        if self._streams >= STREAMS_MAX:
            return Json({"error": f"{STREAMS_MAX} browsers follow this console already"}, 503)
        app = request.query_params.get("app")
        return StreamingResponse(self._events(app), media_type="text/event-stream")

    async def _events(self, app: str | None) -> AsyncIterator[bytes]:
        self._streams += 1
        try:
            yield b"retry: 1000\n\n"
            before: dict[str, bytes] = {}
            quiet = 0
            while True:
                found = {"overview": self._hub.overview()}
                if app is not None:
                    found["app"] = self._detail(app)
                sent = False
                for name, data in found.items():
                    if before.get(name) != data:
                        before[name] = data
                        sent = True
                        yield b"event: %b\ndata: %b\n\n" % (name.encode(), data)
                quiet = 0 if sent else quiet + 1
                if quiet >= _BEAT_TICKS:
                    quiet = 0
                    yield b"event: beat\ndata: {}\n\n"
                await asyncio.sleep(_TICK_SECONDS)
        finally:
            self._streams -= 1

    def _detail(self, app: str) -> bytes:
        """One app as JSON, made once for all browsers."""
        try:
            reading = self._hub.watch(app).reading
        except UnknownAppError as error:
            return json.dumps({"app": app, "error": str(error)}).encode()
        jobs = self._actions.jobs(app)
        version = (reading.version, json.dumps(jobs))
        known = self._details.get(app)
        if known is None or known[0] != version:
            facts = {"app": app, "facts": reading.facts, **reading.detail, "jobs": jobs}
            known = self._details[app] = version, json.dumps(facts).encode()
        return known[1]

    async def _read_race(self, request: Request) -> Response:
        if self._race is None:
            return Json({"error": "no race runs here: keylane race --web"}, 404)
        return Json(self._race.read(request.query_params))

    async def _start_race(self, _request: Request) -> Response:
        if self._race is None:
            return Json({"error": "no race runs here: keylane race --web"}, 404)
        self._race.start()
        return Json({})

    # One app. Plain functions run in threads of their own.

    def _history(self, request: Request) -> Response:
        span = request.query_params.get("span", "5m")
        if span not in SPANS:
            raise SettingsError(f"span: expected one of {', '.join(SPANS)}, got {span[:20]!r}")
        return Json(self._hub.watch(request.path_params["app"]).series(span))

    async def _wall(self, request: Request) -> Response:
        watch = self._hub.watch(request.path_params["app"])
        watch.look()
        tasks = [
            {"task": task, "at": at, "lanes": base64.b64encode(lanes).decode("ascii")}
            for task, (at, lanes) in sorted(watch.wall().items())
        ]
        return Json({"states": [state.value for state in STATES], "tasks": tasks})

    def _lanes(self, request: Request) -> Response:
        app = request.path_params["app"]
        reading = self._hub.watch(app).reading
        text, state = request.query_params.get("q", ""), request.query_params.get("state", "")
        page = _number(request.query_params, "page")
        found = [
            lane
            for lane in reading.stopped
            if (not state or (lane.record is not None and lane.record.stop.value == state))
            and (not text or text in show_key(lane.key) or text == lane.position)
        ]
        shown = found[page * PAGE_LANES : (page + 1) * PAGE_LANES]
        return Json(
            {
                "lanes": [_short(lane_facts(lane)) | {"position": lane.position} for lane in shown],
                "found": len(found),
                "all": len(reading.stopped),
                "totals": totals(reading.stopped),
                "page": page,
                "pages": max(1, -(-len(found) // PAGE_LANES)),
            }
        )

    def _lane(self, request: Request) -> Response:
        key, at = request.query_params.get("key"), request.query_params.get("at")
        if (key is None) == (at is None):
            raise SettingsError("expected a key or a position")
        place = None
        if at is not None:
            partition, _, offset = at.partition("@")
            if not partition.isdecimal() or not offset.isdecimal() or len(at) > 40:
                raise SettingsError(f"expected a position PARTITION@OFFSET, got {at[:50]!r}")
            place = int(partition), int(offset)
        watch = self._hub.watch(request.path_params["app"])
        facts = lane_facts_of(
            watch, self._hub.settings, key=None if key is None else parse_key(key), at=place
        )
        return Json(facts)

    async def _move(self, request: Request) -> Response:
        do = request.path_params["do"]
        if do not in ("release", "skip"):
            raise SettingsError(f"expected release or skip, got {do[:20]!r}")
        body = await _body(request)
        partition, offset, key = body.get("partition"), body.get("offset"), body.get("key")
        if type(partition) is not int or type(offset) is not int or not isinstance(key, str | None):
            raise SettingsError("expected partition and offset as whole numbers, and the key as text")
        app = request.path_params["app"]
        self._hub.watch(app)
        job = await run_in_threadpool(
            lambda: self._actions.move(
                app,
                "release" if do == "release" else "skip",
                partition=partition,
                key=None if key is None else parse_key(key),
                offset=offset,
                reason=_reason(body),
                who=request.state.who,
            )
        )
        return Json(job.facts())

    def _causes(self, request: Request) -> Response:
        index = self._letters.index(request.path_params["app"])
        now = self._hub.watch(request.path_params["app"]).reading.at
        return Json(index.causes(query_of(request.query_params), now))

    def _page(self, request: Request) -> Response:
        index = self._letters.index(request.path_params["app"])
        return Json(index.page(query_of(request.query_params), _number(request.query_params, "page")))

    def _letter(self, request: Request) -> Response:
        return Json(
            self._letters.letter(
                request.path_params["app"],
                request.path_params["partition"],
                request.path_params["offset"],
                contents=request.query_params.get("contents") == "1",
            )
        )

    def _raw(self, request: Request) -> Response:
        place = request.path_params["app"], request.path_params["partition"], request.path_params["offset"]
        return Response(
            self._letters.raw(*place),
            media_type="application/octet-stream",
            headers={"content-disposition": f'attachment; filename="letter-{place[1]}-{place[2]}.bin"'},
        )

    async def _plan(self, request: Request) -> Response:
        body, app = await _body(request), request.path_params["app"]
        self._hub.watch(app)

        def plan() -> dict[str, Any]:
            way, what, cli = self._letters.way(app, body)
            return {**self._actions.plan_redrive(app, way, what), "what": what, "cli": cli}

        return Json(await run_in_threadpool(plan))

    async def _redrive(self, request: Request) -> Response:
        body, app = await _body(request), request.path_params["app"]
        self._hub.watch(app)
        job = await run_in_threadpool(
            lambda: self._actions.redrive(
                app, str(body.get("plan", "")), reason=_reason(body), who=request.state.who
            )
        )
        return Json(job.facts())

    def _jobs(self, request: Request) -> Response:
        return Json({"jobs": self._actions.jobs(request.path_params["app"])})

    def _audit(self, request: Request) -> Response:
        def ask(operator: AdminClient) -> list[AuditEntry]:
            return operator.audit()

        found = self._hub.watch(request.path_params["app"]).ask(ask).result(_ASK_SECONDS)[::-1]
        page = _number(request.query_params, "page")
        shown = found[page * PAGE_ACTIONS : (page + 1) * PAGE_ACTIONS]
        return Json(
            {
                "actions": [_short(action_facts(action)) for action in shown],
                "found": len(found),
                "page": page,
                "pages": max(1, -(-len(found) // PAGE_ACTIONS)),
            }
        )


def _short(facts: dict[str, Any]) -> dict[str, Any]:
    """With long texts cut: a list has many of them."""
    return {name: cut(value, 500) if isinstance(value, str) else value for name, value in facts.items()}


def _number(given: Mapping[str, str], name: str) -> int:
    text = given.get(name, "0")
    if not text.isdecimal() or len(text) > 6:
        raise SettingsError(f"{name}: expected a whole number, got {text[:20]!r}")
    return int(text)


def _reason(body: Mapping[str, Any]) -> str:
    reason = body.get("reason", "")
    if not isinstance(reason, str):
        raise SettingsError("expected a reason as text")
    return reason


async def _body(request: Request) -> dict[str, Any]:
    try:
        found = json.loads(await request.body())
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise SettingsError("expected a JSON object")
    return found
