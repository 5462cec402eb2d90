//! Meshes with more than one row and column, compared with meshes of a single row or column.

use burn::tensor::Device;
use kiln_model::Key;
use kiln_shard::{EngineBuilder, Mesh, MeshError, Recompute, ShardError, StateKind, Strategy};

use crate::reference;
use crate::support::{Rank, Run, assert_close, assert_values_close};

#[test]
fn all_meshes_of_four_ranks_train_the_same() {
    let full = Run::new(Strategy::FullShard, 4).train();
    assert_close("full", &full, reference::standard(false));
    let none = Run::new(Strategy::NoShard, 4).train();
    assert_eq!(none, full);
    for strategy in [Strategy::HybridShard, Strategy::HybridShardGradOp] {
        for shard_size in [1, 2, 4] {
            let run = Run::new(strategy, 4).shard_size(shard_size);
            let hybrid = run.train();
            assert_close(&run.name(), &hybrid, &full);
            // A single row equals FULL_SHARD, a single column NO_SHARD: the same sums in the same order.
            if shard_size != 2 {
                assert_eq!(hybrid, full, "{}", run.name());
            }
        }
    }
}

#[test]
fn meshes_report_their_shape() {
    for (strategy, ranks, shard_size, expected) in [
        (Strategy::FullShard, 3, None, "replicate 1 x shard 3"),
        (Strategy::NoShard, 3, None, "replicate 3 x shard 1"),
        (Strategy::HybridShard, 6, Some(2), "replicate 3 x shard 2"),
        (Strategy::HybridShard, 3, Some(1), "replicate 3 x shard 1"),
    ] {
        let run = Run { shard_size, ..Run::new(strategy, ranks) };
        let meshes = run.on_ranks(|world| Ok(Rank::start(&run, world)?.engine().mesh().to_string()));
        assert_eq!(meshes, vec![expected; ranks]);
    }
}

#[test]
fn wrong_shard_sizes_are_refused_with_a_reason() {
    let refused = |strategy, shard_size| {
        let run = Run { shard_size, ..Run::new(strategy, 4) };
        let errors =
            run.on_ranks(|world| match EngineBuilder::new(world, run.policy.clone(), run.shard_size) {
                Err(ShardError::Mesh(error)) => Ok(error),
                Err(error) => Err(error),
                Ok(_) => panic!("{} was accepted", run.name()),
            });
        run.same_on_all(errors)
    };
    let error = refused(Strategy::HybridShard, Some(3));
    assert_eq!(error, MeshError::Indivisible { shard_size: 3, world_size: 4 });
    assert_eq!(
        error.to_string(),
        "shard.shard_size = 3 does not divide the 4 ranks: 4 / 3 leaves 1; use a divisor of 4"
    );
    let error = refused(Strategy::HybridShardGradOp, Some(0));
    assert_eq!(error, MeshError::Indivisible { shard_size: 0, world_size: 4 });
    let error = refused(Strategy::HybridShard, None);
    assert!(matches!(error, MeshError::MissingShardSize { world_size: 4, .. }), "{error}");
    assert!(error.to_string().starts_with("HYBRID_SHARD needs shard.shard_size"), "{error}");
    for (strategy, expected) in [(Strategy::FullShard, 4), (Strategy::NoShard, 1)] {
        let error = refused(strategy, Some(2));
        assert_eq!(error, MeshError::Contradiction { strategy, shard_size: 2, expected });
        assert!(error.to_string().contains("leave shard.shard_size out"), "{error}");
    }
}

#[test]
fn replicas_start_from_the_values_of_the_first() {
    for (strategy, shard_size) in
        [(Strategy::HybridShard, Some(2)), (Strategy::HybridShardGradOp, Some(1)), (Strategy::NoShard, None)]
    {
        let run = Run { shard_size, ..Run::new(strategy, 4) }.recompute(Recompute::Block);
        let seeded = run.on_ranks(|world| {
            let mesh = Mesh::new(strategy, 4, shard_size)?;
            let seed = 1 + mesh.replicate_index(world.rank()) as u64;
            let decoder = run.seeded(Key::new(seed), &Device::flex());
            let rank = Rank::with_decoder(&run, world, decoder)?;
            let initial = rank.values(StateKind::Weight)?;
            Ok((initial, rank.train()?))
        });
        let (initial, trace) = run.same_on_all(seeded);
        let alone = run.on_ranks(|world| Rank::start(&run, world)?.values(StateKind::Weight));
        assert_eq!(initial, run.same_on_all(alone), "{}", run.name());
        assert_values_close(&run.name(), &trace.weights, &reference::standard(false).weights);
        assert_close(&run.name(), &trace, reference::standard(false));
    }
}

#[test]
fn machines_are_groups_if_they_are_alike_and_their_ranks_consecutive() {
    let size = |nodes: &[usize]| Mesh::shard_size_of_nodes(Strategy::HybridShard, nodes);
    assert_eq!(size(&[0, 0, 1, 1]), Ok(2));
    assert_eq!(size(&[0, 0, 0]), Ok(3));
    assert_eq!(size(&[0, 1, 2]), Ok(1));
    assert_eq!(size(&[]), Err(MeshError::Empty));
    let error = size(&[0, 0, 1, 1, 1, 2]).expect_err("they differ").to_string();
    assert!(error.contains("(machine 0: ranks 0-1; machine 1: ranks 2-4; machine 2: rank 5)"), "{error}");
    assert!(error.starts_with("HYBRID_SHARD") && error.contains("a divisor of 6"), "{error}");
    let error = size(&[0, 1, 0, 1]).expect_err("they are mixed").to_string();
    assert!(error.contains("(machine 0: ranks 0, 2; machine 1: ranks 1, 3)"), "{error}");
    assert!(error.contains("not consecutive"), "{error}");
}
