//! Sealed checkpoints: what is saved comes back with a key, and without one nothing does.
//!
//! The attacker of these tests reads and writes all files, knows the format and makes every digest
//! right. Only the key is missing.
#![allow(unsafe_code)]

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use crate::common::machine::machine;
use crate::common::{
    self, Rng, Sample, engines, faulty, names, publication, read_engines, within_a_minute,
};
use penstock_io::buffer::{HostRegionMut, Region, RegionMut};
use penstock_io::engine::EngineChoice;
use penstock_io::faulty::{Failure, Faults, OpClass, Repeat};
use penstock_io::file::Direct;
use penstock_io::file_system::{FileSystem, Native};
use penstock_store::care::survey::survey;
use penstock_store::care::verify::verify;
use penstock_store::format::digest::{CHUNK_BYTES, Digest};
use penstock_store::format::manifest::{self, Manifest};
use penstock_store::load::checkpoint::{Checkpoint, Loaded};
use penstock_store::options::Options;
use penstock_store::save::{
    Attempt, Job, Publication, SaveState, Staging, Written, commit, save_sealed,
};
use penstock_store::seal::{
    DataKey, KeyError, Seal, Sealing, Sha256, Unsealing, Unwrap, Witness, Wrap,
};
use penstock_store::{Error, MANIFEST, Progress, Result};
use serde_json::value::RawValue;

const MIB: usize = 1 << 20;

/// A recipient whose wraps hold the data key as it is.
struct Holder(&'static str);

impl Unwrap for Holder {
    fn unwrap(&self, wraps: &[Wrap]) -> std::result::Result<DataKey, KeyError> {
        match wraps.iter().find(|wrap| wrap.recipient == self.0) {
            Some(wrap) => Ok(DataKey::from_bytes(wrap.key.as_slice().try_into().unwrap())),
            None => Err(KeyError::NoIdentity {
                identities: 1,
                recipients: wraps.iter().map(|wrap| wrap.recipient.clone()).collect(),
            }),
        }
    }
}

fn wrap(recipient: &str, key: &DataKey) -> Wrap {
    Wrap {
        kind: "test".to_owned(),
        recipient: recipient.to_owned(),
        key: key.expose().to_vec(),
    }
}

fn sealing() -> Sealing {
    let key = DataKey::generate().unwrap();
    let wraps = vec![wrap("alice", &key), wrap("bob", &key)];
    Sealing::new(Arc::new(key), wraps)
}

fn alice() -> Unsealing {
    Unsealing::with(Arc::new(Holder("alice")))
}

fn native() -> Arc<dyn FileSystem> {
    Arc::new(Native)
}

fn with_metadata(path: &Path) -> Publication {
    Publication {
        metadata: RawValue::from_string("{\"secret\":\"note\"}".into()).unwrap(),
        step: Some(7),
        ..publication(path)
    }
}

fn save_as(sample: &Sample, path: &Path, options: &Options, sealing: Sealing) -> Result<()> {
    let publication = with_metadata(path);
    let progress = Progress::default();
    save_sealed(sample.state(), &publication, sealing, options, &progress).map(|_| ())
}

fn open(path: &Path, unsealing: &Unsealing) -> Result<Checkpoint> {
    Checkpoint::open_with(path, &native(), unsealing)
}

fn load_with(path: &Path, options: &Options) -> Result<Loaded> {
    let checkpoint = open(path, &alice())?;
    checkpoint.load(None, HashMap::new(), options, &Progress::default())
}

/// Options that give several shards, and several extents in each.
fn small_shards() -> Options {
    Options {
        shard_bytes: Some(3 * MIB as u64),
        extent_bytes: Some(MIB),
        ..Options::default()
    }
}

#[track_caller]
fn assert_holds(path: &Path, sample: &Sample, options: &Options) {
    let loaded = load_with(path, options).unwrap();
    assert!(sample.is(&loaded), "{} is another state", path.display());
}

#[test]
fn what_is_sealed_comes_back_by_every_way() {
    for &engine in engines() {
        within_a_minute(&format!("a sealed save on {engine}"), move || {
            let root = tempfile::tempdir().unwrap();
            let sample = Sample::mixed();
            for (number, (direct, extent_bytes, shard_bytes)) in [
                (Direct::Auto, MIB, 3 << 20),
                (Direct::Off, 4 * MIB, 1 << 30),
                (Direct::Off, MIB, 1 << 12),
            ]
            .into_iter()
            .enumerate()
            {
                let path = root.path().join(number.to_string());
                let options = Options {
                    engine,
                    direct,
                    extent_bytes: Some(extent_bytes),
                    shard_bytes: Some(shard_bytes),
                    ..Options::default()
                };
                save_as(&sample, &path, &options, sealing()).unwrap();
                for engine in read_engines() {
                    for (direct, verify) in [
                        (Direct::Auto, true),
                        (Direct::Off, true),
                        (Direct::Off, false),
                    ] {
                        let options = Options {
                            engine,
                            direct,
                            verify,
                            ..Options::default()
                        };
                        assert_holds(&path, &sample, &options);
                    }
                }
            }
        });
    }
}

#[test]
fn parts_of_a_checkpoint_load_into_new_memory_and_targets() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let sample = Sample::mixed();
    save_as(&sample, &path, &small_shards(), sealing()).unwrap();
    let checkpoint = open(&path, &alice()).unwrap();
    let order: Vec<usize> = (0..sample.bytes.len()).rev().collect();
    for first in 0..order.len() {
        let chosen: Vec<usize> = order[first..].iter().copied().step_by(3).collect();
        for is_target in [false, true] {
            let wanted = chosen.iter().filter(|_| is_target);
            let mut kept: Vec<(usize, Vec<u8>)> = wanted
                .map(|&index| (index, vec![0xEE; sample.bytes[index].len()]))
                .collect();
            let lent = kept.iter_mut();
            let lent = lent.map(|(index, memory)| (*index, target(memory)));
            let lent: HashMap<usize, RegionMut> = lent.collect();
            let loaded = checkpoint
                .load(
                    Some(&chosen),
                    lent,
                    &Options::default(),
                    &Progress::default(),
                )
                .unwrap();
            for (index, memory) in kept {
                assert!(memory == sample.bytes[index], "target {index}");
            }
            if !is_target {
                for (place, &index) in chosen.iter().enumerate() {
                    let bytes = &sample.bytes[index];
                    let found = common::bytes_of(&loaded, place, bytes.len());
                    assert!(found == &bytes[..], "tensor {index}");
                }
            }
        }
    }
    let small = checkpoint
        .load(
            Some(&[1]),
            HashMap::new(),
            &Options::default(),
            &Progress::default(),
        )
        .unwrap();
    assert!(
        small.report.bytes_read <= 2 * CHUNK_BYTES,
        "whole chunks alone"
    );
}

