//! Kernels receive the rows that they request, on the test driver: the same source that is
//! compiled for devices runs on host threads.

mod common;

use std::fs;
use std::os::unix::fs::FileExt;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use penstock_cuda::{Device, Driver, Stream};
use penstock_cuda_fake::Control;
use penstock_gather::{Error, Proxy, Reader};
use penstock_io::buffer::DeviceStreams;
use penstock_io::engine::EngineChoice;
use penstock_io::executor::Executor;
use penstock_io::faulty::{Failure, Faults, LentDevice, OpClass, Repeat};
use penstock_io::fifo::{self, Fifo};

use common::{EIO, Shape, byte, directory, executor, reader, table};

const STAGING_BYTES: usize = 1 << 20;

struct Machine {
    control: Control,
    device: Arc<Device>,
    device_streams: Arc<DeviceStreams>,
}

/// One driver serves all tests, as in a program; each test uses it exclusively.
fn machine() -> MutexGuard<'static, Machine> {
    static MACHINE: LazyLock<Mutex<Machine>> = LazyLock::new(|| {
        let control = Control::new();
        let driver = Driver::open(&penstock_cuda_fake::library()).unwrap();
        let device = driver.device(0).unwrap();
        let device_streams = Arc::new(DeviceStreams::new(&device).unwrap());
        Mutex::new(Machine {
            control,
            device,
            device_streams,
        })
    });
    let machine = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    machine.control.clear_faults();
    machine
}

impl Machine {
    fn stream(&self) -> Arc<Stream> {
        Arc::new(Stream::new(&self.device).unwrap())
    }

    fn lent(&self, stream: &Arc<Stream>, content: &[u8]) -> LentDevice {
        LentDevice::new(&self.device_streams, stream, content).unwrap()
    }

    fn proxy(&self, reader: &Reader, staging_bytes: usize) -> Arc<Proxy> {
        let row_bytes = reader.table().value_bytes() as usize;
        let fifo = Fifo::new(&self.device, row_bytes, staging_bytes).unwrap();
        Arc::new(Proxy::new(reader.clone(), Arc::new(fifo)).unwrap())
    }

    fn rows(&self, of: &LentDevice, count: usize, width: usize) -> Vec<Vec<u8>> {
        let mut bytes = vec![0; count * width];
        self.control.peek(of.address(), &mut bytes);
        bytes.chunks(width).map(<[u8]>::to_vec).collect()
    }

    /// Gathers on a stream of its own, and returns the rows once it has completed.
    fn gather(&self, proxy: &Proxy, ids: &[i64]) -> Vec<Vec<u8>> {
        let stream = self.stream();
        let width = proxy.fifo().row_bytes();
        let content: Vec<u8> = ids.iter().flat_map(|id| id.to_ne_bytes()).collect();
        let asked = self.lent(&stream, &content);
        let out = self.lent(&stream, &vec![0xA1; ids.len() * width]);
        out.gather(proxy.fifo(), &asked, 8, ids.len()).unwrap();
        stream.synchronize().unwrap();
        self.rows(&out, ids.len(), width)
    }
}

fn expected(ids: &[i64], width: u64) -> Vec<Vec<u8>> {
    let row = |&id: &i64| (0..width).map(|at| byte(id as u64, at)).collect();
    ids.iter().map(row).collect()
}

fn ids(count: usize, rows: i64, seed: i64) -> Vec<i64> {
    (0..count as i64)
        .map(|at| (at * 7919 + seed * 104_729) % rows)
        .collect()
}

fn open(shape: Shape, directory: &std::path::Path, cached: Option<u32>) -> (Executor, Reader) {
    let executor = executor(EngineChoice::Auto, Faults::new(1));
    let reader = reader(table(directory, shape), &executor, cached, 0);
    (executor, reader)
}

