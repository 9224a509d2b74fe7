"""Download of jars with the Ivy that PySpark contains, so that no other resolver is needed.

The list of jars is complete: each is requested without its dependencies, so that no POM has to be read.
KEYLANE_IVY_SETTINGS may name an Ivy settings file, for example for a mirror.
"""

from __future__ import annotations

import importlib.util
import os
import re
import selectors
import shutil
import subprocess
import tempfile
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from xml.sax.saxutils import quoteattr

from keylane.broker.errors import EmbeddedBrokerError
from keylane.broker.progress import DownloadProgress, DownloadStep, OnProgress
from keylane.spark.java import find_java

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SILENCE_TIMEOUT_SECONDS = 120.0
_SHOWN_LINES = 6
_SETTINGS = """\
<ivysettings>
  <settings defaultResolver="public"/>
  <resolvers><ibiblio name="public" m2compatible="true" usepoms="false"/></resolvers>
</ivysettings>
"""
_FOUND = re.compile(r"\s*found \S+#\S+;\S+ in ")
_FETCHED = re.compile(r"\s*\[SUCCESSFUL \] \S+#\S+;\S+!")


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """The name of a jar in a registry."""

    organisation: str
    name: str
    revision: str


class Counter:
    """Counter of found and fetched jars in Ivy's output."""

    __slots__ = ("_fetched", "_found", "_total")

    def __init__(self, total: int) -> None:
        self._total = total
        self._found = 0
        self._fetched = 0

    def read(self, line: str) -> DownloadProgress | None:
        """Take a line of Ivy's output; returns the new state if the line changed it."""
        if _FOUND.match(line):
            self._found = min(self._found + 1, self._total)
        elif _FETCHED.match(line):
            self._fetched = min(self._fetched + 1, self._total)
        else:
            return None
        return self.state

    @property
    def state(self) -> DownloadProgress:
        """The progress so far."""
        if self._fetched or self._found == self._total:
            return DownloadProgress(step=DownloadStep.FETCH, done=self._fetched, total=self._total)
        return DownloadProgress(step=DownloadStep.FIND, done=self._found, total=self._total)


def fetch(wanted: Sequence[Coordinates], into: Path, progress: OnProgress) -> None:
    """Fetch each jar to `into/organisation/name-revision.jar`.

    Raises EmbeddedBrokerError with Ivy's last lines if a jar cannot be fetched, or without progress for two minutes.
    """
    scratch = Path(tempfile.mkdtemp(prefix="ivy-", dir=into.parent))
    try:
        _run(_command(wanted, scratch), into, Counter(len(wanted)), progress)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def descriptor(wanted: Sequence[Coordinates]) -> str:
    """The ivy.xml that requests exactly these jars."""
    lines = (
        f"    <dependency org={quoteattr(jar.organisation)} name={quoteattr(jar.name)} "
        f'rev={quoteattr(jar.revision)} transitive="false" conf="default->default"/>'
        for jar in wanted
    )
    return "\n".join(
        (
            '<ivy-module version="2.0">',
            '  <info organisation="keylane" module="broker"/>',
            "  <dependencies>",
            *lines,
            "  </dependencies>",
            "</ivy-module>",
            "",
        )
    )


def proxy_flags(proxies: Mapping[str, str]) -> tuple[str, ...]:
    """The proxies of `urllib.request.getproxies` as Java flags."""
    flags: list[str] = []
    for scheme in ("http", "https"):
        url = urllib.parse.urlsplit(proxies.get(scheme, ""))
        if url.hostname:
            flags += [f"-D{scheme}.proxyHost={url.hostname}", f"-D{scheme}.proxyPort={url.port or 3128}"]
    without = [host.strip() for host in proxies.get("no", "").split(",") if host.strip()]
    if flags and without:
        hosts = "|".join(f"*{host}" if host.startswith(".") else host for host in without)
        flags.append(f"-Dhttp.nonProxyHosts={hosts}")
    return tuple(flags)