fn target(memory: &mut [u8]) -> RegionMut {
    let address = memory.as_mut_ptr().expose_provenance();
    // SAFETY: the bytes are not accessed before the load that this is for has ended.
    unsafe { HostRegionMut::new(address, memory.len(), Box::new(())) }.into()
}

#[test]
fn background_saves_and_ranks_are_sealed() {
    let root = tempfile::tempdir().unwrap();
    let options = Options {
        is_sealed: true,
        ..small_shards()
    };
    for is_lazy in [false, true] {
        let path = root.path().join(format!("lazy-{is_lazy}"));
        let samples: Vec<Sample> = (0..3)
            .map(|rank| Sample::seeded_rank(rank, &[2 * MIB + 5, 777, 4 * MIB]))
            .collect();
        let sealing = sealing();
        let progress = Progress::default();
        let mut first = Attempt::begin(&path, false, &native(), &progress).unwrap();
        first.seal(sealing.clone());
        let id = first.id().to_owned();
        let mut parts = Vec::new();
        for (rank, sample) in (0..).zip(&samples) {
            let staging = Staging {
                is_lazy,
                ..Staging::default()
            };
            let job = Job::new(sample.state(), &path, &options, &staging).unwrap();
            if !is_lazy {
                job.stage(None).unwrap();
            }
            let written: Written = match rank {
                0 => job.write(&mut first, 0, &progress).unwrap(),
                rank => {
                    let mut joined = Attempt::join(&path, &id, &native(), &progress).unwrap();
                    joined.seal(sealing.clone());
                    job.write(&mut joined, rank, &progress).unwrap()
                }
            };
            assert!(written.part.sha256.is_some());
            parts.push(written.part);
        }
        commit(first, &with_metadata(&path), parts).unwrap();
        let checkpoint = open(&path, &alice()).unwrap();
        assert_eq!(
            checkpoint.manifest().metadata.get(),
            "{\"secret\":\"note\"}"
        );
        let all: Vec<&Vec<u8>> = samples.iter().flat_map(|sample| &sample.bytes).collect();
        let loaded = checkpoint
            .load(None, HashMap::new(), &Options::default(), &progress)
            .unwrap();
        for (place, bytes) in all.into_iter().enumerate() {
            assert!(common::bytes_of(&loaded, place, bytes.len()) == &bytes[..]);
        }
        assert_eq!(checkpoint.tree(2).get(), "{\"a\":1}");
    }
}

