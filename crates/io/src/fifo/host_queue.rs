//! The host's side of the FIFO: finds posts and answers them.
//!
//! Both sides count how often a slot was used, its turns, so nothing is ever cleared. A post has
//! arrived when its slot's word has the turn of its ticket: a load (acquire) of that word sees the
//! ids that were stored before it (release). An answer takes the same way back. `kernels/fifo.cuh`
//! is the other side.

use std::sync::atomic::{AtomicU64, Ordering};

/// The status of a post, as in `kernels/fifo.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// The rows are there.
    Done = 0,
    /// They are not.
    Failed = 1,
}

/// Fields of a post's word: its number of ids, and whether a launch made here has posted it.
const COUNT: u64 = 127;
const OWN: u64 = 128;

/// A number that both sides access.
pub(super) trait Word {
    fn load_relaxed(&self) -> u64;
    fn load_acquire(&self) -> u64;
    fn store_release(&self, value: u64);
}

impl Word for AtomicU64 {
    fn load_relaxed(&self) -> u64 {
        self.load(Ordering::Relaxed)
    }

    fn load_acquire(&self) -> u64 {
        self.load(Ordering::Acquire)
    }

    fn store_release(&self, value: u64) {
        self.store(value, Ordering::Release);
    }
}

/// The words of all slots.
#[derive(Clone, Copy)]
pub(super) struct HostQueue<'a, W> {
    pub(super) posted: &'a [W],
    pub(super) done: &'a [W],
    pub(super) ids: &'a [W],
}

/// A post that has arrived.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PostedIds {
    /// `None` where it has more ids than a post may have.
    pub(super) ids: Option<Vec<u64>>,
    pub(super) is_own: bool,
}

impl<W: Word> HostQueue<'_, W> {
    fn slot(&self, ticket: u64) -> usize {
        ticket as usize & (self.posted.len() - 1)
    }

    fn turn(&self, ticket: u64) -> u64 {
        ticket / self.posted.len() as u64 + 1
    }

    /// The post with a ticket, if it has arrived.
    pub(super) fn find(&self, ticket: u64) -> Option<PostedIds> {
        let slot = self.slot(ticket);
        let word = self.posted[slot].load_acquire();
        if word >> 8 != self.turn(ticket) {
            return None;
        }
        let room = self.ids.len() / self.posted.len();
        let ids = &self.ids[slot * room..][..room];
        let ids = ids.get(..(word & COUNT) as usize);
        Some(PostedIds {
            ids: ids.map(|ids| ids.iter().map(Word::load_relaxed).collect()),
            is_own: word & OWN != 0,
        })
    }

    /// Answers the post with a ticket; its warp sees the rows that were written to the slot before.
    pub(super) fn answer(&self, ticket: u64, answer: Answer) {
        let word = self.turn(ticket) << 8 | answer as u64;
        self.done[self.slot(ticket)].store_release(word);
    }
}

#[cfg(test)]
mod tests {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic::AtomicU64;
    use loom::thread;

    use super::*;

    impl Word for AtomicU64 {
        fn load_relaxed(&self) -> u64 {
            self.load(Ordering::Relaxed)
        }

        fn load_acquire(&self) -> u64 {
            self.load(Ordering::Acquire)
        }

        fn store_release(&self, value: u64) {
            self.store(value, Ordering::Release);
        }
    }

    /// A FIFO of one slot, for all posts, with room for one id and its row.
    struct Machine {
        head: AtomicU64,
        left: AtomicU64,
        posted: [AtomicU64; 1],
        done: [AtomicU64; 1],
        ids: [AtomicU64; 1],
        row: UnsafeCell<u64>,
    }

    impl Machine {
        fn new() -> Machine {
            Machine {
                head: AtomicU64::new(0),
                left: AtomicU64::new(0),
                posted: [AtomicU64::new(0)],
                done: [AtomicU64::new(0)],
                ids: [AtomicU64::new(0)],
                row: UnsafeCell::new(0),
            }
        }

        fn host_queue(&self) -> HostQueue<'_, AtomicU64> {
            HostQueue {
                posted: &self.posted,
                done: &self.done,
                ids: &self.ids,
            }
        }

        /// The steps of a warp, as in `fifo.cuh`, except that it gives up instead of waiting. It
        /// releases the slot with the ordering `release`. Returns whether it got its row.
        fn gather(&self, id: u64, release: Ordering) -> bool {
            let turn = self.head.fetch_add(1, Ordering::Relaxed);
            if self.left.load(Ordering::Acquire) != turn {
                return false;
            }
            self.ids[0].store(id, Ordering::Relaxed);
            self.posted[0].store((turn + 1) << 8 | OWN | 1, Ordering::Release);
            if self.done[0].load(Ordering::Acquire) >> 8 != turn + 1 {
                return false;
            }
            // SAFETY: loom reports a concurrent write.
            let row = self.row.with(|row| unsafe { *row });
            assert_eq!(row, 100 * id);
            self.left.store(turn + 1, release);
            true
        }

        /// Answers a post, if it has arrived.
        fn serve(&self, ticket: u64) {
            let Some(found) = self.host_queue().find(ticket) else {
                return;
            };
            assert!(found.is_own);
            let id = found.ids.unwrap()[0];
            // SAFETY: loom reports a concurrent read or write.
            self.row.with_mut(|row| unsafe { *row = 100 * id });
            self.host_queue().answer(ticket, Answer::Done);
        }
    }

    /// Explores all interleavings of two warps and the host; returns in how many both warps got
    /// their rows.
    fn explore(release: Ordering) -> usize {
        let served = std::sync::Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let counted = std::sync::Arc::clone(&served);
        loom::model(move || {
            let machine = Arc::new(Machine::new());
            let warps = [1, 2].map(|id| {
                let machine = Arc::clone(&machine);
                thread::spawn(move || machine.gather(id, release))
            });
            machine.serve(0);
            machine.serve(1);
            if warps.map(|warp| warp.join().unwrap()) == [true, true] {
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        served.load(Ordering::Relaxed)
    }

    #[test]
    fn each_warp_gets_its_own_rows_in_every_order_of_things() {
        assert!(explore(Ordering::Release) > 0);
    }

    #[test]
    #[should_panic = "Causality violation"]
    fn a_slot_that_is_left_too_early_is_found() {
        explore(Ordering::Relaxed);
    }

    #[test]
    fn more_ids_than_there_is_room_for_are_reported() {
        loom::model(|| {
            let machine = Machine::new();
            machine.posted[0].store(1 << 8 | 2, Ordering::Release);
            let found = machine.host_queue().find(0);
            let (ids, is_own) = (None, false);
            assert_eq!(found, Some(PostedIds { ids, is_own }));
            assert_eq!(machine.host_queue().find(1), None);
        });
    }
}
