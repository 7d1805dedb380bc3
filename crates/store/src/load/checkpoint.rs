//! A complete checkpoint: opening it, and its contents.

pub(crate) mod fetch;
mod hashes;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use penstock_io::file_system::{FileSystem, Files};
use penstock_io::trace;
use serde_json::value::RawValue;

use crate::error::{Error, Result};
use crate::format::description::{Sizes, read_manifest, read_part, read_part_hashed};
use crate::format::manifest::Manifest;
use crate::format::name::MANIFEST;
use crate::format::part::{FileOpener, Missing, MissingKind, Part, Rank, TensorEntry};
use crate::lease::Lease;
use crate::load::sidecar;
use crate::load::signed::{Signed, SignedShards};
use crate::plan::reshard::GlobalTensors;
use crate::seal::{DataKey, Unsealing};
use crate::tier;

pub use self::fetch::Loaded;

/// How often a checkpoint may be replaced while it is opened.
const REPLACED_MAX: usize = 16;

/// Whether a checkpoint is sealed, and whether this process can open it.
#[derive(Debug)]
enum Secrecy {
    Clear,
    /// Sealed: its tensors and its tree are not known here.
    Closed,
    /// Sealed, with the openers of its files in the order of the part.
    Open(Vec<FileOpener>),
}

/// A complete checkpoint, its manifest and parts read and checked.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    manifest: Manifest,
    part: Part,
    ranks: Vec<Rank>,
    global_tensors: GlobalTensors,
    manifest_bytes: u64,
    secrecy: Secrecy,
    /// The signed hashes of its files, if a signature is demanded.
    signed: Option<SignedShards>,
    file_system: Arc<dyn FileSystem>,
    lease: Mutex<Option<Lease>>,
}

impl Checkpoint {
    /// Opens the checkpoint at `path`: reads its manifest and parts, and checks that its files
    /// exist with their exact sizes. No tensor data is read.
    ///
    /// While it is open, neither a deletion nor an overwrite nor a sweep removes its files, where
    /// the file system has locks.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Incomplete`], [`Error::Corrupt`], [`Error::Malformed`],
    /// [`Error::Version`], [`Error::Unknown`].
    pub fn open(path: &Path) -> Result<Checkpoint> {
        Checkpoint::open_on(path, &tier::file_system(path)?)
    }

    /// Opens a checkpoint as [`open`](Checkpoint::open) does, on a given file system.
    pub fn open_on(path: &Path, file_system: &Arc<dyn FileSystem>) -> Result<Checkpoint> {
        Checkpoint::open_with(path, file_system, &Unsealing::default())
    }

    /// Opens a checkpoint as [`open`](Checkpoint::open) does, also a sealed one.
    ///
    /// Without identities a sealed checkpoint opens too: its files are known and can be verified
    /// and copied, and it shows no tensors.
    ///
    /// # Errors
    /// [`Error::NotSealed`] for a clear checkpoint where a sealed one is demanded.
    /// [`Error::Key`] and [`Error::WrongKey`] if the identities do not open it,
    /// [`Error::Tampered`] if somebody without the key changed it.
    /// With signers, [`Error::NotSigned`] and [`Error::Signature`] unless one of them has signed
    /// it; what is loaded is compared with the signed hashes.
    pub fn open_with(
        path: &Path,
        file_system: &Arc<dyn FileSystem>,
        unsealing: &Unsealing,
    ) -> Result<Checkpoint> {
        let _span = trace::span("open");
        let lease = Lease::share_to_read(path, file_system.files());
        let mut opened = Checkpoint::open_as(path, file_system, unsealing)?;
        opened.lease = Mutex::new(lease);
        Ok(opened)
    }

    /// Allows others to remove the files. Loading remains possible while they exist.
    pub fn release(&self) {
        *self.lease.lock().expect("nothing panics with the lock") = None;
    }

    /// Converts a checkpoint opened without a lease into an open one. Only possible in a bucket,
    /// where a lease keeps nobody from removing files and both are the same.
    pub fn into_opened(self) -> Option<Checkpoint> {
        let has_lease = self.file_system.files().has_directories();
        (!has_lease).then_some(self)
    }

    /// Opens a checkpoint without a lease that keeps others from removing its files.
    pub(crate) fn open_unleased(
        path: &Path,
        file_system: &Arc<dyn FileSystem>,
    ) -> Result<Checkpoint> {
        Checkpoint::open_as(path, file_system, &Unsealing::default())
    }

