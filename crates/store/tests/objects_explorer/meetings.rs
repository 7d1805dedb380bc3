//! Where two can meet: each place of the one with each of the other.
//!
//! The first one makes so many requests, then the second one so many, and then both the rest. All that one
//! may do between two requests of the other is tried so, which orders that are drawn come upon by luck.

use crate::mutate::Mutation;
use crate::scenario::{Job, Order, Ran, Scenario, run};

/// Places of the first one where the second one may come in.
#[derive(Clone, Copy)]
pub(crate) struct Meeting {
    scenario: &'static Scenario,
    mutation: Option<Mutation>,
    first: usize,
    /// Of the second one's places every so many are tried.
    stride: usize,
}

fn requests(scenario: &Scenario, ran: &Ran, client: usize) -> usize {
    let (name, _) = scenario.clients[client];
    let of_it = ran.journal.iter().filter(|entry| entry.client == name);
    of_it.count()
}

/// Places of the first one in a scenario, every so many of them, the last first: what has been done by then
/// is most.
pub(crate) fn meetings(
    scenario: &'static Scenario,
    mutation: Option<Mutation>,
    (stride, stride_of_second): (usize, usize),
) -> Vec<Meeting> {
    let alone = Meeting {
        scenario,
        mutation,
        first: usize::MAX,
        stride: stride_of_second,
    };
    let requests = requests(scenario, &run(&alone.job(usize::MAX)), 0);
    let places = (0..=requests).rev().step_by(stride);
    places.map(|first| Meeting { first, ..alone }).collect()
}

impl Meeting {
    fn job(&self, second: usize) -> Job {
        Job {
            scenario: self.scenario,
            order: Order::Directed {
                first: self.first,
                second,
            },
            faults: Vec::new(),
            mutation: self.mutation,
        }
    }

    /// Tries the places of the second one until it has ended by then; tells how many these were, and what
    /// was wrong.
    pub(crate) fn explore(&self, is_one_enough: bool) -> (usize, Vec<String>) {
        let (mut runs, mut violations) = (0, Vec::new());
        let mut second = self.first % self.stride;
        loop {
            let job = self.job(second);
            let ran = run(&job);
            runs += 1;
            violations.extend(ran.violations.iter().map(|why| format!("{job}: {why}")));
            let has_ended = requests(self.scenario, &ran, 1) <= second;
            if has_ended || (is_one_enough && !violations.is_empty()) {
                return (runs, violations);
            }
            second += self.stride;
        }
    }
}
