use super::channel::Channel;
use super::peer_memory::{PeerMemory, address};
use super::waker::Waker;
use crate::backend::empty;
use crate::buffer::Buffer;
use crate::dtype::DType;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::Shutdown;
use std::sync::Arc;
use std::time::Duration;

pub(super) const HEADER: usize = 24;

/// Minimum size in bytes of payloads that peers read from memory.
const PEER_READ: usize = 256 << 10;

const DESCRIPTOR: usize = 8;

const READ: u8 = b'r';
const CONFIRMED: u8 = b'l';

const NO_END: &str = "it sent something else than the end of an exchange";

/// After a failure of the group, an operation continues while bytes move. Bytes move until it completes if all ranks
/// had entered it.
const DRAIN: Duration = Duration::from_millis(250);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Header {
    /// The digest covers everything that the ranks must agree on.
    Operation { sequence: u64, digest: u64 },
    /// The rank is leaving the group.
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
        bytemuck::cast(words.map(u64::to_le))
    }

    pub(super) fn decode(bytes: &[u8; HEADER]) -> Option<Header> {
        match bytemuck::cast::<_, [u64; 3]>(*bytes).map(u64::from_le) {
            [OPERATION, sequence, digest] => Some(Header::Operation { sequence, digest }),
            [LEAVE, 0, 0] => Some(Header::Leave),
            _ => None,
        }
    }
}

#[derive(Debug)]
pub(super) enum Stop {
    /// The group has failed; [`Control`](super::control::Control) knows the cause.
    Failed,
    /// Another rank is in a different operation.
    Mismatch,
    /// The connection to a rank has ended. `left`: the peer announced that.
    Lost { peer: usize, left: bool, reason: String },
}

pub(super) struct Link {
    pub(super) channel: Channel,
    pub(super) memory: Option<PeerMemory>,
}

/// The connections of a rank to its group. An operation consists of *exchanges*, in which a rank may send one payload
/// to every other rank and receive one from each. [`Wire::finish_peer_reads`] ends an exchange.
pub(super) struct Wire {
    links: Vec<Option<Link>>,
    lanes: Vec<Lane>,
    header: [u8; HEADER],
    waker: Arc<Waker>,
    /// True if peers read large payloads of this exchange from memory where possible.
    peer_reads: bool,
    /// Memory for data that cannot be received in place; kept between operations.
    staging: Buffer,
}

#[derive(Clone, Copy, Default)]
struct Lane {
    sent: usize,
    received: usize,
    incoming: [u8; HEADER],
    descriptor: [u8; DESCRIPTOR],
    /// True if the peer reads this rank's payload from memory, and vice versa.
    is_read: bool,
    reads: bool,
    copied: usize,
    /// Bytes sent and received to end a peer read: [`READ`] and [`CONFIRMED`].
    closing: [usize; 2],
    wants_send: bool,
    wants_receive: bool,
}

impl Wire {
    pub(super) fn new(links: Vec<Option<Link>>) -> io::Result<Wire> {
        Ok(Wire {
            lanes: vec![Lane::default(); links.len()],
            links,
            peer_reads: false,
            header: [0; HEADER],
            waker: Arc::new(Waker::new()?),
            staging: empty(),
        })
    }

    pub(super) fn waker(&self) -> &Arc<Waker> {
        &self.waker
    }

    pub(super) fn begin(&mut self, sequence: u64, digest: u64) {
        self.header = Header::Operation { sequence, digest }.encode();
        self.lanes.fill(Lane::default());
        self.peer_reads = false;
    }

    /// Starts the next exchange of an operation. `peer_reads` must be equal on all ranks, and requires that payloads
    /// are passed whole and stay unchanged until [`Wire::finish_peer_reads`] returns true.
    pub(super) fn exchange(&mut self, peer_reads: bool) {
        for lane in &mut self.lanes {
            *lane = Lane {
                sent: lane.sent.min(HEADER),
                received: lane.received.min(HEADER),
                incoming: lane.incoming,
                ..Lane::default()
            };
        }
        self.peer_reads = peer_reads;
    }

    fn peer_memory(&self, peer: usize, len: usize) -> Option<PeerMemory> {
        let link = self.links[peer].as_ref()?;
        link.memory.filter(|_| self.peer_reads && len >= PEER_READ)
    }

    pub(super) fn world_size(&self) -> usize {
        self.links.len()
    }

