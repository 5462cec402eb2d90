//! The assignment of matrices to the ranks that transform them.

use crate::layout::{Layout, ParamGroupLayout};

/// The rank that owns each parameter whose rule works on whole matrices, by the group's position and the parameter's
/// index in the group. Ownership depends only on the layout, so it is the same on all ranks.
pub(crate) struct Owners(Vec<Vec<usize>>);

impl Owners {
    /// Assigns the parameters of the `whole` groups to all ranks. Groups are balanced separately, because they are
    /// transformed one after the other. In each group, the parameter with the most work is assigned first, to the
    /// rank with the least work so far.
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

    /// Returns the indices of the parameters in the group at `position` that `rank` owns.
    pub(crate) fn owned_by(&self, rank: usize, position: usize) -> impl Iterator<Item = usize> {
        let owners = self.0[position].iter().enumerate();
        owners.filter(move |(_, owner)| **owner == rank).map(|(index, _)| index)
    }
}

/// Returns the approximate cost of the products of a matrix with its transpose, in multiplications.
fn cost(shape: &[usize]) -> u128 {
    let [matrices, rows, columns] = as_matrices(shape);
    let (least, most) = (rows.min(columns) as u128, rows.max(columns) as u128);
    matrices as u128 * least * least * (2 * most + least)
}

/// Interprets a shape as matrices: `[matrices, rows, columns]`. A vector is one row.
pub(super) fn as_matrices(shape: &[usize]) -> [usize; 3] {
    match *shape {
        [] => [1, 1, 1],
        [columns] => [1, 1, columns],
        [ref matrices @ .., rows, columns] => [matrices.iter().product(), rows, columns],
    }
}
