//! A model on disk, in any format that commands accept.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::Device;
use kiln_data::{DataError, Tokenizer};
use kiln_model::decoder::Decoder;
use kiln_model::{FULL_ATTENTION, Key, Layers, LoraConfig, ModelConfig, MoeConfig, SWIGLU};
use kiln_shard::{Engine, EngineBuilder};
use kiln_sys::Meter;
use kiln_sys::files;
use kiln_sys::output::ProgressLine;
use serde_json::{Value, json};

use crate::hugging_face::{self, AdapterFolder, HuggingFaceFolder, SamplingDefaults};
use crate::merge::MergedWeights;
use crate::sharded::ShardedDecoder;
use crate::weights::{self, AdaptedWeights, AllowMissing, Weights};
use crate::{Architecture, BaseModel, Checkpoint, CheckpointError, Checksum, TOKENIZER_FILE, error::Result};

/// Maximum sequence length, in tokens, for evaluating a model that Kiln has not trained.
const USUAL_SEQ_LEN: usize = 2048;

const LOADING: &str = "loading the weights";

/// A model on disk.
#[derive(Clone, Debug)]
pub enum ModelSource {
    /// A Kiln checkpoint, sharded or full; and the model that its adapters change, if it contains only adapters.
    Checkpoint(Box<Checkpoint>, Option<Box<ModelSource>>),
    /// A folder in the Hugging Face layout.
    HuggingFace(Box<HuggingFaceFolder>),
    /// A folder with adapters in PEFT's layout, and the model that they adapt.
    Adapters(Box<AdapterFolder>, Box<ModelSource>),
}

impl ModelSource {
    /// Opens a checkpoint, the newest checkpoint of a run folder, or a folder in the Hugging Face layout. Before
    /// computing with the weights, call [`ModelSource::require_layers`].
    pub fn open(path: &Path) -> Result<Self> {
        if AdapterFolder::is_one(path) {
            let base = ModelSource::open(&AdapterFolder::find_base(path)?)?;
            let adapters = AdapterFolder::open(path, base.model())?;
            return Ok(ModelSource::Adapters(Box::new(adapters), Box::new(base)));
        }
        if HuggingFaceFolder::is_one(path) {
            return Ok(ModelSource::HuggingFace(Box::new(HuggingFaceFolder::open(path)?)));
        }
        ModelSource::from_checkpoint(Checkpoint::open(path)?, None)
    }

    /// Returns `checkpoint` and, if it contains only adapters, the model that they change: in its place or, if it is not
    /// there any more, in the folder `instead`.
    pub fn from_checkpoint(checkpoint: Checkpoint, instead: Option<&Path>) -> Result<Self> {
        let Some(saved) = &checkpoint.manifest().base else {
            return Ok(ModelSource::Checkpoint(Box::new(checkpoint), None));
        };
        let opened = open_base(saved, &saved.path, &checkpoint);
        let base = match instead {
            Some(instead) if opened.is_err() => open_base(saved, instead, &checkpoint),
            _ => opened,
        };
        let base = Some(Box::new(base?));
        Ok(ModelSource::Checkpoint(Box::new(checkpoint), base))
    }

    /// Describes this model for the checkpoints of adapters that change it.
    ///
    /// # Errors
    ///
    /// If its weights cannot be read.
    pub fn as_base(&self) -> Result<BaseModel> {
        let path = std::path::absolute(self.folder()).map_err(CheckpointError::io("find", self.folder()))?;
        Ok(BaseModel { path, beginnings: checksum_of_beginnings(&*self.weights())? })
    }

    /// Opens a model like [`ModelSource::open`]. Fails unless `layers` has all of its layers.
    pub fn open_with(path: &Path, layers: &Layers) -> Result<Self> {
        let source = ModelSource::open(path)?;
        source.require_layers(layers)?;
        Ok(source)
    }

    /// Fails unless `layers` has all layers of the model.
    pub fn require_layers(&self, layers: &Layers) -> Result<()> {
        self.refuse(Architecture::objection_with(layers, self.model()))
    }

    /// Fails unless the weights belong to the architecture `here`. Equal names and shapes do not imply this.
    pub fn require_architecture(&self, here: &Architecture) -> Result<()> {
        self.refuse(match self {
            ModelSource::Checkpoint(checkpoint, _) => checkpoint.manifest().architecture.objection(here),
            ModelSource::HuggingFace(_) => Architecture::decoder().objection(here),
            ModelSource::Adapters(_, base) => return base.require_architecture(here),
        })
    }