#[test]
fn without_a_key_files_are_verified_and_say_nothing() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let sample = Sample::of_sizes(&[3 * MIB + 1, 5000]);
    save_as(&sample, &path, &small_shards(), sealing()).unwrap();
    let report = verify(&path, &Options::default(), &Progress::default()).unwrap();
    assert!(report.problems.is_empty() && report.is_sealed, "{report:?}");
    let closed = Checkpoint::open(&path).unwrap();
    assert!(closed.is_closed() && closed.is_sealed());
    assert!(closed.part().tensors.is_empty());
    let loaded = closed.load(
        None,
        HashMap::new(),
        &Options::default(),
        &Progress::default(),
    );
    assert!(matches!(loaded, Err(Error::Sealed { .. })));
    let surveyed = survey(&path, &Options::default(), &Progress::default());
    assert!(matches!(surveyed, Err(Error::Sealed { .. })));
    for name in names(&path) {
        let bytes = fs::read(path.join(&name)).unwrap();
        for secret in [
            &b"\"t0\""[..],
            b"uint8",
            b"secret",
            b"\"a\":1",
            &sample.bytes[1][..64],
        ] {
            let found = bytes.windows(secret.len()).any(|window| window == secret);
            assert!(!found, "{name} shows {secret:?}");
        }
        if name.ends_with(".safetensors") {
            let shard = safetensors::SafeTensors::deserialize(&bytes).unwrap();
            assert_eq!(shard.names(), ["penstock.sealed"]);
        }
    }
}

#[test]
fn keys_and_clear_checkpoints_are_told_apart() {
    let root = tempfile::tempdir().unwrap();
    let (sealed, clear) = (root.path().join("sealed"), root.path().join("clear"));
    let sample = Sample::of_sizes(&[5000]);
    save_as(&sample, &sealed, &Options::default(), sealing()).unwrap();
    sample.save(&clear, &Options::default()).unwrap();
    let stranger = Unsealing::with(Arc::new(Holder("carol")));
    let error = open(&sealed, &stranger).unwrap_err();
    assert!(matches!(
        error,
        Error::Key {
            source: KeyError::NoIdentity { .. },
            ..
        }
    ));
    assert!(error.full_message().contains("alice"), "{error}");
    struct Other;
    impl Unwrap for Other {
        fn unwrap(&self, _: &[Wrap]) -> std::result::Result<DataKey, KeyError> {
            Ok(DataKey::from_bytes(&[1; 32]))
        }
    }
    let error = open(&sealed, &Unsealing::with(Arc::new(Other))).unwrap_err();
    assert!(matches!(error, Error::WrongKey { .. }), "{error}");
    let error = open(&clear, &alice()).unwrap_err();
    assert!(matches!(error, Error::NotSealed { .. }), "{error}");
    let lenient = Unsealing {
        is_demanded: false,
        ..alice()
    };
    open(&clear, &lenient).unwrap();
}

#[test]
fn wraps_are_replaced_without_the_key() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let sample = Sample::of_sizes(&[5000]);
    let key = DataKey::generate().unwrap();
    let carol = wrap("carol", &key);
    let only = Sealing::new(Arc::new(key), vec![]);
    save_as(&sample, &path, &Options::default(), only).unwrap();
    let file = path.join(MANIFEST);
    let text = fs::read(&file).unwrap();
    assert_eq!(manifest::wraps(&text, &path).unwrap(), []);
    let error = open(&path, &alice()).unwrap_err();
    assert!(matches!(error, Error::Key { .. }), "{error}");
    let with = manifest::replace_wraps(&text, &path, std::slice::from_ref(&carol)).unwrap();
    fs::write(&file, &with).unwrap();
    assert_eq!(manifest::wraps(&with, &path).unwrap(), [carol]);
    open(&path, &Unsealing::with(Arc::new(Holder("carol")))).unwrap();
    assert_eq!(manifest::replace_wraps(&with, &path, &[]).unwrap(), text);
    assert_eq!(Manifest::parse(&text, &path).unwrap().stamp(), text);
}

