//! Sending a file to a bucket: each part is read, verified against its chunk digests, and sent.
//!
//! One thread does both, with an engine for each side: local storage reads a part in less time than
//! a request takes, and background work should use one core at most. One staging buffer holds a
//! part from its read to the response, so memory is bounded by the queue depth.
//!
//! A file that is sent sealed is sealed in that buffer, after it was verified. Requests that are
//! repeated send the buffer again; a part is never sealed a second time.

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
use crate::seal::{ShardSealer, Tag};

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
    /// How the file is sealed; `None` to send it as it is.
    pub(crate) seal: Option<Seal<'a>>,
}

/// A file that is sealed on its way.
pub(crate) struct Seal<'a> {
    pub(crate) sealer: &'a ShardSealer,
    /// Takes the place of the first bytes, and stays clear.
    pub(crate) header: &'a [u8],
}

/// The outcome of sending a file.
#[derive(Debug, Default)]
pub(crate) struct Sent {
    /// Damage found in it, after which nothing more was sent.
    pub(crate) damage: Option<Damage>,
    /// Digests and tags of the sealed chunks, in order; none of a file that was sent as it is.
    pub(crate) digests: Vec<Digest>,
    pub(crate) tags: Vec<Tag>,
}

/// Sends parts of a file, in order.
pub(crate) fn send(
    sending: &Sending<'_>,
    reads: &Settings,
    sends: &Settings,
    progress: &Progress,
) -> Result<Sent> {
    let work = |halt: &Halt<'_>| {
        let _row = trace::enter(Role::Mirror);
        let _span = trace::span("send");
        sends.nice.into_iter().for_each(priority::step_back);
        let mut run = Run::default();
        let mut sender = Sender {
            sending,
            sends,
            halt,
            source: open_engine(reads, reads.queue_depth, &mut run)?,
            target: open_engine(sends, sends.queue_depth, &mut run)?,
            completed: Vec::new(),
            sent: Sent::default(),
        };
        sender.run()?;
        Ok(sender.sent)
    };
    let sent = run_workers(1, progress, work)?;
    Ok(sent.into_iter().next().expect("one worker ran"))
}

/// The digest of a byte range whose ends are chunk boundaries or the end of the file.
pub(crate) fn digest_of(chunks: &[Digest], range: &Range<u64>) -> Digest {
    let first = (range.start / CHUNK_BYTES) as usize;
    let end = range.end.div_ceil(CHUNK_BYTES) as usize;
    Digest::of_chunks(&chunks[first..end], range.end - range.start)
}

impl Seal<'_> {
    /// Seals the chunks from byte `start` of the file on, in place.
    fn apply(&self, start: u64, bytes: &mut [u8]) -> Result<(Vec<Digest>, Vec<Tag>)> {
        if start == 0 {
            bytes[..self.header.len()].copy_from_slice(self.header);
        }
        let (mut digests, mut tags) = (Vec::new(), Vec::new());
        let chunks = bytes.chunks_mut(CHUNK_BYTES as usize);
        for (index, chunk) in (start / CHUNK_BYTES..).zip(chunks) {
            tags.push(self.sealer.seal(index, chunk)?);
            digests.push(Digest::of(chunk));
        }
        Ok((digests, tags))
    }
}

struct Sender<'a> {
    sending: &'a Sending<'a>,
    sends: &'a Settings,
    halt: &'a Halt<'a>,
    source: WholeTransfers,
    target: WholeTransfers,
    completed: Vec<Completion>,
    sent: Sent,
}

impl Sender<'_> {
    fn run(&mut self) -> Result<()> {
        for range in &self.sending.parts {
            if !self.halt.check_running()? {
                break;
            }
            while self.target.in_flight() == self.sends.queue_depth {
                self.wait()?;
            }
            self.halt.progress.pay(range.end - range.start)?;
            match self.read(range)? {
                Ok(buf) => self.submit(range, buf)?,
                Err(damage) => {
                    self.sent.damage = Some(damage);
                    return Ok(());
                }
            }
            self.collect(0, None)?;
        }
        while self.target.in_flight() > 0 {
            self.wait()?;
        }
        Ok(())
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

    fn submit(&mut self, range: &Range<u64>, mut buf: IoBuf) -> Result<()> {
        let Sending { to, chunks, .. } = self.sending;
        match &self.sending.seal {
            None => to.expect(range.start, || digest_of(chunks, range).0),
            Some(seal) => {
                let (digests, tags) = seal.apply(range.start, buf.as_mut_slice())?;
                let bytes = range.end - range.start;
                to.expect(range.start, || Digest::of_chunks(&digests, bytes).0);
                self.sent.digests.extend(digests);
                self.sent.tags.extend(tags);
            }
        }
        let op = Op {
            token: range.end - range.start,
            file: Arc::clone(to),
            kind: OpKind::Write {
                offset: range.start,
                buf,
            },
        };
        submit(&mut self.target, op);
        Ok(())
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
