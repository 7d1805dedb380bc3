//! Measurements between the host and a device, with the test driver.

use std::path::Path;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use penstock_bench::bench::Bench;
use penstock_bench::gpu::{LinkJob, Way, link, pinning, self_test};
use penstock_bench::job::{Job, Method, Pattern};
use penstock_bench::outcome::Outcome;
use penstock_cuda::{CuFile, Driver};
use penstock_cuda_fake::{Control, Leaks};
use penstock_io::buffer::DeviceStreams;
use penstock_store::Result;

use crate::jobs;

/// The test driver and its device, for one test at a time.
struct Machine {
    control: Control,
    device_streams: Arc<DeviceStreams>,
    cufile: Arc<CuFile>,
}

fn machine() -> MutexGuard<'static, Machine> {
    static MACHINE: LazyLock<Mutex<Machine>> = LazyLock::new(|| {
        let control = Control::new();
        let driver = Driver::open(&penstock_cuda_fake::library()).unwrap();
        let device_streams = Arc::new(DeviceStreams::new(&driver.device(0).unwrap()).unwrap());
        let cufile = Arc::new(CuFile::open(&penstock_cuda_fake::library()).unwrap());
        Mutex::new(Machine {
            control,
            device_streams,
            cufile,
        })
    });
    let machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    machine.control.clear_faults();
    machine.control.set_garbles(false);
    machine.control.set_pinned_bytes_max(u64::MAX);
    machine
}

impl Machine {
    /// Everything not released, except for the streams.
    fn left(&self) -> Leaks {
        let left = self.control.leaks();
        Leaks {
            streams: 0,
            retained: 0,
            ..left
        }
    }

    fn run(&self, job: &Job) -> Result<Outcome> {
        let cufile = (job.method == Method::Cufile).then(|| Arc::clone(&self.cufile));
        Bench::prepare_with(job.clone(), Some(Arc::clone(&self.device_streams)), cufile)?.run(0.0)
    }
}

fn link_job() -> LinkJob {
    LinkJob {
        block_bytes: vec![64 << 10, 1 << 20],
        ways: vec![Way::ToDevice, Way::ToHost, Way::Both],
        is_batched: vec![false, true],
        window_bytes: 4 << 20,
        seconds: 1e-3,
        rounds: 2,
    }
}

#[test]
fn a_link_has_a_rate_of_each_kind_in_each_round() {
    let machine = machine();
    let found = link(&machine.device_streams, &link_job()).unwrap();
    assert_eq!(found.rates.len(), 2 * 3 * 2);
    assert_eq!(found.unpinned, None);
    for rate in &found.rates {
        assert_eq!(rate.gb_per_second.len(), 2);
        assert!(rate.gb_per_second.iter().all(|&rate| rate > 0.0));
    }
    assert_eq!(machine.left(), Leaks::default());
}

#[test]
fn copies_go_by_as_few_calls_as_was_asked_for() {
    let machine = machine();
    for (is_batched, call, others) in [
        (false, "cuMemcpyDtoHAsync_v2", "cuMemcpyBatchAsync_v2"),
        (true, "cuMemcpyBatchAsync_v2", "cuMemcpyDtoHAsync_v2"),
    ] {
        let job = LinkJob {
            block_bytes: vec![64 << 10],
            ways: vec![Way::ToHost],
            is_batched: vec![is_batched],
            rounds: 1,
            ..link_job()
        };
        let before = (machine.control.calls(call), machine.control.calls(others));
        link(&machine.device_streams, &job).unwrap();
        assert!(machine.control.calls(call) > before.0);
        assert_eq!(machine.control.calls(others), before.1);
    }
}

#[test]
fn link_jobs_that_cannot_be_are_refused() {
    link_job().check().unwrap();
    let refused = [
        LinkJob {
            window_bytes: 1,
            ..link_job()
        },
        LinkJob {
            block_bytes: vec![0],
            ..link_job()
        },
        LinkJob {
            seconds: f64::NAN,
            ..link_job()
        },
        LinkJob {
            rounds: 0,
            ..link_job()
        },
    ];
    for job in refused {
        assert!(job.check().is_err(), "{job:?}");
    }
}

#[test]
fn a_link_without_pinned_memory_says_so() {
    let machine = machine();
    machine.control.set_pinned_bytes_max(0);
    let found = link(&machine.device_streams, &link_job()).unwrap();
    assert!(found.unpinned.unwrap().contains("cuMemHostRegister"));
}

#[test]
fn what_is_garbled_on_its_way_is_found() {
    let machine = machine();
    let tested = self_test(&machine.device_streams).unwrap();
    assert!(tested.wrong.is_none() && tested.unpinned.is_none());
    assert_eq!(tested.pinned_bytes, 64 << 20);
    machine.control.set_garbles(true);
    let wrong = self_test(&machine.device_streams).unwrap().wrong.unwrap();
    assert_eq!((wrong.offset, wrong.is_batched), (0, false));
    assert_eq!(machine.left(), Leaks::default());
}

