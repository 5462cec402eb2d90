//! A run saved with one arrangement of ranks resumes with any other.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kiln::checkpoint::{
    Checkpoint, CheckpointError, CheckpointState, Format, Keep, Progress, SaveContext, SaveOptions, Saver,
    convert, verify,
};
use kiln::run::TrainError;
use kiln::weights::AllowMissing;
use kiln_collectives::Phase;
use kiln_shard::{Muon, Recompute, StateKind, Strategy};
use kiln_sys::Meter;

use crate::support::{Rank, Run, Values, assert_scalars_close};

const RANKS: [usize; 5] = [1, 2, 3, 4, 8];

const STRATEGIES: [Strategy; 5] = [
    Strategy::FullShard,
    Strategy::ShardGradOp,
    Strategy::NoShard,
    Strategy::HybridShard,
    Strategy::HybridShardGradOp,
];

const RECOMPUTE: [Recompute; 2] = [Recompute::None, Recompute::Block];

const KINDS: [StateKind; 3] = [StateKind::Weight, StateKind::Slot("exp_avg"), StateKind::Slot("exp_avg_sq")];

/// Steps before the checkpoint, and after it.
const BEFORE: u64 = 3;
const AFTER: u64 = 5;

/// The state of a run at its checkpoint, and the losses of the later steps.
#[derive(Clone, PartialEq)]
struct Known {
    state: CheckpointState,
    values: [Values; 3],
    losses: Vec<f64>,
}

fn run(strategy: Strategy, ranks: usize, recompute: Recompute) -> Run {
    let run = Run::new(strategy, ranks).tied(ranks.is_multiple_of(2)).recompute(recompute);
    // Even numbers of ranks form groups of two, odd numbers a single group.
    let shard_size = if ranks.is_multiple_of(2) { 2 } else { ranks };
    if strategy.is_hybrid() { run.shard_size(shard_size) } else { run }
}

/// Gives the model the same shape on both sides, whatever the number of ranks.
fn tied_like(run: Run, other: &Run) -> Run {
    let tied = other.model.tie_embeddings;
    run.tied(tied)
}

fn state(run: &Run, step: u64) -> CheckpointState {
    CheckpointState { seed: 1, ..CheckpointState::new(run.model.clone(), run.seq).at(step, run.batch as u64) }
}

fn values(rank: &Rank<'_>) -> Result<[Values; 3], TrainError> {
    let [weights, first, second] = KINDS.map(|kind| rank.values(kind));
    Ok([weights?, first?, second?])
}

/// Trains, saves, and continues training while the checkpoint is being written.
fn save(run: &Run, folder: &Path, format: Format, background: bool) -> Known {
    let known = run.try_on_ranks(|world| {
        let rank = Rank::start(run, world)?;
        for step in 1..=BEFORE {
            rank.step(step)?;
        }
        let options = SaveOptions { folder: folder.to_owned(), format, background, ..options() };
        let mut saver = Saver::new(options, rank.engine().world().rank());
        let state = state(run, BEFORE);
        let context = SaveContext::new(state.clone());
        saver.begin(rank.engine(), context)?;
        let values = if background { None } else { Some(values(&rank)?) };
        let steps = (BEFORE + 1..=BEFORE + AFTER).map(|step| Ok(rank.step(step)?.0));
        let losses = steps.collect::<Result<_, TrainError>>()?;
        saver.settle(rank.engine())?;
        Ok::<_, TrainError>((state, values, losses))
    });
    let known = known.unwrap_or_else(|error| panic!("{}: {error}", run.name()));
    let (state, values, losses) = run.same_on_all(known);
    // A save in the background must have the values of a run that stopped at the checkpoint.
    let values = values.unwrap_or_else(|| stopped(run));
    Known { state, values, losses }
}

fn options() -> SaveOptions {
    SaveOptions {
        folder: PathBuf::new(),
        format: Format::Sharded,
        background: true,
        keep: Keep::default(),
        timeout: Duration::from_secs(600),
        held: None,
    }
}

