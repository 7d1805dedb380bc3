"""Signatures: accepted by other tools, and refused after any change that digests do not see."""

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_public_key,
)

import penstock
from penstock.cli import cli
from penstock.errors import (
    CorruptCheckpointError,
    KeyFileError,
    NotSignedError,
    OtherCheckpointError,
    SignatureError,
    TamperedError,
)
from penstock.sealing import Passphrase
from penstock.signing import Signers, SigningKeys

MIB = 1 << 20
GENERATOR = (1 | 0x9A6C9329AC4BC9B5 << 1).to_bytes(9, "little")
"""Added to a file anywhere within a chunk, it leaves the CRC-64 as it was."""

needs_ssh_keygen = pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="needs ssh-keygen")


def ssh_key(directory, name="key"):
    key = ed25519.Ed25519PrivateKey.generate()
    file = directory / name
    file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    (directory / f"{name}.pub").write_bytes(public + b" me@host\n")
    return file


def ec_key(directory, name="ec", form=PrivateFormat.PKCS8):
    key = ec.generate_private_key(ec.SECP256R1())
    file = directory / f"{name}.pem"
    file.write_bytes(key.private_bytes(Encoding.PEM, form, NoEncryption()))
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (directory / f"{name}.pub").write_bytes(public)
    return file


KINDS = {"ssh": ssh_key, "openssf": ec_key}


@pytest.fixture(params=sorted(KINDS))
def key(request, tmp_path):
    return KINDS[request.param](tmp_path, "key")


@pytest.fixture
def public(tmp_path, key):
    return tmp_path / "key.pub"


