//! The documents of the inputs, as one stream of pieces.
//!
//! Nothing here holds more than one document in memory, and of a text file no more
//! than one piece: a corpus may be far larger than the memory.

use super::DataError;
use super::builtin::Builtin;
use super::jsonl::JsonLines;
use super::piece::{Cutter, Piece, piece_limit};
use super::text::TextFile;
use super::walk::list_files;
use std::io::{Cursor, Read};
use std::path::{Path, PathBuf};

/// The text of one document, as bytes that are valid UTF-8.
pub(super) type DocumentText = Box<dyn Read + Send>;

/// A source of documents in one format. A new format implements this trait and gets
/// an arm in [`Format::of`] and in [`Source::open`].
pub(super) trait DocumentReader: Send {
    /// The next document; `None` after the last one.
    fn next_document(&mut self) -> Result<Option<DocumentText>, DataError>;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    Text,
    JsonLines,
    Parquet,
    Builtin(Builtin),
}

impl Format {
    /// The format that the file extension tells; text when it tells none.
    fn of(path: &Path) -> Self {
        let extension = path.extension().map(|extension| extension.to_ascii_lowercase());
        match extension.as_deref().and_then(|extension| extension.to_str()) {
            Some("jsonl") => Self::JsonLines,
            Some("parquet") => Self::Parquet,
            _ => Self::Text,
        }
    }
}

/// One file, or one built-in text.
#[derive(Clone, Debug)]
struct Source {
    path: PathBuf,
    format: Format,
    /// Whether the input itself is this file, rather than a folder around it.
    is_named: bool,
}

impl Source {
    /// A reader of the documents; `None` when the file is passed over as not text.
    fn open(&self) -> Result<Option<Box<dyn DocumentReader>>, DataError> {
        Ok(Some(match self.format {
            Format::Builtin(text) => Box::new(BuiltinText { text, next: 0 }),
            Format::JsonLines => Box::new(JsonLines::open(&self.path)?),
            Format::Parquet => open_parquet(&self.path)?,
            Format::Text => match TextFile::open(&self.path)? {
                Ok(file) => Box::new(file),
                Err(problem) if self.is_named => {
                    return Err(DataError::NotText { path: self.path.clone(), problem });
                }
                Err(_) => return Ok(None),
            },
        }))
    }

    fn bytes(&self) -> Result<u64, DataError> {
        match self.format {
            Format::Builtin(text) => Ok(text.bytes()),
            _ => std::fs::metadata(&self.path)
                .map(|metadata| metadata.len())
                .map_err(DataError::io("read the size of", &self.path)),
        }
    }
}

#[cfg(feature = "parquet")]
fn open_parquet(path: &Path) -> Result<Box<dyn DocumentReader>, DataError> {
    Ok(Box::new(super::parquet::ParquetFile::open(path)?))
}

#[cfg(not(feature = "parquet"))]
fn open_parquet(path: &Path) -> Result<Box<dyn DocumentReader>, DataError> {
    Err(DataError::ParquetDisabled { path: path.to_path_buf() })
}

struct BuiltinText {
    text: Builtin,
    next: u64,
}

impl DocumentReader for BuiltinText {
    fn next_document(&mut self) -> Result<Option<DocumentText>, DataError> {
        let index = self.next;
        self.next += 1;
        let exists = index < self.text.documents();
        Ok(exists.then(|| Box::new(Cursor::new(self.text.document(index))) as DocumentText))
    }
}

/// The files of all inputs, listed but not read.
#[derive(Clone, Debug)]
pub struct Corpus {
    sources: Vec<Source>,
    bytes: u64,
}

impl Corpus {
    /// Lists the inputs: files, folders and `builtin:arithmetic`.
    ///
    /// # Errors
    ///
    /// When there is no input, when one does not exist, and when a folder or the size
    /// of a file cannot be read.
    pub fn open(inputs: &[PathBuf]) -> Result<Self, DataError> {
        if inputs.is_empty() {
            return Err(DataError::NoInputs);
        }
        let mut sources = Vec::new();
        for input in inputs {
            if let Some(text) = Builtin::parse(input)? {
                let format = Format::Builtin(text);
                sources.push(Source { path: input.clone(), format, is_named: true });
            } else if input.is_dir() {
                sources.extend(list_files(input)?.into_iter().map(|path| {
                    let format = Format::of(&path);
                    Source { path, format, is_named: false }
                }));
            } else if input.try_exists().map_err(DataError::io("open", input))? {
                let format = Format::of(input);
                sources.push(Source { path: input.clone(), format, is_named: true });
            } else {
                return Err(DataError::Missing { path: input.clone() });
            }
        }
        // Told before hours of work on the files that come first.
        let parquet = sources.iter().find(|source| source.format == Format::Parquet);
        if let (Some(source), false) = (parquet, cfg!(feature = "parquet")) {
            return Err(DataError::ParquetDisabled { path: source.path.clone() });
        }
        let bytes = sources.iter().map(Source::bytes).sum::<Result<u64, _>>()?;
        Ok(Self { sources, bytes })
    }

