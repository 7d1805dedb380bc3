//! Multipart uploads, in the protocol of each provider.
//!
//! Each part carries a checksum that the store verifies. The whole object is checked by the
//! means that each store has: S3 receives its CRC-64/NVME and size on completion, Google reports
//! the CRC-32C of the object that it made, and the names of Azure's blocks contain their
//! checksums. So no store has an object of other bytes than were sent.
//!
//! [`parts`] is S3's protocol and Google's, which has the same shapes; [`blocks`] is Azure's.

mod blocks;
mod parts;

use std::time::SystemTime;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use crc_fast::CrcAlgorithm::{Crc32Iscsi, Crc64Nvme};
use http::Method;
use http::header::{ETAG, HeaderName, HeaderValue};
use object_store::path::Path as Key;

use super::ask::{Answer, Ask};
use super::signed::Signed;
use crate::provider::Provider;
use crate::request_error::RequestError;

/// S3 and Google accept no more parts for one object; Azure accepts five times as many.
pub(crate) const PARTS_MAX: u32 = 10_000;

/// Slowest rate at which a store assembles an object by copying its parts.
const ASSEMBLED_BYTES_PER_SECOND_MIN: u64 = 32 << 20;

const OF_AMAZON: HeaderName = HeaderName::from_static("x-amz-checksum-crc64nvme");
const OF_GOOGLE: HeaderName = HeaderName::from_static("x-goog-hash");
const OF_AZURE: HeaderName = HeaderName::from_static("x-ms-content-crc64");

/// An upload that is neither completed nor aborted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenUpload {
    /// Key of the object, from the root of the bucket.
    pub key: String,
    /// The store's identifier of the upload.
    pub id: String,
    /// When it was begun, by the store's clock.
    pub initiated: SystemTime,
}

/// A part that a store has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// Counted from 1.
    pub number: u32,
    /// Its size in bytes.
    pub bytes: u64,
    /// The store's identifier of the part.
    pub tag: String,
    /// The CRC-64/NVME of its bytes, if the store reports one.
    pub crc64nvme: Option<u64>,
    /// The CRC-32C of its bytes, if they were sent with it.
    pub(crate) crc32c: Option<u32>,
}

/// An upload in progress.
#[derive(Clone, Debug)]
pub(crate) struct Begun {
    pub(crate) id: String,
    /// Whether the store verifies checksums of parts.
    pub(crate) is_checked: bool,
}

/// A checksum of a kind that a store accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Checksum {
    Crc64Nvme(u64),
    Crc32c(u32),
}

impl Checksum {
    /// The checksum that bytes are sent with. If it is no CRC-64/NVME, the digest in `known_crc` is
    /// verified here, so that bytes that have changed in memory are not sent.
    ///
    /// # Errors
    /// The bytes have changed since they were digested.
    fn of(provider: Provider, bytes: &[u8], known_crc: Option<u64>) -> Result<Checksum> {
        let crc64nvme = || crc_fast::checksum(Crc64Nvme, bytes);
        match provider {
            Provider::Amazon | Provider::Azure => {
                Ok(Checksum::Crc64Nvme(known_crc.unwrap_or_else(crc64nvme)))
            }
            Provider::Google => match known_crc {
                Some(known_crc) if known_crc != crc64nvme() => Err(RequestError::new(
                    std::io::ErrorKind::InvalidData,
                    "the bytes changed in memory before they were sent",
                )),
                _ => Ok(Checksum::Crc32c(crc32c(bytes))),
            },
        }
    }

    /// The header that carries it.
    fn header(self, provider: Provider) -> (HeaderName, HeaderValue) {
        let (name, text) = match (self, provider) {
            (Checksum::Crc64Nvme(crc), Provider::Azure) => {
                (OF_AZURE, BASE64_STANDARD.encode(crc.to_le_bytes()))
            }
            (Checksum::Crc64Nvme(crc), _) => (OF_AMAZON, checksum(crc)),
            (Checksum::Crc32c(crc), _) => {
                let text = BASE64_STANDARD.encode(crc.to_be_bytes());
                (OF_GOOGLE, format!("crc32c={text}"))
            }
        };
        (name, value(&text))
    }

