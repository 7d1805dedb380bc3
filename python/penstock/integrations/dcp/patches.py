"""`enable`: makes DCP save and load through Penstock where no writer or reader is named.

Lightning's strategies for FSDP and model parallelism, Fabric, torchtitan's manager and the
distributed optimizers of transformers pass only a ``checkpoint_id``. DCP has no registry: it asks
one function for the writer or reader, `torch.distributed.checkpoint._storage_utils._storage_setup`.
That function is replaced in all modules that have imported it. Further replacements depend on the
version of PyTorch: `_probe` checks them before anything changes.
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

from penstock.integrations.dcp import defaults, directory, stateful
from penstock.integrations.dcp.paths import is_local
from penstock.integrations.versions import Probe, check_version, self_check
from penstock.plugin import SealingKeys, to_native

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch.distributed.checkpoint import storage

    from penstock.integrations.dcp.staging import Stagers
    from penstock.options import Options
    from penstock.sealing import Identities, Key, Sealing
    from penstock.signing import SignatureKey, Signers, SigningKeys

_VERSIONS = ("2.4", "2.15")
"""The first PyTorch that Penstock supports, and the newest tested with this module."""

_DCP = "torch.distributed.checkpoint"
_PROCESS = f"{_DCP}._async_process_executor"
"""Asynchronous saves in another process, since PyTorch 2.7."""


@dataclass(frozen=True, slots=True)
class _Replacement:
    """The replacement of an object of PyTorch's.

    Attributes:
        theirs: PyTorch's object.
        ours: Its replacement.
        places: The modules, or the class, that have it under its name; None for all modules.
    """

    theirs: Any
    ours: Any
    places: Sequence[Any] | None = None

    def make(self) -> None:
        """Replaces theirs by ours."""
        self._rebind(self.theirs, self.ours)

    def take_back(self) -> None:
        """Replaces ours by theirs, also in modules that have imported ours since."""
        self._rebind(self.ours, self.theirs)

    def _rebind(self, old: Any, new: Any) -> None:
        name = self.theirs.__name__
        for place in tuple(sys.modules.values()) if self.places is None else self.places:
            # Entries of sys.modules need not be modules, and some create attributes on access.
            if getattr(place, "__dict__", {}).get(name) is old:
                setattr(place, name, new)


class Enabled:
    """The active replacements; as a context manager, it takes them back at the end of the block."""

    def __init__(self, replacements: Sequence[_Replacement], stagers: Stagers | None) -> None:
        self._replacements = replacements
        self._stagers = stagers
        for one in replacements:
            one.make()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        # A second installation has taken back the first.
        if _enabled is self:
            disable()

    def _take_back(self) -> None:
        for one in self._replacements:
            one.take_back()
        if self._stagers is not None:
            self._stagers.close()


_enabled: Enabled | None = None


def enable(
    *,
    overwrite: bool = True,
    file_system_writer: bool = False,
    options: Options | None = None,
    sealing: Sealing | None = None,
    identities: Identities | Key | Iterable[Key] | None = None,
    sign: SigningKeys | SignatureKey | Iterable[SignatureKey] | None = None,
    signed_by: Signers | SignatureKey | Iterable[SignatureKey] | None = None,
) -> Enabled:
    """Makes `dcp.save`, `dcp.async_save` and `dcp.load` use Penstock for a ``checkpoint_id``.

    Call it on every rank, before the first save or load. Calls that name a writer or a reader, and
    URLs (``"s3://…"``), work as before. Directories of DCP's own format are loaded by DCP's reader.
    ``dcp.FileSystemReader(path)`` also returns the reader for the directory's format: a
    `StorageReader` for a Penstock checkpoint. Another call replaces the settings of the one before.

    Args:
        overwrite: Replace a complete checkpoint at the path, as DCP does; False raises
            `CheckpointExistsError`. Unlike with DCP, the old one can be loaded until the new one is
            committed.
        file_system_writer: Make ``dcp.FileSystemWriter(path)`` save through Penstock, too, for
            frameworks that name it, such as accelerate. With extensions or another serialization
            format it stays DCP's.
        options: Settings of the I/O; None for ``Options()``.
        sealing: For whom checkpoints are sealed; see `penstock.save`. Saves that would write clear
            files, to a URL or in a process of their own, are then refused.
        identities: Keys that open sealed checkpoints; see `penstock.load`. With either, loads
            refuse clear checkpoints, also those of DCP's own.
        sign: Private keys that sign checkpoints while they are saved; see `penstock.save`.
        signed_by: Public keys of which one must have signed a checkpoint; see `penstock.load`.
            Those of DCP's own are refused then.

    Returns:
        A context manager that takes it back, as `disable` does.

    Raises:
        MissingDependencyError: PyTorch is older than 2.4, or has changed what is replaced. With a
            version newer than those tested the first save can raise it, too, as it first saves and
            loads a tiny state on trial.

    Example:
        >>> import penstock, tempfile, torch
        >>> import torch.distributed.checkpoint as dcp
        >>> from penstock.integrations.dcp import enable
        >>> path = tempfile.mkdtemp() + "/step-100"
        >>> with enable():
        ...     metadata = dcp.save({"w": torch.ones(3)}, checkpoint_id=path, no_dist=True)
        >>> penstock.load(path)
        {'w': tensor([1., 1., 1.])}
    """
    global _enabled
    check_version("torch", *_VERSIONS)
    to_native(options)
    keys = SealingKeys.of(sealing, identities, sign=sign, signed_by=signed_by)
    disable()
    _probe()
    settings: dict[str, Any] = {"options": options, "keys": keys}
    chosen = partial(defaults.DefaultWriter, overwrite=bool(overwrite), **settings)
    stagers = _stagers()
    reader = partial(defaults.reader_of, **settings)
    replacements = list(_replacements(chosen, reader, stagers, keys))
    defaults.use_keys(keys)
    if file_system_writer:
        replacements.append(_writer_class())
    _enabled = Enabled(replacements, stagers)
    return _enabled


def disable() -> None:
    """Takes back `enable`: DCP saves and loads as before. Does nothing without `enable`."""
    global _enabled
    if _enabled is not None:
        _enabled._take_back()
        _enabled = None
        defaults.use_keys(directory.NO_KEYS)


def _probe() -> None:
    """Raises `MissingDependencyError` unless all that is replaced exists, used as expected."""
    probe = Probe("torch", "penstock.integrations.dcp.enable")
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
    """Whether `async_save` makes its own stager if it is given none: since PyTorch 2.9."""
    from torch.distributed.checkpoint import state_dict_saver

    return hasattr(state_dict_saver, "DefaultStager")


def _stagers() -> Stagers | None:
    if not _has_stager():
        return None
    from penstock.integrations.dcp.staging import Stagers

    return Stagers()


_is_trial = False


def _try_out() -> None:
    """Saves and loads a tiny state with DCP's own functions, and without keys.

    A job that seals need not have identities to load with.
    """
    global _is_trial
    _is_trial = True
    try:
        _save_and_load()
    finally:
        _is_trial = False


def _save_and_load() -> None:
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
    writer: Callable[..., Any],
    reader: Callable[..., Any],
    stagers: Stagers | None,
    keys: SealingKeys,
) -> Iterator[_Replacement]:
    """The replacements for this version of PyTorch: all makers of a writer or reader of a path."""
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import (
        _storage_utils,
        filesystem,
        format_utils,
        state_dict_saver,
    )

    setup = _storage_utils._storage_setup
    yield _Replacement(setup, _setting_up(setup, writer, reader, keys))
    theirs = filesystem.FileSystemReader
    yield _Replacement(theirs, defaults.FileSystemReader, (dcp, format_utils))
    if stagers is not None:
        from torch.distributed.checkpoint.staging import DefaultStager

        yield _Replacement(DefaultStager, stagers.lend, (state_dict_saver,))
    states_of = getattr(state_dict_saver, "_stateful_to_state_dict", None)
    if states_of is not None:
        yield _Replacement(states_of, stateful.skip_plain(states_of), (state_dict_saver,))
    if _has_process():
        # DCP's save process makes its own writer, and nothing is installed there.
        process = import_module(_PROCESS)._AsyncCheckpointProcess
        yield _Replacement(process.save, _sending(process.save, writer), (process,))


def _writer_class() -> _Replacement:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import filesystem

    return _Replacement(filesystem.FileSystemWriter, defaults.FileSystemWriter, (dcp,))


def _setting_up(
    theirs: Callable[..., Any],
    writer: Callable[..., Any],
    reader_of: Callable[..., Any],
    keys: SealingKeys,
) -> Callable[..., Any]:
    @wraps(theirs)
    def set_up(
        storage: storage.StorageReader | storage.StorageWriter | None,
        checkpoint_id: str | os.PathLike[str] | None,
        reader: bool = False,
    ) -> Any:
        if storage or not checkpoint_id or not is_local(checkpoint_id):
            if not storage and checkpoint_id:
                # DCP's own writers and readers of URLs know no keys.
                if reader:
                    keys.refuse_clear(str(checkpoint_id), "read by DCP's own reader of URLs")
                keys.refuse_sealing(str(checkpoint_id), "DCP's own writer of URLs seals nothing")
                keys.refuse_signing(str(checkpoint_id), "DCP's own writer of URLs signs nothing")
            return theirs(storage, checkpoint_id, reader)
        if not reader:
            self_check("torch", _try_out)
        further = {"keys": directory.NO_KEYS} if _is_trial else {}
        return (reader_of if reader else writer)(checkpoint_id, **further)

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
            # With sealing the writer refuses to be sent.
            storage_writer = writer(checkpoint_id)
        further |= {"checkpoint_id": checkpoint_id, "storage_writer": storage_writer}
        return theirs(process, *arguments, **further)

    return save
