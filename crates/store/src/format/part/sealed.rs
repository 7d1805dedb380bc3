//! The sealed body of a part: what the shards of its rank hold, under which names.

use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::{Alias, Missing, Part, SealedBody, TensorEntry};
use crate::error::{Error, Result};
use crate::format::name;
use crate::seal::{
    Block, BlockKey, DataKey, FileSeal, MessageKey, SEALED_TREE, Sealing, ShardOpener, ShardPlace,
};

/// The members of a part that are sealed.
#[derive(Serialize, Deserialize)]
struct Body {
    tensors: Vec<TensorEntry>,
    aliases: Vec<Alias>,
    tree: Box<RawValue>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    missing: Vec<Missing>,
}

/// Opens a file of a sealed part.
#[derive(Debug)]
pub(crate) enum FileOpener {
    /// By chunks, as loads read it.
    Chunks(ShardOpener),
    /// By blocks, with tags that are elsewhere.
    Blocks(BlockKey),
}

impl FileOpener {
    /// Bytes of the header, which stay clear.
    fn header_bytes(&self) -> u64 {
        match self {
            FileOpener::Chunks(opener) => opener.header_bytes(),
            FileOpener::Blocks(key) => key.header_bytes,
        }
    }
}

fn sealed_tree() -> Box<RawValue> {
    RawValue::from_string(SEALED_TREE.to_owned()).expect("it is JSON")
}

impl Part {
    /// Seals names, types, shapes, tree: everything but the files.
    pub(crate) fn seal(&mut self, sealing: &Sealing, salt: Block) {
        let body = Body {
            tensors: std::mem::take(&mut self.tensors),
            aliases: std::mem::take(&mut self.aliases),
            tree: std::mem::replace(&mut self.tree, sealed_tree()),
            missing: std::mem::take(&mut self.missing),
        };
        let text = serde_json::to_vec(&body).expect("a part always serialises");
        let key = MessageKey::of_part(sealing.key(), &salt, &self.id, self.rank);
        self.sealed = Some(SealedBody {
            salt,
            commitment: key.commitment(),
            body: key.seal(sealing, text),
        });
    }

    /// Opens the body; returns the openers of the files, in order.
    ///
    /// # Errors
    /// [`Error::Tampered`] if something was changed without the key. Otherwise those of
    /// [`Part::parse`].
    pub(crate) fn unseal(
        &mut self,
        key: &DataKey,
        path: &Path,
        file: &str,
    ) -> Result<Vec<FileOpener>> {
        let tampered = |detail: &str| Error::tampered(path, file, detail);
        let malformed = |detail: String| Error::malformed(path, file, detail);
        let Some(sealed) = self.sealed.take() else {
            return Err(tampered("it is clear in a sealed checkpoint"));
        };
        let message = MessageKey::of_part(key, &sealed.salt, &self.id, self.rank);
        if !message.is_committed(&sealed.commitment) {
            return Err(tampered("its commitment is that of another key or part"));
        }
        let text = message.open(&sealed.body);
        let text = text.map_err(|_| tampered("its sealed body does not open"))?;
        let openers = self.openers(key, &sealed.salt, path)?;
        let body: Body = serde_json::from_slice(&text)
            .map_err(|error| malformed(format!("its sealed body is no part: {error}")))?;
        self.tensors = body.tensors;
        self.aliases = body.aliases;
        self.tree = body.tree;
        self.missing = body.missing;
        self.check_types(path, file)?;
        self.check().map_err(malformed)?;
        self.check_ranges(&openers).map_err(malformed)?;
        Ok(openers)
    }

    fn openers(&self, key: &DataKey, salt: &Block, path: &Path) -> Result<Vec<FileOpener>> {
        let mut openers = Vec::with_capacity(self.files.len());
        for (number, file) in (0..).zip(&self.files) {
            let tampered = |detail: &str| Error::tampered(path, &file.name, detail);
            let sealed = file.sealed.as_ref();
            let sealed = sealed.ok_or_else(|| tampered("it is clear in a sealed checkpoint"))?;
            if let Some(blocks) = &sealed.blocks {
                let wrapping = MessageKey::of_file(key, salt, &self.id, self.rank, number);
                let (header_bytes, block_bytes) = (sealed.header_bytes, blocks.block_bytes);
                let commitment = &sealed.commitment;
                let opened = BlockKey::unwrap(
                    &wrapping,
                    &blocks.key,
                    header_bytes,
                    block_bytes,
                    commitment,
                );
                let opened = opened
                    .map_err(|_| tampered("its key is that of another file, place or checkpoint"));
                openers.push(FileOpener::Blocks(opened?));
                continue;
            }
            let place = ShardPlace {
                id: &self.id,
                rank: self.rank,
                number,
                file_bytes: file.bytes,
                header_bytes: sealed.header_bytes,
                chunk_bytes: file.chunk_bytes,
            };
            if let Some(wrapped) = &sealed.key {
                let (tags, commitment) = (&sealed.tags.0, &sealed.commitment);
                let opened = FileSeal::unwrap(key, salt, &place, wrapped, commitment, tags);
                let opened = opened
                    .map_err(|_| tampered("its key is that of another file, place or checkpoint"));
                openers.push(FileOpener::Chunks(ShardOpener::of_file(opened?)));
                continue;
            }
            let tags = sealed.tags.0.clone();
            let opener = ShardOpener::new(key, salt, &place, &sealed.commitment, tags);
            let opener = opener
                .map_err(|_| tampered("its commitment is that of another key, size or place"));
            openers.push(FileOpener::Chunks(opener?));
        }
        Ok(openers)
    }