#[test]
fn what_would_stay_clear_is_refused_before_anything_is_written() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let sample = Sample::of_sizes(&[5000]).grouped();
    let error = save_as(&sample, &path, &Options::default(), sealing()).unwrap_err();
    assert!(matches!(error, Error::CannotSeal { .. }), "{error}");
    let beside = Publication {
        sidecars: common::sidecars(1),
        ..publication(&path)
    };
    let sample = Sample::of_sizes(&[5000]);
    let (options, progress) = (Options::default(), Progress::default());
    let error = save_sealed(sample.state(), &beside, sealing(), &options, &progress).unwrap_err();
    assert!(matches!(error, Error::CannotSeal { .. }), "{error}");
    assert_eq!(names(root.path()), [""; 0]);
}

/// A checkpoint of two ranks and several shards, and the files of it.
struct Victim {
    root: tempfile::TempDir,
    files: HashMap<String, Vec<u8>>,
    samples: Vec<Sample>,
}

impl Victim {
    fn new(seed: u64) -> Victim {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        let sizes = [2 * MIB + 4096, 2 * MIB + 4096, 999];
        let samples: Vec<Sample> = (0..2)
            .map(|rank| Sample::seeded_rank(seed + rank, &sizes))
            .collect();
        let options = Options {
            is_sealed: true,
            ..small_shards()
        };
        let sealing = sealing();
        let progress = Progress::default();
        let mut attempt = Attempt::begin(&path, false, &native(), &progress).unwrap();
        attempt.seal(sealing);
        attempt.follow(vec!["f".repeat(32)]);
        let mut parts = Vec::new();
        for (rank, sample) in (0..).zip(&samples) {
            let staging = Staging {
                is_lazy: true,
                ..Staging::default()
            };
            let job = Job::new(sample.state(), &path, &options, &staging).unwrap();
            parts.push(job.write(&mut attempt, rank, &progress).unwrap().part);
        }
        commit(attempt, &with_metadata(&path), parts).unwrap();
        let read = |name: String| (name.clone(), fs::read(path.join(name)).unwrap());
        let files = names(&path).into_iter().map(read).collect();
        Victim {
            root,
            files,
            samples,
        }
    }

    fn path(&self) -> PathBuf {
        self.root.path().join("ckpt")
    }

    fn name(&self, prefix: &str) -> String {
        let mut names: Vec<&String> = self.files.keys().collect();
        names.sort();
        let found = names.into_iter().find(|name| name.starts_with(prefix));
        found.unwrap().clone()
    }

    /// Puts some files in place of the victim's, loads everything, and restores the files.
    fn attack(&self, changed: &[(&str, &[u8])]) -> Result<Loaded> {
        let path = self.path();
        for (name, bytes) in changed {
            fs::write(path.join(name), bytes).unwrap();
        }
        let loaded = load_with(&path, &Options::default());
        let unverified = Options {
            verify: false,
            ..Options::default()
        };
        let again = load_with(&path, &unverified);
        assert_eq!(
            loaded.is_ok(),
            again.is_ok(),
            "tags are checked in any case"
        );
        for (name, _) in changed {
            fs::write(path.join(name), &self.files[*name]).unwrap();
        }
        loaded
    }

    /// The manifest after one text is replaced by another of equal length, with a right digest.
    fn manifest(&self, from: &str, to: &str) -> Vec<u8> {
        let text = String::from_utf8(self.files[MANIFEST].clone()).unwrap();
        assert!(text.contains(from), "{from}");
        let text = text.replacen(from, to, 1);
        restamp(text.as_bytes())
    }

    /// A part with a changed text, and the manifest with its digest, size and hash.
    fn with_part(&self, rank: usize, part: &[u8]) -> Vec<(String, Vec<u8>)> {
        let name = self.name(&format!("part-{rank:05}"));
        let before = &self.files[&name];
        let mut manifest = String::from_utf8(self.files[MANIFEST].clone()).unwrap();
        for (from, to) in [
            (Digest::of(before).to_string(), Digest::of(part).to_string()),
            (Sha256::of(before).to_string(), Sha256::of(part).to_string()),
            (
                format!("\"{name}\",\"bytes\":{}", before.len()),
                format!("\"{name}\",\"bytes\":{}", part.len()),
            ),
        ] {
            assert!(manifest.contains(&from), "{from}");
            manifest = manifest.replacen(&from, &to, 1);
        }
        vec![
            (name, part.to_vec()),
            (MANIFEST.to_owned(), restamp(manifest.as_bytes())),
        ]
    }