/// Returns the values of a run that stops at the step of the checkpoint.
fn stopped(run: &Run) -> [Values; 3] {
    let all = run.try_on_ranks(|world| {
        let rank = Rank::start(run, world)?;
        for step in 1..=BEFORE {
            rank.step(step)?;
        }
        values(&rank)
    });
    run.same_on_all(all.unwrap_or_else(|error| panic!("{}: {error}", run.name())))
}

/// Loads a checkpoint and trains on. Returns the loaded values and the losses, and how many bytes all ranks
/// together have read.
fn load(run: &Run, path: &Path) -> (Known, u64) {
    let known = run.try_on_ranks(|world| {
        let rank = Rank::start(run, world)?;
        let checkpoint = Checkpoint::open(path)?;
        let (reader, none) = (checkpoint.reader(), AllowMissing::default());
        reader.load_weights(rank.engine(), &none)?;
        reader.load_optimizer(rank.engine(), &none)?;
        let values = values(&rank)?;
        let steps = (BEFORE + 1..=BEFORE + AFTER).map(|step| Ok(rank.step(step)?.0));
        let losses = steps.collect::<Result<_, TrainError>>()?;
        let known = Known { state: checkpoint.state().clone(), values, losses };
        let bytes = rank.engine().sum_over_ranks("bytes", &[reader.bytes_read() as f64])?[0];
        Ok::<_, TrainError>((known, bytes as u64))
    });
    run.same_on_all(known.unwrap_or_else(|error| panic!("{}: {error}", run.name())))
}

/// Returns the bytes of all weights and moments.
fn data_bytes(run: &Run) -> u64 {
    3 * 4 * burn::module::Module::num_params(&run.decoder(&burn::tensor::Device::flex())) as u64
}

/// Saves with one arrangement and loads with those that `loads` accepts.
fn check(
    index: usize,
    strategy: Strategy,
    ranks: usize,
    loads: impl Fn(usize, Strategy, Recompute) -> bool,
) -> usize {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let saved = run(strategy, ranks, RECOMPUTE[index % 2]);
    let format = if index.is_multiple_of(3) { Format::Full } else { Format::Sharded };
    let known = save(&saved, folder.path(), format, index % 4 < 2);
    let mut count = 0;
    for other_ranks in RANKS {
        for other in STRATEGIES {
            for recompute in RECOMPUTE {
                if !loads(other_ranks, other, recompute) {
                    continue;
                }
                let loaded = tied_like(run(other, other_ranks, recompute), &saved);
                let what = format!("{} to {}", saved.name(), loaded.name());
                let (found, bytes) = load(&loaded, folder.path());
                assert!(found.state == known.state, "{what}: state");
                for (kind, (found, known)) in found.values.iter().zip(&known.values).enumerate() {
                    assert!(found == known, "{what}: {:?}", KINDS[kind]);
                }
                // The bits are equal if the sums have the same order.
                let alike = (other == strategy && other_ranks == ranks)
                    || (other_ranks == ranks && !other.is_hybrid() && !strategy.is_hybrid());
                if alike {
                    assert!(found.losses == known.losses, "{what}: {:?}", found.losses);
                } else {
                    assert_scalars_close(&what, &found.losses, &known.losses);
                }
                // If all ranks together hold one copy of the model, every byte is read once.
                let copies = match other {
                    Strategy::NoShard => other_ranks,
                    other if other.is_hybrid() => other_ranks / loaded.shard_size.unwrap_or(other_ranks),
                    _ => 1,
                };
                assert_eq!(bytes, copies as u64 * data_bytes(&loaded), "{what}: bytes read");
                count += 1;
            }
        }
    }
    count
}

