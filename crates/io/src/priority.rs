//! Lowers the priority of background threads.

/// The nice value of the calling thread; 0 where the system does not report it.
pub fn nice() -> i32 {
    rustix::process::getpriority_process(None).unwrap_or(0)
}

/// Raises the nice value of the calling thread, and of threads that it starts later, to `nice`; a
/// higher value stays. On Linux each thread has its own value. Errors are ignored: a thread that
/// keeps its priority does the same work.
pub fn step_back(nice: u8) {
    let current = self::nice();
    let nice = i32::from(nice.min(19));
    if nice > current {
        let _ = rustix::process::setpriority_process(None, nice);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_this_thread_and_its_children_step_back() {
        let before = nice();
        let after = std::thread::spawn(move || {
            step_back(7);
            let own = nice();
            step_back(3);
            (own, nice(), std::thread::spawn(nice).join().unwrap())
        });
        let wanted = before.max(7);
        assert_eq!(after.join().unwrap(), (wanted, wanted, wanted));
        assert_eq!(nice(), before);
    }
}
