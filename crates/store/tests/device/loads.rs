//! States loaded to a device: after a load, its memory holds the stored, verified bytes, whatever
//! the order in which a driver works.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::common::answering::answering;
use crate::common::machine::{Machine, machine};
use crate::common::{self, Rng, Sample, bytes_of, draw, forge, noise, within_a_minute};
use penstock_cuda::Stream;
use penstock_cuda_fake::Kind;
use penstock_io::buffer::{
    ArrayMut, DeviceFills, DeviceStreams, HostArrayMut, HostRegionMut, Pool, RegionMut,
};
use penstock_io::faulty::LentDevice;
use penstock_store::format::digest::CHUNK_BYTES;
use penstock_store::load::checkpoint::{Checkpoint, Loaded};
use penstock_store::load::fill::{Fill, Whole};
use penstock_store::options::Options;
use penstock_store::plan::write::TensorSpec;
use penstock_store::report::{FallbackKind, LoadReport};
use penstock_store::{Error, Progress, Result};
use proptest::prelude::*;
use tempfile::TempDir;

const MIB: usize = 1 << 20;
const SIZES: [usize; 8] = [
    3 * MIB + 7,
    1,
    0,
    2 * MIB,
    500,
    70_000,
    300_000,
    5 * MIB - 3,
];

fn options() -> Options {
    Options {
        extent_bytes: Some(MIB),
        io_threads: Some(2),
        queue_depth: Some(2),
        ..Options::default()
    }
}

/// A checkpoint in a directory that is removed with it.
struct Saved {
    _root: TempDir,
    path: PathBuf,
    sample: Sample,
}

fn saved(sample: Sample) -> Saved {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    sample.save(&path, &Options::default()).unwrap();
    Saved {
        _root: root,
        path,
        sample,
    }
}

fn load(path: &Path, targets: HashMap<usize, RegionMut>, options: &Options) -> Result<Loaded> {
    Checkpoint::open(path)?.load(None, targets, options, &Progress::default())
}

/// Device memory for each tensor, filled with other bytes.
struct Tensors(Vec<LentDevice>);

/// The contents of memory before a load.
fn old(index: usize, bytes: usize) -> Vec<u8> {
    noise(900 + index as u64, bytes)
}

impl Tensors {
    fn new(machine: &Machine, sample: &Sample) -> Tensors {
        let sizes = sample.bytes.iter().map(Vec::len).enumerate();
        let tensors = sizes.map(|(index, bytes)| machine.lent(&old(index, bytes)));
        let tensors = Tensors(tensors.collect());
        tensors.follow(machine);
        tensors
    }

    /// Fills from now on come after everything that the training has queued so far.
    fn follow(&self, machine: &Machine) {
        machine
            .device_streams
            .fill_after(&self.0[0].foreign())
            .unwrap();
    }

    fn targets(&self, sample: &Sample) -> HashMap<usize, RegionMut> {
        let target = |(index, lent): (usize, &LentDevice)| {
            let bytes = sample.bytes[index].len();
            (index, lent.array(0, 1, &[bytes], &[1]).into())
        };
        self.0.iter().enumerate().map(target).collect()
    }

    #[track_caller]
    fn assert_are(&self, sample: &Sample) {
        for (index, (lent, bytes)) in self.0.iter().zip(&sample.bytes).enumerate() {
            let content = lent.content().unwrap();
            assert!(content[..bytes.len()] == bytes[..], "tensor {index}");
        }
        self.assert_returned();
    }

    #[track_caller]
    fn assert_returned(&self) {
        assert!(self.0.iter().all(LentDevice::is_returned));
    }
}

