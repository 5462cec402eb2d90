//! Bytes to and from the other ranks of a group, without blocking.

use super::waker::Waker;
use crate::buffer::Buffer;
use crate::dtype::DType;
use crate::member::empty;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::Duration;

/// Bytes of the header that starts each rank's part of an operation.
pub(super) const HEADER: usize = 24;

/// Most bytes moved in one direction before the other gets its turn: what has just been written is
/// still in the cache when the other side reads it.
const BURST: usize = 256 << 10;

/// How long an operation goes on after its group has failed, as long as bytes move: if all ranks
/// had entered it, it completes.
const DRAIN: Duration = Duration::from_millis(250);

/// What a rank says before its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Header {
    /// It is in this operation. The digest covers all that ranks must agree on.
    Operation { sequence: u64, digest: u64 },
    /// It leaves the group.
    Leave,
}

const OPERATION: u64 = u64::from_le_bytes(*b"kiln op\0");
const LEAVE: u64 = u64::from_le_bytes(*b"kiln end");

impl Header {
    pub(super) fn encode(self) -> [u8; HEADER] {
        let words = match self {
            Header::Operation { sequence, digest } => [OPERATION, sequence, digest],
            Header::Leave => [LEAVE, 0, 0],
        };
        let mut bytes = [0; HEADER];
        for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// `None` for anything else.
    pub(super) fn decode(bytes: &[u8; HEADER]) -> Option<Header> {
        let mut words = [0; 3];
        for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = u64::from_le_bytes(chunk.try_into().ok()?);
        }
        match words {
            [OPERATION, sequence, digest] => Some(Header::Operation { sequence, digest }),
            [LEAVE, 0, 0] => Some(Header::Leave),
            _ => None,
        }
    }
}

/// Why an operation cannot go on. Ranks are ranks of the group.
#[derive(Debug)]
pub(super) enum Stop {
    /// The group has failed; the control knows why.
    Failed,
    /// Another rank is in another operation.
    Mismatch,
    /// The connection to a rank has ended.
    Lost { peer: usize, left: bool, reason: String },
}

/// The connections of a rank to the others of its group, and what is under way on them.
pub(super) struct Wire {
    streams: Vec<Option<TcpStream>>,
    lanes: Vec<Lane>,
    header: [u8; HEADER],
    waker: Arc<Waker>,
    /// Memory for data that cannot go straight to its place; kept from one operation to the next.
    staging: Buffer,
}

/// One operation's traffic with one rank.
#[derive(Clone, Copy, Default)]
struct Lane {
    /// Bytes sent, header included.
    sent: usize,
    /// Bytes received, header included.
    received: usize,
    incoming: [u8; HEADER],
    /// What the caller waits for.
    wants: Wants,
}

/// What is left to do in each direction.
#[derive(Clone, Copy, Default)]
struct Wants {
    send: Want,
    receive: Want,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Want {
    /// Nothing.
    #[default]
    Nothing,
    /// More, and it may go on at once.
    More,
    /// More, once the socket is ready.
    Ready,
}

impl Wire {
    pub(super) fn new(streams: Vec<Option<TcpStream>>) -> io::Result<Wire> {
        Ok(Wire {
            lanes: vec![Lane::default(); streams.len()],
            streams,
            header: [0; HEADER],
            waker: Arc::new(Waker::new()?),
            staging: empty(),
        })
    }

    /// Woken when the group fails.
    pub(super) fn waker(&self) -> &Arc<Waker> {
        &self.waker
    }

    /// Starts the next operation.
    pub(super) fn begin(&mut self, sequence: u64, digest: u64) {
        self.header = Header::Operation { sequence, digest }.encode();
        self.lanes.fill(Lane::default());
    }

    /// Number of ranks in the group.
    pub(super) fn world_size(&self) -> usize {
        self.streams.len()
    }

    /// Lends out staging memory of at least `bytes` bytes; give it back with
    /// [`Wire::give_back`].
    pub(super) fn borrow_staging(&mut self, bytes: usize) -> Buffer {
        let staging = std::mem::replace(&mut self.staging, empty());
        if staging.len() >= bytes { staging } else { Buffer::zeros(DType::U8, bytes) }
    }

    pub(super) fn give_back(&mut self, staging: Buffer) {
        self.staging = staging;
    }

    /// The next send to `peer` starts a new payload.
    pub(super) fn restart_send(&mut self, peer: usize) {
        self.lanes[peer].sent = self.lanes[peer].sent.min(HEADER);
    }

    /// The next receive from `peer` starts a new payload.
    pub(super) fn restart_receive(&mut self, peer: usize) {
        self.lanes[peer].received = self.lanes[peer].received.min(HEADER);
    }

