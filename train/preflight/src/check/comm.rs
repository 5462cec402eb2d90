//! The stage `comm`: agreement between processes. Compares arguments, clocks, data, folders and devices, and
//! measures every link of the ring of ranks.

use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kiln_collectives::{Communicator, Label, Phase};
use kiln_shard::ShardError;
use sha2::{Digest, Sha256};

use super::links;
use super::machine::{PREFIX, Setup, nearest};
use super::report::{Checks, Stage};
use kiln_config::{Backend, Config};
use kiln_launch::place::RankEnv;
use kiln_train::error::Result;
use kiln_train::run::RunOptions;
use kiln_train::world::{self, Ranks, World};

const COMM: Stage = Stage::Comm;

/// Number of rounds in which clocks are compared; the quickest round counts.
const ROUNDS: usize = 8;

/// Clock differences, in seconds, above which the check warns and fails. A run does not depend on the clocks,
/// but comparing logs of two machines does.
const CLOCK: [f64; 2] = [1.0, 30.0];

/// Longest time until a new file must be visible on another machine. Its name was never looked up before, so
/// no cache holds its absence.
const SEEN: Duration = Duration::from_secs(2);

/// Interval between attempts to see the file.
const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Number of bytes read at each of three places of a token file to distinguish copies.
const SAMPLE: usize = 1 << 16;

/// Compares this rank with the others. `ahead` is an error in seconds to add to its clock, for a drill.
/// Collective: every rank calls it, whatever its earlier checks found.
pub(super) fn examine(
    setup: &Setup,
    world: &dyn Communicator,
    ahead: f64,
    checks: &mut Checks,
) -> Result<()> {
    let Setup { config, options, .. } = setup;
    let timeout = config.comm.timeout();
    same(
        world,
        COMM,
        "arguments",
        &arguments(config, options),
        timeout,
        checks,
        [
            "this rank has other arguments, another configuration or another build than rank 0",
            "start every rank with the same command",
        ],
    )?;
    clocks(world, ahead, timeout, checks)?;
    let section = &config.data;
    let print = fingerprint(&section.path);
    let differ = format!("the data in {} are not those of rank 0", section.path.display());
    same(
        world,
        COMM,
        "data",
        &print,
        timeout,
        checks,
        [
            &differ,
            "copy the folder of rank 0's machine to all others, or put it on a file system that all of them share",
        ],
    )?;
    for (what, folder) in [
        ("checkpoint", setup.resume.clone()),
        // A resumed run does not read it.
        ("init.from", config.init_from().filter(|_| setup.resume.is_none()).map(Path::to_owned)),
    ] {
        let differ = "what this rank would start from is not what rank 0 would";
        let mend = "put the checkpoint on a file system that all machines share, or copy it to all of them";
        let told = folder.as_deref().map_or_else(String::new, checkpoint_print);
        // Reported only if at least one rank has such a value.
        if any(world, what, !told.is_empty(), timeout)? {
            same(world, COMM, what, &told, timeout, checks, [differ, mend])?;
        }
    }
    let out = setup.out.as_ref().map(|(named, _)| nearest(named).to_owned());
    shared(world, "run folder", out, timeout, checks, "name one with --out")?;
    let is_prepared_later = !section.text.is_empty() && !section.path.join("data.json").exists();
    if any(world, "data folder", is_prepared_later, timeout)? {
        let folder = nearest(&section.path).to_owned();
        shared(world, "data folder", Some(folder), timeout, checks, "name one with data.path")?;
    }
    links::examine(world, timeout, checks)?;
    Ok(())
}

/// Connects to the other processes. Returns `None` on failure, which the others notice.
pub(super) fn meet<'a>(setup: &Setup, place: &'a RankEnv, checks: &mut Checks) -> Option<Ranks<'a>> {
    let ranks = checks.take(COMM, "meeting", Ranks::join(&setup.config, Some(place)))?;
    checks.ok(COMM, "meeting", format!("all {} ranks have come", place.world_size));
    Some(ranks)
}

