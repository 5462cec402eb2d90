//! Samples that a program makes itself, instead of reading them from token files.

use std::any::Any;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::sync::Arc;

use kiln_sys::durable;
use serde::de::DeserializeOwned;
use serde_json::json;
use sha2::{Digest, Sha256};

use super::info::{FORMAT_VERSION, INFO_FILE, TOKENIZER_FILE};
use super::output::OutputFolder;
use super::sums::Sums;
use super::{DataError, DataInfo, Result, SourceInfo, Split, SplitInfo, TokenWidth};

/// An error in a program's own code.
pub type SourceError = Box<dyn Error + Send + Sync>;

/// One sequence of a [`DataSource`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Sample {
    /// `seq_len + 1` token ids: the first `seq_len` are the inputs, the last `seq_len` the targets.
    pub tokens: Vec<u32>,
    /// A weight for each of the `seq_len` targets; a target of weight 0 is masked. If empty, all weights are 1.
    pub weights: Vec<f32>,
}

/// Samples that a program makes. A sample depends only on the source's settings, the split and the index, so that
/// every rank, and a resumed run, gets the same samples.
///
/// ```
/// use kiln_data::{DataSource, Sample, SourceError, Split};
///
/// /// Counts from the index of the sample.
/// struct Counting { seq_len: usize }
///
/// impl DataSource for Counting {
///     fn vocab_size(&self) -> usize {
///         100
///     }
///
///     fn sample(&self, _split: Split, index: u64) -> Result<Sample, SourceError> {
///         let tokens = (0..=self.seq_len as u64).map(|i| ((index + i) % 100) as u32).collect();
///         Ok(Sample { tokens, weights: Vec::new() })
///     }
/// }
/// ```
pub trait DataSource: Send + Sync {
    /// Returns the number of token ids; every id is smaller.
    fn vocab_size(&self) -> usize;

    /// Returns sample `index` of `split`.
    ///
    /// # Errors
    ///
    /// An error ends the run, with the name of the source and the index.
    fn sample(&self, split: Split, index: u64) -> Result<Sample, SourceError>;

    /// Returns the number of samples of `split`, which the run visits epoch by epoch, in the order of `data.shuffle`.
    /// By default `None`: the position in the run is the index, without end.
    fn num_samples(&self, _split: Split) -> Option<u64> {
        None
    }

    /// Returns the number of consecutive samples that belong together, such as 2 for pairs. Shuffling keeps them
    /// together, and micro-batches and evaluations consist of whole groups.
    fn group_size(&self) -> usize {
        1
    }

    /// Returns whether samples may have weights. If so, the ranks sum the weights of each step, and the loss is
    /// divided by this sum.
    fn is_weighted(&self) -> bool {
        true
    }

    /// Returns the id that ends a text, at which generation stops. By default 0.
    fn end_of_text(&self) -> u32 {
        0
    }

    /// Returns the content of `tokenizer.json`, which relates ids to text. By default, the text of an id is its
    /// number, and ids are separated by spaces: `4 17 3`.
    fn tokenizer(&self) -> Option<Vec<u8>> {
        None
    }
}

/// The input of a function that makes a source.
#[derive(Clone, Copy, Debug)]
pub struct DataInit<'a> {
    /// Name and settings.
    pub info: &'a SourceInfo,
    /// Number of input tokens of a sample: `data.seq_len`.
    pub seq_len: usize,
    has_read: &'a Cell<bool>,
}

impl DataInit<'_> {
    /// Reads `[data.extra]`.
    ///
    /// # Errors
    ///
    /// If the section has keys unknown to `T`, or values of other types.
    pub fn extra<T: DeserializeOwned>(&self) -> Result<T, SourceError> {
        self.has_read.set(true);
        let extra = serde_json::Value::Object(self.info.extra.clone());
        serde_json::from_value(extra).map_err(|error| format!("data.extra: {error}").into())
    }
}

type Make = Arc<dyn Fn(DataInit) -> Result<Arc<dyn DataSource>, SourceError> + Send + Sync>;

/// The sources that a program adds, by name.
#[derive(Clone, Default)]
pub struct Sources(BTreeMap<String, Make>);

