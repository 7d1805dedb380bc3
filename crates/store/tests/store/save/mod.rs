//! Jobs, their memory, and linked files.

mod job;
mod linked;
