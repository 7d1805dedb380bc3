//! A survey: finds which tensors of a damaged checkpoint are intact, which are hit, and by which
//! damage.
//!
//! It reads files that a load refuses: truncated shards, shards with unreadable sectors, and, if
//! manifest or parts are gone, the headers of the shards. Headers carry no digests, so tensors
//! known by headers alone are *unverified*; a caller gets them only on request.
//!
//! Each rank is described separately, so that a loss in one rank is no loss in another. A tensor
//! that ranks share is assembled from the boxes in all of their parts.

mod describe;
mod findings;
mod shared;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use penstock_io::file::Direct;
use penstock_io::file_system::{Files, Kind};

use crate::error::{Error, Result};
use crate::format::digest::CHUNK_BYTES;
use crate::format::part::TensorEntry;
use crate::format::plain;
use crate::options::Options;
use crate::pipeline::damage::Damage;
use crate::pipeline::read::{Hashing, OnDamage, Source, read};
use crate::plan::read::plan;
use crate::progress::Progress;
use crate::report::{Problem, Run};
use crate::seal::Unsealing;
pub use describe::Described;
use describe::describe;
pub(crate) use describe::loss;
pub use findings::{SharedTensor, Survey};

/// Examines everything readable of the checkpoint at `path`.
///
/// # Errors
/// [`Error::NotFound`], [`Error::Version`], [`Error::Interrupted`]; [`Error::Corrupt`] if nothing
/// shows which tensors there were; and system errors, except those that mean lost bytes.
/// [`Error::Sealed`] for a sealed checkpoint.
pub fn survey(path: &Path, options: &Options, progress: &Progress) -> Result<Survey> {
    survey_with(path, options, &Unsealing::default(), progress)
}

/// Examines a checkpoint as [`survey`] does, also a sealed one. Its bytes are compared with their
/// digests and not opened, so a chunk that was tampered with counts as intact.
///
/// # Errors
/// Those of [`survey`], and those of [`Checkpoint::open_with`] about its manifest. A part that does
/// not open is a problem, as a lost one is.
///
/// [`Checkpoint::open_with`]: crate::load::checkpoint::Checkpoint::open_with
pub fn survey_with(
    path: &Path,
    options: &Options,
    unsealing: &Unsealing,
    progress: &Progress,
) -> Result<Survey> {
    let begun = Instant::now();
    // One request per digest chunk: otherwise chunks read together with a bad sector would be lost
    // too.
    let options = Options {
        extent_bytes: Some(CHUNK_BYTES as usize),
        ..options.clone()
    };
    let mut survey = Survey::of(describe(path, options.file_system.files(), unsealing)?);
    survey.check_files(path, &options, progress)?;
    survey.shared = shared::assess(&survey);
    survey.seconds = begun.elapsed().as_secs_f64();
    Ok(survey)
}

impl Survey {
    /// Opens the given files as far as they exist; returns them in order with their numbers. Sealed
    /// ones are read as they are, or if `opens` opened by chunks.
    pub(crate) fn open(
        &self,
        path: &Path,
        files: &dyn Files,
        direct: Direct,
        opens: bool,
        is_wanted: impl Fn(usize) -> bool,
    ) -> Result<Vec<(usize, Source<'_>)>> {
        let mut sources = Vec::new();
        for (number, entry) in self.part.files.iter().enumerate() {
            let bytes = self.usable_bytes[number];
            if bytes > 0 && is_wanted(number) {
                let file = Arc::new(files.open(&path.join(&entry.name), direct)?);
                // Files known only by their headers have no digests.
                let has_digests = !entry.chunks.is_empty();
                let chunks = has_digests.then_some(entry.chunks.as_slice());
                sources.push((
                    number,
                    Source {
                        file,
                        bytes,
                        chunks,
                        opener: self.openers.get(number).filter(|_| opens),
                        hashing: Hashing::Off,
                    },
                ));
            }
        }
        Ok(sources)
    }

