//! The fake backend: one rank of a world whose other ranks do not exist.

use half::bf16;
use kiln_collectives::{Buffer, CommError, DType};
use kiln_conformance::results::check_operations;
use kiln_conformance::{PATIENCE, assert_bits, fake, label, values};
use std::sync::Arc;

#[test]
fn arguments_are_checked() {
    let world = fake(3, &[]);
    let error =
        world[1].broadcast(label("weights"), Buffer::zeros(DType::F32, 4), 3).wait(PATIENCE).unwrap_err();
    assert_eq!(
        error.to_string(),
        "broadcast 0 of group \"world\" for \"weights\" (forward) on rank 1: root 3 is not a \
         rank of a group of 3; correct the arguments of this call"
    );
    world[1].abort("enough");
    let error = world[1].barrier(label("b")).wait(PATIENCE).unwrap_err();
    assert!(matches!(&error, CommError::Aborted { by, .. } if by.rank == 1));
}

#[test]
fn splits_take_their_size_from_the_plan() {
    for member in fake(8, &[("shard", 4), ("replicate", 2), ("large", 9)]) {
        let rank = member.rank();
        let split = |name: &str, color: Option<u32>, key: i64| member.split(name, color, key);
        // The usual mesh, with either usual choice of key.
        for key in [rank, rank % 4] {
            let shard = split("shard", Some(rank as u32 / 4), key as i64).unwrap().unwrap();
            assert_eq!((shard.rank(), shard.world_size()), (rank % 4, 4));
            let replicate = split("replicate", Some(rank as u32 % 4), key as i64);
            let replicate = replicate.unwrap().unwrap();
            assert_eq!((replicate.rank(), replicate.world_size()), (rank / 4, 2));
            assert!(Arc::ptr_eq(replicate.recorder(), member.recorder()));
        }
        let alone = split("other", Some(3), 0).unwrap().unwrap();
        assert_eq!((alone.rank(), alone.world_size()), (0, 1));
        assert!(split("shard", None, 0).unwrap().is_none());
        let other_color = split("shard", Some(99), 3).unwrap().unwrap();
        assert_eq!(other_color.rank(), 3);
        assert!(matches!(split("shard", Some(99), -1), Err(CommError::Invalid { .. })));
        assert!(matches!(split("large", Some(0), 0), Err(CommError::Invalid { .. })));
    }
}

#[test]
fn other_ranks_contribute_nothing() {
    for member in fake(4, &[]) {
        let rank = member.rank();
        let own = values::<f32>(rank, 4 * 7);
        let input = Arc::new(Buffer::from_slice(&own));
        let output = Buffer::zeros(DType::F32, 7);
        let work = member.reduce_scatter(label("scatter"), Arc::clone(&input), output);
        assert!(work.is_done());
        let shard = work.wait(PATIENCE).unwrap();
        assert_bits(&shard, &own[rank * 7..(rank + 1) * 7], "reduce_scatter");
        assert_eq!(Arc::strong_count(&input), 1);

        let mut expected = vec![9.0f32; 28];
        expected[rank * 7..(rank + 1) * 7].copy_from_slice(shard.as_slice().unwrap());
        let output = Buffer::from_slice(&[9.0f32; 28]);
        let full = member.all_gather(label("gather"), Arc::new(shard), output);
        assert_bits(&full.wait(PATIENCE).unwrap(), &expected, "all_gather");

        let buffer = Buffer::from_slice(&own);
        let buffer = member.all_reduce(label("reduce"), buffer).wait(PATIENCE).unwrap();
        let buffer = member.broadcast(label("send"), buffer, 3).wait(PATIENCE).unwrap();
        assert_bits(&buffer, &own, "all_reduce and broadcast");
        let nothing = member.barrier(label("barrier")).wait(PATIENCE).unwrap();
        assert!(nothing.is_empty());
    }
}

#[test]
fn a_world_of_one_is_real() {
    for len in [0, 1, 1023] {
        check_operations::<f32>(&fake(1, &[]), len);
        check_operations::<bf16>(&fake(1, &[]), len);
    }
}
