//! Checkpoints of tensors on devices.

#[path = "../common/mod.rs"]
mod common;
mod loads;
mod saves;