impl Sources {
    /// Adds a source, which `make` creates from its settings.
    ///
    /// # Panics
    ///
    /// If the name is empty or taken.
    #[must_use]
    pub fn with<S: DataSource + 'static>(
        mut self,
        name: &str,
        make: impl Fn(DataInit) -> Result<S, SourceError> + Send + Sync + 'static,
    ) -> Self {
        assert!(!name.is_empty(), "data.source: a source needs a name");
        let make: Make = Arc::new(move |init| Ok(Arc::new(make(init)?)));
        let earlier = self.0.insert(name.to_owned(), make);
        assert!(earlier.is_none(), "data.source = \"{name}\" is a source already: choose another name");
        self
    }

    /// Creates the source that `info` describes, for samples of `seq_len` tokens.
    ///
    /// # Errors
    ///
    /// If there is no source of that name, or its settings are invalid.
    pub fn make(&self, info: &SourceInfo, seq_len: usize) -> Result<Arc<dyn DataSource>> {
        let SourceInfo { name, .. } = info;
        let failed = |reason: String| DataError::Source { name: name.clone(), reason };
        let Some(make) = self.0.get(name) else {
            let known: Vec<_> = self.0.keys().map(|name| format!("\"{name}\"")).collect();
            let known = match known.is_empty() {
                true => "has no sources of samples".to_owned(),
                false => format!("has only the sources {}", known.join(", ")),
            };
            return Err(failed(format!("this program {known}. Run the program that registers this source")));
        };
        let has_read = Cell::new(false);
        let source = make(DataInit { info, seq_len, has_read: &has_read });
        let source = source.map_err(|error| failed(error.to_string()))?;
        match info.extra.keys().next() {
            Some(key) if !has_read.get() => {
                Err(failed(format!("the source reads no settings: remove data.extra.{key}")))
            }
            _ => Ok(source),
        }
    }

    /// Returns the description of the data of a source, complete, and its tokenizer.
    ///
    /// # Errors
    ///
    /// As for [`Sources::make`], and if the source has an invalid vocabulary.
    pub fn describe(&self, info: &SourceInfo, seq_len: usize) -> Result<(DataInfo, Vec<u8>)> {
        let source = self.make(info, seq_len)?;
        let (vocab_size, end_of_text) = (source.vocab_size(), source.end_of_text());
        let tokenizer = source.tokenizer().unwrap_or_else(|| numbers(vocab_size));
        let samples = [Split::Train, Split::Validation].map(|split| source.num_samples(split));
        let info = SourceInfo {
            seq_len,
            samples,
            tokenizer: format!("{:x}", Sha256::digest(&tokenizer)),
            ..info.clone()
        };
        let split = |samples: Option<u64>| SplitInfo {
            tokens: samples.unwrap_or(0).saturating_mul(seq_len as u64),
            text_bytes: None,
            sha256: None,
            block_bytes: None,
        };
        let identity = json!([info, vocab_size, end_of_text]).to_string();
        let sha256 = Some(format!("{:x}", Sha256::digest(identity)));
        let described = DataInfo {
            format_version: FORMAT_VERSION,
            dtype: TokenWidth::for_vocabulary(vocab_size),
            vocab_size,
            end_of_text,
            train: SplitInfo { sha256, ..split(samples[0]) },
            validation: split(samples[1]),
            documents: 0,
            skipped_files: 0,
            unknown: 0,
            unigram_entropy: None,
            source: Some(info.clone()),
            chat: None,
        };
        match described.check() {
            Ok(()) => Ok((described, tokenizer)),
            Err(reason) => Err(DataError::Source { name: info.name, reason }),
        }
    }

    /// Writes the description and the tokenizer of a source to `folder`, as far as they do not exist.
    ///
    /// # Errors
    ///
    /// As for [`Sources::describe`], and if the first sample is invalid, or `folder` was made from another source, holds
    /// other files or cannot be written.
    pub fn prepare(&self, folder: &Path, info: &SourceInfo, seq_len: usize) -> Result<DataInfo> {
        let (described, tokenizer) = self.describe(info, seq_len)?;
        if super::is_prepared(folder) {
            let there = DataInfo::load(folder)?;
            let differences = differences(&there, &described);
            return match differences.is_empty() {
                true => Ok(there),
                false => Err(DataError::OtherSource { path: folder.to_owned(), differences }),
            };
        }
        for split in [Split::Train, Split::Validation] {
            OwnSamples::open(self, info, split, seq_len)?.read(0)?;
        }
        let output = OutputFolder::create(folder)?;
        let path = output.path().join(TOKENIZER_FILE);
        durable::write(&path, &tokenizer).map_err(DataError::io("write", &path))?;
        described.save(output.path())?;
        Sums::compute(output.path(), &[INFO_FILE, TOKENIZER_FILE], &[])?.save(output.path())?;
        match output.commit() {
            // Another run has just written the same folder.
            Err(DataError::AlreadyPrepared { .. }) => self.prepare(folder, info, seq_len),
            written => written.map(|()| described),
        }
    }
}

