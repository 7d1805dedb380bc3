"""Megatron-Core's checkpoints are not sealed, and say so before anything is written."""

from __future__ import annotations

import pytest

pytest.importorskip("megatron.core")

from penstock.errors import CannotSealError, KeyFileError
from penstock.integrations.megatron import SaveStrategy, enable
from sealing.marks import KEY, sealing


def test_keys_are_refused_before_anything_is_replaced(monkeypatch, tmp_path):
    with pytest.raises(CannotSealError, match="not sealed yet"):
        enable(sealing=sealing())
    monkeypatch.setenv("PENSTOCK_RECIPIENTS", str(tmp_path / "keys.txt"))
    (tmp_path / "keys.txt").write_text(KEY)
    for make in (enable, SaveStrategy):
        with pytest.raises(CannotSealError):
            make()
    monkeypatch.setenv("PENSTOCK_RECIPIENTS", KEY)
    with pytest.raises(KeyFileError, match="secret") as caught:
        enable()
    assert KEY not in str(caught.value)
