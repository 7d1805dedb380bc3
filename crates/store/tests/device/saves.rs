//! States in device memory: the stored bytes are those that the device had when its owner was
//! allowed to continue, whatever the order in which a driver works.

use std::path::Path;
use std::thread;

use crate::common::machine::{Machine, machine};
use crate::common::{self, bytes_of, load, publication, within_a_minute};
use penstock_cuda_fake::Kind;
use penstock_io::buffer::{DeviceStreams, HostRegion, Region};
use penstock_io::faulty::{Lent, LentDevice};
use penstock_store::options::Options;
use penstock_store::plan::write::TensorSpec;
use penstock_store::save::{
    Arena, Attempt, Job, Linked, Publication, SaveState, Staging, commit, save,
};
use penstock_store::{Error, Progress, Result};
use proptest::prelude::*;
use serde_json::value::RawValue;

const MIB: usize = 1 << 20;

impl Machine {
    /// Tensors of a training, with the contents of step `seed`.
    fn tensors(&self, seed: u64, sizes: &[usize]) -> Tensors {
        let lent = |(index, &bytes)| self.lent(&content(seed, index, bytes));
        Tensors {
            lent: sizes.iter().enumerate().map(lent).collect(),
            sizes: sizes.to_vec(),
        }
    }

    /// Copies from now on see everything that the training has queued so far.
    fn follow(&self, tensors: &Tensors) {
        if let Some(lent) = tensors.lent.first() {
            self.device_streams.follow(&lent.foreign()).unwrap();
        }
    }
}

fn content(seed: u64, index: usize, bytes: usize) -> Vec<u8> {
    common::noise(seed * 1000 + index as u64, bytes)
}

/// Device memory that its owner keeps changing.
struct Tensors {
    lent: Vec<LentDevice>,
    sizes: Vec<usize>,
}

impl Tensors {
    fn state(&self) -> SaveState {
        let regions = self.lent.iter().map(|lent| lent.region().into());
        state(&self.sizes, regions.collect())
    }

    /// A step of the optimizer.
    fn change(&mut self, seed: u64) {
        for (index, lent) in self.lent.iter_mut().enumerate() {
            let content = content(seed, index, self.sizes[index]);
            // This may be a call that is set to fail.
            while lent.change(&content).is_err() {}
        }
    }

    fn are_at(&self, path: &Path, seed: u64) -> bool {
        // Bytes that change between digest and write are damage.
        let Ok(loaded) = load(path, &Options::default()) else {
            return false;
        };
        let mut sizes = self.sizes.iter().enumerate();
        sizes.all(|(index, &bytes)| {
            bytes_of(&loaded, index, bytes) == &content(seed, index, bytes)[..]
        })
    }

    #[track_caller]
    fn assert_at(&self, path: &Path, seed: u64) {
        let loaded = load(path, &Options::default()).unwrap();
        for (index, &bytes) in self.sizes.iter().enumerate() {
            let found = bytes_of(&loaded, index, bytes);
            let expected = content(seed, index, bytes);
            let differs = found
                .iter()
                .zip(&expected)
                .position(|(one, other)| one != other);
            assert!(
                differs.is_none(),
                "tensor {index} is torn at byte {differs:?} of seed {seed}"
            );
        }
    }
}

fn spec(name: String, item_bytes: usize, shape: &[usize]) -> TensorSpec {
    TensorSpec {
        name,
        dtype: if item_bytes == 1 { "uint8" } else { "int32" }.to_owned(),
        shape: shape.iter().map(|&size| size as u64).collect(),
        item_bytes,
        region: None,
        group: None,
    }
}

fn state(sizes: &[usize], sources: Vec<Region>) -> SaveState {
    let specs = sizes.iter().enumerate();
    SaveState {
        tensors: specs
            .map(|(index, &bytes)| spec(format!("t{index}"), 1, &[bytes]))
            .collect(),
        sources,
        linked: Linked::default(),
        aliases: Vec::new(),
        tree: RawValue::from_string("{\"a\":1}".into()).unwrap(),
    }
}

fn options() -> Options {
    Options {
        extent_bytes: Some(MIB),
        io_threads: Some(2),
        queue_depth: Some(2),
        ..Options::default()
    }
}

fn save_at_once(state: SaveState, path: &Path) -> Result<penstock_store::report::SaveReport> {
    save(state, &publication(path), &options(), &Progress::default())
}

