"""Sealed checkpoints of Lightning's Trainer and Fabric."""

from __future__ import annotations

import shutil

import pytest

import penstock
from penstock.errors import CannotSealError, NotSealedError, SealedError, TamperedError

torch = pytest.importorskip("torch")
pytest.importorskip("lightning")

from lightning.fabric import Fabric  # noqa: E402

from lightnings import Module, fit, trainer  # noqa: E402
from penstock.integrations.lightning import PenstockIO  # noqa: E402
from sealed_marks import KEY, NAME, NUMBER, TEXT, assert_hidden, sealing, tamper  # noqa: E402


def sealed_io(**options):
    return PenstockIO(sealing=sealing(), identities=[KEY], **options)


def hidden_module():
    module = Module(config=TEXT)
    module.register_buffer(NAME, torch.full((64,), NUMBER))
    return module


def test_fabric_seals_and_refuses_clear(tmp_path):
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[sealed_io()])
    path = str(tmp_path / "step.ckpt")
    fabric.save(path, {NAME: torch.full((64,), NUMBER), "note": TEXT})
    assert_hidden(tmp_path)
    assert fabric.load(path)["note"] == TEXT
    clear = str(tmp_path / "clear.ckpt")
    Fabric(accelerator="cpu", devices=1, plugins=[PenstockIO()]).save(clear, {"a": 1})
    Fabric(accelerator="cpu", devices=1).save(file := str(tmp_path / "file.ckpt"), {"a": 1})
    for one in (clear, file):
        with pytest.raises(NotSealedError):
            fabric.load(one)
    with pytest.raises(SealedError):
        Fabric(accelerator="cpu", devices=1, plugins=[PenstockIO(sealing=sealing())]).load(path)
    tamper(path)
    with pytest.raises(TamperedError):
        fabric.load(path)


def test_resumed_run_continues_from_a_sealed_checkpoint(tmp_path):
    before = fit(trainer(tmp_path, sealed_io(background=True), epochs=2), hidden_module())
    assert_hidden(tmp_path)
    again = fit(trainer(tmp_path, sealed_io(), epochs=3), hidden_module(), ckpt_path="last")
    assert min(again.losses) == max(before.losses) + 1


def test_tampering_leads_to_no_older_checkpoint(tmp_path):
    fit(trainer(tmp_path, sealed_io(), epochs=2), hidden_module())
    newest = max(tmp_path.glob("*.ckpt"), key=lambda path: penstock.inspect(path).step)
    tamper(newest)
    with pytest.raises(TamperedError):
        fit(trainer(tmp_path, sealed_io(), epochs=3), hidden_module(), ckpt_path="last")
    assert newest.exists()
    # A clear one in its place is refused as well.
    shutil.rmtree(newest)
    fit(trainer(tmp_path / "clear", PenstockIO(), epochs=2), hidden_module())
    shutil.copytree(max((tmp_path / "clear").glob("*.ckpt")), newest)
    with pytest.raises(NotSealedError):
        fit(trainer(tmp_path, sealed_io(), epochs=3), hidden_module(), ckpt_path="last")


def test_files_for_other_readers_are_refused_early(tmp_path):
    with pytest.raises(CannotSealError, match="groups="):
        sealed_io(groups={"state_dict.net": ""})
