//! An engine with faults.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use slab::Slab;

use super::log::Ticket;
use super::{Faults, Logged, Verdict, mix};
use crate::Result;
use crate::buffer::IoBuf;
use crate::engine::{Capabilities, Completion, Engine, Op, OpKind, Rejected, Wake};
use crate::file::File;

/// An operation in flight in the inner engine.
struct Flying {
    /// The caller's token and buffer length.
    token: u64,
    len: usize,
    /// Its record in the log, if there is a log.
    ticket: Option<Ticket>,
}

/// An engine with faults.
pub struct Faulty {
    inner: Box<dyn Engine>,
    faults: Arc<Faults>,
    /// Keyed by the token that the inner engine gets.
    flying: Slab<Flying>,
    /// Operations failed without having run, or completions held back, with their log records.
    ready: VecDeque<(Completion, Option<Ticket>)>,
    random: u64,
}

impl Faulty {
    /// Wraps `inner`.
    pub fn new(inner: Box<dyn Engine>, faults: Arc<Faults>) -> Faulty {
        let random = faults.seed;
        Faulty {
            inner,
            faults,
            flying: Slab::new(),
            ready: VecDeque::new(),
            random,
        }
    }

    /// Logs the start of an operation that changes storage.
    fn begin(&self, op: &Op) -> Option<Ticket> {
        let log = self.faults.log.as_ref()?;
        let file = op.file.path();
        match &op.kind {
            OpKind::Read { .. } => None,
            OpKind::Write { offset, buf } => log.begin_write(file, *offset, buf.as_slice()),
            OpKind::SyncData => log.begin_on(file, Logged::SyncData),
        }
    }

    /// Restores the caller's token and buffer length; returns the operation's log record.
    fn restore(&mut self, completion: &mut Completion) -> Option<Ticket> {
        let key = usize::try_from(completion.token).expect("a token of this decorator");
        let flying = self.flying.remove(key);
        completion.token = flying.token;
        if let Some(buf) = &mut completion.buf {
            buf.set_len(flying.len);
        }
        flying.ticket
    }

    /// Logs the end of an operation, as its caller is about to see it.
    fn end(&self, completion: &Completion, ticket: Option<Ticket>) {
        if let (Some(log), Some(ticket)) = (&self.faults.log, ticket) {
            match &completion.result {
                Ok(moved) => log.end_transfer(ticket, *moved),
                // After a failed write the content is unknown.
                Err(_) => log.leave_open(ticket),
            }
        }
    }

    /// Returns ready completions, at least `min` of them: in order, or shuffled and late by the
    /// faults.
    fn hand_out(&mut self, min: usize, completed: &mut Vec<Completion>) {
        let mut left = match self.faults.late_percent {
            0 => usize::MAX,
            _ => min,
        };
        for _ in 0..self.ready.len() {
            let pick = match self.faults.late_percent {
                0 => 0,
                _ => (mix(&mut self.random) % self.ready.len() as u64) as usize,
            };
            let (completion, ticket) = self.ready.remove(pick).expect("drawn among those there");
            if left == 0 && mix(&mut self.random) % 100 < self.faults.late_percent {
                self.ready.push_back((completion, ticket));
            } else {
                left = left.saturating_sub(1);
                self.end(&completion, ticket);
                completed.push(completion);
            }
        }
    }
}

impl Engine for Faulty {
    fn submit(&mut self, mut op: Op) -> std::result::Result<(), Rejected> {
        if self.in_flight() == self.inner.capabilities().queue_depth_max {
            return Err(Rejected { op });
        }
        let verdict = self.faults.next(&op);
        if let Verdict::Fail(errno) = verdict {
            let buf = op.kind.into_buf();
            let result = Err(io::Error::from_raw_os_error(errno));
            let completion = Completion {
                token: op.token,
                buf,
                result,
            };
            self.ready.push_back((completion, None));
            return Ok(());
        }
        let mut len = 0;
        if let OpKind::Read { buf, .. } | OpKind::Write { buf, .. } = &mut op.kind {
            len = buf.len();
            if let Verdict::Shorten(kept) = verdict {
                buf.set_len(kept);
            }
        }
        let flying = Flying {
            token: op.token,
            len,
            ticket: self.begin(&op),
        };
        op.token = self.flying.insert(flying) as u64;
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
        let mut arrived = Vec::new();
        let wanted = min.saturating_sub(self.ready.len());
        let polled = self.inner.poll(wanted, timeout, &mut arrived);
        for mut completion in arrived {
            let ticket = self.restore(&mut completion);
            self.ready.push_back((completion, ticket));
        }
        self.hand_out(min, completed);
        polled
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
        self.flying.len() + self.ready.len()
    }
}
