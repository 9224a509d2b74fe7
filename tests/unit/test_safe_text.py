"""Text of others: what is made of it before it is written anywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keylane import App, Message, Poison
from keylane.safe_text import cut, cut_bytes, printable, printable_lines, show_bytes, valid
from keylane.spark.outcomes import to_arrow
from keylane.testing import Harness

if TYPE_CHECKING:
    from keylane.engine.delivery import Delivery

ANY = st.text(st.characters(exclude_categories=()))
"""Also lone surrogates."""


@given(ANY, st.integers(0, 10))
def test_valid_text_can_be_encoded_and_is_bounded(text: str, limit: int) -> None:
    assert len(valid(text, limit)) <= limit
    assert valid(text).encode().decode() == valid(text)
    assert valid(valid(text)) == valid(text)


@given(ANY)
def test_printable_text_has_no_control_characters(text: str) -> None:
    assert printable(text).isprintable()
    assert all(line.isprintable() for line in printable_lines(text).split("\n"))


@pytest.mark.parametrize(
    "bad", ["\x1b[2J", "\x07", "\x9b", "\x85", "\u2028", "\u2029", "\u202e", "\r", "\ud800"]
)
def test_printable_lines_escape_control_characters(bad: str) -> None:
    shown = printable_lines(f"a{bad}b\nc")
    assert bad not in shown
    assert shown.endswith("b\n  c")


@given(st.binary(), st.integers(4, 20))
def test_cut_bytes_are_shown_with_their_length(content: bytes, limit: int) -> None:
    shown = cut_bytes(content, limit)
    if len(content) <= limit:
        assert shown == show_bytes(content)
    else:
        assert shown.endswith(f"… ({len(content):,} bytes)")
        assert len(shown) < 2 * limit + 40


def test_cut_text_shows_its_length() -> None:
    assert cut("abc", 3) == "abc"
    assert cut("a" * 5000, 3) == "aaa… (5,000 characters)"
    assert cut_bytes("\u4e2d".encode() * 100, 4) == "\u4e2d… (300 bytes)"


def test_error_with_a_lone_surrogate_is_an_outcome() -> None:
    app = App("app", source="in", decode="json")
    kept: list[Delivery] = []

    @app.stage
    async def work(msg: Message) -> bytes:
        raise Poison(f"unknown name {msg.value['name']}")

    @app.on_dead
    def dead(msg: Delivery, letter: object) -> None:
        kept.append(msg)

    run = Harness(app, partitions=1)
    run.send(key=b"k", value=b'{"name": "\\ud800"}')
    result = run.run()
    (row,) = to_arrow(kept, "me", 1, results=False).to_pylist()
    assert row["error"] == "Poison: unknown name \\ud800"
    (letter,) = result.dead
    for text in (letter.message, letter.traceback):
        assert text.encode()
