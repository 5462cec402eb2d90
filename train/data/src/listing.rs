//! Lists the files of all inputs without reading them.

use super::builtin::Builtin;
use super::progress::Counted;
use super::stream::Stream;
use super::{DataError, Result};
use ignore::{DirEntry, WalkBuilder};
use kiln_sys::files;
use nix::errno::Errno;
use sha2::{Digest, Sha256};
use std::fs::{self, File, Metadata};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::UNIX_EPOCH;

const BLOCK: usize = 1 << 17;

const STANDARD_INPUT: &str = "/dev/stdin";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Text,
    JsonLines,
    Parquet,
    Builtin(Builtin),
}

impl Format {
    pub(super) fn from_path(path: &Path) -> Self {
        let extension = path.extension().map(|extension| extension.to_ascii_lowercase());
        match extension.as_deref().and_then(|extension| extension.to_str()) {
            Some("jsonl" | "ndjson") => Self::JsonLines,
            Some("parquet") => Self::Parquet,
            _ => Self::Text,
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Listed {
    pub(super) path: PathBuf,
    pub(super) format: Format,
    /// True if the user named this file itself, rather than a folder that contains it.
    pub(super) is_named: bool,
    pub(super) stream: Option<Stream>,
    /// Size in bytes; 0 for a stream until it has been read.
    pub(super) bytes: u64,
    /// Time of the last modification, in nanoseconds since 1970, if known.
    pub(super) modified: Option<u64>,
}

impl Listed {
    fn new(path: PathBuf, metadata: &Metadata, is_named: bool) -> Self {
        let stream = Stream::from_metadata(metadata);
        let since_1970 = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
        Self {
            format: Format::from_path(&path),
            path,
            is_named,
            stream,
            bytes: if stream.is_some() { 0 } else { metadata.len() },
            modified: since_1970.and_then(|time| u64::try_from(time.as_nanos()).ok()),
        }
    }

    /// Returns the SHA-256 of the content. Must not be called for a stream.
    pub(super) fn digest(&self) -> Result<String> {
        if let Format::Builtin(text) = self.format {
            return Ok(text.digest());
        }
        let file = File::open(&self.path).map_err(DataError::io("open", &self.path))?;
        sha256_of(file).map_err(DataError::io("read", &self.path))
    }
}

#[derive(Debug, Default)]
pub(super) struct Listing {
    pub(super) files: Vec<Listed>,
    pub(super) skipped: Counted,
}

/// Lists the inputs in order: files, folders, `builtin:arithmetic`, and `-` for the standard input.
pub(super) fn list(inputs: &[PathBuf]) -> Result<Listing> {
    if inputs.is_empty() {
        return Err(DataError::NoInputs);
    }
    let (mut listed, mut skipped) = (Vec::new(), Counted::default());
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
            let (files, others) = walk(input)?;
            skipped.append(others);
            for path in files {
                let metadata = fs::metadata(&path).map_err(DataError::io("read the size of", &path))?;
                listed.push(Listed::new(path, &metadata, false));
            }
        } else {
            listed.push(Listed::new(input.to_path_buf(), &metadata, true));
        }
    }
    Ok(Listing { files: listed, skipped })
}

/// Checks that an input, as in [`PrepareOptions::inputs`](super::PrepareOptions::inputs), exists and is readable. Does
/// not open pipes.
///
/// # Errors
///
/// If the input does not exist or cannot be read.
pub fn check_input(input: &Path) -> Result<()> {
    let listing = list(&[input.to_path_buf()])?;
    let is_file = |listed: &&Listed| listed.stream.is_none() && !matches!(listed.format, Format::Builtin(_));
    match listing.files.iter().find(is_file) {
        Some(Listed { path, .. }) => File::open(path).map(drop).map_err(DataError::io("open", path)),
        None => Ok(()),
    }
}

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

/// Lists the files below `folder` in sorted order, without hidden files, files excluded by `.gitignore`, folders named
/// `target` and folders of prepared data. Also returns links out of the folder, broken links and special files.
fn walk(folder: &Path) -> Result<(Vec<PathBuf>, Counted)> {
    let is_in_repository = is_in_repository(folder);
    let links_out: Arc<Mutex<Vec<(PathBuf, PathBuf)>>> = Arc::default();
    let (root, noted) = (folder.to_owned(), links_out.clone());
    let is_wanted = move |entry: &DirEntry| match link_out(&root, entry) {
        None => is_wanted(entry),
        Some(target) => {
            let mut noted = noted.lock().unwrap_or_else(PoisonError::into_inner);
            noted.push((entry.path().to_owned(), target));
            false
        }
    };
    let mut builder = WalkBuilder::new(folder);
    builder
        .standard_filters(false)
        .hidden(true)
        .git_ignore(true)
        // As in git, `.gitignore` files above the root of the repository do not count.
        .parents(is_in_repository)
        // A `.gitignore` still applies in a folder that was copied out of its repository.
        .require_git(is_in_repository)
        .follow_links(true)
        .sort_by_file_name(|first, second| first.cmp(second))
        .filter_entry(is_wanted);
    let (mut files, mut others) = (Vec::new(), Vec::new());
    for entry in builder.build() {
        match entry {
            Ok(entry) => match entry.metadata().as_ref().ok().and_then(Stream::from_metadata) {
                Some(stream) => others.push((entry.into_path(), stream.to_string())),
                None if entry.file_type().is_some_and(|kind| kind.is_file()) => {
                    files.push(entry.into_path());
                }
                None => {}
            },
            Err(error) if is_circle(&error) => {}
            Err(error) => match dangling_link(&error) {
                Some(link) if is_hidden(link) => {}
                Some(link) => others.push((link.to_owned(), "a broken link".to_owned())),
                None => {
                    return Err(DataError::Walk { path: folder.to_path_buf(), problem: error.to_string() });
                }
            },
        }
    }
    let mut links_out = links_out.lock().unwrap_or_else(PoisonError::into_inner);
    let way_out = |to: PathBuf| format!("a link out of the folder, to {}", to.display());
    others.extend(links_out.drain(..).map(|(link, to)| (link, way_out(to))));
    others.sort_by(|(first, _), (second, _)| first.cmp(second));
    let skipped = others.into_iter().map(|(path, reason)| format!("{} ({reason})", path.display())).collect();
    Ok((files, skipped))
}

fn link_out(root: &Path, entry: &DirEntry) -> Option<PathBuf> {
    if entry.depth() == 0 || !entry.path_is_symlink() {
        return None;
    }
    files::way_out(root, entry.path().strip_prefix(root).ok()?)
}

fn is_hidden(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."))
}

fn is_in_repository(folder: &Path) -> bool {
    let folder = folder.canonicalize();
    folder.is_ok_and(|folder| folder.ancestors().any(|above| above.join(".git").exists()))
}

fn is_wanted(entry: &DirEntry) -> bool {
    if entry.depth() == 0 || !entry.file_type().is_some_and(|kind| kind.is_dir()) {
        return true;
    }
    let path = entry.path();
    let is_prepared = path.join("data.json").exists() && path.join("train.bin").exists();
    entry.file_name() != "target" && !is_prepared
}

/// Reports whether the error is about a link to itself or to a folder that contains it.
fn is_circle(error: &ignore::Error) -> bool {
    match error {
        ignore::Error::WithDepth { err, .. } => is_circle(err),
        ignore::Error::WithPath { path, err } => is_circle(err) || fails_with(path, Errno::ELOOP),
        ignore::Error::Loop { .. } => true,
        _ => false,
    }
}

fn dangling_link(error: &ignore::Error) -> Option<&Path> {
    match error {
        ignore::Error::WithDepth { err, .. } => dangling_link(err),
        ignore::Error::WithPath { path, err } => {
            dangling_link(err).or_else(|| fails_with(path, Errno::ENOENT).then_some(path))
        }
        _ => None,
    }
}

fn fails_with(path: &Path, errno: Errno) -> bool {
    let follow = || fs::metadata(path);
    path.is_symlink() && follow().is_err_and(|error| error.raw_os_error() == Some(errno as i32))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let files = walk(folder).unwrap().0;
        let name = |path: &PathBuf| path.strip_prefix(folder).unwrap().display().to_string();
        files.iter().map(name).collect()
    }

