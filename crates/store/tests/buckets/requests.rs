//! Number of requests that calls make to a bucket: each is a round trip, and some are billed
//! individually.
//!
//! The numbers are exact: an additional request fails the test, and a saved one is recorded here
//! and in `docs/buckets.md`.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{Sample, publication};
use penstock_object::{Address, Credentials, Keys, Objects, Remote};
use penstock_object_server::{Bucket, Call, SECRET, Server};
use penstock_store::care::verify::verify;
use penstock_store::load::checkpoint::Checkpoint;
use penstock_store::options::Options;
use penstock_store::save::{Publication, Sidecars, save};
use penstock_store::steps::store::Store;
use penstock_store::{Error, Progress};

/// A bucket with a store, whose requests are counted.
struct World {
    _server: Server,
    bucket: Arc<Bucket>,
    store: Store,
    options: Options,
}

impl World {
    fn new() -> World {
        let server = Server::start().unwrap();
        let bucket = server.make_bucket("counted");
        let root = PathBuf::from("s3://counted/store");
        let keys = Keys {
            id: "a".into(),
            secret: SECRET.into(),
            token: None,
            expires: None,
        };
        let remote = Remote {
            endpoint: Some(server.endpoint()),
            region: Some("us-east-1".into()),
            credentials: Some(Credentials::Given(keys)),
            ..Remote::default()
        };
        let address = Address::of(&root).unwrap().unwrap();
        let objects = Arc::new(Objects::open(address, &remote).unwrap());
        let options = Options::default().on(&objects);
        World {
            store: Store::new(root).with_file_system(Arc::clone(&options.file_system)),
            _server: server,
            bucket,
            options,
        }
    }

    fn save(&self, step: u64, sample: &Sample, overwrite: bool) {
        let publication = Publication {
            step: Some(step),
            overwrite,
            ..publication(&self.store.step_path(step))
        };
        let progress = Progress::default();
        save(sample.state(), &publication, &self.options, &progress).unwrap();
    }

    fn open(&self, step: u64) -> Checkpoint {
        Checkpoint::open_on(&self.store.step_path(step), &self.options.file_system).unwrap()
    }

    fn load(&self, step: u64, sample: &Sample) {
        let checkpoint = self.open(step);
        let loaded = checkpoint.load(None, HashMap::new(), &self.options, &Progress::default());
        assert!(sample.is(&loaded.unwrap()), "it is another state");
    }

    fn verify(&self, step: u64) {
        let path = self.store.step_path(step);
        let report = verify(&path, &self.options, &Progress::default()).unwrap();
        assert!(report.problems.is_empty(), "{:?}", report.problems);
    }

    /// The key of a step's first shard.
    fn shard(&self, step: u64) -> String {
        let directory = format!("store/{}/shard-", name(&self.store.step_path(step)));
        let mut keys = self.bucket.objects().into_keys();
        let shard = keys.find(|key| key.starts_with(&directory));
        shard.expect("it was saved")
    }

    /// The requests that some work makes, counted by kind.
    fn counted(&self, work: impl FnOnce()) -> String {
        let before = self.bucket.requests();
        work();
        let mut counts: BTreeMap<Call, usize> = BTreeMap::new();
        for entry in &self.bucket.journal()[before..] {
            *counts.entry(entry.call).or_default() += 1;
        }
        let counts = counts.iter();
        let counts: Vec<String> = counts
            .map(|(call, count)| format!("{count} {call:?}"))
            .collect();
        counts.join(", ")
    }

    #[track_caller]
    fn assert_counts(&self, expected: &str, work: impl FnOnce()) {
        assert_eq!(self.counted(work), expected);
    }
}

fn name(path: &Path) -> &str {
    path.file_name().unwrap().to_str().unwrap()
}

/// A state of one small shard.
fn small() -> Sample {
    Sample::seeded_sizes(1, &[600, 77])
}

/// A state of 80 MiB in two shards.
fn large() -> Sample {
    Sample::seeded_sizes(2, &[2 << 20; 40])
}

#[test]
fn a_small_state_is_saved_replaced_and_deleted() {
    let world = World::new();
    let sample = small();
    // A list of the directory, shard and part, a list of all files, the manifest, and another list.
    world.assert_counts("3 List, 3 Put", || world.save(1, &sample, false));
    // Shard and part, a list of them, the present manifest, its successor, and a list of all files;
    // then a fence, a list of the files to remove, a check that the manifest no longer names them,
    // and three removals.
    let overwrite = "2 Get, 3 List, 4 Put, 3 Delete";
    world.assert_counts(overwrite, || world.save(1, &sample, true));
    let delete = "3 Head, 2 Get, 3 List, 1 Put, 4 Delete";
    world.assert_counts(delete, || {
        world.store.delete(1).unwrap();
    });
}

#[test]
fn a_small_file_goes_with_a_state() {
    let world = World::new();
    let publication = Publication {
        sidecars: Sidecars {
            files: vec![("config.json".to_owned(), b"{}".to_vec())],
            group: None,
        },
        ..publication(&world.store.step_path(1))
    };
    // In addition the sidecar, a check of its copy's place, and the copy, read from the sidecar.
    world.assert_counts("1 Get, 4 List, 5 Put", || {
        let state = small().state();
        save(state, &publication, &world.options, &Progress::default()).unwrap();
    });
}