    /// The checksum of an object in a response.
    fn said(provider: Provider, answer: &Answer) -> Option<Checksum> {
        match provider {
            Provider::Amazon => read_checksum(answer.header(&OF_AMAZON)?).map(Checksum::Crc64Nvme),
            Provider::Google => {
                let all = answer.headers.get_all(&OF_GOOGLE).into_iter();
                let hashes = all.filter_map(|value| value.to_str().ok());
                let text = hashes
                    .flat_map(|hashes| hashes.split(','))
                    .find_map(|hash| hash.trim().strip_prefix("crc32c="))?;
                let bytes = BASE64_STANDARD.decode(text).ok()?;
                Some(Checksum::Crc32c(u32::from_be_bytes(bytes.try_into().ok()?)))
            }
            Provider::Azure => None,
        }
    }
}

type Result<T> = std::result::Result<T, RequestError>;

impl Signed {
    /// Begins an upload, with checksums if they are wanted and the store supports them.
    pub(crate) async fn begin(&self, key: &Key, with_checksums: bool) -> Result<Begun> {
        match self.provider() {
            Provider::Azure => Ok(Signed::begin_blocks(with_checksums)),
            Provider::Amazon | Provider::Google => self.begin_parts(key, with_checksums).await,
        }
    }

    /// Puts a whole object, with its checksum if that is wanted and the store supports it. Bytes
    /// changed in transit are refused and sent again.
    pub(crate) async fn put(
        &self,
        key: &Key,
        body: Bytes,
        with_checksums: bool,
        known_crc: Option<u64>,
    ) -> Result<Part> {
        let mut ask = Ask::new(Method::PUT, key);
        if self.provider() == Provider::Azure {
            ask = Signed::put_of_blob(ask);
        }
        let checksum = match with_checksums {
            true => Some(Checksum::of(self.provider(), &body, known_crc)?),
            false => None,
        };
        let ask = ask.body(body);
        let sent = |answer: Answer| part(1, ask.body_bytes(), &answer, checksum);
        match self.put_checked(&ask, checksum, sent).await {
            Err(request_error) if checksum.is_some() && request_error.is_of_checksums() => {
                self.put_checked(&ask, None, sent).await
            }
            put => put,
        }
    }

    /// Sends a part. Bytes changed in transit are refused and sent again.
    pub(crate) async fn put_part(
        &self,
        key: &Key,
        upload: &Begun,
        number: u32,
        body: Bytes,
        known_crc: Option<u64>,
    ) -> Result<Part> {
        let checksum = match upload.is_checked {
            true => Some(Checksum::of(self.provider(), &body, known_crc)?),
            false => None,
        };
        let ask = Ask::new(Method::PUT, key).body(body);
        match self.provider() {
            Provider::Azure => self.put_block(ask, upload, number, checksum).await,
            Provider::Amazon | Provider::Google => {
                let ask = ask
                    .query("partNumber", number.to_string())
                    .query("uploadId", &upload.id);
                let sent = |answer: Answer| part(number, ask.body_bytes(), &answer, checksum);
                self.put_checked(&ask, checksum, sent).await
            }
        }
    }

    /// Puts an empty object with its own checksum, or with that of other bytes.
    pub(crate) async fn put_nothing(&self, key: &Key, is_right: bool) -> Result<()> {
        let mut ask = Ask::new(Method::PUT, key);
        if self.provider() == Provider::Azure {
            ask = Signed::put_of_blob(ask);
        }
        let wrong = u32::from(!is_right);
        let checksum = match self.provider() {
            Provider::Amazon | Provider::Azure => Checksum::Crc64Nvme(wrong.into()),
            Provider::Google => Checksum::Crc32c(wrong),
        };
        let (name, value) = checksum.header(self.provider());
        self.ask_once(&ask.header(name, value)).await.map(drop)
    }

