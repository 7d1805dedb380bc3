//! Mirroring: a copy of a complete checkpoint in a bucket, with the same names and bytes.
//!
//! Every byte is compared with its digest before it is sent, so a damaged checkpoint is never
//! mirrored. The manifest is sent last, with a create, and read back: as with a save, the copy is
//! complete exactly when its manifest exists. Files and parts of files that an earlier, killed call
//! has sent are not sent again. Names contain the attempt, so an existing object of the same name
//! can only have the same bytes.
//!
//! Nothing is ever deleted or replaced at the mirror but signatures, which may also be made after
//! the copy. Files of a complete copy that a sweep or somebody else removed there are sent again.
//!
//! A clear checkpoint may also be mirrored sealed ([`mirror_sealed`]): the copy has a key and an
//! identity of its own then, and is saved like any other checkpoint.

mod ends;
mod file;
mod sealed;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use penstock_io::file_system::{Change, FileSystem, Files};
use penstock_io::trace;
use penstock_object::Objects;

use crate::commit::fence::flaw;
use crate::commit::files::link_new;
use crate::commit::renewal::{RENEW, Renewal};
use crate::commit::signature;
use crate::error::{Error, Result};
use crate::format::description::read_manifest;
use crate::format::digest::Digest;
use crate::format::manifest::Manifest;
use crate::format::name::{self, MANIFEST};
use crate::load::checkpoint::Checkpoint;
use crate::options::{Options, Settings};
use crate::progress::Progress;
use crate::seal::Sealing;
use ends::Ends;
pub use ends::Mirroring;
use sealed::SealedCopy;

/// How often a copy is checked again while somebody removes its files: for 10 seconds.
const CHECKS_MAX: usize = 100;
const CHECK_PAUSE: Duration = Duration::from_millis(100);

/// The result of a mirroring.
#[derive(Clone, Debug)]
pub struct MirrorReport {
    /// Identity of the checkpoint.
    pub id: String,
    /// Size of all files of the copy.
    pub bytes: u64,
    /// Bytes sent by this call; the others existed already.
    pub sent_bytes: u64,
    /// Number of files of the copy.
    pub files: usize,
    /// Duration in seconds.
    pub seconds: f64,
}

/// Copies the complete checkpoint at `from` to `to` in a bucket, except for what exists there
/// already.
///
/// # Errors
/// [`Error::Corrupt`] for a damaged checkpoint, of which no further byte is sent. [`Error::Exists`]
/// if `to` holds another checkpoint. [`Error::NotFound`], [`Error::Incomplete`],
/// [`Error::Partial`], [`Error::Interrupted`], and those of the system and the store. Another call
/// resumes after a failure.
pub fn mirror(
    from: &Path,
    to: &Path,
    mirroring: &Mirroring,
    options: &Options,
    progress: &Progress,
) -> Result<MirrorReport> {
    let begun = Instant::now();
    let _span = trace::span("mirror");
    let ends = Ends::open(from, to, mirroring, options, progress)?;
    let (bytes, files) = ends.checkpoint.size();
    let Ends {
        checkpoint,
        objects,
        source,
        reads,
        sends,
    } = ends;
    let mut copy = Copy {
        from,
        to,
        text: manifest_text(&checkpoint, source.files())?,
        reads,
        sends,
        checkpoint: &checkpoint,
        source: source.as_ref(),
        objects: &objects,
        progress,
        sent_bytes: 0,
    };
    copy.run()?;
    let sent_bytes = copy.sent_bytes;
    Ok(MirrorReport {
        id: checkpoint.manifest().id.clone(),
        bytes,
        sent_bytes,
        files,
        seconds: begun.elapsed().as_secs_f64(),
    })
}

