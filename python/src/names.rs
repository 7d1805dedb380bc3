//! Names of files and directories, for callers that do not open a checkpoint.

use pyo3::prelude::*;

/// The name of a step's directory in a store.
#[pyfunction]
pub(crate) fn step_directory(step: u64) -> String {
    penstock_store::step_directory(step)
}

/// The step of a directory with this name in a store.
#[pyfunction]
pub(crate) fn parse_step(name: &str) -> Option<u64> {
    penstock_store::parse_step(name)
}

/// The file name of a rank's part.
#[pyfunction]
pub(crate) fn part_file(rank: u32, attempt_id: &str) -> String {
    penstock_store::part_file(rank, attempt_id)
}

/// The file name of a rank's shard.
#[pyfunction]
pub(crate) fn shard_file(rank: u32, index: usize, attempt_id: &str) -> String {
    penstock_store::shard_file(rank, index, attempt_id)
}

/// Whether a file with this name is a part.
#[pyfunction]
pub(crate) fn is_part_file(name: &str) -> bool {
    penstock_store::is_part_file(name)
}

/// The rank of a part or shard with this name, also under its temporary name.
#[pyfunction]
pub(crate) fn rank_of_file(name: &str) -> Option<u32> {
    penstock_store::rank_of_file(name)
}

/// The names that the files of a checkpoint's signatures can have.
#[pyfunction]
pub(crate) fn signature_files(checkpoint_id: &str) -> Vec<String> {
    penstock_store::signature_files(checkpoint_id).to_vec()
}
