//! Mirrors of checkpoints, in a bucket of a server that logs its requests: the same names and
//! bytes, no damaged bytes, and nothing sent twice, wherever a process is killed.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::Duration;

use crate::common::{
    self, Rng, Sample, engines, faulty, names, number, publication, sealed, served, sidecars,
};
use penstock_io::buffer::Memory;
use penstock_io::engine::{Op, OpKind};
use penstock_io::faulty::{Failure, Faults, Repeat};
use penstock_io::file::File;
use penstock_object::{Address, Objects, Remote, buckets};
use penstock_object_server::{Bucket, Call, Entry, Fault, Server};
use penstock_store::mirror::{MirrorReport, Mirroring, mirror, mirror_sealed};
use penstock_store::options::Options;
use penstock_store::save::{Attempt, Publication, commit, save, write_rank};
use penstock_store::{Error, MANIFEST, Progress, Result};

const MIB: usize = 1 << 20;

/// A server with a bucket, and a local directory.
struct World {
    server: Server,
    bucket: Arc<Bucket>,
    root: tempfile::TempDir,
}

impl World {
    /// Bucket names are the addresses, so no two tests share one.
    fn new(name: &str) -> World {
        let server = served::start();
        let bucket = server.make_bucket(name);
        reach(name, &server.endpoint());
        World {
            bucket,
            server,
            root: tempfile::tempdir().unwrap(),
        }
    }

    fn from(&self) -> PathBuf {
        self.root.path().join("step")
    }

    fn to(&self) -> PathBuf {
        at(self.bucket.name())
    }

    fn mirror(&self) -> Result<MirrorReport> {
        mirror_to(&self.from(), &self.to(), &Progress::default())
    }

    /// The objects in the bucket under the copy's names.
    fn copy(&self) -> HashMap<String, Vec<u8>> {
        let objects = self.bucket.objects().into_iter();
        objects
            .map(|(key, object)| (name_of(&key), object.bytes.to_vec()))
            .collect()
    }

    #[track_caller]
    fn assert_is_copy(&self) {
        assert_eq!(self.copy(), files(&self.from()));
        assert_eq!(self.bucket.uploads().len(), 0);
    }

    /// Number of parts that the store has received.
    fn parts_sent(&self) -> usize {
        let journal = self.bucket.journal().into_iter();
        let is_part = |call| call == Call::PutPart;
        journal
            .filter(|entry| is_part(entry.call) && entry.status == Some(200))
            .map(|entry| entry.applied)
            .sum()
    }
}

fn at(bucket: &str) -> PathBuf {
    PathBuf::from(served::url(bucket, "run/step"))
}

fn name_of(key: &str) -> String {
    key.strip_prefix("run/step/").unwrap().to_owned()
}

fn reach(bucket: &str, endpoint: &str) {
    let remote = Remote {
        part_bytes: Some(5 * MIB),
        patience: Some(Duration::from_secs(5)),
        ..served::remote(endpoint, "mirror")
    };
    buckets::reach(Address::of(&at(bucket)).unwrap().unwrap(), remote);
}

fn mirror_to(from: &Path, to: &Path, progress: &Progress) -> Result<MirrorReport> {
    let mirroring = Mirroring {
        connections: Some(3),
        ..Mirroring::default()
    };
    mirror(from, to, &mirroring, &Options::default(), progress)
}

fn files(path: &Path) -> HashMap<String, Vec<u8>> {
    let read = |name: String| {
        let bytes = fs::read(path.join(&name)).unwrap();
        (name, bytes)
    };
    names(path).into_iter().map(read).collect()
}

/// A checkpoint with shards of several parts and of less than one, and a sidecar.
fn save_at(path: &Path, seed: u64) {
    let sample = Sample::seeded_sizes(seed, &[11 * MIB, 7 * MIB + 123, 300, 2 * MIB]);
    let publication = Publication {
        overwrite: true,
        sidecars: sidecars(seed),
        ..publication(path)
    };
    let options = Options {
        shard_bytes: Some(17 << 20),
        ..Options::default()
    };
    save(
        sample.grouped().state(),
        &publication,
        &options,
        &Progress::default(),
    )
    .unwrap();
}

fn shard_of(path: &Path) -> String {
    let is_shard = |name: &String| name.starts_with("shard-00000-00");
    names(path).into_iter().find(is_shard).unwrap()
}

#[test]
fn a_copy_has_the_same_names_and_bytes_and_is_sent_once() {
    let world = World::new("same-names");
    save_at(&world.from(), 1);
    let report = world.mirror().unwrap();
    world.assert_is_copy();
    let bytes: usize = files(&world.from()).values().map(Vec::len).sum();
    assert_eq!(
        (report.bytes, report.sent_bytes),
        (bytes as u64, bytes as u64)
    );
    assert_eq!(report.files, names(&world.from()).len());
    let before = world.bucket.changes();
    let again = world.mirror().unwrap();
    assert_eq!((&again.id, again.sent_bytes), (&report.id, 0));
    assert_eq!(world.bucket.changes(), before);
}

