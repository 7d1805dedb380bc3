"""Secrets in the memory of a process that has sealed: none are left, and none are in core dumps,
logs, traces and files.

The process runs by itself and is read from outside, as its dump would be.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from typing import NamedTuple

import pytest
from cryptography.hazmat.primitives.keywrap import aes_key_unwrap

from penstock.sealing import generate
from sealed_reader import SealedCheckpoint

PASSPHRASE = "nine wet lamps under the quay"

CHILD = """
import gc, logging, os, sys
import numpy as np
logging.basicConfig(level=logging.DEBUG)
import penstock
from penstock import Sealing

root, *keys = sys.argv[1:]
sealing = Sealing(keys)
state = {"a": np.arange(1 << 20), "b": np.ones(3)}
with penstock.CheckpointStore(f"{root}/store", sealing=sealing, identities=keys) as store:
    store.save(1, state)
    store.save_async(2, state, lazy=True).result()
    store.load()
# Readers are kept while something of them is used.
view = penstock.load(store.path(1), identities=keys, keys="b")
identities = penstock.sealing.Identities(keys)
print("alive", flush=True)
sys.stdin.readline()
del sealing, store, view, identities
gc.collect()
print("over", flush=True)
sys.stdin.readline()
"""


class Mapping(NamedTuple):
    start: int
    end: int
    is_dumped: bool
    name: str


def mappings(pid):
    """Yields the mappings that a process has written to."""
    start = end = 0
    permissions = name = ""
    with open(f"/proc/{pid}/smaps") as file:
        for line in file:
            if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \S+ *(.*)", line):
                start, end = int(head[1], 16), int(head[2], 16)
                permissions, name = head[3], head[4]
            elif line.startswith("VmFlags:") and permissions.startswith("rw"):
                yield Mapping(start, end, "dd" not in line.split(), name)


def places(pid, secrets):
    """Returns the secrets that the memory of a process holds, with their mappings."""
    found = []
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for mapping in mappings(pid):
            try:
                data = os.pread(memory.fileno(), mapping.end - mapping.start, mapping.start)
            except OSError:
                # The kernel's own pages.
                continue
            found += [(name, mapping) for name, secret in secrets.items() if secret in data]
    return found


@pytest.fixture
def child(tmp_path):
    """A process between its two halves, the secrets of its key file, and those of its attempts."""
    file = tmp_path / "key"
    generate(file, kind="key-file")
    (tmp_path / "passphrase").write_text(PASSPHRASE + "\n")
    generate(tmp_path / "x25519")
    keys = [str(file), f"passphrase-file:{tmp_path}/passphrase", str(tmp_path / "x25519")]
    command = [sys.executable, "-c", CHILD, str(tmp_path), *keys]
    environment = {**os.environ, "PENSTOCK_TRACE": str(tmp_path / "trace.json")}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with (
        open(tmp_path / "log", "w") as log,
        subprocess.Popen(command, text=True, stderr=log, env=environment, **pipes) as process,
    ):
        assert process.stdout.readline() == "alive\n"
        yield process, tmp_path
        process.stdin.close()
        assert process.wait() == 0


def secrets_of(root):
    """Returns the secrets of the key file, and those derived for the attempts."""
    digits = re.search(r"PENSTOCK-SECRET-KEY-1([0-9a-f]{64})", (root / "key").read_text())
    given = {
        "key file": bytes.fromhex(digits[1]),
        "digits of the key file": digits[1].encode(),
        "text of the X25519 key": re.search(
            rb"AGE-SECRET-KEY-1\w+", (root / "x25519").read_bytes()
        )[0],
        "passphrase": PASSPHRASE.encode(),
    }
    derived = {}
    for step, path in enumerate(sorted((root / "store").glob("step-*")), 1):
        manifest = json.loads((path / "manifest.json").read_text())
        (wrap,) = [one for one in manifest["wraps"] if one["kind"] == "key-file"]
        data_key = aes_key_unwrap(given["key file"], base64.b64decode(wrap["key"]))
        checkpoint = SealedCheckpoint(path, data_key)
        derived[f"data key of step {step}"] = data_key
        rank = bytes(4)
        key, _, _ = checkpoint._keys("penstock.v1.part", checkpoint.salt, rank)
        derived[f"key of the body of step {step}"] = key
        salt = base64.b64decode(manifest["sealing"]["salt"])
        derived[f"MAC key of step {step}"] = checkpoint._derive(
            "penstock.v1.manifest", salt, b"", 64
        )[32:]
    return given, derived


def test_a_search_finds_what_is_there(child):
    process, root = child
    found = places(process.pid, {"path of the key file": str(root / "key").encode()})
    assert any(mapping.is_dumped for _, mapping in found)


def test_no_secret_is_in_a_dump_or_left_behind(child):
    process, root = child
    given, derived = secrets_of(root)
    alive = places(process.pid, {"key file": given["key file"], **derived})
    assert [place for place in alive if place[1].is_dumped] == []
    assert "key file" in [name for name, _ in alive]
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "over\n"
    assert places(process.pid, {**given, **derived}) == []


def test_logs_traces_and_manifests_hold_no_secret(child):
    process, root = child
    given, derived = secrets_of(root)
    process.communicate("\n")
    secrets = {**given, **derived}
    secrets |= {f"{name} in digits": secret.hex().encode() for name, secret in secrets.items()}
    secrets |= {f"{name} as B": base64.b64encode(secret) for name, secret in secrets.items()}
    sources = [root / name for name in ("key", "passphrase", "x25519")]
    files = [file for file in root.rglob("*") if file.is_file() and file not in sources]
    assert {"log", "trace.json", "manifest.json"} <= {file.name for file in files}
    assert (root / "trace.json").stat().st_size > 0
    found = [
        (file.name, name)
        for file in files
        for name, secret in secrets.items()
        if secret in file.read_bytes()
    ]
    assert found == []
