//! Staging memory that is kept between saves.

use std::num::NonZeroUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use penstock_cuda::Device;
use penstock_io::buffer::{Pool, available_bytes};

/// Staging memory that is reused by successive saves, so that page faults occur only in the first.
/// Clones share it.
///
/// Jobs that share an arena share its budget. A job whose staging is incomplete must not wait for
/// one that begins to stage later: that one may take the last buffer.
#[derive(Clone, Debug)]
pub struct Arena {
    budget_bytes: Option<usize>,
    sharers: NonZeroUsize,
    pools: Arc<Mutex<Pools>>,
}

#[derive(Debug, Default)]
struct Pools {
    current: Option<Pool>,
    /// Pools of other buffer sizes that a save still uses.
    retired: Vec<Pool>,
}

impl Arena {
    /// An empty arena. It holds at most `budget_bytes`, but always enough for one worker; without a
    /// budget it grows to the largest state, up to half of the available memory, see
    /// [`Arena::shared_by`].
    pub fn new(budget_bytes: Option<usize>) -> Arena {
        Arena {
            budget_bytes,
            sharers: NonZeroUsize::MIN,
            pools: Arc::default(),
        }
    }

    /// Sets how many processes of this machine have such an arena, including this one. Without a
    /// budget, they all see the same available memory at the same time, so each uses its share of
    /// the half. A budget applies per process.
    #[must_use]
    pub fn shared_by(self, sharers: NonZeroUsize) -> Arena {
        Arena { sharers, ..self }
    }

    /// The budget, if one was given.
    pub(crate) fn budget_bytes(&self) -> Option<usize> {
        self.budget_bytes
    }

    /// Returns memory that no save uses to the system, including pinned memory kept by other saves
    /// and loads.
    pub fn release(&self) {
        Pool::release_kept();
        let pools = self.lock();
        pools.all().for_each(Pool::release_free);
    }

    /// Memory held now, in use or not.
    pub fn held_bytes(&self) -> usize {
        self.lock().all().map(Pool::held_bytes).sum()
    }

    /// Peak memory used by saves, since the buffers have their present size.
    pub fn peak_bytes(&self) -> usize {
        let pools = self.lock();
        pools.current.as_ref().map_or(0, Pool::peak_bytes)
    }

    /// A pool of `buffer_bytes` buffers for a save that could use `wanted_bytes` of memory and
    /// needs at least `least_bytes`; pinned if a device copies to it.
    pub(crate) fn pool(
        &self,
        buffer_bytes: usize,
        wanted_bytes: usize,
        least_bytes: usize,
        device: Option<&Arc<Device>>,
    ) -> Pool {
        let mut pools = self.lock();
        pools.retire_unless(buffer_bytes, device.is_some());
        let others_bytes: usize = pools.retired.iter().map(Pool::held_bytes).sum();
        let budget_bytes = match self.budget_bytes {
            Some(budget_bytes) => budget_bytes.saturating_sub(others_bytes),
            None => {
                let held_bytes = pools.current.as_ref().map_or(0, Pool::held_bytes);
                // Unknown available memory sets no limit.
                let free_bytes = available_bytes().unwrap_or(usize::MAX);
                // The other processes hold about as much already, which is not available any more.
                wanted_bytes.min((free_bytes / self.sharers).saturating_add(held_bytes) / 2)
            }
        };
        let budget_bytes = budget_bytes.max(least_bytes);
        let pool = pools.current.get_or_insert_with(|| match device {
            None => Pool::new(buffer_bytes, budget_bytes),
            Some(device) => Pool::pinned(buffer_bytes, budget_bytes, device),
        });
        pool.raise_budget(budget_bytes);
        pool.clone()
    }

    /// A panic cannot leave the pools inconsistent, so a poisoned lock is usable.
    fn lock(&self) -> MutexGuard<'_, Pools> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pools {
    fn all(&self) -> impl Iterator<Item = &Pool> {
        self.retired.iter().chain(&self.current)
    }

    /// Retires the current pool if its buffers do not fit, and forgets retired pools that are
    /// unused. Pinned buffers serve the host as well.
    fn retire_unless(&mut self, buffer_bytes: usize, for_device: bool) {
        // In a forked child, pinned buffers are not pinned.
        self.current.take_if(|pool| !pool.is_ours());
        self.retired.retain(Pool::is_ours);
        let is_other = |pool: &mut Pool| {
            pool.buffer_bytes() != buffer_bytes || for_device && !pool.is_pinned()
        };
        self.retired.extend(self.current.take_if(is_other));
        self.retired.retain(|pool| {
            pool.release_free();
            pool.held_bytes() > 0
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn without_a_budget_it_grows_and_keeps_what_it_has() {
        let arena = Arena::new(None);
        let pool = arena.pool(MIB, 3 * MIB, 2 * MIB, None);
        let address = pool.take().unwrap().address();
        let held_bytes = arena.held_bytes();
        assert!(held_bytes >= MIB);
        let larger = arena.pool(MIB, 40 * MIB, 2 * MIB, None);
        assert_eq!(larger.budget_bytes(), 40 * MIB);
        assert_eq!(larger.take().unwrap().address(), address);
        let smaller = arena.pool(MIB, 0, 2 * MIB, None);
        assert_eq!(smaller.budget_bytes(), 40 * MIB);
        assert_eq!(arena.held_bytes(), held_bytes);
        assert_eq!(arena.peak_bytes(), MIB);
        arena.release();
        assert_eq!(arena.held_bytes(), 0);
    }

    #[test]
    fn a_state_beyond_any_memory_gets_half_of_it() {
        let half = available_bytes().unwrap_or(usize::MAX / 2) / 2;
        let pool = Arena::new(None).pool(MIB, usize::MAX, 2 * MIB, None);
        // Other processes allocate and free memory meanwhile.
        assert!(pool.budget_bytes() <= half.saturating_mul(2));
    }

    #[test]
    fn processes_of_one_machine_share_what_is_available() {
        let half = available_bytes().unwrap_or(usize::MAX / 2) / 2;
        let sharers = NonZeroUsize::new(8).unwrap();
        let pool = Arena::new(None)
            .shared_by(sharers)
            .pool(MIB, usize::MAX, 2 * MIB, None);
        // Other processes allocate and free memory meanwhile.
        assert!(pool.budget_bytes() <= half / 4);
        let given = Arena::new(Some(10 * MIB)).shared_by(sharers);
        let pool = given.pool(MIB, 100 * MIB, 2 * MIB, None);
        assert_eq!(pool.budget_bytes(), 10 * MIB);
    }

    #[test]
    fn a_budget_is_kept_whatever_the_buffers() {
        let arena = Arena::new(Some(10 * MIB));
        let small = arena.pool(MIB, 100 * MIB, 2 * MIB, None);
        assert_eq!(small.budget_bytes(), 10 * MIB);
        let kept: Vec<_> = (0..3).map(|_| small.take().unwrap()).collect();
        let large = arena.pool(4 * MIB, 100 * MIB, 2 * 4 * MIB, None);
        assert_eq!(large.budget_bytes(), 8 * MIB, "what one worker needs");
        assert!(arena.held_bytes() >= 3 * MIB, "what is still in use counts");
        drop((kept, small));
        let large = arena.pool(2 * MIB, 100 * MIB, 2 * MIB, None);
        assert_eq!(large.budget_bytes(), 10 * MIB);
        assert_eq!(arena.held_bytes(), 0);
    }
}
