"""One load in a process of its own: ``python -m penstock_bench.suites.gpu.loader``.

It reads a job as JSON, loads something small, which is not timed, and prints its seconds as JSON.
Memory of the GPU is allocated within the time, by everybody.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock_bench.harness.child import answer, read_job
from penstock_bench.suites.gpu import accelerators

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock_bench.suites.gpu.accelerators import Accelerator, State

SMALL_BYTES = 8 << 20


def _penstock(device: Accelerator, path: Path, nbytes: int) -> State:
    import penstock

    into = accelerators.empty(device, nbytes)
    reports: list[penstock.reports.LoadReport] = []
    loaded: State = penstock.load(path, into=into, report=reports.append)
    if not reports[0].device_bytes:
        raise RuntimeError("nothing was copied by the GPU")
    return loaded


def _safetensors(device: Accelerator, path: Path, nbytes: int) -> State:
    from safetensors.torch import load_file

    return dict(load_file(path, device="cuda:0"))


def _fastsafetensors(device: Accelerator, path: Path, nbytes: int) -> State:
    from fastsafetensors import SafeTensorsFileLoader

    loader = SafeTensorsFileLoader(None, device="cuda:0", nogds=True)
    loader.add_filenames({0: [str(path)]})
    buffers = loader.copy_files_to_device()
    _KEPT.append(buffers)
    return {name: buffers.get_tensor(name) for name in loader.get_keys()}


def _instanttensor(device: Accelerator, path: Path, nbytes: int) -> State:
    from instanttensor import safe_open

    # From 0.2 on what it gives out is no view of memory that it uses again.
    with safe_open(str(path), framework="pt", device=0) as file:
        return dict(file.tensors())


def _kvikio(device: Accelerator, path: Path, nbytes: int) -> State:
    """The bytes of the file as they are, into one tensor: nobody does less."""
    import kvikio
    import torch

    whole = torch.empty(path.stat().st_size, dtype=torch.uint8, device="cuda:0")
    with kvikio.CuFile(str(path), "r") as file:
        if file.read(whole) != whole.numel():
            raise RuntimeError("a part was read")
    return {}


_KEPT: list[Any] = []
"""Keeps the memory that tensors are views of."""

LOADERS: dict[str, Callable[[Accelerator, Path, int], State]] = {
    "penstock": _penstock,
    "safetensors": _safetensors,
    "fastsafetensors": _fastsafetensors,
    "instanttensor": _instanttensor,
    "kvikio": _kvikio,
    "cufile": _kvikio,
}

_ENVIRONMENT = {
    "kvikio": {"KVIKIO_COMPAT_MODE": "ON"},
    "cufile": {"KVIKIO_COMPAT_MODE": "OFF", "CUFILE_FORCE_COMPAT_MODE": "true"},
}
"""Read by libraries when they are imported."""

_KVIKIO = {
    "KVIKIO_NTHREADS": "16",
    "KVIKIO_TASK_SIZE": str(16 << 20),
    "KVIKIO_AUTO_DIRECT_IO_READ": "ON",
}


def main() -> None:
    """Does what standard input says."""
    job = read_job()
    who, path, nbytes = job["who"], Path(job["path"]), job["nbytes"]
    if who in _ENVIRONMENT:
        os.environ |= {**_KVIKIO, **_ENVIRONMENT[who]}
    with accelerators.accelerator() as device:
        load = LOADERS[who]
        load(device, small(path), SMALL_BYTES)
        device.synchronize()
        begun = time.perf_counter()
        loaded = load(device, path, nbytes)
        device.synchronize()
        found: dict[str, Any] = {"seconds": time.perf_counter() - begun}
        if job["checks"] and loaded:
            found["wrong"] = accelerators.wrong(device, loaded, nbytes)
    answer(found)
    # Libraries need not clean up.
    os._exit(0)


def small(path: Path) -> Path:
    """The path of the small state that is loaded first."""
    return path.with_name(f"small-{path.name}")


if __name__ == "__main__":
    main()
