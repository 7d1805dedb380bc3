//! Stores of many checkpoints: retention, deletion, quarantine, scrubbing.

mod lacking;
mod nested;
mod quarantine;
mod retention;
mod scrub;
mod store;
mod unlocked;
