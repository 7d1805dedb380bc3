"""`penstock keys generate` and `penstock.sealing.generate`."""

import json
import os
import stat
import subprocess
import sys

import pytest

from penstock import Sealing
from penstock.errors import StorageError
from penstock.sealing import Identities, generate

pytestmark = pytest.mark.quick


def penstock(*arguments, **options):
    command = [sys.executable, "-m", "penstock", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, **options)


@pytest.mark.parametrize("kind", ["x25519", "key-file"])
def test_only_the_owner_can_read_the_file(kind, tmp_path):
    path = tmp_path / "key"
    umask = os.umask(0)
    try:
        recipient = generate(path, kind=kind)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Sealing([path]).recipients == (recipient,)
    created, public, secret = path.read_text().splitlines()
    assert created.startswith("# created: 20")
    assert public.endswith(f": {recipient}")
    assert secret.startswith({"x25519": "AGE-SECRET-KEY-1", "key-file": "PENSTOCK-"}[kind])


def test_a_file_is_never_overwritten(tmp_path):
    path = tmp_path / "key"
    generate(path)
    before = path.read_bytes()
    with pytest.raises(StorageError, match="choose another file: a key is never overwritten"):
        generate(path)
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(StorageError):
        generate(tmp_path / "link")
    assert path.read_bytes() == before
    assert not (tmp_path / "target").exists()


def test_bad_arguments(tmp_path):
    with pytest.raises(StorageError, match="No such file or directory"):
        generate(tmp_path / "missing" / "key")
    with pytest.raises(ValueError, match="kind is x25519 or key-file"):
        generate(tmp_path / "key", kind="rsa")


def test_the_command_prints_the_recipient(tmp_path):
    path = tmp_path / "keys.txt"
    made = penstock("keys", "generate", path)
    assert (made.returncode, made.stderr) == (0, "")
    assert Sealing([made.stdout.strip()]).recipients == Sealing([path]).recipients
    assert "AGE-SECRET" not in made.stdout
    again = penstock("keys", "generate", path)
    assert again.returncode == 1
    assert "never overwritten" in again.stderr
    made = penstock("keys", "generate", "--kind", "key-file", "--json", tmp_path / "team.key")
    answer = json.loads(made.stdout)
    assert answer["kind"] == "key-file"
    assert answer["recipient"].startswith("penstock-key:")
    assert Identities([tmp_path / "team.key"]).native.count() == 1
