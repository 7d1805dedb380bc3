"""One call of DeepSpeed's async_io on failing storage, and its outcome.

    python faults.py FAULT PATH

PATH is a file of 1 MiB of the byte 7, or a file to write. Prints ``raised NAME``, ``right`` or ``N
bytes wrong``; a process that aborts prints nothing. `FAULTS` lists the faults.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from deepspeed.ops.op_builder import AsyncIOBuilder

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20


def _read(handle: Any, path: str, offset: int = 0, nbytes: int = MIB) -> int:
    tensor = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8)).fill_(0)
    handle.async_pread(tensor, path, offset)
    assert handle.wait() == 1
    return int((tensor != 7).sum())


def _write(handle: Any, path: str, offset: int = 0, nbytes: int = MIB) -> int:
    tensor = handle.new_cpu_locked_tensor(nbytes, torch.empty(0, dtype=torch.uint8)).fill_(9)
    handle.async_pwrite(tensor, path, offset)
    assert handle.wait() == 1
    try:
        with Path(path).open("rb") as file:
            file.seek(offset)
            stored = file.read(nbytes)
    except OSError:
        stored = b""
    return nbytes - stored.count(9)


FAULTS: dict[str, Callable[[Any, str], int]] = {
    "a page that cannot be read": _read,
    "a disk that is gone": _write,
    "a disk that is full": lambda handle, path: _write(handle, path, 0, 32 * MIB),
    "a limit of the file's size": lambda handle, path: _write(handle, path, MIB),
    "an offset off the blocks, read": lambda handle, path: _read(handle, path, 100, MIB // 2),
    "an offset off the blocks, written": lambda handle, path: _write(handle, path, 100, MIB // 2),
    "a size off the blocks": lambda handle, path: _read(handle, path, 0, MIB - 100),
    "a file that ends before": lambda handle, path: _read(handle, path, MIB // 2),
    "nothing under way": lambda handle, _path: handle.wait(),
}


def main(fault: str, path: str) -> None:
    handle = AsyncIOBuilder().load().aio_handle(4096, 8, False, True, 1)
    try:
        wrong = FAULTS[fault](handle, path)
    except Exception as error:
        said = f"raised {type(error).__name__}"
    else:
        said = f"{wrong} bytes wrong" if wrong else "right"
    sys.stdout.write(f"\n{said}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
