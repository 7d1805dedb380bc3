"""A checkpoint engine for DeepSpeed: a tag's files, of all ranks, form one Penstock checkpoint.

Call `enable` before ``deepspeed.initialize``, or `attach` after it. A tag is complete once it has
a manifest, and ``latest`` names it only then. DeepSpeed's own code loads tags that it wrote itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.integrations.deepspeed import methods
from penstock.integrations.deepspeed.engine import EngineSettings, PenstockCheckpointEngine
from penstock.integrations.deepspeed.to_torch import to_torch
from penstock.integrations.versions import check_version
from penstock.plugin import SealingKeys

if TYPE_CHECKING:
    from collections.abc import Iterable

    from penstock.options import Options
    from penstock.sealing import Identities, Key, Sealing
    from penstock.signing import SignatureKey, Signers, SigningKeys

__all__ = ["PenstockCheckpointEngine", "attach", "enable", "to_torch"]


def enable(
    *,
    background: bool = False,
    lazy: bool = False,
    rng: bool = True,
    pickled: Iterable[str] = (),
    trust: bool = False,
    options: Options | None = None,
    sealing: Sealing | None = None,
    identities: Identities | Key | Iterable[Key] | None = None,
    sign: SigningKeys | SignatureKey | Iterable[SignatureKey] | None = None,
    signed_by: Signers | SignatureKey | Iterable[SignatureKey] | None = None,
) -> None:
    """Makes every engine that ``deepspeed.initialize`` builds save and load through Penstock.

    Args:
        background: Whether ``save_checkpoint`` returns once the state is copied. The error of a
            failed save is raised by the next one, by ``load_checkpoint`` or by ``destroy``.
        lazy: Whether a background save also copies the state while training goes on, up to the next
            step; see `penstock.CheckpointStore.save_async`.
        rng: Whether the random states of each rank are saved, and restored with the optimizer.
        pickled: Names of values that only pickle can store, such as
            ``"mp_rank_00_model_states.pt.args"``, or patterns of `fnmatch` for them.
        trust: Whether such values are unpickled, which can run any code.
        options: Settings of the I/O; None for ``penstock.Options()``.
        sealing: For whom tags are sealed; see `penstock.save`. Names of tags and of DeepSpeed's
            files stay clear. Files that DeepSpeed writes outside of a tag are refused.
        identities: Keys that open sealed tags; see `penstock.load`. With either, clear tags are
            refused, also those of DeepSpeed's own.
        sign: Private keys that sign tags while they are saved; see `penstock.save`. Files that
            DeepSpeed writes outside of a tag are refused.
        signed_by: Public keys of which one must have signed a tag; see `penstock.load`. Those of
            DeepSpeed's own are refused then.

    Raises:
        MissingDependencyError: DeepSpeed is older than 0.17, or has changed a method that is
            wrapped.
        ValueError: ``lazy`` without ``background``.
    """
    keys = SealingKeys.of(sealing, identities, sign=sign, signed_by=signed_by)
    settings = _checked(background, lazy, rng, pickled, trust, options, keys)
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
    sealing: Sealing | None = None,
    identities: Identities | Key | Iterable[Key] | None = None,
    sign: SigningKeys | SignatureKey | Iterable[SignatureKey] | None = None,
    signed_by: Signers | SignatureKey | Iterable[SignatureKey] | None = None,
) -> None:
    """Makes one engine, a result of ``deepspeed.initialize``, save and load through Penstock.

    See `enable` for the arguments and errors.
    """
    keys = SealingKeys.of(sealing, identities, sign=sign, signed_by=signed_by)
    settings = _checked(background, lazy, rng, pickled, trust, options, keys)
    engine.checkpoint_engine = PenstockCheckpointEngine(settings)


def _checked(
    background: bool,
    lazy: bool,
    rng: bool,
    pickled: Iterable[str],
    trust: bool,
    options: Options | None,
    keys: SealingKeys,
) -> EngineSettings:
    check_version("deepspeed", "0.17", "0.19.8")
    if lazy and not background:
        raise ValueError("lazy=True: only what is saved in the background can be copied later")
    methods.probe()
    methods.take_over()
    return EngineSettings(background, lazy, rng, tuple(pickled), trust, options, keys)
