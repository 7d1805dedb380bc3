"""Plug-ins that sign what they save, and take nothing that no accepted key has signed.

Each refuses a checkpoint with exchanged bytes, one that nobody or another key has signed, and one
of the framework's own, and goes back to no older one.
"""

from __future__ import annotations

import contextlib
import pickle
import shutil
import subprocess

import numpy as np
import pytest

import penstock
from penstock.errors import NotSignedError, SignatureError, UnsupportedStateError
from penstock.plugin import AGAINST_KEYS, SealingKeys
from sealing.marks import KEY, NAME, NUMBER, TEXT, sealing, tamper

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:To get the last learning rate"),
]


@pytest.fixture
def keys(tmp_path):
    """The options that sign and check."""
    for name in ("key", "other"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)]
        subprocess.run(command, check=True)
    return {"sign": str(tmp_path / "key"), "signed_by": str(tmp_path / "key.pub")}


@pytest.fixture
def other(tmp_path, keys):
    """The option that takes another key alone."""
    return {"signed_by": str(tmp_path / "other.pub")}


def unsigned(path):
    """Takes the signatures from below a directory."""
    for file in [*path.rglob("signed.*"), *path.rglob("signature.*")]:
        file.unlink()


def test_errors_of_signatures_lead_to_no_older_checkpoint():
    assert issubclass(NotSignedError, AGAINST_KEYS)
    assert not issubclass(SignatureError, penstock.errors.CorruptCheckpointError)


def test_a_foreign_checkpoint_is_not_signed(keys):
    checked = SealingKeys.of(signed_by=keys["signed_by"])
    assert checked.refuses_others
    assert not checked.is_demanded
    with pytest.raises(NotSignedError, match="signed_by="):
        checked.refuse_clear("a", "a checkpoint of another library")
    with pytest.raises(UnsupportedStateError, match="sign="):
        SealingKeys.of(sign=keys["sign"]).refuse_signing("a", "something has no signature")


@contextlib.contextmanager
def of_dcp(text):
    """DCP keeps the text of an error, in an error of its own."""
    from torch.distributed.checkpoint.api import CheckpointException

    with pytest.raises((SignatureError, CheckpointException), match=text):
        yield


@pytest.mark.parametrize("seals", [False, True])
def test_dcp_signs_and_checks(tmp_path, keys, other, seals):
    import torch.distributed.checkpoint as dcp

    from penstock.integrations.dcp import StorageReader, StorageWriter, enable

    sealed = {"sealing": sealing(), "identities": [KEY]} if seals else {}
    opened = {"identities": [KEY]} if seals else {}
    saved = {NAME: torch.full((3000,), NUMBER), "note": TEXT}

    def blank():
        return {NAME: torch.zeros(3000), "note": ""}

    path, theirs = tmp_path / "a", tmp_path / "theirs"
    dcp.save(saved, checkpoint_id=theirs, no_dist=True)
    with enable(**keys, **sealed):
        dcp.save(saved, checkpoint_id=path, no_dist=True)
        dcp.load(found := blank(), checkpoint_id=path, no_dist=True)
        assert found["note"] == TEXT
        # A mark of DCP's own format beside it makes it no checkpoint of DCP's.
        (path / ".metadata").write_bytes((theirs / ".metadata").read_bytes())
        dcp.load(blank(), checkpoint_id=path, no_dist=True)
        if not seals:
            with of_dcp("nobody has signed"):
                dcp.load(blank(), checkpoint_id=theirs, no_dist=True)
    with of_dcp("none of the expected keys"):
        reader = StorageReader(path, **opened, **other)
        dcp.load(blank(), storage_reader=reader, no_dist=True)
    tamper(path)
    if not seals:
        with of_dcp("signed"):
            reader = StorageReader(path, signed_by=keys["signed_by"])
            dcp.load(blank(), storage_reader=reader, no_dist=True)
    writer = StorageWriter(path, sign=keys["sign"], sealing=sealed.get("sealing"))
    with pytest.raises((UnsupportedStateError, penstock.errors.CannotSealError), match="THREAD"):
        pickle.dumps(writer)


