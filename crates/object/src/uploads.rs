//! Uploads in parts: requests and answers of S3, in its own words.
//!
//! A part is sent with the CRC-64/NVME of its bytes, and the end of the upload asserts that of the whole
//! object and its size, so a store makes no object of anything but what was sent. Whether a store knows
//! these checksums it says when the upload begins; to one that does not, none is sent.

use std::io;
use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use crc_fast::CrcAlgorithm::Crc64Nvme;
use http::Method;
use http::header::{CONTENT_LENGTH, ETAG, HeaderName, HeaderValue};
use object_store::path::Path as Key;
use serde::{Deserialize, Serialize};

use crate::refusal::Refusal;
use crate::signed::{Ask, Signed};

/// S3 takes no more parts of one object.
pub(crate) const PARTS_MAX: u32 = 10_000;

/// What a store moves in a second at least that puts the parts of an object together by copying them.
const ASSEMBLED_BYTES_PER_SECOND_MIN: u64 = 32 << 20;

const ALGORITHM: HeaderName = HeaderName::from_static("x-amz-checksum-algorithm");
pub(crate) const CHECKSUM: HeaderName = HeaderName::from_static("x-amz-checksum-crc64nvme");
const CHECKSUM_MODE: HeaderName = HeaderName::from_static("x-amz-checksum-mode");
const CHECKSUM_TYPE: HeaderName = HeaderName::from_static("x-amz-checksum-type");
const OBJECT_SIZE: HeaderName = HeaderName::from_static("x-amz-mp-object-size");

const CRC64NVME: HeaderValue = HeaderValue::from_static("CRC64NVME");
const ENABLED: HeaderValue = HeaderValue::from_static("ENABLED");
const FULL_OBJECT: HeaderValue = HeaderValue::from_static("FULL_OBJECT");

/// An upload that was begun and is neither an object yet nor given up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenUpload {
    /// The key that it is of, from the root of the bucket.
    pub key: String,
    /// What the store calls it.
    pub id: String,
    /// When it was begun, by the store's clock.
    pub initiated: SystemTime,
}

/// A part that a store has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    /// From 1.
    pub number: u32,
    /// How many bytes it has.
    pub bytes: u64,
    /// What the store calls it.
    pub tag: String,
    /// The CRC-64/NVME of its bytes, where the store knows such.
    pub crc64nvme: Option<u64>,
}

/// An upload that is under way.
#[derive(Clone, Debug)]
pub(crate) struct Begun {
    pub(crate) id: String,
    /// Whether the store checks what comes.
    pub(crate) is_checked: bool,
}

type Result<T> = std::result::Result<T, Refusal>;

impl Signed {
    /// Begins an upload, with checksums if they are wanted and the store knows them.
    pub(crate) async fn begin(&self, key: &Key, with_checksums: bool) -> Result<Begun> {
        let plain = Ask::new(Method::POST, key).query("uploads", "");
        let checked = plain
            .clone()
            .header(ALGORITHM, CRC64NVME)
            .header(CHECKSUM_TYPE, FULL_OBJECT);
        let checked = match with_checksums {
            true => match self.ask(&checked).await {
                Err(refusal) if refusal.is_of_checksums() => None,
                answer => Some(answer?),
            },
            false => None,
        };
        let (answer, is_asked) = match checked {
            Some(answer) => (answer, true),
            None => (self.ask(&plain).await?, false),
        };
        let algorithm = answer.header(&ALGORITHM);
        let is_checked = is_asked && algorithm.is_some_and(|name| CRC64NVME == name);
        let InitiateMultipartUploadResult { upload_id: id } = parse(&answer.body)?;
        Ok(Begun { id, is_checked })
    }

    /// Puts an object as a whole, with its checksum if it has one and the store knows such. What changes
    /// on its way is refused, and sent again.
    pub(crate) async fn put(&self, key: &Key, body: Bytes, crc64nvme: Option<u64>) -> Result<Part> {
        let ask = Ask::new(Method::PUT, key).body(body);
        match self.put_checked(&ask, 1, crc64nvme).await {
            Err(refusal) if crc64nvme.is_some() && refusal.is_of_checksums() => {
                self.put_checked(&ask, 1, None).await
            }
            put => put,
        }
    }

    /// Sends a part. What changes on its way is refused, and sent again.
    pub(crate) async fn put_part(
        &self,
        key: &Key,
        upload: &Begun,
        number: u32,
        body: Bytes,
        crc64nvme: Option<u64>,
    ) -> Result<Part> {
        let ask = Ask::new(Method::PUT, key)
            .query("partNumber", number.to_string())
            .query("uploadId", &upload.id)
            .body(body);
        self.put_checked(&ask, number, crc64nvme).await
    }

