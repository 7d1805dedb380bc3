"""Writes the files beside it: `python make.py NAME`, with the versions in NAME."""

from __future__ import annotations

import os
import sys
import warnings
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

WEIGHT = torch.arange(6.0).view(2, 3)
STATE = {
    "model": OrderedDict(w=WEIGHT, tied=WEIGHT, half=torch.ones(3).bfloat16()),
    "array": np.arange(4, dtype=np.int16),
    "column": np.asfortranarray(np.eye(2)),
    "number": np.float32(2.5),
    "text": np.str_("sixteen"),
    "flag": np.bool_(True),
    "epoch": 2,
    "betas": (0.9, 0.99),
    "bytes": b"ab\xff",
    "size": torch.Size([2]),
}
NESTED = {
    "model": {"w": WEIGHT, "layers": [torch.ones(2), torch.zeros(1)]},
    "epoch": 2,
    "number": np.float32(2.5),
}


def main(name: str) -> None:
    """Writes a file in each protocol, and a directory of DCP."""
    # DCP's metadata contains the path.
    os.chdir(Path(__file__).parent)
    for protocol in (2, 5):
        torch.save(STATE, f"{name}-protocol-{protocol}.pt", pickle_protocol=protocol)
    warnings.simplefilter("ignore")
    dcp.save(NESTED, checkpoint_id=f"{name}-dcp")


if __name__ == "__main__":
    main(*sys.argv[1:])
