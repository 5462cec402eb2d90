//! Downloads models from the Hugging Face hub into the hub's cache on this machine.

use std::path::PathBuf;

use super::HuggingFaceError;

/// Downloads the model `repo`, written as `owner/name`, at `revision` and returns its folder. Cached files
/// are not downloaded again. `HF_HOME`, `HF_HUB_CACHE`, `HF_TOKEN` and `HF_ENDPOINT` have the same meaning as
/// in the hub's own tools.
///
/// # Errors
///
/// If the name is invalid, if this build lacks the feature `hub`, and if a download fails.
pub fn model(repo: &str, revision: &str) -> Result<PathBuf, HuggingFaceError> {
    let part = |part: &&str| {
        let plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
        !part.is_empty() && part.chars().all(plain) && !part.starts_with('.')
    };
    let named = repo.split_once('/').filter(|(owner, name)| part(owner) && part(name));
    let Some((owner, name)) = named else {
        return Err(HuggingFaceError::RepoName { given: repo.to_owned() });
    };
    hub::model(owner, name, revision)
}

#[cfg(not(feature = "hub"))]
mod hub {
    use super::{HuggingFaceError, PathBuf};

    pub(super) fn model(owner: &str, name: &str, _: &str) -> Result<PathBuf, HuggingFaceError> {
        Err(HuggingFaceError::NoHub { repo: format!("{owner}/{name}") })
    }
}

#[cfg(feature = "hub")]
mod hub {
    use std::error::Error;
    use std::path::{Path, PathBuf};

    use hf_hub::progress::{DownloadEvent, ProgressEvent, ProgressHandler};
    use hf_hub::repository::RepoTypeModel;
    use hf_hub::{HFClientSync, HFError, HFRepositorySync};
    use indicatif::{ProgressBar, ProgressStyle};

    use super::super::folder::files_of_index;
    use super::super::{CARRIED, CONFIG_FILE, HuggingFaceError, INDEX_FILE, MODEL_FILE};

    /// A repository of the hub.
    struct Repository {
        files: HFRepositorySync<RepoTypeModel>,
        name: String,
    }

    pub(super) fn model(owner: &str, name: &str, revision: &str) -> Result<PathBuf, HuggingFaceError> {
        let full_name = format!("{owner}/{name}");
        let client =
            HFClientSync::new().map_err(|error| failed(&full_name, revision, CONFIG_FILE, &error))?;
        let repository = Repository { files: client.model(owner, name), name: full_name };
        let config = repository.needed(CONFIG_FILE, revision)?;
        let folder = config.parent().unwrap_or(Path::new(".")).to_owned();
        // The cache names the folder after the commit. All other files come from this commit too, even if the
        // branch changes meanwhile.
        let commit = folder.file_name().and_then(|name| name.to_str()).unwrap_or(revision);
        for file in CARRIED {
            repository.file(file, commit)?;
        }
        match repository.file(INDEX_FILE, commit)? {
            Some(index) => {
                for (file, _) in files_of_index(&index)? {
                    repository.needed(&file, commit)?;
                }
            }
            None => {
                repository.needed(MODEL_FILE, commit)?;
            }
        }
        Ok(folder)
    }

    impl Repository {
        /// Downloads a required file.
        fn needed(&self, file: &str, revision: &str) -> Result<PathBuf, HuggingFaceError> {
            self.download(file, revision).map_err(|error| failed(&self.name, revision, file, &error))
        }

        /// Downloads a file, if it exists.
        fn file(&self, file: &str, revision: &str) -> Result<Option<PathBuf>, HuggingFaceError> {
            match self.download(file, revision) {
                Ok(path) => Ok(Some(path)),
                Err(HFError::EntryNotFound { .. }) => Ok(None),
                Err(error) => Err(failed(&self.name, revision, file, &error)),
            }
        }

        fn download(&self, file: &str, revision: &str) -> Result<PathBuf, HFError> {
            let bar = Bar::new(file);
            let shown = bar.0.clone();
            let path = self.files.download_file().filename(file).revision(revision).progress(bar).send();
            shown.finish_and_clear();
            path
        }
    }

    fn failed(repo: &str, revision: &str, file: &str, error: &HFError) -> HuggingFaceError {
        // The outermost message of a client says that a request failed; the innermost gives the reason.
        let mut problem = error.to_string();
        let mut source = error.source();
        while let Some(inner) = source {
            let text = inner.to_string();
            if !problem.contains(&text) {
                problem = format!("{problem}: {text}");
            }
            source = inner.source();
        }
        HuggingFaceError::Download {
            repo: repo.to_owned(),
            revision: revision.to_owned(),
            file: file.to_owned(),
            problem,
        }
    }

    /// Shows the progress of the download of one file; hidden without a terminal.
    struct Bar(ProgressBar);

    impl Bar {
        fn new(file: &str) -> Self {
            let style = "{msg} {bar:24} {bytes}/{total_bytes} | {bytes_per_sec} | eta {eta}";
            // The template is a valid constant; the default style would be fine as well.
            let style = ProgressStyle::with_template(style).unwrap_or_else(|_| ProgressStyle::default_bar());
            Bar(ProgressBar::new(0).with_style(style).with_message(file.to_owned()))
        }
    }

    impl ProgressHandler for Bar {
        fn on_progress(&self, event: &ProgressEvent) {
            let ProgressEvent::Download(event) = event else { return };
            match event {
                DownloadEvent::Start { total_bytes, .. } => self.0.set_length(*total_bytes),
                DownloadEvent::Progress { files } => {
                    if let Some(file) = files.last() {
                        self.0.set_position(file.bytes_completed);
                    }
                }
                DownloadEvent::AggregateProgress { bytes_completed, .. } => {
                    self.0.set_position(*bytes_completed);
                }
                DownloadEvent::Complete => {}
            }
        }
    }
}