def save_by_dcp(path, keys, is_alike):
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from penstock.integrations.dcp import enable

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    own = {"weight": distribute_tensor(torch.full((4000,), NUMBER), mesh, [Shard(0)])}
    given = keys if is_alike or dist.get_rank() == 0 else {"signed_by": keys["signed_by"]}
    with enable(**given):
        try:
            dcp.save(own, checkpoint_id=path)
        except CheckpointException as error:
            return str(error)
        dcp.load({"weight": torch.zeros(4000)}, checkpoint_id=path)
    return "done"


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="this PyTorch has no gloo")
def test_ranks_of_dcp_sign_together(jobs, tmp_path, keys):
    path = tmp_path / "a"
    assert jobs.of(2).call(save_by_dcp, path, keys, True) == ["done", "done"]
    penstock.load(path, signed_by=keys["signed_by"])
    # All ranks have hashed while they wrote.
    assert all(b'"blake3":' in part.read_bytes() for part in path.glob("part-*.json"))
    for told in jobs.of(2).call(save_by_dcp, tmp_path / "b", keys, False):
        assert "sign=" in told
    assert not (tmp_path / "b" / "manifest.json").exists()


def test_jax_signs_and_checks(tmp_path, keys, other):
    pytest.importorskip("jax")
    import jax.numpy as jnp

    from penstock.integrations import jax as pj

    pytree = {NAME: jnp.full(3000, NUMBER), "note": TEXT}
    path = tmp_path / "a"
    pj.save(path, pytree, sign=keys["sign"])
    pj.save_async(tmp_path / "b", pytree, sign=keys["sign"]).result()
    pj.save(tmp_path / "clear", pytree)
    for like in (None, pytree):
        for name in "ab":
            loaded = pj.load(tmp_path / name, like, signed_by=keys["signed_by"])
            assert loaded["note"] == TEXT
        with pytest.raises(SignatureError):
            pj.load(path, like, **other)
        with pytest.raises(NotSignedError):
            pj.load(tmp_path / "clear", like, signed_by=keys["signed_by"])
    tamper(path)
    with pytest.raises(SignatureError):
        pj.load(path, pytree, signed_by=keys["signed_by"])
    with pj.Checkpoints(tmp_path / "run", **keys) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, pytree)
        assert checkpoints.resume(pytree)[0] == 2
        unsigned(tmp_path / "run" / "step-0000000002")
        for call in (lambda: checkpoints.resume(pytree), lambda: checkpoints.load(like=pytree)):
            with pytest.raises(NotSignedError):
                call()
        assert checkpoints.steps() == [1, 2]


def test_lightning_signs_and_checks(tmp_path, keys, other):
    pytest.importorskip("lightning")
    from lightning.fabric import Fabric

    from penstock.integrations.lightning import PenstockIO

    def fabric(**given):
        return Fabric(accelerator="cpu", devices=1, plugins=[PenstockIO(**given)])

    path, file = str(tmp_path / "a.ckpt"), str(tmp_path / "file.ckpt")
    fabric(**keys).save(path, {NAME: torch.full((3000,), NUMBER), "note": TEXT})
    assert fabric(**keys).load(path)["note"] == TEXT
    Fabric(accelerator="cpu", devices=1).save(file, {"a": 1})
    with pytest.raises(NotSignedError):
        fabric(**keys).load(file)
    with pytest.raises(SignatureError):
        fabric(**other).load(path)
    tamper(path)
    with pytest.raises(SignatureError):
        fabric(**keys).load(path)


def test_a_run_of_lightning_goes_back_to_no_older_checkpoint(tmp_path, keys):
    pytest.importorskip("lightning")
    from integrations.lightnings import Module, fit, trainer
    from penstock.integrations.lightning import PenstockIO

    run = tmp_path / "run"
    before = fit(trainer(run, PenstockIO(**keys), epochs=2), Module())
    again = fit(trainer(run, PenstockIO(**keys), epochs=3), Module(), ckpt_path="last")
    assert min(again.losses) == max(before.losses) + 1
    newest = max(run.glob("*.ckpt"), key=lambda path: penstock.inspect(path).step)
    unsigned(newest)
    with pytest.raises(NotSignedError):
        fit(trainer(run, PenstockIO(**keys), epochs=4), Module(), ckpt_path="last")
    assert newest.exists()


