//! Primary contexts: one a device, alive while somebody retains it.

use std::collections::HashMap;
use std::thread::JoinHandle;

use crate::status::{Answer, Status};

pub(crate) struct Context {
    pub(crate) device: i32,
    /// How often it was retained and not released.
    pub(crate) users: u32,
    /// What an operation failed with. Nothing else begins from then on.
    pub(crate) failing: Option<Status>,
    /// The same, when nothing writes any more. It is what all calls answer from then on.
    pub(crate) failed: Option<Status>,
    /// Its streams by default: the legacy one, and one for each thread that asked.
    pub(crate) legacy: u64,
    pub(crate) per_thread: HashMap<u64, u64>,
    /// Threads of streams that were destroyed, to be awaited at the end.
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
