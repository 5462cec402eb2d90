//! If a rank fails, the run ends, and names the rank and the reason.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use kiln_collectives::{Communicator, Label, LocalGroup, Phase};
use kiln_model::ModelConfig;
use kiln_model::layers::{AnyLayer, Context, Layer};
use kiln_shard::ranks::{RankError, RanksError, run_rank};
use kiln_shard::{Recompute, Reshard, ShardError, Strategy};

use crate::reference;
use crate::support::{Rank, Run, assert_close, block, small_model};

/// Places of a step at which a rank can fail.
const PLACES: [&str; 4] = ["before forward", "after forward", "after backward", "after the step"];

/// An error of the program that uses the engine.
#[derive(Debug)]
enum TestError {
    Shard(ShardError),
    Own(String),
}

impl fmt::Display for TestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TestError::Shard(error) => error.fmt(f),
            TestError::Own(message) => f.write_str(message),
        }
    }
}

impl From<ShardError> for TestError {
    fn from(error: ShardError) -> Self {
        TestError::Shard(error)
    }
}

impl RankError for TestError {
    fn is_consequence(&self) -> bool {
        matches!(self, TestError::Shard(error) if error.is_consequence())
    }
}

/// Trains until `fail` returns an error on some rank at some place of step 2.
fn train_until(
    run: &Run,
    fail: impl Fn(usize, &str) -> Result<(), TestError> + Sync,
) -> RanksError<TestError> {
    let body = |world: Arc<dyn Communicator>| -> Result<(), TestError> {
        let number = world.rank();
        let rank = Rank::start(run, world)?;
        rank.step(1)?;
        let mut places = PLACES.iter();
        let mut pass_by = || fail(number, places.next().expect("four places"));
        let engine = rank.engine();
        engine.begin_step();
        pass_by()?;
        let batch = rank.micro_batch(2, 0, &rank.training);
        let loss = batch.loss(&rank.model.pass(&rank.training));
        engine.check()?;
        pass_by()?;
        engine.backward(loss, true)?;
        pass_by()?;
        rank.update()?;
        pass_by()?;
        rank.step(3)?;
        Ok(())
    };
    match run.try_on_ranks(body) {
        Ok(_) => panic!("{}: no rank failed", run.name()),
        Err(error) => error,
    }
}

fn runs() -> Vec<Run> {
    let mut runs = Vec::new();
    for recompute in [Recompute::None, Recompute::Block] {
        runs.push(Run::new(Strategy::FullShard, 3).recompute(recompute));
        runs.push(Run::new(Strategy::NoShard, 3).recompute(recompute));
        runs.push(Run::new(Strategy::HybridShard, 4).shard_size(2).recompute(recompute));
        let delayed = Run::new(Strategy::ShardGradOp, 3).reshard(Reshard::Always);
        runs.push(Run { delay_seed: Some(1), ..delayed.recompute(recompute) });
    }
    runs
}

#[test]
fn a_rank_that_returns_an_error_ends_the_run_with_it() {
    for run in runs() {
        for place in PLACES {
            let culprit = run.ranks - 1;
            let error = train_until(&run, |rank, here| match (rank, here) {
                (rank, here) if rank == culprit && here == place => {
                    Err(TestError::Own(format!("lost {here}")))
                }
                _ => Ok(()),
            });
            match error {
                RanksError::Failed { rank, error: TestError::Own(message) } => {
                    assert_eq!((rank, message), (culprit, format!("lost {place}")));
                }
                other => panic!("{}, {place}: {other}", run.name()),
            }
        }
    }
}

#[test]
fn a_rank_that_panics_ends_the_run_with_its_message() {
    for run in runs() {
        for place in PLACES {
            let error = train_until(&run, |rank, here| {
                assert!(rank != 1 || here != place, "lost {here}");
                Ok(())
            });
            match error {
                RanksError::Panicked { rank: 1, message } => {
                    assert_eq!(message, format!("lost {place}"));
                }
                other => panic!("{}, {place}: {other}", run.name()),
            }
        }
    }
}

/// A block that panics in one of its forward passes. With recomputation, this pass may be inside backward.
#[derive(Module, Debug)]
struct Fragile {
    block: AnyLayer,
    #[module(skip)]
    passes_left: Arc<AtomicUsize>,
}

