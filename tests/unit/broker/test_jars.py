from __future__ import annotations

import hashlib
import logging
import multiprocessing
import os
import time
from typing import TYPE_CHECKING

import pytest

from keylane.broker import DownloadProgress, DownloadStep, EmbeddedBrokerError, OnProgress
from keylane.broker.ivy import Coordinates, Counter, descriptor, fetch, proxy_flags
from keylane.broker.jars import Jar, damages, ensure_jars, fetch_with_ivy, listed, parse_list
from keylane.broker.progress import Lines, silent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

pytestmark = pytest.mark.timeout(20)

CONTENT = {
    "org.one/alpha-1.0.jar": b"alpha",
    "org.one/beta-2.0.jar": b"beta",
    "org.two/gamma-3.jar": b"gamma",
}
JARS = tuple(Jar(path=path, sha256=hashlib.sha256(data).hexdigest()) for path, data in CONTENT.items())


class Registry:
    """Replaces Ivy: writes the jars and records the requests."""

    def __init__(self, content: dict[str, bytes] | None = None) -> None:
        self.content = CONTENT if content is None else content
        self.asked: list[list[str]] = []

    def __call__(self, jars: Sequence[Jar], into: Path, progress: OnProgress) -> None:
        self.asked.append([jar.path for jar in jars])
        for jar in jars:
            (into / jar.path).parent.mkdir(parents=True, exist_ok=True)
            (into / jar.path).write_bytes(self.content[jar.path])


def test_every_listed_jar_has_coordinates_and_a_hash() -> None:
    jars = listed()
    assert len(jars) == len({jar.path for jar in jars}) > 40
    assert all(len(jar.sha256) == 64 for jar in jars)
    by_name = {jar.coordinates.name: jar.coordinates for jar in jars}
    assert by_name["kafka_2.13"] == Coordinates(
        organisation="org.apache.kafka", name="kafka_2.13", revision="4.3.1"
    )
    assert by_name["zstd-jni"].revision == "1.5.6-10"
    assert {"kafka-tools", "log4j-slf4j-impl"} <= by_name.keys()


def test_jar_list_has_the_format_of_sha256sum() -> None:
    assert parse_list("aa  org/x-1.jar\n\nbb  org/y-2.jar\n") == (
        Jar(path="org/x-1.jar", sha256="aa"),
        Jar(path="org/y-2.jar", sha256="bb"),
    )


def test_missing_and_changed_jars_are_damages(tmp_path: Path) -> None:
    Registry()(JARS, tmp_path, silent)
    assert damages(tmp_path, JARS) == ()
    (tmp_path / JARS[0].path).unlink()
    (tmp_path / JARS[1].path).write_bytes(b"bad")
    missing, changed = damages(tmp_path, JARS)
    assert (missing.jar, missing.actual) == (JARS[0], None)
    assert (changed.jar, changed.actual) == (JARS[1], hashlib.sha256(b"bad").hexdigest())


def test_jars_are_fetched_once(tmp_path: Path) -> None:
    registry = Registry()
    for _ in range(3):
        folder = ensure_jars(jars=JARS, cache=tmp_path, fetch=registry)
    assert len(registry.asked) == 1
    assert folder.classpath.split(os.pathsep) == [str(folder.path / path) for path in CONTENT]
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [folder.path.name]


def test_damaged_jar_is_logged_and_fetched_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    folder = ensure_jars(jars=JARS, cache=tmp_path, fetch=registry)
    (folder.path / JARS[1].path).write_bytes(b"flipped")
    (folder.path / "made-from-the-old-jars").touch()
    with caplog.at_level(logging.WARNING, "keylane.broker"):
        ensure_jars(jars=JARS, cache=tmp_path, fetch=registry)
    assert registry.asked[1:] == [[JARS[1].path]]
    assert damages(folder.path, JARS) == ()
    assert not (folder.path / "made-from-the-old-jars").exists()
    assert "fetching damaged jar again" in caplog.text
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [folder.path.name]


def test_jars_wrong_at_the_source_are_refused_and_removed(tmp_path: Path) -> None:
    evil = Registry({**CONTENT, JARS[2].path: b"evil"})
    with pytest.raises(EmbeddedBrokerError) as caught:
        ensure_jars(jars=JARS, cache=tmp_path, fetch=evil)
    for part in (
        "org.two/gamma-3.jar",
        JARS[2].sha256,
        hashlib.sha256(b"evil").hexdigest(),
        "KEYLANE_IVY_SETTINGS",
    ):
        assert part in str(caught.value)
    assert not any(path.is_dir() for path in tmp_path.iterdir())


def test_failed_fetch_keeps_the_old_folder(tmp_path: Path) -> None:
    folder = ensure_jars(jars=JARS, cache=tmp_path, fetch=Registry())
    (folder.path / JARS[0].path).write_bytes(b"flipped")

    def fails(jars: Sequence[Jar], into: Path, progress: OnProgress) -> None:
        raise EmbeddedBrokerError("no network")

    with pytest.raises(EmbeddedBrokerError, match="no network"):
        ensure_jars(jars=JARS, cache=tmp_path, fetch=fails)
    assert (folder.path / JARS[1].path).exists()


def test_unwritable_cache_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EmbeddedBrokerError, match="KEYLANE_CACHE"):
        ensure_jars(jars=JARS, cache=tmp_path / "file" / "cache", fetch=Registry())


