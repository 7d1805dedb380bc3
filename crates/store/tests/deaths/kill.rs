//! SIGKILL at random moments: acknowledged data loads, bit for bit, and the store remains usable.
//!
//! A child process saves, overwrites, retains, deletes and sweeps, and reports on its standard
//! output when it begins and finishes an operation; the parent kills it at a random moment, and
//! checks the store. `make torture` makes a thousand kills; an ordinary run makes fifty.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use crate::common::ledger::Ledger;
use crate::common::saver::{News, Saver, Tally};
use crate::common::{Rng, number};
use penstock_store::steps::store::Store;

/// Environment variables that tell the child where to save, and what.
const ROOT: &str = "PENSTOCK_TEST_KILL_ROOT";
const CHOICES: &str = "PENSTOCK_TEST_KILL_CHOICES";
const FIRST_SEED: &str = "PENSTOCK_TEST_KILL_FIRST_SEED";
/// Prefixes of the child's lines: the test harness writes lines of its own.
const BEGUN: &str = "child begins ";
const ACKNOWLEDGED: &str = "child acknowledges";

/// Longest time from the last awaited message to the kill.
const MOMENT_MAX: Duration = Duration::from_millis(30);

#[test]
#[ignore = "not a test: what the test kills"]
fn child() {
    let Some(root) = std::env::var_os(ROOT) else {
        return;
    };
    let store = Store::new(root);
    let rng = Rng::quiet(number(CHOICES, 0));
    let mut saver = Saver::new(&store, Ledger::of(&store), rng, number(FIRST_SEED, 0));
    let mut output = std::io::stdout();
    let error = saver.run(|news| {
        let reported = match news {
            News::Begun(activity) => writeln!(output, "{BEGUN}{activity}"),
            News::Acknowledged => writeln!(output, "{ACKNOWLEDGED}"),
        };
        reported.unwrap();
    });
    panic!("{:?}: {error}", saver.ledger.begun());
}

fn spawn(root: &Path, choices: u64, first_seed: u64) -> (Child, Receiver<News>) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["kill::child", "--exact", "--ignored", "--nocapture"])
        .env(ROOT, root)
        .env(CHOICES, choices.to_string())
        .env(FIRST_SEED, first_seed.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let (sender, receiver) = channel();
    thread::spawn(move || {
        for line in lines.map_while(Result::ok) {
            if let Some(news) = read(&line) {
                sender.send(news).unwrap();
            }
        }
    });
    (child, receiver)
}

/// The test harness may have begun the line.
fn read(line: &str) -> Option<News> {
    if let Some((_, activity)) = line.split_once(BEGUN) {
        return Some(News::Begun(activity.parse().unwrap()));
    }
    line.contains(ACKNOWLEDGED).then_some(News::Acknowledged)
}

#[test]
fn what_was_acknowledged_survives_kills() {
    let kills = number("PENSTOCK_TORTURE_KILLS", 50);
    let seed = number("PENSTOCK_TORTURE_SEED", 0x0009_1c11);
    let mut rng = Rng::new(seed);
    let root = tempfile::tempdir().unwrap();
    let store = Store::new(root.path());
    let mut ledger = Ledger::default();
    let mut activities = Tally::default();
    let mut acknowledged = 0;
    for kill in 0..kills {
        let (mut child, news) = spawn(root.path(), rng.below(u64::MAX), (1 + kill) << 20);
        let mut heard = Vec::new();
        for _ in 0..rng.below(8) {
            heard.push(news.recv().expect("the child works until it is killed"));
        }
        // The random moment itself; nothing is synchronized by it.
        thread::sleep(Duration::from_micros(
            rng.below(MOMENT_MAX.as_micros() as u64),
        ));
        child.kill().unwrap();
        let status = child.wait().unwrap();
        heard.extend(news);
        for news in heard {
            match news {
                News::Begun(activity) => ledger.begin(activity),
                News::Acknowledged => ledger.acknowledge(),
            }
            acknowledged += u64::from(news.is_acknowledged());
        }
        let activity = ledger.begun().map_or("nothing", |activity| activity.name());
        let when = format!("kill {kill} of seed {seed}, in {activity}");
        assert_eq!(status.signal(), Some(9), "{when}: the child had failed");
        activities.count(activity);
        ledger.check(&store, &when);
        // Half of the children start with the remains of the previous one.
        if rng.below(2) == 0 {
            ledger.sweep(&store, &when);
        }
    }
    assert!(acknowledged >= kills, "the children got somewhere");
    ledger.sweep(&store, "at the end");
    eprintln!("{kills} kills, seed {seed}, {acknowledged} acknowledged, 0 lost");
    eprintln!("killed in {activities}");
}
