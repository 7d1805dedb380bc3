//! The manifest: the commit point of a checkpoint.
//!
//! A checkpoint is complete exactly when this file exists. The manifest contains a digest of its
//! own text and one of each part, and each part the digests of its shards: the chain covers every
//! byte of a checkpoint.

use std::collections::HashSet;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::FORMAT_VERSION;
use crate::error::{Error, Result};
use crate::format::digest::Digest;
use crate::format::name::{self, MANIFEST};
use crate::seal::{
    Block, CIPHER, DataKey, ManifestKeys, SealingEntry, Sha256, Wrap, join_wraps, split_mac,
};
use crate::sign::Blake3;

/// Most ids in a manifest's `previous`: two days of a save each twenty minutes.
pub const PREVIOUS_MAX: usize = 144;

/// Value of a manifest's `format` member.
pub(crate) const FORMAT: &str = "penstock-checkpoint";

/// Text before and after the digest at the end of the file.
const STAMP_PREFIX: &str = ",\"digest\":\"";
const STAMP_SUFFIX: &str = "\"}\n";
/// `crc64nvme:` and sixteen digits.
const DIGEST_BYTES: usize = 26;
const STAMP_BYTES: usize = STAMP_PREFIX.len() + DIGEST_BYTES + STAMP_SUFFIX.len();

/// A parsed manifest.
#[derive(Debug, Serialize, Deserialize)]
pub struct Manifest {
    /// Always `penstock-checkpoint`.
    pub format: String,
    /// Version of the format; see [`FORMAT_VERSION`].
    pub version: u64,
    /// The attempt that committed it: the identity of the checkpoint.
    pub id: String,
    /// The training step, if the caller gave one.
    pub step: Option<u64>,
    /// Time of the commit, for people; nothing is ordered by it.
    pub created: String,
    /// The program that wrote it.
    pub writer: String,
    /// Number of ranks that wrote parts.
    pub world_size: u32,
    /// One entry per rank, in order.
    pub parts: Vec<PartEntry>,
    /// The caller's own JSON object.
    pub metadata: Box<RawValue>,
    /// Set if the checkpoint holds only tensors salvaged from another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partial: Option<Partial>,
    /// Sidecars: small files of the checkpoint that are also copied to fixed names in its
    /// directory.
    #[serde(rename = "beside", default, skip_serializing_if = "Vec::is_empty")]
    pub sidecars: Vec<SidecarEntry>,
    /// Identity of the clear checkpoint that this one is a sealed copy of, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy_of: Option<String>,
    /// Ids of checkpoints that its writer knew before it, newest first, at most [`PREVIOUS_MAX`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub previous: Vec<String>,
    /// Set if the checkpoint is sealed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sealing: Option<SealingEntry>,
    /// The MAC of a sealed manifest, over the text in front of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mac: Option<Block>,
    /// The data key of a sealed checkpoint, wrapped for each recipient.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wraps: Option<Vec<Wrap>>,
    /// The text that the MAC covers.
    #[serde(skip)]
    pub(crate) covered: Vec<u8>,
    /// The hash of the text that a signature covers: of the whole file, or of a sealed manifest up
    /// to its MAC, as wraps are replaced.
    #[serde(skip)]
    pub(crate) hash: Option<Blake3>,
}

/// A sidecar and its digest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SidecarEntry {
    /// Name of the copy.
    pub name: String,
    /// Name inside the checkpoint directory.
    pub file: String,
    /// Exact size.
    pub bytes: u64,
    /// Digest of the whole file.
    pub digest: Digest,
}

/// The origin of a partial checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Partial {
    /// Identity of the checkpoint that it was salvaged from, if that could be read.
    pub source: Option<String>,
    /// Whether its contents were salvaged without a digest to check them against.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unverified: bool,
}

/// A part and its digest.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PartEntry {
    /// The rank that wrote it.
    pub rank: u32,
    /// Name inside the checkpoint directory.
    pub file: String,
    /// Exact size.
    pub bytes: u64,
    /// Digest of the whole file.
    pub digest: Digest,
    /// The file's SHA-256, in a sealed checkpoint: a digest can be forged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<Sha256>,
}

impl Manifest {
    /// The text of the file, with its digest at the end.
    pub fn stamp(&self) -> Vec<u8> {
        stamped(self.text())
    }