    fn attack_owned(&self, changed: &[(String, Vec<u8>)]) -> Result<Loaded> {
        let changed: Vec<(&str, &[u8])> = changed
            .iter()
            .map(|(name, bytes)| (name.as_str(), bytes.as_slice()))
            .collect();
        self.attack(&changed)
    }
}

/// A manifest with the digest of its present text.
fn restamp(text: &[u8]) -> Vec<u8> {
    let stamped = &text[..text.len() - 40];
    let digest = Digest::of(stamped);
    let mut text = stamped.to_vec();
    text.extend_from_slice(format!(",\"digest\":\"{digest}\"}}\n").as_bytes());
    text
}

/// Changes bytes so that no CRC-64 sees it: adds the generator polynomial.
fn collide(bytes: &mut [u8], at: usize) {
    let generator: u128 = 1 | 0x9a6c_9329_ac4b_c9b5_u128 << 1;
    for (byte, change) in bytes[at..at + 9].iter_mut().zip(generator.to_le_bytes()) {
        *byte ^= change;
    }
}

#[track_caller]
fn assert_tampered(result: Result<Loaded>, what: &str) {
    match result {
        Err(Error::Tampered { .. }) => {}
        Err(error) => panic!("{what}: not named as tampering: {error}"),
        Ok(_) => panic!("{what}: accepted"),
    }
}

#[test]
fn damage_is_told_from_tampering() {
    let victim = Victim::new(1);
    assert!(victim.attack(&[]).is_ok());
    let shard = victim.name("shard-00000-00");
    let mut bytes = victim.files[&shard].clone();
    for at in [0, 20, 4000, 4096, MIB - 9, MIB, MIB + 77, bytes.len() - 9] {
        let mut flipped = bytes.clone();
        flipped[at] ^= 1;
        let error = victim.attack(&[(&shard, &flipped)]).unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "{at}: {error}");
        let mut changed = bytes.clone();
        collide(&mut changed, at);
        assert_eq!(Digest::of(&changed), Digest::of(&bytes));
        let error = victim.attack(&[(&shard, &changed)]).unwrap_err();
        let place = (at / MIB * MIB) as u64;
        let is_at = |offset: Option<u64>| offset == Some(place);
        let is_named = matches!(&error, Error::Tampered { offset, .. } if is_at(*offset));
        assert!(is_named, "{at}: {error}");
    }
    bytes.truncate(bytes.len() - 1);
    let error = victim.attack(&[(&shard, &bytes)]).unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    bytes.extend_from_slice(&[0; 100]);
    let error = victim.attack(&[(&shard, &bytes)]).unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
}

#[test]
fn a_chunk_that_does_not_open_leaves_zeros_in_a_target() {
    let victim = Victim::new(2);
    let shard = victim.name("shard-00000-00");
    let mut bytes = victim.files[&shard].clone();
    collide(&mut bytes, MIB + 5);
    fs::write(victim.path().join(&shard), &bytes).unwrap();
    let checkpoint = open(&victim.path(), &alice()).unwrap();
    let mut memory = vec![0xEE; 2 * MIB + 4096];
    let targets = HashMap::from([(0, target(&mut memory))]);
    let loaded = checkpoint.load(
        Some(&[0]),
        targets,
        &Options::default(),
        &Progress::default(),
    );
    assert!(matches!(
        loaded,
        Err(Error::Tampered {
            tensor: Some(_),
            ..
        })
    ));
    drop(loaded);
    let second = &memory[MIB - 4096..2 * MIB - 4096];
    let is_handed_out = second != vec![0xEE; MIB] && second.iter().any(|&byte| byte != 0);
    assert!(!is_handed_out, "bytes of the chunk were handed out");
}

