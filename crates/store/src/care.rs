//! Care for checkpoints: verification, damage surveys, and salvage of intact tensors.

mod beside;
pub(crate) mod references;

pub mod salvage;
pub mod survey;
pub mod verify;
