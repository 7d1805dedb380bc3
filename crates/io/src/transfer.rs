//! Whole transfers: the one place where short reads and writes are resumed.
//!
//! The kernel may move fewer bytes than requested (a signal, a full device, its own limits) and may
//! ask to be called again (`EINTR`, `EAGAIN`). [`WholeTransfers`] wraps an engine and hides both: a
//! read is short only at the end of the file, a write is whole or an error.
//!
//! On a file opened for direct I/O the rest of a transfer starts at an offset rounded *down* to the
//! file's alignment, so a few bytes are moved twice; they are the same bytes.
//!
//! A failed sync is never repeated, except after `EINTR`, which says that it did not run: the
//! kernel marks pages clean when it reports a write-back error, so a second sync could claim
//! success for data that is lost.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use slab::Slab;

use crate::Result;
use crate::buffer::IoBuf;
use crate::engine::{Capabilities, Completion, Deadline, Engine, Op, OpKind, Rejected, Wake};
use crate::file::File;
use crate::trace::{self, InFlight};

/// Retries without progress before an interruption counts as an error.
const RETRIES_MAX: u32 = 64;

/// The pause before repeating an operation that the kernel could not accept at the moment. It
/// bounds the rate of retries; with [`RETRIES_MAX`] the whole wait stays under a tenth of a second.
const RETRY_PAUSE: Duration = Duration::from_millis(1);

/// An engine whose transfers are whole; see the module's description.
pub struct WholeTransfers {
    inner: Box<dyn Engine>,
    /// Keyed by the token that the inner engine gets.
    transfers: Slab<Transfer>,
    /// Completions of the inner engine; kept to reuse its memory.
    arrived: Vec<Completion>,
}

/// An operation of the caller, and its progress.
struct Transfer {
    token: u64,
    file: Arc<File>,
    direction: Direction,
    offset: u64,
    /// Bytes moved so far.
    done: usize,
    /// Offset in the buffer at which the operation in flight starts; at most `done`.
    resumed_at: usize,
    retries: u32,
    /// `Some` while a trace runs.
    traced: Option<InFlight>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Direction {
    Read,
    Write,
    Sync,
}

impl Direction {
    fn name(self) -> &'static str {
        match self {
            Direction::Read => "read",
            Direction::Write => "write",
            Direction::Sync => "sync",
        }
    }
}

/// The next step after a completion of the inner engine.
enum Next {
    Finish(io::Result<usize>),
    Resume,
}

impl WholeTransfers {
    /// Wraps `inner`.
    pub fn new(inner: Box<dyn Engine>) -> WholeTransfers {
        WholeTransfers {
            inner,
            transfers: Slab::new(),
            arrived: Vec::new(),
        }
    }

    /// Returns a finished operation to the caller, or submits the rest of it.
    fn carry_on(&mut self, arrived: Completion, completed: &mut Vec<Completion>) {
        let Completion {
            token: key,
            mut buf,
            result,
        } = arrived;
        let key = usize::try_from(key).expect("a token of this decorator");
        let transfer = &mut self.transfers[key];
        if let Some(buf) = &mut buf {
            buf.restore();
        }
        let len = buf.as_ref().map_or(0, IoBuf::len);
        match transfer.advance(result, len) {
            Next::Finish(result) => {
                let transfer = self.transfers.remove(key);
                if let Some(traced) = transfer.traced {
                    let memory = buf.as_ref().map_or(&[][..], IoBuf::as_slice);
                    let operation = transfer.direction.name();
                    let has_failed = result.is_err();
                    let (file, offset) = (&transfer.file, transfer.offset);
                    traced.end(operation, key, file, offset, memory, has_failed);
                }
                completed.push(Completion {
                    token: transfer.token,
                    buf,
                    result,
                });
            }
            Next::Resume => {
                let op = transfer.rest(key as u64, buf);
                self.inner
                    .submit(op)
                    .expect("an operation that completed leaves room for its rest");
            }
        }
    }
}

impl Transfer {
    /// Applies the result of the operation in flight; `len` is the length of the whole transfer.
    fn advance(&mut self, result: io::Result<usize>, len: usize) -> Next {
        let moved = match result {
            Ok(moved) => moved,
            Err(error) => return self.retry(error),
        };
        if self.direction == Direction::Sync {
            return Next::Finish(Ok(0));
        }
        let done = self.resumed_at + moved;
        if done >= len {
            return Next::Finish(Ok(len));
        }
        if done <= self.done {
            return Next::Finish(match self.direction {
                // Nothing beyond the bytes read before: the end of the file.
                Direction::Read => Ok(self.done),
                Direction::Write | Direction::Sync => Err(io::ErrorKind::WriteZero.into()),
            });
        }
        self.done = done;
        self.retries = 0;
        Next::Resume
    }