/// From every number of ranks to every other, with every strategy on both sides.
#[test]
fn any_arrangement_goes_on_where_another_stopped() {
    let mut count = 0;
    for (at, ranks) in RANKS.into_iter().enumerate() {
        let index = at * 3;
        // Each number of ranks saves with two strategies, and every number loads each save.
        for shift in [0, 2] {
            let strategy = STRATEGIES[(at + shift) % 5];
            count += check(index + shift, strategy, ranks, |other_ranks, other, recompute| {
                let place = RANKS.iter().position(|n| *n == other_ranks).unwrap_or(0);
                other == STRATEGIES[(place + at + shift * 2) % 5]
                    && recompute == RECOMPUTE[(place + at + shift / 2) % 2]
            });
        }
    }
    assert_eq!(count, 50);
}

#[test]
#[ignore = "takes minutes: cargo test --release -p kiln --test sharding -- --ignored"]
fn all_arrangements_go_on_where_any_other_stopped() {
    let mut count = 0;
    for (index, (ranks, strategy)) in
        RANKS.into_iter().flat_map(|n| STRATEGIES.map(|strategy| (n, strategy))).enumerate()
    {
        count += check(index, strategy, ranks, |_, _, _| true);
        println!("{strategy} on {ranks} ranks: {count} loads so far");
    }
    assert_eq!(count, 25 * 50);
}

/// The same weights give the same files, however they are sharded. The files have the optimizer's name, which the
/// engine provides.
#[test]
fn the_state_of_any_optimizer_is_saved() {
    for format in [Format::Sharded, Format::Full] {
        let folder = tempfile::tempdir().unwrap();
        let run = Run { muon: Some(Muon::default()), ..Run::new(Strategy::FullShard, 2) };
        let saved = run.try_on_ranks(|world| {
            let rank = Rank::start(&run, world)?;
            rank.step(1)?;
            let options = SaveOptions { folder: folder.path().to_owned(), format, ..options() };
            let mut saver = Saver::new(options, rank.engine().world().rank());
            saver.begin(rank.engine(), SaveContext::new(state(&run, 1)))?;
            saver.settle(rank.engine())?;
            Ok::<_, TrainError>(())
        });
        saved.unwrap_or_else(|error| panic!("{}: {error}", run.name()));
        let checkpoint = Checkpoint::open(&folder.path().join("fsdp_cpt1")).unwrap();
        let optimizer = checkpoint.manifest().optimizer.to_string();
        assert_eq!(optimizer, "muon (state exp_avg, exp_avg_sq, momentum_buffer)");
        let slots = checkpoint
            .manifest()
            .tensors
            .iter()
            .filter(|tensor| tensor.saved == "momentum_buffer".to_owned().into());
        assert!(slots.count() > 0);
    }
}

#[test]
fn strategies_write_the_same_bytes() {
    let files = |strategy: Strategy| {
        let folder = tempfile::tempdir().expect("a temporary folder");
        save(&run(strategy, 4, Recompute::None), folder.path(), Format::Sharded, false);
        contents(&Checkpoint::open(folder.path()).expect("a checkpoint"))
    };
    let full = files(Strategy::FullShard);
    assert_eq!(full.len(), 4 + 4 + 1, "{:?}", full.iter().map(|(name, _)| name).collect::<Vec<_>>());
    for strategy in [Strategy::ShardGradOp, Strategy::NoShard] {
        assert!(files(strategy) == full, "{strategy}");
    }
}

/// Returns all files of a checkpoint.
fn contents(checkpoint: &Checkpoint) -> Vec<(String, Vec<u8>)> {
    let entries = std::fs::read_dir(checkpoint.folder()).expect("a folder").flatten();
    let mut files: Vec<_> = entries
        .map(|entry| {
            let name = entry.file_name().into_string().expect("a name");
            (name, std::fs::read(entry.path()).expect("a file"))
        })
        .collect();
    files.sort();
    files
}

