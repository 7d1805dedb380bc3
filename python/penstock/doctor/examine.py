"""`examine`: runs all checks, in order."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.common.paths import of_bucket, tidy
from penstock.doctor import bucket, gpu, measured, secrets, storage, system
from penstock.doctor.findings import Finding

if TYPE_CHECKING:
    from collections.abc import Callable

_FREE_TIMES_SIZE = 2


@dataclass(frozen=True, slots=True)
class Examination:
    """All findings of the doctor.

    Attributes:
        directory: The directory or URL that was checked.
        findings: One or more for each check.
    """

    directory: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return all(one.status != "fail" for one in self.findings)


def examine(
    directory: Path | str,
    *,
    measures: bool = True,
    size_bytes: int = measured.SIZE_BYTES_MAX,
    progress: Callable[[str], None] = lambda _: None,
) -> Examination:
    """Checks this machine and a directory.

    Args:
        directory: Directory for checkpoints, which must exist, or a URL of a bucket.
        measures: Whether to measure as well, which takes 10 to 20 s.
        size_bytes: Size of the file for measurements; smaller if there is little room.
        progress: Called with the name of each measurement.
    """
    url = tidy(os.fspath(directory))
    if of_bucket(url):
        return Examination(url, tuple(bucket.check(url, measures=measures, progress=progress)))
    directory = Path(url)
    looked = [*system.check(), *secrets.check(), *storage.check(directory)]
    findings = [*looked, *gpu.check(directory, measures=measures, progress=progress)]
    is_usable = all(one.status != "fail" for one in findings)
    if measures and is_usable:
        free = shutil.disk_usage(directory).free
        findings += measured.check(directory, min(size_bytes, free // _FREE_TIMES_SIZE), progress)
    elif measures:
        findings.append(Finding("measurement", "ok", "left out, since something failed"))
    return Examination(str(directory), tuple(findings))
