//! The stage `comm`: checks that all processes agree, and measures every link of the ring of ranks.

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

use super::env::{Setup, nearest};
use super::ring;
use crate::findings::{Findings, Stage};
use kiln_config::{Backend, Config};
use kiln_launch::place::RankEnv;
use kiln_train::error::Result;
use kiln_train::run::{CHECK_PREFIX, RunOptions};
use kiln_train::world::{self, Ranks, World};

const COMM: Stage = Stage::Comm;

const ROUNDS: usize = 8;

/// Clock differences, in seconds, that warn and fail: they matter only for comparing logs of two machines.
const CLOCK: [f64; 2] = [1.0, 30.0];

/// Maximum time until another machine must see a new file, whose name no machine has looked up before.
const SEEN: Duration = Duration::from_secs(2);

const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Bytes read at each of three places of a token file, to detect copies that differ.
const SAMPLE: usize = 1 << 16;

/// Compares this rank with rank 0. A drill adds `ahead` seconds to this rank's clock. Collective.
pub(super) fn examine(
    setup: &Setup,
    world: &dyn Communicator,
    ahead: f64,
    findings: &mut Findings,
) -> Result<()> {
    let Setup { config, options, .. } = setup;
    let timeout = config.comm.timeout();
    let mut comparison = Comparison { world, timeout, findings };
    comparison.same(
        "arguments",
        &arguments(config, options),
        "this rank's arguments, configuration or build differ from those of rank 0",
        "start every rank with the same command",
    )?;
    comparison.clocks(ahead)?;
    let section = &config.data;
    comparison.same(
        "data",
        &fingerprint(&section.path),
        &format!("the data in {} differ from those of rank 0", section.path.display()),
        "copy the folder of rank 0's machine to all others, or put it on a file system that all machines share",
    )?;
    for (subject, folder) in [
        ("checkpoint", setup.resume.clone()),
        ("init.from", config.init_from().filter(|_| setup.resume.is_none()).map(Path::to_owned)),
    ] {
        let print = folder.as_deref().map_or_else(String::new, checkpoint_print);
        if comparison.any(subject, !print.is_empty())? {
            comparison.same(
                subject,
                &print,
                "this rank would start from different weights than rank 0",
                "put the checkpoint on a file system that all machines share, or copy it to all machines",
            )?;
        }
    }
    let out = setup.out.as_ref().map(|(named, _)| nearest(named).to_owned());
    comparison.shared("run folder", out, "name one with --out")?;
    let is_prepared_later = !section.inputs().is_empty() && !section.path.join("data.json").exists();
    if comparison.any("data folder", is_prepared_later)? {
        let folder = nearest(&section.path).to_owned();
        comparison.shared("data folder", Some(folder), "name one with data.path")?;
    }
    ring::examine(world, timeout, findings)
}

pub(super) fn meet<'a>(setup: &Setup, place: &'a RankEnv, findings: &mut Findings) -> Option<Ranks<'a>> {
    let ranks = findings.take(COMM, "meeting", Ranks::join(&setup.config, Some(place)))?;
    findings.ok(COMM, "meeting", format!("all {} ranks have joined", place.world_size));
    Some(ranks)
}

pub(super) fn devices(
    setup: &Setup,
    met: &World,
    world: &dyn Communicator,
    findings: &mut Findings,
) -> Result<()> {
    let Setup { config, device, .. } = setup;
    // A rank without a device cannot take part in the collectives below.
    let is_missing = any(world, "devices", device.is_none(), config.comm.timeout())?;
    let Some(device) = device.as_ref().filter(|_| !is_missing) else { return Ok(()) };
    if config.device.backend != Backend::Cpu
        && findings.take(COMM, "devices", met.settle_on(device, &config.comm)).is_some()
    {
        findings.ok(COMM, "devices", format!("compatible, over {}", met.communicator().backend()));
    }
    Ok(())
}

fn arguments(config: &Config, options: &RunOptions) -> String {
    let RunOptions { out, resume, allow_missing, allow_other_parts, allow_changed, .. } = options;
    format!(
        "{} {config:?} {out:?} {resume:?} {:?} {allow_other_parts} {allow_changed:?}",
        env!("CARGO_PKG_VERSION"),
        allow_missing.patterns()
    )
}

fn any(world: &dyn Communicator, label: &'static str, here: bool, timeout: Duration) -> Result<bool> {
    Ok(world::gather(world, label, &[u8::from(here)], timeout)?.iter().any(|flag| *flag == [1]))
}

/// A comparison of all ranks. Every method is collective.
struct Comparison<'a> {
    world: &'a dyn Communicator,
    timeout: Duration,
    findings: &'a mut Findings,
}

