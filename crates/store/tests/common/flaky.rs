//! An engine with faulty reads.

use std::collections::HashSet;
use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use penstock_io::Result;
use penstock_io::engine::{
    Capabilities, Completion, Engine, EngineChoice, EngineConfig, Op, OpKind, Opened, Rejected,
    open,
};
use penstock_io::file::Direct;
use penstock_store::options::Options;

pub const EIO: i32 = 5;

/// The reads so far, by all engines of a call.
#[derive(Default)]
pub struct Reads {
    /// Bytes that were read before, and so are returned correctly from now on. The rest of a short
    /// transfer counts as read with its beginning.
    seen: Vec<Range<u64>>,
    /// Number of reads on files that bypass the page cache, and on others.
    pub direct: usize,
    pub buffered: usize,
}

/// The kind of read fault.
#[derive(Clone, Copy)]
pub enum Fault {
    /// A bit is flipped in the first read of every byte.
    Once,
    /// A bit is flipped in every read.
    Always,
    /// This byte is unreadable.
    Lost(u64),
}

/// An engine with faulty reads.
pub struct Flaky {
    inner: Box<dyn Engine>,
    fault: Fault,
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
            let range = *offset..*offset + buf.len() as u64;
            let is_bad = match self.fault {
                Fault::Once => !reads.seen.iter().any(|seen| seen.contains(offset)),
                Fault::Always => true,
                Fault::Lost(byte) => range.contains(&byte),
            };
            if is_bad {
                self.bad.insert(op.token);
            }
            reads.seen.push(range);
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
            if !self.bad.remove(&completion.token) {
                continue;
            }
            match (self.fault, &mut completion.buf) {
                (Fault::Lost(_), _) => completion.result = Err(io::Error::from_raw_os_error(EIO)),
                (_, Some(buf)) => buf.as_mut_slice()[0] ^= 4,
                (_, None) => {}
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

/// Options with an engine whose reads have this fault, and the reads.
pub fn flaky(choice: EngineChoice, direct: Direct, fault: Fault) -> (Options, Arc<Mutex<Reads>>) {
    let reads: Arc<Mutex<Reads>> = Arc::default();
    let shared = Arc::clone(&reads);
    let factory = move |queue_depth| {
        let opened = open(&EngineConfig {
            choice,
            queue_depth,
        })?;
        let flaky = Flaky {
            inner: opened.engine,
            fault,
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
