//! `inputs.json`: the inputs and options that a folder was prepared from, to detect later changes.

use super::listing::{Format, Listed, list};
use super::progress::{Counted, NAMED};
use super::sums::{read_small_file, write_small_file};
use super::tokenizer::read_named_tokenizer;
use super::{DataError, PrepareOptions, Result, TokenizerSource};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::collections::{HashMap, HashSet, VecDeque};
use std::fmt;
use std::path::{Path, PathBuf, absolute};
use std::sync::atomic::AtomicBool;

pub(super) const INPUTS_FILE: &str = "inputs.json";

/// Version of the rules for dividing and tokenizing documents. Folders without a version have version 1.
const RULES: u64 = 2;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Inputs {
    #[serde(default = "first_rules")]
    rules: u64,
    tokenizer: Tokenizer,
    validation_fraction: f64,
    seed: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    limit: Option<u64>,
    /// True if documents start with a token. `None`: the tokenizer's post-processor decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    bos: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    end_of_text: Option<String>,
    #[serde(default)]
    special_tokens: bool,
    #[serde(default)]
    skip_bad_lines: bool,
    /// SHA-256 of the chat template, if the files are conversations.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    chat_template: Option<String>,
    files: Vec<InputFile>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Tokenizer {
    /// Trained on the inputs, with a requested vocabulary of `vocab_size` tokens.
    Trained { vocab_size: usize },
    /// Read from a `tokenizer.json` whose SHA-256, in hexadecimal, is `sha256`.
    File { sha256: String },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct InputFile {
    path: String,
    bytes: u64,
    /// Time of the last modification, in nanoseconds since 1970.
    #[serde(default)]
    modified: Option<u64>,
    sha256: String,
}

fn first_rules() -> u64 {
    1
}

impl Tokenizer {
    /// Describes `source`. `given`: the content of the tokenizer file, which may be a pipe that can be read only once.
    fn new(source: &TokenizerSource, given: &[u8]) -> Self {
        match source {
            TokenizerSource::Train { vocab_size } => Self::Trained { vocab_size: *vocab_size },
            TokenizerSource::File(_) => Self::File { sha256: format!("{:x}", Sha256::digest(given)) },
        }
    }
}

impl fmt::Display for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Trained { vocab_size } => {
                write!(f, "trained with data.vocab_size = {vocab_size}")
            }
            Self::File { sha256 } => {
                write!(f, "a tokenizer.json with SHA-256 {}…", sha256.get(..12).unwrap_or(sha256))
            }
        }
    }
}

impl Inputs {
    /// Records `options` and `files` with their SHA-256. `tokenizer`: the content of the tokenizer file.
    pub(super) fn new(
        files: Vec<(&Listed, String)>,
        options: &PrepareOptions,
        tokenizer: &[u8],
    ) -> Result<Self> {
        let file = |(listed, sha256): (&Listed, String)| InputFile {
            path: name(&listed.path),
            bytes: listed.bytes,
            modified: listed.modified,
            sha256,
        };
        Ok(Self {
            rules: RULES,
            tokenizer: Tokenizer::new(&options.tokenizer, tokenizer),
            validation_fraction: options.validation_fraction,
            seed: options.seed,
            limit: options.limit,
            bos: options.bos,
            end_of_text: options.end_of_text.clone(),
            special_tokens: options.special_tokens,
            skip_bad_lines: options.skip_bad_lines,
            chat_template: chat_template(options)?,
            files: files.into_iter().map(file).collect(),
        })
    }

    pub(super) fn repeated(&self) -> Counted {
        let mut groups: HashMap<(&str, u64), Vec<&InputFile>> = HashMap::new();
        for file in self.files.iter().filter(|file| file.bytes > 0) {
            groups.entry((&file.sha256, file.bytes)).or_default().push(file);
        }
        let first = self.files.iter().filter_map(|file| {
            let group = groups.get(&(file.sha256.as_str(), file.bytes))?;
            (group.len() > 1 && std::ptr::eq(group[0], file)).then_some(group)
        });
        first.map(|group| same(&group.iter().map(|file| file.path.as_str()).collect::<Vec<_>>())).collect()
    }

    pub(super) fn load(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(INPUTS_FILE);
        if !path.try_exists().map_err(DataError::io("open", &path))? {
            return Ok(None);
        }
        let inputs = serde_json::from_slice(&read_small_file(folder, INPUTS_FILE)?);
        inputs.map(Some).map_err(|error| DataError::Info { path, problem: error.to_string() })
    }

    pub(super) fn save(&self, folder: &Path) -> Result<()> {
        write_small_file(folder, INPUTS_FILE, self)
    }