/// A converted checkpoint equals the one that a run of that format would have written.
#[test]
fn converted_checkpoints_are_those_of_a_run() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let at = |name: &str| folder.path().join(name);
    for (name, ranks, format) in
        [("sharded3", 3, Format::Sharded), ("sharded4", 4, Format::Sharded), ("full3", 3, Format::Full)]
    {
        let run = run(Strategy::FullShard, ranks, Recompute::None).tied(false);
        save(&run, &at(name), format, false);
    }
    let open = |name: &str| Checkpoint::open(&at(name)).expect("a checkpoint");
    let convert = |from: &str, to: &str, format, ranks| {
        convert(&open(from), &at(to), format, ranks, &Meter::default()).expect("converts");
        assert!(verify(&open(to)).problems.is_empty());
        contents(&open(to))
    };
    assert!(convert("sharded3", "a", Format::Full, 1) == contents(&open("full3")));
    assert!(convert("full3", "b", Format::Sharded, 3) == contents(&open("sharded3")));
    // Runs on three and on four ranks differ by rounding, but converting there and back is exact.
    let four = convert("a", "c", Format::Sharded, 4);
    assert_eq!(four.len(), contents(&open("sharded4")).len());
    assert!(convert("c", "d", Format::Sharded, 3) == contents(&open("sharded3")));
    let again = kiln::checkpoint::convert(&open("c"), &at("d"), Format::Full, 1, &Meter::default());
    assert!(again.is_err(), "exists");
}

/// Later steps do not change a saved file, whatever they change and whenever the file is written.
#[test]
fn later_steps_do_not_reach_a_snapshot() {
    let run = run(Strategy::FullShard, 2, Recompute::None);
    let on_all = run.on_ranks(|world| {
        let rank = Rank::start(&run, world)?;
        rank.step(1)?;
        let groups = rank.engine().layout().groups.len();
        let mut snapshot = rank.engine().snapshot();
        let read = |snapshot: &kiln_shard::Snapshot| -> Vec<Vec<f32>> {
            let all = (0..groups).flat_map(|group| KINDS.map(|kind| (group, kind)));
            all.map(|(group, kind)| snapshot.values(group, kind).expect("f32").expect("values").to_vec())
                .collect()
        };
        let before = read(&snapshot);
        // Releases one tensor, which the next step then changes in place; the other tensors are copied.
        snapshot.release(1, StateKind::Weight);
        assert_eq!(snapshot.values(1, StateKind::Weight), Ok(None));
        let (group, kinds) = (3, KINDS.len());
        rank.step(2)?;
        for (at, kind) in KINDS.into_iter().enumerate() {
            let values = snapshot.values(group, kind).expect("f32").expect("values");
            assert!(values == before[group * kinds + at], "{kind:?}");
        }
        // Small groups may lie entirely on the other rank; padding stays zero.
        let after = read(&rank.engine().snapshot());
        let moved = |(after, before): (&Vec<f32>, &Vec<f32>)| {
            after != before || before.iter().all(|value| *value == 0.0)
        };
        assert!(after.iter().zip(&before).all(moved));
        Ok(())
    });
    assert_eq!(on_all.len(), 2);
}

/// Only weights that the caller names may be missing, and existing weights must have the right shape.
#[test]
fn names_are_taken_strictly() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let tied = run(Strategy::FullShard, 2, Recompute::None);
    save(&tied, folder.path(), Format::Sharded, false);
    let outcome = |run: &Run, patterns: &[&str]| {
        let patterns: Vec<_> = patterns.iter().map(|pattern| (*pattern).to_owned()).collect();
        let allow = AllowMissing::new(&patterns).expect("patterns");
        let loaded = run.try_on_ranks(|world| {
            let rank = Rank::start(run, world)?;
            let checkpoint = Checkpoint::open(folder.path())?;
            let absent = checkpoint.reader().load_weights(rank.engine(), &allow)?;
            checkpoint.reader().load_optimizer(rank.engine(), &allow)?;
            rank.step(1)?;
            Ok::<_, TrainError>(absent)
        });
        loaded.map(|mut all| all.swap_remove(0)).map_err(|error| error.to_string())
    };
    let untied = tied.clone().tied(false);
    let error = outcome(&untied, &[]).expect_err("a missing weight");
    assert!(error.contains("missing [lm_head.weight]") && error.contains("--allow-missing"), "{error}");
    let error = outcome(&untied, &["lm_head.bias"]).expect_err("a missing weight");
    assert!(error.contains("missing [lm_head.weight]"), "{error}");
    let absent = outcome(&untied, &["lm_head.*"]).expect("loads");
    assert_eq!(absent.into_iter().collect::<Vec<_>>(), ["lm_head.weight"]);

    let mut fewer = tied.clone();
    fewer.model.layers = 2;
    let error = outcome(&fewer, &["*"]).expect_err("unexpected weights");
    assert!(error.contains("unexpected [layers.2.attention.k_proj.weight, "), "{error}");
    let mut wider = tied.clone();
    wider.model.d_ff = 32;
    let error = outcome(&wider, &["*"]).expect_err("other shapes");
    assert!(error.contains("of another shape [`layers.0.ffn."), "{error}");
    assert!(error.contains("is [16, 24] there and [16, 32] in the model"), "{error}");
}

