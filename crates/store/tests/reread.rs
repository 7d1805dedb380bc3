//! A transfer that goes wrong once is no damage: before bytes are called damaged they are read a
//! second time, and that past the page cache, which would give the same bytes again.

mod common;

use std::collections::HashSet;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Sample, engines, skip};
use penstock_io::Result;
use penstock_io::engine::{
    Capabilities, Completion, Engine, EngineChoice, EngineConfig, Op, OpKind, Opened, Rejected,
    open,
};
use penstock_io::file::{Direct, File};
use penstock_store::options::Options;
use penstock_store::verify::verify;
use penstock_store::{Error, Progress};

/// What was read so far, by all engines of a call.
#[derive(Default)]
struct Reads {
    /// Bytes that were read, and so are given back right from now on. The rest of a short transfer
    /// counts as read with its beginning.
    seen: Vec<Range<u64>>,
    /// How many reads came on files that bypass the page cache, and on others.
    direct: usize,
    buffered: usize,
}

/// Flips a bit in the first reading of every offset; or in every one.
struct Flaky {
    inner: Box<dyn Engine>,
    always: bool,
    reads: Arc<Mutex<Reads>>,
    bad: HashSet<u64>,
}

impl Engine for Flaky {
    fn submit(&mut self, op: Op) -> std::result::Result<(), Rejected> {
        if let OpKind::Read { offset, buf } = &op.kind {
            let mut reads = self.reads.lock().unwrap();
            match op.file.is_direct() {
                true => reads.direct += 1,
                false => reads.buffered += 1,
            }
            if self.always || !reads.seen.iter().any(|seen| seen.contains(offset)) {
                self.bad.insert(op.token);
            }
            reads.seen.push(*offset..*offset + buf.len() as u64);
        }
        self.inner.submit(op)
    }

    fn poll(
        &mut self,
        min: usize,
        timeout: Option<Duration>,
        completed: &mut Vec<Completion>,
    ) -> Result<()> {
        let before = completed.len();
        self.inner.poll(min, timeout, completed)?;
        for completion in &mut completed[before..] {
            if let Some(buf) = &mut completion.buf
                && self.bad.remove(&completion.token)
            {
                buf.as_mut_slice()[0] ^= 4;
            }
        }
        Ok(())
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
}

fn flaky(choice: EngineChoice, direct: Direct, always: bool) -> (Options, Arc<Mutex<Reads>>) {
    let reads: Arc<Mutex<Reads>> = Arc::default();
    let shared = Arc::clone(&reads);
    let factory = move |queue_depth| {
        let opened = open(&EngineConfig {
            choice,
            queue_depth,
        })?;
        let flaky = Flaky {
            inner: opened.engine,
            always,
            reads: Arc::clone(&shared),
            bad: HashSet::new(),
        };
        Ok(Opened {
            engine: Box::new(flaky),
            fallback: opened.fallback,
        })
    };
    let options = Options {
        engine_factory: Some(Arc::new(factory)),
        direct,
        extent_bytes: Some(1 << 20),
        io_threads: Some(2),
        ..Options::default()
    };
    (options, reads)
}

/// Tensors of every kind of place: in segments, through staging, across extents.
fn sample() -> Sample {
    Sample::of_sizes(&[3 << 20, 17, 70_001, 4096, 1 << 20, 300, 2_345_678])
}

#[test]
fn what_was_wrong_once_loads_and_verifies() {
    for &engine in engines() {
        for direct in [Direct::Auto, Direct::Off] {
            let root = tempfile::tempdir().unwrap();
            let path = root.path().join("ckpt");
            let sample = sample();
            sample.save(&path, &Options::default()).unwrap();
            let (options, _) = flaky(engine, direct, false);
            let loaded = common::load(&path, &options).unwrap();
            assert!(sample.is(&loaded), "{engine:?} {direct:?}");
            let (options, _) = flaky(engine, direct, false);
            let report = verify(&path, &options, &Progress::default()).unwrap();
            assert_eq!(report.problems, []);
        }
    }
}

#[test]
fn what_is_wrong_twice_is_damage() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    sample().save(&path, &Options::default()).unwrap();
    for direct in [Direct::Auto, Direct::Off] {
        let (options, _) = flaky(engines()[0], direct, true);
        let error = common::load(&path, &options).unwrap_err();
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    }
}

#[test]
fn a_buffered_reading_is_repeated_past_the_page_cache() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let sample = sample();
    sample.save(&path, &Options::default()).unwrap();
    let shard = common::forge::shard_path(&path);
    if !File::open(&shard, Direct::Auto).unwrap().is_direct() {
        let reason = "this file system has no direct I/O";
        return skip("a_buffered_reading_is_repeated_past_the_page_cache", reason);
    }
    let (options, reads) = flaky(engines()[0], Direct::Off, false);
    let loaded = common::load(&path, &options).unwrap();
    assert!(sample.is(&loaded));
    let reads = reads.lock().unwrap();
    let items = std::fs::metadata(&shard).unwrap().len().div_ceil(1 << 20) as usize;
    assert!(reads.direct >= items, "a second reading for each item");
    assert!(reads.buffered >= items);
}
