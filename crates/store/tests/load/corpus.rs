//! Every seed of the fuzz targets passes the target's own check: an input that a fuzzer once found
//! is tested without a fuzzer. Such inputs are kept in `fuzz/seeds` as `finding_*`.

#[allow(
    dead_code,
    unreachable_pub,
    reason = "a part of the library of the fuzz targets"
)]
#[path = "../../../../fuzz/src/checks/mod.rs"]
mod checks;

use std::cell::Cell;
use std::fs;
use std::path::{Path, PathBuf};

use checks::open::Checkpoint;
use checks::read_plan::Load;

/// The seeds of a target; panics if there are none, since the directory must be wrong then.
fn seeds(target: &str) -> Vec<(PathBuf, Vec<u8>)> {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/seeds")
        .join(target);
    let entries = fs::read_dir(&directory).unwrap_or_else(|error| panic!("{directory:?}: {error}"));
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    assert!(!paths.is_empty(), "{directory:?} is empty");
    let read = |path: PathBuf| (path.clone(), fs::read(path).unwrap());
    paths.into_iter().map(read).collect()
}

/// Runs a check on every seed of a target; the output of a failure ends with the seed's path.
fn run(target: &str, check: impl Fn(&[u8])) {
    for (path, input) in seeds(target) {
        eprintln!("{}", path.display());
        check(&input);
    }
}

#[test]
fn manifests() {
    run("manifest", checks::manifest);
}

#[test]
fn stamped_manifests() {
    run("stamped_manifest", checks::stamped_manifest);
}

#[test]
fn parts() {
    run("part", checks::part);
}

#[test]
fn headers() {
    run("header", checks::header);
}

#[test]
fn framed_headers() {
    run("framed_header", checks::framed_header);
}

#[test]
fn headers_beside_the_library() {
    run("library", checks::library::same);
    run("framed_header", checks::library::same);
}

#[test]
fn read_plans() {
    run("read_plan", |input| Load::decode(input).check());
}

#[test]
fn wraps_of_strangers() {
    run("wraps", checks::keys::wraps);
}

#[test]
fn files_of_keys() {
    run("keys", checks::keys::keys);
}

#[test]
fn open() {
    let root = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::new(root.path());
    let loaded = Cell::new(0);
    run("open", |part| {
        loaded.set(loaded.get() + usize::from(checkpoint.check(part)));
    });
    assert!(loaded.get() > 0, "some seeds are good checkpoints");
}
