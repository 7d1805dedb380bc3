//! A salvage recovers exactly the intact tensors of a damaged checkpoint, and never presents them
//! as a complete one.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use crate::common::{self, Sample, bytes_of, engines, faulty, forge, load, names};
use penstock_io::faulty::{Failure, Faults, OpClass, Repeat};
use penstock_store::care::salvage::{SalvageReport, salvage};
use penstock_store::care::survey::{Described, Survey, survey};
use penstock_store::care::verify::verify;
use penstock_store::format::part::{Alias, View};
use penstock_store::load::checkpoint::Checkpoint;
use penstock_store::options::Options;
use penstock_store::save::Sidecars;
use penstock_store::steps::store::{StepState, Store};
use penstock_store::{Error, MANIFEST, Progress, Result};
use serde_json::value::RawValue;

const MIB: usize = 1 << 20;

/// Ten tensors in two shards, the first with a tie and a view.
fn sample() -> Sample {
    let mut sample = Sample::of_sizes(&[
        2 * MIB,
        MIB,
        4096,
        700_001,
        640,
        3,
        0,
        MIB + 17,
        2 * MIB,
        100,
    ]);
    let view = View {
        shape: vec![7],
        strides: vec![2],
        offset: 3,
    };
    let alias = |name: &str, tensor, view| Alias {
        name: name.to_owned(),
        tensor,
        view,
    };
    sample.aliases = vec![
        alias("tie", 0, None),
        alias("window", 1, Some(view.clone())),
        alias("other", 9, Some(view)),
    ];
    sample
}

fn save(path: &Path) -> Sample {
    let sample = sample();
    let mut state = sample.state();
    let references = (0..10).map(|i| format!("{{\"$\":\"tensor\",\"i\":{i}}}"));
    let aliases = (0..3).map(|a| format!("{{\"$\":\"tensor\",\"a\":{a}}}"));
    let all: Vec<String> = references.chain(aliases).collect();
    let tree = format!("{{\"all\":[{}],\"lr\":1e-4}}", all.join(","));
    state.tree = RawValue::from_string(tree).unwrap();
    let publication = penstock_store::save::Publication {
        step: Some(7),
        ..common::publication(path)
    };
    let options = Options {
        shard_bytes: Some(4 << 20),
        ..Options::default()
    };
    penstock_store::save::save(state, &publication, &options, &Progress::default()).unwrap();
    sample
}

fn surveyed(path: &Path) -> Result<Survey> {
    survey(path, &Options::default(), &Progress::default())
}

fn salvaged(path: &Path, out: &Path, unverified: bool) -> Result<SalvageReport> {
    salvage(
        path,
        out,
        unverified,
        &Options::default(),
        &Options::default(),
        &Progress::default(),
    )
}

/// The tensors in the salvaged checkpoint, by name, each checked bit for bit.
fn recovered(out: &Path, sample: &Sample) -> Vec<String> {
    let checkpoint = Checkpoint::open(out).unwrap();
    let loaded = load(out, &Options::default()).unwrap();
    let tensors = &checkpoint.part().tensors;
    for (place, tensor) in tensors.iter().enumerate() {
        let index: usize = tensor.name[1..].parse().unwrap();
        let expected = &sample.bytes[index];
        assert_eq!(bytes_of(&loaded, place, expected.len()), &expected[..]);
    }
    let report = verify(out, &Options::default(), &Progress::default()).unwrap();
    assert_eq!(report.problems, []);
    tensors.iter().map(|tensor| tensor.name.clone()).collect()
}

fn missing(report: &SalvageReport) -> Vec<&str> {
    let names = report.missing.iter();
    names.map(|(_, missing)| missing.name.as_str()).collect()
}