def _ensure_slowly(cache: Path, log: Path) -> None:
    def slow(jars: Sequence[Jar], into: Path, progress: OnProgress) -> None:
        with log.open("a") as file:
            file.write("fetched\n")
        time.sleep(0.3)
        Registry()(jars, into, progress)

    folder = ensure_jars(jars=JARS, cache=cache, fetch=slow)
    assert damages(folder.path, JARS) == ()


def test_one_of_many_processes_fetches_and_others_wait(tmp_path: Path) -> None:
    log = tmp_path / "log"
    spawn = multiprocessing.get_context("fork") if os.name == "posix" else multiprocessing.get_context()
    processes = [spawn.Process(target=_ensure_slowly, args=(tmp_path / "cache", log)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert log.read_text() == "fetched\n"


IVY_SAYS = """\
:: loading settings :: file = settings.xml
:: resolving dependencies :: keylane#broker;working@vm
\tconfs: [default]
\tfound org.one#alpha;1.0 in public
\tfound org.one#beta;2.0 in public
downloading somewhere/alpha-1.0.jar ...
......... (111kB)
\t[SUCCESSFUL ] org.one#alpha;1.0!alpha.jar (219ms)
downloading somewhere/beta-2.0.jar ...
\t[SUCCESSFUL ] org.one#beta;2.0!beta.jar(bundle) (152ms)
:: resolution report :: resolve 29931ms :: artifacts dl 6464ms
"""


def test_progress_is_parsed_from_ivys_output() -> None:
    counter = Counter(2)
    assert counter.state == DownloadProgress(step=DownloadStep.FIND, done=0, total=2)
    seen = [counter.read(line) for line in IVY_SAYS.splitlines()]
    assert [(each.step, each.done, each.total) for each in seen if each is not None] == [
        (DownloadStep.FIND, 1, 2),
        (DownloadStep.FETCH, 0, 2),
        (DownloadStep.FETCH, 1, 2),
        (DownloadStep.FETCH, 2, 2),
    ]


def test_jars_are_requested_without_their_dependencies() -> None:
    text = descriptor([Coordinates(organisation="org.one", name="alpha", revision="1.0")])
    assert (
        '<dependency org="org.one" name="alpha" rev="1.0" transitive="false" conf="default->default"/>'
        in text
    )


def test_system_proxies_become_java_flags() -> None:
    proxies = {"https": "http://proxy.example:8080", "http": "http://proxy.example", "no": "localhost, .corp"}
    assert proxy_flags(proxies) == (
        "-Dhttp.proxyHost=proxy.example",
        "-Dhttp.proxyPort=3128",
        "-Dhttps.proxyHost=proxy.example",
        "-Dhttps.proxyPort=8080",
        "-Dhttp.nonProxyHosts=localhost|*.corp",
    )
    assert proxy_flags({"no": "localhost"}) == ()


@pytest.fixture
def java_that_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    def make(text: str, code: int) -> None:
        java = tmp_path / "home" / "bin" / "java"
        java.parent.mkdir(parents=True)
        version = 'if [ "$1" = -version ]; then echo \'openjdk version "17"\' >&2; exit 0; fi'
        java.write_text(f"#!/bin/sh\n{version}\ncat <<'END'\n{text}\nEND\nexit {code}\n")
        java.chmod(0o755)
        monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))

    return make


def test_failed_download_shows_ivys_last_lines(
    tmp_path: Path, java_that_says: Callable[[str, int], None]
) -> None:
    java_that_says(
        "\t\tUNRESOLVED DEPENDENCIES\n::::::\nunresolved dependency: org.one#alpha;1.0: not found\n", 1
    )
    into = tmp_path / "cache" / "new"
    into.mkdir(parents=True)
    with pytest.raises(EmbeddedBrokerError, match=r"check the network[\s\S]*org.one#alpha;1.0: not found"):
        fetch_with_ivy(JARS, into, silent)
    assert list(into.parent.iterdir()) == [into]


def test_progress_is_reported_while_ivy_runs(
    tmp_path: Path, java_that_says: Callable[[str, int], None]
) -> None:
    java_that_says(IVY_SAYS, 0)
    seen: list[DownloadProgress] = []
    into = tmp_path / "new"
    into.mkdir()
    fetch([jar.coordinates for jar in JARS[:2]], into, seen.append)
    assert seen[0] == DownloadProgress(step=DownloadStep.FIND, done=0, total=2)
    assert seen[-1] == DownloadProgress(step=DownloadStep.FETCH, done=2, total=2)


def test_plain_lines_are_printed_per_step_and_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    import sys  # noqa: PLC0415 - after capsys has replaced stderr

    lines = Lines(sys.stderr)
    for done in range(5):
        lines(DownloadProgress(step=DownloadStep.FETCH, done=done, total=5))
    lines(DownloadProgress(step=DownloadStep.PREPARE, done=0, total=1))
    lines.finish()
    assert capsys.readouterr().err.splitlines() == [
        "keylane: fetching Kafka's jars (0 of 5)",
        "keylane: preparing Kafka for a quick start",
        "keylane: Kafka is ready after 0 s; later starts skip this",
    ]


def test_nothing_is_printed_without_a_fetch(capsys: pytest.CaptureFixture[str]) -> None:
    import sys  # noqa: PLC0415 - after capsys has replaced stderr

    Lines(sys.stderr).finish()
    assert capsys.readouterr().err == ""
