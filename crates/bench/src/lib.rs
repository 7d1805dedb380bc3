//! Measuring workloads.
//!
//! A [`Job`](job::Job) says what one process does: which requests, of what size, by which system
//! calls, on how many threads. [`plan`] lays them out, [`bench::Bench`] prepares the files and
//! runs them, and an [`Outcome`](outcome::Outcome) has what came of it. The loop is as bare as that
//! of fio, so that the two agree where they are told to do the same.
//!
//! What lies between a disk and a GPU, [`gpu`] measures.
//!
//! Nothing here decides what is worth measuring, starts processes or draws: that is the caller's.
#![forbid(unsafe_code)]

mod batches;
pub mod bench;
mod content;
pub mod gpu;
pub mod job;
mod method;
pub mod outcome;
pub mod plan;
mod staged;
mod worker;