    /// Checks the form of a part as it was read: all of it is sealed, or nothing.
    pub(super) fn check_sealed(&self) -> std::result::Result<(), String> {
        let is_sealed = self.sealed.is_some();
        for (number, file) in self.files.iter().enumerate() {
            if file.sealed.is_some() != is_sealed {
                return Err(format!(
                    "{}: a part is sealed with all its files",
                    file.name
                ));
            }
            if is_sealed && file.name != name::shard_file(self.rank, number, &self.id) {
                return Err(format!("{}: it is not shard {number}", file.name));
            }
        }
        let is_empty =
            self.tensors.is_empty() && self.aliases.is_empty() && self.missing.is_empty();
        if is_sealed && (!is_empty || self.tree.get() != SEALED_TREE) {
            return Err("it is sealed and has clear tensors or a clear tree".into());
        }
        Ok(())
    }

    /// Headers are clear: no tensor reaches into one.
    fn check_ranges(&self, openers: &[FileOpener]) -> std::result::Result<(), String> {
        let is_clear = |tensor: &&TensorEntry| {
            let (begin, end) = tensor.range;
            begin < end && begin < openers[tensor.file].header_bytes()
        };
        match self.tensors.iter().find(is_clear) {
            Some(tensor) => Err(format!("tensor {:?} is in a header", tensor.name)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const ATTEMPT: &str = "0123456789abcdef0123456789abcdef";

    fn part() -> Part {
        let text = serde_json::json!({
            "format": "penstock-part", "version": 1, "id": ATTEMPT, "rank": 3,
            "files": [], "tensors": [], "aliases": [], "tree": {"a": 1},
        });
        Part::parse(
            text.to_string().as_bytes(),
            Path::new("ckpt"),
            "part",
            ATTEMPT,
            3,
        )
        .unwrap()
    }

    fn key() -> DataKey {
        DataKey::from_bytes(&[7; 32])
    }

    /// A sealed part after a change.
    fn sealed(change: impl FnOnce(&mut SealedBody)) -> Part {
        let mut part = part();
        let sealing = Sealing::new(Arc::new(key()), Vec::new());
        part.seal(&sealing, Block([9; 32]));
        assert_eq!(part.tree.get(), SEALED_TREE);
        change(part.sealed.as_mut().unwrap());
        part
    }

    fn unseal(mut part: Part, key: &DataKey) -> Result<Part> {
        part.unseal(key, Path::new("ckpt"), "part")?;
        Ok(part)
    }

    #[test]
    fn a_body_opens_as_it_was_sealed() {
        let opened = unseal(sealed(|_| {}), &key()).unwrap();
        assert_eq!(opened.tree.get(), part().tree.get());
    }

    /// The commitment is checked for itself: with two keys, one body could open as two texts.
    #[test]
    fn each_member_of_a_sealed_body_is_checked() {
        let changes: &[fn(&mut SealedBody)] = &[
            |body| body.commitment.0[0] ^= 1,
            |body| body.commitment.0[31] ^= 0x80,
            |body| body.salt.0[0] ^= 1,
            |body| body.body.0[0] ^= 1,
            |body| body.body.0.truncate(30),
        ];
        for (number, change) in changes.iter().enumerate() {
            let error = unseal(sealed(change), &key()).unwrap_err();
            assert!(matches!(error, Error::Tampered { .. }), "{number}: {error}");
        }
        let error = unseal(sealed(|_| {}), &DataKey::from_bytes(&[8; 32])).unwrap_err();
        assert!(
            matches!(error, Error::Tampered { .. }),
            "another key: {error}"
        );
        let mut elsewhere = sealed(|_| {});
        elsewhere.rank = 2;
        let error = unseal(elsewhere, &key()).unwrap_err();
        assert!(
            matches!(error, Error::Tampered { .. }),
            "another rank: {error}"
        );
        let error = unseal(part(), &key()).unwrap_err();
        assert!(matches!(error, Error::Tampered { .. }), "clear: {error}");
    }
}
