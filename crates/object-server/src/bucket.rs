//! A bucket: what it holds, and what becomes of requests on their way to it.

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

/// What is done between two requests.
type Look = Arc<dyn Fn() + Send + Sync>;

/// A bucket, as a test sees it: without requests, and without faults.
pub struct Bucket {
    name: String,
    contents: Mutex<Contents>,
    traffic: Mutex<Traffic>,
    pub(crate) turns: Turns,
    /// How many requests were applied.
    applied: watch::Sender<usize>,
}

#[derive(Default)]
struct Traffic {
    faults: HashMap<(String, usize), Fault>,
    /// How often each client has asked.
    asked: HashMap<String, usize>,
    dead: HashSet<String>,
    /// Tokens that nobody takes any more.
    expired: HashSet<String>,
    late: Vec<(usize, Received)>,
    journal: Vec<Entry>,
    look: Option<Look>,
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

    /// What it is called.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Every object, by its key.
    pub fn objects(&self) -> BTreeMap<String, Object> {
        self.contents().objects().clone()
    }

    /// Every upload that nobody has ended, by its id.
    pub fn uploads(&self) -> BTreeMap<String, OpenUpload> {
        self.contents().uploads().clone()
    }

    /// How often an object was made or removed.
    pub fn changes(&self) -> u64 {
        self.contents().changes
    }

    /// Puts an object, whatever is there.
    pub fn put(&self, key: &str, bytes: impl Into<Bytes>) {
        let put = self.contents().put(key, bytes.into(), None, &[]);
        put.expect("nothing is asked of what is there");
    }

    /// Removes an object, if it is there.
    pub fn remove(&self, key: &str) {
        let removed = self.contents().delete(key, &[]);
        removed.expect("nothing is asked of what is there");
    }

    /// Gives up all uploads that are open, as somebody else may.
    pub fn end_uploads(&self) {
        self.contents().end_uploads();
    }

    /// What its clock says.
    pub fn now(&self) -> SystemTime {
        self.contents().now
    }

    /// Moves its clock, which stands still otherwise.
    pub fn pass(&self, time: Duration) {
        self.contents().now += time;
    }

    /// Has an upload that was completed be unknown from then on, as on MinIO: S3 gives its answer again.
    pub fn forget_uploads(&self) {
        self.contents().forgets_uploads = true;
    }

    /// Has changes of one key refused that are less than a second apart by the bucket's clock, as Google does:
    /// whoever repeats them has success where [`between`](Bucket::between) lets time [`pass`](Bucket::pass).
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

    /// Has something go wrong with a client's nth request, counted from 0.
    pub fn plan(&self, client: &str, nth: usize, fault: Fault) {
        self.traffic()
            .faults
            .insert((client.to_owned(), nth), fault);
    }

    /// Refuses all that a client asks for from now on: to the store it is dead.
    pub fn kill(&self, client: &str) {
        self.traffic().dead.insert(client.to_owned());
        self.turns.leave(client);
    }

    /// What has been asked for, in the order in which it took effect; not by the observer, nor by the dead.
    pub fn journal(&self) -> Vec<Entry> {
        self.traffic().journal.clone()
    }

    /// How many requests have taken effect, not counting those of the observer and the dead.
    pub fn requests(&self) -> usize {
        self.traffic().journal.len()
    }

    /// Has something looked at, or done, right before each request of others than the observer.
    pub fn between(&self, look: impl Fn() + Send + Sync + 'static) {
        self.traffic().look = Some(Arc::new(look));
    }

    /// Draws the order of the requests of these clients from a seed, until they have ended.
    pub fn interleave(&self, clients: &[&str], seed: u64) {
        self.turns.among(clients, seed);
    }

    /// Has so many requests of one client come first, then so many of the next, as long as they have not
    /// ended, and after that in the order that is drawn.
    pub fn direct(&self, stages: &[(&str, usize)]) {
        self.turns.direct(stages);
    }

    /// Says that a client has ended: nobody waits for its next request.
    pub fn ended(&self, client: &str) {
        self.turns.leave(client);
    }

    /// Whether a client is dead to the store.
    pub fn is_dead(&self, client: &str) -> bool {
        self.traffic().dead.contains(client)
    }

    pub(crate) fn look(&self) -> Option<Look> {
        self.traffic().look.clone()
    }

    /// Counts a request; tells which of its client's it is, and what goes wrong with it.
    pub(crate) fn count(&self, client: &str) -> (usize, Option<Fault>) {
        let mut traffic = self.traffic();
        let asked = traffic.asked.entry(client.to_owned()).or_default();
        let nth = *asked;
        *asked += 1;
        (nth, traffic.faults.remove(&(client.to_owned(), nth)))
    }

    /// Requests that are applied now, of those that are late; all of them, where nobody comes any more.
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

    /// Waits until so many more requests took effect; not for ever.
    pub(crate) async fn others(&self, count: usize) {
        let mut applied = self.applied.subscribe();
        let wanted = *applied.borrow() + count;
        let is_there = applied.wait_for(|applied| *applied >= wanted);
        let _ = tokio::time::timeout(HELD_MAX, is_there).await;
    }
}

/// The buckets of a server, by their names.
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

/// How long an answer is held back where nobody else asks for anything.
const HELD_MAX: Duration = Duration::from_millis(200);

/// What became of a request.
pub(crate) struct Outcome {
    pub(crate) applied: usize,
    pub(crate) status: Option<u16>,
}
