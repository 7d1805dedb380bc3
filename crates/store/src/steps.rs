//! A store: many checkpoints in one directory, one per step, listed, retained, protected,
//! quarantined, deleted and scrubbed.

pub(crate) mod protect;
pub(crate) mod removal;

mod aged;
mod layered;
pub mod marks;
mod nested;
pub mod quarantine;
pub mod retention;
pub mod scrub;
pub mod store;
pub mod sweep;
pub mod whole;
