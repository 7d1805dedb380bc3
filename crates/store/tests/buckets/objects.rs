//! Checkpoints in a bucket, on a real server of S3's protocol: VersityGW, found through
//! `PENSTOCK_VERSITYGW`, or where `make objects-server` installs it.

use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::io::ErrorKind::ResourceBusy;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{Sample, names, number, only_winner, publication, race, skip};
use penstock_io::buffer::Memory;
use penstock_io::engine::{Op, OpKind};
use penstock_io::file::{Direct, File};
use penstock_io::file_system::{Change, FileSystem, Files};
use penstock_object::{Address, Credentials, Keys, Objects, Remote, Verdict, probe};
use penstock_store::care::verify::verify;
use penstock_store::format::manifest::PartEntry;
use penstock_store::load::checkpoint::{Checkpoint, Loaded};
use penstock_store::options::Options;
use penstock_store::report::SaveReport;
use penstock_store::save::{Attempt, Publication, commit, is_committed, save, write_rank};
use penstock_store::steps::store::{StepState, Store};
use penstock_store::steps::sweep::Sweep;
use penstock_store::{Error, Progress, Result};

const BUCKET: &str = "bucket";

/// A server with one bucket, whose objects are files of a directory.
struct Server {
    process: Child,
    endpoint: String,
    root: tempfile::TempDir,
}

