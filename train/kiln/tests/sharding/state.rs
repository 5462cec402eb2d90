//! Reading and writing the values of shards.

use kiln_model::Key;
use kiln_model::layers::Linear;
use kiln_shard::{EngineBuilder, Recompute, ShardError, ShardOptions, StateKind, Strategy};

use burn::tensor::Device;

use crate::support::{Rank, Run, Values, assert_scalars_close, assert_values_close};

const KINDS: [StateKind; 3] = [StateKind::Weight, StateKind::Slot("exp_avg"), StateKind::Slot("exp_avg_sq")];

fn save(rank: &Rank<'_>) -> Result<[Values; 3], ShardError> {
    let [weights, first, second] = KINDS.map(|kind| rank.values(kind));
    Ok([weights?, first?, second?])
}

fn load(rank: &Rank<'_>, saved: &[Values; 3]) -> Result<(), ShardError> {
    for (kind, values) in KINDS.into_iter().zip(saved) {
        for (name, values) in values {
            rank.engine().load_parameter(name, kind, values)?;
        }
    }
    rank.engine().resume(2, None);
    Ok(())
}

#[test]
fn values_survive_any_change_of_ranks_and_strategy() {
    let run = Run::new(Strategy::FullShard, 4).tied(true).steps(2);
    let results = run.on_ranks(|world| {
        let rank = Rank::start(&run, world)?;
        for step in 1..=2 {
            rank.step(step)?;
        }
        let saved = save(&rank)?;
        // The next steps of an uninterrupted run.
        let next = [rank.step(3)?, rank.step(4)?];
        Ok((saved, next, rank.values(StateKind::Weight)?))
    });
    let (saved, next, last) = run.same_on_all(results);
    for (strategy, ranks, shard_size) in [
        (Strategy::FullShard, 1, None),
        (Strategy::FullShard, 3, None),
        (Strategy::FullShard, 8, None),
        (Strategy::ShardGradOp, 4, None),
        (Strategy::NoShard, 2, None),
        (Strategy::HybridShard, 4, Some(2)),
    ] {
        let other = Run { shard_size, ..Run::new(strategy, ranks).tied(true) };
        let results = other.on_ranks(|world| {
            let rank = Rank::start(&other, world)?;
            load(&rank, &saved)?;
            let same = save(&rank)? == saved;
            Ok((same, [rank.step(3)?, rank.step(4)?], rank.values(StateKind::Weight)?))
        });
        let (same, steps, weights) = other.same_on_all(results);
        assert!(same, "{}: a round trip keeps all bits", other.name());
        for (step, expected) in steps.iter().zip(next) {
            assert_scalars_close(&other.name(), &[step.0, step.1], &[expected.0, expected.1]);
        }
        assert_values_close(&other.name(), &weights, &last);
    }
}

#[test]
fn gradients_and_moments_are_there_when_they_exist() {
    let run = Run::new(Strategy::FullShard, 2);
    run.on_ranks(|world| {
        let rank = Rank::start(&run, world)?;
        let all = rank.values(StateKind::Weight)?.len();
        let counts = || -> Result<Vec<usize>, ShardError> {
            [StateKind::Gradient, StateKind::Slot("exp_avg"), StateKind::Slot("exp_avg_sq")]
                .into_iter()
                .map(|kind| Ok(rank.values(kind)?.len()))
                .collect()
        };
        assert_eq!(counts()?, [0, 0, 0]);
        rank.gradients(1)?;
        assert_eq!(counts()?, [all, 0, 0]);
        rank.update()?;
        assert_eq!(counts()?, [0, all, all]);
        assert!(rank.engine().gather_group(99, StateKind::Weight)?.is_none());
        Ok(())
    });
}

#[test]
fn gradients_can_be_replaced() {
    let run = Run::new(Strategy::FullShard, 3).recompute(Recompute::Block);
    run.on_ranks(|world| {
        let rank = Rank::start(&run, world)?;
        rank.gradients(1)?;
        let gradients = rank.values(StateKind::Gradient)?;
        for (name, gradient) in &gradients {
            let zeros = vec![0.0; gradient.len()];
            rank.engine().load_parameter(name, StateKind::Gradient, &zeros)?;
        }
        assert_eq!(rank.engine().grad_norm()?, 0.0);
        rank.engine().load_parameter("norm.weight", StateKind::Gradient, &[0.5; 16])?;
        assert_eq!(rank.engine().grad_norm()?, 2.0);
        assert_eq!(rank.engine().first_non_finite_gradient()?, None);
        let mut bad = gradients["layers.1.attention.o_proj.weight"].clone();
        *bad.last_mut().expect("it has elements") = f32::NAN;
        rank.engine().load_parameter("layers.1.attention.o_proj.weight", StateKind::Gradient, &bad)?;
        let found = rank.engine().first_non_finite_gradient()?;
        assert_eq!(found.as_deref(), Some("layers.1.attention.o_proj.weight"));
        Ok(())
    });
}

#[test]
fn a_gradient_that_is_not_there_is_no_view_of_a_weight() {
    let run = Run::new(Strategy::FullShard, 2);
    run.on_ranks(|world| {
        let rank = Rank::start(&run, world)?;
        let set = || rank.engine().load_parameter("norm.weight", StateKind::Gradient, &[0.5; 16]);
        let none = |outcome: Result<(), ShardError>| {
            let error = outcome.expect_err("there is no gradient");
            assert!(matches!(&error, ShardError::NoGradient { name } if name == "norm.weight"));
            assert!(error.to_string().starts_with("`norm.weight` has no gradient now"), "{error}");
        };
        none(set());
        rank.gradients(1)?;
        set()?;
        rank.update()?;
        none(set());
        Ok(())
    });
}

