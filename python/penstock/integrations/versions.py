"""Which versions of a framework a plug-in was tried with."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from penstock.errors import MissingDependencyError

UNTESTED = "PENSTOCK_UNTESTED"
"""Names of packages, separated by commas, whose untested versions are taken all the same."""


def check_version(package: str, first: str, last: str) -> None:
    """Refuses versions of a framework that a plug-in was not tried with.

    Plug-ins take the place of methods that frameworks promise nobody to keep. One that has moved
    would go on without an error, and save less than it should.

    Args:
        package: The name it is installed by.
        first: The first version that was tried, as ``"2.6"``.
        last: The last one, whose fixes (``"2.6"``: 2.6.1, 2.6.2, …) are taken too.

    Raises:
        MissingDependencyError: It is not installed, older or newer.
    """
    plug_in = f"Penstock's plug-in for {package}"
    try:
        found = version(package)
    except PackageNotFoundError:
        raise MissingDependencyError(
            f"{plug_in} needs it: pip install '{package}>={first}'", name=package
        ) from None
    if package in (name.strip() for name in os.environ.get(UNTESTED, "").split(",")):
        return
    release, newest = Version(found).release, Version(last).release
    if Version(first).release <= release and release[: len(newest)] <= newest:
        return
    raise MissingDependencyError(
        f"{plug_in} was tried with versions {first} to {last}, and {found} is installed: install "
        f"one of those, or set {UNTESTED}={package} to go on with this one, and try a resume first",
        name=package,
    )