#[test]
fn what_is_damaged_here_is_not_mirrored() {
    let world = World::new("damaged");
    save_at(&world.from(), 1);
    for name in names(&world.from()) {
        let file = world.from().join(&name);
        let right = fs::read(&file).unwrap();
        let mut damaged = right.clone();
        damaged[right.len() / 2] ^= 4;
        fs::write(&file, &damaged).unwrap();
        let result = world.mirror();
        fs::write(&file, &right).unwrap();
        if name == "config.json" || name == "model.safetensors.index.json" {
            // The copies of sidecars may be edited: the originals are mirrored, whose digests are
            // in the manifest.
            world.assert_is_copy();
            for key in world.bucket.objects().keys() {
                world.bucket.remove(key);
            }
            continue;
        }
        let Err(Error::Corrupt { file, path, .. }) = result else {
            panic!("{name}: {result:?}");
        };
        assert_eq!((file.as_deref(), path), (Some(&*name), world.from()));
        let copy = world.copy();
        assert!(
            !copy.contains_key(MANIFEST) && !copy.contains_key(&name),
            "{name}"
        );
    }
    world.mirror().unwrap();
    world.assert_is_copy();
}

#[test]
fn another_checkpoint_there_is_left_alone() {
    let world = World::new("another");
    save_at(&world.from(), 1);
    world.mirror().unwrap();
    let copy = world.copy();
    save_at(&world.from(), 2);
    let refused = world.mirror();
    assert!(matches!(refused, Err(Error::Exists { .. })), "{refused:?}");
    assert_eq!(world.copy(), copy);
}

#[test]
fn what_cannot_be_mirrored_is_refused() {
    let world = World::new("refused");
    let nothing = world.mirror();
    assert!(
        matches!(nothing, Err(Error::NotFound { .. })),
        "{nothing:?}"
    );
    fs::create_dir(world.from()).unwrap();
    let incomplete = world.mirror();
    assert!(
        matches!(incomplete, Err(Error::Incomplete { .. })),
        "{incomplete:?}"
    );
    save_at(&world.from(), 1);
    let local = mirror_to(&world.from(), world.root.path(), &Progress::default());
    assert!(matches!(local, Err(Error::Storage { .. })), "{local:?}");
    let stopped = Progress::default();
    stopped.cancel();
    let interrupted = mirror_to(&world.from(), &world.to(), &stopped);
    assert!(
        matches!(interrupted, Err(Error::Interrupted)),
        "{interrupted:?}"
    );
    assert_eq!(world.copy(), HashMap::new());
}

/// Makes several attempts at a time, as each waits for repetitions of requests most of the time.
fn try_all<T: Send>(cases: impl Iterator<Item = T> + Send, attempt: impl Fn(T) + Sync) {
    let cases = Mutex::new(cases);
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                loop {
                    let case = cases.lock().unwrap().next();
                    let Some(case) = case else { break };
                    attempt(case);
                }
            });
        }
    });
}

/// A single fault of any request is repaired by this call or the next, and the copy is whole as
/// soon as it has a manifest.
#[test]
fn one_fault_anywhere_costs_at_most_another_call() {
    let faults = [
        Fault::Refused(500),
        Fault::Disowned(500),
        Fault::Refused(404),
        Fault::Dropped,
        Fault::Unanswered,
        Fault::Doubled,
        Fault::Cut,
        Fault::Late(2),
        Fault::Refused(409),
        Fault::Garbled,
        Fault::Flipped(7),
        Fault::Flipped(1001),
        Fault::Stale(1),
        Fault::Stale(3),
    ];
    let world = World::new("faults");
    save_at(&world.from(), 1);
    world.mirror().unwrap();
    let requests = world.bucket.journal().len();
    let stride = if number("PENSTOCK_TORTURE_MIRROR_FAULTS", 0) > 0 {
        1
    } else {
        3
    };
    let cases: Vec<_> = faults
        .into_iter()
        .enumerate()
        .flat_map(|(start, fault)| {
            let every = (start % stride..requests).step_by(stride);
            every.map(move |nth| (start, fault, nth))
        })
        .collect();
    assert!(cases.len() >= faults.len() * requests / stride / 2);
    try_all(cases.into_iter(), |(start, fault, nth)| {
        let name = format!("faults-{start}-{nth}");
        let bucket = world.server.make_bucket(&name);
        reach(&name, &world.server.endpoint());
        bucket.plan("mirror", nth, fault);
        let to = at(&name);
        let copy = || -> HashMap<String, Vec<u8>> {
            let objects = bucket.objects().into_iter();
            objects
                .map(|(key, object)| (name_of(&key), object.bytes.to_vec()))
                .collect()
        };
        let mirrored = mirror_to(&world.from(), &to, &Progress::default());
        // No error tells the user to delete the copy.
        let is_condemned = matches!(
            mirrored,
            Err(Error::Exists { .. } | Error::Corrupt { .. } | Error::Malformed { .. })
        );
        assert!(!is_condemned, "{fault:?} of {nth}: {mirrored:?}");
        if mirrored.is_err() {
            let is_whole = copy() == files(&world.from());
            assert!(
                is_whole || !copy().contains_key(MANIFEST),
                "{fault:?} of {nth}"
            );
            mirror_to(&world.from(), &to, &Progress::default())
                .unwrap_or_else(|error| panic!("{fault:?} of {nth}: {}", error.full_message()));
        }
        world.server.apply_late(&bucket);
        assert_eq!(copy(), files(&world.from()), "{fault:?} of {nth}");
        world.server.remove_bucket(&name);
    });
}

