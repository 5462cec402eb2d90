//! Rules with state of whole matrices: the same bits under every strategy, in checkpoints of every format, and after a
//! change of ranks, which moves the state to other owners.

use std::path::Path;

use burn::tensor::Tensor;
use kiln::checkpoint::{
    Checkpoint, CheckpointState, Format, SaveContext, SaveOptions, Saver, convert, verify,
};
use kiln::run::TrainError;
use kiln::weights::AllowMissing;
use kiln_shard::{AdamW, Optimizer, OwnedRun, Rule, ShardError, ShardRun, StateKind, Strategy, UpdateStep};
use kiln_sys::Meter;

use crate::support::{Rank, Run, Trace, Values, assert_scalars_close};

const BEFORE: u64 = 2;
const AFTER: u64 = 2;

/// Divides the directions by the norm of a running mean of G Gᵀ, and multiplies them by numbers that depend on name and
/// step. Its faults are those that a user's rule can have.
#[derive(Clone, Debug)]
struct Gram {
    /// Matrices with this number of columns have no `gram`.
    without: usize,
    fault: Option<&'static str>,
}

const GRAM: Gram = Gram { without: 8, fault: None };

impl Rule for Gram {
    fn name(&self) -> &str {
        "gram"
    }

    fn slots(&self) -> &[&'static str] {
        &["momentum"]
    }

    fn owned_slots(&self) -> &[&'static str] {
        if self.fault == Some("name") { &["momentum"] } else { &["gram", "count"] }
    }

    fn owned_shape(&self, slot: &str, shape: &[usize]) -> Vec<usize> {
        match (slot, shape) {
            ("gram", [_, columns]) if *columns == self.without => vec![0],
            ("gram", [rows, _]) => vec![*rows, *rows],
            _ => vec![3],
        }
    }

    fn transform_owned(&self, step: &UpdateStep, run: OwnedRun<'_>) -> Tensor<3> {
        let OwnedRun { name, matrices, slots } = run;
        let gradient = matrices * step.gradient_factor;
        slots[1] = slots[1].clone() + 1.0;
        let count: Vec<f32> = slots[1].to_data().iter().collect();
        assert_eq!(count, [step.step as f32; 3], "{name}: a count of the updates");
        let mut update = gradient.clone() * (name.len() as f64 / step.step as f64);
        if slots[0].dims()[2] > 0 {
            let square = gradient.clone().matmul(gradient.transpose());
            slots[0] = slots[0].clone() * 0.5 + square * 0.5;
            update = slots[0].clone().matmul(update);
        }
        match self.fault {
            Some("slot") => slots[1] = Tensor::zeros([1, 1, 2], &update.device()),
            Some("update") => update = Tensor::zeros([1, 1, 1], &update.device()),
            _ => {}
        }
        update
    }

    fn update(&self, step: &UpdateStep, run: ShardRun<'_>) {
        let ShardRun { weights, gradient, mut slots, .. } = run;
        for ((weight, update), momentum) in weights.iter_mut().zip(gradient).zip(slots[0].iter_mut()) {
            *momentum = 0.9 * *momentum + update;
            *weight -= step.learning_rate as f32 * *momentum;
        }
    }
}

fn optimizer(rule: &Gram) -> Optimizer {
    let is_matrix = |name: &str, shape: &[usize]| name.starts_with("layers.") && shape.len() == 2;
    Optimizer::from(AdamW::default()).with_rule(rule.clone(), is_matrix).named("gram")
}

fn start<'a>(
    run: &'a Run,
    world: std::sync::Arc<dyn kiln_collectives::Communicator>,
) -> Result<Rank<'a>, ShardError> {
    Rank::with_optimizer(run, world, optimizer(&GRAM))
}

/// All state, gathered from the ranks.
fn values(rank: &Rank<'_>) -> Result<Vec<Values>, ShardError> {
    let slots = ["exp_avg", "exp_avg_sq", "momentum", "gram", "count"].map(StateKind::Slot);
    [StateKind::Weight].into_iter().chain(slots).map(|kind| rank.values(kind)).collect()
}

fn state(run: &Run) -> CheckpointState {
    let model = run.model.clone();
    CheckpointState { step: BEFORE, ..CheckpointState::new(model, run.seq) }
}

