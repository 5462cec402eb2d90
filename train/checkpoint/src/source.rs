//! A model on disk in any supported format. Every command that takes a checkpoint accepts one of these.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::Device;
use kiln_data::{DataError, Tokenizer};
use kiln_model::decoder::Decoder;
use kiln_model::{FULL_ATTENTION, Key, Layers, ModelConfig, MoeConfig, SWIGLU};
use kiln_shard::{Engine, EngineBuilder};
use kiln_sys::Meter;
use kiln_sys::files;
use kiln_sys::output::ProgressLine;
use serde_json::{Value, json};

use crate::hugging_face::{self, HuggingFaceError, HuggingFaceFolder};
use crate::sharded::ShardedDecoder;
use crate::weights::{self, AllowMissing, Weights};
use crate::{Architecture, Checkpoint, CheckpointError};

/// Tokens of a sequence for an evaluation of a model that Kiln has not trained, at most.
const USUAL_SEQ_LEN: usize = 2048;

/// The text of the progress bar while weights are read.
const LOADING: &str = "loading the weights";

/// A model on disk.
#[derive(Clone, Debug)]
pub enum ModelSource {
    /// A checkpoint of Kiln, sharded or full.
    Checkpoint(Box<Checkpoint>),
    /// A folder in the layout of Hugging Face.
    HuggingFace(Box<HuggingFaceFolder>),
}

impl ModelSource {
    /// Opens a checkpoint, the newest one of a run folder, or a folder in the layout of Hugging Face. Code
    /// that computes with its weights must call [`ModelSource::require_layers`] next.
    pub fn open(path: &Path) -> Result<Self, CheckpointError> {
        if HuggingFaceFolder::is_one(path) {
            return Ok(ModelSource::HuggingFace(Box::new(HuggingFaceFolder::open(path)?)));
        }
        Ok(ModelSource::Checkpoint(Box::new(Checkpoint::open(path)?)))
    }

    /// Like [`ModelSource::open`], but fails unless `layers` has all layers of the model.
    pub fn open_with(path: &Path, layers: &Layers) -> Result<Self, CheckpointError> {
        let source = ModelSource::open(path)?;
        source.require_layers(layers)?;
        Ok(source)
    }

    /// Fails unless `layers` has all layers of the model.
    pub fn require_layers(&self, layers: &Layers) -> Result<(), CheckpointError> {
        match Architecture::objection_with(layers, self.model()) {
            None => Ok(()),
            Some(objection) => {
                Err(CheckpointError::OtherArchitecture { path: self.folder().to_owned(), objection })
            }
        }
    }

    /// Fails unless the weights belong to the architecture that the caller builds. Weights in the layout of
    /// Hugging Face belong to the built-in decoder, or could not be opened.
    pub fn require_architecture(&self, here: &Architecture) -> Result<(), CheckpointError> {
        match self {
            ModelSource::Checkpoint(checkpoint) => checkpoint.require_architecture(here),
            ModelSource::HuggingFace(folder) => {
                let objection = Architecture::decoder().objection(here);
                let path = folder.folder().to_owned();
                objection
                    .map_or(Ok(()), |objection| Err(CheckpointError::OtherArchitecture { path, objection }))
            }
        }
    }

    /// Returns the folder.
    pub fn folder(&self) -> &Path {
        match self {
            ModelSource::Checkpoint(checkpoint) => checkpoint.folder(),
            ModelSource::HuggingFace(folder) => folder.folder(),
        }
    }

    /// Returns the shape of the model.
    pub fn model(&self) -> &ModelConfig {
        match self {
            ModelSource::Checkpoint(checkpoint) => &checkpoint.state().model,
            ModelSource::HuggingFace(folder) => folder.model(),
        }
    }

