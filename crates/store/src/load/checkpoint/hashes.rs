//! The hashes of the chunks of signed shards.
//!
//! A part may hold them; they are believed if they add up to the hash that the signature lists.
//! Otherwise the whole shard is read once, before anything of it is loaded. Either way each chunk is
//! compared when it is loaded, so nothing is handed out that was exchanged in between.

use std::sync::Mutex;

use super::Checkpoint;
use crate::error::{Error, Result};
use crate::options::{Options, Settings};
use crate::pipeline::read::{Hashing, OnDamage, Source, read};
use crate::plan::read::{FileFacts, plan};
use crate::progress::Progress;
use crate::report::Run;
use crate::sign::{ChunkHash, Hashes};

impl Checkpoint {
    /// How the chunks of a shard are checked while they are loaded; see
    /// [`learn_hashes`](Self::learn_hashes).
    pub(super) fn hashing(&self, file: usize) -> Hashing<'_> {
        match &self.signed {
            None => Hashing::Off,
            Some(_) => Hashing::Compare(self.chunk_hashes(file).expect("they were learned")),
        }
    }

    /// The signed hashes of the chunks of a shard, if they are known.
    fn chunk_hashes(&self, file: usize) -> Option<&[ChunkHash]> {
        let signed = self.signed.as_ref()?;
        signed.chunks[file].get().map(|hashes| hashes.0.as_slice())
    }

    /// The signed hashes of the chunks of a shard, read from it if they are not known; `None` if no
    /// signature is demanded.
    ///
    /// # Errors
    /// [`Error::Signature`] if the shard is not the signed one, and those of a load.
    pub(crate) fn learned_hashes(&self, file: usize) -> Result<Option<&[ChunkHash]>> {
        if self.signed.is_some() && self.chunk_hashes(file).is_none() {
            let options = Options {
                file_system: std::sync::Arc::clone(&self.file_system),
                ..Options::default()
            };
            let settings = options.choose_to_read(&self.path, self.part.files[file].bytes);
            let mut run = Run::default();
            let sources = self.open_files(&[file], settings.direct, &mut run)?;
            let progress = Progress::default();
            self.learn_hashes(&[file], &sources, &settings, &progress, &mut run)?;
        }
        Ok(self.chunk_hashes(file))
    }

    /// Reads the shards with the numbers in `used` whose chunk hashes are not known, and compares
    /// them with the signature.
    ///
    /// # Errors
    /// [`Error::Signature`] if one is not the signed one, and those of a load.
    pub(super) fn learn_hashes(
        &self,
        used: &[usize],
        sources: &[Source<'_>],
        settings: &Settings,
        progress: &Progress,
        run: &mut Run,
    ) -> Result<()> {
        let Some(signed) = &self.signed else {
            return Ok(());
        };
        let unknown: Vec<usize> = (0..used.len())
            .filter(|&index| signed.chunks[used[index]].get().is_none())
            .collect();
        let sinks: Vec<Mutex<Vec<ChunkHash>>> = unknown
            .iter()
            .map(|&index| Mutex::new(vec![[0; 32]; self.part.files[used[index]].chunks.len()]))
            .collect();
        let read_whole: Vec<Source<'_>> = unknown
            .iter()
            .zip(&sinks)
            .map(|(&index, sink)| Source {
                file: std::sync::Arc::clone(&sources[index].file),
                bytes: sources[index].bytes,
                chunks: sources[index].chunks,
                opener: None,
                hashing: Hashing::Collect(sink),
            })
            .collect();
        if read_whole.is_empty() {
            return Ok(());
        }
        let facts: Vec<FileFacts> = read_whole.iter().map(Source::facts).collect();
        let plan = plan(&facts, &[], true, settings.extent_bytes as u64);
        // Damage differs from the signed file, too: only digests tell the two apart.
        let settings = Settings {
            verify: true,
            ..settings.clone()
        };
        let stop = OnDamage::Stop;
        let outcome = read(
            plan,
            Vec::new(),
            &read_whole,
            &settings,
            stop,
            progress,
            run,
        )?;
        let number = |index: usize| used[unknown[index]];
        if let Some(damage) = outcome.damage.first() {
            return Err(self.corrupt(number(damage.file), damage, &[]));
        }
        drop(read_whole);
        for (index, sink) in sinks.into_iter().enumerate() {
            let file = number(index);
            let shard = &self.part.files[file];
            let hashes = Hashes(sink.into_inner().expect("no worker panics with the lock"));
            if hashes.root(shard.bytes) != signed.files[file] {
                let signer = &signed.signer;
                let detail = format!("it is not the file that {signer} signed");
                return Err(Error::signature(&self.path, &shard.name, detail));
            }
            // Another thread may have learned the same.
            let _ = signed.chunks[file].set(hashes);
        }
        Ok(())
    }
}
