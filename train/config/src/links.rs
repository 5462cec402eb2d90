//! The file in which `kiln bench network` stores the speed of collectives, and from which plans predict their time.

use std::io;
use std::path::{Path, PathBuf};

use kiln_collectives::Operation;
use serde::{Deserialize, Serialize};

use kiln_sys::durable::write_named;
use kiln_sys::files;

const VERSION: u64 = 1;

const MAX_BYTES: u64 = 1 << 20;

/// Measurements of networks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Links {
    version: u64,
    /// The measured links, one per backend, group of ranks and operation.
    pub links: Vec<Link>,
}

/// The speed of one collective: a call takes `latency_s + bytes_sent / bytes_per_s`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// The [backend](kiln_collectives::Communicator::backend): `local`, `tcp`, `mpi` or `nccl`.
    pub backend: String,
    /// Number of ranks in the group.
    pub ranks: usize,
    /// Number of machines that the ranks are on.
    pub nodes: usize,
    /// `all_gather`, `reduce_scatter` or `all_reduce`.
    pub operation: Operation,
    /// Fixed latency of a call in seconds.
    pub latency_s: f64,
    /// Bytes that a rank sends per second, after the latency, as a [`Recorder`](kiln_collectives::Recorder) counts
    /// them.
    pub bytes_per_s: f64,
}

/// Reasons why a file of links cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LinksError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}; `kiln bench network --out` writes such a file", .path.display())]
    Read { path: PathBuf, source: io::Error },
    /// The file does not contain links, or is damaged.
    #[error("{} is not a file of network links: {problem}; `kiln bench network --out` writes such a file", .path.display())]
    Content { path: PathBuf, problem: String },
}

impl Default for Links {
    fn default() -> Self {
        Links { version: VERSION, links: Vec::new() }
    }
}

impl Links {
    /// Reads a file of links.
    ///
    /// # Errors
    ///
    /// If the file cannot be read, is of another version, or has impossible numbers.
    pub fn read(path: &Path) -> Result<Self, LinksError> {
        let content = files::read(path, MAX_BYTES)
            .map_err(|source| LinksError::Read { path: path.to_owned(), source })?;
        let wrong = |problem: String| LinksError::Content { path: path.to_owned(), problem };
        let links: Links = serde_json::from_slice(&content).map_err(|error| wrong(error.to_string()))?;
        if links.version != VERSION {
            return Err(wrong(format!(
                "it has version {}, and this build reads version {VERSION}",
                links.version
            )));
        }
        match links.links.iter().find(|link| !link.is_possible()) {
            None => Ok(links),
            Some(Link { operation, latency_s, bytes_per_s, .. }) => {
                Err(wrong(format!("{operation} takes {latency_s} s and has {bytes_per_s} bytes per second")))
            }
        }
    }

    /// Adds `link`, replacing an earlier measurement of the same link.
    pub fn put(&mut self, link: Link) {
        match self.links.iter_mut().find(|known| known.is_of_same(&link)) {
            Some(known) => *known = link,
            None => self.links.push(link),
        }
    }

    /// Writes the links to `path`; a regular file is replaced atomically.
    ///
    /// # Errors
    ///
    /// If the file cannot be written.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        let text = serde_json::to_string_pretty(self)?;
        write_named(path, format!("{text}\n").as_bytes(), "file of links", |start| start.starts_with(b"{"))
    }
}

impl Link {
    /// Returns the duration in seconds of a call in which a rank sends `bytes_sent` bytes.
    pub fn seconds(&self, bytes_sent: u64) -> f64 {
        self.latency_s + bytes_sent as f64 / self.bytes_per_s
    }

    fn is_of_same(&self, other: &Link) -> bool {
        let key = |link: &Link| (link.backend.clone(), link.ranks, link.nodes, link.operation);
        key(self) == key(other)
    }

    fn is_possible(&self) -> bool {
        let finite = self.latency_s.is_finite() && self.bytes_per_s.is_finite();
        finite && self.latency_s >= 0.0 && self.bytes_per_s > 0.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(ranks: usize, bytes_per_s: f64) -> Link {
        let (backend, operation) = ("tcp".to_owned(), Operation::AllGather);
        Link { backend, ranks, nodes: 1, operation, latency_s: 1e-5, bytes_per_s }
    }

    #[test]
    fn new_measurement_replaces_old() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("links.json");
        let mut links = Links::default();
        links.put(link(2, 1e9));
        links.put(link(4, 2e9));
        links.put(link(2, 3e9));
        assert_eq!(links.links, [link(2, 3e9), link(4, 2e9)]);
        links.write(&path).expect("a file");
        assert_eq!(Links::read(&path).expect("links"), links);
        assert_eq!(link(2, 1e9).seconds(1_000_000), 1e-5 + 1e-3);
    }

    #[test]
    fn other_files_are_refused() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("links.json");
        let read = || Links::read(&path).expect_err("no links").to_string();
        assert!(read().contains("cannot read"));
        let good = serde_json::to_string(&Links { links: vec![link(2, 1e9)], ..Links::default() });
        let good = good.expect("JSON");
        for (from, to, expected) in [
            ("\"version\":1", "\"version\":2", "it has version 2"),
            ("1000000000.0", "0.0", "has 0 bytes per second"),
            ("all_gather", "gather", "unknown variant"),
            ("\"nodes\"", "\"machines\"", "unknown field"),
        ] {
            let text = good.replace(from, to);
            assert_ne!(text, good, "{from}");
            std::fs::write(&path, text).expect("a file");
            let message = read();
            assert!(message.contains(expected) && message.contains("kiln bench network --out"), "{message}");
        }
    }
}
