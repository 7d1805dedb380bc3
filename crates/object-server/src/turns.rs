//! The order of requests from several clients.
//!
//! Requests take effect one after the other. If several clients are active, the order is given
//! beforehand, as a number of requests of each client in turn, or drawn from a seed once each
//! client has a request waiting or has ended. A client that takes very long is not waited for, so
//! that nothing hangs: then the order depends on the clock.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::Notify;

/// How long a client may take before it is not waited for: much longer than it takes to read an
/// answer, or to pause before it repeats a request.
const PATIENCE: Duration = Duration::from_secs(2);

/// The binary logarithm of the greatest ratio between the paces of two clients.
const PACE_LOG_MAX: u32 = 4;

pub(crate) struct Turns {
    state: Mutex<TurnsState>,
    changed: Notify,
}

struct TurnsState {
    random: fastrand::Rng,
    /// Clients that have not ended.
    live: BTreeSet<String>,
    /// How much faster than the slowest each client is. With equal paces, if one of two clients
    /// makes many more requests, the two would always overlap at the start of those.
    paces: BTreeMap<String, u32>,
    /// Clients with their number of requests, to serve before any order is drawn.
    stages: VecDeque<(String, usize)>,
    /// Waiting requests, in the order of arrival.
    waiting: BTreeMap<u64, String>,
    tickets: u64,
    /// The request that is being served.
    chosen: Option<u64>,
}

impl Turns {
    pub(crate) fn new() -> Turns {
        Turns {
            state: Mutex::new(TurnsState {
                random: fastrand::Rng::with_seed(0),
                live: BTreeSet::new(),
                paces: BTreeMap::new(),
                stages: VecDeque::new(),
                waiting: BTreeMap::new(),
                tickets: 0,
                chosen: None,
            }),
            changed: Notify::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, TurnsState> {
        self.state.lock().expect("nothing panics with the lock")
    }

    /// Sets the active clients, and the seed of their order.
    pub(crate) fn among(&self, clients: &[&str], seed: u64) {
        let mut state = self.state();
        state.live = clients.iter().map(|&client| client.to_owned()).collect();
        state.random = fastrand::Rng::with_seed(seed);
        for &client in clients {
            let pace = 1 << state.random.u32(..=PACE_LOG_MAX);
            state.paces.insert(client.to_owned(), pace);
        }
    }

    /// Sets the clients whose requests come first, and their number of requests.
    pub(crate) fn direct(&self, stages: &[(&str, usize)]) {
        let owned = |&(client, count): &(&str, usize)| (client.to_owned(), count);
        self.state().stages = stages.iter().map(owned).collect();
    }

    /// Removes a client until it is back; returns whether it was active.
    pub(crate) fn leave(&self, client: &str) -> bool {
        let was_live = self.state().live.remove(client);
        self.changed.notify_waiters();
        was_live
    }

    /// Adds a client that is back.
    pub(crate) fn enter(&self, client: &str) {
        self.state().live.insert(client.to_owned());
    }

    /// Waits for the turn of a client's request, which lasts until the result is dropped.
    pub(crate) async fn wait(&self, client: &str) -> Turn<'_> {
        let ticket = {
            let mut state = self.state();
            let ticket = state.tickets;
            state.tickets += 1;
            state.waiting.insert(ticket, client.to_owned());
            ticket
        };
        let turn = Turn {
            turns: self,
            ticket,
        };
        self.changed.notify_waiters();
        let mut is_patient = true;
        loop {
            let changed = self.changed.notified();
            let (chosen, is_new) = self.state().choose(is_patient);
            if chosen == Some(ticket) {
                return turn;
            }
            if is_new {
                self.changed.notify_waiters();
            }
            is_patient = tokio::time::timeout(PATIENCE, changed).await.is_ok();
        }
    }
}

impl TurnsState {
    /// Chooses the next request; also returns whether it was chosen just now.
    fn choose(&mut self, is_patient: bool) -> (Option<u64>, bool) {
        let was_open = self.chosen.is_none();
        if was_open && self.is_stage() {
            self.chosen = self.follow();
        }
        if was_open && self.chosen.is_none() && (!self.is_stage() || !is_patient) {
            let here: BTreeSet<&String> = self.waiting.values().collect();
            let is_complete = self.live.iter().all(|client| here.contains(client));
            if is_complete || !is_patient {
                self.chosen = match self.live.is_empty() {
                    true => self.waiting.keys().next().copied(),
                    false => self.draw(),
                };
            }
        }
        (self.chosen, was_open && self.chosen.is_some())
    }

    /// Whether the given order names a next client that is active.
    fn is_stage(&mut self) -> bool {
        while let Some((client, left)) = self.stages.front()
            && (*left == 0 || !self.live.contains(client))
        {
            self.stages.pop_front();
        }
        !self.stages.is_empty()
    }

    /// The waiting request of the client that is next in the given order, if there is one.
    fn follow(&mut self) -> Option<u64> {
        let (client, left) = self.stages.front_mut()?;
        let mut waiting = self.waiting.iter();
        let (ticket, _) = waiting.find(|(_, waiting)| *waiting == client)?;
        *left -= 1;
        Some(*ticket)
    }

    fn draw(&mut self) -> Option<u64> {
        let pace = |client: &String| self.paces.get(client).copied().unwrap_or(1);
        // By name, as the order of arrival depends on the clock.
        let mut waiting: Vec<(&String, u64, u32)> = (self.waiting.iter())
            .map(|(ticket, client)| (client, *ticket, pace(client)))
            .collect();
        waiting.sort_unstable();
        let all: u32 = waiting.iter().map(|(.., pace)| pace).sum();
        let mut place = self.random.u32(..all);
        let drawn = waiting
            .iter()
            .find(|(.., pace)| match place.checked_sub(*pace) {
                Some(rest) => {
                    place = rest;
                    false
                }
                None => true,
            });
        drawn.map(|(_, ticket, _)| *ticket)
    }
}

/// A request's turn, or its place among the waiting ones.
pub(crate) struct Turn<'a> {
    turns: &'a Turns,
    ticket: u64,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.turns.state();
        state.waiting.remove(&self.ticket);
        state.chosen.take_if(|chosen| *chosen == self.ticket);
        drop(state);
        self.turns.changed.notify_waiters();
    }
}