/// Prepares the ranks to use their GPUs together. Collective.
pub(super) fn devices(
    setup: &Setup,
    met: &World,
    world: &dyn Communicator,
    checks: &mut Checks,
) -> Result<()> {
    let Setup { config, device, .. } = setup;
    // A rank without a device cannot take part in the collectives below.
    let is_missing = any(world, "devices", device.is_none(), config.comm.timeout())?;
    let Some(device) = device.as_ref().filter(|_| !is_missing) else { return Ok(()) };
    if config.device.backend != Backend::Cpu
        && checks.take(COMM, "devices", met.settle_on(device, &config.comm)).is_some()
    {
        checks.ok(COMM, "devices", format!("they go together, over {}", met.communicator().backend()));
    }
    Ok(())
}

/// Returns `true` if `here` is set on any rank. Collective.
fn any(world: &dyn Communicator, what: &'static str, here: bool, timeout: Duration) -> Result<bool> {
    Ok(world::gather(world, what, &[u8::from(here)], timeout)?.iter().any(|told| *told == [1]))
}

/// The arguments that must be the same on all ranks.
fn arguments(config: &Config, options: &RunOptions) -> String {
    let RunOptions { out, resume, allow_missing, allow_other_parts, allow_changed, .. } = options;
    format!(
        "{} {config:?} {out:?} {resume:?} {:?} {allow_other_parts} {allow_changed:?}",
        env!("CARGO_PKG_VERSION"),
        allow_missing.patterns()
    )
}

/// Compares a text with rank 0's. `problem` is the message and the fix to report if they differ. Collective.
fn same(
    world: &dyn Communicator,
    stage: Stage,
    what: &'static str,
    told: &str,
    timeout: Duration,
    checks: &mut Checks,
    problem: [&str; 2],
) -> Result<()> {
    let all = world::gather(world, what, &Sha256::digest(told), timeout)?;
    match all[world.rank()] == all[0] {
        true => checks.ok(stage, what, "the same on all ranks"),
        false => checks.fail(stage, what, problem[0], problem[1]),
    }
    Ok(())
}

/// Compares this rank's clock with rank 0's. Collective.
///
/// A rank reads its clock between a barrier and a gather. Rank 0 reads its own before the barrier and after
/// the gather, so the other reading lies between the two: at their midpoint, plus or minus half their
/// distance.
fn clocks(world: &dyn Communicator, ahead: f64, timeout: Duration, checks: &mut Checks) -> Result<()> {
    let wall = || {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        since.as_secs_f64() + ahead
    };
    let (mut difference, mut within) = (0.0, f64::INFINITY);
    for _ in 0..ROUNDS {
        let before = wall();
        let barrier = world.barrier(Label::new("clock", Phase::Init));
        barrier.wait(timeout).map_err(ShardError::from)?;
        let mine = wall();
        let looks = world::gather(world, "clock", &mine.to_le_bytes(), timeout)?;
        let after = wall();
        let told = [before, after].map(f64::to_le_bytes).concat();
        let told = world::gather(world, "clock of rank 0", &told, timeout)?;
        let number = |bytes: &[u8]| f64::from_le_bytes(bytes.try_into().unwrap_or_default());
        let (before, after) = told[0].split_at(8);
        let (before, after, mine) = (number(before), number(after), number(&looks[world.rank()]));
        if after - before < within {
            (difference, within) = (mine - (before + after) / 2.0, after - before);
        }
    }
    let (off, half) = (difference.abs(), within / 2.0);
    let surely = off - half;
    let way = if difference > 0.0 { "ahead of" } else { "behind" };
    let detail = format!("this rank's clock is {off:.1} s {way} rank 0's, give or take {half:.1} s");
    let mend = "let a time service set the clocks of all machines, such as chronyd";
    match surely {
        surely if surely > CLOCK[1] => checks.fail(COMM, "clock", detail, mend),
        surely if surely > CLOCK[0] => checks.warn(COMM, "clock", detail, mend),
        _ => checks.ok(COMM, "clock", "within a second of rank 0's"),
    }
    Ok(())
}