    /// Returns a line for each difference between `options` and those that this folder was prepared from, except for
    /// the seed and the folder. Compares the contents of files if their modification times differ. Finds moved files by
    /// content.
    pub(super) fn differences(&self, options: &PrepareOptions) -> Result<Vec<String>> {
        let mut differences = Vec::new();
        let given = match &options.tokenizer {
            TokenizerSource::Train { .. } => Vec::new(),
            TokenizerSource::File(path) => read_named_tokenizer(path, &AtomicBool::new(false))?,
        };
        let tokenizer = Tokenizer::new(&options.tokenizer, &given);
        if self.tokenizer != tokenizer {
            differences.push(format!("tokenizer: {} then, {tokenizer} now", self.tokenizer));
        }
        let bos = |bos: Option<bool>| bos.map_or("auto".to_owned(), |bos| bos.to_string());
        let end = |end: &Option<String>| end.clone().unwrap_or_else(|| "not set".to_owned());
        let bad_lines = |skip: bool| if skip { "skip" } else { "error" }.to_owned();
        let template = |sha256: &Option<String>| match sha256 {
            Some(sha256) => format!("one with SHA-256 {}…", sha256.get(..12).unwrap_or(sha256)),
            None => "none".to_owned(),
        };
        let documents = |limit: Option<u64>| limit.map_or("all".to_owned(), |n| format!("the first {n}"));
        for (key, then, now) in [
            (
                "data.validation_fraction",
                self.validation_fraction.to_string(),
                options.validation_fraction.to_string(),
            ),
            ("version of the rules by which text becomes tokens", self.rules.to_string(), RULES.to_string()),
            ("data.bos", bos(self.bos), bos(options.bos)),
            ("data.end_of_text", end(&self.end_of_text), end(&options.end_of_text)),
            ("data.special_tokens", self.special_tokens.to_string(), options.special_tokens.to_string()),
            ("data.bad_lines", bad_lines(self.skip_bad_lines), bad_lines(options.skip_bad_lines)),
            ("chat template", template(&self.chat_template), template(&chat_template(options)?)),
            ("documents", documents(self.limit), documents(options.limit)),
        ] {
            if then != now {
                differences.push(format!("{key}: {then} then, {now} now"));
            }
        }
        match list(&options.inputs) {
            Ok(listing) => self.compare_files(&listing.files, &mut differences)?,
            Err(DataError::Missing { path }) => {
                differences.push(format!("text: {} no longer exists", path.display()));
            }
            Err(error) => return Err(error),
        }
        Ok(differences)
    }

    fn compare_files(&self, listed: &[Listed], differences: &mut Vec<String>) -> Result<()> {
        let mut pairs = self.pair_by_path(listed);
        self.pair_by_content(listed, &mut pairs)?;
        let (mut added, mut changed, mut unsure) = (Counted::default(), Counted::default(), Vec::new());
        for (now, pair) in listed.iter().zip(&pairs) {
            let path = name(&now.path);
            match pair.map(|index| &self.files[index]) {
                None => added.add(|| path),
                Some(_) if now.stream.is_some() => {
                    changed.add(|| format!("{path} (it can be read only once, so nothing is compared)"));
                }
                Some(then) if then.bytes != now.bytes => {
                    changed.add(|| format!("{path} ({} bytes then, {} now)", then.bytes, now.bytes));
                }
                Some(then) if then.modified.is_some() && then.modified == now.modified => {}
                Some(then) => unsure.push((then, now)),
            }
        }
        let other = |(then, now): &(&InputFile, &Listed)| -> Result<Option<String>> {
            let same = now.digest()? == then.sha256;
            Ok((!same).then(|| format!("{} (other content)", then.path)))
        };
        let others = unsure.par_iter().map(other).collect::<Result<Vec<_>, _>>()?;
        changed.append(others.into_iter().flatten().collect());
        let removed = self.unpaired(&pairs).map(|index| self.files[index].path.clone()).collect();
        let before = differences.len();
        for (what, files) in [("changed", changed), ("new", added), ("gone", removed)] {
            if files.count > 0 {
                differences.push(format!("text, {what}: {files}"));
            }
        }
        if before == differences.len() && !pairs.is_sorted() {
            differences.push("text: the same files in a different order".to_owned());
        }
        Ok(())
    }

    /// Returns, for each current file, the index of the recorded file with the same canonical path.
    fn pair_by_path(&self, listed: &[Listed]) -> Vec<Option<usize>> {
        // A file may have been named more than once.
        let mut left: HashMap<PathBuf, VecDeque<usize>> = HashMap::new();
        for (index, file) in self.files.iter().enumerate() {
            left.entry(place(Path::new(&file.path))).or_default().push_back(index);
        }
        listed.iter().map(|now| left.get_mut(&place(&now.path))?.pop_front()).collect()
    }

