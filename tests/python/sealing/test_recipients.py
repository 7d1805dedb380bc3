"""Recipients of a checkpoint are added, removed and replaced by its manifest alone."""

import errno
import json
import os

import numpy as np
import pytest

import penstock
from conftest import run_command
from format_reader import digest
from penstock import Sealing, sealing
from penstock.errors import (
    CheckpointNotFoundError,
    CorruptCheckpointError,
    KeyFileError,
    NotSealedError,
    StorageError,
    TamperedError,
    WrongKeyError,
)
from penstock.plugin import OpenCheckpoint
from penstock.sealing.unsealing import Unsealing

pytestmark = pytest.mark.quick

STATE = {"w": np.arange(6.0), "step": 3}


@pytest.fixture
def home(tmp_path):
    """Three keys, and a checkpoint sealed for the first."""
    for name in ("me", "you", "them"):
        sealing.generate(tmp_path / name)
    sealing.generate(tmp_path / "team", kind="key-file")
    penstock.save(tmp_path / "ckpt", STATE, sealing=Sealing([tmp_path / "me"]))
    return tmp_path


def name_of(path):
    [name] = Sealing([path]).recipients
    return name


def opens(home, name):
    try:
        loaded = penstock.load(home / "ckpt", identities=[home / name])
    except WrongKeyError:
        return False
    np.testing.assert_array_equal(loaded["w"], STATE["w"])
    return True


def files(path):
    return {
        file.name: (file.stat().st_ino, file.stat().st_mtime_ns)
        for file in path.iterdir()
        if file.name != "manifest.json"
    }


def test_recipients_are_listed_without_a_key(home):
    assert sealing.recipients(home / "ckpt") == [("age", name_of(home / "me"))]


def test_an_added_recipient_opens_and_no_data_is_touched(home):
    before = files(home / "ckpt")
    new = [home / "you", home / "team"]
    found = sealing.add_recipients(home / "ckpt", new, identities=[home / "me"])
    assert found == [
        ("age", name_of(home / "me")),
        ("age", name_of(home / "you")),
        ("key-file", name_of(home / "team")),
    ]
    assert sealing.recipients(home / "ckpt") == found
    assert all(opens(home, name) for name in ("me", "you", "team"))
    assert not opens(home, "them")
    assert files(home / "ckpt") == before
    assert penstock.verify(home / "ckpt").ok


def bytes_read():
    with open("/proc/self/io") as file:
        return int(file.readline().removeprefix("rchar: "))


def test_recipients_of_a_large_checkpoint_take_no_more_reads(home):
    (shard,) = (home / "ckpt").glob("shard-*")
    os.truncate(shard, 1 << 40)
    before = bytes_read()
    sealing.add_recipients(home / "ckpt", [home / "you"], identities=[home / "me"])
    assert bytes_read() - before < 1 << 20


def test_a_recipient_is_not_added_twice(home):
    for _ in range(2):
        found = sealing.add_recipients(home / "ckpt", [home / "me"], identities=[home / "me"])
        assert len(found) == 1
    assert opens(home, "me")


def test_a_removed_recipient_does_not_open(home):
    sealing.add_recipients(home / "ckpt", [home / "you"], identities=[home / "me"])
    sealing.remove_recipients(home / "ckpt", [name_of(home / "me")])
    assert not opens(home, "me")
    assert opens(home, "you")


def test_the_last_recipient_stays(home):
    with pytest.raises(KeyFileError, match="nobody would be left"):
        sealing.remove_recipients(home / "ckpt", name_of(home / "me"))
    with pytest.raises(KeyFileError, match=r"none of the checkpoint's"):
        sealing.remove_recipients(home / "ckpt", [name_of(home / "you")])
    assert opens(home, "me")


def test_rotation_replaces_all_recipients(home):
    sealing.add_recipients(home / "ckpt", [home / "you"], identities=[home / "me"])
    found = sealing.rotate(home / "ckpt", [home / "them"], identities=[home / "you"])
    assert found == [("age", name_of(home / "them"))]
    assert [opens(home, name) for name in ("me", "you", "them")] == [False, False, True]


def test_adding_takes_a_key_that_opens(home, monkeypatch):
    with pytest.raises(WrongKeyError):
        sealing.add_recipients(home / "ckpt", [home / "you"], identities=[home / "them"])
    with pytest.raises(KeyFileError, match="pass identities="):
        sealing.add_recipients(home / "ckpt", [home / "you"])
    monkeypatch.setenv("PENSTOCK_IDENTITIES", str(home / "me"))
    sealing.add_recipients(home / "ckpt", [home / "you"])
    assert opens(home, "you")


def forge(path, changed):
    """Changes the wraps of a manifest without a key, and makes its digest right."""
    manifest = path.read_bytes()
    wraps = json.loads(manifest)["wraps"]
    old, new = (
        json.dumps(value, separators=(",", ":")).encode() for value in (wraps, changed(wraps))
    )
    assert manifest.count(old) == 1
    text = manifest.replace(old, new)
    text = text[: text.rindex(b',"digest":')]
    path.write_bytes(text + f',"digest":"{digest(text)}"}}\n'.encode())


def test_a_wrap_of_another_key_does_not_replace_the_right_ones(home):
    """Somebody without the key adds a wrap that our identity opens, of a key of his own."""
    path = home / "ckpt" / "manifest.json"
    [forged] = json.loads(Sealing([home / "you"]).wrap_new().wraps())
    forge(path, lambda wraps: [*wraps, forged])
    before = path.read_bytes()
    for change in (sealing.rotate, sealing.add_recipients):
        with pytest.raises((WrongKeyError, TamperedError)):
            change(home / "ckpt", [home / "them"], identities=[home / "you"])
    assert path.read_bytes() == before
    assert opens(home, "me")


