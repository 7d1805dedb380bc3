//! Damaged chunks are read from a replica, except those that are damaged there too.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{self, Sample, forge, names};
use penstock_store::format::digest::CHUNK_BYTES;
use penstock_store::options::Options;
use penstock_store::report::FallbackKind;
use penstock_store::{Error, Result};

fn sample() -> Sample {
    Sample::of_sizes(&[3 << 20, 17, 70_001, 4096, 1 << 20, 300, 2_345_678])
}

/// Two copies of a checkpoint.
fn copies(root: &Path) -> (PathBuf, PathBuf) {
    let (first, second) = (root.join("first"), root.join("second"));
    sample().save(&first, &Options::default()).unwrap();
    fs::create_dir(&second).unwrap();
    for name in names(&first) {
        fs::copy(first.join(&name), second.join(&name)).unwrap();
    }
    (first, second)
}

fn flip(path: &Path, at: u64) {
    let shard = forge::shard_path(path);
    let mut bytes = fs::read(&shard).unwrap();
    bytes[at as usize] ^= 1;
    fs::write(&shard, bytes).unwrap();
}

fn load(path: &Path, replica: &Path) -> Result<(bool, Vec<String>)> {
    let options = Options {
        replica: Some(replica.to_owned()),
        ..Options::default()
    };
    let loaded = common::load(path, &options)?;
    let fallbacks = loaded.report.transport.fallbacks.iter();
    let mended = fallbacks.filter(|fallback| fallback.kind == FallbackKind::Copy);
    let mended = mended.map(|fallback| fallback.reason.clone()).collect();
    Ok((sample().is(&loaded), mended))
}

#[test]
fn each_copy_mends_the_other() {
    let root = tempfile::tempdir().unwrap();
    let (first, second) = copies(root.path());
    assert_eq!(load(&first, &second).unwrap(), (true, vec![]));
    let places = [9, CHUNK_BYTES + 5, 3 * CHUNK_BYTES - 1];
    for place in places {
        flip(&first, place);
    }
    flip(&second, 4 * CHUNK_BYTES + 77);
    for (path, other, chunks) in [
        (&first, &second, "3 chunks are"),
        (&second, &first, "a chunk is"),
    ] {
        let (is_it, mended) = load(path, other).unwrap();
        assert!(is_it);
        assert_eq!(mended.len(), 1);
        assert!(mended[0].contains(chunks) && mended[0].contains(&*other.to_string_lossy()));
    }
}

#[test]
fn what_both_have_damaged_is_damage() {
    let root = tempfile::tempdir().unwrap();
    let (first, second) = copies(root.path());
    flip(&first, CHUNK_BYTES + 5);
    flip(&second, CHUNK_BYTES + 70_000);
    let damaged = load(&first, &second);
    let Err(Error::Corrupt { path, offset, .. }) = damaged else {
        panic!("{damaged:?}");
    };
    assert_eq!((path, offset), (first.clone(), Some(CHUNK_BYTES + 5)));
    // A replica that holds another checkpoint, or nothing, is of no use.
    let other = root.path().join("other");
    Sample::seeded(7).save(&other, &Options::default()).unwrap();
    for replica in [other, root.path().join("nothing")] {
        assert!(matches!(load(&first, &replica), Err(Error::Corrupt { .. })));
    }
}