#[test]
fn what_is_loaded_is_in_place_wherever_it_goes() {
    let mut machine = machine();
    let saved = saved(Sample::of_sizes(&SIZES));
    let mut random = Rng::new(1);
    for seed in 0..30 {
        machine.draw(seed, 200 * (seed % 2));
        let tensors = Tensors::new(&machine, &saved.sample);
        let mut host: Vec<Vec<u8>> = SIZES.iter().map(|&bytes| vec![0; bytes]).collect();
        let mut targets = tensors.targets(&saved.sample);
        let goal = |index: usize| (index + seed as usize) % 3;
        for (index, bytes) in host.iter_mut().enumerate() {
            let region = host_region(bytes);
            match goal(index) {
                0 => {}
                1 => _ = targets.insert(index, region.into()),
                _ => _ = targets.remove(&index),
            }
        }
        let options = draw::options(&mut random, saved.path.parent().unwrap());
        let loaded = load(&saved.path, targets, &options).unwrap();
        tensors.assert_returned();
        let mut device_bytes = 0;
        for (index, bytes) in saved.sample.bytes.iter().enumerate() {
            let is_it = match goal(index) {
                0 => {
                    device_bytes += bytes.len();
                    tensors.0[index].content().unwrap()[..bytes.len()] == bytes[..]
                }
                1 => host[index] == *bytes,
                _ => bytes_of(&loaded, index, bytes.len()) == &bytes[..],
            };
            assert!(is_it, "tensor {index} with {options:?}");
        }
        assert_eq!(loaded.report.device_bytes, device_bytes as u64);
    }
}

fn host_region(bytes: &mut [u8]) -> HostRegionMut {
    let address = bytes.as_mut_ptr().expose_provenance();
    // SAFETY: the bytes are not accessed before the load that this is for has ended.
    unsafe { HostRegionMut::new(address, bytes.len(), Box::new(())) }
}

#[test]
fn memory_is_pinned_once_and_stays_within_its_bounds() {
    let machine = machine();
    let saved = saved(Sample::of_sizes(&[20 * MIB]));
    let options = Options {
        staging_bytes: Some(8 * MIB),
        ..options()
    };
    let tensors = Tensors::new(&machine, &saved.sample);
    for number in 0..3 {
        let before = machine.control.calls("cuMemHostRegister_v2");
        let loaded = load(&saved.path, tensors.targets(&saved.sample), &options).unwrap();
        let pinned = machine.control.calls("cuMemHostRegister_v2") - before;
        assert!(number == 0 || pinned == 0, "{pinned}");
        assert!(!is_unpinned(&loaded.report));
        assert!(loaded.report.transport.staging_peak_bytes <= 8 * MIB);
        tensors.assert_are(&saved.sample);
    }
}

fn is_unpinned(report: &LoadReport) -> bool {
    let mut fallbacks = report.transport.fallbacks.iter();
    fallbacks.any(|one| one.kind == FallbackKind::Unpinned)
}

#[test]
fn memory_that_cannot_be_pinned_will_do() {
    // Memory pinned by another test is kept, so this needs a separate process.
    assert_passes("loads::child_that_can_pin_nothing");
}

#[test]
#[ignore = "run by another test"]
fn child_that_can_pin_nothing() {
    let machine = machine();
    let saved = saved(Sample::of_sizes(&SIZES));
    let tensors = Tensors::new(&machine, &saved.sample);
    let unpinned = || {
        let targets = tensors.targets(&saved.sample);
        let loaded = load(&saved.path, targets, &options());
        is_unpinned(&loaded.unwrap().report)
    };
    machine.control.set_pinned_bytes_max(0);
    assert!(unpinned());
    machine.control.set_pinned_bytes_max(u64::MAX);
    tensors.assert_are(&saved.sample);
    machine.control.fail_call("cuMemHostRegister_v2", 1, 999);
    assert!(unpinned());
    tensors.assert_are(&saved.sample);
    assert!(!unpinned());
}

#[track_caller]
fn assert_passes(child: &str) {
    let text = crate::text_of(child, &[]);
    assert!(text.contains("1 passed"), "{text}");
}

#[test]
fn loads_side_by_side_do_not_disturb_each_other() {
    let mut machine = machine();
    let saved = saved(Sample::of_sizes(&SIZES));
    for seed in 0..5 {
        machine.draw(seed, 200);
        let tensors = [(); 4].map(|()| Tensors::new(&machine, &saved.sample));
        let staging_bytes = [Some(1), Some(4 * MIB), Some(8 * MIB), None];
        thread::scope(|scope| {
            for (tensors, staging_bytes) in tensors.iter().zip(staging_bytes) {
                let targets = tensors.targets(&saved.sample);
                let options = Options {
                    staging_bytes,
                    ..options()
                };
                let path = &saved.path;
                scope.spawn(move || load(path, targets, &options).unwrap());
            }
        });
        for tensors in tensors {
            tensors.assert_are(&saved.sample);
        }
    }
}