/// The response that shows a mirror that its copy is complete may itself be wrong. The request is
/// repeated, and the first call reports the copy.
#[test]
fn one_bad_answer_to_a_read_back_condemns_no_copy() {
    let world = World::new("read-back");
    save_at(&world.from(), 1);
    world.mirror().unwrap();
    let is_read_back = |entry: &&Entry| {
        let is_of_manifest = entry.call == Call::Get && entry.key.ends_with(MANIFEST);
        is_of_manifest || matches!(entry.call, Call::List | Call::Head)
    };
    let journal = world.bucket.journal();
    let reads: Vec<usize> = (journal.iter().filter(is_read_back))
        .map(|entry| entry.nth)
        .collect();
    let faults = [
        Fault::Flipped(3),
        Fault::Flipped(500),
        Fault::Flipped(1999),
        Fault::Refused(404),
        Fault::Garbled,
        Fault::Cut,
        Fault::Stale(1),
    ];
    let all: Vec<_> = reads
        .iter()
        .flat_map(|nth| faults.map(|fault| (*nth, fault)))
        .collect();
    // Every fault occurs, since the stride does not divide their number.
    let stride = if number("PENSTOCK_TORTURE_MIRROR_FAULTS", 0) > 0 {
        1
    } else {
        4
    };
    let cases = all.into_iter().enumerate().step_by(stride);
    try_all(cases, |(number, (nth, fault))| {
        let name = format!("read-back-{number}");
        let bucket = world.server.make_bucket(&name);
        reach(&name, &world.server.endpoint());
        bucket.plan("mirror", nth, fault);
        let report = mirror_to(&world.from(), &at(&name), &Progress::default());
        report.unwrap_or_else(|error| panic!("{fault:?} of {nth}: {}", error.full_message()));
        let objects = bucket.objects().into_iter();
        let copy: HashMap<_, _> = objects
            .map(|(key, object)| (name_of(&key), object.bytes.to_vec()))
            .collect();
        assert_eq!(copy, files(&world.from()), "{fault:?} of {nth}");
        // A later call that finds the copy, through a response that is wrong once, reports it too.
        let asked = bucket.requests();
        bucket.plan("mirror", asked, fault);
        let again = mirror_to(&world.from(), &at(&name), &Progress::default());
        again.unwrap_or_else(|error| panic!("{fault:?} again: {}", error.full_message()));
        world.server.remove_bucket(&name);
    });
}

/// A read of the source fails, on each engine: nothing is published, and the next call continues.
#[test]
fn each_failing_read_ends_the_mirroring_and_the_next_call_goes_on() {
    let world = World::new("failing-reads");
    save_at(&world.from(), 1);
    for engine in engines() {
        let reading = |faults: &Arc<Faults>, to: &Path| {
            let options = faulty(*engine, Arc::clone(faults));
            let mirroring = Mirroring::default();
            mirror(
                &world.from(),
                to,
                &mirroring,
                &options,
                &Progress::default(),
            )
        };
        let counting = Arc::new(Faults::new(0));
        reading(&counting, &at("failing-reads")).unwrap();
        world
            .bucket
            .objects()
            .keys()
            .for_each(|key| world.bucket.remove(key));
        for nth in 1..=counting.operations() {
            let name = format!("failing-reads-{engine:?}-{nth}").to_lowercase();
            let bucket = world.server.make_bucket(&name);
            reach(&name, &world.server.endpoint());
            let failure = Failure {
                class: None,
                nth,
                repeat: Repeat::Once,
                errno: 5,
            };
            let failing = Arc::new(Faults::new(nth).fail(failure));
            let failed = reading(&failing, &at(&name));
            assert!(failed.is_err(), "{engine:?} read {nth}");
            assert!(!bucket.objects().contains_key("run/step/manifest.json"));
            reading(&Arc::new(Faults::new(0).short_transfers(50)), &at(&name)).unwrap();
            let objects = bucket.objects().into_iter();
            let copy: HashMap<_, _> = objects
                .map(|(key, object)| (name_of(&key), object.bytes.to_vec()))
                .collect();
            assert_eq!(copy, files(&world.from()), "{engine:?} read {nth}");
            world.server.remove_bucket(&name);
        }
    }
}

/// A damaged manifest at the mirror is not another checkpoint.
#[test]
fn a_copy_whose_manifest_is_damaged_there_is_called_damaged() {
    let world = World::new("damaged-there");
    save_at(&world.from(), 1);
    world.mirror().unwrap();
    let mut manifest = world.copy()[MANIFEST].clone();
    manifest[100] ^= 1;
    world.bucket.put("run/step/manifest.json", manifest);
    let refused = world.mirror();
    let Err(Error::Corrupt { path, file, .. }) = refused else {
        panic!("{refused:?}");
    };
    assert_eq!((path, file.as_deref()), (world.to(), Some(MANIFEST)));
}

