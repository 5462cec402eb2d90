//! Listing the files of an input folder.

use super::DataError;
use ignore::{DirEntry, WalkBuilder};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Every file below `folder`, in sorted order. Hidden files, what `.gitignore` files
/// exclude, folders named `target` and folders of prepared data are left out.
pub(super) fn list_files(folder: &Path) -> Result<Vec<PathBuf>, DataError> {
    let is_in_repository = is_in_repository(folder);
    let mut builder = WalkBuilder::new(folder);
    builder
        .standard_filters(false)
        .hidden(true)
        .git_ignore(true)
        // As for git, files above the root of the repository do not count, such as one in the home folder.
        .parents(is_in_repository)
        // In a folder that was copied out of its repository, a `.gitignore` counts all the same.
        .require_git(is_in_repository)
        .follow_links(true)
        .sort_by_file_name(|first, second| first.cmp(second))
        .filter_entry(is_wanted);
    let mut files = Vec::new();
    for entry in builder.build() {
        match entry {
            Ok(entry) if entry.file_type().is_some_and(|kind| kind.is_file()) => {
                files.push(entry.into_path());
            }
            Ok(_) => {}
            Err(error) if leads_nowhere(&error) => {}
            Err(error) => {
                return Err(DataError::Walk {
                    path: folder.to_path_buf(),
                    problem: error.to_string(),
                });
            }
        }
    }
    Ok(files)
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

/// Whether the error is a symbolic link that holds no text to miss: to nothing, to itself, or to a folder
/// that it is in, whose files are listed anyway.
fn leads_nowhere(error: &ignore::Error) -> bool {
    match error {
        ignore::Error::WithDepth { err, .. } => leads_nowhere(err),
        ignore::Error::WithPath { path, err } => {
            leads_nowhere(err) || path.is_symlink() && fs::metadata(path).is_err_and(is_lost)
        }
        ignore::Error::Loop { .. } => true,
        _ => false,
    }
}

fn is_lost(error: io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ELOOP)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let files = list_files(folder).unwrap();
        let name = |path: &PathBuf| path.strip_prefix(folder).unwrap().display().to_string();
        files.iter().map(name).collect()
    }

    #[test]
    fn is_sorted_and_leaves_out_what_is_not_text_of_the_project() {
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

    /// As for git: a file of the home folder does not empty the repositories in it.
    #[test]
    fn rules_above_a_repository_do_not_count() {
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
    fn dangling_links_are_passed_over() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a.txt"), "x").unwrap();
        std::os::unix::fs::symlink("a.txt", folder.path().join("b.txt")).unwrap();
        std::os::unix::fs::symlink("nowhere", folder.path().join("c.txt")).unwrap();
        assert_eq!(names(folder.path()), ["a.txt", "b.txt"]);
    }

    #[test]
    fn links_in_a_circle_are_passed_over() {
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
    }

    #[test]
    fn a_folder_that_cannot_be_listed_is_named() {
        let error = list_files(Path::new("/no/such/folder")).unwrap_err().to_string();
        assert!(error.contains("/no/such/folder"), "{error}");
    }
}
