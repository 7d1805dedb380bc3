"""Wraps the methods of DeepSpeed's engine that take part in a save.

A checkpoint engine learns from nothing else where a tag begins and ends, and when state that a lazy
save has still to copy is about to change.
"""

from __future__ import annotations

import functools
import inspect
import os
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import deepspeed.runtime.engine as runtime
import torch
from deepspeed.utils import zero_to_fp32

from penstock.errors import PenstockError, PenstockWarning, UnsupportedStateError
from penstock.integrations.deepspeed import tags
from penstock.integrations.deepspeed.engine import PenstockCheckpointEngine
from penstock.integrations.deepspeed.trial import try_out
from penstock.integrations.versions import Probe
from penstock.plugin import check_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_ENGINE = "deepspeed.runtime.engine"
_FACTORY = "create_checkpoint_engine"
"""Makes an engine's checkpoint engine, since DeepSpeed 0.17.2."""

_MARK = "_penstock"
"""Attribute of a wrapped method; wrappers around it copy it."""


def probe() -> None:
    """Raises `MissingDependencyError` unless the methods exist with the expected parameters."""
    found = Probe("deepspeed", "penstock.integrations.deepspeed.checkpoint_engine")
    cls = found.attribute(_ENGINE, "DeepSpeedEngine")
    for name, parameters in (
        (
            "save_checkpoint",
            ("save_dir", "tag", "client_state", "save_latest", "exclude_frozen_parameters"),
        ),
        (
            "load_checkpoint",
            (
                "load_dir",
                "tag",
                "load_module_strict",
                "load_optimizer_states",
                "load_lr_scheduler_states",
                "load_module_only",
                "custom_load_fn",
            ),
        ),
        ("load_module_state_dict", ("checkpoint", "strict", "custom_load_fn")),
        ("_get_all_ckpt_names", ("checkpoints_path", "tag")),
        ("_copy_recovery_script", ("save_path",)),
        ("zero_nvme_offload_optimizer", ()),
        ("use_node_local_storage", ()),
    ):
        found.signature(found.attribute(cls, name), *parameters)
    for name in ("_take_model_step", "destroy"):
        found.attribute(cls, name)
    save = found.attribute(cls, "save_checkpoint")
    found.calls(save, "checkpoint_engine", "create", "_save_checkpoint", "commit")
    configure = found.attribute(cls, "_configure_checkpointing")
    found.calls(configure, _FACTORY if hasattr(runtime, _FACTORY) else "TorchCheckpointEngine")
    theirs = found.attribute(
        "deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine", "TorchCheckpointEngine"
    )
    for name, parameters in (
        ("save", ("state_dict", "path")),
        ("load", ("path", "map_location")),
        ("makedirs", ("path", "exist_ok")),
    ):
        found.signature(found.attribute(theirs, name), *parameters)
    found.attribute(_ENGINE, "get_fp32_state_dict_from_zero_checkpoint")
    found.attribute("deepspeed.utils.zero_to_fp32", "torch")
    found.check()


def build_with(make: Callable[[], PenstockCheckpointEngine]) -> None:
    """Makes every DeepSpeed engine built from now on save by an engine of ``make``."""
    if hasattr(runtime, _FACTORY):
        runtime.create_checkpoint_engine = lambda *_, **__: make()
        return
    cls = runtime.DeepSpeedEngine
    configure = inspect.unwrap(cls._configure_checkpointing)

    @functools.wraps(configure)
    def _configure_checkpointing(self: Any, *arguments: Any, **further: Any) -> None:
        configure(self, *arguments, **further)
        self.checkpoint_engine = make()

    cls._configure_checkpointing = _configure_checkpointing


def take_over() -> None:
    """Wraps the methods, for all engines that save by ours; may be called again."""
    cls = runtime.DeepSpeedEngine
    if hasattr(cls.save_checkpoint, _MARK):
        return
    for name, wrapped in (
        ("save_checkpoint", _saving(cls.save_checkpoint)),
        ("load_checkpoint", _loading(cls.load_checkpoint)),
        ("load_module_state_dict", _comparing(cls.load_module_state_dict)),
        ("_get_all_ckpt_names", _finding(cls._get_all_ckpt_names)),
        ("_copy_recovery_script", _copying(cls._copy_recovery_script)),
        ("_take_model_step", _staged(cls._take_model_step)),
        ("destroy", _ending(cls.destroy)),
        # DeepSpeed before 0.17.2 has none.
        ("__del__", _dying(getattr(cls, "__del__", lambda _: None))),
    ):
        setattr(cls, name, wrapped)
    setattr(cls.save_checkpoint, _MARK, True)
    read_stubs()


def _of(engine: Any) -> PenstockCheckpointEngine | None:
    """Our engine of a DeepSpeed engine, which may have failed while it was built."""
    found = vars(engine).get("checkpoint_engine")
    return found if isinstance(found, PenstockCheckpointEngine) else None


