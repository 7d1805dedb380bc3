//! A salvage of a checkpoint of many ranks recovers exactly the intact tensors: a loss in one rank
//! is no loss in another, and no tensor with a hole passes for whole.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::{self, Rng, bytes_of, engines, faulty, load, names, noise, publication};
use penstock_io::buffer::HostRegion;
use penstock_io::faulty::{Failure, Faults, OpClass, Repeat};
use penstock_io::file::{Direct, File};
use penstock_io::file_system::{Change, FileSystem, Files, Native};
use penstock_store::care::salvage::{SalvageReport, salvage};
use penstock_store::care::survey::{Described, survey};
use penstock_store::care::verify::verify;
use penstock_store::format::part::{Alias, MissingKind, TensorBox};
use penstock_store::load::checkpoint::Checkpoint;
use penstock_store::options::Options;
use penstock_store::plan::write::TensorSpec;
use penstock_store::save::{Attempt, Linked, SaveState, commit, write_rank};
use penstock_store::{Error, MANIFEST, Progress, Result};
use serde_json::json;
use serde_json::value::RawValue;

const RANKS: u32 = 3;

/// Tensors that ranks share, each of eight rows of 64 bytes, and the rows of each rank: sharded
/// over all, stored by one rank, replicated and written by two, with a gap in the middle rank.
const SHARED: [(&str, [(u64, u64); 3]); 5] = [
    ("rows", [(0, 3), (3, 6), (6, 8)]),
    ("first", [(0, 8), (0, 0), (0, 0)]),
    ("last", [(0, 0), (0, 0), (0, 8)]),
    ("halves", [(0, 4), (4, 8), (0, 0)]),
    ("ends", [(5, 8), (0, 0), (0, 5)]),
];

const ROW_BYTES: u64 = 64;

fn content(name: &str) -> Vec<u8> {
    let seed = name.bytes().map(u64::from).sum();
    noise(seed, 8 * ROW_BYTES as usize)
}

fn own_content(rank: u32, number: u64) -> Vec<u8> {
    noise(u64::from(rank) * 10 + number, 640 + number as usize)
}

fn reference(name: &str) -> serde_json::Value {
    json!({"$": "tensor", "g": name, "dtype": "uint8", "shape": [8, ROW_BYTES]})
}

fn state_of(rank: u32) -> SaveState {
    let (mut tensors, mut sources) = (Vec::new(), Vec::new());
    for number in 0..2 {
        let bytes = own_content(rank, number);
        tensors.push(TensorSpec {
            name: format!("own{number}"),
            dtype: "uint8".to_owned(),
            shape: vec![bytes.len() as u64],
            item_bytes: 1,
            region: None,
            group: None,
        });
        sources.push(HostRegion::from(bytes).into());
    }
    for (name, rows) in SHARED {
        let (first, end) = rows[rank as usize];
        if first == end {
            continue;
        }
        let bytes = content(name);
        let bytes = bytes[(first * ROW_BYTES) as usize..(end * ROW_BYTES) as usize].to_vec();
        tensors.push(TensorSpec {
            name: name.to_owned(),
            dtype: "uint8".to_owned(),
            shape: vec![end - first, ROW_BYTES],
            item_bytes: 1,
            region: Some(TensorBox {
                tensor: name.to_owned(),
                shape: vec![8, ROW_BYTES],
                start: vec![first, 0],
            }),
            group: None,
        });
        sources.push(HostRegion::from(bytes).into());
    }
    let shared: Vec<_> = SHARED.iter().map(|(name, _)| reference(name)).collect();
    let own = [
        json!({"$": "tensor", "i": 0}),
        json!({"$": "tensor", "i": 1}),
    ];
    let tree = json!({"shared": shared, "own": own, "tied": {"$": "tensor", "a": 0}, "rank": rank});
    SaveState {
        tensors,
        sources,
        linked: Linked::default(),
        aliases: vec![Alias {
            name: "tied".to_owned(),
            tensor: 1,
            view: None,
        }],
        tree: RawValue::from_string(tree.to_string()).unwrap(),
    }
}

/// Files that are not synced: no test here cuts the power, and syncing takes most of the time.
#[derive(Debug)]
struct Unsynced;

impl FileSystem for Unsynced {
    fn files(&self) -> &dyn Files {
        &Native
    }

    fn create(&self, path: &Path, direct: Direct) -> penstock_io::Result<File> {
        Native.create(path, direct)
    }

