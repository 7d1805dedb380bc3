"""Saves and resumes a tiny run, if DeepSpeed is newer than the versions tested."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import deepspeed
import torch

from penstock.errors import StateMismatchError
from penstock.integrations.trial import trial_directory
from penstock.integrations.versions import self_check

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.integrations.deepspeed.engine import PenstockCheckpointEngine


def try_out(engine: Any, root: str, make: Callable[[], PenstockCheckpointEngine]) -> None:
    """Saves and resumes an engine of two parameters, if DeepSpeed is newer than tested.

    All ranks call it. The tiny engine has the ZeRO stage and the groups of the engine that is about
    to save.
    """
    self_check("deepspeed", lambda: _try_out(engine, root, make))


def _try_out(engine: Any, root: str, make: Callable[[], PenstockCheckpointEngine]) -> None:
    with trial_directory(root) as directory:
        tiny = _tiny(engine)
        tiny.checkpoint_engine = make()
        _losses(tiny, 1)
        tiny.save_checkpoint(directory, "tag")
        straight = _losses(tiny, 2)
        tiny.load_checkpoint(directory, "tag")
        resumed = _losses(tiny, 2)
        tiny.destroy()
        if resumed != straight:
            raise StateMismatchError(
                f"{directory}: a run that went on had losses of {resumed}, and one that did not "
                f"stop {straight}",
                key="module",
                path=directory,
            )


def _tiny(engine: Any) -> Any:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": engine.zero_optimization_stage()},
    }
    # PyTorch's optimizer, as DeepSpeed's are compiled at their first use.
    tiny, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=engine.mpu)
    return tiny


def _losses(engine: Any, steps: int) -> list[float]:
    """The losses of some steps; the second one depends on the optimizer's state."""
    found = []
    for _ in range(steps):
        loss = engine(torch.ones(1, 1, device=engine.device)).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found
