//! Meeting points: each point of one client combined with each of another.
//!
//! The first client makes some requests, then the second some, and then both the rest. So
//! everything that one may do between two requests of the other is tried; random orders find such
//! cases only by luck.

use crate::mutate::Mutation;
use crate::scenario::{Job, Order, Ran, Scenario, run};

/// A point of the first client at which the second one may start.
#[derive(Clone, Copy)]
pub(crate) struct Meeting {
    scenario: &'static Scenario,
    mutation: Option<Mutation>,
    first: usize,
    /// Distance between the tried points of the second client.
    stride: usize,
}

fn requests(scenario: &Scenario, ran: &Ran, client: usize) -> usize {
    let (name, _) = scenario.clients[client];
    let of_it = ran.journal.iter().filter(|entry| entry.client == name);
    of_it.count()
}

/// The points of the first client in a scenario, with a stride, the last first: most has been done
/// by then.
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

    /// Tries the points of the second client until it has ended by then; returns their number, and
    /// the violations.
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