#[test]
fn each_member_of_a_manifest_is_authentic() {
    let victim = Victim::new(3);
    let id = &Manifest::parse(&victim.files[MANIFEST], Path::new("c"))
        .unwrap()
        .id;
    let text = String::from_utf8(victim.files[MANIFEST].clone()).unwrap();
    let member = |name: &str| {
        let start = text.find(&format!("\"{name}\":\"")).unwrap() + name.len() + 4;
        text[start..start + 43].to_owned()
    };
    for name in ["salt", "commitment", "mac", "metadata"] {
        let before = member(name);
        let mut after = before.clone().into_bytes();
        after[5] = if after[5] == b'A' { b'B' } else { b'A' };
        let after = String::from_utf8(after).unwrap();
        let result = victim.attack(&[(MANIFEST, &victim.manifest(&before, &after))]);
        match name {
            "salt" | "commitment" => {
                let error = result.unwrap_err();
                assert!(matches!(error, Error::WrongKey { .. }), "{name}: {error}");
            }
            _ => assert_tampered(result, name),
        }
    }
    for (from, to) in [
        ("\"step\":7", "\"step\":8"),
        ("\"metadata\":{}", "\"metadata\":{\"a\":1}"),
        (
            "\"world_size\":2",
            "\"world_size\":2,\"partial\":{\"source\":null}",
        ),
        ("\"created\":\"2", "\"created\":\"3"),
        ("\"previous\":[\"f", "\"previous\":[\"e"),
    ] {
        let manifest = victim.manifest(from, to);
        assert_tampered(victim.attack(&[(MANIFEST, &manifest)]), to);
    }
    for (from, to) in [
        ("\"wraps\":[", "\"partial\":{\"source\":null},\"wraps\":["),
        ("}],\"digest\"", "}],\"step\":9,\"digest\""),
        ("AES-256-GCM", "AES-128-GCM"),
    ] {
        assert!(text.contains(from), "{from}");
        let text = text.replacen(from, to, 1);
        let manifest = restamp(text.as_bytes());
        let error = victim.attack(&[(MANIFEST, &manifest)]).unwrap_err();
        let is_named = matches!(error, Error::Malformed { .. } | Error::Unknown { .. });
        assert!(is_named, "{to}: {error}");
    }
    let wraps = manifest::replace_wraps(text.as_bytes(), Path::new("c"), &[]).unwrap();
    let error = victim.attack(&[(MANIFEST, &wraps)]).unwrap_err();
    assert!(matches!(error, Error::Key { .. }), "{error}");
    // The clear manifest that an attacker can make of it.
    let cut = text.find(",\"sealing\"").unwrap();
    let clear = restamp(&[&text.as_bytes()[..cut], &[b' '; 40]].concat());
    let error = victim.attack(&[(MANIFEST, &clear)]).unwrap_err();
    assert!(matches!(error, Error::NotSealed { .. }), "{error}");
    assert!(text.contains(id.as_str()));
}

#[test]
fn each_byte_of_a_part_is_authentic() {
    let victim = Victim::new(4);
    let name = victim.name("part-00000");
    let part = String::from_utf8(victim.files[&name].clone()).unwrap();
    for member in ["tags", "commitment", "salt", "body"] {
        let start = part.find(&format!("\"{member}\":\"")).unwrap() + member.len() + 4;
        let mut changed = part.clone().into_bytes();
        changed[start + 3] = if changed[start + 3] == b'A' {
            b'B'
        } else {
            b'A'
        };
        // The part alone, with a digest that matches: the hash in the manifest is another.
        let forged = victim.with_part(0, &changed);
        assert_tampered(victim.attack_owned(&forged), member);
        let error = victim.attack_owned(&forged[..1]).unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "{member}: {error}");
    }
    // A change that the digest does not see.
    let mut changed = part.into_bytes();
    let body = changed.len() - 200;
    collide(&mut changed, body);
    let result = victim.attack(&[(&name, &changed)]);
    assert_tampered(result, "a part with the digest of another");
}