/// Fingerprint of a folder of data that does not read all of it.
fn fingerprint(folder: &Path) -> String {
    let mut print = String::new();
    for name in ["data.json", "tokenizer.json"] {
        let content = fs::read(folder.join(name)).unwrap_or_default();
        let _ = write!(print, "{name} {:x} ", Sha256::digest(content));
    }
    for name in ["train.bin", "val.bin"] {
        let Ok(file) = File::open(folder.join(name)) else { continue };
        let bytes = file.metadata().map_or(0, |found| found.len());
        let mut digest = Sha256::new();
        for place in [0, bytes / 2, bytes.saturating_sub(SAMPLE as u64)] {
            let mut sample = vec![0; SAMPLE];
            let read = file.read_at(&mut sample, place).unwrap_or_default();
            digest.update(&sample[..read]);
        }
        let _ = write!(print, "{name} {bytes} {:x} ", digest.finalize());
    }
    print
}

/// Fingerprint of a checkpoint: the hashes of its list of contents.
fn checkpoint_print(folder: &Path) -> String {
    let found = kiln_checkpoint::Checkpoint::find(folder).unwrap_or_else(|_| folder.to_owned());
    let list = ["manifest.json", "config.json", "model.safetensors.index.json"];
    let print = |name: &str| format!("{:x} ", Sha256::digest(fs::read(found.join(name)).unwrap_or_default()));
    list.map(print).concat()
}

/// Checks that this rank sees in `folder` what rank 0 has just written there. Collective.
fn shared(
    world: &dyn Communicator,
    what: &'static str,
    folder: Option<PathBuf>,
    timeout: Duration,
    checks: &mut Checks,
    mend: &str,
) -> Result<()> {
    // Dropping this deletes the file.
    let (mut written, mut reason) = (None, String::new());
    if let Some(folder) = folder.filter(|_| world.rank() == 0) {
        match write(&folder) {
            Ok(file) => written = Some((file, folder)),
            Err(error) => reason = format!(" ({}: {error})", folder.display()),
        }
    }
    // Uses the folder's name on rank 0: on other machines, the same option may resolve to another folder.
    let told = written.as_ref().map(|((file, nonce), folder)| (folder, file.path().file_name(), nonce));
    let told = serde_json::to_vec(&(told, reason)).unwrap_or_default();
    let told = world::gather(world, what, &told, timeout)?;
    let told: (Option<(PathBuf, OsString, String)>, String) =
        serde_json::from_slice(&told[0]).unwrap_or_default();
    match told {
        (None, reason) => checks.skip(COMM, &format!("a {what} in which rank 0 can write{reason}")),
        _ if world.rank() == 0 => {}
        (Some((folder, name, nonce)), _) => {
            let shown = folder.display();
            match sees(&folder.join(name), &nonce) {
                true => checks.ok(COMM, what, format!("what rank 0 writes to {shown} is seen here")),
                false => checks.fail(
                    COMM,
                    what,
                    format!("what rank 0 has just written to {shown} is not seen here"),
                    format!("use a folder that all machines share, under the same path: {mend}"),
                ),
            }
        }
    }
    // Keeps the file until all ranks have looked.
    let barrier = world.barrier(Label::new(what, Phase::Init));
    barrier.wait(timeout).map_err(ShardError::from)?;
    drop(written);
    Ok(())
}

/// Creates a file in `folder` with random content.
fn write(folder: &Path) -> std::io::Result<(tempfile::NamedTempFile, String)> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(|error| std::io::Error::other(error.to_string()))?;
    let nonce = format!("{:032x}", u128::from_be_bytes(random));
    let mut file = tempfile::Builder::new().prefix(PREFIX).tempfile_in(folder)?;
    file.write_all(nonce.as_bytes())?;
    file.as_file().sync_all()?;
    Ok((file, nonce))
}

/// Waits for the file to become visible. Returns `false` if it does not.
fn sees(path: &Path, nonce: &str) -> bool {
    let until = Instant::now() + SEEN;
    loop {
        if fs::read(path).is_ok_and(|content| content == nonce.as_bytes()) {
            return true;
        }
        // If the folder does not exist, waiting for caches does not help.
        if Instant::now() >= until || !path.parent().is_some_and(Path::is_dir) {
            return false;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}
