//! `io_uring` refused by the kernel, as under the seccomp profile of a container: really refused,
//! by a seccomp filter on the thread that opens the engine.
//!
//! The filter applies to its thread and the threads started by it, so each test runs in a thread of
//! its own.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use penstock_io::Error;
use penstock_io::buffer::Memory;
use penstock_io::engine::{EngineChoice, EngineConfig, Op, OpKind, Opened, open};
use penstock_io::file::{Direct, File};
use seccompiler::{BpfProgram, SeccompAction, SeccompFilter};

const EPERM: i32 = 1;
const ENOSYS: i32 = 38;

/// The number of `io_uring_setup`, the same on every architecture.
const IO_URING_SETUP: i64 = 425;

/// Runs `test` in a thread where `io_uring_setup` returns `errno`.
fn with_refusal(errno: i32, test: fn()) {
    let confined = std::thread::spawn(move || {
        let filter = SeccompFilter::new(
            BTreeMap::from([(IO_URING_SETUP, Vec::new())]),
            SeccompAction::Allow,
            SeccompAction::Errno(errno.cast_unsigned()),
            std::env::consts::ARCH.try_into().unwrap(),
        );
        let program: BpfProgram = filter.unwrap().try_into().unwrap();
        seccompiler::apply_filter(&program).unwrap();
        test();
    });
    confined.join().unwrap();
}

fn config(choice: EngineChoice) -> EngineConfig {
    EngineConfig {
        choice,
        queue_depth: 8,
    }
}

/// Writes and reads through an engine, to check that it really works.
fn assert_works(opened: Opened) {
    let Opened { mut engine, .. } = opened;
    let directory = tempfile::tempdir().unwrap();
    let file = Arc::new(File::create(&directory.path().join("file"), Direct::Off).unwrap());
    let mut buf = Memory::allocate(4096).unwrap().share().1;
    buf.as_mut_slice().fill(42);
    let kind = OpKind::Write { offset: 0, buf };
    engine
        .submit(Op {
            token: 1,
            file: Arc::clone(&file),
            kind,
        })
        .unwrap();
    let mut completed = Vec::new();
    engine
        .poll(1, Some(Duration::from_secs(60)), &mut completed)
        .unwrap();
    assert_eq!(completed.pop().unwrap().result.unwrap(), 4096);
    let kind = OpKind::Read {
        offset: 0,
        buf: Memory::allocate(4096).unwrap().share().1,
    };
    engine
        .submit(Op {
            token: 2,
            file,
            kind,
        })
        .unwrap();
    engine
        .poll(1, Some(Duration::from_secs(60)), &mut completed)
        .unwrap();
    let read = completed.pop().unwrap();
    assert_eq!(read.result.unwrap(), 4096);
    assert!(read.buf.unwrap().as_slice().iter().all(|&byte| byte == 42));
}

fn assert_auto_falls_back(because: &str) {
    let opened = open(&config(EngineChoice::Auto)).unwrap();
    assert_eq!(opened.engine.capabilities().name, "threads");
    let reason = opened.fallback.as_deref().expect("a reason");
    assert!(
        reason.contains(because),
        "{reason:?} does not say {because:?}"
    );
    assert_works(opened);
}

#[cfg(feature = "uring")]
fn assert_uring_is_unavailable(errno: i32) {
    match open(&config(EngineChoice::Uring)) {
        Err(Error::EngineUnavailable {
            engine: "uring",
            reason,
            source,
        }) => {
            assert_eq!(source.raw_os_error(), Some(errno));
            assert!(reason.contains("io_uring"), "{reason}");
        }
        other => panic!("io_uring is refused, and yet: {other:?}"),
    }
}

#[test]
#[cfg(feature = "uring")]
fn auto_falls_back_when_a_profile_forbids_io_uring() {
    with_refusal(EPERM, || assert_auto_falls_back("EPERM"));
}

#[test]
#[cfg(feature = "uring")]
fn auto_falls_back_when_a_profile_hides_io_uring() {
    with_refusal(ENOSYS, || assert_auto_falls_back("ENOSYS"));
}

#[test]
#[cfg(feature = "uring")]
fn uring_on_demand_is_an_error_when_refused() {
    with_refusal(EPERM, || assert_uring_is_unavailable(EPERM));
    with_refusal(ENOSYS, || assert_uring_is_unavailable(ENOSYS));
}

#[test]
fn threads_do_not_need_io_uring() {
    with_refusal(EPERM, || {
        let opened = open(&config(EngineChoice::Threads)).unwrap();
        assert_eq!(opened.fallback, None);
        assert_works(opened);
    });
}

#[test]
#[cfg(not(feature = "uring"))]
fn a_build_without_io_uring_says_so() {
    assert_auto_falls_back("left out of this build");
    let refused = open(&config(EngineChoice::Uring));
    assert!(matches!(
        refused,
        Err(Error::EngineUnavailable {
            engine: "uring",
            ..
        })
    ));
    with_refusal(ENOSYS, || assert_auto_falls_back("left out of this build"));
}
