"""`Neighbours`: how many processes of a job share this machine, its memory and its disks."""

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
"""The message with the number of ranks of each machine; it stays."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Neighbours:
    """The ranks of a group that are on this machine.

    Where no launcher says how many there are, ranks tell each other where they are: each once, when
    it first comes to anything that they do together, and whoever is last counts.

    Args:
        rank: The number of this one.
        size: How many there are in all.
        job_size: How many the whole job has.
    """

    def __init__(self, rank: int, size: int, job_size: int) -> None:
        self._rank = rank
        self._size = size
        self._is_told = False
        self.count = processes_here(job_size)
        """How many are here, this one included; None where that is not known yet."""
        if size == 1 and self.count is None:
            self.count = 1

    def tell(self, mailbox: Mailbox) -> None:
        """Says where this rank is; all do, as another launcher may have said less to others."""
        if self._is_told or self._size == 1:
            return
        self._is_told = True
        mailbox.put(f"machine/{self._rank}", _machine())
        if mailbox.count("machines told") == self._size:
            names = [f"machine/{rank}" for rank in range(self._size)]
            mailbox.post(COUNTS, dict(Counter(mailbox.read(names))))
            mailbox.delete([*names, "machines told"])

    def hear(self, mailbox: Mailbox) -> int:
        """Reads how many are here, when all have said where they are."""
        counts = mailbox.look(COUNTS)
        if counts is None:
            raise AssertionError("what was waited for stays")
        self.count = int(counts[_machine()])
        return self.count


def processes_here(job_size: int | None = None) -> int | None:
    """How many processes of a job this machine has, as launchers say; None where they do not.

    Args:
        job_size: How many there are in all; None if that is not known. A launcher of another number
            started something else.
    """
    found = placement()
    if found is None or job_size not in (None, found.ranks):
        return None
    return found.ranks_here


def _machine() -> str:
    """The same for all processes that share memory and disks, containers or not."""
    try:
        name = _BOOT_ID.read_text()
    except OSError:
        name = socket.gethostname()
    return blake2b(name.encode(), digest_size=8).hexdigest()