fn begin(path: &Path) -> Attempt {
    let options = Options::default();
    Attempt::begin(path, true, &options.file_system, &Progress::default()).unwrap()
}

fn write(job: &Job, path: &Path) -> Result<()> {
    let mut attempt = begin(path);
    let written = job.write(&mut attempt, 0, &Progress::default())?;
    let publication = Publication {
        overwrite: true,
        ..publication(path)
    };
    commit(attempt, &publication, vec![written.part])?;
    Ok(())
}

fn staging(arena: &Arena, is_lazy: bool, tensors: &Tensors) -> Staging {
    Staging {
        arena: Some(arena.clone()),
        is_lazy,
        streams: vec![tensors.lent[0].foreign()],
        ..Staging::default()
    }
}

const SIZES: [usize; 6] = [3 * MIB + 7, 1, 0, 2 * MIB, 500, 5 * MIB - 3];

#[test]
fn what_device_and_host_have_is_saved_together() {
    let mut machine = machine();
    let root = tempfile::tempdir().unwrap();
    for seed in 0..4 {
        machine.draw(seed, 300 * (seed % 2));
        let path = root.path().join(format!("{seed}"));
        let tensors = machine.tensors(seed, &SIZES);
        machine.follow(&tensors);
        let source = |(index, lent): (usize, &LentDevice)| match index % 2 {
            0 => Region::from(lent.region()),
            _ => HostRegion::from(content(seed, index, SIZES[index])).into(),
        };
        let sources = tensors.lent.iter().enumerate().map(source).collect();
        save_at_once(state(&SIZES, sources), &path).unwrap();
        tensors.assert_at(&path, seed);
        assert!(tensors.lent.iter().all(LentDevice::is_returned));
    }
}

#[test]
fn memory_is_pinned_once_and_stays_within_its_bounds() {
    let machine = machine();
    let root = tempfile::tempdir().unwrap();
    let tensors = machine.tensors(1, &[20 * MIB]);
    let options = Options {
        staging_bytes: Some(8 * MIB),
        ..options()
    };
    let mut pinned = Vec::new();
    for number in 0..3 {
        machine.follow(&tensors);
        let path = root.path().join(format!("{number}"));
        let publication = publication(&path);
        let saved = save(
            tensors.state(),
            &publication,
            &options,
            &Progress::default(),
        )
        .unwrap();
        let fallbacks = &saved.transport.fallbacks;
        assert!(
            !fallbacks.iter().any(|one| one.kind.name() == "unpinned"),
            "{fallbacks:?}"
        );
        assert!(saved.transport.staging_peak_bytes <= 8 * MIB);
        tensors.assert_at(&path, 1);
        pinned.push(machine.control.calls("cuMemHostRegister_v2"));
    }
    assert_eq!(pinned[1..], [pinned[1], pinned[1]]);
}

#[test]
fn a_training_goes_on_once_an_eager_save_is_staged() {
    let mut machine = machine();
    let root = tempfile::tempdir().unwrap();
    let arena = Arena::new(None);
    for seed in 0..10 {
        machine.draw(seed, 200);
        let path = root.path().join(format!("{seed}"));
        let mut tensors = machine.tensors(seed, &SIZES);
        machine.follow(&tensors);
        let job = Job::new(
            tensors.state(),
            &path,
            &options(),
            &staging(&arena, false, &tensors),
        )
        .unwrap();
        thread::scope(|scope| {
            let writing = scope.spawn(|| write(&job, &path));
            job.stage(None).unwrap();
            assert!(tensors.lent.iter().all(LentDevice::is_returned));
            tensors.change(seed + 100);
            writing.join().unwrap().unwrap();
        });
        tensors.assert_at(&path, seed);
    }
}

/// Several threads queue copies of one tensor, and may record them in another order.
#[test]
fn an_eager_save_is_staged_when_the_last_copy_is_done_whoever_queued_it() {
    let mut machine = machine();
    let root = in_memory();
    let arena = Arena::new(None);
    for seed in 0..common::number("PENSTOCK_TORTURE_DEVICE_STAGES", 50) {
        machine.draw(seed, 200);
        let path = root.path().join("ckpt");
        let mut tensors = machine.tensors(seed, &[24 * MIB + 5]);
        machine.follow(&tensors);
        let staging = staging(&arena, false, &tensors);
        let job = Job::new(tensors.state(), &path, &options(), &staging).unwrap();
        thread::scope(|scope| {
            let writing = scope.spawn(|| write(&job, &path));
            job.stage(Some(4)).unwrap();
            // Immediately, and not in the order of the stream.
            machine
                .control
                .poke(tensors.lent[0].address(), &vec![7; 24 * MIB + 5]);
            writing.join().unwrap().unwrap();
        });
        tensors.assert_at(&path, seed);
        tensors.change(seed);
    }
}