    fn change(&self, change: Change<'_>) -> penstock_io::Result<()> {
        match change {
            Change::SyncData(_) | Change::SyncDirectory(_) => Ok(()),
            change => Native.change(change),
        }
    }
}

fn unsynced() -> Options {
    Options {
        file_system: Arc::new(Unsynced),
        direct: Direct::Off,
        ..Options::default()
    }
}

fn save(path: &Path) {
    let (options, progress) = (unsynced(), Progress::default());
    let files = &options.file_system;
    let mut first = Attempt::begin(path, false, files, &progress).unwrap();
    let id = first.id().to_owned();
    let mut parts = Vec::new();
    for rank in 0..RANKS {
        let state = state_of(rank);
        let written = if rank == 0 {
            write_rank(&mut first, rank, state, &options, &progress)
        } else {
            let mut joined = Attempt::join(path, &id, files, &progress).unwrap();
            write_rank(&mut joined, rank, state, &options, &progress)
        };
        parts.push(written.unwrap().part);
    }
    commit(first, &publication(path), parts).unwrap();
}

fn salvaged(path: &Path, out: &Path, unverified: bool) -> Result<SalvageReport> {
    let (options, progress) = (unsynced(), Progress::default());
    salvage(path, out, unverified, &options, &options, &progress)
}

fn file_of(path: &Path, kind: &str, rank: u32) -> PathBuf {
    let start = format!("{kind}-{rank:05}");
    let names = names(path).into_iter();
    let mut found = names.filter(|name| name.starts_with(&start));
    path.join(found.next().expect("the file is there"))
}

/// The tensors that are, or should be, in a checkpoint: names of shared tensors, and of those of
/// each rank.
#[derive(Debug, Default, PartialEq, Eq)]
struct Had {
    shared: BTreeSet<String>,
    own: BTreeSet<(u32, String)>,
}

impl Had {
    fn all() -> Had {
        let ranks = 0..RANKS;
        let own = ranks.flat_map(|rank| (0..2).map(move |number| (rank, format!("own{number}"))));
        Had {
            shared: SHARED.iter().map(|(name, _)| (*name).to_owned()).collect(),
            own: own.collect(),
        }
    }

    fn lose_box(&mut self, name: &str) {
        self.shared.remove(name);
    }

    fn lose_rank(&mut self, rank: u32) {
        self.own.retain(|(of, _)| *of != rank);
        for (name, rows) in SHARED {
            if rows[rank as usize].0 != rows[rank as usize].1 {
                self.lose_box(name);
            }
        }
    }
}

/// Reads the tensors of a checkpoint, comparing every byte with what was saved.
fn held(path: &Path) -> Had {
    let checkpoint = Checkpoint::open(path).unwrap();
    assert_eq!(checkpoint.manifest().world_size, RANKS);
    let loaded = load(path, &Options::default()).unwrap();
    let mut had = Had::default();
    let mut rows: BTreeMap<String, u64> = BTreeMap::new();
    let offsets = checkpoint.offsets();
    for (place, entry) in checkpoint.part().tensors.iter().enumerate() {
        let rank = offsets
            .iter()
            .rposition(|offset| offset.0 <= place)
            .unwrap() as u32;
        let found = bytes_of(&loaded, place, entry.nbytes() as usize);
        match &entry.region {
            None => {
                let number = entry.name[3..].parse().unwrap();
                assert_eq!(found, own_content(rank, number));
                had.own.insert((rank, entry.name.clone()));
            }
            Some(region) => {
                let first = (region.start[0] * ROW_BYTES) as usize;
                let expected = &content(&region.tensor)[first..first + found.len()];
                assert_eq!(found, expected, "{}", region.tensor);
                *rows.entry(region.tensor.clone()).or_default() += entry.shape[0];
            }
        }
    }
    let missing = |name: &String| {
        let mut missing = checkpoint.part().missing.iter();
        missing.any(|lost| lost.kind == MissingKind::Shared && lost.name == *name)
    };
    for (name, rows) in rows.into_iter().filter(|(name, _)| !missing(name)) {
        assert_eq!(rows, 8, "{name} has a hole");
        had.shared.insert(name);
    }
    let report = verify(path, &Options::default(), &Progress::default()).unwrap();
    assert_eq!(report.problems, []);
    had
}

