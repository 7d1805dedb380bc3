//! The choice of faults, and of the requests that they hit.

use penstock_object_server::{Call, Entry, Fault};

use crate::common::Rng;
use crate::mutate::Mutation;
use crate::scenario::{Job, Order, Planned, Ran, Scenario};

/// Number of failing requests while a connection is down: more than are retried until patience
/// ends.
const DOWN: usize = 64;

/// A request that arrives when nobody waits for it any more.
const AT_THE_END: usize = usize::MAX;

/// The possible faults of a request, each with whether the connection is down after it. A listing
/// is stale only if one client works alone: a sweep during a save needs a strongly consistent
/// store.
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

/// A fault at a client's request, and at all of its following ones if the connection is down.
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

/// Each fault at each request that a scenario made without faults; changes come first, and of those
/// the last one, where most is at stake.
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

/// Random runs with up to three faults, and a random order of requests.
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
        // If several clients act, their order alone may cause a violation.
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
