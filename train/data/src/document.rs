//! The documents of the inputs, as one stream of chunks.
//!
//! Nothing here holds more than one document in memory, and of a text file no more
//! than one chunk: a corpus may be far larger than the memory.

use super::builtin::Builtin;
use super::encoding::NotText;
use super::jsonl::JsonLines;
use super::listing::{Format, Listed, sha256_of};
use super::piece::{Cutter, TextChunk, chunk_limit};
use super::reader::{DocumentReader, DocumentText};
use super::remark::{PassedOver, Unread};
use super::stream;
use super::text::TextFile;
use super::{DataError, Result};
use rayon::prelude::*;
use std::fs::{self, File};
use std::io::{Cursor, Read, Seek as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

/// One file, or one built-in text, that can be read as often as it takes.
#[derive(Debug)]
struct Source {
    listed: Listed,
    /// What a stream has yielded, in a file that has no name any more.
    copy: Option<File>,
}

impl Source {
    /// A reader of the documents; the inner error says why the file is passed over as not text.
    fn open(&self) -> Result<Result<Box<dyn DocumentReader>, NotText>> {
        let path = &self.listed.path;
        Ok(Ok(match self.listed.format {
            Format::Builtin(text) => Box::new(BuiltinText { text, next: 0 }),
            Format::JsonLines => Box::new(JsonLines::new(self.file()?, path)),
            Format::Parquet => open_parquet(self.file()?, path)?,
            Format::Text => match TextFile::new(self.file()?, path)? {
                Ok(file) => Box::new(file),
                Err(problem) if self.listed.is_named => {
                    let problem = problem.to_string();
                    return Err(DataError::NotText { path: path.clone(), problem });
                }
                Err(problem) => return Ok(Err(problem)),
            },
        }))
    }

    /// The content, from its start. One reader at a time: those of a copy share their position.
    fn file(&self) -> Result<File> {
        let path = &self.listed.path;
        let Some(copy) = &self.copy else {
            return File::open(path).map_err(DataError::io("open", path));
        };
        let again = || {
            let mut file = copy.try_clone()?;
            file.rewind()?;
            Ok(file)
        };
        again().map_err(DataError::io("read the copy of", path))
    }
}

#[cfg(feature = "parquet")]
fn open_parquet(file: File, path: &Path) -> Result<Box<dyn DocumentReader>> {
    Ok(Box::new(super::parquet::ParquetFile::new(file, path)?))
}

#[cfg(not(feature = "parquet"))]
fn open_parquet(_: File, path: &Path) -> Result<Box<dyn DocumentReader>> {
    Err(DataError::ParquetDisabled { path: path.to_path_buf() })
}

struct BuiltinText {
    text: Builtin,
    next: u64,
}

impl DocumentReader for BuiltinText {
    fn next_document(&mut self) -> Result<Option<DocumentText>> {
        let index = self.next;
        self.next += 1;
        let exists = index < self.text.documents();
        Ok(exists.then(|| Box::new(Cursor::new(self.text.document(index))) as DocumentText))
    }
}

/// The files of all inputs, which can be read as often as it takes.
#[derive(Debug)]
pub(super) struct Corpus {
    sources: Vec<Source>,
    bytes: u64,
    /// Documents to read at most.
    limit: Option<u64>,
}

impl Corpus {
    /// Takes the files as they were listed. What can be read only once is read now, to its end, and kept
    /// as a file in the folder `scratch` that has no name and is gone with the corpus.
    ///
    /// # Errors
    ///
    /// When this build cannot read one of the formats, when a stream cannot be read or copied, and when
    /// `stop` becomes true meanwhile.
    pub(super) fn open(listed: Vec<Listed>, scratch: &Path, stop: &AtomicBool) -> Result<Self> {
        // Told before hours of work on the files that come first.
        let parquet = listed.iter().find(|listed| listed.format == Format::Parquet);
        if let (Some(listed), false) = (parquet, cfg!(feature = "parquet")) {
            return Err(DataError::ParquetDisabled { path: listed.path.clone() });
        }
        let mut sources = Vec::with_capacity(listed.len());
        for mut listed in listed {
            let copy = match listed.stream.is_some() {
                true => Some(copy_stream(&mut listed, scratch, stop)?),
                false => None,
            };
            sources.push(Source { listed, copy });
        }
        let bytes = sources.iter().map(|source| source.listed.bytes).sum();
        Ok(Self { sources, bytes, limit: None })
    }

    /// Takes no more than the first `limit` documents, if it is given.
    pub(super) fn take(self, limit: Option<u64>) -> Self {
        Self { limit, ..self }
    }

    /// Every file with its SHA-256; files are read on all cores.
    pub(super) fn digests(&self) -> Result<Vec<(&Listed, String)>> {
        let digest = |source: &Source| match &source.copy {
            None => source.listed.digest(),
            Some(_) => sha256_of(source.file()?).map_err(DataError::io("read", &source.listed.path)),
        };
        self.sources.par_iter().map(|source| Ok((&source.listed, digest(source)?))).collect()
    }

    /// Number of files, counting a built-in text as one.
    pub(super) fn files(&self) -> usize {
        self.sources.len()
    }

    /// Inputs that were named and hold nothing.
    pub(super) fn empty(&self) -> Vec<PathBuf> {
        let listed = self.sources.iter().map(|source| &source.listed);
        // Some files have content and no size, such as those in /proc.
        let is_empty = |listed: &Listed| {
            let first = || File::open(&listed.path).and_then(|mut file| file.read(&mut [0]));
            listed.bytes == 0 && (listed.stream.is_some() || first().is_ok_and(|read| read == 0))
        };
        let empty = listed.filter(|listed| listed.is_named && is_empty(listed));
        empty.map(|listed| listed.path.clone()).collect()
    }

    /// Size of all files together, in bytes. The text in them is smaller in `.jsonl`
    /// files and may be larger in `.parquet` files.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Reads the text, from the start. The chunks are the same on every pass.
    pub(super) fn chunks(&self) -> TextChunks<'_> {
        TextChunks {
            sources: self.sources.iter(),
            limit: chunk_limit(self.bytes),
            most: self.limit.unwrap_or(u64::MAX),
            source: None,
            cutter: None,
            documents: 0,
            passed_over: PassedOver::default(),
            failed: false,
        }
    }
}

