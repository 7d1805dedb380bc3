//! Copies rows from cache slots into a result, on the caller's thread and idle executor threads.

use std::collections::VecDeque;
use std::iter;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use penstock_io::buffer::{IoBuf, Reading, Slots, stream_copy};
use penstock_io::executor::ParallelWork;

use crate::index::Slot;

/// How long the caller spins for the pieces that others copy, one for each thread.
const SPIN_MAX: Duration = Duration::from_micros(100);

/// Rows that are fetched while others are copied.
const PREFETCHED: usize = 8;

/// Results from this size on leave the processor's caches before they are read.
const STREAMED_BYTES: usize = 32 << 20;

/// Pieces of a result that are to be copied, and those that are finished.
#[derive(Debug)]
pub(crate) struct Copying {
    slots: Arc<Slots>,
    width: usize,
    /// Whether the result exceeds the processor's caches and is written past them.
    is_streamed: bool,
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Progress {
    left: VecDeque<ResultPiece>,
    /// Number of pieces added.
    pushed: usize,
    /// Pieces being copied.
    under_way: usize,
    done: Vec<Copied>,
}

/// A piece of a result.
#[derive(Debug)]
pub(crate) struct ResultPiece {
    /// Position of its first row in the batch.
    pub(crate) first: usize,
    pub(crate) memory: IoBuf,
    /// Positions in it, and the slots of their rows.
    pub(crate) there: Vec<(usize, Slot)>,
}

/// A finished piece.
#[derive(Debug)]
pub(crate) struct Copied {
    pub(crate) first: usize,
    pub(crate) memory: IoBuf,
    /// Positions whose slots are being written.
    pub(crate) coming: Vec<usize>,
    /// How many rows were copied.
    pub(crate) rows: usize,
}

impl Copying {
    /// Copies rows of `width` bytes into a result of `bytes` bytes.
    pub(crate) fn new(slots: &Arc<Slots>, width: usize, bytes: usize) -> Arc<Copying> {
        Arc::new(Copying {
            slots: Arc::clone(slots),
            width,
            is_streamed: bytes >= STREAMED_BYTES,
            progress: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Adds a piece.
    pub(crate) fn push(&self, piece: ResultPiece) {
        let mut progress = self.lock();
        progress.left.push_back(piece);
        progress.pushed += 1;
    }

    /// Copies the remaining pieces, waits for those that others copy, and returns all of them in
    /// order.
    ///
    /// # Panics
    /// If copying has panicked on another thread.
    pub(crate) fn finish(&self, reading: &Reading<'_>) -> Vec<Copied> {
        while self.copy_one(reading) {}
        let until = Instant::now() + SPIN_MAX;
        loop {
            let mut progress = self.lock();
            let is_over = Instant::now() >= until;
            while is_over && progress.under_way > 0 {
                let waited = self.changed.wait(progress);
                progress = waited.unwrap_or_else(PoisonError::into_inner);
            }
            if progress.under_way == 0 {
                let mut done = std::mem::take(&mut progress.done);
                assert_eq!(done.len(), progress.pushed, "each piece comes back");
                done.sort_unstable_by_key(|one| one.first);
                return done;
            }
            drop(progress);
            std::hint::spin_loop();
        }
    }

    /// Copies the rows of one piece, if one is left.
    fn copy_one(&self, reading: &Reading<'_>) -> bool {
        let mut progress = self.lock();
        let Some(piece) = progress.left.pop_front() else {
            return false;
        };
        progress.under_way += 1;
        drop(progress);
        // If copying panics, the caller must not wait forever.
        let under_way = UnderWay(self);
        let copied = piece.copied(reading, self.width, self.is_streamed);
        self.lock().done.push(copied);
        drop(under_way);
        true
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A piece that is being copied.
struct UnderWay<'a>(&'a Copying);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        let mut progress = self.0.lock();
        progress.under_way -= 1;
        if progress.under_way == 0 {
            self.0.changed.notify_all();
        }
    }
}

impl ParallelWork for Copying {
    fn run_part(&self) -> bool {
        // A thread that waits to write a slot blocks new readers, and that wait may depend on the
        // caller, who must not wait for this thread. The caller then copies alone.
        match self.slots.try_read() {
            Some(reading) => self.copy_one(&reading),
            None => false,
        }
    }
}

impl ResultPiece {
    fn copied(mut self, reading: &Reading<'_>, width: usize, is_streamed: bool) -> Copied {
        let mut coming = Vec::new();
        let out = &mut self.memory;
        match is_streamed {
            true => copy_by(
                stream_copy,
                reading,
                &self.there,
                self.first,
                width,
                out,
                &mut coming,
            ),
            false => copy_rows(reading, &self.there, self.first, width, out, &mut coming),
        }
        Copied {
            first: self.first,
            rows: self.there.len() - coming.len(),
            memory: self.memory,
            coming,
        }
    }
}

/// Copies rows of `width` bytes from slots into a part of a result that begins at position
/// `begin`; adds the positions whose slots are being written to `coming`.
pub(super) fn copy_rows(
    reading: &Reading<'_>,
    there: &[(usize, Slot)],
    begin: usize,
    width: usize,
    out: &mut IoBuf,
    coming: &mut Vec<usize>,
) {
    let copy = |from: &[u8], to: &mut [u8]| to.copy_from_slice(from);
    copy_by(copy, reading, there, begin, width, out, coming);
}

fn copy_by(
    copy: impl Fn(&[u8], &mut [u8]),
    reading: &Reading<'_>,
    there: &[(usize, Slot)],
    begin: usize,
    width: usize,
    out: &mut IoBuf,
    coming: &mut Vec<usize>,
) {
    let out = out.as_mut_slice();
    let ahead = there
        .iter()
        .skip(PREFETCHED)
        .map(Some)
        .chain(iter::repeat(None));
    for (&(position, slot), ahead) in there.iter().zip(ahead) {
        if let Some(&(_, slot)) = ahead {
            reading.prefetch(slot);
        }
        let Some(bytes) = reading.slot(slot) else {
            coming.push(position);
            continue;
        };
        let start = (position - begin) * width;
        copy(&bytes[..width], &mut out[start..start + width]);
    }
}

/// A part of a result, divided into pieces of equally many rows, except for the last.
#[derive(Debug)]
pub(crate) struct Pieces {
    /// Position of its first row in the batch.
    begin: usize,
    width: usize,
    /// Rows of a piece.
    rows: usize,
    pieces: VecDeque<IoBuf>,
}

impl Pieces {
    /// Divides a part that begins at a position.
    pub(crate) fn of(out: IoBuf, begin: usize, width: usize, rows: usize) -> Pieces {
        let mut pieces = VecDeque::with_capacity(out.len().div_ceil(rows * width));
        let mut rest = out;
        while rest.len() > rows * width {
            let behind = rest.split_off(rows * width);
            pieces.push_back(std::mem::replace(&mut rest, behind));
        }
        pieces.push_back(rest);
        Pieces {
            begin,
            width,
            rows,
            pieces,
        }
    }

    /// A result in one piece.
    pub(crate) fn whole(out: IoBuf, width: usize) -> Pieces {
        let rows = (out.len() / width).max(1);
        Pieces::of(out, 0, width, rows)
    }

    /// Takes the next piece. All pieces must be taken and put back in order before places are
    /// used.
    ///
    /// # Panics
    /// If none is left.
    pub(crate) fn take(&mut self) -> IoBuf {
        self.pieces.pop_front().expect("there is one left")
    }

    /// Puts back the oldest piece that was taken.
    pub(crate) fn put(&mut self, memory: IoBuf) {
        self.pieces.push_back(memory);
    }

    /// The memory of a row.
    ///
    /// # Panics
    /// If the part has no such row.
    pub(crate) fn place(&mut self, position: usize) -> &mut [u8] {
        let position = position - self.begin;
        let start = position % self.rows * self.width;
        &mut self.pieces[position / self.rows].as_mut_slice()[start..start + self.width]
    }

    /// Splits off the memory of each row at these positions, in ascending order.
    pub(crate) fn carve(self, positions: &[usize]) -> Vec<IoBuf> {
        let mut places: Vec<IoBuf> = Vec::with_capacity(positions.len());
        let mut rest = positions;
        for (mut piece, first) in self
            .pieces
            .into_iter()
            .zip((self.begin..).step_by(self.rows))
        {
            let here = rest.partition_point(|&position| position < first + self.rows);
            let (mine, behind) = rest.split_at(here);
            rest = behind;
            let begin = places.len();
            for &position in mine.iter().rev() {
                let mut memory = piece.split_off((position - first) * self.width);
                drop(memory.split_off(self.width));
                places.push(memory);
            }
            places[begin..].reverse();
        }
        places
    }
}

#[cfg(test)]
mod tests {
    use penstock_io::buffer::Memory;

    use super::*;

    #[test]
    fn pieces_go_and_come_back_and_places_stay() {
        let (handle, mut out) = Memory::allocate(70).unwrap().share();
        for (position, row) in out.as_mut_slice().chunks_mut(10).enumerate() {
            row.fill(position as u8);
        }
        let mut pieces = Pieces::of(out, 0, 10, 3);
        let away: Vec<IoBuf> = (0..3).map(|_| pieces.take()).collect();
        away.into_iter().for_each(|piece| pieces.put(piece));
        for position in 0..7 {
            assert_eq!(pieces.place(position), [position as u8; 10]);
        }
        let rows = pieces.carve(&[0, 2, 3, 6]);
        let found: Vec<u8> = rows.iter().map(|row| row.as_slice()[9]).collect();
        assert_eq!(found, [0, 2, 3, 6]);
        drop((rows, handle));
        assert!(
            Pieces::whole(Memory::allocate(0).unwrap().share().1, 10)
                .carve(&[])
                .is_empty()
        );
    }

    #[test]
    fn what_nobody_helps_with_is_copied_all_the_same() {
        let slots = Slots::allocate(4, 8).unwrap();
        for slot in 0..4 {
            slots
                .claim(slot)
                .unwrap()
                .as_mut_slice()
                .fill(slot as u8 + 1);
        }
        let coming = slots.claim(2).unwrap();
        let (handle, out) = Memory::allocate(40).unwrap().share();
        let mut pieces = Pieces::of(out, 0, 8, 2);
        let copying = Copying::new(&slots, 8, 40);
        let reading = slots.read();
        for (first, there) in [
            (0, vec![(0, 3), (1, 2)]),
            (2, vec![(3, 0)]),
            (4, vec![(4, 1)]),
        ] {
            let memory = pieces.take();
            copying.push(ResultPiece {
                first,
                memory,
                there,
            });
        }
        assert!(copying.run_part(), "another one reads too");
        let done = copying.finish(&reading);
        assert!(!copying.run_part(), "nothing is left");
        let coming_at: Vec<usize> = done.iter().flat_map(|one| one.coming.clone()).collect();
        assert_eq!(coming_at, [1]);
        assert_eq!(done.iter().map(|one| one.rows).sum::<usize>(), 3);
        done.into_iter().for_each(|one| pieces.put(one.memory));
        let found: Vec<u8> = (0..5).map(|position| pieces.place(position)[7]).collect();
        assert_eq!(found, [4, 0, 0, 1, 2]);
        drop((coming, handle));
    }
}
