//! Servers of the stores' protocols, and proxies between them and the tests.

#![allow(dead_code, reason = "no test needs all of it")]

pub(crate) mod azurite;
pub(crate) mod contract;
pub(crate) mod fake;
pub(crate) mod proxy;
pub(crate) mod server;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use penstock_io::buffer::Memory;
use penstock_io::engine::{Completion, Op, OpKind};
use penstock_io::file::{Direct, File};
use penstock_io::file_system::{Change, FileSystem};
use penstock_object::{Address, Credentials, Keys, Objects, Remote};

pub(crate) const BUCKET: &str = "bucket";
pub(crate) const MIB: usize = 1 << 20;

/// Bytes of a part in these tests: the smallest that S3 allows.
pub(crate) const PART_BYTES: usize = 5 * MIB;

pub(crate) fn skip(test: &str, reason: &str) {
    // Past the capture of the test harness, because a skipped promise must be visible.
    let _ = writeln!(std::io::stderr(), "skipped {test}: {reason}");
}

pub(crate) fn at(key: &str) -> PathBuf {
    PathBuf::from(format!("s3://{BUCKET}/{key}"))
}

/// The key of the servers in these tests.
pub(crate) fn key(secret: &str) -> Credentials {
    Credentials::Given(Keys {
        id: "key".to_owned(),
        secret: secret.to_owned(),
        token: None,
        expires: None,
    })
}

/// A bucket at an endpoint; the options in `remote` take precedence.
pub(crate) fn objects(endpoint: &str, remote: Remote) -> Objects {
    let or = |given: Option<String>, other: &str| given.or_else(|| Some(other.to_owned()));
    let remote = Remote {
        endpoint: or(remote.endpoint, endpoint),
        region: or(remote.region, "us-east-1"),
        credentials: remote.credentials.or_else(|| Some(key("secret"))),
        part_bytes: remote.part_bytes.or(Some(PART_BYTES)),
        ..remote
    };
    let address = Address::of(&at("")).unwrap().unwrap();
    Objects::open(address, &remote).unwrap()
}

/// Bytes that differ at every place.
pub(crate) fn bytes(len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8)
        .collect()
}

/// Runs operations on a file, all at once.
pub(crate) fn transfer(objects: &Objects, file: &Arc<File>, kinds: Vec<OpKind>) -> Vec<Completion> {
    let mut engine = objects.engine(kinds.len()).unwrap().engine;
    let all = kinds.len();
    for (token, kind) in (0..).zip(kinds) {
        let file = Arc::clone(file);
        engine.submit(Op { token, file, kind }).unwrap();
    }
    let mut completed = Vec::new();
    engine.poll(all, None, &mut completed).unwrap();
    completed.sort_by_key(|completion| completion.token);
    completed
}

pub(crate) fn write_of(offset: usize, bytes: &[u8]) -> OpKind {
    let mut buf = Memory::allocate(bytes.len()).unwrap().share().1;
    buf.as_mut_slice().copy_from_slice(bytes);
    let offset = offset as u64;
    OpKind::Write { offset, buf }
}

/// Sends parts; returns the first error.
pub(crate) fn send(
    objects: &Objects,
    file: &Arc<File>,
    bytes: &[u8],
    parts: impl IntoIterator<Item = usize>,
) -> std::io::Result<()> {
    let write = |part: usize| {
        let end = bytes.len().min((part + 1) * PART_BYTES);
        write_of(part * PART_BYTES, &bytes[part * PART_BYTES..end])
    };
    let kinds = parts.into_iter().map(write).collect();
    let completed = transfer(objects, file, kinds);
    completed
        .into_iter()
        .try_for_each(|completion| completion.result.map(drop))
}

/// Uploads an object in parts.
pub(crate) fn upload(objects: &Objects, path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let file = Arc::new(objects.create(path, Direct::Off).unwrap());
    send(objects, &file, bytes, 0..bytes.len().div_ceil(PART_BYTES))?;
    finish(objects, &file)
}

/// Completes the upload of a file.
pub(crate) fn finish(objects: &Objects, file: &File) -> std::io::Result<()> {
    let synced = objects.change(Change::SyncData(file));
    synced.map_err(source)
}

/// The store's error within an error of the I/O layer.
pub(crate) fn source(error: penstock_io::Error) -> std::io::Error {
    match error {
        penstock_io::Error::Storage { source, .. } => source,
        error => std::io::Error::other(error.to_string()),
    }
}

/// Reads an object through the engine.
pub(crate) fn download(objects: &Objects, path: &Path) -> std::io::Result<Vec<u8>> {
    let file = Arc::new(objects.files().open(path, Direct::Off).map_err(source)?);
    let len = file.len().map_err(source)? as usize;
    let read = |offset: usize| OpKind::Read {
        offset: offset as u64,
        buf: Memory::allocate(PART_BYTES.min(len - offset))
            .unwrap()
            .share()
            .1,
    };
    let kinds = (0..len).step_by(PART_BYTES).map(read).collect();
    let mut read = Vec::new();
    for completion in transfer(objects, &file, kinds) {
        let filled = completion.result?;
        read.extend_from_slice(&completion.buf.unwrap().as_slice()[..filled]);
    }
    Ok(read)
}
