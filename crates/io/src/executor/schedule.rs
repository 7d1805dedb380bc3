//! The order of requests from several shares: weighted turns (deficit round robin, Shreedhar and
//! Varghese, SIGCOMM 1995).

use std::collections::VecDeque;
use std::sync::Arc;

use slab::Slab;

use super::pieces::{RequestPart, Rest};
use super::transfer::TransferState;

/// Bytes that a share of weight 1 moves in a turn.
const QUANTUM_BYTES: u64 = 1 << 20;

/// The least that an operation is charged: its cost regardless of bytes.
const PIECE_BYTES_MIN: u64 = 4096;

/// Requests that have not begun completely, by share.
pub(super) struct Schedule {
    shares: Slab<Queue>,
    /// Shares with waiting requests; the first one has its turn.
    turns: VecDeque<usize>,
    queued: usize,
    block_bytes: u64,
}

struct Queue {
    weight: u64,
    rests: VecDeque<(Rest, Arc<TransferState>)>,
    /// Bytes that it may still move in this turn.
    credit_bytes: u64,
    /// Whether its owner is gone, so that no requests follow.
    is_abandoned: bool,
}

/// The next step of the schedule.
pub(super) enum Next {
    /// An operation to start.
    RequestPart(RequestPart, Arc<TransferState>),
    /// A request to skip, as its transfer is over.
    Over(Arc<TransferState>),
}

impl Schedule {
    pub(super) fn new(block_bytes: u64) -> Schedule {
        Schedule {
            shares: Slab::new(),
            turns: VecDeque::new(),
            queued: 0,
            block_bytes,
        }
    }

    pub(super) fn add_share(&mut self, weight: u32) -> usize {
        self.shares.insert(Queue {
            weight: u64::from(weight.max(1)),
            rests: VecDeque::new(),
            credit_bytes: 0,
            is_abandoned: false,
        })
    }

    /// Removes a share once it has no requests left.
    pub(super) fn remove_share(&mut self, share: usize) {
        self.shares[share].is_abandoned = true;
        self.forget_if_empty(share);
    }

    fn forget_if_empty(&mut self, share: usize) {
        if self.shares[share].is_abandoned && self.shares[share].rests.is_empty() {
            self.shares.remove(share);
        }
    }

    /// Requests that have not begun completely.
    pub(super) fn queued(&self) -> usize {
        self.queued
    }

    /// Appends requests to those of the same share.
    pub(super) fn push(&mut self, share: usize, rests: Vec<Rest>, state: &Arc<TransferState>) {
        let queue = &mut self.shares[share];
        if queue.rests.is_empty() && !rests.is_empty() {
            queue.credit_bytes = 0;
            self.turns.push_back(share);
        }
        self.queued += rests.len();
        let rests = rests.into_iter().map(|rest| (rest, Arc::clone(state)));
        queue.rests.extend(rests);
    }

    /// Takes the next piece, if there is one.
    pub(super) fn take(&mut self) -> Option<Next> {
        loop {
            let share = *self.turns.front()?;
            let queue = &mut self.shares[share];
            let (rest, state) = queue.rests.front_mut().expect("it has something to do");
            if state.is_over() {
                let (_, state) = queue.rests.pop_front().expect("it was there");
                self.queued -= 1;
                self.end_turn_if_empty(share);
                return Some(Next::Over(state));
            }
            let cost = rest.next_bytes(self.block_bytes).max(PIECE_BYTES_MIN);
            if queue.credit_bytes < cost {
                queue.credit_bytes += QUANTUM_BYTES * queue.weight;
                self.turns.rotate_left(1);
                continue;
            }
            queue.credit_bytes -= cost;
            let piece = rest.take(self.block_bytes);
            let is_last = rest.is_empty();
            state.begin(is_last);
            let state = Arc::clone(state);
            if is_last {
                queue.rests.pop_front();
                self.queued -= 1;
                self.end_turn_if_empty(share);
            }
            return Some(Next::RequestPart(piece, state));
        }
    }