#[test]
fn each_device_takes_what_is_its_own() {
    let machine = machine();
    let sample = Sample::of_sizes(&[300, 500, 700, MIB + 5, 2 * MIB, 100, 900]);
    let saved = saved(sample);
    let second = Arc::new(DeviceStreams::new(&machine.second).unwrap());
    let stream = Arc::new(Stream::new(&machine.second).unwrap());
    let sizes = saved.sample.bytes.iter().map(Vec::len).enumerate();
    let lent = sizes.map(|(index, bytes)| match index % 3 {
        0 => LentDevice::new(&second, &stream, &old(index, bytes)).unwrap(),
        _ => machine.lent(&old(index, bytes)),
    });
    let tensors = Tensors(lent.collect());
    second.fill_after(&tensors.0[0].foreign()).unwrap();
    machine
        .device_streams
        .fill_after(&tensors.0[1].foreign())
        .unwrap();
    let loaded = load(&saved.path, tensors.targets(&saved.sample), &options()).unwrap();
    assert!(!is_unpinned(&loaded.report));
    tensors.assert_are(&saved.sample);
}

/// Work queued for the previous owner may still write to memory that was just allocated.
#[test]
fn what_was_queued_before_a_load_does_not_overwrite_it() {
    within_a_minute("a load behind a stream", || {
        let machine = machine();
        let saved = saved(Sample::of_sizes(&SIZES));
        let mut tensors = Tensors::new(&machine, &saved.sample);
        let hold = machine.control.hold_stream(machine.theirs.raw() as u64);
        for (index, lent) in tensors.0.iter_mut().enumerate() {
            lent.change(&old(index + 50, SIZES[index])).unwrap();
        }
        tensors.follow(&machine);
        let copies = || machine.control.calls("cuMemcpyHtoDAsync_v2");
        let before = copies();
        let targets = tensors.targets(&saved.sample);
        thread::scope(|scope| {
            let loading = scope.spawn(|| load(&saved.path, targets, &options()));
            while copies() == before {
                thread::sleep(Duration::from_millis(1));
            }
            // A load that did not wait would be done by now.
            thread::sleep(Duration::from_millis(20));
            drop(hold);
            loading.join().unwrap().unwrap();
        });
        tensors.assert_are(&saved.sample);
    });
}

#[test]
fn a_stream_sees_what_is_on_its_way_and_the_host_does_not_wait() {
    within_a_minute("a stream behind copies", || {
        let machine = machine();
        let content = noise(1, 100_000);
        let lent = machine.lent(&noise(2, 100_000));
        machine.device_streams.fill_after(&lent.foreign()).unwrap();
        machine.theirs.synchronize().unwrap();
        let pool = Pool::pinned(100_000, 100_000, &machine.device);
        let mut buf = pool.take().unwrap();
        buf.as_mut_slice().copy_from_slice(&content);
        let hold = machine.control.hold();
        let mut fills = DeviceFills::default();
        fills.add(lent.target().into_content(), 0, 0, 0..content.len());
        fills.keep([buf]);
        let host_to_device = fills.begin().unwrap();
        machine
            .device_streams
            .hold_for_fills(&lent.foreign())
            .unwrap();
        let read_back = lent.read_back().unwrap();
        assert!(!host_to_device.is_done().unwrap());
        assert!(pool.try_take().unwrap().is_none() && !lent.is_returned());
        // It could continue if it did not have to wait.
        hold.allow(machine.theirs.raw() as u64, 10);
        thread::sleep(Duration::from_millis(20));
        drop(hold);
        assert!(read_back.content().unwrap() == content);
        host_to_device.wait().unwrap();
        assert!(pool.try_take().unwrap().is_some() && lent.is_returned());
    });
}

