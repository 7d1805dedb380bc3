//! Windows that return to their lender.

#![allow(unsafe_code)]

use std::sync::Arc;

use super::{IoBuf, Owner};

/// The lender's claim on a window.
#[derive(Debug)]
pub struct Lease {
    lent: Arc<IoBuf>,
}

impl Lease {
    /// Lends the bytes in use of a window. The claim gets the window back once the returned buffer
    /// and all windows split off it are dropped.
    pub fn of(window: IoBuf) -> (Lease, IoBuf) {
        let (address, len) = (window.address, window.len);
        let lent = Arc::new(window);
        let owner: Owner = Arc::clone(&lent) as Owner;
        // SAFETY: the bytes are the window's, which lives as long as `owner`; nobody reaches it
        // before `owner`, and with it every window on the bytes, is dropped.
        let buf = unsafe { IoBuf::new(address, len, owner) };
        (Lease { lent }, buf)
    }

    /// The window, if every buffer on it was dropped.
    ///
    /// # Errors
    /// The claim itself while a buffer is left.
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
