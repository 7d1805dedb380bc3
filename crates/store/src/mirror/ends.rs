//! Both ends of a mirroring, and its limits.

use std::path::Path;
use std::sync::Arc;

use penstock_io::file_system::FileSystem;
use penstock_object::Objects;

use crate::error::{Error, Result};
use crate::load::checkpoint::Checkpoint;
use crate::options::{Options, Settings};
use crate::progress::Progress;
use crate::tier;

/// Limits of a mirroring.
#[derive(Clone, Copy, Debug, Default)]
pub struct Mirroring {
    /// Upload rate limit in bytes per second; unlimited if absent.
    pub bytes_per_second: Option<u64>,
    /// Limit on concurrent requests; the bucket's own limit if absent.
    pub connections: Option<usize>,
}

/// The checkpoint that is copied, the bucket, and how bytes move from one to the other.
pub(super) struct Ends {
    pub(super) checkpoint: Checkpoint,
    pub(super) objects: Arc<Objects>,
    pub(super) source: Arc<dyn FileSystem>,
    pub(super) reads: Settings,
    pub(super) sends: Settings,
}

impl Ends {
    pub(super) fn open(
        from: &Path,
        to: &Path,
        mirroring: &Mirroring,
        options: &Options,
        progress: &Progress,
    ) -> Result<Ends> {
        if let Some(bytes_per_second) = mirroring.bytes_per_second {
            progress.limit(bytes_per_second);
        }
        let objects = tier::objects(to)?.ok_or_else(|| {
            let detail = "it is not the URL of a bucket, such as s3://BUCKET/DIRECTORY";
            let source = std::io::Error::new(std::io::ErrorKind::InvalidInput, detail);
            Error::storage("mirror to", to)(source)
        })?;
        let source = options.clone().at(from)?;
        let checkpoint = Checkpoint::open_on(from, &source.file_system)?;
        if checkpoint.manifest().partial.is_some() {
            let path = from.to_owned();
            return Err(Error::Partial { path });
        }
        let (bytes, _) = checkpoint.size();
        progress.expect(bytes);
        Ok(Ends {
            reads: Settings {
                // One read at a time: it reads a whole part, which storage divides among its
                // queues.
                queue_depth: 1,
                ..source.choose(from, bytes)
            },
            sends: mirroring.sends(options, &objects, to, bytes),
            source: source.file_system,
            checkpoint,
            objects,
        })
    }
}

impl Mirroring {
    fn sends(&self, options: &Options, objects: &Arc<Objects>, to: &Path, bytes: u64) -> Settings {
        let connections = self.connections.unwrap_or(objects.connections());
        let options = Options {
            io_threads: Some(1),
            queue_depth: Some(connections),
            ..options.clone()
        };
        options.on(objects).choose(to, bytes)
    }
}