#[test]
fn a_buffer_is_not_released_before_it_is_copied() {
    within_a_minute("a buffer that departs", || {
        let machine = machine();
        let lent = machine.lent(&noise(2, 100_000));
        machine.theirs.synchronize().unwrap();
        let pool = Pool::pinned(100_000, 100_000, &machine.device);
        let mut buf = pool.take().unwrap();
        buf.as_mut_slice().copy_from_slice(&noise(1, 100_000));
        let hold = machine.control.hold();
        let mut fills = DeviceFills::default();
        fills.add(lent.target().into_content(), 0, 0, 0..100_000);
        fills.keep([buf]);
        let host_to_device = fills.begin().unwrap();
        thread::scope(|scope| {
            let dropping = scope.spawn(|| drop(host_to_device));
            thread::sleep(Duration::from_millis(20));
            assert!(!dropping.is_finished() && !lent.is_returned());
            assert!(pool.try_take().unwrap().is_none());
            drop(hold);
        });
        // The next user of the buffer may write to it.
        let mut buf = pool.try_take().unwrap().unwrap();
        buf.as_mut_slice().fill(0);
        assert!(lent.is_returned());
        assert!(lent.content().unwrap() == noise(1, 100_000));
    });
}

/// Some copies may be in progress when a later call fails.
#[test]
fn copies_that_begin_in_part_are_waited_for() {
    within_a_minute("copies that begin in part", || {
        let machine = machine();
        let lent = machine.lent(&noise(2, 100_000));
        machine.theirs.synchronize().unwrap();
        let pool = Pool::pinned(100_000, 100_000, &machine.device);
        let buf = pool.take().unwrap();
        let hold = machine.control.hold();
        let mut fills = DeviceFills::default();
        fills.add(lent.target().into_content(), 0, 0, 0..100_000);
        machine.control.fail_call("cuEventRecord", 1, 999);
        thread::scope(|scope| {
            fills.keep([buf]);
            let beginning = scope.spawn(|| fills.begin().map(drop));
            thread::sleep(Duration::from_millis(20));
            assert!(!beginning.is_finished() && !lent.is_returned());
            assert!(pool.try_take().unwrap().is_none());
            drop(hold);
            let error = beginning.join().unwrap().unwrap_err();
            assert!(matches!(error, penstock_io::Error::Cuda(_)), "{error}");
        });
        assert!(pool.try_take().unwrap().is_some() && lent.is_returned());
    });
}

/// Changes a stored byte of a tensor; returns its offset in the file.
fn damage(saved: &Saved, tensor: usize, at: usize) -> u64 {
    let checkpoint = Checkpoint::open(&saved.path).unwrap();
    let place = checkpoint.part().tensors[tensor].range.0 + at as u64;
    let shard = forge::shard_path(&saved.path);
    let mut bytes = fs::read(&shard).unwrap();
    bytes[place as usize] ^= 4;
    fs::write(&shard, bytes).unwrap();
    place
}

