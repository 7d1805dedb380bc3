//! Opening sealed items in their places, or on the way there.
//!
//! An item that fills new memory alone is read there and opened in place, chunk by chunk while a
//! chunk is in a cache. Nobody sees that memory if a chunk does not open. Any other item is read
//! into one staging run. A chunk whose text lies in one window of host memory is opened right
//! there, in place of the copy; another one is opened in staging and copied from there. A chunk
//! that does not open leaves zeros.

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
        let range = self.range.clone();
        if let Some(bytes) = self.alone_in_place() {
            let starts = (range.start..range.end).step_by(CHUNK_BYTES as usize);
            for (start, text) in starts.zip(bytes.chunks_mut(CHUNK_BYTES as usize)) {
                let opened = opener.open_in_place(start / CHUNK_BYTES, &[], text);
                opened.map_err(|_| start..start + text.len() as u64)?;
            }
            return Ok(());
        }
        let [run] = self.runs.as_mut_slice() else {
            unreachable!("a sealed item is planned with one piece or one run")
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

    /// The bytes of the item if it was read in place.
    fn alone_in_place(&mut self) -> Option<&mut [u8]> {
        let [landing] = self.landings.as_mut_slice() else {
            return None;
        };
        let Place::Direct { window, read } = &mut landing.place else {
            return None;
        };
        let window = window.as_mut().expect("all reads of the item are back");
        let first = (self.range.start - read.start) as usize;
        let bytes = (self.range.end - self.range.start) as usize;
        Some(&mut window.as_mut_slice()[first..first + bytes])
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