def _saving(save: Any) -> Any:
    @functools.wraps(save)
    def save_checkpoint(
        self: Any,
        save_dir: str,
        tag: Any = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        ours, client_state = _of(self), client_state or {}
        if ours is None:
            return save(self, save_dir, tag, client_state, save_latest, exclude_frozen_parameters)
        _check(self)
        try_out(self, os.fspath(save_dir), ours.plain)
        ours.begin(save_dir)
        try:
            # DeepSpeed would write ``latest`` in place, before anything is durable.
            done = save(self, save_dir, tag, client_state, False, exclude_frozen_parameters)
        except BaseException:
            ours.end()
            raise
        ours.finish(self.global_steps, moves_latest=save_latest)
        return done

    return save_checkpoint


def _loading(load: Any) -> Any:
    signature = inspect.signature(load)

    @functools.wraps(load)
    def load_checkpoint(self: Any, *arguments: Any, **named: Any) -> Any:
        ours = _of(self)
        if ours is None:
            return load(self, *arguments, **named)
        bound = signature.bind(self, *arguments, **named)
        bound.apply_defaults()
        given = bound.arguments
        ours.wait_on_all_ranks()
        with weights_by(ours.load, given["tag"]):
            found = load(self, *arguments, **named)
        whole = given["load_optimizer_states"] and not given["load_module_only"]
        if found[0] is not None and whole:
            ours.restore_random_states(os.path.dirname(found[0]))
        return found

    return load_checkpoint


def _comparing(load: Any) -> Any:
    @functools.wraps(load)
    def load_module_state_dict(
        self: Any,
        checkpoint: Any,
        strict: bool = True,
        custom_load_fn: Any = None,
        *arguments: Any,
        **further: Any,
    ) -> Any:
        ours, state = _of(self), checkpoint["module"]
        if ours is not None and custom_load_fn is None and isinstance(state, Mapping):
            # PyTorch fills one name after the other: the last of several tied names would win.
            check_model(self.module, state, ours.loaded)
        return load(self, checkpoint, strict, custom_load_fn, *arguments, **further)

    return load_module_state_dict


def _finding(find: Any) -> Any:
    @functools.wraps(find)
    def _get_all_ckpt_names(self: Any, checkpoints_path: str, tag: Any) -> Any:
        found = find(self, checkpoints_path, tag)
        if not found and _of(self) is not None:
            # DeepSpeed would only assert that there are some.
            raise tags.unfit(os.path.abspath(os.path.join(checkpoints_path, str(tag))))
        return found

    return _get_all_ckpt_names


def _copying(copy: Any) -> Any:
    @functools.wraps(copy)
    def _copy_recovery_script(self: Any, save_path: str) -> None:
        ours = _of(self)
        if ours is None or not ours.is_open:
            copy(self, save_path)
        # Otherwise does nothing: the scripts cannot read stubs, and a full disk would stop one
        # rank.

    return _copy_recovery_script


def _staged(change: Any) -> Any:
    """Wraps a method that changes state which a lazy save may still have to copy."""

    @functools.wraps(change)
    def changing(self: Any, *arguments: Any, **further: Any) -> Any:
        ours = _of(self)
        if ours is not None:
            ours.stage()
        return change(self, *arguments, **further)

    return changing


def _ending(destroy: Any) -> Any:
    """Wraps `destroy`, so that it waits for the save in progress in all versions."""
    staged = _staged(destroy)

    @functools.wraps(destroy)
    def ending(self: Any) -> None:
        staged(self)
        ours = _of(self)
        if ours is not None and ours.is_decoupled():
            ours.cleanup()

    return ending


def _dying(delete: Any) -> Any:
    @functools.wraps(delete)
    def dying(self: Any) -> None:
        ours = _of(self)
        if ours is not None:
            try:
                ours.cleanup()
            except PenstockError as error:
                # DeepSpeed's `__del__` would swallow it.
                warnings.warn(f"the last save failed: {error}", PenstockWarning, stacklevel=2)
        delete(self)

    return dying


def _check(engine: Any) -> None:
    """Refuses state that DeepSpeed saves outside the checkpoint, or where not all ranks see it."""
    if engine.zero_nvme_offload_optimizer():
        raise UnsupportedStateError(
            "the optimizer's state on NVMe is copied by DeepSpeed itself, beside the commit: keep "
            "it in memory (offload_optimizer.device), or save with DeepSpeed's own engine",
            key="optimizer",
        )
    if engine.use_node_local_storage():
        raise UnsupportedStateError(
            "use_node_local_storage: all ranks save one checkpoint, on a file system that they "
            "share",
            key="checkpoint",
        )


def read_stubs() -> None:
    """Makes these functions read our tags without pickled values, in this process."""
    zero_to_fp32.torch = _Torch(lambda path, device: tags.read_file(path, device=device))


@contextmanager
def weights_by(load: Callable[[str, Any], Any], tag: Any) -> Iterator[None]:
    """Makes them read by an engine, and the requested tag, within the block.

    Args:
        load: Loads a stub, given its path and where tensors go.
        tag: The tag; None for the latest.
    """
    gather, before = runtime.get_fp32_state_dict_from_zero_checkpoint, zero_to_fp32.torch
    runtime.get_fp32_state_dict_from_zero_checkpoint = functools.partial(gather, tag=tag)
    zero_to_fp32.torch = _Torch(load)
    try:
        yield
    finally:
        zero_to_fp32.torch = before
        runtime.get_fp32_state_dict_from_zero_checkpoint = gather


class _Torch:
    """PyTorch, with another `load` for stubs."""

    def __init__(self, load: Callable[[str, Any], Any]) -> None:
        self._load = load

    def load(self, path: str, **how: Any) -> Any:
        if tags.is_stub(path):
            return self._load(path, how.get("map_location"))
        return torch.load(path, **how)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
