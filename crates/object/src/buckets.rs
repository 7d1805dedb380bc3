//! The buckets that a process has to do with, and how each is reached.
//!
//! A bucket is opened once a process: its connections are shared by all who save and load there.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::address::Address;
use crate::objects::Objects;
use crate::remote::Remote;

#[derive(Default)]
struct Buckets {
    /// How they are reached, as far as the environment does not say.
    remotes: HashMap<Address, Remote>,
    open: HashMap<Address, Arc<Objects>>,
}

static BUCKETS: Mutex<Option<Buckets>> = Mutex::new(None);

fn with<T>(work: impl FnOnce(&mut Buckets) -> T) -> T {
    let mut buckets = BUCKETS.lock().expect("nothing panics with the lock");
    work(buckets.get_or_insert_default())
}

/// The bucket that a path is in; `None` where the path is none of a URL of objects.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] for a URL without a bucket, and for options that make no client.
pub fn at(path: &Path) -> io::Result<Option<Arc<Objects>>> {
    let Some(address) = Address::of(path)? else {
        return Ok(None);
    };
    with(|buckets| {
        if let Some(open) = buckets.open.get(&address) {
            return Ok(Some(Arc::clone(open)));
        }
        let remote = buckets.remotes.get(&address).cloned().unwrap_or_default();
        let objects = Arc::new(Objects::open(address.clone(), &remote)?);
        buckets.open.insert(address, Arc::clone(&objects));
        Ok(Some(objects))
    })
}

/// From now on this process reaches a bucket so. What is left open the environment says, which is read
/// anew.
pub fn reach(address: Address, remote: Remote) {
    // What was there before is dropped without the lock.
    let _old = with(|buckets| {
        let open = buckets.open.remove(&address);
        (open, buckets.remotes.insert(address, remote))
    });
}
