//! A store: many checkpoints in one directory, one per step, listed, retained, protected,
//! quarantined, deleted and scrubbed.

pub(crate) mod protect;
pub(crate) mod removal;

mod aged;
pub mod aside;
mod layered;
pub mod marks;
mod nested;
pub mod retention;
pub mod scrub;
pub mod store;
pub mod sweep;
pub mod whole;
