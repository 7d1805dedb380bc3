//! Checkpoints on storage.
//!
//! This crate turns tensors into files that other tools read, and back: it plans where every byte
//! goes ([`plan`]), moves the bytes ([`pipeline`]) through the engine of `penstock-io`, describes
//! them ([`shard`], [`part`], [`manifest`]), and makes them complete in one step. The entry points
//! are [`save::save`], [`checkpoint::Checkpoint`], [`verify::verify`] and [`store::Store`].
//!
//! It knows nothing of Python. It promises that an acknowledged save survives a crash bit for bit,
//! that no reader sees a mix of two attempts, that damage is an error and never data, and that no
//! input makes it run code or allocate far beyond the input's own size.
#![forbid(unsafe_code)]

mod commit;
mod description;
mod error;
mod lease;
mod name;
mod plain;
mod progress;
mod protect;
mod references;
mod removal;
mod reshard;
mod tree;

pub mod aside;
pub mod checkpoint;
pub mod digest;
pub mod dtype;
pub mod fill;
pub mod manifest;
pub mod marks;
pub mod options;
pub mod part;
pub mod pipeline;
pub mod plan;
pub mod report;
pub mod retention;
pub mod salvage;
pub mod save;
pub mod scrub;
pub mod shard;
pub mod store;
pub mod survey;
pub mod verify;

pub use error::{Error, Result};
pub use name::{MANIFEST, step_directory, step_of};
pub use progress::Progress;

/// The version of the format that this build writes, and the newest that it reads.
pub const FORMAT_VERSION: u64 = 1;
