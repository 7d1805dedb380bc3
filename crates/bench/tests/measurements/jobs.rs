//! Jobs of every kind on real files, and the properties of their plans.

use std::path::Path;

use penstock_bench::bench::Bench;
use penstock_bench::job::{ALIGNMENT, Job, Layout, Method, Pattern};
use penstock_bench::outcome::Outcome;
use penstock_bench::plan::Plan;
use penstock_io::engine::{EngineChoice, EngineConfig, open};
use penstock_store::Error;
use proptest::prelude::*;

const METHODS: [Method; 4] = [
    Method::Posix,
    Method::Threads,
    Method::Uring,
    Method::UringRegistered,
];
const LAYOUTS: [Layout; 3] = [
    Layout::FilePerTensor,
    Layout::FilePerProcess,
    Layout::SharedFile,
];

/// A small job of one process on the host.
pub(crate) fn job(directory: &Path) -> Job {
    Job {
        directory: directory.to_owned(),
        process: 0,
        processes: 1,
        method: Method::Posix,
        direct: false,
        layout: Layout::FilePerProcess,
        aggregated: true,
        pattern: Pattern::Write,
        tensors: vec![1 << 20, 100, 70_000, 3 << 20],
        copies: false,
        block_bytes: 64 << 10,
        depth: 1,
        threads: 1,
        allocates: true,
        syncs: true,
        verifies: true,
        seconds: None,
        device: None,
        seed: 7,
    }
}

fn run(job: &Job) -> Outcome {
    Bench::prepare(job.clone()).unwrap().run(0.0).unwrap()
}

fn has_uring() -> bool {
    let choice = EngineChoice::Uring;
    let opened = open(&EngineConfig {
        choice,
        queue_depth: 1,
    });
    opened
        .inspect_err(|error| eprintln!("SKIPPED io_uring: {error}"))
        .is_ok()
}

/// On a disk, because tmpfs may not support direct I/O.
fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

#[test]
fn what_is_written_in_any_way_is_read_back_in_any_other() {
    let methods = if has_uring() {
        &METHODS[..]
    } else {
        &METHODS[..2]
    };
    for layout in LAYOUTS {
        for (aggregated, direct) in [(true, true), (true, false), (false, true), (false, false)] {
            for (number, &method) in methods.iter().enumerate() {
                let directory = directory();
                let depth = if method == Method::Posix { 1 } else { 8 };
                let written = Job {
                    method,
                    layout,
                    aggregated,
                    direct,
                    depth,
                    threads: 2,
                    ..job(directory.path())
                };
                let outcome = run(&written);
                let bytes = Plan::new(&written).bytes();
                assert_eq!((outcome.bytes, outcome.is_direct), (bytes, direct));
                assert_eq!(outcome.metadata.sync, outcome.metadata.create);
                assert!(outcome.fallback.is_none(), "{:?}", outcome.fallback);
                let other = methods[(number + 1) % methods.len()];
                for pattern in [Pattern::Read, Pattern::RandomRead] {
                    let read = Job {
                        method: other,
                        pattern,
                        depth: if other == Method::Posix { 1 } else { 8 },
                        ..written.clone()
                    };
                    let outcome = run(&read);
                    assert_eq!(outcome.damaged, None);
                    assert_eq!(outcome.checked, outcome.requests);
                    let counted: u64 = outcome.latencies.iter().map(|&(_, count)| count).sum();
                    assert_eq!(counted, outcome.requests);
                    assert_eq!(outcome.timeline.iter().sum::<u64>(), outcome.bytes);
                }
            }
        }
    }
}

#[test]
fn processes_of_one_file_keep_to_their_parts() {
    let directory = directory();
    let of = |process| Job {
        layout: Layout::SharedFile,
        process,
        processes: 3,
        ..job(directory.path())
    };
    for process in 0..3 {
        run(&of(process));
    }
    for process in 0..3 {
        let read = Job {
            pattern: Pattern::Read,
            ..of(process)
        };
        assert_eq!(run(&read).damaged, None);
    }
}

