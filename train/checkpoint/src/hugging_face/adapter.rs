//! Low-rank adapters in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`, next to the path of the
//! model that they adapt.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use kiln_model::{LoraConfig, ModelConfig};
use serde_json::{Value, json};

use super::check_inside;
use super::keys::Keys;
use super::names::{HuggingFaceName, adapter_name};
use super::weight_file::WeightFile;
use crate::CheckpointError;
use crate::error::{Mismatch, Result};
use crate::sharded::{outline, parameter_shapes};
use crate::weights::Weights;

pub(crate) const ADAPTER_CONFIG_FILE: &str = "adapter_config.json";
pub(crate) const ADAPTER_FILE: &str = "adapter_model.safetensors";

/// Adapters in PEFT's layout.
#[derive(Clone, Debug)]
pub struct AdapterFolder {
    folder: PathBuf,
    /// The model with its adapters.
    model: ModelConfig,
    file: WeightFile,
    /// For each parameter of an adapter, its shape and its name in the file.
    tensors: BTreeMap<String, (Vec<usize>, HuggingFaceName)>,
}

impl AdapterFolder {
    /// Reports whether `folder` contains adapters.
    pub fn is_one(folder: &Path) -> bool {
        folder.join(ADAPTER_CONFIG_FILE).is_file()
    }

    /// Returns the folder of the model that the adapters in `folder` change.
    ///
    /// # Errors
    ///
    /// If the adapters are of a kind that Kiln does not have, or name no folder.
    pub fn find_base(folder: &Path) -> Result<PathBuf> {
        let keys = AdapterFolder::keys(folder)?;
        let base = keys.needed("base_model_name_or_path", keys.text("base_model_name_or_path"))?;
        let found = [folder.join(&base), PathBuf::from(&base)].into_iter().find(|path| path.is_dir());
        found.ok_or_else(|| {
            let problem = format!(
                "is \"{base}\", which is not a folder here: set it to the folder of the model that was adapted"
            );
            CheckpointError::BaseModel { path: folder.to_owned(), problem }
        })
    }

    fn keys(folder: &Path) -> Result<Keys> {
        for name in [ADAPTER_CONFIG_FILE, ADAPTER_FILE] {
            check_inside(folder, name)?;
        }
        let keys = Keys::read(&folder.join(ADAPTER_CONFIG_FILE))?;
        refuse_other_kinds(&keys)?;
        Ok(keys)
    }

    /// Opens the adapters in `folder`, which change a model of the shape `base`.
    ///
    /// # Errors
    ///
    /// If the adapters are of a kind that Kiln does not have, or do not fit the model.
    pub fn open(folder: &Path, base: &ModelConfig) -> Result<Self> {
        let keys = AdapterFolder::keys(folder)?;
        if base.lora.is_some() {
            let problem = "names a model that already has adapters: merge them first".to_owned();
            return Err(CheckpointError::BaseModel { path: folder.to_owned(), problem });
        }
        let file = WeightFile::open(&folder.join(ADAPTER_FILE))?;
        let lora = LoraConfig {
            rank: keys.needed("r", keys.size("r"))?,
            alpha: keys.needed("lora_alpha", keys.number("lora_alpha"))?,
            dropout: keys.number("lora_dropout")?.unwrap_or(0.0),
            targets: targets(base, &file)?,
        };
        let model = ModelConfig { lora: Some(lora), ..base.clone() };
        let shape = |source| CheckpointError::Shape { path: folder.join(ADAPTER_CONFIG_FILE), source };
        model.validate().map_err(shape)?;
        let (mut tensors, mut mismatch) = (BTreeMap::new(), Mismatch::default());
        for (name, shape) in parameter_shapes(&outline(&model)?) {
            let Some(there) = adapter_name(&name) else { continue };
            match file.tensors.get(&there.name) {
                None => mismatch.missing.push(there.name),
                Some(entry) if !entry.shape.iter().eq(shape.iter().rev()) => {
                    mismatch.misshapen.push(format!(
                        "`{}` is {:?}, expected {:?}",
                        there.name,
                        entry.shape,
                        shape.iter().rev().collect::<Vec<_>>()
                    ))
                }
                Some(_) => {
                    file.check_dtype(&there.name)?;
                    tensors.insert(name, (shape, there));
                }
            }
        }
        if !mismatch.is_empty() {
            return Err(CheckpointError::Adapters { path: folder.to_owned(), mismatch });
        }
        Ok(AdapterFolder { folder: folder.to_owned(), model, file, tensors })
    }

    /// Returns the path of the folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the shape of the model with its adapters.
    pub fn model(&self) -> &ModelConfig {
        &self.model
    }

    /// Describes the adapters of the model in `base`.
    pub fn describe(&self, base: &Path) -> String {
        let parameters: usize = self.tensors.values().map(|(shape, _)| shape.iter().product::<usize>()).sum();
        let (folder, base) = (self.folder.display(), base.display());
        let LoraConfig { rank, alpha, targets, .. } = self.model.lora.clone().unwrap_or_default();
        let targets = targets.join(", ");
        format!(
            "{folder}: adapters of the model in {base}\nrank {rank}, alpha {alpha}, {parameters} parameters, of \
             the maps {targets}"
        )
    }
}

