"""URLs are paths: what works on a directory works in a bucket, on real servers."""

from __future__ import annotations

import datetime as dt
import json
import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner

import penstock
from buckets import ACCOUNT, ACCOUNT_KEY, serving
from conftest import run_child
from penstock.cli import cli
from penstock.errors import (
    CheckpointExistsError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    PartialCheckpointError,
    StorageError,
    UnsupportedPathError,
)
from penstock.integrations.dcp import StorageReader, StorageWriter


def state(seed=0, elements=3_000_000):
    numbers = np.random.default_rng(seed)
    return {
        "model": {"w": torch.from_numpy(numbers.standard_normal(elements).astype("f4"))},
        "b": torch.arange(7),
        "step": seed,
        "note": "x",
    }


def assert_same(loaded, expected):
    assert torch.equal(loaded["model"]["w"], expected["model"]["w"])
    assert torch.equal(loaded["b"], expected["b"])
    assert (loaded["step"], loaded["note"]) == (expected["step"], expected["note"])


def test_a_state_comes_back_bit_for_bit(place):
    url = f"{place.url}/run/step-1"
    report = penstock.save(url, state(), files={"config.json": b"{}"})
    assert (report.path, report.engine, report.device) == (url, "objects", None)
    assert_same(penstock.load(url), state())
    assert_same(penstock.load(url + "/"), state())
    assert penstock.inspect(url).bytes >= report.bytes
    assert penstock.verify(url).ok
    names = [file.name for file in penstock.inspect(url).files]
    assert any(name.endswith(".config.json") for name in names)


def test_part_of_a_state_is_had_alone_and_in_place(place):
    url = f"{place.url}/part"
    penstock.save(url, state())
    assert penstock.load(url, keys=["b"])["b"].tolist() == list(range(7))
    into = state(1)
    penstock.load(url, into=into)
    assert torch.equal(into["model"]["w"], state()["model"]["w"])


def test_one_that_is_there_is_refused_or_replaced(place):
    url = f"{place.url}/one"
    penstock.save(url, state(1))
    with pytest.raises(CheckpointExistsError):
        penstock.save(url, state(2))
    assert_same(penstock.load(url), state(1))
    penstock.save(url, state(2), overwrite=True)
    assert_same(penstock.load(url), state(2))


def test_a_store_keeps_steps_and_loads_the_newest(place):
    store = penstock.CheckpointStore(f"{place.url}/store", keep_last=2)
    for step in range(4):
        store.save(step, state(step))
    assert store.steps() == [2, 3]
    store.save_async(7, state(7)).result()
    assert store.latest() == 7
    assert_same(store.load(), state(7))
    assert_same(store.load(3), state(3))
    store.delete(3)
    assert store.steps() == [7]
    with pytest.raises(CheckpointNotFoundError):
        store.load(3)


