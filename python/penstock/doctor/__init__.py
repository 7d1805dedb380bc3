"""Checks a machine and a directory, and how to improve them, for `penstock doctor`.

Every check inspects one thing and says what it found, why that matters, and how to fix it. A check
that cannot inspect it says so; none needs more rights than an ordinary user has.
"""

from penstock.doctor.examine import Examination, examine
from penstock.doctor.findings import Finding, Status

__all__ = ["Examination", "Finding", "Status", "examine"]
