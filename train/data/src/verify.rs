use super::blocks::BlockSums;
use super::info::{INFO_FILE, TOKENIZER_FILE};
use super::inputs::INPUTS_FILE;
use super::listing::sha256_of;
use super::sums::{SUMS_FILE, Sums};
use super::{DataError, DataInfo, Result, Split, TokenWidth, Tokenizer};
use kiln_sys::{Checksum, files};
use sha2::{Digest, Sha256};
use std::fmt::Display;
use std::fs::File;
use std::io::ErrorKind;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

const CHUNK: u64 = 1 << 20;

const MISSING: &str = "it is missing";

const NAMED: usize = 5;

/// The result of checking every byte of a folder.
#[derive(Debug)]
pub struct Verified {
    /// Number of files compared with a checksum.
    pub files: usize,
    /// Total size of these files in bytes.
    pub bytes: u64,
    /// Files without a checksum. Earlier versions and other programs do not write all checksums.
    pub unproven: Vec<&'static str>,
    /// Problems found, each starting with the path of its file.
    pub problems: Vec<String>,
}

/// Compares every file of a folder of prepared data with its checksums. `progress` receives the bytes read and the
/// total.
///
/// # Errors
///
/// If the folder does not exist, its `data.json` is invalid, or a file cannot be read.
pub fn verify(folder: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<Verified> {
    if !folder.try_exists().map_err(DataError::io("open", folder))? {
        return Err(DataError::Missing { path: folder.to_owned() });
    }
    let info = DataInfo::load_unproven(folder)?;
    let splits = [Split::Train, Split::Validation];
    let sizes = splits.map(|split| info.split(split).tokens.saturating_mul(info.dtype.bytes() as u64));
    let all = sizes[0].saturating_add(sizes[1]);
    let mut check = Check {
        folder,
        info: &info,
        sums: None,
        progress: &mut |read| progress(read, all),
        read: 0,
        found: Verified { files: 0, bytes: 0, unproven: Vec::new(), problems: Vec::new() },
    };
    check.load_sums()?;
    // Samples that a program makes are in no file.
    for split in splits.into_iter().filter(|_| info.source.is_none()) {
        check.check_tokens(split)?;
        if info.chat.is_some() {
            check.check_small_file(split.turns_name())?;
        }
    }
    let of_text = info.source.is_none().then_some(INPUTS_FILE);
    for name in [INFO_FILE, TOKENIZER_FILE].into_iter().chain(of_text) {
        check.check_small_file(name)?;
    }
    check.check_tokenizer();
    Ok(check.found)
}

struct Check<'a> {
    folder: &'a Path,
    info: &'a DataInfo,
    sums: Option<Sums>,
    progress: &'a mut dyn FnMut(u64),
    read: u64,
    found: Verified,
}

