"""A checkpoint engine for DeepSpeed: all files of a tag, of all ranks, are one Penstock checkpoint.

`install` before ``deepspeed.initialize``, or `attach` behind it. A tag is complete when its
manifest is there, and only then ``latest`` names it. Tags that DeepSpeed wrote itself are loaded by
its own code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.integrations.deepspeed import methods
from penstock.integrations.deepspeed.engine import PenstockCheckpointEngine, Settings
from penstock.integrations.deepspeed.to_torch import to_torch
from penstock.integrations.versions import check_version

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.options import Options

__all__ = ["PenstockCheckpointEngine", "attach", "install", "to_torch"]


def install(
    *,
    background: bool = False,
    lazy: bool = False,
    rng: bool = True,
    pickled: Iterable[str] = (),
    trust: bool = False,
    options: Options | None = None,
) -> None:
    """Has every engine that ``deepspeed.initialize`` builds save and load by Penstock.

    Args:
        background: Whether ``save_checkpoint`` returns as soon as the state is copied. A save that
            failed raises its error from the next one, from ``load_checkpoint`` or ``destroy``.
        lazy: Whether, in the background, the state is also copied while training goes on, up to the
            next step; see `penstock.CheckpointStore.save_async`.
        rng: Whether the random states of each rank are saved, and restored where the optimizer is.
        pickled: Names of values that only pickle can store, such as
            ``"mp_rank_00_model_states.pt.args"``, or patterns of `fnmatch` over them.
        trust: Whether such values are unpickled, which can run any code.
        options: How bytes move; None for ``penstock.Options()``.

    Raises:
        MissingDependencyError: DeepSpeed is older than 0.17, or has changed a method that is
            wrapped.
        ValueError: ``lazy`` without ``background``.
    """
    settings = _checked(background, lazy, rng, pickled, trust, options)
    methods.build_with(lambda: PenstockCheckpointEngine(settings))


def attach(
    engine: Any,
    *,
    background: bool = False,
    lazy: bool = False,
    rng: bool = True,
    pickled: Iterable[str] = (),
    trust: bool = False,
    options: Options | None = None,
) -> None:
    """Has one engine, as ``deepspeed.initialize`` returned it, save and load by Penstock.

    See `install` for the arguments and errors.
    """
    settings = _checked(background, lazy, rng, pickled, trust, options)
    engine.checkpoint_engine = PenstockCheckpointEngine(settings)


def _checked(
    background: bool,
    lazy: bool,
    rng: bool,
    pickled: Iterable[str],
    trust: bool,
    options: Options | None,
) -> Settings:
    check_version("deepspeed", "0.17", "0.19.8")
    if lazy and not background:
        raise ValueError("lazy=True: only what is saved in the background can be copied later")
    methods.probe()
    methods.take_over()
    return Settings(background, lazy, rng, tuple(pickled), trust, options)
