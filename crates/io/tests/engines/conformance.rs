//! The conformance suite, on every backend, buffered and direct, bare and decorated.

use std::path::Path;
use std::sync::Arc;

use crate::support;
use penstock_io::conformance::{self as plain, Subject, faults};
use penstock_io::engine::{Engine, EngineChoice, EngineConfig, open};
use penstock_io::faulty::{Faults, Faulty};
use penstock_io::file::{Direct, File};
use penstock_io::transfer::WholeTransfers;

fn bare(choice: EngineChoice, queue_depth: usize) -> Box<dyn Engine> {
    open(&EngineConfig {
        choice,
        queue_depth,
    })
    .unwrap()
    .engine
}

fn threads(queue_depth: usize) -> Box<dyn Engine> {
    bare(EngineChoice::Threads, queue_depth)
}

fn threads_decorated(queue_depth: usize) -> Box<dyn Engine> {
    decorate(threads(queue_depth))
}

fn sync(queue_depth: usize) -> Box<dyn Engine> {
    bare(EngineChoice::Sync, queue_depth)
}

fn sync_decorated(queue_depth: usize) -> Box<dyn Engine> {
    decorate(sync(queue_depth))
}

#[cfg(feature = "uring")]
fn uring(queue_depth: usize) -> Box<dyn Engine> {
    bare(EngineChoice::Uring, queue_depth)
}

#[cfg(feature = "uring")]
fn uring_decorated(queue_depth: usize) -> Box<dyn Engine> {
    decorate(uring(queue_depth))
}

/// Wraps an engine that cuts half of its transfers short, and completes in any order, for whole
/// transfers.
fn decorate(engine: Box<dyn Engine>) -> Box<dyn Engine> {
    let faults = Faults::new(20_260_101)
        .short_transfers(50)
        .late_completions(40);
    let faults = Arc::new(faults);
    Box::new(WholeTransfers::new(Box::new(Faulty::new(engine, faults))))
}

/// Runs one case in a directory of its own; prints a skip message where the machine cannot run it.
fn check(case: fn(&Subject), open: fn(usize) -> Box<dyn Engine>, backend: &str, direct: Direct) {
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let reason = match (backend, direct) {
        ("uring", _) if uring_refused().is_some() => uring_refused(),
        (_, Direct::On) => no_direct_io(directory.path()),
        _ => None,
    };
    if let Some(reason) = reason {
        return support::skip(&format!("conformance, {backend}, direct {direct}"), &reason);
    }
    case(&Subject {
        open,
        directory: directory.path().to_owned(),
        direct,
    });
}

fn uring_refused() -> Option<String> {
    open(&EngineConfig {
        choice: EngineChoice::Auto,
        queue_depth: 1,
    })
    .unwrap()
    .fallback
}

fn no_direct_io(directory: &Path) -> Option<String> {
    let probe = File::create(&directory.join("probe"), Direct::Auto).unwrap();
    probe.fallback().map(str::to_owned)
}

/// A module of tests for a list of cases and an engine, buffered and direct.
macro_rules! suite {
    ($name:ident: $engine:ident on $backend:literal, $from:ident: $($case:ident),+ $(,)?) => {
        mod $name {
            mod buffered {
                $(#[test]
                fn $case() {
                    let case = super::super::$from::$case;
                    super::super::check(
                        case, super::super::$engine, $backend, super::super::Direct::Off,
                    );
                })+
            }
            mod direct {
                $(#[test]
                fn $case() {
                    let case = super::super::$from::$case;
                    super::super::check(
                        case, super::super::$engine, $backend, super::super::Direct::On,
                    );
                })+
            }
        }
    };
}

macro_rules! plain_suite {
    ($name:ident: $engine:ident on $backend:literal $(, $more:ident)?) => {
        suite! {
            $name: $engine on $backend, plain:
            round_trip,
            queue_full,
            read_past_the_end,
            dropped_in_flight,
            sync_data,
            many_out_of_order,
            errors_carry_errno,
            zero_length,
            poll_minimum,
            poll_without_waiting,
            padded_tail,
            $($more,)?
        }
    };
}

macro_rules! fault_suite {
    ($name:ident: $engine:ident on $backend:literal) => {
        suite! {
            $name: $engine on $backend, faults:
            short_transfers_are_resumed,
            short_reads_end_at_the_end,
            interruptions_are_retried,
            endless_interruptions_end,
            errors_surface,
            errors_surface_after_a_short_transfer,
            a_failed_sync_is_final,
            faults_repeat,
            decorated_queue_full,
        }
    };
}

plain_suite!(on_threads: threads on "threads", woken);
plain_suite!(on_threads_decorated: threads_decorated on "threads", woken);
fault_suite!(on_threads_with_faults: threads on "threads");

// It never waits, so nothing has to wake it.
plain_suite!(on_sync: sync on "sync");
plain_suite!(on_sync_decorated: sync_decorated on "sync");
fault_suite!(on_sync_with_faults: sync on "sync");

#[cfg(feature = "uring")]
plain_suite!(on_uring: uring on "uring", woken);
#[cfg(feature = "uring")]
plain_suite!(on_uring_decorated: uring_decorated on "uring", woken);
#[cfg(feature = "uring")]
fault_suite!(on_uring_with_faults: uring on "uring");