#[test]
fn a_changed_byte_is_found() {
    let directory = directory();
    run(&job(directory.path()));
    let path = directory.path().join("process-00000.bin");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[1_234_567] ^= 1;
    std::fs::write(&path, bytes).unwrap();
    let read = Job {
        pattern: Pattern::Read,
        ..job(directory.path())
    };
    let (found, offset) = run(&read).damaged.unwrap();
    assert_eq!(
        (found, offset),
        (path.display().to_string(), 1_234_567 / 8 * 8)
    );
}

#[test]
fn a_job_goes_on_until_its_time_is_over() {
    let directory = directory();
    run(&job(directory.path()));
    let timed = Job {
        pattern: Pattern::RandomRead,
        seconds: Some(0.3),
        threads: 3,
        ..job(directory.path())
    };
    let outcome = run(&timed);
    assert!(outcome.seconds >= 0.3 && outcome.requests > 0);
}

#[test]
fn a_cancelled_job_is_interrupted() {
    let directory = directory();
    let bench = Bench::prepare(job(directory.path())).unwrap();
    bench.cancel();
    assert!(matches!(bench.run(0.0), Err(Error::Interrupted)));
}

#[test]
fn nothing_is_written_over() {
    let directory = directory();
    run(&job(directory.path()));
    assert!(Bench::prepare(job(directory.path())).is_err());
}

#[test]
fn jobs_that_cannot_be_are_refused() {
    let valid = job(Path::new("/"));
    valid.check().unwrap();
    let direct = Job {
        direct: true,
        block_bytes: 100 << 3,
        ..valid.clone()
    };
    let refused = [
        direct,
        Job {
            block_bytes: 0,
            ..valid.clone()
        },
        Job {
            depth: 0,
            ..valid.clone()
        },
        Job {
            depth: 2,
            ..valid.clone()
        },
        Job {
            threads: 0,
            ..valid.clone()
        },
        Job {
            process: 1,
            ..valid.clone()
        },
        Job {
            tensors: vec![],
            ..valid.clone()
        },
        Job {
            tensors: vec![0, 0],
            ..valid.clone()
        },
        Job {
            tensors: vec![u64::MAX, 1],
            ..valid.clone()
        },
        Job {
            seconds: Some(0.0),
            ..valid.clone()
        },
        Job {
            seconds: Some(f64::NAN),
            ..valid
        },
    ];
    for job in refused {
        assert!(job.check().is_err(), "{job:?}");
    }
}

proptest! {
    #[test]
    fn requests_cover_all_tensors_once(
        tensors in prop::collection::vec(0_u64..300_000, 1..12),
        layout in prop::sample::select(&LAYOUTS[..]),
        blocks in 1_u32..20,
        aggregated: bool,
        direct: bool,
        processes in 1_u32..4,
    ) {
        prop_assume!(tensors.iter().sum::<u64>() > 0);
        let block_bytes = blocks * 4096;
        let job = Job {
            layout, aggregated, direct, processes, block_bytes,
            process: processes - 1,
            tensors: tensors.clone(),
            ..job(Path::new("/x"))
        };
        job.check().unwrap();
        let plan = Plan::new(&job);
        let mut start = 0;
        let mut ends = vec![0; plan.files.len()];
        for request in &plan.requests {
            let bytes = u64::from(request.bytes);
            prop_assert!(bytes > 0 && request.bytes <= block_bytes);
            let file = request.file as usize;
            // In order, without overlap, and inside the file.
            prop_assert!(request.offset >= ends[file]);
            ends[file] = request.offset + bytes;
            prop_assert!(ends[file] <= plan.files[file].bytes);
            let alignment = if direct { ALIGNMENT } else { 8 };
            prop_assert!(request.offset.is_multiple_of(alignment) && bytes.is_multiple_of(alignment));
            // No byte is left out: a request begins no later than the previous one's data ended.
            prop_assert!(request.start <= start);
            start = start.max(request.start + bytes);
            if !aggregated {
                let tensor = plan.ends.partition_point(|&end| end <= request.start);
                prop_assert!(request.start + bytes <= plan.ends[tensor].next_multiple_of(alignment)
                    + request.start % alignment + alignment);
            }
        }
        prop_assert!(start >= tensors.iter().sum::<u64>());
    }
}
