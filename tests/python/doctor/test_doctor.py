"""`penstock doctor`: the right findings where there is a problem, and none where not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import penstock
from conftest import watch_refusal
from penstock import _native
from penstock.cli.doctor import _print
from penstock.common.machine import facts
from penstock.doctor import Examination, examine, measured, storage, system
from penstock.doctor.findings import Finding

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="takes root: mounts, another user")


def doctor(*arguments, prefix=(), **options):
    command = [*prefix, sys.executable, "-m", "penstock", "doctor", "--json", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.stdout, done.stderr
    found = json.loads(done.stdout)
    findings = {one["check"]: one for one in found["findings"]}
    assert done.returncode == (0 if found["ok"] else 1)
    for one in findings.values():
        assert one["status"] in ("ok", "warn", "fail")
        # Each warning or failure has a reason.
        assert one["status"] == "ok" or one["why"]
    return found["ok"], findings


def make_disk(image, mib):
    """Makes an empty ext4 in a file."""
    with open(image, "wb") as file:
        file.truncate(mib << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    return image


@contextmanager
def mounted(place, kind, source="none", options=""):
    place.mkdir()
    command = ["mount", "-t", kind, *(["-o", options] if options else []), source, str(place)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"cannot mount {kind}: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", str(place)], check=True)


def test_a_disk_is_measured_and_nothing_is_left(disk_path):
    found = examine(disk_path, size_bytes=32 << 20)
    status = {one.check: one.status for one in found.findings}
    assert {"durable write", "cold read", "random read of 4 KiB", "sync of 4 KiB"} <= set(status)
    assert status["kernel"] == "ok"
    assert list(disk_path.iterdir()) == []


def test_what_is_found_is_shown_to_people(disk_path):
    command = [sys.executable, "-m", "penstock", "doctor", str(disk_path), "--no-measure"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "io_uring" in done.stdout
    assert "warning" in done.stdout
    assert "durable write" not in done.stdout


def test_a_directory_that_is_none_is_refused(tmp_path):
    command = [sys.executable, "-m", "penstock", "doctor", str(tmp_path / "nowhere")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2


@ROOT
def test_memory_is_no_disk(tmp_path):
    with mounted(tmp_path / "memory", "tmpfs", options="size=64m") as place:
        _, found = doctor("--no-measure", place)
    assert found["file system"]["status"] == "warn"
    assert "memory" in found["file system"]["why"]
    # It is small, too.
    assert found["room"]["status"] == "fail"


@ROOT
def test_a_disk_that_is_nearly_full_is_a_failure_and_is_not_filled(tmp_path, disk_path):
    image = make_disk(disk_path / "image", 300)
    with mounted(tmp_path / "small", "ext4", source=str(image), options="loop") as place:
        (place / "data").write_bytes(bytes(200 << 20))
        ok, found = doctor(place)
        assert not ok
        assert found["room"]["status"] == "fail"
        assert "penstock sweep" in found["room"]["remedy"]
        assert "durable write" not in found


@ROOT
def test_a_mount_that_is_read_only_or_unsafe_is_a_failure(tmp_path, disk_path):
    image = make_disk(disk_path / "image", 64)
    for number, (options, why) in enumerate(
        [("loop,ro", "nothing can be saved"), ("loop,nobarrier", "power cut")]
    ):
        with mounted(tmp_path / f"m{number}", "ext4", str(image), options) as place:
            ok, found = doctor("--no-measure", place)
        assert not ok
        assert found["mount"]["status"] == "fail"
        assert why in found["mount"]["why"]


@ROOT
def test_an_ordinary_user_gets_the_same_findings():
    prefix = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    if shutil.which("setpriv") is None:
        pytest.skip("no setpriv to change the user with")
    if subprocess.run([*prefix, sys.executable, "-c", "import penstock"], check=False).returncode:
        pytest.skip("the interpreter is closed to other users")
    # Other users cannot enter pytest's directories.
    place = Path(tempfile.mkdtemp())
    try:
        place.chmod(0o755)
        ok, found = doctor("--no-measure", place, prefix=prefix)
        assert not ok
        assert "not writable for this user" in found["room"]["found"]
        place.chmod(0o777)
        ok, found = doctor("--no-measure", place, prefix=prefix)
        assert "writable" not in found["room"]["found"]
        assert found["direct I/O"]["status"] in ("ok", "warn")
        assert list(place.iterdir()) == []
    finally:
        shutil.rmtree(place)


BLOCKED = """
import ctypes, dataclasses, json, pathlib, sys
# Tells the kernel to answer io_uring_setup, _enter and _register with EPERM: a seccomp filter
# (seccomp(2)) of five instructions.
class Instruction(ctypes.Structure):
    _fields_ = [("code", ctypes.c_ushort), ("jt", ctypes.c_ubyte), ("jf", ctypes.c_ubyte),
                ("k", ctypes.c_uint32)]
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.POINTER(Instruction))]
LOAD, AT_LEAST, ABOVE, RETURN = 0x20, 0x35, 0x25, 0x06
rows = (Instruction * 5)(
    Instruction(LOAD, 0, 0, 0), Instruction(AT_LEAST, 0, 2, 425), Instruction(ABOVE, 1, 0, 427),
    Instruction(RETURN, 0, 0, 0x00050001), Instruction(RETURN, 0, 0, 0x7FFF0000))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Program(5, rows))) == 0, ctypes.get_errno()
