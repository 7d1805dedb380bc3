"""The programs in examples/: killed in the middle, they end with an uninterrupted run's bits."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import threading
import time

import psutil
import pytest

import forks
import penstock
from conftest import REPOSITORY, tell
from ranks import environments_of

SEED = 90_210
TIMEOUT_SECONDS = 120


class Program:
    """An example that runs, and its output so far.

    Its ranks are forked: each that torchrun starts takes seconds to import PyTorch.
    """

    def __init__(
        self,
        name,
        directory,
        steps,
        ranks=None,
        every=4,
        *further,
        launcher=None,
        popen=forks.RankPopen,
    ):
        command = [str(REPOSITORY / "examples" / name), "--directory", str(directory)]
        command += ["--steps", str(steps), "--every", str(every), *further]
        environments = [{}] if ranks is None or launcher else environments_of(ranks)
        self.processes = [
            popen(
                [*(launcher or []), *command],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | environment,
            )
            for environment in environments
        ]
        self.lines = []
        self.errors = []
        self._threads = [
            threading.Thread(target=self._read, args=pair)
            for process in self.processes
            for pair in ((process.stdout, self.lines), (process.stderr, self.errors))
        ]
        for thread in self._threads:
            thread.start()

    def _read(self, stream, lines):
        # Line by line, as another thread reads the list meanwhile.
        with stream:
            for line in stream:
                lines.append(line.rstrip("\n"))

    def wait(self, code=0):
        """Waits for its end; returns its output."""
        try:
            for process in self.processes:
                process.wait(TIMEOUT_SECONDS)
        finally:
            self.kill()
        codes = {process.returncode for process in self.processes}
        assert codes == {code}, self.trouble
        return self.lines

    def wait_for(self, text):
        """Waits for a line with this beginning."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not any(line.startswith(text) for line in list(self.lines)):
            assert self.is_running(), self.trouble
            assert time.monotonic() < deadline, f"no {text!r} in {self.lines[-5:]}"
            time.sleep(0.001)

    def wait_for_lines(self, count):
        """Waits until it has printed so many lines, or has ended."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while len(self.lines) < count and self.is_running():
            assert time.monotonic() < deadline, f"{count} lines are more than {self.lines[-5:]}"
            time.sleep(0.001)

    @property
    def trouble(self):
        """Returns the end of its errors, without Triton's complaints about an early exit."""
        noise = ("nanobind:", " - leaked", " - ... skipped", "See https://nanobind")
        return "\n".join([line for line in self.errors if not line.startswith(noise)][-60:])

    def is_running(self):
        return all(process.poll() is None for process in self.processes)

    def kill(self):
        """Kills all of its processes at once: torchrun's ranks have sessions of their own."""
        processes = []
        for process in self.processes:
            try:
                first = psutil.Process(process.pid)
                # A stopped launcher neither restarts ranks nor ends them in its own way.
                first.send_signal(signal.SIGSTOP)
                processes += [*first.children(recursive=True), first]
            except psutil.NoSuchProcess:
                continue
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(processes, timeout=TIMEOUT_SECONDS)
        for process in self.processes:
            process.wait()
        for thread in self._threads:
            thread.join()


def by_torchrun(ranks):
    """Returns the command that starts ranks; --standalone finds a free port."""
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]


def said(lines, what):
    """Returns the rest of the line that begins with a word."""
    (found,) = [line.removeprefix(what).strip() for line in lines if line.startswith(what)]
    return found


def kill_after(begin, directory, last, chooser):
    """Kills a program soon after a step, before its end."""
    for attempt in range(5):
        program = begin()
        try:
            program.wait_for("step 1:")
            began = time.monotonic()
            program.wait_for(f"step {last}:")
            # A random part of its last steps, in this machine's measured time per step.
            time.sleep(chooser.uniform(0, 2) * (time.monotonic() - began) / last)
            was_running = program.is_running()
        finally:
            program.kill()
        if not any(line.startswith("digest") for line in program.lines):
            assert was_running, program.trouble
            tell(f"killed after step {last}, at {program.lines[-1]!r}")
            return
        shutil.rmtree(directory)
        tell(f"it was over before it was killed, {attempt + 1} times")
    raise AssertionError("its last steps are over sooner than it can be killed")


