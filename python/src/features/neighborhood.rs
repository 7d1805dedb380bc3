//! Neighbourhoods in graphs, with nodes and edges as arrays of `int64`.

use penstock_gather::EdgeRanges;
use penstock_io::buffer::IoBuf;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::errors::gathered as raised;
use crate::ids::{Ids, doubles};
use crate::owner::detached;
use crate::tensor::{self, NativeArray, TensorTarget};

/// Nodes numbered from 0 in the order in which they were found.
#[pyclass(module = "penstock._native")]
pub struct NodeNumbers {
    inner: penstock_gather::NodeNumbers,
}

#[pymethods]
impl NodeNumbers {
    /// Numbers the first nodes by their positions.
    #[new]
    fn new(py: Python<'_>, first: NativeArray) -> PyResult<NodeNumbers> {
        let first = Ids::of(first, true)?;
        let made = detached(py, || {
            let first = first.numbers(u64::MAX)?;
            Ok(penstock_gather::NodeNumbers::new(&first))
        });
        Ok(NodeNumbers {
            inner: raised(py, made)?,
        })
    }

    /// Fills `numbers` with those of some nodes; new nodes have the next ones.
    fn number(
        &mut self,
        py: Python<'_>,
        nodes: NativeArray,
        numbers: TensorTarget,
    ) -> PyResult<()> {
        let nodes = Ids::of(nodes, true)?;
        let mut out = room(numbers, nodes.count())?;
        let numbered = detached(py, || {
            for (node, to) in nodes.numbers(u64::MAX)?.into_iter().zip(items(&mut out)) {
                *to = (self.inner.number(node) as u64).to_ne_bytes();
            }
            drop(out);
            Ok(())
        });
        raised(py, numbered)
    }

    /// Fills `out` with the nodes from the number `first` on.
    fn copy_nodes(&self, py: Python<'_>, first: usize, out: TensorTarget) -> PyResult<()> {
        let nodes = self.inner.nodes().get(first..);
        let nodes = nodes.ok_or_else(|| PyValueError::new_err("there are not as many nodes"))?;
        let mut out = room(out, nodes.len() as u64)?;
        detached(py, || {
            for (node, to) in nodes.iter().zip(items(&mut out)) {
                *to = node.to_ne_bytes();
            }
            drop(out);
        });
        Ok(())
    }

    fn __len__(&self) -> usize {
        self.inner.nodes().len()
    }
}

/// Draws `count` edges of each node, all of them by default. `begin` has the position of each
/// node's first edge, `degrees` the number of its edges, `shares` random numbers of `float64`.
///
/// Fills `nodes` with the position of each drawn edge's node plus `first_node`, and `edges` with
/// the position of the edge.
#[pyfunction]
#[expect(
    clippy::too_many_arguments,
    reason = "they are arrays of one call, which has no other caller"
)]
pub(crate) fn draw_edges(
    py: Python<'_>,
    begin: NativeArray,
    degrees: NativeArray,
    count: Option<u64>,
    is_replaced: bool,
    shares: NativeArray,
    first_node: u64,
    nodes: TensorTarget,
    edges: TensorTarget,
) -> PyResult<()> {
    let (begin, degrees) = (Ids::of(begin, true)?, Ids::of(degrees, true)?);
    let shares = doubles(shares)?;
    let drawn = nodes.1 as u64 / size_of::<u64>() as u64;
    let (mut nodes, mut edges) = (room(nodes, drawn)?, room(edges, drawn)?);
    let draw = || {
        let (begin, degrees) = (begin.numbers(u64::MAX)?, degrees.numbers(u64::MAX)?);
        let ranges = EdgeRanges {
            begin: &begin,
            degrees: &degrees,
        };
        let mut places = items(&mut nodes).iter_mut().zip(items(&mut edges));
        let mut count_of_drawn = 0_u64;
        let take = |place: usize, at: u64| {
            count_of_drawn += 1;
            if let Some((node, edge)) = places.next() {
                *node = (place as u64 + first_node).to_ne_bytes();
                *edge = at.to_ne_bytes();
            }
        };
        match (count, is_replaced) {
            (Some(count), true) => ranges.draw_again(count, &shares, take),
            (count, _) => ranges.draw_distinct(count.unwrap_or(u64::MAX), &shares, take),
        }
        drop((nodes, edges));
        Ok(count_of_drawn)
    };
    match raised(py, detached(py, draw))? {
        found if found == drawn => Ok(()),
        found => Err(PyValueError::new_err(format!(
            "{found} edges are drawn, and there is room for {drawn}"
        ))),
    }
}

/// Memory for `count` integers.
fn room(out: TensorTarget, count: u64) -> PyResult<IoBuf> {
    let out = tensor::target(out)?.into_buf();
    if out.len() as u64 != count * size_of::<u64>() as u64 {
        return Err(PyValueError::new_err(format!(
            "{} bytes for {count} integers of 8 bytes",
            out.len()
        )));
    }
    Ok(out)
}

fn items(out: &mut IoBuf) -> &mut [[u8; 8]] {
    out.as_mut_slice().as_chunks_mut().0
}