/// Everything sent so far is removed meanwhile, as by a lifecycle rule of the bucket.
#[test]
fn a_bucket_that_is_emptied_meanwhile_costs_at_most_another_call() {
    let world = World::new("emptied");
    save_at(&world.from(), 1);
    world.mirror().unwrap();
    let requests = world.bucket.requests();
    try_all(1..requests, |after| {
        let name = format!("emptied-{after}");
        let bucket = world.server.make_bucket(&name);
        reach(&name, &world.server.endpoint());
        let (inside, is_done) = (Arc::downgrade(&bucket), AtomicBool::new(false));
        bucket.between(move || {
            let bucket = inside.upgrade().unwrap();
            if bucket.requests() >= after && !is_done.swap(true, Ordering::Relaxed) {
                bucket.end_uploads();
                bucket.objects().keys().for_each(|key| bucket.remove(key));
            }
        });
        let copy = || -> HashMap<String, Vec<u8>> {
            let objects = bucket.objects().into_iter();
            objects
                .map(|(key, object)| (name_of(&key), object.bytes.to_vec()))
                .collect()
        };
        let mirrored = mirror_to(&world.from(), &at(&name), &Progress::default());
        match mirrored {
            Ok(_) => {}
            Err(Error::Storage { .. }) => {
                assert!(!copy().contains_key(MANIFEST), "emptied after {after}");
                mirror_to(&world.from(), &at(&name), &Progress::default()).unwrap();
            }
            Err(error) => panic!("emptied after {after}: {}", error.full_message()),
        }
        assert_eq!(copy(), files(&world.from()), "emptied after {after}");
        world.server.remove_bucket(&name);
    });
}

/// Two processes mirror different checkpoints of one step over a line with wrong responses: the
/// copy is one of the two, and only the owner of that one reports success.
#[test]
fn two_mirrors_of_one_step_through_a_line_that_lies_make_one_whole_copy() {
    let world = World::new("two");
    let others = world.root.path().join("other");
    save_at(&world.from(), 1);
    save_at(&others, 2);
    let mut rng = Rng::new(number("PENSTOCK_TORTURE_SEED", 0x7e0));
    for round in 0..number("PENSTOCK_TORTURE_MIRROR_PAIRS", 12) {
        let name = format!("two-{round}");
        let bucket = world.server.make_bucket(&name);
        reach(&name, &world.server.endpoint());
        let drawn: Vec<(usize, Fault)> = (0..4)
            .map(|_| {
                let fault = match rng.below(8) {
                    0 => Fault::Flipped(rng.below(8192) as usize),
                    1 => Fault::Garbled,
                    2 => Fault::Refused(404),
                    3 => Fault::Refused(409),
                    4 => Fault::Unanswered,
                    5 => Fault::Doubled,
                    6 => Fault::Cut,
                    _ => Fault::Disowned(500),
                };
                (rng.below(60) as usize, fault)
            })
            .collect();
        for (nth, fault) in &drawn {
            bucket.plan("mirror", *nth, *fault);
        }
        let from = [world.from(), others.clone()];
        let mirrored = thread::scope(|scope| {
            let to = at(&name);
            let work = |from: PathBuf| {
                let to = to.clone();
                scope.spawn(move || mirror_to(&from, &to, &Progress::default()))
            };
            from.clone()
                .map(work)
                .map(|mirrored| mirrored.join().unwrap())
        });
        world.server.apply_late(&bucket);
        let manifest = bucket.objects().get("run/step/manifest.json").cloned();
        let what = format!("round {round}, {drawn:?}: {mirrored:?}");
        for (from, mirrored) in from.iter().zip(&mirrored) {
            let files = files(from);
            let is_its = manifest
                .as_ref()
                .is_some_and(|manifest| manifest.bytes == files[MANIFEST]);
            let has = |name: &String, bytes: &Vec<u8>| {
                let object = bucket.objects().remove(&format!("run/step/{name}"));
                object.is_some_and(|object| object.bytes == *bytes)
            };
            match mirrored {
                Ok(_) => assert!(is_its, "{what}"),
                Err(Error::Exists { .. }) => assert!(manifest.is_some() && !is_its, "{what}"),
                Err(Error::Corrupt { .. }) => panic!("{what}"),
                Err(_) => {}
            }
            // Two files have names that both checkpoints use.
            let shared = ["config.json", "model.safetensors.index.json"];
            let mut own = files
                .iter()
                .filter(|(name, _)| !shared.contains(&name.as_str()));
            assert!(
                !is_its || own.all(|(name, bytes)| has(name, bytes)),
                "{what}"
            );
        }
        world.server.remove_bucket(&name);
    }
}