fn differences(there: &DataInfo, here: &DataInfo) -> Vec<String> {
    let Some(source) = &there.source else { return vec!["they were prepared from text".to_owned()] };
    let of = |info: &DataInfo, source: &SourceInfo| {
        let samples =
            source.samples.map(|count| count.map_or("endless".to_owned(), |count| count.to_string()));
        [
            source.name.clone(),
            serde_json::Value::Object(source.extra.clone()).to_string(),
            info.vocab_size.to_string(),
            info.end_of_text.to_string(),
            samples.join(" and "),
            source.tokenizer.chars().take(12).collect(),
        ]
    };
    let names = [
        "data.source",
        "data.extra",
        "the vocabulary",
        "the end of a text",
        "the number of samples",
        "the tokenizer's SHA-256",
    ];
    let here = here.source.as_ref().map(|source| of(here, source)).unwrap_or_default();
    let pairs = of(there, source).into_iter().zip(here).zip(names);
    let differing = pairs.filter(|((then, now), _)| then != now);
    differing.map(|((then, now), name)| format!("{name} was {then} and is {now} now")).collect()
}

impl fmt::Debug for Sources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.0.keys()).finish()
    }
}

/// The samples of one split of a [`DataSource`], checked before they are used.
#[derive(Clone)]
pub struct OwnSamples {
    source: Arc<dyn DataSource>,
    name: String,
    split: Split,
    seq_len: usize,
}

impl OwnSamples {
    /// Opens `split` of the source that `info` describes, with samples of `seq_len` tokens.
    pub(super) fn open(sources: &Sources, info: &SourceInfo, split: Split, seq_len: usize) -> Result<Self> {
        if seq_len == 0 {
            return Err(DataError::ZeroSequenceLength);
        }
        let source = sources.make(info, seq_len)?;
        let (name, group) = (info.name.clone(), source.group_size().max(1) as u64);
        match source.num_samples(split) {
            Some(0) => {
                let reason = format!("{} has no samples", split.name());
                Err(DataError::Source { name, reason })
            }
            Some(count) if !count.is_multiple_of(group) => {
                let reason = format!("{} has {count} samples, not a multiple of {group}", split.name());
                Err(DataError::Source { name, reason })
            }
            _ => Ok(()),
        }?;
        Ok(OwnSamples { source, name: info.name.clone(), split, seq_len })
    }

    pub(super) fn num_samples(&self) -> Option<u64> {
        self.source.num_samples(self.split)
    }

    pub(super) fn seq_len(&self) -> usize {
        self.seq_len
    }

    pub(super) fn group_size(&self) -> usize {
        self.source.group_size().max(1)
    }

    pub(super) fn is_weighted(&self) -> bool {
        self.source.is_weighted()
    }

    /// Returns sample `index`, with a weight for each target if the source is weighted.
    pub(super) fn read(&self, index: u64) -> Result<Sample> {
        let failed = |reason: String| {
            let reason = format!("sample {index} of {}: {reason}", self.split.name());
            DataError::Source { name: self.name.clone(), reason }
        };
        // The source is the user's code.
        let made = panic::catch_unwind(AssertUnwindSafe(|| self.source.sample(self.split, index)));
        let made = made.map_err(|panic| failed(format!("the source panics: {}", message(&*panic))))?;
        let mut sample = made.map_err(|error| failed(error.to_string()))?;
        let (needed, vocab_size) = (self.seq_len + 1, self.source.vocab_size());
        if sample.tokens.len() != needed {
            let count = sample.tokens.len();
            return Err(failed(format!("has {count} tokens instead of data.seq_len + 1 = {needed}")));
        }
        if let Some(id) = sample.tokens.iter().find(|id| **id as usize >= vocab_size) {
            return Err(failed(format!("has the id {id}, outside the vocabulary of {vocab_size}")));
        }
        match (sample.weights.len(), self.source.is_weighted()) {
            (0, true) => sample.weights = vec![1.0; self.seq_len],
            (0, false) => {}
            (_, false) => {
                return Err(failed("has weights, but the source says that it is not weighted".to_owned()));
            }
            (count, true) if count != self.seq_len => {
                let needed = self.seq_len;
                return Err(failed(format!("has {count} weights instead of data.seq_len = {needed}")));
            }
            _ => {}
        }
        if let Some(weight) = sample.weights.iter().find(|weight| !(weight.is_finite() && **weight >= 0.0)) {
            return Err(failed(format!("has the weight {weight}; a weight is finite and not negative")));
        }
        Ok(sample)
    }
}

