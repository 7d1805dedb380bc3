//! The number of this process, without a system call.
#![allow(unsafe_code)]

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// A page that the kernel clears in each fork; null until the first call.
static PAGE: AtomicPtr<AtomicU32> = AtomicPtr::new(ptr::null_mut());

/// Whether the system has refused such a page; it is not asked again.
static IS_REFUSED: AtomicBool = AtomicBool::new(cfg!(miri));

/// As [`std::process::id`], which makes a system call each time: too much for a check of each row
/// or request. Correct in every fork.
pub fn id() -> u32 {
    let page = PAGE.load(Ordering::Acquire);
    // SAFETY: a page that was published stays mapped, and is accessed atomically alone.
    let known = unsafe { page.as_ref() };
    match known.map(|known| known.load(Ordering::Relaxed)) {
        Some(id) if id != 0 => id,
        _ => find(known),
    }
}

/// Asks the system, and remembers the answer where that is possible.
#[cold]
fn find(known: Option<&AtomicU32>) -> u32 {
    let id = std::process::id();
    match known {
        Some(known) => known.store(id, Ordering::Relaxed),
        None if IS_REFUSED.load(Ordering::Relaxed) => {}
        None => publish(id),
    }
    id
}

/// Publishes a page with the number, unless another thread has, or the system does not clear pages.
fn publish(id: u32) {
    let bytes = rustix::param::page_size();
    let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // SAFETY: the kernel chooses an address that nobody uses.
    let Ok(page) = (unsafe { mmap_anonymous(ptr::null_mut(), bytes, protection, flags) }) else {
        IS_REFUSED.store(true, Ordering::Relaxed);
        return;
    };
    // SAFETY: the page is this function's, and its content does not matter yet.
    let cleared = unsafe { madvise(page, bytes, Advice::LinuxWipeOnFork) };
    let number = page.cast::<AtomicU32>();
    if cleared.is_ok() {
        // SAFETY: the page is mapped, aligned, zero, and nobody else has its address.
        unsafe { &*number }.store(id, Ordering::Relaxed);
        let published = PAGE.compare_exchange(
            ptr::null_mut(),
            number,
            Ordering::Release,
            Ordering::Relaxed,
        );
        if published.is_ok() {
            return;
        }
    }
    if cleared.is_err() {
        IS_REFUSED.store(true, Ordering::Relaxed);
    }
    // SAFETY: it was not published, so nobody else has its address. A failure leaks a page.
    let _ = unsafe { munmap(page, bytes) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_that_of_the_system() {
        for _ in 0..3 {
            assert_eq!(id(), std::process::id());
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "it forks")]
    fn a_fork_and_its_fork_have_their_own() {
        let parent = id();
        // SAFETY: the children call the system alone, and end at once.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let is_right = id() != parent && id() == std::process::id();
            // SAFETY: as above.
            let grandchild = unsafe { libc::fork() };
            if grandchild == 0 {
                // SAFETY: as above.
                unsafe { libc::_exit(i32::from(id() != std::process::id())) }
            }
            let (mut status, mut wrong) = (0, i32::from(!is_right));
            // SAFETY: it waits for the child just made.
            unsafe { libc::waitpid(grandchild, &raw mut status, 0) };
            wrong |= libc::WEXITSTATUS(status);
            // SAFETY: as above.
            unsafe { libc::_exit(wrong) }
        }
        let mut status = 0;
        // SAFETY: it waits for the child just made.
        unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!(
            (libc::WIFEXITED(status), libc::WEXITSTATUS(status)),
            (true, 0)
        );
        assert_eq!(id(), parent);
    }
}
