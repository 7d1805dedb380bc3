"""DCP's saves and loads of sealed checkpoints."""

from __future__ import annotations

import contextlib

import pytest

import penstock
from penstock.errors import CannotSealError, NotSealedError, SealedError, TamperedError

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402

from penstock.integrations.dcp import StorageReader, StorageWriter, enable  # noqa: E402
from sealing.marks import (  # noqa: E402
    KEY,
    NAME,
    NUMBER,
    TEXT,
    assert_hidden,
    sealing,
    tamper,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def state(number=NUMBER):
    tensor = torch.full((3000,), number)
    return {"model": {NAME: tensor, "twin": [tensor[:10]]}, "note": TEXT, "step": 7}


def empty():
    return {"model": {NAME: torch.zeros(3000), "twin": [torch.zeros(10)]}, "note": "", "step": 0}


@contextlib.contextmanager
def raises(kind):
    """Expects an error within the `CheckpointException` of DCP, which may keep only its text."""
    texts = {
        SealedError: "is sealed",
        NotSealedError: "a sealed checkpoint is demanded|a sealed one is demanded",
        TamperedError: "not the one that was sealed",
        CannotSealError: "seals nothing",
    }
    with pytest.raises((kind, CheckpointException), match=texts[kind]):
        yield


def test_writer_and_reader_seal_everything(tmp_path):
    path = tmp_path / "step"
    dcp.save(state(), storage_writer=StorageWriter(path, sealing=sealing()), no_dist=True)
    assert_hidden(path)
    found = empty()
    dcp.load(found, storage_reader=StorageReader(path, identities=[KEY]), no_dist=True)
    assert found["note"] == TEXT
    assert found["step"] == 7
    assert torch.equal(found["model"][NAME], state()["model"][NAME])
    assert penstock.load(path, identities=[KEY])["note"] == TEXT
    with raises(SealedError):
        dcp.load(empty(), storage_reader=StorageReader(path), no_dist=True)
    tamper(path)
    with raises(TamperedError):
        dcp.load(empty(), storage_reader=StorageReader(path, identities=[KEY]), no_dist=True)


def test_reader_with_identities_refuses_a_clear_checkpoint(tmp_path):
    dcp.save(state(), storage_writer=StorageWriter(tmp_path / "step"), no_dist=True)
    with raises(NotSealedError):
        dcp.load(
            empty(), storage_reader=StorageReader(tmp_path / "step", identities=[KEY]), no_dist=True
        )


def test_enabled_saves_are_sealed_and_clear_ones_refused(tmp_path, monkeypatch):
    theirs = tmp_path / "theirs"
    dcp.save(state(), checkpoint_id=theirs, no_dist=True)
    with enable(sealing=sealing(), identities=[KEY], file_system_writer=True):
        dcp.save(state(), checkpoint_id=tmp_path / "a", no_dist=True)
        dcp.save(state(), storage_writer=dcp.FileSystemWriter(tmp_path / "b"), no_dist=True)
        for name in "ab":
            assert_hidden(tmp_path / name)
            found = empty()
            dcp.load(found, storage_reader=dcp.FileSystemReader(tmp_path / name), no_dist=True)
            assert found["note"] == TEXT
        with raises(NotSealedError):
            dcp.load(empty(), checkpoint_id=theirs, no_dist=True)
        # A writer to the storage can put the mark of DCP's own format into a directory.
        (tmp_path / "a" / ".metadata").write_bytes((theirs / ".metadata").read_bytes())
        dcp.load(found := empty(), checkpoint_id=tmp_path / "a", no_dist=True)
        assert found["note"] == TEXT
        with raises(CannotSealError):
            dcp.save(state(), checkpoint_id="memory://bucket/a", no_dist=True)
    with enable(sealing=sealing()), raises(SealedError):
        dcp.load(empty(), checkpoint_id=tmp_path / "b", no_dist=True)


def test_writer_that_seals_is_not_sent_to_another_process(tmp_path):
    import pickle

    with pytest.raises(CannotSealError, match="THREAD"):
        pickle.dumps(StorageWriter(tmp_path, sealing=sealing()))


def _save_together(path, seals, background):
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    own = {"weight": distribute_tensor(torch.full((4000,), NUMBER), mesh, [Shard(0)]), NAME: TEXT}
    keys = {"sealing": sealing()} if seals == "all" or seals == str(rank) else {}
    with enable(**keys, identities=[KEY]):
        try:
            if background:
                dcp.async_save(own, checkpoint_id=path).result()
            else:
                dcp.save(own, checkpoint_id=path)
        except CheckpointException as error:
            # It cannot be pickled.
            return str(error)
        found = {"weight": torch.zeros(4000), NAME: ""}
        dcp.load(found, checkpoint_id=path)
    assert found[NAME] == TEXT
    assert torch.equal(found["weight"], torch.full((4000,), NUMBER))
    return "done"


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
def test_ranks_seal_one_checkpoint_and_differ_in_nothing(tmp_path):
    from contextlib import closing

    from ranks import Job

    with closing(Job(2)) as job:
        for name in "ab":
            told = job.call(_save_together, str(tmp_path / name), "all", name == "b")
            assert told == ["done", "done"]
        for seals in ("0", "1"):
            for told in job.call(_save_together, str(tmp_path / seals), seals, False):
                assert "differ in sealing= or sign=" in told
            assert not (tmp_path / seals / "manifest.json").exists()
    assert_hidden(tmp_path / "a")
    assert_hidden(tmp_path / "b")
