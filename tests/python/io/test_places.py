"""Stores keep their promises on users' file systems, or name the missing feature."""

from __future__ import annotations

import errno
import os
import shutil
import warnings

import numpy as np
import pytest
import torch

import penstock
import penstock.features
import places
from penstock.doctor import examine
from penstock.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    PenstockWarning,
    ProtectedCheckpointError,
    StorageError,
)
from penstock.plugin import remove_checkpoint

STEPS = (10, 20, 30, 40, 50)
DAMAGED = 50


def state_of(step):
    return {"model": {"w": np.full(5000, step), "b": np.arange(9)}, "step": step}


def make_store(root):
    """Saves five steps, the last of which is damaged and has foreign files beside it."""
    store = penstock.CheckpointStore(root)
    for step in STEPS:
        store.save(step, state_of(step))
    last = store.path(DAMAGED)
    shard = next(name for name in os.listdir(last) if name.startswith("shard"))
    with open(os.path.join(last, shard), "r+b") as file:
        file.truncate(os.path.getsize(file.name) - 1)
    os.makedirs(os.path.join(last, "logs"))
    for name in ("trainer_state.json", "logs/events"):
        with open(os.path.join(last, name), "w") as file:
            file.write("{}")


def tree_of(path):
    return sorted(
        os.path.relpath(os.path.join(above, name), path)
        for above, below, names in os.walk(path)
        for name in (*below, *names)
    )


def save(place, store, step, **options):
    """Saves; on file systems without atomic names, by the remedy in the error."""
    if not place.renames_new:
        way_out = r"no hard links.*overwrite=True"
        with pytest.raises(StorageError, match=way_out) as refused:
            store.save(step, state_of(step), **options)
        assert refused.value.errno == errno.EINVAL
        assert "gs://" in str(refused.value)
        assert not os.path.exists(os.path.join(store.path(step), "manifest.json"))
        options["overwrite"] = True
    return store.save(step, state_of(step), **options)


def check_steps(place, store):
    assert store.load(step=20)["step"] == 20
    save(place, store, 60)
    assert np.array_equal(store.load(step=60)["model"]["w"], np.full(5000, 60))
    with pytest.raises(CheckpointExistsError):
        store.save(60, state_of(60))
    store.save(60, {"step": 61}, overwrite=True)
    assert store.load(step=60)["step"] == 61
    store.save_async(61, state_of(61), overwrite=not place.renames_new).result()
    assert penstock.verify(store.path(61)).ok
    store.protect(61)
    with pytest.raises(ProtectedCheckpointError):
        store.delete(61)
    store.unprotect(61)
    for step in (61, 60):
        store.delete(step)
        assert not os.path.exists(os.path.join(store.path(step), "manifest.json"))
        # Without locks, replaced files stay: another host may be writing them.
        assert not os.path.exists(store.path(step)) or not place.locks


def check_setting_aside(place, store):
    before = tree_of(store.path(DAMAGED))
    with pytest.warns(PenstockWarning, match="passed over"):
        assert store.load(fallback=True)["step"] == 40
    if not place.locks:
        # Another host may be saving there: the step stays until `overwrite=True`.
        with pytest.raises(CheckpointExistsError, match="overwrite=True"):
            store.save(DAMAGED, state_of(DAMAGED))
        store.save(DAMAGED, state_of(DAMAGED), overwrite=True)
        assert store.load()["step"] == DAMAGED
        return
    ((step, aside),) = store.quarantined()
    assert step == DAMAGED
    assert tree_of(aside) == before
    assert not os.path.exists(store.path(DAMAGED))
    save(place, store, DAMAGED)
    assert store.load()["step"] == DAMAGED
    assert [name for name in os.listdir(store.root) if name.endswith(".tmp")] == []


def check_a_save_of_what_is_damaged(place, store):
    if place.locks:
        store.save(DAMAGED, state_of(DAMAGED))
        assert [step for step, _ in store.quarantined()] == [DAMAGED]
        assert store.load()["step"] == DAMAGED


def check_retention(place, store):
    store.delete(DAMAGED)
    kept = penstock.CheckpointStore(store.root, keep_last=2)
    kept.save(60, state_of(60), overwrite=not place.renames_new)
    assert kept.steps() == [40, 60]
    store.sweep()
    assert store.load()["step"] == 60


def check_removal(place, store):
    path = store.path(40)
    os.mkdir(os.path.join(path, "logs"))
    for name in ("trainer_state.json", "logs/events"):
        with open(os.path.join(path, name), "w") as file:
            file.write("{}")
    remove_checkpoint(path)
    assert not os.path.exists(path)
    with pytest.raises(CheckpointNotFoundError):
        remove_checkpoint(path)


