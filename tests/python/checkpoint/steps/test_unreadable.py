"""An unreadable step is reported and kept, and blocks no other operation."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest

import penstock
from conftest import run_child
from penstock.cli.ls import describe
from penstock.errors import CheckpointNotFoundError, PenstockWarning, StorageError


def state_of(step):
    return {"w": np.full(50, step), "step": step}


@pytest.fixture
def store(tmp_path):
    """Saves steps 10 to 30."""
    store = penstock.CheckpointStore(tmp_path / "store")
    for step in (10, 20, 30):
        store.save(step, state_of(step))
    return store


def lose(store, step):
    """Makes a step unreadable for every user: a link that leads to itself."""
    shutil.rmtree(store.path(step))
    os.symlink(store.path(step), store.path(step))


def states(store):
    return {info.step: info.state for info in store.scan()}


def test_an_old_one_is_in_nobodys_way(store):
    lose(store, 10)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.load()["step"] == 30
        assert store.load(fallback=True)["step"] == 30
        assert (store.steps(), store.latest()) == ([20, 30], 30)
        assert states(store) == {10: "unreadable", 20: "complete", 30: "complete"}
        assert "Too many levels of symbolic links" in store.scan()[0].reason
        assert store.sweep() == store.sweep(dry_run=True) == []
        keeping = penstock.CheckpointStore(store.root, keep_last=1)
        keeping.save(40, state_of(40))
        # Step 30 is the newest that was read back whole.
        assert states(store) == {10: "unreadable", 30: "complete", 40: "complete"}
        report = keeping.retain(dry_run=True)
    assert report.kept == {
        10: "unreadable",
        30: "the newest that was read back whole",
        40: "among the newest",
    }
    assert penstock.explain(store.path(30)).earlier_step is None
    assert [step.state for step in store.scrub().steps] == ["failed", "skipped", "verified"]


def test_the_newest_is_an_error_that_names_the_way_back(store):
    lose(store, 30)
    for _ in range(2):
        with pytest.raises(StorageError, match=r"store\.load\(step=20\)") as raised:
            store.load()
        assert raised.value.errno == errno.ELOOP
    assert store.latest() == 20
    reports = []
    with pytest.warns(PenstockWarning, match="step 30 is passed over") as caught:
        assert store.load(fallback=True, report=reports.append)["step"] == 20
    assert len(caught) == 1
    assert [step for step, _ in reports[0].skipped] == [30]
    assert states(store)[30] == "unreadable"


def test_where_none_can_be_read_a_fallback_says_why(store):
    for step in (10, 20, 30):
        lose(store, step)
    with warnings.catch_warnings(action="ignore"), pytest.raises(penstock.PenstockError) as raised:
        store.load(fallback=True)
    assert not isinstance(raised.value, CheckpointNotFoundError)


def test_the_list_tells_of_it(store):
    lose(store, 20)
    assert [row["state"] for row in describe(Path(store.root))] == [
        "complete",
        "unreadable",
        "complete",
    ]


AS_NOBODY = """
    import json, os, sys, warnings
    import penstock
    from penstock.cli.ls import describe
    from pathlib import Path
    # Imports lazy names first: other users may not be able to read the interpreter's files.
    _ = penstock.save, penstock.CheckpointStore
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    store = penstock.CheckpointStore(sys.argv[1], keep_last=1)
    found = {"states": {info.step: info.state for info in store.scan()}}
    found["ls"] = [row["state"] for row in describe(Path(sys.argv[1]))]
    found["latest"] = store.latest()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found["load"] = store.load()["step"]
        except penstock.errors.StorageError as error:
            found["load"] = [error.errno, "store.load(step=" in str(error)]
        found["fallback"] = store.load(fallback=True)["step"]
        store.save(40, {"step": 40})
        found["swept"] = len(store.sweep())
    found["warnings"] = [str(one.message)[:8] for one in caught]
    found["after"] = {info.step: info.state for info in store.scan()}
    print(json.dumps(found))
"""


@pytest.mark.parametrize("hidden", ["manifest.json", "part-", "", "shard-"])
@pytest.mark.parametrize("step", [10, 30], ids=["old", "newest"])
def test_one_of_somebody_else(store, need_root, step, hidden):
    # Other users cannot enter pytest's directories.
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        shutil.move(store.root, directory)
        check_as_nobody(penstock.CheckpointStore(Path(directory) / "store"), step, hidden)


def check_as_nobody(store, step, hidden):
    for directory, _, files in os.walk(store.root):
        for name in (".", *files):
            os.chown(os.path.join(directory, name), 65534, 65534)
    path = store.path(step)
    victim = next(os.path.join(path, name) for name in os.listdir(path) if name.startswith(hidden))
    victim = victim if hidden else path
    os.chown(victim, 0, 0)
    os.chmod(victim, 0o700 if not hidden else 0o600)
    found = run_child(AS_NOBODY, store.root)
    assert found["states"][str(step)] == "unreadable"
    assert found["ls"].count("complete") == 2
    if step == 30:
        assert found["load"] == [errno.EACCES, True]
        assert found["fallback"] == 20
        assert found["warnings"] == ["step 30 "]
    else:
        assert (found["load"], found["fallback"], found["warnings"]) == (30, 30, [])
    assert found["latest"] == (20 if step == 30 else 30)
    assert (found["after"].get("40"), found["swept"]) == ("complete", 0)
    # Retention works: steps that are neither kept nor unreadable are deleted.
    # Step 20 or 30 was read back whole.
    good = "20" if step == 30 else "30"
    assert set(found["after"]) == {good, "40", str(step)}


KEEPING_ONE = """
    import glob, json, os, sys
    import numpy as np
    import penstock
    from click.testing import CliRunner
    from penstock.cli import cli
    # Imports lazy names first: other users may not be able to read the interpreter's files.
    _ = penstock.save, penstock.CheckpointStore
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    store = penstock.CheckpointStore(sys.argv[1] + "/store", keep_last=None)
    for step in (10, 20, 30):
        store.save(step, {"w": np.full(5000, step)})
    os.chmod(glob.glob(store.path(30) + "/shard-*")[0], 0)
    report = penstock.CheckpointStore(store.root, keep_last=1).retain()
    states = {info.step: info.state for info in store.scan()}
    os.chmod(store.path(20), 0o444)
    ends = [
        type(CliRunner().invoke(cli, [*words, store.path(20)]).exception).__name__
        for words in (["verify"], ["verify", "--explain"], ["inspect"], ["ls"])
    ]
    os.chmod(store.path(20), 0o755)
    print(json.dumps([report.deleted, report.kept, states, ends]))