def test_a_checkpoint_in_use_is_not_changed(home):
    opened = OpenCheckpoint(str(home / "ckpt"), unsealing=Unsealing.of([home / "me"]))
    try:
        with pytest.raises(StorageError) as caught:
            sealing.add_recipients(home / "ckpt", [home / "you"], identities=[home / "me"])
        assert caught.value.errno == errno.EBUSY
    finally:
        opened.release()
    sealing.add_recipients(home / "ckpt", [home / "you"], identities=[home / "me"])


def test_a_temporary_file_of_a_dead_process_is_replaced(home):
    identity = penstock.inspect(home / "ckpt").id
    before = {file.name for file in (home / "ckpt").iterdir()}
    (home / "ckpt" / f"manifest.{identity}.tmp").write_bytes(b"half")
    sealing.add_recipients(home / "ckpt", [home / "you"], identities=[home / "me"])
    assert opens(home, "you")
    assert before == {file.name for file in (home / "ckpt").iterdir()}


def test_clear_and_missing_checkpoints_are_named(home):
    penstock.save(home / "clear", STATE)
    with pytest.raises(NotSealedError):
        sealing.recipients(home / "clear")
    with pytest.raises(NotSealedError):
        sealing.add_recipients(home / "clear", [home / "you"], identities=[home / "me"])
    with pytest.raises(CheckpointNotFoundError):
        sealing.recipients(home / "none")
    with pytest.raises(CheckpointNotFoundError):
        sealing.rotate(home / "none", [home / "you"], identities=[home / "me"])


def command(*arguments):
    return run_command(*arguments)


def test_the_commands(home):
    root = home / "store"
    store = penstock.CheckpointStore(root, sealing=Sealing([home / "me"]))
    for step in (1, 2):
        store.save(step, STATE)
    listed = json.loads(command("keys", "list", root, "--json").stdout)
    assert [len(entry["recipients"]) for entry in listed["checkpoints"]] == [1, 1]
    me, you = name_of(home / "me"), name_of(home / "you")
    added = command("keys", "add", root, "--recipient", you, "--identity", home / "me")
    assert (added.returncode, added.stderr) == (0, "")
    assert added.stdout.count(you) == 2
    removed = command("keys", "remove", root, me, "--json")
    [first, _] = json.loads(removed.stdout)["checkpoints"]
    assert first["recipients"] == [{"kind": "age", "name": you}]
    last = command("keys", "remove", root, you)
    assert last.returncode == 1
    assert "nobody would be left" in last.stderr
    rotated = command(
        "keys", "rotate", root, "--recipient", home / "team", "--identity", home / "you", "--json"
    )
    assert "key-file" in rotated.stdout
    shown = command("inspect", root, "--identity", home / "team", "--json")
    assert [tensor["name"] for tensor in json.loads(shown.stdout)["tensors"]] == ["w"]
    closed = json.loads(command("inspect", root, "--json").stdout)
    assert closed["closed"]
    assert closed["tensors"] == []
    assert command("inspect", root).returncode == 0


def test_diff_opens_the_side_that_is_sealed(home):
    penstock.save(home / "clear", STATE)
    same = command("diff", home / "ckpt", home / "clear", "--identity", home / "me", "--json")
    assert (same.returncode, same.stderr) == (0, "")
    assert json.loads(same.stdout)["tensors_compared"] == 1
    closed = command("diff", home / "ckpt", home / "clear")
    assert closed.returncode == 1
    assert "is sealed" in closed.stderr


def test_ls_tells_sealed_steps(home, monkeypatch):
    root = home / "store"
    for step, name in ((1, "me"), (2, "you")):
        store = penstock.CheckpointStore(root, sealing=Sealing([home / name]))
        store.save(step, STATE)
    penstock.CheckpointStore(root).save(3, STATE)

    def listed(*options):
        steps = json.loads(command("ls", root, "--json", *options).stdout)["steps"]
        assert {step["state"] for step in steps} == {"complete"}
        return [(step["sealed"], step["tensors"]) for step in steps]

    assert listed() == [(True, None), (True, None), (False, 1)]
    # The second step is for somebody else, and is not damaged for that.
    assert listed("--identity", home / "me") == [(True, 1), (True, None), (False, 1)]
    monkeypatch.setenv("PENSTOCK_IDENTITIES", str(home / "me"))
    assert listed() == [(True, 1), (None, None), (False, 1)]
    assert "sealed" in command("ls", root).stdout


def test_no_secret_is_taken_from_a_command_line(home):
    secret = (home / "me").read_text().splitlines()[-1]
    for option in ("--identity", "--recipient"):
        refused = command("keys", "add", home / "ckpt", option, secret)
        assert refused.returncode == 2
        assert "give the secret's file" in refused.stderr
        assert secret not in refused.stderr


def test_names_in_a_manifest_cannot_control_a_terminal(home):
    name = "age1\x1b[2J\n" * 500
    forge(
        home / "ckpt" / "manifest.json",
        lambda wraps: [{**wraps[0], "recipient": name} for _ in range(20)],
    )
    with pytest.raises(WrongKeyError) as caught:
        penstock.load(home / "ckpt", identities=[home / "you"])
    assert len(str(caught.value)) < 5000
    shown = [command(*words, home / "ckpt") for words in (("keys", "list"), ("inspect",))]
    for text in (str(caught.value), *(result.stdout for result in shown)):
        assert "\x1b" not in text
    assert all(result.returncode == 0 for result in shown)


def test_too_many_wraps_are_refused(home):
    forge(home / "ckpt" / "manifest.json", lambda wraps: wraps * 257)
    with pytest.raises((WrongKeyError, TamperedError, CorruptCheckpointError)):
        penstock.load(home / "ckpt", identities=[home / "you"])
