"""The demo: its claims hold, it notices when one does not, and it leaves no trace."""

from __future__ import annotations

import copy
import os
import re
import signal
import subprocess
import sys

import pytest
import torch

import forks
import penstock
from penstock.demo.crash import SaveKiller
from penstock.demo.narrator import ClaimError
from penstock.demo.run import RunError, TrainingLog, TrainingProcess
from penstock.demo.story import Story
from penstock.demo.text import Windows

DEMO = ["-m", "penstock", "demo"]

SAVER = """
import numpy as np, penstock, sys
store = penstock.CheckpointStore(sys.argv[1])
for step in range(1, 1000):
    store.save(step, {"w": np.full(1 << 20, step)})
    print(step, flush=True)
"""


def run_demo(directory, *options, **kwargs):
    environment = os.environ | {"COLUMNS": "80"}
    return forks.run([*DEMO, *options], cwd=directory, env=environment, **kwargs)


@pytest.mark.slow
def test_the_whole_demo_holds_and_leaves_nothing_behind(tmp_path):
    told = run_demo(tmp_path, "--steps", "6")
    assert told.returncode == 0, told.stdout + told.stderr
    for claim in (
        "SIGKILL hit while step 4 was being saved",
        "the store calls step 4 incomplete; the newest complete step is 3",
        "it went on by itself from step 3",
        "steps 1 to 4, before the kill: every loss equal bit for bit",
        "steps 4 to 6, resumed: every loss equal bit for bit",
        "final weights equal bit for bit",
        "nothing is left of the killed save",
        "load handed nothing out, and named the tensor that was hit",
    ):
        assert f"ok {claim}" in re.sub(r"\s+", " ", told.stdout)
    assert "GB/s" in told.stdout
    assert max(map(len, told.stdout.splitlines())) <= 80
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_ends_the_demo_and_its_training_and_removes_the_directory(tmp_path):
    with forks.Popen(
        DEMO, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as demo:
        while "Train without interruption" not in demo.stdout.readline():
            assert demo.poll() is None
        demo.send_signal(signal.SIGINT)
        _, err = demo.communicate()
    assert demo.returncode == 130
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_use_is_refused_and_left_alone(tmp_path):
    (tmp_path / "precious").write_text("data")
    told = run_demo(tmp_path, "--directory", ".")
    assert told.returncode == 2
    assert "no empty directory" in told.stderr
    assert (tmp_path / "precious").read_text() == "data"


def test_without_torch_the_demo_says_what_to_install(tmp_path):
    script = "import sys; sys.modules['torch'] = None; sys.argv = ['penstock', 'demo']\n"
    script += "from penstock.cli import main; main()"
    told = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert told.returncode == 1
    assert "pip install 'penstock[torch]'" in told.stderr
    assert list(tmp_path.iterdir()) == []


# ---- The claims can fail


@pytest.fixture
def runs():
    """Returns a reference run, a killed one and a resumed one that fit together."""
    losses = {step: (5.0 / step).hex() for step in range(1, 13)}
    reference = TrainingLog(steps=12, losses=losses, weights="00")
    killed = TrainingLog(steps=12, losses={s: losses[s] for s in range(1, 9)}, saves=[{"step": 7}])
    resumed = TrainingLog(steps=12, losses={s: losses[s] for s in range(8, 13)}, weights="00")
    resumed.loaded = {"step": 7}
    return reference, killed, resumed


def resume(tmp_path, monkeypatch, runs, kill_step=8):
    from penstock.demo.crash import Kill

    reference, killed, resumed = runs
    story = Story(tmp_path, 60, None)
    monkeypatch.setattr(story, "_train", lambda *_: (resumed, None))
    return story._resume(reference, killed, Kill(kill_step, tmp_path, []))


def test_runs_that_fit_together_pass(tmp_path, monkeypatch, runs):
    assert resume(tmp_path, monkeypatch, runs) is runs[2]


def one_bit_more(run, step):
    loss = run.loss(step)
    run.losses[step] = (loss * (1 + 2**-52)).hex()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda killed, resumed: one_bit_more(killed, 3),
        lambda killed, resumed: one_bit_more(resumed, 12),
        lambda killed, resumed: resumed.losses.pop(9),
        lambda killed, resumed: setattr(resumed, "weights", "01"),
        lambda killed, resumed: setattr(resumed, "loaded", {"step": 6}),
        lambda killed, resumed: setattr(resumed, "loaded", None),
    ],
    ids=["loss-before", "loss-after", "step-missing", "weights", "older-step", "not-resumed"],
)
def test_a_run_that_differs_in_one_bit_fails(tmp_path, monkeypatch, runs, spoil):
    reference, *others = copy.deepcopy(runs)
    spoil(*others)
    with pytest.raises(ClaimError):
        resume(tmp_path, monkeypatch, (reference, *others))


def test_a_training_program_that_fails_is_told_with_its_error(tmp_path):
    with TrainingProcess(["--no-such-option"]) as training:
        training.follow(lambda _: None)
    with pytest.raises(RunError, match="no-such-option"):
        training.require_success()


# ---- Its parts


def test_the_killer_hits_a_save_between_its_data_and_its_manifest(tmp_path):
    root = tmp_path / "store"
    with subprocess.Popen(
        [sys.executable, "-c", SAVER, root], stdout=subprocess.PIPE, text=True
    ) as process:
        killer = SaveKiller(process, root, step_min=5)
        killer.start()
        acknowledged = [int(line) for line in process.stdout]
        kill = killer.end()
    assert process.returncode == -signal.SIGKILL
    assert kill is not None
    assert kill.step >= 5
    names = [name for name, _ in kill.files]
    assert any(name.startswith("shard-") for name in names)
    assert "manifest.json" not in names
    store = penstock.CheckpointStore(root)
    assert store.latest() == acknowledged[-1] == kill.step - 1
    assert store.load()["w"][0] == kill.step - 1


def test_windows_go_on_with_the_batch_that_was_next():
    text = torch.arange(200, dtype=torch.uint8)
    windows = Windows(text, window=9, batch=3, seed=0)
    # 20 samples are 6 batches an epoch: the state is taken in the second one.
    for _ in range(8):
        windows.next_batch()
    state = copy.deepcopy(windows.state_dict())
    expected = [windows.next_batch() for _ in range(15)]
    resumed = Windows(text, window=9, batch=3, seed=1)
    resumed.load_state_dict(state)
    for inputs, targets in expected:
        again = resumed.next_batch()
        assert torch.equal(again[0], inputs)
        assert torch.equal(again[1], targets)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
