//! Which rank transforms which matrices.

use crate::layout::{Layout, ParamGroupLayout};

/// The owner of every parameter whose rule works on whole matrices, by position of its group and its index in
/// it. The same on all ranks: it follows from the layout alone.
pub(crate) struct Owners(Vec<Vec<usize>>);

impl Owners {
    /// Spreads the parameters of the groups that are `whole` over all ranks: group by group, since groups are
    /// transformed one after the other, and the most work first, to the rank that has the least so far.
    pub(crate) fn new(layout: &Layout, whole: impl Fn(usize) -> bool) -> Self {
        let mut load = vec![0u128; layout.mesh.world_size()];
        let mut of_group = |group: &ParamGroupLayout| {
            let costs: Vec<_> = group.parameters.iter().map(|parameter| cost(&parameter.shape)).collect();
            let mut order: Vec<_> = (0..costs.len()).collect();
            // Stable: equal costs stay in the order of the layout.
            order.sort_by_key(|index| std::cmp::Reverse(costs[*index]));
            let mut owners = vec![0; costs.len()];
            for index in order {
                let ranks = load.iter().enumerate();
                let least = ranks.min_by_key(|(_, load)| **load).map_or(0, |(rank, _)| rank);
                load[least] += costs[index];
                owners[index] = least;
            }
            owners
        };
        let groups = layout.groups.iter().enumerate();
        Owners(groups.map(|(at, group)| if whole(at) { of_group(group) } else { Vec::new() }).collect())
    }

    /// The parameters of the group at `position` that `rank` owns, by their index in it.
    pub(crate) fn owned_by(&self, rank: usize, position: usize) -> impl Iterator<Item = usize> {
        let owners = self.0[position].iter().enumerate();
        owners.filter(move |(_, owner)| **owner == rank).map(|(index, _)| index)
    }
}

/// About what the products of a matrix with its transpose cost, in multiplications.
fn cost(shape: &[usize]) -> u128 {
    let [matrices, rows, columns] = as_matrices(shape);
    let (least, most) = (rows.min(columns) as u128, rows.max(columns) as u128);
    matrices as u128 * least * least * (2 * most + least)
}

/// A shape as that of matrices: `[matrices, rows, columns]`. A vector is one row.
pub(super) fn as_matrices(shape: &[usize]) -> [usize; 3] {
    match *shape {
        [] => [1, 1, 1],
        [columns] => [1, 1, columns],
        [ref matrices @ .., rows, columns] => [matrices.iter().product(), rows, columns],
    }
}
