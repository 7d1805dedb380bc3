//! Signed checkpoints: who asks for a signature gets the signed bytes or an error.
//!
//! The attacker of these tests writes to all files, knows the format, makes every digest right and
//! has a key of their own. The signer is careless, too: some statements are lies under the right
//! key.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::flaky::{Fault, flaky};
use crate::common::forge::{edit_manifest, part_path, shard_path};
use crate::common::{Sample, names, publication, read_engines};
use penstock_io::file::Direct;
use penstock_io::file_system::{FileSystem, Native};
use penstock_store::care::verify::verify_signed;
use penstock_store::format::digest::Digest;
use penstock_store::load::checkpoint::{Checkpoint, Loaded};
use penstock_store::options::Options;
use penstock_store::save::{Authenticity, save_authentic};
use penstock_store::seal::Unsealing;
use penstock_store::sign::{Signers, SigningKey};
use penstock_store::{Error, Progress, Result};
use serde_json::{Value, json};

const MIB: usize = 1 << 20;

const KEY: &str = "\
-----BEGIN OPENSSH PRIVATE KEY-----\n\
b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtzc2gtZW\n\
QyNTUxOQAAACCsz6Ts8dYv82KOybjuRu7nkFEncPMcPO+GxE/2w+m8RwAAAIgke6MeJHuj\n\
HgAAAAtzc2gtZWQyNTUxOQAAACCsz6Ts8dYv82KOybjuRu7nkFEncPMcPO+GxE/2w+m8Rw\n\
AAAEAaDCuwALEMPVKRimQAvSQOAf7ArsTWF4SGkHv00/bDZKzPpOzx1i/zYo7JuO5G7ueQ\n\
USdw8xw874bET/bD6bxHAAAAAAECAwQF\n\
-----END OPENSSH PRIVATE KEY-----\n";
const OTHER_KEY: &str = "\
-----BEGIN OPENSSH PRIVATE KEY-----\n\
b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAAAAAABAAAAMwAAAAtzc2gtZW\n\
QyNTUxOQAAACCx+AqZn9Rbu+ktVqTPuzReqH/LgUKYs0Pk0oq5xTvYJAAAAIg0GXtQNBl7\n\
UAAAAAtzc2gtZWQyNTUxOQAAACCx+AqZn9Rbu+ktVqTPuzReqH/LgUKYs0Pk0oq5xTvYJA\n\
AAAECudfa/aUnsW9RkgnNxCQsR0uXBU2HPubjYuL8Fd6/HK7H4Cpmf1Fu76S1WpM+7NF6o\n\
f8uBQpizQ+TSirnFO9gkAAAAAAECAwQF\n\
-----END OPENSSH PRIVATE KEY-----\n";
const PUBLIC: &str =
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKzPpOzx1i/zYo7JuO5G7ueQUSdw8xw874bET/bD6bxH";
const OTHER_PUBLIC: &str =
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAILH4Cpmf1Fu76S1WpM+7NF6of8uBQpizQ+TSirnFO9gk";

fn key(text: &str) -> SigningKey {
    SigningKey::from_content("key", text.as_bytes()).unwrap()
}

/// A signed checkpoint of a state.
struct Victim {
    root: tempfile::TempDir,
    sample: Sample,
}

impl Victim {
    fn new() -> Victim {
        let root = tempfile::tempdir().unwrap();
        let sample = Sample::of_sizes(&[2 * MIB + 77, 5, 4000]);
        let victim = Victim { root, sample };
        victim.save("ckpt");
        victim
    }

    fn save(&self, name: &str) {
        let path = self.root.path().join(name);
        let authenticity = Authenticity {
            signing: Some([key(KEY)].into()),
            ..Authenticity::default()
        };
        let (options, progress) = (Options::default(), Progress::default());
        let publication = publication(&path);
        let state = self.sample.state();
        save_authentic(state, &publication, authenticity, &options, &progress).unwrap();
    }

    fn path(&self) -> PathBuf {
        self.root.path().join("ckpt")
    }

    /// Loads everything, if the signature is one of this key.
    fn load(&self, public: &str) -> Result<Loaded> {
        self.load_with(public, &Options::default())
    }