def test_of_savers_at_once_one_wins_and_the_others_are_told(place):
    url = f"{place.url}/race"
    won, lost = [], []

    def save(seed):
        try:
            penstock.save(url, state(seed, 1000))
            won.append(seed)
        except CheckpointExistsError:
            lost.append(seed)

    threads = [threading.Thread(target=save, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 5)
    assert_same(penstock.load(url), state(won[0], 1000))


def test_what_is_damaged_is_named_and_the_rest_is_saved_here(bucket, tmp_path):
    url = f"{bucket.url}/damaged"
    penstock.save(url, state())
    (shard,) = (bucket.files / "damaged").glob("shard-*")
    damaged = bytearray(shard.read_bytes())
    damaged[5_000_000] ^= 1
    shard.write_bytes(damaged)
    with pytest.raises(CorruptCheckpointError) as raised:
        penstock.load(url)
    assert raised.value.path == url
    assert not penstock.verify(url).ok
    salvaged = penstock.salvage(url, tmp_path / "out")
    assert [one.name for one in salvaged.missing] == ["model.w"]
    assert penstock.load(tmp_path / "out", keys=["b"], allow_partial=True)["b"].tolist() == list(
        range(7)
    )
    penstock.salvage(tmp_path / "out", f"{bucket.url}/again")
    with pytest.raises(PartialCheckpointError):
        penstock.load(f"{bucket.url}/again")


def test_dcp_saves_to_a_bucket_and_loads_from_it(place):
    url = f"{place.url}/dcp"
    written = {"w": torch.randn(1000), "n": 5}
    dcp.save(written, storage_writer=StorageWriter(url), no_dist=True)
    read = {"w": torch.zeros(1000), "n": 0}
    dcp.load(read, storage_reader=StorageReader(url), no_dist=True)
    assert torch.equal(read["w"], written["w"])
    assert read["n"] == 5


def test_commands_take_urls(place):
    store = penstock.CheckpointStore(f"{place.url}/runs")
    for step in (1, 2):
        store.save(step, state(step, 1000))
    one, both = f"{place.url}/runs/step-0000000001", f"{place.url}/runs"
    for command, expected in [
        (["ls", both], "complete"),
        (["inspect", one], "model.w"),
        (["inspect", both + "/"], "newest complete step, 2"),
        (["verify", both], "good"),
        (["verify", one, "--explain"], "are whole"),
        (["scrub", both], "it was read back"),
        (["sweep", both], "nothing to sweep"),
        (["diff", one, f"{both}/step-0000000002"], "model.w"),
    ]:
        done = CliRunner().invoke(cli, command)
        assert expected in done.output, (command, done.output, done.exception)
    listed = CliRunner().invoke(cli, ["ls", both, "--json"])
    assert json.loads(listed.output)["root"] == both


def test_a_bucket_is_reached_as_it_is_said(bucket, monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    asked = []

    def credentials():
        asked.append(threading.current_thread() is threading.main_thread())
        return penstock.Credentials(
            access_key_id="key",
            secret_access_key="secret",
            expires=dt.datetime.now(dt.UTC) + dt.timedelta(hours=1),
        )

    remote = penstock.Remote(
        endpoint=bucket.endpoint, region="us-east-1", credentials=credentials, connections=4
    )
    penstock.set_remote(bucket.url, remote)
    penstock.save(f"{bucket.url}/a", state())
    assert_same(penstock.load(f"{bucket.url}/a"), state())
    assert asked == [False]


def test_a_container_is_reached_as_it_is_said(container, monkeypatch):
    for name in ("ENDPOINT", "ACCOUNT_NAME", "ACCOUNT_KEY"):
        monkeypatch.delenv(f"AZURE_STORAGE_{name}")
    penstock.set_remote(container.url, None)
    with pytest.raises(StorageError, match=r"set AZURE_STORAGE_ACCOUNT_NAME, or"):
        penstock.save(f"{container.url}/a", {"x": 1})
    key = penstock.Credentials(access_key_id=ACCOUNT, secret_access_key=ACCOUNT_KEY)
    for credentials in (key, lambda: key):
        remote = penstock.Remote(endpoint=container.endpoint, credentials=credentials)
        penstock.set_remote(container.url, remote)
        penstock.save(f"{container.url}/a", state(), overwrite=True)
        assert_same(penstock.load(f"{container.url}/a"), state())
    other = penstock.Credentials(access_key_id="other", secret_access_key=ACCOUNT_KEY)
    remote = penstock.Remote(endpoint=container.endpoint, credentials=lambda: other)
    penstock.set_remote(container.url, remote)
    with pytest.raises(StorageError, match=f"account other, and {ACCOUNT} is reached"):
        penstock.load(f"{container.url}/a")
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING",
        f"AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};BlobEndpoint={container.endpoint}",
    )
    penstock.set_remote(container.url, None)
    assert_same(penstock.load(f"{container.url}/a"), state())
    with pytest.raises(StorageError, match="no such container"):
        penstock.save("az://elsewhere/a", {"x": 1})
    token = penstock.Token(token="nobody's")
    remote = penstock.Remote(endpoint=container.endpoint, credentials=token)
    penstock.set_remote(container.url, remote)
    with pytest.raises(StorageError, match="AZURE_STORAGE_ACCOUNT_KEY"):
        penstock.load(f"{container.url}/a")


def test_steps_are_copied_to_a_container(container, tmp_path):
    mirror = penstock.Mirror(f"{container.url}/run", keep_local=1, wait="commit")
    store = penstock.CheckpointStore(tmp_path / "store", mirror=mirror)
    for step in range(3):
        store.save(step, state(step, 1000))
    assert_same(store.load(0), state(0, 1000))
    copied = penstock.CheckpointStore(f"{container.url}/run")
    assert copied.steps() == [0, 1, 2]
    assert_same(copied.load(), state(2, 1000))


def test_the_promises_of_a_container_are_found_out(container):
    done = CliRunner().invoke(cli, ["doctor", f"{container.url}/run", "--json"])
    findings = json.loads(done.output)["findings"]
    assert {one["status"] for one in findings} == {"ok"}, done.output


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://bucket", {"credentials": penstock.Token(token="x")}),
        ("gs://bucket", {"region": "eu"}),
        ("az://bucket", {"region": "eu"}),
        (
            "gs://bucket",
            {"credentials": penstock.Credentials(access_key_id="a", secret_access_key="b")},
        ),
    ],
)
def test_what_a_provider_has_no_use_for_is_refused(url, options):
    with pytest.raises(ValueError, match=r"region|credentials"):
        penstock.set_remote(url, penstock.Remote(**options))