/// The host's part of a state may also be changed once `hold` returns.
#[test]
fn what_the_host_has_may_change_once_all_is_held() {
    let mut machine = machine();
    let root = in_memory();
    let arena = Arena::new(None);
    for seed in 0..20 {
        machine.draw(seed, 300);
        let path = root.path().join("ckpt");
        let tensors = machine.tensors(seed, &[2 * MIB + 5]);
        let lent = Lent::new(seed, MIB / 4);
        machine.follow(&tensors);
        let mut state = state(
            &[2 * MIB + 5, 2 * MIB],
            vec![tensors.lent[0].region().into()],
        );
        state.sources.push(lent.region().into());
        let staging = Staging {
            is_watched: true,
            ..staging(&arena, true, &tensors)
        };
        let job = Job::new(state, &path, &options(), &staging).unwrap();
        thread::scope(|scope| {
            let writing = scope.spawn(|| write(&job, &path));
            job.hold(&[tensors.lent[0].foreign()]).unwrap();
            lent.change(99);
            writing.join().unwrap().unwrap();
        });
        let loaded = load(&path, &Options::default()).unwrap();
        assert!(bytes_of(&loaded, 1, 2 * MIB) == &Lent::content(seed, MIB / 4)[..]);
        std::fs::remove_dir_all(&path).unwrap();
    }
}

/// The host may continue before anything is copied; later work on the training's stream waits.
#[test]
fn a_stream_waits_for_a_lazy_save_and_the_host_does_not() {
    within_a_minute("a lazy save of a device", || {
        let machine = machine();
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        let arena = Arena::new(None);
        let mut tensors = machine.tensors(1, &SIZES);
        machine.theirs.synchronize().unwrap();
        machine.follow(&tensors);
        let hold = machine.control.hold();
        let job = Job::new(
            tensors.state(),
            &path,
            &options(),
            &staging(&arena, true, &tensors),
        )
        .unwrap();
        job.hold(&[tensors.lent[0].foreign()]).unwrap();
        tensors.change(2);
        assert!(!job.is_staged());
        drop(hold);
        write(&job, &path).unwrap();
        assert!(job.is_staged());
        tensors.assert_at(&path, 1);
        // The change is visible afterwards.
        machine.follow(&tensors);
        save_at_once(tensors.state(), &root.path().join("next")).unwrap();
        tensors.assert_at(&root.path().join("next"), 2);
    });
}

/// Some tensors change without a notification: a save that contains one is eager, however small its
/// memory.
#[test]
fn a_tensor_that_is_to_be_copied_at_once_makes_the_save_an_eager_one() {
    let machine = machine();
    let root = in_memory();
    let path = root.path().join("ckpt");
    let tensors = machine.tensors(1, &[9 * MIB]);
    machine.follow(&tensors);
    let staging = Staging {
        eager: vec![0],
        ..staging(&Arena::new(Some(2 * MIB)), true, &tensors)
    };
    let job = Job::new(tensors.state(), &path, &options(), &staging).unwrap();
    assert!(!job.is_lazy());
    thread::scope(|scope| {
        let writing = scope.spawn(|| write(&job, &path));
        job.stage(None).unwrap();
        writing.join().unwrap().unwrap();
    });
    tensors.assert_at(&path, 1);
}

/// Counters and statistics change in a forward pass, which no optimizer hook announces.
#[test]
fn small_tensors_are_those_of_the_call() {
    let mut machine = machine();
    let root = tempfile::tempdir().unwrap();
    let arena = Arena::new(None);
    let sizes = [300, 64 << 10, 3 * MIB, 1, 60_000, 64 << 10, 0];
    for seed in 1..4 {
        machine.draw(seed, 300);
        let path = root.path().join(format!("{seed}"));
        let mut tensors = machine.tensors(seed, &sizes);
        machine.theirs.synchronize().unwrap();
        machine.follow(&tensors);
        let hold = machine.control.hold();
        let staging = staging(&arena, true, &tensors);
        let job = Job::new(tensors.state(), &path, &options(), &staging).unwrap();
        for (index, &bytes) in sizes.iter().enumerate() {
            if bytes <= 64 << 10 {
                tensors.lent[index]
                    .change(&content(99, index, bytes))
                    .unwrap();
            }
        }
        drop(hold);
        write(&job, &path).unwrap();
        tensors.assert_at(&path, seed);
    }
}

