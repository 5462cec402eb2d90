//! The sockets of a run, in the folder `debug` of its run folder, each next to a file that identifies its process.
//!
//! Socket paths have at most 107 bytes, so the sockets are addressed through `/proc/self/fd`.

use std::fs;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Mode, OFlags, fchmod, fstat, open, unlinkat};
use rustix::net::sockopt::socket_peercred;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
use rustix::process::geteuid;
use serde::{Deserialize, Serialize};

use kiln_sys::{ProcessId, files};

const FOLDER: &str = "debug";

/// Maximum number of ranks in a world. Files and replies with more ranks are rejected.
pub(super) const MOST_RANKS: usize = 1 << 16;

const MAX_BYTES: u64 = 64 * 1024;

/// Identifies the process of a socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    pub process: ProcessId,
    /// Ranks of the process, ascending.
    pub ranks: Vec<usize>,
}

/// The open folder of a run's sockets, which stays valid if the run folder is moved.
#[derive(Debug)]
pub struct Folder(OwnedFd);

fn path_of(out: &Path) -> PathBuf {
    out.join(FOLDER)
}

impl Folder {
    /// Opens the existing socket folder of the run in `out`.
    pub fn open(out: &Path) -> io::Result<Self> {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(Folder(open(path_of(out), flags, Mode::empty())?))
    }

    /// Creates the socket folder with permissions for this user only.
    pub fn make(out: &Path) -> io::Result<Self> {
        match fs::create_dir(path_of(out)) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let folder = Folder::open(out)?;
        fchmod(&folder.0, Mode::RWXU)?;
        Ok(folder)
    }

    /// Returns a short path to a file in the folder.
    fn path(&self, name: &str) -> PathBuf {
        Path::new("/proc/self/fd").join(self.0.as_raw_fd().to_string()).join(name)
    }

    /// Listens at the socket of `owner`, replacing one that an earlier process left behind.
    pub fn listen(&self, owner: &Owner) -> io::Result<UnixListener> {
        let name = owner.name();
        let _ = self.remove(&format!("{name}.sock"));
        let listener = UnixListener::bind(self.path(&format!("{name}.sock")))?;
        // Renamed after it is written, so that readers never see a partial file.
        let temporary = self.path(&format!(".{name}.json"));
        fs::write(&temporary, serde_json::to_vec(owner)?)?;
        fs::rename(&temporary, self.path(&format!("{name}.json")))?;
        Ok(listener)
    }

    /// Removes the files of `owner`.
    pub fn remove_of(&self, owner: &Owner) {
        let name = owner.name();
        for name in [format!("{name}.json"), format!("{name}.sock")] {
            // The next start replaces a leftover file.
            let _ = self.remove(&name);
        }
    }

    fn remove(&self, name: &str) -> io::Result<()> {
        Ok(unlinkat(&self.0, name, AtFlags::empty())?)
    }

    /// Returns the processes that have a socket, ordered by their first rank.
    pub fn owners(&self) -> Vec<Owner> {
        let entries = fs::read_dir(self.path("")).into_iter().flatten().flatten();
        let mut owners: Vec<Owner> = entries
            .filter_map(|entry| {
                let name = entry.file_name().into_string().ok()?;
                name.strip_prefix("rank_")?.strip_suffix(".json")?;
                let owner: Owner =
                    serde_json::from_slice(&files::read(&entry.path(), MAX_BYTES).ok()?).ok()?;
                let is_valid =
                    owner.ranks.is_sorted() && owner.ranks.last().is_none_or(|last| *last < MOST_RANKS);
                (is_valid && format!("{}.json", owner.name()) == name).then_some(owner)
            })
            .collect();
        owners.sort_by_key(|owner| owner.ranks.first().copied());
        owners
    }

    /// Connects to the process `owner` without waiting. Fails if the process accepts no connections, or if its user
    /// neither owns the folder nor is root.
    pub fn connect(&self, owner: &Owner) -> io::Result<UnixStream> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &SocketAddrUnix::new(self.path(&format!("{}.sock", owner.name())))?)?;
        let stream = UnixStream::from(socket);
        let user = socket_peercred(&stream)?.uid;
        if user.as_raw() != fstat(&self.0)?.st_uid && !user.is_root() {
            let problem = format!("a process of another user, {}, answers instead", user.as_raw());
            return Err(io::Error::new(ErrorKind::PermissionDenied, problem));
        }
        stream.set_nonblocking(false)?;
        Ok(stream)
    }
}

impl Owner {
    fn name(&self) -> String {
        format!("rank_{}", self.ranks.first().copied().unwrap_or_default())
    }
}

