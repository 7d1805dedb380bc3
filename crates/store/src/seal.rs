//! Sealing: encryption and authentication of what a save stores (docs/format.md, 9).
//!
//! One [`DataKey`] seals an attempt. From it, keys are derived for each shard, each part, the
//! metadata and the manifest, bound to the place and the size of what they seal. So a chunk, a
//! file or a part that stands in another place does not open. Shards are sealed by the chunks of
//! their digests, and digests cover the sealed bytes: finding damage, copying and removing take no
//! key.
//!
//! This module knows bytes and keys. The form of manifest and parts is that of `format`, and the
//! pipeline decides when a chunk is sealed or opened. It does not promise that an older sealed
//! checkpoint in the place of a newer one is noticed, and a holder of the data key can forge.

mod blocks;
mod derive;
mod encoded;
mod file;
mod message;
mod opener;
mod record;
mod sealer;
mod statement;

use std::fmt;
use std::sync::Arc;

pub use penstock_keys::{DataKey, KeyError, Signers, Unwrap, Wrap};

pub use blocks::{BlockOpener, BlockSealer};

pub(crate) use blocks::BlockKey;
pub(crate) use derive::{ShardPlace, draw_salt};
pub(crate) use encoded::Tag;
pub use encoded::{Block, Sha256, Tags, Text};
pub use file::FileSeal;
pub(crate) use message::{ManifestKeys, MessageKey};
pub(crate) use opener::ShardOpener;
pub use record::{Seal, Witness};
pub(crate) use sealer::ShardSealer;
pub use statement::SealingEntry;
pub(crate) use statement::{join_wraps, split_mac};

/// The name of the only tensor in the header of a sealed shard.
pub const DECOY: &str = "penstock.sealed";

/// The tree of a sealed part: a tag that a reader without sealing refuses.
pub const SEALED_TREE: &str = "{\"$\":\"sealed\"}";

/// The name of the cipher in a manifest.
pub const CIPHER: &str = "AES-256-GCM";

/// The data key of an attempt to save, and its wraps for the recipients.
///
/// A key is for one attempt: another attempt gets another key.
#[derive(Clone)]
pub struct Sealing {
    key: Arc<DataKey>,
    wraps: Vec<Wrap>,
    witness: Option<Witness>,
}

impl Sealing {
    /// Sealing with a data key that nothing else uses.
    pub fn new(key: Arc<DataKey>, wraps: Vec<Wrap>) -> Sealing {
        Sealing {
            key,
            wraps,
            witness: record::witness(),
        }
    }

    /// Shows each key and nonce to a witness, for tests.
    #[must_use]
    pub fn watched_by(self, witness: Witness) -> Sealing {
        Sealing {
            witness: Some(witness),
            ..self
        }
    }

    /// The data key.
    pub fn key(&self) -> &DataKey {
        &self.key
    }

    /// The data key wrapped for each recipient.
    pub fn wraps(&self) -> &[Wrap] {
        &self.wraps
    }

    /// Reports a message to the witness, before it is sealed.
    fn witness(&self, key: &[u8], nonce: [u8; 12]) {
        if let Some(witness) = &self.witness {
            let key = Sha256::of(key).0;
            witness(&Seal { key, nonce });
        }
    }
}

impl fmt::Debug for Sealing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sealing")
            .field("wraps", &self.wraps)
            .finish_non_exhaustive()
    }
}

/// Opens sealed checkpoints for a reader, and says whether clear and unsigned ones are refused.
#[derive(Clone, Default)]
pub struct Unsealing {
    /// Finds the data key; without it a sealed checkpoint stays closed.
    pub identities: Option<Arc<dyn Unwrap>>,
    /// Whether a clear checkpoint is refused. A reader that expects a sealed one must set it:
    /// whoever writes to the storage can put a clear one there.
    pub is_demanded: bool,
    /// The keys of which one must have signed the checkpoint; without them signatures are not
    /// looked at.
    pub signers: Option<Arc<Signers>>,
}

impl Unsealing {
    /// Opens sealed checkpoints with these identities, and refuses clear ones.
    pub fn with(identities: Arc<dyn Unwrap>) -> Unsealing {
        Unsealing {
            identities: Some(identities),
            is_demanded: true,
            signers: None,
        }
    }
}

impl fmt::Debug for Unsealing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unsealing")
            .field("has_identities", &self.identities.is_some())
            .field("is_demanded", &self.is_demanded)
            .field("signers", &self.signers)
            .finish()
    }
}

/// A message does not open: it was changed, or belongs elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Closed;