#[test]
fn pinning_is_measured_both_ways_and_given_back() {
    let machine = machine();
    let calls = |machine: &Machine| {
        [
            "cuMemHostAlloc",
            "cuMemFreeHost",
            "cuMemHostRegister_v2",
            "cuMemHostUnregister",
        ]
        .map(|name| machine.control.calls(name))
    };
    let before = calls(&machine);
    let found = pinning(machine.device_streams.device(), 8 << 20).unwrap();
    assert_eq!(found.bytes, 8 << 20);
    assert_eq!(calls(&machine), before.map(|count| count + 1));
    assert_eq!(machine.left(), Leaks::default());
}

fn job(directory: &Path) -> Job {
    Job {
        device: Some(0),
        ..jobs::job(directory)
    }
}

#[test]
fn what_a_device_writes_is_read_back_by_it_and_by_the_host() {
    let machine = machine();
    for (method, depth) in [
        (Method::Posix, 1),
        (Method::Threads, 1),
        (Method::Threads, 8),
        (Method::Cufile, 1),
    ] {
        for threads in [1, 3] {
            let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let written = Job {
                method,
                depth,
                threads,
                ..job(directory.path())
            };
            let outcome = machine.run(&written).unwrap();
            assert!(outcome.bytes >= 4_264_404 && outcome.fallback.is_none());
            let read = Job {
                pattern: Pattern::Read,
                ..written
            };
            for pattern in [Pattern::Read, Pattern::RandomRead] {
                let found = machine
                    .run(&Job {
                        pattern,
                        ..read.clone()
                    })
                    .unwrap();
                assert_eq!((found.damaged, found.checked), (None, found.requests));
                // Random reads are whole blocks.
                assert!(found.bytes <= outcome.bytes && found.bytes > outcome.bytes / 2);
                let counted: u64 = found.latencies.iter().map(|&(_, count)| count).sum();
                assert_eq!(counted, found.requests);
            }
            let of_host = Job {
                device: None,
                method: Method::Threads,
                ..read
            };
            let found = Bench::prepare(of_host).unwrap().run(0.0).unwrap();
            assert_eq!((found.damaged, found.checked), (None, found.requests));
        }
    }
    assert_eq!(machine.left(), Leaks::default());
}

#[test]
fn what_a_device_has_got_is_what_is_checked() {
    let machine = machine();
    for (method, depth) in [(Method::Posix, 1), (Method::Threads, 4)] {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let written = Job {
            method,
            depth,
            ..job(directory.path())
        };
        machine.run(&written).unwrap();
        machine.control.set_garbles(true);
        let read = Job {
            pattern: Pattern::Read,
            ..written
        };
        assert!(machine.run(&read).unwrap().damaged.is_some());
        machine.control.set_garbles(false);
    }
}

#[test]
fn memory_that_cannot_be_pinned_is_told_of() {
    let machine = machine();
    machine.control.set_pinned_bytes_max(0);
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let outcome = machine.run(&job(directory.path())).unwrap();
    assert!(outcome.fallback.unwrap().starts_with("unpinned: "));
}

#[test]
fn a_copy_that_fails_ends_the_job_and_leaves_nothing() {
    let machine = machine();
    for (method, depth) in [(Method::Posix, 1), (Method::Threads, 8)] {
        for pattern in [Pattern::Write, Pattern::Read] {
            let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            let written = Job {
                method,
                depth,
                ..job(directory.path())
            };
            let call = match pattern {
                Pattern::Write => "cuMemcpyDtoHAsync_v2",
                Pattern::Read | Pattern::RandomRead => {
                    machine.run(&written).unwrap();
                    "cuMemcpyHtoDAsync_v2"
                }
            };
            machine.control.fail_call(call, 20, 700);
            let failed = machine.run(&Job { pattern, ..written });
            let error = failed.unwrap_err().to_string();
            assert!(error.contains(call.trim_end_matches("_v2")), "{error}");
            assert_eq!(machine.left(), Leaks::default());
        }
    }
}

#[test]
fn a_ring_that_has_nothing_of_devices_is_refused() {
    for method in [Method::Executor, Method::UringRegistered] {
        let refused = Job {
            method,
            ..job(Path::new("/"))
        };
        assert!(refused.check().is_err());
    }
}

#[test]
fn the_way_that_cufile_went_is_counted() {
    let machine = machine();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let written = Job {
        method: Method::Cufile,
        ..job(directory.path())
    };
    for pattern in [Pattern::Write, Pattern::Read] {
        let outcome = machine
            .run(&Job {
                pattern,
                ..written.clone()
            })
            .unwrap();
        let counts = outcome.cufile.unwrap();
        assert_eq!((counts.by_peers, counts.by_module), (0, 0));
        assert_eq!(counts.by_host, outcome.requests);
    }
}

#[test]
fn a_cufile_that_fails_ends_the_job_with_its_words() {
    let machine = machine();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let written = Job {
        method: Method::Cufile,
        ..job(directory.path())
    };
    machine.control.fail_call("cuFileWrite", 3, 8);
    let error = machine.run(&written).unwrap_err().to_string();
    assert!(error.contains("cuFileWrite: cuFile error 5008"), "{error}");
    assert!(error.contains("does not work on this file"), "{error}");
    let missing = CuFile::open(Path::new("/nowhere/libcufile.so.0")).unwrap_err();
    assert!(
        missing
            .to_string()
            .starts_with("no cuFile /nowhere/libcufile.so.0: ")
    );
}