/// A directory in memory if possible, where a save takes no time.
fn in_memory() -> tempfile::TempDir {
    tempfile::tempdir_in("/dev/shm").unwrap_or_else(|_| tempfile::tempdir().unwrap())
}

/// Driver calls that report success and do nothing.
type Mutant = (
    &'static str,
    &'static str,
    std::ops::RangeInclusive<u64>,
    bool,
);

const MUTANTS: &[Mutant] = &[
    (
        "an eager save does not wait for the training",
        "cuStreamWaitEvent",
        1..=1,
        false,
    ),
    (
        "a lazy save does not wait for the training",
        "cuStreamWaitEvent",
        1..=1,
        true,
    ),
    (
        "the training does not wait for a lazy save",
        "cuStreamWaitEvent",
        2..=9,
        true,
    ),
    (
        "events of an eager save come at once",
        "cuEventRecord",
        2..=200,
        false,
    ),
    (
        "events of a lazy save come at once",
        "cuEventRecord",
        2..=200,
        true,
    ),
    (
        "an eager save does not wait for events",
        "cuEventSynchronize",
        1..=200,
        false,
    ),
];

/// A save that does not keep an order stores wrong bytes sooner or later, or makes the device fail.
#[test]
fn every_mutant_is_caught() {
    for (number, (what, ..)) in MUTANTS.iter().enumerate() {
        let caught = crate::text_of(
            "saves::child_with_a_mutant",
            &[(MUTANT, &number.to_string())],
        );
        assert!(
            caught.contains("caught"),
            "{what}, and nothing shows it: {caught}"
        );
    }
}

const MUTANT: &str = "PENSTOCK_TEST_MUTANT";

/// A device that has failed is lost for its process, so each mutant has a process of its own.
#[test]
#[ignore = "run by another test"]
fn child_with_a_mutant() {
    let number: usize = std::env::var(MUTANT).unwrap().parse().unwrap();
    let (what, call, nths, is_lazy) = &MUTANTS[number];
    let mut machine = machine();
    let root = in_memory();
    for seed in 0..100 {
        machine.draw(seed, 500);
        let path = root.path().join("ckpt");
        let mut tensors = machine.tensors(seed, &[2 * MIB + 5, 300, 70_000]);
        for nth in nths.clone() {
            machine.control.fail_call(call, nth, 0);
        }
        let saved = save_beside(&machine, &mut tensors, &path, *is_lazy, &|| {});
        machine.control.clear_faults();
        let saved = saved.is_ok() && machine.theirs.synchronize().is_ok();
        if !saved || !tensors.are_at(&path, seed) {
            eprintln!("caught with seed {seed}: {what}");
            // Dropping would wait for a device that has failed.
            std::process::exit(0);
        }
    }
}

/// Steps of an optimizer during saves, each time with delays from another seed.
#[test]
fn no_save_is_torn_by_a_training_that_goes_on() {
    let rounds = common::number("PENSTOCK_TORTURE_DEVICE_SAVES", 200);
    let mut machine = machine();
    let root = in_memory();
    let arena = Arena::new(Some(6 * MIB));
    let sizes = [2 * MIB + 5, 300, MIB, 70_000];
    for seed in 0..rounds {
        machine.draw(seed, 100);
        let mut tensors = machine.tensors(seed, &sizes);
        let path = root.path().join("ckpt");
        machine.follow(&tensors);
        let is_lazy = seed % 2 == 0;
        let job = Job::new(
            tensors.state(),
            &path,
            &options(),
            &staging(&arena, is_lazy, &tensors),
        )
        .unwrap();
        thread::scope(|scope| {
            let writing = scope.spawn(|| write(&job, &path));
            match is_lazy {
                true => job.hold(&[tensors.lent[0].foreign()]).unwrap(),
                false => job.stage(None).unwrap(),
            }
            tensors.change(seed + 1);
            writing.join().unwrap().unwrap();
        });
        tensors.assert_at(&path, seed);
    }
}

