use crate::*;
use kiln_collectives::{Buffer, CommError, Communicator, DType};
use std::sync::Arc;

fn sum_of(member: &dyn Communicator, value: f64) -> f64 {
    let buffer = Buffer::from_slice(&[value]);
    let sum = member.all_reduce(label("sum"), buffer).wait(PATIENCE);
    sum.unwrap().as_slice::<f64>().unwrap()[0]
}

pub fn check_split(world: &[Arc<dyn Communicator>]) {
    on_each_rank(world, |member| {
        let rank = member.rank();
        let color = (rank != 2).then_some(rank as u32 % 2);
        let Some(group) = member.split("parity", color, -(rank as i64)).unwrap() else {
            assert_eq!(rank, 2);
            return;
        };
        let members: Vec<usize> = match rank % 2 {
            0 => vec![4, 0],
            _ => vec![5, 3, 1],
        };
        assert_eq!(group.name(), "parity");
        assert_eq!(group.backend(), member.backend());
        assert_eq!(group.world_size(), members.len());
        assert_eq!(members[group.rank()], rank);
        assert!(Arc::ptr_eq(group.recorder(), member.recorder()));
        let sum: usize = members.iter().sum();
        assert_eq!(sum_of(group.as_ref(), rank as f64), sum as f64);

        // With the same key on all ranks, the order is kept. A group can itself be split.
        let same = group.split("same", Some(7), 0).unwrap().unwrap();
        assert_eq!(same.rank(), group.rank());
        assert_eq!(same.world_size(), group.world_size());
        assert_eq!(sum_of(same.as_ref(), 1.0), members.len() as f64);
    });
}

pub fn split_orders_by_key(suite: &Suite) {
    check_split(&suite.world(6));
    check_split(&suite.delayed(6, 3));
}

/// Checks rows and columns of a 2 x 2 mesh, used concurrently and in a different order on each rank.
pub fn check_mesh(world: &[Arc<dyn Communicator>]) {
    on_each_rank(world, |member| {
        let rank = member.rank();
        let (row, column) = (rank / 2, rank % 2);
        let shard = member.split("shard", Some(row as u32), column as i64);
        let shard = shard.unwrap().unwrap();
        let replicate = member.split("replicate", Some(column as u32), row as i64);
        let replicate = replicate.unwrap().unwrap();
        assert_eq!((shard.rank(), replicate.rank()), (column, row));

        for round in 0..20 {
            let own = [(rank * 100 + round) as f32];
            let input = || Arc::new(Buffer::from_slice(&own));
            let gather = || {
                let output = Buffer::zeros(DType::F32, 2);
                shard.all_gather(label("gather"), input(), output)
            };
            let reduce = || replicate.all_reduce(label("reduce"), Buffer::from_slice(&own));
            // Each rank waits for a different group first, which would deadlock with a queue shared by both groups.
            let (gathered, reduced) = if (rank + round) % 2 == 0 {
                let gather = gather();
                let reduced = reduce().wait(PATIENCE);
                (gather.wait(PATIENCE), reduced)
            } else {
                let reduce = reduce();
                let gathered = gather().wait(PATIENCE);
                (gathered, reduce.wait(PATIENCE))
            };
            let value = |rank: usize| (rank * 100 + round) as f32;
            let expected = [value(row * 2), value(row * 2 + 1)];
            assert_bits(&gathered.unwrap(), &expected, "row");
            let expected = [value(column) + value(column + 2)];
            assert_bits(&reduced.unwrap(), &expected, "column");
        }
    });
}

pub fn mesh_groups_run_side_by_side(suite: &Suite) {
    check_mesh(&suite.world(4));
    for seed in 0..5 {
        check_mesh(&suite.delayed(4, seed));
    }
}

pub fn groups_outlive_their_parent(suite: &Suite) {
    let groups = on_each_rank(&suite.world(2), |member| member.split("child", Some(0), 0).unwrap().unwrap());
    on_each_rank(&groups, |group| assert_eq!(sum_of(group.as_ref(), 1.0), 2.0));
}

pub fn names_must_agree_within_a_group_only(suite: &Suite) {
    on_each_rank(&suite.world(4), |member| {
        let color = member.rank() as u32 / 2;
        let group = member.split(&format!("shard {color}"), Some(color), 0);
        assert_eq!(group.unwrap().unwrap().name(), format!("shard {color}"));

        let name = if member.rank() == 1 { "odd" } else { "even" };
        let error = member.split(name, Some(0), 0).unwrap_err();
        assert!(matches!(error, CommError::Mismatch { sequence: 1, .. }));
        let message = error.to_string();
        let common = "ranks 0, 2, 3 called split with color 0 for \"even\" (init)";
        let other = "rank 1 called split with color 0 for \"odd\" (init)";
        assert!(message.contains(&format!("{common}; {other}")), "{message}");
    });
}
