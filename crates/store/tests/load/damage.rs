//! Damage is an error that names file and tensor; it is never returned as data.
//!
//! Files truncated, extended, missing, swapped or outdated, and other kinds of entries in place of
//! files: `load` and `verify` report them, and never hang. Flipped bits are tested in `flips.rs`.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{self, Sample, forge, load, make_fifo, names, problem_of, within_a_minute};
use penstock_io::engine::EngineChoice;
use penstock_store::care::verify::verify;
use penstock_store::format::digest::CHUNK_BYTES;
use penstock_store::load::checkpoint::Checkpoint;
use penstock_store::options::Options;
use penstock_store::report::VerifyReport;
use penstock_store::{Error, MANIFEST, Progress, Result};

fn check(path: &Path) -> Result<VerifyReport> {
    verify(path, &Options::default(), &Progress::default())
}

/// A way to damage a checkpoint; returns the file that the error must name.
type Harm = Box<dyn Fn(&Path) -> PathBuf>;

fn harm(harm: impl Fn(&Path) -> PathBuf + 'static) -> Harm {
    Box::new(harm)
}

/// Damages a fresh checkpoint in each way and expects its file named by `load` and `verify`.
fn expect_named(harms: Vec<(&'static str, Harm)>) {
    for (what, harm) in harms {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        Sample::seeded(1).save(&path, &Options::default()).unwrap();
        let file = harm(&path);
        let file = file.file_name().unwrap().to_str().unwrap().to_owned();
        let place = format!("{what} of {file}");
        let (at, subject) = (path.clone(), place.clone());
        let error = within_a_minute(&subject, move || load(&at, &Options::default()));
        let problem = problem_of(error.expect_err(&place));
        assert_eq!(problem.file, file, "{place}");
        let (at, subject) = (path.clone(), place.clone());
        let report = within_a_minute(&subject, move || check(&at)).unwrap();
        assert!(!report.problems.is_empty(), "{place}");
        for problem in &report.problems {
            assert_eq!(problem.file, file, "{place}");
        }
    }
}

fn resize(file: &Path, change: impl Fn(u64) -> u64) {
    let bytes = fs::metadata(file).unwrap().len();
    let file = fs::File::options().write(true).open(file).unwrap();
    file.set_len(change(bytes)).unwrap();
}

#[test]
fn files_of_another_size_are_named() {
    type Change = fn(u64) -> u64;
    let files: [Find; 3] = [
        |path| path.join(MANIFEST),
        forge::part_path,
        forge::shard_path,
    ];
    let changes: [(&'static str, Change); 5] = [
        ("emptied", |_| 0),
        ("cut to a half", |bytes| bytes / 2),
        ("cut by one", |bytes| bytes - 1),
        ("extended by one", |bytes| bytes + 1),
        ("extended by a chunk", |bytes| bytes + CHUNK_BYTES),
    ];
    let mut harms = Vec::new();
    for find in files {
        for (what, change) in changes {
            harms.push((
                what,
                harm(move |path| {
                    resize(&find(path), change);
                    find(path)
                }),
            ));
        }
    }
    expect_named(harms);
}

#[test]
fn missing_files_are_named() {
    let remove = |find: fn(&Path) -> PathBuf| {
        harm(move |path| {
            let file = find(path);
            fs::remove_file(&file).unwrap();
            file
        })
    };
    expect_named(vec![
        ("the loss", remove(forge::part_path)),
        ("the loss", remove(forge::shard_path)),
    ]);
}

type Find = fn(&Path) -> PathBuf;

/// Replaces a file by another kind of entry.
fn in_place(find: Find, make: fn(&Path)) -> Harm {
    harm(move |path| {
        let file = find(path);
        fs::remove_file(&file).unwrap();
        make(&file);
        file
    })
}

fn make_directory(file: &Path) {
    fs::create_dir(file).unwrap();
}

fn make_dangling_link(file: &Path) {
    std::os::unix::fs::symlink("nowhere", file).unwrap();
}

/// A device of endless length.
fn make_link_to_zeros(file: &Path) {
    std::os::unix::fs::symlink("/dev/zero", file).unwrap();
}

#[test]
fn things_that_are_no_files_are_named_and_do_not_hang() {
    let manifest: Find = |path| path.join(MANIFEST);
    let mut harms = Vec::new();
    for find in [manifest, forge::part_path, forge::shard_path] {
        harms.push(("a FIFO in place", in_place(find, make_fifo)));
        harms.push(("a directory in place", in_place(find, make_directory)));
        harms.push(("a device in place", in_place(find, make_link_to_zeros)));
    }
    for find in [forge::part_path as Find, forge::shard_path] {
        harms.push(("a link to nothing", in_place(find, make_dangling_link)));
    }
    expect_named(harms);
}

#[test]
fn files_of_another_checkpoint_are_named() {
    let other = |path: &Path| {
        let other = path.parent().unwrap().join("other");
        Sample::seeded(2).save(&other, &Options::default()).unwrap();
        other
    };
    let replace = move |find: fn(&Path) -> PathBuf| {
        harm(move |path| {
            let file = find(path);
            fs::copy(find(&other(path)), &file).unwrap();
            file
        })
    };
    expect_named(vec![
        ("another's", replace(forge::part_path)),
        ("another's", replace(forge::shard_path)),
        (
            // The manifest names a part that is not here.
            "another's manifest",
            harm(move |path| {
                let other = other(path);
                fs::copy(other.join(MANIFEST), path.join(MANIFEST)).unwrap();
                forge::part_path(&other)
            }),
        ),
    ]);
}

#[test]
fn swapped_chunks_and_swapped_shards_are_seen() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let sample = Sample::of_sizes(&[4 << 20, 4 << 20]);
    let options = Options {
        shard_bytes: Some(4 << 20),
        ..Options::default()
    };
    sample.save(&path, &options).unwrap();
    let first = forge::shard_path(&path);
    let good = fs::read(&first).unwrap();
    let chunk = CHUNK_BYTES as usize;
    let mut bad = good.clone();
    let (left, right) = bad.split_at_mut(3 * chunk);
    left[chunk..2 * chunk].swap_with_slice(&mut right[..chunk]);
    fs::write(&first, &bad).unwrap();
    let offsets: Vec<_> = check(&path)
        .unwrap()
        .problems
        .iter()
        .map(|problem| problem.offset)
        .collect();
    assert_eq!(offsets, [Some(CHUNK_BYTES), Some(3 * CHUNK_BYTES)]);
    load(&path, &Options::default()).expect_err("swapped chunks");
    fs::write(&first, &good).unwrap();

    let names = names(&path);
    let second = names
        .iter()
        .find(|name| name.starts_with("shard-00000-01"))
        .unwrap();
    let second = path.join(second);
    let other = fs::read(&second).unwrap();
    assert_eq!(good.len(), other.len());
    fs::write(&first, &other).unwrap();
    fs::write(&second, &good).unwrap();
    load(&path, &Options::default()).expect_err("swapped shards");
    let files: std::collections::HashSet<_> = check(&path)
        .unwrap()
        .problems
        .into_iter()
        .map(|problem| problem.file)
        .collect();
    assert_eq!(files.len(), 2, "both are named: {files:?}");
}

#[test]
fn a_stale_manifest_is_no_checkpoint() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    Sample::seeded(1).save(&path, &Options::default()).unwrap();
    let stale = fs::read(path.join(MANIFEST)).unwrap();
    Sample::seeded(2).save_step(&path, None, true).unwrap();
    fs::write(path.join(MANIFEST), stale).unwrap();
    let error = load(&path, &Options::default()).map(drop).unwrap_err();
    assert!(problem_of(error).file.starts_with("part-"));
    assert!(!check(&path).unwrap().problems.is_empty());
}