from penstock.doctor.examine import examine
found = examine(pathlib.Path(sys.argv[1]), size_bytes=32 << 20)
json.dump([dataclasses.asdict(one) for one in found.findings], sys.stdout)
"""


def test_where_io_uring_is_blocked_the_remedy_is_the_profile(disk_path):
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, str(disk_path)], capture_output=True, text=True, check=False
    )
    findings = {one["check"]: one for one in json.loads(done.stdout)}
    assert findings["io_uring"]["status"] == "warn"
    assert "seccomp" in findings["io_uring"]["remedy"]
    # The measurement runs nonetheless, with the other engine.
    assert "GB/s" in findings["durable write"]["found"]


def test_the_switch_of_the_kernel_is_told_from_a_filter(monkeypatch):
    monkeypatch.setattr(system, "read", lambda _: "2")
    (found,) = system._io_uring([("ring", 1, "Operation not permitted")])
    assert found.remedy == "sysctl -w kernel.io_uring_disabled=0"
    monkeypatch.setattr(system, "read", lambda _: "0")
    (found,) = system._io_uring([("ring", 1, "Operation not permitted")])
    assert "seccomp" in found.remedy


def sys_tree(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def findings_of(device):
    return {one.check: one for one in storage._device(device)}


def test_a_link_that_is_slower_than_the_drive_is_found(tmp_path):
    drive = sys_tree(
        tmp_path / "nvme0n1",
        {
            "device/model": "FAST 1T", "queue/rotational": "0",
            "queue/scheduler": "[mq-deadline] none",
            "device/current_link_speed": "8.0 GT/s PCIe", "device/current_link_width": "2",
            "device/max_link_speed": "16.0 GT/s PCIe", "device/max_link_width": "4",
        },
    )  # fmt: skip
    found = findings_of(drive)
    assert found["PCIe link of nvme0n1"].status == "warn"
    assert "of 16.0 GT/s PCIe x 4" in found["PCIe link of nvme0n1"].found
    assert found["scheduler of nvme0n1"].remedy == "echo none > /sys/block/nvme0n1/queue/scheduler"
    # Half of the rate of two lanes of PCIe 3.0.
    assert measured.expected(drive).read_gb == pytest.approx(0.985)


def test_an_array_that_lost_a_disk_is_a_failure(tmp_path):
    array = sys_tree(
        tmp_path / "md0",
        {"md/level": "raid10", "md/raid_disks": "4", "md/chunk_size": "524288", "md/degraded": "1"},
    )
    found = findings_of(array)["array md0"]
    assert found.status == "fail"
    assert "1 missing" in found.found
    (array / "md/degraded").write_text("0\n")
    assert findings_of(array)["array md0"] == Finding(
        "array md0", "ok", "raid10 of 4, chunks of 512 KiB"
    )


def test_a_volume_is_seen_with_what_is_below(tmp_path):
    disk = sys_tree(tmp_path / "sda", {"queue/rotational": "1", "device/model": "OLD 4T"})
    volume = sys_tree(tmp_path / "dm-0", {"dm/uuid": "LVM-abc"})
    (volume / "slaves").mkdir()
    (volume / "slaves/sda").symlink_to(disk)
    assert list(storage.stack(volume)) == [volume, disk]
    assert findings_of(volume)["volume dm-0"].found == "LVM over 1 device"


# Reports.


def examined(statuses):
    return Examination("/d", tuple(Finding("check", one, "found") for one in statuses))


@pytest.mark.parametrize(
    ("statuses", "told"),
    [
        (["ok", "warn", "fail"], "1 ok, 1 warning, 1 failure"),
        (["warn", "warn"], "0 ok, 2 warnings, 0 failures"),
    ],
)
def test_one_is_not_counted_as_several(capsys, statuses, told):
    _print(examined(statuses))
    assert told in capsys.readouterr().out.splitlines()[-1]


def test_little_room_is_told_in_units_that_show_it(tmp_path, monkeypatch):
    usage = shutil._ntuple_diskusage(8_000_000, 5_000_000, 3_000_000)
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda _: usage)
    assert storage._room(tmp_path).found == "3.0 MB free of 8.0 MB"


@pytest.mark.parametrize(
    ("place", "files", "does"),
    [
        ("host0/sda", {"queue/rotational": "1", "device/vendor": "SEAGATE"}, True),
        ("host0/sda", {"queue/rotational": "1", "device/vendor": "QEMU    "}, False),
        ("virtio1/vda", {"queue/rotational": "1"}, False),
        ("host0/sdb", {"queue/rotational": "0", "device/vendor": "SEAGATE"}, False),
    ],
)
def test_what_a_virtual_disk_says_of_rotation_is_nowhere_believed(
    tmp_path, monkeypatch, place, files, does
):
    """Neither the doctor nor a benchmark's facts believe it."""
    disk = sys_tree(tmp_path / place, files)
    (found,) = [one for one in storage._device(disk) if one.check.startswith("device")]
    assert ("rotating" in found.found) is does
    assert (measured._expected_of_one(disk).name == "rotating disk") is does
    monkeypatch.setattr(facts, "Path", lambda text: disk if "/sys/dev" in text else Path(text))
    assert facts.queue_of(tmp_path)["rotational"] == str(int(does))


