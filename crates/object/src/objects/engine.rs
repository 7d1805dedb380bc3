//! An engine whose operations are HTTP requests.
//!
//! A read is one range request, a write one part of an upload. A request owns its buffer and
//! returns it: a write is sent without a copy, a read is copied once, from the connection into its
//! final place.

use std::future::Future;
use std::io;
use std::ops::Range;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use crossbeam_channel::Sender;
use futures_util::future::{Either, select};
use futures_util::{FutureExt, TryStreamExt};
use object_store::{GetOptions, GetRange};
use penstock_io::buffer::IoBuf;
use penstock_io::engine::{Arrivals, Capabilities, Completion, Engine, Op, OpKind, Rejected, Wake};
use penstock_io::file::File;
use tokio::sync::{oneshot, watch};

use super::handle::{CHANGED, Object, Written};
use crate::client::BucketClient;
use crate::request_error::RequestError;
use crate::runtime;

/// Bytes that a request must transfer for the caller's patience to start anew.
const PROGRESS_BYTES_MIN: usize = 64 << 10;

/// An engine whose operations are HTTP requests.
pub(crate) struct Requests {
    bucket_client: BucketClient,
    part_bytes: u64,
    arrivals: Arrivals,
    done: Sender<Completion>,
    runtime: tokio::runtime::Handle,
    /// Whether the engine was dropped, so that no one reads the responses.
    is_dropped: watch::Sender<bool>,
}

impl Requests {
    pub(crate) fn new(
        bucket_client: BucketClient,
        part_bytes: usize,
        queue_depth: usize,
    ) -> io::Result<Requests> {
        let (done, arrivals) = Arrivals::new(queue_depth);
        Ok(Requests {
            bucket_client,
            part_bytes: part_bytes as u64,
            arrivals,
            done,
            runtime: runtime::handle()?,
            is_dropped: watch::Sender::new(false),
        })
    }
}

