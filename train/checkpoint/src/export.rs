//! Exports a model to the Hugging Face layout, for `kiln export`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use half::{bf16, f16};
use kiln_data::Tokenizer;
use kiln_model::ModelConfig;
use kiln_model::layers::HEAD_LAYER_PREFIX;
use kiln_sys::Meter;
use kiln_sys::header::{Array, header};
use serde_json::{Map, Value, json};

use crate::TOKENIZER_FILE;
use crate::error::Result;
use crate::hugging_face::adapter::{ADAPTER_CONFIG_FILE, ADAPTER_FILE, adapter_config};
use crate::hugging_face::config::to_json;
use crate::hugging_face::folder::{in_file, part_shape};
use crate::hugging_face::names::{HuggingFaceName, adapter_name, hugging_face_names};
use crate::hugging_face::{
    CONFIG_FILE, GENERATION_FILE, MODEL_FILE, TOKENIZER_CONFIG_FILE, TokenIds, carried_files,
    generation_file, token_ids,
};
use crate::sharded::{outline, parameter_shapes};
use crate::source::ModelSource;
use crate::weights::Watched;
use crate::write::INDEX_FILE;
use crate::write::NewFolder;
use crate::{CheckpointError, folder};

const ROWS: usize = 64;

/// Element type of exported weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum ExportDtype {
    /// 32-bit floating point, the weights unchanged.
    F32,
    /// bfloat16.
    Bf16,
    /// 16-bit floating point.
    F16,
}

impl ExportDtype {
    fn name(self) -> &'static str {
        ["F32", "BF16", "F16"][self as usize]
    }

    /// Returns the type's name in PyTorch.
    pub fn torch_name(self) -> &'static str {
        ["float32", "bfloat16", "float16"][self as usize]
    }

    fn width(self) -> usize {
        if self == ExportDtype::F32 { 4 } else { 2 }
    }

    /// Appends a value, rounded to the nearest. Returns `false` if the value is out of range.
    fn append(self, value: f32, bytes: &mut Vec<u8>) -> bool {
        let rounded = match self {
            ExportDtype::F32 => {
                bytes.extend(value.to_le_bytes());
                value
            }
            ExportDtype::Bf16 => {
                let rounded = bf16::from_f32(value);
                bytes.extend(rounded.to_le_bytes());
                rounded.to_f32()
            }
            ExportDtype::F16 => {
                let rounded = f16::from_f32(value);
                bytes.extend(rounded.to_le_bytes());
                rounded.to_f32()
            }
        };
        rounded.is_finite() || !value.is_finite()
    }
}

struct Item {
    name: String,
    first: usize,
    /// Shape of the part to write, in Kiln's order of dimensions.
    shape: Vec<usize>,
    there: HuggingFaceName,
}