/// Copies the complete, clear checkpoint at `from` to `to` in a bucket, sealed with a key that
/// nothing else uses. A complete sealed copy of it that is there already stays.
///
/// # Errors
/// Those of [`mirror`]. [`Error::CannotSeal`] before anything is sent, for a checkpoint of which
/// something would stay clear, or that is sealed. Another call begins again after a failure, with
/// another key.
pub fn mirror_sealed(
    from: &Path,
    to: &Path,
    sealing: &Sealing,
    mirroring: &Mirroring,
    options: &Options,
    progress: &Progress,
) -> Result<MirrorReport> {
    let begun = Instant::now();
    let _span = trace::span("mirror");
    let ends = Ends::open(from, to, mirroring, options, progress)?;
    let copied = SealedCopy::new(from, to, &ends, progress).run(sealing)?;
    Ok(MirrorReport {
        id: ends.checkpoint.manifest().id.clone(),
        bytes: copied.bytes,
        sent_bytes: copied.sent_bytes,
        files: copied.files,
        seconds: begun.elapsed().as_secs_f64(),
    })
}

/// The stored text of a manifest, so that members added by a newer version are mirrored too.
fn manifest_text(checkpoint: &Checkpoint, files: &dyn Files) -> Result<Vec<u8>> {
    let (path, file) = (checkpoint.path(), checkpoint.path().join(MANIFEST));
    let text = files.read(&file).map_err(Error::storage("read", &file))?;
    match Manifest::parse(&text, path)?.id == checkpoint.manifest().id {
        true => Ok(text),
        false => Err(Error::Replaced {
            path: path.to_owned(),
        }),
    }
}

/// Whether a file exists only while somebody removes others.
fn is_of_removal(path: &Path) -> bool {
    let name = path.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name::is_fence(name) || name::is_tombstone(name))
}

fn removed(missing: PathBuf) -> Error {
    let detail = "a sweep has taken it, or is about to: mirror it again";
    let source = std::io::Error::new(std::io::ErrorKind::NotFound, detail);
    Error::storage("publish", missing)(source)
}

/// One mirroring in progress.
struct Copy<'a> {
    from: &'a Path,
    to: &'a Path,
    /// The text of the manifest.
    text: Vec<u8>,
    reads: Settings,
    sends: Settings,
    checkpoint: &'a Checkpoint,
    /// The file system of the source.
    source: &'a dyn FileSystem,
    objects: &'a Arc<Objects>,
    progress: &'a Progress,
    sent_bytes: u64,
}

