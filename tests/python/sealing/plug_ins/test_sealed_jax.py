"""Sealed pytrees of JAX."""

from __future__ import annotations

import shutil
import socket
import textwrap

import pytest

pytest.importorskip("jax")

import jax.numpy as jnp

import penstock
from penstock.errors import NotSealedError, SealedError, TamperedError
from penstock.integrations import jax as pj
from sealing.marks import KEY, NAME, NUMBER, TEXT, assert_hidden, sealing, tamper


def pytree():
    return {NAME: jnp.full(64, NUMBER), "note": TEXT, "step": 3}


def test_pytree_is_sealed_and_clear_refused(tmp_path):
    path = tmp_path / "a"
    pj.save(path, pytree(), sealing=sealing(), metadata={"of": TEXT})
    pj.save_async(tmp_path / "b", pytree(), sealing=sealing()).result()
    assert_hidden(tmp_path)
    pj.save(tmp_path / "clear", pytree())
    assert penstock.load(tmp_path / "clear")["note"] == TEXT
    for like in (None, pytree()):
        assert pj.load(path, like, identities=[KEY])["note"] == TEXT
        with pytest.raises(SealedError):
            pj.load(path, like)
        with pytest.raises(NotSealedError):
            pj.load(tmp_path / "clear", like, identities=[KEY])
    tamper(path)
    with pytest.raises(TamperedError):
        pj.load(path, pytree(), identities=[KEY])


def test_steps_are_sealed_and_tampering_leads_to_no_older_one(tmp_path):
    keys = {"sealing": sealing(), "identities": [KEY]}
    with pj.Checkpoints(tmp_path / "run", **keys) as checkpoints:
        checkpoints.save(1, pytree())
        checkpoints.save_async(2, pytree())
        checkpoints.wait()
        assert_hidden(tmp_path)
        assert checkpoints.resume(pytree())[0] == 2
        tamper(checkpoints.store.path(2))
        with pytest.raises(TamperedError):
            checkpoints.resume(pytree())
        with pytest.raises(TamperedError):
            checkpoints.load(like=pytree())
        assert checkpoints.steps() == [1, 2]
        shutil.rmtree(checkpoints.store.path(2))
        pj.save(checkpoints.store.path(2), pytree(), step=2)
        with pytest.raises(NotSealedError):
            checkpoints.resume(pytree())


PROCESS = textwrap.dedent("""
    import sys
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    root, port, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, rank)
    from penstock.errors import RankError
    from penstock.integrations import jax as pj
    from sealing.marks import KEY, NAME, NUMBER, TEXT, sealing
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("d",)), PartitionSpec("d"))
    whole = np.full(64, NUMBER, "float32")
    array = jax.make_array_from_callback(whole.shape, sharding, lambda index: whole[index])
    pytree = {NAME: array, "note": TEXT}
    with pj.Checkpoints(f"{root}/run", sealing=sealing(), identities=[KEY]) as checkpoints:
        checkpoints.save(1, pytree)
        checkpoints.save_async(2, pytree)
        step, found = checkpoints.resume(pytree)
        assert step == 2 and found["note"] == TEXT
    try:
        pj.save(f"{root}/mixed", pytree, sealing=sealing() if rank else None)
    except RankError as error:
        assert "differ in sealing= or sign=" in str(error), error
    else:
        raise AssertionError("ranks that differ have saved")
""")


def test_processes_seal_one_checkpoint(tmp_path):
    import os
    import subprocess
    import sys

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path), str(port), str(rank)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for process in processes:
        _, told = process.communicate(timeout=120)
        assert process.returncode == 0, told
    assert_hidden(tmp_path)
    assert not (tmp_path / "mixed" / "manifest.json").exists()
