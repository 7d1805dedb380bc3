"""Findings of `penstock doctor` about GPUs, on the driver for tests and without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from gpu import DRIVER, VARIABLE
from penstock.common.machine import gpus
from penstock.doctor import gds, gpu


@pytest.fixture
def need_driver():
    if not DRIVER.exists():
        pytest.skip(f"there is no driver for tests at {DRIVER}: make test-python builds it")


def run(*command, driver=str(DRIVER), **fake):
    """A program on a driver for tests."""
    variables = {f"PENSTOCK_FAKE_{name.upper()}": str(value) for name, value in fake.items()}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, VARIABLE: driver, **variables},
    )
    assert done.stdout, done.stderr
    return done


def doctor(directory, *arguments, **driver):
    """Runs the doctor; returns the findings by name, and the exit code."""
    done = run("-m", "penstock", "doctor", "--json", str(directory), *arguments, **driver)
    found = json.loads(done.stdout)["findings"]
    assert all(one["status"] == "ok" or one["why"] for one in found)
    return {one["check"]: one for one in found}, done.returncode


EXAMINE = f"""
import json, sys
from penstock.doctor.examine import examine
found = examine(sys.argv[1], size_bytes={1 << 20})
print(json.dumps({{one.check: [one.status, one.found] for one in found.findings}}))
"""


def measured(directory, **driver):
    """Findings of an examination that measures the disk for a moment only, by their names."""
    found = json.loads(run("-c", EXAMINE, str(directory), **driver).stdout)
    return {check: {"status": status, "found": text} for check, (status, text) in found.items()}


def test_each_device_is_named_tried_and_measured(disk_path, need_driver):
    found = measured(disk_path, devices=2)
    for ordinal in (0, 1):
        name = found[f"GPU {ordinal}"]["found"]
        assert "Penstock fake device, 1.1 GB" in name
        assert "CUDA 13.2" in name
        assert found[f"copies of GPU {ordinal}"]["status"] == "ok"
        link = found[f"link of GPU {ordinal}"]["found"]
        assert "GB/s to it" in link
        assert "both at once" in link
    assert found["pinned memory"]["found"].startswith("67.1 MB")
    assert "GPUDirect Storage" in found


def test_looking_alone_measures_nothing(disk_path, need_driver):
    found, _ = doctor(disk_path, "--no-measure")
    assert found["copies of GPU 0"]["status"] == "ok"
    assert "link of GPU 0" not in found


def test_garbage_is_a_failure_with_a_way_around_it(disk_path, need_driver):
    found, code = doctor(disk_path, "--no-measure", garbles=1)
    assert code == 1
    assert found["copies of GPU 0"]["status"] == "fail"
    assert "PENSTOCK_CUDA_DRIVER" in found["copies of GPU 0"]["remedy"]


def test_memory_that_cannot_be_pinned_is_a_warning_with_its_reason(disk_path, need_driver):
    found, code = doctor(disk_path, "--no-measure", pinning_permitted=0)
    assert code == 0
    pinned = found["pinned memory"]
    assert pinned["status"] == "warn"
    assert "CUDA_ERROR_NOT_PERMITTED" in pinned["found"]
    assert pinned["remedy"]


def test_a_device_that_is_full_is_tried_and_not_measured(disk_path, need_driver):
    found = measured(disk_path, memory_bytes=100 << 20)
    assert found["link of GPU 0"]["found"].startswith("not measured: 104.9 MB")


def test_a_driver_that_is_too_old_or_has_no_device_is_no_failure(disk_path, need_driver):
    found, code = doctor(disk_path, "--no-measure", driver_version=10020)
    assert code == 0
    assert "version 10.2" in found["GPU"]["found"]
    found, code = doctor(disk_path, "--no-measure", devices=0)
    assert code == 0
    assert found["GPU"]["found"] == "none: the CUDA driver finds no device"
    assert "GPUDirect Storage" not in found


def test_without_a_driver_there_is_none(disk_path):
    found, code = doctor(disk_path, "--no-measure", driver="/nowhere/libcuda.so")
    assert code == 0
    assert found["GPU"]["status"] == "ok"
    assert found["GPU"]["found"] == "none"


def test_devices_without_a_driver_are_a_warning(tmp_path, monkeypatch):
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(gpu, "_DEVICES", tmp_path)
    driver = gpus.Driver("libcuda.so.1", False, None, "no CUDA driver", 0, [])
    monkeypatch.setattr(gpus, "probe_driver", lambda: driver)
    (found,) = gpu.check(tmp_path, measures=False)
    assert found.status == "warn"
    assert "1 found, not usable: no CUDA driver" in found.found


def test_of_amd_it_is_said_who_copies(tmp_path, monkeypatch):
    (tmp_path / "kfd").touch()
    monkeypatch.setattr(gpu, "_DEVICES", tmp_path)
    driver = gpus.Driver("libcuda.so.1", False, None, "no CUDA driver", 0, [])
    monkeypatch.setattr(gpus, "probe_driver", lambda: driver)
    (found,) = gpu.check(tmp_path, measures=False)
    assert found.found.startswith("AMD: PyTorch copies its tensors")


def test_a_link_that_is_slower_than_its_bus_is_a_warning(tmp_path, monkeypatch):
    place = tmp_path / "0000:01:00.0"
    place.mkdir()
    (place / "max_link_speed").write_text("32.0 GT/s PCIe\n")
    (place / "max_link_width").write_text("16\n")
    monkeypatch.setattr(gpus, "_PCI_DEVICES", tmp_path)
    assert gpus.bus_gb_per_second("0000:01:00.0") == pytest.approx(63.0, abs=0.1)
    assert gpus.bus_gb_per_second("0000:02:00.0") is None
    one = gpus.Gpu(0, "H100", "0000:01:00.0", 80 << 30, 80 << 30, None)

    def link(rate):
        ways = ("to_device", "to_host", "both")
        rates = [gpus.Rate(way, 4 << 20, False, [rate] * 3) for way in ways]
        monkeypatch.setattr(gpus, "link", lambda *_, **__: gpus.Link(rates, None))
        return gpu._link(one)

    assert link(55.6).status == "ok"
    found = link(25.0)
    assert found.status == "warn"
    assert "its bus has 63.0 GB/s" in found.found
    assert "lspci" in found.remedy


# GPUDirect Storage: the files of a working machine, and each of them left out.

WORKING = {
    "boot/config-6.8.0-40-generic": "CONFIG_PCI_P2PDMA=y",
    "proc/driver/nvidia/version": (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build"
    ),
    "proc/driver/nvidia/params": ('RegistryDwords: "RMForceStaticBar1=1;RmForceDisableIomapWC=1"'),
    "sys/module/nvme_core/parameters/multipath": "N",
    "sys/kernel/iommu_groups/0/type": "identity",
    "etc/cufile.json": (
        '{ // "not this"\n "logging": {"dir": "/a//b"},\n'
        '  "properties": {"use_pci_p2pdma": true, "allow_compat_mode": true} // end\n}'
    ),
}


@pytest.fixture
def examined(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "cufile", lambda: "libcufile.so.0")
    monkeypatch.setattr(gds.platform, "release", lambda: "6.8.0-40-generic")
    monkeypatch.setattr(gds.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(gds, "device_of", lambda _: tmp_path / "drive")
    monkeypatch.setattr(gds, "stack", lambda device: [device])
    monkeypatch.setattr(gds, "transport", lambda _: "nvme")
    monkeypatch.delenv("CUFILE_ENV_PATH_JSON", raising=False)

    def look(changed):
        for name, text in (WORKING | changed).items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
        (found,) = gds.check(tmp_path, gds.SystemPaths(tmp_path))
        return found

    return look


def test_transfers_from_peer_to_peer_are_found_usable(examined):
    assert examined({}).found == "usable: by transfers from peer to peer, without nvidia-fs"


@pytest.mark.parametrize(
    ("file", "text", "told"),
    [
        (
            "proc/driver/nvidia/version",
            "NVIDIA UNIX x86_64 Kernel Module  570.1",
            "not the open one",
        ),
        (
            "proc/driver/nvidia/version",
            "NVIDIA UNIX Open Kernel Module for x86_64  560.35.03",
            "older than 565.47",
        ),
        ("proc/driver/nvidia/params", 'RegistryDwords: "RMForceStaticBar1=1"', "RmForceDisable"),
        ("sys/module/nvme_core/parameters/multipath", "Y", "multipath"),
        ("sys/kernel/iommu_groups/0/type", "DMA-FQ", "iommu=pt"),
        ("boot/config-6.8.0-40-generic", "# CONFIG_PCI_P2PDMA is not set", "PCI_P2PDMA"),
        ("etc/cufile.json", "{}", "use_pci_p2pdma"),
    ],
)
def test_each_condition_that_does_not_hold_is_named(examined, file, text, told):
    found = examined({file: text})
    assert found.status == "ok"
    assert "compat mode" in found.found
    assert told in found.found
    # And no other device.
    assert found.found.rpartition("for the way without it: ")[2].count(";") == 0


def test_a_module_that_is_loaded_is_enough(examined):
    found = examined({"proc/driver/nvidia-fs/version": "version: 2.24", "etc/cufile.json": "{}"})
    assert found.found == "usable: nvidia-fs 2.24 is loaded"


def test_settings_that_forbid_the_only_way_are_a_warning(examined):
    found = examined({"etc/cufile.json": '{"properties": {"allow_compat_mode": false}}'})
    assert found.status == "warn"
    assert "allow_compat_mode" in found.remedy


def test_settings_that_cannot_be_read_are_a_warning(examined):
    found = examined({"etc/cufile.json": "{properties"})
    assert found.status == "warn"
    assert "no JSON" in found.found


def test_without_the_library_the_way_to_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "cufile", lambda: None)
    (found,) = gds.check(tmp_path)
    assert found.status == "ok"
    assert found.found.startswith("not found")
    assert "nvidia-cufile" in found.remedy
