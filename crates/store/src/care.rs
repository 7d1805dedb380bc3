//! Care for checkpoints: verification, damage surveys, and salvage of intact tensors.

pub(crate) mod references;
mod sidecar;

pub mod salvage;
pub mod survey;
pub mod verify;
