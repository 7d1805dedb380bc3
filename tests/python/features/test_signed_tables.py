"""Signed tables: a table opens if an accepted key has signed the bytes of its rows."""

from __future__ import annotations

import subprocess

import numpy as np
import pytest
from test_sealed_tables import GENERATOR, KEY, file_of, rows_of

import penstock
from penstock import features
from penstock.errors import NotSignedError, SignatureError
from penstock.sealing import Sealing

pytestmark = pytest.mark.quick


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)
    return path


@pytest.mark.parametrize("seals", [False, True])
def test_a_signed_table_opens_and_an_exchanged_one_does_not(tmp_path, key, seals):
    path, rows = tmp_path / "table", rows_of()
    given = {"sealing": Sealing([KEY])} if seals else {}
    identities = {"identities": [KEY]} if seals else {}
    features.write(path, rows, key="paper", **given)
    with pytest.raises(NotSignedError):
        features.open(path, signed_by=f"{key}.pub", **identities)
    penstock.sign(path, key)
    with features.open(path, signed_by=f"{key}.pub", **identities) as table:
        ids = [7, 0, 2999]
        assert np.array_equal(table.gather(ids), rows[ids])
    file = file_of(path)
    data = bytearray(file.read_bytes())
    for place, byte in enumerate(GENERATOR, 8192):
        data[place] ^= byte
    # Digests, and checksums of blocks, say who has not changed it by chance.
    file.write_bytes(data)
    with pytest.raises(SignatureError):
        features.open(path, signed_by=f"{key}.pub", **identities)


def test_tables_of_other_formats_are_refused(tmp_path, key):
    np.save(tmp_path / "rows.npy", rows_of())
    with pytest.raises(NotSignedError, match="signed_by="):
        features.open(tmp_path / "rows.npy", signed_by=f"{key}.pub")