    fn pair_by_content(&self, listed: &[Listed], pairs: &mut [Option<usize>]) -> Result<()> {
        let mut left: HashMap<u64, Vec<usize>> = HashMap::new();
        for index in self.unpaired(pairs) {
            left.entry(self.files[index].bytes).or_default().push(index);
        }
        let lone: Vec<usize> = (0..listed.len())
            .filter(|&index| pairs[index].is_none() && listed[index].stream.is_none())
            .filter(|&index| left.contains_key(&listed[index].bytes))
            .collect();
        let digests = lone.par_iter().map(|&index| listed[index].digest()).collect::<Result<Vec<_>, _>>()?;
        for (index, digest) in lone.into_iter().zip(digests) {
            let now = &listed[index];
            let Some(candidates) = left.get_mut(&now.bytes) else { continue };
            let is_same = |&then: &usize| {
                let then = &self.files[then];
                then.sha256 == digest && Format::from_path(Path::new(&then.path)) == now.format
            };
            if let Some(at) = candidates.iter().position(is_same) {
                pairs[index] = Some(candidates.remove(at));
            }
        }
        Ok(())
    }

    fn unpaired(&self, pairs: &[Option<usize>]) -> impl Iterator<Item = usize> + use<> {
        let paired: HashSet<usize> = pairs.iter().flatten().copied().collect();
        (0..self.files.len()).filter(move |index| !paired.contains(index))
    }
}

fn chat_template(options: &PrepareOptions) -> Result<Option<String>> {
    options.chat.then(|| Ok(options.chat_model()?.1.digest())).transpose()
}

fn same(group: &[&str]) -> String {
    let (first, count) = (group[0], group.len());
    if group.iter().all(|path| *path == first) {
        return format!("{first} ({count} times)");
    }
    match count {
        0..=NAMED => group.join(" = "),
        _ => format!("{} = {} more", group[..NAMED].join(" = "), count - NAMED),
    }
}

fn place(path: &Path) -> PathBuf {
    path.canonicalize().or_else(|_| absolute(path)).unwrap_or_else(|_| path.to_owned())
}

fn name(path: &Path) -> String {
    path.strip_prefix("./").unwrap_or(path).display().to_string()
}

#[cfg(test)]
mod tests {
    use super::super::{PrepareOptions, Progress, Remark, prepare};
    use super::*;
    use std::fs::{self, File};
    use std::time::{Duration, SystemTime};

    struct Folder(tempfile::TempDir);

    impl Folder {
        fn new() -> Self {
            let folder = Self(tempfile::tempdir().unwrap());
            fs::create_dir(folder.path("texts")).unwrap();
            for name in ["a.txt", "b.txt"] {
                folder.write(name, &format!("a line of {name}\n").repeat(50));
            }
            folder
        }

        fn path(&self, name: &str) -> PathBuf {
            self.0.path().join(name)
        }

        fn write(&self, name: &str, content: &str) {
            fs::write(self.path("texts").join(name), content).unwrap();
        }

        fn set_modified(&self, name: &str, time: SystemTime) {
            let file = File::options().write(true).open(self.path("texts").join(name)).unwrap();
            file.set_modified(time).unwrap();
        }

        fn options(&self) -> PrepareOptions {
            let tokenizer = TokenizerSource::Train { vocab_size: 300 };
            PrepareOptions {
                validation_fraction: 0.3,
                seed: 1,
                ..PrepareOptions::new(vec![self.path("texts")], self.path("data"), tokenizer)
            }
        }

        fn differences(&self, options: &PrepareOptions) -> Vec<String> {
            let inputs = Inputs::load(&self.path("data")).unwrap().unwrap();
            let folder = format!("{}/", self.path("texts").display());
            let differences = inputs.differences(options).unwrap();
            differences.iter().map(|line| line.replace(&folder, "")).collect()
        }
    }

    #[test]
    fn the_same_inputs_do_not_differ() {
        let folder = Folder::new();
        let options = folder.options();
        prepare(&options, &mut |_| {}).unwrap();
        assert!(folder.differences(&options).is_empty());
        let other = PrepareOptions { seed: 2, out: folder.path("other"), ..options.clone() };
        assert!(folder.differences(&other).is_empty());
        let time = SystemTime::now() + Duration::from_secs(100);
        folder.set_modified("a.txt", time);
        assert!(folder.differences(&options).is_empty());
    }