/// Salvages, and checks that exactly the expected tensors are recovered and all others are listed.
fn check(path: &Path, unverified: bool, expected: &Had, what: &str) -> SalvageReport {
    let out = tempfile::tempdir().unwrap();
    let out = out.path().join("out");
    let before = names(path);
    let report = salvaged(path, &out, unverified).unwrap_or_else(|error| panic!("{what}: {error}"));
    let had = held(&out);
    assert_eq!(had, *expected, "{what}");
    assert_eq!(names(path), before, "{what}: the damaged one is left alone");
    let all = Had::all();
    let of_kind = |kind| {
        report
            .missing
            .iter()
            .filter(move |missing| missing.1.kind == kind)
    };
    let shared: Vec<_> = of_kind(MissingKind::Shared)
        .map(|found| found.1.name.clone())
        .collect();
    let lost: BTreeSet<String> = all.shared.difference(&expected.shared).cloned().collect();
    assert_eq!(
        shared.iter().cloned().collect::<BTreeSet<_>>(),
        lost,
        "{what}"
    );
    assert_eq!(shared.len(), lost.len(), "{what}: each once");
    for (rank, missing) in of_kind(MissingKind::Own).filter(|found| found.1.name != "tied") {
        let name = (rank.unwrap(), missing.name.clone());
        assert!(!expected.own.contains(&name), "{what}: {name:?}");
    }
    assert!(
        report
            .missing
            .iter()
            .all(|missing| !missing.1.reason.is_empty())
    );
    let listed = Checkpoint::open(&out).unwrap();
    let listed: Vec<_> = listed
        .missing()
        .into_iter()
        .map(|(rank, found)| (rank, found.clone()))
        .collect();
    assert_eq!(listed, report.missing, "{what}");
    assert_eq!(
        report.tensors,
        expected.shared.len() + expected.own.len(),
        "{what}"
    );

    // A salvage of the salvaged checkpoint recovers the same, and reports nothing further as
    // missing.
    let again = tempfile::tempdir().unwrap();
    let again = again.path().join("again");
    let second = salvaged(&out, &again, false).unwrap();
    assert_eq!(held(&again), *expected, "{what}, again");
    assert_eq!(second.missing, report.missing, "{what}, again");
    assert_eq!(
        (second.unverified, &second.ranks_lost),
        (report.unverified, &report.ranks_lost)
    );
    report
}

fn flip(path: &Path, rank: u32, name: &str) {
    flip_in(&Checkpoint::open(path).unwrap(), rank, name);
}

/// Changes a byte of a tensor of a checkpoint that was opened before it was damaged.
fn flip_in(checkpoint: &Checkpoint, rank: u32, name: &str) {
    let (first, _) = checkpoint.offsets()[rank as usize];
    let part = checkpoint.part();
    let entry = part.tensors[first..]
        .iter()
        .find(|entry| entry.name == name)
        .unwrap();
    change(
        &checkpoint.path().join(&part.files[entry.file].name),
        entry.range.0 + 7,
        1,
    );
}

/// Changes bytes of a file.
fn change(file: &Path, at: u64, count: usize) {
    let mut bytes = fs::read(file).unwrap();
    for byte in &mut bytes[at as usize..at as usize + count] {
        *byte ^= 0x5a;
    }
    fs::write(file, bytes).unwrap();
}

fn cut(file: &Path, bytes: u64) {
    let file = fs::File::options().write(true).open(file).unwrap();
    file.set_len(bytes).unwrap();
}

#[test]
fn what_is_whole_is_saved_whole() {
    let root = tempfile::tempdir().unwrap();
    let (path, out) = (root.path().join("ckpt"), root.path().join("out"));
    save(&path);
    let report = check(&path, false, &Had::all(), "whole");
    assert!(report.missing.is_empty() && report.ranks_lost.is_empty());
    salvaged(&path, &out, true).unwrap();
    let (source, taken) = (
        Checkpoint::open(&path).unwrap(),
        Checkpoint::open(&out).unwrap(),
    );
    assert!(
        taken.manifest().partial.is_none(),
        "asked for more than was there"
    );
    for rank in 0..RANKS {
        assert_eq!(taken.tree(rank).get(), source.tree(rank).get());
    }
}