def check_tables(place, store):
    path = os.path.join(store.root, "table")
    with penstock.features.Table.create(
        path, 100, {"w": (4, "float32")}, log_bytes=1 << 20
    ) as table:
        table.update(np.arange(10), {"w": np.ones((10, 4), np.float32)})
        table.flush()
    with penstock.features.Table(path) as table:
        assert table.lookup(np.array([3]))["w"].tolist() == [[1, 1, 1, 1]]


def check_optimizers(place, store):
    from penstock.offload import AdamW

    def make():
        weight = torch.nn.Parameter(torch.ones(3000))
        return weight, AdamW([weight], directory=os.path.join(store.root, "moments"))

    if not place.links:
        with pytest.raises(StorageError, match=r"no hard links.*another one"):
            make()
        return
    weight, optimizer = make()
    weight.grad = torch.ones(3000)
    optimizer.step()
    store.save(70, {"optimizer": optimizer.state_dict()})
    optimizer.close()
    assert penstock.verify(store.path(70)).ok
    store.delete(70)


def check_exports(place, store):
    out, linked = (os.path.join(store.root, name) for name in ("exported", "linked"))
    penstock.export(store.path(10), out, key="model")
    assert any(name.endswith(".safetensors") for name in os.listdir(out))
    store.save(70, state_of(70), groups={"model": ""}, overwrite=True)
    if place.links:
        assert penstock.export(store.path(70), linked, hard_link=True).way == "hard link"
        return
    with pytest.raises(StorageError, match="leave --hard-link out"):
        penstock.export(store.path(70), linked, hard_link=True)
    assert penstock.export(store.path(70), linked).way == "copy"


CHECKS = (
    check_steps,
    check_setting_aside,
    check_a_save_of_what_is_damaged,
    check_retention,
    check_removal,
    check_tables,
    check_optimizers,
    check_exports,
)


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """Makes a store that each test copies."""
    root = tmp_path_factory.mktemp("template") / "store"
    make_store(root)
    return root


@pytest.mark.parametrize("kind", places.KINDS)
def test_a_store_keeps_its_promises_or_names_what_is_missing(tmp_path, template, kind):
    def before(directory):
        for check in CHECKS:
            shutil.copytree(template, directory / check.__name__)

    with places.place(kind, tmp_path, before) as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for check in CHECKS:
            try:
                check(place, penstock.CheckpointStore(place.path / check.__name__))
            except BaseException as error:
                error.add_note(f"{check.__name__} on {kind}")
                raise


@pytest.mark.parametrize("kind", places.KINDS)
def test_doctor_says_beforehand_what_a_file_system_lacks(tmp_path, kind):
    with places.place(kind, tmp_path, lambda _: None) as place:
        found = {one.check: one for one in examine(place.path, measures=False).findings}
        left = os.listdir(place.path)
    names = found["names"]
    wanted = "ok" if place.links else "warn" if place.renames_new else "fail"
    assert names.status == wanted
    assert ("no hard links" in names.found) == (not place.links)
    if wanted == "fail":
        assert "overwrite=True" in names.why
        assert "s3://" in names.remedy
    assert set(left) <= {"lost+found"}


def test_plug_ins_drop_what_an_image_brought_along(tmp_path):
    from accelerate import Accelerator

    from penstock.integrations.accelerate import directories as accelerate
    from penstock.integrations.lightning import directories as lightning

    def before(lower):
        for name in ("last.ckpt", "linked.ckpt", "checkpoint_1"):
            penstock.save(lower / name, state_of(1))
        theirs = lower / "checkpoint_0"
        theirs.mkdir()
        for name in ("random_states_0.pkl", "model.safetensors"):
            (theirs / name).touch()

    with places.place("overlay", tmp_path, before) as place, warnings.catch_warnings():
        warnings.simplefilter("error")
        saved, path = str(place.path / "last.penstock.ckpt"), str(place.path / "last.ckpt")
        penstock.save(saved, state_of(2))
        lightning.rename_onto(saved, path)
        assert penstock.load(path)["step"] == 2
        lightning.link(path, str(place.path / "linked.ckpt"))
        assert penstock.load(place.path / "linked.ckpt")["step"] == 2
        newest = str(place.path / "checkpoint_2")
        penstock.save(newest, state_of(2))
        accelerate.retire(newest, 1, Accelerator(cpu=True))
        left = sorted(os.listdir(place.path))
    assert left == ["checkpoint_2", "last.ckpt", "linked.ckpt"]