    fn open_as(
        path: &Path,
        file_system: &Arc<dyn FileSystem>,
        unsealing: &Unsealing,
    ) -> Result<Checkpoint> {
        let files = file_system.files();
        for _ in 0..REPLACED_MAX {
            let (manifest, manifest_bytes) = read_manifest(path, files)?;
            let id = manifest.id.clone();
            let size = manifest_bytes;
            match Checkpoint::open_parts(path, file_system, manifest, size, unsealing) {
                // Replaced between two of the reads: the new checkpoint is in place and whole.
                Err(error) if is_replaced(path, files, &id, &error) => {}
                result => return result,
            }
        }
        let path = path.to_owned();
        Err(Error::Replaced { path })
    }

    fn open_parts(
        path: &Path,
        file_system: &Arc<dyn FileSystem>,
        mut manifest: Manifest,
        manifest_bytes: u64,
        unsealing: &Unsealing,
    ) -> Result<Checkpoint> {
        let files = file_system.files();
        let signers = unsealing.signers.as_deref();
        let signed = signers.map(|signers| Signed::find(path, files, &manifest, signers));
        let signed = signed.transpose()?;
        // Nothing of the manifest is used before its MAC is checked.
        let key = unseal(path, &mut manifest, unsealing)?;
        let mut parts = Vec::with_capacity(manifest.parts.len());
        let mut openers = Vec::new();
        for entry in &manifest.parts {
            let mut part = match &signed {
                None => read_part(path, files, &manifest, entry)?,
                Some(signed) => {
                    let (part, hash) = read_part_hashed(path, files, &manifest, entry)?;
                    signed.check(path, &entry.file, hash)?;
                    part
                }
            };
            if let Some(key) = &key {
                openers.extend(part.unseal(key, path, &entry.file)?);
            }
            parts.push(part);
        }
        let secrecy = match (&manifest.sealing, key) {
            (None, _) => Secrecy::Clear,
            (Some(_), None) => Secrecy::Closed,
            (Some(_), Some(_)) => Secrecy::Open(openers),
        };
        let (part, ranks) = Part::merge(parts).expect("a manifest lists a part");
        let global_tensors = global_tensors_of(path, &part)?;
        let sizes = Sizes::of(path, files, part.files.len());
        part.files.iter().try_for_each(|entry| sizes.check(entry))?;
        let sidecars = &manifest.sidecars;
        let signed = signed.map(|signed| SignedShards::of(path, signed, &part.files, sidecars));
        let signed = signed.transpose()?;
        Ok(Checkpoint {
            path: path.to_owned(),
            manifest,
            part,
            ranks,
            global_tensors,
            manifest_bytes,
            secrecy,
            signed,
            file_system: Arc::clone(file_system),
            lease: Mutex::default(),
        })
    }

    /// The checkpoint directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The manifest that the commit wrote.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Whether it is sealed.
    pub fn is_sealed(&self) -> bool {
        !matches!(self.secrecy, Secrecy::Clear)
    }

    /// Whether it is sealed and its tensors are unknown, for lack of identities.
    pub fn is_closed(&self) -> bool {
        matches!(self.secrecy, Secrecy::Closed)
    }

    /// The openers of its files, if they are sealed.
    ///
    /// # Errors
    /// [`Error::Sealed`] without identities.
    pub(crate) fn openers(&self) -> Result<Option<&[FileOpener]>> {
        match &self.secrecy {
            Secrecy::Clear => Ok(None),
            Secrecy::Open(openers) => Ok(Some(openers)),
            Secrecy::Closed => Err(Error::Sealed {
                path: self.path.clone(),
            }),
        }
    }

    pub(crate) fn into_manifest(self) -> Manifest {
        self.manifest
    }

    /// The parts of all ranks merged into one: files, tensors and aliases of each rank in order.
    /// The merged part has no tree; see [`Checkpoint::tree`].
    pub fn part(&self) -> &Part {
        &self.part
    }

    /// Structure and plain leaves of a rank's state, as typed JSON; its indices count the rank's
    /// own tensors and aliases, see [`Checkpoint::offsets`].
    ///
    /// # Panics
    /// If the rank does not exist.
    pub fn tree(&self, rank: u32) -> &RawValue {
        &self.ranks[rank as usize].tree
    }

    /// Returns an error if a tree has a tag that this version does not know. Opening such a
    /// checkpoint is no error, since its other values can be read.
    pub(crate) fn unknown_tag(&self) -> Option<Error> {
        let mut trees = self.ranks.iter().zip(&self.manifest.parts);
        trees.find_map(|(rank, entry)| {
            let tag = crate::format::tree::unknown_tag(rank.tree.get())?;
            Some(Error::Unknown {
                path: self.path.clone(),
                file: entry.file.clone(),
                detail: format!(
                    "the state has a value of a kind that this version of Penstock does not know: \
                     {tag:?}"
                ),
            })
        })
    }

