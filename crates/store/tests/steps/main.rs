//! Stores of many checkpoints: retention, deletion, quarantine, scrubbing.

mod aside;
#[path = "../common/mod.rs"]
mod common;
mod lacking;
mod nested;
mod retention;
mod scrub;
mod store;
mod unlocked;