#[test]
fn what_is_no_checkpoint_is_called_what_it_is() {
    let root = tempfile::tempdir().unwrap();
    let opened = |path: &Path| {
        let verified = check(path).map(|report| report.problems.len());
        (Checkpoint::open(path).map(drop).unwrap_err(), verified)
    };
    let (error, verified) = opened(&root.path().join("nothing"));
    assert!(matches!(error, Error::NotFound { .. }), "{error}");
    assert!(matches!(verified, Err(Error::NotFound { .. })));

    let (error, verified) = opened(root.path());
    assert!(matches!(error, Error::Incomplete { .. }), "{error}");
    assert!(matches!(verified, Err(Error::Incomplete { .. })));

    let file = root.path().join("file");
    fs::write(&file, "precious").unwrap();
    for path in [file.clone(), file.join("below")] {
        let (error, _) = opened(&path);
        assert!(matches!(error, Error::Storage { .. }), "{error}");
        assert_eq!(common::errno(&error).unwrap_or(20), 20, "ENOTDIR: {error}");
    }
    let error = Sample::seeded(1).save(&file, &Options::default());
    assert!(matches!(error, Err(Error::Storage { .. })), "{error:?}");
    assert_eq!(fs::read(&file).unwrap(), b"precious");
}

#[test]
fn foreign_and_newer_manifests_are_told_apart() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    Sample::seeded(1).save(&path, &Options::default()).unwrap();
    for foreign in [
        &b"{\"weight_map\": {\"a\": \"model-00001.safetensors\"}}"[..],
        b"",
        b"\n",
        b"\x89PNG\r\n\x1a\n",
        b"\xff\xfe{\x00}\x00",
        b"null",
    ] {
        fs::write(path.join(MANIFEST), foreign).unwrap();
        let error = load(&path, &Options::default()).map(drop).unwrap_err();
        assert_eq!(problem_of(error).file, MANIFEST);
        assert_eq!(check(&path).unwrap().problems[0].file, MANIFEST);
    }
    let newer = forge::stamp(r#"{"format":"penstock-checkpoint","version":7,"whatever":[1]}"#);
    for text in [
        &newer[..],
        br#"{"format":"penstock-checkpoint","version":7}"#,
    ] {
        fs::write(path.join(MANIFEST), text).unwrap();
        for error in [
            load(&path, &Options::default()).map(drop).unwrap_err(),
            check(&path).map(drop).unwrap_err(),
        ] {
            let newer = matches!(error, Error::Version { found: 7, .. });
            assert!(newer, "{error}");
        }
    }
}

#[test]
fn a_load_without_digests_is_the_callers_choice_and_says_so() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    Sample::seeded(1).save(&path, &Options::default()).unwrap();
    let shard = forge::shard_path(&path);
    let mut bytes = fs::read(&shard).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&shard, bytes).unwrap();
    let options = Options {
        verify: false,
        engine: EngineChoice::Auto,
        ..Options::default()
    };
    let loaded = load(&path, &options).unwrap();
    assert!(!loaded.report.verified);
    let report = verify(&path, &options, &Progress::default()).unwrap();
    assert_eq!(report.problems.len(), 1, "verify checks in any case");
}
