use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use kiln_model::ModelConfig;
use kiln_sys::files;
use kiln_sys::words::number_of;

use super::keys::Keys;
use super::names::{EMBEDDING_THERE, HEAD, HuggingFaceName, hugging_face_names, is_buffer};
use super::weight_file::WeightFile;
use super::{CARRIED, CONFIG_FILE, FolderConfig, INDEX_FILE, MODEL_FILE, check_inside, token_ids};
use crate::describe::model_line;
use crate::error::{Mismatch, Result};
use crate::sharded::{outline, parameter_shapes};
use crate::weights::Weights;
use crate::{CheckpointError, MANIFEST_FILE};

/// A folder with `config.json` and safetensors files. Opening it checks all names, shapes and dtypes.
#[derive(Clone, Debug)]
pub struct HuggingFaceFolder {
    folder: PathBuf,
    config: FolderConfig,
    end_ids: Vec<u32>,
    files: Vec<WeightFile>,
    tensors: BTreeMap<String, Tensor>,
}

#[derive(Clone, Debug)]
struct Tensor {
    shape: Vec<usize>,
    /// The tensors that form the weight: one, or one of equal size per expert.
    parts: Vec<Part>,
}

#[derive(Clone, Debug)]
struct Part {
    there: HuggingFaceName,
    file: usize,
}

impl Tensor {
    fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

impl HuggingFaceFolder {
    /// Reports whether `folder` is a model in this layout rather than a Kiln checkpoint, judging by its file names.
    pub fn is_one(folder: &Path) -> bool {
        folder.join(CONFIG_FILE).is_file() && !folder.join(MANIFEST_FILE).exists()
    }

    /// Opens `folder`. Fails if the model is damaged or not supported, or its weights do not match `config.json`.
    pub fn open(folder: &Path) -> Result<Self> {
        // A checkpoint may have the same index and files, but only its manifest describes them.
        if folder.join(MANIFEST_FILE).exists() {
            let problem = "it is a checkpoint of Kiln; use it directly, or `kiln export` it";
            return Err(not_a_model(folder, problem));
        }
        if !folder.join(CONFIG_FILE).is_file() {
            return Err(not_a_model(folder, "it has no config.json; name the folder that has one"));
        }
        for name in CARRIED.iter().chain(&[CONFIG_FILE, MODEL_FILE, INDEX_FILE]) {
            check_inside(folder, name)?;
        }
        let mut config = FolderConfig::read(folder)?;
        let end_ids = token_ids(folder)?.end;
        let (files, places) = open_files(folder)?;
        if config.model.tie_embeddings
            && let (Some(head), Some(embedding)) = (places.get(HEAD), places.get(EMBEDDING_THERE))
            && files[*head].differs(HEAD, &files[*embedding], EMBEDDING_THERE)?
        {
            config.model.tie_embeddings = false;
            tracing::warn!(
                "{}: config.json says tie_word_embeddings = true, but {HEAD} differs from {EMBEDDING_THERE}: \
                 the model keeps both (model.tie_embeddings = false)",
                folder.display()
            );
        }
        let tensors = place(folder, &config.model, &files, places)?;
        for part in tensors.values().flat_map(|tensor| &tensor.parts) {
            files[part.file].check_dtype(&part.there.name)?;
        }
        Ok(HuggingFaceFolder { folder: folder.to_owned(), config, end_ids, files, tensors })
    }

    /// Returns the path of the folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the shape of the model.
    pub fn model(&self) -> &ModelConfig {
        &self.config.model
    }

    /// Returns the longest sequence, in tokens, that the model supports.
    pub fn context_length(&self) -> usize {
        self.config.context_length
    }