/// Every kind of file of the first rank and of the others, and every way to lose it.
#[test]
fn each_file_takes_what_depends_on_it_and_nothing_else() {
    type Harm = fn(&Path);
    let remove: Harm = |file| fs::remove_file(file).unwrap();
    let empty: Harm = |file| cut(file, 0);
    let halve: Harm = |file| cut(file, fs::metadata(file).unwrap().len() / 2);
    let garble: Harm = |file| change(file, fs::metadata(file).unwrap().len() / 2, 16);
    let flip: Harm = |file| change(file, fs::metadata(file).unwrap().len() / 2, 1);
    let directory: Harm = |file| {
        fs::remove_file(file).unwrap();
        fs::create_dir(file).unwrap();
    };
    for rank in [0, RANKS - 1] {
        for (name, harm) in [
            ("removed", remove),
            ("emptied", empty),
            ("halved", halve),
            ("garbled", garble),
            ("flipped", flip),
            ("not a file", directory),
        ] {
            let root = tempfile::tempdir().unwrap();
            let path = root.path().join("ckpt");
            save(&path);
            harm(&file_of(&path, "part", rank));
            let mut expected = Had::all();
            expected.lose_rank(rank);
            let what = format!("part of rank {rank} {name}");
            let report = check(&path, false, &expected, &what);
            assert_eq!(report.ranks_lost, [rank], "{what}");
            assert!(!report.unverified, "{what}");
            let state = report
                .missing
                .iter()
                .find(|lost| lost.1.kind == MissingKind::State);
            let (whose, state) = state.expect("the state is listed");
            assert_eq!(*whose, Some(rank));
            assert!(
                state.reason.contains(&format!("part-{rank:05}")),
                "{}",
                state.reason
            );
            // With `unverified`, the tensors are recovered from the headers of the shards.
            let report = check(&path, true, &Had::all(), &what);
            assert!(report.unverified && report.ranks_lost == [rank], "{what}");
        }
        for (name, harm) in [
            ("removed", remove),
            ("emptied", empty),
            ("halved", halve),
            ("garbled", garble),
            ("not a file", directory),
        ] {
            let root = tempfile::tempdir().unwrap();
            let path = root.path().join("ckpt");
            save(&path);
            harm(&file_of(&path, "shard", rank));
            let mut expected = Had::all();
            expected.lose_rank(rank);
            let what = format!("shard of rank {rank} {name}");
            let report = check(&path, false, &expected, &what);
            assert!(report.ranks_lost.is_empty(), "{what}");
            for (_, missing) in report.missing.iter().filter(|lost| lost.1.name != "tied") {
                let reason = &missing.reason;
                assert!(
                    reason.contains(&format!("shard-{rank:05}")),
                    "{what}: {reason}"
                );
            }
        }
    }
}

#[test]
fn one_byte_hits_one_tensor() {
    for (rank, name) in [
        (0, "own1"),
        (2, "own0"),
        (1, "rows"),
        (2, "ends"),
        (1, "halves"),
        (0, "first"),
    ] {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        save(&path);
        flip(&path, rank, name);
        let mut expected = Had::all();
        expected.own.remove(&(rank, name.to_owned()));
        expected.lose_box(name);
        let report = check(&path, false, &expected, name);
        let (whose, missing) = &report.missing[0];
        assert_eq!(missing.name, name);
        assert!(
            missing.reason.contains(&format!("shard-{rank:05}")),
            "{}",
            missing.reason
        );
        if name.starts_with("own") {
            assert_eq!(*whose, Some(rank));
        } else {
            assert_eq!(*whose, None);
        }
        let boxes = SHARED.iter().find(|shared| shared.0 == name);
        let boxes = boxes.map_or(1, |shared| {
            shared.1.iter().filter(|rows| rows.0 < rows.1).count()
        });
        if boxes > 1 {
            let expected = format!("1 of {boxes} boxes, first [");
            assert!(missing.reason.starts_with(&expected), "{}", missing.reason);
            assert!(
                missing.reason.contains(&format!("of rank {rank}: ")),
                "{}",
                missing.reason
            );
        }
    }
}