fn flip(path: &Path, tensor: &str) {
    let checkpoint = Checkpoint::open(path).unwrap();
    let part = checkpoint.part();
    let entry = part
        .tensors
        .iter()
        .find(|entry| entry.name == tensor)
        .unwrap();
    let file = path.join(&part.files[entry.file].name);
    let mut bytes = fs::read(&file).unwrap();
    bytes[entry.range.0 as usize] ^= 1;
    fs::write(file, bytes).unwrap();
}

#[test]
fn exactly_the_tensors_that_are_hit_are_missing() {
    let root = tempfile::tempdir().unwrap();
    let (path, out) = (root.path().join("ckpt"), root.path().join("out"));
    let sample = save(&path);
    flip(&path, "t1");
    flip(&path, "t4");
    let before = names(&path);
    let report = salvaged(&path, &out, false).unwrap();
    assert_eq!(missing(&report), ["t1", "t4", "window"]);
    assert!(report.missing[0].1.reason.contains("offset"));
    assert_eq!(
        recovered(&out, &sample),
        ["t0", "t2", "t3", "t5", "t6", "t7", "t8", "t9"]
    );
    assert_eq!(names(&path), before, "the damaged one is left alone");
    let whole: usize = sample.bytes.iter().map(Vec::len).sum();
    assert_eq!(report.recovered_bytes as usize, whole - MIB - 640);

    let checkpoint = Checkpoint::open(&out).unwrap();
    let source = Checkpoint::open(&path).unwrap();
    let partial = checkpoint.manifest().partial.as_ref().unwrap();
    assert_eq!(
        partial.source.as_deref(),
        Some(source.manifest().id.as_str())
    );
    assert!(!partial.unverified);
    assert_eq!(checkpoint.manifest().step, Some(7));
    let tree = checkpoint.tree(0).get();
    assert!(tree.ends_with("],\"lr\":1e-4}"), "{tree}");
    assert!(tree.contains("{\"$\":\"missing\",\"i\":0}"));
    assert_eq!(checkpoint.part().aliases.len(), 2);
}

#[test]
fn a_cut_shard_gives_what_lies_before_the_cut() {
    let root = tempfile::tempdir().unwrap();
    let (path, out) = (root.path().join("ckpt"), root.path().join("out"));
    let sample = save(&path);
    let checkpoint = Checkpoint::open(&path).unwrap();
    let part = checkpoint.part();
    let first = part.tensors.iter();
    let first = first.filter(|tensor| tensor.file == 0 && tensor.nbytes() > 0);
    let last = first.max_by_key(|tensor| tensor.range.0).unwrap();
    let file = path.join(&part.files[0].name);
    fs::File::options()
        .write(true)
        .open(file)
        .unwrap()
        .set_len(last.range.1 - 1)
        .unwrap();
    let lost = last.name.clone();
    drop(checkpoint);
    let report = salvaged(&path, &out, false).unwrap();
    assert!(missing(&report).contains(&lost.as_str()));
    let names = recovered(&out, &sample);
    assert!(names.contains(&"t0".to_owned()) || names.contains(&"t8".to_owned()));
    assert!(
        report
            .missing
            .iter()
            .any(|(_, missing)| missing.reason.contains("bytes instead of"))
    );
}

#[test]
fn a_missing_shard_takes_its_tensors_and_no_others() {
    let root = tempfile::tempdir().unwrap();
    let (path, out) = (root.path().join("ckpt"), root.path().join("out"));
    let sample = save(&path);
    let of_first: Vec<String> = {
        let checkpoint = Checkpoint::open(&path).unwrap();
        let tensors = checkpoint.part().tensors.iter();
        let lost = tensors.filter(|tensor| tensor.file == 0 && tensor.nbytes() > 0);
        lost.map(|tensor| tensor.name.clone()).collect()
    };
    let shard = forge::shard_path(&path);
    fs::remove_file(&shard).unwrap();
    let survey = surveyed(&path).unwrap();
    let name = shard.file_name().unwrap().to_str().unwrap();
    assert_eq!(survey.missing_files, [name]);
    let report = salvaged(&path, &out, false).unwrap();
    let missing = missing(&report);
    assert!(of_first.iter().all(|lost| missing.contains(&lost.as_str())));
    assert_eq!(recovered(&out, &sample).len(), 10 - of_first.len());
}

