"""Who moves one tensor from or to one file: `penstock.offload`, and DeepSpeed's async_io."""

from __future__ import annotations

import importlib.util
import shutil
from typing import TYPE_CHECKING, Any

from penstock.common.machine.quiesce import quiesce_after
from penstock_bench.harness.cases import share_bytes
from penstock_bench.harness.running import run_module
from penstock_bench.results.results import Measurement

if TYPE_CHECKING:
    from pathlib import Path

    from penstock_bench.harness.cases import Case

TENSOR_IO, DEEPSPEED, KVIKIO, CUFILE = "tensor_io", "deepspeed", "kvikio", "cufile"
OF_GPUS = (KVIKIO, CUFILE)
"""Those that move memory of a GPU, and none of the host: kvikio by itself, and cuFile by kvikio."""

MISSING = {
    DEEPSPEED: "DeepSpeed is not installed: pip install deepspeed",
    KVIKIO: "kvikio is not installed: pip install kvikio-cu13",
    CUFILE: "kvikio, which calls cuFile, is not installed: pip install kvikio-cu13",
}
_SECONDS_MAX = 24 * 3600.0
_PACKAGES = {DEEPSPEED: "deepspeed", KVIKIO: "kvikio", CUFILE: "kvikio"}


def is_there(library: str) -> bool:
    """Whether a library is installed."""
    return library == TENSOR_IO or importlib.util.find_spec(_PACKAGES[library]) is not None


def run(
    case: Case, library: str, directory: Path, total_bytes: int, *, round_index: int
) -> Measurement:
    """Measures a case: the tensor is moved by one call, in blocks, as ds_io does.

    Leaves nothing behind. A case that a library cannot run is a measurement with an error. The
    directory must not exist, and does not afterwards.
    """
    made = Measurement(case=case.label, by=library, round_index=round_index)
    made.error = _refusal(case, library)
    if made.error is not None:
        return made
    quiesce_after(directory.parent, total_bytes)
    directory.mkdir()
    try:
        found = _child(case, library, directory, share_bytes(case, total_bytes))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    if "error" in found:
        made.error = found["error"]
        return made
    for name, value in found.items():
        setattr(made, name, value)
    return made


def _refusal(case: Case, library: str) -> str | None:
    if case.tensors or case.processes > 1 or case.pattern == "random_read":
        return f"{library} is measured with one tensor, in order, in one process"
    if (library in OF_GPUS) != (case.device is not None):
        return f"{library} moves memory of {'GPUs' if library in OF_GPUS else 'the host'} alone"
    if library == DEEPSPEED and not case.direct:
        return "DeepSpeed has no way through the page cache"
    return None


def _child(case: Case, library: str, directory: Path, nbytes: int) -> dict[str, Any]:
    job = {"library": library, "path": str(directory / "tensor"), "nbytes": nbytes}
    job |= case.as_json()
    found = run_module("penstock_bench.suites.io.mover", job, timeout_seconds=_SECONDS_MAX)
    if "error" in found:
        found["error"] = f"{library} {found['error']}"
    return found
