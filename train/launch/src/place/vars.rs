//! Parsing variables: text, numbers, ports and hosts, each with its limits.

use std::fmt;
use std::net::IpAddr;

use super::error::EnvError;

/// Looks up a variable, like `std::env::var`.
pub type Lookup<'a> = dyn Fn(&str) -> Option<String> + 'a;

/// Maximum number of ranks and nodes of a job.
pub const MAX_RANKS: usize = 1 << 20;

/// Maximum number of ranks that one launcher starts.
pub const MAX_RANKS_PER_NODE: usize = 1024;

/// Default port of the master, the same as torchrun's.
pub const DEFAULT_PORT: u16 = 29500;

/// Maximum bytes of a value.
const MAX_VALUE: usize = 64 * 1024;

/// A variable or flag that is set.
#[derive(Clone, Debug)]
pub(super) struct Named {
    pub(super) name: &'static str,
    pub(super) value: String,
}

/// The variables that a source reads.
pub(super) struct Vars<'a>(pub(super) &'a Lookup<'a>);

impl Vars<'_> {
    pub(super) fn has(&self, name: &str) -> bool {
        (self.0)(name).is_some()
    }

    /// Returns the first of `names` that is set; an empty variable is an error.
    pub(super) fn first(&self, names: &[&'static str]) -> Result<Option<Named>, EnvError> {
        for &name in names {
            if let Some(value) = (self.0)(name) {
                return checked(name, value).map(Some);
            }
        }
        Ok(None)
    }

    pub(super) fn text(&self, name: &'static str) -> Result<Option<String>, EnvError> {
        Ok(self.first(&[name])?.map(|named| named.value))
    }

    /// Parses a rank, a size or an index.
    pub(super) fn number(&self, name: &'static str) -> Result<Option<usize>, EnvError> {
        self.first(&[name])?.map(|named| named.number(MAX_RANKS)).transpose()
    }

    /// Returns how often the job was restarted. A missing or invalid variable counts as never: these counters
    /// belong to the scheduler, and some contain text.
    pub(super) fn restarts(&self, name: &str) -> u64 {
        (self.0)(name).and_then(|value| value.trim().parse().ok()).unwrap_or(0)
    }

    pub(super) fn host(&self, names: &[&'static str]) -> Result<Option<String>, EnvError> {
        self.first(names)?.map(|named| named.host()).transpose()
    }

    pub(super) fn port(&self, names: &[&'static str]) -> Result<Option<u16>, EnvError> {
        self.first(names)?.map(|named| named.port()).transpose()
    }

    /// Returns the job's secret. No error shows its value.
    pub(super) fn secret(&self) -> Result<Option<JobSecret>, EnvError> {
        match (self.0)(SECRET) {
            Some(secret) if secret.trim().is_empty() => {
                Err(EnvError::value(SECRET, "", "empty; set a long random text, or unset it"))
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

/// The variable with the job's secret.
pub const SECRET: &str = "KILN_JOB_SECRET";

/// Accepts a value unless it is empty or absurdly long.
pub(super) fn checked(name: &'static str, value: String) -> Result<Named, EnvError> {
    if value.len() > MAX_VALUE {
        return Err(EnvError::value(name, &value, "longer than 64 KiB; set it to a real value"));
    }
    let value = value.trim();
    if value.is_empty() {
        return Err(EnvError::value(name, "", "empty; give it a value, or unset it"));
    }
    Ok(Named { name, value: value.to_owned() })
}

impl Named {
    /// Returns the error for a problem with the value.
    pub(super) fn wrong(&self, problem: impl Into<String>) -> EnvError {
        EnvError::value(self.name, &self.value, problem)
    }

    /// Parses a whole number up to `max`.
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

    /// Parses a host name or an address; an IPv6 address may be in brackets.
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

/// Returns whether a host means the local machine on every machine.
pub(super) fn is_loopback(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

/// Returns a port for a job that sets none: the same on every node, different from that of most other jobs,
/// and below the ports that systems assign automatically.
pub(super) fn port_of_job(job: &str) -> u16 {
    const FIRST: u16 = 15_000;
    const COUNT: u64 = 16_384;
    // FNV-1a.
    let hash = job.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    FIRST + (hash % COUNT) as u16
}

/// Returns whether a scheduler's name of a job is valid.
pub(super) fn is_name(text: &str) -> bool {
    !text.trim().is_empty() && text.len() <= 253
}
