//! The scenarios: what clients do in a bucket, and with which faults.

use std::fmt;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use penstock_object_server::{Entry, Fault, OBSERVER};
use penstock_store::Result;

use crate::mutate::Mutation;
use crate::world::{Client, Stalled, World};

/// The smallest age at which a sweep takes files for dead.
const MINUTES: Duration = Duration::from_secs(15 * 60);

type Work = fn(&Client) -> Result<()>;

/// Preparations by one client, and the work of concurrent clients.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    /// Whether other scenarios cover the same operations.
    pub(crate) is_long: bool,
    /// Whether the first client stops for days somewhere, and others take it for dead. Its calls
    /// then fail, or their results are whole.
    pub(crate) stalls: bool,
    pub(crate) set_up: Work,
    pub(crate) clients: &'static [(&'static str, Work)],
}

pub(crate) const SCENARIOS: &[Scenario] = &[
    Scenario {
        name: "save",
        is_long: false,
        stalls: false,
        set_up: |_| Ok(()),
        clients: &[("a", |a| a.save(1, 1))],
    },
    Scenario {
        name: "save again",
        is_long: true,
        stalls: false,
        set_up: |_| Ok(()),
        clients: &[("a", |a| {
            // A caller without an acknowledgement saves the step again.
            let _ = a.save(1, 1);
            a.save(1, 2)
        })],
    },
    Scenario {
        name: "overwrite",
        is_long: false,
        stalls: false,
        set_up: |a| a.save(1, 1),
        clients: &[("a", |a| a.overwrite(1, 2))],
    },
    Scenario {
        name: "overwrite again",
        is_long: true,
        stalls: false,
        set_up: |a| a.save(1, 1),
        clients: &[("a", |a| {
            let _ = a.overwrite(1, 2);
            a.overwrite(1, 3)
        })],
    },
    Scenario {
        name: "delete and save again",
        is_long: true,
        stalls: false,
        set_up: |a| a.save(1, 1),
        clients: &[("a", |a| {
            let _ = a.delete(1);
            a.save(1, 2)
        })],
    },
    Scenario {
        name: "delete",
        is_long: false,
        stalls: false,
        set_up: |a| a.save(1, 1),
        clients: &[("a", |a| a.delete(1))],
    },
    Scenario {
        name: "save and retain",
        is_long: true,
        stalls: false,
        set_up: |a| a.save(1, 1),
        clients: &[("a", |a| {
            a.save(2, 2)?;
            a.retain(1, 2)
        })],
    },
    Scenario {
        name: "load",
        is_long: false,
        stalls: false,
        set_up: |a| a.save(1, 1),
        clients: &[("a", |a| a.load(1))],
    },
    Scenario {
        name: "two savers",
        is_long: false,
        stalls: false,
        set_up: |_| Ok(()),
        clients: &[("a", |a| a.save(1, 1)), ("b", |b| b.save(1, 2))],
    },
    Scenario {
        name: "a saver and one that overwrites",
        is_long: false,
        stalls: false,
        set_up: |_| Ok(()),
        clients: &[("a", |a| a.save(1, 1)), ("b", |b| b.overwrite(1, 2))],
    },
    Scenario {
        name: "two that overwrite",
        is_long: false,
        stalls: false,
        set_up: |a| a.save(1, 1),
        clients: &[("a", |a| a.overwrite(1, 2)), ("b", |b| b.overwrite(1, 3))],
    },
    Scenario {
        name: "a saver and a deleter",
        is_long: false,
        stalls: false,
        set_up: |a| a.save(1, 1),
        clients: &[("a", |a| a.overwrite(1, 2)), ("b", |b| b.delete(1))],
    },
    Scenario {
        name: "retention beside an overwrite",
        is_long: false,
        stalls: false,
        set_up: |a| {
            a.save(1, 1)?;
            a.save(2, 2)
        },
        clients: &[("a", |a| a.retain(1, 2)), ("b", |b| b.overwrite(1, 3))],
    },
    Scenario {
        name: "two deleters and a saver",
        is_long: false,
        stalls: false,
        set_up: |a| a.save(1, 1),
        clients: &[
            ("a", |a| a.delete(1)),
            ("b", |b| b.delete(1)),
            ("c", |c| c.save(1, 2)),
        ],
    },
    Scenario {
        name: "a saver and a reader",
        is_long: false,
        stalls: false,
        set_up: |a| a.save(1, 1),
        clients: &[
            ("a", |a| a.overwrite(1, 2)),
            ("b", |b| {
                b.load(1)?;
                b.load(1)
            }),
        ],
    },
    Scenario {
        name: "sweep after a dead save",
        is_long: true,
        stalls: false,
        set_up: |a| {
            a.save(1, 1)?;
            a.leave(1, 2)?;
            a.leave(2, 3)
        },
        clients: &[("a", |a| a.sweep(Duration::ZERO))],
    },
    Scenario {
        name: "a saver and a sweeper",
        is_long: false,
        stalls: false,
        set_up: |a| a.save(1, 1),
        clients: &[
            ("a", |a| {
                a.save(2, 2)?;
                a.overwrite(1, 3)
            }),
            ("b", |b| {
                b.sweep(MINUTES)?;
                b.sweep(MINUTES)
            }),
        ],
    },
    Scenario {
        name: "two sweepers",
        is_long: false,
        stalls: false,
        set_up: |a| {
            a.save(1, 1)?;
            a.leave(1, 2)?;
            a.leave(2, 3)
        },
        clients: &[
            ("a", |a| a.sweep(Duration::ZERO)),
            ("b", |b| b.sweep(Duration::ZERO)),
        ],
    },
    Scenario {
        name: "two that mark",
        is_long: false,
        stalls: false,
        set_up: |a| {
            a.save(1, 1)?;
            a.save(2, 2)?;
            a.save(3, 3)?;
            a.mark(3)
        },
        clients: &[("a", |a| a.mark(1)), ("b", |b| b.mark(2))],
    },
    Scenario {
        name: "a saver taken for dead",
        is_long: false,
        stalls: true,
        set_up: |a| a.save(1, 1),
        clients: &[("a", |a| a.save(2, 2)), ("b", |b| b.sweep(MINUTES))],
    },
    Scenario {
        name: "an overwrite taken for dead",
        is_long: false,
        stalls: true,
        set_up: |a| a.save(1, 1),
        clients: &[("a", |a| a.overwrite(1, 2)), ("b", |b| b.sweep(MINUTES))],
    },
    Scenario {
        name: "a saver taken for dead, and another",
        is_long: false,
        stalls: true,
        set_up: |_| Ok(()),
        clients: &[
            ("a", |a| a.save(1, 1)),
            ("b", |b| b.sweep(MINUTES)),
            ("c", |c| c.overwrite(1, 2)),
        ],
    },
];

