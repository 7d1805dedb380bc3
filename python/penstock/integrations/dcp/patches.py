"""`install`: DCP saves and loads through Penstock where nobody has named a writer or reader.

Lightning's strategies of FSDP and model parallelism, Fabric, torchtitan's manager and the
distributed optimizers of transformers pass a ``checkpoint_id`` and nothing else. DCP asks one
function then what is meant, `torch.distributed.checkpoint._storage_utils._storage_setup`, and has
no registry. That function is replaced, in all modules that know it by name. What else is replaced
depends on what the version of PyTorch has: `_probe` looks before anything changes.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from functools import partial, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from penstock.checkpoint.saving.rank_save import to_native
from penstock.integrations.dcp import defaults
from penstock.integrations.dcp.paths import is_local
from penstock.integrations.versions import Probe, check_version, self_check

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.checkpoint import storage

    from penstock.integrations.dcp.staging import Stagers
    from penstock.options import Options

_VERSIONS = ("2.4", "2.15")
"""The first PyTorch that Penstock runs with, and the last that this was tried with."""

_DCP = "torch.distributed.checkpoint"
_PROCESS = f"{_DCP}._async_process_executor"
"""Saves of another process, which came with PyTorch 2.7."""


@dataclass(frozen=True, slots=True)
class _Replacement:
    """Something of PyTorch's that another thing stands in for.

    Attributes:
        theirs: What it is.
        ours: What stands in for it.
        places: The modules, or the class, that have it under its name; None for all modules.
    """

    theirs: Any
    ours: Any
    places: Sequence[Any] | None = None

    def make(self) -> None:
        """Has ours stand where theirs does."""
        self._rebind(self.theirs, self.ours)

    def take_back(self) -> None:
        """Has theirs stand where ours does, also where it was imported from since."""
        self._rebind(self.ours, self.theirs)

    def _rebind(self, old: Any, new: Any) -> None:
        name = self.theirs.__name__
        for place in tuple(sys.modules.values()) if self.places is None else self.places:
            # Not all that is among the modules is one, and some make what they are asked for.
            if getattr(place, "__dict__", {}).get(name) is old:
                setattr(place, name, new)


class Installation:
    """What `install` has done; as a context manager, it ends with the block."""

    def __init__(self, replacements: Sequence[_Replacement], stagers: Stagers | None) -> None:
        self._replacements = replacements
        self._stagers = stagers
        for one in replacements:
            one.make()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        # Of two, the second one has taken back the first.
        if _installed is self:
            uninstall()

    def _take_back(self) -> None:
        for one in self._replacements:
            one.take_back()
        if self._stagers is not None:
            self._stagers.close()


_installed: Installation | None = None


def install(
    *,
    overwrite: bool = True,
    file_system_writer: bool = False,
    options: Options | None = None,
) -> Installation:
    """Has `dcp.save`, `dcp.async_save` and `dcp.load` use Penstock for a ``checkpoint_id``.

    Called on every rank, before the first save or load. What names a writer or a reader is as
    before, and so are URLs (``"s3://…"``). Directories of DCP's own format are loaded by DCP's
    reader, and so is ``dcp.FileSystemReader(path)``, which gives `StorageReader` where a Penstock
    checkpoint is. Another call replaces what the one before it has chosen.

    Args:
        overwrite: Replace a complete checkpoint at the path, as DCP does; else that is a
            `CheckpointExistsError`. Unlike with DCP, it stays loadable until the new one is
            committed.
        file_system_writer: Have ``dcp.FileSystemWriter(path)`` save through Penstock too, for
            frameworks that name it: accelerate. What asks it for extensions or another
            serialization stays DCP's.
        options: How bytes move; None for ``Options()``.

    Returns:
        A context manager that takes it back; `uninstall` does as well.

    Raises:
        MissingDependencyError: PyTorch is older than 2.4, or has changed what is replaced. Of a
            version newer than those tried, the first save can raise it as well: before, a tiny
            state is saved and loaded on trial.

    Example:
        >>> import penstock, tempfile, torch
        >>> import torch.distributed.checkpoint as dcp
        >>> from penstock.integrations.dcp import install
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> with install():
        ...     metadata = dcp.save({"w": torch.ones(3)}, checkpoint_id=path, no_dist=True)
        >>> penstock.load(path)
        {'w': tensor([1., 1., 1.])}
    """
    global _installed
    check_version("torch", *_VERSIONS)
    to_native(options)
    uninstall()
    _probe()
    chosen = partial(defaults.DefaultWriter, overwrite=bool(overwrite), options=options)
    stagers = _stagers()
    reader = partial(defaults.reader_of, options=options)
    replacements = list(_replacements(chosen, reader, stagers))
    if file_system_writer:
        replacements.append(_writer_class())
    _installed = Installation(replacements, stagers)
    return _installed


def uninstall() -> None:
    """Has DCP save and load as if there had been no `install`; nothing where there was none."""
    global _installed
    if _installed is not None:
        _installed._take_back()
        _installed = None


def _probe() -> None:
    """Looks whether all that is replaced is where it was, and is used as it was.

    Raises:
        MissingDependencyError: It is not.
    """
    probe = Probe("torch", "penstock.integrations.dcp.install")
    setup = probe.attribute(f"{_DCP}._storage_utils", "_storage_setup")
    probe.signature(setup, "storage", "checkpoint_id", "reader")
    for name, module in (("save", "state_dict_saver"), ("load", "state_dict_loader")):
        probe.calls(probe.attribute(f"{_DCP}.{module}", name), "_storage_setup")
    for module in (_DCP, f"{_DCP}.format_utils", f"{_DCP}.filesystem"):
        probe.attribute(module, "FileSystemReader")
    writer = probe.attribute(f"{_DCP}.filesystem", "FileSystemWriter")
    probe.signature(writer, "path")
    if _has_process():
        process = probe.attribute(_PROCESS, "_AsyncCheckpointProcess")
        save = probe.attribute(process, "save")
        probe.signature(save, "staged_state_dict", "checkpoint_id", "storage_writer", "planner")
    if _has_stager():
        stager = probe.attribute(f"{_DCP}.staging", "DefaultStager")
        probe.signature(stager, "config")
        probe.attribute(stager, "stage")
        probe.attribute(stager, "close")
        probe.attribute(f"{_DCP}.staging", "StagingOptions")
    probe.check()


def _has_process() -> bool:
    return find_spec(_PROCESS) is not None


def _has_stager() -> bool:
    """Whether `async_save` makes a stager where it is given none: from PyTorch 2.9 on."""
    from torch.distributed.checkpoint import state_dict_saver

    return hasattr(state_dict_saver, "DefaultStager")


def _stagers() -> Stagers | None:
    if not _has_stager():
        return None
    from penstock.integrations.dcp.staging import Stagers

    return Stagers()


def _try_out() -> None:
    """Saves and loads a tiny state by DCP's own functions."""
    import torch
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    with tempfile.TemporaryDirectory(prefix="penstock-") as directory:
        path = os.path.join(directory, "step")
        save({"w": torch.arange(6.0), "step": 7}, checkpoint_id=path, no_dist=True)
        found: dict[str, Any] = {"w": torch.zeros(6), "step": 0}
        load(found, checkpoint_id=path, no_dist=True)
    if found["step"] != 7 or not torch.equal(found["w"], torch.arange(6.0)):
        raise ValueError(f"it came back as {found}")