/// The driver calls of a save. If one fails, the save either fails with its name and stores
/// nothing, or stores everything correctly.
const CALLS: &[&str] = &[
    "cuCtxPushCurrent_v2",
    "cuThreadExchangeStreamCaptureMode",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuEventDestroy_v2",
    "cuStreamWaitEvent",
    "cuStreamIsCapturing",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyBatchAsync_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
];

#[test]
fn a_call_that_fails_tears_no_save_and_leaves_nothing() {
    let calls = common::number("PENSTOCK_TORTURE_DEVICE_FAULTS", 12);
    let mut machine = machine();
    let root = tempfile::tempdir().unwrap();
    let sizes = [MIB + 5, 300, 70_000];
    let mut failed = 0;
    for call in CALLS {
        for is_lazy in [false, true] {
            // The number of calls varies from run to run.
            for nth in 1..=calls {
                machine.draw(nth, 50);
                let mut tensors = machine.tensors(nth, &sizes);
                let path = root.path().join("ckpt");
                let outcome = save_beside(&machine, &mut tensors, &path, is_lazy, &|| {
                    machine.control.fail_call(call, nth, 999);
                });
                machine.control.clear_faults();
                match outcome {
                    Ok(()) => tensors.assert_at(&path, nth),
                    Err(Error::Io(penstock_io::Error::Cuda(error))) => {
                        assert!(error.to_string().contains(call), "{error}");
                        failed += 1;
                    }
                    // The thread that stages or holds has the cause.
                    Err(Error::Interrupted) => failed += 1,
                    Err(error) => panic!("{call}: {error}"),
                }
                if path.exists() {
                    std::fs::remove_dir_all(&path).unwrap();
                }
                assert!(
                    tensors.lent.iter().all(LentDevice::is_returned),
                    "{call} {nth}"
                );
            }
        }
    }
    assert!(failed > 20, "{failed}");
    let tensors = machine.tensors(1, &sizes);
    machine.follow(&tensors);
    let path = root.path().join("last");
    save_at_once(tensors.state(), &path).unwrap();
    tensors.assert_at(&path, 1);
}

/// A save during a training that takes its next step as soon as allowed; something fails
/// `meanwhile`.
fn save_beside(
    machine: &Machine,
    tensors: &mut Tensors,
    path: &Path,
    is_lazy: bool,
    meanwhile: &dyn Fn(),
) -> Result<()> {
    let seed = 1_000_000;
    let arena = Arena::new(None);
    machine.follow(tensors);
    let foreign = tensors.lent[0].foreign();
    let job = Job::new(
        tensors.state(),
        path,
        &options(),
        &staging(&arena, is_lazy, tensors),
    )?;
    meanwhile();
    thread::scope(|scope| {
        let writing = scope.spawn(|| write(&job, path));
        let staged = match is_lazy {
            true => job.hold(&[foreign]),
            false => job.stage(None),
        };
        if staged.is_ok() {
            tensors.change(seed);
        } else {
            job.cancel();
        }
        let written = writing.join().unwrap();
        staged.and(written)
    })
}

#[test]
fn memory_that_cannot_be_pinned_will_do() {
    let machine = machine();
    let root = tempfile::tempdir().unwrap();
    let arena = Arena::new(None);
    let tensors = machine.tensors(1, &SIZES);
    machine.follow(&tensors);
    machine.control.set_pinned_bytes_max(0);
    let path = root.path().join("ckpt");
    let job = Job::new(
        tensors.state(),
        &path,
        &options(),
        &staging(&arena, true, &tensors),
    )
    .unwrap();
    let mut attempt = begin(&path);
    let written = job.write(&mut attempt, 0, &Progress::default());
    machine.control.set_pinned_bytes_max(u64::MAX);
    let written = written.unwrap();
    let fallbacks = &written.transport.fallbacks;
    assert!(
        fallbacks.iter().any(|one| one.kind.name() == "unpinned"),
        "{fallbacks:?}"
    );
    commit(attempt, &publication(&path), vec![written.part]).unwrap();
    tensors.assert_at(&path, 1);
}