    fn refuse(&self, objection: Option<String>) -> Result<()> {
        let path = self.folder().to_owned();
        objection.map_or(Ok(()), |objection| Err(CheckpointError::OtherArchitecture { path, objection }))
    }

    /// Returns the model's folder.
    pub fn folder(&self) -> &Path {
        match self {
            ModelSource::Checkpoint(checkpoint, _) => checkpoint.folder(),
            ModelSource::HuggingFace(folder) => folder.folder(),
            ModelSource::Adapters(adapters, _) => adapters.folder(),
        }
    }

    /// Returns the shape of the model.
    pub fn model(&self) -> &ModelConfig {
        match self {
            ModelSource::Checkpoint(checkpoint, _) => &checkpoint.state().model,
            ModelSource::HuggingFace(folder) => folder.model(),
            ModelSource::Adapters(adapters, _) => adapters.model(),
        }
    }

    /// Returns the shape of the model, with built-in layers instead of those that `layers` lacks.
    pub fn model_of(&self, layers: &Layers) -> ModelConfig {
        let mut model = self.model().clone();
        for (key, name) in layers.missing(self.model()) {
            match key {
                "block" => model.block = None,
                "head_layer" => model.head_layer = None,
                "attention" => model.attention = FULL_ATTENTION.to_owned(),
                _ => model.feed_forward = SWIGLU.to_owned(),
            }
            // Settings in no layer's table may belong to this layer.
            if model.extra.remove(name).is_none_or(|settings| !settings.is_object()) {
                model.extra.clear();
            }
        }
        model
    }

    /// Returns the folder of the tokenizer and its settings: the model's or, if adapters come without a tokenizer, that
    /// of the model that they adapt.
    pub fn tokenizer_folder(&self) -> &Path {
        match self {
            ModelSource::Adapters(adapters, base) if !adapters.folder().join(TOKENIZER_FILE).exists() => {
                base.tokenizer_folder()
            }
            source => source.folder(),
        }
    }

    /// Returns the path of the tokenizer file, which may not exist.
    pub fn tokenizer(&self) -> PathBuf {
        self.tokenizer_folder().join(TOKENIZER_FILE)
    }

    /// Returns the longest sequence, in tokens, that the model supports.
    pub fn context_length(&self) -> usize {
        match self {
            ModelSource::Checkpoint(checkpoint, _) => checkpoint.context_length(),
            ModelSource::HuggingFace(folder) => folder.context_length(),
            ModelSource::Adapters(_, base) => base.context_length(),
        }
    }

    /// Returns the context length that the original model specified, independent of the sequence length in training.
    pub fn given_context(&self) -> Option<usize> {
        match self {
            ModelSource::Checkpoint(checkpoint, _) => checkpoint.given_context(),
            ModelSource::HuggingFace(folder) => Some(folder.context_length()),
            ModelSource::Adapters(_, base) => base.given_context(),
        }
    }

    /// Returns the sequence length, in tokens, for evaluations: the length in training, or the context length up to
    /// 2048.
    pub fn seq_len(&self) -> usize {
        let context = self.context_length();
        match self {
            ModelSource::Checkpoint(checkpoint, _) if checkpoint.state().next_sample > 0 => {
                checkpoint.seq_len().min(context)
            }
            _ => context.min(USUAL_SEQ_LEN),
        }
    }

    /// Returns the SHA-256 of the tokens that the model was trained on, if recorded.
    pub fn data_sha256(&self) -> Option<&str> {
        match self {
            ModelSource::Checkpoint(checkpoint, _) => checkpoint.state().data_sha256.as_deref(),
            ModelSource::HuggingFace(_) => None,
            ModelSource::Adapters(_, base) => base.data_sha256(),
        }
    }

    /// Returns the end-of-text ids that the folder specifies, in addition to the tokenizer's own.
    pub fn end_ids(&self) -> Result<Vec<u32>> {
        Ok(hugging_face::token_ids(self.tokenizer_folder())?.end)
    }

    /// Returns the settings for generating text that the folder recommends.
    pub fn sampling_defaults(&self) -> Result<SamplingDefaults> {
        hugging_face::sampling_defaults(self.tokenizer_folder())
    }