    /// Takes staging memory of at least `bytes` bytes; return it with [`Wire::return_staging`].
    pub(super) fn take_staging(&mut self, bytes: usize) -> Buffer {
        let staging = std::mem::replace(&mut self.staging, empty());
        if staging.len() >= bytes { staging } else { Buffer::zeros(DType::U8, bytes) }
    }

    pub(super) fn return_staging(&mut self, staging: Buffer) {
        self.staging = staging;
    }

    pub(super) fn restart_send(&mut self, peer: usize) {
        self.lanes[peer].sent = self.lanes[peer].sent.min(HEADER);
    }

    /// Sends as much of the header and `payload` as possible. Returns the bytes of this payload sent so far; `None`
    /// while the header is incomplete. A payload that the peer reads from memory is sent once the peer has its address.
    pub(super) fn send(&mut self, peer: usize, payload: &[u8]) -> Result<Option<usize>, Stop> {
        let is_read = self.peer_memory(peer, payload.len()).is_some();
        let descriptor = address(payload).to_le_bytes();
        let content = if is_read { &descriptor[..] } else { payload };
        let Wire { links, lanes, header, .. } = self;
        let (Some(link), Some(lane)) = (&mut links[peer], lanes.get_mut(peer)) else {
            return Ok(Some(payload.len()));
        };
        lane.is_read = is_read;
        let total = HEADER + content.len();
        while lane.sent < total {
            let head = &header[lane.sent.min(HEADER)..];
            let body = &content[lane.sent.saturating_sub(HEADER)..];
            let written = link.channel.writer.write_vectored(&[IoSlice::new(head), IoSlice::new(body)]);
            match moved(peer, written, io::ErrorKind::WriteZero)? {
                0 => break,
                count => lane.sent += count,
            }
        }
        lane.wants_send = lane.sent < total;
        let sent = lane.sent.checked_sub(HEADER);
        if !is_read {
            return Ok(sent);
        }
        Ok(sent.map(|sent| if sent == DESCRIPTOR { payload.len() } else { 0 }))
    }

    /// Receives available bytes of the header and a whole payload. Returns a count as [`Wire::send`] does.
    pub(super) fn receive(&mut self, peer: usize, whole: &mut [u8]) -> Result<Option<usize>, Stop> {
        let len = whole.len();
        self.receive_block(peer, whole, 0, len)
    }

    /// Receives the block at byte `start` of a payload of `whole` bytes. The returned count is relative to
    /// the start of the block. Call [`Wire::next_block`] between blocks.
    pub(super) fn receive_block(
        &mut self,
        peer: usize,
        block: &mut [u8],
        start: usize,
        whole: usize,
    ) -> Result<Option<usize>, Stop> {
        let Some(memory) = self.peer_memory(peer, whole) else {
            return self.read(peer, block, false);
        };
        let got = self.read(peer, &mut [0; DESCRIPTOR], true)?;
        if got != Some(DESCRIPTOR) {
            return Ok(got.map(|_| 0));
        }
        let lane = &mut self.lanes[peer];
        lane.reads = true;
        // The block may have been read already, while the caller waits for other peers.
        if lane.copied < start + block.len() {
            let address = u64::from_le_bytes(lane.descriptor).wrapping_add(start as u64);
            memory.read(address, block).map_err(|error| lost(peer, error))?;
            lane.copied = start + block.len();
        }
        Ok(Some(block.len()))
    }

    fn read(&mut self, peer: usize, payload: &mut [u8], is_descriptor: bool) -> Result<Option<usize>, Stop> {
        let Wire { links, lanes, header, .. } = self;
        let (Some(link), Some(lane)) = (&mut links[peer], lanes.get_mut(peer)) else {
            return Ok(Some(payload.len()));
        };
        let Lane { received, incoming, descriptor, wants_receive, .. } = lane;
        let payload = if is_descriptor { &mut descriptor[..] } else { payload };
        let total = HEADER + payload.len();
        while *received < total {
            let was = *received;
            let head = &mut incoming[was.min(HEADER)..];
            let body = &mut payload[was.saturating_sub(HEADER)..];
            let outcome = if head.is_empty() {
                link.channel.reader.read(body)
            } else {
                link.channel.reader.read_vectored(&mut [IoSliceMut::new(head), IoSliceMut::new(body)])
            };
            match moved(peer, outcome, io::ErrorKind::UnexpectedEof)? {
                0 => break,
                count => *received += count,
            }
            if was < HEADER && *received >= HEADER {
                check(peer, incoming, header)?;
            }
        }
        *wants_receive = *received < total;
        Ok(received.checked_sub(HEADER))
    }

