//! Windows on memory that come back to whoever has lent them.

#![allow(unsafe_code)]

use std::sync::Arc;

use super::{IoBuf, Owner};

/// The claim on a window that is lent.
#[derive(Debug)]
pub struct Lease {
    lent: Arc<IoBuf>,
}

impl Lease {
    /// Lends what is in use of a window. The claim gets it back once every window is gone that was made of
    /// what comes beside it.
    pub fn of(window: IoBuf) -> (Lease, IoBuf) {
        let (address, len) = (window.address, window.len);
        let lent = Arc::new(window);
        let owner: Owner = Arc::clone(&lent) as Owner;
        // SAFETY: the bytes are the window's, which lives as long as `owner`, and is reached by nobody
        // before `owner`, and with it every window on them, is gone.
        let buf = unsafe { IoBuf::new(address, len, owner) };
        (Lease { lent }, buf)
    }

    /// The window, once everything made of what was lent was dropped.
    ///
    /// # Errors
    /// The claim itself, as long as there is some left.
    pub fn reclaim(self) -> Result<IoBuf, Lease> {
        Arc::try_unwrap(self.lent).map_err(|lent| Lease { lent })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::buffer::Pool;

    #[test]
    fn a_window_comes_back_with_its_last_part() {
        let pool = Pool::new(8192, 1);
        let mut window = pool.take().unwrap();
        window.set_len(6000);
        let address = window.address();
        let (lease, mut lent) = Lease::of(window);
        assert_eq!((lent.len(), lent.capacity()), (6000, 6000));
        let mut rest = lent.split_off(100);
        drop(lent);
        let lease = lease.reclaim().unwrap_err();
        rest.as_mut_slice()[0] = 7;
        drop(rest);
        let window = lease.reclaim().unwrap();
        assert_eq!((window.address(), window.as_slice()[100]), (address, 7));
        assert!(pool.try_take().unwrap().is_none());
        drop(window);
        assert!(pool.try_take().unwrap().is_some());
    }
}