/// Copies a stream to its end, and notes its size.
fn copy_stream(listed: &mut Listed, scratch: &Path, stop: &AtomicBool) -> Result<File> {
    let path = scratch.join("stream");
    let mut copy = File::options()
        .read(true)
        .write(true)
        // A prepare that was killed may have left its own.
        .create(true)
        .truncate(true)
        .open(&path)
        .map_err(DataError::io("create", &path))?;
    // Nobody else needs its name, and without one it cannot be left behind.
    fs::remove_file(&path).map_err(DataError::io("remove", &path))?;
    listed.bytes = stream::copy_to_end(&listed.path, &mut copy, u64::MAX, stop)?;
    Ok(copy)
}

/// The chunks of all documents, in order; see [`Corpus::chunks`]. It ends after the first error.
pub(super) struct TextChunks<'a> {
    sources: std::slice::Iter<'a, Source>,
    limit: usize,
    /// Documents to read at most.
    most: u64,
    source: Option<(&'a Source, Box<dyn DocumentReader>)>,
    cutter: Option<Cutter>,
    documents: u64,
    passed_over: PassedOver,
    failed: bool,
}

impl TextChunks<'_> {
    /// Documents finished so far, not counting empty ones.
    pub(super) fn documents(&self) -> u64 {
        self.documents
    }

    /// Files passed over so far because they are not UTF-8 text.
    pub(super) fn passed_over(&self) -> &PassedOver {
        &self.passed_over
    }

    fn advance(&mut self) -> Result<Option<TextChunk>> {
        loop {
            if let (Some(cutter), Some((source, _))) = (&mut self.cutter, &self.source) {
                let next = cutter.next().map_err(DataError::io("read", &source.listed.path))?;
                if let Some((text, ends_document)) = next {
                    let document = self.documents;
                    if ends_document {
                        self.documents += 1;
                        self.cutter = None;
                    }
                    return Ok(Some(TextChunk { document, text, ends_document }));
                }
                self.cutter = None;
            }
            if self.documents >= self.most {
                return Ok(None);
            }
            if let Some((_, reader)) = &mut self.source {
                match reader.next_document()? {
                    Some(document) => self.cutter = Some(Cutter::new(document, self.limit)),
                    None => self.source = None,
                }
                continue;
            }
            let Some(source) = self.sources.next() else {
                return Ok(None);
            };
            match source.open()? {
                Ok(reader) => self.source = Some((source, reader)),
                Err(reason) => {
                    self.passed_over.add(&source.listed.path, Unread::NotText(reason));
                }
            }
        }
    }
}

