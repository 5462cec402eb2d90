//! Damage of every kind at random places: each damage is noticed before a weight is used.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kiln::checkpoint::{Checkpoint, CheckpointState, Format, Keep, SaveContext, SaveOptions, Saver, verify};
use kiln::run::TrainError;
use kiln::weights::AllowMissing;
use kiln_model::Key;
use kiln_shard::Strategy;

use crate::support::{Rank, Run};

/// Number of damages per format.
const DAMAGES: u64 = 250;

fn small() -> Run {
    let mut run = Run::new(Strategy::FullShard, 2);
    run.model.layers = 2;
    run
}

/// Returns a checkpoint with a tokenizer and a configuration, after one step.
fn saved(folder: &Path, format: Format) -> PathBuf {
    let run = small();
    let tokenizer = ("tokenizer.json".to_owned(), br#"{"a": 1, "b": 2}"#.as_slice().into());
    let folders = run.try_on_ranks(|world| {
        let rank = Rank::start(&run, world)?;
        rank.step(1)?;
        let options = SaveOptions {
            folder: folder.join("checkpoints"),
            format,
            background: false,
            keep: Keep::default(),
            timeout: Duration::from_secs(600),
            held: None,
        };
        let mut saver = Saver::new(options, rank.engine().world().rank());
        let state = CheckpointState {
            step: 1,
            skipped: 0,
            loss_scale: None,
            next_sample: 96,
            tokens: 576,
            seed: 1,
            model: run.model.clone(),
            context_length: 6,
            data_sha256: None,
        };
        let config = Some("[train]\nsteps = 1\n".to_owned());
        let context = SaveContext { config, files: vec![tokenizer.clone()], ..SaveContext::new(state) };
        Ok::<_, TrainError>(saver.begin(rank.engine(), context)?.expect("it is complete"))
    });
    folders.unwrap_or_else(|error| panic!("{error}")).swap_remove(0)
}

/// Loads the whole checkpoint on `ranks` ranks, and takes one step.
fn load(path: &Path, ranks: usize) -> Result<(), String> {
    let run = Run { ranks, ..small() };
    let loaded = run.try_on_ranks(|world| {
        let checkpoint = Checkpoint::open(path)?;
        let rank = Rank::start(&run, world)?;
        checkpoint.reader().load_weights(rank.engine(), &AllowMissing::default())?;
        checkpoint.reader().load_optimizer(rank.engine(), &AllowMissing::default())?;
        Ok::<_, TrainError>(())
    });
    loaded.map(drop).map_err(|error| error.to_string())
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> =
        fs::read_dir(folder).expect("a folder").flatten().map(|entry| entry.path()).collect();
    files.sort();
    files
}

fn copy(from: &Path, to: &Path) {
    let _ = fs::remove_dir_all(to);
    fs::create_dir(to).expect("a folder");
    for file in files(from) {
        fs::copy(&file, to.join(file.file_name().expect("a name"))).expect("a copy");
    }
}

/// Damages the checkpoint in `folder`. Returns a description and the files that the error may name.
fn damage(folder: &Path, random: Key) -> (String, Vec<PathBuf>) {
    let files = files(folder);
    let pick = |what: u64, below: u64| random.at(what) % below;
    let file = files[pick(1, files.len() as u64) as usize].clone();
    let mut bytes = fs::read(&file).expect("a file");
    let length = bytes.len() as u64;
    let name = file.file_name().expect("a name").to_string_lossy().into_owned();
    match pick(0, 10) {
        0..6 => {
            let (at, bit) = (pick(2, length), pick(3, 8));
            bytes[at as usize] ^= 1 << bit;
            fs::write(&file, bytes).expect("a file");
            (format!("bit {bit} of byte {at} of {name}"), vec![file])
        }
        6 | 7 => {
            let to = pick(2, length);
            fs::write(&file, &bytes[..to as usize]).expect("a file");
            (format!("{name} cut to {to} bytes"), vec![file])
        }
        8 => {
            let other = files[pick(2, files.len() as u64) as usize].clone();
            let other = if other == file {
                files[(pick(2, files.len() as u64) as usize + 1) % files.len()].clone()
            } else {
                other
            };
            fs::write(&file, fs::read(&other).expect("a file")).expect("a file");
            fs::write(&other, bytes).expect("a file");
            (format!("{name} and {} swapped", other.display()), vec![file, other])
        }
        _ => {
            fs::remove_file(&file).expect("a file");
            (format!("{name} removed"), vec![file])
        }
    }
}

fn every_damage_is_noticed(format: Format) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let whole = saved(folder.path(), format);
    let broken = folder.path().join("broken");
    for ranks in [1, 2, 3] {
        load(&whole, ranks).expect("it loads while it is complete");
    }
    let key = Key::new(20).fork(&format.to_string());
    for index in 0..DAMAGES {
        copy(&whole, &broken);
        let (what, named) = damage(&broken, key.fork_index(index));
        let error = load(&broken, 1 + index as usize % 3).expect_err(&what);
        let names = |path: &PathBuf| {
            let name = path.file_name().expect("a name").to_string_lossy();
            // If the folder is no longer a checkpoint, the error can name only the missing file.
            error.contains(&*name)
        };
        assert!(named.iter().any(names), "{what}: {error}");
        // Verifying every byte finds a problem too.
        match Checkpoint::open(&broken) {
            Ok(checkpoint) => assert!(!verify(&checkpoint).problems.is_empty(), "{what}"),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }
}

#[test]
fn every_damage_to_a_sharded_checkpoint_is_noticed() {
    every_damage_is_noticed(Format::Sharded);
}

#[test]
fn every_damage_to_a_full_checkpoint_is_noticed() {
    every_damage_is_noticed(Format::Full);
}

/// A weight and a moment have the same shape, and so have the parts of two ranks, so their files could be confused.
#[test]
fn files_of_equal_length_cannot_stand_in_for_each_other() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let whole = saved(folder.path(), Format::Sharded);
    let broken = folder.path().join("broken");
    let files: Vec<_> = files(&whole)
        .into_iter()
        .filter(|file| file.extension().is_some_and(|extension| extension == "safetensors"))
        .collect();
    assert_eq!(files.len(), 4);
    for from in &files {
        for to in files.iter().filter(|to| *to != from) {
            copy(&whole, &broken);
            let place = broken.join(to.file_name().expect("a name"));
            fs::copy(from, &place).expect("a copy");
            let error = load(&broken, 2).expect_err("it is another file");
            assert!(error.contains(&place.display().to_string()), "{error}");
        }
    }
}