#[test]
fn without_a_manifest_nothing_is_proven() {
    for lose in [
        |file: &Path| fs::remove_file(file).unwrap(),
        |file: &Path| fs::write(file, "gone").unwrap(),
        |file: &Path| change(file, 100, 1),
    ] {
        let root = tempfile::tempdir().unwrap();
        let (path, out) = (root.path().join("ckpt"), root.path().join("out"));
        save(&path);
        flip(&path, 1, "rows");
        lose(&path.join(MANIFEST));
        let found = survey(&path, &Options::default(), &Progress::default()).unwrap();
        assert_eq!(found.described_by(), [Described::PartAlone; 3]);
        assert!(found.shared.iter().all(|tensor| !tensor.is_vouched_for));
        let error = salvaged(&path, &out, false).unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
        assert!(error.to_string().contains("10 tensors"), "{error}");
        assert!(!out.exists());
        let mut expected = Had::all();
        expected.lose_box("rows");
        assert!(check(&path, true, &expected, "manifest").unverified);

        // The first rank's part as well: its shard's header remains.
        let part = file_of(&path, "part", 0);
        fs::remove_file(&part).unwrap();
        fs::create_dir(part).unwrap();
        let report = check(&path, true, &expected, "manifest and part");
        assert_eq!(report.ranks_lost, [0]);
        // And all files of the middle rank.
        fs::remove_file(file_of(&path, "part", 1)).unwrap();
        fs::remove_file(file_of(&path, "shard", 1)).unwrap();
        expected.lose_rank(1);
        let report = check(&path, true, &expected, "manifest, parts and a shard");
        assert_eq!(report.ranks_lost, [0, 1]);
    }
}

#[test]
fn with_all_parts_lost_the_headers_tell_what_is_a_piece_of_what() {
    let root = tempfile::tempdir().unwrap();
    let (path, out) = (root.path().join("ckpt"), root.path().join("out"));
    save(&path);
    for rank in 0..RANKS {
        fs::remove_file(file_of(&path, "part", rank)).unwrap();
    }
    let error = salvaged(&path, &out, false).unwrap_err();
    assert!(error.to_string().contains("11 tensors"), "{error}");
    let report = check(&path, true, &Had::all(), "parts");
    assert_eq!(report.ranks_lost, [0, 1, 2]);
    salvaged(&path, &out, true).unwrap();
    let tree = Checkpoint::open(&out).unwrap().tree(0).get().to_owned();
    assert!(
        tree.contains("\"g\":\"rows\"") && tree.contains("own1"),
        "{tree}"
    );
}

/// A shard of older versions does not list which of its tensors are boxes.
#[test]
fn a_piece_never_passes_for_the_whole() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    save(&path);
    let shard = file_of(&path, "shard", 1);
    let bytes = fs::read(&shard).unwrap();
    let key = b"penstock.boxes";
    let at = bytes
        .windows(key.len())
        .position(|window| window == key)
        .unwrap();
    change(&shard, at as u64, 1);
    let mut expected = Had::all();
    assert!(check(&path, false, &expected, "header").missing.is_empty());
    fs::remove_file(file_of(&path, "part", 1)).unwrap();
    expected.lose_rank(1);
    let report = check(&path, true, &expected, "old shard");
    assert!(report.missing.iter().any(|lost| lost.1.name == "rows"));
    let found = survey(&path, &Options::default(), &Progress::default()).unwrap();
    let reported = |detail: &str| {
        found
            .problems
            .iter()
            .any(|problem| problem.detail.contains(detail))
    };
    assert!(reported("pieces of larger ones"), "{:?}", found.problems);
}

/// No digest covers a header's list of boxes: a false list must not affect tensors with recorded
/// digests.
#[test]
fn headers_that_lie_spoil_nothing_that_is_proven() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    save(&path);
    let shard = file_of(&path, "shard", 1);
    let mut bytes = fs::read(&shard).unwrap();
    let claim = |name: &str| format!("{{\\\"tensor\\\":\\\"{name}\\\"").into_bytes();
    let (said, lie) = (claim("halves"), claim("first "));
    let at = bytes
        .windows(said.len())
        .position(|window| window == said)
        .unwrap();
    let mut lie = lie;
    lie.truncate(said.len());
    let lie = String::from_utf8(lie)
        .unwrap()
        .replace("first \\", "first\\\"");
    assert_eq!(lie.len(), said.len());
    let lie = lie.replace("first\\\"\"", "first\\\" ");
    bytes[at..at + said.len()].copy_from_slice(lie.as_bytes());
    fs::write(&shard, bytes).unwrap();
    fs::remove_file(file_of(&path, "part", 1)).unwrap();
    let mut expected = Had::all();
    expected.lose_box("halves");
    check(&path, true, &expected, "lie");
}