impl Item {
    fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

/// Writes a model in the Hugging Face layout into the new folder `out`, in files of at most `max_shard_bytes` unless a
/// weight is larger. Holds one weight in memory at a time. `meter` counts the bytes of the weights, as f32. Fails if
/// `out` exists, a weight is not finite, or no Hugging Face architecture has all features of the model. Merges adapters
/// into the weights, and leaves out the layer of the head, which only objectives run.
pub fn export(
    source: &ModelSource,
    out: &Path,
    dtype: ExportDtype,
    max_shard_bytes: usize,
    meter: &Meter,
) -> Result<()> {
    let path = source.folder();
    let tokens = tokens_of(source)?;
    let (model, weights) = source.merged();
    let model = ModelConfig { head_layer: None, extra: Map::new(), ..model };
    let config = to_json(&model, source.context_length(), &tokens, dtype.torch_name(), path)?;
    let items = items(path, &model)?;
    let known: BTreeSet<_> = items.iter().map(|item| item.name.as_str()).collect();
    let is_unknown = |name: &&&str| !known.contains(**name) && !name.starts_with(HEAD_LAYER_PREFIX);
    if let Some(name) = weights.shapes().keys().find(is_unknown) {
        return Err(CheckpointError::Unnamed { path: path.to_owned(), name: (*name).to_owned() });
    }
    let numel = items.iter().map(Item::numel).sum();
    let weights = Watched::new(weights.as_ref(), numel, meter);
    let out = NewFolder::create(out)?;
    let write = |name: &str, content: &[u8]| folder::write(&out.path().join(name), content);
    let write_json = |name: &str, value: &Value| write(name, format!("{value:#}\n").as_bytes());
    let has_generation = copy_tokenizer(source, &tokens, out.path())?;
    if !has_generation {
        let (name, content) = generation_file(&tokens);
        write(&name, &content)?;
    }
    write_json(CONFIG_FILE, &config)?;
    let files = split(items, dtype, max_shard_bytes);
    for (name, items) in &files {
        write_file(&out.path().join(name), &weights, items, dtype)?;
    }
    if files.len() > 1 {
        let items = || files.iter().flat_map(|(file, items)| items.iter().map(move |item| (file, item)));
        let total: usize = items().map(|(_, item)| item.numel() * dtype.width()).sum();
        let weight_map: BTreeMap<_, _> = items().map(|(file, item)| (&item.there.name, file)).collect();
        write_json(INDEX_FILE, &json!({"metadata": {"total_size": total}, "weight_map": weight_map}))?;
    }
    weights.check()?;
    out.commit()
}

/// Writes the adapters of a model in PEFT's layout into the new folder `out`, with the tokenizer. `meter` counts the
/// bytes of the adapters, as f32.
///
/// # Errors
///
/// If `out` exists, an adapter is not finite, or the model has no adapters.
pub fn export_adapters(source: &ModelSource, out: &Path, dtype: ExportDtype, meter: &Meter) -> Result<()> {
    let Some(lora) = &source.model().lora else {
        return Err(CheckpointError::NoAdapters { path: source.folder().to_owned() });
    };
    let base = std::path::absolute(source.base_model().folder());
    let base = base.ok().map(|path| path.display().to_string());
    let config = adapter_config(lora, source.model(), base.as_deref())?;
    let tokens = tokens_of(source)?;
    let model = ModelConfig { head_layer: None, extra: Map::new(), ..source.model().clone() };
    let shapes = parameter_shapes(&outline(&model)?).into_iter();
    let item = |(name, shape): (String, Vec<usize>)| {
        let there = adapter_name(&name)?;
        Some(Item { name, first: 0, shape, there })
    };
    let items: Vec<_> = shapes.filter_map(item).collect();
    let weights = source.weights();
    let weights = Watched::new(weights.as_ref(), items.iter().map(Item::numel).sum(), meter);
    let out = NewFolder::create(out)?;
    folder::write(&out.path().join(ADAPTER_CONFIG_FILE), format!("{config:#}\n").as_bytes())?;
    copy_tokenizer(source, &tokens, out.path())?;
    write_file(&out.path().join(ADAPTER_FILE), &weights, &items, dtype)?;
    weights.check()?;
    out.commit()
}

/// Copies the tokenizer and the files that belong to it into `out`. Returns whether the settings of generation are
/// among them.
fn copy_tokenizer(source: &ModelSource, tokens: &TokenIds, out: &Path) -> Result<bool> {
    let carried = carried_files(source.tokenizer_folder(), tokens)?;
    for (name, content) in &carried {
        folder::write(&out.join(name), content)?;
    }
    let is_carried = |name: &str| carried.iter().any(|(carried, _)| carried == name);
    if is_carried(TOKENIZER_FILE) && !is_carried(TOKENIZER_CONFIG_FILE) {
        let config = format!("{:#}\n", tokenizer_config(source, tokens)?);
        folder::write(&out.join(TOKENIZER_CONFIG_FILE), config.as_bytes())?;
    }
    Ok(is_carried(GENERATION_FILE))
}

fn items(path: &Path, model: &ModelConfig) -> Result<Vec<Item>> {
    let mut items = Vec::new();
    for (name, shape) in parameter_shapes(&outline(model)?) {
        let Some(parts) = hugging_face_names(&name, &shape) else {
            return Err(CheckpointError::Unnamed { path: path.to_owned(), name });
        };
        let shape = part_shape(&shape, parts.len()).to_vec();
        let len: usize = shape.iter().product();
        let item =
            |(index, there)| Item { name: name.clone(), first: index * len, shape: shape.clone(), there };
        items.extend(parts.into_iter().enumerate().map(item));
    }
    Ok(items)
}

/// Divides items into files of at most `most` bytes each; a file with a single weight may be larger.
fn split(items: Vec<Item>, dtype: ExportDtype, most: usize) -> Vec<(String, Vec<Item>)> {
    let (mut files, mut used): (Vec<Vec<Item>>, _) = (Vec::new(), 0);
    for item in items {
        let bytes = item.numel() * dtype.width();
        match files.last_mut() {
            Some(file) if used + bytes <= most => {
                used += bytes;
                file.push(item);
            }
            _ => {
                used = bytes;
                files.push(vec![item]);
            }
        }
    }
    let count = files.len();
    let name = |index: usize| match count {
        1 => MODEL_FILE.to_owned(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
    };
    files.into_iter().enumerate().map(|(index, file)| (name(index), file)).collect()
}

/// Returns the ids that start and end a text: the folder's, or else the tokenizer's.
fn tokens_of(source: &ModelSource) -> Result<TokenIds> {
    let mut tokens = token_ids(source.tokenizer_folder())?;
    let path = source.tokenizer();
    if path.is_file() {
        let tokenizer = Tokenizer::load(&path)?;
        if tokens.end.is_empty() {
            tokens.end = tokenizer.end_of_text().into_iter().collect();
        }
        tokens.start = tokens.start.or_else(|| tokenizer.start_of_text());
    }
    Ok(tokens)
}

/// Returns the settings that transformers needs to load `tokenizer.json` without other files.
fn tokenizer_config(source: &ModelSource, tokens: &TokenIds) -> Result<Value> {
    let tokenizer = Tokenizer::load(source.tokenizer())?;
    let mut config = json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": source.context_length(),
        "clean_up_tokenization_spaces": false,
    });
    for (key, id) in [("bos_token", tokens.start), ("eos_token", tokens.end.first().copied())] {
        if let Some(id) = id {
            config[key] = json!(tokenizer.decode(&[id])?);
        }
    }
    Ok(config)
}

