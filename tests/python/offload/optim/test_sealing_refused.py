"""Optimizers in files do not seal yet, and say so before they write."""

from __future__ import annotations

import pytest
import torch

import penstock
from penstock.errors import CannotSealError

pytestmark = pytest.mark.quick

KEY = "PENSTOCK-SECRET-KEY-1" + "5e" * 32


@pytest.mark.parametrize("kind", [penstock.offload.AdamW, penstock.offload.SGD])
def test_sealing_is_refused_before_the_directory_is_made(tmp_path, kind):
    parameters = torch.nn.Linear(3, 3).parameters()
    with pytest.raises(CannotSealError, match="encrypted disk") as caught:
        kind(parameters, directory=tmp_path / "state", sealing=penstock.Sealing([KEY]))
    assert KEY not in str(caught.value)
    assert not (tmp_path / "state").exists()


def test_a_key_in_place_of_a_sealing_is_no_sealing(tmp_path):
    with pytest.raises(TypeError, match="Sealing"):
        penstock.offload.AdamW(
            torch.nn.Linear(3, 3).parameters(), directory=tmp_path / "state", sealing=KEY
        )
    assert not (tmp_path / "state").exists()
