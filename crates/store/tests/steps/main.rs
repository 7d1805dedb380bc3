//! Many checkpoints: kept, deleted, set aside, read again.

mod aside;
#[path = "../common/mod.rs"]
mod common;
mod lacking;
mod nested;
mod retention;
mod scrub;
mod store;
mod unlocked;
