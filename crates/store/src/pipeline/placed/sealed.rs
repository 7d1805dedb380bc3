//! Opening sealed items on the way from staging to their places.
//!
//! A sealed item is read into one staging run. A chunk whose text lies in one window of host
//! memory is opened right there, in place of the copy; another one is opened in staging and copied
//! from there. A chunk that does not open leaves zeros.

use std::ops::Range;

use super::{Landing, Place, PlacedItem};
use crate::format::digest::CHUNK_BYTES;
use crate::pipeline::target::Window;
use crate::seal::ShardOpener;

impl PlacedItem {
    /// Opens all chunks of the item, which are authentic then.
    ///
    /// # Errors
    /// The first chunk that does not open; later ones are still sealed.
    pub(in crate::pipeline) fn open(&mut self, opener: &ShardOpener) -> Result<(), Range<u64>> {
        let [run] = self.runs.as_mut_slice() else {
            unreachable!("a sealed item is planned with one run")
        };
        let buf = run.buf.as_mut().expect("all reads of the item are back");
        let staged = buf.as_mut_slice();
        let within = |range: &Range<u64>| {
            (range.start - run.read.start) as usize..(range.end - run.read.start) as usize
        };
        let starts = (self.range.start..self.range.end).step_by(CHUNK_BYTES as usize);
        for start in starts {
            let chunk = start..(start + CHUNK_BYTES).min(self.range.end);
            let header_bytes = if start == 0 { opener.header_bytes() } else { 0 };
            let text = start + header_bytes..chunk.end;
            let (header, sealed) = staged[within(&chunk)].split_at_mut(header_bytes as usize);
            let index = start / CHUNK_BYTES;
            let opened = match self
                .landings
                .iter_mut()
                .find_map(|one| one.window_of(&text))
            {
                Some(window) => opener.open(index, header, sealed, window),
                None => opener.open_in_place(index, header, sealed),
            };
            opened.map_err(|_| chunk)?;
        }
        Ok(())
    }
}

impl Landing {
    /// The memory for all of a chunk's text, if it is one window of this landing; marks it as
    /// opened.
    fn window_of(&mut self, text: &Range<u64>) -> Option<&mut [u8]> {
        if text.is_empty() || text.start < self.range.start || self.range.end < text.end {
            return None;
        }
        let Place::Staged {
            window: Some(Window::Plain(window)),
            ..
        } = &mut self.place
        else {
            return None;
        };
        // Chunks are opened in order, so the opened ones are adjacent.
        if self.opened.is_empty() {
            self.opened = text.clone();
        }
        self.opened.end = text.end;
        let first = (text.start - self.range.start) as usize;
        let bytes = (text.end - text.start) as usize;
        Some(&mut window.as_mut_slice()[first..first + bytes])
    }
}
