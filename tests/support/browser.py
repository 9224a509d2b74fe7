"""A real Chromium for the console's tests: found on this machine, or installed where that can be done."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Self

from playwright.sync_api import TimeoutError  # noqa: A004 - its own, which is no TimeoutError of Python

if TYPE_CHECKING:
    from types import TracebackType

    from playwright.sync_api import Browser, ConsoleMessage, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = (
    "NO BROWSER: the console's tests in a real Chromium are skipped. Install one (Debian: apt install chromium), or "
    "name it: KEYLANE_BROWSER=/path/to/chromium"
)


def find() -> str | None:
    """The path of a Chromium; None if there is none."""
    named = os.environ.get("KEYLANE_BROWSER")
    return named or next((found for name in NAMES if (found := shutil.which(name))), None)


def ensure() -> str | None:
    """The same, after installing one if this is a Debian machine and its administrator runs the tests."""
    found = find()
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        sys.stderr.write("installing Chromium for the console's tests ...\n")
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "timeout": 300}
        try:
            subprocess.run(["apt-get", "update"], check=True, **quiet)  # type: ignore[call-overload]
            subprocess.run(
                ["apt-get", "install", "-y", "--no-install-recommends", "chromium"],
                check=True,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                **quiet,
            )  # type: ignore[call-overload]
        except (subprocess.SubprocessError, OSError) as error:
            sys.stderr.write(f"could not install Chromium: {error}\n")
        found = find()
    return found


class Visitor:
    """One browser window with a session of its own. Every error of the page is noted in ``errors``."""

    def __init__(self, browser: Browser, link: str, *, dark: bool = False, width: int = 1280) -> None:
        self.errors: list[str] = []
        self._context = browser.new_context(
            color_scheme="dark" if dark else "light",
            viewport={"width": width, "height": 900},
            reduced_motion="reduce",
        )
        self._context.set_default_timeout(10_000)
        self.page: Page = self._context.new_page()
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", self._note)
        self.page.on("dialog", lambda dialog: self.errors.append(f"dialog: {dialog.message}"))
        self.page.goto(link)
        self.origin = link.partition("/login")[0]

    def _note(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self.errors.append(message.text)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._context.close()

    def open(self, path: str) -> Page:
        """Go to a page of the console."""
        self.page.goto(self.origin + path)
        return self.page

    def wait_for(self, text: str, seconds: float = 20.0) -> None:
        """Wait until the page says this; fails with what it says instead."""
        try:
            self.page.locator("main", has_text=text).wait_for(timeout=seconds * 1000)
        except TimeoutError:
            raise AssertionError(f"expected {text!r} on the page, found: {self.text()[:2000]}") from None

    def text(self, selector: str = "main") -> str:
        """What a person reads there."""
        return str(self.page.locator(selector).first.inner_text())


if __name__ == "__main__":
    if ensure() is None:
        sys.stderr.write(f"\n{'!' * 100}\n{MISSING}\n{'!' * 100}\n\n")
