//! Checkpoints on storage.
//!
//! This crate turns tensors into files that other tools read, and back: it plans where every byte
//! goes ([`plan`]), moves the bytes ([`pipeline`]) through the engine of `penstock-io`, describes
//! them ([`format`](mod@format)), and makes them complete in one step. The entry points are
//! [`save::save`], [`load::checkpoint::Checkpoint`], [`care::verify::verify`] and
//! [`steps::store::Store`].
//!
//! This crate is independent of Python. It promises that an acknowledged save survives a crash bit
//! for bit, that no reader sees a mix of two attempts, that damage is an error and never data, and
//! that no input makes it run code or allocate far beyond the input's own size.
#![forbid(unsafe_code)]

mod commit;
mod error;
mod lease;
mod progress;

pub mod care;
pub mod format;
pub mod load;
#[cfg(feature = "objects")]
pub mod mirror;
pub mod options;
pub mod pipeline;
pub mod plan;
pub mod report;
pub mod save;
pub mod seal;
pub mod sign;
pub mod steps;
pub mod tier;

pub use error::{Error, Result};
pub use format::name::{
    MANIFEST, is_part_file, parse_step, part_file, rank_of_file, shard_file, signature_files,
    step_directory, step_of,
};
pub use progress::Progress;

/// The version of the format that this build writes, and the newest that it reads.
pub const FORMAT_VERSION: u64 = 1;
