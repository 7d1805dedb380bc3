//! Samples neighbourhoods: draws edges of nodes, and numbers the nodes that they lead to.
//!
//! Pure: the caller has the graph and the random numbers, so the same numbers give the same
//! neighbourhood on any machine.

use std::hash::BuildHasher;

use hashbrown::hash_table::Entry;
use hashbrown::{DefaultHashBuilder, HashTable};

/// Nodes numbered from 0 in the order in which they were found.
#[derive(Debug, Default)]
pub struct NodeNumbers {
    nodes: Vec<u64>,
    /// The number of each node, by the node's hash.
    numbers: HashTable<usize>,
    hasher: DefaultHashBuilder,
}

impl NodeNumbers {
    /// Numbers the first nodes by their positions. A node that occurs twice keeps both places, and
    /// the first one is its number.
    pub fn new(first: &[u64]) -> NodeNumbers {
        let mut made = NodeNumbers {
            numbers: HashTable::with_capacity(first.len()),
            ..NodeNumbers::default()
        };
        for (position, &node) in first.iter().enumerate() {
            if made.number(node) < position {
                made.nodes.push(node);
            }
        }
        made
    }

    /// The number of a node, which is the next one if the node is new.
    pub fn number(&mut self, node: u64) -> usize {
        let NodeNumbers {
            nodes,
            numbers,
            hasher,
        } = self;
        let is_it = |&number: &usize| nodes[number] == node;
        let hash_of = |&number: &usize| hasher.hash_one(nodes[number]);
        match numbers.entry(hasher.hash_one(node), is_it, hash_of) {
            Entry::Occupied(entry) => *entry.get(),
            Entry::Vacant(entry) => {
                let number = nodes.len();
                entry.insert(number);
                nodes.push(node);
                number
            }
        }
    }

    /// The nodes, by their numbers.
    pub fn nodes(&self) -> &[u64] {
        &self.nodes
    }
}

/// The edges of some nodes: those of one node are adjacent.
#[derive(Clone, Copy, Debug)]
pub struct EdgeRanges<'a> {
    /// The position of each node's first edge.
    pub begin: &'a [u64],
    /// The number of each node's edges.
    pub degrees: &'a [u64],
}

impl EdgeRanges<'_> {
    /// The number of nodes that have more than `count` edges.
    pub fn many(&self, count: u64) -> usize {
        self.degrees
            .iter()
            .filter(|&&degree| degree > count)
            .count()
    }

    /// Draws `count` distinct edges of each node, each set with equal probability; all edges of a
    /// node that has no more. Passes the position of the node, and the position of the edge, to
    /// `take`, node by node.
    ///
    /// Floyd's algorithm (Bentley, Communications of the ACM 30(9), 1987). `shares` are random
    /// numbers from 0 to 1: for each draw one for each node that has more than `count` edges.
    ///
    /// # Panics
    /// If there are not as many random numbers.
    pub fn draw_distinct(&self, count: u64, shares: &[f64], mut take: impl FnMut(usize, u64)) {
        let many = self.many(count);
        assert_eq!(
            shares.len() as u64,
            (many as u64).saturating_mul(count),
            "a number for each draw"
        );
        let mut chosen: Vec<u64> = Vec::new();
        let mut node = 0;
        for (place, (&begin, &degree)) in self.begin.iter().zip(self.degrees).enumerate() {
            if degree <= count {
                (begin..begin + degree).for_each(|edge| take(place, edge));
                continue;
            }
            chosen.clear();
            for (last, shares) in (degree - count..degree).zip(shares.chunks_exact(many)) {
                let one = below(last + 1, shares[node]);
                let one = if chosen.contains(&one) { last } else { one };
                chosen.push(one);
                take(place, begin + one);
            }
            node += 1;
        }
    }

    /// Draws `count` edges of each node that has any; an edge may be drawn again. `shares` are
    /// random numbers from 0 to 1, `count` for each node.
    ///
    /// # Panics
    /// If there are not as many random numbers.
    pub fn draw_again(&self, count: u64, shares: &[f64], mut take: impl FnMut(usize, u64)) {
        let nodes = self.degrees.len() as u64;
        assert_eq!(
            shares.len() as u64,
            nodes.saturating_mul(count),
            "a number for each draw"
        );
        if count == 0 {
            return;
        }
        let shares = shares.chunks_exact(count as usize);
        for (place, ((&begin, &degree), shares)) in
            self.begin.iter().zip(self.degrees).zip(shares).enumerate()
        {
            let shares = if degree == 0 { &[] } else { shares };
            for &share in shares {
                take(place, begin + below(degree, share));
            }
        }
    }
}

/// The number below `end` that a share, from 0 to 1, stands for.
fn below(end: u64, share: f64) -> u64 {
    ((share * end as f64) as u64).min(end - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_have_numbers_in_the_order_in_which_they_come() {
        let mut numbers = NodeNumbers::new(&[7, 3, 7, 9]);
        let found = [9, 5, 7, 5, 1, 3].map(|node| numbers.number(node));
        assert_eq!(found, [3, 4, 0, 4, 5, 1]);
        assert_eq!(numbers.nodes(), [7, 3, 7, 9, 5, 1]);
        assert!(NodeNumbers::new(&[]).nodes().is_empty());
    }

    #[test]
    fn a_node_with_few_edges_has_all_of_them() {
        let edges = EdgeRanges {
            begin: &[10, 20, 20, 30],
            degrees: &[2, 0, 4, 3],
        };
        assert_eq!(edges.many(3), 1);
        let mut drawn = Vec::new();
        // Of four edges the numbers 0, 1, 0: the second 0 stands for the last edge.
        edges.draw_distinct(3, &[0.1, 0.5, 0.0], |place, edge| drawn.push((place, edge)));
        let all = [
            (0, 10),
            (0, 11),
            (2, 20),
            (2, 21),
            (2, 23),
            (3, 30),
            (3, 31),
            (3, 32),
        ];
        assert_eq!(drawn, all);
        drawn.clear();
        edges.draw_distinct(u64::MAX, &[], |place, edge| drawn.push((place, edge)));
        assert_eq!(drawn.len(), 9);
        edges.draw_distinct(0, &[], |_, _| panic!("no edge"));
    }

    #[test]
    fn an_edge_is_drawn_again_only_where_that_is_allowed() {
        let edges = EdgeRanges {
            begin: &[5, 9],
            degrees: &[3, 0],
        };
        let mut drawn = Vec::new();
        let shares = [0.0, 0.4, 1.0, 0.2, 0.2, 0.2];
        edges.draw_again(3, &shares, |place, edge| drawn.push((place, edge)));
        assert_eq!(drawn, [(0, 5), (0, 6), (0, 7)]);
        edges.draw_again(0, &[], |_, _| panic!("no edge"));
    }
}