#[test]
fn rows_of_every_size_arrive() {
    let machine = machine();
    let directory = directory();
    for (row_bytes, value_bytes) in [
        (1, 1),
        (6, 5),
        (100, 100),
        (512, 512),
        (4096, 4096),
        (12_288, 12_000),
    ] {
        let shape = Shape {
            value_bytes,
            parts: 2,
            ..Shape::plain(50, row_bytes)
        };
        for cached in [None, Some(16)] {
            let (_executor, reader) = open(shape, directory.path(), cached);
            let proxy = machine.proxy(&reader, STAGING_BYTES);
            for (count, seed) in [(1, 0), (31, 1), (32, 2), (33, 3), (400, 4)] {
                let ids = ids(count, 50, seed);
                assert_eq!(
                    machine.gather(&proxy, &ids),
                    expected(&ids, value_bytes),
                    "{row_bytes}"
                );
            }
            proxy.check().unwrap();
        }
    }
    assert_eq!(machine.control.leaks().modules, 0);
}

#[test]
fn ids_of_four_bytes_do_as_well() {
    let machine = machine();
    let directory = directory();
    let (_executor, reader) = open(Shape::plain(50, 8), directory.path(), None);
    let proxy = machine.proxy(&reader, STAGING_BYTES);
    let stream = machine.stream();
    let wanted = [3_i32, 49, 0];
    let content: Vec<u8> = wanted.iter().flat_map(|id| id.to_ne_bytes()).collect();
    let (asked, out) = (
        machine.lent(&stream, &content),
        machine.lent(&stream, &[0; 24]),
    );
    out.gather(proxy.fifo(), &asked, 4, 3).unwrap();
    stream.synchronize().unwrap();
    assert_eq!(machine.rows(&out, 3, 8), expected(&[3, 49, 0], 8));
}

/// Two slots, which the requests of three streams reuse again and again.
#[test]
fn slots_are_used_again_by_whoever_comes() {
    let machine = machine();
    let directory = directory();
    for cached in [None, Some(8)] {
        let (_executor, reader) = open(Shape::plain(300, 520), directory.path(), cached);
        let proxy = machine.proxy(&reader, 1);
        assert_eq!(proxy.fifo().slots(), 2);
        thread::scope(|scope| {
            for seed in 0..3 {
                let (machine, proxy) = (&*machine, &proxy);
                scope.spawn(move || {
                    for turn in 0..8 {
                        let ids = ids(500, 300, 10 * seed + turn);
                        assert_eq!(machine.gather(proxy, &ids), expected(&ids, 520));
                    }
                });
            }
        });
    }
}

#[test]
fn it_is_in_order_of_the_stream() {
    let machine = machine();
    let directory = directory();
    let (_executor, reader) = open(Shape::plain(50, 16), directory.path(), None);
    let proxy = machine.proxy(&reader, STAGING_BYTES);
    let stream = machine.stream();
    let mut asked = machine.lent(&stream, &7_i64.to_ne_bytes());
    let out = machine.lent(&stream, &[0; 16]);
    let held = machine.control.hold_stream(stream.raw() as u64);
    // The ids at the time of the kernel's turn count, not those at the call.
    asked.change(&9_i64.to_ne_bytes()).unwrap();
    out.gather(proxy.fifo(), &asked, 8, 1).unwrap();
    thread::sleep(Duration::from_millis(5));
    drop(held);
    stream.synchronize().unwrap();
    assert_eq!(machine.rows(&out, 1, 16), expected(&[9], 16));
}

#[test]
fn ids_that_are_none_are_reported_and_the_others_come() {
    let machine = machine();
    let directory = directory();
    let (_executor, reader) = open(Shape::plain(50, 16), directory.path(), None);
    let proxy = machine.proxy(&reader, STAGING_BYTES);
    for wrong in [50, -1] {
        let mut wanted = ids(64, 50, 1);
        wanted[40] = wrong;
        let found = machine.gather(&proxy, &wanted);
        assert_eq!(
            found[..32],
            expected(&wanted[..32], 16),
            "the post without it"
        );
        match proxy.check() {
            Err(Error::NoSuchRow { id, rows: 50 }) => assert_eq!(id, wrong),
            other => panic!("{other:?}"),
        }
        proxy.check().expect("it is told once");
        assert_eq!(machine.gather(&proxy, &[5]), expected(&[5], 16));
    }
}