    fn end_turn_if_empty(&mut self, share: usize) {
        if self.shares[share].rests.is_empty() {
            self.turns.pop_front();
            self.forget_if_empty(share);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Memory;
    use crate::executor::request::{Kind, Landing, Request, Target};
    use crate::executor::transfer::Transfer;
    use crate::file::{Direct, File};

    const BLOCK: u64 = 1 << 20;

    fn target() -> (tempfile::TempDir, Target) {
        let directory = tempfile::tempdir().unwrap();
        let file = File::create(&directory.path().join("file"), Direct::Off).unwrap();
        let file = Arc::new(file);
        (directory, Target { file, edges: None })
    }

    fn reads(target: &Target, count: usize, bytes: usize) -> (Vec<Rest>, Transfer) {
        let read = || {
            let buf = Memory::allocate(bytes).unwrap().share().1;
            Rest::of(Request {
                target: target.clone(),
                offset: 0,
                kind: Kind::Read(Landing::Window(buf)),
            })
        };
        let rests = (0..count).map(|_| read()).collect();
        let process = crate::process::id();
        (rests, Transfer::new(count, Vec::new(), process))
    }

    /// The bytes that each transfer gets among the first `pieces` pieces.
    fn first(schedule: &mut Schedule, of: &[&Transfer], pieces: usize) -> Vec<u64> {
        let mut bytes = vec![0; of.len()];
        for _ in 0..pieces {
            let Some(Next::RequestPart(piece, state)) = schedule.take() else {
                panic!("there is more to do")
            };
            let whose = of.iter().position(|one| Arc::ptr_eq(&one.state, &state));
            bytes[whose.unwrap()] += piece.bytes;
        }
        bytes
    }

    #[test]
    fn shares_move_bytes_by_their_weights() {
        let (_directory, target) = target();
        let mut schedule = Schedule::new(BLOCK);
        let (one, three) = (schedule.add_share(1), schedule.add_share(3));
        let (rests, large) = reads(&target, 1, 64 << 20);
        schedule.push(one, rests, &large.state);
        let (rests, small) = reads(&target, 64 * 256, 4096);
        schedule.push(three, rests, &small.state);
        // Three mebibytes in pages for each mebibyte in a block.
        let bytes = first(&mut schedule, &[&large, &small], 10 * (1 + 3 * 256));
        let ratio = bytes[1] as f64 / bytes[0] as f64;
        assert!((2.4..=3.6).contains(&ratio), "{bytes:?}");
    }

    #[test]
    fn who_comes_late_waits_for_no_backlog() {
        let (_directory, target) = target();
        let mut schedule = Schedule::new(BLOCK);
        let (early, late) = (schedule.add_share(1), schedule.add_share(1));
        let (rests, backlog) = reads(&target, 1, 1 << 30);
        schedule.push(early, rests, &backlog.state);
        first(&mut schedule, &[&backlog], 100);
        let (rests, urgent) = reads(&target, 1, 4096);
        schedule.push(late, rests, &urgent.state);
        let bytes = first(&mut schedule, &[&backlog, &urgent], 3);
        assert_eq!(bytes[1], 4096, "{bytes:?}");
    }

    #[test]
    fn a_share_is_forgotten_with_its_last_request() {
        let (_directory, target) = target();
        let mut schedule = Schedule::new(BLOCK);
        let share = schedule.add_share(1);
        let (rests, transfer) = reads(&target, 2, 4096);
        schedule.push(share, rests, &transfer.state);
        schedule.remove_share(share);
        first(&mut schedule, &[&transfer], 2);
        assert!(schedule.take().is_none());
        assert!(schedule.is_empty() && schedule.shares.is_empty());
        assert_eq!(schedule.queued(), 0);
        let share = schedule.add_share(1);
        let (rests, cancelled) = reads(&target, 2, 4096);
        schedule.push(share, rests, &cancelled.state);
        cancelled.cancel().unwrap();
        for _ in 0..2 {
            assert!(matches!(schedule.take(), Some(Next::Over(_))));
        }
        assert!(schedule.take().is_none());
    }
}
