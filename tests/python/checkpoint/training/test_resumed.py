"""A randomly killed and damaged run ends with the bits of an uninterrupted one.

Some kills of each kind; `tests/python/resumed.py` does hundreds.
"""

from __future__ import annotations

import os
import random

import pytest

from conftest import slow, tell
from resumed import KINDS, Campaign

KILLS = int(os.environ.get("PENSTOCK_TORTURE_RESUMES", 3))
STEPS = 12 if KILLS < 10 else 60
OTHERS = [kind for kind in KINDS if kind not in {"plain", "offload"}]
SEED = os.environ.get("PENSTOCK_TORTURE_SEED", "20")


@pytest.mark.timeout(300 + 60 * KILLS)
@pytest.mark.parametrize("kind", ["plain", *slow("offload", *OTHERS)])
def test_a_run_that_is_killed_and_damaged_ends_as_if_nothing_had_happened(disk_path, kind):
    tell("seed", SEED)
    campaign = Campaign(kind, disk_path, STEPS, random.Random(f"{SEED} {kind}"))
    campaign.run(KILLS, max(KILLS // 5, 1))
    tell(campaign)
    assert campaign.kills == KILLS
    assert campaign.damages
    assert campaign.runs > 0