/// Somebody aborts the upload of a file, or a sweep takes sent files for those of a dead save.
#[test]
fn what_somebody_removes_meanwhile_is_not_published_without() {
    let world = World::new("removed");
    save_at(&world.from(), 1);
    let removed = Arc::new(AtomicBool::new(false));
    let (bucket, done) = (Arc::downgrade(&world.bucket), Arc::clone(&removed));
    let key = format!("run/step/{}", shard_of(&world.from()));
    let victim = key.clone();
    world.bucket.between(move || {
        let bucket = bucket.upgrade().unwrap();
        let is_late = bucket.journal().iter().any(|entry| entry.call == Call::Put);
        if is_late && bucket.objects().contains_key(&victim) && !done.swap(true, Ordering::Relaxed)
        {
            bucket.remove(&victim);
        }
    });
    let refused = world.mirror();
    assert!(removed.load(Ordering::Relaxed));
    let Err(Error::Storage {
        path, operation, ..
    }) = refused
    else {
        panic!("{refused:?}");
    };
    assert_eq!(operation, "publish");
    assert!(path.ends_with(shard_of(&world.from())));
    assert!(!world.copy().contains_key(MANIFEST));
    world.mirror().unwrap();
    world.assert_is_copy();
}

/// A mirror that finds the manifest checks the other files too: the earlier mirror may have died
/// before it did.
#[test]
fn what_a_copy_with_a_manifest_lacks_is_sent_again() {
    let world = World::new("lacks");
    save_at(&world.from(), 1);
    world.mirror().unwrap();
    let shard = shard_of(&world.from());
    world.bucket.remove(&format!("run/step/{shard}"));
    let report = world.mirror().unwrap();
    world.assert_is_copy();
    let bytes = fs::metadata(world.from().join(shard)).unwrap().len();
    assert_eq!(report.sent_bytes, bytes);
}

/// A sweep may have begun before the manifest existed. The mirror waits for it and sends the
/// removed files again; the manifest stays, since another mirror may have reported the copy.
#[test]
fn a_sweep_that_meets_the_publication_costs_what_it_took_and_no_more() {
    let world = World::new("meets");
    save_at(&world.from(), 1);
    let part = names(&world.from());
    let part = part.iter().find(|name| name.starts_with("part-")).unwrap();
    let id = part.split('.').nth(1).unwrap();
    let fence = format!("run/step/fence-{id}.{id}.tmp");
    let victim = format!("run/step/{part}");
    let bucket = Arc::downgrade(&world.bucket);
    let has_begun = AtomicBool::new(false);
    let since = AtomicUsize::new(0);
    let (has_ended, is_taken_back) = (Arc::default(), Arc::default());
    let (ended, taken_back): (Arc<AtomicBool>, Arc<AtomicBool>) =
        (Arc::clone(&has_ended), Arc::clone(&is_taken_back));
    world.bucket.between(move || {
        let bucket = bucket.upgrade().unwrap();
        let objects = bucket.objects();
        let has_manifest = objects.contains_key("run/step/manifest.json");
        if has_manifest && !has_begun.swap(true, Ordering::Relaxed) {
            bucket.put(&fence, "{}");
            bucket.remove(&victim);
        } else if has_begun.load(Ordering::Relaxed) {
            taken_back.fetch_or(!has_manifest, Ordering::Relaxed);
            if since.fetch_add(1, Ordering::Relaxed) == 6 {
                ended.store(objects.contains_key(&fence), Ordering::Relaxed);
                bucket.remove(&fence);
            }
        }
    });
    world.mirror().unwrap();
    assert!(has_ended.load(Ordering::Relaxed));
    assert!(!is_taken_back.load(Ordering::Relaxed));
    world.assert_is_copy();
}

#[test]
fn an_upload_that_is_not_ours_is_given_up() {
    let world = World::new("not-ours");
    save_at(&world.from(), 1);
    let objects = buckets::at(&world.to()).unwrap().unwrap();
    let path = world.to().join(shard_of(&world.from()));
    // One upload without a part, and one with a part of other bytes.
    for part in [None, Some(vec![7; 5 * MIB])] {
        let resumed = objects.resume_upload(&path, |_| false).unwrap();
        if let Some(bytes) = part {
            put_part(&objects, resumed.file, &bytes);
        }
    }
    assert_eq!(world.bucket.uploads().len(), 1);
    world.mirror().unwrap();
    world.assert_is_copy();
}

#[test]
fn an_upload_that_somebody_ends_is_begun_anew() {
    let world = World::new("ended");
    save_at(&world.from(), 1);
    let bucket = Arc::downgrade(&world.bucket);
    let is_done = AtomicBool::new(false);
    world.bucket.between(move || {
        let bucket = bucket.upgrade().unwrap();
        let has_part = bucket
            .journal()
            .iter()
            .any(|entry| entry.call == Call::PutPart);
        if has_part && !is_done.swap(true, Ordering::Relaxed) {
            bucket.end_uploads();
        }
    });
    world.mirror().unwrap();
    world.assert_is_copy();
    assert!(world.bucket.uploads().is_empty());
}