impl Server {
    /// Starts a server; `None`, with a message, if there is none.
    fn start(test: &str) -> Option<Server> {
        let Some(program) = program() else {
            skip(
                test,
                "VersityGW is not installed: `make objects-server` does it with Go",
            );
            return None;
        };
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join(BUCKET)).unwrap();
        // Somebody else may take a port that was just free.
        for _ in 0..5 {
            let port = free_port();
            let mut process = Command::new(&program)
                .args(["--port", &format!("127.0.0.1:{port}"), "posix"])
                .arg(root.path())
                .env("ROOT_ACCESS_KEY_ID", "key")
                .env("ROOT_SECRET_ACCESS_KEY", "secret")
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_secs(30) {
                if process.try_wait().unwrap().is_some() {
                    break;
                }
                if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                    return Some(Server {
                        process,
                        endpoint: format!("http://127.0.0.1:{port}"),
                        root,
                    });
                }
                thread::sleep(Duration::from_millis(20));
            }
            let _ = process.kill();
            let _ = process.wait();
        }
        panic!("{} does not start", program.display());
    }

    fn objects_as(&self, remote: Remote) -> Arc<Objects> {
        let remote = Remote {
            endpoint: remote.endpoint.or(Some(self.endpoint.clone())),
            region: Some("us-east-1".into()),
            credentials: remote.credentials.or_else(|| Some(key("secret"))),
            ..remote
        };
        let address = Address::of(&at("")).unwrap().unwrap();
        Arc::new(Objects::open(address, &remote).unwrap())
    }

    fn objects(&self) -> Arc<Objects> {
        self.objects_as(Remote::default())
    }

    /// The server's file for a key.
    fn file(&self, key: &str) -> PathBuf {
        self.root.path().join(BUCKET).join(key)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// How a connection treats requests that put a manifest.
#[derive(Clone, Copy, PartialEq)]
enum Cut {
    Nothing,
    /// They do not arrive.
    Request,
    /// They are carried out, but their responses are lost.
    Answer,
}

/// A connection to a server that can be cut. Its threads end with their connections.
struct Line {
    endpoint: String,
    cut: Arc<Mutex<Cut>>,
}

impl Line {
    fn to(server: &Server) -> Line {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let upstream = server.endpoint.trim_start_matches("http://").to_owned();
        let cut = Arc::new(Mutex::new(Cut::Nothing));
        let shared = Arc::clone(&cut);
        thread::spawn(move || {
            for client in listener.incoming() {
                let (client, shared) = (client.unwrap(), Arc::clone(&shared));
                let Ok(server) = TcpStream::connect(&upstream) else {
                    return;
                };
                thread::spawn(move || pass(client, server, &shared));
            }
        });
        Line { endpoint, cut }
    }

    fn cut(&self, what: Cut) {
        *self.cut.lock().unwrap() = what;
    }

    fn objects(&self, server: &Server) -> Arc<Objects> {
        server.objects_as(Remote {
            endpoint: Some(self.endpoint.clone()),
            patience: Some(Duration::from_millis(500)),
            ..Remote::default()
        })
    }
}

/// Forwards requests one after the other, and their responses back.
fn pass(mut client: TcpStream, mut server: TcpStream, cut: &Mutex<Cut>) {
    let (mut answers, mut back) = (server.try_clone().unwrap(), client.try_clone().unwrap());
    let is_mute = Arc::new(AtomicBool::new(false));
    let mute = Arc::clone(&is_mute);
    thread::spawn(move || {
        let mut buffer = [0; 1 << 16];
        while let Ok(count @ 1..) = answers.read(&mut buffer) {
            if mute.load(Ordering::SeqCst) || back.write_all(&buffer[..count]).is_err() {
                break;
            }
        }
        let _ = back.shutdown(Shutdown::Both);
    });
    let mut buffer = [0; 1 << 16];
    while let Ok(count @ 1..) = client.read(&mut buffer) {
        let request = String::from_utf8_lossy(&buffer[..count]);
        let line = request.lines().next().unwrap_or_default();
        let what = *cut.lock().unwrap();
        if line.starts_with("PUT") && line.contains("manifest.json") && what != Cut::Nothing {
            if what == Cut::Request {
                break;
            }
            is_mute.store(true, Ordering::SeqCst);
        }
        if server.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = server.shutdown(Shutdown::Both);
    let _ = client.shutdown(Shutdown::Both);
}

fn program() -> Option<PathBuf> {
    let installed =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../.cache/versitygw-v1.8.0/versitygw");
    let named = std::env::var_os("PENSTOCK_VERSITYGW").map(PathBuf::from);
    named.or_else(|| installed.exists().then_some(installed))
}

fn key(secret: &str) -> Credentials {
    Credentials::Given(Keys {
        id: "key".into(),
        secret: secret.into(),
        token: None,
        expires: None,
    })
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

fn at(key: &str) -> PathBuf {
    PathBuf::from(format!("s3://{BUCKET}/{key}"))
}

fn options(objects: &Arc<Objects>) -> Options {
    Options::default().on(objects)
}

fn load(path: &Path, objects: &Arc<Objects>) -> Result<Loaded> {
    let options = options(objects);
    let checkpoint = Checkpoint::open_on(path, &options.file_system)?;
    checkpoint.load(None, HashMap::new(), &options, &Progress::default())
}

fn assert_at(sample: &Sample, path: &Path, objects: &Arc<Objects>) {
    let progress = Progress::default();
    let loaded = load(path, objects);
    assert!(
        sample.is(&loaded.unwrap()),
        "{} is another state",
        path.display()
    );
    let report = verify(path, &options(objects), &progress).unwrap();
    assert!(report.problems.is_empty(), "{:?}", report.problems);
}

#[test]
fn a_state_comes_back_bit_for_bit() {
    let Some(server) = Server::start("a_state_comes_back_bit_for_bit") else {
        return;
    };
    let objects = server.objects();
    let samples = [
        Sample::mixed(),
        Sample::of_sizes(&[]),
        // Several parts, and an end within one.
        Sample::of_sizes(&[30 << 20, 1, (9 << 20) + 5]),
    ];
    for (index, sample) in samples.iter().enumerate() {
        let path = at(&format!("run/{index}"));
        for shard_bytes in [None, Some(12 << 20)] {
            let options = Options {
                shard_bytes,
                ..options(&objects)
            };
            let publication = Publication {
                overwrite: true,
                ..publication(&path)
            };
            save(sample.state(), &publication, &options, &Progress::default()).unwrap();
            assert_at(sample, &path, &objects);
        }
    }
}

#[test]
fn one_that_is_there_is_refused_or_replaced_and_nothing_is_left_of_it() {
    let Some(server) = Server::start("one_that_is_there_is_refused") else {
        return;
    };
    let objects = server.objects();
    let path = at("ckpt");
    let (first, second) = (Sample::seeded(1), Sample::seeded(2));
    first.save(&path, &options(&objects)).unwrap();
    let refused = second.save(&path, &options(&objects));
    assert!(matches!(refused, Err(Error::Exists { .. })), "{refused:?}");
    assert_at(&first, &path, &objects);
    assert_eq!(names(&server.file("ckpt")).len(), 3);
    let publication = Publication {
        overwrite: true,
        ..publication(&path)
    };
    save(
        second.state(),
        &publication,
        &options(&objects),
        &Progress::default(),
    )
    .unwrap();
    assert_at(&second, &path, &objects);
}

#[test]
fn one_of_several_savers_wins() {
    let Some(server) = Server::start("one_of_several_savers_wins") else {
        return;
    };
    let objects = server.objects();
    let samples: Vec<Sample> = (0..8)
        .map(|seed| Sample::seeded_sizes(seed, &[4096, 77]))
        .collect();
    for round in 0..number("PENSTOCK_TORTURE_RACES", 10) {
        let path = at(&format!("races/{round}"));
        let results = race(&samples, |sample| sample.save(&path, &options(&objects)));
        assert_at(&samples[only_winner(&results)], &path, &objects);
    }
}

#[test]
fn a_store_keeps_and_deletes_steps() {
    let Some(server) = Server::start("a_store_keeps_and_deletes_steps") else {
        return;
    };
    let objects = server.objects();
    let store = Store::new(at("store")).with_file_system(Arc::clone(&objects) as _);
    assert_eq!(store.steps().unwrap(), Vec::<u64>::new());
    for step in [1, 2, 3] {
        let publication = Publication {
            step: Some(step),
            ..publication(&store.step_path(step))
        };
        let state = Sample::seeded(step).state();
        save(
            state,
            &publication,
            &options(&objects),
            &Progress::default(),
        )
        .unwrap();
    }
    assert_eq!(store.newest_complete(None).unwrap(), Some(3));
    store.protect(1).unwrap();
    assert!(matches!(store.delete(1), Err(Error::Protected { .. })));
    assert!(store.delete(2).unwrap() > 1 << 20);
    assert_eq!(store.steps().unwrap(), [1, 3]);
    assert!(!server.file("store/step-0000000002").exists());
    assert_at(&Sample::seeded(1), &store.step_path(1), &objects);
    store.unprotect(1).unwrap();
    store.delete(1).unwrap();
    assert_eq!(store.steps().unwrap(), [3]);
    assert!(matches!(store.delete(7), Err(Error::NotFound { .. })));
}

#[test]
fn what_changed_on_the_server_is_damage() {
    let Some(server) = Server::start("what_changed_on_the_server_is_damage") else {
        return;
    };
    let objects = server.objects();
    let path = at("ckpt");
    Sample::seeded(1).save(&path, &options(&objects)).unwrap();
    let directory = server.file("ckpt");
    let shard = names(&directory)
        .into_iter()
        .find(|name| name.starts_with("shard"));
    let shard = directory.join(shard.unwrap());
    let mut bytes = fs::read(&shard).unwrap();
    bytes[5000] ^= 1;
    fs::write(&shard, &bytes).unwrap();
    assert!(matches!(
        load(&path, &objects),
        Err(Error::Corrupt {
            offset: Some(_),
            ..
        })
    ));
    fs::write(&shard, &bytes[..6000]).unwrap();
    assert!(matches!(load(&path, &objects), Err(Error::Corrupt { .. })));
    fs::remove_file(&shard).unwrap();
    assert!(matches!(load(&path, &objects), Err(Error::Corrupt { .. })));
}

#[test]
fn what_cannot_be_asked_is_an_error_and_changes_nothing() {
    let Some(server) = Server::start("what_cannot_be_asked_is_an_error") else {
        return;
    };
    let stranger = Remote {
        credentials: Some(key("wrong")),
        ..Remote::default()
    };
    let stranger = server.objects_as(stranger);
    let refused = Sample::seeded(1).save(&at("ckpt"), &options(&stranger));
    let error = refused.unwrap_err();
    let is_refused =
        |source: &std::io::Error| source.kind() == std::io::ErrorKind::PermissionDenied;
    assert!(
        matches!(&error, Error::Storage { source, .. } if is_refused(source)),
        "{error:?}"
    );
    let elsewhere = PathBuf::from("s3://none/ckpt");
    let address = Address::of(&elsewhere).unwrap().unwrap();
    let remote = Remote {
        endpoint: Some(server.endpoint.clone()),
        credentials: Some(key("secret")),
        ..Remote::default()
    };
    let nobody = Arc::new(Objects::open(address, &remote).unwrap());
    assert!(
        Sample::seeded(1)
            .save(&elsewhere, &options(&nobody))
            .is_err()
    );
    assert_eq!(names(&server.file("")), Vec::<String>::new());
}

#[test]
fn a_commit_whose_answer_is_lost_is_found_and_one_that_nobody_decides_keeps_its_data() {
    let Some(server) = Server::start("a_commit_whose_answer_is_lost_is_found") else {
        return;
    };
    let line = Line::to(&server);
    let objects = line.objects(&server);
    line.cut(Cut::Answer);
    for (path, overwrite, seed) in [("ckpt", false, 1), ("ckpt", true, 2), ("new", true, 3)] {
        let publication = Publication {
            overwrite,
            ..publication(&at(path))
        };
        let sample = Sample::seeded(seed);
        let saved = save(
            sample.state(),
            &publication,
            &options(&objects),
            &Progress::default(),
        );
        saved.unwrap_or_else(|error| panic!("{path}: {}", error.full_message()));
        assert_at(&sample, &at(path), &server.objects());
    }
    line.cut(Cut::Request);
    let lost = Sample::seeded(4).save(&at("lost"), &options(&objects));
    let Err(Error::CommitUndecided { attempt, .. }) = lost else {
        panic!("{lost:?}")
    };
    let stored = names(&server.file("lost"));
    assert_eq!(stored.len(), 2, "{stored:?}");
    assert!(stored.iter().all(|name| name.contains(&attempt)));
    // Another checkpoint has its place by now: the late request is refused.
    let first = Sample::seeded(1);
    first
        .save(&at("taken"), &options(&server.objects()))
        .unwrap();
    let refused = Sample::seeded(5).save(&at("taken"), &options(&objects));
    assert!(matches!(refused, Err(Error::Exists { .. })), "{refused:?}");
    assert_at(&first, &at("taken"), &server.objects());
}

/// A store in the bucket, and the options to save its steps with.
struct Steps {
    store: Store,
    objects: Arc<Objects>,
}

impl Steps {
    fn at(key: &str, objects: &Arc<Objects>) -> Steps {
        let store = Store::new(at(key)).with_file_system(Arc::clone(objects) as _);
        Steps {
            store,
            objects: Arc::clone(objects),
        }
    }

    fn publication(&self, step: u64, overwrite: bool) -> Publication {
        Publication {
            step: Some(step),
            overwrite,
            ..publication(&self.store.step_path(step))
        }
    }

    fn save(&self, step: u64, seed: u64, overwrite: bool) -> Result<SaveReport> {
        self.save_as(step, &Sample::seeded(seed), overwrite)
    }

    fn save_as(&self, step: u64, sample: &Sample, overwrite: bool) -> Result<SaveReport> {
        let (publication, options) = (self.publication(step, overwrite), options(&self.objects));
        save(sample.state(), &publication, &options, &Progress::default())
    }

    /// An attempt of one rank that has written everything except the manifest.
    fn prepare(&self, step: u64, seed: u64) -> (Attempt, Vec<PartEntry>) {
        let (options, progress) = (options(&self.objects), Progress::default());
        let path = self.store.step_path(step);
        let attempt = Attempt::begin(&path, true, &options.file_system, &progress);
        let mut attempt = attempt.unwrap();
        let state = Sample::seeded(seed).state();
        let written = write_rank(&mut attempt, 0, state, &options, &progress).unwrap();
        (attempt, vec![written.part])
    }
}

/// Sets the age of all files of a step, as reported by the server.
fn set_age(server: &Server, key: &str, seconds: i64) {
    let directory = server.file(key);
    let date = format!("{} seconds ago", seconds);
    for name in names(&directory) {
        let touched = Command::new("touch")
            .args(["-d", &date])
            .arg(directory.join(name))
            .status();
        assert!(touched.unwrap().success());
    }
}

fn is_taken_for_dead(error: &Error) -> bool {
    error.full_message().contains("took this save for dead")
}

const DAY: i64 = 24 * 60 * 60;

#[test]
fn an_overwritten_checkpoint_goes_and_nothing_of_others_does() {
    let Some(server) = Server::start("an_overwritten_checkpoint_goes") else {
        return;
    };
    let steps = Steps::at("run", &server.objects());
    steps.save(1, 1, false).unwrap();
    let (live, _) = steps.prepare(1, 9);
    steps.save(1, 2, true).unwrap();
    let path = steps.store.step_path(1);
    assert_at(&Sample::seeded(2), &path, &steps.objects);
    let stored = names(&server.file("run/step-0000000001"));
    let of_live = |name: &&String| name.contains(live.id());
    assert_eq!(stored.iter().filter(of_live).count(), 2, "{stored:?}");
    assert_eq!(stored.len(), 5, "{stored:?}");
    drop(live);
    assert_eq!(names(&server.file("run/step-0000000001")).len(), 3);
}

#[test]
fn of_savers_that_overwrite_each_other_one_is_there_whole_and_nothing_else_is() {
    let Some(server) = Server::start("of_savers_that_overwrite_each_other") else {
        return;
    };
    let steps = Steps::at("run", &server.objects());
    for round in 0..number("PENSTOCK_TORTURE_RACES", 5) {
        let samples: Vec<Sample> = (0..6).map(Sample::seeded).collect();
        let results = race(&samples, |sample| steps.save_as(round, sample, true));
        for result in results {
            result.unwrap();
        }
        let path = steps.store.step_path(round);
        let report = verify(&path, &options(&steps.objects), &Progress::default()).unwrap();
        assert!(report.problems.is_empty(), "{:?}", report.problems);
        let stored = names(&server.file(&format!("run/step-{round:010}")));
        assert_eq!(stored.len(), 3, "{stored:?}");
    }
}

#[test]
fn a_sweep_goes_by_the_age_of_the_youngest_file_of_an_attempt() {
    let Some(server) = Server::start("a_sweep_goes_by_the_age") else {
        return;
    };
    let steps = Steps::at("run", &server.objects());
    let store = &steps.store;
    assert_eq!(store.sweep().unwrap(), []);
    steps.save(1, 1, false).unwrap();
    for step in [1, 2, 3] {
        // Like a process that died: nothing is cleaned up after it.
        std::mem::forget(steps.prepare(step, 5));
    }
    assert_eq!(store.sweep().unwrap(), []);
    set_age(&server, "run/step-0000000001", DAY + 60);
    set_age(&server, "run/step-0000000002", DAY + 60);
    set_age(&server, "run/step-0000000003", DAY - 60);
    let reported = store.orphans().unwrap();
    let swept = store.sweep().unwrap();
    assert_eq!(reported, swept);
    let paths: Vec<_> = swept.iter().map(|(path, _)| path.clone()).collect();
    assert_eq!(paths, [store.step_path(1), store.step_path(2)]);
    assert!(swept.iter().all(|(_, bytes)| *bytes > 1 << 20), "{swept:?}");
    assert_eq!(store.steps().unwrap(), [1, 3]);
    assert_at(&Sample::seeded(1), &store.step_path(1), &steps.objects);
    assert_eq!(names(&server.file("run/step-0000000001")).len(), 3);
    assert_eq!(names(&server.file("run/step-0000000003")).len(), 2);
    // A low age is raised to the minimum, unless the caller forces it.
    set_age(&server, "run/step-0000000003", 60);
    let age = Duration::ZERO;
    let low = Sweep {
        age,
        is_forced: false,
    };
    assert_eq!(store.sweep_as(&low).unwrap(), []);
    set_age(&server, "run/step-0000000003", 16 * 60);
    assert_eq!(store.sweep_as(&low).unwrap().len(), 1);
    assert_eq!(store.steps().unwrap(), [1]);
    assert_eq!(names(&server.file("run")), ["step-0000000001"]);
}

#[test]
fn a_lease_that_is_renewed_keeps_old_files_of_a_live_save() {
    let Some(server) = Server::start("a_lease_that_is_renewed") else {
        return;
    };
    let steps = Steps::at("run", &server.objects());
    let (attempt, parts) = steps.prepare(1, 1);
    set_age(&server, "run/step-0000000001", 7 * DAY);
    let lease = format!("run/step-0000000001/lease.{}.tmp", attempt.id());
    fs::write(server.file(&lease), b"{}").unwrap();
    assert_eq!(steps.store.sweep().unwrap(), []);
    commit(attempt, &steps.publication(1, false), parts).unwrap();
    assert_at(
        &Sample::seeded(1),
        &steps.store.step_path(1),
        &steps.objects,
    );
    // The lease of a save that died after its commit is of no use to anybody.
    set_age(&server, "run/step-0000000001", 7 * DAY);
    assert_eq!(steps.store.sweep().unwrap().len(), 1);
    assert_eq!(names(&server.file("run/step-0000000001")).len(), 3);
    assert_at(
        &Sample::seeded(1),
        &steps.store.step_path(1),
        &steps.objects,
    );
}

#[test]
fn a_save_that_a_sweep_took_for_dead_is_not_committed() {
    let Some(server) = Server::start("a_save_that_a_sweep_took_for_dead") else {
        return;
    };
    let steps = Steps::at("run", &server.objects());
    let step = "run/step-0000000001";
    steps.save(1, 1, false).unwrap();
    // Apparently stopped for two days: all of its files are gone, or only the old ones.
    for is_partly in [false, true] {
        let (attempt, parts) = steps.prepare(1, 2);
        set_age(&server, step, 2 * DAY);
        steps.store.sweep().unwrap();
        if is_partly {
            let part = server.file(step).join(&parts[0].file);
            fs::write(part, vec![b' '; parts[0].bytes as usize]).unwrap();
        }
        let error = commit(attempt, &steps.publication(1, true), parts).unwrap_err();
        assert!(is_taken_for_dead(&error), "{}", error.full_message());
        assert_at(
            &Sample::seeded(1),
            &steps.store.step_path(1),
            &steps.objects,
        );
        assert_eq!(names(&server.file(step)).len(), 3);
    }
    // A sweep in progress.
    let (attempt, parts) = steps.prepare(1, 2);
    let fence = format!("{step}/fence-{}.{}.tmp", "0".repeat(32), attempt.id());
    fs::write(server.file(&fence), b"{}").unwrap();
    assert!(commit(attempt, &steps.publication(1, true), parts).is_err());
    assert_at(
        &Sample::seeded(1),
        &steps.store.step_path(1),
        &steps.objects,
    );
    // That sweep has died: another one continues once the fence is old.
    assert_eq!(steps.store.sweep().unwrap(), []);
    set_age(&server, step, 2 * DAY);
    steps.store.sweep().unwrap();
    assert_eq!(names(&server.file(step)).len(), 3);
}

#[test]
fn a_clock_that_is_off_takes_no_live_data() {
    let Some(server) = Server::start("a_clock_that_is_off") else {
        return;
    };
    let steps = Steps::at("run", &server.objects());
    for (step, age) in [(1, 10 * 365 * DAY), (2, -10 * 365 * DAY)] {
        let directory = format!("run/step-{step:010}");
        let (attempt, parts) = steps.prepare(step, step);
        set_age(&server, &directory, age);
        // Another host uses the time of the files.
        steps.store.sweep().unwrap();
        let committed = commit(attempt, &steps.publication(step, false), parts);
        let path = steps.store.step_path(step);
        match age > 0 {
            // It looked dead, and its save was not acknowledged.
            true => assert!(committed.is_err() && !server.file(&directory).exists()),
            false => {
                committed.unwrap();
                assert_at(&Sample::seeded(step), &path, &steps.objects);
            }
        }
        steps.save(step, 7, true).unwrap();
        set_age(&server, &directory, age);
        steps.store.sweep().unwrap();
        assert_at(&Sample::seeded(7), &path, &steps.objects);
    }
}

#[test]
fn a_removal_that_died_is_finished_and_one_that_had_not_begun_is_not() {
    let Some(server) = Server::start("a_removal_that_died_is_finished") else {
        return;
    };
    let steps = Steps::at("run", &server.objects());
    for step in [1, 2, 3] {
        steps.save(step, step, false).unwrap();
        let directory = server.file(&format!("run/step-{step:010}"));
        let manifest = directory.join("manifest.json");
        let text = fs::read_to_string(&manifest).unwrap();
        let id = text.split('"').find(|field| field.len() == 32).unwrap();
        let taken = directory.join(format!("deleted-{}.{id}.json", "0".repeat(32)));
        // Taken; only copied; and copied a day ago.
        fs::copy(&manifest, taken).unwrap();
        if step == 1 {
            fs::remove_file(&manifest).unwrap();
        }
    }
    set_age(&server, "run/step-0000000003", 2 * DAY);
    steps.store.sweep().unwrap();
    assert_eq!(steps.store.steps().unwrap(), [2, 3]);
    for step in [2, 3] {
        assert_at(
            &Sample::seeded(step),
            &steps.store.step_path(step),
            &steps.objects,
        );
    }
    assert_eq!(names(&server.file("run/step-0000000002")).len(), 4);
    assert_eq!(names(&server.file("run/step-0000000003")).len(), 3);
    steps.store.delete(2).unwrap();
    steps.store.sweep().unwrap();
    assert_eq!(steps.store.steps().unwrap(), [3]);
}

/// A bucket in which somebody else acts right before its manifest is put.
struct Meanwhile {
    inner: Arc<Objects>,
    call: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl fmt::Debug for Meanwhile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl FileSystem for Meanwhile {
    fn create(&self, path: &Path, direct: Direct) -> penstock_io::Result<File> {
        self.inner.create(path, direct)
    }

    fn create_temporary(&self, path: &Path) -> penstock_io::Result<File> {
        self.inner.create_temporary(path)
    }

    fn change(&self, change: Change<'_>) -> penstock_io::Result<()> {
        let is_manifest = change.path().ends_with("manifest.json");
        let call = is_manifest.then(|| self.call.lock().unwrap().take());
        if let Some(call) = call.flatten() {
            call();
        }
        self.inner.change(change)
    }

    fn files(&self) -> &dyn Files {
        self.inner.files()
    }
}

#[test]
fn a_sweep_between_the_last_look_and_the_commit_breaks_no_checkpoint() {
    let Some(server) = Server::start("a_sweep_between_the_last_look") else {
        return;
    };
    let server = Arc::new(server);
    let objects = server.objects();
    for (step, is_replacing) in [(1, false), (2, true)] {
        let steps = Arc::new(Steps::at("run", &objects));
        let directory = format!("run/step-{step:010}");
        if is_replacing {
            steps.save(step, 1, false).unwrap();
        }
        let swept = Arc::new(AtomicBool::new(false));
        let (elsewhere, is_swept) = (Arc::clone(&steps), Arc::clone(&swept));
        let (host, of) = (Arc::clone(&server), directory.clone());
        let sweep = move || {
            set_age(&host, &of, 2 * DAY);
            let found = elsewhere.store.sweep().unwrap();
            is_swept.store(!found.is_empty(), Ordering::SeqCst);
        };
        let meanwhile = Meanwhile {
            inner: Arc::clone(&objects),
            call: Mutex::new(Some(Box::new(sweep))),
        };
        let mut options = options(&objects);
        options.file_system = Arc::new(meanwhile);
        let publication = steps.publication(step, is_replacing);
        let state = Sample::seeded(2).state();
        let saved = save(state, &publication, &options, &Progress::default());
        assert!(swept.load(Ordering::SeqCst));
        let error = saved.unwrap_err();
        assert!(is_taken_for_dead(&error), "{}", error.full_message());
        match is_replacing {
            true => {
                assert_at(&Sample::seeded(1), &steps.store.step_path(step), &objects);
                assert_eq!(names(&server.file(&directory)).len(), 3);
            }
            false => assert!(!server.file(&directory).exists()),
        }
    }
}

#[test]
fn a_store_is_probed_and_nothing_is_left_of_that() {
    let Some(server) = Server::start("a_store_is_probed") else {
        return;
    };
    let findings = probe(&server.objects(), &at("run")).unwrap();
    for finding in &findings {
        assert_eq!(finding.verdict, Verdict::Holds, "{finding}");
    }
    assert_eq!(findings.len(), 7);
    let mut left = names(&server.file(""));
    // The server's own directory.
    left.retain(|name| name != ".sgwtmp");
    assert_eq!(left, Vec::<String>::new());
}

#[test]
fn uploads_of_dead_attempts_go_and_those_of_live_ones_and_of_others_stay() {
    let Some(server) = Server::start("uploads_of_dead_attempts_go") else {
        return;
    };
    let steps = Steps::at("run", &server.objects());
    let id = |digit: &str| digit.repeat(32);
    let shard = |step: u64, digit: &str| {
        let name = format!("shard-00000-00.{}.safetensors", id(digit));
        steps.store.step_path(step).join(name)
    };
    let other = steps.store.step_path(4).join("somebody's own");
    let elsewhere = at("walk/step-0000000004/").join(format!("part-00000.{}.json", id("a")));
    for path in [&shard(4, "a"), &other, &elsewhere] {
        begin_upload(&steps.objects, path);
    }
    let uploads = server.file(".sgwtmp/multipart");
    let date = format!("{} seconds ago", 2 * DAY);
    let touched = Command::new("find")
        .arg(uploads)
        .args(["-exec", "touch", "-d", &date, "{}", "+"])
        .status();
    assert!(touched.unwrap().success());
    begin_upload(&steps.objects, &shard(4, "b"));
    begin_upload(&steps.objects, &shard(5, "c"));
    let path = steps.store.step_path(4);
    assert_eq!(steps.store.orphans().unwrap(), [(path.clone(), 0)]);
    assert_eq!(steps.store.sweep().unwrap(), [(path, 0)]);
    let file_system: &dyn FileSystem = steps.objects.as_ref();
    let mut left: Vec<_> = file_system.open_uploads(&at("")).unwrap();
    left.sort_by(|one, other| one.path.cmp(&other.path));
    let left: Vec<_> = left.into_iter().map(|upload| upload.path).collect();
    let mut expected = vec![shard(4, "b"), shard(5, "c"), other, elsewhere];
    expected.sort();
    assert_eq!(left, expected);
    assert_eq!(steps.store.sweep().unwrap(), []);
}

/// Sends the first part of a file, and dies.
fn begin_upload(objects: &Arc<Objects>, path: &Path) {
    let file = Arc::new(objects.resume_upload(path, |_| true).unwrap().file);
    let mut engine = objects.engine(1).unwrap().engine;
    let kind = OpKind::Write {
        offset: 0,
        buf: Memory::allocate(4).unwrap().share().1,
    };
    let (token, to) = (0, Arc::clone(&file));
    engine
        .submit(Op {
            token,
            file: to,
            kind,
        })
        .unwrap();
    let mut completed = Vec::new();
    engine.poll(1, None, &mut completed).unwrap();
    assert_eq!(completed[0].result.as_ref().unwrap(), &4);
}

/// Ranks of one attempt, each with connections of its own; returns the coordinator's attempt, the
/// others', and all votes.
fn vote(server: &Server, path: &Path, ranks: u32) -> (Vec<Attempt>, Vec<PartEntry>) {
    let write = |mut attempt: Attempt, rank: u32, objects: &Arc<Objects>| {
        let state = Sample::seeded(u64::from(rank)).state();
        let (options, progress) = (options(objects), Progress::default());
        let written = write_rank(&mut attempt, rank, state, &options, &progress).unwrap();
        (attempt, written.part)
    };
    let (objects, progress) = (server.objects(), Progress::default());
    let first = Attempt::begin(path, false, &options(&objects).file_system, &progress).unwrap();
    let id = first.id().to_owned();
    let join = |rank| {
        let objects = server.objects();
        let joined = Attempt::join(path, &id, &options(&objects).file_system, &progress).unwrap();
        write(joined, rank, &objects)
    };
    thread::scope(|scope| {
        let members: Vec<_> = (1..ranks)
            .map(|rank| scope.spawn(move || join(rank)))
            .collect();
        let mut all = vec![write(first, 0, &objects)];
        all.extend(members.into_iter().map(|member| member.join().unwrap()));
        all.into_iter().unzip()
    })
}

#[test]
fn ranks_save_together_and_one_that_lacks_a_file_keeps_all_from_it() {
    let Some(server) = Server::start("ranks_save_together") else {
        return;
    };
    let steps = Steps::at("run", &server.objects());
    const RANKS: u32 = 5;
    let path = |step| steps.store.step_path(step);
    let file = |step: u64| format!("run/step-{step:010}");
    let (mut attempts, votes) = vote(&server, &path(1), RANKS);
    let first = attempts.remove(0);
    commit(first, &steps.publication(1, false), votes).unwrap();
    drop(attempts);
    let report = verify(&path(1), &options(&steps.objects), &Progress::default()).unwrap();
    assert!(report.problems.is_empty(), "{:?}", report.problems);
    let stored = names(&server.file(&file(1)));
    assert_eq!(stored.len(), 2 * RANKS as usize + 1, "{stored:?}");
    // A file that a rank voted for is missing or incomplete: its part, one of its shards, bytes of
    // a shard.
    for (step, is_lacking) in [(2, "part-00003"), (3, "shard-00004"), (4, "cut")] {
        let (mut attempts, votes) = vote(&server, &path(step), RANKS);
        let stored = names(&server.file(&file(step)));
        let of = |name: &str| {
            stored
                .iter()
                .find(|stored| stored.starts_with(name))
                .unwrap()
        };
        let directory = server.file(&file(step));
        match is_lacking {
            "cut" => fs::write(directory.join(of("shard-00002")), b"short").unwrap(),
            name => fs::remove_file(directory.join(of(name))).unwrap(),
        }
        let first = attempts.remove(0);
        let refused = commit(first, &steps.publication(step, false), votes);
        assert!(refused.is_err(), "{is_lacking}");
        assert!(matches!(steps.store.state(step), Ok(StepState::Incomplete)));
        // They learn of the failure, and discard their files.
        attempts.into_iter().for_each(Attempt::discard);
        assert!(!directory.exists(), "{is_lacking}");
    }
}

#[test]
fn what_ranks_leave_that_died_is_swept_by_its_age() {
    let Some(server) = Server::start("what_ranks_leave_that_died") else {
        return;
    };
    let steps = Steps::at("run", &server.objects());
    let directory = "run/step-0000000001";
    let (mut attempts, votes) = vote(&server, &steps.store.step_path(1), 3);
    // The coordinator dies with all votes. The other ranks do not learn of it, so they leave their
    // files.
    let first = attempts.remove(0);
    let id = first.id().to_owned();
    std::mem::forget(first);
    assert!(!is_committed(
        &steps.store.step_path(1),
        steps.objects.files(),
        &id
    ));
    drop(attempts);
    assert_eq!(names(&server.file(directory)).len(), 6);
    // A later run saves the step, and the remaining files belong to nobody.
    steps.save(1, 1, false).unwrap();
    assert_eq!(steps.store.sweep().unwrap(), []);
    set_age(&server, directory, 2 * DAY);
    assert_eq!(steps.store.sweep().unwrap().len(), 1);
    assert_eq!(names(&server.file(directory)).len(), 3);
    assert_at(
        &Sample::seeded(1),
        &steps.store.step_path(1),
        &steps.objects,
    );
    // A rank dies before it votes: the coordinator gives up, and removes its own files.
    let (mut attempts, _) = vote(&server, &steps.store.step_path(2), 3);
    std::mem::forget(attempts.pop());
    attempts.into_iter().for_each(Attempt::discard);
    assert_eq!(names(&server.file("run/step-0000000002")).len(), 2);
    set_age(&server, "run/step-0000000002", 2 * DAY);
    steps.store.sweep().unwrap();
    assert_eq!(steps.store.steps().unwrap(), [1]);
    drop(votes);
}

#[test]
fn a_reader_whose_step_is_deleted_gets_an_error_that_says_so() {
    let Some(server) = Server::start("a_reader_whose_step_is_deleted") else {
        return;
    };
    let steps = Steps::at("run", &server.objects());
    let options = options(&steps.objects);
    for is_replaced in [false, true] {
        steps.save(1, 1, false).unwrap();
        let path = steps.store.step_path(1);
        let open = Checkpoint::open_on(&path, &options.file_system).unwrap();
        match is_replaced {
            true => drop(steps.save(1, 2, true).unwrap()),
            false => drop(steps.store.delete(1).unwrap()),
        }
        let loaded = open.load(None, HashMap::new(), &options, &Progress::default());
        let error = loaded.map(drop).unwrap_err();
        let is_named = matches!(&error, Error::Replaced { path: named } if *named == path);
        assert!(is_named, "{error:?}");
    }
}

#[test]
fn deletions_and_saves_of_one_step_leave_it_whole_or_not_at_all() {
    let Some(server) = Server::start("deletions_and_saves_of_one_step") else {
        return;
    };
    let steps = Steps::at("run", &server.objects());
    for round in 0..number("PENSTOCK_TORTURE_RACES", 6) {
        let (path, directory) = (
            steps.store.step_path(round),
            format!("run/step-{round:010}"),
        );
        steps.save(round, 100, false).unwrap();
        thread::scope(|scope| {
            for seed in 0..3 {
                let steps = &steps;
                scope.spawn(move || match steps.save(round, seed, true) {
                    Ok(_) => {}
                    // Its own deletion, right after it had published.
                    Err(Error::CommitUndecided { .. }) => {}
                    Err(error) => assert!(is_taken_for_dead(&error), "{error:?}"),
                });
                scope.spawn(move || match steps.store.delete(round) {
                    Ok(_) | Err(Error::NotFound { .. } | Error::Undecided { .. }) => {}
                    Err(Error::Storage { source, .. }) if source.kind() == ResourceBusy => {}
                    Err(error) => panic!("{error:?}"),
                });
            }
        });
        match steps.store.state(round) {
            Ok(StepState::Complete(_)) => {
                let report = verify(&path, &options(&steps.objects), &Progress::default());
                let problems = report.unwrap().problems;
                assert!(problems.is_empty(), "{problems:?}");
            }
            Ok(StepState::Incomplete) | Err(Error::NotFound { .. }) => {}
            other => panic!("{other:?}"),
        }
        // Files left by deletions and saves are removed by their age, and nothing else is.
        if server.file(&directory).exists() {
            set_age(&server, &directory, 2 * DAY);
        }
        steps.store.sweep().unwrap();
        let stored = match server.file(&directory).exists() {
            true => names(&server.file(&directory)),
            false => Vec::new(),
        };
        assert!(matches!(stored.len(), 0 | 3), "{stored:?}");
    }
}