    async fn put_checked(
        &self,
        ask: &Ask<'_>,
        number: u32,
        crc64nvme: Option<u64>,
    ) -> Result<Part> {
        let mut ask = ask.clone();
        if let Some(crc) = crc64nvme {
            ask = ask.header(CHECKSUM, value(&checksum(crc)));
        }
        let mut tries = self.tries();
        let answer = loop {
            match self.ask_once(&ask).await {
                Ok(answer) => break answer,
                Err(mut refusal) => {
                    refusal.is_passing |= refusal.is_of_changed_bytes();
                    tries.again(refusal).await?;
                }
            }
        };
        let Some(tag) = answer.header(&ETAG) else {
            return Err(unexpected("a part without a tag"));
        };
        Ok(Part {
            number,
            bytes: ask.body_bytes(),
            tag: tag.to_owned(),
            crc64nvme,
        })
    }

    /// Makes an object of the parts of an upload, which are all of its bytes in order.
    pub(crate) async fn complete(&self, key: &Key, upload: &Begun, parts: &[Part]) -> Result<()> {
        let bytes = parts.iter().map(|part| part.bytes).sum::<u64>();
        let crc = match upload.is_checked {
            true => whole(parts),
            false => None,
        };
        let body = CompleteMultipartUpload::of(parts, crc.is_some());
        let body = quick_xml::se::to_string(&body).expect("it is of strings and numbers");
        let mut ask = Ask::new(Method::POST, key)
            .query("uploadId", &upload.id)
            .work(Duration::from_secs(bytes / ASSEMBLED_BYTES_PER_SECOND_MIN))
            .body(body.into());
        if let Some(crc) = crc {
            ask = ask
                .header(CHECKSUM, value(&checksum(crc)))
                .header(CHECKSUM_TYPE, FULL_OBJECT)
                .header(OBJECT_SIZE, value(&bytes.to_string()));
        }
        let mut tries = self.tries();
        loop {
            let refusal = match self.ask_once(&ask).await {
                Ok(answer) => match Refusal::within(&answer.body) {
                    Some(refusal) => refusal,
                    None if parse::<CompleteMultipartUploadResult>(&answer.body).is_ok() => {
                        return Ok(());
                    }
                    None => {
                        let text = "the store does not say that it has all of the object";
                        Refusal::passing(io::ErrorKind::InvalidData, text)
                    }
                },
                Err(refusal) => refusal,
            };
            // Perhaps by an earlier request of ours, whose answer was lost.
            if refusal.is_of_no_upload() && self.is_there(key, bytes, crc).await? {
                return Ok(());
            }
            tries.again(refusal).await?;
        }
    }

    /// Whether there is an object of so many bytes with this checksum, where the store has one of it.
    pub(crate) async fn is_there(&self, key: &Key, bytes: u64, crc: Option<u64>) -> Result<bool> {
        let ask = Ask::new(Method::HEAD, key).header(CHECKSUM_MODE, ENABLED);
        let answer = match self.ask(&ask).await {
            Ok(answer) => answer,
            Err(refusal) if refusal.is_of_nothing() => return Ok(false),
            Err(refusal) => return Err(refusal),
        };
        let has_bytes = answer.header(&CONTENT_LENGTH) == Some(&bytes.to_string());
        let found = answer.header(&CHECKSUM);
        let is_same = crc
            .zip(found)
            .is_none_or(|(crc, found)| checksum(crc) == found);
        Ok(has_bytes && is_same)
    }

    /// Gives up an upload; that it is gone already is as good.
    pub(crate) async fn abort(&self, key: &Key, id: &str) -> Result<()> {
        let ask = Ask::new(Method::DELETE, key).query("uploadId", id);
        match self.ask(&ask).await {
            Err(refusal) if !refusal.is_of_no_upload() => Err(refusal),
            _ => Ok(()),
        }
    }

    /// All uploads that are open of keys that begin with `prefix`.
    pub(crate) async fn open_uploads(&self, prefix: &str) -> Result<Vec<OpenUpload>> {
        let mut uploads = Vec::new();
        let bucket = Key::default();
        let first = Ask::new(Method::GET, &bucket)
            .query("uploads", "")
            .query("prefix", prefix);
        let mut ask = first.clone();
        loop {
            let page: ListMultipartUploadsResult = parse(&self.ask(&ask).await?.body)?;
            for upload in page.upload {
                uploads.push(upload.try_into()?);
            }
            let (true, Some(key)) = (page.is_truncated, page.next_key_marker) else {
                return Ok(uploads);
            };
            let id = page.next_upload_id_marker.unwrap_or_default();
            ask = first
                .clone()
                .query("key-marker", key)
                .query("upload-id-marker", id);
        }
    }