    /// Describes the model, and for each weight its names in Kiln and in the files.
    pub fn describe(&self) -> String {
        let parameters: u64 = self.tensors.values().map(|tensor| tensor.numel() as u64).sum();
        let (folder, files) = (self.folder.display(), self.files.len());
        let width = self.tensors.keys().map(String::len).max().unwrap_or(0).max(4);
        let mut lines = vec![
            format!(
                "{folder}: a model in the layout of Hugging Face, {} of weights",
                number_of(files, "file")
            ),
            model_line(self.model(), parameters, self.context_length()),
            format!("{:width$}  {:5}  {:16}  name there", "name", "dtype", "shape"),
        ];
        for (name, tensor) in &self.tensors {
            let [first, others @ ..] = tensor.parts.as_slice() else { continue };
            let (shape, there) = (format!("{:?}", tensor.shape), &first.there.name);
            let dtype = format!("{:?}", self.files[first.file].tensors[there].dtype);
            let more = if others.is_empty() { String::new() } else { format!(" and {} more", others.len()) };
            lines.push(format!("{name:width$}  {dtype:5}  {shape:16}  {there}{more}"));
        }
        lines.join("\n")
    }

    /// Returns the end-of-text ids; empty if the folder specifies none.
    pub fn end_ids(&self) -> &[u32] {
        &self.end_ids
    }
}

impl Weights for HuggingFaceFolder {
    fn folder(&self) -> &Path {
        &self.folder
    }

    fn shapes(&self) -> BTreeMap<&str, &[usize]> {
        let shapes = self.tensors.iter();
        shapes.map(|(name, tensor)| (name.as_str(), tensor.shape.as_slice())).collect()
    }