/// Writes `items` to the safetensors file `path` as a stream.
fn write_file(path: &Path, weights: &Watched, items: &[Item], dtype: ExportDtype) -> Result<()> {
    let failed = |error| CheckpointError::io("write", path)(error);
    let out = File::create(path).map_err(CheckpointError::io("create", path))?;
    let mut out = BufWriter::with_capacity(1 << 20, out);
    let shapes: Vec<_> = items.iter().map(|item| in_file(&item.shape, &item.there)).collect();
    let arrays = items.iter().zip(&shapes).map(|(item, shape)| Array {
        key: &item.there.name,
        dtype: dtype.name(),
        width: dtype.width(),
        shape,
    });
    out.write_all(&header(("format", "pt"), arrays)).map_err(failed)?;
    for item in items {
        let mut values = vec![0.0; item.numel()];
        weights.read(&item.name, item.first..item.first + values.len(), &mut values)?;
        let mut bytes = Vec::new();
        let mut put = |values: &[f32]| -> Result<()> {
            bytes.clear();
            for value in values {
                if !dtype.append(*value, &mut bytes) {
                    let (name, dtype) = (item.there.name.clone(), dtype.torch_name());
                    return Err(CheckpointError::Range { name, value: *value, dtype });
                }
            }
            out.write_all(&bytes).map_err(failed)
        };
        let (true, &[rows, columns]) = (item.there.transposed, item.shape.as_slice()) else {
            values.chunks(1 << 16).try_for_each(put)?;
            continue;
        };
        // Transposes several columns at a time, so that every fetched cache line is fully used.
        let mut transposed = vec![0.0; ROWS.min(columns) * rows];
        for left in (0..columns).step_by(ROWS) {
            let width = ROWS.min(columns - left);
            for (row, line) in values.chunks_exact(columns).enumerate() {
                for (column, value) in line[left..left + width].iter().enumerate() {
                    transposed[column * rows + row] = *value;
                }
            }
            put(&transposed[..width * rows])?;
        }
    }
    let out = out.into_inner().map_err(|error| failed(error.into_error()))?;
    out.sync_all().map_err(failed)
}