/// An unreadable sector, in a request whose other bytes can be read.
#[test]
fn bytes_that_cannot_be_read_hit_their_chunk_only() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let sample = Sample::of_sizes(&[MIB, MIB, MIB, MIB]);
    sample.save(&path, &Options::default()).unwrap();
    for &engine in engines() {
        let bad = |nth| Failure {
            class: Some(OpClass::Read),
            nth,
            repeat: Repeat::Once,
            errno: 5,
        };
        // With one request at a time, the second read of an item comes after the others.
        let faults = Faults::new(1).fail(bad(2));
        let options = Options {
            io_threads: Some(1),
            queue_depth: Some(1),
            ..faulty(engine, Arc::new(faults))
        };
        let survey = survey(&path, &options, &Progress::default()).unwrap();
        assert_eq!(survey.intact().len(), 4, "once is no damage");
    }
}

#[test]
fn a_checkpoint_that_turns_out_whole_is_saved_whole() {
    let root = tempfile::tempdir().unwrap();
    let (path, out) = (root.path().join("ckpt"), root.path().join("out"));
    let sample = save(&path);
    let report = salvaged(&path, &out, false).unwrap();
    assert!(report.missing.is_empty());
    assert!(Checkpoint::open(&out).unwrap().manifest().partial.is_none());
    assert_eq!(recovered(&out, &sample).len(), 10);
    let before = [names(&out), names(&path)];
    for taken in [&out, &path, &path.join("sub"), &path.join("../ckpt")] {
        let again = salvaged(&path, taken, false).map(drop);
        let Err(Error::Storage { operation, .. }) = again else {
            panic!("{}: {again:?}", taken.display());
        };
        assert_eq!(operation, "salvage to");
    }
    assert_eq!([names(&out), names(&path)], before);
}

#[test]
fn without_a_part_nothing_is_proven_and_nothing_is_taken_unasked() {
    for lose in [
        |path: &Path| fs::remove_file(forge::part_path(path)).unwrap(),
        |path: &Path| fs::write(forge::part_path(path), "{").unwrap(),
    ] {
        let root = tempfile::tempdir().unwrap();
        let (path, out) = (root.path().join("ckpt"), root.path().join("out"));
        let sample = save(&path);
        lose(&path);
        let survey = surveyed(&path).unwrap();
        assert_eq!(survey.described, Described::Headers);
        assert_eq!(survey.part.tensors.len(), 10);
        let error = salvaged(&path, &out, false).unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
        assert!(error.to_string().contains("10 tensors"), "{error}");
        assert!(!out.exists());

        let report = salvaged(&path, &out, true).unwrap();
        assert!(report.unverified);
        assert_eq!(report.ranks_lost, [0]);
        let partial = Checkpoint::open(&out).unwrap().manifest().partial.clone();
        assert!(partial.unwrap().unverified);
        assert_eq!(recovered(&out, &sample).len(), 10);
    }
}

#[test]
fn a_part_that_lost_its_manifest_vouches_for_data_but_nothing_for_it() {
    let root = tempfile::tempdir().unwrap();
    let (path, out) = (root.path().join("ckpt"), root.path().join("out"));
    let sample = save(&path);
    flip(&path, "t7");
    fs::write(path.join(MANIFEST), "gone").unwrap();
    assert_eq!(surveyed(&path).unwrap().described, Described::PartAlone);
    salvaged(&path, &out, false).unwrap_err();
    let report = salvaged(&path, &out, true).unwrap();
    assert_eq!(missing(&report), ["t7"]);
    assert!(report.unverified && report.ranks_lost.is_empty());
    assert_eq!(recovered(&out, &sample).len(), 9);
}

