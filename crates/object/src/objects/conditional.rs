//! Conditional writes and removals of small objects, and how their outcome is decided.
//!
//! A store accepts an object only if its key is free (`If-None-Match: *`), or only in place of
//! the object that was seen (`If-Match`). Its response may be lost, or may be an error although
//! the store has carried out the request or carries it out later. A refusal for rights or arguments
//! is final, unless an earlier request may have been carried out. After any other failed put the
//! key is read:
//!
//! - The bytes that were put: success, whichever request stored them. They contain an id that
//!   no other process draws.
//! - Other bytes: refused, and a request of ours still on its way will be refused too. If the put
//!   was to replace an object and a request may have been carried out, ours may have been stored
//!   and then replaced: the outcome is undecided.
//! - The bytes that were there before: not final. The same bytes are put again; whichever request
//!   arrives first takes effect, and the others change nothing.
//!
//! - No object: put again, or an error if one was to be replaced.
//!
//! Other bytes count only when they were read twice, because bytes may change on their way.
//!
//! The client sends each request once, as its own retries would hide which of them was
//! refused. If nothing decides within the caller's `patience`, the error's kind is
//! [`io::ErrorKind::Other`], which no store's refusal has, and the request may still be carried
//! out while its signature is valid, which is 15 minutes on S3.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use object_store::path::Path as Key;
use object_store::{GetOptions, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use tokio::time::Instant;

use crate::client::retry::first_pause;
use crate::client::{BucketClient, kind_of};
use crate::provider::only_over;

/// Longest pause between two retries; each pause is twice as long as the one before.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// The condition on a put.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// Unconditional.
    Any,
    /// Only if the key is free.
    Free,
    /// Only in place of these bytes. A known version saves reading the object before the put.
    Of(Bytes, Option<String>),
}

/// Puts a text under a key if its condition holds.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`] if other bytes have the key, [`io::ErrorKind::NotFound`] if
/// the object to be replaced is gone, [`io::ErrorKind::Other`] if the outcome is unknown, and the
/// store's own kinds for its other refusals.
pub(crate) async fn put(
    bucket_client: &BucketClient,
    key: &Key,
    text: Bytes,
    place: Place,
) -> io::Result<()> {
    let mut version = None;
    match &place {
        Place::Any => {
            return Ok(bucket_client.put(key, text).await?);
        }
        Place::Free => {}
        Place::Of(_, Some(known)) => version = Some(known.clone()),
        Place::Of(seen, None) => match read_expecting(bucket_client, key, seen).await? {
            Some((there, found)) if there == seen => version = found,
            other => return Err(refused(other.is_some(), &place, false)),
        },
    }
    let begun = Instant::now();
    let mut pause = first_pause(bucket_client.patience);
    // Whether a request may have been carried out, or may still be.
    let mut is_open = false;
    loop {
        let options = PutOptions::from(mode(&place, version.clone())?);
        let payload = PutPayload::from(text.clone());
        let error = match bucket_client.store.put_opts(key, payload, options).await {
            Ok(_) => return Ok(()),
            Err(error) => kind_of(error),
        };
        match error.kind() {
            io::ErrorKind::AlreadyExists => {}
            kind if is_rejection(kind) && !is_open => return Err(error),
            kind => is_open |= !is_rejection(kind),
        }
        let mut observed = read_once(bucket_client, key).await;
        if is_other(&observed, &text, &place) {
            observed = read_once(bucket_client, key).await;
        }
        match (observed, &place) {
            (Ok(Some((there, _))), _) if there == text => return Ok(()),
            (Ok(Some((there, found))), Place::Of(seen, _)) if there == seen => version = found,
            (Ok(None), Place::Free) | (Err(_), _) => {}
            (Ok(other), _) => return Err(refused(other.is_some(), &place, is_open)),
        }
        if begun.elapsed() >= bucket_client.patience {
            return Err(undecided(&error));
        }
        tokio::time::sleep(pause).await;
        pause = PAUSE_MAX.min(2 * pause);
    }
}

/// Removes a small object if it still has these bytes. A known version saves reading it first.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`] if it has other bytes, [`io::ErrorKind::NotFound`] if it is
/// gone or has changed since it was read.
pub(crate) async fn remove(
    bucket_client: &BucketClient,
    key: &Key,
    seen: &Bytes,
    version: Option<&str>,
) -> io::Result<()> {
    if version.is_some() {
        return bucket_client.signed.delete_if(key, version).await;
    }
    match read_expecting(bucket_client, key, seen).await? {
        Some((there, version)) if there == seen => {
            bucket_client
                .signed
                .delete_if(key, version.as_deref())
                .await
        }
        Some(_) => Err(io::ErrorKind::AlreadyExists.into()),
        None => Err(io::ErrorKind::NotFound.into()),
    }
}

fn mode(place: &Place, version: Option<String>) -> io::Result<PutMode> {
    match place {
        Place::Any => Ok(PutMode::Overwrite),
        Place::Free => Ok(PutMode::Create),
        Place::Of(..) => {
            let version = version.ok_or(io::ErrorKind::Unsupported)?;
            Ok(PutMode::Update(only_over(version)))
        }
    }
}

/// Whether the store has said that it did not carry out the request.
fn is_rejection(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{InvalidInput, NotFound, PermissionDenied, Unsupported};
    matches!(
        kind,
        NotFound | PermissionDenied | Unsupported | InvalidInput
    )
}

/// The error for a key that has other bytes (`is_there`) or none.
fn refused(is_there: bool, place: &Place, is_open: bool) -> io::Error {
    match (is_there, place) {
        (_, Place::Of(..)) if is_open => {
            undecided(&io::Error::other("something else has its place by now"))
        }
        (true, _) => io::ErrorKind::AlreadyExists.into(),
        (false, _) => io::ErrorKind::NotFound.into(),
    }
}

fn undecided(last: &io::Error) -> io::Error {
    let detail = format!("the store did not say whether it took it: {last}");
    io::Error::other(detail)
}

type There = Option<(Bytes, Option<String>)>;

/// Whether the key has bytes that are neither the new ones nor the ones to be replaced.
fn is_other(observed: &io::Result<There>, text: &Bytes, place: &Place) -> bool {
    let is_before = |there: &Bytes| matches!(place, Place::Of(seen, _) if there == seen);
    matches!(observed, Ok(Some((there, _))) if there != text && !is_before(there))
}

/// Reads an object and its version, a second time if its bytes are not the expected ones.
async fn read_expecting(
    bucket_client: &BucketClient,
    key: &Key,
    seen: &Bytes,
) -> io::Result<There> {
    let found = read_retrying(bucket_client, key).await?;
    match &found {
        Some((there, _)) if there == seen => Ok(found),
        _ => read_retrying(bucket_client, key).await,
    }
}

async fn read_retrying(bucket_client: &BucketClient, key: &Key) -> io::Result<There> {
    match bucket_client
        .get(key, &GetOptions::default(), u64::MAX)
        .await
    {
        Ok(found) => {
            let version = bucket_client.version(&found.meta);
            Ok(Some((found.bytes, version)))
        }
        Err(request_error) if request_error.is_of_nothing() => Ok(None),
        Err(request_error) => Err(request_error.into()),
    }
}

async fn read_once(bucket_client: &BucketClient, key: &Key) -> io::Result<There> {
    match bucket_client.store.get(key).await {
        Ok(found) => {
            let version = bucket_client.version(&found.meta);
            Ok(Some((found.bytes().await.map_err(kind_of)?, version)))
        }
        Err(object_store::Error::NotFound { .. }) => Ok(None),
        Err(error) => Err(kind_of(error)),
    }
}
