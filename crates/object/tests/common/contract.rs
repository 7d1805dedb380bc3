//! The contract of a bucket, the same for every provider.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use penstock_io::file::Direct;
use penstock_io::file_system::{Change, FileSystem, Files, Kind, Seen};
use penstock_object::{Objects, Part, Verdict, probe};

use super::{PART_BYTES, bytes, download, finish, send, source, upload};

/// Two full parts and a short one.
pub(crate) const BYTES: usize = 2 * PART_BYTES + 12_345;

/// A bucket, and the root of its paths.
pub(crate) struct Place {
    pub(crate) objects: Objects,
    pub(crate) root: &'static str,
}

impl Place {
    pub(crate) fn at(&self, key: &str) -> PathBuf {
        PathBuf::from(format!("{}/{key}", self.root))
    }

    /// Puts a text under a name, in place of `seen` or under a free key.
    fn write(&self, name: &str, text: &[u8], seen: Option<&[u8]>) -> std::io::Result<()> {
        let (from, to) = (self.at("drawn"), self.at(name));
        let file = self.objects.create_temporary(&from).unwrap();
        self.objects.change(Change::Write(&file, text)).unwrap();
        let (from, to) = (&*from, &*to);
        let seen = seen.map(Seen::of);
        let change = match &seen {
            None => Change::RenameNew { from, to },
            Some(seen) => Change::Replace { from, to, seen },
        };
        self.objects.change(change).map_err(source)
    }

    /// Replaces a text by the same one; returns the version before.
    fn write_again(&self, path: &Path) -> Option<String> {
        let (_, seen) = self.objects.stat_and_read(path, 100).unwrap();
        let from = self.at("drawn");
        let put = |text: &[u8], seen: &Seen| {
            let file = self.objects.create_temporary(&from).unwrap();
            self.objects.change(Change::Write(&file, text)).unwrap();
            let (from, to) = (&*from, path);
            let change = Change::Replace { from, to, seen };
            self.objects.change(change).unwrap();
        };
        put(b"between", &seen);
        let (_, between) = self.objects.stat_and_read(path, 100).unwrap();
        put(b"second", &between);
        between.version
    }

    /// An object of several parts has the bytes that were sent, is found, and can be removed.
    pub(crate) fn uploads_and_removes(&self) {
        let (objects, path) = (&self.objects, self.at("run/object"));
        let bytes = bytes(BYTES);
        upload(objects, &path, &bytes).unwrap();
        assert_eq!(download(objects, &path).unwrap(), bytes);
        let found = objects.stat(&self.at("run")).unwrap();
        assert_eq!(found.kind, Kind::Directory);
        assert_eq!(objects.stat(&path).unwrap().bytes, BYTES as u64);
        let listed = objects.list(&self.at("run")).unwrap();
        assert_eq!((listed.len(), listed[0].bytes), (1, Some(BYTES as u64)));
        objects.change(Change::RemoveFile(&path)).unwrap();
        let gone = objects.stat(&path).unwrap_err();
        assert_eq!(gone.kind(), ErrorKind::NotFound);
    }

    /// Bytes that differ from their digest are refused, as a part and as a whole object; this
    /// client does not retry.
    pub(crate) fn refuses_other_bytes(&self) {
        let (objects, path) = (&self.objects, self.at("object"));
        for is_whole in [false, true] {
            let file = Arc::new(objects.create(&path, Direct::Off).unwrap());
            let bytes = bytes(PART_BYTES);
            if is_whole {
                let allocated = Change::Allocate(&file, bytes.len() as u64);
                objects.change(allocated).unwrap();
            }
            file.expect(0, || 1);
            let error = send(objects, &file, &bytes, [0]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
            send(objects, &file, &bytes, [0]).unwrap();
            finish(objects, &file).unwrap();
            assert_eq!(download(objects, &path).unwrap(), bytes);
        }
    }

    /// An upload of an earlier process is resumed unless one of its parts is wrong.
    pub(crate) fn goes_on(&self, is_right: impl Fn(&Part) -> bool + Send + 'static) {
        let (objects, path, bytes) = (&self.objects, self.at("object"), bytes(BYTES));
        let begun = objects.resume_upload(&path, |_| true).unwrap();
        assert_eq!(begun.parts, []);
        send(objects, &Arc::new(begun.file), &bytes, [0, 2]).unwrap();
        let resumed = objects.resume_upload(&path, is_right).unwrap();
        let sizes = resumed.parts.iter().map(|part| (part.number, part.bytes));
        let (part, last) = (PART_BYTES as u64, (BYTES % PART_BYTES) as u64);
        assert_eq!(sizes.collect::<Vec<_>>(), [(1, part), (3, last)]);
        let file = Arc::new(resumed.file);
        // An upload with a missing part makes no object.
        finish(objects, &file).unwrap_err();
        send(objects, &file, &bytes, [1]).unwrap();
        finish(objects, &file).unwrap();
        assert_eq!(download(objects, &path).unwrap(), bytes);
        let begun = objects.resume_upload(&path, |_| true).unwrap();
        send(objects, &Arc::new(begun.file), &bytes, [0, 1]).unwrap();
        let anew = objects
            .resume_upload(&path, |part| part.number == 1)
            .unwrap();
        assert_eq!(anew.parts, []);
    }

    /// Conditions hold, and the probe leaves nothing behind.
    pub(crate) fn has_conditions(&self) {
        let objects = &self.objects;
        let path = self.at("run/text");
        self.write("run/text", b"first", None).unwrap();
        let taken = self.write("run/text", b"second", None).unwrap_err();
        assert_eq!(taken.kind(), ErrorKind::AlreadyExists);
        self.write("run/text", b"second", Some(b"first")).unwrap();
        let stale = self.write("run/text", b"third", Some(b"first"));
        assert_eq!(stale.unwrap_err().kind(), ErrorKind::AlreadyExists);
        assert_eq!(objects.read_range(&path, 0..u64::MAX).unwrap(), b"second");
        // The version that a lookup returns is a condition too.
        let (_, seen) = objects.stat_and_read(&path, 100).unwrap();
        assert_eq!(seen.bytes, b"second");
        let stale = Seen {
            version: self.write_again(&path),
            ..seen
        };
        let refused = objects.change(Change::RemoveSeen(&path, &stale));
        assert_eq!(source(refused.unwrap_err()).kind(), ErrorKind::NotFound);
        let removed = |seen: &[u8]| {
            let removed = objects.change(Change::RemoveSeen(&path, &Seen::of(seen)));
            removed.map_err(|error| source(error).kind())
        };
        assert_eq!(removed(b"first"), Err(ErrorKind::AlreadyExists));
        assert_eq!(removed(b"second"), Ok(()));
        assert_eq!(removed(b"second"), Err(ErrorKind::NotFound));
        assert!(objects.time_at(&self.at("run/clock")).unwrap().is_some());
        for finding in probe(objects, &self.at("run")).unwrap() {
            assert_eq!(finding.verdict, Verdict::Holds, "{finding}");
        }
        let left = objects.list(&self.at("run")).unwrap_err();
        assert_eq!(left.kind(), ErrorKind::NotFound);
    }
}