#[test]
fn a_partial_checkpoint_is_no_complete_step() {
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    save(&store.step_path(1));
    save(&store.step_path(7));
    fs::rename(store.step_path(7), root.path().join("bad")).unwrap();
    flip(&root.path().join("bad"), "t1");
    salvaged(&root.path().join("bad"), &store.step_path(7), false).unwrap();
    let state = store.state(7).unwrap();
    assert!(matches!(state, StepState::Damaged(Error::Partial { .. })));
    let id = Checkpoint::open(&store.step_path(7))
        .unwrap()
        .manifest()
        .id
        .clone();
    store.mark_verified(7, &id).unwrap();
    assert!(store.marks().unwrap().is_empty(), "it never counts as good");
    assert!(store.retain(Some(1), None, None).unwrap().is_empty());
    assert_eq!(store.steps().unwrap(), [1, 7]);
}

#[test]
fn what_was_missing_once_stays_missing() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    let sample = save(&path("a"));
    flip(&path("a"), "t1");
    salvaged(&path("a"), &path("b"), false).unwrap();
    flip(&path("b"), "t8");
    let report = salvaged(&path("b"), &path("c"), false).unwrap();
    assert_eq!(missing(&report), ["t1", "window", "t8"]);
    assert_eq!(recovered(&path("c"), &sample).len(), 8);
    let whole = salvaged(&path("b"), &path("d"), false).unwrap();
    assert_eq!(missing(&whole), missing(&report));
}

#[test]
fn what_is_no_checkpoint_is_not_salvaged() {
    let root = tempfile::tempdir().unwrap();
    let none = salvaged(&root.path().join("none"), &root.path().join("out"), true);
    assert!(matches!(none, Err(Error::NotFound { .. })), "{none:?}");
    let path = root.path().join("ckpt");
    save(&path);
    fs::remove_file(path.join(MANIFEST)).unwrap();
    let orphan = format!("shard-00000-00.{}.safetensors", forge::ATTEMPT);
    fs::write(path.join(orphan), "x").unwrap();
    let mixed = salvaged(&path, &root.path().join("out"), true);
    assert!(matches!(mixed, Err(Error::Corrupt { .. })), "{mixed:?}");
}

#[test]
fn a_group_stays_one_and_a_name_that_it_has_twice_counts_once() {
    let root = tempfile::tempdir().unwrap();
    let path = |name: &str| root.path().join(name);
    let sample = Sample::of_sizes(&[4096, 64, 3]).grouped();
    let publication = penstock_store::save::Publication {
        sidecars: Sidecars {
            files: vec![("config.json".to_owned(), b"{}".to_vec())],
            group: Some(String::new()),
        },
        ..common::publication(&path("a"))
    };
    let (options, progress) = (Options::default(), Progress::default());
    penstock_store::save::save(sample.state(), &publication, &options, &progress).unwrap();
    let report = salvaged(&path("a"), &path("b"), false).unwrap();
    assert_eq!((report.files_lost, report.missing.len()), (vec![], 0));
    let groups = |name: &str| -> Vec<(String, bool)> {
        let checkpoint = Checkpoint::open(&path(name)).unwrap();
        let tensors = checkpoint.part().tensors.iter();
        tensors
            .map(|tensor| (tensor.stored_name().to_owned(), tensor.group.is_some()))
            .collect()
    };
    assert_eq!(groups("b"), groups("a"));
    assert_eq!(recovered(&path("b"), &sample).len(), 3);

    forge::edit_part(&path("a"), |part| {
        part["tensors"][1]["stored_name"] = part["tensors"][0]["stored_name"].clone();
    });
    salvaged(&path("a"), &path("c"), false).unwrap();
    assert_eq!(recovered(&path("c"), &sample).len(), 3);
    let is_grouped: Vec<bool> = groups("c").into_iter().map(|(_, is)| is).collect();
    assert_eq!(is_grouped, [true, false, true]);
}
