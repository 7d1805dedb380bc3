"""SIGKILL at random moments: a table has its acknowledged rows, and no row is torn."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time

import torch

import forks
from conftest import tell
from penstock.features import Cache, Table

KILLS = int(os.environ.get("PENSTOCK_TORTURE_KILLS", 8))
SEED = os.environ.get("PENSTOCK_TORTURE_SEED", "4711")
ROWS = 3000
SECONDS_MAX = 0.3

VICTIM = """
import sys
import torch
from penstock.features import Cache, Table

path, first = sys.argv[1], int(sys.argv[2])
table = Table(path, cache=Cache(100 << 10), log_bytes=1 << 20, compaction_bytes=0)
random = torch.Generator().manual_seed(first)
for value in range(first, first + 100_000):
    ids = torch.randperm(len(table), generator=random)[:500]
    rows = table.lookup(ids)
    rows["value"][:] = value
    rows["id"][:] = ids
    table.update(ids, rows)
    table.flush()
    print(value, *ids.tolist(), flush=True)
"""


def test_what_was_flushed_is_there_after_any_kill(disk_path):
    tell(f"seed {SEED}, {KILLS} kills")
    random_ = random.Random(SEED)
    path = disk_path / "t"
    columns = {"value": ((20,), "int64"), "id": ((), "int64")}
    Table.create(path, ROWS, columns).close()
    least, first = torch.zeros(ROWS, dtype=torch.int64), 1
    for _ in range(KILLS):
        victim = forks.Popen(
            ["-c", VICTIM, str(path), str(first)], stdout=subprocess.PIPE, text=True
        )
        acknowledged = []
        line = victim.stdout.readline()
        assert line, "it ended"
        time.sleep(random_.random() * SECONDS_MAX)
        victim.send_signal(signal.SIGKILL)
        # A truncated line was not acknowledged.
        lines = [one for one in (line, *victim.stdout) if one.endswith("\n")]
        acknowledged = [[int(number) for number in one.split()] for one in lines]
        victim.wait()
        victim.stdout.close()
        for value, *ids in acknowledged:
            least[ids] = value
        last = acknowledged[-1][0]
        with Table(path, cache=Cache(1 << 20)) as table:
            rows = table.lookup(torch.arange(ROWS))
        value = rows["value"]
        assert (value == value[:, :1]).all(), "a row is torn"
        found = value[:, 0]
        assert torch.where(found > 0, rows["id"], torch.arange(ROWS)).equal(torch.arange(ROWS))
        # The update under way at the kill may be there, or some of its rows.
        assert ((found == least) | (found == last + 1)).all()
        least, first = found, last + 2
