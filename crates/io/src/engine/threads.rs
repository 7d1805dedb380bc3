//! The thread-pool backend: `pread`, `pwrite` and `fdatasync` on a few threads.
//!
//! For machines and containers that refuse `io_uring`. It keeps the same contract, with one context
//! switch per operation: negligible for transfers of a mebibyte, a third of the rate for pages.
//!
//! Operations and completions pass through two channels, so a buffer is owned by exactly one side
//! at any time. Dropping the engine lets the threads finish the accepted operations and joins them.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};

use super::sync::perform;
use super::{Arrivals, Capabilities, Completion, Engine, Op, Rejected, Wake};
use crate::{Error, Result};

/// More threads than this only contend: enough to fill the queue of one NVMe drive with transfers
/// of a mebibyte, and most of it with pages.
const THREADS_MAX: usize = 32;

/// A bounded pool of threads that block in system calls.
pub(super) struct Threads {
    arrivals: Arrivals,
    /// `None` only while dropping: closing this channel ends the threads.
    ops: Option<Sender<Op>>,
    threads: Vec<JoinHandle<()>>,
}

impl Threads {
    /// Starts the threads.
    pub(super) fn open(queue_depth: usize) -> Result<Threads> {
        // At most `queue_depth` operations are in flight, so it never fills up.
        let (ops, ops_taken) = crossbeam_channel::bounded(queue_depth);
        let (done, arrivals) = Arrivals::new(queue_depth);
        let mut threads = Vec::new();
        for index in 0..queue_depth.min(THREADS_MAX) {
            let (ops, completions) = (ops_taken.clone(), done.clone());
            let started = std::thread::Builder::new()
                .name(format!("penstock-io-{index}"))
                .spawn(move || work(&ops, &completions));
            match started {
                Ok(thread) => threads.push(thread),
                // Fewer threads than requested are slower, not wrong.
                Err(_) if !threads.is_empty() => break,
                Err(source) => {
                    return Err(Error::EngineUnavailable {
                        engine: "threads",
                        reason: "no thread could be started".to_owned(),
                        source,
                    });
                }
            }
        }
        Ok(Threads {
            arrivals,
            ops: Some(ops),
            threads,
        })
    }
}

impl Engine for Threads {
    fn submit(&mut self, op: Op) -> std::result::Result<(), Rejected> {
        let op = self.arrivals.admit(op)?;
        let ops = self
            .ops
            .as_ref()
            .expect("the channel is closed by drop alone");
        ops.send(op).expect("the threads outlive the channel");
        Ok(())
    }

    fn poll(
        &mut self,
        min: usize,
        timeout: Option<Duration>,
        completed: &mut Vec<Completion>,
    ) -> Result<()> {
        self.arrivals.poll(min, timeout, completed);
        Ok(())
    }

    fn waker(&mut self) -> io::Result<Arc<dyn Wake>> {
        Ok(self.arrivals.waker())
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: "threads",
            queue_depth_max: self.arrivals.queue_depth(),
            setup: "pread, pwrite and fdatasync",
        }
    }

    fn in_flight(&self) -> usize {
        self.arrivals.in_flight()
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.ops = None;
        for thread in self.threads.drain(..) {
            // A thread that panicked has unwound and dropped its operation: nothing is in use.
            drop(thread.join());
        }
    }
}

/// One thread: performs operations until the channel is closed and empty.
fn work(ops: &Receiver<Op>, completions: &Sender<Completion>) {
    for op in ops {
        // The receiver lives until this thread was joined.
        drop(completions.send(perform(op)));
    }
}