    /// Returns the weights, for reading in parts.
    pub fn weights(&self) -> Box<dyn Weights + '_> {
        match self {
            ModelSource::Checkpoint(checkpoint, base) => match base {
                None => Box::new(checkpoint.reader()),
                Some(base) => {
                    Box::new(AdaptedWeights { base: base.weights(), adapters: Box::new(checkpoint.reader()) })
                }
            },
            ModelSource::HuggingFace(folder) => Box::new(HuggingFaceFolder::clone(folder)),
            ModelSource::Adapters(adapters, base) => Box::new(AdaptedWeights {
                base: base.weights(),
                adapters: Box::new(AdapterFolder::clone(adapters)),
            }),
        }
    }

    /// Returns the model without its adapters: the one that they change, or else this model.
    pub fn base_model(&self) -> &ModelSource {
        match self {
            ModelSource::Checkpoint(_, base) => base.as_deref().unwrap_or(self),
            ModelSource::HuggingFace(_) => self,
            ModelSource::Adapters(_, base) => base,
        }
    }

    /// Returns the model without its adapters, as [`ModelSource::base_model`].
    pub(crate) fn into_base(self) -> ModelSource {
        match self.base_model() {
            base if std::ptr::eq(base, &self) => self,
            base => base.clone(),
        }
    }

    /// Returns the model and its weights with the adapters merged in, for reading in parts.
    pub(crate) fn merged(&self) -> (ModelConfig, Box<dyn Weights + '_>) {
        let mut model = self.model().clone();
        match model.lora.take() {
            Some(lora) => (model, Box::new(MergedWeights::new(self.weights(), lora.scale()))),
            None => (model, self.weights()),
        }
    }

    /// Fails unless the weight files have the expected lengths. `layers` must contain all layers of the model.
    pub fn check_weights_are_there(&self, layers: &Layers) -> Result<()> {
        match self {
            ModelSource::Checkpoint(checkpoint, base) => {
                let base = base.as_ref().map(|base| base.model());
                checkpoint.check_weights_are_there(layers, base)
            }
            // Opening the folder has already checked this.
            ModelSource::HuggingFace(_) => Ok(()),
            ModelSource::Adapters(_, base) => base.check_weights_are_there(layers),
        }
    }

    /// Fails if the saved model has a different shape from `model`, even if the weights would fit, as with another
    /// number of heads. If weights may be missing, keys that only add weights are not compared.
    pub fn check_model(&self, model: &ModelConfig, allow_missing: &AllowMissing) -> Result<()> {
        let model = &match (&self.model().lora, &model.lora) {
            (Some(_), None) => {
                return Err(CheckpointError::UnusedAdapters { path: self.folder().to_owned() });
            }
            // The run adds adapters.
            (None, Some(_)) => ModelConfig { lora: None, ..model.clone() },
            // The comparison of names covers the targets, and each run may choose its dropout.
            (Some(saved), Some(here)) => {
                let LoraConfig { rank, alpha, .. } = *here;
                ModelConfig { lora: Some(LoraConfig { rank, alpha, ..saved.clone() }), ..model.clone() }
            }
            (None, None) => model.clone(),
        };
        let differences = match allow_missing.is_empty() {
            true => differences(self.model(), model),
            false => differences(self.model(), &without_added_weights(self.model(), model)),
        };
        if differences.is_empty() {
            return Ok(());
        }
        let instead = match self {
            ModelSource::Checkpoint(..) => "use another checkpoint",
            ModelSource::HuggingFace(_) | ModelSource::Adapters(..) => "start from another model",
        };
        Err(CheckpointError::OtherModel { path: self.folder().to_owned(), differences, instead })
    }

    /// Loads this rank's part of all weights. Names and shapes must match, except for weights that may be missing.
    /// Returns the names of the missing weights. Collective.
    pub fn load_weights(&self, engine: &Engine, allow_missing: &AllowMissing) -> Result<BTreeSet<String>> {
        // Show progress only on a terminal, so that it is not mixed with the output of commands.
        let line = |meter| (engine.world().rank() == 0).then(|| ProgressLine::on_terminal(LOADING, meter));
        match self {
            ModelSource::Checkpoint(checkpoint, base) => {
                let reader = checkpoint.reader();
                if let Some(base) = base {
                    base.load_weights(engine, allow_missing)?;
                    reader.load_weights(engine, &AllowMissing::all_but_adapters())?;
                    return Ok(BTreeSet::new());
                }
                let _line = line(reader.meter());
                reader.load_weights(engine, allow_missing)
            }
            ModelSource::HuggingFace(_) | ModelSource::Adapters(..) => {
                let (weights, meter) = (self.weights(), Arc::new(Meter::default()));
                let _line = line(meter.clone());
                let absent = weights::compare(engine, &*weights, allow_missing)?;
                weights::load(engine, &*weights, &absent, &meter)?.check(self.folder(), false)?;
                Ok(absent)
            }
        }
    }

    /// Loads the tokenizer, with the folder's first end-of-text id. Fails if it has tokens outside the model's
    /// vocabulary.
    pub fn load_tokenizer(&self) -> Result<Tokenizer> {
        let path = self.tokenizer();
        let damaged = |problem: String| match self {
            ModelSource::Checkpoint(..) => CheckpointError::damaged(&path, problem),
            _ => DataError::TokenizerFile { path: path.clone(), problem }.into(),
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

    /// Returns the decoder with all weights on `device`, built from `layers` and sharded by `builder`. Collective.
    pub fn decoder(
        &self,
        layers: &Layers,
        builder: EngineBuilder,
        device: &Device,
    ) -> Result<ShardedDecoder> {
        self.require_layers(layers)?;
        self.check_weights_are_there(layers)?;
        // All weights are loaded, so the seed has no effect.
        let decoder = Decoder::new(layers, self.model(), Key::new(0), device)?;
        let decoder = ShardedDecoder::new(decoder, builder.load_later(|_| true))?;
        self.load_weights(decoder.engine(), &AllowMissing::default())?;
        Ok(decoder)
    }
}

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

/// Number of elements of each weight that [`BaseModel::beginnings`] covers.
const BEGINNING: usize = 256;

fn checksum_of_beginnings(weights: &dyn Weights) -> Result<Checksum> {
    let mut all = Vec::new();
    for (name, shape) in weights.shapes() {
        let mut values = vec![0.0; shape.iter().product::<usize>().min(BEGINNING)];
        weights.read(name, 0..values.len(), &mut values)?;
        all.extend(values);
    }
    Ok(Checksum::of(bytemuck::cast_slice(&all)))
}

/// Opens the model in `path`, which the adapters in `checkpoint` must have changed.
fn open_base(saved: &BaseModel, path: &Path, checkpoint: &Checkpoint) -> Result<ModelSource> {
    let failed = |problem: String| CheckpointError::Base {
        path: checkpoint.folder().to_owned(),
        base: path.to_owned(),
        problem,
    };
    if !path.exists() {
        return Err(failed("no longer exists".to_owned()));
    }
    let base = ModelSource::open(path)?.into_base();
    let expected = ModelConfig { lora: None, ..checkpoint.state().model.clone() };
    let differences = differences(base.model(), &expected);
    if !differences.is_empty() {
        return Err(failed(format!("is another model now ({})", differences.join(", "))));
    }
    let beginnings = checksum_of_beginnings(&*base.weights())?;
    if beginnings == saved.beginnings { Ok(base) } else { Err(failed("has other weights now".to_owned())) }
}

/// Describes, key by key, how the shapes `saved` and `here` differ, except for settings that each run may choose.
fn differences(saved: &ModelConfig, here: &ModelConfig) -> Vec<String> {
    let [saved_parts, parts_here] = [saved, here].map(|model| Layers::default().missing(model));
    // Another number of heads or another model width explains a different head width.
    let is_explained = saved.d_model != here.d_model || saved.heads != here.heads;
    let keys = |model: &ModelConfig| {
        let mut model = model.clone();
        model.head_dim = Some(model.head_dim()).filter(|_| !is_explained);
        let windowed: Vec<_> = (0..model.layers).map(|index| model.window_of(index).is_some()).collect();
        model.window_pattern = ModelConfig::window_pattern_of(&windowed).filter(|_| model.window.is_some());
        if let Some(moe) = &mut model.moe {
            // Each run may choose how to balance the experts' load.
            let MoeConfig { router_aux_loss_coef, router_aux_loss_over, .. } = MoeConfig::default();
            *moe = MoeConfig { router_aux_loss_coef, router_aux_loss_over, ..moe.clone() };
        }
        let mut keys: BTreeMap<String, Value> = serde_json::from_value(json!(model)).unwrap_or_default();
        keys.insert("attention".to_owned(), json!(model.attention));
        let mut ignored = vec!["dropout", "init_std"];
        // `require_architecture` compares custom layers.
        ignored.extend(saved_parts.iter().chain(&parts_here).map(|(key, _)| *key));
        if saved_parts != parts_here {
            ignored.push("extra");
        }
        keys.retain(|key, value| !ignored.contains(&key.as_str()) && !value.is_null());
        keys
    };
    let (saved, here) = (keys(saved), keys(here));
    let names: BTreeSet<_> = saved.keys().chain(here.keys()).collect();
    let differs = |key: &String| {
        let [there, here] = [&saved, &here].map(|keys| keys.get(key).map_or("none".to_owned(), shown));
        (there != here).then(|| format!("model.{key} is {there} there and {here} here"))
    };
    names.into_iter().filter_map(differs).collect()
}

fn shown(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.as_f64().unwrap_or(f64::NAN).to_string(),
        value => value.to_string(),
    }
}