#[test]
fn files_of_other_places_and_attempts_are_refused() {
    let (victim, other) = (Victim::new(5), Victim::new(5));
    let shards: Vec<String> = ["shard-00000-00", "shard-00000-01", "shard-00001-00"]
        .map(|prefix| victim.name(prefix))
        .to_vec();
    for (one, two) in [(0, 1), (0, 2), (1, 2)] {
        let (one, two) = (shards[one].as_str(), shards[two].as_str());
        let swapped = [
            (one, victim.files[two].as_slice()),
            (two, victim.files[one].as_slice()),
        ];
        let error = victim.attack(&swapped).unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    }
    // All of another attempt under the names of this one: only the manifest's MAC tells.
    let id_of = |victim: &Victim| {
        Manifest::parse(&victim.files[MANIFEST], Path::new("c"))
            .unwrap()
            .id
    };
    let (id, other_id) = (id_of(&victim), id_of(&other));
    let mut forged: Vec<(String, Vec<u8>)> = Vec::new();
    for (name, bytes) in &other.files {
        let mut bytes = bytes.clone();
        if !name.ends_with(".safetensors") {
            let text = String::from_utf8(bytes).unwrap();
            bytes = text.replace(&other_id, &id).into_bytes();
        }
        forged.push((name.replace(&other_id, &id), bytes));
    }
    let part = |rank: usize, forged: &[(String, Vec<u8>)]| {
        let prefix = format!("part-{rank:05}");
        let found = forged.iter().find(|(name, _)| name.starts_with(&prefix));
        found.unwrap().1.clone()
    };
    let mut manifest = String::from_utf8(other.files[MANIFEST].clone()).unwrap();
    manifest = manifest.replace(&other_id, &id);
    for rank in 0..2 {
        let before = &other.files[&other.name(&format!("part-{rank:05}"))];
        let after = part(rank, &forged);
        manifest = manifest.replace(
            &Digest::of(before).to_string(),
            &Digest::of(&after).to_string(),
        );
        manifest = manifest.replace(
            &Sha256::of(before).to_string(),
            &Sha256::of(&after).to_string(),
        );
    }
    forged.retain(|(name, _)| name != MANIFEST);
    forged.push((MANIFEST.to_owned(), restamp(manifest.as_bytes())));
    // The id is part of the context of all keys.
    let error = victim.attack_owned(&forged).unwrap_err();
    assert!(matches!(error, Error::WrongKey { .. }), "{error}");
    // An old manifest over the new files.
    let error = victim
        .attack(&[(MANIFEST, &other.files[MANIFEST])])
        .unwrap_err();
    assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    // The wraps of another checkpoint.
    let wraps = manifest::wraps(&other.files[MANIFEST], Path::new("c")).unwrap();
    let text = &victim.files[MANIFEST];
    let exchanged = manifest::replace_wraps(text, Path::new("c"), &wraps).unwrap();
    let error = victim.attack(&[(MANIFEST, &exchanged)]).unwrap_err();
    assert!(matches!(error, Error::WrongKey { .. }), "{error}");
    assert!(victim.attack(&[]).is_ok());
}

#[test]
fn drawn_changes_are_never_accepted() {
    let victim = Victim::new(6);
    let mut rng = Rng::new(common::number("PENSTOCK_SEAL_SEED", 0x5ea1));
    let mut names: Vec<&String> = victim.files.keys().collect();
    names.sort();
    for _ in 0..common::number("PENSTOCK_SEAL_ATTACKS", 300) {
        let name = names[rng.below(names.len() as u64) as usize];
        let mut bytes = victim.files[name].clone();
        let at = rng.below(bytes.len() as u64 - 50) as usize;
        match rng.below(3) {
            0 => bytes[at] ^= 1 << rng.below(8),
            1 => collide(&mut bytes, at),
            _ => {
                let to = rng.below(bytes.len() as u64 - 50) as usize;
                let moved = bytes[at..at + 16].to_vec();
                bytes[to..to + 16].copy_from_slice(&moved);
            }
        }
        if name == MANIFEST {
            bytes = restamp(&bytes);
        }
        if bytes == victim.files[name] {
            continue;
        }
        let change = (name.as_str(), bytes.as_slice());
        if let Ok(loaded) = victim.attack(&[change]) {
            // A wrap of a recipient that does not load may be changed: wraps stand for themselves.
            let wraps = manifest::wraps(&bytes, Path::new("c")).unwrap();
            let before = manifest::wraps(&victim.files[MANIFEST], Path::new("c")).unwrap();
            assert!(
                name == MANIFEST && wraps != before,
                "{name} at {at}: accepted"
            );
            let all = victim.samples.iter().flat_map(|sample| &sample.bytes);
            for (place, bytes) in all.enumerate() {
                assert!(common::bytes_of(&loaded, place, bytes.len()) == &bytes[..]);
            }
        }
    }
}

