//! Primary contexts: one per device, alive while it is retained.

use std::collections::HashMap;
use std::thread::JoinHandle;

use crate::status::{Answer, Status};

pub(crate) struct Context {
    pub(crate) device: i32,
    /// Number of retains minus releases.
    pub(crate) users: u32,
    /// The code of the first failed operation. No other operation begins after it.
    pub(crate) failing: Option<Status>,
    /// The same code, once no operation writes any more. From then on all calls return it.
    pub(crate) failed: Option<Status>,
    /// Its default streams: the legacy stream, and one for each thread that used its own.
    pub(crate) legacy: u64,
    pub(crate) per_thread: HashMap<u64, u64>,
    /// Threads of destroyed streams, to be joined at the end.
    pub(crate) ended: Vec<JoinHandle<()>>,
}

impl Context {
    pub(crate) fn new(device: i32, legacy: u64) -> Context {
        Context {
            device,
            users: 1,
            failing: None,
            failed: None,
            legacy,
            per_thread: HashMap::new(),
            ended: Vec::new(),
        }
    }

    pub(crate) fn is_usable(&self) -> Answer {
        self.failed.map_or(Ok(()), Err)
    }
}