/// Removes sockets of earlier processes of the run in `out`.
pub fn clear(out: &Path) {
    let Ok(folder) = Folder::open(out) else { return };
    let entries = fs::read_dir(folder.path("")).into_iter().flatten().flatten();
    for name in entries.filter_map(|entry| entry.file_name().into_string().ok()) {
        if name.trim_start_matches('.').starts_with("rank_") {
            let _ = folder.remove(&name);
        }
    }
}

/// Removes the socket folder if it is empty.
pub fn remove_if_empty(out: &Path) {
    let _ = fs::remove_dir(path_of(out));
}

/// Returns the user at the other end, if it is neither this process's user nor root.
pub fn stranger(stream: impl AsFd) -> io::Result<Option<u32>> {
    let user = socket_peercred(stream)?.uid;
    Ok((user != geteuid() && !user.is_root()).then(|| user.as_raw()))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};

    use super::*;

    #[test]
    fn long_paths_get_private_sockets() {
        let root = tempfile::tempdir().unwrap();
        let out = root.path().join("x".repeat(200));
        fs::create_dir(&out).unwrap();
        let folder = Folder::make(&out).unwrap();
        let owner = Owner { process: ProcessId::this(), ranks: vec![3, 4] };
        let listener = folder.listen(&owner).unwrap();
        assert_eq!(folder.owners(), std::slice::from_ref(&owner));
        let mode = fs::metadata(out.join("debug")).unwrap().permissions();
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode) & 0o777, 0o700);

        let moved = root.path().join("moved");
        fs::rename(&out, &moved).unwrap();
        let mut client = Folder::open(&moved).unwrap().connect(&owner).unwrap();
        let (mut server, _) = listener.accept().unwrap();
        assert_eq!(stranger(&server).unwrap(), None);
        server.write_all(b"here").unwrap();
        drop(server);
        let mut received = String::new();
        client.read_to_string(&mut received).unwrap();
        assert_eq!(received, "here");

        drop(listener);
        assert!(folder.connect(&owner).is_err());
        let again = folder.listen(&owner).unwrap();
        assert!(folder.connect(&owner).is_ok());
        drop(again);
        folder.remove_of(&owner);
        assert_eq!(fs::read_dir(moved.join("debug")).unwrap().count(), 0);
    }

    const SOCKET: &str = "KILN_TEST_SOCKET";

    #[test]
    #[ignore = "a program for the next test"]
    fn a_stranger_listens() {
        let Some(path) = std::env::var_os(SOCKET) else { return };
        let listener = UnixListener::bind(path).unwrap();
        while listener.accept().is_ok() {}
    }

    #[test]
    #[ignore = "needs root and util-linux: cargo test --release -p kiln-observe --lib -- --ignored stranger"]
    fn stranger_in_place_of_a_process_is_rejected() {
        let out = tempfile::tempdir().unwrap();
        let folder = Folder::make(out.path()).unwrap();
        let owner = Owner { process: ProcessId::this(), ranks: vec![0] };
        drop(folder.listen(&owner).unwrap());
        folder.remove("rank_0.sock").unwrap();
        let debug = path_of(out.path());
        for open in [out.path(), &debug] {
            fs::set_permissions(open, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
        }
        let mut stranger = std::process::Command::new("setpriv");
        stranger.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
        stranger.arg(std::env::current_exe().unwrap()).args(["a_stranger_listens", "--ignored"]);
        let mut stranger = stranger.env(SOCKET, debug.join("rank_0.sock")).spawn().unwrap();
        kiln_testkit::wait_until("its socket", || debug.join("rank_0.sock").exists());
        let refused = folder.connect(&owner).unwrap_err();
        stranger.kill().unwrap();
        kiln_testkit::status_of(&mut stranger);
        assert_eq!(refused.kind(), ErrorKind::PermissionDenied, "{refused}");
    }

    #[test]
    fn invalid_files_are_skipped_and_cleared() {
        let out = tempfile::tempdir().unwrap();
        let folder = Folder::make(out.path()).unwrap();
        let path = |name: &str| out.path().join("debug").join(name);
        fs::write(path("rank_0.json"), "{\"process\": ").unwrap();
        let owner = Owner { process: ProcessId::this(), ranks: vec![1] };
        fs::write(path("rank_2.json"), serde_json::to_vec(&owner).unwrap()).unwrap();
        fs::write(path("notes.txt"), "mine").unwrap();
        assert_eq!(folder.owners(), []);
        clear(out.path());
        remove_if_empty(out.path());
        assert_eq!(fs::read_dir(out.path().join("debug")).unwrap().count(), 1);
        // Following links would let anyone who may write here remove other users' files.
        let other = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink(out.path().join("debug"), other.path().join("debug")).unwrap();
        assert!(Folder::make(other.path()).is_err());
    }
}