/// The adapters alone.
impl Weights for AdapterFolder {
    fn folder(&self) -> &Path {
        &self.folder
    }

    fn shapes(&self) -> BTreeMap<&str, &[usize]> {
        self.tensors.iter().map(|(name, (shape, _))| (name.as_str(), shape.as_slice())).collect()
    }

    fn read(&self, name: &str, range: Range<usize>, values: &mut [f32]) -> Result<()> {
        let (_, there) = self.tensors.get(name).ok_or_else(|| {
            CheckpointError::damaged_weights(&self.folder, format!("there is no adapter `{name}`"))
        })?;
        self.file.read(&there.name, there.transposed, range, values)
    }
}

/// Fails for adapters other than those of [`LoraConfig`].
fn refuse_other_kinds(keys: &Keys) -> Result<()> {
    let kind = keys.needed("peft_type", keys.text("peft_type"))?;
    if kind != "LORA" {
        return Err(keys.unsupported("peft_type", "LORA"));
    }
    if keys.text("bias")?.is_some_and(|bias| bias != "none") {
        return Err(keys.unsupported("bias", "none"));
    }
    for key in ["use_dora", "use_rslora", "use_qalora", "lora_bias", "fan_in_fan_out"] {
        if keys.flag(key)? {
            return Err(keys.unsupported(key, "false"));
        }
    }
    let is_empty = |value: &Value| match value {
        Value::Array(items) => items.is_empty(),
        Value::Object(items) => items.is_empty(),
        _ => false,
    };
    for key in ["rank_pattern", "alpha_pattern", "modules_to_save", "layer_replication", "target_parameters"]
    {
        if keys.get(key).is_some_and(|value| !is_empty(value)) {
            return Err(keys.unsupported(key, "none"));
        }
    }
    Ok(())
}

/// Returns the targets of adapters of `model`, in names of Kiln, from the tensors in their file: PEFT's own targets may
/// be any regular expression.
fn targets(model: &ModelConfig, file: &WeightFile) -> Result<Vec<String>> {
    let all = ModelConfig { lora: Some(LoraConfig::default()), ..model.clone() };
    let maps: BTreeMap<String, String> = parameter_shapes(&outline(&all)?)
        .into_iter()
        .filter_map(|(name, _)| Some((adapter_name(&name)?.name, name.strip_suffix(".lora.a")?.to_owned())))
        .collect();
    let mut adapted = BTreeSet::new();
    for tensor in file.tensors.keys() {
        let first = tensor.replace(".lora_B.", ".lora_A.");
        let Some(map) = maps.get(&first) else {
            let problem = format!("`{tensor}` does not belong to a map that can have an adapter");
            return Err(CheckpointError::damaged_weights(&file.path, problem));
        };
        adapted.insert(map.as_str());
    }
    Ok(short_targets(&adapted, &maps.values().map(String::as_str).collect()))
}

/// Returns the last parts of the names of the `adapted` maps if all maps with such a name are adapted, else the names.
fn short_targets(adapted: &BTreeSet<&str>, all: &BTreeSet<&str>) -> Vec<String> {
    let short: BTreeSet<_> = adapted.iter().map(|name| last_part(name)).collect();
    let is_whole = all.iter().all(|name| adapted.contains(name) || !short.contains(last_part(name)));
    let names = if is_whole { &short } else { adapted };
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn last_part(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}

/// Returns the settings of the adapters of `model` as PEFT reads them. `base` is the path of the model they adapt.
pub(crate) fn adapter_config(lora: &LoraConfig, model: &ModelConfig, base: Option<&str>) -> Result<Value> {
    let all = ModelConfig { lora: Some(LoraConfig::default()), ..model.clone() };
    let shapes = parameter_shapes(&outline(&all)?);
    let maps: BTreeMap<String, String> = shapes
        .into_iter()
        .filter_map(|(name, _)| Some((name.strip_suffix(".lora.a")?.to_owned(), module_of(&name)?)))
        .collect();
    let modules = |wanted: &dyn Fn(&str) -> bool| -> BTreeSet<&str> {
        maps.iter().filter(|(name, _)| wanted(name)).map(|(_, module)| module.as_str()).collect()
    };
    let targets = short_targets(&modules(&|name| lora.adapts(name)), &modules(&|_| true));
    Ok(json!({
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": false,
        "inference_mode": true,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "modules_to_save": null,
        "peft_type": "LORA",
        "r": lora.rank,
        "target_modules": targets,
        "task_type": "CAUSAL_LM",
        "use_dora": false,
        "use_rslora": false,
    }))
}

/// Returns the name in transformers of the map with the adapter `name`, such as `layers.0.self_attn.q_proj`.
fn module_of(name: &str) -> Option<String> {
    let there = adapter_name(name)?.name;
    let module = there.strip_prefix("base_model.model.")?.strip_suffix(".lora_A.weight")?;
    Some(module.to_owned())
}