    /// The text without its last brace.
    fn text(&self) -> Vec<u8> {
        let mut text = serde_json::to_vec(self).expect("a manifest always serialises");
        text.pop();
        text
    }

    /// Adds the MAC and the wraps, which stand behind everything else.
    pub(crate) fn sign(&mut self, keys: &ManifestKeys, wraps: &[Wrap]) {
        (self.mac, self.wraps) = (None, None);
        self.mac = Some(keys.sign(&self.text()));
        self.wraps = Some(wraps.to_vec());
    }

    /// Checks a sealed manifest with the data key, and opens its metadata.
    ///
    /// # Errors
    /// [`Error::WrongKey`], and [`Error::Tampered`] if somebody without the key changed it.
    pub(crate) fn unseal(&mut self, key: &DataKey, path: &Path) -> Result<()> {
        let (Some(sealing), Some(mac)) = (&self.sealing, &self.mac) else {
            return Err(Error::NotSealed {
                path: path.to_owned(),
            });
        };
        let Some(keys) = sealing.keys(key, &self.id) else {
            return Err(Error::WrongKey {
                path: path.to_owned(),
            });
        };
        if !keys.verify(&self.covered, mac) {
            return Err(Error::tampered(path, MANIFEST, "its MAC is wrong"));
        }
        let opened = sealing.open_metadata(key, &self.id);
        let opened =
            opened.map_err(|_| Error::tampered(path, MANIFEST, "its metadata do not open"))?;
        let malformed = |detail: String| Error::malformed(path, MANIFEST, detail);
        let metadata = String::from_utf8(opened).map_err(|error| malformed(error.to_string()))?;
        self.metadata =
            RawValue::from_string(metadata).map_err(|error| malformed(error.to_string()))?;
        check_metadata(&self.metadata).map_err(malformed)
    }

    /// Checks the digest, parses the text, and validates the result.
    pub fn parse(text: &[u8], path: &Path) -> Result<Manifest> {
        let corrupt = |detail: String| Error::corrupt(path, MANIFEST, detail);
        let malformed = |detail: String| Error::malformed(path, MANIFEST, detail);
        let Some((digest, stamped)) = split_stamp(text) else {
            // A newer format may place its digest elsewhere, but still states its version.
            check_version(text, path)?;
            return Err(corrupt("not a Penstock manifest, or cut short".into()));
        };
        let found = Digest::of(stamped);
        if found != digest {
            return Err(corrupt(format!(
                "its digest is {found}, it should be {digest}"
            )));
        }
        check_version(text, path)?;
        let mut manifest: Manifest = serde_json::from_slice(text)
            .map_err(|error| malformed(format!("not a Penstock manifest: {error}")))?;
        if let Some(cipher) = manifest.unknown_cipher() {
            return Err(Error::Unknown {
                path: path.to_owned(),
                file: MANIFEST.to_owned(),
                detail: format!(
                    "it is sealed with a cipher that this version of Penstock does not know: \
                     {cipher:?}"
                ),
            });
        }
        manifest.check().map_err(malformed)?;
        if manifest.sealing.is_some() {
            let Some((covered, ..)) = split_mac(stamped) else {
                return Err(malformed("something else stands behind its MAC".into()));
            };
            manifest.covered = covered.to_vec();
        }
        manifest.hash = Some(manifest.hash_of(text));
        Ok(manifest)
    }

    /// The hash that a signature of a manifest with this text lists.
    fn hash_of(&self, text: &[u8]) -> Blake3 {
        Blake3::of(match self.sealing {
            Some(_) => &self.covered,
            None => text,
        })
    }

    pub(crate) fn check(&self) -> std::result::Result<(), String> {
        if self.format != FORMAT || self.version != FORMAT_VERSION {
            return Err(format!(
                "unknown format {:?} version {}",
                self.format, self.version
            ));
        }
        if !name::is_attempt(&self.id) {
            return Err(format!("{:?} is no checkpoint id", self.id));
        }
        check_metadata(&self.metadata)?;
        self.check_previous()?;
        self.check_sealing()?;
        if self.parts.len() as u64 != u64::from(self.world_size) || self.parts.is_empty() {
            return Err(format!(
                "{} parts of {} ranks",
                self.parts.len(),
                self.world_size
            ));
        }
        for (rank, part) in (0..).zip(&self.parts) {
            if part.rank != rank || !name::is_part(&part.file, rank, &self.id) {
                return Err(format!("{:?} is not the part of rank {rank}", part.file));
            }
        }
        let mut seen = HashSet::new();
        for SidecarEntry { name, file, .. } in &self.sidecars {
            let is_its = name::is_sidecar(name) && *file == name::sidecar_file(&self.id, name);
            if !is_its || !seen.insert(name) {
                return Err(format!("{name:?} is no name of a file, or there twice"));
            }
        }
        Ok(())
    }