    /// Returns the shape of the model, with built-in layers instead of those that are not among `layers`. A
    /// program that lacks a layer either refuses the weights by their architecture, or uses them as those of
    /// a built-in layer.
    pub fn model_of(&self, layers: &Layers) -> ModelConfig {
        let mut model = self.model().clone();
        for (key, _) in layers.missing(self.model()) {
            match key {
                "block" => model.block = None,
                "attention" => model.attention = FULL_ATTENTION.to_owned(),
                _ => model.feed_forward = SWIGLU.to_owned(),
            }
            model.extra.clear();
        }
        model
    }

    /// Returns the path of the tokenizer's file.
    pub fn tokenizer(&self) -> PathBuf {
        match self {
            ModelSource::Checkpoint(checkpoint) => checkpoint.tokenizer(),
            ModelSource::HuggingFace(folder) => folder.tokenizer(),
        }
    }

    /// Returns the longest sequence, in tokens, that the model supports.
    pub fn context_length(&self) -> usize {
        match self {
            ModelSource::Checkpoint(checkpoint) => checkpoint.context_length(),
            ModelSource::HuggingFace(folder) => folder.context_length(),
        }
    }

    /// Returns the context of the original model, as opposed to that of its training data.
    pub fn given_context(&self) -> Option<usize> {
        match self {
            ModelSource::Checkpoint(checkpoint) => checkpoint.given_context(),
            ModelSource::HuggingFace(folder) => Some(folder.context_length()),
        }
    }

    /// Tokens of a sequence for an evaluation: as many as Kiln has trained the model on. If it has not, as many as the
    /// context has, at most 2048.
    pub fn seq_len(&self) -> usize {
        let context = self.context_length();
        match self {
            ModelSource::Checkpoint(checkpoint) if checkpoint.state().next_sample > 0 => {
                checkpoint.seq_len().min(context)
            }
            _ => context.min(USUAL_SEQ_LEN),
        }
    }

    /// Names and contents of the small files that models made from this one carry along. Its
    /// `generation_config.json` names `tokens`.
    ///
    /// # Errors
    ///
    /// When a file cannot be read.
    pub fn carried_files(
        &self,
        tokens: &hugging_face::TokenIds,
    ) -> Result<Vec<hugging_face::CarriedFile>, CheckpointError> {
        Ok(hugging_face::carried_files(self.folder(), tokens)?)
    }

    /// Ids that start, end and pad a text, as the folder names them.
    ///
    /// # Errors
    ///
    /// When a file cannot be read.
    pub fn token_ids(&self) -> Result<hugging_face::TokenIds, CheckpointError> {
        Ok(hugging_face::token_ids(self.folder())?)
    }

    /// Returns the SHA-256 of the tokens that the model was trained on, if recorded.
    pub fn data_sha256(&self) -> Option<&str> {
        match self {
            ModelSource::Checkpoint(checkpoint) => checkpoint.state().data_sha256.as_deref(),
            ModelSource::HuggingFace(_) => None,
        }
    }

    /// Returns the ids that end a text in addition to the tokenizer's own; none if the folder names none.
    pub fn end_ids(&self) -> Result<Vec<u32>, CheckpointError> {
        match self {
            // An imported checkpoint contains its original file.
            ModelSource::Checkpoint(checkpoint) => Ok(hugging_face::end_ids(checkpoint.folder())?),
            ModelSource::HuggingFace(folder) => Ok(folder.end_ids().to_vec()),
        }
    }