/// Devices copy to and from staging memory, where chunks are sealed and opened.
#[test]
fn what_a_device_has_is_sealed_and_opened() {
    let machine = machine();
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let sample = Sample::of_sizes(&[3 * MIB + 7, 1, 2 * MIB, 500]);
    let lend = |bytes: &Vec<u8>| machine.lent(bytes);
    let lent: Vec<_> = sample.bytes.iter().map(lend).collect();
    machine.device_streams.follow(&lent[0].foreign()).unwrap();
    let sources = lent.iter().map(|one| Region::from(one.region()));
    let state = SaveState {
        sources: sources.collect(),
        ..sample.state()
    };
    let (options, progress) = (small_shards(), Progress::default());
    save_sealed(state, &publication(&path), sealing(), &options, &progress).unwrap();
    assert_holds(&path, &sample, &Options::default());
    let blank: Vec<_> = sample
        .bytes
        .iter()
        .map(|bytes| vec![0xEE; bytes.len()])
        .collect();
    let blank: Vec<_> = blank.iter().map(|bytes| machine.lent(bytes)).collect();
    machine
        .device_streams
        .fill_after(&blank[0].foreign())
        .unwrap();
    let targets = blank.iter().zip(&sample.bytes).enumerate();
    let targets = targets.map(|(index, (one, bytes))| {
        let target: RegionMut = one.array(0, 1, &[bytes.len()], &[1]).into();
        (index, target)
    });
    let targets = targets.collect();
    let checkpoint = open(&path, &alice()).unwrap();
    let loaded = checkpoint.load(None, targets, &options, &progress).unwrap();
    assert!(loaded.report.device_bytes > 0);
    for (one, bytes) in blank.iter().zip(&sample.bytes) {
        assert!(one.content().unwrap()[..bytes.len()] == bytes[..]);
    }
}

/// AES-GCM is lost with one nonce that a key uses twice.
#[test]
fn no_key_and_nonce_occur_twice() {
    let root = tempfile::tempdir().unwrap();
    let seen = Arc::new(Mutex::new(Vec::<Seal>::new()));
    let witness: Witness = {
        let seen = Arc::clone(&seen);
        Arc::new(move |seal: &Seal| seen.lock().unwrap().push(*seal))
    };
    let sample = Sample::mixed();
    let key = Arc::new(DataKey::generate().unwrap());
    let mut saves = 0;
    for choice in [EngineChoice::Threads, EngineChoice::Sync] {
        for fault in 0..6 {
            let path = root.path().join(format!("{choice}-{fault}"));
            let mut options = small_shards();
            options.engine = choice;
            if fault > 0 {
                let mut faults = Faults::new(fault).short_transfers(50);
                if fault > 1 {
                    faults = faults.fail(Failure {
                        class: Some(OpClass::Write),
                        nth: fault * 3,
                        repeat: Repeat::Once,
                        errno: 5,
                    });
                }
                options = Options {
                    shard_bytes: options.shard_bytes,
                    ..faulty(choice, Arc::new(faults))
                };
            }
            // One key for all: salts and ids alone keep the attempts apart.
            let sealing = Sealing::new(Arc::clone(&key), vec![wrap("alice", &key)]);
            let sealing = sealing.watched_by(Arc::clone(&witness));
            let saved = save_as(&sample, &path, &options, sealing.clone());
            if saved.is_err() {
                save_as(&sample, &path, &small_shards(), sealing).unwrap();
            }
            assert_holds(&path, &sample, &Options::default());
            saves += 1;
        }
    }
    // Two processes that act as one rank of one attempt, with one key: the salt of each part is its
    // own.
    let sealing = Sealing::new(Arc::clone(&key), Vec::new()).watched_by(witness);
    let progress = Progress::default();
    let options = Options {
        is_sealed: true,
        ..small_shards()
    };
    let twins = ["one", "other"].map(|name| root.path().join(name));
    let mut first = Attempt::begin(&twins[0], false, &native(), &progress).unwrap();
    fs::create_dir(&twins[1]).unwrap();
    let mut second = Attempt::join(&twins[1], first.id(), &native(), &progress).unwrap();
    for attempt in [&mut first, &mut second] {
        attempt.seal(sealing.clone());
        let staging = Staging {
            is_lazy: true,
            ..Staging::default()
        };
        let job = Job::new(sample.state(), attempt.path(), &options, &staging).unwrap();
        drop(job.write(attempt, 0, &progress).unwrap());
    }
    let seen = seen.lock().unwrap();
    let apart: HashSet<&Seal> = seen.iter().collect();
    assert_eq!(apart.len(), seen.len(), "a nonce is used twice");
    let chunks: usize = sample.bytes.iter().map(|bytes| bytes.len() / MIB).sum();
    assert!(seen.len() >= saves * (chunks + 2), "every chunk is seen");
}