    fn check_previous(&self) -> std::result::Result<(), String> {
        let count = self.previous.len();
        if count > PREVIOUS_MAX {
            return Err(format!("it names {count} former checkpoints"));
        }
        match self.previous.iter().find(|id| !name::is_attempt(id)) {
            Some(id) => Err(format!("{id:?} is no checkpoint id")),
            None => Ok(()),
        }
    }

    fn unknown_cipher(&self) -> Option<&str> {
        let cipher = self.sealing.as_ref().map(|sealing| sealing.cipher.as_str());
        cipher.filter(|cipher| *cipher != CIPHER)
    }

    fn check_sealing(&self) -> std::result::Result<(), String> {
        let is_sealed = self.sealing.is_some();
        if !is_sealed && (self.mac.is_some() || self.wraps.is_some()) {
            return Err("it has a MAC or wraps and is not sealed".into());
        }
        let unhashed = self.parts.iter().find(|part| part.sha256.is_none());
        match unhashed {
            Some(part) if is_sealed => Err(format!("{:?} has no SHA-256", part.file)),
            _ => Ok(()),
        }
    }
}

fn check_metadata(metadata: &RawValue) -> std::result::Result<(), String> {
    match metadata.get().starts_with('{') {
        true => Ok(()),
        false => Err("the metadata is not an object".into()),
    }
}

/// The wraps of a sealed manifest, from its text.
///
/// # Errors
/// Those of [`Manifest::parse`], and [`Error::NotSealed`].
pub fn wraps(text: &[u8], path: &Path) -> Result<Vec<Wrap>> {
    let wraps = Manifest::parse(text, path)?.wraps;
    wraps.ok_or_else(|| Error::NotSealed {
        path: path.to_owned(),
    })
}

/// The text of a sealed manifest with other wraps; all else stays byte for byte.
///
/// # Errors
/// As [`wraps`].
pub fn replace_wraps(text: &[u8], path: &Path, wraps: &[Wrap]) -> Result<Vec<u8>> {
    let Manifest { covered, mac, .. } = Manifest::parse(text, path)?;
    match mac {
        Some(mac) => Ok(stamped(join_wraps(&covered, &mac, wraps))),
        None => Err(Error::NotSealed {
            path: path.to_owned(),
        }),
    }
}

/// Adds the digest and the last brace.
fn stamped(mut text: Vec<u8>) -> Vec<u8> {
    let digest = Digest::of(&text);
    text.extend_from_slice(format!("{STAMP_PREFIX}{digest}{STAMP_SUFFIX}").as_bytes());
    text
}

/// Splits the text into the digest at its end and the bytes that it covers.
fn split_stamp(text: &[u8]) -> Option<(Digest, &[u8])> {
    let (stamped, stamp) = text.split_at_checked(text.len().checked_sub(STAMP_BYTES)?)?;
    let stamp = std::str::from_utf8(stamp).ok()?;
    let digest = stamp
        .strip_prefix(STAMP_PREFIX)?
        .strip_suffix(STAMP_SUFFIX)?;
    Some((Digest::parse(digest)?, stamped))
}