    fn retry(&mut self, error: io::Error) -> Next {
        let interrupted = error.kind() == io::ErrorKind::Interrupted;
        let busy = error.kind() == io::ErrorKind::WouldBlock && self.direction != Direction::Sync;
        if !(interrupted || busy) || self.retries == RETRIES_MAX {
            return Next::Finish(Err(error));
        }
        self.retries += 1;
        if busy {
            std::thread::sleep(RETRY_PAUSE);
        }
        Next::Resume
    }

    /// The operation for the remaining bytes.
    fn rest(&mut self, token: u64, buf: Option<IoBuf>) -> Op {
        let file = Arc::clone(&self.file);
        let Some(mut buf) = buf else {
            return Op {
                token,
                file,
                kind: OpKind::SyncData,
            };
        };
        let alignment = file.alignment();
        let step = alignment.memory.max(alignment.offset);
        self.resumed_at = self.done - self.done % step;
        buf.advance(self.resumed_at);
        let offset = self.offset + self.resumed_at as u64;
        let kind = match self.direction {
            Direction::Read => OpKind::Read { offset, buf },
            Direction::Write => OpKind::Write { offset, buf },
            Direction::Sync => unreachable!("a sync has no buffer"),
        };
        Op { token, file, kind }
    }
}

impl Engine for WholeTransfers {
    fn submit(&mut self, op: Op) -> std::result::Result<(), Rejected> {
        let _span = trace::span("submit");
        let (direction, offset, bytes) = match &op.kind {
            OpKind::Read { offset, buf } => (Direction::Read, *offset, buf.len()),
            OpKind::Write { offset, buf } => (Direction::Write, *offset, buf.len()),
            OpKind::SyncData => (Direction::Sync, 0, 0),
        };
        let token = op.token;
        let key = self.transfers.insert(Transfer {
            token,
            file: Arc::clone(&op.file),
            direction,
            offset,
            done: 0,
            resumed_at: 0,
            retries: 0,
            traced: InFlight::begin(bytes),
        });
        let op = Op {
            token: key as u64,
            ..op
        };
        self.inner.submit(op).map_err(|Rejected { op }| {
            self.transfers.remove(key);
            Rejected {
                op: Op { token, ..op },
            }
        })
    }

    fn poll(
        &mut self,
        min: usize,
        timeout: Option<Duration>,
        completed: &mut Vec<Completion>,
    ) -> Result<()> {
        let _span = trace::span(if min == 0 { "poll" } else { "wait" });
        let deadline = Deadline::after(timeout);
        let target = completed.len() + min.min(self.in_flight());
        loop {
            let wanted = target.saturating_sub(completed.len());
            let mut arrived = std::mem::take(&mut self.arrived);
            let polled = self.inner.poll(wanted, deadline.left(), &mut arrived);
            // Without completions the time has passed (or none was wanted).
            let idle = arrived.is_empty();
            for completion in arrived.drain(..) {
                self.carry_on(completion, completed);
            }
            self.arrived = arrived;
            polled?;
            if completed.len() >= target || idle {
                return Ok(());
            }
        }
    }

    fn register(&mut self, buffers: &[&IoBuf], files: &[Arc<File>]) -> io::Result<()> {
        self.inner.register(buffers, files)
    }

