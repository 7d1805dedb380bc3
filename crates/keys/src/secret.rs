//! 32 secret bytes in a page of their own: locked, so that it is never written to swap, and kept
//! from core dumps.
//!
//! Where the process may lock no more memory (`ulimit -l`), the page is not locked. Where the
//! system gives no page, the bytes are on the heap. They are overwritten when they are dropped.

use penstock_io::buffer::Memory;
use zeroize::Zeroize;

pub(crate) const SECRET_BYTES: usize = 32;

pub(crate) struct Secret(Place);

enum Place {
    Page(Memory),
    Heap(Box<[u8; SECRET_BYTES]>),
}

impl Secret {
    pub(crate) fn zeroed() -> Secret {
        let Ok(page) = Memory::allocate(SECRET_BYTES) else {
            return Secret(Place::Heap(Box::new([0; SECRET_BYTES])));
        };
        // Best effort: a save does not fail because the process may lock no more.
        let _ = page.lock();
        let _ = page.keep_from_dumps();
        Secret(Place::Page(page))
    }

    pub(crate) fn expose(&self) -> &[u8; SECRET_BYTES] {
        match &self.0 {
            Place::Page(page) => page
                .as_slice()
                .try_into()
                .expect("the page has this length"),
            Place::Heap(bytes) => bytes,
        }
    }

    pub(crate) fn expose_mut(&mut self) -> &mut [u8; SECRET_BYTES] {
        match &mut self.0 {
            Place::Page(page) => page
                .as_mut_slice()
                .try_into()
                .expect("the page has this length"),
            Place::Heap(bytes) => bytes,
        }
    }
}

impl Drop for Secret {
    fn drop(&mut self) {
        self.expose_mut().zeroize();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Flags of the mapping that holds an address, as the kernel shows them.
    fn flags_at(address: usize) -> String {
        let maps = fs::read_to_string("/proc/self/smaps").unwrap();
        let mut is_there = false;
        for line in maps.lines() {
            let range = line.split(' ').next().unwrap_or_default().split_once('-');
            let ends =
                range.map(|(start, end)| [start, end].map(|end| usize::from_str_radix(end, 16)));
            if let Some([Ok(start), Ok(end)]) = ends {
                is_there = (start..end).contains(&address);
            } else if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| is_there) {
                return flags.to_owned();
            }
        }
        panic!("no mapping holds the address")
    }

    #[test]
    fn a_secret_is_locked_and_kept_from_dumps() {
        let secret = Secret::zeroed();
        let flags = flags_at(secret.expose().as_ptr() as usize);
        assert!(flags.contains(" dd"), "{flags}");
        if Memory::allocate(1).unwrap().lock().is_ok() {
            assert!(flags.contains(" lo"), "{flags}");
        }
    }
}
