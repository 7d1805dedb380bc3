//! A decorator that makes an engine fail on purpose, the same way every time.
//!
//! Fault model: a transfer may move fewer bytes than asked for (never none, and whole alignment
//! units on a direct file, as a kernel would), and an operation may fail with any error without
//! having run. Both are decided from the seed and the operation's number alone, so a failing test
//! fails again with the same seed. Not modelled: operations that run and *then* report an error,
//! corrupted bytes, lost writes.
//!
//! Tracers and preloaded libraries see only `io_uring_enter`, never a request: faults have to be
//! injected here.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use slab::Slab;

use super::{Capabilities, Completion, Engine, Op, OpKind, Rejected};
use crate::Result;

/// Operations by what they do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpClass {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Syncs.
    Sync,
}

/// How often an operation fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repeat {
    /// The Nth of its class, and no other.
    Once,
    /// The Nth of its class and all later ones.
    Forever,
}

/// Which operation fails, and with what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Failure {
    /// The class that is counted; `None` counts all operations.
    pub class: Option<OpClass>,
    /// Which one of them, counted from 1.
    pub nth: u64,
    /// Only that one, or all from there on.
    pub repeat: Repeat,
    /// The error, as the kernel numbers it.
    pub errno: i32,
}

/// What goes wrong. May be shared by several engines, and then counts their operations together.
#[derive(Debug)]
pub struct Faults {
    seed: u64,
    short_percent: u64,
    failures: Vec<Failure>,
    operations: AtomicU64,
    by_class: [AtomicU64; 3],
}

impl Faults {
    /// No faults at all, yet.
    pub fn new(seed: u64) -> Faults {
        Faults {
            seed,
            short_percent: 0,
            failures: Vec::new(),
            operations: AtomicU64::new(0),
            by_class: Default::default(),
        }
    }

    /// Makes this share of all transfers short, to a length drawn from the seed.
    #[must_use]
    pub fn short_transfers(self, percent: u64) -> Faults {
        Faults {
            short_percent: percent,
            ..self
        }
    }

    /// Adds a failure. Of several that apply to an operation the first one added wins.
    #[must_use]
    pub fn fail(mut self, failure: Failure) -> Faults {
        self.failures.push(failure);
        self
    }

    /// Operations seen so far, failed ones included: with it a test can fail each one in turn.
    pub fn operations(&self) -> u64 {
        self.operations.load(Ordering::Relaxed)
    }

    /// Counts an operation and says what becomes of it.
    fn next(&self, op: &Op) -> Verdict {
        let class = match op.kind {
            OpKind::Read { .. } => OpClass::Read,
            OpKind::Write { .. } => OpClass::Write,
            OpKind::SyncData => OpClass::Sync,
        };
        let number = self.operations.fetch_add(1, Ordering::Relaxed) + 1;
        let of_class = self.by_class[class as usize].fetch_add(1, Ordering::Relaxed) + 1;
        let failure = self.failures.iter().find(|failure| {
            let count = match failure.class {
                None => number,
                Some(counted) if counted == class => of_class,
                Some(_) => return false,
            };
            count == failure.nth || (failure.repeat == Repeat::Forever && count > failure.nth)
        });
        if let Some(failure) = failure {
            return Verdict::Fail(failure.errno);
        }
        match &op.kind {
            OpKind::Read { buf, .. } | OpKind::Write { buf, .. } => {
                let alignment = op.file.alignment();
                let step = alignment.memory.max(alignment.offset);
                self.shorten(number, buf.len(), step)
            }
            OpKind::SyncData => Verdict::Pass,
        }
    }

    fn shorten(&self, number: u64, len: usize, step: usize) -> Verdict {
        let mut random = self.seed ^ number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let steps = (len / step) as u64;
        if steps < 2 || mix(&mut random) % 100 >= self.short_percent {
            return Verdict::Pass;
        }
        let kept = 1 + mix(&mut random) % (steps - 1);
        Verdict::Shorten(kept as usize * step)
    }
}

enum Verdict {
    Pass,
    Shorten(usize),
    Fail(i32),
}

/// SplitMix64.
fn mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// An engine with faults.
pub struct Faulty {
    inner: Box<dyn Engine>,
    faults: Arc<Faults>,
    /// By the token that the inner engine sees: the caller's token and buffer length.
    flying: Slab<(u64, usize)>,
    failed: VecDeque<Completion>,
}

impl Faulty {
    /// Wraps `inner`.
    pub fn new(inner: Box<dyn Engine>, faults: Arc<Faults>) -> Faulty {
        Faulty {
            inner,
            faults,
            flying: Slab::new(),
            failed: VecDeque::new(),
        }
    }

    fn take_failed(&mut self, completed: &mut Vec<Completion>) -> usize {
        let taken = self.failed.len();
        completed.extend(self.failed.drain(..));
        taken
    }
}

impl Engine for Faulty {
    fn submit(&mut self, mut op: Op) -> std::result::Result<(), Rejected> {
        if self.in_flight() == self.inner.capabilities().queue_depth_max {
            return Err(Rejected { op });
        }
        let verdict = self.faults.next(&op);
        if let Verdict::Fail(errno) = verdict {
            let buf = match op.kind {
                OpKind::Read { buf, .. } | OpKind::Write { buf, .. } => Some(buf),
                OpKind::SyncData => None,
            };
            let result = Err(io::Error::from_raw_os_error(errno));
            self.failed.push_back(Completion {
                token: op.token,
                buf,
                result,
            });
            return Ok(());
        }
        let mut len = 0;
        if let OpKind::Read { buf, .. } | OpKind::Write { buf, .. } = &mut op.kind {
            len = buf.len();
            if let Verdict::Shorten(kept) = verdict {
                buf.set_len(kept);
            }
        }
        op.token = self.flying.insert((op.token, len)) as u64;
        self.inner
            .submit(op)
            .expect("the inner engine has room: its queue is as deep as this one");
        Ok(())
    }

    fn poll(
        &mut self,
        min: usize,
        timeout: Option<Duration>,
        completed: &mut Vec<Completion>,
    ) -> Result<()> {
        let taken = self.take_failed(completed);
        let first = completed.len();
        let polled = self
            .inner
            .poll(min.saturating_sub(taken), timeout, completed);
        for completion in &mut completed[first..] {
            let key = usize::try_from(completion.token).expect("a token of this decorator");
            let (token, len) = self.flying.remove(key);
            completion.token = token;
            if let Some(buf) = &mut completion.buf {
                buf.set_len(len);
            }
        }
        polled
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn in_flight(&self) -> usize {
        self.flying.len() + self.failed.len()
    }
}