    /// The index of each rank's first tensor and first alias in the merged part.
    pub fn offsets(&self) -> Vec<(usize, usize)> {
        let offset = |rank: &Rank| (rank.first_tensor, rank.first_alias);
        self.ranks.iter().map(offset).collect()
    }

    /// State that could not be salvaged; with several ranks, each entry with the rank that owned
    /// it.
    pub fn missing(&self) -> Vec<(Option<u32>, &Missing)> {
        let several = self.ranks.len() > 1;
        let missing = self.part.missing.iter().enumerate();
        let rank_of = |index: usize, missing: &Missing| {
            let starts_before = |rank: &Rank| rank.first_missing <= index;
            let rank = self.ranks.partition_point(starts_before) as u32 - 1;
            (several && missing.kind != MissingKind::Shared).then_some(rank)
        };
        missing
            .map(|(index, missing)| (rank_of(index, missing), missing))
            .collect()
    }

    pub(crate) fn global_tensors(&self) -> &GlobalTensors {
        &self.global_tensors
    }

    /// Names and sizes of all files, the manifest first.
    pub fn files(&self) -> Vec<(&str, u64)> {
        let parts = self
            .manifest
            .parts
            .iter()
            .map(|part| (part.file.as_str(), part.bytes));
        let shards = self
            .part
            .files
            .iter()
            .map(|file| (file.name.as_str(), file.bytes));
        let sidecars = self.manifest.sidecars.iter();
        let sidecars = sidecars.map(|entry| (entry.file.as_str(), entry.bytes));
        std::iter::once((MANIFEST, self.manifest_bytes))
            .chain(parts)
            .chain(shards)
            .chain(sidecars)
            .collect()
    }

    /// The content of a small file that was saved with the checkpoint; `None` without one.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if it is damaged, [`Error::Signature`] if it is not the signed one.
    pub fn sidecar(&self, name: &str) -> Result<Option<Vec<u8>>> {
        let mut sidecars = self.manifest.sidecars.iter();
        let Some(entry) = sidecars.find(|entry| entry.name == name) else {
            return Ok(None);
        };
        let text = sidecar::read(&self.path, self.file_system.files(), entry)?;
        if let Some(signed) = &self.signed {
            signed.check_sidecar(&self.path, &entry.file, &text)?;
        }
        Ok(Some(text))
    }

    /// Size and number of all files, the copies of small files included.
    pub(crate) fn size(&self) -> (u64, usize) {
        let files = self.files();
        let sidecars = &self.manifest.sidecars;
        let own_names: u64 = sidecars.iter().map(|entry| entry.bytes).sum();
        let bytes = files.iter().map(|(_, bytes)| bytes).sum::<u64>() + own_names;
        (bytes, files.len() + sidecars.len())
    }

    /// Size of all tensors.
    pub fn tensor_bytes(&self) -> u64 {
        self.part.tensors.iter().map(TensorEntry::nbytes).sum()
    }
}

/// Opens a sealed manifest, if there are identities; returns the data key.
pub(crate) fn unseal(
    path: &Path,
    manifest: &mut Manifest,
    unsealing: &Unsealing,
) -> Result<Option<DataKey>> {
    let path = path.to_owned();
    let Some(wraps) = &manifest.wraps else {
        return match unsealing.is_demanded {
            true => Err(Error::NotSealed { path }),
            false => Ok(None),
        };
    };
    let Some(identities) = &unsealing.identities else {
        return Ok(None);
    };
    let key = identities.unwrap(wraps).map_err(|source| Error::Key {
        path: path.clone(),
        source,
    })?;
    manifest.unseal(&key, &path)?;
    Ok(Some(key))
}

/// Collects the global tensors of a part.
pub(crate) fn global_tensors_of(path: &Path, part: &Part) -> Result<GlobalTensors> {
    let file = |entry: usize| part.files[part.tensors[entry].file].name.clone();
    GlobalTensors::new(&part.tensors).map_err(|conflict| Error::Malformed {
        path: path.to_owned(),
        file: Some(file(conflict.second)),
        tensor: Some(conflict.tensor),
        detail: format!("{} (in {})", conflict.detail, file(conflict.first)),
    })
}

/// Whether an error about files of the checkpoint `id` only means that the checkpoint is gone or
/// replaced.
pub(crate) fn is_replaced(path: &Path, files: &dyn Files, id: &str, error: &Error) -> bool {
    let is_about_files = matches!(
        error,
        Error::Corrupt { .. } | Error::Storage { .. } | Error::Io(_)
    );
    is_about_files
        && match read_manifest(path, files) {
            Ok((manifest, _)) => manifest.id != id,
            Err(error) => matches!(error, Error::NotFound { .. } | Error::Incomplete { .. }),
        }
}
