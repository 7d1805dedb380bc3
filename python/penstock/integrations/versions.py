"""Checks that a plug-in fits the installed version of its framework.

Plug-ins replace methods that frameworks do not promise to keep. After a change they might go on
without an error, and save less than they should. So the version is compared with those tested, a
`Probe` checks each thing that the plug-in replaces or calls, and with a version newer than those
tested `self_check` first saves and loads a tiny state.
"""

from __future__ import annotations

import dis
import inspect
import warnings
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from types import CodeType
from typing import TYPE_CHECKING

from packaging.version import Version

from penstock.errors import MissingDependencyError, PenstockError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_tried: dict[str, tuple[str, str]] = {}
"""The first and the last version that a plug-in was tested with, by the framework's package."""

_modules: dict[str, str] = {}
"""The module that says the version of a package which is used without being installed."""

_warned: set[str] = set()
_self_checked: set[str] = set()


class NewerVersionWarning(UserWarning):
    """A framework is newer than the versions that its plug-in was tested with."""


def check_version(package: str, first: str, last: str, *, module: str | None = None) -> None:
    """Refuses versions of a framework that are too old, and warns of newer ones than tested.

    Args:
        package: The name under which it is installed.
        first: The first version that the plug-in supports, as ``"2.4"``.
        last: The last version tested; its patch releases (``"2.6"``: 2.6.1, 2.6.2, …) are included.
        module: A module with a ``__version__``, for a checkout that is not installed.

    Warns:
        NewerVersionWarning: It is newer than `last`; once in a process.

    Raises:
        MissingDependencyError: It is not installed, or older than `first`.
    """
    plug_in = f"Penstock's plug-in for {package}"
    _tried[package] = first, last
    if module is not None:
        _modules[package] = module
    try:
        found = _version(package)
    except PackageNotFoundError:
        raise MissingDependencyError(
            f"{plug_in} needs it: pip install '{package}>={first}'", name=package
        ) from None
    if Version(found).release < Version(first).release:
        raise MissingDependencyError(
            f"{plug_in} takes versions from {first} on, and {found} is installed: "
            f"pip install '{package}>={first}'",
            name=package,
        )
    if is_newer(package) and package not in _warned:
        _warned.add(package)
        warnings.warn(
            f"{plug_in} was tried with versions {first} to {last}, and {found} is newer: all that "
            "the plug-in replaces is checked, so that a change which matters is an error",
            NewerVersionWarning,
            stacklevel=3,
        )


def is_newer(package: str) -> bool:
    """Whether a framework is newer than the versions that `check_version` was called with."""
    newest = Version(_tried[package][1]).release
    return Version(_version(package)).release[: len(newest)] > newest


def self_check(package: str, trial: Callable[[], None]) -> None:
    """Runs a plug-in's trial once in a process, if its framework is newer than the versions tested.

    Args:
        package: The framework's package, given to `check_version` before.
        trial: Saves and loads a tiny state through the framework; raises an error if another state
            comes back.

    Raises:
        MissingDependencyError: The trial failed.
        StorageError: The operating system failed it, which says nothing about the version.
    """
    if package in _self_checked or not is_newer(package):
        return
    # Set before, as the trial's own save calls this function again.
    _self_checked.add(package)
    try:
        trial()
    except Exception as error:
        _self_checked.discard(package)
        if isinstance(error, StorageError):
            raise
        if isinstance(error, OSError) and not isinstance(error, PenstockError):
            path = str(error.filename or "")
            raise StorageError(
                f"{path or 'a file'} of a trial save cannot be written: {error.strerror or error}; "
                "make room there, or save elsewhere",
                path=path,
                errno=error.errno,
            ) from error
        raise MissingDependencyError(
            f"Penstock's plug-in for {package} saved and loaded a small state as a trial, as "
            f"{_version(package)} is newer than the versions it was tried with, and that failed: "
            f"{error}: {_remedy(package)}",
            name=package,
        ) from error


