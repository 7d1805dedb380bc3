//! Signatures: statements about the files of a checkpoint, and the hashes in them (docs/format.md,
//! 10).
//!
//! A statement lists the BLAKE3 of every file. A reader who has its signature and trusts the signer
//! knows all bytes of the checkpoint. BLAKE3 is a tree: [`ChunkHash`]es of the chunks of the digests
//! add up to the hash of the file, so a save makes them while it writes, a load compares each chunk
//! that it reads, and neither reads anything else.
//!
//! This module knows bytes and names. The form of keys and signatures is that of `penstock-keys`;
//! `load` finds the signature of a checkpoint, and `care` and `save` make one.

mod hash;
mod statement;

pub use hash::{Blake3, ChunkHash, Hashes};
pub(crate) use hash::{FileHasher, StreamHasher};
pub use penstock_keys::{SignatureFlaw, SignatureForm, Signers, SigningKey};
pub use statement::statement_files;
pub(crate) use statement::{Contents, Sha256s, Statement};
