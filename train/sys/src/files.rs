//! Opens and reads files from untrusted sources: without blocking, within limits, and confined to their folder.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::OFlag;

/// Maximum size in bytes of a file that is read as a whole.
pub const MAX_WHOLE: u64 = 1 << 30;

/// Opens a regular file for reading. Any other kind of file fails with [`ErrorKind::InvalidInput`]: a FIFO could block
/// forever, and a device could be endless.
pub fn open(path: &Path) -> io::Result<File> {
    open_with(OpenOptions::new().read(true), path)
}

/// Opens a file with `options`, with the same checks as [`open`].
pub fn open_with(options: &OpenOptions, path: &Path) -> io::Result<File> {
    let refused = || io::Error::new(ErrorKind::InvalidInput, "it is not a regular file");
    // Checked by name first: opening a device may have effects, and opening a FIFO may fail with a different error.
    if fs::metadata(path).is_ok_and(|found| !found.is_file()) {
        return Err(refused());
    }
    // The file may have been replaced by a FIFO since the check.
    let file = options.clone().custom_flags(OFlag::O_NONBLOCK.bits()).open(path)?;
    if file.metadata()?.is_file() { Ok(file) } else { Err(refused()) }
}

/// Reads a regular file of at most `most` bytes. A longer file fails with [`ErrorKind::FileTooLarge`].
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // The reported length may be wrong, so the buffer grows with the content.
    open(path)?.take(most.saturating_add(1)).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most { Err(too_long(most)) } else { Ok(bytes) }
}

/// The error for a file longer than `most` bytes.
pub fn too_long(most: u64) -> io::Error {
    let problem = format!("it is longer than the {most} bytes that such a file may have");
    io::Error::new(ErrorKind::FileTooLarge, problem)
}

/// Returns advice for fixing an error of the file system.
pub fn advice(error: &io::Error) -> &'static str {
    let Some(code) = error.raw_os_error() else {
        return match error.kind() {
            ErrorKind::InvalidInput | ErrorKind::FileTooLarge => "check the path",
            _ => "check the path, its permissions and the free space",
        };
    };
    if let Some(limit) = limit_of(error) {
        return limit;
    }
    match Errno::from_raw(code) {
        Errno::ENAMETOOLONG => "choose a shorter name",
        Errno::ENOSPC | Errno::EDQUOT => "free some space there, or use another disk",
        Errno::EROFS => "nothing can be written there: use another disk",
        Errno::EACCES | Errno::EPERM => "check the permissions of the path",
        Errno::ENOENT | Errno::ENOTDIR | Errno::EISDIR | Errno::ELOOP => "check the path",
        Errno::EIO => "check the disk",
        _ => "check the path, its permissions and the free space",
    }
}

/// Returns advice for an error caused by a limit of the process or machine; `None` for other errors.
pub fn limit_of(error: &io::Error) -> Option<&'static str> {
    match Errno::from_raw(error.raw_os_error()?) {
        Errno::EMFILE => Some("allow a process more open files (`ulimit -n`)"),
        Errno::ENFILE => Some("the machine has too many open files: end some processes"),
        Errno::ENOMEM => Some("free some memory, or allow a process more of it (`ulimit -v`)"),
        Errno::EFBIG => Some("allow a process larger files (`ulimit -f`), or use another file system"),
        _ => None,
    }
}

/// Returns the broken link that makes `path` invalid, either `path` itself or a parent folder, and the link's target.
pub fn dangling_link(path: &Path) -> Option<(PathBuf, PathBuf)> {
    // Without a trailing slash, which would follow the link.
    let bare: PathBuf = path.components().collect();
    let link = bare.ancestors().find(|part| part.is_symlink() && !part.exists())?;
    Some((link.to_owned(), fs::read_link(link).ok()?))
}

/// Returns the target if links lead from `name` in `folder` out of the folder, and `None` otherwise or if nothing
/// exists there. A snapshot in the Hugging Face cache includes its blobs.
pub fn way_out(folder: &Path, name: impl AsRef<Path>) -> Option<PathBuf> {
    let folder = folder.canonicalize().ok()?;
    let path = folder.join(name);
    let target = path.canonicalize().ok()?;
    let is_within = |place: &Path| target.starts_with(place);
    if is_within(&folder) || blobs_of(&folder).is_some_and(|blobs| is_within(&blobs)) {
        return None;
    }
    Some(target)
}