#[test]
fn what_cannot_be_read_is_reported_and_later_rows_come() {
    let machine = machine();
    let directory = directory();
    let failure = Failure {
        class: Some(OpClass::Read),
        nth: 2,
        repeat: Repeat::Once,
        errno: EIO,
    };
    for cached in [None, Some(64)] {
        let executor = executor(EngineChoice::Auto, Faults::new(1).fail(failure));
        let table = table(directory.path(), Shape::plain(64, 4096));
        let reader = reader(table, &executor, cached, 0);
        let proxy = machine.proxy(&reader, STAGING_BYTES);
        machine.gather(&proxy, &ids(32, 64, 0));
        let error = proxy.check().expect_err("one read has failed");
        assert!(
            matches!(error, Error::Io(penstock_io::Error::Transfer { .. })),
            "{error:?}"
        );
        let ids = ids(64, 64, 3);
        assert_eq!(machine.gather(&proxy, &ids), expected(&ids, 4096));
    }
}

#[test]
fn damaged_rows_do_not_arrive_as_good_ones() {
    let machine = machine();
    let directory = directory();
    let shape = Shape {
        is_checked: true,
        ..Shape::plain(64, 4096)
    };
    let (_executor, reader) = open(shape, directory.path(), None);
    let file = fs::File::options()
        .write(true)
        .open(directory.path().join("part-0"))
        .unwrap();
    file.write_all_at(&[!byte(9, 0)], 9 * 4096).unwrap();
    let proxy = machine.proxy(&reader, STAGING_BYTES);
    let found = machine.gather(&proxy, &[1, 9]);
    assert_eq!(
        found,
        vec![vec![0xA1; 4096]; 2],
        "the post is not answered with rows"
    );
    let error = proxy.check();
    assert!(
        matches!(error, Err(Error::Damaged { row: 9, .. })),
        "{error:?}"
    );
    assert_eq!(machine.gather(&proxy, &[1]), expected(&[1], 4096));
}

#[test]
fn what_was_launched_gets_its_rows_before_the_end() {
    let machine = machine();
    let directory = directory();
    let (_executor, reader) = open(Shape::plain(50, 16), directory.path(), None);
    let stream = machine.stream();
    let wanted = ids(3000, 50, 0);
    let content: Vec<u8> = wanted.iter().flat_map(|id| id.to_ne_bytes()).collect();
    let asked = machine.lent(&stream, &content);
    for _ in 0..20 {
        let out = machine.lent(&stream, &[0; 48_000]);
        let proxy = machine.proxy(&reader, 1);
        out.gather(proxy.fifo(), &asked, 8, 3000).unwrap();
        drop(proxy);
        stream.synchronize().unwrap();
        assert_eq!(machine.rows(&out, 3000, 16), expected(&wanted, 16));
    }
    assert_eq!(machine.control.leaks().modules, 0);
}

/// Some tools return from a launch only when the kernel has ended.
#[test]
fn posts_are_served_while_the_launch_has_not_returned() {
    let machine = machine();
    let directory = directory();
    let (_executor, reader) = open(Shape::plain(50, 16), directory.path(), None);
    let proxy = machine.proxy(&reader, STAGING_BYTES);
    let stream = machine.stream();
    let asked = machine.lent(&stream, &7_i64.to_ne_bytes());
    let out = machine.lent(&stream, &[0; 16]);
    // The event after the launch cannot be recorded, yet the launched kernel is served.
    machine.control.fail_call("cuEventRecord", 1, 1);
    assert!(out.gather(proxy.fifo(), &asked, 8, 1).is_err());
    stream.synchronize().unwrap();
    assert_eq!(machine.rows(&out, 1, 16), expected(&[7], 16));
}

