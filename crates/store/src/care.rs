//! What is still good of a checkpoint, and how to get it out.

mod beside;
pub(crate) mod references;

pub mod salvage;
pub mod survey;
pub mod verify;