/// The state at a checkpoint, and the losses of the later steps.
type Known = (Vec<Values>, Vec<f64>);

/// Trains, saves in the background where the format allows it, and trains on.
fn save(run: &Run, folder: &Path, format: Format) -> Known {
    let known = run.try_on_ranks(|world| {
        let rank = start(run, world)?;
        for step in 1..=BEFORE {
            rank.step(step)?;
        }
        let known = values(&rank)?;
        let options = SaveOptions { format, background: true, ..SaveOptions::new(folder.to_owned()) };
        let mut saver = Saver::new(options, rank.engine().world().rank());
        saver.begin(rank.engine(), SaveContext::new(state(run)))?;
        let losses = (BEFORE + 1..=BEFORE + AFTER).map(|step| Ok(rank.step(step)?.0));
        let losses = losses.collect::<Result<_, ShardError>>()?;
        saver.settle(rank.engine())?;
        Ok::<_, TrainError>((known, losses))
    });
    run.same_on_all(known.unwrap_or_else(|error| panic!("{}: {error}", run.name())))
}

fn load(run: &Run, path: &Path, rule: &Gram, allowed: &[&str]) -> Result<Known, String> {
    let allowed: Vec<_> = allowed.iter().map(|name| (*name).to_owned()).collect();
    let known = run.try_on_ranks(|world| {
        let rank = Rank::with_optimizer(run, world, optimizer(rule))?;
        let checkpoint = Checkpoint::open(path)?;
        checkpoint.reader().load_weights(rank.engine(), &AllowMissing::default())?;
        let allowed = AllowMissing::new(&allowed).expect("patterns");
        checkpoint.reader().load_optimizer(rank.engine(), &allowed)?;
        let known = values(&rank)?;
        if rule.without != GRAM.without {
            return Ok((known, Vec::new()));
        }
        let losses = (BEFORE + 1..=BEFORE + AFTER).map(|step| Ok(rank.step(step)?.0));
        Ok::<_, TrainError>((known, losses.collect::<Result<_, ShardError>>()?))
    });
    known.map(|known| run.same_on_all(known)).map_err(|error| error.to_string())
}

fn run(strategy: Strategy, ranks: usize) -> Run {
    let run = Run::new(strategy, ranks);
    if strategy.is_hybrid() { run.shard_size(2) } else { run }
}

fn train(run: &Run) -> Trace {
    let traces = run.on_ranks(|world| {
        let rank = start(run, world)?;
        let trace = rank.train()?;
        assert_eq!(rank.engine().pinned_groups(), Vec::<String>::new(), "pinned");
        Ok(trace)
    });
    run.same_on_all(traces)
}

#[test]
fn strategies_agree_bit_for_bit() {
    for ranks in [2, 3, 4] {
        let first = train(&run(Strategy::FullShard, ranks));
        for strategy in [Strategy::ShardGradOp, Strategy::NoShard] {
            assert!(train(&run(strategy, ranks)) == first, "{strategy} on {ranks} ranks");
        }
    }
    let hybrid = train(&run(Strategy::HybridShard, 4));
    assert!(train(&run(Strategy::HybridShardGradOp, 4)) == hybrid);
    assert_scalars_close("hybrid", &hybrid.losses, &train(&run(Strategy::FullShard, 4)).losses);
}

#[test]
fn any_arrangement_resumes_any_other() {
    let arrangements = [
        (Strategy::FullShard, 1),
        (Strategy::FullShard, 3),
        (Strategy::ShardGradOp, 4),
        (Strategy::NoShard, 3),
        (Strategy::HybridShard, 4),
    ];
    for (at, (strategy, ranks)) in arrangements.into_iter().enumerate() {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let format = if at.is_multiple_of(2) { Format::Sharded } else { Format::Full };
        let (known, losses) = save(&run(strategy, ranks), folder.path(), format);
        for (name, columns) in
            [("layers.0.attention.q_proj.weight", 16), ("layers.1.ffn.down_proj.weight", 24)]
        {
            assert_eq!(
                known[4].get(name).map(Vec::len),
                Some(columns * columns),
                "{name} {:?}",
                known[4].keys()
            );
        }
        let path = Checkpoint::open(folder.path()).expect("a checkpoint").folder().to_owned();
        // Each save is loaded by itself and two others.
        for (other, other_ranks) in (at..at + 3).map(|at| arrangements[at % arrangements.len()]) {
            let what = format!("{strategy} on {ranks} to {other} on {other_ranks}");
            let (found, next) = load(&run(other, other_ranks), &path, &GRAM, &[]).expect(&what);
            assert!(found == known, "{what}");
            let is_alike = (other, other_ranks) == (strategy, ranks)
                || (other_ranks == ranks && !other.is_hybrid() && !strategy.is_hybrid());
            match is_alike {
                true => assert_eq!(next, losses, "{what}"),
                false => assert_scalars_close(&what, &next, &losses),
            }
        }
    }
}