    async fn put_checked<T>(
        &self,
        ask: &Ask<'_>,
        checksum: Option<Checksum>,
        read: impl Fn(Answer) -> Result<T>,
    ) -> Result<T> {
        let mut ask = ask.clone();
        if let Some(checksum) = checksum {
            let (name, value) = checksum.header(self.provider());
            ask = ask.header(name, value);
        }
        let mut retry = self.retry();
        loop {
            match self.ask_once(&ask).await.and_then(&read) {
                Ok(answer) => return Ok(answer),
                Err(mut request_error) => {
                    request_error.is_passing |= request_error.is_of_changed_bytes();
                    retry.back_off(request_error).await?;
                }
            }
        }
    }

    /// Completes an object from the parts of an upload, which are all of its bytes in order.
    pub(crate) async fn complete(&self, key: &Key, upload: &Begun, parts: &[Part]) -> Result<()> {
        match self.provider() {
            Provider::Azure => self.list_blocks(key, parts).await,
            Provider::Amazon | Provider::Google => self.complete_parts(key, upload, parts).await,
        }
    }

    /// Aborts an upload; one that is already gone counts as aborted.
    pub(crate) async fn abort(&self, key: &Key, id: &str) -> Result<()> {
        match self.provider() {
            // Azure has no abort: unlisted blocks expire after a week, or when an object of their
            // key is made.
            Provider::Azure => Ok(()),
            Provider::Amazon | Provider::Google => self.abort_parts(key, id).await,
        }
    }

    /// All open uploads of keys that begin with `prefix`. Azure has none: unlisted blocks expire
    /// by themselves.
    pub(crate) async fn open_uploads(&self, prefix: &str) -> Result<Vec<OpenUpload>> {
        match self.provider() {
            Provider::Azure => Ok(Vec::new()),
            Provider::Amazon | Provider::Google => self.list_uploads(prefix).await,
        }
    }

    /// The uploads of one key with the parts that the store has, newest first.
    pub(crate) async fn uploads_of(&self, key: &Key) -> Result<Vec<(String, Vec<Part>)>> {
        match self.provider() {
            Provider::Azure => self.uploads_of_blocks(key).await,
            Provider::Amazon | Provider::Google => self.uploads_of_parts(key).await,
        }
    }
}

fn part(number: u32, bytes: u64, answer: &Answer, checksum: Option<Checksum>) -> Result<Part> {
    let Some(tag) = answer.header(&ETAG) else {
        return Err(RequestError::nonsense("a part without a tag"));
    };
    Ok(Part::sent(number, bytes, tag, checksum))
}

impl Part {
    fn sent(number: u32, bytes: u64, tag: &str, checksum: Option<Checksum>) -> Part {
        let (crc64nvme, crc32c) = match checksum {
            Some(Checksum::Crc64Nvme(crc)) => (Some(crc), None),
            Some(Checksum::Crc32c(crc)) => (None, Some(crc)),
            None => (None, None),
        };
        Part {
            number,
            bytes,
            tag: tag.to_owned(),
            crc64nvme,
            crc32c,
        }
    }
}

pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
    // A checksum of 32 bits is in the lower half.
    crc_fast::checksum(Crc32Iscsi, bytes) as u32
}

/// A CRC-64/NVME in S3's notation.
fn checksum(crc: u64) -> String {
    BASE64_STANDARD.encode(crc.to_be_bytes())
}

fn read_checksum(text: &str) -> Option<u64> {
    let bytes = BASE64_STANDARD.decode(text).ok()?;
    Some(u64::from_be_bytes(bytes.try_into().ok()?))
}

fn value(text: &str) -> HeaderValue {
    HeaderValue::from_str(text).expect("it is of letters and digits")
}

fn parse<T: for<'de> serde::Deserialize<'de>>(body: &[u8]) -> Result<T> {
    let text =
        std::str::from_utf8(body).map_err(|error| RequestError::nonsense(&error.to_string()))?;
    // Azure's responses begin with a byte order mark.
    let text = text.trim_start_matches('\u{feff}');
    quick_xml::de::from_str(text).map_err(|error| RequestError::nonsense(&error.to_string()))
}
