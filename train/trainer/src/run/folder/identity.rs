//! `run.json`: marks a folder as a run of Kiln, and identifies the run.

use std::io::ErrorKind;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::error::FolderError;
use crate::metrics::write_atomic;
use crate::process::ProcessId;
use crate::run::RunOptions;
use crate::version::version;
use kiln_config::Config;
use kiln_sys::files;

pub(super) const FILE: &str = "run.json";

const MAX_BYTES: u64 = 1 << 20;

const FORMAT: u64 = 1;

/// The identity of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// [`FORMAT`] of the build that wrote the file. Files of other programs do not have this key.
    kiln_run: u64,
    pub(super) id: String,
    created: String,
    kiln: String,
    #[serde(default)]
    build: String,
    #[serde(default)]
    device: String,
    config_sha256: String,
    /// The job that last started the run and may take it over; `None` if nothing restarts the run.
    job: Option<String>,
}

const OTHER_JOB: &str = "it was started by another job, or by one without a name";
const OTHER_CONFIG: &str = "it was started with a different configuration";

#[derive(Clone, Debug)]
pub(super) struct Claimant {
    pub(super) config_sha256: String,
    pub(super) job: Option<String>,
}

impl Claimant {
    pub(super) fn new(config: &Config, options: &RunOptions) -> Self {
        // The launcher determines the number of ranks, which may differ after a restart.
        let mut config = config.clone();
        config.train.ranks = 0;
        let digest = Sha256::digest(format!("{config:?}"));
        Claimant { config_sha256: format!("{digest:x}"), job: job_of(options) }
    }
}

/// Identifies a job across its restarts: by its name, or else by the process that starts and restarts rank 0.
fn job_of(options: &RunOptions) -> Option<String> {
    match &options.job().name {
        Some(name) => Some(name.clone()),
        // Without a launcher, nothing restarts this process.
        None if options.place.is_none() => None,
        None => serde_json::to_string(&ProcessId::parent()?).ok(),
    }
}

impl Identity {
    pub(super) fn new(claimant: &Claimant) -> Result<Self, FolderError> {
        let mut id = [0; 16];
        getrandom::fill(&mut id).map_err(|error| {
            let source = std::io::Error::other(error.to_string());
            FolderError::io("get random bytes for", Path::new(FILE))(source)
        })?;
        Ok(Identity {
            kiln_run: FORMAT,
            id: format!("{:032x}", u128::from_be_bytes(id)),
            created: now(),
            kiln: env!("CARGO_PKG_VERSION").to_owned(),
            build: version().to_owned(),
            device: String::new(),
            config_sha256: claimant.config_sha256.clone(),
            job: claimant.job.clone(),
        })
    }

    pub(super) fn taken_by(&self, claimant: &Claimant) -> Self {
        Identity {
            kiln: env!("CARGO_PKG_VERSION").to_owned(),
            build: version().to_owned(),
            config_sha256: claimant.config_sha256.clone(),
            job: claimant.job.clone(),
            ..self.clone()
        }
    }

    pub(super) fn on_device(&self, device: String) -> Self {
        Identity { device, ..self.clone() }
    }

    /// Returns the identity of the same run without a job, so that no restarted job takes it over yet.
    pub(super) fn without_job(self) -> Self {
        Identity { job: None, ..self }
    }