    /// Returns the weights, for reading in parts.
    pub fn weights(&self) -> Box<dyn Weights + '_> {
        match self {
            ModelSource::Checkpoint(checkpoint) => Box::new(checkpoint.reader()),
            ModelSource::HuggingFace(folder) => Box::new(HuggingFaceFolder::clone(folder)),
        }
    }

    /// Fails unless the files of all weights are complete, judging by their lengths. `layers` must have all
    /// layers of the model.
    pub fn check_weights_are_there(&self, layers: &Layers) -> Result<(), CheckpointError> {
        match self {
            ModelSource::Checkpoint(checkpoint) => checkpoint.check_weights_are_there(layers),
            // Otherwise it could not have been opened.
            ModelSource::HuggingFace(_) => Ok(()),
        }
    }

    /// Fails if the shape of the saved model is not that of `model`. Reports this before any work starts,
    /// even if the weights would fit but have a different meaning, as with another number of heads. If some
    /// weights may be missing, keys that only add weights are left to [`ModelSource::load_weights`], which
    /// compares names.
    pub fn check_model(
        &self,
        model: &ModelConfig,
        allow_missing: &AllowMissing,
    ) -> Result<(), CheckpointError> {
        let differences = match allow_missing.is_empty() {
            true => differences(self.model(), model),
            false => differences(self.model(), &without_added_weights(self.model(), model)),
        };
        if differences.is_empty() {
            return Ok(());
        }
        let path = self.folder().to_owned();
        Err(match self {
            ModelSource::Checkpoint(_) => CheckpointError::OtherModel { path, differences },
            ModelSource::HuggingFace(_) => HuggingFaceError::OtherModel { path, differences }.into(),
        })
    }

    /// Loads this rank's part of all weights. Names and shapes must match exactly, except for names that may
    /// be missing; returns the missing names. Collective.
    pub fn load_weights(
        &self,
        engine: &Engine,
        allow_missing: &AllowMissing,
    ) -> Result<BTreeSet<String>, CheckpointError> {
        // A progress line only on a terminal, so that it is not mixed with the output of commands.
        let line = |meter| (engine.world().rank() == 0).then(|| ProgressLine::on_terminal(LOADING, meter));
        match self {
            ModelSource::Checkpoint(checkpoint) => {
                let reader = checkpoint.reader();
                let _line = line(reader.meter());
                reader.load_weights(engine, allow_missing)
            }
            ModelSource::HuggingFace(folder) => {
                let meter = Arc::new(Meter::default());
                let _line = line(meter.clone());
                weights::load(engine, folder.as_ref(), allow_missing, &meter)?.finite(folder.folder())
            }
        }
    }

    /// Loads the tokenizer, whose end of text is the first that the folder names. Fails if the model does not know
    /// all of its tokens.
    pub fn load_tokenizer(&self) -> Result<Tokenizer, CheckpointError> {
        let path = self.tokenizer();
        let damaged = |problem: String| match self {
            ModelSource::Checkpoint(_) => CheckpointError::Damaged { path: path.clone(), problem },
            ModelSource::HuggingFace(_) => DataError::TokenizerFile { path: path.clone(), problem }.into(),
        };
        if let Err(error) = files::open(&path)
            && error.kind() == ErrorKind::InvalidInput
        {
            return Err(damaged(error.to_string()));
        }
        let tokenizer = Tokenizer::load(&path)?.ending_with(self.end_ids()?.first().copied());
        let (tokens, known) = (tokenizer.vocab_size(), self.model().vocab_size);
        if tokens > known {
            return Err(damaged(format!("it has {tokens} tokens, and the model knows {known}")));
        }
        Ok(tokenizer)
    }

    /// Returns the decoder with all its weights on `device`, built from `layers` and sharded by `builder`.
    /// Collective.
    pub fn decoder(
        &self,
        layers: &Layers,
        builder: EngineBuilder,
        device: &Device,
    ) -> Result<ShardedDecoder, CheckpointError> {
        self.require_layers(layers)?;
        self.check_weights_are_there(layers)?;
        // The seed is not used: all weights are loaded.
        let decoder = Decoder::new(layers, self.model(), Key::new(0), device)?;
        let decoder = ShardedDecoder::new(decoder, builder.load_later(|_| true))?;
        self.load_weights(decoder.engine(), &AllowMissing::default())?;
        Ok(decoder)
    }
}

/// Returns `here`, with the values of `saved` for keys that only add weights.
fn without_added_weights(saved: &ModelConfig, here: &ModelConfig) -> ModelConfig {
    let saved_moe = saved.moe.clone().unwrap_or_default();
    ModelConfig {
        layers: saved.layers,
        tie_embeddings: saved.tie_embeddings,
        attention_bias: saved.attention_bias,
        feed_forward_bias: saved.feed_forward_bias,
        qk_norm: saved.qk_norm,
        moe: here.moe.clone().map(|moe| MoeConfig {
            shared_expert_d_ff: saved_moe.shared_expert_d_ff,
            expert_bias: saved_moe.expert_bias,
            dense_layers: saved_moe.dense_layers,
            ..moe
        }),
        ..here.clone()
    }
}

