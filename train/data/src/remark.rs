//! Remarks on the inputs that their owner should know, although they are not errors.

use super::encoding::NotText;
use super::reader::BadLines;
use super::stream::Stream;
use kiln_sys::words::number_of;
use std::fmt;
use std::path::{Path, PathBuf};

/// Maximum number of files named in a message; the others are only counted.
const NAMED: usize = 5;

/// A remark for the user who prepares data.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Remark {
    /// Files in folders are not UTF-8 text, and were not read. `files`: the files and reasons; `of`: total
    /// number of files.
    PassedOver { files: PassedOver, of: usize },
    /// Entries of folders were not read: links out of the folder, and entries that are not files.
    NotFollowed { entries: PassedOver },
    /// Files have the same content, and every one is read. `groups`: the files of each content.
    SameContent { groups: Vec<Vec<String>> },
    /// Named inputs are empty.
    Empty { inputs: Vec<PathBuf> },
    /// The text has too few pairs of tokens to merge for the requested vocabulary. `wanted`: requested number
    /// of tokens; `reached`: actual number of tokens.
    SmallVocabulary { wanted: usize, reached: usize },
    /// The documents are so few that the end of each is held out instead of whole ones. `documents`: their
    /// number.
    DividedDocuments { documents: usize },
    /// Lines of `.jsonl` files could not be used and were skipped.
    BadLines(BadLines),
    /// Files are JSON, and are read as plain text.
    Json(JsonFiles),
    /// The text contains spellings of special tokens. `count`: how often; `read`: whether they became these
    /// tokens; `tokens`: the spellings.
    SpecialTokens { count: u64, read: bool, tokens: Vec<String> },
    /// The tokenizer cannot express some of the text. `unknown`: number of tokens that stand for such text,
    /// or of characters that were omitted; `tokens`: tokens of all text.
    Unknown { unknown: u64, tokens: u64 },
}

impl Remark {
    /// Reports whether intended text may be missing, or the user must act.
    pub fn is_warning(&self) -> bool {
        match self {
            Self::PassedOver { .. }
            | Self::NotFollowed { .. }
            | Self::Empty { .. }
            | Self::BadLines(_)
            | Self::Json(_)
            | Self::Unknown { .. } => true,
            Self::SameContent { .. }
            | Self::SmallVocabulary { .. }
            | Self::DividedDocuments { .. }
            | Self::SpecialTokens { .. } => false,
        }
    }
}

/// JSON files that are read as plain text. Only the first few are kept by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JsonFiles {
    first: Vec<String>,
    count: usize,
}

impl JsonFiles {
    pub(super) fn add(&mut self, path: &Path) {
        if self.first.len() < NAMED {
            self.first.push(path.display().to_string());
        }
        self.count += 1;
    }

    /// Number of files.
    pub fn count(&self) -> usize {
        self.count
    }
}

/// The reason why an entry of a folder is not read.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unread {
    /// A file without text.
    NotText(NotText),
    /// A link out of the folder.
    LeadsOut { to: PathBuf },
    /// A broken link.
    LeadsNowhere,
    /// Not a file; it can be read only once or not at all.
    Stream(Stream),
}

impl fmt::Display for Unread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotText(reason) => reason.fmt(f),
            Self::LeadsOut { to } => write!(f, "a link out of the folder, to {}", to.display()),
            Self::LeadsNowhere => f.write_str("a link that leads nowhere"),
            Self::Stream(stream) => stream.fmt(f),
        }
    }
}

/// Entries skipped in folders. Only the first few are kept by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PassedOver {
    first: Vec<(PathBuf, Unread)>,
    count: usize,
}

impl PassedOver {
    pub(super) fn add(&mut self, path: &Path, reason: Unread) {
        if self.first.len() < NAMED {
            self.first.push((path.to_owned(), reason));
        }
        self.count += 1;
    }

    /// Adds the entries of another folder.
    pub(super) fn append(&mut self, others: Self) {
        let room = NAMED - self.first.len();
        self.first.extend(others.first.into_iter().take(room));
        self.count += others.count;
    }

    /// Formats the first entries with their reasons, and the number of further entries.
    fn named(&self) -> String {
        let named = self.first.iter();
        let named: Vec<_> = named.map(|(path, reason)| format!("{} ({reason})", path.display())).collect();
        some_of(&named, self.count)
    }

    /// Number of files.
    pub fn count(&self) -> usize {
        self.count
    }
}