    /// Starts the next block from `peer`, which may be received into a different place.
    pub(super) fn next_block(&mut self, peer: usize) {
        let lane = &mut self.lanes[peer];
        if !lane.reads {
            lane.received = lane.received.min(HEADER);
        }
    }

    /// Ends the peer reads of an exchange with `peer`; returns true once neither rank reads the other's memory. The
    /// reader reports its end, and the peer confirms that the payload was still valid: a failed peer might have reused
    /// the memory.
    pub(super) fn finish_peer_reads(&mut self, peer: usize) -> Result<bool, Stop> {
        let (Some(link), Some(lane)) = (&mut self.links[peer], self.lanes.get_mut(peer)) else {
            return Ok(true);
        };
        let total = usize::from(lane.is_read) + usize::from(lane.reads);
        loop {
            let [said, heard] = lane.closing;
            let may_say = usize::from(lane.reads) + usize::from(lane.is_read && heard > 0);
            let (say, hear) = (said < may_say, heard < total);
            let word = |is_reader: bool, at: usize| if is_reader && at == 0 { READ } else { CONFIRMED };
            let mut progress = 0;
            if say {
                let written = link.channel.writer.write(&[word(lane.reads, said)]);
                progress += moved(peer, written, io::ErrorKind::WriteZero)?;
                lane.closing[0] += progress;
            }
            if hear {
                let mut theirs = [0];
                let read = link.channel.reader.read(&mut theirs);
                let count = moved(peer, read, io::ErrorKind::UnexpectedEof)?;
                if count > 0 && theirs != [word(lane.is_read, heard)] {
                    return Err(lost(peer, io::Error::other(NO_END)));
                }
                lane.closing[1] += count;
                progress += count;
            }
            if progress == 0 {
                (lane.wants_send, lane.wants_receive) = (say, hear);
                return Ok(lane.closing == [total, total]);
            }
        }
    }

    pub(super) fn wait(&mut self) -> Result<(), Stop> {
        let mut ready = Vec::with_capacity(self.links.len() + 1);
        ready.push(PollFd::new(&*self.waker, PollFlags::IN));
        for (link, lane) in self.links.iter().zip(&self.lanes) {
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::OUT, lane.wants_send);
            flags.set(PollFlags::IN, lane.wants_receive);
            if let (Some(link), false) = (link, flags.is_empty()) {
                ready.push(PollFd::new(link.channel.stream(), flags));
            }
        }
        rustix::io::retry_on_intr(|| poll(&mut ready, None)).map_err(|_| Stop::Failed)?;
        if !ready[0].revents().is_empty() {
            return self.drain(ready);
        }
        Ok(())
    }

    /// After the group has failed, continues for as long as bytes move.
    fn drain(&self, mut ready: Vec<PollFd<'_>>) -> Result<(), Stop> {
        ready.remove(0);
        let limit = Timespec::try_from(DRAIN).map_err(|_| Stop::Failed)?;
        match poll(&mut ready, Some(&limit)) {
            Ok(count) if count > 0 => Ok(()),
            _ => Err(Stop::Failed),
        }
    }

    pub(super) fn leave(&mut self) {
        let idle = !self.lanes.iter().any(|lane| lane.wants_send);
        for link in self.links.iter_mut().flatten() {
            if idle {
                // The header fits into the socket's buffer, or the peer notices that the connection is broken.
                let _ = link.channel.writer.write(&Header::Leave.encode());
            }
            let _ = link.channel.stream().shutdown(Shutdown::Write);
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

/// Returns the bytes moved, 0 if none can be moved now. Reports the end of the connection as `end`.
fn moved(peer: usize, outcome: io::Result<usize>, end: io::ErrorKind) -> Result<usize, Stop> {
    match outcome {
        Ok(0) => Err(lost(peer, end.into())),
        Ok(count) => Ok(count),
        Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(0),
        Err(error) => Err(lost(peer, error)),
    }
}

fn lost(peer: usize, error: io::Error) -> Stop {
    Stop::Lost { peer, left: false, reason: error.to_string() }
}

#[cfg(test)]
mod tests;