/// A save in the background reads the values of the moment at which it began, even if other values are loaded
/// before it ends.
#[test]
fn values_are_replaced_beside_a_snapshot() {
    let run = Run::new(Strategy::NoShard, 1);
    run.on_ranks(|world| {
        let rank = Rank::start(&run, world)?;
        rank.step(1)?;
        let engine = rank.engine();
        let position = |name: &str| {
            let mut groups = engine.layout().groups.iter();
            let has = |p: &kiln_shard::layout::ParameterLayout| p.name == name;
            groups.position(|group| group.parameters.iter().any(has)).expect("a group")
        };
        let group = position("norm.weight");
        for kind in KINDS {
            let snapshot = engine.snapshot();
            let before = snapshot.values(group, kind)?.expect("values").to_vec();
            engine.load_parameter("norm.weight", kind, &[0.25; 16])?;
            assert!(snapshot.values(group, kind)? == Some(&before[..]), "{kind:?}");
            let now = engine.gather_parameter("norm.weight", kind)?;
            assert_eq!(now.as_deref(), Some(&[0.25; 16][..]), "{kind:?}");
        }
        Ok(())
    });
}

/// A norm that every rank computes from its own shards equals the norm of the whole parameter, under every strategy.
#[test]
fn sums_over_shards_count_every_element_once() {
    let mut norms = Vec::new();
    for (strategy, ranks, shard_size, replicas) in [
        (Strategy::NoShard, 1, None, 1.0),
        (Strategy::FullShard, 4, None, 1.0),
        (Strategy::ShardGradOp, 4, None, 1.0),
        (Strategy::NoShard, 4, None, 4.0),
        (Strategy::HybridShard, 4, Some(2), 2.0),
        (Strategy::HybridShardGradOp, 4, Some(2), 2.0),
    ] {
        let run = Run { shard_size, ..Run::new(strategy, ranks) };
        let results = run.on_ranks(|world| {
            let rank = Rank::start(&run, world)?;
            let engine = rank.engine();
            let mut squares = 0.0;
            for (_, parameter) in engine.layout().parameters() {
                let sum =
                    |_, values: &[f32]| values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
                let part = engine.read_parameter(&parameter.name, StateKind::Weight, sum)?;
                squares += part.unwrap_or_default();
            }
            assert_eq!(engine.read_parameter("norm.weight", StateKind::Gradient, |_, _| ())?, None);
            let once = engine.sum_over_shards("norm", &[squares])?[0];
            let over_ranks = engine.sum_over_ranks("norm", &[squares])?[0];
            assert!((over_ranks / once - replicas).abs() < 1e-9, "{strategy}: {over_ranks}");
            Ok(once)
        });
        norms.push(run.same_on_all(results));
    }
    for norm in &norms {
        assert!((norm / norms[0] - 1.0).abs() < 1e-12, "{norms:?}");
    }
}

#[test]
fn unknown_names_and_wrong_lengths_are_refused() {
    let run = Run::new(Strategy::FullShard, 2);
    run.on_ranks(|world| {
        let rank = Rank::start(&run, world)?;
        let engine = rank.engine();
        let unknown = engine.gather_parameter("layers.9.weight", StateKind::Weight);
        assert!(
            matches!(&unknown, Err(ShardError::UnknownParameter { name }) if name == "layers.9.weight"),
            "{unknown:?}"
        );
        let unknown = engine.load_parameter("nothing", StateKind::Weight, &[]);
        assert_eq!(unknown.expect_err("unknown").to_string(), "no parameter is called `nothing`");
        for len in [0, 15, 17] {
            let wrong = engine.load_parameter("norm.weight", StateKind::Weight, &vec![0.0; len]);
            assert_eq!(
                wrong.expect_err("wrong length").to_string(),
                format!("`norm.weight` has 16 elements (shape [16]), but {len} were given")
            );
        }
        // After the error, the engine still works.
        rank.step(1).map(drop)
    });
}

#[test]
fn names_are_given_once() {
    let run = Run::new(Strategy::FullShard, 2);
    run.on_ranks(|world| {
        let mut builder = EngineBuilder::new(world, run.policy.clone(), None)?;
        let linear = || Linear::new(4, 4, 0.1, Key::new(1), &Device::flex());
        builder.fully_shard("first", "a.", linear(), ShardOptions::default())?;
        builder.fully_shard("second", "b.", linear(), ShardOptions::default())?;
        match builder.fully_shard("third", "a.", linear(), ShardOptions::default()).map(drop) {
            Err(ShardError::DuplicateParameter { name }) => assert_eq!(name, "a.weight"),
            other => panic!("{other:?}"),
        }
        Ok(())
    });
}

#[test]
fn names_are_known_before_anything_is_sharded() {
    for tied in [true, false] {
        let run = Run::new(Strategy::FullShard, 2).tied(tied);
        let expected = kiln::sharded::parameter_names(&run.decoder(&Device::flex()));
        let results = run.on_ranks(|world| {
            let rank = Rank::start(&run, world)?;
            let layout = rank.engine().layout();
            Ok(layout.parameters().map(|(_, parameter)| parameter.name.clone()).collect::<Vec<_>>())
        });
        assert_eq!(run.same_on_all(results), expected, "tied {tied}");
    }
}