/// A fault, and the request that it hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Planned {
    pub(crate) client: &'static str,
    pub(crate) nth: usize,
    pub(crate) fault: Fault,
}

impl fmt::Display for Planned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} at {}'s request {}",
            self.fault, self.client, self.nth
        )
    }
}

/// The order of requests if several clients act.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Random, from this seed.
    Drawn(u64),
    /// A number of requests of the first client, a number of the second, all of the others, and
    /// then the rest of the first, and of the second.
    Directed { first: usize, second: usize },
}

impl Scenario {
    fn names(&self) -> Vec<&'static str> {
        self.clients.iter().map(|(name, _)| *name).collect()
    }

    fn stages(&self, order: Order) -> Vec<(&'static str, usize)> {
        let Order::Directed { first, second } = order else {
            return Vec::new();
        };
        let names = self.names();
        let all = |name: &&'static str| (*name, usize::MAX);
        let mut stages = vec![(names[0], first), (names[1], second)];
        stages.extend(names[2..].iter().map(all));
        stages.extend(names[..2].iter().map(all));
        stages
    }

    fn stalled(&self, order: Order) -> Option<Stalled> {
        match order {
            Order::Directed { first, .. } if self.stalls => Some(Stalled { after: first }),
            _ => None,
        }
    }
}

/// A run to be made.
pub(crate) struct Job {
    pub(crate) scenario: &'static Scenario,
    pub(crate) order: Order,
    pub(crate) faults: Vec<Planned>,
    pub(crate) mutation: Option<Mutation>,
}

impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.scenario.name)?;
        if let Some(mutation) = self.mutation {
            write!(f, ", {mutation:?}")?;
        }
        match self.order {
            Order::Drawn(seed) if self.scenario.clients.len() > 1 => write!(f, ", order {seed}")?,
            Order::Drawn(_) => {}
            Order::Directed { first, second } => {
                let names = self.scenario.names();
                write!(
                    f,
                    ", {first} of {} and {second} of {} first",
                    names[0], names[1]
                )?;
            }
        }
        let some = self.faults.iter().take(FAULTS_SHOWN);
        some.clone()
            .try_for_each(|planned| write!(f, ", {planned}"))?;
        match self.faults.len() > FAULTS_SHOWN {
            true => write!(f, ", …"),
            false => Ok(()),
        }
    }
}

/// If a connection is down for long, its first faults suffice.
const FAULTS_SHOWN: usize = 4;

/// The result of a scenario.
pub(crate) struct Ran {
    pub(crate) journal: Vec<Entry>,
    pub(crate) violations: Vec<String>,
}

/// Runs a scenario.
pub(crate) fn run(job: &Job) -> Ran {
    let (scenario, order) = (job.scenario, job.order);
    let world = World::new(scenario.stalled(order));
    let first = world.client(OBSERVER, None);
    (scenario.set_up)(&first).expect("nothing goes wrong in the set-up");
    for planned in &job.faults {
        world
            .bucket
            .plan(planned.client, planned.nth, planned.fault);
    }
    let names = scenario.names();
    if names.len() > 1 {
        let seed = match order {
            Order::Drawn(seed) => seed,
            Order::Directed { .. } => 0,
        };
        world.bucket.interleave(&names, seed);
        world.bucket.direct(&scenario.stages(order));
    }
    let work = |name: &'static str, work: Work, world: &Arc<World>| {
        let client = world.client(name, job.mutation);
        let result = work(&client);
        world.bucket.ended(name);
        result
            .err()
            .map(|error| format!("{name}: {}", error.full_message()))
    };
    let errors: Vec<String> = thread::scope(|scope| {
        let clients: Vec<_> = scenario
            .clients
            .iter()
            .map(|&(name, what)| {
                let world = &world;
                scope.spawn(move || work(name, what, world))
            })
            .collect();
        let ended = clients.into_iter().map(|client| client.join().unwrap());
        ended.flatten().collect()
    });
    let journal = world.bucket.journal();
    let mut violations = world.end();
    if job.faults.is_empty() {
        let reported = |error: &String| format!("nothing went wrong, and it was told: {error}");
        violations.extend(errors.iter().map(reported));
    }
    Ran {
        violations,
        journal,
    }
}
