//! A row that is unreadable or damaged is in no batch, however often it is requested concurrently.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use penstock_gather::{
    BLOCK_BYTES, Cache, Checks, DeviceReader, Merging, Policy, Reader, Segment, Table,
};
use penstock_io::buffer::Memory;
use penstock_io::engine::{
    self, Capabilities, Completion, Engine, EngineChoice, EngineConfig, Op, OpKind, Rejected, Wake,
};
use penstock_io::executor::{Executor, ExecutorConfig, OpenEngine, Target};
use penstock_io::file::{Direct, File};

use crate::machine::machine;
use crate::{HANG, byte};

const WIDTH: u64 = 4096;
const ROWS: u64 = 1000;
const BAD: u64 = 999;
/// Enough batches to show most visible failures.
const BATCHES: usize = 60;

/// An engine whose reads of the bad row fail.
struct Failing {
    inner: Box<dyn Engine>,
    failed: Vec<Completion>,
}

impl Engine for Failing {
    fn submit(&mut self, op: Op) -> Result<(), Rejected> {
        match op {
            Op {
                token,
                kind: OpKind::Read { offset, buf },
                ..
            } if (offset..offset + buf.len() as u64).contains(&(BAD * WIDTH)) => {
                self.failed.push(Completion {
                    token,
                    buf: Some(buf),
                    result: Err(std::io::Error::from_raw_os_error(5)),
                });
                Ok(())
            }
            op => self.inner.submit(op),
        }
    }

    fn poll(
        &mut self,
        min: usize,
        timeout: Option<Duration>,
        completed: &mut Vec<Completion>,
    ) -> penstock_io::Result<()> {
        let has_failed = !self.failed.is_empty();
        completed.append(&mut self.failed);
        match has_failed {
            true => self.inner.poll(0, None, completed),
            false => self.inner.poll(min, timeout, completed),
        }
    }

    fn waker(&mut self) -> std::io::Result<Arc<dyn Wake>> {
        self.inner.waker()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.failed.len()
    }
}

#[test]
fn what_cannot_be_read_is_in_no_batch() {
    assert_is_in_none(false);
}

#[test]
fn what_is_damaged_is_in_no_batch() {
    assert_is_in_none(true);
}

/// A table whose bad row is damaged if `is_damaged`.
fn segment(path: &Path, is_damaged: bool) -> Segment {
    let row = |row| (0..WIDTH).map(move |at| byte(50, row, at));
    let content: Vec<u8> = (0..ROWS).flat_map(row).collect();
    fs::write(path, &content).unwrap();
    let sums = content.chunks(BLOCK_BYTES as usize).map(Checks::of);
    if is_damaged {
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        file.write_all_at(b"\0damage\0", BAD * WIDTH + 50).unwrap();
    }
    Segment {
        target: Target {
            file: Arc::new(File::open(path, Direct::Off).unwrap()),
            edges: None,
        },
        offset: 0,
        rows: ROWS,
        checks: is_damaged.then(|| Arc::new(Checks::new(sums))),
        opener: None,
    }
}

fn assert_is_in_none(is_damaged: bool) {
    let machine = machine();
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let segment = segment(&directory.path().join("table"), is_damaged);
    let engine = EngineConfig {
        choice: EngineChoice::Auto,
        queue_depth: 32,
    };
    let open: OpenEngine = Arc::new(move || {
        let inner = engine::open(&engine)?.engine;
        Ok(match is_damaged {
            true => inner,
            false => Box::new(Failing {
                inner,
                failed: Vec::new(),
            }),
        })
    });
    let executor = Executor::open_with(&ExecutorConfig::default(), &open).unwrap();
    let reader = Reader::new(
        Table::new(vec![segment], WIDTH, WIDTH),
        Arc::new(executor.share(1).unwrap()),
        Some(Arc::new(
            Cache::new(2000, WIDTH as usize, Policy::Sieve).unwrap(),
        )),
        Merging {
            gap_bytes: 0,
            run_bytes_max: 256 << 10,
        },
    );
    let device = DeviceReader::new(&reader, &machine.device_streams).unwrap();
    let is_over = AtomicBool::new(false);
    let gathered = |ids: &[u64]| {
        let (handle, out) = Memory::allocate(ids.len() * WIDTH as usize)
            .unwrap()
            .share();
        let is_there = reader.gather(ids, out).unwrap().wait(None).is_ok();
        drop(handle);
        is_there
    };
    let mut ids: Vec<u64> = (0..9000).map(|position| position % BAD).collect();
    ids.push(BAD);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                assert!(!gathered(&[BAD]));
            }
        });
        let over = Over(&is_over);
        for _ in 0..BATCHES {
            assert!(!gathered(&ids));
            let memory = machine.lent(&vec![0xee; ids.len() * WIDTH as usize]);
            let batch = device
                .gather(ids.clone(), memory.target(), &memory.foreign(), None)
                .unwrap();
            assert!(batch.wait(Some(HANG)).is_err());
        }
        drop(over);
    });
    device.finish();
}

/// Ends the other thread, even if this one fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}