def _version(package: str) -> str:
    """The version of a package.

    Raises:
        PackageNotFoundError: It is neither installed nor on the path.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        if package not in _modules:
            raise
        try:
            return str(import_module(_modules[package]).__version__)
        except ImportError:
            raise PackageNotFoundError(package) from None


def skip_self_check(package: str) -> None:
    """Turns off the trial of a framework in this process, which itself is a trial."""
    _self_checked.add(package)


class Probe:
    """Checks a framework for everything that a plug-in replaces or calls, and collects changes.

    Example:
        ```python
        probe = Probe("transformers", "penstock.integrations.transformers")
        trainer = probe.attribute("transformers", "Trainer")
        save = probe.attribute(trainer, "_save_checkpoint")
        probe.signature(save, "model", "trial")
        probe.calls(save, "save_model", "_save_optimizer_and_scheduler", "_save_rng_state")
        probe.check()
        ```
    """

    def __init__(self, package: str, plug_in: str) -> None:
        """Makes a probe without recorded changes.

        Args:
            package: The name under which the framework is installed.
            plug_in: The plug-in's name for errors.
        """
        self._package = package
        self._plug_in = plug_in
        self._moved: list[str] = []

    def attribute(self, owner: object, name: str) -> object:
        """Looks up an attribute.

        Args:
            owner: A module by its name (``"torch.distributed.checkpoint"``), or any object. `None`,
                the result of a failed look-up, is ignored: that is recorded already.
            name: The attribute's name.

        Returns:
            The attribute, or `None` if it is missing.
        """
        if owner is None:
            return None
        if isinstance(owner, str):
            try:
                owner = import_module(owner)
            except ImportError:
                self._moved.append(f"no module {owner}")
                return None
        try:
            return getattr(owner, name)
        except AttributeError:
            self._moved.append(f"no {_name(owner)}.{name}")
            return None

    def signature(self, function: object, *parameters: str) -> None:
        """Records parameters that a function no longer has, and new ones that it requires.

        Args:
            function: A result of `attribute`. A class stands for its constructor.
            parameters: The names of all parameters that the plug-in passes or takes, without
                ``self``. Others must have a default.
        """
        if function is None:
            return
        assert callable(function)
        found = inspect.signature(function).parameters
        kinds = {parameter.kind for parameter in found.values()}
        open_ended = inspect.Parameter.VAR_KEYWORD in kinds
        lost = [name for name in parameters if name not in found and not open_ended]
        demanded = [
            name
            for name, parameter in found.items()
            if parameter.default is inspect.Parameter.empty
            and parameter.kind
            not in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            and name not in (*parameters, "self", "cls")
        ]
        if lost:
            self._moved.append(f"{_name(function)} takes no {', '.join(lost)}")
        if demanded:
            self._moved.append(f"{_name(function)} demands {', '.join(demanded)}")

    def calls(self, function: object, *names_in_order: str) -> None:
        """Records names that a function no longer uses, or uses in another order.

        Args:
            function: A result of `attribute`.
            names_in_order: Functions, methods and attributes that it uses, in the order in which
                its code names them; others may come between.
        """
        if function is None:
            return
        assert callable(function)
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is None:
            self._moved.append(f"{_name(function)} is no Python function")
            return
        used = list(_used(code))
        if lost := [name for name in names_in_order if name not in used]:
            self._moved.append(f"{_name(function)} uses no {', '.join(lost)}")
        elif not _in_order(names_in_order, used):
            order = ", ".join(names_in_order)
            self._moved.append(f"{_name(function)} does not use in this order: {order}")

    def note(self, moved: str) -> None:
        """Records a change that a plug-in has found itself, as ``"no attribute so-and-so"``."""
        self._moved.append(moved)

    def check(self) -> None:
        """Raises an error if any change was recorded.

        Raises:
            MissingDependencyError: With all changes, the version found and the remedy.
        """
        if self._moved:
            raise MissingDependencyError(
                f"{self._plug_in} does not fit {self._package} {_version(self._package)}: "
                f"{'; '.join(self._moved)}: {_remedy(self._package)}",
                name=self._package,
            )


def _remedy(package: str) -> str:
    if package in _tried:
        first, last = _tried[package]
        return f"install {package} {first} to {last}, or a newer Penstock"
    return f"install an older {package}, or a newer Penstock"


def _name(thing: object) -> str:
    """The name of a module, class or function, or of an object's class."""
    if inspect.ismodule(thing):
        return thing.__name__
    named = thing if hasattr(thing, "__qualname__") else type(thing)
    return f"{named.__module__}.{named.__qualname__}"


_USES = (
    "LOAD_GLOBAL",
    "LOAD_NAME",
    "LOAD_DEREF",
    "LOAD_ATTR",
    "LOAD_METHOD",
    "LOAD_SUPER_ATTR",
    "LOAD_SUPER_METHOD",
    "IMPORT_FROM",
)


def _used(code: CodeType) -> Iterator[str]:
    """The names that code uses, except local variables, in its order.

    It reads byte code, as source is not installed everywhere.
    """
    for instruction in dis.get_instructions(code):
        if instruction.opname in _USES:
            yield instruction.argval
        elif isinstance(instruction.argval, CodeType):
            yield from _used(instruction.argval)


def _in_order(names: Iterable[str], used: Iterable[str]) -> bool:
    rest = iter(used)
    return all(name in rest for name in names)
