//! Streams the documents of the inputs as chunks. Memory use does not grow with the size of the corpus.

use super::builtin::Builtin;
use super::cut::Cuts;
use super::division::Division;
use super::document::{DocumentReader, DocumentText};
use super::jsonl::JsonLines;
use super::listing::{Format, Listed, sha256_of};
use super::piece::{CHUNK_BYTES, Cutter, TextChunk, TextPiece};
use super::progress::{Counted, check};
use super::stream;
use super::text_file::{Json, NotText, TextFile};
use super::{DataError, Result, Split};
use rayon::prelude::*;
use std::fs::{self, File};
use std::io::{Cursor, Read, Seek as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

#[derive(Clone, Debug, Default)]
pub(super) struct Findings {
    pub(super) not_text: Counted,
    pub(super) bad_lines: Counted,
    /// JSON files that are read as plain text.
    pub(super) json: Counted,
}

#[derive(Debug)]
struct Source {
    listed: Listed,
    /// Content of a stream, copied to an unnamed file.
    copy: Option<File>,
}

impl Source {
    /// Opens the documents. The inner error is the reason why a file in a folder is skipped.
    fn open(
        &self,
        skip_bad_lines: bool,
        json: &mut Counted,
    ) -> Result<Result<Box<dyn DocumentReader>, NotText>> {
        let path = &self.listed.path;
        Ok(Ok(match self.listed.format {
            Format::Builtin(text) => Box::new(BuiltinText { text, next: 0 }),
            Format::JsonLines => Box::new(JsonLines::new(self.file()?, path, skip_bad_lines)),
            Format::Parquet => open_parquet(self.file()?, path)?,
            Format::Text => match TextFile::new(self.file()?, path)? {
                Ok(file) => {
                    // Other JSON files are common in source folders, so they cause no remark.
                    if file.json().is_some_and(|kind| self.listed.is_named || kind == Json::Documents) {
                        json.add(|| path.display().to_string());
                    }
                    Box::new(file)
                }
                Err(problem) if self.listed.is_named => {
                    let problem = problem.to_string();
                    return Err(DataError::NotText { path: path.clone(), problem });
                }
                Err(problem) => return Ok(Err(problem)),
            },
        }))
    }

    /// Opens the content at its start. Use one reader at a time: readers of a copy share their position.
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
    fn next_document(&mut self, _: &mut Counted) -> Result<Option<DocumentText>> {
        let index = self.next;
        self.next += 1;
        let exists = index < self.text.documents();
        Ok(exists.then(|| Box::new(Cursor::new(self.text.document(index))) as DocumentText))
    }
}

#[derive(Debug)]
pub(super) struct Corpus {
    sources: Vec<Source>,
    /// Total size of the files in bytes, which may differ from the size of their text.
    pub(super) bytes: u64,
    limit: Option<u64>,
    skip_bad_lines: bool,
}

impl Corpus {
    /// Opens the listed files. Copies streams into unnamed files in the folder `scratch`. Fails if this build cannot
    /// read a format, a stream cannot be copied, or `stop` becomes true while copying.
    pub(super) fn open(
        listed: Vec<Listed>,
        limit: Option<u64>,
        skip_bad_lines: bool,
        scratch: &Path,
        stop: &AtomicBool,
    ) -> Result<Self> {
        // Fails now instead of after hours of work on earlier files.
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
        Ok(Self { sources, bytes, limit, skip_bad_lines })
    }

    pub(super) fn digests(&self) -> Result<Vec<(&Listed, String)>> {
        let digest = |source: &Source| match &source.copy {
            None => source.listed.digest(),
            Some(_) => sha256_of(source.file()?).map_err(DataError::io("read", &source.listed.path)),
        };
        self.sources.par_iter().map(|source| Ok((&source.listed, digest(source)?))).collect()
    }

    pub(super) fn files(&self) -> usize {
        self.sources.len()
    }

    pub(super) fn empty(&self) -> Vec<PathBuf> {
        let listed = self.sources.iter().map(|source| &source.listed);
        // Some files, such as those in /proc, have content although their size is 0.
        let is_empty = |listed: &Listed| {
            let first = || File::open(&listed.path).and_then(|mut file| file.read(&mut [0]));
            listed.bytes == 0 && (listed.stream.is_some() || first().is_ok_and(|read| read == 0))
        };
        let empty = listed.filter(|listed| listed.is_named && is_empty(listed));
        empty.map(|listed| listed.path.clone()).collect()
    }

    /// Returns the sizes in bytes of the first `most` non-empty documents, and whether there are no others.
    pub(super) fn sizes(&self, most: usize, stop: &AtomicBool) -> Result<(Vec<u64>, bool)> {
        let mut sizes = Vec::new();
        let division = Division::default();
        for chunk in self.chunks(Cuts::ANYWHERE, &division) {
            check(stop)?;
            let chunk = chunk?;
            if sizes.len() as u64 == chunk.document {
                if sizes.len() == most {
                    return Ok((sizes, false));
                }
                sizes.push(0);
            }
            if let Some(size) = sizes.last_mut() {
                *size += chunk.text.len() as u64;
            }
        }
        Ok((sizes, true))
    }

    /// Reads the text from the start, cut by `cuts` and `division`. Every pass gives the same chunks.
    pub(super) fn chunks<'a>(&'a self, cuts: Cuts, division: &'a Division) -> TextChunks<'a> {
        TextChunks {
            sources: self.sources.iter(),
            skip_bad_lines: self.skip_bad_lines,
            most: self.limit.unwrap_or(u64::MAX),
            cuts,
            division,
            source: None,
            cutter: None,
            split: Split::Train,
            starts: true,
            documents: 0,
            findings: Findings::default(),
            failed: false,
        }
    }
}

fn copy_stream(listed: &mut Listed, scratch: &Path, stop: &AtomicBool) -> Result<File> {
    let path = scratch.join("stream");
    let mut copy = File::options()
        .read(true)
        .write(true)
        .create_new(true)
        .open(&path)
        .map_err(DataError::io("create", &path))?;
    // An unnamed file cannot be left behind.
    fs::remove_file(&path).map_err(DataError::io("remove", &path))?;
    listed.bytes = stream::copy_to_end(&listed.path, &mut copy, u64::MAX, stop)?;
    Ok(copy)
}

pub(super) struct TextChunks<'a> {
    sources: std::slice::Iter<'a, Source>,
    skip_bad_lines: bool,
    most: u64,
    cuts: Cuts,
    division: &'a Division,
    source: Option<(&'a Source, Box<dyn DocumentReader>)>,
    cutter: Option<Cutter>,
    split: Split,
    /// True if the next chunk is the first of its split in the document.
    starts: bool,
    pub(super) documents: u64,
    pub(super) findings: Findings,
    failed: bool,
}

impl TextChunks<'_> {
    fn advance(&mut self) -> Result<Option<TextChunk>> {
        loop {
            if let (Some(cutter), Some((source, _))) = (&mut self.cutter, &self.source) {
                let next = cutter.next().map_err(DataError::io("read", &source.listed.path))?;
                if let Some(TextPiece { text, ends_section, ends_document }) = next {
                    let (document, split, starts) = (self.documents, self.split, self.starts);
                    self.starts = ends_section;
                    if ends_section {
                        self.split = Split::Validation;
                    }
                    if ends_document {
                        self.documents += 1;
                        self.cutter = None;
                    }
                    return Ok(Some(TextChunk { document, split, text, starts, ends: ends_section }));
                }
                self.cutter = None;
            }
            if self.documents >= self.most {
                return Ok(None);
            }
            if let Some((_, reader)) = &mut self.source {
                match reader.next_document(&mut self.findings.bad_lines)? {
                    Some(document) => {
                        let section = self.division.section_of(self.documents);
                        self.split = self.division.split_of(self.documents);
                        self.starts = true;
                        self.cutter = Some(Cutter::new(document, CHUNK_BYTES, self.cuts, section));
                    }
                    None => self.source = None,
                }
                continue;
            }
            let Some(source) = self.sources.next() else {
                return Ok(None);
            };
            match source.open(self.skip_bad_lines, &mut self.findings.json)? {
                Ok(reader) => self.source = Some((source, reader)),
                Err(reason) => {
                    let path = source.listed.path.display();
                    self.findings.not_text.add(|| format!("{path} ({reason})"));
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
        Corpus::open(list(&inputs)?.files, None, false, &std::env::temp_dir(), &AtomicBool::new(false))
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
        let division = Division::default();
        let mut chunks = corpus.chunks(Cuts::AT_WORDS, &division);
        let mut documents: Vec<String> = Vec::new();
        for chunk in &mut chunks {
            let chunk = chunk.unwrap();
            if chunk.document as usize == documents.len() {
                documents.push(String::new());
            }
            documents[chunk.document as usize].push_str(&chunk.text);
        }
        assert_eq!(chunks.findings.not_text.count, 1);
        assert_eq!(chunks.documents, documents.len() as u64);
        assert_eq!(documents[..3], ["one\n", "two", "3"]);
        assert_eq!(documents[3], Builtin::Arithmetic.document(0));
        assert_eq!(documents.last().unwrap(), "one\n");
        assert_eq!(documents.len(), 3 + 400 + 1);
    }

    #[test]
    fn a_long_document_comes_in_pieces() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("long.txt");
        let text: String = (0..50_000).map(|line| format!("line {line}\n")).collect();
        fs::write(&path, &text).unwrap();
        let corpus = open(&[&path]).unwrap();
        let division = Division::default();
        let chunks: Vec<TextChunk> = corpus.chunks(Cuts::AT_WORDS, &division).map(Result::unwrap).collect();
        assert!(chunks.len() > 40);
        assert!(chunks.iter().all(|chunk| chunk.document == 0 && chunk.text.len() <= CHUNK_BYTES));
        let last = chunks.len() - 1;
        assert!(chunks.iter().enumerate().all(|(index, chunk)| chunk.starts == (index == 0)));
        assert!(chunks.iter().enumerate().all(|(index, chunk)| chunk.ends == (index == last)));
        assert_eq!(corpus.sizes(9, &AtomicBool::new(false)).unwrap(), (vec![text.len() as u64], true));
        assert_eq!(chunks.iter().map(|chunk| chunk.text.as_str()).collect::<String>(), text);
    }

    #[test]
    fn inputs_that_cannot_be_used_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image.bin");
        fs::write(&path, b"\0\x01").unwrap();
        let corpus = open(&[&path]).unwrap();
        let division = Division::default();
        let mut chunks = corpus.chunks(Cuts::AT_WORDS, &division);
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
