//! Small objects that are put on a condition, and what came of it.
//!
//! A store takes an object only where there is none by its key (`If-None-Match: *`), or only in the
//! place of the one that was seen (`If-Match`). Its answer may be lost, or be an error to a request that
//! it has carried out all the same, or carries out later. So anything but a yes is decided by a look at
//! what is there:
//!
//! - What was put: done, by whichever request. It carries an id that nobody else draws.
//! - Something else: refused, and a request of ours that is still on its way will be too. Where it was to
//!   take the place of another one, and a request may have been carried out, it may also have done so
//!   and have been replaced in turn: that is undecided.
//! - Something else is believed when it is seen twice: bytes may change on their way.
//! - What was there before: that is not final. The same bytes are put again; whichever request comes
//!   first counts, and the others change nothing.
//!
//! Each request is sent once, as the client's own repetitions would hide which of them was refused.
//! Where nothing decides for as long as the caller has patience, the error has no kind that a store
//! gives for a refusal ([`io::ErrorKind::Other`]), and what was sent may yet be carried out: for as long
//! as its signature is good, 15 minutes on S3.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use object_store::path::Path as Key;
use object_store::{GetOptions, ObjectStoreExt, PutMode, PutOptions, PutPayload};
use tokio::time::Instant;

use crate::kin::{Kin, kind_of};
use crate::provider::only_over;
use crate::tries::first_pause;

/// Between two repetitions, each of which waits twice as long as the one before.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Where an object may be put.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    /// Wherever its key says.
    Any,
    /// Where there is none.
    Free,
    /// Where there is one with these bytes. With its version nobody looks what is there before it is put.
    Of(Bytes, Option<String>),
}

/// Puts a text under a key, if its place lets it.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`] where something else is there, [`io::ErrorKind::NotFound`] where
/// nothing is whose place it was to take, other kinds but [`io::ErrorKind::Other`] for other refusals,
/// and that where nobody knows.
pub(crate) async fn put(kin: &Kin, key: &Key, text: Bytes, place: Place) -> io::Result<()> {
    let mut version = None;
    match &place {
        Place::Any => {
            return Ok(kin.put(key, text).await?);
        }
        Place::Free => {}
        Place::Of(_, Some(known)) => version = Some(known.clone()),
        Place::Of(seen, None) => match look(kin, key, seen).await? {
            Some((there, found)) if there == seen => version = found,
            other => return Err(refused(other.is_some(), &place, false)),
        },
    }
    let begun = Instant::now();
    let mut pause = first_pause(kin.patience);
    // Whether a request may have been carried out, or may yet be.
    let mut is_open = false;
    loop {
        let options = PutOptions::from(mode(&place, version.clone())?);
        let payload = PutPayload::from(text.clone());
        let error = match kin.store.put_opts(key, payload, options).await {
            Ok(_) => return Ok(()),
            Err(error) => kind_of(error),
        };
        match error.kind() {
            io::ErrorKind::AlreadyExists => {}
            kind if is_refusal(kind) && !is_open => return Err(error),
            kind => is_open |= !is_refusal(kind),
        }
        let mut looked = look_once(kin, key).await;
        if is_other(&looked, &text, &place) {
            looked = look_once(kin, key).await;
        }
        match (looked, &place) {
            (Ok(Some((there, _))), _) if there == text => return Ok(()),
            (Ok(Some((there, found))), Place::Of(seen, _)) if there == seen => version = found,
            (Ok(None), Place::Free) | (Err(_), _) => {}
            (Ok(other), _) => return Err(refused(other.is_some(), &place, is_open)),
        }
        if begun.elapsed() >= kin.patience {
            return Err(undecided(&error));
        }
        tokio::time::sleep(pause).await;
        pause = PAUSE_MAX.min(2 * pause);
    }
}

/// Removes a small object, if it still has these bytes. With its version nobody looks at it before.
///
/// # Errors
/// [`io::ErrorKind::AlreadyExists`] where it has others, [`io::ErrorKind::NotFound`] where it is gone, or
/// has others since somebody looked.
pub(crate) async fn remove(
    kin: &Kin,
    key: &Key,
    seen: &Bytes,
    version: Option<&str>,
) -> io::Result<()> {
    if version.is_some() {
        return kin.signed.delete_if(key, version).await;
    }
    match look(kin, key, seen).await? {
        Some((there, version)) if there == seen => {
            kin.signed.delete_if(key, version.as_deref()).await
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

/// Whether the store has said that it does not do what it was asked for.
fn is_refusal(kind: io::ErrorKind) -> bool {
    use io::ErrorKind::{InvalidInput, NotFound, PermissionDenied, Unsupported};
    matches!(
        kind,
        NotFound | PermissionDenied | Unsupported | InvalidInput
    )
}

/// What it is that something else is there, or nothing.
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

/// Whether a look has shown something that is neither what was put nor what was there before.
fn is_other(looked: &io::Result<There>, text: &Bytes, place: &Place) -> bool {
    let is_before = |there: &Bytes| matches!(place, Place::Of(seen, _) if there == seen);
    matches!(looked, Ok(Some((there, _))) if there != text && !is_before(there))
}

/// Looks at an object and its version, twice where it is not what somebody has seen.
async fn look(kin: &Kin, key: &Key, seen: &Bytes) -> io::Result<There> {
    let found = look_as_long_as_it_takes(kin, key).await?;
    match &found {
        Some((there, _)) if there == seen => Ok(found),
        _ => look_as_long_as_it_takes(kin, key).await,
    }
}

async fn look_as_long_as_it_takes(kin: &Kin, key: &Key) -> io::Result<There> {
    match kin.get(key, &GetOptions::default(), u64::MAX).await {
        Ok(found) => {
            let version = kin.version(&found.meta);
            Ok(Some((found.bytes, version)))
        }
        Err(refusal) if refusal.is_of_nothing() => Ok(None),
        Err(refusal) => Err(refusal.into()),
    }
}

async fn look_once(kin: &Kin, key: &Key) -> io::Result<There> {
    match kin.store.get(key).await {
        Ok(found) => {
            let version = kin.version(&found.meta);
            Ok(Some((found.bytes().await.map_err(kind_of)?, version)))
        }
        Err(object_store::Error::NotFound { .. }) => Ok(None),
        Err(error) => Err(kind_of(error)),
    }
}
