"""A stream's wait for a message by a kernel of this package (csrc/await_count.cu), instead of by the driver."""

from __future__ import annotations

import ctypes
import warnings

import torch

from parallel3d.comm.environment import DEFAULT_TIMEOUT
from parallel3d.comm.obstacles import local_obstacle
from parallel3d.errors import CommunicationError
from parallel3d.kernels.loader import check, load_library


class MessageWait:
    """Lets streams of one device wait for counts that peers write. Made by open_message_wait.

    A wait longer than `limit_s` ends the process's use of the device: nothing may be computed with what did not come.
    """

    def __init__(self, device: torch.device, limit_s: float):
        library = load_library()
        assert library is not None, "checked before by local_obstacle"
        self._library, self._device, self._limit_s = library, device, limit_s
        # Where the kernel tells the host of a failure: reading it waits for nothing.
        self._pinned = torch.zeros(1, dtype=torch.int32).pin_memory()
        self._report = ctypes.c_int32.from_address(self._pinned.data_ptr())

    def wait(self, stream: int, word: int, count: int) -> None:
        """Let the stream of a handle go on when the int32 at an address has reached the count; see rings.Stream.

        Raises CommunicationError after a wait was too long, KernelError.
        """
        if self._report.value:
            raise CommunicationError(
                f"a message did not come within {self._limit_s:g} s; look for the rank that stopped sending, in whose output "
                "is why"
            )
        status = self._library.p3d_await_count(
            word, count % 2**32, int(self._limit_s * 1e9), self._pinned.data_ptr(), self._device.index, stream
        )
        check(self._library, "p3d_await_count", status)


def open_message_wait(
    device: torch.device, asked: bool, limit_s: float = DEFAULT_TIMEOUT.total_seconds()
) -> MessageWait | None:
    """None where it is not asked for, and, with a warning that says why, where it can't be had."""
    if not asked:
        return None
    if (obstacle := local_obstacle(device)) is not None:
        warnings.warn(f"kernels.message_wait: {obstacle}; the driver waits for messages instead", stacklevel=2)
        return None
    waits = MessageWait(device, limit_s)
    # Loads the kernel: in a step, where others may be waiting on the device, that could wait for ever.
    word = torch.ones(1, dtype=torch.int32, device=device)
    waits.wait(torch.cuda.current_stream(device).cuda_stream, word.data_ptr(), 1)
    torch.cuda.synchronize(device)
    return waits