/// Sends the first part of an upload.
fn put_part(objects: &Objects, file: File, bytes: &[u8]) {
    let mut buf = Memory::allocate(bytes.len()).unwrap().share().1;
    buf.as_mut_slice().copy_from_slice(bytes);
    let mut engine = objects.engine(1).unwrap().engine;
    let op = Op {
        token: 0,
        file: Arc::new(file),
        kind: OpKind::Write { offset: 0, buf },
    };
    engine.submit(op).unwrap();
    let mut completed = Vec::new();
    engine.poll(1, None, &mut completed).unwrap();
    completed.pop().unwrap().result.unwrap();
}

/// A store that accepts requests and never responds.
#[test]
fn a_stop_does_not_wait_for_answers() {
    let world = World::new("silent");
    save_at(&world.from(), 1);
    let progress = Arc::new(Progress::default());
    let silent = Arc::downgrade(&progress);
    // Every request is answered up to the first part, whose response never comes during the test.
    let silence = TcpListener::bind("127.0.0.1:0").unwrap();
    let endpoint = format!("http://{}", silence.local_addr().unwrap());
    let server = world.server.endpoint();
    thread::spawn(move || relay(&silence, server.trim_start_matches("http://"), &silent));
    reach("silent", &endpoint);
    let stopped = mirror_to(&world.from(), &world.to(), &progress);
    assert!(matches!(stopped, Err(Error::Interrupted)), "{stopped:?}");
    reach("silent", &world.server.endpoint());
    world.mirror().unwrap();
    world.assert_is_copy();
}

/// Forwards requests until one is a part, then cancels, and forwards nothing more.
fn relay(clients: &TcpListener, server: &str, progress: &Weak<Progress>) {
    for client in clients.incoming() {
        let (client, server) = (client.unwrap(), TcpStream::connect(server).unwrap());
        let (mut answers, mut back) = (server.try_clone().unwrap(), client.try_clone().unwrap());
        thread::spawn(move || std::io::copy(&mut answers, &mut back));
        let progress = progress.clone();
        thread::spawn(move || pass_all_but_parts(client, server, &progress));
    }
}

fn pass_all_but_parts(mut client: TcpStream, mut server: TcpStream, progress: &Weak<Progress>) {
    let mut bytes = vec![0; 64 << 10];
    while let Ok(len @ 1..) = client.read(&mut bytes) {
        let text = String::from_utf8_lossy(&bytes[..len.min(1000)]).into_owned();
        if text.contains("partNumber=") {
            progress.upgrade().unwrap().cancel();
            thread::sleep(Duration::from_secs(600));
        }
        server.write_all(&bytes[..len]).unwrap();
    }
}

/// Environment variables that tell a child what to mirror.
const FROM: &str = "PENSTOCK_TEST_MIRROR_FROM";
const BUCKET: &str = "PENSTOCK_TEST_MIRROR_BUCKET";
const ENDPOINT: &str = "PENSTOCK_TEST_MIRROR_ENDPOINT";
/// The file that gets each sealed message, by its key and nonce; with it a child seals its copy.
const SEALS: &str = "PENSTOCK_RECORD_SEALS";

#[test]
#[ignore = "not a test: what the test kills"]
fn child() {
    let Some(from) = std::env::var_os(FROM) else {
        return;
    };
    let bucket = std::env::var(BUCKET).unwrap();
    reach(&bucket, &std::env::var(ENDPOINT).unwrap());
    let (from, to) = (Path::new(&from), at(&bucket));
    match std::env::var_os(SEALS) {
        None => mirror_to(from, &to, &Progress::default()).unwrap(),
        Some(_) => mirror_sealed_to(from, &to).unwrap(),
    };
}

/// A mirroring that is killed at random moments and restarted until it finishes.
#[test]
fn a_part_is_sent_once_wherever_a_process_is_killed() {
    let wanted = number("PENSTOCK_TORTURE_MIRROR_KILLS", 25);
    let seed = number("PENSTOCK_TORTURE_SEED", 0x0009_1c11);
    let mut rng = Rng::new(seed);
    let (mut kills, mut rounds) = (0, 0);
    while kills < wanted {
        let world = World::new(&format!("kills-{rounds}"));
        save_at(&world.from(), rounds);
        rounds += 1;
        let mut is_done = false;
        while !is_done {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["mirror::child", "--exact", "--ignored", "--nocapture"])
                .env(FROM, world.from())
                .env(BUCKET, world.bucket.name())
                .env(ENDPOINT, world.server.endpoint())
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            // The random moment itself; nothing is synchronized by it.
            thread::sleep(Duration::from_micros(
                rng.below(MOMENT_MAX.as_micros() as u64),
            ));
            match child.try_wait().unwrap() {
                Some(status) => {
                    assert!(status.success(), "round {rounds} of seed {seed}");
                    is_done = true;
                }
                None => {
                    child.kill().unwrap();
                    child.wait().unwrap();
                    kills += 1;
                }
            }
            apply_late(&world.bucket);
            let has_manifest = world.copy().contains_key(MANIFEST);
            if has_manifest {
                assert_eq!(
                    world.copy(),
                    files(&world.from()),
                    "round {rounds} of seed {seed}"
                );
            }
            assert!(has_manifest || !is_done);
        }
        world.assert_is_copy();
        let parts: usize = files(&world.from())
            .values()
            .filter(|bytes| bytes.len() > 5 * MIB)
            .map(|bytes| bytes.len().div_ceil(5 * MIB))
            .sum();
        assert_eq!(world.parts_sent(), parts, "round {rounds} of seed {seed}");
    }
    eprintln!("{kills} kills in {rounds} rounds, seed {seed}: no part sent twice");
}