#[test]
fn conversion_writes_the_files_of_a_run() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let at = |name: &str| folder.path().join(name);
    for (name, strategy, format) in [
        ("sharded", Strategy::FullShard, Format::Sharded),
        ("none", Strategy::NoShard, Format::Sharded),
        ("full", Strategy::FullShard, Format::Full),
    ] {
        save(&run(strategy, 3), &at(name), format);
    }
    let open = |name: &str| Checkpoint::open(&at(name)).expect("a checkpoint");
    let contents = |name: &str| {
        let entries = std::fs::read_dir(open(name).folder()).expect("a folder").flatten();
        let file =
            |entry: std::fs::DirEntry| (entry.file_name(), std::fs::read(entry.path()).expect("a file"));
        let mut files: Vec<_> = entries.map(file).collect();
        files.sort();
        files
    };
    let convert = |from: &str, to: &str, format, ranks| {
        convert(&open(from), &at(to), format, ranks, &Meter::default()).expect("converts");
        assert!(verify(&open(to)).problems.is_empty());
    };
    assert!(contents("none") == contents("sharded"), "strategies");
    convert("sharded", "a", Format::Full, 1);
    assert!(contents("a") == contents("full"));
    convert("a", "b", Format::Sharded, 5);
    convert("b", "c", Format::Sharded, 3);
    assert!(contents("c") == contents("sharded"));
    let manifest = open("sharded").manifest().clone();
    assert_eq!(manifest.optimizer.to_string(), "gram (state momentum, exp_avg, exp_avg_sq, gram, count)");
    let name = "layers.1.ffn.down_proj.weight";
    let gram =
        |tensor: &&kiln::checkpoint::TensorEntry| tensor.name == name && tensor.saved.slot() == Some("gram");
    let gram = manifest.tensors.iter().find(gram).expect("saved");
    assert_eq!((gram.shape.as_slice(), gram.chunks.len()), (&[24, 24][..], 1));
}

/// No state is made up for parameters that had none, unless that is allowed.
#[test]
fn absent_slots_are_refused() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let run = run(Strategy::FullShard, 2);
    save(&run, folder.path(), Format::Sharded);
    let path = Checkpoint::open(folder.path()).expect("a checkpoint").folder().to_owned();
    let with_all = Gram { without: 0, ..GRAM };
    let error = load(&run, &path, &with_all, &[]).expect_err("absent");
    assert!(error.contains("no optimizer state for layers.0.attention.k_proj.weight.gram"), "{error}");
    let allowed = ["*.k_proj.weight", "*.v_proj.weight"];
    let (values, _) = load(&run, &path, &with_all, &allowed).expect("allowed");
    assert!(values[4]["layers.0.attention.k_proj.weight"] == vec![0.0; 16 * 16]);
    assert!(values[4]["layers.0.attention.q_proj.weight"].iter().any(|value| *value != 0.0));
}

#[test]
fn faults_of_a_rule_are_named() {
    let run = run(Strategy::FullShard, 2);
    let error = |fault| {
        let rule = Gram { fault: Some(fault), ..GRAM };
        let outcome =
            run.try_on_ranks(|world| Rank::with_optimizer(&run, world, optimizer(&rule))?.step(1).map(drop));
        outcome.expect_err("a fault").to_string()
    };
    for (fault, expected) in [
        ("slot", "its slot `count` has the shape [1, 1, 2] instead of [1, 1, 3]"),
        ("update", "it has the shape [1, 1, 1], and its matrices [1, "),
        ("name", "two kinds of slots called `momentum`"),
    ] {
        let error = error(fault);
        assert!(error.contains(expected), "{error}");
    }
}