impl fmt::Debug for OwnSamples {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnSamples").field("name", &self.name).field("split", &self.split).finish()
    }
}

/// Returns the message of a panic.
fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

/// Returns a tokenizer in which the text of an id is its number, and spaces separate ids.
fn numbers(vocab_size: usize) -> Vec<u8> {
    let vocab: serde_json::Map<_, _> = (0..vocab_size).map(|id| (id.to_string(), json!(id))).collect();
    let tokenizer = json!({
        "version": "1.0",
        "added_tokens": [],
        "normalizer": null,
        "pre_tokenizer": { "type": "WhitespaceSplit" },
        "post_processor": null,
        "decoder": null,
        "model": { "type": "WordLevel", "vocab": vocab, "unk_token": "<unknown>" },
    });
    tokenizer.to_string().into_bytes()
}

#[cfg(test)]
mod tests {
    use super::super::{BatchSource, Samples, Tokenizer};
    use super::*;
    use serde::Deserialize;

    /// Counts from the index; `mistake` spoils sample 3.
    struct Counting {
        seq_len: usize,
        samples: Option<u64>,
        group: usize,
        mistake: String,
    }

    impl DataSource for Counting {
        fn vocab_size(&self) -> usize {
            50
        }

        fn sample(&self, _split: Split, index: u64) -> Result<Sample, SourceError> {
            let tokens = (0..=self.seq_len as u64).map(|i| ((index + i) % 50) as u32).collect();
            let weights = (0..self.seq_len).map(|i| (i % 2) as f32).collect();
            let mut sample = Sample { tokens, weights };
            match self.mistake.as_str() {
                _ if index != 3 => {}
                "short" => sample.tokens.truncate(2),
                "outside" => sample.tokens[1] = 50,
                "weights" => sample.weights.truncate(1),
                "nan" => sample.weights[0] = f32::NAN,
                "error" => return Err("no luck".into()),
                "panic" => panic!("no idea"),
                _ => {}
            }
            Ok(sample)
        }

        fn num_samples(&self, _split: Split) -> Option<u64> {
            self.samples
        }

        fn group_size(&self) -> usize {
            self.group
        }
    }

    #[derive(Deserialize)]
    #[serde(deny_unknown_fields, default)]
    #[derive(Default)]
    struct Extra {
        samples: Option<u64>,
        group: usize,
        mistake: String,
    }

    fn sources() -> Sources {
        Sources::default().with("counting", |init| {
            let Extra { samples, group, mistake } = init.extra()?;
            Ok(Counting { seq_len: init.seq_len, samples, group, mistake })
        })
    }

    fn info(extra: serde_json::Value) -> SourceInfo {
        let serde_json::Value::Object(extra) = extra else { panic!("a table") };
        SourceInfo { name: "counting".to_owned(), extra, ..SourceInfo::default() }
    }

    fn batches(extra: serde_json::Value) -> (tempfile::TempDir, BatchSource) {
        let folder = tempfile::tempdir().unwrap();
        let (sources, info) = (sources(), info(extra));
        sources.prepare(folder.path(), &info, 4).unwrap();
        let samples = Samples::open(folder.path(), Split::Train, 4, &sources).unwrap();
        let batches = BatchSource::new(samples, true, 1).unwrap();
        (folder, batches)
    }

