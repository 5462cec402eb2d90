//! Ranks on one machine, whose memory can be read directly.
//!
//! Between two processes of one machine a socket copies everything twice. Where the system allows
//! it (same user, Linux, no stricter ptrace rule), a large transfer is *lent* instead: the sender
//! says where its data is, and the receiver copies it from there (`process_vm_readv`). Whether that
//! works is tried out once per connection; if not, the data goes over the socket.

use super::frame::{self, FrameError, STRANGER_LIMIT};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;
use serde::{Deserialize, Serialize};
use std::io::{self, IoSliceMut};
use std::net::TcpStream;
use std::time::Duration;

/// How long the other side may take to answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// Bytes read at once, so that other ranks get their turn.
const CHUNK: usize = 4 << 20;

/// Bytes that both sides try to read from each other.
const SAMPLE: usize = 32;

/// Another process whose memory this one can read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Neighbour(Pid);

/// An invitation to read a sample.
#[derive(Serialize, Deserialize)]
struct Invitation {
    process: i32,
    address: u64,
    sample: [u8; SAMPLE],
}

/// Finds out together with the other side whether each can read the other's memory; `None` if not,
/// on both sides. The stream must block.
pub(super) fn meet(stream: &TcpStream) -> Result<Option<Neighbour>, FrameError> {
    let mut sample = vec![0; SAMPLE];
    getrandom::fill(&mut sample).map_err(io::Error::other)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut own = [0; SAMPLE];
    own.copy_from_slice(&sample);
    let invitation = Invitation {
        process: nix::unistd::getpid().as_raw(),
        address: address(&sample),
        sample: own,
    };
    frame::write(stream, &invitation, STRANGER_LIMIT)?;
    let theirs: Invitation = frame::read(stream, STRANGER_LIMIT)?;
    let neighbour = Neighbour(Pid::from_raw(theirs.process));
    let mut seen = [0; SAMPLE];
    let is_open = neighbour.read(theirs.address, &mut seen).is_ok() && seen == theirs.sample;
    frame::write(stream, &is_open, STRANGER_LIMIT)?;
    let is_open_to_them: bool = frame::read(stream, STRANGER_LIMIT)?;
    stream.set_read_timeout(None)?;
    Ok((is_open && is_open_to_them).then_some(neighbour))
}

/// Where data is, for a neighbour to read.
pub(super) fn address(data: &[u8]) -> u64 {
    data.as_ptr().addr() as u64
}

impl Neighbour {
    /// Copies from `address` in the memory of this process, all of `into`.
    ///
    /// # Errors
    ///
    /// The system's reason, if the process is gone or the memory is not its own.
    pub(super) fn read(self, address: u64, into: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < into.len() {
            let len = CHUNK.min(into.len() - done);
            let base = usize::try_from(address)
                .ok()
                .and_then(|address| address.checked_add(done))
                .ok_or(io::ErrorKind::InvalidInput)?;
            let remote = [RemoteIoVec { base, len }];
            let mut local = [IoSliceMut::new(&mut into[done..done + len])];
            match process_vm_readv(self.0, &mut local, &remote)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => done += count,
            }
        }
        Ok(())
    }
}