impl Check<'_> {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    fn add(&mut self, name: &str, problem: impl Display) {
        self.found.problems.push(format!("{}: {problem}", self.path(name).display()));
    }

    fn load_sums(&mut self) -> Result<()> {
        match Sums::load(self.folder)? {
            Some(Ok(sums)) => self.sums = Some(sums),
            Some(Err(problem)) => self.add(SUMS_FILE, problem),
            // Every program that writes block checksums also writes `SHA256SUMS`.
            None if self.info.train.block_bytes.is_some() => self.add(SUMS_FILE, MISSING),
            None => {}
        }
        Ok(())
    }

    fn open(&mut self, name: &'static str) -> Result<Option<(File, u64)>> {
        let path = self.path(name);
        let file = match files::open(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                self.add(name, MISSING);
                return Ok(None);
            }
            Err(error) if error.kind() == ErrorKind::InvalidInput => {
                self.add(name, error);
                return Ok(None);
            }
            file => file.map_err(DataError::io("open", &path))?,
        };
        let bytes = file.metadata().map_err(DataError::io("read the size of", &path))?.len();
        Ok(Some((file, bytes)))
    }

    /// Compares the SHA-256 of a file with the stated one. Returns whether they agree, or `None` if none is stated.
    fn compare(
        &mut self,
        name: &'static str,
        bytes: u64,
        actual: &str,
        in_info: Option<&str>,
    ) -> Option<bool> {
        let listed = self.sums.as_ref().map(|sums| sums.get(name).map(str::to_owned));
        let (expected, stated_in) = match listed {
            Some(Some(listed)) => (listed, SUMS_FILE),
            Some(None) => {
                self.add(name, format_args!("{SUMS_FILE} has no line for it"));
                return None;
            }
            None => match in_info {
                Some(stated) => (stated.to_owned(), INFO_FILE),
                None => {
                    self.found.unproven.push(name);
                    return None;
                }
            },
        };
        self.found.files += 1;
        self.found.bytes += bytes;
        let agrees = actual.eq_ignore_ascii_case(&expected);
        if !agrees {
            self.add(name, format_args!("its SHA-256 differs from the one in {stated_in}"));
        }
        Some(agrees)
    }

    fn check_small_file(&mut self, name: &'static str) -> Result<Option<bool>> {
        // Folders from other programs may lack this file.
        let is_there = self.path(name).exists();
        if !is_there && name == INPUTS_FILE && self.sums.is_none() {
            return Ok(None);
        }
        let Some((file, bytes)) = self.open(name)? else { return Ok(None) };
        let path = self.path(name);
        let actual = sha256_of(file).map_err(DataError::io("read", &path))?;
        Ok(self.compare(name, bytes, &actual, None))
    }

    /// Checks that the tokenizer is usable, even without a checksum.
    fn check_tokenizer(&mut self) {
        let path = self.path(TOKENIZER_FILE);
        let prefix = format!("{}: ", path.display());
        if self.found.problems.iter().any(|problem| problem.starts_with(&prefix)) {
            return;
        }
        let problem = match Tokenizer::load(&path) {
            Ok(_) => return,
            Err(DataError::TokenizerFile { problem, .. }) => problem,
            Err(error) => error.to_string(),
        };
        self.add(TOKENIZER_FILE, format_args!("it is not a usable tokenizer: {problem}"));
    }

    fn check_tokens(&mut self, split: Split) -> Result<()> {
        let (name, stated) = (split.file_name(), self.info.split(split).clone());
        let sums_agree = match stated.block_bytes {
            Some(_) => self.check_small_file(split.block_sums_name())?,
            None => None,
        };
        let Some((file, bytes)) = self.open(name)? else { return Ok(()) };
        let expected = stated.tokens.saturating_mul(self.info.dtype.bytes() as u64);
        if bytes != expected {
            self.add(name, format_args!("it has {bytes} bytes, not {expected}"));
            return Ok(());
        }
        // Without block checksums, the whole file may still have a checksum.
        let blocks = match stated.block_bytes {
            Some(block) if self.path(split.block_sums_name()).is_file() => {
                match BlockSums::open(self.path(split.block_sums_name()), block, bytes) {
                    Ok(blocks) => Some(blocks),
                    Err(DataError::BlockSums { problem, .. }) => {
                        self.add(split.block_sums_name(), problem);
                        None
                    }
                    Err(error) => return Err(error),
                }
            }
            _ => None,
        };
        let scan = self.scan(&file, name, bytes, blocks.as_ref())?;
        if let Some((position, id)) = scan.outside {
            let others = match scan.outsiders - 1 {
                0 => String::new(),
                others => format!(", and so are {others} more"),
            };
            let vocab_size = self.info.vocab_size;
            let problem = format!("token {position} is {id}, outside the vocabulary of {vocab_size}{others}");
            self.add(name, problem);
        }
        let before = self.found.problems.len();
        let agrees = self.compare(name, bytes, &scan.sha256, stated.sha256.as_deref());
        let Some(blocks) = blocks.filter(|_| !scan.changed.is_empty()) else { return Ok(()) };
        // If the token file is intact, its block checksums are damaged.
        if agrees == Some(true) && sums_agree != Some(true) {
            // If the file of block checksums has a checksum, its damage has already been reported.
            if sums_agree.is_none() {
                let problem = format!("{} checksums do not match {name}", scan.changed.len());
                self.add(split.block_sums_name(), problem);
            }
            return Ok(());
        }
        // The damaged places replace the report about the whole file.
        self.found.problems.truncate(before);
        let width = self.info.dtype.bytes() as u64;
        let runs: Vec<&[u64]> = scan.changed.chunk_by(|block, next| block + 1 == *next).collect();
        let tokens = |run: &&[u64]| {
            let end = ((run[run.len() - 1] + 1) * blocks.block_bytes()).min(bytes);
            format!("{} to {}", run[0] * blocks.block_bytes() / width, end / width - 1)
        };
        let named = runs.iter().take(NAMED).map(tokens).collect::<Vec<_>>().join(" and ");
        let more = match runs.len().saturating_sub(NAMED) {
            0 => String::new(),
            more => format!(" and in {more} more places"),
        };
        let (changed, all) = (scan.changed.len(), blocks.blocks());
        self.add(
            name,
            format_args!(
                "tokens {named}{more} have changed since they were prepared ({changed} of {all} blocks differ)"
            ),
        );
        Ok(())
    }

    /// Computes the SHA-256, the changed blocks and the ids outside the vocabulary in one pass over a token file.
    fn scan(&mut self, file: &File, name: &str, bytes: u64, blocks: Option<&BlockSums>) -> Result<Scan> {
        let path = self.path(name);
        let chunk = blocks.map_or(CHUNK, BlockSums::block_bytes);
        let width = self.info.dtype.bytes() as u64;
        let (mut hasher, mut content) = (Sha256::new(), Vec::new());
        let mut scan = Scan::default();
        for index in 0..bytes.div_ceil(chunk) {
            let start = index * chunk;
            content.resize((bytes - start).min(chunk) as usize, 0);
            file.read_exact_at(&mut content, start).map_err(DataError::io("read", &path))?;
            hasher.update(&content);
            if let Some(blocks) = blocks
                && Checksum::of(&content) != blocks.checksum(index)?
            {
                scan.changed.push(index);
            }
            let (first, vocab_size) = (start / width, self.info.vocab_size);
            match self.info.dtype {
                TokenWidth::U16 => {
                    let ids = content.as_chunks().0.iter().map(|id| u16::from_le_bytes(*id).into());
                    scan.check_ids(ids, first, vocab_size);
                }
                TokenWidth::U32 => {
                    let ids = content.as_chunks().0.iter().map(|id| u32::from_le_bytes(*id));
                    scan.check_ids(ids, first, vocab_size);
                }
            }
            self.read += content.len() as u64;
            (self.progress)(self.read);
        }
        scan.sha256 = format!("{:x}", hasher.finalize());
        Ok(scan)
    }
}

#[derive(Default)]
struct Scan {
    sha256: String,
    changed: Vec<u64>,
    outside: Option<(u64, u32)>,
    outsiders: u64,
}

impl Scan {
    /// Records ids outside the vocabulary. `first`: position in the file of the first of `ids`.
    fn check_ids(&mut self, ids: impl Iterator<Item = u32>, first: u64, vocab_size: usize) {
        for (position, id) in (first..).zip(ids) {
            if id as usize >= vocab_size {
                self.outside.get_or_insert((position, id));
                self.outsiders += 1;
            }
        }
    }
}
