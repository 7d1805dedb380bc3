"""Makes DeepSpeed load Penstock's ops: patches its op builders as soon as they are defined.

In this process an import hook does it; in child processes, which DeepSpeed starts by forkserver and
``spawn``, a ``sitecustomize`` that installs the same hook if an environment variable says so.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

from penstock.integrations.deepspeed import variables

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_BUILDERS = ("deepspeed.ops.op_builder.builder", "op_builder.builder")
"""Modules that define the builders: as installed, and in a checkout on the path."""

_OURS = ("async_io", "gds", "pin_memory")


def enable(*, strict: bool = True) -> None:
    """Makes DeepSpeed use Penstock's ops, in this process and in those that it starts.

    Call it before or after the import of DeepSpeed, but before DeepSpeed loads an op. May be called
    again.

    Args:
        strict: Whether failures raise. Otherwise calls return what DeepSpeed's ops would: -1 for a
            file that cannot be opened or has another size, and from ``wait`` the number of
            operations, even failed ones; a warning then says which bytes were not moved.
    """
    os.environ.update(variables.environment(os.environ, strict=strict))
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name in _BUILDERS:
        module = sys.modules.get(name)
        if module is not None:
            _take_over(module)


def enable_from_environment() -> None:
    """Installs the ops in a process started with the variables of `environment`."""
    if variables.is_asked_for():
        enable(strict=variables.is_strict())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of the builders with other finders, to patch them after their import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _BUILDERS:
            return None
        for finder in sys.meta_path:
            if isinstance(finder, _Finder):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """Loads a module with another loader, then patches it."""

    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        _take_over(module)

    def __getattr__(self, name: str) -> Any:
        # Inspection reads further attributes of loaders.
        return getattr(self._inner, name)


def _take_over(builders: ModuleType) -> None:
    """Makes the builders of these ops load ours, including builders defined later."""
    base = builders.OpBuilder
    if "__init_subclass__" not in vars(base):

        def define(cls: type, /, **arguments: object) -> None:
            super(base, cls).__init_subclass__(**arguments)
            _redirect(cls)

        base.__init_subclass__ = classmethod(define)
    pending = [base]
    while pending:
        cls = pending.pop()
        _redirect(cls)
        pending += cls.__subclasses__()


def _redirect(cls: Any) -> None:
    name = getattr(cls, "NAME", None)
    if name not in _OURS:
        return

    def load(self: object, verbose: bool = False) -> object:
        from penstock.integrations.deepspeed import ops

        return ops.module(name)

    def is_compatible(self: object, verbose: bool = False) -> bool:
        return True

    cls.load, cls.is_compatible = load, is_compatible
