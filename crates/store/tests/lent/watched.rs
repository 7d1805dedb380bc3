//! A watched job stores the state as it was when the job was made, or fails: whoever changed a
//! tensor before it was copied, and even if the change is not finished.

use std::path::Path;

use crate::alone;
use crate::common::{bytes_of, load, names, publication};
use penstock_io::faulty::Lent;
use penstock_store::options::Options;
use penstock_store::plan::write::TensorSpec;
use penstock_store::save::{Attempt, Job, Linked, SaveState, Staging, commit};
use penstock_store::{Error, Progress, Result};
use serde_json::value::RawValue;

const MIB: usize = 1 << 20;
/// Number of 8-byte words in a mebibyte.
const MIB_WORDS: usize = MIB / 8;
const SIZES: [usize; 3] = [3 * MIB_WORDS + 7, 2 * MIB_WORDS, 500];

fn state(lent: &[Lent]) -> SaveState {
    let spec = |(index, &words): (usize, &usize)| TensorSpec {
        name: format!("t{index}"),
        dtype: "int64".to_owned(),
        shape: vec![words as u64],
        item_bytes: 8,
        region: None,
        group: None,
    };
    SaveState {
        tensors: SIZES.iter().enumerate().map(spec).collect(),
        sources: lent.iter().map(|lent| lent.region().into()).collect(),
        linked: Linked::default(),
        aliases: Vec::new(),
        tree: RawValue::from_string("{}".into()).unwrap(),
    }
}

fn lent() -> Vec<Lent> {
    SIZES.iter().map(|&words| Lent::new(1, words)).collect()
}

fn watched(lent: &[Lent], path: &Path, eager: &[usize]) -> Job {
    let staging = Staging {
        arena: None,
        is_lazy: true,
        is_watched: true,
        eager: eager.to_vec(),
        ..Staging::default()
    };
    Job::new(state(lent), path, &Options::default(), &staging).unwrap()
}

/// `None`, with a message, if the kernel cannot watch.
fn lazy(lent: &[Lent], path: &Path, eager: &[usize]) -> Option<Job> {
    let job = watched(lent, path, eager);
    if !job.is_lazy() {
        eprintln!("skipped: the kernel does not watch memory here");
    }
    Some(job).filter(Job::is_lazy)
}

fn write(job: &Job, path: &Path) -> Result<()> {
    let options = Options::default();
    let progress = Progress::default();
    let mut attempt = Attempt::begin(path, false, &options.file_system, &progress)?;
    let written = job.write(&mut attempt, 0, &progress)?;
    commit(attempt, &publication(path), vec![written.part])?;
    Ok(())
}

#[track_caller]
fn assert_first(path: &Path) {
    let loaded = load(path, &Options::default()).unwrap();
    for (place, &words) in SIZES.iter().enumerate() {
        let content = Lent::content(1, words);
        assert!(bytes_of(&loaded, place, content.len()) == &content[..]);
    }
}

#[test]
fn a_change_before_the_copy_fails_the_write_and_leaves_nothing() {
    let _alone = alone();
    for (changed, is_staged) in [(0, false), (1, false), (0, true), (1, true)] {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ckpt");
        let lent = lent();
        let Some(job) = lazy(&lent, &path, &[]) else {
            return;
        };
        lent[changed].change(2);
        if is_staged {
            job.stage(None).unwrap();
            assert!(job.is_staged());
        }
        let failed = write(&job, &path).unwrap_err();
        let Error::SourceModified { path: named, key } = &failed else {
            panic!("{failed}");
        };
        assert_eq!((named, key), (&path, &format!("t{changed}")));
        assert!(failed.remedy().contains("stage()"));
        assert!(names(&path).is_empty());
        assert!(lent.iter().all(Lent::is_returned));
    }
}

#[test]
fn a_change_after_the_copy_harms_nothing() {
    let _alone = alone();
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let lent = lent();
    let Some(job) = lazy(&lent, &path, &[]) else {
        return;
    };
    job.stage(None).unwrap();
    lent.iter().for_each(|lent| lent.change(2));
    write(&job, &path).unwrap();
    assert_first(&path);
}

#[test]
fn what_is_small_and_what_is_asked_for_is_copied_at_once() {
    let _alone = alone();
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let lent = lent();
    let Some(job) = lazy(&lent, &path, &[1]) else {
        return;
    };
    lent[1].change(2);
    lent[2].change(2);
    write(&job, &path).unwrap();
    assert_first(&path);
}

#[test]
fn a_job_that_cannot_be_watched_waits_for_its_stage() {
    let _alone = alone();
    let root = tempfile::tempdir().unwrap();
    let (one, other) = (root.path().join("one"), root.path().join("other"));
    let (first_lent, second_lent) = (lent(), lent());
    let Some(first) = lazy(&first_lent, &one, &[]) else {
        return;
    };
    let second = watched(&second_lent, &other, &[]);
    assert!(!second.is_lazy() && !second.is_staged());
    second.stage(None).unwrap();
    second_lent.iter().for_each(|lent| lent.change(2));
    write(&second, &other).unwrap();
    assert_first(&other);
    // A cancelled job lets the next one watch.
    first.cancel();
    assert!(watched(&first_lent, &one, &[]).is_lazy());
    drop(first);
    assert!(watched(&first_lent, &one, &[]).is_lazy());
}
