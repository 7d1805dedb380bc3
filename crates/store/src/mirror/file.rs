//! Sending one file of a mirrored copy: in one request, or in parts of a resumable upload.

use std::ops::Range;
use std::sync::Arc;

use penstock_io::file::Direct;
use penstock_io::file_system::{Change, FileSystem};
use penstock_object::{Part, ResumedUpload, is_of_lost_upload};

use super::Copy;
use crate::error::{Error, Result};
use crate::format::digest::Digest;
use crate::load::checkpoint::fetch::open_shard;
use crate::pipeline::send::{Sending, digest_of, send};
use crate::report::Run;

/// How often a file is restarted after somebody else ended its upload.
const ANEW_MAX: usize = 3;

impl Copy<'_> {
    /// Sends a shard.
    pub(super) fn send_shard(&mut self, file: usize) -> Result<()> {
        let entry = &self.checkpoint.part().files[file];
        let whole = Digest::of_chunks(&entry.chunks, entry.bytes);
        if entry.bytes <= self.objects.part_bytes() as u64 {
            return self.send_small(&entry.name, &entry.name, entry.bytes, whole);
        }
        let path = self.to.join(&entry.name);
        let checked = self.objects.check_size(entry.bytes);
        checked.map_err(Error::storage("send", path))?;
        for anew in 0.. {
            self.progress.check()?;
            if self.has(&entry.name, entry.bytes, whole)? {
                self.progress.advance(entry.bytes);
                return Ok(());
            }
            match self.send_parts(file) {
                Err(Error::Storage { source, .. })
                    if anew < ANEW_MAX && is_of_lost_upload(&source) => {}
                result => return result,
            }
        }
        unreachable!("it is begun anew so often and no more")
    }

    /// Sends the parts of a shard that the store lacks.
    fn send_parts(&mut self, file: usize) -> Result<()> {
        let entry = &self.checkpoint.part().files[file];
        let path = self.to.join(&entry.name);
        let part_bytes = self.objects.part_bytes() as u64;
        let range = move |number: u64, bytes: u64| {
            let start = number * part_bytes;
            start..(start + part_bytes).min(bytes)
        };
        let (bytes, chunks) = (entry.bytes, entry.chunks.clone());
        // If the store keeps no checksum of a part, at least the acknowledged length must match.
        let is_right = move |part: &Part| {
            let range = range(u64::from(part.number.saturating_sub(1)), bytes);
            part.number > 0
                && range.start < bytes
                && part.bytes == range.end - range.start
                && part
                    .crc64nvme
                    .is_none_or(|crc| digest_of(&chunks, &range) == Digest(crc))
        };
        let resumed = self.objects.resume_upload(&path, is_right);
        let ResumedUpload { file: to, parts } = resumed.map_err(Error::storage("send", &path))?;
        let is_sent = |number: &u64| {
            parts
                .iter()
                .any(|part| u64::from(part.number) == number + 1)
        };
        let missing: Vec<Range<u64>> = (0..bytes.div_ceil(part_bytes))
            .filter(|number| !is_sent(number))
            .map(|number| range(number, bytes))
            .collect();
        self.progress
            .advance(parts.iter().map(|part| part.bytes).sum());
        let from = open_shard(
            self.from,
            self.source.files(),
            entry,
            self.reads.direct,
            &mut Run::default(),
        )?;
        if !self.objects.reports_checksums() {
            let local = self.from.join(&entry.name);
            for part in &parts {
                let range = range(u64::from(part.number) - 1, bytes);
                let read = self.source.files().read_range(&local, range);
                let bytes = read.map_err(Error::storage("read", &local))?;
                self.objects.expect_part(&to, part, &bytes);
            }
        }
        let missing_bytes: u64 = missing.iter().map(|range| range.end - range.start).sum();
        let to = Arc::new(to);
        let sending = Sending {
            from: from.file,
            to: Arc::clone(&to),
            chunks: &entry.chunks,
            parts: missing,
            seal: None,
        };
        let sent = send(&sending, &self.reads, &self.sends, self.progress)?;
        if let Some(damage) = sent.damage {
            return Err(self.checkpoint.corrupt(file, &damage, &[]));
        }
        let target: &dyn FileSystem = self.objects.as_ref();
        target.change(Change::SyncData(&to))?;
        self.sent_bytes += missing_bytes;
        Ok(())
    }

    /// Sends a file in one request, under the same or another name.
    pub(super) fn send_small(
        &mut self,
        file: &str,
        name: &str,
        bytes: u64,
        digest: Digest,
    ) -> Result<()> {
        self.progress.check()?;
        if self.has(name, bytes, digest)? {
            self.progress.advance(bytes);
            return Ok(());
        }
        let text = self.read_small(file, bytes, digest)?;
        self.progress.pay(bytes)?;
        let target: &dyn FileSystem = self.objects.as_ref();
        let to = target.create(&self.to.join(name), Direct::Off)?;
        target.change(Change::Write(&to, &text))?;
        target.change(Change::SyncData(&to))?;
        self.sent(bytes);
        Ok(())
    }

    /// Reads a small file. If it does not match its digest, it is read once more, bypassing the
    /// page cache.
    fn read_small(&self, file: &str, bytes: u64, digest: Digest) -> Result<Vec<u8>> {
        let path = self.from.join(file);
        let mut found = Digest::EMPTY;
        for _ in 0..2 {
            let text = self.source.files().read(&path);
            let text = text.map_err(Error::storage("read", &path))?;
            found = Digest::of(&text);
            if found == digest && text.len() as u64 == bytes {
                return Ok(text);
            }
            if let Ok(file) = self.source.files().open(&path, Direct::Off) {
                let _ = file.drop_cache();
            }
        }
        let detail = format!("its digest is {found}, it should be {digest}");
        Err(Error::corrupt(self.from, file, detail))
    }
}
