//! `kiln convert`, `kiln import` and `kiln export`: convert a model between formats on disk.

use std::path::PathBuf;
use std::sync::Arc;

use clap::{Args, ValueEnum};

use crate::error::{CommandError, Result};
use kiln_checkpoint::hugging_face::{self, HuggingFaceFolder};
use kiln_checkpoint::source::ModelSource;
use kiln_checkpoint::{self as checkpoint, Checkpoint, CheckpointError, ExportDtype, Format};
use kiln_config::{Config, DataSection, ModelSection};
use kiln_train::metrics::print_line;
use kiln_train::process::Meter;
use kiln_train::process::output::ProgressLine;

const MAX_PARTS: usize = 1 << 16;

/// Arguments of `kiln convert`.
#[derive(Args, Clone, Debug)]
pub struct ConvertArgs {
    /// Checkpoint folder, or run folder (its newest checkpoint).
    #[arg(value_name = "CHECKPOINT")]
    checkpoint: PathBuf,
    /// Folder to create.
    #[arg(long)]
    out: PathBuf,
    /// Target form [default: full, or sharded with --ranks].
    #[arg(long, value_enum)]
    to: Option<Target>,
    /// Number of parts of a sharded checkpoint. It loads with any number of ranks; with this number, each rank reads one
    /// part.
    #[arg(long, value_name = "N")]
    ranks: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Target {
    Full,
    Sharded,
}

impl ConvertArgs {
    /// Converts the checkpoint; returns a message for the user.
    pub fn run(self) -> Result<String> {
        let (format, ranks) = match (self.to, self.ranks) {
            (Some(Target::Full), Some(_)) => {
                return Err(CommandError::usage("--ranks needs --to sharded: remove --ranks or --to full"));
            }
            (Some(Target::Full) | None, None) => (Format::Full, 1),
            (Some(Target::Sharded), None) => {
                return Err(CommandError::usage("--to sharded needs --ranks, the number of parts"));
            }
            (_, Some(ranks)) if (1..=MAX_PARTS).contains(&ranks) => (Format::Sharded, ranks),
            (_, Some(ranks)) => {
                let problem = format!("--ranks {ranks}: must be from 1 to {MAX_PARTS}");
                return Err(CommandError::usage(problem));
            }
        };
        let checkpoint = Checkpoint::open(&self.checkpoint)?;
        counted("converting", |meter| {
            kiln_checkpoint::convert(&checkpoint, &self.out, format, ranks, meter)
        })?;
        let (from, out) = (checkpoint.manifest().format, self.out.display());
        Ok(format!("{out} is the {format} form of {} ({from})", checkpoint.folder().display()))
    }
}

/// Calls `work`, and shows the progress in bytes that it counts.
fn counted<T>(topic: &str, work: impl FnOnce(&Meter) -> T) -> T {
    let meter = Arc::new(Meter::default());
    let _line = ProgressLine::for_bytes(topic, meter.clone());
    work(&meter)
}

/// Bytes of a GB, as disk makers and transformers count.
const GB: f64 = 1e9;

/// Arguments of `kiln export`.
#[derive(Args, Clone, Debug)]
pub struct ExportArgs {
    /// Checkpoint folder, run folder (its newest checkpoint), or Hugging Face folder.
    #[arg(value_name = "CHECKPOINT")]
    checkpoint: PathBuf,
    /// Folder to create.
    #[arg(long)]
    out: PathBuf,
    /// Data type of the weights.
    #[arg(long, value_enum, default_value = "f32")]
    dtype: ExportDtype,
    /// Merge the adapters of a LoRA run into the weights. Otherwise, the adapters alone are written, in PEFT's layout.
    #[arg(long)]
    merge: bool,
    /// Maximum size of a weight file.
    #[arg(long, default_value_t = 5.0, value_name = "GB", allow_negative_numbers = true)]
    max_shard_gb: f64,
}

impl ExportArgs {
    /// Exports the checkpoint, and prints the folder.
    pub fn run(self) -> Result<()> {
        let ExportArgs { checkpoint, out, dtype, merge, max_shard_gb } = self;
        if !(max_shard_gb > 0.0 && max_shard_gb.is_finite()) {
            let problem = format!("--max-shard-gb {max_shard_gb}: must be positive and finite");
            return Err(CommandError::usage(problem));
        }
        // For a size beyond all files, this conversion saturates.
        let max_shard_bytes = (max_shard_gb * GB) as usize;
        // Works without the program's layers: below, the export fails if the format cannot express the model.
        let source = ModelSource::open(&checkpoint)?;
        let has_adapters = source.model().lora.is_some();
        if merge && !has_adapters {
            return Err(CheckpointError::NoAdapters { path: source.folder().to_owned() }.into());
        }
        counted("exporting", |meter| match has_adapters && !merge {
            true => checkpoint::export_adapters(&source, &out, dtype, meter),
            false => checkpoint::export(&source, &out, dtype, max_shard_bytes, meter),
        })?;
        if let Some(name) = &source.model().head_layer {
            print_line(&format!(
                "left out: the extra head `{name}` (head_layer.*), which only its objective runs"
            ));
        }
        print_line(&format!("exported to {}", out.display()));
        Ok(())
    }
}

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
    /// Hugging Face folder.
    #[arg(long, value_name = "DIR")]
    hf: Option<PathBuf>,
    /// Repository to download from the Hugging Face hub.
    #[arg(long, value_name = "OWNER/NAME")]
    repo: Option<String>,
}

impl ImportArgs {
    /// Imports the model, and prints the folder.
    pub fn run(self) -> Result<()> {
        let folder = match (self.source.hf, self.source.repo) {
            (Some(folder), _) => folder,
            (None, repo) => {
                // Checked first, because a download may take hours.
                kiln_checkpoint::check_free(&self.out)?;
                hugging_face::download(&repo.unwrap_or_default(), &self.revision)?
            }
        };
        let model = HuggingFaceFolder::open(&folder)?;
        let config = config_of(&model)?;
        counted("importing", |meter| checkpoint::import(&model, config, &self.out, meter))?;
        print_line(&format!("imported to {}", self.out.display()));
        Ok(())
    }
}

/// Returns the configuration of a run that would have trained `model`, as TOML.
fn config_of(model: &HuggingFaceFolder) -> Result<String> {
    let config = Config {
        model: ModelSection {
            context_length: Some(model.context_length()),
            ..ModelSection::from_model(model.model())
        },
        data: DataSection { seq_len: model.context_length(), ..DataSection::default() },
        ..Config::default()
    };
    toml::to_string(&config)
        .map_err(|error| CommandError::usage(format!("the configuration cannot be written: {error}")))
}
