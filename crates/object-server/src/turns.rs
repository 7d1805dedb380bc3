//! Whose request is next.
//!
//! Requests take effect one after the other. Where several clients are at work, whose is next is written down
//! beforehand, so many of the one and then so many of the other, or drawn from a seed once each of them has a
//! request to be answered or has ended; a client that thinks for very long is not waited for, so that nothing
//! hangs: then the order is that of the clock.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use tokio::sync::Notify;

/// How long a client may think before it is not waited for: much longer than it takes to read an answer, or
/// than what it pauses before it repeats a request.
const PATIENCE: Duration = Duration::from_secs(2);

/// The fastest client asks so many times twice as often as the slowest.
const PACE_LOG_MAX: u32 = 4;

pub(crate) struct Turns {
    state: Mutex<State>,
    changed: Notify,
}

struct State {
    random: fastrand::Rng,
    /// Clients that have not ended.
    live: BTreeSet<String>,
    /// How much faster than the slowest each client is: else two of which one asks for much more would
    /// always meet at the beginning of that.
    paces: BTreeMap<String, u32>,
    /// Whose turn it is, and for how many requests, before any is drawn.
    stages: VecDeque<(String, usize)>,
    /// Requests that wait, in the order in which they came.
    waiting: BTreeMap<u64, String>,
    tickets: u64,
    /// Whose turn it is, until that is over.
    chosen: Option<u64>,
}

impl Turns {
    pub(crate) fn new() -> Turns {
        Turns {
            state: Mutex::new(State {
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

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("nothing panics with the lock")
    }

    /// Who is at work from now on, and the seed of their order.
    pub(crate) fn among(&self, clients: &[&str], seed: u64) {
        let mut state = self.state();
        state.live = clients.iter().map(|&client| client.to_owned()).collect();
        state.random = fastrand::Rng::with_seed(seed);
        for &client in clients {
            let pace = 1 << state.random.u32(..=PACE_LOG_MAX);
            state.paces.insert(client.to_owned(), pace);
        }
    }

    /// Whose requests come first, and how many of them.
    pub(crate) fn direct(&self, stages: &[(&str, usize)]) {
        let owned = |&(client, count): &(&str, usize)| (client.to_owned(), count);
        self.state().stages = stages.iter().map(owned).collect();
    }

    /// A client asks for nothing more, or not before it is back; tells whether it was at work.
    pub(crate) fn leave(&self, client: &str) -> bool {
        let was_live = self.state().live.remove(client);
        self.changed.notify_waiters();
        was_live
    }

    /// A client is back.
    pub(crate) fn enter(&self, client: &str) {
        self.state().live.insert(client.to_owned());
    }

    /// Waits for the turn of a client's request, which lasts until it is dropped.
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

impl State {
    /// Whose turn it is, and whether that was decided just now.
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

    /// Whether it is written down whose turn it is: of somebody who is at work.
    fn is_stage(&mut self) -> bool {
        while let Some((client, left)) = self.stages.front()
            && (*left == 0 || !self.live.contains(client))
        {
            self.stages.pop_front();
        }
        !self.stages.is_empty()
    }

    /// The request that it is the turn of by what is written down, if it is here.
    fn follow(&mut self) -> Option<u64> {
        let (client, left) = self.stages.front_mut()?;
        let mut waiting = self.waiting.iter();
        let (ticket, _) = waiting.find(|(_, waiting)| *waiting == client)?;
        *left -= 1;
        Some(*ticket)
    }

    fn draw(&mut self) -> Option<u64> {
        let pace = |client: &String| self.paces.get(client).copied().unwrap_or(1);
        // By name, since who came first is a matter of the clock.
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

/// A request's turn, or its place among those who wait for one.
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
