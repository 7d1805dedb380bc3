//! A bucket: its objects, and the faults that requests to it meet.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use tokio::sync::watch;

use crate::contents::{Contents, Object, OpenUpload};
use crate::fault::Fault;
use crate::request::{Asked, Entry, Received};
use crate::turns::Turns;

/// A callback between two requests.
type Observer = Arc<dyn Fn() + Send + Sync>;

/// A bucket, as tests access it: without requests, and without faults.
pub struct Bucket {
    name: String,
    contents: Mutex<Contents>,
    traffic: Mutex<Traffic>,
    pub(crate) turns: Turns,
    /// The number of requests applied.
    applied: watch::Sender<usize>,
}

#[derive(Default)]
struct Traffic {
    faults: HashMap<(String, usize), Fault>,
    /// The number of requests of each client.
    asked: HashMap<String, usize>,
    dead: HashSet<String>,
    /// Tokens that are no longer accepted.
    expired: HashSet<String>,
    late: Vec<(usize, Received)>,
    journal: Vec<Entry>,
    observer: Option<Observer>,
}

impl fmt::Debug for Bucket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bucket")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Bucket {
    pub(crate) fn new(name: &str) -> Bucket {
        Bucket {
            name: name.to_owned(),
            contents: Mutex::default(),
            traffic: Mutex::default(),
            turns: Turns::new(),
            applied: watch::Sender::new(0),
        }
    }

    pub(crate) fn contents(&self) -> MutexGuard<'_, Contents> {
        self.contents.lock().expect("nothing panics with the lock")
    }

    fn traffic(&self) -> MutexGuard<'_, Traffic> {
        self.traffic.lock().expect("nothing panics with the lock")
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Every object, by its key.
    pub fn objects(&self) -> BTreeMap<String, Object> {
        self.contents().objects().clone()
    }

    /// Every open upload, by its id.
    pub fn uploads(&self) -> BTreeMap<String, OpenUpload> {
        self.contents().uploads().clone()
    }

    /// The number of times an object was made or removed.
    pub fn changes(&self) -> u64 {
        self.contents().changes
    }

    /// Puts an object, replacing any.
    pub fn put(&self, key: &str, bytes: impl Into<Bytes>) {
        let put = self.contents().put(key, bytes.into(), None, &[]);
        put.expect("nothing is asked of what is there");
    }

    /// Removes an object, if it exists.
    pub fn remove(&self, key: &str) {
        let removed = self.contents().delete(key, &[]);
        removed.expect("nothing is asked of what is there");
    }

    /// Aborts all open uploads, as another client may.
    pub fn end_uploads(&self) {
        self.contents().end_uploads();
    }

    /// The time of its clock.
    pub fn now(&self) -> SystemTime {
        self.contents().now
    }

    /// Advances its clock, which otherwise does not move.
    pub fn pass(&self, time: Duration) {
        self.contents().now += time;
    }

    /// Forgets uploads once they are completed, as MinIO does; S3 repeats the answer of the
    /// completion.
    pub fn forget_uploads(&self) {
        self.contents().forgets_uploads = true;
    }

    /// Refuses changes of one key that are less than a second apart by the bucket's clock, as
    /// Google does. Repeating them succeeds if [`between`](Bucket::between) advances the clock by
    /// [`pass`](Bucket::pass).
    pub fn limit_changes(&self) {
        self.contents().limits_changes = true;
    }

    /// Refuses a [token](crate::token) from now on.
    pub fn expire(&self, token: &str) {
        self.traffic().expired.insert(token.to_owned());
    }

    pub(crate) fn has_expired(&self, token: &str) -> bool {
        self.traffic().expired.contains(token)
    }

    /// Plans a fault for a client's nth request, counted from 0.
    pub fn plan(&self, client: &str, nth: usize, fault: Fault) {
        self.traffic()
            .faults
            .insert((client.to_owned(), nth), fault);
    }

    /// Refuses all further requests of a client: to the bucket it is dead.
    pub fn kill(&self, client: &str) {
        self.traffic().dead.insert(client.to_owned());
        self.turns.leave(client);
    }

    /// The requests in the order in which they took effect, except those of the observer and of the
    /// dead.
    pub fn journal(&self) -> Vec<Entry> {
        self.traffic().journal.clone()
    }

    /// The number of requests that took effect, except those of the observer and of the dead.
    pub fn requests(&self) -> usize {
        self.traffic().journal.len()
    }

    /// Calls `observer` right before each request, except those of the observer.
    pub fn between(&self, observer: impl Fn() + Send + Sync + 'static) {
        self.traffic().observer = Some(Arc::new(observer));
    }

    /// Draws the order of these clients' requests from a seed, until they have ended.
    pub fn interleave(&self, clients: &[&str], seed: u64) {
        self.turns.among(clients, seed);
    }

    /// Serves a number of requests of one client first, then of the next, unless they have ended,
    /// and after that in the drawn order.
    pub fn direct(&self, stages: &[(&str, usize)]) {
        self.turns.direct(stages);
    }

    /// Notes that a client has ended: nobody waits for its next request.
    pub fn ended(&self, client: &str) {
        self.turns.leave(client);
    }

    /// Whether a client is dead to the bucket.
    pub fn is_dead(&self, client: &str) -> bool {
        self.traffic().dead.contains(client)
    }

    pub(crate) fn observer(&self) -> Option<Observer> {
        self.traffic().observer.clone()
    }

    /// Counts a request; returns its number among its client's, and its fault.
    pub(crate) fn count(&self, client: &str) -> (usize, Option<Fault>) {
        let mut traffic = self.traffic();
        let asked = traffic.asked.entry(client.to_owned()).or_default();
        let nth = *asked;
        *asked += 1;
        (nth, traffic.faults.remove(&(client.to_owned(), nth)))
    }

    /// Takes the late requests that are due now; all of them, if no other requests follow.
    pub(crate) fn arrived(&self, is_end: bool) -> Vec<Received> {
        let mut traffic = self.traffic();
        let (arrived, late) = std::mem::take(&mut traffic.late)
            .into_iter()
            .map(|(after, request)| (after.saturating_sub(1), request))
            .partition(|(after, _)| is_end || *after == 0);
        traffic.late = late;
        let arrived: Vec<(usize, Received)> = arrived;
        arrived.into_iter().map(|(_, request)| request).collect()
    }

    pub(crate) fn hold_back(&self, after: usize, request: Received) {
        self.traffic().late.push((after, request));
    }

    pub(crate) fn record(&self, asked: Asked, nth: usize, fault: Option<Fault>, outcome: &Outcome) {
        self.traffic().journal.push(Entry {
            client: asked.client,
            nth,
            call: asked.call,
            key: asked.key,
            is_conditional: asked.is_conditional,
            fault,
            applied: outcome.applied,
            status: outcome.status,
        });
        self.applied.send_modify(|applied| *applied += 1);
    }

    /// Waits until `count` more requests took effect, for a bounded time.
    pub(crate) async fn others(&self, count: usize) {
        let mut applied = self.applied.subscribe();
        let wanted = *applied.borrow() + count;
        let is_there = applied.wait_for(|applied| *applied >= wanted);
        let _ = tokio::time::timeout(HELD_MAX, is_there).await;
    }
}

/// The buckets of a server, by name.
#[derive(Default)]
pub(crate) struct Buckets(Mutex<HashMap<String, Arc<Bucket>>>);

impl Buckets {
    fn all(&self) -> MutexGuard<'_, HashMap<String, Arc<Bucket>>> {
        self.0.lock().expect("nothing panics with the lock")
    }

    pub(crate) fn get(&self, name: &str) -> Option<Arc<Bucket>> {
        self.all().get(name).cloned()
    }

    pub(crate) fn insert(&self, name: &str) -> Arc<Bucket> {
        let bucket = Arc::new(Bucket::new(name));
        self.all().insert(name.to_owned(), Arc::clone(&bucket));
        bucket
    }

    pub(crate) fn remove(&self, name: &str) {
        self.all().remove(name);
    }
}

/// How long an answer is held back where no other requests arrive.
const HELD_MAX: Duration = Duration::from_millis(200);

/// The outcome of a request.
pub(crate) struct Outcome {
    pub(crate) applied: usize,
    pub(crate) status: Option<u16>,
}
