//! Stores of many checkpoints: retention, deletion, quarantine, scrubbing.

#[path = "../common/mod.rs"]
mod common;
mod lacking;
mod nested;
mod quarantine;
mod retention;
mod scrub;
mod store;
mod unlocked;
