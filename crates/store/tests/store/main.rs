//! Checkpoints from their commit to their removal.

mod care;
mod commit;
#[path = "../common/mod.rs"]
mod common;
mod concurrency;
mod save;
mod steps;
