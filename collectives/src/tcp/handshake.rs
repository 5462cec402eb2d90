//! Authentication: both sides of a connection prove that they know the job's secret before they send any
//! other data.
//!
//! The accepting side sends a nonce. The calling side answers with its claim, its own nonce and a keyed hash
//! (HMAC-SHA-256) over all three. The accepting side answers with its decision and a hash over everything.
//! Nonces are fresh, so a recorded handshake proves nothing. The claim says whether later traffic is sealed;
//! the keys for that are derived from the same messages (see `seal`).

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

/// Time limit for a caller to authenticate itself, however slowly its bytes arrive. The limit is long because
/// a genuine caller may be on a very busy machine. When too many callers wait, unauthenticated ones are
/// closed earlier.
const PATIENCE: Duration = Duration::from_secs(30);

/// Maximum length of the name of a job or a machine, in bytes.
const NAME_LIMIT: usize = 256;

type Nonce = [u8; 32];

/// Purpose of a connection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Purpose {
    /// Between a rank and the rendezvous.
    Control {
        /// The number of ranks that the caller expects.
        world_size: usize,
        /// Name of the caller's machine.
        node: String,
        /// The port that the caller was given, if another program owns it and the ranks meet at a port near
        /// it. Ranks of other jobs may meet there as well.
        near: Option<u16>,
        /// The port on which the caller listens for other ranks.
        port: u16,
    },
    /// Between two ranks of a group.
    Data {
        /// Random number of this run, drawn by the rendezvous.
        session: u64,
        /// Number of the group.
        group: u64,
    },
}

/// The identity that the calling side claims.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Claim {
    pub(super) job: String,
    /// World rank.
    pub(super) rank: usize,
    /// Protection of the connection's traffic after the handshake.
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

/// The last message of the accepting side.
#[derive(Serialize, Deserialize)]
struct Answer {
    /// `None` if the caller is accepted.
    refusal: Option<Refusal>,
    hash: [u8; 32],
}

/// The reason why a caller that knows the secret is refused.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Refusal {
    pub(super) reason: String,
    /// True if a later call may be accepted.
    pub(super) retry: bool,
}

/// The reason why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum HandshakeError {
    /// The other side sent an unexpected message.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The other side uses a different protocol version.
    #[error("it uses version {0} of the protocol, but this program uses version {VERSION}")]
    Version(u32),
    /// The other side sent a wrong hash, or closed the connection after this side's hash, so it does not know
    /// the secret.
    #[error("it does not know this job's secret")]
    Secret,
    /// The caller claims to be the given rank, but does not know the secret.
    #[error("it does not know this job's secret (and claims to be rank {0})")]
    UnprovenRank(usize),
    /// A name is too long to be sent.
    #[error("\"{0}\" is longer than {NAME_LIMIT} bytes")]
    Name(String),
    /// The other side refused.
    #[error("{}", .0.reason)]
    Refused(Refusal),
}

impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> HandshakeError {
        HandshakeError::Frame(error.into())
    }
}

/// An incoming connection that is authenticated and awaits this side's decision.
pub(super) struct Caller {
    pub(super) claim: Claim,
    stream: Arc<TcpStream>,
    secret: Secret,
    transcript: Vec<u8>,
}

/// On the accepting side, first half: authenticates the caller.
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
    /// Returns the address of the caller.
    pub(super) fn address(&self) -> io::Result<SocketAddr> {
        self.stream.peer_addr()
    }

    /// On the accepting side, second half: accepts the caller.
    pub(super) fn welcome(self) -> Result<Channel, HandshakeError> {
        self.answer(None)?;
        set_patience(&self.stream, None)?;
        let [calling, accepting] = keys(&self.secret, &self.transcript);
        Ok(Channel::new(self.stream, self.claim.seal, [&accepting, &calling]))
    }

    /// On the accepting side, second half: refuses the caller.
    pub(super) fn refuse(self, reason: &str, retry: bool) {
        // If sending fails, the caller is gone, so it need not be refused.
        let _ = self.answer(Some(Refusal { reason: reason.to_owned(), retry }));
    }

    fn answer(&self, refusal: Option<Refusal>) -> Result<(), HandshakeError> {
        let hash = hash(&self.secret, b"accepted", &with_refusal(&self.transcript, &refusal)?);
        let answer = Answer { refusal, hash };
        let patient = TimedStream::for_at_most(&self.stream, PATIENCE);
        Ok(frame::write(patient, &answer, HANDSHAKE_LIMIT)?)
    }
}

/// Time limits of the calling side.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Limit for the first message of the other side. That may be another program, which sends nothing.
    pub(super) hello: Duration,
    /// Limit for the answer to the proof. If a caller gives up at this point, the other side considers the
    /// connection accepted, so choose a limit that is too long rather than too short.
    pub(super) answer: Duration,
}

/// On the calling side: proves `claim` and checks that the other side knows the secret as well.
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
        // A side that rejects the proof closes the connection. A side that has no room for the caller sends
        // an empty message first.
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

/// Derives two keys: one for the calling side's traffic, and one for the accepting side's.
fn keys(secret: &Secret, transcript: &[u8]) -> [Key; 2] {
    let labels: [&[u8]; 2] = [b"seal of the calling side", b"seal of the accepting side"];
    labels.map(|label| seal::derive(secret.as_bytes(), label, transcript))
}

/// Encodes the version, both nonces and the claim, which the hashes cover.
fn transcript(accepting: &Nonce, claim: &Claim, calling: &Nonce) -> Result<Vec<u8>, FrameError> {
    frame::encode(&(VERSION, accepting, claim, calling), HANDSHAKE_LIMIT)
}

/// Appends the accepting side's decision to `transcript`.
fn with_refusal(transcript: &[u8], refusal: &Option<Refusal>) -> Result<Vec<u8>, FrameError> {
    Ok([transcript, &frame::encode(refusal, HANDSHAKE_LIMIT)?].concat())
}

fn hash(secret: &Secret, role: &[u8], transcript: &[u8]) -> [u8; 32] {
    keyed(secret.as_bytes(), role, transcript).finalize().into_bytes().into()
}

/// Checks `hash` in constant time.
fn verify(secret: &Secret, role: &[u8], transcript: &[u8], hash: &[u8; 32]) -> Result<(), HandshakeError> {
    let mac = keyed(secret.as_bytes(), role, transcript);
    mac.verify_slice(hash).map_err(|_| HandshakeError::Secret)
}

/// A connection with one time limit for all its reads and writes together.
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

/// Decodes `bytes` as each kind of handshake message.
#[cfg(test)]
pub(super) fn decode_all(bytes: &[u8]) {
    let _ = frame::read::<Hello>(bytes, HANDSHAKE_LIMIT);
    let _ = frame::read::<Proof>(bytes, HANDSHAKE_LIMIT);
    let _ = frame::read::<Answer>(bytes, HANDSHAKE_LIMIT);
    let _ = frame::decode::<Proof>(bytes);
}
