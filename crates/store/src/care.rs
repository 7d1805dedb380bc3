//! Care for checkpoints: verification, damage surveys, salvage of intact tensors, changes of who
//! can open sealed checkpoints, signatures.

mod hashed;
pub(crate) mod references;

pub mod salvage;
pub mod sign;
pub mod survey;
pub mod verify;
pub mod wraps;