/// Any array that PyTorch can have, and a few that it cannot.
fn views() -> impl Strategy<Value = (usize, Vec<usize>, Vec<isize>)> {
    let dims = prop::collection::vec((1_usize..7, 1_isize..4, any::<bool>()), 0..4);
    let order = any::<u64>();
    (prop::sample::select(vec![1, 4]), dims, order).prop_map(|(item_bytes, dims, order)| {
        let mut stride = item_bytes as isize;
        let mut shape = Vec::new();
        let mut strides = Vec::new();
        for (size, step, is_expanded) in dims {
            shape.push(size);
            strides.push(if is_expanded { 0 } else { stride * step });
            stride *= step * size as isize;
        }
        // Dimensions in another order.
        let mut left: Vec<usize> = (0..shape.len()).collect();
        let (mut order, mut drawn) = (order, Vec::new());
        while !left.is_empty() {
            drawn.push(left.swap_remove(order as usize % left.len()));
            order /= 7;
        }
        let shape = drawn.iter().map(|&dim| shape[dim]).collect();
        let strides = drawn.iter().map(|&dim| strides[dim]).collect();
        (item_bytes, shape, strides)
    })
}

/// The row-major content, item by item.
fn row_major(memory: &[u8], item_bytes: usize, shape: &[usize], strides: &[isize]) -> Vec<u8> {
    let mut found = Vec::new();
    for number in 0..shape.iter().product() {
        let (mut at, mut rest): (isize, usize) = (0, number);
        for (&size, &stride) in shape.iter().zip(strides).rev() {
            at += (rest % size) as isize * stride;
            rest /= size;
        }
        found.extend_from_slice(&memory[at as usize..][..item_bytes]);
    }
    found
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn whatever_the_strides_the_content_is_stored(
        arrays in prop::collection::vec(views(), 1..12),
        seed: u64,
    ) {
        let machine = machine();
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        let memory = common::noise(seed % 1000, 200_000);
        let lent = machine.lent(&memory);
        machine.device_streams.follow(&lent.foreign()).unwrap();
        let specs = arrays.iter().enumerate();
        let specs = specs.map(|(index, (item_bytes, shape, _))| {
            spec(format!("a{index}"), *item_bytes, shape)
        });
        let sources = arrays.iter().map(|(item_bytes, shape, strides)| {
            lent.view(0, *item_bytes, shape, strides).into()
        });
        let state = SaveState { tensors: specs.collect(), ..state(&[], sources.collect()) };
        save_at_once(state, &path).unwrap();
        let loaded = load(&path, &Options::default()).unwrap();
        for (index, (item_bytes, shape, strides)) in arrays.iter().enumerate() {
            let expected = row_major(&memory, *item_bytes, shape, strides);
            let found = bytes_of(&loaded, index, expected.len());
            prop_assert!(found == &expected[..], "array {}", index);
        }
    }
}

#[test]
fn a_device_that_fails_under_way_fails_the_save() {
    // A context that has failed is lost for its process, so this needs a separate one.
    let text = crate::text_of("saves::child_whose_device_fails", &[]);
    assert!(text.contains("1 passed"), "{text}");
}

#[test]
#[ignore = "run by another test"]
fn child_whose_device_fails() {
    let machine = machine();
    let root = tempfile::tempdir().unwrap();
    let tensors = machine.tensors(1, &SIZES);
    machine.theirs.synchronize().unwrap();
    machine.follow(&tensors);
    machine
        .control
        .fail_operation(Some(Kind::DeviceToHost), 2, 700);
    let path = root.path().join("ckpt");
    let error = save_at_once(tensors.state(), &path).unwrap_err();
    assert!(
        matches!(&error, Error::Io(penstock_io::Error::Cuda(_))),
        "{error}"
    );
    assert!(!path.exists());
    // The host's tensors can still be saved.
    let kept = HostRegion::from(content(1, 0, SIZES[0])).into();
    save_at_once(state(&SIZES[..1], vec![kept]), &path).unwrap();
}

#[test]
fn a_device_that_does_not_give_back_what_it_was_given_is_not_used() {
    let machine = machine();
    DeviceStreams::checked(&machine.device).unwrap();
    for kind in [Kind::HostToDevice, Kind::DeviceToHost] {
        // The driver reports success, and has done nothing.
        machine.control.fail_operation(Some(kind), 1, 0);
        let refused = DeviceStreams::checked(&machine.device).unwrap_err();
        let words = refused.to_string();
        assert!(words.contains("does not come back"), "{words}");
        machine.control.clear_faults();
    }
    // There may be no memory for that.
    machine.control.fail_call("cuMemAlloc_v2", 1, 2);
    DeviceStreams::checked(&machine.device).unwrap();
}
