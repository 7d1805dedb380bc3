//! Which faults are put where.

use penstock_object_server::{Call, Entry, Fault};

use crate::common::Rng;
use crate::mutate::Mutation;
use crate::scenario::{Job, Order, Planned, Ran, Scenario};

/// Requests of one line that is down: more than are repeated until patience ends.
const DOWN: usize = 64;

/// A request that comes when nobody waits for it any more.
const AT_THE_END: usize = usize::MAX;

/// The faults of a request, each with whether the line is down after it. A listing is stale only where one client
/// works alone: a sweep beside a save takes a store that shows everybody the same.
fn faults_of(scenario: &Scenario, entry: &Entry) -> Vec<(Fault, bool)> {
    let lines_down = |faults: &[Fault]| -> Vec<(Fault, bool)> {
        faults.iter().map(|fault| (*fault, true)).collect()
    };
    if entry.call.is_read() {
        let faults = [
            Fault::Refused(500),
            Fault::Refused(503),
            Fault::Refused(404),
            Fault::Dropped,
            Fault::Cut,
            Fault::Garbled,
            Fault::Flipped(3),
            Fault::Flipped(777),
            Fault::Killed,
        ];
        let mut faults: Vec<_> = faults.map(|fault| (fault, false)).into();
        faults.extend(lines_down(&[Fault::Dropped]));
        if entry.call == Call::List && scenario.clients.len() == 1 {
            faults.extend([(Fault::Stale(1), false), (Fault::Stale(3), false)]);
        }
        return faults;
    }
    let faults = [
        Fault::Refused(500),
        Fault::Refused(503),
        Fault::Disowned(500),
        Fault::Dropped,
        Fault::Unanswered,
        Fault::Late(1),
        Fault::Late(3),
        Fault::Late(AT_THE_END),
        Fault::Doubled,
        Fault::Cut,
        Fault::Garbled,
        Fault::Flipped(5),
        Fault::Refused(409),
        Fault::Killed,
        Fault::KilledAfter,
    ];
    let mut faults: Vec<_> = faults.map(|fault| (fault, false)).into();
    faults.extend(lines_down(&[
        Fault::Dropped,
        Fault::Unanswered,
        Fault::Late(AT_THE_END),
    ]));
    if entry.is_conditional {
        faults.push((Fault::Disowned(409), false));
    }
    faults
}

/// A fault at a client's request, and all of the line's where that is down.
fn planned(client: &'static str, nth: usize, (fault, is_down): (Fault, bool)) -> Vec<Planned> {
    let first = Planned { client, nth, fault };
    let rest = (nth + 1..nth + DOWN).map(|nth| Planned {
        client,
        nth,
        fault: Fault::Dropped,
    });
    let rest = rest.take(if is_down { DOWN } else { 0 });
    std::iter::once(first).chain(rest).collect()
}

fn of_whom(scenario: &Scenario, entry: &Entry) -> &'static str {
    let mut clients = scenario.clients.iter();
    let found = clients.find(|(name, _)| *name == entry.client);
    found.expect("nobody else is counted").0
}

/// Each fault at each request that a scenario made without faults; what changes something first, and of that
/// the last, where most is at stake.
pub(crate) fn each(scenario: &'static Scenario, ran: &Ran, mutation: Option<Mutation>) -> Vec<Job> {
    let mut jobs = Vec::new();
    let mut entries: Vec<&Entry> = ran.journal.iter().rev().collect();
    entries.sort_by_key(|entry| entry.call.is_read());
    for entry in entries {
        let client = of_whom(scenario, entry);
        jobs.extend(faults_of(scenario, entry).into_iter().map(|fault| Job {
            scenario,
            order: Order::Drawn(0),
            faults: planned(client, entry.nth, fault),
            mutation,
        }));
    }
    jobs
}

/// So many runs with up to three faults, and an order, that are drawn.
pub(crate) fn drawn(
    scenario: &'static Scenario,
    ran: &Ran,
    mutation: Option<Mutation>,
    count: u64,
    random: &mut Rng,
) -> Vec<Job> {
    let mut one_of = |count: usize| random.below(count as u64) as usize;
    let mut jobs = Vec::new();
    for _ in 0..count {
        let mut faults = Vec::new();
        // Where several are at work, their order alone may do it.
        let least = usize::from(scenario.clients.len() == 1);
        for _ in 0..least + one_of(3) {
            let entry = &ran.journal[one_of(ran.journal.len())];
            let all = faults_of(scenario, entry);
            let mut fault = all[one_of(all.len())];
            if scenario.clients.len() > 1 && one_of(8) == 0 {
                fault = (Fault::Held(1 + one_of(4)), false);
            }
            faults.extend(planned(of_whom(scenario, entry), entry.nth, fault));
        }
        jobs.push(Job {
            scenario,
            order: Order::Drawn(one_of(1 << 20) as u64),
            faults,
            mutation,
        });
    }
    jobs
}
