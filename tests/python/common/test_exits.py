"""The end of a process that uses Penstock, whatever its threads do by then."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

LATE = r"""
    #define _GNU_SOURCE
    #include <dlfcn.h>
    #include <stdio.h>
    #include <stdlib.h>
    #include <string.h>
    #include <sys/prctl.h>
    #include <time.h>

    extern int Py_IsInitialized(void);

    static double now(void) {
        struct timespec time;
        clock_gettime(CLOCK_MONOTONIC, &time);
        return time.tv_sec + time.tv_nsec / 1e9;
    }

    /* Runs between the check for an interpreter and the wait for its lock. */
    void *PyThreadState_New(void *interpreter) {
        void *(*make)(void *) = dlsym(RTLD_NEXT, "PyThreadState_New");
        void *state = make(interpreter);
        char name[16] = "";
        prctl(PR_GET_NAME, name);
        if (strcmp(name, "pt_gloo_runloop") == 0 && getenv("LATE")) {
            fprintf(stderr, "gloo is late\n");
            for (double end = now() + 1; now() < end && Py_IsInitialized();) {
            }
        }
        return state;
    }
"""
"""A library to preload, which delays a gloo worker while it releases a tensor.

The worker runs, or waits for a processor, until the interpreter begins to end, or for a second.
"""

RANK = """
    import os
    import torch, torch.distributed as dist
    import penstock

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    # As a mesh does, and so every DTensor.
    kept = dist.group.WORLD
    os.environ["LATE"] = "1"
    # Only gloo still refers to the tensor.
    dist.all_reduce(torch.ones(1 << 20), async_op=True)
    dist.destroy_process_group()
"""


@pytest.fixture
def late(tmp_path):
    """Builds a library to preload, which delays gloo."""
    source, library = tmp_path / "late.c", tmp_path / "late.so"
    source.write_text(textwrap.dedent(LATE))
    try:
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    except FileNotFoundError:
        pytest.skip("no C compiler")
    return library


def test_a_rank_ends_after_gloo_has_let_go_of_tensors(late):
    """With PyTorch's own exit, the process aborts here each time."""
    for _ in range(10):
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(RANK)],
            env={**os.environ, "LD_PRELOAD": str(late)},
            capture_output=True,
            text=True,
            check=False,
        )
        if "gloo is late" in done.stderr:
            break
        # On a busy machine gloo may be done before this program drops its own reference.
    else:
        pytest.skip("gloo lets go of tensors in another way here")
    assert done.returncode == 0, done.stderr


def test_a_daemon_thread_that_shows_progress_does_not_abort_the_process(tmp_path):
    script = """
        import sys, threading, time
        import numpy as np, penstock

        is_shown = threading.Event()

        def show(done, total):
            is_shown.set()
            until = time.monotonic() + 0.2
            while time.monotonic() < until:
                pass

        state = {"w": np.ones(1 << 20)}
        call = lambda: penstock.save(sys.argv[1], state, progress=show)
        threading.Thread(target=call, daemon=True).start()
        is_shown.wait()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path / "ckpt"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