#[test]
fn damaged_bytes_never_reach_a_device() {
    let machine = machine();
    let saved = saved(Sample::of_sizes(&SIZES));
    let place = damage(&saved, 3, MIB + 5);
    let tensors = Tensors::new(&machine, &saved.sample);
    let error = load(&saved.path, tensors.targets(&saved.sample), &options()).unwrap_err();
    let Error::Corrupt { offset, tensor, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!((*offset, tensor.as_deref()), (Some(place), Some("t3")));
    tensors.assert_returned();
    // Each chunk holds the new bytes, or the old ones.
    let checkpoint = Checkpoint::open(&saved.path).unwrap();
    for (index, (lent, bytes)) in tensors.0.iter().zip(&saved.sample.bytes).enumerate() {
        let (content, old) = (lent.content().unwrap(), old(index, bytes.len()));
        let first = checkpoint.part().tensors[index].range.0;
        let mut at = 0;
        while at < bytes.len() {
            let chunk = (first + at as u64) / CHUNK_BYTES;
            let end = ((chunk + 1) * CHUNK_BYTES - first).min(bytes.len() as u64) as usize;
            let is_new = content[at..end] == bytes[at..end];
            assert!(is_new || content[at..end] == old[at..end], "tensor {index}");
            let is_damaged = chunk == place / CHUNK_BYTES;
            assert!(!(is_new && is_damaged), "tensor {index}");
            at = end;
        }
    }
}

#[test]
fn what_another_copy_has_reaches_a_device() {
    let machine = machine();
    let saved = saved(Sample::of_sizes(&SIZES));
    let copy = tempfile::tempdir().unwrap();
    let replica = copy.path().join("copy");
    fs::create_dir(&replica).unwrap();
    for name in common::names(&saved.path) {
        fs::copy(saved.path.join(&name), replica.join(&name)).unwrap();
    }
    damage(&saved, 3, MIB + 5);
    let options = Options {
        replica: Some(replica),
        ..options()
    };
    let tensors = Tensors::new(&machine, &saved.sample);
    load(&saved.path, tensors.targets(&saved.sample), &options).unwrap();
    tensors.assert_are(&saved.sample);
}

#[test]
fn a_target_of_another_size_is_left_alone() {
    let machine = machine();
    let saved = saved(Sample::of_sizes(&[100, 200]));
    let tensors = Tensors::new(&machine, &saved.sample);
    let target = tensors.0[1].array(0, 1, &[199], &[1]);
    let targets = HashMap::from([(1, target.into())]);
    let refused = load(&saved.path, targets, &options());
    assert!(
        matches!(refused, Err(Error::Mismatch { .. })),
        "{refused:?}"
    );
    assert!(tensors.0[1].content().unwrap() == old(1, 200));
}

#[test]
fn a_cancelled_load_lets_go_of_what_it_had() {
    let mut machine = machine();
    let saved = saved(Sample::of_sizes(&SIZES));
    let checkpoint = Checkpoint::open(&saved.path).unwrap();
    for seed in 0..10 {
        machine.draw(seed, 500);
        let tensors = Tensors::new(&machine, &saved.sample);
        let targets = tensors.targets(&saved.sample);
        let progress = Progress::default();
        let calls = ["cuMemcpyHtoDAsync_v2", "cuMemcpyBatchAsync_v2"];
        let copies = || -> u64 { calls.iter().map(|call| machine.control.calls(call)).sum() };
        let (before, wanted) = (copies(), seed % 3);
        let hold = machine.control.hold();
        let loaded = thread::scope(|scope| {
            let loading = scope.spawn(|| checkpoint.load(None, targets, &options(), &progress));
            while copies() < before + wanted {
                thread::sleep(Duration::from_millis(1));
            }
            progress.cancel();
            drop(hold);
            loading.join().unwrap()
        });
        assert!(matches!(loaded, Err(Error::Interrupted)), "{loaded:?}");
        tensors.assert_returned();
    }
}

/// The driver calls of a load. If one fails, the load either fails with its name, or returns
/// everything as it was stored.
const CALLS: &[&str] = &[
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyBatchAsync_v2",
    "cuMemcpy2DAsync_v2",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuEventDestroy_v2",
    "cuCtxPushCurrent_v2",
    "cuThreadExchangeStreamCaptureMode",
];

/// The calls needed to destroy an event: if one fails, the event leaks.
const TO_DESTROY: &[&str] = &[
    "cuCtxPushCurrent_v2",
    "cuThreadExchangeStreamCaptureMode",
    "cuEventDestroy_v2",
];

#[test]
fn a_call_that_fails_spoils_no_load_and_leaves_nothing() {
    let calls = common::number("PENSTOCK_TORTURE_DEVICE_FAULTS", 12);
    let mut machine = machine();
    // The last tensor is filled in rows, the ones before it by one call; a lone tensor by another
    // call.
    let saved = saved(Sample::of_sizes(&[MIB + 5, 300, 500, 9000]));
    let first = Sample::of_sizes(&[MIB + 5, 300, 500]);
    let mut failed = Vec::new();
    for call in CALLS {
        for nth in 1..=calls {
            machine.draw(nth, 50);
            let tensors = Tensors::new(&machine, &first);
            let rows = machine.lent(&noise(5, 20_000));
            let mut targets = tensors.targets(&first);
            targets.insert(3, rows.array(0, 1, &[90, 100], &[200, 1]).into());
            let is_alone = *call == "cuMemcpyHtoDAsync_v2";
            if is_alone {
                targets.retain(|number, _| *number == 1);
            }
            machine.theirs.synchronize().unwrap();
            let events = machine.control.leaks().events;
            machine.control.fail_call(call, nth, 999);
            let outcome = load(&saved.path, targets, &options());
            machine.control.clear_faults();
            match outcome {
                Ok(_) if is_alone => {}
                Ok(_) => {
                    tensors.assert_are(&first);
                    let found = rows.content().unwrap();
                    let found = found.chunks(200).flat_map(|row| &row[..100]);
                    let is_it = found.take(9000).eq(&saved.sample.bytes[3]);
                    assert!(is_it, "{call} {nth}");
                }
                Err(Error::Io(penstock_io::Error::Cuda(error))) => {
                    assert!(error.to_string().contains(call), "{error}");
                    failed.push(*call);
                }
                Err(error) => panic!("{call}: {error}"),
            }
            tensors.assert_returned();
            assert!(rows.is_returned(), "{call} {nth}");
            if !TO_DESTROY.contains(call) {
                assert_eq!(machine.control.leaks().events, events, "{call} {nth}");
            }
        }
    }
    // The calls that begin copies are always made, and nothing replaces them.
    for call in &CALLS[..5] {
        assert!(failed.contains(call), "{call}");
    }
}

/// Driver calls that report success and do nothing.
const MUTANTS: &[(&str, &str, RangeInclusive<u64>)] = &[
    (
        "a load does not wait for a stream",
        "cuStreamWaitEvent",
        1..=1,
    ),
    ("events come at once", "cuEventRecord", 2..=200),
    ("nobody waits for events", "cuEventSynchronize", 1..=200),
];

const MUTANT: &str = "PENSTOCK_TEST_MUTANT";

/// A load that does not keep an order returns wrong bytes sooner or later, or makes the device
/// fail.
#[test]
fn every_mutant_is_caught() {
    for (number, (what, ..)) in MUTANTS.iter().enumerate() {
        let text = crate::text_of(
            "loads::child_with_a_mutant",
            &[(MUTANT, &number.to_string())],
        );
        assert!(
            text.contains("caught"),
            "{what}, and nothing shows it: {text}"
        );
    }
}

/// A device that has failed is lost for its process.
#[test]
#[ignore = "run by another test"]
fn child_with_a_mutant() {
    let number: usize = std::env::var(MUTANT).unwrap().parse().unwrap();
    let (what, call, nths) = &MUTANTS[number];
    let mut machine = machine();
    let saved = saved(Sample::of_sizes(&[2 * MIB + 5, 300, 70_000]));
    for seed in 0..100 {
        machine.draw(seed, 500);
        let sizes = saved.sample.bytes.iter().map(Vec::len).enumerate();
        let lent = sizes.map(|(index, bytes)| machine.lent(&old(index, bytes)));
        let mut tensors = Tensors(lent.collect());
        // A stream that is busy for a while.
        for _ in 0..5 {
            for (index, lent) in tensors.0.iter_mut().enumerate() {
                lent.change(&old(index, saved.sample.bytes[index].len()))
                    .unwrap();
            }
        }
        for nth in nths.clone() {
            machine.control.fail_call(call, nth, 0);
        }
        tensors.follow(&machine);
        let loaded = load(&saved.path, tensors.targets(&saved.sample), &options());
        let is_loaded = || {
            let mut tensors = tensors.0.iter().zip(&saved.sample.bytes);
            tensors.all(|(lent, bytes)| {
                let mut found = vec![0; bytes.len()];
                machine.control.peek(lent.address(), &mut found);
                found == *bytes
            })
        };
        let is_it = loaded.is_ok() && is_loaded();
        machine.control.clear_faults();
        if !is_it || machine.theirs.synchronize().is_err() || !is_loaded() {
            eprintln!("caught with seed {seed}: {what}");
            // Dropping would wait for a device that may have failed.
            std::process::exit(0);
        }
    }
}

/// Memory of an array with dimensions in any order, any distance apart, in any direction.
#[derive(Clone, Debug)]
struct Layout {
    order: u64,
    steps: Vec<(usize, bool)>,
    is_on_device: bool,
}

fn layouts() -> impl Strategy<Value = Layout> {
    let steps = prop::collection::vec(
        (prop_oneof![3 => Just(1), 1 => 2..4_usize], any::<bool>()),
        3,
    );
    (any::<u64>(), steps, prop::bool::weighted(0.7)).prop_map(|(order, steps, is_on_device)| {
        Layout {
            order,
            steps,
            is_on_device,
        }
    })
}

impl Layout {
    fn memory(&self, machine: &Machine, item_bytes: usize, shape: &[usize]) -> Memory {
        let mut left: Vec<usize> = (0..shape.len()).collect();
        let (mut strides, mut order) = (vec![0; shape.len()], self.order);
        let (mut stride, mut first) = (item_bytes, 0);
        while !left.is_empty() {
            // Without an order it is row-major.
            let place = match self.order % 2 {
                0 => left.len() - 1,
                _ => order as usize / 2 % left.len(),
            };
            let dim = left.remove(place);
            order /= 7;
            let (step, is_backwards) = self.steps[dim];
            stride *= step;
            strides[dim] = stride.cast_signed();
            if is_backwards {
                strides[dim] = -strides[dim];
                first += stride * (shape[dim] - 1);
            }
            stride *= shape[dim];
        }
        let bytes = noise(7, stride);
        Memory {
            item_bytes,
            shape: shape.to_vec(),
            strides,
            first,
            lent: self.is_on_device.then(|| machine.lent(&bytes)),
            old: bytes.clone(),
            host: bytes,
        }
    }
}

struct Memory {
    item_bytes: usize,
    shape: Vec<usize>,
    strides: Vec<isize>,
    first: usize,
    old: Vec<u8>,
    host: Vec<u8>,
    /// The device memory, if it is on a device.
    lent: Option<LentDevice>,
}

impl Memory {
    fn array(&mut self) -> ArrayMut {
        let (item_bytes, shape, strides) = (self.item_bytes, &self.shape, &self.strides);
        if let Some(lent) = &self.lent {
            return lent.array(self.first, item_bytes, shape, strides).into();
        }
        let address = self.host.as_mut_ptr().expose_provenance() + self.first;
        // SAFETY: all items are in the bytes, which are not accessed before the fill has ended.
        let array =
            unsafe { HostArrayMut::new(address, item_bytes, shape, Some(strides), Box::new(())) };
        array.unwrap().into()
    }

    /// Whether the items have this content, and all other bytes are unchanged.
    fn holds(&self, content: &[u8]) -> bool {
        let mut expected = self.old.clone();
        for (number, item) in content.chunks(self.item_bytes).enumerate() {
            let (mut at, mut rest) = (self.first as isize, number);
            for (&size, &stride) in self.shape.iter().zip(&self.strides).rev() {
                at += (rest % size) as isize * stride;
                rest /= size;
            }
            expected[at as usize..][..self.item_bytes].copy_from_slice(item);
        }
        match &self.lent {
            Some(lent) => lent.is_returned() && lent.content().unwrap() == expected,
            None => self.host == expected,
        }
    }
}

/// A box of an array with items of 4 bytes, in row-major order.
fn content_of(bytes: &[u8], shape: &[usize], start: &[usize], size: &[usize]) -> Vec<u8> {
    let mut content = Vec::new();
    for a in start[0]..start[0] + size[0] {
        for b in start[1]..start[1] + size[1] {
            let row = (a * shape[1] + b) * shape[2] + start[2];
            content.extend_from_slice(&bytes[4 * row..4 * (row + size[2])]);
        }
    }
    content
}

fn array_of(shape: &[usize]) -> Sample {
    let mut sample = Sample::of_sizes(&[1234, 4 * shape.iter().product::<usize>()]);
    sample.specs[1] = TensorSpec {
        dtype: "int32".to_owned(),
        shape: shape.iter().map(|&size| size as u64).collect(),
        item_bytes: 4,
        ..sample.specs[1].clone()
    };
    sample
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn whatever_the_strides_all_items_are_filled_and_nothing_else(
        shape in prop::sample::select(vec![[7, 9, 11], [3, 300, 700], [1, 1, 1], [2, 5, 70_000]]),
        layout in layouts(),
        verify: bool,
    ) {
        let machine = machine();
        let saved = saved(array_of(&shape));
        let layout = Layout { is_on_device: true, ..layout };
        let mut memory = layout.memory(&machine, 4, &shape);
        machine.device_streams.fill_after(&memory.lent.as_ref().unwrap().foreign()).unwrap();
        let ArrayMut::Device(array) = memory.array() else { unreachable!() };
        let targets = HashMap::from([(1, array.into())]);
        load(&saved.path, targets, &Options { verify, ..options() }).unwrap();
        prop_assert!(memory.holds(&saved.sample.bytes[1]));
    }

    #[test]
    fn boxes_are_filled_wherever_they_are(
        shape in prop::sample::select(vec![[7, 9, 11], [3, 300, 700], [2, 5, 70_000]]),
        boxes in prop::collection::vec((layouts(), any::<[[u16; 2]; 3]>()), 1..6),
    ) {
        let machine = machine();
        let saved = saved(array_of(&shape));
        let mut memories = Vec::new();
        for (layout, bounds) in &boxes {
            let start: Vec<usize> = (0..3).map(|dim| bounds[dim][0] as usize % shape[dim]).collect();
            let size = |dim: usize| 1 + bounds[dim][1] as usize % (shape[dim] - start[dim]);
            let size: Vec<usize> = (0..3).map(size).collect();
            let memory = layout.memory(&machine, 4, &size);
            memories.push((start, size, memory));
        }
        for lent in memories.iter().filter_map(|(.., memory)| memory.lent.as_ref()) {
            machine.device_streams.fill_after(&lent.foreign()).unwrap();
        }
        let fill = |(start, _, memory): &mut (Vec<usize>, Vec<usize>, Memory)| Fill {
            of: Whole::Entry(1),
            start: start.iter().map(|&start| start as u64).collect(),
            into: memory.array(),
        };
        let fills = memories.iter_mut().map(fill).collect();
        let checkpoint = Checkpoint::open(&saved.path).unwrap();
        let report = checkpoint.fill(fills, &options(), &Progress::default()).unwrap();
        let mut device_bytes = 0;
        for (start, size, memory) in &memories {
            let content = content_of(&saved.sample.bytes[1], &shape, start, size);
            prop_assert!(memory.holds(&content), "{:?} at {:?}", size, start);
            device_bytes += memory.lent.as_ref().map_or(0, |_| content.len() as u64);
        }
        prop_assert_eq!(report.device_bytes, device_bytes);
    }
}

#[test]
fn a_device_that_fails_under_way_fails_the_load() {
    // A context that has failed is lost for its process, so these need separate ones.
    assert_passes("loads::child_whose_device_fails");
    assert_passes("loads::child_whose_last_copy_fails");
}

#[test]
#[ignore = "run by another test"]
fn child_whose_device_fails() {
    assert_fails(&SIZES, 1);
}

/// No later call would fail as well.
#[test]
#[ignore = "run by another test"]
fn child_whose_last_copy_fails() {
    assert_fails(&[500], 1);
}

#[track_caller]
fn assert_fails(sizes: &[usize], nth: u64) {
    let machine = machine();
    let saved = saved(Sample::of_sizes(sizes));
    let tensors = Tensors::new(&machine, &saved.sample);
    machine.theirs.synchronize().unwrap();
    let targets = tensors.targets(&saved.sample);
    machine
        .control
        .fail_operation(Some(Kind::HostToDevice), nth, 700);
    // The load has time to reach its wait.
    let hold = machine.control.hold();
    let error = thread::scope(|scope| {
        let loading = scope.spawn(|| load(&saved.path, targets, &options()));
        thread::sleep(Duration::from_millis(50));
        drop(hold);
        loading.join().unwrap().unwrap_err()
    });
    assert!(
        matches!(&error, Error::Io(penstock_io::Error::Cuda(_))),
        "{error}"
    );
    tensors.assert_returned();
    // Tensors can still be loaded to the host.
    let loaded = load(&saved.path, HashMap::new(), &options()).unwrap();
    assert!(saved.sample.is(&loaded));
}

/// The host's part of the same extents is read meanwhile, within the staging memory that is left.
#[test]
fn a_load_goes_on_reading_while_a_device_copies() {
    let machine = machine();
    let saved = saved(Sample::of_sizes(&[256 << 10; 64]));
    let checkpoint = Checkpoint::open(&saved.path).unwrap();
    let tensors = Tensors::new(&machine, &saved.sample);
    machine.theirs.synchronize().unwrap();
    let mut targets = tensors.targets(&saved.sample);
    targets.retain(|index, _| index % 2 == 0);
    let options = Options {
        io_threads: Some(1),
        ..options()
    };
    let (options, _) = answering(options, usize::MAX);
    let progress = Progress::default();
    let hold = machine.control.hold();
    thread::scope(|scope| {
        let loading = scope.spawn(|| checkpoint.load(None, targets, &options, &progress));
        let until = Instant::now() + Duration::from_secs(60);
        let is_all_read = || {
            let (done, total) = progress.bytes();
            total > 0 && done == total
        };
        while !is_all_read() && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
        assert!(is_all_read());
        drop(hold);
        loading.join().unwrap().unwrap();
    });
}