/// Latest time after its start at which a child is killed.
const MOMENT_MAX: Duration = Duration::from_millis(120);

/// Waits for the complete requests of a dead child, which the server still carries out.
fn apply_late(bucket: &Bucket) {
    let mut before = usize::MAX;
    while bucket.journal().len() != before {
        before = bucket.journal().len();
        thread::sleep(Duration::from_millis(20));
    }
}

// Sealed copies of clear checkpoints.

fn mirror_sealed_to(from: &Path, to: &Path) -> Result<MirrorReport> {
    let (mirroring, options) = (Mirroring::default(), Options::default());
    let progress = Progress::default();
    mirror_sealed(
        from,
        to,
        &sealed::sealing(),
        &mirroring,
        &options,
        &progress,
    )
}

/// A checkpoint of two ranks, with shards of several parts and of less than one.
fn save_clear(path: &Path) -> Vec<Sample> {
    let samples: Vec<Sample> = (0..2)
        .map(|rank| Sample::seeded_rank(rank, &[6 * MIB, 300, MIB + 5]))
        .collect();
    let (options, progress) = (Options::default(), Progress::default());
    let native = &options.file_system;
    let mut attempt = Attempt::begin(path, false, native, &progress).unwrap();
    let id = attempt.id().to_owned();
    let mut joined = Attempt::join(path, &id, native, &progress).unwrap();
    let parts = (0..).zip([&mut attempt, &mut joined]).zip(&samples);
    let write = |((rank, attempt), sample): ((u32, &mut Attempt), &Sample)| {
        let written = write_rank(attempt, rank, sample.state(), &options, &progress);
        written.unwrap().part
    };
    let parts = parts.map(write).collect();
    drop(joined);
    commit(attempt, &publication(path), parts).unwrap();
    samples
}

/// Panics unless the bucket has a whole sealed copy.
#[track_caller]
fn assert_is_sealed_copy(bucket: &Bucket, samples: &[Sample], what: &str) {
    let to = at(bucket.name());
    let options = Options::default().at(&to).unwrap();
    let copy = sealed::open(&to, &options.file_system).unwrap();
    assert!(copy.is_sealed(), "{what}");
    let loaded = copy.load(None, HashMap::new(), &options, &Progress::default());
    let loaded = loaded.unwrap_or_else(|error| panic!("{what}: {}", error.full_message()));
    let all = samples.iter().flat_map(|sample| &sample.bytes);
    for (place, bytes) in all.enumerate() {
        assert!(
            common::bytes_of(&loaded, place, bytes.len()) == &bytes[..],
            "{what}"
        );
    }
}

/// A single fault of any request is repaired by this call or the next, which begins anew with
/// another key. All of a copy is of one attempt.
#[test]
fn one_fault_anywhere_costs_a_sealed_copy_at_most_another_call() {
    let faults = [
        Fault::Disowned(500),
        Fault::Dropped,
        Fault::Unanswered,
        Fault::Doubled,
        Fault::Cut,
        Fault::Late(2),
        Fault::Flipped(1001),
        Fault::Stale(1),
    ];
    let world = World::new("sealed-faults");
    let samples = save_clear(&world.from());
    mirror_sealed_to(&world.from(), &world.to()).unwrap();
    assert_is_sealed_copy(&world.bucket, &samples, "no fault");
    for (name, bytes) in world.copy() {
        let shows = |text: &[u8]| bytes.windows(text.len()).any(|window| window == text);
        for sample in &samples {
            let (first, last) = (&sample.bytes[0], &sample.bytes[2]);
            let is_clear = shows(&first[..32]) || shows(&last[last.len() - 32..]);
            assert!(!is_clear && !shows(b"s1.t"), "{name} is clear");
        }
    }
    let requests = world.bucket.journal().len();
    let stride = match number("PENSTOCK_TORTURE_MIRROR_FAULTS", 0) {
        0 => 7,
        _ => 1,
    };
    let cases = (0..).zip(faults).flat_map(|(start, fault)| {
        let every = (start % stride..requests).step_by(stride);
        every.map(move |nth| (start, fault, nth))
    });
    let cases: Vec<_> = cases.collect();
    try_all(cases.into_iter(), |(start, fault, nth)| {
        let name = format!("sealed-faults-{start}-{nth}");
        let bucket = world.server.make_bucket(&name);
        reach(&name, &world.server.endpoint());
        bucket.plan("mirror", nth, fault);
        let to = at(&name);
        let what = format!("{fault:?} of {nth}");
        let mirrored = mirror_sealed_to(&world.from(), &to);
        let is_condemned = matches!(
            mirrored,
            Err(Error::Exists { .. } | Error::Corrupt { .. } | Error::Malformed { .. })
        );
        assert!(!is_condemned, "{what}: {mirrored:?}");
        if mirrored.is_err() {
            mirror_sealed_to(&world.from(), &to)
                .unwrap_or_else(|error| panic!("{what}: {}", error.full_message()));
        }
        world.server.apply_late(&bucket);
        assert_is_sealed_copy(&bucket, &samples, &what);
        let again = mirror_sealed_to(&world.from(), &to).unwrap();
        assert_eq!(again.sent_bytes, 0, "{what}");
        world.server.remove_bucket(&name);
    });
}