    #[test]
    fn every_difference_is_named() {
        let folder = Folder::new();
        let options = folder.options();
        prepare(&options, &mut |_| {}).unwrap();
        let tokenizer = TokenizerSource::Train { vocab_size: 400 };
        let other = PrepareOptions {
            tokenizer,
            validation_fraction: 0.2,
            bos: Some(false),
            end_of_text: Some("<|end|>".to_owned()),
            special_tokens: true,
            skip_bad_lines: true,
            ..options.clone()
        };
        assert_eq!(
            folder.differences(&other),
            [
                "tokenizer: trained with data.vocab_size = 300 then, trained with data.vocab_size = 400 now",
                "data.validation_fraction: 0.3 then, 0.2 now",
                "data.bos: auto then, false now",
                "data.end_of_text: not set then, <|end|> now",
                "data.special_tokens: false then, true now",
                "data.bad_lines: error then, skip now",
            ]
        );
        let record = folder.path("data").join(INPUTS_FILE);
        let newer = fs::read_to_string(&record).unwrap();
        fs::remove_file(folder.path("data").join("SHA256SUMS")).unwrap();
        fs::write(&record, newer.replace("\"rules\": 2,", "")).unwrap();
        let rules = "version of the rules by which text becomes tokens: 1 then, 2 now";
        assert_eq!(folder.differences(&options), [rules]);
        fs::write(&record, newer).unwrap();
        let again = PrepareOptions {
            inputs: vec![folder.path("texts"), folder.path("texts/a.txt")],
            ..options.clone()
        };
        assert_eq!(folder.differences(&again), ["text, new: a.txt"]);
        let apart = |first, second| PrepareOptions {
            inputs: vec![folder.path(first), folder.path(second)],
            ..options.clone()
        };
        assert!(folder.differences(&apart("texts/a.txt", "texts/b.txt")).is_empty());
        assert_eq!(
            folder.differences(&apart("texts/b.txt", "texts/a.txt")),
            ["text: the same files in a different order"]
        );

        folder.write("a.txt", "another");
        // The same length as before.
        folder.write("b.txt", &"A LINE OF b.txt\n".repeat(50));
        folder.set_modified("b.txt", SystemTime::now() + Duration::from_secs(100));
        folder.write("c.txt", "new");
        assert_eq!(
            folder.differences(&options),
            ["text, changed: a.txt (800 bytes then, 7 now), b.txt (other content)", "text, new: c.txt"]
        );
        fs::remove_file(folder.path("texts/a.txt")).unwrap();
        assert!(folder.differences(&options).contains(&"text, gone: a.txt".to_owned()));
        fs::remove_dir_all(folder.path("texts")).unwrap();
        let gone = format!("text: {} no longer exists", folder.path("texts").display());
        assert_eq!(folder.differences(&options), [gone]);
    }

    #[test]
    fn moved_text_is_the_same_text() {
        let folder = Folder::new();
        let options = folder.options();
        prepare(&options, &mut |_| {}).unwrap();
        let of = |inputs: &[&str]| PrepareOptions {
            inputs: inputs.iter().map(|name| folder.path(name)).collect(),
            ..options.clone()
        };
        assert!(folder.differences(&of(&["texts/../texts"])).is_empty());
        std::os::unix::fs::symlink("texts", folder.path("link")).unwrap();
        assert!(folder.differences(&of(&["link"])).is_empty());
        fs::rename(folder.path("texts"), folder.path("moved")).unwrap();
        assert!(folder.differences(&of(&["moved"])).is_empty());
        assert_eq!(
            folder.differences(&of(&["moved/b.txt", "moved/a.txt"])),
            ["text: the same files in a different order"]
        );
        // As a `.jsonl` file, the same bytes are different text.
        fs::rename(folder.path("moved/b.txt"), folder.path("moved/b.jsonl")).unwrap();
        let differences = folder.differences(&of(&["moved"]));
        assert_eq!(differences.len(), 2, "{differences:?}");
        assert!(differences[1] == "text, gone: b.txt", "{differences:?}");
    }

    #[test]
    fn repeated_content_is_reported() {
        let folder = Folder::new();
        folder.write("c.txt", &"a line of a.txt\n".repeat(50));
        for empty in ["d.txt", "e.txt"] {
            folder.write(empty, "");
        }
        let inputs = ["texts", "texts/b.txt"].map(|name| folder.path(name)).to_vec();
        let mut remarks = Vec::new();
        let mut progress = |progress| {
            if let Progress::Remark(remark) = progress {
                remarks.push(remark);
            }
        };
        prepare(&PrepareOptions { inputs, ..folder.options() }, &mut progress).unwrap();
        let path = |name: &str| folder.path("texts").join(name).display().to_string();
        let groups = format!("{} = {}, {} (2 times)", path("a.txt"), path("c.txt"), path("b.txt"));
        let message = format!("the same content occurs more than once: {groups}");
        assert!(remarks.contains(&Remark::note(message)), "{remarks:?}");
    }

    #[test]
    fn large_groups_are_shortened() {
        let files = ["0", "1", "2", "3", "4", "5", "6", "7"];
        assert_eq!(same(&files[..2]), "0 = 1");
        assert_eq!(same(&files), "0 = 1 = 2 = 3 = 4 = 3 more");
        assert_eq!(same(&["a", "a"]), "a (2 times)");
    }
}