    fn check_files(&mut self, path: &Path, options: &Options, progress: &Progress) -> Result<()> {
        let files = options.file_system.files();
        for number in 0..self.part.files.len() {
            let usable_bytes = self.measure(path, files, number)?;
            self.usable_bytes.push(usable_bytes);
        }
        let settings = options.choose_to_read(path, self.usable_bytes.iter().sum());
        let has_digests = |file: usize| !self.part.files[file].chunks.is_empty();
        let sources = self.open(path, files, settings.direct, false, has_digests)?;
        let (numbers, sources): (Vec<usize>, Vec<Source<'_>>) = sources.into_iter().unzip();
        let facts: Vec<_> = sources.iter().map(Source::facts).collect();
        let bytes = facts.iter().map(|file| file.bytes).sum();
        progress.expect(bytes);
        let plan = plan(&facts, &[], true, settings.extent_bytes as u64);
        let mut run = Run::default();
        let outcome = read(
            plan,
            Vec::new(),
            &sources,
            &settings,
            OnDamage::Survey,
            progress,
            &mut run,
        )?;
        drop(sources);
        for damage in &outcome.damage {
            let number = numbers[damage.file];
            let first = self.hit(number, damage);
            self.problems.push(Problem {
                file: self.part.files[number].name.clone(),
                offset: Some(damage.offset()),
                tensor: first,
                detail: damage.detail(),
                is_proven: damage.unreadable.is_none(),
            });
        }
        self.bytes_checked += bytes;
        Ok(())
    }

    /// Marks the tensors that the damage touches as hit; returns the name of the first one.
    pub(crate) fn hit(&mut self, number: usize, damage: &Damage) -> Option<String> {
        // One changed byte keeps the whole of a sealed chunk from opening.
        let whole = Damage {
            byte: None,
            ..damage.clone()
        };
        let is_sealed = !self.openers.is_empty();
        let touching = if is_sealed { &whole } else { damage };
        let file = &self.part.files[number].name;
        let mut first: Option<&TensorEntry> = None;
        for (tensor, hit) in self.part.tensors.iter().zip(&mut self.hits) {
            let is_touched = tensor.file == number && touching.touches(tensor.range);
            if is_touched && tensor.nbytes() > 0 {
                let reason = || format!("{file}, offset {}: {}", damage.offset(), damage.detail());
                hit.get_or_insert_with(reason);
                let is_first = first.is_none_or(|first| tensor.range < first.range);
                first = if is_first { Some(tensor) } else { first };
            }
        }
        first.map(|tensor| tensor.name.clone())
    }

    /// Returns how many bytes of a file are readable in whole chunks; tensors beyond that are hit.
    fn measure(&mut self, path: &Path, files: &dyn Files, number: usize) -> Result<u64> {
        let entry = &self.part.files[number];
        let file = path.join(&entry.name);
        let (usable_bytes, detail) = match files.stat(&file) {
            Ok(found) if found.kind != Kind::File => (0, plain::flaw(&found).map(str::to_owned)),
            Ok(found) if found.bytes == entry.bytes => (entry.bytes, None),
            Ok(found) => {
                let (found, expected) = (found.bytes, entry.bytes);
                let whole = match found > expected {
                    true => expected,
                    false => found - found % CHUNK_BYTES,
                };
                let detail = format!("it has {found} bytes instead of {expected}");
                (whole, Some(detail))
            }
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                self.missing_files.push(entry.name.clone());
                (0, Some("the file is missing".to_owned()))
            }
            Err(source) => return Err(Error::storage("stat", &file)(source)),
        };
        let Some(detail) = detail else {
            return Ok(usable_bytes);
        };
        for (tensor, hit) in self.part.tensors.iter().zip(&mut self.hits) {
            if tensor.file == number && tensor.range.1 > usable_bytes && tensor.nbytes() > 0 {
                hit.get_or_insert_with(|| format!("{}: {detail}", entry.name));
            }
        }
        self.problems.push(Problem {
            file: entry.name.clone(),
            offset: None,
            tensor: None,
            detail,
            is_proven: true,
        });
        Ok(usable_bytes)
    }
}
