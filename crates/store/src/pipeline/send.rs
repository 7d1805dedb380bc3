//! Sending a file to a bucket: each part is read, verified against its chunk digests, and sent.
//!
//! One thread does both, with an engine for each side: local storage reads a part in less time than
//! a request takes, and background work should use one core at most. One staging buffer holds a
//! part from its read to the response, so memory is bounded by the queue depth.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use penstock_io::buffer::IoBuf;
use penstock_io::engine::{Completion, Engine, Op, OpKind};
use penstock_io::file::File;
use penstock_io::priority;
use penstock_io::trace::{self, Role};
use penstock_io::transfer::WholeTransfers;

use super::copy::{length, mismatch};
use super::damage::Damage;
use super::{Halt, failed, open_engine, run_workers, submit};
use crate::error::Result;
use crate::format::digest::{CHUNK_BYTES, Digest};
use crate::options::Settings;
use crate::progress::Progress;
use crate::report::Run;

/// Longest wait for a response before cancellation is checked.
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// A file, and the upload that receives its bytes.
pub(crate) struct Sending<'a> {
    pub(crate) from: Arc<File>,
    pub(crate) to: Arc<File>,
    /// Digests of its chunks.
    pub(crate) chunks: &'a [Digest],
    /// The byte ranges to send, one per part.
    pub(crate) parts: Vec<Range<u64>>,
}

/// Sends parts of a file; returns damage found in it, after which nothing more is sent.
pub(crate) fn send(
    sending: &Sending<'_>,
    reads: &Settings,
    sends: &Settings,
    progress: &Progress,
) -> Result<Option<Damage>> {
    let work = |halt: &Halt<'_>| {
        let _row = trace::enter(Role::Mirror);
        let _span = trace::span("send");
        sends.nice.into_iter().for_each(priority::step_back);
        let mut run = Run::default();
        let mut sender = Sender {
            sending,
            sends,
            halt,
            source: open_engine(reads, &mut run)?,
            target: open_engine(sends, &mut run)?,
            completed: Vec::new(),
        };
        sender.run()
    };
    let found = run_workers(1, progress, work)?;
    Ok(found.into_iter().flatten().next())
}

/// The digest of a byte range whose ends are chunk boundaries or the end of the file.
pub(crate) fn digest_of(chunks: &[Digest], range: &Range<u64>) -> Digest {
    let first = (range.start / CHUNK_BYTES) as usize;
    let end = range.end.div_ceil(CHUNK_BYTES) as usize;
    Digest::of_chunks(&chunks[first..end], range.end - range.start)
}

struct Sender<'a> {
    sending: &'a Sending<'a>,
    sends: &'a Settings,
    halt: &'a Halt<'a>,
    source: WholeTransfers,
    target: WholeTransfers,
    completed: Vec<Completion>,
}

impl Sender<'_> {
    fn run(&mut self) -> Result<Option<Damage>> {
        for range in &self.sending.parts {
            if !self.halt.check_running()? {
                break;
            }
            while self.target.in_flight() == self.sends.queue_depth {
                self.wait()?;
            }
            self.halt.progress.pay(range.end - range.start)?;
            match self.read(range)? {
                Ok(buf) => self.submit(range, buf),
                Err(damage) => return Ok(Some(damage)),
            }
            self.collect(0, None)?;
        }
        while self.target.in_flight() > 0 {
            self.wait()?;
        }
        Ok(None)
    }

    /// Reads a part. If it does not match its digests, it is read once more, bypassing the page
    /// cache, since a transfer can fail although the stored bytes are right.
    fn read(&mut self, range: &Range<u64>) -> Result<std::result::Result<IoBuf, Damage>> {
        let mut buf = self.read_once(range, self.sends.pool.take()?)?;
        let mut found = mismatch(self.sending.chunks, range.start, buf.as_slice());
        if found.is_some() {
            // The page cache would return the same bytes again; the device may not.
            let _ = self.sending.from.drop_cache();
            buf = self.read_once(range, buf)?;
            found = mismatch(self.sending.chunks, range.start, buf.as_slice());
        }
        Ok(match found {
            None => Ok(buf),
            Some(range) => Err(Damage {
                file: 0,
                range,
                byte: None,
                unreadable: None,
                is_tampered: false,
            }),
        })
    }

    fn read_once(&mut self, range: &Range<u64>, mut buf: IoBuf) -> Result<IoBuf> {
        let Sending { from, .. } = self.sending;
        let bytes = (range.end - range.start) as usize;
        buf.set_len(length(from, bytes));
        let op = Op {
            token: 0,
            file: Arc::clone(from),
            kind: OpKind::Read {
                offset: range.start,
                buf,
            },
        };
        submit(&mut self.source, op);
        let mut completed = Vec::new();
        self.source.poll(1, None, &mut completed)?;
        let completion = completed.pop().expect("one was submitted");
        let moved = completion.result.and_then(|moved| match moved {
            // The size was right when the file was opened, so somebody is truncating it meanwhile.
            moved if moved < bytes => Err(io::ErrorKind::UnexpectedEof.into()),
            moved => Ok(moved),
        });
        moved.map_err(failed("read", from.path()))?;
        let mut buf = completion.buf.expect("a read returns its buffer");
        buf.set_len(bytes);
        Ok(buf)
    }

    fn submit(&mut self, range: &Range<u64>, buf: IoBuf) {
        let Sending { to, chunks, .. } = self.sending;
        to.expect(range.start, || digest_of(chunks, range).0);
        let op = Op {
            token: range.end - range.start,
            file: Arc::clone(to),
            kind: OpKind::Write {
                offset: range.start,
                buf,
            },
        };
        submit(&mut self.target, op);
    }

    /// Waits for a response, checking for cancellation meanwhile.
    fn wait(&mut self) -> Result<()> {
        self.halt.check_running()?;
        self.collect(1, Some(PAUSE_MAX))
    }

    fn collect(&mut self, min: usize, timeout: Option<Duration>) -> Result<()> {
        self.target.poll(min, timeout, &mut self.completed)?;
        for completion in self.completed.drain(..) {
            let path = self.sending.to.path();
            completion.result.map_err(failed("send", path))?;
            self.halt.progress.advance(completion.token);
        }
        Ok(())
    }
}