#[test]
fn two_sealed_mirrors_of_one_step_make_one_whole_copy() {
    let world = World::new("sealed-two");
    let samples = save_clear(&world.from());
    thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| mirror_sealed_to(&world.from(), &world.to()).unwrap());
        }
    });
    assert_is_sealed_copy(&world.bucket, &samples, "three at once");
    // The others have removed their files.
    let (from, copy) = (files(&world.from()), world.copy());
    assert_eq!(copy.len(), from.len());
}

/// A sealed mirroring of two ranks that is killed at random moments: nothing but a whole copy is
/// ever published, the next call finishes it, and no key and nonce seals two texts.
#[test]
fn a_sealed_copy_is_whole_wherever_a_process_is_killed() {
    let wanted = number("PENSTOCK_TORTURE_MIRROR_KILLS", 25);
    let seed = number("PENSTOCK_TORTURE_SEED", 0x0009_1c12);
    let mut rng = Rng::new(seed);
    let (mut kills, mut rounds) = (0, 0);
    while kills < wanted {
        let world = World::new(&format!("sealed-kills-{rounds}"));
        let samples = save_clear(&world.from());
        let seals = world.from().with_file_name("seals");
        rounds += 1;
        let what = format!("round {rounds} of seed {seed}");
        // Each call begins anew, so one that is killed too early again and again would never end.
        for moment in [Some(0), Some(1), Some(2), Some(3), None] {
            let mut child = Command::new(std::env::current_exe().unwrap())
                .args(["mirror::child", "--exact", "--ignored", "--nocapture"])
                .env(FROM, world.from())
                .env(BUCKET, world.bucket.name())
                .env(ENDPOINT, world.server.endpoint())
                .env(SEALS, &seals)
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            if moment.is_some() {
                // The random moment itself; nothing is synchronized by it.
                let latest = 3 * MOMENT_MAX.as_micros() as u64;
                thread::sleep(Duration::from_micros(rng.below(latest)));
                if child.try_wait().unwrap().is_none() {
                    child.kill().unwrap();
                    kills += 1;
                }
            }
            let status = child.wait().unwrap();
            assert!(status.success() || moment.is_some(), "{what}");
            apply_late(&world.bucket);
            if world.copy().contains_key(MANIFEST) {
                assert_is_sealed_copy(&world.bucket, &samples, &what);
            }
        }
        assert_is_sealed_copy(&world.bucket, &samples, &what);
        let recorded = fs::read(&seals).unwrap();
        let (recorded, rest) = recorded.as_chunks::<44>();
        assert!(rest.is_empty(), "{what}: a record is cut");
        let apart: HashSet<&[u8; 44]> = recorded.iter().collect();
        assert_eq!(apart.len(), recorded.len(), "{what}: a nonce is used twice");
    }
    eprintln!("{kills} kills in {rounds} rounds, seed {seed}: each copy is whole");
}

/// A copy at the place is only taken for complete if it is sealed, and of this checkpoint.
#[test]
fn another_copy_in_the_place_of_a_sealed_one_is_refused() {
    let world = World::new("sealed-others");
    save_clear(&world.from());
    mirror_sealed_to(&world.from(), &world.to()).unwrap();
    assert_eq!(
        mirror_sealed_to(&world.from(), &world.to())
            .unwrap()
            .sent_bytes,
        0
    );
    let other = world.from().with_file_name("other");
    save_clear(&other);
    let error = mirror_sealed_to(&other, &world.to()).unwrap_err();
    assert!(matches!(error, Error::Exists { .. }), "{error}");
    let world = World::new("sealed-clear");
    save_clear(&world.from());
    let (mirroring, options) = (Mirroring::default(), Options::default());
    let progress = Progress::default();
    mirror(&world.from(), &world.to(), &mirroring, &options, &progress).unwrap();
    let error = mirror_sealed_to(&world.from(), &world.to()).unwrap_err();
    assert!(matches!(error, Error::Exists { .. }), "{error}");
}

#[test]
fn a_damaged_checkpoint_is_not_sealed() {
    let world = World::new("sealed-damaged");
    save_clear(&world.from());
    let shard = world.from().join(shard_of(&world.from()));
    let mut bytes = fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&shard, bytes).unwrap();
    let mirrored = mirror_sealed_to(&world.from(), &world.to());
    assert!(matches!(mirrored, Err(Error::Corrupt { .. })));
    assert!(world.copy().is_empty());
}