def test_facts_and_reports_agree_on_rotation_here(tmp_path):
    reports = []
    penstock.save(tmp_path / "ckpt", {"w": b"x" * 5000})
    penstock.load(tmp_path / "ckpt", report=reports.append)
    queue = facts.queue_of(tmp_path)
    if reports[0].device is None or not queue:
        pytest.skip("no device can be seen here")
    says = "does not rotate" if queue["rotational"] == "0" else " rotates"
    assert any(says in choice for choice in reports[0].choices), reports[0].choices


def test_whether_lazy_saves_are_watched_is_tried(disk_path):
    found = {one.check: one for one in examine(disk_path, measures=False).findings}
    refusal = watch_refusal()
    assert found["lazy saves"].status == ("ok" if refusal is None else "warn")


def test_a_kernel_that_does_not_watch_is_told_with_its_remedy(disk_path, monkeypatch):
    reason = "the kernel does not tell of writes here (userfaultfd: not permitted)"
    monkeypatch.setattr(system._native, "probe_watch", lambda: reason)
    found = {one.check: one for one in examine(disk_path, measures=False).findings}
    told = found["lazy saves"]
    assert (told.status, told.found) == ("warn", reason)
    assert "copies the whole state at the call" in told.why
    assert "Linux 6.7" in told.remedy
    assert "userfaultfd" in told.remedy


def test_trying_does_not_disturb_a_lazy_save_under_way(tmp_path, need_watch):
    store = penstock.CheckpointStore(tmp_path)
    state = {"w": torch.arange(1 << 20)}
    pending = store.save_async(1, state, lazy=True)
    assert _native.probe_watch() is None
    report = pending.result()
    assert not report.fallbacks
    assert torch.equal(store.load()["w"], state["w"])


@pytest.mark.parametrize(
    ("device", "features", "is_told"),
    [
        ("0x0005", "01100101", True),
        ("0x0005", "01100001", False),
        ("0x0005", "011", False),
        ("0x0002", "01100101", False),
        (None, None, False),
    ],
)
def test_a_host_that_takes_free_memory_back_is_told(tmp_path, device, features, is_told):
    for name, text in [("device", device), ("features", features)]:
        if text is not None:
            (tmp_path / "virtio0").mkdir(exist_ok=True)
            (tmp_path / "virtio0" / name).write_text(text + "\n")
    findings = list(system._reported_pages(tmp_path))
    assert [finding.status for finding in findings] == ["warn"] * is_told
    assert all(finding.remedy for finding in findings)