/// Returns `<repository>/blobs` for a Hugging Face cache folder `<repository>/snapshots/<commit>`.
fn blobs_of(folder: &Path) -> Option<PathBuf> {
    let snapshots = folder.parent()?;
    let repository = snapshots.parent()?;
    let name = repository.file_name()?.to_str()?;
    let is_cache = snapshots.file_name()? == "snapshots"
        && (name.starts_with("models--") || name.starts_with("datasets--"));
    is_cache.then(|| repository.join("blobs"))
}

/// Returns whether `name` can only name a direct entry of a folder.
pub fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    let first = parts.next();
    matches!(first, Some(Component::Normal(part)) if part == name) && parts.next().is_none()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;

    use super::*;

    #[test]
    fn only_regular_files_are_opened_and_nothing_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        mkfifo(&path("fifo"), Mode::S_IRWXU).unwrap();
        fs::create_dir(path("folder")).unwrap();
        symlink("/dev/zero", path("device")).unwrap();
        symlink("fifo", path("link")).unwrap();
        for name in ["fifo", "folder", "device", "link"] {
            for options in [OpenOptions::new().read(true), OpenOptions::new().append(true)] {
                let error = open_with(options, &path(name)).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::InvalidInput, "{name}: {error}");
            }
        }
        assert_eq!(open(&path("nothing")).unwrap_err().kind(), ErrorKind::NotFound);
        fs::write(path("file"), "1234").unwrap();
        assert_eq!(read(&path("file"), 4).unwrap(), b"1234");
        assert_eq!(read(&path("file"), 3).unwrap_err().kind(), ErrorKind::FileTooLarge);
    }

    #[test]
    fn advice_fits_the_error() {
        let of = |errno: Errno| advice(&errno.into());
        for (errno, word) in [
            (Errno::ENAMETOOLONG, "shorter"),
            (Errno::EMFILE, "ulimit -n"),
            (Errno::ENOMEM, "ulimit -v"),
            (Errno::EFBIG, "ulimit -f"),
            (Errno::ENOSPC, "space"),
            (Errno::EACCES, "permissions"),
        ] {
            assert!(of(errno).contains(word), "{errno}: {}", of(errno));
        }
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(advice(&open(folder.path()).unwrap_err()), "check the path");
        assert_eq!(advice(&too_long(4)), "check the path");
        assert_eq!(of(Errno::ETXTBSY), advice(&io::Error::other("")));
    }

    #[test]
    fn links_that_lead_out_of_a_folder_are_known() {
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let repository = root.join("models--owner--name");
        let snapshot = repository.join("snapshots/abc");
        fs::create_dir_all(&snapshot).unwrap();
        fs::create_dir(repository.join("blobs")).unwrap();
        for file in ["secret", "models--owner--name/blobs/1", "models--owner--name/snapshots/abc/a"] {
            fs::write(root.join(file), "").unwrap();
        }
        for (link, to) in
            [("blob", "../../blobs/1"), ("inside", "a"), ("out", "../../../secret"), ("gone", "b")]
        {
            symlink(to, snapshot.join(link)).unwrap();
        }
        symlink(&snapshot, root.join("model")).unwrap();
        for folder in [&snapshot, &root.join("model")] {
            for name in ["a", "blob", "inside", "gone", "none"] {
                assert_eq!(way_out(folder, name), None, "{name}");
            }
            assert_eq!(way_out(folder, "out"), Some(root.join("secret")));
        }
        let data = root.join("datasets--owner--name");
        fs::rename(&repository, &data).unwrap();
        assert_eq!(way_out(&data.join("snapshots/abc"), "blob"), None);
        fs::rename(&data, &repository).unwrap();
        fs::rename(&repository, root.join("other")).unwrap();
        let other = root.join("other/snapshots/abc");
        assert_eq!(way_out(&other, "blob"), Some(root.join("other/blobs/1")));
        assert_eq!(dangling_link(&other.join("gone")), Some((other.join("gone"), "b".into())));
        assert_eq!(dangling_link(&other.join("gone/below/")).unwrap().0, other.join("gone"));
        assert_eq!(dangling_link(&other.join("inside")), None);
    }

    #[test]
    fn plain_names() {
        for name in ["a", "fsdp_cpt3", "..a"] {
            assert!(is_plain_name(name), "{name}");
        }
        for name in ["", ".", "..", "/", "/a", "a/", "a/b", "../a", "./a"] {
            assert!(!is_plain_name(name), "{name}");
        }
    }
}
