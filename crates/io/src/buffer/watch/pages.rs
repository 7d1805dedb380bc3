//! Selects the pages to watch, and the ranges to register for that.

use std::ops::Range;

use rustix::param::page_size;

use super::mapping::Mapping;

/// Gaps between pages up to this size are registered along with them. Only the pages are protected,
/// so a gap costs no more than a walk over it at the end, and no mapping.
const GAP_BYTES_MAX: usize = 4 << 20;
/// A registered range that begins or ends within a mapping splits it, and a process may have 65,530
/// mappings (`vm.max_map_count`): a watch uses at most this share of them.
const SPLITS_MAX: usize = 16_384;

/// The whole pages within a span of addresses.
pub(super) fn whole_pages(span: &Range<usize>) -> Range<usize> {
    let page_bytes = page_size();
    let start = span.start.next_multiple_of(page_bytes);
    let end = span.end - span.end % page_bytes;
    start..end.max(start)
}

pub(super) fn overlaps(one: &Range<usize>, other: &Range<usize>) -> bool {
    one.start < other.end && other.start < one.end
}

/// Sorts the ranges by address and merges those that touch or overlap.
pub(super) fn merged(mut pages: Vec<Range<usize>>) -> Vec<Range<usize>> {
    pages.sort_unstable_by_key(|range| range.start);
    let mut merged: Vec<Range<usize>> = Vec::with_capacity(pages.len());
    for range in pages {
        match merged.last_mut() {
            Some(last) if range.start <= last.end => last.end = last.end.max(range.end),
            _ => merged.push(range),
        }
    }
    merged
}

/// The ranges to register so that the pages can be protected: whole mappings where they are only a
/// little larger, as that splits none. `None` where too many mappings would be split.
pub(super) fn to_register(
    pages: &[Range<usize>],
    mappings: &[Mapping],
) -> Option<Vec<Range<usize>>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let mut splits = 0;
    for mapping in mappings {
        let Range { start, end } = mapping.range;
        let first = pages.partition_point(|pages| pages.end <= start);
        let pages = pages[first..].iter().take_while(|pages| pages.start < end);
        let mut own: Vec<Range<usize>> = Vec::new();
        for pages in pages {
            let pages = pages.start.max(start)..pages.end.min(end);
            match own.last_mut() {
                Some(last) if pages.start - last.end <= GAP_BYTES_MAX => last.end = pages.end,
                None if pages.start - start <= GAP_BYTES_MAX => own.push(start..pages.end),
                _ => own.push(pages),
            }
        }
        if let Some(last) = own
            .last_mut()
            .filter(|last| end - last.end <= GAP_BYTES_MAX)
        {
            last.end = end;
        }
        let cuts = own
            .iter()
            .map(|own| usize::from(own.start > start) + usize::from(own.end < end));
        splits += cuts.sum::<usize>();
        ranges.append(&mut own);
    }
    (splits <= SPLITS_MAX).then_some(ranges)
}

#[cfg(test)]
mod tests {
    use super::super::mapping::MappingKind;
    use super::*;

    const MIB: usize = 1 << 20;

    #[test]
    fn what_is_registered_splits_few_mappings_or_it_is_refused() {
        let anonymous = |range| Mapping {
            range,
            kind: MappingKind::Anonymous,
        };
        // The end of one mapping, a gap that is too large, and all of the next mapping.
        let apart = 100 * MIB;
        let two = [anonymous(MIB..200 * MIB), anonymous(200 * MIB..201 * MIB)];
        let pages = [2 * MIB..3 * MIB, apart..apart + MIB, 199 * MIB..201 * MIB];
        let expected = [MIB..3 * MIB, apart..apart + MIB, 199 * MIB..200 * MIB];
        let found = to_register(&pages, &two).unwrap();
        assert_eq!(found[..3], expected);
        assert_eq!(found[3], 200 * MIB..201 * MIB);
        assert_eq!(found.len(), 4);
        let one = [anonymous(0..1 << 40)];
        let scattered = |count: usize| -> Vec<Range<usize>> {
            let place = |index: usize| (index + 1) * 8 * MIB;
            (0..count)
                .map(|index| place(index)..place(index) + MIB)
                .collect()
        };
        let most = SPLITS_MAX / 2;
        assert_eq!(to_register(&scattered(most), &one).unwrap().len(), most);
        assert_eq!(to_register(&scattered(most + 1), &one), None);
    }

    #[test]
    fn pages_that_touch_are_one_range() {
        let page = page_size();
        assert_eq!(merged(vec![5..9, 0..3, 3..4, 6..7]), [0..4, 5..9]);
        assert_eq!(whole_pages(&(1..3 * page - 1)), page..2 * page);
        assert!(whole_pages(&(page + 1..page + 9)).is_empty());
        assert_eq!(whole_pages(&(page..page)), page..page);
    }
}
