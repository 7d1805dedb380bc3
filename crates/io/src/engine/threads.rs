//! The thread-pool backend: `pread`, `pwrite` and `fdatasync` on a few threads.
//!
//! For machines and containers that refuse `io_uring`. The same contract, with one context switch
//! per operation: of no weight for transfers of a mebibyte, a third of the rate for pages.
//!
//! Operations travel to the threads and completions back through two channels, so a buffer is owned
//! by exactly one side at any time. Dropping the engine lets the threads finish what was accepted
//! and joins them.

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, select};

use super::{
    Capabilities, Completion, Deadline, Engine, Op, OpKind, Rejected, TRANSFER_BYTES_MAX, Wake,
};
use crate::file::File;
use crate::{Error, Result};

/// More threads than this only contend: enough to fill the queue of one NVMe drive with transfers
/// of a mebibyte, and most of it with pages.
const THREADS_MAX: usize = 32;

/// A bounded pool of threads that block in system calls.
pub(super) struct Threads {
    queue_depth: usize,
    in_flight: usize,
    /// `None` only while dropping: closing this channel is what ends the threads.
    ops: Option<Sender<Op>>,
    completions: Receiver<Completion>,
    /// What [`Engine::waker`] sends; nobody sends before.
    wakes: Receiver<()>,
    threads: Vec<JoinHandle<()>>,
}

impl Threads {
    /// Starts the threads.
    pub(super) fn open(queue_depth: usize) -> Result<Threads> {
        // Neither channel can ever be full: at most `queue_depth` operations are in flight.
        let (ops, ops_taken) = crossbeam_channel::bounded(queue_depth);
        let (completions_made, completions) = crossbeam_channel::bounded(queue_depth);
        let mut threads = Vec::new();
        for index in 0..queue_depth.min(THREADS_MAX) {
            let (ops, completions) = (ops_taken.clone(), completions_made.clone());
            let started = std::thread::Builder::new()
                .name(format!("penstock-io-{index}"))
                .spawn(move || work(&ops, &completions));
            match started {
                Ok(thread) => threads.push(thread),
                // Fewer threads than wished for are slower, not wrong.
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
            queue_depth,
            in_flight: 0,
            ops: Some(ops),
            completions,
            wakes: crossbeam_channel::never(),
            threads,
        })
    }

    fn take(&mut self, completion: Completion, completed: &mut Vec<Completion>) {
        self.in_flight -= 1;
        completed.push(completion);
    }
}

impl Engine for Threads {
    fn submit(&mut self, op: Op) -> std::result::Result<(), Rejected> {
        if self.in_flight == self.queue_depth {
            return Err(Rejected { op });
        }
        let ops = self
            .ops
            .as_ref()
            .expect("the channel is closed by drop alone");
        ops.send(op).expect("the threads outlive the channel");
        self.in_flight += 1;
        Ok(())
    }

    fn poll(
        &mut self,
        min: usize,
        timeout: Option<Duration>,
        completed: &mut Vec<Completion>,
    ) -> Result<()> {
        let deadline = Deadline::after(timeout);
        let mut wanted = min.min(self.in_flight);
        loop {
            while let Ok(completion) = self.completions.try_recv() {
                self.take(completion, completed);
                wanted = wanted.saturating_sub(1);
            }
            if wanted == 0 {
                return Ok(());
            }
            let timeout = match deadline.left() {
                None => crossbeam_channel::never(),
                Some(left) => crossbeam_channel::after(left),
            };
            select! {
                recv(self.completions) -> received => {
                    let completion = received.expect("a thread outlives its engine");
                    self.take(completion, completed);
                    wanted -= 1;
                }
                recv(self.wakes) -> _ => return Ok(()),
                recv(timeout) -> _ => return Ok(()),
            }
        }
    }

    fn waker(&mut self) -> io::Result<Arc<dyn Wake>> {
        let (wake, wakes) = crossbeam_channel::bounded(1);
        self.wakes = wakes;
        Ok(Arc::new(Waker { wake }))
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            name: "threads",
            queue_depth_max: self.queue_depth,
            setup: "pread, pwrite and fdatasync",
        }
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

struct Waker {
    wake: Sender<()>,
}

impl Wake for Waker {
    fn wake(&self) {
        // Full, there is a wake already; gone, nobody waits.
        let _ = self.wake.try_send(());
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

fn perform(op: Op) -> Completion {
    let Op { token, file, kind } = op;
    match kind {
        OpKind::Read { offset, mut buf } => {
            let len = buf.len().min(TRANSFER_BYTES_MAX);
            let result = rustix::io::pread(file.as_ref(), &mut buf.as_mut_slice()[..len], offset);
            Completion {
                token,
                buf: Some(buf),
                result: result.map_err(io::Error::from),
            }
        }
        OpKind::Write { offset, buf } => {
            let len = buf.len().min(TRANSFER_BYTES_MAX);
            let result = rustix::io::pwrite(file.as_ref(), &buf.as_slice()[..len], offset);
            Completion {
                token,
                buf: Some(buf),
                result: result.map_err(io::Error::from),
            }
        }
        OpKind::SyncData => Completion {
            token,
            buf: None,
            result: sync(&file),
        },
    }
}

fn sync(file: &File) -> io::Result<usize> {
    rustix::fs::fdatasync(file)?;
    Ok(0)
}
