"""However a training ends, its optimizer's state on storage is that of one whole step."""

from __future__ import annotations

import os
import random
import shutil
import sys

import pytest

from offload.optim import ended

SEED = int(os.environ.get("PENSTOCK_TORTURE_SEED", "1"))


def test_after_a_kill_there_is_exactly_one_step() -> None:
    count = int(os.environ.get("PENSTOCK_TORTURE_STEPS_KILLED", "3"))
    campaign = ended.kills(count, random.Random(f"{SEED} kills"))
    sys.stdout.write(f"seed {SEED}, {count} kills: {campaign}\n")
    assert campaign.found.total() == count + 1


@pytest.mark.parametrize("kind", ["ext4", "xfs"])
def test_after_a_power_cut_there_is_exactly_one_step(need_root: None, kind: str) -> None:
    if shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"mkfs.{kind} is not installed")
    count = int(os.environ.get("PENSTOCK_TORTURE_STEPS_CUT", "2"))
    campaign = ended.cuts(count, random.Random(f"{SEED} {kind}"), kind)
    sys.stdout.write(f"seed {SEED}, {count} cuts of {kind}: {campaign}\n")
    assert campaign.found.total() == count + 1