    fn load_with(&self, public: &str, options: &Options) -> Result<Loaded> {
        let mut signers = Signers::new();
        signers.add_content("signers", public.as_bytes()).unwrap();
        let unsealing = Unsealing {
            signers: Some(Arc::new(signers)),
            ..Unsealing::default()
        };
        let file_system: Arc<dyn FileSystem> = Arc::new(Native);
        let checkpoint = Checkpoint::open_with(&self.path(), &file_system, &unsealing)?;
        let unverified = Options {
            verify: false,
            ..options.clone()
        };
        let load = |options: &Options| {
            checkpoint.load(None, HashMap::new(), options, &Progress::default())
        };
        let loaded = load(options);
        let is_same = load(&unverified).is_ok() == loaded.is_ok();
        assert!(is_same, "hashes are compared whatever the options say");
        loaded
    }

    #[track_caller]
    fn assert_refused(&self, what: &str) {
        match self.load(PUBLIC) {
            Err(Error::Signature { .. }) => {}
            Err(error) => panic!("{what}: not named as another signature's: {error}"),
            Ok(_) => panic!("{what}: accepted"),
        }
    }

    fn file(&self, ending: &str) -> PathBuf {
        let is_wanted = |name: &&String| name.starts_with("signed.") && name.ends_with(ending);
        let names = names(&self.path());
        self.path().join(names.iter().find(is_wanted).unwrap())
    }

    /// Changes the statement, and signs it again.
    fn resign(&self, private: &str, change: impl FnOnce(&mut Value)) {
        let statement = self.file(".json");
        let mut value: Value = serde_json::from_slice(&fs::read(&statement).unwrap()).unwrap();
        change(&mut value);
        let hashes: Vec<u8> = value["predicate"]["resources"]
            .as_array()
            .unwrap()
            .iter()
            .flat_map(|resource| hex(resource["digest"].as_str().unwrap()))
            .collect();
        let root = penstock_store::seal::Sha256::of(&hashes).to_string();
        value["subject"][0]["digest"]["sha256"] = root.into();
        let text = value.to_string();
        let signature = key(private).sign(text.as_bytes()).unwrap();
        fs::write(statement, text).unwrap();
        fs::write(self.file(".sig"), signature).unwrap();
    }
}

fn hex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks(2);
    let byte = |pair: &[u8]| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.map(byte).collect()
}

fn resource<'a>(statement: &'a mut Value, prefix: &str) -> &'a mut Value {
    let resources = statement["predicate"]["resources"].as_array_mut().unwrap();
    let is_wanted = |one: &&mut Value| one["name"].as_str().unwrap().starts_with(prefix);
    resources.iter_mut().find(is_wanted).unwrap()
}

/// Changes bytes so that no CRC-64 sees it: adds the generator polynomial.
fn collide(file: &Path, at: usize) {
    let mut bytes = fs::read(file).unwrap();
    let before = Digest::of(&bytes);
    let generator: u128 = 1 | 0x9a6c_9329_ac4b_c9b5_u128 << 1;
    for (byte, change) in bytes[at..at + 9].iter_mut().zip(generator.to_le_bytes()) {
        *byte ^= change;
    }
    assert_eq!(Digest::of(&bytes), before);
    fs::write(file, bytes).unwrap();
}

#[test]
fn a_signed_checkpoint_loads_with_the_signer_alone() {
    let victim = Victim::new();
    assert!(victim.sample.is(&victim.load(PUBLIC).unwrap()));
    let both = format!("{OTHER_PUBLIC}\n{PUBLIC}\n");
    assert!(victim.sample.is(&victim.load(&both).unwrap()));
    let error = victim.load(OTHER_PUBLIC).unwrap_err();
    assert!(matches!(error, Error::Signature { .. }), "{error}");
    // The statement, signed by the attacker.
    victim.resign(OTHER_KEY, |_| {});
    assert!(victim.load(OTHER_PUBLIC).is_ok());
    victim.assert_refused("another signer");
    fs::remove_file(victim.file(".sig")).unwrap();
    let error = victim.load(PUBLIC).unwrap_err();
    assert!(matches!(error, Error::NotSigned { .. }), "{error}");
}

#[test]
fn a_statement_counts_for_its_own_text() {
    let victim = Victim::new();
    let statement = victim.file(".json");
    let text = fs::read_to_string(&statement).unwrap();
    fs::write(&statement, format!("{text} ")).unwrap();
    victim.assert_refused("a statement that was changed");
    fs::write(&statement, text).unwrap();
    victim.load(PUBLIC).unwrap();
}

