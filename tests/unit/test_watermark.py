from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from keylane.core.progress import decode, encode
from keylane.core.watermark import Progress, Watermark

FRESH = Progress(watermark=0, position=0)


class WatermarkAgainstSets(RuleBasedStateMachine):
    """One partition through any number of lives, against the set of offsets that are done."""

    @initialize(
        gaps=st.lists(st.sampled_from([1, 1, 1, 2, 5]), min_size=1, max_size=40), first=st.integers(0, 9)
    )
    def begin(self, gaps: list[int], first: int) -> None:
        self.log = [first]
        for gap in gaps:
            self.log.append(self.log[-1] + gap)
        self.committed = Progress(watermark=first, position=first)
        self.committed_done: set[int] = set()
        self.live()

    def live(self) -> None:
        """A new task: it knows nothing but what was committed, and reads from the watermark."""
        self.mark = Watermark(self.committed)
        self.done = set(self.committed_done)
        self.unread = [offset for offset in self.log if offset >= self.committed.watermark]
        self.running: list[int] = []
        self.known = self.committed.position  # below this everything is done or known to be pending

    @precondition(lambda self: self.unread)
    @rule(count=st.integers(1, 8))
    def fetch(self, count: int) -> None:
        batch, self.unread = self.unread[:count], self.unread[count:]
        wanted = [o for o in batch if self.mark.wanted(o)] if self.mark.restoring else batch
        assert wanted == [o for o in batch if o not in self.done], "exactly what is not done runs again"
        if wanted:
            self.mark.deliver(wanted)
            self.running += wanted
        self.mark.reach(batch[-1] + 1)
        assert self.mark.position == batch[-1] + 1
        self.known = max(self.known, batch[-1] + 1)

    @precondition(lambda self: not self.unread)
    @rule(hole=st.integers(0, 5))
    def come_to_the_end_past_a_hole(self, hole: int) -> None:
        end = max(self.mark.position, self.log[-1] + 1 + hole)
        self.mark.reach(end)
        self.mark.reach(end - 3)
        assert self.mark.position == end
        self.known = max(self.known, end)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def some_are_done(self, data: st.DataObject) -> None:
        done = set(data.draw(st.lists(st.sampled_from(self.running), min_size=1)))
        self.running = [o for o in self.running if o not in done]
        self.done |= done
        self.mark.done(done)

    @rule()
    def commit(self) -> None:
        progress = self.mark.progress()
        restored = decode(progress.watermark, encode(progress))
        assert restored.problem is None
        assert restored.progress == progress
        self.committed = restored.progress
        self.committed_done = set(self.done)

    @rule()
    def crash(self) -> None:
        self.live()

    @rule(count=st.integers(2, 5))
    def crash_again_and_again_in_the_middle_of_the_restore(self, count: int) -> None:
        for _ in range(count):
            self.live()
            if self.unread:
                self.fetch(2)
            self.commit()

    @invariant()
    def progress_says_what_the_sets_say(self) -> None:
        progress = self.mark.progress()
        left = [o for o in self.log if o < self.known and o not in self.done]
        assert progress.pending == tuple(left)
        assert progress.position == self.known
        assert progress.watermark == self.mark.value == (left[0] if left else self.known)
        assert self.mark.pending == len(self.running)
        for offset in self.log:
            assert progress.is_done(offset) == (offset in self.done)

    def teardown(self) -> None:
        """Whatever happened: one more life does exactly the rest."""
        if not hasattr(self, "log"):
            return
        self.live()
        ran: list[int] = []
        while self.unread:
            self.fetch(7)
            ran += self.running
            self.done |= set(self.running)
            self.mark.done(self.running)
            self.running = []
        assert ran == [o for o in self.log if o not in self.committed_done]
        assert self.mark.value == self.known
        assert self.mark.progress().pending == ()


TestWatermarkAgainstSets = WatermarkAgainstSets.TestCase
TestWatermarkAgainstSets.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@given(st.permutations(range(12)))
def test_done_in_any_order_moves_the_watermark_to_the_lowest_that_is_not(order: list[int]) -> None:
    mark = Watermark(FRESH)
    offsets = [10 * n for n in range(12)]
    mark.deliver(offsets)
    left = set(offsets)
    for place in order:
        assert mark.value == min(left)
        left.discard(10 * place)
        mark.done([10 * place])
    assert mark.value == mark.position == 111


def test_a_fresh_partition_is_where_reading_begins() -> None:
    mark = Watermark(Progress(watermark=7, position=7))
    assert (mark.value, mark.position, mark.pending, mark.restoring) == (7, 7, 0, False)
    assert mark.progress() == Progress(watermark=7, position=7)


def test_what_is_done_twice_or_was_never_delivered_changes_nothing() -> None:
    mark = Watermark(FRESH)
    mark.deliver([1, 2])
    mark.done([1])
    mark.done([1, 99])
    assert mark.progress() == Progress(watermark=2, position=3, pending=(2,))


def test_restored_offsets_that_have_left_the_log_are_forgotten_once_reading_has_passed_them() -> None:
    mark = Watermark(Progress(watermark=3, position=20, pending=(3, 9)))
    mark.deliver([9])  # retention has taken offset 3 in the meantime
    assert mark.value == 9
    mark.done([9])
    assert mark.value == 20


def test_stuck_lanes_do_not_make_the_watermark_keep_what_passed_them_by() -> None:
    mark = Watermark(FRESH)
    stuck = [5, 65_536 + 3, 2 * 65_536 + 1]  # a set holds them in another order
    mark.deliver(stuck)
    for start in range(200_000, 250_000, 1000):
        batch = list(range(start, start + 1000))
        mark.deliver(batch)
        mark.done(batch)
        assert mark.value == 5
    assert len(mark._order) < 5000
    assert mark.progress() == Progress(watermark=5, position=250_000, pending=tuple(stuck))
    for offset, then in ((stuck[1], 5), (5, stuck[2]), (stuck[2], 250_000)):
        mark.done([offset])
        assert mark.value == then
