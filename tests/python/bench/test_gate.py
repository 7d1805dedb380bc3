"""The trial of `penstock bench compare` on a real disk, as small as it goes."""

from __future__ import annotations

from click.testing import CliRunner

from penstock_bench.results.results import Results
from penstock_bench.suites.io import gate

MIB = 1 << 20


def test_each_build_is_measured_in_every_round_and_the_slowed_one_does_a_tenth_more(
    disk_path, tmp_path
):
    arguments = ["--trials", "1", "--rounds", "3", "--size-mib", "10", "--output", str(tmp_path)]
    done = CliRunner().invoke(gate.main, [str(disk_path), *arguments])
    # The result of three rounds of 10 MiB depends on the disk.
    assert done.exit_code in (0, 1), done.output
    assert "alarms at the slowed build:" in done.output
    assert not [path for path in disk_path.iterdir() if path.name.startswith(".penstock")]
    for build in gate.BUILDS:
        found = Results.read(tmp_path / "00" / f"{build}.json")
        assert len(found.cases) == 2
        for case in found.cases:
            made = found.of(case, "penstock")
            assert [one.round_index for one in made] == [0, 1, 2]
            assert {one.nbytes for one in made} == {10 * MIB}
            assert {one.requests for one in made} == {11 if build == "slowed" else 10}


def test_builds_take_turns_in_coming_first():
    in_turns = list(gate._order(3, apart=False))
    assert [build for number, _, build in in_turns if number == 1] == [
        *("same", "slowed", "before"),
        *("same", "slowed", "before"),
    ]
    assert [case for _, case, _ in in_turns[:6]] == [case for case in gate.CASES for _ in range(3)]
    assert {build for _, _, build in in_turns[:: len(in_turns) // 3]} == set(gate.BUILDS)
    apart = list(gate._order(3, apart=True))
    assert [build for _, _, build in apart] == [build for build in gate.BUILDS for _ in range(6)]
    assert set(apart) == set(in_turns)


def test_a_size_of_which_there_is_no_tenth_is_refused(disk_path):
    done = CliRunner().invoke(gate.main, [str(disk_path), "--size-mib", "256"])
    assert done.exit_code == 2
    assert "no whole number of requests" in done.output
