"""Megatron-Core's saves and loads of sealed and signed checkpoints."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402

import penstock  # noqa: E402
from megatrons import assert_loaded, load, queue, save, state, strategy  # noqa: E402
from penstock.errors import (  # noqa: E402
    CannotSealError,
    KeyFileError,
    SealedError,
    WrongKeyError,
)
from penstock.integrations.megatron import (  # noqa: E402
    LoadStrategy,
    SaveStrategy,
    agreement,
    clear_files,
    enable,
)
from sealing.marks import KEY, NAME, NUMBER, OTHER, TEXT, assert_hidden, sealing, tamper  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

SECRET = (b"layers", b"embedding", b"gated", b"model")
"""Names in the state; a file in the clear has them. Base64 has shorter ones by chance."""


def marked(tensor_parallel, **settings):
    """The state of `megatrons`, with marks in the common state, an object and a tensor."""
    found = state(tensor_parallel, **settings)
    is_blank = settings.get("is_blank", False)
    found["args"] |= {NAME: TEXT, "number": NUMBER}
    found["model"][NAME] = ShardedTensor.from_rank_offsets(
        NAME,
        torch.full((3000,), 0.0 if is_blank else NUMBER),
        replica_id=(0, 0, torch.distributed.get_rank()),
    )
    return found


def assert_marked(found, tensor_parallel, step=0):
    assert found["args"].pop(NAME) == TEXT
    assert found["args"].pop("number") == NUMBER
    assert torch.equal(found["model"].pop(NAME), torch.full((3000,), NUMBER))
    assert_loaded(found, tensor_parallel, step)


def keys(**further):
    return {"sealing": sealing(), "identities": [KEY]} | further


def outcome(call, *arguments, **named):
    """The error of a call on this rank, as rank and kind; those of Megatron-Core do not travel."""
    try:
        call(*arguments, **named)
    except Exception as error:
        return type(error).__name__, str(error)
    return "done", ""


def sealed_round_trip(path, tensor_parallel, is_parallel, background):
    with enable(**keys()):
        how = strategy(is_parallel=is_parallel)
        if background:
            calls = queue()
            saved = marked(tensor_parallel)
            calls.schedule_async_request(save(saved, path, how, async_sharded_save=True))
            saved["args"][NAME] = "changed after the call"
            calls.maybe_finalize_async_calls(blocking=True)
            calls.close()
        else:
            save(marked(tensor_parallel), path, how)
        found = load(marked(tensor_parallel, is_blank=True), path, strict="raise_all")
        assert_marked(found, tensor_parallel)
        # Programs ask for it apart: Megatron-LM takes its arguments from there.
        common = dist_checkpointing.load_common_state_dict(str(path))
        assert common["args"][NAME] == TEXT
        metadata = dist_checkpointing.load_tensors_metadata(str(path))
        assert metadata[NAME].global_shape == (3000,)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("background", [False, True])
def test_everything_of_a_save_is_sealed(jobs, disk_path, ranks, background):
    path = disk_path / "iter_0000001"
    jobs.of(ranks).call(sealed_round_trip, path, ranks, ranks > 1, background)
    assert_hidden(path, *SECRET)
    assert not (path / "common.pt").exists()
    assert penstock.verify(path).ok
    assert penstock.inspect(path).recipients
    opened = penstock.load(path, identities=[KEY])
    assert opened["tensors"][NAME][0] == pytest.approx(NUMBER)
    with pytest.raises(SealedError):
        penstock.load(path)


def save_sealed(path, tensor_parallel, step=0, **further):
    with enable(**keys(**further)):
        save(marked(tensor_parallel, step=step), path, strategy(is_parallel=True))


def load_sealed(path, tensor_parallel, identities=(KEY,)):
    """With strategies instead of `enable`, which has to find the common state without it."""
    into = marked(tensor_parallel, is_blank=True) | {"rng": []}
    found = load(into, path, LoadStrategy(identities=list(identities)))
    found["rng"] = state(tensor_parallel)["rng"]
    assert_marked(found, tensor_parallel)


@pytest.mark.parametrize(("ranks", "later"), [(2, 1), (1, 2)])
def test_a_sealed_checkpoint_loads_at_other_parallel_sizes(jobs, disk_path, ranks, later):
    path = disk_path / "iter_0000001"
    jobs.of(ranks).call(save_sealed, path, ranks)
    jobs.of(later).call(load_sealed, path, later)


def refused(path, given):
    def loads():
        with enable(**given):
            load(marked(1, is_blank=True), path)

    def common():
        with enable(**given):
            dist_checkpointing.load_common_state_dict(str(path))

    return outcome(loads)[0], outcome(common)[0]


def save_clear(path, how=None):
    if how == "own":
        save(marked(1), path)
        return
    with enable():
        save(marked(1), path)


def test_wrong_keys_and_clear_checkpoints_are_refused_on_all_ranks(jobs, disk_path):
    path, clear, own = (disk_path / name for name in ("sealed", "clear", "own"))
    job = jobs.of(2)
    job.call(save_sealed, path, 1)
    for kind, given in ((WrongKeyError, {"identities": [OTHER]}), (SealedError, {})):
        for told in job.call(refused, path, given):
            assert told == (kind.__name__, kind.__name__)
    job.call(save_clear, clear)
    job.call(save_clear, own, "own")
    for there in (clear, own):
        for given in ({"identities": [KEY]}, {"sealing": sealing()}):
            if "sealing" in given:
                # A `Sealing` is not sent to other processes.
                told = job.call(refused_by_sealing, there)
            else:
                told = job.call(refused, there, given)
            assert told == [("NotSealedError", "NotSealedError")] * 2, (there, given)
    # Somebody who writes to the storage puts a clear common state, and files of DCP, beside it.
    (path / "common.pt").write_bytes((clear / "common.pt").read_bytes())
    (path / ".metadata").write_bytes((own / ".metadata").read_bytes())
    job.call(load_sealed, path, 1)


def refused_by_sealing(path):
    return refused(path, {"sealing": sealing()})


def test_a_tampered_checkpoint_is_refused(jobs, disk_path):
    path = disk_path / "iter_0000001"
    job = jobs.of(2)
    job.call(save_sealed, path, 1)
    tamper(path)
    told = job.call(refused, path, {"identities": [KEY]})
    # The rank that reads the chunk raises, and the other one learns of it.
    loads = {on_rank[0] for on_rank in told}
    assert "TamperedError" in loads
    assert loads <= {"TamperedError", "RankError"}


def test_a_clear_checkpoint_is_replaced_by_a_sealed_one_without_a_rest(jobs, disk_path):
    job = jobs.of(2)
    for how in (None, "own"):
        path = disk_path / f"of-{how}"
        job.call(save_clear, path, how)
        assert (path / "metadata.json").exists()
        job.call(save_sealed, path, 1)
        assert_hidden(path, *SECRET)
        job.call(load_sealed, path, 1)


def lost_piece(path):
    saved = {
        "w": ShardedTensor.from_rank_offsets(
            "w", torch.ones(2, 2), (0, torch.distributed.get_rank(), 3)
        )
    }
    with enable(**keys()):
        return outcome(save, saved, path, validate_access_integrity=False)


def test_pieces_are_compared_although_parts_are_sealed(jobs, disk_path):
    path = disk_path / "iter_0000001"
    for kind, text in jobs.of(2).call(lost_piece, path):
        assert kind == "RankError"
        assert "w is not whole" in text
    assert not (path / "manifest.json").exists()


def differing(path):
    given = keys() if torch.distributed.get_rank() == 0 else {"identities": [KEY]}
    with enable(**given):
        return outcome(save, marked(1), path)


def test_ranks_that_differ_in_keys_save_nothing(jobs, disk_path):
    path = disk_path / "iter_0000001"
    for kind, text in jobs.of(2).call(differing, path):
        assert kind == "RankError"
        assert "sealing=" in text
    assert not (path / "manifest.json").exists()


def save_by_name(path, early):
    """`save` as a module has it that imported it before a strategy was made."""
    with enable():
        pass
    os.makedirs(path, exist_ok=True)
    how = SaveStrategy(sealing=sealing())
    unwrapped = dist_checkpointing.save.__wrapped__ if early else dist_checkpointing.save
    return outcome(unwrapped, marked(1), str(path), how)


@pytest.mark.parametrize("early", [False, True])
def test_strategies_seal_without_enable(jobs, disk_path, early):
    path = disk_path / "iter_0000001"
    (told,) = jobs.of(1).call(save_by_name, path, early)
    if not early:
        assert told == ("done", "")
        assert_hidden(path, *SECRET)
        jobs.of(1).call(load_sealed, path, 1)
    else:
        # Megatron-Core 0.19 has the common state among the objects.
        assert told[0] in ("CannotSealError", "done")
        assert not (path / "common.pt").exists()


def test_keys_of_the_environment_seal(jobs, disk_path, monkeypatch):
    (disk_path / "keys.txt").write_text(KEY)
    for given in ({}, {"identities": [KEY]}):
        path = disk_path / f"iter_{len(given)}"
        jobs.of(1).call(save_by_environment, path, str(disk_path / "keys.txt"), given)
        assert_hidden(path, *SECRET)
    monkeypatch.setenv("PENSTOCK_RECIPIENTS", KEY)
    with pytest.raises(KeyFileError, match="secret") as caught:
        enable()
    assert KEY not in str(caught.value)


def save_by_environment(path, file, given):
    os.environ |= {"PENSTOCK_RECIPIENTS": file, "PENSTOCK_IDENTITIES": file}
    try:
        with enable(**given):
            save(marked(1), path)
            assert_marked(load(marked(1, is_blank=True), path), 1)
    finally:
        del os.environ["PENSTOCK_RECIPIENTS"], os.environ["PENSTOCK_IDENTITIES"]


def at_url():
    with enable(**keys()):
        own = strategy()
        saves = outcome(own.save, {}, "msc://bucket/iter_0000001")
        loads = outcome(
            dist_checkpointing.strategies.torch.TorchDistLoadShardedStrategy().load,
            {},
            "msc://bucket/iter_0000001",
        )
    return saves[0], loads[0]


def test_urls_of_megatron_are_refused(jobs):
    assert jobs.of(1).call(at_url) == [("CannotSealError", "NotSealedError")]


CHECKPOINTING = """
import types

