"""A test that leaves something behind fails, and the leftover is ended."""

import os
import subprocess
import sys
from pathlib import Path

import psutil

LEAVING = """
import os, signal, subprocess, sys, threading

def test_an_orphan(tmp_path):
    # Its parent ends at once.
    code = "import subprocess; print(subprocess.Popen(['sleep', '1000'], stdout=-3).pid)"
    print("orphan", subprocess.check_output([sys.executable, "-c", code], text=True))

def test_a_thread():
    # Not a daemon: the interpreter waits for it at its end.
    threading.Thread(target=threading.Event().wait, args=(2,), name="laggard").start()

def test_what_ends_by_itself():
    subprocess.Popen(["true"])

def test_signals_are_those_of_a_terminal():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    code = "import signal; print(*map(signal.getsignal, (signal.SIGHUP, signal.SIGQUIT)))"
    told = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert told.split() == ["0", "0"] or told.count("SIG_DFL") == 2
"""


def test_what_is_left_behind_fails_the_test_and_is_ended(tmp_path):
    (tmp_path / "test_leaving.py").write_text(LEAVING)
    (tmp_path / "conftest.py").write_text("import leftovers\nleftovers._ENDING_SECONDS_MAX = 0.5\n")
    command = [sys.executable, "-m", "pytest", "-p", "dispositions", "-p", "leftovers", "-rA"]
    done = subprocess.run(
        # As in the background of a shell.
        ["sh", "-c", "trap '' INT HUP QUIT; exec \"$@\"", "sh", *command, "--rootdir", tmp_path],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
    )
    told = done.stdout
    assert done.returncode == 1, told
    assert "4 passed, 2 errors" in told
    assert "ERROR test_leaving.py::test_an_orphan - Failed: left behind: process" in told
    assert "ERROR test_leaving.py::test_a_thread - Failed: left behind: thread laggard" in told
    (pid,) = {int(line.split()[1]) for line in told.splitlines() if line.startswith("orphan ")}
    assert not psutil.pid_exists(pid)
