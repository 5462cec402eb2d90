//! Peer reads: a rank copies a large payload from the memory of a peer on the same machine (`process_vm_readv`),
//! instead of copying it twice through a socket. Linux allows that between processes of one user, unless its ptrace
//! rule is stricter.
//!
//! A rank reads only from a process that has proved to be the peer. The reader sends a challenge, the peer stores its
//! keyed hash in its own memory and sends the address, and the reader compares. The hash covers both ranks and the
//! direction, so neither an echo nor another pair's hash is accepted. If either rank cannot read the other's memory,
//! data uses the socket.

use super::channel::Channel;
use super::frame::{self, FrameError, HANDSHAKE_LIMIT};
use super::message::GroupNumber;
use super::options::{Secret, random};
use super::seal::keyed;
use hmac::{Hmac, Mac};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::{Pid, getpid};
use serde::{Deserialize, Serialize};
use sha2::Sha256;
use std::io::{self, IoSliceMut};
use std::net::TcpStream;
use std::time::Duration;

const READ_SIZE: usize = 4 << 20;

const HASH: usize = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PeerMemory(Pid);

#[derive(Clone, Copy)]
pub(super) struct Pair<'a> {
    pub(super) secret: &'a Secret,
    pub(super) session: u64,
    pub(super) group: GroupNumber,
    pub(super) own: usize,
    pub(super) peer: usize,
    /// True if both ranks are in this process.
    pub(super) in_one_process: bool,
}

#[derive(Serialize, Deserialize)]
struct RemoteAddress {
    process: i32,
    address: u64,
}

/// Finds out whether two ranks can read each other's memory. Both sides take the steps [`start`](Probe::start),
/// [`answer`](Probe::answer), [`check`](Probe::check) and [`finish`](Probe::finish). A step waits only for the other
/// side's previous step, so a rank may take one step with all its peers before the next.
pub(super) struct Probe<'a> {
    channel: &'a mut Channel,
    pair: Pair<'a>,
    challenge: [u8; HASH],
    /// The hash that the peer reads. Its address must not change until the probe ends.
    answer: Box<[u8; HASH]>,
    memory: Option<PeerMemory>,
}

impl<'a> Probe<'a> {
    /// Sends a challenge. The socket must be in blocking mode; no step waits for longer than `patience`.
    pub(super) fn start(
        channel: &'a mut Channel,
        pair: Pair<'a>,
        patience: Duration,
    ) -> Result<Probe<'a>, FrameError> {
        let challenge = random()?;
        channel.stream().set_read_timeout(Some(patience))?;
        frame::write(&mut channel.writer, &challenge, HANDSHAKE_LIMIT)?;
        let answer = Box::new([0; HASH]);
        Ok(Probe { channel, pair, challenge, answer, memory: None })
    }

    /// Receives the peer's challenge, and sends the address of this rank's answer.
    pub(super) fn answer(&mut self) -> Result<(), FrameError> {
        let challenge: [u8; HASH] = frame::read(&mut self.channel.reader, HANDSHAKE_LIMIT)?;
        let Pair { own, peer, .. } = self.pair;
        *self.answer = self.hash(&challenge, own, peer)?.finalize().into_bytes().into();
        // Another process reads the answer, which the compiler cannot see.
        let place = RemoteAddress {
            process: getpid().as_raw(),
            address: address(&std::hint::black_box(&self.answer)[..]),
        };
        frame::write(&mut self.channel.writer, &place, HANDSHAKE_LIMIT)
    }

    /// Reads the answer in the peer's memory, and reports to the peer whether it is right.
    pub(super) fn check(&mut self) -> Result<(), FrameError> {
        let place: RemoteAddress = frame::read(&mut self.channel.reader, HANDSHAKE_LIMIT)?;
        let Pair { own, peer, in_one_process, .. } = self.pair;
        let memory = PeerMemory(Pid::from_raw(place.process));
        if in_one_process || memory.0 != getpid() {
            let mut found = [0; HASH];
            let expected = self.hash(&self.challenge, peer, own)?;
            let is_peer =
                memory.read(place.address, &mut found).is_ok() && expected.verify_slice(&found).is_ok();
            self.memory = is_peer.then_some(memory);
        }
        frame::write(&mut self.channel.writer, &self.memory.is_some(), HANDSHAKE_LIMIT)
    }

    /// Returns the peer's memory if each rank can read the other's; otherwise `None` on both ranks.
    pub(super) fn finish(self) -> Result<Option<PeerMemory>, FrameError> {
        let is_open_to_them: bool = frame::read(&mut self.channel.reader, HANDSHAKE_LIMIT)?;
        self.channel.stream().set_read_timeout(None)?;
        Ok(self.memory.filter(|_| is_open_to_them))
    }

    /// Computes the answer of `owner` to `challenge`, for `reader` to read.
    fn hash(&self, challenge: &[u8; HASH], owner: usize, reader: usize) -> Result<Hmac<Sha256>, FrameError> {
        let Pair { secret, session, group, .. } = self.pair;
        let text = frame::encode(&(challenge, session, group, owner, reader), HANDSHAKE_LIMIT)?;
        Ok(keyed(secret.as_bytes(), b"memory of a neighbour", &text))
    }
}

pub(super) fn is_on_this_machine(stream: &TcpStream) -> io::Result<bool> {
    let (here, there) = (stream.local_addr()?.ip(), stream.peer_addr()?.ip());
    let (here, there) = (here.to_canonical(), there.to_canonical());
    Ok(here == there || (here.is_loopback() && there.is_loopback()))
}