def get_args():
    return types.SimpleNamespace(**SETTINGS)

def save_checkpoint():
    maybe_save_dataloader_state(None, 1, None)
    WRITTEN.append("checkpoint")

def maybe_save_dataloader_state(*given):
    WRITTEN.append("data loader")

INNER = {"save_checkpoint": save_checkpoint}
"""
"""The shape of Megatron-LM's module."""


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"ckpt_format": "torch"}, "--ckpt-format torch"),
        ({"ckpt_format": "torch_dcp"}, "dcp.enable"),
        ({"non_persistent_ckpt_type": "local"}, "local"),
        ({"dataloader_save": "/data"}, "--dataloader-save"),
        ({}, None),
    ],
)
@pytest.mark.parametrize("is_imported", [False, True])
def test_what_megatron_lm_writes_in_the_clear_is_refused(
    monkeypatch, tmp_path, settings, named, is_imported
):
    written = []
    name = "checkpointing_of_a_test"
    (tmp_path / f"{name}.py").write_text(CHECKPOINTING)
    monkeypatch.setattr(clear_files, "MODULE", name)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    if is_imported:
        importlib.import_module(name)
    # As in `python -m penstock.megatron`, before the program imports anything.
    with enable(sealing=sealing()):
        module = importlib.import_module(name)
        module.SETTINGS = {"ckpt_format": "torch_dist", "save": "run"} | settings
        module.WRITTEN = written
        # A module that imported it by its name, before or after.
        for save in (module.save_checkpoint, module.INNER["save_checkpoint"]):
            if named is None:
                save()
            else:
                with pytest.raises(CannotSealError, match=named):
                    save()
    assert bool(written) == (named is None)
    assert module.save_checkpoint is module.INNER["save_checkpoint"]
    assert clear_files._finder not in sys.meta_path
    monkeypatch.delitem(sys.modules, name)
    module = importlib.import_module(name)
    assert module.save_checkpoint is module.INNER["save_checkpoint"]