"""


def test_nothing_goes_for_a_step_whose_data_nobody_here_can_read(need_root):
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)
        deleted, kept, states, ends = run_child(KEEPING_ONE, directory)
    assert deleted == [10]
    assert kept == {"20": "among the newest", "30": "unreadable"}
    assert states == {"20": "complete", "30": "unreadable"}
    assert "PermissionError" not in ends


def test_a_name_that_is_no_text_is_explained(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    penstock.save(b"\xff\xfe", {"w": np.ones(5)})
    assert penstock.explain(b"\xff\xfe").ok


COMING_PAST_IT = """
    import glob, json, os, sys, warnings
    import numpy as np
    import penstock
    warnings.simplefilter("ignore")
    # Imports lazy names first: other users may not be able to read the interpreter's files.
    _ = penstock.save, penstock.CheckpointStore
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
    store = penstock.CheckpointStore(sys.argv[1] + "/store")
    for step in (10, 20):
        store.save(step, {"w": np.full(5000, step), "step": step})
    os.chmod(glob.glob(store.path(20) + "/shard-*")[0], 0)
    went_back_to = store.load(fallback=True)["step"]
    store.save(20, {"step": 20})
    (aside,) = store.quarantined()
    os.chmod(glob.glob(aside.path + "/shard-*")[0], 0o600)
    kept = penstock.load(aside.path)["w"].tolist() == [20] * 5000
    print(json.dumps([went_back_to, store.load()["step"], kept]))
"""


def test_a_run_that_went_back_past_it_saves_the_step_again(need_root):
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o777)
        assert run_child(COMING_PAST_IT, directory) == [10, 20, True]


# A device with unreadable bytes: the kernel's own EIO, from memory that is not mapped.


LOST = """
import ctypes, errno, json, os, sys, warnings
import penstock

root, kind = sys.argv[1:]
store = penstock.CheckpointStore(root, keep_last=1)
directory = store.path(30)
(name,) = (name for name in os.listdir(directory) if name.startswith(kind))
libc = ctypes.CDLL(None, use_errno=True)
NEW_USER, NEW_MOUNTS, BIND = 0x10000000, 0x20000, 4096
if libc.unshare(NEW_MOUNTS) and libc.unshare(NEW_USER | NEW_MOUNTS):
    print(json.dumps({"skip": "no mounts of its own: " + os.strerror(ctypes.get_errno())}))
    sys.exit()
# Private, so that nobody else sees it.
libc.mount(b"none", b"/", None, 0x44000, None)
if libc.mount(b"/proc/self/mem", os.fsencode(os.path.join(directory, name)), None, BIND, None):
    print(json.dumps({"skip": "cannot mount: " + os.strerror(ctypes.get_errno())}))
    sys.exit()
before = sorted(os.listdir(directory))
numbers = []
for call in (lambda: store.load(), lambda: penstock.load(directory)):
    try:
        call()
    except penstock.errors.StorageError as error:
        numbers.append(error.errno)
states = {info.step: info.state for info in store.scan()}
swept = store.sweep()
with warnings.catch_warnings(record=True, action="always") as told:
    fallen = store.load(fallback=True)["step"]
found = {
    "numbers": numbers,
    "states": states,
    "swept": swept,
    "fallen": fallen,
    "told": [str(one.message) for one in told],
    "kept": store.retain(dry_run=True).kept[30],
    "scrubbed": [step.state for step in store.scrub().steps if step.step == 30],
    "marks": [step for step, mark in store.marks().items() if not mark.is_good],
    "quarantined": store.quarantined(),
    "is_left": sorted(os.listdir(directory)) == before,
}
print(json.dumps(found))
"""


def test_a_manifest_that_the_device_does_not_give_back_is_no_damage(store):
    found = run_child(LOST, store.root, "manifest")
    if "skip" in found:
        pytest.skip(found["skip"])
    assert found["numbers"] == [errno.EIO, errno.EIO]
    assert found["states"] == {"10": "complete", "20": "complete", "30": "unreadable"}
    assert (found["fallen"], found["kept"]) == (20, "unreadable")
    (told,) = found["told"]
    assert "step 30 is passed over" in told
    assert "Input/output error" in told
    assert found["scrubbed"] == ["failed"]
    assert found["swept"] == found["marks"] == found["quarantined"] == []
    assert found["is_left"]
    # The device works again.
    assert store.load()["step"] == 30
