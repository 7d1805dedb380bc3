//! Many checkpoints in one directory, each a step: which are there, kept, protected, set aside,
//! removed and read again.

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
