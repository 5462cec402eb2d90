//! `kiln import`: a model in the layout of Hugging Face becomes a checkpoint of step 0, without optimizer
//! state.

use std::path::{Path, PathBuf};

use clap::Args;
use kiln_model::Key;
use kiln_model::decoder::Decoder;
use serde_json::json;

use super::output::NewFolder;
use super::tokens::{end_value, generation_config, token_ids};
use super::{CARRIED, GENERATION_FILE, HuggingFaceError, HuggingFaceFolder, download};
use crate::checkpoint::{CheckpointState, SaveContext, write_full};
use crate::config::{Config, DataSection, ModelSection};
use crate::device;
use crate::error::TrainError;
use crate::metrics::say;
use crate::sharded::layout_of;
use crate::source::ModelSource;

/// Arguments of `kiln import`.
#[derive(Args, Clone, Debug)]
pub struct ImportArgs {
    #[command(flatten)]
    source: Source,
    /// Branch, tag or commit of the repository.
    #[arg(long, default_value = "main", conflicts_with = "hf")]
    revision: String,
    /// Checkpoint folder to create.
    #[arg(long)]
    out: PathBuf,
}

#[derive(Args, Clone, Debug)]
#[group(required = true, multiple = false)]
struct Source {
    /// Folder in the layout of Hugging Face.
    #[arg(long, value_name = "DIR")]
    hf: Option<PathBuf>,
    /// Download from this repository of the Hugging Face hub.
    #[arg(long, value_name = "OWNER/NAME")]
    repo: Option<String>,
}

impl ImportArgs {
    /// Imports and says where to.
    pub fn run(self) -> Result<(), TrainError> {
        let folder = match (self.source.hf, self.source.repo) {
            (Some(folder), _) => folder,
            (None, repo) => {
                // Before a download that may take hours.
                NewFolder::check_free(&self.out)?;
                // The argument parser insists on one of the two.
                download::model(&repo.unwrap_or_default(), &self.revision)?
            }
        };
        import(&folder, &self.out)?;
        say(&format!("imported to {}", self.out.display()));
        Ok(())
    }
}

/// Makes a full checkpoint at `out` of the model in `folder`. Holds one weight in memory at a time.
///
/// # Errors
///
/// When the folder is no model that Kiln's decoder can be, when there is something at `out`
/// already, and when the disk fails.
pub fn import(folder: &Path, out: &Path) -> Result<(), TrainError> {
    let opened = HuggingFaceFolder::open(folder)?;
    let source = ModelSource::HuggingFace(Box::new(opened.clone()));
    if source.tokenizer().exists() {
        // What nothing could use afterwards is better refused now.
        let tokenizer = source.load_tokenizer()?;
        if opened.end_ids().is_empty() {
            tokenizer.end_of_text()?;
        }
    }
    // What is not weights is put together here and copied from here.
    let aside = NewFolder::create(out)?;
    let carried = aside.carry(folder, &CARRIED)?;
    keep_token_ids(folder, &aside, carried.contains(&GENERATION_FILE))?;
    write_checkpoint(&opened, aside.files()?, out)
}

/// Ids that only `config.json` names, which is not carried along, go to `generation_config.json`.
fn keep_token_ids(
    folder: &Path,
    out: &NewFolder,
    has_generation_config: bool,
) -> Result<(), HuggingFaceError> {
    let tokens = token_ids(folder)?;
    if token_ids(out.path())? == tokens {
        return Ok(());
    }
    if !has_generation_config {
        return out.write_json(GENERATION_FILE, &generation_config(&tokens));
    }
    let path = out.path().join(GENERATION_FILE);
    let text = std::fs::read(&path).map_err(HuggingFaceError::io("read", &path))?;
    let mut config: serde_json::Value = serde_json::from_slice(&text)
        .map_err(|error| HuggingFaceError::Json { path, problem: error.to_string() })?;
    config["bos_token_id"] = json!(tokens.start);
    config["eos_token_id"] = end_value(&tokens);
    out.write_json(GENERATION_FILE, &config)
}

fn write_checkpoint(source: &HuggingFaceFolder, files: Vec<PathBuf>, out: &Path) -> Result<(), TrainError> {
    let model = source.model();
    let layout = layout_of(&Decoder::new(model, Key::new(0), &device::plain()), 1);
    let config = Config {
        model: ModelSection::from_model(model),
        data: DataSection { seq_len: source.context_length(), ..DataSection::default() },
        ..Config::default()
    };
    let config = toml::to_string(&config).map_err(|error| HuggingFaceError::damaged(out, error))?;
    let state = CheckpointState {
        step: 0,
        skipped: 0,
        loss_scale: None,
        next_sample: 0,
        tokens: 0,
        seed: 0,
        model: model.clone(),
        context_length: source.context_length(),
        data_sha256: None,
    };
    let context = SaveContext { config: Some(config), files, ..SaveContext::built_in(state) };
    Ok(write_full(out, source, &layout, &context)?)
}