# Signatures.


def key_of(directory, name="key"):
    path = directory / name
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True)
    return str(path)


def signed_round_trip(path, key, seals):
    given = keys() if seals else {}
    with enable(**given, sign=key, signed_by=f"{key}.pub"):
        save(marked(1), path)
        assert_marked(load(marked(1, is_blank=True), path, strict="raise_all"), 1)


@pytest.mark.parametrize("seals", [False, True])
def test_saves_sign_and_loads_check(jobs, disk_path, seals):
    path, key, other = disk_path / "iter_0000001", key_of(disk_path), key_of(disk_path, "other")
    job = jobs.of(2)
    job.call(signed_round_trip, path, key, seals)
    # Files that are written for other programs after the commit are not signed.
    problems = penstock.verify(path, signed_by=f"{key}.pub").problems
    after = {".metadata", "metadata.json"} if seals else {".metadata"}
    assert {problem.file for problem in problems} == after
    given = {"identities": [KEY]} if seals else {}
    told = job.call(refused, path, {"signed_by": f"{other}.pub"} | given)
    assert told == [("SignatureError", "SignatureError")] * 2
    unsigned = disk_path / "unsigned"
    job.call(save_clear, unsigned)
    told = job.call(refused, unsigned, {"signed_by": f"{key}.pub"})
    assert told == [("NotSignedError", "NotSignedError")] * 2


