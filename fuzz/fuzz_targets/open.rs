//! Any bytes as the part of a complete checkpoint in memory.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use libfuzzer_sys::{fuzz_mutator, fuzz_target};
use penstock_fuzz::checks::open::Checkpoint;
use penstock_fuzz::{bounded_beside, json};
use tempfile::TempDir;

/// An engine with its worker, the manifest, and the header of the shard.
const FIXED_BYTES: usize = 1 << 20;

/// In memory if the system has a tmpfs there. A killed fuzzer leaves it behind.
static CHECKPOINT: LazyLock<(TempDir, Checkpoint)> = LazyLock::new(|| {
    let root = tempfile::tempdir_in(Path::new("/dev/shm")).or_else(|_| tempfile::tempdir());
    let root = root.expect("a temporary directory");
    let checkpoint = Checkpoint::new(root.path());
    (root, checkpoint)
});

fuzz_target!(|part: &[u8]| {
    let (_, checkpoint) = &*CHECKPOINT;
    bounded_beside(FIXED_BYTES, part.len(), || {
        checkpoint.check(part);
    });
});

fuzz_mutator!(|data: &mut [u8], size: usize, size_max: usize, seed: u32| {
    json::mutate(data, size, size_max, seed, 0)
});
