//! Multipart uploads of S3, and of Google's XML API.
//!
//! An S3-compatible store reports when an upload begins whether it supports checksums; a store
//! that does not is sent none. Google verifies the checksums that it receives in any case.

use std::io;
use std::time::Duration;

use crc_fast::CrcAlgorithm::{Crc32Iscsi, Crc64Nvme};
use http::Method;
use http::header::{CONTENT_LENGTH, HeaderName, HeaderValue};
use object_store::path::Path as Key;
use serde::{Deserialize, Serialize};

use super::{
    ASSEMBLED_BYTES_PER_SECOND_MIN, Begun, Checksum, OpenUpload, Part, Result, checksum, parse,
    read_checksum, value,
};
use crate::client::ask::{Answer, Ask};
use crate::client::signed::Signed;
use crate::provider::Provider;
use crate::request_error::RequestError;

const ALGORITHM: HeaderName = HeaderName::from_static("x-amz-checksum-algorithm");
const CHECKSUM_MODE: HeaderName = HeaderName::from_static("x-amz-checksum-mode");
const CHECKSUM_TYPE: HeaderName = HeaderName::from_static("x-amz-checksum-type");
const OBJECT_SIZE: HeaderName = HeaderName::from_static("x-amz-mp-object-size");

const CRC64NVME: HeaderValue = HeaderValue::from_static("CRC64NVME");
const ENABLED: HeaderValue = HeaderValue::from_static("ENABLED");
const FULL_OBJECT: HeaderValue = HeaderValue::from_static("FULL_OBJECT");

impl Signed {
    pub(super) async fn begin_parts(&self, key: &Key, with_checksums: bool) -> Result<Begun> {
        let plain = Ask::new(Method::POST, key).query("uploads", "");
        let is_of_amazon = self.provider() == Provider::Amazon;
        let checked = plain
            .clone()
            .header(ALGORITHM, CRC64NVME)
            .header(CHECKSUM_TYPE, FULL_OBJECT);
        let begun = |answer: Answer| {
            let is_known = answer.header(&ALGORITHM) == CRC64NVME.to_str().ok();
            let InitiateMultipartUploadResult { upload_id: id } = parse(&answer.body)?;
            Ok((id, is_known))
        };
        let checked = match with_checksums && is_of_amazon {
            true => match self.ask_for(&checked, begun).await {
                Err(request_error) if request_error.is_of_checksums() => None,
                answer => Some(answer?),
            },
            false => None,
        };
        let ((id, is_known), is_asked) = match checked {
            Some(begun) => (begun, true),
            None => (self.ask_for(&plain, begun).await?, false),
        };
        let is_checked = match is_of_amazon {
            true => is_asked && is_known,
            false => with_checksums,
        };
        Ok(Begun { id, is_checked })
    }

    pub(super) async fn complete_parts(
        &self,
        key: &Key,
        upload: &Begun,
        parts: &[Part],
    ) -> Result<()> {
        let bytes = parts.iter().map(|part| part.bytes).sum::<u64>();
        let whole = match upload.is_checked {
            true => whole(parts),
            false => None,
        };
        let known_crc = match whole {
            Some(Checksum::Crc64Nvme(crc)) => Some(crc),
            _ => None,
        };
        let body = CompleteMultipartUpload::of(parts, known_crc.is_some());
        let body = quick_xml::se::to_string(&body).expect("it is of strings and numbers");
        let mut ask = Ask::new(Method::POST, key)
            .query("uploadId", &upload.id)
            .work(Duration::from_secs(bytes / ASSEMBLED_BYTES_PER_SECOND_MIN))
            .body(body.into());
        if let Some(crc) = known_crc {
            let (name, value_) = Checksum::Crc64Nvme(crc).header(self.provider());
            ask = ask
                .header(name, value_)
                .header(CHECKSUM_TYPE, FULL_OBJECT)
                .header(OBJECT_SIZE, value(&bytes.to_string()));
        }
        let mut retry = self.retry();
        loop {
            let request_error = match self.ask_once(&ask).await {
                Ok(answer) => match RequestError::within(self.provider(), &answer.body) {
                    Some(request_error) => request_error,
                    None if parse::<CompleteMultipartUploadResult>(&answer.body).is_ok() => {
                        return match whole {
                            // The request did not contain the expected checksum, so the object's
                            // is read.
                            Some(Checksum::Crc32c(_)) => self.check_made(key, bytes, whole).await,
                            _ => Ok(()),
                        };
                    }
                    None => {
                        let text = "the store does not say that it has all of the object";
                        RequestError::passing(io::ErrorKind::InvalidData, text)
                    }
                },
                Err(request_error) => request_error,
            };
            // An earlier request of ours may have completed it, and its response was lost.
            if request_error.is_of_no_upload() && self.has_made(key, bytes, whole).await? {
                return Ok(());
            }
            retry.back_off(request_error).await?;
        }
    }

