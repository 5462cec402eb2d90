//! A model folder in the layout of Hugging Face, as weights of Kiln's decoder.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

use kiln_model::ModelConfig;
use kiln_sys::files;
use kiln_sys::words::number_of;

use super::config::FolderConfig;
use super::keys::Keys;
use super::names::{EMBEDDING_THERE, HEAD, HuggingFaceName, hugging_face_names, is_buffer};
use super::tokens::end_ids;
use super::{CARRIED, CONFIG_FILE, HuggingFaceError, INDEX_FILE, MODEL_FILE, TOKENIZER_FILE, WeightFile};
use crate::sharded::{outline, parameter_shapes};
use crate::weights::Weights;
use crate::{CheckpointError, MANIFEST_FILE, model_line};

/// A folder with `config.json` and safetensors. Opening it checks names, shapes and dtypes of all weights;
/// their values are read in place, part by part.
#[derive(Clone, Debug)]
pub struct HuggingFaceFolder {
    folder: PathBuf,
    config: FolderConfig,
    end_ids: Vec<u32>,
    files: Vec<WeightFile>,
    /// Tensors by the names of Kiln's decoder.
    tensors: BTreeMap<String, Tensor>,
}

/// A weight of Kiln's decoder.
#[derive(Clone, Debug)]
struct Tensor {
    /// Kiln's shape.
    shape: Vec<usize>,
    /// Its tensors there: one, or one per expert, of equal size.
    parts: Vec<Part>,
}

/// A tensor of a file.
#[derive(Clone, Debug)]
struct Part {
    there: HuggingFaceName,
    /// Index in `files`.
    file: usize,
}

impl Tensor {
    /// Returns the number of elements.
    fn numel(&self) -> usize {
        self.shape.iter().product()
    }
}

impl HuggingFaceFolder {
    /// Returns whether `folder` is a model in this layout rather than a checkpoint of Kiln, judging by names.
    pub fn is_one(folder: &Path) -> bool {
        folder.join(CONFIG_FILE).is_file() && !folder.join(MANIFEST_FILE).exists()
    }

    /// Opens `folder`.
    ///
    /// # Errors
    ///
    /// If a file is missing or damaged, if Kiln's decoder does not support the model, and if the weights do
    /// not match `config.json`.
    pub fn open(folder: &Path) -> Result<Self, HuggingFaceError> {
        // A checkpoint has the same index and files, but only its manifest describes them.
        if folder.join(MANIFEST_FILE).exists() {
            return Err(not_a_model(
                folder,
                "it is a checkpoint of Kiln; use it as it is, or `kiln export` it",
            ));
        }
        if !folder.join(CONFIG_FILE).is_file() {
            return Err(not_a_model(folder, "it has no config.json; name the folder that has one"));
        }
        for name in CARRIED.iter().chain(&[CONFIG_FILE, MODEL_FILE, INDEX_FILE]) {
            HuggingFaceError::check_inside(folder, name)?;
        }
        let mut config = FolderConfig::read(folder)?;
        let end_ids = end_ids(folder)?;
        let (files, places) = open_files(folder)?;
        if config.model.tie_embeddings && has_other_head(&files, &places)? {
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

    /// Returns the folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Returns the shape of the model.
    pub fn model(&self) -> &ModelConfig {
        &self.config.model
    }

    /// Returns the path of the tokenizer's file, which may be missing.
    pub fn tokenizer(&self) -> PathBuf {
        self.folder.join(TOKENIZER_FILE)
    }

    /// Returns the longest sequence, in tokens, that the model supports.
    pub fn context_length(&self) -> usize {
        self.config.context_length
    }

    /// Describes the folder: the model, and a line for each weight, with Kiln's name and the name there.
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
            let dtype = self.files[first.file].dtype(there).unwrap_or_default();
            let more = if others.is_empty() { String::new() } else { format!(" and {} more", others.len()) };
            lines.push(format!("{name:width$}  {dtype:5}  {shape:16}  {there}{more}"));
        }
        lines.join("\n")
    }

