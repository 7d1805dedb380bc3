//! The buckets that a process uses, and how each is reached.
//!
//! A process opens each bucket once, so all saves and loads share its connections.

use std::collections::HashMap;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::address::Address;
use crate::objects::Objects;
use crate::remote::Remote;

#[derive(Default)]
struct Buckets {
    /// Settings of each bucket; the environment supplies the rest.
    remotes: HashMap<Address, Remote>,
    open: HashMap<Address, Arc<Objects>>,
}

static BUCKETS: Mutex<Option<Buckets>> = Mutex::new(None);

fn with<T>(work: impl FnOnce(&mut Buckets) -> T) -> T {
    let mut buckets = BUCKETS.lock().expect("nothing panics with the lock");
    work(buckets.get_or_insert_default())
}

/// The bucket of a path; `None` for a path that is no object URL.
///
/// # Errors
/// [`io::ErrorKind::InvalidInput`] for a URL without a bucket, and for options that no client can
/// be made from.
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

/// Sets how this process reaches a bucket from now on. The environment supplies unset options and
/// is read again.
pub fn reach(address: Address, remote: Remote) {
    // The old client is dropped after the lock is released.
    let _old = with(|buckets| {
        let open = buckets.open.remove(&address);
        (open, buckets.remotes.insert(address, remote))
    });
}