    fn read(&self, name: &str, range: Range<usize>, values: &mut [f32]) -> Result<()> {
        let tensor = self.tensors.get(name).ok_or_else(|| {
            CheckpointError::damaged_weights(&self.folder, format!("the model has no weight `{name}`"))
        })?;
        if range.end > tensor.numel() {
            let problem =
                format!("`{name}` has {} elements, and {range:?} are not among them", tensor.numel());
            return Err(CheckpointError::damaged_weights(&self.folder, problem));
        }
        let len = tensor.numel() / tensor.parts.len().max(1);
        let (mut rest, mut start) = (values, range.start);
        while start < range.end {
            let (index, first) = (start / len, start % len);
            let count = (len - first).min(range.end - start);
            let Part { there, file } = &tensor.parts[index];
            let (values, after) = std::mem::take(&mut rest).split_at_mut(count);
            self.files[*file].read(&there.name, there.transposed, first..first + count, values)?;
            (rest, start) = (after, start + count);
        }
        Ok(())
    }
}

type Files = (Vec<WeightFile>, BTreeMap<String, usize>);

/// Opens the single weight file, or all files of the index, which must list exactly the tensors in the files.
fn open_files(folder: &Path) -> Result<Files> {
    let whole = folder.join(MODEL_FILE);
    if whole.is_file() {
        let file = WeightFile::open(&whole)?;
        let places = file.tensors.keys().map(|name| (name.clone(), 0)).collect();
        return Ok((vec![file], places));
    }
    let index = folder.join(INDEX_FILE);
    if !index.is_file() {
        let pickled = ["pytorch_model.bin", "pytorch_model.bin.index.json"];
        let problem = if pickled.iter().any(|name| folder.join(name).is_file()) {
            "its weights are in pytorch_model.bin, which runs code when it is opened; convert them to \
             model.safetensors, or get the safetensors of the model"
        } else {
            "it has neither model.safetensors nor model.safetensors.index.json"
        };
        return Err(not_a_model(folder, problem));
    }
    let (mut files, mut places) = (Vec::new(), BTreeMap::new());
    for (name, expected) in files_of_index(&index)? {
        check_inside(folder, &name)?;
        let file = WeightFile::open(&folder.join(name))?;
        let found: BTreeSet<_> = file.tensors.keys().cloned().collect();
        if let Some(missing) = expected.difference(&found).next() {
            let problem = format!("`{missing}` is not in it, although the index lists it");
            return Err(CheckpointError::damaged_weights(&file.path, problem));
        }
        if let Some(unlisted) = found.difference(&expected).find(|name| !is_buffer(name)) {
            let problem = format!("`{unlisted}` is in it, although the index does not list it");
            return Err(CheckpointError::damaged_weights(&file.path, problem));
        }
        places.extend(found.into_iter().map(|name| (name, files.len())));
        files.push(file);
    }
    Ok((files, places))
}

fn not_a_model(folder: &Path, problem: &'static str) -> CheckpointError {
    CheckpointError::NotAModel { path: folder.to_owned(), problem }
}

/// Returns the files that an index lists, each with its tensors. Rejects paths that could lead out of the folder.
pub(super) fn files_of_index(index: &Path) -> Result<BTreeMap<String, BTreeSet<String>>> {
    let weight_map = Keys::read(index)?;
    let Some(weight_map) = weight_map.object("weight_map")? else {
        return Err(weight_map.problem("weight_map", "is missing"));
    };
    let mut files: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for tensor in weight_map.map.keys() {
        let file = weight_map.text(tensor)?.unwrap_or_default();
        if !files::is_plain_name(&file) || !file.ends_with(".safetensors") {
            let problem = format!("is {file}, expected the name of a .safetensors file next to it");
            return Err(weight_map.problem(tensor, problem));
        }
        files.entry(file).or_default().insert(tensor.clone());
    }
    Ok(files)
}

/// Finds the tensors of every weight of the decoder. Fails if other tensors remain, except tables that can be computed.
fn place(
    folder: &Path,
    model: &ModelConfig,
    files: &[WeightFile],
    mut places: BTreeMap<String, usize>,
) -> Result<BTreeMap<String, Tensor>> {
    // Check before creating layers and experts in these numbers.
    let experts = model.moe.as_ref();
    let experts = experts.map_or((0, 0), |moe| (moe.experts, moe.layers_with_experts(model.layers)));
    for (key, value, needed) in [
        ("num_hidden_layers", model.layers, model.layers),
        ("num_experts", experts.0, experts.1.saturating_mul(experts.0)),
    ] {
        if needed > places.len() {
            let problem = format!("is {value}, but there are {} tensors", places.len());
            let (path, key) = (folder.join(CONFIG_FILE), key.to_owned());
            return Err(CheckpointError::Key { path, key, problem });
        }
    }
    let (mut tensors, mut mismatch) = (BTreeMap::new(), Mismatch::default());
    for (name, shape) in parameter_shapes(&outline(model)?) {
        let names = hugging_face_names(&name, &shape)
            .ok_or_else(|| CheckpointError::Unnamed { path: folder.to_owned(), name: name.clone() })?;
        let part_shape = part_shape(&shape, names.len());
        let mut parts = Vec::with_capacity(names.len());
        for mut there in names {
            // Some programs save tied weights under the name of the head.
            let is_head = there.name == EMBEDDING_THERE && !places.contains_key(EMBEDDING_THERE);
            if is_head && model.tie_embeddings && places.contains_key(HEAD) {
                there.name = HEAD.to_owned();
            }
            let Some(file) = places.remove(&there.name) else {
                mismatch.missing.push(there.name);
                continue;
            };
            let (found, expected) = (&files[file].tensors[&there.name].shape, in_file(part_shape, &there));
            if *found != expected {
                mismatch.misshapen.push(format!("`{}` is {found:?}, expected {expected:?}", there.name));
            }
            parts.push(Part { there, file });
        }
        tensors.insert(name, Tensor { shape, parts });
    }
    // A tied model's head equals the embedding, as checked when the folder was opened.
    let is_known = |name: &String| is_buffer(name) || model.tie_embeddings && name == HEAD;
    mismatch.unexpected = places.into_keys().filter(|name| !is_known(name)).collect();
    if mismatch.is_empty() {
        return Ok(tensors);
    }
    Err(CheckpointError::Tensors { path: folder.to_owned(), mismatch })
}

/// Returns the shape, in Kiln's order, of each of the `parts` tensors that form a weight of `shape`.
pub(crate) fn part_shape(shape: &[usize], parts: usize) -> &[usize] {
    match shape {
        [stacked, part @ ..] if part.len() == 2 && *stacked == parts => part,
        _ => shape,
    }
}

/// Returns the shape in the file of a tensor that has `shape` in Kiln.
pub(crate) fn in_file(shape: &[usize], there: &HuggingFaceName) -> Vec<usize> {
    let mut shape = shape.to_vec();
    if there.transposed {
        shape.reverse();
    }
    shape
}
