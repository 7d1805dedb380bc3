//! Names of files and directories, for whoever looks at a checkpoint without opening it.

use pyo3::prelude::*;

/// The name of a step's directory in a store.
#[pyfunction]
pub(crate) fn step_directory(step: u64) -> String {
    penstock_store::step_directory(step)
}

/// The step that a directory of this name is, in a store.
#[pyfunction]
pub(crate) fn parse_step(name: &str) -> Option<u64> {
    penstock_store::parse_step(name)
}

/// The name of a rank's part.
#[pyfunction]
pub(crate) fn part_file(rank: u32, attempt_id: &str) -> String {
    penstock_store::part_file(rank, attempt_id)
}

/// The name of a shard of a rank.
#[pyfunction]
pub(crate) fn shard_file(rank: u32, index: usize, attempt_id: &str) -> String {
    penstock_store::shard_file(rank, index, attempt_id)
}

/// Whether a file of this name is a part.
#[pyfunction]
pub(crate) fn is_part_file(name: &str) -> bool {
    penstock_store::is_part_file(name)
}

/// The rank whose part or shard a file of this name is, or becomes.
#[pyfunction]
pub(crate) fn rank_of_file(name: &str) -> Option<u32> {
    penstock_store::rank_of_file(name)
}