#[test]
fn a_signature_counts_for_its_own_checkpoint() {
    let victim = Victim::new();
    victim.save("other");
    let own = |path: &Path, ending: &str| {
        let is_wanted = |name: &String| name.starts_with("signed.") && name.ends_with(ending);
        path.join(names(path).into_iter().find(is_wanted).unwrap())
    };
    for ending in [".json", ".sig"] {
        let from = own(&victim.root.path().join("other"), ending);
        fs::copy(from, victim.file(ending)).unwrap();
    }
    victim.assert_refused("the signature of another checkpoint");
    // A careless signer: all is right but the id.
    let victim = Victim::new();
    victim.resign(KEY, |_| {});
    victim.load(PUBLIC).unwrap();
    victim.resign(KEY, |statement| {
        statement["predicate"]["penstock"]["id"] = "0".repeat(32).into();
    });
    victim.assert_refused("the id of another checkpoint");
}

#[test]
fn files_with_right_digests_are_compared_with_the_statement() {
    let victim = Victim::new();
    edit_manifest(&victim.path(), |manifest| manifest["step"] = 8.into());
    victim.assert_refused("a changed manifest");
    let victim = Victim::new();
    let part = part_path(&victim.path());
    let text = fs::read_to_string(&part).unwrap();
    // Within a string, so that the part is still JSON of the same form.
    let at = text.find("\"blake3\":\"").unwrap() + 10;
    collide(&part, at);
    let result = victim.load(PUBLIC);
    assert!(result.is_err(), "a changed part");
    for at in [5000, MIB + 9, 2 * MIB + 50] {
        let victim = Victim::new();
        collide(&shard_path(&victim.path()), at);
        victim.assert_refused("a changed shard");
    }
}

#[test]
fn a_statement_covers_the_files_that_it_names() {
    for prefix in ["shard-", "part-"] {
        let victim = Victim::new();
        victim.resign(KEY, |statement| {
            let resources = statement["predicate"]["resources"].as_array_mut().unwrap();
            resources.retain(|one| !one["name"].as_str().unwrap().starts_with(prefix));
        });
        victim.assert_refused(prefix);
        // Also under its other hash, which is right for no file.
        let victim = Victim::new();
        victim.resign(KEY, |statement| {
            resource(statement, prefix)["digest"] = json!("0".repeat(64));
        });
        victim.assert_refused(prefix);
    }
}

#[test]
fn verification_lists_each_file_that_differs() {
    let victim = Victim::new();
    let problems = |victim: &Victim| -> Vec<String> {
        let mut signers = Signers::new();
        signers.add_content("signers", PUBLIC.as_bytes()).unwrap();
        let (options, progress) = (Options::default(), Progress::default());
        let report = verify_signed(&victim.path(), &signers, &options, &progress).unwrap();
        let files = report.problems.into_iter().map(|problem| problem.file);
        files.collect()
    };
    assert_eq!(problems(&victim), [""; 0]);
    fs::write(victim.path().join("extra.bin"), b"x").unwrap();
    let shard = shard_path(&victim.path());
    collide(&shard, 5000);
    let mut found = problems(&victim);
    found.sort();
    let shard = shard.file_name().unwrap().to_str().unwrap().to_owned();
    assert_eq!(found, ["extra.bin".to_owned(), shard]);
}

/// The replica of a mirror gives bytes that storage lost, and only those that were signed.
#[test]
fn chunks_of_a_replica_are_compared_with_the_statement() {
    let victim = Victim::new();
    let copy = victim.root.path().join("copy");
    fs::create_dir(&copy).unwrap();
    for name in names(&victim.path()) {
        fs::copy(victim.path().join(&name), copy.join(&name)).unwrap();
    }
    let load = |engine, direct, fault| {
        let options = Options {
            replica: Some(copy.clone()),
            ..flaky(engine, direct, fault).0
        };
        victim.load_with(PUBLIC, &options)
    };
    let cases = || {
        let directs = [Direct::Auto, Direct::Off];
        let faults = [Fault::Always, Fault::Lost(1 << 20)];
        let engines = read_engines().into_iter();
        engines.flat_map(move |engine| {
            directs.map(|direct| faults.map(|fault| (engine, direct, fault)))
        })
    };
    for (engine, direct, fault) in cases().flatten() {
        let loaded = load(engine, direct, fault).unwrap();
        assert!(victim.sample.is(&loaded), "{engine:?} {direct:?}");
    }
    collide(
        &copy.join(shard_path(&victim.path()).file_name().unwrap()),
        (1 << 20) + 5000,
    );
    for (engine, direct, fault) in cases().flatten() {
        match load(engine, direct, fault) {
            Err(Error::Signature { .. }) => {}
            Err(error) => panic!("{engine:?} {direct:?}: {error}"),
            Ok(_) => panic!("{engine:?} {direct:?}: accepted"),
        }
    }
}
