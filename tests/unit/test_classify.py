from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import json
import socket

import pytest

from keylane import Poison, Transient
from keylane.core.classify import Failure, classify

# What clients written for older Pythons raise.
old_names = [
    TimeoutError("asyncio"),
    concurrent.futures.TimeoutError("futures"),
    TimeoutError("socket"),
]


class Busy(Transient):
    pass


class Hopeless(Poison, Transient):
    pass


@pytest.mark.parametrize(
    "error",
    [
        Transient("later"),
        Busy(),
        TimeoutError(),
        *old_names,
        ConnectionError(),
        ConnectionResetError(),
        ConnectionRefusedError(),
        BrokenPipeError(),
        asyncio.IncompleteReadError(b"half", 10),
        socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
        OSError(errno.EHOSTUNREACH, "No route to host"),
        OSError(errno.ENETUNREACH, "Network is unreachable"),
        OSError(errno.ETIMEDOUT, "Connection timed out"),
    ],
    ids=repr,
)
def test_what_may_pass_is_transient(error: BaseException) -> None:
    assert classify(error) is Failure.TRANSIENT


@pytest.mark.parametrize(
    "error",
    [
        Poison("never"),
        Hopeless(),
        ValueError(),
        KeyError("k"),
        ZeroDivisionError(),
        json.JSONDecodeError("no", "", 0),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no"),
        FileNotFoundError(errno.ENOENT, "No such file"),
        PermissionError(errno.EACCES, "no"),
        OSError(errno.ENOSPC, "No space left on device"),
        OSError("of no kind"),
        AssertionError(),
        RecursionError(),
        MemoryError(),
        SystemExit(1),
        EOFError(),
    ],
    ids=repr,
)
def test_everything_else_is_poison_the_unexpected_included(error: BaseException) -> None:
    assert classify(error) is Failure.POISON
