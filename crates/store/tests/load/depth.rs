//! How much a load has under way: what storage needs to be kept busy, and no more.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use penstock_io::Result;
use penstock_io::engine::{
    Capabilities, Completion, Engine, EngineChoice, EngineConfig, Op, Opened, Rejected, open,
};
use penstock_store::options::Options;

use crate::common::{Sample, load};

const MIB: usize = 1 << 20;
const DEPTH: usize = 8;

/// Storage that answers while it is asked for so many requests, and later ones only whoever waits.
struct Storage {
    inner: Box<dyn Engine>,
    at_once: usize,
    asked: usize,
    /// Requests under way at each look.
    seen: Arc<Mutex<Vec<usize>>>,
}

impl Engine for Storage {
    fn submit(&mut self, op: Op) -> std::result::Result<(), Rejected> {
        self.asked += 1;
        self.inner.submit(op)
    }

    fn poll(
        &mut self,
        min: usize,
        timeout: Option<Duration>,
        completed: &mut Vec<Completion>,
    ) -> Result<()> {
        let in_flight = self.in_flight();
        if in_flight > 0 {
            self.seen.lock().unwrap().push(in_flight);
        }
        match (self.asked <= self.at_once, min) {
            (true, _) => self.inner.poll(in_flight, timeout, completed),
            (false, 0) => Ok(()),
            (false, _) => self.inner.poll(min, timeout, completed),
        }
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight()
    }
}

/// What one worker had under way at each look, while it loaded tensors of these sizes.
fn looks(sizes: &[usize], at_once: usize) -> Vec<usize> {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("ckpt");
    let sample = Sample::of_sizes(sizes);
    sample.save(&path, &Options::default()).unwrap();
    let seen: Arc<Mutex<Vec<usize>>> = Arc::default();
    let shared = Arc::clone(&seen);
    let factory = move |queue_depth| {
        let opened = open(&EngineConfig {
            choice: EngineChoice::Threads,
            queue_depth,
        })?;
        Ok(Opened {
            engine: Box::new(Storage {
                inner: opened.engine,
                at_once,
                asked: 0,
                seen: Arc::clone(&shared),
            }),
            fallback: opened.fallback,
        })
    };
    let options = Options {
        engine_factory: Some(Arc::new(factory)),
        extent_bytes: Some(MIB),
        io_threads: Some(1),
        queue_depth: Some(DEPTH),
        ..Options::default()
    };
    let loaded = load(&path, &options).unwrap();
    assert!(sample.is(&loaded));
    seen.lock().unwrap().clone()
}

#[test]
fn storage_that_answers_at_once_is_asked_for_one_thing_at_a_time() {
    let looks = looks(&[40 * MIB], usize::MAX);
    assert_eq!(looks[0], DEPTH);
    assert!(looks[4..].iter().all(|&count| count == 1), "{looks:?}");
}

#[test]
fn storage_that_takes_its_time_is_kept_busy() {
    let all = looks(&[40 * MIB], 0);
    assert!(all[..all.len() / 2].contains(&DEPTH), "{all:?}");
    // And where it has answered at once before: what the page cache had may end.
    let later = looks(&[40 * MIB], 20);
    let tail = &later[later.len() / 2..];
    assert!(later.contains(&1) && tail.contains(&DEPTH), "{later:?}");
}

/// Some of them take several requests, which do not all go at once.
#[test]
fn whatever_is_under_way_everything_is_read() {
    let sizes: Vec<usize> = (1..60)
        .map(|number| number * 70_001 % 2_345_678 + number)
        .collect();
    for at_once in [0, 1, 7, 30, usize::MAX] {
        looks(&sizes, at_once);
    }
}
