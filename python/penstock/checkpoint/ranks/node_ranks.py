"""`Neighbours`: the number of a job's processes that share this machine, its memory and disks."""

from __future__ import annotations

import socket
from collections import Counter
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.common.process import placement

if TYPE_CHECKING:
    from penstock.checkpoint.ranks.mailbox import Mailbox

COUNTS = "machines"
"""Name of the message with the number of ranks per machine; it is never deleted."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Neighbours:
    """The ranks of a group that are on this machine.

    If no launcher gives their number, ranks exchange their machines' names: once, at their first
    common operation, and the last rank counts.
    """

    def __init__(self, rank: int, size: int, job_size: int) -> None:
        self._rank = rank
        self._size = size
        self._is_told = False
        self.count = processes_here(job_size)
        """Number of ranks on this machine, this one included; None until known."""
        if size == 1 and self.count is None:
            self.count = 1

    def publish(self, mailbox: Mailbox) -> None:
        """Publishes this rank's machine, once; a launcher may have told other ranks less."""
        if self._is_told or self._size == 1:
            return
        self._is_told = True
        mailbox.put(f"machine/{self._rank}", _machine())
        if mailbox.count("machines told") == self._size:
            names = [f"machine/{rank}" for rank in range(self._size)]
            mailbox.post(COUNTS, dict(Counter(mailbox.read(names))))
            mailbox.delete([*names, "machines told"])

    def count_here(self, mailbox: Mailbox) -> int:
        """Reads the number of ranks on this machine, once all have published theirs."""
        counts = mailbox.read_message(COUNTS)
        if counts is None:
            raise AssertionError("what was waited for stays")
        self.count = int(counts[_machine()])
        return self.count


def processes_here(job_size: int | None = None) -> int | None:
    """Returns the number of a job's processes on this machine; None if no launcher gives it.

    Args:
        job_size: Number of processes in the job; None if unknown. A launcher with another number
            started something else.
    """
    found = placement()
    if found is None or job_size not in (None, found.ranks):
        return None
    return found.ranks_here


def _machine() -> str:
    """Returns an id that is equal for all processes on one machine, in any container."""
    try:
        name = _BOOT_ID.read_text()
    except OSError:
        name = socket.gethostname()
    return blake2b(name.encode(), digest_size=8).hexdigest()