impl Copy<'_> {
    /// A copy counts as complete once its manifest, and after that all of its files and no removal,
    /// were seen. Missing files are sent again, and the manifest is never removed: another
    /// mirroring of the same step may have reported the copy meanwhile.
    fn run(&mut self) -> Result<()> {
        let id = &self.checkpoint.manifest().id;
        let target = Arc::clone(self.objects) as Arc<dyn FileSystem>;
        let mut renewal = None;
        let mut checks = 0;
        loop {
            self.progress.check()?;
            checks += 1;
            let is_there = self.is_there()?;
            match self.flaw()? {
                None if is_there => {
                    if renewal.is_none() {
                        self.progress.advance(self.checkpoint.size().0);
                    }
                    // They may have been made since the copy, or replaced by those of other keys.
                    return self.send_signatures();
                }
                Some(path) if checks >= CHECKS_MAX => return Err(removed(path)),
                Some(path) if is_of_removal(&path) => {
                    thread::sleep(CHECK_PAUSE);
                    continue;
                }
                _ => {}
            }
            let lease = || Renewal::begin(self.to.join(name::lease(id)), &target, RENEW);
            renewal.get_or_insert_with(lease);
            self.send()?;
            if !is_there {
                self.check_sent()?;
                self.publish()?;
            }
        }
    }

    /// Sends the files that the store lacks.
    fn send(&mut self) -> Result<()> {
        let part = self.checkpoint.part();
        for file in 0..part.files.len() {
            self.send_shard(file)?;
        }
        let manifest = self.checkpoint.manifest();
        for entry in &manifest.parts {
            self.send_small(&entry.file, &entry.file, entry.bytes, entry.digest)?;
        }
        for entry in &manifest.sidecars {
            for name in [&entry.file, &entry.name] {
                self.send_small(&entry.file, name, entry.bytes, entry.digest)?;
            }
        }
        self.send_signatures()
    }

    /// Sends the signatures that there are now and that the copy lacks.
    fn send_signatures(&mut self) -> Result<()> {
        for name in name::signature_files(&self.checkpoint.manifest().id) {
            let file = self.from.join(&name);
            let text = match self.source.files().read(&file) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
                text => text.map_err(Error::storage("read", &file))?,
            };
            let bytes = text.len() as u64;
            if !self.has(&name, bytes, Digest::of(&text))? {
                self.progress.pay(bytes)?;
                let (to, id) = (self.objects.as_ref(), &self.checkpoint.manifest().id);
                signature::write(self.to, to, id, &name, &text)?;
                self.sent_bytes += bytes;
            }
        }
        Ok(())
    }

    /// Whether the copy is complete. Only a whole manifest of another id means that another
    /// checkpoint is there, since the user is told to delete it. A manifest that is not whole in
    /// two reads is damaged.
    fn is_there(&self) -> Result<bool> {
        match read_manifest(self.to, self.objects.as_ref()) {
            Ok((found, _)) if found.id == self.checkpoint.manifest().id => Ok(true),
            Ok(_) | Err(Error::Version { .. } | Error::Unknown { .. }) => Err(self.exists()),
            Err(Error::NotFound { .. } | Error::Incomplete { .. } | Error::Store { .. }) => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    fn exists(&self) -> Error {
        Error::Exists {
            path: self.to.to_owned(),
        }
    }

    /// The first missing file of the copy, or the marker of a removal.
    fn flaw(&self) -> Result<Option<PathBuf>> {
        let id = &self.checkpoint.manifest().id;
        let files = self.checkpoint.files().into_iter();
        let names = files.map(|(name, _)| name).filter(|name| *name != MANIFEST);
        flaw(self.to, self.objects.as_ref(), id, names)
    }

    /// Refuses to publish an incomplete copy: a sweep may have taken files sent long ago for those
    /// of a dead save.
    fn check_sent(&self) -> Result<()> {
        self.flaw()?.map_or(Ok(()), |missing| Err(removed(missing)))
    }

    /// Publishes the manifest, and checks that the copy is complete.
    fn publish(&mut self) -> Result<()> {
        let _span = trace::span("publish");
        let target: &dyn FileSystem = self.objects.as_ref();
        let (id, manifest) = (&self.checkpoint.manifest().id, self.to.join(MANIFEST));
        let temporary = self.to.join(name::temporary_manifest(id));
        let file = target.create_temporary(&temporary)?;
        target.change(Change::Write(&file, &self.text))?;
        target.change(Change::SyncData(&file))?;
        let published = link_new(target, &temporary, &manifest);
        target.change(Change::RemoveFile(&temporary))?;
        match (self.is_there(), published) {
            (Ok(true), _) => {}
            (Err(error @ Error::Exists { .. }), _) => return Err(error),
            (_, Err(error)) => return Err(error),
            (Err(error), _) => return Err(error),
            (Ok(false), Ok(())) => {
                let detail = "it was put there, and is not: mirror it again";
                let source = std::io::Error::new(std::io::ErrorKind::NotFound, detail);
                return Err(Error::storage("publish", manifest)(source));
            }
        }
        self.sent(self.text.len() as u64);
        Ok(())
    }

    fn sent(&mut self, bytes: u64) {
        self.sent_bytes += bytes;
        self.progress.advance(bytes);
    }

    /// Whether the store has a file with this size and digest.
    fn has(&self, name: &str, bytes: u64, digest: Digest) -> Result<bool> {
        let path = self.to.join(name);
        let has = self.objects.has(&path, bytes, digest.0);
        has.map_err(Error::storage("look at", path))
    }
}