    #[test]
    fn listing_is_sorted_and_omits_other_files() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        for file in [
            "b.txt",
            "a.txt",
            "sub/c.txt",
            "sub/skip.log",
            ".hidden",
            ".git/config",
            "target/x",
            "old/data.json",
            "old/train.bin",
            "target.txt",
        ] {
            let path = root.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "x").unwrap();
        }
        fs::write(root.join(".gitignore"), "*.log\n").unwrap();
        assert_eq!(names(root), ["a.txt", "b.txt", "sub/c.txt", "target.txt"]);
    }

    #[test]
    fn gitignore_above_a_repository_is_ignored() {
        let home = tempfile::tempdir().unwrap();
        let repository = home.path().join("repository");
        let (inner, copied) = (repository.join("inner"), home.path().join("copied"));
        for folder in [&inner, &copied] {
            fs::create_dir_all(folder).unwrap();
            fs::write(folder.join("a.txt"), "x").unwrap();
            fs::write(folder.join("b.log"), "x").unwrap();
        }
        fs::write(home.path().join(".gitignore"), "*\n").unwrap();
        fs::create_dir(repository.join(".git")).unwrap();
        fs::write(repository.join(".gitignore"), "*.log\n").unwrap();
        assert_eq!(names(&repository), ["inner/a.txt"]);
        assert_eq!(names(&inner), ["a.txt"]);
        assert_eq!(names(&copied), ["a.txt", "b.log"]);
    }

    #[cfg(unix)]
    #[test]
    fn broken_links_are_skipped() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a.txt"), "x").unwrap();
        std::os::unix::fs::symlink("a.txt", folder.path().join("b.txt")).unwrap();
        std::os::unix::fs::symlink("nowhere", folder.path().join("c.txt")).unwrap();
        assert_eq!(names(folder.path()), ["a.txt", "b.txt"]);
        assert_eq!(walk(folder.path()).unwrap().1.count, 1);
    }

    #[test]
    fn circular_links_are_skipped() {
        use std::os::unix::fs::symlink;
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::create_dir_all(root.join("deep/er")).unwrap();
        fs::write(root.join("deep/a.txt"), "x").unwrap();
        symlink(root, root.join("deep/er/up")).unwrap();
        symlink("../er", root.join("deep/er/here")).unwrap();
        symlink("itself", root.join("itself")).unwrap();
        symlink("there", root.join("back")).unwrap();
        symlink("back", root.join("there")).unwrap();
        assert_eq!(names(root), ["deep/a.txt"]);
        // Circular links hide no files, so they are not counted as skipped.
        assert_eq!(walk(root).unwrap().1.count, 0);
    }

    #[test]
    fn a_folder_that_cannot_be_listed_is_named() {
        let error = walk(Path::new("/no/such/folder")).unwrap_err().to_string();
        assert!(error.contains("/no/such/folder"), "{error}");
    }
}