impl Engine for Requests {
    fn submit(&mut self, op: Op) -> Result<(), Rejected> {
        let op = self.arrivals.admit(op)?;
        let (bucket_client, part_bytes, done) = (
            self.bucket_client.clone(),
            self.part_bytes,
            self.done.clone(),
        );
        let is_dropped = self.is_dropped.subscribe();
        self.runtime.spawn(async move {
            let Op { token, file, kind } = op;
            let (buf, result) = match kind {
                OpKind::Read { offset, buf } => {
                    let (buf, result) = read(&bucket_client, &file, offset, buf, is_dropped).await;
                    (Some(buf), result)
                }
                OpKind::Write { offset, buf } => {
                    let (buf, result) = write(&file, offset, buf, part_bytes, is_dropped).await;
                    (Some(buf), result)
                }
                // Completing the upload makes it durable; a part does not.
                OpKind::SyncData => (None, Ok(0)),
            };
            // The file is dropped before the completion is reported.
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
        self.arrivals.poll(min, timeout, completed);
        Ok(())
    }

    fn waker(&mut self) -> io::Result<Arc<dyn Wake>> {
        Ok(self.arrivals.waker())
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::new(
            "objects",
            self.arrivals.queue_depth(),
            "HTTP/1.1 requests of ranges and parts",
        )
    }

    fn in_flight(&self) -> usize {
        self.arrivals.in_flight()
    }
}

impl Drop for Requests {
    /// Cancels requests in flight and waits until they have returned their buffers.
    fn drop(&mut self) {
        self.is_dropped.send_replace(true);
        let all = self.arrivals.in_flight();
        self.arrivals.poll(all, None, &mut Vec::new());
    }
}

/// The request's result, or an error once the engine is dropped. A panic, such as the library's
/// own on a token that no header may contain, is an error too: the engine would wait forever for
/// an operation that never completes.
async fn unless_dropped<T>(
    mut is_dropped: watch::Receiver<bool>,
    request: impl Future<Output = io::Result<T>>,
) -> io::Result<T> {
    let dropped = is_dropped.wait_for(|is_dropped| *is_dropped);
    let request = AssertUnwindSafe(request).catch_unwind();
    match select(pin!(request), pin!(dropped)).await {
        Either::Left((Ok(outcome), _)) => outcome,
        Either::Left((Err(_), _)) => Err(io::Error::other("a request ended by a panic")),
        Either::Right(_) => Err(io::ErrorKind::Interrupted.into()),
    }
}

/// Fills a buffer with bytes of an object, with fewer at its end.
async fn read(
    bucket_client: &BucketClient,
    file: &Arc<File>,
    offset: u64,
    mut buf: IoBuf,
    is_dropped: watch::Receiver<bool>,
) -> (IoBuf, io::Result<usize>) {
    let Some(object) = file.stands_for::<Object>() else {
        return (buf, Err(foreign()));
    };
    let end = (offset + buf.len() as u64).min(object.bytes);
    if offset >= end {
        return (buf, Ok(0));
    }
    let into = &mut buf.as_mut_slice()[..(end - offset) as usize];
    let read = read_into(bucket_client, object, offset..end, into);
    let read = unless_dropped(is_dropped, read).await;
    (buf, read)
}

/// Reads a whole range. After an interrupted response the next request begins at the following
/// byte.
async fn read_into(
    bucket_client: &BucketClient,
    object: &Object,
    range: Range<u64>,
    into: &mut [u8],
) -> io::Result<usize> {
    let (mut filled, mut retry) = (0, bucket_client.signed.retry());
    while filled < into.len() {
        let rest = range.start + filled as u64..range.end;
        let came = read_on(bucket_client, object, rest, &mut into[filled..]).await;
        filled += came.bytes;
        if came.bytes >= PROGRESS_BYTES_MIN {
            retry = bucket_client.signed.retry();
        }
        if let Some(request_error) = came.request_error {
            // The object is known to exist, so a 404 is retried.
            retry.back_off_for_known(request_error).await?;
        }
    }
    Ok(filled)
}

/// The result of one range request.
struct Came {
    bytes: usize,
    /// Why the response ended early.
    request_error: Option<RequestError>,
}

/// Fills `into` from one response, as far as that goes.
async fn read_on(
    bucket_client: &BucketClient,
    object: &Object,
    range: Range<u64>,
    into: &mut [u8],
) -> Came {
    let came = |bytes, request_error| Came {
        bytes,
        request_error: Some(request_error),
    };
    let condition = object.tag();
    let had_condition = condition.is_some();
    let options = GetOptions {
        range: Some(GetRange::Bounded(range)),
        if_match: condition,
        ..GetOptions::default()
    };
    let found = match bucket_client.store.get_opts(&object.key, options).await {
        Ok(found) => found,
        Err(object_store::Error::Precondition { .. }) => return came(0, is_not_it(CHANGED)),
        Err(error) => return came(0, RequestError::of_request(&error)),
    };
    if let Some(flaw) = object.flaw(&found.meta, had_condition) {
        return came(0, is_not_it(flaw));
    }
    let mut chunks = found.into_stream();
    let mut filled = 0;
    loop {
        match chunks.try_next().await {
            Ok(Some(chunk)) => {
                let Some(place) = into.get_mut(filled..filled + chunk.len()) else {
                    let text = "the store sent more bytes than were asked for";
                    return came(filled, RequestError::new(io::ErrorKind::InvalidData, text));
                };
                place.copy_from_slice(&chunk);
                filled += chunk.len();
            }
            Ok(None) if filled == into.len() => {
                return Came {
                    bytes: filled,
                    request_error: None,
                };
            }
            Ok(None) => {
                let text = "the store sent fewer bytes than were asked for";
                let kind = io::ErrorKind::UnexpectedEof;
                return came(filled, RequestError::passing(kind, text));
            }
            Err(error) => return came(filled, RequestError::of_request(&error)),
        }
    }
}

fn is_not_it(why: impl Into<String>) -> RequestError {
    RequestError::new(io::ErrorKind::InvalidData, why)
}

/// Sends a buffer as one part.
async fn write(
    file: &Arc<File>,
    offset: u64,
    buf: IoBuf,
    part_bytes: u64,
    is_dropped: watch::Receiver<bool>,
) -> (IoBuf, io::Result<usize>) {
    let len = buf.len();
    let Some(Written(upload)) = file.stands_for() else {
        return (buf, Err(foreign()));
    };
    // An error and not an assertion: a panic would leave the operation without a completion.
    if !offset.is_multiple_of(part_bytes) {
        let detail = format!("a part begins at byte {offset}, in the middle of one");
        return (buf, Err(io::Error::other(detail)));
    }
    let part = (offset / part_bytes) as usize;
    let (payload, back) = Lent::lend(buf);
    let sent = unless_dropped(is_dropped, upload.send(part, offset, payload)).await;
    // A connection may keep the bytes for a moment after the response.
    let buf = back.await.expect("whoever has the bytes gives them back");
    (buf, sent.map(|()| len))
}

fn foreign() -> io::Error {
    io::Error::other("a file of another engine")
}

/// A buffer lent to a request; it is returned when no view of it is left.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_of_a_request_is_an_error() {
        let panics = |why: &str| -> io::Result<()> { panic!("{why}") };
        let (_open, is_dropped) = watch::channel(false);
        let request = async move { panics("the library does so") };
        let outcome = runtime::wait(unless_dropped(is_dropped, request));
        let text = outcome.unwrap_err().to_string();
        // Not the error of `wait`, whose task is still running.
        assert_eq!(text, "a request ended by a panic");
    }
}