#[test]
fn a_small_state_is_found_loaded_and_verified() {
    let world = World::new();
    let (sample, store) = (small(), &world.store);
    world.save(1, &sample, false);
    // Manifest, part, and a lookup of the shard.
    world.assert_counts("1 Head, 2 Get", || drop(world.open(1)));
    world.assert_counts("1 Head, 3 Get", || world.load(1, &sample));
    // The header of the shard, and all of it.
    world.assert_counts("1 Head, 4 Get", || world.verify(1));
    world.assert_counts("1 Get", || drop(store.identity(1).unwrap()));
    world.assert_counts("1 Get", || drop(store.glance(1).unwrap()));
    world.assert_counts("1 Head, 2 Get", || drop(store.state(1).unwrap()));
    world.assert_counts("1 Head, 1 Get, 1 List", || {
        store.state(2).unwrap_err();
    });
    // No step makes way for a save there.
    world.assert_counts("", || {
        let quarantined = store.make_way(1, &Progress::default());
        assert_eq!(quarantined.unwrap(), None);
    });
}

#[test]
fn marks_are_made() {
    let world = World::new();
    let store = &world.store;
    let mark = |step| {
        let id = store.identity(step).unwrap().unwrap();
        store.mark_verified(step, &id).unwrap();
    };
    world.save(1, &small(), false);
    world.save(2, &small(), false);
    // The manifest twice, once for its id, and the marks; with other marks, those again and a list
    // of the steps.
    world.assert_counts("3 Get, 1 Put", || mark(1));
    world.assert_counts("4 Get, 1 List, 1 Put", || mark(2));
    world.assert_counts("3 Get", || mark(2));
}

#[test]
fn a_step_is_swept() {
    let world = World::new();
    world.save(1, &small(), false);
    // The time, the uploads, and the steps; of each step a list of its files, before and after its
    // manifest, part and shard were checked; and a list of remaining clock files.
    let sweep = "2 Head, 2 Get, 4 List, 1 ListUploads, 1 Put, 1 Delete";
    world.assert_counts(sweep, || assert_eq!(world.store.sweep().unwrap(), []));
}

#[test]
fn shards_are_read_in_requests_of_8_mib_and_no_others() {
    let world = World::new();
    let sample = large();
    world.save(1, &sample, false);
    world.assert_counts("2 Get, 1 List", || drop(world.open(1)));
    let checkpoint = world.open(1);
    let bytes = checkpoint.files().into_iter();
    let reads = bytes
        .filter(|(name, _)| name.starts_with("shard-"))
        .map(|(_, bytes)| bytes.div_ceil(8 << 20))
        .sum::<u64>();
    world.assert_counts(&format!("{reads} Get"), || {
        let loaded = checkpoint.load(None, HashMap::new(), &world.options, &Progress::default());
        assert!(sample.is(&loaded.unwrap()), "it is another state");
    });
}

#[test]
fn what_became_of_a_shard_since_it_was_looked_at_is_reported_when_it_is_read() {
    let world = World::new();
    world.save(1, &small(), false);
    let (checkpoint, shard) = (world.open(1), world.shard(1));
    let bytes = world.bucket.objects()[&shard].bytes.to_vec();
    let load = || {
        let loaded = checkpoint.load(None, HashMap::new(), &world.options, &Progress::default());
        match loaded.unwrap_err() {
            Error::Corrupt { file, detail, .. } => {
                assert!(shard.ends_with(&file.unwrap()));
                detail
            }
            error => panic!("{}", error.full_message()),
        }
    };
    world.bucket.remove(&shard);
    assert_eq!(load(), "the file is missing");
    for other in [&bytes[1..], &[&bytes[..], b"!"].concat(), b""] {
        world.bucket.put(&shard, other.to_vec());
        let (found, expected) = (other.len(), bytes.len());
        assert_eq!(
            load(),
            format!("it has {found} bytes instead of {expected}")
        );
    }
    let mut other = bytes.clone();
    *other.last_mut().unwrap() ^= 1;
    world.bucket.put(&shard, other);
    let reported = load();
    assert!(
        reported.contains("not the one that was written"),
        "{reported}"
    );
    world.bucket.put(&shard, bytes);
    let loaded = checkpoint.load(None, HashMap::new(), &world.options, &Progress::default());
    assert!(small().is(&loaded.unwrap()));
}

#[test]
fn a_shard_that_another_one_replaces_while_it_is_read_is_not_mixed_with_that() {
    let world = World::new();
    let sample = large();
    world.save(1, &sample, false);
    let (checkpoint, shard) = (world.open(1), world.shard(1));
    // The same bytes, put in one request: only the tag differs from the one before.
    let bytes = world.bucket.objects()[&shard].bytes.clone();
    let (bucket, key) = (Arc::downgrade(&world.bucket), shard.clone());
    let reads = AtomicUsize::new(0);
    world.bucket.between(move || {
        if reads.fetch_add(1, Ordering::SeqCst) == 2 {
            bucket.upgrade().unwrap().put(&key, bytes.clone());
        }
    });
    let loaded = checkpoint.load(None, HashMap::new(), &world.options, &Progress::default());
    let reported = loaded.unwrap_err().full_message();
    assert!(
        reported.contains("another object has its place"),
        "{reported}"
    );
}
