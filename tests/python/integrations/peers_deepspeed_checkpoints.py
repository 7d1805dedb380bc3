"""A pytest plug-in for `make peers-deepspeed WHAT=checkpoints`: DeepSpeed's tests save by Penstock.

Their tests run in processes of their own, which call `prepare` first.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch.multiprocessing

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.pool import Pool

PROCESSES_MAX = 4
REFUSED = {
    f"test_checkpoint_unique_tag[{mode}]": "each rank has a tag of its own, which is refused"
    for mode in ("WARN", "IGNORE")
}
"""Tests of features that Penstock does not support, with the reasons."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option to use DeepSpeed's own engine, which shows whose failure a failure is."""
    parser.addoption("--theirs", action="store_true", help="save by DeepSpeed's own engine")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Makes the processes of the tests call `prepare`."""
    # Their conftest has put it before the installed packages.
    checkout = str(session.config.rootpath.parent)
    sys.path[:] = [path for path in sys.path if path != checkout]
    # By default DeepSpeed allows one process for each node of memory.
    os.environ["LOCAL_SIZE"] = str(PROCESSES_MAX)
    # Each process would take seconds to import these.
    multiprocessing.set_forkserver_preload(["deepspeed", "torch._dynamo"])
    torch.multiprocessing.Pool = functools.partial(  # type: ignore[assignment]
        torch.multiprocessing.Pool,
        initializer=prepare,
        initargs=(session.config.getoption("theirs"),),
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skips unsupported tests, and makes failing tests end their processes."""
    common = importlib.import_module("unit.common")
    common.DistributedExec._close_pool = _end
    for item in items:
        if item.name in REFUSED and not config.getoption("theirs"):
            item.add_marker(pytest.mark.skip(REFUSED[item.name]))


def _end(self: Any, pool: Pool, processes: int, force: bool = False) -> None:
    """Ends the processes of a test, which may wait for each other."""
    pool.terminate()
    pool.join()


def prepare(theirs: bool) -> None:
    """Makes a process save by Penstock, and enables tests on the CPU."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    from penstock.integrations.deepspeed import checkpoint_engine

    # Tests compare it, but release 0.19.8 no longer has it.
    deepspeed.DeepSpeedEngine.sparse_tensor_module_names = frozenset()
    # Processors without half-precision instructions are refused: they are only slower.
    get_accelerator().is_fp16_supported = lambda: True
    # An op for collectives, which would be compiled.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not theirs:
        checkpoint_engine.enable()
        # Tests inspect the files of a tag.
        torch.load = _loading(torch.load)


def _loading(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def loading(file: Any, *arguments: Any, **further: Any) -> Any:
        from penstock.integrations.deepspeed import tags

        if isinstance(file, str | os.PathLike) and tags.is_stub(os.fspath(file)):
            return tags.read_file(os.fspath(file))
        return load(file, *arguments, **further)

    return loading