impl Comparison<'_> {
    fn any(&self, subject: &'static str, here: bool) -> Result<bool> {
        any(self.world, subject, here, self.timeout)
    }

    fn gather(&self, subject: &'static str, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        Ok(world::gather(self.world, subject, bytes, self.timeout)?)
    }

    fn barrier(&self, label: &'static str) -> Result<()> {
        let barrier = self.world.barrier(Label::new(label, Phase::Init));
        barrier.wait(self.timeout).map_err(ShardError::from)?;
        Ok(())
    }

    fn same(&mut self, subject: &'static str, text: &str, problem: &str, fix: &str) -> Result<()> {
        let all = self.gather(subject, &Sha256::digest(text))?;
        match all[self.world.rank()] == all[0] {
            true => self.findings.ok(COMM, subject, "the same on all ranks"),
            false => self.findings.fail(COMM, subject, problem, fix),
        }
        Ok(())
    }

    /// Compares this rank's clock with rank 0's, which reads its own before a barrier and after a gather.
    /// This rank's reading lies in between: at the midpoint, plus or minus half the distance.
    fn clocks(&mut self, ahead: f64) -> Result<()> {
        let now = || {
            let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            since.as_secs_f64() + ahead
        };
        let number = |bytes: &[u8]| f64::from_le_bytes(bytes.try_into().unwrap_or_default());
        let (mut difference, mut within) = (0.0, f64::INFINITY);
        for _ in 0..ROUNDS {
            let before = now();
            self.barrier("clock")?;
            let mine = now();
            self.gather("clock", &mine.to_le_bytes())?;
            let after = now();
            let rank_0 = self.gather("clock of rank 0", &[before, after].map(f64::to_le_bytes).concat())?;
            let (before, after) = rank_0[0].split_at(8);
            let (before, after) = (number(before), number(after));
            if after - before < within {
                (difference, within) = (mine - (before + after) / 2.0, after - before);
            }
        }
        let (off, half) = (difference.abs(), within / 2.0);
        let way = if difference > 0.0 { "ahead of" } else { "behind" };
        let detail = format!("this rank's clock is {off:.1} s {way} rank 0's, give or take {half:.1} s");
        let fix = "let a time service set the clocks of all machines, such as chronyd";
        match off - half {
            surely if surely > CLOCK[1] => self.findings.fail(COMM, "clock", detail, fix),
            surely if surely > CLOCK[0] => self.findings.warn(COMM, "clock", detail, fix),
            _ => self.findings.ok(COMM, "clock", "within a second of rank 0's"),
        }
        Ok(())
    }

    /// Checks that this rank sees a file that rank 0 has just written to `folder`.
    fn shared(&mut self, subject: &'static str, folder: Option<PathBuf>, fix: &str) -> Result<()> {
        let (mut written, mut reason) = (None, String::new());
        if let Some(folder) = folder.filter(|_| self.world.rank() == 0) {
            match write(&folder) {
                Ok(file) => written = Some((file, folder)),
                Err(error) => reason = format!(" ({}: {error})", folder.display()),
            }
        }
        // Uses the folder's name on rank 0: on other machines, the same option may resolve to another folder.
        let mine = written.as_ref().map(|((file, nonce), folder)| (folder, file.path().file_name(), nonce));
        let all = self.gather(subject, &serde_json::to_vec(&(mine, reason)).unwrap_or_default())?;
        let rank_0: (Option<(PathBuf, OsString, String)>, String) =
            serde_json::from_slice(&all[0]).unwrap_or_default();
        match rank_0 {
            (None, reason) => {
                self.findings.skip(COMM, &format!("a {subject} in which rank 0 can write{reason}"));
            }
            _ if self.world.rank() == 0 => {}
            (Some((folder, name, nonce)), _) => {
                let shown = folder.display();
                match sees(&folder.join(name), &nonce) {
                    true => {
                        self.findings.ok(COMM, subject, format!("rank 0's files in {shown} are visible here"))
                    }
                    false => self.findings.fail(
                        COMM,
                        subject,
                        format!("a file that rank 0 has just written to {shown} is not visible here"),
                        format!("use a folder that all machines share, under the same path: {fix}"),
                    ),
                }
            }
        }
        self.barrier(subject)?;
        drop(written);
        Ok(())
    }
}

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

/// Returns a fingerprint of a checkpoint: the hashes of the files that list its contents.
fn checkpoint_print(folder: &Path) -> String {
    let found = kiln_checkpoint::Checkpoint::find(folder).unwrap_or_else(|_| folder.to_owned());
    let list = ["manifest.json", "config.json", "model.safetensors.index.json"];
    let print = |name: &str| format!("{:x} ", Sha256::digest(fs::read(found.join(name)).unwrap_or_default()));
    list.map(print).concat()
}

fn write(folder: &Path) -> std::io::Result<(tempfile::NamedTempFile, String)> {
    let mut random = [0; 16];
    getrandom::fill(&mut random).map_err(|error| std::io::Error::other(error.to_string()))?;
    let nonce = format!("{:032x}", u128::from_be_bytes(random));
    let mut file = tempfile::Builder::new().prefix(CHECK_PREFIX).tempfile_in(folder)?;
    file.write_all(nonce.as_bytes())?;
    file.as_file().sync_all()?;
    Ok((file, nonce))
}

fn sees(path: &Path, nonce: &str) -> bool {
    let until = Instant::now() + SEEN;
    loop {
        if fs::read(path).is_ok_and(|content| content == nonce.as_bytes()) {
            return true;
        }
        // If even the folder is missing, no cache is the cause, and waiting does not help.
        if Instant::now() >= until || !path.parent().is_some_and(Path::is_dir) {
            return false;
        }
        std::thread::sleep(LOOK_EVERY);
    }
}