#[test]
fn ranks_that_left_nothing_are_counted_within_reason() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    save(&path);
    let part = file_of(&path, "part", 2);
    let far = part
        .to_str()
        .unwrap()
        .replace("part-00002", "part-4000000000");
    fs::remove_file(path.join(MANIFEST)).unwrap();
    fs::rename(part, far).unwrap();
    let refused = survey(&path, &Options::default(), &Progress::default());
    let Err(Error::Corrupt { detail, .. }) = refused else {
        panic!("{refused:?}")
    };
    assert!(detail.contains("4000000000"), "{detail}");
}

/// The device fails between the survey and the last rank: boxes of a tensor are already saved when
/// another one turns out to be unreadable.
#[test]
fn what_is_found_damaged_on_the_way_is_missing_too() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    save(&path);
    let mut ranks_read = BTreeSet::new();
    // The survey reads each shard once; the salvage reads each once or twice more.
    for nth in u64::from(RANKS) + 1..3 * u64::from(RANKS) + 1 {
        let out = root.path().join(format!("out{nth}"));
        let failure = Failure {
            class: Some(OpClass::Read),
            nth,
            repeat: Repeat::Forever,
            errno: 5,
        };
        let options = Options {
            direct: Direct::Off,
            io_threads: Some(1),
            queue_depth: Some(1),
            file_system: Arc::new(Unsynced),
            ..faulty(engines()[0], Arc::new(Faults::new(1).fail(failure)))
        };
        let report = salvage(&path, &out, false, &options, &options, &Progress::default()).unwrap();
        let had = held(&out);
        let read = (0..RANKS).filter(|rank| had.own.contains(&(*rank, "own0".to_owned())));
        let read: BTreeSet<u32> = read.collect();
        let mut expected = Had::all();
        let lost = (0..RANKS).filter(|rank| !read.contains(rank));
        lost.for_each(|rank| expected.lose_rank(rank));
        assert_eq!(had, expected, "from reading {nth} on");
        assert_eq!(report.tensors, had.shared.len() + had.own.len());
        let found = survey(&out, &unsynced(), &Progress::default()).unwrap();
        let intact = found.shared.iter().map(|tensor| tensor.name.clone());
        assert_eq!(
            intact.collect::<BTreeSet<_>>(),
            had.shared,
            "whatever boxes there are"
        );
        ranks_read.insert(read.len());
    }
    assert!(
        ranks_read.contains(&1) && ranks_read.contains(&2),
        "{ranks_read:?}"
    );
}

/// Random damage to random files, compared with the tensors that it can have hit.
#[test]
fn whatever_is_damaged_what_is_intact_is_had() {
    let seed = common::number("PENSTOCK_TORTURE_SEED", 0x5a17_a6e5);
    eprintln!("seed {seed:#x}");
    for case in 0..common::number("PENSTOCK_TORTURE_SALVAGES", 24) {
        let mut rng = Rng::quiet(seed + case);
        let what = format!("seed {:#x}", seed + case);
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        save(&path);
        let opened = Checkpoint::open(&path).unwrap();
        let mut expected = Had::all();
        for rank in 0..RANKS {
            match rng.below(6) {
                0 => {
                    harm(&file_of(&path, "shard", rank), &mut rng);
                    expected.lose_rank(rank);
                }
                1 | 2 => {
                    let own = format!("own{}", rng.below(2));
                    flip_in(&opened, rank, &own);
                    expected.own.remove(&(rank, own));
                }
                3 => {
                    let held = SHARED
                        .iter()
                        .filter(|(_, rows)| rows[rank as usize].0 < rows[rank as usize].1);
                    let held: Vec<_> = held.collect();
                    let name = held[rng.below(held.len() as u64) as usize].0;
                    flip_in(&opened, rank, name);
                    expected.lose_box(name);
                }
                _ => {}
            }
        }
        let lost = rng.below(2 * u64::from(RANKS)) as u32;
        if lost < RANKS {
            harm(&file_of(&path, "part", lost), &mut rng);
            expected.lose_rank(lost);
        }
        check(&path, false, &expected, &what);
    }
}

/// One of several ways to damage a file of some kilobytes.
fn harm(file: &Path, rng: &mut Rng) {
    let bytes = fs::metadata(file).unwrap().len();
    match rng.below(3) {
        0 => fs::remove_file(file).unwrap(),
        1 => cut(file, rng.below(bytes)),
        _ => change(file, rng.below(bytes - 64), 64),
    }
}