@pytest.mark.parametrize(
    ("url", "name", "value", "words"),
    [
        ("s3://b/a", "AWS_SERVER_SIDE_ENCRYPTION", "aws:kms", "AWS_SERVER_SIDE_ENCRYPTION is not"),
        ("az://b/a", "AZURE_STORAGE_ENCRYPTION_KEY", "a2V5", "AZURE_STORAGE_ENCRYPTION_KEY is not"),
        ("gs://b/a", "GOOGLE_APPLICATION_CREDENTIALS", "/nowhere.json", "/nowhere.json"),
        ("az://b/a", "AZURE_STORAGE_CONNECTION_STRING", "AccountName=a;AccountKey=!", "Access Key"),
    ],
)
def test_what_the_environment_says_wrongly_is_named(url, name, value, words, monkeypatch):
    monkeypatch.setenv(name, value)
    penstock.set_remote(url, None)
    with pytest.raises(StorageError, match=words):
        penstock.load(url)
    monkeypatch.delenv(name)
    penstock.set_remote(url, None)


def test_a_token_with_the_end_of_a_line_ends_a_save(monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:1")
    token = penstock.Token(token="read from a file\n")
    for credentials in (token, lambda: token):
        penstock.set_remote("gs://bucket", penstock.Remote(credentials=credentials))
        with pytest.raises(StorageError, match="a line's end"):
            penstock.save("gs://bucket/run", state())
    penstock.set_remote("gs://bucket", None)


def test_a_bucket_of_google_that_answers_nobody_is_named(monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:1")
    remote = penstock.Remote(credentials=penstock.Token(token="x"), patience_seconds=1)
    penstock.set_remote("gs://bucket", remote)
    with pytest.raises(StorageError, match="no connection to the store"):
        penstock.load("gs://bucket/run")
    penstock.set_remote("gs://bucket", None)


def test_a_store_that_is_open_goes_the_new_way_in_all_it_does(bucket, tmp_path):
    store = penstock.CheckpointStore(f"{bucket.url}/store")
    store.save(1, {"x": 1})
    with serving(tmp_path / "other") as other:
        penstock.set_remote(bucket.url, penstock.Remote(endpoint=other.endpoint))
        assert store.steps() == []
        store.save(2, {"x": 2})
        store.protect(2)
        assert (store.steps(), store.latest(), store.load()) == ([2], 2, {"x": 2})
        assert store.protected() == [2]
        assert store.verify(2).ok
        store.unprotect(2)
        store.delete(2)
        assert store.steps() == []
    penstock.set_remote(bucket.url, None)
    assert (store.steps(), store.load()) == ([1], {"x": 1})


def test_files_of_the_home_directory_give_a_key(bucket, tmp_path, monkeypatch):
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(
        "[default]\naws_access_key_id = nobody\naws_secret_access_key = wrong\n"
        "[work]\naws_access_key_id = key\naws_secret_access_key = secret\n"
    )
    (tmp_path / ".aws/config").write_text(
        f"[profile work]\nregion = us-east-1\nendpoint_url = {bucket.endpoint}\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "work")
    penstock.set_remote(bucket.url, None)
    penstock.save(f"{bucket.url}/a", {"x": 1})
    assert penstock.load(f"{bucket.url}/a") == {"x": 1}
    monkeypatch.setenv("AWS_PROFILE", "play")
    penstock.set_remote(bucket.url, None)
    with pytest.raises(StorageError, match="AWS_PROFILE=play"):
        penstock.load(f"{bucket.url}/a")


def test_credentials_that_are_none_say_why(bucket):
    def broken():
        raise RuntimeError("the vault is closed")

    for credentials, words in [(broken, "the vault is closed"), (lambda: "key", "gave str")]:
        remote = penstock.Remote(endpoint=bucket.endpoint, credentials=credentials)
        penstock.set_remote(bucket.url, remote)
        with pytest.raises(StorageError, match=words):
            penstock.save(f"{bucket.url}/a", {"x": 1})
    assert bucket.names() == []


def test_a_fork_has_connections_of_its_own(bucket):
    url = f"{bucket.url}/forked"
    penstock.save(url, state(1, 1000))
    store = penstock.CheckpointStore(f"{bucket.url}/store")
    store.save(1, state(1, 1000))
    said = run_child(
        """
        import json, os, sys
        import numpy, penstock
        url, root = sys.argv[1:]
        penstock.load(url)
        store = penstock.CheckpointStore(root)
        store.load()
        asked = penstock.Credentials(access_key_id="key", secret_access_key="secret")
        penstock.set_remote(url, penstock.Remote(credentials=lambda: asked))
        penstock.load(url)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                penstock.load(url)
                store.load()
                store.save(2, {"x": 2})
                code = 0
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        penstock.load(url)
        print(json.dumps([status, store.latest()]))
        """,
        url,
        store.root,
        is_fresh=True,
    )
    assert said == [0, 2]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"endpoint": "127.0.0.1:1"}, ValueError),
        ({"endpoint": 1}, TypeError),
        ({"endpoint": "http://me:secret@host"}, ValueError),
        ({"endpoint": "http://host/?sig=secret"}, ValueError),
        ({"part_bytes": 1 << 20}, ValueError),
        ({"part_bytes": (8 << 20) + 1}, ValueError),
        ({"connections": 0}, ValueError),
        ({"connections": True}, TypeError),
        ({"credentials": "secret"}, TypeError),
        ({"bucket": "x"}, TypeError),
    ],
)
def test_what_no_remote_can_be_is_refused(options, error):
    with pytest.raises(error) as raised:
        penstock.Remote(**options)
    assert "secret" not in str(raised.value).replace("secret_access_key", "")