def _replacements(
    writer: Callable[..., Any], reader: Callable[..., Any], stagers: Stagers | None
) -> Iterator[_Replacement]:
    """What stands in for what, by who makes a writer or a reader of a path."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import (
        _storage_utils,
        filesystem,
        format_utils,
        state_dict_saver,
    )

    setup = _storage_utils._storage_setup
    yield _Replacement(setup, _setting_up(setup, writer, reader))
    theirs = filesystem.FileSystemReader
    yield _Replacement(theirs, defaults.FileSystemReader, (dcp, format_utils))
    if stagers is not None:
        from torch.distributed.checkpoint.staging import DefaultStager

        yield _Replacement(DefaultStager, stagers.lend, (state_dict_saver,))
    if _has_process():
        # DCP's process for saves makes its writer itself, and there nothing is installed.
        process = import_module(_PROCESS)._AsyncCheckpointProcess
        yield _Replacement(process.save, _sending(process.save, writer), (process,))


def _writer_class() -> _Replacement:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import filesystem

    return _Replacement(filesystem.FileSystemWriter, defaults.FileSystemWriter, (dcp,))


def _setting_up(
    theirs: Callable[..., Any], writer: Callable[..., Any], reader_of: Callable[..., Any]
) -> Callable[..., Any]:
    @wraps(theirs)
    def set_up(
        storage: storage.StorageReader | storage.StorageWriter | None,
        checkpoint_id: str | os.PathLike[str] | None,
        reader: bool = False,
    ) -> Any:
        if storage or not checkpoint_id or not is_local(checkpoint_id):
            return theirs(storage, checkpoint_id, reader)
        if not reader:
            self_check("torch", _try_out)
        return reader_of(checkpoint_id) if reader else writer(checkpoint_id)

    return set_up


def _sending(theirs: Callable[..., Any], writer: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(theirs)
    def save(
        process: Any,
        *arguments: Any,
        checkpoint_id: str | os.PathLike[str] | None = None,
        storage_writer: storage.StorageWriter | None = None,
        **further: Any,
    ) -> Any:
        if storage_writer is None and checkpoint_id and is_local(checkpoint_id):
            storage_writer = writer(checkpoint_id)
        further |= {"checkpoint_id": checkpoint_id, "storage_writer": storage_writer}
        return theirs(process, *arguments, **further)

    return save