def killed_and_resumed(name, tmp_path, steps=40, ranks=None, *further, popen=forks.RankPopen):
    """Runs a program to its end; and again, killed on the way. Returns both digests."""
    tell("seed", SEED)
    chooser = random.Random(f"{SEED} {name}")

    def begun(directory):
        return Program(name, tmp_path / directory, steps, ranks, 4, *further, popen=popen)

    straight = begun("straight").wait()
    # A save is complete when the next one begins, so at least one is complete here.
    last = chooser.randrange(steps // 2, steps - 4)
    kill_after(lambda: begun("killed"), tmp_path / "killed", last, chooser)
    resumed = begun("killed").wait()
    step = int(said(resumed, "resumed from step").partition(":")[0])
    tell(f"resumed from step {step}")
    assert 0 < step < steps
    assert f"step {step + 1}:" in " ".join(resumed)
    return said(straight, "digest"), said(resumed, "digest")


def killed_often(name, tmp_path, kills, chooser, popen, steps=40, every=4):
    """Kills a program many times; returns whether all complete runs equal an uninterrupted one.

    At any moment, also at its start: after a random number of its lines, and a little later.
    """
    straight = said(Program(name, tmp_path / "straight", steps, popen=popen).wait(), "digest")
    killed, runs = 0, 0
    while True:
        program = Program(name, tmp_path / f"run-{runs}", steps, None, every, popen=popen)
        try:
            lines = chooser.randrange(steps // 2)
            while killed < kills and len(program.lines) < lines and program.is_running():
                time.sleep(0.001)
            time.sleep(chooser.uniform(0, 0.05 if lines else 2))
            is_killed = killed < kills and program.is_running()
            if is_killed:
                program.kill()
                killed += 1
                tell(f"kill {killed}: {program.lines[:1]} to {program.lines[-1:]}")
                continue
            ended = program.wait()
        finally:
            program.kill()
        if said(ended, "digest") != straight:
            return False
        runs += 1
        if killed == kills:
            tell(f"{kills} kills, {runs} runs ended alike")
            return True


@pytest.mark.slow
def test_lazy_saves_resume_bit_for_bit_after_a_kill(tmp_path):
    straight, resumed = killed_and_resumed("lazy_saves.py", tmp_path)
    assert resumed == straight


@pytest.mark.slow
def test_fsdp2_resumes_bit_for_bit_after_all_ranks_are_killed(tmp_path):
    straight, resumed = killed_and_resumed("fsdp2_reshard.py", tmp_path, ranks=2)
    assert resumed == straight


def test_fsdp2_goes_on_with_2_ranks_from_what_4_saved(tmp_path):
    saved = Program("fsdp2_reshard.py", tmp_path, steps=6, ranks=4).wait()
    resumed = Program("fsdp2_reshard.py", tmp_path, steps=8, ranks=2).wait()
    # The digest covers the whole model and optimizer, gathered from the ranks.
    assert said(resumed, "resumed from step") == f"6: digest {said(saved, 'digest')}"
    assert any(line.startswith("step 8:") for line in resumed)


@pytest.mark.slow
def test_dcp_resumes_bit_for_bit_after_all_ranks_are_killed(tmp_path):
    pytest.importorskip("penstock.integrations.dcp")
    straight, resumed = killed_and_resumed("dcp_async_save.py", tmp_path, ranks=2)
    assert resumed == straight


@pytest.mark.slow
def test_jax_resumes_bit_for_bit_after_kills_at_random_moments(tmp_path):
    kills = int(os.environ.get("PENSTOCK_TORTURE_JAX_KILLS", "2"))
    seed = int(os.environ.get("PENSTOCK_TORTURE_SEED", SEED))
    tell("seed", seed)
    assert killed_often("jax_training.py", tmp_path, kills, random.Random(seed), forks.JaxPopen)


@pytest.mark.slow
def test_ray_resumes_bit_for_bit_after_kills_at_random_moments(tmp_path):
    """In local mode, where a kill ends all processes."""
    kills = int(os.environ.get("PENSTOCK_TORTURE_RAY_KILLS", "1"))
    seed = int(os.environ.get("PENSTOCK_TORTURE_SEED", SEED))
    tell("seed", seed)
    assert killed_often("ray_training.py", tmp_path, kills, random.Random(seed), forks.RayPopen)


@pytest.mark.slow
def test_dcp_that_names_no_writer_resumes_bit_for_bit_after_all_ranks_are_killed(tmp_path):
    straight, resumed = killed_and_resumed("dcp_enable.py", tmp_path, ranks=2)
    assert resumed == straight
    assert penstock.verify(tmp_path / "killed" / "step-0000000036").ok


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [None, 2])
def test_the_trainer_resumes_bit_for_bit_after_a_kill(tmp_path, ranks):
    straight, resumed = killed_and_resumed(
        "transformers_trainer.py", tmp_path, ranks=ranks, popen=forks.TrainerPopen
    )
    assert resumed == straight


@pytest.mark.slow
def test_torchtitan_resumes_bit_for_bit_after_all_ranks_are_killed(tmp_path):
    straight, resumed = killed_and_resumed(
        "torchtitan_training.py", tmp_path, steps=24, ranks=2, popen=forks.TitanPopen
    )
    assert resumed == straight


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "further"), [(None, ()), (2, ()), (2, ("--shard",))])
def test_lightning_resumes_bit_for_bit_in_the_middle_of_an_epoch(
    tmp_path, monkeypatch, ranks, further
):
    # Otherwise Lightning starts ranks of its own.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
    straight, resumed = killed_and_resumed(
        "lightning_training.py", tmp_path, 40, ranks, *further, popen=forks.LightningPopen
    )
    assert resumed == straight


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [None, 2])
def test_accelerate_resumes_bit_for_bit_after_a_kill(tmp_path, ranks):
    straight, resumed = killed_and_resumed(
        "accelerate_training.py", tmp_path, 30, ranks, popen=forks.AcceleratePopen
    )
    assert resumed == straight


