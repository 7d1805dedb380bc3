"""Checks that the plug-in fits the installed torchtitan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.errors import StateMismatchError
from penstock.integrations.versions import Probe, self_check

if TYPE_CHECKING:
    import torch


def check() -> None:
    """Raises `MissingDependencyError`, with a list, if torchtitan lacks parts the plug-in uses."""
    probe = Probe("torchtitan", "penstock.integrations.torchtitan")
    module = "torchtitan.components.checkpointer"
    for name in ("MODEL", "OPTIMIZER", "DATALOADER", "AsyncMode"):
        probe.attribute(module, name)
    manager = probe.attribute(module, "CheckpointManager")
    probe.signature(
        manager,
        "config",
        "dataloader",
        "model_parts",
        "optimizers",
        "lr_schedulers",
        "states",
        "sd_adapter",
        "base_folder",
    )
    for name, parameters in (
        ("_save", ("curr_step", "last_step")),
        ("_load", ("step",)),
        ("_should_save", ("curr_step", "last_step")),
        ("_wait_for_saving", ()),
        ("_maybe_wait_for_staging", ()),
        ("_close", ()),
        ("_find_load_step", ("folder",)),
        ("dcp_load", ("state_dict", "checkpoint_id", "from_hf", "from_quantized")),
    ):
        probe.signature(probe.attribute(manager, name), *parameters)
    probe.calls(probe.attribute(manager, "save"), "_save")
    probe.calls(probe.attribute(manager, "load"), "_load")
    probe.check()


def try_out(kind: Any, root: str, device: torch.device) -> None:
    """Saves and loads a tiny run, if torchtitan is newer than the versions tested.

    All ranks call it.
    """
    self_check("torchtitan", lambda: _try_out(kind, root, device))


def _try_out(kind: Any, root: str, device: torch.device) -> None:
    import torch

    # Imported after `check`, which looks up what this imports.
    from penstock.integrations.trial import trial_directory

    with trial_directory(root) as directory, torch.enable_grad():
        model = torch.nn.Linear(1, 1).to(device)
        optimizer = _Optimizer(model)
        optimizer.step()
        manager = kind(
            kind.Config(enable=True, interval=1, keep_latest_k=0),
            dataloader=None,
            model_parts=[model],
            optimizers=optimizer,
            lr_schedulers=_Schedule(),
            states={},
            sd_adapter=None,
            base_folder=directory,
        )
        manager.save(1)
        wanted = [one.clone() for one in optimizer.values()]
        for one in optimizer.values():
            one.zero_()
        manager.load(step=-1)
        manager.close()
        if not all(map(torch.equal, optimizer.values(), wanted)):
            raise StateMismatchError(
                f"{directory}: a model or an optimizer came back otherwise",
                key="optimizer",
                path=directory,
            )


class _Optimizer:
    """A model's optimizer, with a state by name as torchtitan's containers have one."""

    def __init__(self, model: torch.nn.Linear) -> None:
        import torch

        self._model = model
        self.optimizers = [torch.optim.Adam(model.parameters())]

    def step(self) -> None:
        self._model.weight.sum().backward()  # type: ignore[no-untyped-call]
        self.optimizers[0].step()

    def values(self) -> list[torch.Tensor]:
        return [self._model.weight.detach(), *self.state_dict().values()]

    def state_dict(self) -> dict[str, Any]:
        return {"weight.exp_avg": self.optimizers[0].state[self._model.weight]["exp_avg"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state_dict()["weight.exp_avg"].copy_(state["weight.exp_avg"])


class _Schedule:
    """A schedule of learning rates, which the trial does not compare."""

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