impl Iterator for TextChunks<'_> {
    type Item = Result<TextChunk>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let next = self.advance().transpose();
        self.failed = matches!(next, Some(Err(_)));
        next
    }
}

#[cfg(test)]
mod tests {
    use super::super::listing::list;
    use super::*;

    fn open(inputs: &[&Path]) -> Result<Corpus, DataError> {
        let inputs: Vec<_> = inputs.iter().map(|path| path.to_path_buf()).collect();
        Corpus::open(list(&inputs)?.files, &std::env::temp_dir(), &AtomicBool::new(false))
    }

    #[test]
    fn reads_folders_files_and_builtin_text_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::write(root.join("b.jsonl"), "{\"text\":\"two\"}\n{\"text\":\"\"}\n{\"text\":\"3\"}").unwrap();
        fs::write(root.join("a.txt"), "one\n").unwrap();
        fs::write(root.join("c.png"), b"\x89PNG\xFF\0").unwrap();
        fs::write(root.join("d.txt"), "").unwrap();
        let corpus = open(&[root, Path::new("builtin:arithmetic"), &root.join("a.txt")]).unwrap();
        assert_eq!(corpus.files(), 6);
        let mut chunks = corpus.chunks();
        let mut documents: Vec<String> = Vec::new();
        for chunk in &mut chunks {
            let chunk = chunk.unwrap();
            if chunk.document as usize == documents.len() {
                documents.push(String::new());
            }
            documents[chunk.document as usize].push_str(&chunk.text);
        }
        assert_eq!(chunks.passed_over().count(), 1);
        assert_eq!(chunks.documents(), documents.len() as u64);
        assert_eq!(documents[..3], ["one\n", "two", "3"]);
        assert_eq!(documents[3], Builtin::Arithmetic.document(0));
        assert_eq!(documents.last().unwrap(), "one\n");
        assert_eq!(documents.len(), 3 + 400 + 1);
    }

    #[test]
    fn a_long_document_comes_in_pieces() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("long.txt");
        let text: String = (0..5000).map(|line| format!("line {line}\n")).collect();
        fs::write(&path, &text).unwrap();
        let corpus = open(&[&path]).unwrap();
        let chunks: Vec<TextChunk> = corpus.chunks().map(Result::unwrap).collect();
        assert!(chunks.len() > 40);
        assert!(chunks.iter().all(|chunk| chunk.document == 0 && chunk.text.ends_with('\n')));
        assert_eq!(chunks.iter().map(|chunk| chunk.text.as_str()).collect::<String>(), text);
    }

    #[test]
    fn inputs_that_cannot_be_used_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image.bin");
        fs::write(&path, b"\0\x01").unwrap();
        let corpus = open(&[&path]).unwrap();
        let mut chunks = corpus.chunks();
        assert!(matches!(chunks.next(), Some(Err(DataError::NotText { .. }))));
        assert!(chunks.next().is_none());
        let missing = folder.path().join("no.txt");
        assert!(matches!(open(&[&missing]), Err(DataError::Missing { .. })));
        assert!(matches!(open(&[]), Err(DataError::NoInputs)));
    }

    #[cfg(not(feature = "parquet"))]
    #[test]
    fn parquet_needs_its_feature() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a.parquet"), "").unwrap();
        let error = open(&[folder.path()]).unwrap_err().to_string();
        assert!(error.ends_with("rebuild with `--features parquet`"), "{error}");
    }
}