impl fmt::Display for Remark {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::PassedOver { files, of } => {
                let (named, files) = (files.named(), files.count);
                let verb = if files == 1 { "is" } else { "are" };
                let was = if files == 1 { "was" } else { "were" };
                write!(
                    f,
                    "{files} of {of} files {verb} not UTF-8 text and {was} passed over: {}; convert or \
                     unpack what is to be read",
                    named
                )
            }
            Self::NotFollowed { entries } => {
                let what = if entries.count == 1 { "entry" } else { "entries" };
                let was = if entries.count == 1 { "was" } else { "were" };
                write!(
                    f,
                    "{} {what} of the input folders {was} passed over: {}; name what is to be read as an \
                     input of its own",
                    entries.count,
                    entries.named()
                )
            }
            Self::SameContent { groups } => {
                let groups: Vec<_> = groups.iter().map(|group| same(group)).collect();
                let groups = some_of(&groups, groups.len());
                write!(f, "the same content comes more than once: {groups}")
            }
            Self::Empty { inputs } => {
                let names: Vec<_> = inputs.iter().map(|path| path.display().to_string()).collect();
                write!(f, "no text came from {}", some_of(&names, names.len()))
            }
            Self::SmallVocabulary { wanted, reached } => write!(
                f,
                "the vocabulary has {reached} tokens, not the {wanted} that were asked for: in this \
                 text, no more pairs of tokens come twice"
            ),
            Self::DividedDocuments { documents } => write!(
                f,
                "the text has so few documents that the end of {} is held out for validation, rather than whole \
                 documents",
                if *documents == 1 { "one".to_owned() } else { format!("{documents} of them") }
            ),
            Self::BadLines(BadLines { count, first }) => {
                let first = first.as_deref().unwrap_or_default();
                write!(
                    f,
                    "{} cannot be used and {} skipped: {first}",
                    number_of(*count, "line"),
                    was(*count)
                )?;
                if *count > 1 { write!(f, ", and {} more", count - 1) } else { Ok(()) }
            }
            Self::Json(JsonFiles { first, count }) => write!(
                f,
                "{} of JSON {} read as plain text, with all braces and quotes: {}; to read documents out of JSON, \
                 write one object with the field \"text\" per line to a .jsonl file",
                number_of(*count as u64, "file"),
                was(*count as u64),
                some_of(first, *count)
            ),
            Self::SpecialTokens { count, read, tokens } => {
                let (spellings, tokens) = (number_of(*count, "spelling"), some_of(tokens, tokens.len()));
                match read {
                    true => write!(
                        f,
                        "the text has {spellings} of special tokens, which became these tokens: {tokens}"
                    ),
                    false => write!(
                        f,
                        "the text has {spellings} of special tokens ({tokens}), which {} ordinary text: set \
                         data.special_tokens = true (`kiln data prepare --special-tokens`) if the author of the text \
                         may write them",
                        if *count == 1 { "is" } else { "are" }
                    ),
                }
            }
            Self::Unknown { unknown, tokens } => write!(
                f,
                "the tokenizer cannot express all of the text: {unknown} unknown or left-out tokens, {:.2} % of \
                 {tokens}; take a tokenizer that knows these characters, such as a byte-level one",
                *unknown as f64 * 100.0 / (*tokens).max(1) as f64
            ),
        }
    }
}

fn was(count: u64) -> &'static str {
    if count == 1 { "was" } else { "were" }
}

/// Formats a group of files with the same content.
fn same(group: &[String]) -> String {
    let (first, count) = (&group[0], group.len());
    if group.iter().all(|path| path == first) {
        return format!("{first} ({count} times)");
    }
    match count {
        0..=NAMED => group.join(" = "),
        _ => format!("{} = {} more", group[..NAMED].join(" = "), count - NAMED),
    }
}

/// Formats the first of `names`, and how many more of `count` there are.
pub(super) fn some_of(names: &[String], count: usize) -> String {
    let named = names.iter().take(NAMED).map(String::as_str).collect::<Vec<_>>();
    match count - named.len() {
        0 => named.join(", "),
        more => format!("{}, and {more} more", named.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_files_are_counted() {
        let files: Vec<_> = (0..8).map(|index| index.to_string()).collect();
        assert_eq!(some_of(&files, 8), "0, 1, 2, 3, 4, and 3 more");
        assert_eq!(some_of(&files[..5], 5), "0, 1, 2, 3, 4");
        assert_eq!(same(&files[..2]), "0 = 1");
        assert_eq!(same(&files), "0 = 1 = 2 = 3 = 4 = 3 more");
        assert_eq!(same(&["a".to_owned(), "a".to_owned()]), "a (2 times)");
    }

    #[test]
    fn one_file_is_one() {
        let mut files = PassedOver::default();
        files.add(Path::new("a"), Unread::NotText(NotText::Utf16));
        let remark = Remark::PassedOver { files, of: 3 }.to_string();
        assert!(remark.starts_with("1 of 3 files is not UTF-8 text and was passed over: a (it is UTF-16); "));
    }
}