/// Returns an error if the checkpoint has a newer format, to distinguish it from a damaged one.
fn check_version(text: &[u8], path: &Path) -> Result<()> {
    #[derive(Deserialize)]
    struct Probe {
        format: String,
        version: u64,
    }
    match serde_json::from_slice::<Probe>(text) {
        Ok(probe) if probe.format == FORMAT && probe.version > FORMAT_VERSION => {
            Err(Error::Version {
                path: path.to_owned(),
                found: probe.version,
                supported: FORMAT_VERSION,
            })
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ATTEMPT: &str = "0123456789abcdef0123456789abcdef";

    fn sample() -> Manifest {
        Manifest {
            format: FORMAT.into(),
            version: FORMAT_VERSION,
            id: ATTEMPT.into(),
            step: Some(40),
            created: "2026-01-01T00:00:00Z".into(),
            writer: "penstock 0.1.0".into(),
            world_size: 1,
            parts: vec![PartEntry {
                rank: 0,
                file: name::part_file(0, ATTEMPT),
                bytes: 10,
                digest: Digest::of(b"part"),
                sha256: None,
            }],
            metadata: RawValue::from_string("{\"run\": \"a\"}".into()).unwrap(),
            partial: None,
            sidecars: vec![SidecarEntry {
                name: "config.json".into(),
                file: name::sidecar_file(ATTEMPT, "config.json"),
                bytes: 2,
                digest: Digest::of(b"{}"),
            }],
            copy_of: None,
            previous: Vec::new(),
            sealing: None,
            mac: None,
            wraps: None,
            covered: Vec::new(),
            hash: None,
        }
    }

    fn parse(text: &[u8]) -> Result<Manifest> {
        Manifest::parse(text, Path::new("ckpt"))
    }

    fn restamp(manifest: &Manifest) -> Vec<u8> {
        manifest.stamp()
    }

    #[test]
    fn stamped_text_round_trips() {
        let text = sample().stamp();
        let manifest = parse(&text).unwrap();
        assert_eq!(manifest.stamp(), text);
        assert_eq!(manifest.step, Some(40));
    }

    #[test]
    fn former_checkpoints_are_ids_of_a_bounded_number() {
        let with = |previous: Vec<String>| Manifest {
            previous,
            ..sample()
        };
        let most = with(vec!["a".repeat(32); PREVIOUS_MAX]);
        assert_eq!(parse(&most.stamp()).unwrap().previous, most.previous);
        assert!(
            !String::from_utf8(sample().stamp())
                .unwrap()
                .contains("previous")
        );
        for wrong in [
            vec!["a".repeat(32); PREVIOUS_MAX + 1],
            vec!["A".repeat(32)],
            vec![String::new()],
        ] {
            let error = parse(&with(wrong).stamp()).unwrap_err();
            assert!(matches!(error, Error::Malformed { .. }), "{error}");
        }
    }

    #[test]
    fn every_flipped_bit_is_corruption() {
        let text = sample().stamp();
        for position in 0..text.len() * 8 {
            let mut damaged = text.clone();
            damaged[position / 8] ^= 1 << (position % 8);
            let error = parse(&damaged).unwrap_err();
            assert!(
                matches!(error, Error::Corrupt { .. }),
                "bit {position}: {error}"
            );
        }
    }

    #[test]
    fn every_truncation_is_corruption() {
        let text = sample().stamp();
        for length in 0..text.len() {
            assert!(
                matches!(parse(&text[..length]), Err(Error::Corrupt { .. })),
                "{length}"
            );
        }
    }

    #[test]
    fn a_newer_format_says_so() {
        let mut newer = sample();
        newer.version = 2;
        assert!(matches!(
            parse(&restamp(&newer)),
            Err(Error::Version { found: 2, .. })
        ));
        let unstamped = br#"{"format":"penstock-checkpoint","version":3,"other":1}"#;
        assert!(matches!(
            parse(unstamped),
            Err(Error::Version { found: 3, .. })
        ));
        assert!(matches!(parse(b"{\"a\":1}"), Err(Error::Corrupt { .. })));
    }

    #[test]
    fn well_stamped_lies_are_no_damage() {
        let lies: &[fn(&mut Manifest)] = &[
            |m| m.version = 0,
            |m| m.format = "other".into(),
            |m| m.id = "../x".into(),
            |m| m.world_size = 2,
            |m| m.world_size = u32::MAX,
            |m| m.parts.clear(),
            |m| m.parts[0].rank = 1,
            |m| m.parts[0].file = "../../etc/passwd".into(),
            |m| m.metadata = RawValue::from_string("[]".into()).unwrap(),
            |m| m.sidecars[0].name = "../config.json".into(),
            |m| m.sidecars[0].name = "manifest.json".into(),
            |m| m.sidecars[0].file = "config.json".into(),
            |m| m.sidecars.push(m.sidecars[0].clone()),
        ];
        for (index, lie) in lies.iter().enumerate() {
            let mut manifest = sample();
            lie(&mut manifest);
            let result = parse(&restamp(&manifest));
            let is_malformed = matches!(result, Err(Error::Malformed { .. }));
            assert!(is_malformed, "lie {index}");
        }
    }
}