def test_no_secret_is_shown():
    given = penstock.Credentials(
        access_key_id="me", secret_access_key="hidden", session_token="hidden"
    )
    assert "hidden" not in repr(given) + repr(penstock.Remote(credentials=given))
    with pytest.raises(ValueError, match="zone"):
        penstock.Credentials(
            access_key_id="a", secret_access_key="b", expires=dt.datetime(2030, 1, 1)
        )
    assert "hidden" not in repr(penstock.Token(token="hidden"))
    with pytest.raises(TypeError, match="datetime"):
        penstock.Token(token="hidden", expires=5)


def test_a_shard_of_too_many_parts_is_refused_before_anything_is_sent(bucket, tmp_path):
    # The array is a hole in a file.
    large = np.memmap(tmp_path / "hole", dtype=np.uint8, mode="w+", shape=(90 << 30,))
    with pytest.raises(StorageError, match=r"part_bytes of at least 10 MiB"):
        penstock.save(f"{bucket.url}/a", {"large": large})
    assert bucket.names() == []


def test_a_server_that_is_not_there_is_named(bucket):
    url = f"{bucket.url}/a"
    penstock.save(url, {"x": 1})
    penstock.set_remote(bucket.url, penstock.Remote(patience_seconds=1))
    bucket.stop()
    with pytest.raises(StorageError, match=r"and that it runs, \d+ times in \d+ s$"):
        penstock.load(url)
    begun = time.monotonic()
    with pytest.raises(StorageError):
        penstock.save(f"{bucket.url}/b", {"x": 1})
    assert time.monotonic() - begun < 60


def test_a_server_that_starts_again_in_the_middle_is_waited_for(bucket):
    url, expected = f"{bucket.url}/a", state(elements=30_000_000)
    penstock.save(f"{bucket.url}/first", {"x": 1})
    saver = threading.Thread(target=penstock.save, args=(url, expected))
    saver.start()
    while not bucket.names("a") and saver.is_alive():
        # Waits for the first uploaded part.
        time.sleep(0.01)
        if any(bucket.root.rglob(".sgwtmp/multipart/*/*/*")):
            break
    bucket.stop()
    time.sleep(0.3)
    bucket.start()
    saver.join()
    assert_same(penstock.load(url), expected)


def test_a_model_is_exported_out_of_a_bucket(bucket, tmp_path):
    url = f"{bucket.url}/run"
    model = {"a.weight": torch.ones(5), "b.weight": torch.ones(7)}
    penstock.save(url, {"model": model, "step": 1}, groups={"model": ""}, files={"x.json": b"{}"})
    report = penstock.export(url, tmp_path / "out")
    assert (report.way, report.tensors) == ("copy", 2)
    assert (tmp_path / "out/x.json").read_bytes() == b"{}"
    with pytest.raises(UnsupportedPathError):
        penstock.export(url)
    with pytest.raises(StorageError):
        penstock.export(url, tmp_path / "linked", hard_link=True)
    with pytest.raises(UnsupportedPathError):
        penstock.export(url, f"{bucket.url}/out")
