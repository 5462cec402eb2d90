//! Parses variables within limits.

use std::fmt;
use std::net::IpAddr;

use super::error::EnvError;

/// Looks up a variable, like `std::env::var`.
pub type Lookup<'a> = dyn Fn(&str) -> Option<String> + 'a;

/// Maximum number of ranks and nodes of a job.
pub const MAX_RANKS: usize = 1 << 20;

/// Maximum number of ranks that a launcher starts.
pub const MAX_RANKS_PER_NODE: usize = 1024;

/// Default port where the ranks meet, as for torchrun.
pub const DEFAULT_PORT: u16 = 29500;

const MAX_VALUE: usize = 64 * 1024;

#[derive(Clone, Debug)]
pub(super) struct Named {
    pub(super) name: &'static str,
    pub(super) value: String,
}

pub(super) struct Vars<'a>(pub(super) &'a Lookup<'a>);

impl Vars<'_> {
    pub(super) fn has(&self, name: &str) -> bool {
        (self.0)(name).is_some()
    }

    pub(super) fn first(&self, names: &[&'static str]) -> Result<Option<Named>, EnvError> {
        for &name in names {
            let Some(value) = (self.0)(name) else { continue };
            if value.len() > MAX_VALUE {
                return Err(EnvError::value(name, &value, "longer than 64 KiB; set it to a real value"));
            }
            return match value.trim() {
                "" => Err(EnvError::value(name, "", "empty; give it a value, or unset it")),
                value => Ok(Some(Named { name, value: value.to_owned() })),
            };
        }
        Ok(None)
    }

    pub(super) fn text(&self, name: &'static str) -> Result<Option<String>, EnvError> {
        Ok(self.first(&[name])?.map(|named| named.value))
    }

    pub(super) fn number(&self, name: &'static str) -> Result<Option<usize>, EnvError> {
        self.first(&[name])?.map(|named| named.number(MAX_RANKS)).transpose()
    }

    /// `problem` explains why the number must be set, and the fix.
    pub(super) fn needed(&self, name: &'static str, problem: &str) -> Result<usize, EnvError> {
        self.number(name)?.ok_or_else(|| EnvError::missing(name, problem))
    }

    /// Returns a scheduler's restart counter. Missing or invalid counters, some of which contain text, count as 0.
    pub(super) fn restarts(&self, name: &str) -> u64 {
        (self.0)(name).and_then(|value| value.trim().parse().ok()).unwrap_or(0)
    }

    pub(super) fn host(&self, names: &[&'static str]) -> Result<Option<String>, EnvError> {
        self.first(names)?.map(|named| named.host()).transpose()
    }

    pub(super) fn port(&self, names: &[&'static str]) -> Result<Option<u16>, EnvError> {
        self.first(names)?.map(|named| named.port()).transpose()
    }

    /// Errors never show the secret.
    pub(super) fn secret(&self) -> Result<Option<JobSecret>, EnvError> {
        match (self.0)(SECRET) {
            Some(secret) if secret.trim().is_empty() => {
                Err(EnvError::value(SECRET, "", "empty; set a long random string, or unset it"))
            }
            Some(secret) if secret.len() > MAX_VALUE => {
                Err(EnvError::value(SECRET, "…", "too long; 32 random characters are enough"))
            }
            secret => Ok(secret.map(JobSecret)),
        }
    }
}

/// The text with which the ranks of a job authenticate each other. Never logged.
#[derive(Clone, PartialEq, Eq)]
pub struct JobSecret(pub String);

impl fmt::Debug for JobSecret {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("\"…\"")
    }
}

/// The variable that contains the job's secret.
pub const SECRET: &str = "KILN_JOB_SECRET";

impl Named {
    pub(super) fn wrong(&self, problem: impl Into<String>) -> EnvError {
        EnvError::value(self.name, &self.value, problem)
    }

    pub(super) fn number(&self, max: usize) -> Result<usize, EnvError> {
        let number = self.value.parse().ok().filter(|number| *number <= max);
        // `parse` accepts "+1", which no launcher writes.
        number
            .filter(|_| !self.value.starts_with('+'))
            .ok_or_else(|| self.wrong(format!("not a whole number from 0 to {max}; correct or unset it")))
    }

    pub(super) fn port(&self) -> Result<u16, EnvError> {
        match self.value.parse() {
            Ok(port) if port > 0 && !self.value.starts_with('+') => Ok(port),
            _ => Err(self.wrong("not a port; ports are 1 to 65535, and those from 1024 need no rights")),
        }
    }

    pub(super) fn host(&self) -> Result<String, EnvError> {
        let inner = self.value.strip_prefix('[').and_then(|rest| rest.strip_suffix(']'));
        let host = inner.unwrap_or(&self.value);
        let named = host.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
        // An address with a zone, such as fe80::1%eth0, is not an `IpAddr`.
        let address = host.split('%').next().is_some_and(|ip| ip.parse::<IpAddr>().is_ok());
        if host.len() <= 253 && !host.is_empty() && (named || address) {
            return Ok(host.to_owned());
        }
        Err(self.wrong("not a host name or address; name the machine of rank 0, without a port"))
    }
}

pub(super) fn is_name(text: &str) -> bool {
    !text.trim().is_empty() && text.len() <= 253
}

pub(super) type Number = (&'static str, usize);

pub(super) fn below(index: Number, size: Number, why: &str) -> Result<(), EnvError> {
    if index.1 < size.1 {
        return Ok(());
    }
    let problem = format!("{why}, so {} must be below {}", index.0, size.0);
    Err(EnvError::contradiction(&[index, size], problem))
}