    #[test]
    fn endless_sources_follow_the_position() {
        let (folder, batches) = batches(json!({}));
        let batch = batches.fetch(48, 2).unwrap();
        assert_eq!(batch.inputs, [48, 49, 0, 1, 49, 0, 1, 2]);
        assert_eq!(batch.targets, [49, 0, 1, 2, 0, 1, 2, 3]);
        assert_eq!(batch.weights.unwrap(), [0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0]);
        assert_eq!(batches.num_samples(), None);
        let path = folder.path().join("tokenizer.json");
        let tokenizer = Tokenizer::from_file(std::fs::read(&path).unwrap(), &path).unwrap();
        assert_eq!(tokenizer.encode("7 49 0").unwrap(), [7, 49, 0]);
        assert_eq!(tokenizer.decode(&[7, 49]).unwrap(), "7 49");
        assert!(tokenizer.encode("7 x").is_err(), "unknown text");
    }

    #[test]
    fn sources_with_an_end_have_epochs() {
        let (_folder, batches) = batches(json!({ "samples": 5 }));
        assert_eq!(batches.num_samples(), Some(5));
        let mut firsts: Vec<_> = (0..5).map(|i| batches.fetch(i, 1).unwrap().inputs[0]).collect();
        firsts.sort_unstable();
        assert_eq!(firsts, [0, 1, 2, 3, 4]);
    }

    #[test]
    fn groups_stay_together() {
        let (_folder, batches) = batches(json!({ "samples": 12, "group": 3 }));
        let mut firsts: Vec<_> = (0..12).map(|i| batches.fetch(i, 1).unwrap().inputs[0]).collect();
        assert!(firsts.chunks(3).all(|group| group[0] % 3 == 0 && group[2] == group[0] + 2), "{firsts:?}");
        assert_ne!(firsts, (0..12).collect::<Vec<_>>(), "shuffled");
        firsts.sort_unstable();
        assert_eq!(firsts, (0..12).collect::<Vec<_>>());
        let uneven = sources().prepare(
            tempfile::tempdir().unwrap().path(),
            &info(json!({ "samples": 5, "group": 2 })),
            4,
        );
        assert!(uneven.unwrap_err().to_string().contains("has 5 samples, not a multiple of 2"));
    }

    #[test]
    fn other_files_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tokenizer.json"), "mine").unwrap();
        let message = sources().prepare(folder.path(), &info(json!({})), 4).unwrap_err().to_string();
        assert!(message.contains("the folder holds other files, such as tokenizer.json"), "{message}");
        assert_eq!(std::fs::read_to_string(folder.path().join("tokenizer.json")).unwrap(), "mine");
    }

    #[test]
    fn mistakes_of_a_source_are_named() {
        for (mistake, expected) in [
            ("short", "has 2 tokens instead of data.seq_len + 1 = 5"),
            ("outside", "has the id 50, outside the vocabulary of 50"),
            ("weights", "has 1 weights instead of data.seq_len = 4"),
            ("nan", "has the weight NaN"),
            ("error", "no luck"),
            ("panic", "the source panics: no idea"),
        ] {
            let (_folder, batches) = batches(json!({ "mistake": mistake }));
            batches.fetch(0, 3).unwrap();
            let message = batches.fetch(2, 2).unwrap_err().to_string();
            let start = "data.source = \"counting\": sample 3 of the training split: ";
            assert!(message.starts_with(start) && message.contains(expected), "{message}");
        }
    }

    #[test]
    fn a_folder_belongs_to_one_source() {
        let (folder, _) = batches(json!({ "samples": 5 }));
        let prepare = |info: &SourceInfo| sources().prepare(folder.path(), info, 4);
        prepare(&info(json!({ "samples": 5 }))).unwrap();
        let message = prepare(&info(json!({ "samples": 6 }))).unwrap_err().to_string();
        assert!(message.contains("data.extra was {\"samples\":5} and is {\"samples\":6} now"), "{message}");
        let message = prepare(&info(json!({ "sample": 6 }))).unwrap_err().to_string();
        assert!(message.contains("data.extra: unknown field `sample`"), "{message}");
        let deaf = Sources::default().with("counting", |init| {
            let (samples, group, mistake) = (None, 1, String::new());
            Ok(Counting { seq_len: init.seq_len, samples, group, mistake })
        });
        let message = deaf.describe(&info(json!({ "samples": 5 })), 4).unwrap_err().to_string();
        assert!(message.contains("the source reads no settings: remove data.extra.samples"), "{message}");
        let unknown = SourceInfo { name: "other".to_owned(), ..info(json!({})) };
        let message = prepare(&unknown).unwrap_err().to_string();
        assert!(message.contains("\"other\": this program has only the sources \"counting\""), "{message}");
    }
}
