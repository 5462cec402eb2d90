//! The files of all inputs, listed but not read.

use super::builtin::Builtin;
use super::remark::PassedOver;
use super::stream::Stream;
use super::walk::{Walked, walk};
use super::{DataError, Result};
use sha2::{Digest, Sha256};
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

/// Bytes hashed at a time.
const BLOCK: usize = 1 << 17;

/// Path of the standard input, for the input `-`.
const STANDARD_INPUT: &str = "/dev/stdin";

/// The format of the documents of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Text,
    JsonLines,
    Parquet,
    Builtin(Builtin),
}

impl Format {
    /// Returns the format of the file's extension, or text for any other extension.
    pub(super) fn of(path: &Path) -> Self {
        let extension = path.extension().map(|extension| extension.to_ascii_lowercase());
        match extension.as_deref().and_then(|extension| extension.to_str()) {
            Some("jsonl" | "ndjson") => Self::JsonLines,
            Some("parquet") => Self::Parquet,
            _ => Self::Text,
        }
    }
}

/// One file, or one built-in text.
#[derive(Clone, Debug)]
pub(super) struct Listed {
    /// The path as given, or as found below a given folder.
    pub(super) path: PathBuf,
    pub(super) format: Format,
    /// True if the user named this file itself, rather than a folder that contains it.
    pub(super) is_named: bool,
    /// The kind of stream, if the input can be read only once.
    pub(super) stream: Option<Stream>,
    /// Size in bytes; 0 for a stream, whose size is unknown until it has been read.
    pub(super) bytes: u64,
    /// Time of the last modification, in nanoseconds since 1970, if known.
    pub(super) modified: Option<u64>,
}

impl Listed {
    fn new(path: PathBuf, metadata: &Metadata, is_named: bool) -> Self {
        let stream = Stream::of(metadata);
        let since_1970 = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        Self {
            format: Format::of(&path),
            path,
            is_named,
            stream,
            bytes: if stream.is_some() { 0 } else { metadata.len() },
            modified: since_1970.and_then(|time| u64::try_from(time.as_nanos()).ok()),
        }
    }

    /// Returns the SHA-256 of the content. Not for a stream.
    pub(super) fn digest(&self) -> Result<String> {
        if let Format::Builtin(text) = self.format {
            return Ok(text.digest());
        }
        let file = File::open(&self.path).map_err(DataError::io("open", &self.path))?;
        sha256_of(file).map_err(DataError::io("read", &self.path))
    }
}

/// The listed inputs.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// The files, in order.
    pub(super) files: Vec<Listed>,
    /// Entries of folders that are not read.
    pub(super) passed_over: PassedOver,
}

/// Lists the inputs, which are files, folders and `builtin:arithmetic`, in their order. `-` stands for the
/// standard input.
///
/// # Errors
///
/// When there is no input, when one does not exist, and when a folder or the size of a file cannot be read.
pub(super) fn list(inputs: &[PathBuf]) -> Result<Listing> {
    if inputs.is_empty() {
        return Err(DataError::NoInputs);
    }
    let Listing { files: mut listed, mut passed_over } = Listing::default();
    for input in inputs {
        if let Some(text) = Builtin::parse(input)? {
            listed.push(Listed {
                path: input.clone(),
                format: Format::Builtin(text),
                is_named: true,
                stream: None,
                bytes: text.bytes(),
                modified: None,
            });
            continue;
        }
        let input = if input == Path::new("-") { Path::new(STANDARD_INPUT) } else { input };
        let metadata = match fs::metadata(input) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Err(DataError::Missing { path: input.to_path_buf() });
            }
            metadata => metadata.map_err(DataError::io("open", input))?,
        };
        if metadata.is_dir() {
            let Walked { files, passed_over: others } = walk(input)?;
            passed_over.append(others);
            for path in files {
                let metadata = fs::metadata(&path).map_err(DataError::io("read the size of", &path))?;
                listed.push(Listed::new(path, &metadata, false));
            }
        } else {
            listed.push(Listed::new(input.to_path_buf(), &metadata, true));
        }
    }
    Ok(Listing { files: listed, passed_over })
}

/// Checks that an input, as named in [`PrepareOptions::inputs`](super::PrepareOptions::inputs), exists and
/// may be read. A pipe is not opened, since its content can be read only once.
///
/// # Errors
///
/// When it does not exist, or may not be read.
pub fn check_input(input: &Path) -> Result<()> {
    let listing = list(&[input.to_path_buf()])?;
    let is_file = |listed: &&Listed| listed.stream.is_none() && !matches!(listed.format, Format::Builtin(_));
    match listing.files.iter().find(is_file) {
        Some(Listed { path, .. }) => File::open(path).map(drop).map_err(DataError::io("open", path)),
        None => Ok(()),
    }
}

/// Returns the SHA-256 of everything that `reader` yields, in hexadecimal.
pub(super) fn sha256_of(mut reader: impl Read) -> io::Result<String> {
    let mut hasher = Sha256::new();
    let mut block = vec![0; BLOCK];
    loop {
        match reader.read(&mut block) {
            Ok(0) => return Ok(format!("{:x}", hasher.finalize())),
            Ok(read) => hasher.update(&block[..read]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