def test_the_common_state_of_a_signed_checkpoint_is_checked(jobs, disk_path):
    path, key = disk_path / "iter_0000001", key_of(disk_path)
    job = jobs.of(1)
    job.call(save_clear, path)
    penstock.sign(path, key)
    job.call(load_signed, path, f"{key}.pub")
    # Megatron-Core itself reads the copy; a signed load reads what was signed.
    for kept in (one for one in path.iterdir() if "common" in one.name):
        kept.write_bytes(kept.read_bytes().replace(TEXT.encode(), TEXT.upper().encode()))
    told = job.call(refused, path, {"signed_by": f"{key}.pub"})
    # From 0.19 on it is an object, too, which lies in a signed shard, and the file is not read.
    tensors = penstock.inspect(path).tensors
    is_object = any("common_state" in tensor.name for tensor in tensors)
    assert told[0][1] == ("done" if is_object else "CorruptCheckpointError")


def save_beside_an_attacker(path, key):
    """Signs while somebody puts another common state into the directory."""
    other = {"args": {NAME: "of an attacker"}}
    entered = agreement.start_strategy

    def attacked():
        torch.save(other, os.path.join(path, "common.pt"))
        entered()

    with enable(sign=key, signed_by=f"{key}.pub"), pytest.MonkeyPatch.context() as patches:
        # After Megatron-Core has written its own, where it does, and before the strategy saves.
        patches.setattr(agreement, "start_strategy", attacked)
        save(marked(1), path)
        assert_marked(load(marked(1, is_blank=True), path), 1)


def test_a_save_signs_no_common_state_of_others(jobs, disk_path):
    path, key = disk_path / "iter_0000001", key_of(disk_path)
    jobs.of(1).call(save_beside_an_attacker, path, key)
    penstock.load(path, signed_by=f"{key}.pub")
    # The file of the attacker stays under its name, where Megatron-Core alone would read it, or
    # the signed one has taken its place.
    problems = {one.file for one in penstock.verify(path, signed_by=f"{key}.pub").problems}
    is_ours = torch.load(path / "common.pt", weights_only=True)["args"][NAME] == TEXT
    assert is_ours == ("common.pt" not in problems)


def load_signed(path, public):
    with enable(signed_by=public):
        assert_marked(load(marked(1, is_blank=True), path), 1)


# Conversion.


def load_own(path):
    """Megatron-Core's own load, without the plug-in."""
    into = marked(1, is_blank=True) | {"rng": []}
    found = load(into, path)
    found["rng"] = state(1)["rng"]
    assert_marked(found, 1)


def test_a_sealed_checkpoint_is_converted_to_the_format_of_megatron(jobs, disk_path):
    path, clear = disk_path / "sealed", disk_path / "clear"
    jobs.of(1).call(save_sealed, path, 1)
    with pytest.raises(SealedError):
        penstock.convert(path, clear, to="megatron")
    penstock.convert(path, clear, to="megatron", unseal=True, identities=[KEY])
    jobs.of(1).call(load_own, clear)
    with pytest.raises(CannotSealError):
        penstock.convert(clear, disk_path / "again", sealing=sealing())
