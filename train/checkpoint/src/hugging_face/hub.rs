use std::path::PathBuf;

use crate::CheckpointError;
use crate::error::Result;

/// Downloads the model `repo`, written as `owner/name`, at `revision` into the hub's cache, and returns its folder.
/// Respects `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN` and `HF_ENDPOINT`. Fails if the name is invalid, this build lacks the
/// feature `hub`, or a download fails.
pub fn download(repo: &str, revision: &str) -> Result<PathBuf> {
    let part = |part: &&str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        !part.is_empty() && part.chars().all(plain) && !part.starts_with('.')
    };
    let named = repo.split_once('/').filter(|(owner, name)| part(owner) && part(name));
    let Some((owner, name)) = named else {
        return Err(CheckpointError::RepoName { given: repo.to_owned() });
    };
    client::model(owner, name, revision)
}

#[cfg(not(feature = "hub"))]
mod client {
    use super::{CheckpointError, PathBuf, Result};

    pub(super) fn model(owner: &str, name: &str, _: &str) -> Result<PathBuf> {
        Err(CheckpointError::NoHub { repo: format!("{owner}/{name}") })
    }
}

#[cfg(feature = "hub")]
mod client {
    use std::error::Error;
    use std::path::{Path, PathBuf};
    use std::sync::Arc;

    use hf_hub::progress::{DownloadEvent, ProgressEvent, ProgressHandler};
    use hf_hub::{HFClientSync, HFError};
    use kiln_sys::Meter;
    use kiln_sys::output::ProgressLine;

    use super::super::folder::files_of_index;
    use super::super::{CARRIED, CONFIG_FILE, INDEX_FILE, MODEL_FILE};
    use super::{CheckpointError, Result};

    pub(super) fn model(owner: &str, name: &str, revision: &str) -> Result<PathBuf> {
        let failed = |file: &str, revision: &str, error: HFError| CheckpointError::Download {
            repo: format!("{owner}/{name}"),
            revision: revision.to_owned(),
            file: file.to_owned(),
            problem: with_sources(&error),
        };
        let client = HFClientSync::new().map_err(|error| failed(CONFIG_FILE, revision, error))?;
        let files = client.model(owner, name);
        let download = |file: &str, revision: &str| {
            let meter = Arc::new(Meter::default());
            let _line = ProgressLine::on_terminal(file, meter.clone());
            files.download_file().filename(file).revision(revision).progress(Counter(meter)).send()
        };
        let needed = |file: &str, revision: &str| {
            download(file, revision).map_err(|error| failed(file, revision, error))
        };
        let optional = |file: &str, revision: &str| match download(file, revision) {
            Err(HFError::EntryNotFound { .. }) => Ok(None),
            other => other.map(Some).map_err(|error| failed(file, revision, error)),
        };
        let config = needed(CONFIG_FILE, revision)?;
        let folder = config.parent().unwrap_or(Path::new(".")).to_owned();
        // The cache names the folder after the commit. Other files come from the same commit, even if the branch moves.
        let commit = folder.file_name().and_then(|name| name.to_str()).unwrap_or(revision);
        for file in CARRIED {
            optional(file, commit)?;
        }
        match optional(INDEX_FILE, commit)? {
            Some(index) => {
                for (file, _) in files_of_index(&index)? {
                    needed(&file, commit)?;
                }
            }
            None => drop(needed(MODEL_FILE, commit)?),
        }
        Ok(folder)
    }

    /// Formats an error with its sources: the outermost message only reports that a request failed.
    fn with_sources(error: &HFError) -> String {
        let mut problem = error.to_string();
        let mut source = error.source();
        while let Some(inner) = source {
            let text = inner.to_string();
            if !problem.contains(&text) {
                problem = format!("{problem}: {text}");
            }
            source = inner.source();
        }
        problem
    }

    struct Counter(Arc<Meter>);

    impl ProgressHandler for Counter {
        fn on_progress(&self, event: &ProgressEvent) {
            let ProgressEvent::Download(event) = event else { return };
            let done = match event {
                DownloadEvent::Start { total_bytes, .. } => return self.0.begin(*total_bytes),
                DownloadEvent::Progress { files } => files.last().map(|file| file.bytes_completed),
                DownloadEvent::AggregateProgress { bytes_completed, .. } => Some(*bytes_completed),
                DownloadEvent::Complete => None,
            };
            let (before, _) = self.0.read();
            self.0.add(done.unwrap_or_default().saturating_sub(before));
        }
    }
}
