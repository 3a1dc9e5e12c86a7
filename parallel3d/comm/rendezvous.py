"""Ranks that agree through the world's store: from any thread, and with a limit to how long they wait for each other."""

from __future__ import annotations

import base64
import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from parallel3d.comm.collectives import Group
from parallel3d.comm.lifelines import Lifelines
from parallel3d.errors import CommunicationError, Parallel3DError, PeerError

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05
# torch's TCPStore takes no values of more than 8 MiB.
_MOST_BYTES = 4 << 20
# The first rank may own the store: it stays until the others have read their answers, but not for those that died.
_LEAVE_S = 10.0
# How often a rank has given up, over all ranks; below it, of each rank, the count when it last did.
_GIVEN_UP = "given_up"


class Rendezvous:
    """Meetings of all ranks of a world, one after the other; all ranks must meet for the same ends in the same order.

    They use no process group, so one can be held while training communicates, and one that fails does no harm.
    group: the world, by any handle that all ranks made together; name: of this series of meetings. Collective over `group`.
    """

    def __init__(self, group: Group, name: str):
        self._size, self._index = group.size, group.index
        self._meetings = 0
        if group.handle is not None:
            self._store = dist.PrefixStore(f"{name}/{group.handle.group_name}", _get_default_store())
            self._lifelines = Lifelines(group)

    def meet(self, purpose: str, value: Any, decide: Callable[[list[Any]], Sequence[Any]], timeout_s: float) -> Any:
        """This rank's item of decide(every rank's value), which the first rank calls; values and items are JSON's.

        Raises CommunicationError, naming the ranks that have not come, after timeout_s; on every rank the Parallel3DError
        that `decide` raises; PeerError as soon as a rank that has not come is known to be gone.
        """
        if self._size == 1:
            return decide([value])[0]
        self._purpose, self._deadline, self._timeout = purpose, time.monotonic() + timeout_s, timeout_s
        number = self._meetings
        self._begun = self._store.add(_GIVEN_UP, 0)
        self._put(f"{number}/{self._index}", [purpose, value])
        try:
            answer = self._lead(number, value, decide) if self._index == 0 else self._follow(number)
        finally:
            self._remove(f"{number}/{self._index}")
        self._meetings += 1
        if "error" in answer:
            raise _error_of(answer)
        self._check(0, answer["purpose"])
        return answer["item"]

    def _lead(self, number: int, value: Any, decide: Callable[[list[Any]], Sequence[Any]]) -> dict[str, Any]:
        others = {rank: f"{number}/{rank}" for rank in range(1, self._size)}
        answers: list[dict[str, Any]]
        if lost := self._wait(others):
            answers = [{"error": self._end_of(lost), "lost": lost[0]}] * self._size
        else:
            came = [[self._purpose, value], *(self._get(key) for key in others.values())]
            try:
                for rank, (purpose, _) in enumerate(came):
                    self._check(rank, purpose)
                answers = [{"item": item} for item in decide([value for _, value in came])]
            except Exception as error:  # whatever it is, the others are waiting for it
                told = str(error) if isinstance(error, Parallel3DError) else f"{type(error).__name__}: {error}"
                answers = [{"error": told, "kind": type(error).__name__}] * self._size
        for rank in range(1, self._size):
            self._put(f"{number}/answer/{rank}", {**answers[rank], "purpose": self._purpose})
        self._wait_for_readers(number)
        return {**answers[0], "purpose": self._purpose}

    def _follow(self, number: int) -> dict[str, Any]:
        key = f"{number}/answer/{self._index}"
        if lost := self._wait({0: key}):
            raise PeerError(self._end_of(lost), lost[0])
        answer: dict[str, Any] = self._get(key)
        self._remove(key)
        return answer

    def _check(self, rank: int, purpose: str) -> None:
        """Where ranks have lost count, as after one that came too late, what they say would be taken for something else."""
        if purpose != self._purpose:
            raise CommunicationError(
                f"rank {self._index} is at {self._purpose} and rank {rank} at {purpose}; every rank must call the same, in the "
                "same order (after one that came too late, start the job anew)"
            )

    def _put(self, key: str, value: Any) -> None:
        content = zlib.compress(json.dumps(value).encode(), 1)
        pieces = [content[k : k + _MOST_BYTES] for k in range(0, len(content), _MOST_BYTES)]
        for k, piece in enumerate(pieces):
            self._store.set(f"{key}/{k}", base64.b64encode(piece).decode())
        self._store.set(key, str(len(pieces)))  # last: with it the value is there

    def _get(self, key: str) -> Any:
        number = int(self._store.get(key))
        content = b"".join(base64.b64decode(self._store.get(f"{key}/{k}")) for k in range(number))
        return json.loads(zlib.decompress(content))

    def _remove(self, key: str) -> None:
        for k in range(int(self._store.get(key))):
            self._store.delete_key(f"{key}/{k}")
        self._store.delete_key(key)

    def _wait(self, keys: Mapping[int, str]) -> list[int]:
        """Until all keys are there; or which of the ranks that are to set them have ended and have not.

        Raises CommunicationError at the deadline.
        """
        pause = _SHORTEST_PAUSE_S
        while not self._store.check(list(keys.values())):
            # It may have ended after it had set its key.
            if lost := [rank for rank in self._lifelines.ended(keys) if not self._store.check([keys[rank]])]:
                return lost
            if time.monotonic() > self._deadline:
                absence = self._absence()
                # What it brought is taken back, so that no later meeting takes it for new; that it was here stays on record.
                self._store.set(f"{_GIVEN_UP}/{self._index}", str(self._store.add(_GIVEN_UP, 1)))
                raise CommunicationError(absence)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        return []

    def _end_of(self, lost: list[int]) -> str:
        who = f"rank {lost[0]}" if len(lost) == 1 else f"ranks {lost}"
        return (
            f"{self._purpose}: {who} ended while others waited for what it brings; look at its output for why it died, or left "
            "its script before the others"
        )

    def _absence(self) -> str:
        missing = [r for r in range(self._size) if not self._has_come(r)]
        who = f"ranks {missing} have not come" if missing else "rank 0 has not answered"
        return (
            f"{self._purpose}: {who} within {self._timeout:g} s; every rank must call it, at the same place (look for a rank "
            "that died, or an `if rank == 0` around the call)"
        )

    def _has_come(self, rank: int) -> bool:
        """Whether a rank is here, or was and gave up after this one began to wait."""
        if self._store.check([f"{self._meetings}/{rank}"]):
            return True
        key = f"{_GIVEN_UP}/{rank}"
        return self._store.check([key]) and int(self._store.get(key)) > self._begun

    def _wait_for_readers(self, number: int) -> None:
        deadline, pause = time.monotonic() + _LEAVE_S, _SHORTEST_PAUSE_S
        unread = {rank: f"{number}/answer/{rank}" for rank in range(1, self._size)}
        while unread and time.monotonic() < deadline:
            gone = self._lifelines.ended(unread)
            unread = {rank: key for rank, key in unread.items() if rank not in gone and self._store.check([key])}
            if unread:
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)


def _error_of(answer: dict[str, Any]) -> Parallel3DError:
    if "lost" in answer:
        return PeerError(answer["error"], answer["lost"])
    return _ERRORS.get(answer["kind"], CommunicationError)(answer["error"])


_ERRORS: dict[str, type[Parallel3DError]] = {cls.__name__: cls for cls in Parallel3DError.__subclasses__()}
