//! Files as the layers above use them: which paths open, and the promise of each call.

use std::fs;
use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use penstock_io::Error;
use penstock_io::file::{Alignment, Direct, File};
use rustix::fs::{CWD, Mode, mkfifoat};

const ENOENT: i32 = 2;
const EEXIST: i32 = 17;
const EISDIR: i32 = 21;
const EINVAL: i32 = 22;

fn directory() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

#[track_caller]
fn assert_storage<T: std::fmt::Debug>(
    result: Result<T, Error>,
    operation: &str,
    path: &Path,
    errno: Option<i32>,
) -> String {
    match result.unwrap_err() {
        Error::Storage {
            operation: found,
            path: of,
            source,
        } => {
            assert_eq!((found, of.as_path()), (operation, path));
            assert_eq!(source.raw_os_error(), errno, "{source}");
            source.to_string()
        }
        other => panic!("not a storage error: {other:?}"),
    }
}

#[test]
fn create_never_replaces() {
    let directory = directory();
    let path = directory.path().join("file");
    let file = File::create(&path, Direct::Auto).unwrap();
    assert_eq!(file.path(), path);
    assert_eq!(file.len().unwrap(), 0);
    assert_storage(
        File::create(&path, Direct::Auto),
        "create",
        &path,
        Some(EEXIST),
    );
    let dangling = directory.path().join("link");
    symlink(directory.path().join("nowhere"), &dangling).unwrap();
    assert_storage(
        File::create(&dangling, Direct::Auto),
        "create",
        &dangling,
        Some(EEXIST),
    );
    let nowhere = directory.path().join("no/such/directory");
    assert_storage(
        File::create(&nowhere, Direct::Off),
        "create",
        &nowhere,
        Some(ENOENT),
    );
}

#[test]
fn created_files_follow_the_umask() {
    let directory = directory();
    let path = directory.path().join("file");
    File::create(&path, Direct::Off).unwrap();
    fs::write(directory.path().join("other"), "").unwrap();
    let mode = |path: PathBuf| fs::metadata(path).unwrap().permissions().mode();
    assert_eq!(mode(path), mode(directory.path().join("other")));
}

#[test]
fn only_regular_files_open() {
    let directory = directory();
    let missing = directory.path().join("missing");
    assert_storage(
        File::open(&missing, Direct::Auto),
        "open",
        &missing,
        Some(ENOENT),
    );
    let here = directory.path();
    assert_storage(File::open(here, Direct::Auto), "open", here, Some(EISDIR));

    // Without `O_NONBLOCK` this would wait for a writer that never comes.
    let fifo = directory.path().join("fifo");
    mkfifoat(CWD, &fifo, Mode::from_raw_mode(0o600)).unwrap();
    let message = assert_storage(File::open(&fifo, Direct::Auto), "open", &fifo, None);
    assert!(message.contains("a FIFO"), "{message}");
    let link = directory.path().join("link");
    symlink(&fifo, &link).unwrap();
    let message = assert_storage(File::open(&link, Direct::Auto), "open", &link, None);
    assert!(message.contains("a symbolic link"), "{message}");

    let device = Path::new("/dev/zero");
    let message = assert_storage(File::open(device, Direct::Auto), "open", device, None);
    assert!(message.contains("a character device"), "{message}");
    let socket = directory.path().join("socket");
    let _listener = UnixListener::bind(&socket).unwrap();
    assert!(matches!(
        File::open(&socket, Direct::Off),
        Err(Error::Storage { .. })
    ));
}

#[test]
fn a_link_is_not_followed_and_one_on_the_way_is() {
    let directory = directory();
    let (within, link) = (
        directory.path().join("within"),
        directory.path().join("link"),
    );
    fs::create_dir(&within).unwrap();
    let path = within.join("file");
    fs::write(&path, "content").unwrap();
    symlink(&path, &link).unwrap();
    let open = [File::open, File::open_to_write];
    for open in open {
        for direct in [Direct::Auto, Direct::Off] {
            let message = assert_storage(open(&link, direct), "open", &link, None);
            assert!(message.contains("a symbolic link"), "{message}");
        }
    }
    let way = directory.path().join("way");
    symlink(&within, &way).unwrap();
    let file = File::open(&way.join("file"), Direct::Off).unwrap();
    assert_eq!(file.len().unwrap(), 7);
    let mut text = String::new();
    fs::File::from(file).read_to_string(&mut text).unwrap();
    assert_eq!(text, "content");
}