    /// Returns the ids that end a text; none if the folder names none.
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

    fn read(&self, name: &str, range: Range<usize>, values: &mut [f32]) -> Result<(), CheckpointError> {
        let tensor = self.tensors.get(name).ok_or_else(|| {
            HuggingFaceError::damaged(&self.folder, format!("the model has no weight `{name}`"))
        })?;
        // The elements of each part that are in the range.
        let len = tensor.numel() / tensor.parts.len().max(1);
        let (mut rest, mut start) = (values, range.start);
        while start < range.end {
            let (index, first) = (start / len, start % len);
            let count = (len - first).min(range.end - start);
            let Some(Part { there, file }) = tensor.parts.get(index) else {
                let problem = format!("elements {range:?} of `{name}` were asked for, of {}", tensor.numel());
                return Err(HuggingFaceError::damaged(&self.folder, problem).into());
            };
            let (values, after) = std::mem::take(&mut rest).split_at_mut(count);
            self.files[*file].read(&there.name, there.transposed, first..first + count, values)?;
            (rest, start) = (after, start + count);
        }
        Ok(())
    }
}

/// The files of weights, and the file of each tensor.
pub(super) type Files = (Vec<WeightFile>, BTreeMap<String, usize>);

/// Opens the file of weights, or all files of the index.
fn open_files(folder: &Path) -> Result<Files, HuggingFaceError> {
    let whole = folder.join(MODEL_FILE);
    if whole.is_file() {
        let file = WeightFile::open(&whole)?;
        let places = file.names().map(|name| (name.to_owned(), 0)).collect();
        return Ok((vec![file], places));
    }
    let index = folder.join(INDEX_FILE);
    if index.is_file() {
        return open_index(folder, &index);
    }
    let pickled = ["pytorch_model.bin", "pytorch_model.bin.index.json"];
    let problem = if pickled.iter().any(|name| folder.join(name).is_file()) {
        "its weights are in pytorch_model.bin, which runs code when it is opened; convert them to \
         model.safetensors, or get the safetensors of the model"
    } else {
        "it has neither model.safetensors nor model.safetensors.index.json"
    };
    Err(not_a_model(folder, problem))
}

fn not_a_model(folder: &Path, problem: &str) -> HuggingFaceError {
    HuggingFaceError::NotAModel { path: folder.to_owned(), problem: problem.to_owned() }
}

/// Returns the files that an index names, each with its tensors. They are next to the index: only the names
/// of safetensors files are accepted.
pub(super) fn files_of_index(index: &Path) -> Result<BTreeMap<String, BTreeSet<String>>, HuggingFaceError> {
    let weight_map = Keys::read(index)?;
    let Some(weight_map) = weight_map.object("weight_map")? else {
        return Err(weight_map.problem("weight_map", "is missing"));
    };
    let mut files: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for tensor in weight_map.names() {
        // Null counts as no name.
        let file = weight_map.text(tensor)?.unwrap_or_default();
        if !files::is_plain_name(&file) || !file.ends_with(".safetensors") {
            let problem = format!("is {file}, expected the name of a .safetensors file beside it");
            return Err(weight_map.problem(tensor, &problem));
        }
        files.entry(file).or_default().insert(tensor.to_owned());
    }
    Ok(files)
}

/// Opens all files of an index, which must give the file of every tensor.
pub(super) fn open_index(folder: &Path, index: &Path) -> Result<Files, HuggingFaceError> {
    let (mut files, mut places) = (Vec::new(), BTreeMap::new());
    for (name, expected) in files_of_index(index)? {
        HuggingFaceError::check_inside(folder, &name)?;
        let expected: BTreeSet<_> = expected.iter().map(String::as_str).collect();
        let file = WeightFile::open(&folder.join(name))?;
        let found: BTreeSet<_> = file.names().collect();
        if let Some(missing) = expected.difference(&found).next() {
            let problem = format!("`{missing}` is not in it, although the index says so");
            return Err(HuggingFaceError::damaged(file.path(), problem));
        }
        let unlisted = found.difference(&expected).find(|name| !is_buffer(name));
        if let Some(unlisted) = unlisted {
            let problem = format!("`{unlisted}` is in it, although the index says otherwise");
            return Err(HuggingFaceError::damaged(file.path(), problem));
        }
        places.extend(found.into_iter().map(|name| (name.to_owned(), files.len())));
        files.push(file);
    }
    Ok((files, places))
}