#[test]
fn a_capture_of_somebody_elses_survives_the_end() {
    let machine = machine();
    let directory = directory();
    let (_executor, reader) = open(Shape::plain(50, 16), directory.path(), None);
    let synchronized = machine.control.calls("cuCtxSynchronize");
    for _ in 0..3 {
        let proxy = machine.proxy(&reader, STAGING_BYTES);
        machine.gather(&proxy, &[5]);
    }
    // Synchronizing during a capture is refused and invalidates the capture.
    assert_eq!(machine.control.calls("cuCtxSynchronize"), synchronized);
}

#[test]
fn kernels_of_others_are_served_while_somebody_says_so() {
    let machine = machine();
    let directory = directory();
    let (_executor, reader) = open(Shape::plain(50, 16), directory.path(), None);
    let proxy = machine.proxy(&reader, STAGING_BYTES);
    // The proxy sleeps while no request is expected, and wakes for `serve`.
    for _ in 0..3 {
        thread::sleep(Duration::from_millis(2));
        let serving = proxy.serve();
        assert_eq!(machine.gather(&proxy, &[5, 6]), expected(&[5, 6], 16));
        drop(serving);
    }
}

#[test]
fn a_launch_that_is_refused_is_not_waited_for() {
    let machine = machine();
    let directory = directory();
    let (_executor, reader) = open(Shape::plain(50, 16), directory.path(), None);
    let proxy = machine.proxy(&reader, STAGING_BYTES);
    let stream = machine.stream();
    let (asked, out) = (
        machine.lent(&stream, &[0; 8]),
        machine.lent(&stream, &[0; 16]),
    );
    stream.synchronize().unwrap();
    for call in ["cuLaunchKernel", "cuStreamIsCapturing"] {
        machine.control.fail_call(call, 1, 1);
        let error = out.gather(proxy.fifo(), &asked, 8, 1).unwrap_err();
        assert!(matches!(error, penstock_io::Error::Cuda(_)), "{error}");
    }
    assert_eq!(machine.gather(&proxy, &[5]), expected(&[5], 16));
    let since = Instant::now();
    drop(proxy);
    assert!(since.elapsed() < common::HANG);
}

#[test]
fn posts_that_are_answered_at_once_take_some_time() {
    let machine = machine();
    for (warps, posts) in [(1, 1), (1, 100), (8, 300), (10_000, 5000)] {
        let took = fifo::measure_posts(&machine.device, warps, posts).unwrap();
        assert!(took > Duration::ZERO);
    }
}

#[test]
fn rows_that_kernels_read_themselves_take_some_time() {
    let machine = machine();
    for (rows, row_bytes, count) in [(1, 1, 1), (100, 48, 1000), (7, 4096, 5)] {
        let took = fifo::measure_packing(&machine.device, rows, row_bytes, count).unwrap();
        assert!(took > Duration::ZERO);
    }
    machine.control.fail_call("cuLaunchKernel", 1, 1);
    fifo::measure_packing(&machine.device, 1, 1, 1).unwrap_err();
    assert_eq!(machine.control.leaks().modules, 0);
}

#[test]
fn what_the_driver_refuses_when_it_is_made_leaves_nothing() {
    let machine = machine();
    let before = machine.control.leaks();
    for call in [
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuMemHostRegister_v2",
        "cuMemHostGetDevicePointer_v2",
        "cuMemAlloc_v2",
        "cuStreamCreate",
        "cuMemcpyHtoDAsync_v2",
    ] {
        machine.control.fail_call(call, 1, 2);
        let made = Fifo::new(&machine.device, 64, STAGING_BYTES);
        assert!(matches!(made, Err(penstock_io::Error::Cuda(_))), "{call}");
        machine.control.clear_faults();
        assert_eq!(machine.control.leaks(), before, "{call}");
    }
}