    /// Sends what fits of the header and then of `payload` to `peer`. Returns how many bytes of the
    /// payload have been sent by now, over all calls with the same payload in this operation;
    /// `None` while the header is still on its way.
    pub(super) fn send(&mut self, peer: usize, payload: &[u8]) -> Result<Option<usize>, Stop> {
        let Wire { streams, lanes, header, .. } = self;
        let (Some(stream), Some(lane)) = (&mut streams[peer], lanes.get_mut(peer)) else {
            return Ok(Some(payload.len()));
        };
        let total = HEADER + payload.len();
        let until = total.min(lane.sent + BURST);
        lane.wants.send = if until < total { Want::More } else { Want::Nothing };
        while lane.sent < until {
            let head = &header[lane.sent.min(HEADER)..];
            let body = &payload[lane.sent.saturating_sub(HEADER)..until.max(HEADER) - HEADER];
            match stream.write_vectored(&[IoSlice::new(head), IoSlice::new(body)]) {
                Ok(0) => return Err(lost(peer, io::ErrorKind::WriteZero.into())),
                Ok(count) => {
                    lane.sent += count;
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    lane.wants.send = Want::Ready;
                    break;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(lost(peer, error)),
            }
        }
        Ok(lane.sent.checked_sub(HEADER))
    }

    /// Receives what is there of the header and then of `payload` from `peer`; counts like
    /// [`Wire::send`].
    pub(super) fn receive(
        &mut self,
        peer: usize,
        payload: &mut [u8],
    ) -> Result<Option<usize>, Stop> {
        let Wire { streams, lanes, header, .. } = self;
        let (Some(stream), Some(lane)) = (&mut streams[peer], lanes.get_mut(peer)) else {
            return Ok(Some(payload.len()));
        };
        let total = HEADER + payload.len();
        let until = total.min(lane.received + BURST);
        lane.wants.receive = if until < total { Want::More } else { Want::Nothing };
        while lane.received < until {
            let was = lane.received;
            let head = &mut lane.incoming[was.min(HEADER)..];
            let body = &mut payload[was.saturating_sub(HEADER)..until.max(HEADER) - HEADER];
            let outcome = if head.is_empty() {
                stream.read(body)
            } else {
                stream.read_vectored(&mut [IoSliceMut::new(head), IoSliceMut::new(body)])
            };
            match outcome {
                Ok(0) => return Err(lost(peer, io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => {
                    lane.received += count;
                    if was < HEADER && lane.received >= HEADER {
                        check(peer, &lane.incoming, header)?;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    lane.wants.receive = Want::Ready;
                    break;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(lost(peer, error)),
            }
        }
        Ok(lane.received.checked_sub(HEADER))
    }

    /// Waits until something that the last sends and receives could not do can go on.
    pub(super) fn wait(&mut self) -> Result<(), Stop> {
        let may_go_on =
            |lane: &Lane| lane.wants.send == Want::More || lane.wants.receive == Want::More;
        if self.lanes.iter().any(may_go_on) {
            return Ok(());
        }
        let mut ready = Vec::with_capacity(self.streams.len() + 1);
        ready.push(PollFd::new(&*self.waker, PollFlags::IN));
        for (stream, lane) in self.streams.iter().zip(&self.lanes) {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::OUT, lane.wants.send == Want::Ready);
            flags.set(PollFlags::IN, lane.wants.receive == Want::Ready);
            if let (Some(stream), false) = (stream, flags.is_empty()) {
                ready.push(PollFd::new(stream, flags));
            }
        }
        loop {
            match poll(&mut ready, None) {
                Ok(_) => break,
                Err(rustix::io::Errno::INTR) => {}
                Err(_) => return Err(Stop::Failed),
            }
        }
        if !ready[0].revents().is_empty() {
            return self.drain(ready);
        }
        Ok(())
    }

    /// The group has failed: goes on for as long as bytes move.
    fn drain(&self, mut ready: Vec<PollFd<'_>>) -> Result<(), Stop> {
        ready.remove(0);
        let limit = Timespec::try_from(DRAIN).map_err(|_| Stop::Failed)?;
        match poll(&mut ready, Some(&limit)) {
            Ok(count) if count > 0 => Ok(()),
            _ => Err(Stop::Failed),
        }
    }

    /// Tells the others that this rank leaves, if it is not in the middle of sending something.
    pub(super) fn leave(&mut self) {
        let idle = !self.lanes.iter().any(|lane| lane.wants.send != Want::Nothing);
        for stream in self.streams.iter_mut().flatten() {
            if idle {
                // 24 bytes fit or the connection is broken; either way the other side sees an end.
                let _ = stream.write(&Header::Leave.encode());
            }
            let _ = stream.shutdown(Shutdown::Write);
        }
    }
}

fn check(peer: usize, theirs: &[u8; HEADER], mine: &[u8; HEADER]) -> Result<(), Stop> {
    match Header::decode(theirs) {
        _ if theirs == mine => Ok(()),
        Some(Header::Operation { .. }) => Err(Stop::Mismatch),
        Some(Header::Leave) => Err(Stop::Lost { peer, left: true, reason: String::new() }),
        None => Err(Stop::Lost { peer, left: false, reason: "it sent no header".into() }),
    }
}

fn lost(peer: usize, error: io::Error) -> Stop {
    Stop::Lost { peer, left: false, reason: error.to_string() }
}
