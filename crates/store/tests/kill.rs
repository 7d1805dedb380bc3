//! SIGKILL at random moments, fifty times: the store always loads the newest acknowledged step,
//! bit for bit, and goes on from there.
//!
//! A child process saves step after step with retention on and acknowledges each on its standard
//! output; the parent kills it, wherever it is, and looks at what is there.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use common::{Rng, Sample};
use penstock_store::store::{StepState, Store};

const KILLS: usize = 50;
/// The variable that tells the child where to save.
const ROOT: &str = "PENSTOCK_TEST_KILL_ROOT";
/// What a step that was acknowledged is announced with.
const ACKNOWLEDGED: &str = "acknowledged ";

/// The newest complete step, loaded, verified and found to be the one that was saved.
fn newest(store: &Store) -> Option<u64> {
    let steps = store.steps().unwrap();
    let newest = steps
        .into_iter()
        .rev()
        .find(|&step| match store.state(step).unwrap() {
            StepState::Complete(_) => true,
            StepState::Incomplete => false,
            StepState::Damaged(error) | StepState::Newer(error) => {
                panic!("a kill damages nothing: {error}")
            }
        })?;
    Sample::seeded(newest).assert_at(&store.step_path(newest));
    Some(newest)
}

#[test]
#[ignore = "not a test: what the test kills"]
fn child() {
    let Some(root) = std::env::var_os(ROOT) else {
        return;
    };
    let store = Store::new(root);
    let first = newest(&store).map_or(1, |step| step + 1);
    for step in first.. {
        let path = store.step_path(step);
        // What a killed attempt left at this step is no obstacle; every third replaces itself.
        Sample::seeded(step)
            .save_step(&path, Some(step), false)
            .unwrap();
        writeln!(std::io::stdout(), "{ACKNOWLEDGED}{step}").unwrap();
        if step % 3 == 0 {
            Sample::seeded(step)
                .save_step(&path, Some(step), true)
                .unwrap();
        }
        store.retain(Some(2), Some(10), Some(step)).unwrap();
    }
}

fn spawn(root: &Path) -> (Child, Receiver<u64>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["child", "--exact", "--ignored", "--nocapture"])
        .env(ROOT, root)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let (sender, receiver) = channel();
    thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            // The harness may have begun a line of its own.
            let Some((_, step)) = line.split_once(ACKNOWLEDGED) else {
                continue;
            };
            sender.send(step.parse().unwrap()).unwrap();
        }
    });
    (child, receiver)
}

#[test]
fn every_acknowledged_step_survives_a_kill() {
    let mut rng = Rng::new(0x0009_1c11);
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    let mut acknowledged = 0;
    for kill in 0..KILLS {
        let (mut child, steps) = spawn(root.path());
        // Some kills fall into the first save, some into a later one or into retention. The wait
        // is the random moment itself, nothing is synchronised by it.
        for _ in 0..rng.below(4) {
            acknowledged = steps.recv().expect("the child saves until it is killed");
        }
        thread::sleep(Duration::from_micros(rng.below(30_000)));
        child.kill().unwrap();
        child.wait().unwrap();
        acknowledged = steps.iter().last().unwrap_or(acknowledged);
        let newest = newest(&store).unwrap_or(0);
        assert!(
            newest >= acknowledged,
            "kill {kill}: step {acknowledged} was acknowledged, {newest} is there"
        );
    }
    assert!(
        acknowledged > 20,
        "the children got somewhere: {acknowledged}"
    );
    store.sweep().unwrap();
    for step in store.steps().unwrap() {
        let state = store.state(step).unwrap();
        assert!(matches!(state, StepState::Complete(_)), "step {step}");
        assert_eq!(common::names(&store.step_path(step)).len(), 3);
        Sample::seeded(step).assert_at(&store.step_path(step));
    }
}