def state(seed=0):
    random = np.random.default_rng(seed)
    return {
        "weight": random.standard_normal((3 * MIB) // 8 + 5),
        "bias": random.standard_normal(3),
        "step": seed,
    }


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert found["step"] == expected["step"]
    for name in ("weight", "bias"):
        assert np.array_equal(found[name], expected[name])


@pytest.fixture(params=["later", "saving"])
def signed(request, tmp_path, key):
    path, files = tmp_path / "ckpt", {"config.json": b'{"a": 1}'}
    if request.param == "saving":
        penstock.save(path, state(), files=files, sign=key)
    else:
        penstock.save(path, state(), files=files)
        penstock.sign(path, key)
    return path


def shard_of(path):
    return min(Path(path).glob("shard-*"))


def signature_files(path):
    return sorted([*Path(path).glob("signature.*"), *Path(path).glob("signed.*")])


def collide(file, at):
    """Changes nine bytes of a file so that its digests stay right."""
    data = bytearray(file.read_bytes())
    for place, byte in enumerate(GENERATOR, at):
        data[place] ^= byte
    file.write_bytes(data)


# Signatures that are accepted.


@pytest.mark.quick
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("direct", ["auto", "off"])
def test_a_signed_checkpoint_loads(signed, public, direct, verify):
    options = penstock.Options(direct=direct, verify=verify)
    assert_same(penstock.load(signed, signed_by=public, options=options), state())
    part = penstock.load(signed, signed_by=public, keys="bias", options=options)
    assert np.array_equal(part["bias"], state()["bias"])
    into = state(1)
    penstock.load(signed, signed_by=public, into=into, options=options)
    assert_same(into | {"step": 0}, state())
    result = penstock.verify(signed, signed_by=public)
    assert result.ok, result
    assert (
        result.signer
        == SigningKeys(
            public.with_suffix("") if _is_ssh(public) else public.with_suffix(".pem")
        ).signers[0]
    )


def _is_ssh(public):
    return public.read_text().startswith("ssh-")


def test_many_shards_and_sizes_are_signed(tmp_path, key, public):
    path = tmp_path / "ckpt"
    arrays = {str(size): np.arange(size, dtype="u1") for size in (0, 1, 4096, MIB, 2 * MIB + 77)}
    penstock.save(path, arrays, options=penstock.Options(shard_bytes=MIB))
    assert penstock.sign(path, key).files > 4
    found = penstock.load(path, signed_by=public)
    assert all(np.array_equal(found[name], array) for name, array in arrays.items())


def test_one_of_several_keys_suffices(tmp_path, signed, public):
    other = ssh_key(tmp_path, "other").with_suffix(".pub")
    assert penstock.load(signed, signed_by=[other, public])["step"] == 0
    assert penstock.load(signed, signed_by=public.read_text())["step"] == 0
    assert penstock.load(signed, signed_by=lambda: public.read_bytes())["step"] == 0
    assert penstock.load(signed, signed_by=Signers([other, public]))["step"] == 0


def test_a_wrong_signature_beside_a_right_one_changes_nothing(tmp_path):
    path = tmp_path / "ckpt"
    penstock.save(path, state())
    penstock.sign(path, [ssh_key(tmp_path), ec_key(tmp_path)])
    (bundle,) = path.glob("signature.*")
    bundle.write_bytes(b"garbage")
    assert penstock.load(path, signed_by=[tmp_path / "key.pub", tmp_path / "ec.pub"])["step"] == 0
    with pytest.raises(SignatureError):
        penstock.load(path, signed_by=tmp_path / "ec.pub")


def test_a_store_takes_signed_steps_only(tmp_path, key, public):
    store = penstock.CheckpointStore(tmp_path / "store", signed_by=public)
    for step in (1, 2):
        store.save(step, state(step))
        penstock.sign(store.path(step), key)
    assert store.load()["step"] == 2
    assert store.verify(2, signed_by=public).ok
    store.save(3, state(3))
    for fallback in (False, True):
        with pytest.raises(NotSignedError):
            store.load(fallback=fallback)
    training = penstock.Training(state={"a": 1})
    with pytest.raises(NotSignedError):
        store.resume(training)
    assert store.load(step=2)["step"] == 2
    assert store.quarantined() == []


def test_files_of_a_dead_signature_are_swept_and_removed(tmp_path, key):
    store = penstock.CheckpointStore(tmp_path / "store", keep_last=1)
    store.save(1, state())
    penstock.sign(store.path(1), key)
    store.save(1, state(2), overwrite=True)
    assert signature_files(store.path(1)) == []
    penstock.sign(store.path(1), key)
    store.save(2, state())
    assert store.steps() == [2]
    assert not os.path.exists(store.path(1))


def test_a_sealed_checkpoint_stays_signed_when_recipients_change(tmp_path, key, public):
    path = tmp_path / "ckpt"
    mine, yours = tmp_path / "mine", tmp_path / "yours"
    for file in (mine, yours):
        penstock.sealing.generate(str(file))
    penstock.save(path, state(), sealing=penstock.Sealing([mine]))
    penstock.sign(path, key)
    penstock.sealing.add_recipients(path, [yours], identities=[mine])
    assert_same(penstock.load(path, identities=[yours], signed_by=public), state())
    penstock.sealing.rotate(path, [mine], identities=[yours])
    assert_same(penstock.load(path, identities=[mine], signed_by=public), state())
    assert penstock.verify(path, signed_by=public).ok
    manifest = path / "manifest.json"
    text = manifest.read_bytes().replace(b'"writer":"penstock', b'"writer":"penstocK')
    manifest.write_bytes(restamped(text))
    with pytest.raises(SignatureError, match="manifest"):
        penstock.load(path, identities=[mine], signed_by=public)


# Signed while they are saved.


def part_of(path):
    return json.loads(next(Path(path).glob("part-*")).read_bytes())


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("lazy", [None, False, True])
def test_every_kind_of_save_signs(tmp_path, key, public, lazy, sealed):
    (tmp_path / "keys").write_text("PENSTOCK-SECRET-KEY-1" + "17" * 32)
    sealing = penstock.Sealing([tmp_path / "keys"]) if sealed else None
    options = penstock.Options(shard_bytes=MIB, extent_bytes=MIB)
    store = penstock.CheckpointStore(
        tmp_path / "store",
        sign=key,
        signed_by=public,
        sealing=sealing,
        options=options,
        identities=[tmp_path / "keys"] if sealed else None,
    )
    with store:
        if lazy is None:
            store.save(1, state())
        else:
            store.save_async(1, state(), lazy=lazy).result()
        assert_same(store.load(), state())
        assert store.verify(1, signed_by=public).ok
        path = store.path(1)
    files = part_of(path)["files"]
    assert len(files) > 1
    for file in files:
        hashes = base64.b64decode(file["blake3"], validate=True)
        assert len(hashes) == 32 * -(-file["bytes"] // MIB)
    reports = []
    store.load(report=reports.append)
    assert reports[0].bytes_read <= sum(-(-file["bytes"] // 4096) * 4096 for file in files)
    # A part of it takes whole chunks, and nothing else.
    identities = [tmp_path / "keys"] if sealed else None
    penstock.load(path, keys="bias", signed_by=public, identities=identities, report=reports.append)
    assert reports[1].bytes_read <= MIB


def test_replacing_signs_the_new_one(tmp_path, key, public):
    path = tmp_path / "ckpt"
    penstock.save(path, state(1), files={"old.json": b"1", "both.json": b"1"}, sign=key)
    (path / "notes.txt").write_text("mine")
    penstock.save(path, state(2), files={"both.json": b"2"}, sign=key, overwrite=True)
    assert penstock.load(path, signed_by=public)["step"] == 2
    assert not (path / "old.json").exists()
    # Not written by the save, so not signed by it.
    problems = penstock.verify(path, signed_by=public).problems
    assert [problem.file for problem in problems] == ["notes.txt"]


def test_a_save_with_a_key_that_cannot_sign_commits_nothing(tmp_path, key):
    path = tmp_path / "ckpt"
    path.mkdir()
    with pytest.raises(KeyFileError):
        penstock.save(path, state(), sign=tmp_path / "key.pub")
    assert os.listdir(path) == []


def test_hashes_that_are_not_those_of_the_signature_are_refused(tmp_path, key, public):
    """The part is not what it was, with all digests right."""
    path = tmp_path / "ckpt"
    penstock.save(path, state(), sign=key)
    part = next(path.glob("part-*"))
    text = part.read_bytes()
    at = text.index(b'"blake3":"') + 20
    other = text[:at] + (b"A" if text[at : at + 1] != b"A" else b"B") + text[at + 1 :]
    part.write_bytes(other)
    manifest = path / "manifest.json"
    entry = json.loads(manifest.read_bytes())["parts"][0]
    changed = manifest.read_bytes().replace(
        entry["digest"].encode(), b"crc64nvme:%016x" % crc64(other)
    )
    changed = changed.replace(entry["sha256"].encode(), hashlib.sha256(other).hexdigest().encode())
    manifest.write_bytes(restamped(changed))
    assert penstock.verify(path).ok
    refused(path, public)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("when", ["while saving", "later"])
def test_damage_of_a_signed_file_is_no_forgery(tmp_path, key, public, when, verify):
    path = tmp_path / "ckpt"
    penstock.save(
        path, {"w": np.zeros(3 << 20, dtype=np.uint8)}, sign=None if when == "later" else key
    )
    if when == "later":
        penstock.sign(path, key)
    shard = shard_of(path)
    content = bytearray(shard.read_bytes())
    content[(1 << 20) + 77] ^= 1
    shard.write_bytes(content)
    with pytest.raises(CorruptCheckpointError):
        penstock.load(path, signed_by=public, options=penstock.Options(verify=verify))


def test_an_older_checkpoint_in_place_of_the_expected_one_is_refused(tmp_path, key, public):
    path, old = tmp_path / "ckpt", tmp_path / "old"
    first = penstock.save(path, state(1), sign=key).checkpoint_id
    shutil.copytree(path, old)
    second = penstock.save(path, state(2), sign=key, overwrite=True).checkpoint_id
    assert penstock.inspect(path).id == second
    assert penstock.load(path, signed_by=public, expect=second)["step"] == 2
    shutil.rmtree(path)
    old.rename(path)
    assert penstock.load(path, signed_by=public)["step"] == 1
    with pytest.raises(OtherCheckpointError) as raised:
        penstock.load(path, signed_by=public, expect=second)
    assert (raised.value.found, raised.value.expected) == (first, second)


# Other tools.


def test_the_bundle_is_a_signature_by_the_standard(tmp_path):
    path = tmp_path / "ckpt"
    penstock.save(path, state(), files={"config.json": b"{}"})
    penstock.sign(path, ec_key(tmp_path))
    (bundle,) = path.glob("signature.*")
    bundle = json.loads(bundle.read_text())
    envelope = bundle["dsseEnvelope"]
    payload = base64.b64decode(envelope["payload"], validate=True)
    kind = envelope["payloadType"]
    text = f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload
    public = load_pem_public_key((tmp_path / "ec.pub").read_bytes())
    (signature,) = envelope["signatures"]
    signature = base64.b64decode(signature["sig"], validate=True)
    public.verify(signature, text, ec.ECDSA(hashes.SHA256()))
    with pytest.raises(InvalidSignature):
        public.verify(signature, text + b" ", ec.ECDSA(hashes.SHA256()))
    hint = hashlib.sha256((tmp_path / "ec.pub").read_bytes()).hexdigest()
    assert bundle["verificationMaterial"]["publicKey"]["hint"] == hint
    listed = {one["name"]: one for one in json.loads(payload)["predicate"]["resources"]}
    files = [name for name in os.listdir(path) if not name.startswith(("signature.", "signed."))]
    assert sorted(listed) == sorted(files)
    for name, one in listed.items():
        assert one["algorithm"] == "sha256"
        assert one["digest"] == hashlib.sha256((path / name).read_bytes()).hexdigest()


@pytest.mark.parametrize("form", [PrivateFormat.PKCS8, PrivateFormat.TraditionalOpenSSL])
def test_model_signing_accepts_ours(tmp_path, form):
    command = shutil.which("model_signing", path=os.path.dirname(sys.executable))
    command = command or shutil.which("model_signing")
    if command is None:
        pytest.skip("needs model-signing")
    path = tmp_path / "ckpt"
    penstock.save(path, state(), files={"config.json": b"{}"})
    penstock.sign(path, ec_key(tmp_path, form=form))
    ec_key(tmp_path, "other")

    def verify(name):
        (bundle,) = path.glob("signature.*")
        public = ["--public_key", tmp_path / f"{name}.pub"]
        call = [command, "verify", "key", path, "--signature", bundle, *public]
        return subprocess.run(call, check=False, capture_output=True, text=True)

    done = verify("ec")
    assert done.returncode == 0, done.stderr
    assert verify("other").returncode != 0
    (path / "extra").write_text("x")
    assert verify("ec").returncode != 0


@needs_ssh_keygen
def test_ssh_keygen_makes_keys_and_accepts_ours(tmp_path):
    path, key = tmp_path / "ckpt", tmp_path / "key"
    call = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "me@host", "-f", key]
    subprocess.run(call, check=True)
    penstock.save(path, state())
    penstock.sign(path, key)
    allowed = tmp_path / "allowed_signers"
    option = 'namespaces="penstock-checkpoint"'
    allowed.write_text(f"me@host {option} {(tmp_path / 'key.pub').read_text()}")
    (signature,) = path.glob("signed.*.sig")
    (statement,) = path.glob("signed.*.json")
    identity = ["-I", "me@host", "-n", "penstock-checkpoint"]
    call = ["ssh-keygen", "-Y", "verify", "-f", allowed, *identity, "-s", signature]
    subprocess.run(call, check=True, stdin=statement.open("rb"), capture_output=True)
    assert penstock.load(path, signed_by=allowed)["step"] == 0
    # And the other way round: ssh-keygen signs the statement.
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", other], check=True)
    signature.unlink()
    sign = ["ssh-keygen", "-q", "-Y", "sign", "-f", other, "-n", "penstock-checkpoint", statement]
    subprocess.run(sign, check=True, capture_output=True)
    Path(f"{statement}.sig").rename(signature)
    assert penstock.load(path, signed_by=tmp_path / "other.pub")["step"] == 0


# Attacks.


def restamped(text):
    """A manifest with the digest of its text."""
    body = text[:-40]
    return body + b',"digest":"crc64nvme:%016x"}\n' % crc64(body)


def crc64(data):
    polynomial, value = 0x9A6C9329AC4BC9B5, (1 << 64) - 1
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (polynomial if value & 1 else 0)
    return value ^ ((1 << 64) - 1)


def refused(path, public, error=SignatureError):
    """Checks that no way of loading hands out anything."""
    for options in (None, penstock.Options(verify=False), penstock.Options(direct="off")):
        with pytest.raises(error) as raised:
            penstock.load(path, signed_by=public, options=options)
        assert raised.value.path == str(path)
    return raised.value


def test_a_checkpoint_without_a_signature_is_refused(tmp_path, signed, public):
    for file in signature_files(signed):
        file.unlink()
    assert type(refused(signed, public)) is NotSignedError
    with pytest.raises(NotSignedError):
        penstock.verify(signed, signed_by=public)
    assert penstock.load(signed)["step"] == 0


def test_another_key_is_refused(tmp_path, signed, public):
    for make in KINDS.values():
        make(tmp_path, "other")
        error = refused(signed, tmp_path / "other.pub")
        assert "none of the expected keys" in str(error)
        with pytest.raises(SignatureError):
            penstock.verify(signed, signed_by=tmp_path / "other.pub")


def test_the_signature_of_another_checkpoint_is_refused(tmp_path, key, signed, public):
    other = tmp_path / "other"
    penstock.save(other, state(1))
    penstock.sign(other, key)
    for theirs, ours in zip(signature_files(other), signature_files(signed), strict=True):
        shutil.copy(theirs, ours)
    assert "another checkpoint" in str(refused(signed, public))


@pytest.mark.parametrize("at", [0, MIB + 5, -9])
def test_changed_bytes_with_right_digests_are_refused(signed, public, at):
    shard = shard_of(signed)
    at = at % shard.stat().st_size if at else 4096
    collide(shard, at)
    assert penstock.verify(signed).ok
    error = refused(signed, public)
    assert error.file == shard.name
    result = penstock.verify(signed, signed_by=public)
    assert [problem.file for problem in result.problems] == [shard.name]
    into = state(1)
    with pytest.raises(SignatureError):
        penstock.load(signed, signed_by=public, into=into)
    for name in ("weight", "bias"):
        is_known = (into[name] == state(1)[name]) | (into[name] == state()[name])
        assert is_known.all(), "bytes that nobody signed are in the target"


def test_damage_is_told_from_tampering(signed, public):
    shard = shard_of(signed)
    data = bytearray(shard.read_bytes())
    data[5000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptCheckpointError) as raised:
        penstock.load(signed, signed_by=public)
    error = raised.value
    assert error.is_proven
    assert not isinstance(error, TamperedError)


def test_a_changed_manifest_is_refused(signed, public):
    manifest = signed / "manifest.json"
    text = manifest.read_bytes()
    manifest.write_bytes(restamped(text.replace(b'"step":null', b'"step":1234')))
    assert penstock.inspect(signed).step == 1234
    assert refused(signed, public).file.startswith(("signature.", "signed."))


def test_a_changed_part_is_refused(signed, public):
    part = next(signed.glob("part-*"))
    text = part.read_bytes()
    other = text.replace(b'"bias"', b'"biaS"')
    assert len(other) == len(text)
    part.write_bytes(other)
    manifest = signed / "manifest.json"
    changed = manifest.read_bytes()
    entry = json.loads(changed)["parts"][0]
    changed = changed.replace(entry["digest"].encode(), b"crc64nvme:%016x" % crc64(other))
    sha256 = hashlib.sha256(other).hexdigest().encode()
    changed = changed.replace(entry.get("sha256", "none").encode(), sha256)
    manifest.write_bytes(restamped(changed))
    assert "biaS" in penstock.load(signed)
    refused(signed, public)


def test_exchanged_files_are_refused(tmp_path, key, public):
    path = tmp_path / "ckpt"
    same = {"a": np.zeros(MIB, "u1"), "b": np.ones(MIB, "u1")}
    penstock.save(path, same, options=penstock.Options(shard_bytes=MIB))
    penstock.sign(path, key)
    first, second = sorted(path.glob("shard-*"))[:2]
    data = first.read_bytes(), second.read_bytes()
    if len(data[0]) != len(data[1]):
        pytest.skip("the shards have different sizes")
    first.write_bytes(data[1])
    second.write_bytes(data[0])
    with pytest.raises((SignatureError, CorruptCheckpointError)):
        penstock.load(path, signed_by=public)
    assert not penstock.verify(path, signed_by=public).ok


def test_extra_missing_and_edited_files_are_problems(signed, public):
    (signed / "adapter_model.bin").write_bytes(b"pickle")
    os.symlink("/etc/passwd", signed / "vocab.txt")
    (signed / "config.json").write_bytes(b'{"a": 2}')
    result = penstock.verify(signed, signed_by=public)
    assert {problem.file for problem in result.problems} == {
        "adapter_model.bin",
        "vocab.txt",
        "config.json",
    }
    (signed / "config.json").unlink()
    result = penstock.verify(signed, signed_by=public)
    assert "config.json" in {problem.file for problem in result.problems}
    # A load reads none of them.
    assert penstock.load(signed, signed_by=public)["step"] == 0


def test_links_in_place_of_files_are_refused(signed, public, key):
    for file in signature_files(signed):
        elsewhere = signed.parent / "elsewhere"
        file.rename(elsewhere)
        file.symlink_to(elsewhere)
        refused(signed, public)
        file.unlink()
        elsewhere.rename(file)
    shard = shard_of(signed)
    shard.rename(signed.parent / "shard")
    shard.symlink_to(signed.parent / "shard")
    with pytest.raises(CorruptCheckpointError):
        penstock.load(signed, signed_by=public)


def test_a_link_among_the_files_cannot_be_signed(tmp_path, key):
    path = tmp_path / "ckpt"
    penstock.save(path, state())
    os.symlink("/etc/passwd", path / "vocab.txt")
    with pytest.raises(SignatureError, match="no regular file") as raised:
        penstock.sign(path, key)
    assert raised.value.file == "vocab.txt"
    assert signature_files(path) == []


def test_damage_is_not_signed(tmp_path, key):
    path = tmp_path / "ckpt"
    penstock.save(path, state())
    shard = shard_of(path)
    data = bytearray(shard.read_bytes())
    data[5000] ^= 1
    shard.write_bytes(data)
    with pytest.raises(CorruptCheckpointError):
        penstock.sign(path, key)
    assert signature_files(path) == []


def test_a_statement_that_lists_fewer_files_is_refused(tmp_path):
    """Signed with the right key, which a careless signer of other tools may do."""
    path, key = tmp_path / "ckpt", ssh_key(tmp_path)
    penstock.save(path, state())
    penstock.sign(path, key)
    (statement,) = path.glob("signed.*.json")
    (signature,) = path.glob("signed.*.sig")
    parsed = json.loads(statement.read_bytes())
    resources = parsed["predicate"]["resources"]
    kept = [one for one in resources if not one["name"].startswith("shard-")]
    parsed["predicate"]["resources"] = kept
    root = hashlib.sha256(b"".join(bytes.fromhex(one["digest"]) for one in kept))
    parsed["subject"][0]["digest"]["sha256"] = root.hexdigest()
    resign(key, statement, signature, json.dumps(parsed).encode())
    assert "does not cover" in str(refused(path, tmp_path / "key.pub"))
    result = penstock.verify(path, signed_by=tmp_path / "key.pub")
    assert [problem.file for problem in result.problems] == [shard_of(path).name]


@needs_ssh_keygen
def test_a_signature_for_another_purpose_is_refused(tmp_path):
    path, key = tmp_path / "ckpt", ssh_key(tmp_path)
    penstock.save(path, state())
    penstock.sign(path, key)
    (statement,) = path.glob("signed.*.json")
    (signature,) = path.glob("signed.*.sig")
    resign(key, statement, signature, statement.read_bytes(), namespace="file")
    assert "'file'" in str(refused(path, tmp_path / "key.pub")).replace('"', "'")


def resign(key, statement, signature, text, namespace="penstock-checkpoint"):
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs ssh-keygen")
    key.chmod(0o600)
    statement.write_bytes(text)
    signature.unlink()
    sign = ["ssh-keygen", "-q", "-Y", "sign", "-f", key, "-n", namespace, statement]
    subprocess.run(sign, check=True, capture_output=True)
    Path(f"{statement}.sig").rename(signature)


def test_garbage_in_a_signature_is_refused(signed, public):
    """Every cut, and bits flipped all over: no crash, and nothing is accepted."""
    for file in signature_files(signed):
        text = file.read_bytes()
        for changed in changes(text):
            file.write_bytes(changed)
            with pytest.raises(SignatureError):
                penstock.load(signed, signed_by=public, keys="step")
        file.write_bytes(text)
    assert penstock.load(signed, signed_by=public)["step"] == 0


def changes(text):
    step = max(1, len(text) // 60)
    for cut in range(0, len(text) - 1, step):
        yield text[:cut]
    for place in range(0, len(text), step):
        if text[place : place + 1].isspace() or text[place : place + 1] == b"=":
            continue
        yield text[:place] + bytes([text[place] ^ 0x81]) + text[place + 1 :]
    yield b"[" * 100_000
    yield b'{"dsseEnvelope":' * 10_000
    yield b"\xff" * 1000
    yield b'{"mediaType":1e999}'


# Keys.


def test_what_is_no_key_is_refused(tmp_path):
    (tmp_path / "text").write_text("text")
    p384 = ec.generate_private_key(ec.SECP384R1())
    form = (Encoding.PEM, PrivateFormat.PKCS8)
    (tmp_path / "p384").write_bytes(p384.private_bytes(*form, NoEncryption()))
    public = p384.public_key()
    public = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    (tmp_path / "p384.pub").write_bytes(public)
    key = ssh_key(tmp_path)
    for name in ("text", "p384", "key.pub"):
        with pytest.raises(KeyFileError):
            SigningKeys(tmp_path / name)
    for name in ("text", "p384.pub", "key"):
        with pytest.raises(KeyFileError):
            Signers(tmp_path / name)
    with pytest.raises(penstock.errors.StorageError):
        SigningKeys(tmp_path / "missing")
    with pytest.raises(ValueError, match="no key"):
        SigningKeys([])
    for wrong in (7, b"bytes", [7]):
        with pytest.raises(TypeError):
            SigningKeys(wrong)
        with pytest.raises(TypeError):
            penstock.load(tmp_path, signed_by=wrong)
    secret = key.read_text().splitlines()[3]
    assert secret not in repr(SigningKeys(key))


@needs_ssh_keygen
def test_a_key_with_a_passphrase_opens_by_one_before_it(tmp_path, monkeypatch):
    key = tmp_path / "key"
    call = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "secret", "-f", key]
    subprocess.run(call, check=True)
    (tmp_path / "secret").write_text("secret\n")
    monkeypatch.setenv("THE_PASSPHRASE", "secret")
    given = {
        "callable": Passphrase(lambda: "secret"),
        "file": f"passphrase-file:{tmp_path}/secret",
        "variable": "passphrase-env:THE_PASSPHRASE",
    }
    for name, passphrase in given.items():
        path = tmp_path / name
        penstock.save(path, state(), sign=[Passphrase(lambda: "wrong"), passphrase, key])
        assert penstock.load(path, signed_by=tmp_path / "key.pub")["step"] == 0
    done = CliRunner().invoke(
        cli, ["sign", str(path), "--key", given["variable"], "--key", str(key)]
    )
    assert done.exit_code == 0, done.output
    for keys, said in (
        ([key], "give that before the key"),
        ([key, Passphrase(lambda: "secret")], "give that before the key"),
        ([Passphrase(lambda: "wrong"), key], "no passphrase that stands before it"),
        ([Passphrase(lambda: "secret")], "a passphrase signs nothing"),
        (["passphrase-env:NO_SUCH_VARIABLE", key], "is not set"),
        ([Passphrase(lambda: ""), key], "empty"),
    ):
        with pytest.raises(KeyFileError, match=said) as caught:
            SigningKeys(keys)
        assert "secret" not in str(caught.value).replace(str(tmp_path), "")


def test_files_that_no_signature_lists_are_problems(signed, public):
    foreign = signed / f"shard-00000-00.{'5e' * 16}.safetensors"
    shutil.copy(shard_of(signed), foreign)
    (signed / "original").mkdir()
    (signed / "original" / "model.bin").write_bytes(b"weights")
    found = penstock.verify(signed, signed_by=public)
    assert {problem.file for problem in found.problems} == {foreign.name, "original"}
    # They harm no load.
    assert_same(penstock.load(signed, signed_by=public), state())


def test_an_entry_that_is_no_file_hides_no_signature(tmp_path):
    keys = [ssh_key(tmp_path, "key"), ec_key(tmp_path, "ec")]
    path = tmp_path / "ckpt"
    penstock.save(path, state())
    penstock.sign(path, keys[0])
    found = penstock.inspect(path).id
    (path / f"signature.{found}.json").mkdir()
    assert_same(
        penstock.load(path, signed_by=[f"{tmp_path}/key.pub", f"{tmp_path}/ec.pub"]), state()
    )


@pytest.mark.parametrize("expect", ["", "5e", "5E" * 16, 5, b"5e" * 16])
def test_an_expected_id_has_the_form_of_one(signed, expect):
    with pytest.raises((TypeError, ValueError), match="expect"):
        penstock.load(signed, expect=expect)


def forms(text):
    """Texts of a private key that are not taken for one."""
    yield Path(text)
    yield text.partition("\n")[2]
    yield f'"{text.strip()}"'
    yield Path(text.split("\n")[1])


def test_no_error_shows_a_private_key(tmp_path, key):
    text = key.read_text()
    body = text.split("\n")[1]
    for given in forms(text):
        for use in (lambda key: penstock.sign(tmp_path / "ckpt", key), Signers):
            with pytest.raises(KeyFileError) as caught:
                use(given)
            assert body not in str(caught.value)
    penstock.save(tmp_path / "ckpt", state())
    # A literal in a program, and the secret of a CI system, begin with a line end.
    assert penstock.sign(tmp_path / "ckpt", f"\n{text}").signers


def test_no_private_key_is_taken_from_a_command_line(tmp_path, key):
    penstock.save(tmp_path / "ckpt", state())
    command = [sys.executable, "-m", "penstock", "sign", str(tmp_path / "ckpt"), "--key"]
    done = subprocess.run([*command, key.read_text()], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "other processes can see command lines" in done.stderr
    assert key.read_text().split("\n")[1] not in done.stderr


def test_a_mirror_that_seals_makes_no_signed_copies(tmp_path, key, public):
    mirror = penstock.Mirror("s3://bucket/run", sealing=penstock.Sealing(["5e" * 32]))
    with pytest.raises(ValueError, match="signed_by="):
        penstock.CheckpointStore(tmp_path / "store", sign=key, signed_by=public, mirror=mirror)


def test_a_save_signs_no_files_of_others(tmp_path, key, public):
    path = tmp_path / "ckpt"
    path.mkdir()
    (path / "model.safetensors").write_bytes(b"of somebody")
    os.symlink("/etc/passwd", path / "vocab.txt")
    penstock.save(path, state(), sign=key)
    assert_same(penstock.load(path, signed_by=public), state())
    found = penstock.verify(path, signed_by=public)
    assert {problem.file for problem in found.problems} == {"model.safetensors", "vocab.txt"}
