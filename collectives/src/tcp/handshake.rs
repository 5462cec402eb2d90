//! Authentication: both sides of a connection prove that they know the job's secret.
//!
//! The accepting side sends a nonce. The caller answers with its claim, its nonce and an HMAC-SHA-256 over all three.
//! The accepting side answers with its decision and a hash over everything. Fresh nonces make recorded handshakes
//! useless. Keys for sealed traffic are derived from the same messages (see `seal`).

use super::channel::Channel;
use super::frame::{self, FrameError, HANDSHAKE_LIMIT};
use super::options::{Seal, Secret, random};
use super::seal::{self, Key, keyed};
use hmac::Mac;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Version of the protocol. Increment it whenever the messages change.
const VERSION: u32 = 7;

/// Time limit for a caller's proof. Long, because a genuine caller may be on a busy machine. If too many callers wait,
/// some are closed earlier.
const PATIENCE: Duration = Duration::from_secs(30);

const NAME_LIMIT: usize = 256;

type Nonce = [u8; 32];

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Purpose {
    /// Between a rank and the rendezvous.
    Control {
        world_size: usize,
        node: String,
        /// The caller's given port, if another program owns it and the ranks meet at one of the next ports, perhaps
        /// with ranks of other jobs.
        near: Option<u16>,
        port: u16,
    },
    /// Between two ranks of a group.
    Data {
        /// Random number of this run, drawn by the rendezvous.
        session: u64,
        group: u64,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Claim {
    pub(super) job: String,
    pub(super) rank: usize,
    pub(super) seal: Seal,
    pub(super) purpose: Purpose,
}

#[derive(Serialize, Deserialize)]
struct Hello {
    version: u32,
    nonce: Nonce,
}

#[derive(Serialize, Deserialize)]
struct Proof {
    claim: Claim,
    nonce: Nonce,
    hash: [u8; 32],
}

#[derive(Serialize, Deserialize)]
struct Answer {
    refusal: Option<Refusal>,
    hash: [u8; 32],
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Refusal {
    pub(super) reason: String,
    pub(super) retry: bool,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("it uses version {0} of the protocol, but this program uses version {VERSION}")]
    Version(u32),
    /// The other side sent a wrong hash, or closed the connection after this side's hash.
    #[error("it does not know this job's secret")]
    Secret,
    #[error("it does not know this job's secret (and claims to be rank {0})")]
    UnprovenRank(usize),
    #[error("\"{0}\" is longer than {NAME_LIMIT} bytes")]
    Name(String),
    #[error("{}", .0.reason)]
    Refused(Refusal),
}

impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> HandshakeError {
        HandshakeError::Frame(error.into())
    }
}

pub(super) struct Caller {
    pub(super) claim: Claim,
    stream: Arc<TcpStream>,
    secret: Secret,
    transcript: Vec<u8>,
}

/// First half of the accepting side: authenticates the caller.
pub(super) fn examine(stream: Arc<TcpStream>, secret: &Secret) -> Result<Caller, HandshakeError> {
    let mut patient = TimedStream::for_at_most(&stream, PATIENCE);
    let hello = Hello { version: VERSION, nonce: random()? };
    frame::write(&mut patient, &hello, HANDSHAKE_LIMIT)?;
    let proof: Proof = frame::read(&mut patient, HANDSHAKE_LIMIT)?;
    let transcript = transcript(&hello.nonce, &proof.claim, &proof.nonce)?;
    verify(secret, b"caller", &transcript, &proof.hash)
        .map_err(|_| HandshakeError::UnprovenRank(proof.claim.rank))?;
    Ok(Caller { claim: proof.claim, stream, secret: secret.clone(), transcript })
}

impl Caller {
    pub(super) fn address(&self) -> io::Result<SocketAddr> {
        self.stream.peer_addr()
    }

    /// Second half of the accepting side: accepts the caller.
    pub(super) fn welcome(self) -> Result<Channel, HandshakeError> {
        self.answer(None)?;
        set_patience(&self.stream, None)?;
        let [calling, accepting] = keys(&self.secret, &self.transcript);
        Ok(Channel::new(self.stream, self.claim.seal, [&accepting, &calling]))
    }

    /// Second half of the accepting side: refuses the caller.
    pub(super) fn refuse(self, reason: &str, retry: bool) {
        let _ = self.answer(Some(Refusal { reason: reason.to_owned(), retry }));
    }

    fn answer(&self, refusal: Option<Refusal>) -> Result<(), HandshakeError> {
        let hash = hash(&self.secret, b"accepted", &with_refusal(&self.transcript, &refusal)?);
        let answer = Answer { refusal, hash };
        let patient = TimedStream::for_at_most(&self.stream, PATIENCE);
        Ok(frame::write(patient, &answer, HANDSHAKE_LIMIT)?)
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Time limit for the other side's first message. Another program may send nothing.
    pub(super) hello: Duration,
    /// Time limit for the answer to the proof. A short limit abandons connections that the other side has accepted.
    pub(super) answer: Duration,
}

/// The calling side: proves `claim`, and checks that the other side knows the secret.
pub(super) fn call(
    stream: TcpStream,
    claim: Claim,
    secret: &Secret,
    limits: Limits,
) -> Result<Channel, HandshakeError> {
    let node = match &claim.purpose {
        Purpose::Control { node, .. } => Some(node),
        Purpose::Data { .. } => None,
    };
    if let Some(name) = [&claim.job].into_iter().chain(node).find(|name| name.len() > NAME_LIMIT) {
        return Err(HandshakeError::Name(name.to_owned()));
    }
    let seal = claim.seal;
    let hello: Hello = frame::read(TimedStream::for_at_most(&stream, limits.hello), HANDSHAKE_LIMIT)?;
    let mut patient = TimedStream::for_at_most(&stream, limits.answer);
    if hello.version != VERSION {
        return Err(HandshakeError::Version(hello.version));
    }
    let nonce = random()?;
    let transcript = transcript(&hello.nonce, &claim, &nonce)?;
    let proof = Proof { claim, nonce, hash: hash(secret, b"caller", &transcript) };
    frame::write(&mut patient, &proof, HANDSHAKE_LIMIT)?;
    let answer: Answer = frame::read(&mut patient, HANDSHAKE_LIMIT).map_err(|error| match error {
        // A side that rejects the proof closes the connection. A side without room sends an empty message first.
        FrameError::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => HandshakeError::Secret,
        error => error.into(),
    })?;
    let whole = with_refusal(&transcript, &answer.refusal)?;
    verify(secret, b"accepted", &whole, &answer.hash)?;
    if let Some(refusal) = answer.refusal {
        return Err(HandshakeError::Refused(refusal));
    }
    set_patience(&stream, None)?;
    let [calling, accepting] = keys(secret, &transcript);
    Ok(Channel::new(Arc::new(stream), seal, [&calling, &accepting]))
}

fn keys(secret: &Secret, transcript: &[u8]) -> [Key; 2] {
    let labels: [&[u8]; 2] = [b"seal of the calling side", b"seal of the accepting side"];
    labels.map(|label| seal::derive(secret.as_bytes(), label, transcript))
}

fn transcript(accepting: &Nonce, claim: &Claim, calling: &Nonce) -> Result<Vec<u8>, FrameError> {
    frame::encode(&(VERSION, accepting, claim, calling), HANDSHAKE_LIMIT)
}

fn with_refusal(transcript: &[u8], refusal: &Option<Refusal>) -> Result<Vec<u8>, FrameError> {
    Ok([transcript, &frame::encode(refusal, HANDSHAKE_LIMIT)?].concat())
}

fn hash(secret: &Secret, role: &[u8], transcript: &[u8]) -> [u8; 32] {
    keyed(secret.as_bytes(), role, transcript).finalize().into_bytes().into()
}

fn verify(secret: &Secret, role: &[u8], transcript: &[u8], hash: &[u8; 32]) -> Result<(), HandshakeError> {
    let mac = keyed(secret.as_bytes(), role, transcript);
    mac.verify_slice(hash).map_err(|_| HandshakeError::Secret)
}

struct TimedStream<'a> {
    stream: &'a TcpStream,
    until: Instant,
}

impl TimedStream<'_> {
    fn for_at_most(stream: &TcpStream, patience: Duration) -> TimedStream<'_> {
        TimedStream { stream, until: Instant::now() + patience }
    }

    fn tick(&self) -> io::Result<()> {
        let left = self.until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        set_patience(self.stream, Some(left))
    }
}

impl Read for TimedStream<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.tick()?;
        self.stream.read(into)
    }
}

impl Write for TimedStream<'_> {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.tick()?;
        self.stream.write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.stream.flush()
    }
}

fn set_patience(stream: &TcpStream, patience: Option<Duration>) -> io::Result<()> {
    stream.set_read_timeout(patience)?;
    stream.set_write_timeout(patience)
}

#[cfg(test)]
pub(super) fn decode_all(bytes: &[u8]) {
    let _ = frame::read::<Hello>(bytes, HANDSHAKE_LIMIT);
    let _ = frame::read::<Proof>(bytes, HANDSHAKE_LIMIT);
    let _ = frame::read::<Answer>(bytes, HANDSHAKE_LIMIT);
    let _ = frame::decode::<Proof>(bytes);
}
