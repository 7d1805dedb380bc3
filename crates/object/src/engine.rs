//! An engine whose operations are requests.
//!
//! A read is one request for a range, a write one part of an upload. Buffers go to the request and come
//! back from it: a write is sent from where it lies, a read is copied once, from what the connection
//! gives out into its final place.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use crossbeam_channel::{Receiver, Sender};
use futures_util::TryStreamExt;
use object_store::{GetOptions, GetRange};
use penstock_io::buffer::IoBuf;
use penstock_io::engine::{Capabilities, Completion, Engine, Op, OpKind, Rejected};
use penstock_io::file::File;
use tokio::sync::oneshot;

use crate::handle::{Object, Written};
use crate::kin::{Kin, kind_of};
use crate::runtime;

/// See the module's description.
pub(crate) struct Requests {
    kin: Kin,
    part_bytes: u64,
    queue_depth: usize,
    in_flight: usize,
    done: Sender<Completion>,
    completions: Receiver<Completion>,
    runtime: tokio::runtime::Handle,
}

impl Requests {
    pub(crate) fn new(kin: Kin, part_bytes: usize, queue_depth: usize) -> io::Result<Requests> {
        let (done, completions) = crossbeam_channel::unbounded();
        Ok(Requests {
            kin,
            part_bytes: part_bytes as u64,
            queue_depth,
            in_flight: 0,
            done,
            completions,
            runtime: runtime::handle()?,
        })
    }

    fn take(&mut self, completion: Completion, completed: &mut Vec<Completion>) {
        self.in_flight -= 1;
        completed.push(completion);
    }
}

impl Engine for Requests {
    fn submit(&mut self, op: Op) -> Result<(), Rejected> {
        if self.in_flight == self.queue_depth {
            return Err(Rejected { op });
        }
        self.in_flight += 1;
        let (kin, part_bytes, done) = (self.kin.clone(), self.part_bytes, self.done.clone());
        self.runtime.spawn(async move {
            let Op { token, file, kind } = op;
            let (buf, result) = match kind {
                OpKind::Read { offset, buf } => {
                    let (buf, result) = read(&kin, &file, offset, buf).await;
                    (Some(buf), result)
                }
                OpKind::Write { offset, buf } => {
                    let (buf, result) = write(&file, offset, buf, part_bytes).await;
                    (Some(buf), result)
                }
                // What is durable says the end of the upload.
                OpKind::SyncData => (None, Ok(0)),
            };
            // The file goes before anybody hears of the end.
            drop(file);
            let _ = done.send(Completion { token, buf, result });
        });
        Ok(())
    }

    fn poll(
        &mut self,
        min: usize,
        timeout: Option<Duration>,
        completed: &mut Vec<Completion>,
    ) -> penstock_io::Result<()> {
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        let mut wanted = min.min(self.in_flight);
        loop {
            while let Ok(completion) = self.completions.try_recv() {
                self.take(completion, completed);
                wanted = wanted.saturating_sub(1);
            }
            if wanted == 0 {
                return Ok(());
            }
            let received = match deadline {
                Some(deadline) => self.completions.recv_deadline(deadline).ok(),
                None => self.completions.recv().ok(),
            };
            let Some(completion) = received else {
                return Ok(());
            };
            self.take(completion, completed);
            wanted -= 1;
        }
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new(
            "objects",
            self.queue_depth,
            "HTTP/1.1 requests of ranges and parts",
        )
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }
}

impl Drop for Requests {
    /// Waits for what is in flight, as nobody else may have the buffers before.
    fn drop(&mut self) {
        while self.in_flight > 0 && self.completions.recv().is_ok() {
            self.in_flight -= 1;
        }
    }
}

/// Fills a buffer with bytes of an object, fewer where it ends.
async fn read(
    kin: &Kin,
    file: &Arc<File>,
    offset: u64,
    mut buf: IoBuf,
) -> (IoBuf, io::Result<usize>) {
    let Some(object) = file.stands_for::<Object>() else {
        return (buf, Err(foreign()));
    };
    let end = (offset + buf.len() as u64).min(object.bytes);
    if offset >= end {
        return (buf, Ok(0));
    }
    let into = buf.as_mut_slice();
    let read = read_into(kin, object, offset..end, into).await;
    (buf, read)
}

async fn read_into(
    kin: &Kin,
    object: &Object,
    range: std::ops::Range<u64>,
    into: &mut [u8],
) -> io::Result<usize> {
    let options = GetOptions {
        range: Some(GetRange::Bounded(range.clone())),
        if_match: object.tag.clone(),
        ..GetOptions::default()
    };
    let found = kin
        .store
        .get_opts(&object.key, options)
        .await
        .map_err(kind_of)?;
    let mut chunks = found.into_stream();
    let mut filled = 0;
    while let Some(chunk) = chunks.try_next().await.map_err(kind_of)? {
        let Some(place) = into.get_mut(filled..filled + chunk.len()) else {
            return Err(io::Error::other(
                "the store sent more bytes than were asked for",
            ));
        };
        place.copy_from_slice(&chunk);
        filled += chunk.len();
    }
    if filled as u64 != range.end - range.start {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(filled)
}

/// Sends a buffer as a part.
async fn write(
    file: &Arc<File>,
    offset: u64,
    buf: IoBuf,
    part_bytes: u64,
) -> (IoBuf, io::Result<usize>) {
    let len = buf.len();
    let Some(Written(upload)) = file.stands_for() else {
        return (buf, Err(foreign()));
    };
    assert!(offset.is_multiple_of(part_bytes), "an extent is a part");
    let (payload, back) = Lent::lend(buf);
    let part = usize::try_from(offset / part_bytes).expect("a store takes 10,000 parts");
    let sent = upload.send(part, offset, payload).await;
    // A connection may let go of the bytes a moment after the answer.
    let buf = back.await.expect("whoever has the bytes gives them back");
    (buf, sent.map(|()| len))
}

fn foreign() -> io::Error {
    io::Error::other("a file of another engine")
}

/// A buffer that is lent to a request, and comes back when nobody has a byte of it any more.
struct Lent {
    buf: Option<IoBuf>,
    back: Option<oneshot::Sender<IoBuf>>,
}

impl Lent {
    fn lend(buf: IoBuf) -> (Bytes, oneshot::Receiver<IoBuf>) {
        let (back, returned) = oneshot::channel();
        let lent = Lent {
            buf: Some(buf),
            back: Some(back),
        };
        (Bytes::from_owner(lent), returned)
    }
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        self.buf.as_ref().map_or(&[], IoBuf::as_slice)
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let (Some(buf), Some(back)) = (self.buf.take(), self.back.take()) {
            let _ = back.send(buf);
        }
    }
}
