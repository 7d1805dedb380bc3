//! Blocks of Azure: <https://learn.microsoft.com/rest/api/storageservices/put-block>.
//!
//! An upload has no beginning: blocks wait under an object's key until a list of their names
//! makes the object. So a block's name contains all that resuming needs: its upload, its number,
//! and the checksum that the store has verified.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use http::Method;
use http::header::{HeaderName, HeaderValue};
use object_store::path::Path as Key;
use serde::{Deserialize, Serialize};

use super::{ASSEMBLED_BYTES_PER_SECOND_MIN, Begun, Checksum, Part, Result, parse};
use crate::client::ask::{Answer, Ask};
use crate::client::signed::Signed;

const BLOB_TYPE: HeaderName = HeaderName::from_static("x-ms-blob-type");
const BLOCK_BLOB: HeaderValue = HeaderValue::from_static("BlockBlob");

/// Checksum field of a block sent without one; all block names of an object must have the same
/// length.
const UNCHECKED: &str = "----------------";

/// The name of a block.
struct Name {
    upload: String,
    number: u32,
    crc64nvme: Option<u64>,
}

impl Name {
    fn text(&self) -> String {
        let checksum = match self.crc64nvme {
            Some(crc) => format!("{crc:016x}"),
            None => UNCHECKED.to_owned(),
        };
        BASE64_STANDARD.encode(format!("{}-{:05}-{checksum}", self.upload, self.number))
    }

    /// Parses a block's name; `None` for a name of another writer.
    fn parse(name: &str) -> Option<Name> {
        let text = String::from_utf8(BASE64_STANDARD.decode(name).ok()?).ok()?;
        let mut fields = text.splitn(3, '-');
        let (upload, number, checksum) = (fields.next()?, fields.next()?, fields.next()?);
        let crc64nvme = match checksum {
            UNCHECKED => None,
            digits => Some(u64::from_str_radix(digits, 16).ok()?),
        };
        Some(Name {
            upload: upload.to_owned(),
            number: number.parse().ok()?,
            crc64nvme,
        })
    }
}

impl Signed {
    pub(super) fn begin_blocks(with_checksums: bool) -> Begun {
        let drawn = RandomState::new().hash_one(std::process::id());
        Begun {
            id: format!("{drawn:016x}"),
            is_checked: with_checksums,
        }
    }

    /// Headers of a put of an object without blocks.
    pub(super) fn put_of_blob(ask: Ask<'_>) -> Ask<'_> {
        ask.header(BLOB_TYPE, BLOCK_BLOB)
    }

    pub(super) async fn put_block(
        &self,
        ask: Ask<'_>,
        upload: &Begun,
        number: u32,
        checksum: Option<Checksum>,
    ) -> Result<Part> {
        let crc64nvme = match checksum {
            Some(Checksum::Crc64Nvme(crc)) => Some(crc),
            _ => None,
        };
        let name = Name {
            upload: upload.id.clone(),
            number,
            crc64nvme,
        };
        let name = name.text();
        let ask = ask.query("comp", "block").query("blockid", &name);
        self.put_checked(&ask, checksum, Ok).await?;
        Ok(Part::sent(number, ask.body_bytes(), &name, checksum))
    }

    /// Makes an object of blocks. A retry lists the same blocks.
    pub(super) async fn list_blocks(&self, key: &Key, parts: &[Part]) -> Result<()> {
        let bytes = parts.iter().map(|part| part.bytes).sum::<u64>();
        let list = BlockList {
            latest: parts.iter().map(|part| part.tag.as_str()).collect(),
        };
        let body = quick_xml::se::to_string(&list).expect("it is of strings");
        let ask = Ask::new(Method::PUT, key)
            .query("comp", "blocklist")
            .work(Duration::from_secs(bytes / ASSEMBLED_BYTES_PER_SECOND_MIN))
            .body(body.into());
        self.ask(&ask).await.map(drop)
    }

    pub(super) async fn uploads_of_blocks(&self, key: &Key) -> Result<Vec<(String, Vec<Part>)>> {
        let ask = Ask::new(Method::GET, key)
            .query("comp", "blocklist")
            .query("blocklisttype", "uncommitted");
        let read = |answer: Answer| parse::<ListedBlocks>(&answer.body);
        let listed = match self.ask_for(&ask, read).await {
            Ok(listed) => listed,
            Err(request_error) if request_error.is_of_nothing() => return Ok(Vec::new()),
            Err(request_error) => return Err(request_error),
        };
        let mut uploads: HashMap<String, Vec<Part>> = HashMap::new();
        for block in listed.uncommitted_blocks.block {
            let Some(name) = Name::parse(&block.name) else {
                continue;
            };
            let checksum = name.crc64nvme.map(Checksum::Crc64Nvme);
            let part = Part::sent(name.number, block.size, &block.name, checksum);
            uploads.entry(name.upload).or_default().push(part);
        }
        let mut uploads: Vec<_> = uploads.into_iter().collect();
        for (_, parts) in &mut uploads {
            parts.sort_by_key(|part| part.number);
        }
        // Azure does not report which upload is newest; the one with the most parts leaves the
        // least to send.
        uploads.sort_by_key(|(_, parts)| std::cmp::Reverse(parts.len()));
        Ok(uploads)
    }
}

#[derive(Serialize)]
struct BlockList<'a> {
    #[serde(rename = "Latest")]
    latest: Vec<&'a str>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ListedBlocks {
    #[serde(default)]
    uncommitted_blocks: Blocks,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Blocks {
    #[serde(default)]
    block: Vec<Block>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Block {
    name: String,
    size: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_says_what_the_block_is_and_all_are_of_one_length() {
        let name = |number, crc64nvme| Name {
            upload: Signed::begin_blocks(true).id,
            number,
            crc64nvme,
        };
        let (checked, plain) = (name(7, Some(0x1f)), name(10_000, None));
        assert_eq!(checked.text().len(), plain.text().len());
        for one in [checked, plain] {
            let read = Name::parse(&one.text()).unwrap();
            assert_eq!(read.upload, one.upload);
            assert_eq!((read.number, read.crc64nvme), (one.number, one.crc64nvme));
        }
        for foreign in ["AAAA", "not base64", ""] {
            assert!(Name::parse(foreign).is_none(), "{foreign}");
        }
    }
}
