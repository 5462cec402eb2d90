//! Parameters that a batch does not use, such as those of sparse experts: they differ on every rank, in every step
//! and micro-batch.

use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;

use burn::module::Module;
use burn::tensor::Tensor;
use kiln_collectives::Communicator;
use kiln_model::Key;
use kiln_model::layers::{Context, Layer, LayerInit, Linear, RmsNorm};
use kiln_shard::{Accumulate, Recompute, Reshard, ShardError, StateKind, Strategy};

use crate::support::{Rank, Run, Trace, assert_close};

const EXPERTS: usize = 3;

thread_local! {
    /// Identifies the current micro-batch of this rank.
    static MICRO_BATCH: Cell<u64> = const { Cell::new(0) };
}

/// Applies some of its experts in sequence. The selection depends on the micro-batch and may be empty.
#[derive(Module, Debug)]
struct Experts {
    index: usize,
    norm: RmsNorm,
    experts: Vec<Linear>,
}

impl Experts {
    fn new(LayerInit { model, index, key, device, .. }: LayerInit) -> Self {
        let d = model.d_model;
        let expert =
            |expert| Linear::new(d, d, model.init_std, key.fork("experts").fork_index(expert), device);
        Experts {
            index,
            norm: RmsNorm::new(d, model.norm_eps, device),
            experts: (0..EXPERTS as u64).map(expert).collect(),
        }
    }
}

impl Layer for Experts {
    fn forward(&self, x: Tensor<3>, _context: &Context) -> Tensor<3> {
        let key = Key::new(MICRO_BATCH.get()).fork_index(self.index as u64);
        let mut x = x;
        for (index, expert) in self.experts.iter().enumerate() {
            if key.at(index as u64).is_multiple_of(2) {
                x = x.clone() + expert.forward(self.norm.forward(x));
            }
        }
        x
    }
}

fn start(run: &Run, world: Arc<dyn Communicator>) -> Result<Rank<'_>, ShardError> {
    Rank::with_decoder(run, world, run.with_blocks(&(run.device)(), Experts::new))
}

fn train(run: &Run) -> Trace {
    run.same_on_all(run.on_ranks(|world| {
        let number = world.rank();
        let rank = start(run, world)?;
        let mut trace = Trace::default();
        for step in 1..=run.steps {
            rank.engine().begin_step();
            for index in 0..run.accumulation {
                // The same samples have the same number, however they are split over the ranks.
                let micro_batch = number * run.accumulation + index;
                MICRO_BATCH.set(step << 32 | micro_batch as u64);
                let batch = rank.micro_batch(step, index, &rank.training);
                let loss = batch.loss(&rank.model.pass(&rank.training));
                rank.engine().check()?;
                rank.engine().backward(loss, index + 1 == run.accumulation)?;
            }
            trace.gradients.push(rank.values(StateKind::Gradient)?);
            let (loss, norm) = rank.update()?;
            trace.losses.push(loss);
            trace.norms.push(norm);
        }
        trace.weights = rank.values(StateKind::Weight)?;
        Ok(trace)
    }))
}

/// Returns runs over `ranks` ranks, with `accumulation` micro-batches each.
fn settings(ranks: usize, accumulation: usize, frozen: fn(&str) -> bool) -> Vec<Run> {
    let new = |strategy, ranks| {
        let mut run = Run::new(strategy, ranks).accumulation(accumulation).frozen(frozen).steps(6);
        // A mismatch of collectives between ranks must be noticed quickly.
        run.policy.timeout = Duration::from_secs(30);
        run
    };
    let mut runs = Vec::new();
    for recompute in [Recompute::None, Recompute::Selective, Recompute::Block] {
        for tied in [false, true] {
            for strategy in [Strategy::FullShard, Strategy::ShardGradOp, Strategy::NoShard] {
                runs.push(new(strategy, ranks).recompute(recompute).tied(tied));
            }
            let always = new(Strategy::FullShard, ranks).reshard(Reshard::Always);
            runs.push(always.recompute(recompute).tied(tied));
            if ranks.is_multiple_of(2) {
                let hybrid = new(Strategy::HybridShard, ranks).shard_size(2);
                runs.push(hybrid.recompute(recompute).tied(tied));
            }
        }
    }
    if accumulation > 1 {
        let unsharded = |run: &Run| run.clone().accumulate(Accumulate::Unsharded);
        let more: Vec<_> = runs.iter().filter(|run| !run.model.tie_embeddings).map(unsharded).collect();
        runs.extend(more);
    }
    for (seed, run) in runs.iter_mut().enumerate() {
        run.delay_seed = Some(seed as u64);
    }
    runs
}

#[test]
fn ranks_reach_other_parameters_in_every_micro_batch() {
    let first_expert = |name: &str| name.contains("experts.0.");
    let first_block = |name: &str| name.contains("embed_tokens") || name.starts_with("layers.0.");
    let frozen: [fn(&str) -> bool; 3] = [|_| false, first_expert, first_block];
    for (ranks, accumulation, frozen) in
        [(2, 1, frozen[0]), (4, 2, frozen[0]), (3, 2, frozen[1]), (2, 2, frozen[2])]
    {
        for run in settings(ranks, accumulation, frozen) {
            let mut alone = Run::new(Strategy::NoShard, 1).accumulation(ranks * accumulation);
            alone = alone.frozen(frozen).tied(run.model.tie_embeddings).steps(run.steps);
            assert_close(&run.name(), &train(&run), &train(&alone));
        }
    }
}