def _command(wanted: Sequence[Coordinates], scratch: Path) -> list[str]:
    (scratch / "ivy.xml").write_text(descriptor(wanted), encoding="utf-8")
    own = os.environ.get("KEYLANE_IVY_SETTINGS")
    settings = Path(own).absolute() if own else scratch / "settings.xml"
    if not own:
        settings.write_text(_SETTINGS, encoding="utf-8")
    elif not settings.is_file():
        raise EmbeddedBrokerError(
            f"KEYLANE_IVY_SETTINGS names {settings}, which is not a file: correct or unset it"
        )
    return [
        str(find_java()),
        "-XX:TieredStopAtLevel=1",
        "-Dsun.net.client.defaultConnectTimeout=15000",
        "-Dsun.net.client.defaultReadTimeout=60000",
        *proxy_flags(urllib.request.getproxies()),
        *("-cp", str(_ivy_jar()), "org.apache.ivy.Main"),
        *("-settings", str(settings)),
        *("-ivy", str(scratch / "ivy.xml")),
        *("-cache", str(scratch / "cache")),
        *("-retrieve", "[organisation]/[artifact]-[revision].[ext]"),
    ]


def _ivy_jar() -> Path:
    spec = importlib.util.find_spec("pyspark")  # without the slow import
    for place in (spec.submodule_search_locations or ()) if spec else ():
        for jar in sorted(Path(place, "jars").glob("ivy-*.jar")):
            return jar
    raise EmbeddedBrokerError(
        "PySpark contains no Ivy: install the full package (`pip install pyspark`), not pyspark-client"
    )


def _run(command: Sequence[str], into: Path, counter: Counter, progress: OnProgress) -> None:
    progress(counter.state)
    with (
        subprocess.Popen(  # noqa: S603 - our own command line
            command, cwd=into, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as running,
        selectors.DefaultSelector() as ready,
    ):
        try:
            output = _follow(running, ready, counter, progress)
        except BaseException:
            running.kill()
            raise
    if running.returncode != 0:
        raise EmbeddedBrokerError(
            "could not fetch Kafka's jars: check the network (https_proxy sets a proxy, KEYLANE_IVY_SETTINGS a mirror) "
            f"and try again. Ivy's last lines:\n{_last_lines(output)}"
        )


def _follow(
    running: subprocess.Popen[bytes], ready: selectors.BaseSelector, counter: Counter, progress: OnProgress
) -> list[str]:
    """Report progress at each change and every second without output; returns the lines of Ivy's output."""
    assert running.stdout is not None  # noqa: S101 - asked for in Popen
    ready.register(running.stdout, selectors.EVENT_READ)
    output: list[str] = []
    rest = b""
    last_output = time.monotonic()
    while True:
        if not ready.select(timeout=1.0):
            if time.monotonic() - last_output > SILENCE_TIMEOUT_SECONDS:
                raise EmbeddedBrokerError(
                    f"fetching Kafka's jars stopped: no output for {SILENCE_TIMEOUT_SECONDS:.0f} s. "
                    f"Check the network and try again. Ivy's last lines:\n{_last_lines(output)}"
                )
            progress(counter.state)
            continue
        piece = os.read(running.stdout.fileno(), 65_536)
        if not piece:
            return output
        last_output = time.monotonic()
        *lines, rest = (rest + piece).split(b"\n")
        for line in (raw.decode(errors="replace") for raw in lines):
            output.append(line)
            state = counter.read(line)
            if state is not None:
                progress(state)


def _last_lines(output: Sequence[str]) -> str:
    """The last lines with words, without dots, rulers and empty lines."""
    worded = [line.rstrip() for line in output if re.search(r"[A-Za-z]{3}", line)]
    return "\n".join(f"  {line.strip()}" for line in worded[-_SHOWN_LINES:])