@pytest.mark.slow
def test_deepspeed_resumes_bit_for_bit_after_all_ranks_are_killed(tmp_path):
    straight, resumed = killed_and_resumed(
        "deepspeed_training.py", tmp_path, 30, 2, popen=forks.DeepSpeedPopen
    )
    assert resumed == straight


@pytest.mark.slow
def test_a_run_that_is_preempted_goes_on_as_if_it_had_not_been(tmp_path):
    straight = Program("resume.py", tmp_path / "straight", 2_000, every=500).wait()
    program = Program("resume.py", tmp_path / "preempted", 2_000, every=500)
    try:
        program.wait_for("step 2:")
        program.processes[0].send_signal(signal.SIGUSR1)
        stopped = program.wait(code=75)
    finally:
        program.kill()
    resumed = Program("resume.py", tmp_path / "preempted", 2_000, every=500).wait()
    assert said(resumed, "resumed from step") == said(stopped, "preempted after step")
    assert said(resumed, "digest") == said(straight, "digest")


@pytest.mark.slow
def test_ranks_that_torchrun_is_told_to_end_save_first(tmp_path):
    further = (100_000, "--shard")
    program = Program("resume.py", tmp_path, 100_000, 2, *further, launcher=by_torchrun(2))
    try:
        program.wait_for("step 2:")
        (launcher,) = program.processes
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(TIMEOUT_SECONDS)
    finally:
        program.kill()
    last = int(said(program.lines, "preempted after step"))
    resumed = Program("resume.py", tmp_path, last + 2, 2, 4, "--shard").wait()
    assert said(resumed, "resumed from step") == str(last)
    assert any(line.startswith("digest") for line in resumed)


@pytest.mark.slow
@pytest.mark.parametrize("further", [(), ("--ordered", "--workers", "2")])
def test_a_graph_network_that_is_killed_has_the_losses_that_it_would_have_had(tmp_path, further):
    """At any moment: sampling, its order and dropout resume exactly."""
    pytest.importorskip("torch_geometric")
    tell("seed", SEED)
    chooser = random.Random(f"{SEED} graph {further}")
    steps, every, scale = 40, 3, 5e-6  # 22 steps an epoch

    def begun(name):
        directory = tmp_path / name
        options = ("--scale", str(scale), *further)
        return Program(
            "graph_training.py", directory, steps, None, every, *options, popen=forks.GraphPopen
        )

    straight = begun("straight").wait()
    wanted = [line for line in straight if line.startswith("step")]
    assert len(wanted) == steps
    # In the middle of its tables or its first steps, and of each epoch.
    moments = [None, chooser.randrange(8, 20), chooser.randrange(24, 36)]
    for moment in moments:
        program = begun("killed")
        try:
            if moment is None:
                time.sleep(chooser.uniform(0, 1.5))
            else:
                program.wait_for(f"step {moment}:")
                time.sleep(chooser.uniform(0, 0.05))
            assert program.is_running(), "it was over before it was killed"
        finally:
            program.kill()
        tell(f"killed at {moment}: {program.lines[:1]} to {program.lines[-1:]}")
        assert set(program.lines[1:]) <= set(wanted)
    resumed = begun("killed").wait()
    step = int(said(resumed, "resumed from step"))
    assert step >= moments[-1] - 3 * every
    assert [line for line in resumed if line.startswith("step")] == wanted[step:]
    assert said(resumed, "digest") == said(straight, "digest")
