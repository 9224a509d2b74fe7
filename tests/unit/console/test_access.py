"""The checks that every request of the console passes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from keylane.console.access import POLICY, Access, Guard, allowed_hosts
from keylane.errors import SettingsError

HOST = "127.0.0.1:8600"
ORIGIN = {"origin": f"http://{HOST}", "content-type": "application/json", "content-length": "2"}


class Site:
    """The guard in front of an app that answers everything."""

    def __init__(self, **more: Any) -> None:
        self.links: list[str] = []
        self.access = Access(hosts=allowed_hosts("127.0.0.1", 8600), announce=self.links.append, **more)
        self.reached: list[str] = []

        async def answer(request: Any) -> JSONResponse:
            self.reached.append(request.url.path)
            return JSONResponse({"who": request.state.who})

        routes = [Route("/{rest:path}", answer, methods=["GET", "POST", "PUT"])]
        self.app = Guard(Starlette(routes=routes), self.access, "session")

    def ask(
        self, method: str = "GET", path: str = "/api/me", **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        given = {"host": HOST, **{name.replace("_", "-"): value for name, value in headers.items()}}
        path, _, query = path.partition("?")
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in given.items()],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 8600),
        }
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"{}", "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(self.app(scope, receive, send))
        start = sent[0]
        body = b"".join(message.get("body", b"") for message in sent[1:])
        return start["status"], {n.decode(): v.decode() for n, v in start["headers"]}, body

    def cookie(self) -> str:
        status, headers, _ = self.ask(path=self.access.login_path())
        assert status == 303
        return headers["set-cookie"].partition(";")[0]


def test_request_without_a_session_is_refused() -> None:
    site = Site()
    assert site.ask()[0] == 401
    assert site.ask(cookie="session=guess")[0] == 401
    assert site.ask("POST", "/api/apps/chat/redrive", **ORIGIN)[0] == 401
    assert site.reached == []


def test_token_gives_one_session_in_a_strict_cookie() -> None:
    site = Site()
    link = site.access.login_path()
    status, headers, _ = site.ask(path=link)
    assert (status, headers["location"]) == (303, "/")
    parts = {part.strip().lower().partition("=")[0] for part in headers["set-cookie"].split(";")}
    assert {"httponly", "samesite", "path"} <= parts
    assert "samesite=strict" in headers["set-cookie"].lower()
    assert site.ask(cookie=headers["set-cookie"].partition(";")[0])[0] == 200
    assert site.ask(path=link)[0] == 401  # it works once
    assert site.links == [site.access.login_path()]
    assert site.links[0] != link


def test_other_host_names_are_refused() -> None:
    """DNS rebinding: another site's name that points to this machine."""
    site = Site()
    cookie = site.cookie()
    for host in ("evil.example:8600", "127.0.0.1:8601", "127.0.0.1", "", "127.0.0.1:8600.evil.example"):
        assert site.ask(host=host, cookie=cookie)[0] == 421
        assert site.ask(path="/", host=host)[0] == 421
        assert site.ask(path=site.access.login_path(), host=host)[0] == 421
    assert site.ask(host="LOCALHOST:8600", cookie=cookie)[0] == 200
    assert site.reached == ["/api/me"]


def test_requests_of_other_sites_are_refused() -> None:
    """Cross-site request forgery: the browser sends the cookie, but says where the request came from."""
    site = Site()
    cookie = site.cookie()
    good = {**ORIGIN, "cookie": cookie}
    path = "/api/apps/chat/lane/release"
    assert site.ask("POST", path, **good)[0] == 200
    assert site.ask("POST", path, **{**good, "origin": "http://evil.example"})[0] == 403
    assert site.ask("POST", path, **{**good, "origin": "null"})[0] == 403
    assert (
        site.ask("POST", path, **{name: value for name, value in good.items() if name != "origin"})[0] == 403
    )
    assert site.ask("POST", path, **good, sec_fetch_site="cross-site")[0] == 403
    assert site.ask("POST", path, **good, sec_fetch_site="same-site")[0] == 403
    assert site.ask("GET", cookie=cookie, sec_fetch_site="cross-site")[0] == 403
    assert site.ask("POST", path, **{**good, "content-type": "text/plain"})[0] == 415
    assert site.ask("POST", path, **{**good, "content-length": "70000"})[0] == 413
    assert site.ask("PUT", path, **good)[0] == 405
    assert site.ask("POST", "/", **good)[0] == 405
    assert site.reached == [path]


def test_page_itself_opens_from_a_link_elsewhere() -> None:
    site = Site()
    assert site.ask(path="/apps/chat", sec_fetch_site="cross-site")[0] == 200


def test_every_answer_has_the_policy() -> None:
    site = Site()
    for path in ("/", "/api/me", "/login?token=x", "/assets/x.js"):
        headers = site.ask(path=path)[1]
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    assert "unsafe" not in POLICY
    assert site.ask(host="evil.example")[1]["content-security-policy"] == POLICY


def test_identity_header_counts_only_when_trusted() -> None:
    assert Site().ask(x_forwarded_user="mallory")[0] == 401
    site = Site(trust_header="x-forwarded-user")
    status, _, body = site.ask(x_forwarded_user="ada\x1b[31m@example.org")
    assert status == 200
    assert json.loads(body) == {"who": r"ada\x1b[31m@example.org"}
    assert site.ask()[0] == 401
    assert site.ask(x_forwarded_user="  ")[0] == 401


def test_session_ends() -> None:
    site = Site()
    cookie = site.cookie()
    for session in site.access._sessions:
        site.access._sessions[session] = 0.0
    assert site.ask(cookie=cookie)[0] == 401


@pytest.mark.parametrize("name", ["", "a b", "http://x", "*.example.org", "user@x"])
def test_host_that_is_not_a_name_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match="--allow-host"):
        allowed_hosts("127.0.0.1", 8600, (name,))


def test_further_host_names_are_accepted() -> None:
    found = allowed_hosts("0.0.0.0", 8600, ("Console.example.org",))  # noqa: S104
    assert {"console.example.org", "console.example.org:8600", "localhost:8600"} <= found
    assert not any(name.startswith("0.0.0.0") for name in found)  # noqa: S104