/// Returns true if the files contain an embedding and a head with different values.
fn has_other_head(files: &[WeightFile], places: &BTreeMap<String, usize>) -> Result<bool, HuggingFaceError> {
    match (places.get(HEAD), places.get(EMBEDDING_THERE)) {
        (Some(head), Some(embedding)) => files[*head].differs(HEAD, &files[*embedding], EMBEDDING_THERE),
        _ => Ok(false),
    }
}

/// Finds every weight of the decoder; only tensors that can be computed may be left over.
fn place(
    folder: &Path,
    model: &ModelConfig,
    files: &[WeightFile],
    mut places: BTreeMap<String, usize>,
) -> Result<BTreeMap<String, Tensor>, HuggingFaceError> {
    // Checked before that many are created.
    if model.layers > places.len() {
        return Err(HuggingFaceError::Key {
            path: folder.join(CONFIG_FILE),
            key: "num_hidden_layers".to_owned(),
            problem: format!("is {}, but there are {} tensors", model.layers, places.len()),
        });
    }
    if let Some(moe) = &model.moe
        && moe.layers_with_experts(model.layers).saturating_mul(moe.experts) > places.len()
    {
        return Err(HuggingFaceError::Key {
            path: folder.join(CONFIG_FILE),
            key: "num_experts".to_owned(),
            problem: format!("is {}, but there are {} tensors", moe.experts, places.len()),
        });
    }
    let (mut tensors, mut missing, mut misshapen) = (BTreeMap::new(), Vec::new(), Vec::new());
    for (name, shape) in parameter_shapes(&outline(model)?) {
        let names = hugging_face_names(&name, &shape)
            .ok_or_else(|| HuggingFaceError::Unnamed { path: folder.to_owned(), name: name.clone() })?;
        let part_shape = part_shape(&shape, names.len());
        let mut parts = Vec::with_capacity(names.len());
        for mut there in names {
            // Some programs save tied weights under the name of the head.
            let is_head = there.name == EMBEDDING_THERE && !places.contains_key(EMBEDDING_THERE);
            if is_head && model.tie_embeddings && places.contains_key(HEAD) {
                there.name = HEAD.to_owned();
            }
            let Some(file) = places.remove(&there.name) else {
                missing.push(there.name);
                continue;
            };
            let found = files[file].shape(&there.name).unwrap_or_default();
            let expected = in_file(part_shape, &there);
            if found != expected {
                misshapen.push(format!("`{}` is {found:?}, expected {expected:?}", there.name));
            }
            parts.push(Part { there, file });
        }
        tensors.insert(name, Tensor { shape, parts });
    }
    // A tied model's head that is present equals the embedding.
    let unexpected: Vec<_> = places
        .into_keys()
        .filter(|name| !(is_buffer(name) || model.tie_embeddings && name == HEAD))
        .collect();
    if missing.is_empty() && unexpected.is_empty() && misshapen.is_empty() {
        return Ok(tensors);
    }
    let path = folder.to_owned();
    Err(HuggingFaceError::Names { path, missing, unexpected, misshapen })
}

/// Returns the shape in Kiln of each of the `parts` tensors that form a weight of this shape there.
pub(super) fn part_shape(shape: &[usize], parts: usize) -> &[usize] {
    match shape {
        [stacked, part @ ..] if part.len() == 2 && *stacked == parts => part,
        _ => shape,
    }
}

/// Returns the shape that Kiln's `shape` has in a file.
pub(super) fn in_file(shape: &[usize], there: &HuggingFaceName) -> Vec<usize> {
    let mut shape = shape.to_vec();
    if there.transposed {
        shape.reverse();
    }
    shape
}