    /// Number of files, counting a built-in text as one.
    pub fn files(&self) -> usize {
        self.sources.len()
    }

    /// Size of all files together, in bytes. The text in them is smaller in `.jsonl`
    /// files and may be larger in `.parquet` files.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Reads the text, from the start. The pieces are the same on every pass.
    pub fn pieces(&self) -> Pieces<'_> {
        Pieces {
            sources: self.sources.iter(),
            limit: piece_limit(self.bytes),
            source: None,
            cutter: None,
            documents: 0,
            skipped_files: 0,
            failed: false,
        }
    }
}

/// The pieces of all documents, in order; see [`Corpus::pieces`]. It ends after the
/// first error.
pub struct Pieces<'a> {
    sources: std::slice::Iter<'a, Source>,
    limit: usize,
    source: Option<(&'a Source, Box<dyn DocumentReader>)>,
    cutter: Option<Cutter>,
    documents: u64,
    skipped_files: u64,
    failed: bool,
}

impl Pieces<'_> {
    /// Documents finished so far, not counting empty ones.
    pub fn documents(&self) -> u64 {
        self.documents
    }

    /// Files passed over so far because they are not UTF-8 text.
    pub fn skipped_files(&self) -> u64 {
        self.skipped_files
    }

    fn advance(&mut self) -> Result<Option<Piece>, DataError> {
        loop {
            if let (Some(cutter), Some((source, _))) = (&mut self.cutter, &self.source) {
                let next = cutter.next().map_err(DataError::io("read", &source.path))?;
                if let Some((text, ends_document)) = next {
                    let document = self.documents;
                    if ends_document {
                        self.documents += 1;
                        self.cutter = None;
                    }
                    return Ok(Some(Piece { document, text, ends_document }));
                }
                self.cutter = None;
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
                Some(reader) => self.source = Some((source, reader)),
                None => self.skipped_files += 1,
            }
        }
    }
}

impl Iterator for Pieces<'_> {
    type Item = Result<Piece, DataError>;

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
    use super::*;
    use std::fs;

    fn open(inputs: &[&Path]) -> Result<Corpus, DataError> {
        Corpus::open(&inputs.iter().map(|path| path.to_path_buf()).collect::<Vec<_>>())
    }

    #[test]
    fn reads_folders_files_and_builtin_text_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::write(root.join("b.jsonl"), "{\"text\":\"two\"}\n{\"text\":\"\"}\n{\"text\":\"3\"}")
            .unwrap();
        fs::write(root.join("a.txt"), "one\n").unwrap();
        fs::write(root.join("c.png"), b"\x89PNG\xFF\0").unwrap();
        fs::write(root.join("d.txt"), "").unwrap();
        let corpus = open(&[root, Path::new("builtin:arithmetic"), &root.join("a.txt")]).unwrap();
        assert_eq!(corpus.files(), 6);
        let mut pieces = corpus.pieces();
        let mut documents: Vec<String> = Vec::new();
        for piece in &mut pieces {
            let piece = piece.unwrap();
            if piece.document as usize == documents.len() {
                documents.push(String::new());
            }
            documents[piece.document as usize].push_str(&piece.text);
        }
        assert_eq!(pieces.skipped_files(), 1);
        assert_eq!(pieces.documents(), documents.len() as u64);
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
        let pieces: Vec<Piece> = corpus.pieces().map(Result::unwrap).collect();
        assert!(pieces.len() > 40);
        assert!(pieces.iter().all(|piece| piece.document == 0 && piece.text.ends_with('\n')));
        assert_eq!(pieces.iter().map(|piece| piece.text.as_str()).collect::<String>(), text);
    }

    #[test]
    fn inputs_that_cannot_be_used_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("image.bin");
        fs::write(&path, b"\0\x01").unwrap();
        let corpus = open(&[&path]).unwrap();
        let mut pieces = corpus.pieces();
        assert!(matches!(pieces.next(), Some(Err(DataError::NotText { .. }))));
        assert!(pieces.next().is_none());
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