pub(super) fn address(data: &[u8]) -> u64 {
    data.as_ptr().addr() as u64
}

impl PeerMemory {
    #[cfg(test)]
    pub(super) fn this_process() -> Self {
        PeerMemory(getpid())
    }

    /// Fills `into` from `address` in the peer's memory.
    ///
    /// # Errors
    ///
    /// The system's error, if the process is gone or the range is not mapped.
    pub(super) fn read(self, address: u64, into: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < into.len() {
            let len = READ_SIZE.min(into.len() - done);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tcp::options::Seal;
    use std::net::{Ipv4Addr, TcpListener};
    use std::process::{Child, Command, Stdio};
    use std::sync::Arc;
    use std::thread;

    const PATIENCE: Duration = Duration::from_secs(60);

    fn secret() -> Secret {
        Secret::new("of both")
    }

    fn channels() -> [Channel; 2] {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let calling = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepting, _) = listener.accept().unwrap();
        let keys = [&[1; 16], &[2; 16]];
        [calling, accepting].map(|stream| Channel::new(Arc::new(stream), Seal::Off, keys))
    }

    fn pair(secret: &Secret, own: usize, peer: usize, in_one_process: bool) -> Pair<'_> {
        Pair { secret, session: 7, group: 0, own, peer, in_one_process }
    }

    fn meet(channel: &mut Channel, pair: Pair<'_>) -> Result<Option<PeerMemory>, FrameError> {
        let mut probe = Probe::start(channel, pair, PATIENCE)?;
        probe.answer()?;
        probe.check()?;
        probe.finish()
    }

    fn meet_with(act: impl FnOnce(&mut Channel) + Send) -> Result<Option<PeerMemory>, FrameError> {
        let [mut own, mut other] = channels();
        thread::scope(|scope| {
            scope.spawn(move || act(&mut other));
            meet(&mut own, pair(&secret(), 0, 1, false))
        })
    }

    fn say<T: Serialize>(channel: &mut Channel, message: &T) {
        frame::write(&mut channel.writer, message, HANDSHAKE_LIMIT).unwrap();
    }

    fn hear<T: serde::de::DeserializeOwned>(channel: &mut Channel) -> T {
        frame::read(&mut channel.reader, HANDSHAKE_LIMIT).unwrap()
    }

    #[test]
    fn ranks_of_one_process_meet_if_they_may() {
        for allowed in [true, false] {
            let [mut own, mut other] = channels();
            let met = thread::scope(|scope| {
                let other = scope.spawn(move || meet(&mut other, pair(&secret(), 1, 0, allowed)).unwrap());
                [meet(&mut own, pair(&secret(), 0, 1, allowed)).unwrap(), other.join().unwrap()]
            });
            assert_eq!(met, [allowed.then_some(PeerMemory(getpid())); 2]);
        }
    }

    #[test]
    fn a_peer_that_sends_everything_back_is_not_read() {
        let met = meet_with(|channel| {
            let challenge: [u8; HASH] = hear(channel);
            say(channel, &challenge);
            let place: RemoteAddress = hear(channel);
            say(channel, &place);
            hear::<bool>(channel);
            say(channel, &true);
        });
        assert_eq!(met.unwrap(), None);
    }

    /// Even in its own process, a rank does not accept its own answer to its own challenge.
    #[test]
    fn a_rank_rejects_its_own_answer() {
        let [mut own, mut other] = channels();
        let met = thread::scope(|scope| {
            scope.spawn(move || {
                let challenge: [u8; HASH] = hear(&mut other);
                say(&mut other, &challenge);
                let place: RemoteAddress = hear(&mut other);
                say(&mut other, &place);
                assert!(!hear::<bool>(&mut other));
                say(&mut other, &true);
            });
            meet(&mut own, pair(&secret(), 0, 1, true))
        });
        assert_eq!(met.unwrap(), None);
    }

    /// The peer sends rank 0's own pid and a correct answer, because rank 1 is a thread here.
    #[test]
    fn a_peer_that_names_this_process_is_not_read() {
        let met = meet_with(|channel| {
            let secret = secret();
            let mut probe = Probe::start(channel, pair(&secret, 1, 0, false), PATIENCE).unwrap();
            probe.answer().unwrap();
            probe.check().unwrap();
            say(probe.channel, &true);
        });
        assert_eq!(met.unwrap(), None);
    }

    struct OtherProcess(Child);

    impl Drop for OtherProcess {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    /// The peer knows some bytes in the memory of another process of this user.
    #[test]
    fn a_peer_that_names_another_process_is_not_read() {
        let child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn();
        let other = OtherProcess(child.unwrap());
        let process = other.0.id() as i32;
        let maps = std::fs::read_to_string(format!("/proc/{process}/maps")).unwrap();
        let base = maps.split('-').next().and_then(|hex| u64::from_str_radix(hex, 16).ok()).unwrap();
        let mut there = [0; HASH];
        let _ = PeerMemory(Pid::from_raw(process)).read(base, &mut there);
        let met = meet_with(|channel| {
            hear::<[u8; HASH]>(channel);
            say(channel, &there);
            hear::<RemoteAddress>(channel);
            say(channel, &RemoteAddress { process, address: base });
            assert!(!hear::<bool>(channel));
            say(channel, &true);
        });
        assert_eq!(met.unwrap(), None);
    }

    #[test]
    fn local_connections_are_found_by_address() {
        let [own, other] = channels();
        assert!(is_on_this_machine(own.stream()).unwrap());
        assert!(is_on_this_machine(other.stream()).unwrap());
    }
}