    pub(super) fn check_restart_of(&self, claimant: &Claimant) -> Result<(), &'static str> {
        if self.job.is_none() || self.job != claimant.job {
            return Err(OTHER_JOB);
        }
        if !self.was_started_as(claimant) { Err(OTHER_CONFIG) } else { Ok(()) }
    }

    pub(super) fn was_started_as(&self, claimant: &Claimant) -> bool {
        self.config_sha256 == claimant.config_sha256
    }

    /// Reads the identity in `out`; `None` if the file is missing or belongs to another program.
    pub(super) fn read(out: &Path) -> Result<Option<Self>, FolderError> {
        let path = out.join(FILE);
        let wrong = |problem: String| FolderError::Identity(path.clone(), problem);
        let text = match files::read(&path, MAX_BYTES) {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Err(error) if error.kind() == ErrorKind::InvalidInput => {
                let problem = "is not a regular file: choose another folder with --out";
                return Err(wrong(problem.to_owned()));
            }
            Err(error) if error.kind() == ErrorKind::FileTooLarge => return Ok(None),
            Err(error) => return Err(FolderError::io("read", &path)(error)),
        };
        let json: Value = serde_json::from_slice(&text).unwrap_or_default();
        match json.get("kiln_run").and_then(Value::as_u64) {
            None => Ok(None),
            Some(version) if version != FORMAT => Err(wrong(format!(
                "is of version {version}, and this build knows {FORMAT}: use the build that wrote \
                 it, or choose another folder with --out"
            ))),
            Some(_) => serde_json::from_value(json)
                .map(Some)
                .map_err(|error| wrong(format!("is damaged ({error}): choose another folder with --out"))),
        }
    }

    pub(super) fn write(&self, out: &Path) -> Result<(), FolderError> {
        let path = out.join(FILE);
        let text = serde_json::to_string_pretty(self).map_err(std::io::Error::other);
        text.and_then(|text| write_atomic(&path, format!("{text}\n").as_bytes()))
            .map_err(FolderError::io("write", &path))
    }
}

/// Returns the time in UTC, as in `2026-11-23T07:08:19Z`.
pub(super) fn now() -> String {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    utc(since.as_secs())
}

/// Formats `seconds` since 1970 with Howard Hinnant's `civil_from_days`, restricted to non-negative dates
/// (<https://howardhinnant.github.io/date_algorithms.html>).
fn utc(seconds: u64) -> String {
    let (days, time) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // Months counted from March.
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = 400 * era + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (time / 3600, time / 60 % 60, time % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn claimant(config: &str, job: Option<&str>) -> Claimant {
        Claimant { config_sha256: config.to_owned(), job: job.map(str::to_owned) }
    }

    #[test]
    fn a_run_is_taken_over_by_its_own_job_with_its_own_configuration_alone() {
        let mine = claimant("c", Some("j"));
        let run = Identity::new(&mine).unwrap();
        assert_eq!(run.check_restart_of(&mine), Ok(()));
        assert_eq!(run.check_restart_of(&claimant("c", Some("k"))), Err(OTHER_JOB));
        assert_eq!(run.check_restart_of(&claimant("d", Some("j"))), Err(OTHER_CONFIG));
        let alone = run.clone().without_job();
        assert_eq!(alone.check_restart_of(&claimant("c", None)), Err(OTHER_JOB));
        assert_eq!(alone.taken_by(&mine), run);
        assert_ne!(Identity::new(&mine).unwrap().id, run.id);
    }

    #[test]
    fn the_number_of_ranks_is_no_part_of_a_run() {
        let mut config = Config::default();
        let digest = |config: &Config| Claimant::new(config, &RunOptions::default()).config_sha256;
        let before = digest(&config);
        config.train.ranks += 1;
        assert_eq!(digest(&config), before);
        config.train.seed += 1;
        assert_ne!(digest(&config), before);
    }

    #[test]
    fn only_our_own_file_is_an_identity() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path();
        assert_eq!(Identity::read(out).unwrap(), None);
        for other in ["", "{}", "[1]", "{\"run\": 3}"] {
            std::fs::write(out.join(FILE), other).unwrap();
            assert_eq!(Identity::read(out).unwrap(), None, "{other}");
        }
        let run = Identity::new(&claimant("c", None)).unwrap();
        run.write(out).unwrap();
        assert_eq!(Identity::read(out).unwrap(), Some(run));
        std::fs::write(out.join(FILE), vec![b' '; MAX_BYTES as usize + 1]).unwrap();
        assert_eq!(Identity::read(out).unwrap(), None);
        for (other, said) in [("{\"kiln_run\": 2}", "version 2"), ("{\"kiln_run\": 1}", "damaged")] {
            std::fs::write(out.join(FILE), other).unwrap();
            let error = Identity::read(out).unwrap_err().to_string();
            assert!(error.contains(said), "{error}");
        }
    }

    #[test]
    fn dates() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_795_417_699, "2026-11-23T07:08:19Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(utc(seconds), text);
        }
    }
}
