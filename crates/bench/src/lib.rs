//! Measuring workloads.
//!
//! A [`Job`](job::Job) describes the work of one process: requests, their sizes, system calls and
//! threads. [`plan`] lays the requests out, [`bench::Bench`] prepares the files and runs the
//! requests, and an [`Outcome`](outcome::Outcome) has the results. The measured loop does as
//! little as fio's, so that both agree on the same workload.
//!
//! [`gpu`] measures the path between the host and a GPU.
//!
//! Choosing workloads, starting processes and plotting is left to the caller.
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
