"""The trial of a plug-in ends on all ranks alike, and leaves no files behind."""

from __future__ import annotations

import os
import signal
import textwrap

import pytest

import forks
from penstock.errors import RankError

torch = pytest.importorskip("torch")

from penstock.integrations.trial import trial_directory  # noqa: E402


def try_out(root, failing):
    with trial_directory(root) as directory:
        rank = torch.distributed.get_rank()
        open(os.path.join(directory, str(rank)), "w").close()
        if rank in failing:
            raise ValueError(f"of rank {rank}")


@pytest.mark.parametrize("failing", [(1,), (0,), (0, 1)])
def test_a_trial_that_fails_on_one_rank_fails_on_all_at_once(tmp_path, jobs, failing):
    found = jobs.of(2).outcomes(try_out, str(tmp_path), failing)
    for rank, error in enumerate(found):
        if rank in failing:
            assert isinstance(error, ValueError)
            assert str(error) == f"of rank {rank}"
        else:
            assert isinstance(error, RankError)
            assert f"failed on rank {failing[0]}: ValueError: of rank" in str(error)
    assert os.listdir(tmp_path) == []


def test_a_trial_leaves_nothing_and_draws_no_random_numbers(tmp_path, jobs):
    jobs.of(2).call(try_out, str(tmp_path), ())
    assert os.listdir(tmp_path) == []
    before = torch.get_rng_state()
    with trial_directory(str(tmp_path / "new")):
        torch.rand(3)
    assert torch.equal(torch.get_rng_state(), before)
    assert os.listdir(tmp_path / "new") == []


def test_a_trial_removes_what_a_killed_one_left_and_nothing_of_a_live_one(tmp_path):
    program = f"""
        import os, signal, sys
        from penstock.integrations.trial import trial_directory
        with trial_directory({str(tmp_path)!r}) as directory:
            open(os.path.join(directory, "file"), "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = forks.run(["-c", textwrap.dedent(program)])
    assert killed.returncode == -signal.SIGKILL
    (left,) = os.listdir(tmp_path)
    with trial_directory(str(tmp_path)) as live:
        assert os.listdir(tmp_path) == [os.path.basename(live)] != [left]
        with trial_directory(str(tmp_path)):
            assert os.path.isdir(live)
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_removed_stops_no_trial(tmp_path):
    (tmp_path / ".penstock-trial-file").touch()
    os.symlink(tmp_path, tmp_path / ".penstock-trial-link")
    with trial_directory(str(tmp_path)):
        pass
    assert len(os.listdir(tmp_path)) == 2