impl Layer for Fragile {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        let left = self.passes_left.fetch_sub(1, Ordering::Relaxed);
        assert_ne!(left, 0, "the block broke");
        self.block.forward(x, context)
    }
}

#[test]
fn a_panic_inside_backward_ends_the_run_and_harms_no_later_one() {
    let run = Run::new(Strategy::FullShard, 3).recompute(Recompute::Block);
    // Three blocks per forward and per backward: the fifth pass is the second in backward.
    let fragile = |passes: usize| {
        let device = Device::flex();
        let passes_left = Arc::new(AtomicUsize::new(passes));
        run.with_blocks(&device, move |init| Fragile { block: block(init), passes_left: passes_left.clone() })
    };
    let ended = run.try_on_ranks(|world| {
        let passes = if world.rank() == 1 { 4 } else { usize::MAX };
        Rank::with_decoder(&run, world, fragile(passes))?.train()
    });
    match ended {
        Err(RanksError::Panicked { rank: 1, message }) => {
            assert!(message.contains("the block broke"), "{message}");
        }
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("no rank failed"),
    }
    assert_close("the next run", &run.train(), reference::standard(false));
}

#[test]
fn an_engine_that_failed_stays_failed() {
    let run = Run::new(Strategy::FullShard, 2);
    let ended = run.try_on_ranks(|world| -> Result<(), TestError> {
        if world.rank() == 1 {
            let _rank = Rank::start(&run, world)?;
            return Err(TestError::Own("gone".to_owned()));
        }
        let rank = Rank::start(&run, world)?;
        let first = rank.step(1).expect_err("the other rank is gone").to_string();
        assert!(first.contains("aborted by rank 1"), "{first}");
        for _ in 0..2 {
            assert_eq!(rank.step(1).expect_err("it stays so").to_string(), first);
        }
        Err(rank.engine().check().expect_err("it is known").into())
    });
    let error = ended.expect_err("both failed").to_string();
    assert_eq!(error, "rank 1: gone");
}

#[test]
fn ranks_with_another_plan_are_named_on_every_rank() {
    let narrow = ModelConfig { d_ff: 16, ..small_model(false) };
    let tied = small_model(true);
    let base = || Run::new(Strategy::FullShard, 3);
    let mut bf16 = base();
    bf16.policy.reduce_dtype = kiln_collectives::DType::BF16;
    for other in [
        Run { model: narrow, ..base() },
        Run { model: tied, ..base() },
        base().recompute(Recompute::Block),
        base().reshard(Reshard::Never),
        base().frozen(|name| name == "norm.weight"),
        bf16,
    ] {
        let run = base();
        let mismatches = run.on_ranks(|world| {
            let run = if world.rank() == 2 { &other } else { &run };
            match Rank::start(run, world).map(|_| ()) {
                Err(ShardError::PlanMismatch { ranks }) => Ok(ranks),
                other => panic!("{other:?}"),
            }
        });
        assert_eq!(mismatches, [[2], [2], [2]], "{}", other.name());
    }
}

/// A rank with a process of its own gets only its own error; the other ranks learn of the error at once.
#[test]
fn a_rank_on_its_own_tells_the_others_why_it_ends() {
    type End = fn() -> Result<(), TestError>;
    let ends: [(&str, End); 2] =
        [("lost", || Err(TestError::Own("lost".to_owned()))), ("panicked: lost", || panic!("lost"))];
    for (reason, end) in ends {
        let mut worlds = LocalGroup::new(2).into_iter();
        let mut next = || Arc::new(worlds.next().expect("two ranks"));
        let (first, second) = (next(), next());
        let waits = std::thread::spawn(move || {
            run_rank(first, 1, |world| {
                let work = world.barrier(Label::new("end", Phase::Other));
                let error = work.wait(Duration::from_secs(600)).expect_err("the other one is gone");
                Err::<(), _>(TestError::Shard(error.into()))
            })
        });
        let failed = run_rank(second, 1, |_| end()).expect_err("it failed");
        assert_eq!(failed.to_string(), format!("rank 1 {reason}").replace("rank 1 lost", "rank 1: lost"));
        match waits.join().expect("no panic") {
            Err(RanksError::Failed { rank: 0, error }) => {
                assert!(error.is_consequence(), "{error}");
                assert!(error.to_string().contains(reason), "{error}");
            }
            other => panic!("{other:?}"),
        }
    }
}