    /// The parts that the store has of an upload, in order.
    pub(crate) async fn parts(&self, key: &Key, id: &str) -> Result<Vec<Part>> {
        let mut parts = Vec::new();
        let first = Ask::new(Method::GET, key).query("uploadId", id);
        let mut ask = first.clone();
        loop {
            let page: ListPartsResult = parse(&self.ask(&ask).await?.body)?;
            for part in page.part {
                parts.push(part.try_into()?);
            }
            let (true, Some(marker)) = (page.is_truncated, page.next_part_number_marker) else {
                return Ok(parts);
            };
            ask = first.clone().query("part-number-marker", marker);
        }
    }
}

/// The checksum of an object from those of its parts; `None` where one has none.
fn whole(parts: &[Part]) -> Option<u64> {
    let mut whole = crc_fast::checksum(Crc64Nvme, &[]);
    for part in parts {
        whole = crc_fast::checksum_combine(Crc64Nvme, whole, part.crc64nvme?, part.bytes);
    }
    Some(whole)
}

/// A checksum as S3 writes it.
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

fn parse<T: for<'de> Deserialize<'de>>(body: &[u8]) -> Result<T> {
    let text = std::str::from_utf8(body).map_err(|error| unexpected(&error.to_string()))?;
    quick_xml::de::from_str(text).map_err(|error| unexpected(&error.to_string()))
}

fn unexpected(what: &str) -> Refusal {
    let text = format!("the store does not answer as S3 does: {what}");
    Refusal::new(io::ErrorKind::InvalidData, text)
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct InitiateMultipartUploadResult {
    upload_id: String,
}

/// Without a tag it is none.
#[derive(Deserialize)]
struct CompleteMultipartUploadResult {
    #[serde(rename = "ETag")]
    _e_tag: String,
}

#[derive(Serialize)]
struct CompleteMultipartUpload<'a> {
    #[serde(rename = "@xmlns")]
    xmlns: &'static str,
    #[serde(rename = "Part")]
    parts: Vec<CompletePart<'a>>,
}

impl CompleteMultipartUpload<'_> {
    fn of(parts: &[Part], is_checked: bool) -> CompleteMultipartUpload<'_> {
        let part = |part: &Part| part.crc64nvme.filter(|_| is_checked).map(checksum);
        let parts = parts.iter().map(|sent| CompletePart {
            part_number: sent.number,
            e_tag: &sent.tag,
            checksum: part(sent),
        });
        CompleteMultipartUpload {
            xmlns: "http://s3.amazonaws.com/doc/2006-03-01/",
            parts: parts.collect(),
        }
    }
}

#[derive(Serialize)]
struct CompletePart<'a> {
    #[serde(rename = "ChecksumCRC64NVME", skip_serializing_if = "Option::is_none")]
    checksum: Option<String>,
    #[serde(rename = "ETag")]
    e_tag: &'a str,
    #[serde(rename = "PartNumber")]
    part_number: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ListMultipartUploadsResult {
    #[serde(default)]
    is_truncated: bool,
    next_key_marker: Option<String>,
    next_upload_id_marker: Option<String>,
    #[serde(default)]
    upload: Vec<ListedUpload>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ListedUpload {
    key: String,
    upload_id: String,
    initiated: String,
}

impl TryFrom<ListedUpload> for OpenUpload {
    type Error = Refusal;

    fn try_from(listed: ListedUpload) -> Result<OpenUpload> {
        let initiated: jiff::Timestamp = listed
            .initiated
            .parse()
            .map_err(|error: jiff::Error| unexpected(&error.to_string()))?;
        Ok(OpenUpload {
            key: listed.key,
            id: listed.upload_id,
            initiated: initiated.into(),
        })
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ListPartsResult {
    #[serde(default)]
    is_truncated: bool,
    next_part_number_marker: Option<String>,
    #[serde(default)]
    part: Vec<ListedPart>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ListedPart {
    part_number: u32,
    size: u64,
    #[serde(rename = "ETag")]
    e_tag: String,
    #[serde(rename = "ChecksumCRC64NVME")]
    checksum: Option<String>,
}

impl TryFrom<ListedPart> for Part {
    type Error = Refusal;

    fn try_from(listed: ListedPart) -> Result<Part> {
        let crc64nvme = match listed.checksum.as_deref() {
            None | Some("") => None,
            Some(text) => Some(read_checksum(text).ok_or_else(|| unexpected("its checksum"))?),
        };
        Ok(Part {
            number: listed.part_number,
            bytes: listed.size,
            tag: listed.e_tag,
            crc64nvme,
        })
    }
}
