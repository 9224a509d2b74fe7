"""Failure policies: what happens to a message that failed for good, and to its lane.

A :class:`FailurePolicy` describes itself, and decides through :class:`FailedMessage`, which the engine implements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    from keylane.message import Message
    from keylane.policies.failure_info import FailureInfo

OnFailure = Literal["skip", "block", "block_and_dlq", "park"]


class FailedMessage(Protocol):
    """A message that failed for good, at the head of its lane. A policy calls exactly one of the three methods."""

    @property
    def message(self) -> Message:
        """The message; its value is what the failed stage was given."""

    @property
    def info(self) -> FailureInfo:
        """The stage, the error and the attempts."""

    @property
    def has_lane(self) -> bool:
        """Whether any other message waits for this one."""

    def skip(self) -> None:
        """Write the dead letter, then continue with the next message of the lane."""

    def block(self, *, archive: bool = False) -> None:
        """Stop the lane until an operator acts; with ``archive`` write a copy to the dead letters first."""

    def park(self) -> None:
        """Send this message and all that follow in its lane to the dead letters, to be redriven in order."""


class FailurePolicy:
    """The base of all policies. For one of your own, write :meth:`decide`.

    ``decide`` runs on the task's loop: it must be quick and must not block. An exception from it, or no decision, stops
    the task; nothing is lost, the message runs again. The object travels to the tasks with the app, so it must be
    picklable.
    """

    blocks: ClassVar[bool] = False
    """Whether :meth:`decide` may call :meth:`FailedMessage.block`."""
    parks: ClassVar[bool] = False
    """Whether :meth:`decide` may call :meth:`FailedMessage.park`."""

    @property
    def stops(self) -> bool:
        """Whether a lane may stop at a failed message."""
        return self.blocks or self.parks

    def decide(self, failed: FailedMessage) -> None:
        """Call exactly one of the methods of ``failed``."""
        raise NotImplementedError(f"{type(self).__name__} needs a method decide(failed)")

    def __str__(self) -> str:
        return repr(self)


class _NamedPolicy(FailurePolicy):
    """One of the four with a name. There is one object of each, also after pickling."""

    _NAME: ClassVar[OnFailure]

    def __str__(self) -> str:
        return self._NAME

    def __repr__(self) -> str:
        return repr(self._NAME)

    def __reduce__(self) -> tuple[Any, ...]:
        return failure_policy, (self._NAME,)


class _SkipPolicy(_NamedPolicy):
    _NAME = "skip"

    def decide(self, failed: FailedMessage) -> None:
        failed.skip()


class _BlockPolicy(_NamedPolicy):
    blocks = True
    _NAME = "block"

    def decide(self, failed: FailedMessage) -> None:
        failed.block()


class _BlockAndDlqPolicy(_NamedPolicy):
    blocks = True
    _NAME = "block_and_dlq"

    def decide(self, failed: FailedMessage) -> None:
        failed.block(archive=True)


class _ParkPolicy(_NamedPolicy):
    parks = True
    _NAME = "park"

    def decide(self, failed: FailedMessage) -> None:
        if failed.has_lane:
            failed.park()
        else:  # there is nothing to set aside with it
            failed.skip()


SKIP: FailurePolicy = _SkipPolicy()
BLOCK: FailurePolicy = _BlockPolicy()
BLOCK_AND_DLQ: FailurePolicy = _BlockAndDlqPolicy()
PARK: FailurePolicy = _ParkPolicy()
POLICIES: Mapping[str, FailurePolicy] = {str(one): one for one in (SKIP, BLOCK, BLOCK_AND_DLQ, PARK)}
"""Those with a name."""


def failure_policy(on_failure: object) -> FailurePolicy | None:
    """The policy of this name, or the object itself; None for anything else."""
    if isinstance(on_failure, FailurePolicy):
        return on_failure
    return POLICIES.get(on_failure) if isinstance(on_failure, str) else None
