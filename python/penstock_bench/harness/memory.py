"""The memory of the machine, touched before anything that would pay for the first touch."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil

from penstock_bench.workloads.states import GIB

_WARM_TIMES_STATE = 3
_WARM_FRACTION_OF_FREE = 0.7
# Memory that the kernel has reported to the host so far, where it counts that.
_REPORTED = "/sys/module/page_reporting/parameters/reported_kib"
# It reports at most every two seconds, and only what was freed.
_TOUCH = f"""
import numpy, sys, time
memory = numpy.empty(int(sys.argv[1]), numpy.uint8)
began = time.perf_counter()
memory[::4096] = 1
print(time.perf_counter() - began)
def reported():
    try:
        return open({_REPORTED!r}).read()
    except OSError:
        return None
last, since, limit = reported(), time.monotonic(), time.monotonic() + 20
while last is not None and time.monotonic() < min(since + 2.3, limit):
    time.sleep(0.05)
    if reported() != last:
        last, since = reported(), time.monotonic()
"""


def touch(nbytes: int) -> float:
    """Touches so much memory in a process of its own and gives it back; returns seconds.

    A virtual machine may report pages that have been free for two seconds to its host, which
    takes them away: the next touch faults there, ten times slower than one in the guest (2.5
    against 0.15 s/GB measured). Whoever follows an operation that used much memory would find it
    cheap and the next one dear, so it is made cheap before each. Where the kernel shows what it
    reports, the memory is held until nothing is reported any more: then two seconds pass before
    what is freed now may be.
    """
    command = [sys.executable, "-c", _TOUCH, str(nbytes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return float(done.stdout)


def warm(state_bytes: int) -> dict[str, float]:
    """Touches memory twice in a process of its own and tells how fast each time was.

    The first touch of a page that a virtual machine was never given faults in its host, which
    is several times slower than later ones: without this the first contender pays for all.
    """
    free = psutil.virtual_memory().available
    nbytes = min(_WARM_TIMES_STATE * state_bytes, int(_WARM_FRACTION_OF_FREE * free))
    seconds = []
    for _ in range(2):
        seconds.append(touch(nbytes))
        time.sleep(0.1)
    return {
        "touched_gib": nbytes / GIB,
        "first_gb_per_second": nbytes / seconds[0] / 1e9,
        "second_gb_per_second": nbytes / seconds[1] / 1e9,
    }