    /// Fails, and removes the object, if it is not made of the parts that were sent.
    async fn check_made(&self, key: &Key, bytes: u64, whole: Option<Checksum>) -> Result<()> {
        if self.has_made(key, bytes, whole).await? {
            return Ok(());
        }
        // No one has read it: its name was drawn for this save.
        let _ = self.delete(key).await;
        Err(RequestError::of_other_bytes())
    }

    /// Whether an object of `bytes` bytes exists with this CRC-64/NVME, if the store reports one.
    pub(crate) async fn is_there(&self, key: &Key, bytes: u64, crc: Option<u64>) -> Result<bool> {
        self.has_whole(key, bytes, crc.map(Checksum::Crc64Nvme))
            .await
    }

    /// As [`has_whole`](Signed::has_whole). A "no" would discard the upload and may be an
    /// unintelligible response, so it is retried.
    async fn has_made(&self, key: &Key, bytes: u64, whole: Option<Checksum>) -> Result<bool> {
        let mut retry = self.retry();
        while !self.has_whole(key, bytes, whole).await? {
            let none = RequestError::new(io::ErrorKind::NotFound, "there is no such object");
            if retry.back_off_for_known(none).await.is_err() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    async fn has_whole(&self, key: &Key, bytes: u64, whole: Option<Checksum>) -> Result<bool> {
        let mut ask = Ask::new(Method::HEAD, key);
        if self.provider() == Provider::Amazon {
            ask = ask.header(CHECKSUM_MODE, ENABLED);
        }
        let answer = match self.ask(&ask).await {
            Ok(answer) => answer,
            Err(request_error) if request_error.is_of_nothing() => return Ok(false),
            Err(request_error) => return Err(request_error),
        };
        let has_bytes = answer.header(&CONTENT_LENGTH) == Some(&bytes.to_string());
        let is_same = match (whole, Checksum::said(self.provider(), &answer)) {
            (Some(Checksum::Crc64Nvme(wanted)), Some(Checksum::Crc64Nvme(found))) => {
                wanted == found
            }
            (Some(Checksum::Crc32c(wanted)), Some(Checksum::Crc32c(found))) => wanted == found,
            // Checksums of different kinds cannot be compared.
            _ => true,
        };
        Ok(has_bytes && is_same)
    }

    pub(super) async fn abort_parts(&self, key: &Key, id: &str) -> Result<()> {
        let ask = Ask::new(Method::DELETE, key).query("uploadId", id);
        match self.ask(&ask).await {
            Err(request_error) if !request_error.is_of_no_upload() => Err(request_error),
            _ => Ok(()),
        }
    }

    pub(super) async fn list_uploads(&self, prefix: &str) -> Result<Vec<OpenUpload>> {
        let mut uploads = Vec::new();
        let bucket = Key::default();
        let first = Ask::new(Method::GET, &bucket)
            .query("uploads", "")
            .query("prefix", prefix);
        let mut ask = first.clone();
        loop {
            let read = |answer: Answer| {
                let page: ListMultipartUploadsResult = parse(&answer.body)?;
                let next = page.next_key_marker.filter(|_| page.is_truncated);
                let found = page.upload.into_iter().map(OpenUpload::try_from);
                Ok((
                    found.collect::<Result<Vec<_>>>()?,
                    next,
                    page.next_upload_id_marker,
                ))
            };
            let (found, next, id) = self.ask_for(&ask, read).await?;
            uploads.extend(found);
            let Some(key) = next else {
                return Ok(uploads);
            };
            let id = id.unwrap_or_default();
            ask = first
                .clone()
                .query("key-marker", key)
                .query("upload-id-marker", id);
        }
    }

    /// The parts that the store has of an upload, in order.
    async fn parts(&self, key: &Key, id: &str) -> Result<Vec<Part>> {
        let mut parts = Vec::new();
        let first = Ask::new(Method::GET, key).query("uploadId", id);
        let mut ask = first.clone();
        loop {
            let read = |answer: Answer| {
                let page: ListPartsResult = parse(&answer.body)?;
                let next = page.next_part_number_marker.filter(|_| page.is_truncated);
                let found = page.part.into_iter().map(Part::try_from);
                Ok((found.collect::<Result<Vec<_>>>()?, next))
            };
            let (found, next) = self.ask_for(&ask, read).await?;
            parts.extend(found);
            let Some(marker) = next else {
                return Ok(parts);
            };
            ask = first.clone().query("part-number-marker", marker);
        }
    }

    pub(super) async fn uploads_of_parts(&self, key: &Key) -> Result<Vec<(String, Vec<Part>)>> {
        let mut uploads = self.list_uploads(key.as_ref()).await?;
        // Other keys may begin with the prefix too.
        uploads.retain(|upload| upload.key == key.as_ref());
        uploads.sort_by_key(|upload| std::cmp::Reverse(upload.initiated));
        let mut found = Vec::with_capacity(uploads.len());
        for OpenUpload { id, .. } in uploads {
            match self.parts(key, &id).await {
                // The upload was ended since.
                Err(request_error) if request_error.is_of_no_upload() => {}
                parts => found.push((id, parts?)),
            }
        }
        Ok(found)
    }
}

/// The checksum of an object, combined from those of its parts; `None` if one has none.
fn whole(parts: &[Part]) -> Option<Checksum> {
    if parts.first()?.crc32c.is_some() {
        let mut whole = crc_fast::checksum(Crc32Iscsi, &[]);
        for part in parts {
            let crc = u64::from(part.crc32c?);
            whole = crc_fast::checksum_combine(Crc32Iscsi, whole, crc, part.bytes);
        }
        return Some(Checksum::Crc32c(whole as u32));
    }
    let mut whole = crc_fast::checksum(Crc64Nvme, &[]);
    for part in parts {
        whole = crc_fast::checksum_combine(Crc64Nvme, whole, part.crc64nvme?, part.bytes);
    }
    Some(Checksum::Crc64Nvme(whole))
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct InitiateMultipartUploadResult {
    upload_id: String,
}

/// A completion response must contain an ETag.
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
    type Error = RequestError;

    fn try_from(listed: ListedUpload) -> Result<OpenUpload> {
        let initiated: jiff::Timestamp = listed
            .initiated
            .parse()
            .map_err(|error: jiff::Error| RequestError::nonsense(&error.to_string()))?;
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
    type Error = RequestError;

    fn try_from(listed: ListedPart) -> Result<Part> {
        let crc64nvme = match listed.checksum.as_deref() {
            None | Some("") => None,
            Some(text) => {
                Some(read_checksum(text).ok_or_else(|| RequestError::nonsense("its checksum"))?)
            }
        };
        Ok(Part {
            number: listed.part_number,
            bytes: listed.size,
            tag: listed.e_tag,
            crc64nvme,
            crc32c: None,
        })
    }
}
