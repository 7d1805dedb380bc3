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

use crate::common::{Rng, number};
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
fn signatures_of_strangers() {
    run("bundle", checks::signing::bundle);
    run("ssh_signature", checks::signing::ssh_signature);
    run("statement", checks::signing::statement);
    run("signers", checks::signing::signers);
}

/// The assertions of a target.
type Check = fn(&[u8]);

/// A fuzzer in short, for what is read before anybody vouches for it.
#[test]
fn drawn_changes_of_what_strangers_write() {
    let mut rng = Rng::new(number("PENSTOCK_TORTURE_SEED", 0x000f_022e));
    let targets: [(&str, Check); 6] = [
        ("bundle", checks::signing::bundle),
        ("ssh_signature", checks::signing::ssh_signature),
        ("statement", checks::signing::statement),
        ("signers", checks::signing::signers),
        ("wraps", checks::keys::wraps),
        ("stamped_manifest", checks::stamped_manifest),
    ];
    for (target, check) in targets {
        for (path, input) in seeds(target) {
            for _ in 0..number("PENSTOCK_SEED_CHANGES", 200) {
                let mut changed = input.clone();
                for _ in 0..=rng.below(4) {
                    change(&mut changed, &mut rng);
                }
                let shown = String::from_utf8_lossy(&changed).into_owned();
                let checked = std::panic::catch_unwind(|| check(&changed));
                assert!(checked.is_ok(), "{}: {shown}", path.display());
            }
        }
    }
}

/// Flips, adds, removes or repeats some bytes.
fn change(bytes: &mut Vec<u8>, rng: &mut Rng) {
    let at = rng.below(bytes.len() as u64 + 1) as usize;
    let end = bytes.len().min(at + rng.below(40) as usize);
    match rng.below(4) {
        0 if at < bytes.len() => bytes[at] ^= 1 << rng.below(8),
        1 => bytes.insert(at, b"\"{}[],:0-eA=\n\x1b\xff"[rng.below(15) as usize]),
        2 => drop(bytes.drain(at..end)),
        _ => {
            let piece = bytes[at..end].to_vec();
            let to = rng.below(bytes.len() as u64 + 1) as usize;
            bytes.splice(to..to, piece);
        }
    }
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
