"""torchtitan, with Penstock below its checkpoint manager.

`Checkpointer` takes the place of torchtitan's ``CheckpointManager``: the fields of its ``Config``
are the same and mean the same. Which steps are saved, what a run begins with and what is left out
stays torchtitan's; how a checkpoint becomes complete, and which one a run goes on with, is
Penstock's.

Example:
    >>> from penstock.integrations.torchtitan import Checkpointer
    >>> config = Checkpointer.Config(enable=True, interval=500, async_mode="async_with_pinned_mem")
    >>> config.keep_latest_k
    10
"""

from penstock.integrations.versions import Probe, check_version

check_version("torchtitan", "0.3", "0.3")


def _probe() -> None:
    """Looks whether torchtitan's manager has the methods that ours replaces.

    Raises:
        MissingDependencyError: It has not.
    """
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


_probe()

from penstock.integrations.torchtitan.checkpointer import Checkpointer  # noqa: E402

__all__ = ["Checkpointer"]
