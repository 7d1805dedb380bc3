"""Checks that the installed DLIO is one that the plug-in was made for.

DLIO's repository calls itself 2.0.0 since the release of that version, so the methods tell the two
apart: the release saves by ``checkpoint`` and loads nothing.
"""

from __future__ import annotations

from penstock.integrations.versions import Probe, check_version

PACKAGE = "dlio-benchmark"
_OURS = "penstock.integrations.dlio"
_THEIRS = "dlio_benchmark"


def check() -> None:
    """Refuses a DLIO whose classes have other methods than those that are replaced or called.

    Raises:
        MissingDependencyError: DLIO is not installed, too old, or has changed.
    """
    check_version(PACKAGE, "2.0", "2.0")
    probe = Probe(PACKAGE, _OURS)
    torch_save = probe.attribute(
        f"{_THEIRS}.checkpointing.pytorch_checkpointing", "PyTorchCheckpointing"
    )
    probe.attribute(torch_save, "get_instance")
    if hasattr(torch_save, "save_checkpoint"):
        for name in ("save_checkpoint", "load_checkpoint"):
            probe.signature(probe.attribute(torch_save, name), "epoch", "step_number")
        probe.attribute(torch_save, "get_layer_index")
    else:
        probe.signature(probe.attribute(torch_save, "checkpoint"), "epoch", "step_number")
    mpi = probe.attribute(f"{_THEIRS}.utils.utility", "DLIOMPI")
    for name in ("get_instance", "comm", "rank"):
        probe.attribute(mpi, name)
    for module, name, methods in (
        ("npy_reader", "NPYReader", ("open", "get_sample")),
        ("npz_reader", "NPZReader", ("open", "get_sample")),
        ("indexed_binary_reader", "IndexedBinaryReader", ("load_index_file", "read_index")),
    ):
        reader = probe.attribute(f"{_THEIRS}.reader.{module}", name)
        probe.signature(reader, "dataset_type", "thread_index", "epoch")
        for method in methods:
            probe.attribute(reader, method)
    probe.check()
