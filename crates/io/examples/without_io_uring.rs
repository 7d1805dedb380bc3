//! Runs a program for which the kernel refuses `io_uring`, as seccomp profiles of containers do.
//!
//! `make test-rust` gives it to Cargo as the runner of tests, which need not be compiled again:
//!
//! `cargo test --config 'target."cfg(all())".runner = "target/debug/examples/without_io_uring"'`

use std::collections::BTreeMap;
use std::error::Error;
use std::os::unix::process::CommandExt;
use std::process::Command;

use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

const EPERM: u32 = 1;

/// The number of `io_uring_setup`, the same on every architecture.
const IO_URING_SETUP: i64 = 425;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let program = arguments
        .next()
        .ok_or("usage: without_io_uring PROGRAM [ARGUMENT]...")?;
    let filter = SeccompFilter::new(
        BTreeMap::from([(IO_URING_SETUP, Vec::new())]),
        SeccompAction::Allow,
        SeccompAction::Errno(EPERM),
        std::env::consts::ARCH.try_into()?,
    );
    let filter: BpfProgram = filter?.try_into()?;
    // It stays in force for the program and its children.
    seccompiler::apply_filter(&filter)?;
    Err(Command::new(program).args(arguments).exec().into())
}
