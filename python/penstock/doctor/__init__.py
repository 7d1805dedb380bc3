"""What a machine and a directory can do, and what is in the way: what `penstock doctor` finds.

Every check looks at one thing and says what it found, why that matters, and what mends it. A check
that cannot look says so; none needs a right that an ordinary user lacks.
"""

from penstock.doctor.examine import Examination, examine
from penstock.doctor.findings import Finding, Status

__all__ = ["Examination", "Finding", "Status", "examine"]