def test_accelerate_signs_and_checks(tmp_path, keys, other):
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from penstock.integrations.accelerate import attach

    def begun(name="run", attaches=True, **given):
        project = ProjectConfiguration(
            project_dir=str(tmp_path / name), automatic_checkpoint_naming=True
        )
        accelerator = Accelerator(cpu=True, project_config=project)
        model = torch.nn.Linear(64, 64)
        accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        return attach(accelerator, **given) if attaches else accelerator

    accelerator = begun(**keys)
    first, newest = (accelerator.save_state() for _ in range(2))
    begun(**keys).load_state()
    with pytest.raises(SignatureError):
        begun(**other).load_state()
    tamper(newest)
    with pytest.raises(SignatureError):
        begun(**keys).load_state()
    unsigned(newest)
    with pytest.raises(NotSignedError):
        begun(**keys).load_state()
    begun(**keys).load_state(str(first))
    shutil.rmtree(newest)
    shutil.copytree(begun("theirs", attaches=False).save_state(), newest)
    with pytest.raises(NotSignedError):
        begun(**keys).load_state(str(newest))
    accelerator.register_save_state_pre_hook(lambda models, weights, path: None)
    with pytest.raises(UnsupportedStateError, match="hooks"):
        accelerator.save_state()


def test_ray_signs_and_checks(tmp_path, keys, other):
    pytest.importorskip("ray")
    import ray.train
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from penstock.integrations import ray as pr

    def trained(steps, sign=keys["sign"], signed_by=keys["signed_by"]):
        found = []

        def train():
            training = penstock.Training(w=np.full(3000, NUMBER), count=0)
            resumed = pr.resume(training, storage_path=tmp_path / "runs", signed_by=signed_by)
            found.append(resumed)
            for step in range((resumed or 0) + 1, steps + 1):
                training.count = step
                pr.report({}, training, step=step, storage_path=tmp_path / "runs", sign=sign)

        DataParallelTrainer(
            train,
            scaling_config=ray.train.ScalingConfig(num_workers=0),
            run_config=ray.train.RunConfig(name="run", storage_path=str(tmp_path / "runs")),
        ).fit()
        return found[0]

    trained(2)
    assert trained(3) == 2
    newest = max((tmp_path / "runs" / "run").glob("penstock-*"))
    with pytest.raises(SignatureError):
        trained(3, **other)
    tamper(newest)
    with pytest.raises(SignatureError):
        trained(3)
    unsigned(newest)
    with pytest.raises(NotSignedError):
        trained(3)
    assert newest.exists()


def test_torchtitan_signs_and_checks(tmp_path, keys, other):
    pytest.importorskip("torchtitan")
    from titan import begun, end, trained

    given = {name: [value] for name, value in keys.items()}
    folder = tmp_path / "run"
    trained(folder, 4, async_mode="async", **given)
    run = begun(folder, **given)
    assert run.checkpointer.load(step=-1)
    end(run)
    store = penstock.CheckpointStore(folder / "checkpoint")
    with pytest.raises(SignatureError):
        trained(folder, 4, signed_by=[other["signed_by"]])
    unsigned(folder)
    with pytest.raises(NotSignedError):
        trained(folder, 4, **given)
    assert store.steps() == [2, 4]


def save_by_deepspeed(directory, keys):
    engine = _engine(keys)
    engine.save_checkpoint(directory, client_state={"note": TEXT})
    if torch.distributed.get_rank() == 0:
        with pytest.raises(UnsupportedStateError, match="outside of a tag"):
            engine.save_16bit_model(f"{directory}-whole")
    engine.destroy()


def load_by_deepspeed(directory, keys):
    engine = _engine(keys)
    _, client_state = engine.load_checkpoint(directory)
    assert client_state["note"] == TEXT
    engine.destroy()


def _engine(keys):
    from integrations.deepspeeds import attach, config_of, deepspeed_here

    deepspeed = deepspeed_here()
    model = torch.nn.Sequential(torch.nn.Linear(16, 16))
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config_of(2, "fp32")
    )
    attach(engine, **keys)
    return engine


@pytest.mark.slow
def test_deepspeed_signs_and_checks(jobs, tmp_path, keys, other):
    pytest.importorskip("deepspeed")
    ranks, path = jobs.of(2), str(tmp_path / "run")
    ranks.call(save_by_deepspeed, path, keys)
    ranks.call(load_by_deepspeed, path, keys)
    with pytest.raises((SignatureError, penstock.errors.RankError)):
        ranks.call(load_by_deepspeed, path, other)
    from penstock.integrations.deepspeed.checkpoint_engine import to_torch

    with pytest.raises(SignatureError):
        to_torch(path, tmp_path / "files", **other)
    to_torch(path, tmp_path / "files2", signed_by=keys["signed_by"])
    unsigned(tmp_path / "run")
    with pytest.raises((NotSignedError, penstock.errors.RankError)):
        ranks.call(load_by_deepspeed, path, keys)
