//! Copies of many regions into one piece of memory, by several threads.

use std::num::NonZeroUsize;
use std::sync::Mutex;
use std::thread;

use super::HostRegion;

/// Bytes that a thread copies before it takes more: enough to read memory in sequence for long.
const RUN_BYTES: usize = 4 << 20;

/// Copies regions to their places in `target`, with up to `threads` threads including this one.
/// Bytes between the places stay as they are. If the system starts fewer threads, these copy all.
///
/// # Panics
/// If the places are not in order, or regions reach beyond the next place or the target.
pub fn stream_side_by_side(
    sources: &[(usize, HostRegion)],
    target: &mut [u8],
    threads: NonZeroUsize,
) {
    let mut pieces = Vec::new();
    let (mut rest, mut at) = (target, 0);
    for (place, source) in sources {
        assert!(*place >= at, "places are in order");
        let bytes = usize::try_from(source.len()).expect("memory has room for it");
        let (part, behind) = rest.split_at_mut(*place - at).1.split_at_mut(bytes);
        let cuts = (0..).step_by(RUN_BYTES).zip(part.chunks_mut(RUN_BYTES));
        pieces.extend(cuts.map(|(start, dst)| (source, start, dst)));
        (rest, at) = (behind, *place + bytes);
    }
    let pieces = Mutex::new(pieces.into_iter().peekable());
    let work = || {
        let mut run = Vec::new();
        loop {
            let mut pieces = pieces.lock().expect("nothing panics with the lock");
            let mut room_bytes = RUN_BYTES;
            while let Some(piece) = pieces.next_if(|(.., dst)| dst.len() <= room_bytes) {
                room_bytes -= piece.2.len();
                run.push(piece);
            }
            drop(pieces);
            if run.is_empty() {
                return;
            }
            for (source, start, dst) in run.drain(..) {
                source.stream_to(start, dst);
            }
        }
    };
    thread::scope(|scope| {
        for _ in 1..threads.get() {
            let builder = thread::Builder::new().name("penstock-copy".to_owned());
            let _ = builder.spawn_scoped(scope, work);
        }
        work();
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regions_arrive_at_their_places_whatever_the_number_of_threads() {
        let lens = [5, 0, 4096, 3 * RUN_BYTES + 17, 100_000, 64, RUN_BYTES];
        let contents: Vec<Vec<u8>> = (1..)
            .zip(lens)
            .map(|(seed, len)| (0..len).map(|byte| (byte % 251) as u8 ^ seed).collect())
            .collect();
        let mut places = Vec::new();
        let mut end = 3;
        for len in lens {
            places.push(end);
            end += len + len % 7;
        }
        let mut expected = vec![0xaa; end + 5];
        for (&place, content) in places.iter().zip(&contents) {
            expected[place..place + content.len()].copy_from_slice(content);
        }
        for threads in [1, 2, 5] {
            let regions = contents.iter().cloned().map(HostRegion::from);
            let sources: Vec<_> = places.iter().copied().zip(regions).collect();
            let mut found = vec![0xaa; expected.len()];
            stream_side_by_side(&sources, &mut found, NonZeroUsize::new(threads).unwrap());
            assert!(found == expected, "{threads} threads");
        }
        stream_side_by_side(&[], &mut [], NonZeroUsize::MIN);
    }

    #[test]
    #[should_panic(expected = "places are in order")]
    fn regions_do_not_overlap() {
        let sources = [(0, 2), (1, 2)].map(|(at, len)| (at, HostRegion::from(vec![1; len])));
        stream_side_by_side(&sources, &mut [0; 4], NonZeroUsize::MIN);
    }
}