/// Describes, key by key, why weights of the shape `saved` have a different meaning in a model of the shape
/// `here`. Dropout and initial values may differ: they are choices of a run.
fn differences(saved: &ModelConfig, here: &ModelConfig) -> Vec<String> {
    // Layers that are not built in are covered by the comparison of architectures.
    let [saved_parts, parts_here] = [saved, here].map(|model| Layers::default().missing(model));
    let is_stock = saved_parts.is_empty() && parts_here.is_empty();
    let built_in = |name: &String| if is_stock { name.clone() } else { String::new() };
    let extra = |model: &ModelConfig| match saved_parts == parts_here {
        true => json!(model.extra).to_string(),
        false => String::new(),
    };
    let shown = |model: &ModelConfig| {
        let scaling = model.rope_scaling.as_ref().map(|scaling| json!(scaling).to_string());
        [
            ("vocab_size", model.vocab_size.to_string()),
            ("d_model", model.d_model.to_string()),
            ("layers", model.layers.to_string()),
            ("heads", model.heads.to_string()),
            ("kv_heads", model.kv_heads.to_string()),
            ("d_ff", model.d_ff.to_string()),
            ("tie_embeddings", model.tie_embeddings.to_string()),
            ("block", built_in(&model.block.clone().unwrap_or_else(none))),
            ("attention", built_in(&model.attention)),
            ("feed_forward", built_in(&model.feed_forward)),
            ("moe", experts(model)),
            ("extra", extra(model)),
            ("window", model.window.map_or_else(none, |window| window.to_string())),
            ("window_pattern", window_pattern(model)),
            ("attention_bias", word(json!(model.attention_bias))),
            ("feed_forward_bias", model.feed_forward_bias.to_string()),
            ("qk_norm", model.qk_norm.to_string()),
            ("logit_softcap", model.logit_softcap.map_or_else(|| "none".to_owned(), |cap| cap.to_string())),
            ("rope_theta", model.rope_theta.to_string()),
            ("norm_eps", model.norm_eps.to_string()),
            ("rope_scaling", scaling.unwrap_or_else(none)),
        ]
    };
    let differs = |((key, saved), (_, here)): ((&str, String), (&str, String))| {
        (saved != here).then(|| format!("model.{key} is {saved} there and {here} here"))
    };
    let mut differences: Vec<_> = shown(saved).into_iter().zip(shown(here)).filter_map(differs).collect();
    // Already explained by different heads or a different width.
    let explained = saved.d_model != here.d_model || saved.heads != here.heads;
    if !explained && saved.head_dim() != here.head_dim() {
        let (saved, here) = (saved.head_dim(), here.head_dim());
        differences.push(format!("model.head_dim is {saved} there and {here} here"));
    }
    differences
}

/// Returns which blocks of a model have its window, regardless of the notation.
fn window_pattern(model: &ModelConfig) -> String {
    let windowed: Vec<_> = (0..model.layers).map(|index| model.window_of(index).is_some()).collect();
    let pattern = ModelConfig::window_pattern_of(&windowed).filter(|_| model.window.is_some());
    pattern.unwrap_or_else(none)
}

fn none() -> String {
    "none".to_owned()
}

/// Describes the settings that affect the experts' weights; the balance of their load is a choice of a run.
fn experts(model: &ModelConfig) -> String {
    match &model.moe {
        Some(moe) => {
            let MoeConfig { router_aux_loss_coef, router_aux_loss_over, .. } = MoeConfig::default();
            json!(MoeConfig { router_aux_loss_coef, router_aux_loss_over, ..moe.clone() }).to_string()
        }
        None => "none".to_owned(),
    }
}

/// Returns the name of a variant in configurations.
fn word(value: Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}