/// Rank 1 writes to a folder that rank 0 does not see, as on separate file systems or on one that shows files
/// late: this save fails, and the next save is complete.
#[test]
fn a_save_whose_parts_do_not_appear_has_a_deadline() {
    for background in [true, false] {
        let (shared, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::create_dir(elsewhere.path().join(".fsdp_cpt2.partial")).unwrap();
        let run = run(Strategy::HybridShard, 4, Recompute::None);
        let lost = 1;
        let said = run.try_on_ranks(|world| {
            let rank = Rank::start(&run, world)?;
            let (engine, index) = (rank.engine(), rank.engine().world().rank());
            let saver = |folder: &Path, timeout| {
                let folder = folder.to_owned();
                Saver::new(SaveOptions { folder, background, timeout, ..options() }, index)
            };
            let patient = || saver(shared.path(), Duration::from_secs(600));
            rank.step(1)?;
            let mut good = patient();
            good.begin(engine, SaveContext::new(state(&run, 1)))?;
            good.settle(engine)?;

            let folder = if index == lost { elsewhere.path() } else { shared.path() };
            let mut failing = saver(folder, Duration::from_secs(2));
            rank.step(2)?;
            let begun = failing.begin(engine, SaveContext::new(state(&run, 2)));
            assert_eq!(begun.is_ok(), background, "{begun:?}");
            let mut ended = begun.map(drop);
            for step in 3.. {
                if ended.is_err() {
                    break;
                }
                rank.step(step)?;
                let mine = failing.progress().to_values();
                let sums = engine.all_reduce_f64(Phase::Other, "progress", &mine)?;
                let all = Progress::from_values([sums[0], sums[1], sums[2]]);
                ended = failing.advance(engine, all).map(|folder| assert_eq!(folder, None));
            }
            // Nothing remains of the failed save, and the next save is complete.
            let mut next = patient();
            next.begin(engine, SaveContext::new(state(&run, 90)))?;
            next.settle(engine)?;
            Ok::<_, TrainError>(ended.expect_err("it has failed"))
        });
        let said = said.unwrap_or_else(|error| panic!("{error}"));
        match &said[0] {
            CheckpointError::MissingParts { folder, ranks, .. } => {
                assert_eq!(ranks[..], [lost]);
                assert_eq!(folder, &shared.path().join(".fsdp_cpt2.partial"));
            }
            other => panic!("{other:?}"),
        }
        assert!(said[1..].iter().all(CheckpointError::is_consequence), "{said:?}");
        let entries = std::fs::read_dir(shared.path()).unwrap().flatten();
        let mut names: Vec<_> = entries.map(|e| e.file_name().into_string().unwrap()).collect();
        names.sort();
        assert_eq!(names, ["fsdp_cpt1", "fsdp_cpt90", "latest"]);
        for step in [1, 90] {
            let checkpoint = Checkpoint::open(&shared.path().join(format!("fsdp_cpt{step}")));
            assert!(verify(&checkpoint.unwrap()).problems.is_empty());
        }
    }
}