#[test]
fn buffered_files_demand_nothing() {
    let directory = directory();
    let file = File::create(&directory.path().join("file"), Direct::Off).unwrap();
    assert!(!file.is_direct());
    assert_eq!(
        file.alignment(),
        Alignment {
            memory: 1,
            offset: 1
        }
    );
    assert_eq!(file.fallback(), None, "off is a choice, not a fallback");
}

#[test]
fn direct_or_a_reason_but_never_both() {
    let directory = directory();
    let path = directory.path().join("file");
    for file in [
        File::create(&path, Direct::Auto).unwrap(),
        File::open(&path, Direct::Auto).unwrap(),
    ] {
        let Alignment { memory, offset } = file.alignment();
        assert_eq!(file.is_direct(), file.fallback().is_none());
        for alignment in [memory, offset] {
            assert!(
                alignment.is_power_of_two() && alignment <= 4096,
                "{alignment}"
            );
            assert!(file.is_direct() || alignment == 1);
        }
    }
}

#[test]
fn allocate_reserves_and_truncate_cuts() {
    let directory = directory();
    let path = directory.path().join("file");
    let file = File::create(&path, Direct::Auto).unwrap();
    file.allocate(0).unwrap();
    if file.allocate(1 << 20).is_ok() {
        assert_eq!(file.len().unwrap(), 1 << 20);
    }
    file.truncate(12_345).unwrap();
    assert_eq!(file.len().unwrap(), 12_345);
    file.sync_data().unwrap();
    file.drop_cache().unwrap();
    let read_only = File::open(&path, Direct::Auto).unwrap();
    assert_storage(read_only.truncate(0), "truncate", &path, Some(EINVAL));
    assert_eq!(read_only.len().unwrap(), 12_345);
}

#[test]
fn a_reservation_beyond_the_device_is_an_error() {
    let directory = directory();
    let path = directory.path().join("file");
    let file = File::create(&path, Direct::Auto).unwrap();
    // More than any file system here holds, or than its files may have.
    let refused = file.allocate(1 << 62).unwrap_err();
    assert!(
        matches!(
            refused,
            Error::Storage {
                operation: "allocate",
                ..
            }
        ),
        "{refused:?}"
    );
    assert!(
        refused.to_string().starts_with("cannot allocate /"),
        "{refused}"
    );
}

#[test]
fn choices_have_words() {
    for direct in [Direct::Auto, Direct::On, Direct::Off] {
        assert_eq!(direct.to_string().parse::<Direct>().unwrap(), direct);
    }
    let error = "maybe".parse::<Direct>().unwrap_err();
    assert_eq!(
        error.to_string(),
        r#"direct cannot be "maybe": expected "auto", "on" or "off""#
    );
}

#[test]
fn what_others_have_made_is_reached_by_links_and_descriptors() {
    let directory = directory();
    let path = directory.path().join("file");
    fs::write(&path, vec![7; 10_000]).unwrap();
    let link = directory.path().join("link");
    symlink(&path, &link).unwrap();
    for direct in [Direct::Auto, Direct::Off] {
        assert_eq!(File::reach(&link, direct).unwrap().len().unwrap(), 10_000);
        let file = File::reach_to_write(&link, direct).unwrap();
        assert!(file.is_writable().unwrap());
        let twin = file.again(Direct::Off).unwrap();
        assert!(!twin.is_direct() && twin.is_writable().unwrap());
        assert_eq!(twin.path(), file.path());
        // The first file is unchanged.
        assert_eq!(
            file.is_direct(),
            File::reach(&path, direct).unwrap().is_direct()
        );
    }
    let owned = fs::File::open(&path).unwrap();
    let file = File::reopen(owned.as_raw_fd(), Direct::Off).unwrap();
    assert!(!file.is_writable().unwrap());
    assert_eq!(file.path(), path);
    let refused = File::reopen(-1, Direct::Off).unwrap_err();
    assert!(refused.to_string().contains("descriptor -1"), "{refused}");
    let directory = fs::File::open(directory.path()).unwrap();
    assert!(File::reopen(directory.as_raw_fd(), Direct::Off).is_err());
}

#[test]
fn a_file_is_extended_and_never_shortened() {
    let directory = directory();
    let file = File::create(&directory.path().join("file"), Direct::Off).unwrap();
    file.write_all(0, b"abc").unwrap();
    for (end, len) in [(2, 3), (3, 3), (100_000, 100_000), (0, 100_000)] {
        file.extend_to(end).unwrap();
        assert_eq!(file.len().unwrap(), len);
    }
    file.sync_entry().unwrap();
    assert!(file.extend_to(u64::MAX).is_err());
}
