"""Memory is bounded by the buffer pool, whatever the size of the state."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

import penstock
from conftest import need_uring, run_child, tell

MIB = 1 << 20
EXTRA_BYTES_MAX = 300 * MIB
STAGING_BYTES = 256 * MIB

MEASURE = """
    import json, os, sys
    import numpy as np
    import penstock

    def status(name):
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith(name + ":"):
                    return int(line.split()[1]) * 1024

    class Growth:
        '''The most memory that was resident inside the block, beyond what was at its start.'''

        def __enter__(self):
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
            self.before_bytes = status("VmRSS")
            return self

        def __exit__(self, *_):
            self.bytes = status("VmHWM") - self.before_bytes

    path, kind, total_bytes, engine, direct = sys.argv[1:]
    total_bytes = int(total_bytes)
    options = penstock.Options(engine=engine, direct=direct)

    def make_state():
        if kind == "one array":
            return {"w": np.full(total_bytes // 8, 1.5)}
        if kind == "transposed":
            side = int((total_bytes // 8) ** 0.5)
            return {"w": np.full((side, side), 2.5).T}
        if kind == "small tensors":
            count = total_bytes // 40_000
            return {f"w{i}": np.full(10_000, i, np.float32) for i in range(count)}
        each = total_bytes // 32
        return {f"w{i}": np.full(each + 4096 * (i % 3) + i % 2, i, np.uint8) for i in range(32)}

    state = make_state()
    # Excludes the one-time cost of imports, threads and rings.
    penstock.save(path + "/warm", {"w": np.zeros(1 << 20)}, options=options)
    penstock.load(path + "/warm", options=options)
    with Growth() as saving:
        report = penstock.save(path + "/ckpt", state, options=options)
    into_bytes = into_bounced = None
    if kind == "many arrays":
        reports = []
        with Growth() as filling:
            penstock.load(path + "/ckpt", into=state, options=options, report=reports.append)
        into_bytes, into_bounced = filling.bytes, reports[0].bounced_bytes
    del state
    reports = []
    with Growth() as loading:
        loaded = penstock.load(path + "/ckpt", options=options, report=reports.append)
    checksum = sum(int(value.ravel()[-1]) for value in loaded.values())
    print(json.dumps({
        "save_bytes": saving.bytes,
        "load_bytes": loading.bytes,
        "into_bytes": into_bytes,
        "into_bounced": into_bounced,
        "tensor_bytes": report.tensor_bytes,
        "save_staging": report.staging_peak_bytes,
        "load_staging": reports[0].staging_peak_bytes,
        "bounced": reports[0].bounced_bytes,
        "bytes_read": reports[0].bytes_read,
        "bytes": reports[0].bytes,
        "engine": report.engine,
        "checksum": checksum,
    }))
"""


def measure(disk_path, kind, total_bytes, engine, direct):
    if engine == "uring":
        need_uring()
    result = run_child(MEASURE, disk_path, kind, total_bytes, engine, direct, is_fresh=True)
    tell(result)
    assert result["engine"] == engine
    return result


def assert_bounded(result):
    """The promise of the project: 2 GiB saved within 300 MiB."""
    assert result["save_bytes"] <= EXTRA_BYTES_MAX
    assert result["load_bytes"] <= result["tensor_bytes"] + EXTRA_BYTES_MAX
    assert result["save_staging"] <= STAGING_BYTES
    assert result["load_staging"] <= STAGING_BYTES


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "direct"), [("uring", "on"), ("threads", "off")])
def test_two_gib_are_saved_and_loaded_within_300_mib(disk_path, engine, direct):
    result = measure(disk_path, "many arrays", 2 << 30, engine, direct)
    assert result["tensor_bytes"] >= 2 << 30
    assert_bounded(result)
    assert result["into_bytes"] <= EXTRA_BYTES_MAX


@pytest.mark.parametrize("kind", ["transposed", "small tensors"])
def test_a_state_of_any_layout_is_saved_within_300_mib(disk_path, kind):
    engine = "threads"
    result = measure(disk_path, kind, 800 * MIB, engine, "on")
    assert_bounded(result)


def test_an_aligned_load_copies_nothing(disk_path):
    result = measure(disk_path, "one array", 256 * MIB, "threads", "on")
    assert result["bounced"] == 0
    assert result["bytes_read"] <= result["bytes"] + 2 * MIB


def test_a_load_reads_little_more_than_it_was_asked_for(tmp_path):
    import numpy as np

    state = {f"w{i}": np.zeros(4 * MIB, np.uint8) for i in range(16)}
    penstock.save(tmp_path / "ckpt", state)
    reports = []
    penstock.load(tmp_path / "ckpt", keys="w3", report=reports.append)
    assert reports[0].bytes == 4 * MIB
    # Rounded to digest chunks at both ends.
    assert reports[0].bytes_read <= 6 * MIB
    assert reports[0].tensors == 1


def test_the_model_alone_is_read_without_the_optimizer(tmp_path):
    import torch

    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(24)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 1024)).sum().backward()
    optimizer.step()
    state = {"optimizer": optimizer.state_dict(), "model": model.state_dict()}
    saved = penstock.save(tmp_path / "ckpt", state)
    reports = []
    penstock.load(tmp_path / "ckpt", keys="model.*", report=reports.append)
    model_bytes = sum(value.nbytes for value in model.state_dict().values())
    assert reports[0].bytes == model_bytes
    assert saved.tensor_bytes >= 3 * model_bytes
    assert reports[0].bytes_read <= 1.02 * model_bytes


def test_one_small_tensor_costs_two_chunks_at_most(tmp_path):
    import numpy as np

    state = {f"t{i:03d}": np.full(40_000 + i, i, np.uint8) for i in range(200)}
    penstock.save(tmp_path / "ckpt", state)
    for name, value in state.items():
        reports = []
        loaded = penstock.load(tmp_path / "ckpt", keys=name, report=reports.append)
        assert np.array_equal(loaded[name], value)
        assert reports[0].bytes_read <= 2 * MIB


@pytest.mark.parametrize("staging_mib", [12, 64])
def test_the_staging_budget_is_kept(disk_path, options, staging_mib):
    import numpy as np

    chosen = penstock.Options(
        engine=options.engine,
        direct=options.direct,
        staging_bytes=staging_mib * MIB,
        queue_depth=64,
        io_threads=4,
    )
    state = [np.ones(3 * MIB + 5, np.uint8) for _ in range(20)]
    report = penstock.save(disk_path / "ckpt", state, options=chosen)
    assert 0 < report.staging_peak_bytes <= staging_mib * MIB
    assert report.queue_depth * report.io_threads * report.extent_bytes <= staging_mib * MIB
    reports = []
    penstock.load(disk_path / "ckpt", options=chosen, report=reports.append)
    assert reports[0].staging_peak_bytes <= staging_mib * MIB


def test_a_tensor_that_outlives_its_neighbours_pins_little(disk_path):
    result = run_child(
        """
        import json, os, sys
        import numpy as np, penstock
        path = sys.argv[1]
        penstock.save(path, {f"w{i}": np.ones(100_000, np.uint8) for i in range(5000)})
        def rss():
            return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")
        before = rss()
        kept = penstock.load(path)["w2500"]
        print(json.dumps(rss() - before))
        """,
        disk_path / "ckpt",
    )
    assert result < 100 * MIB


@pytest.mark.parametrize("kind", ["whole", "keys", "into"])
def test_a_loaded_state_is_freed_with_its_last_reference(tmp_path, kind):
    """Without waiting for garbage collection, which may be disabled: a state is large."""
    state = {"a": torch.ones(1000), "b": (np.ones(1000), {1: torch.zeros(3)})}
    penstock.save(tmp_path / "ckpt", state)
    how = {"whole": {}, "keys": {"keys": "a*"}, "into": {"into": state}}[kind]
    gc.collect()
    gc.disable()
    try:
        loaded = penstock.load(tmp_path / "ckpt", **how)
        leaf = weakref.ref(loaded["a"])
        del loaded, state, how
        assert leaf() is None
    finally:
        gc.enable()