    fn waker(&mut self) -> io::Result<Arc<dyn Wake>> {
        self.inner.waker()
    }

    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }

    fn in_flight(&self) -> usize {
        self.transfers.len()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;
    use crate::buffer::Memory;
    use crate::file::Direct;

    /// An engine that answers from a script and records the requests.
    #[derive(Default)]
    struct Scripted {
        answers: VecDeque<io::Result<usize>>,
        taken: VecDeque<Op>,
        asked: std::rc::Rc<std::cell::RefCell<Vec<(u64, usize)>>>,
    }

    impl Engine for Scripted {
        fn submit(&mut self, op: Op) -> std::result::Result<(), Rejected> {
            match &op.kind {
                OpKind::Read { offset, buf } | OpKind::Write { offset, buf } => {
                    self.asked.borrow_mut().push((*offset, buf.len()));
                }
                OpKind::SyncData => self.asked.borrow_mut().push((0, 0)),
            }
            self.taken.push_back(op);
            Ok(())
        }

        fn poll(
            &mut self,
            _min: usize,
            _timeout: Option<Duration>,
            completed: &mut Vec<Completion>,
        ) -> Result<()> {
            if let Some(Op { token, kind, .. }) = self.taken.pop_front() {
                let buf = kind.into_buf();
                let result = self
                    .answers
                    .pop_front()
                    .expect("an answer for each operation");
                completed.push(Completion { token, buf, result });
            }
            Ok(())
        }

        fn capabilities(&self) -> Capabilities {
            Capabilities {
                name: "scripted",
                queue_depth_max: 1,
                setup: "",
            }
        }

        fn in_flight(&self) -> usize {
            self.taken.len()
        }
    }

    #[derive(Clone, Copy)]
    enum Kind {
        Read,
        Write,
        Sync,
    }

    /// Runs one operation of 10000 bytes at offset 5000 against the answers; returns its result,
    /// and the offsets and lengths that the inner engine saw.
    fn run(kind: Kind, answers: Vec<io::Result<usize>>) -> (io::Result<usize>, Vec<(u64, usize)>) {
        let directory = tempfile::tempdir().unwrap();
        let file = File::create(&directory.path().join("file"), Direct::Off).unwrap();
        let scripted = Scripted {
            answers: answers.into(),
            ..Scripted::default()
        };
        let asked = std::rc::Rc::clone(&scripted.asked);
        let mut engine = WholeTransfers::new(Box::new(scripted));
        let buf = Memory::allocate(10_000).unwrap().share().1;
        let kind = match kind {
            Kind::Read => OpKind::Read { offset: 5000, buf },
            Kind::Write => OpKind::Write { offset: 5000, buf },
            Kind::Sync => OpKind::SyncData,
        };
        engine
            .submit(Op {
                token: 77,
                file: Arc::new(file),
                kind,
            })
            .unwrap();
        let mut completed = Vec::new();
        engine.poll(1, None, &mut completed).unwrap();
        let Completion { token, buf, result } = completed.pop().expect("one completion");
        assert_eq!(token, 77);
        assert!(
            buf.is_none_or(|buf| buf.len() == 10_000),
            "the buffer comes back whole"
        );
        (result, asked.take())
    }

    fn errno(errno: i32) -> io::Result<usize> {
        Err(io::Error::from_raw_os_error(errno))
    }

    #[test]
    fn the_rest_goes_on_where_the_transfer_stopped() {
        let (result, asked) = run(Kind::Write, vec![Ok(1), Ok(7000), Ok(2999)]);
        assert_eq!(result.unwrap(), 10_000);
        assert_eq!(asked, [(5000, 10_000), (5001, 9999), (12_001, 2999)]);
    }

    #[test]
    fn a_write_without_progress_is_an_error() {
        let (result, asked) = run(Kind::Write, vec![Ok(4000), Ok(0)]);
        assert_eq!(result.unwrap_err().kind(), io::ErrorKind::WriteZero);
        assert_eq!(asked.len(), 2);
    }

    #[test]
    fn a_read_without_progress_is_the_end_of_the_file() {
        assert_eq!(run(Kind::Read, vec![Ok(4000), Ok(0)]).0.unwrap(), 4000);
        assert_eq!(run(Kind::Read, vec![Ok(0)]).0.unwrap(), 0);
    }

    #[test]
    fn progress_starts_the_count_of_retries_again() {
        let mut answers: Vec<_> = (0..RETRIES_MAX).map(|_| errno(4)).collect();
        answers.push(Ok(10));
        answers.extend((0..RETRIES_MAX).map(|_| errno(4)));
        answers.push(Ok(9990));
        assert_eq!(run(Kind::Read, answers).0.unwrap(), 10_000);
        let answers = (0..=RETRIES_MAX).map(|_| errno(4)).collect();
        assert_eq!(
            run(Kind::Read, answers).0.unwrap_err().raw_os_error(),
            Some(4)
        );
    }

    #[test]
    fn a_sync_is_repeated_only_if_it_did_not_run() {
        assert_eq!(run(Kind::Sync, vec![errno(4), Ok(0)]).0.unwrap(), 0);
        for failure in [5, 11, 28] {
            let (result, asked) = run(Kind::Sync, vec![errno(failure)]);
            assert_eq!(result.unwrap_err().raw_os_error(), Some(failure));
            assert_eq!(asked.len(), 1);
        }
    }
}
