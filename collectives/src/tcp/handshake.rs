//! Who is at the other end: both sides prove that they know the job's secret before anything else
//! is said.
//!
//! The side that accepts sends a nonce; the other answers with what it claims to be, a nonce of its
//! own and a keyed hash (HMAC-SHA-256) over all of it; the first side proves itself with a hash
//! over the same. Nonces are fresh, so a recorded conversation proves nothing. What follows is sealed
//! as the claim says, with keys that are hashes over the same as well (`seal`).

use super::channel::Channel;
use super::frame::{self, FrameError, STRANGER_LIMIT};
use super::keyed::keyed;
use super::options::{Seal, Secret};
use super::seal::{self, Key};
use hmac::Mac;
use serde::{Deserialize, Serialize};
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Changes whenever messages do.
const VERSION: u32 = 4;

/// How long a caller may take to prove itself, however slowly its bytes drip in. Long, since a genuine one
/// may be on a machine that is very busy; when others want to come in, strangers are turned away earlier.
const PATIENCE: Duration = Duration::from_secs(30);

/// Longest name of a job or a machine, in bytes.
const NAME_LIMIT: usize = 256;

type Nonce = [u8; 32];

/// What a connection is for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Purpose {
    /// Between a rank and the rendezvous.
    Control {
        /// Ranks the caller believes there are.
        world_size: usize,
        /// Machine of the caller.
        node: String,
        /// The port that the caller was told, if that is another program's and the ranks meet near it: so may
        /// those of another job.
        near: Option<u16>,
        /// Where the caller listens for other ranks.
        port: u16,
    },
    /// Between two ranks of a group.
    Data {
        /// Number drawn by the rendezvous for this run.
        session: u64,
        /// Number of the group.
        group: u64,
    },
}

/// What the calling side says it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Claim {
    pub(super) job: String,
    /// World rank.
    pub(super) rank: usize,
    /// What protects the connection after this.
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

/// The accepting side's last word.
#[derive(Serialize, Deserialize)]
struct Answer {
    /// Why the claim, though genuine, cannot be granted.
    refusal: Option<Refusal>,
    hash: [u8; 32],
}

/// Why a genuine claim is not granted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Refusal {
    pub(super) reason: String,
    /// Whether it may be granted later.
    pub(super) retry: bool,
}

/// Why a handshake failed.
#[derive(Debug, thiserror::Error)]
pub enum HandshakeError {
    /// The other side sent something else.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// The other side speaks another version.
    #[error("it speaks version {0} of the protocol, this program version {VERSION}")]
    Version(u32),
    /// The other side's hash is wrong, or it hangs up on ours: it does not know the secret.
    #[error("it does not know this job's secret")]
    Secret,
    /// The same of a caller, which says that it is this rank.
    #[error("it does not know this job's secret (and says that it is rank {0})")]
    Stranger(usize),
    /// A name is too long to be sent.
    #[error("\"{0}\" is longer than {NAME_LIMIT} bytes")]
    Name(String),
    /// The other side says no; the flag tells whether it may say yes later.
    #[error("{0}")]
    Refused(String, bool),
}

impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> HandshakeError {
        HandshakeError::Frame(error.into())
    }
}

/// An incoming connection whose claim is genuine and waits for its answer.
pub(super) struct Caller {
    pub(super) claim: Claim,
    stream: Arc<TcpStream>,
    secret: Secret,
    transcript: Vec<u8>,
}

/// Accepting side, first half: finds out who calls.
pub(super) fn examine(stream: Arc<TcpStream>, secret: &Secret) -> Result<Caller, HandshakeError> {
    let mut patient = TimedStream::for_at_most(&stream, PATIENCE);
    let hello = Hello { version: VERSION, nonce: nonce()? };
    frame::write(&mut patient, &hello, STRANGER_LIMIT)?;
    let proof: Proof = frame::read(&mut patient, STRANGER_LIMIT)?;
    let transcript = transcript(&hello.nonce, &proof.claim, &proof.nonce)?;
    verify(secret, b"caller", &transcript, &proof.hash)
        .map_err(|_| HandshakeError::Stranger(proof.claim.rank))?;
    Ok(Caller { claim: proof.claim, stream, secret: secret.clone(), transcript })
}

impl Caller {
    /// Address the call comes from.
    pub(super) fn address(&self) -> io::Result<SocketAddr> {
        self.stream.peer_addr()
    }

    /// Accepting side, second half, if the claim is granted.
    pub(super) fn welcome(self) -> Result<Channel, HandshakeError> {
        self.answer(None)?;
        set_patience(&self.stream, None)?;
        let [calling, accepting] = keys(&self.secret, &self.transcript);
        Ok(Channel::new(self.stream, self.claim.seal, [&accepting, &calling]))
    }

    /// Accepting side, second half, if it is not.
    pub(super) fn refuse(self, reason: &str, retry: bool) {
        // The caller learns nothing if it is gone already; it is refused either way.
        let _ = self.answer(Some(Refusal { reason: reason.to_owned(), retry }));
    }

    fn answer(&self, refusal: Option<Refusal>) -> Result<(), HandshakeError> {
        let hash = hash(&self.secret, b"accepted", &with_refusal(&self.transcript, &refusal)?);
        let answer = Answer { refusal, hash };
        let patient = TimedStream::for_at_most(&self.stream, PATIENCE);
        Ok(frame::write(patient, &answer, STRANGER_LIMIT)?)
    }
}

/// How long a caller waits.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// For the other side's first word. It may be another program, which says nothing.
    pub(super) hello: Duration,
    /// For its answer to the proof. Whoever gives up here leaves the other side with a connection that it
    /// takes for good, so this is better too long than too short.
    pub(super) answer: Duration,
}

/// Calling side: proves `claim` and checks that the other side knows the secret as well.
pub(super) fn call(
    stream: TcpStream,
    claim: Claim,
    secret: &Secret,
    limits: Limits,
) -> Result<Channel, HandshakeError> {
    check_name(&claim.job)?;
    if let Purpose::Control { node, .. } = &claim.purpose {
        check_name(node)?;
    }
    let seal = claim.seal;
    let hello: Hello =
        frame::read(TimedStream::for_at_most(&stream, limits.hello), STRANGER_LIMIT)?;
    let mut patient = TimedStream::for_at_most(&stream, limits.answer);
    if hello.version != VERSION {
        return Err(HandshakeError::Version(hello.version));
    }
    let nonce = nonce()?;
    let transcript = transcript(&hello.nonce, &claim, &nonce)?;
    let proof = Proof { claim, nonce, hash: hash(secret, b"caller", &transcript) };
    frame::write(&mut patient, &proof, STRANGER_LIMIT)?;
    let answer: Answer =
        frame::read(&mut patient, STRANGER_LIMIT).map_err(|error| match error {
            // Who does not believe us hangs up without a word, and who has no time for us says an empty one.
            FrameError::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                HandshakeError::Secret
            }
            error => error.into(),
        })?;
    let whole = with_refusal(&transcript, &answer.refusal)?;
    verify(secret, b"accepted", &whole, &answer.hash)?;
    if let Some(Refusal { reason, retry }) = answer.refusal {
        return Err(HandshakeError::Refused(reason, retry));
    }
    set_patience(&stream, None)?;
    let [calling, accepting] = keys(secret, &transcript);
    Ok(Channel::new(Arc::new(stream), seal, [&calling, &accepting]))
}

/// Keys of what the calling side sends and of what the accepting side sends, after this handshake.
fn keys(secret: &Secret, transcript: &[u8]) -> [Key; 2] {
    let labels: [&[u8]; 2] = [b"seal of the calling side", b"seal of the accepting side"];
    labels.map(|label| seal::derive(secret.as_bytes(), label, transcript))
}

fn check_name(name: &str) -> Result<(), HandshakeError> {
    if name.len() > NAME_LIMIT {
        return Err(HandshakeError::Name(name.to_owned()));
    }
    Ok(())
}

fn nonce() -> io::Result<Nonce> {
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).map_err(io::Error::other)?;
    Ok(nonce)
}

/// Everything both sides have said.
fn transcript(accepting: &Nonce, claim: &Claim, calling: &Nonce) -> Result<Vec<u8>, FrameError> {
    frame::encode(&(VERSION, accepting, claim, calling), STRANGER_LIMIT)
}

/// The transcript of a finished handshake.
fn with_refusal(transcript: &[u8], refusal: &Option<Refusal>) -> Result<Vec<u8>, FrameError> {
    Ok([transcript, &frame::encode(refusal, STRANGER_LIMIT)?].concat())
}

fn hash(secret: &Secret, role: &[u8], transcript: &[u8]) -> [u8; 32] {
    keyed(secret.as_bytes(), role, transcript).finalize().into_bytes().into()
}

/// Compares in constant time.
fn verify(
    secret: &Secret,
    role: &[u8],
    transcript: &[u8],
    hash: &[u8; 32],
) -> Result<(), HandshakeError> {
    let mac = keyed(secret.as_bytes(), role, transcript);
    mac.verify_slice(hash).map_err(|_| HandshakeError::Secret)
}

/// A connection that must get through its handshake in time.
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

/// Decodes `bytes` as every message of a handshake.
#[cfg(test)]
pub(super) fn decode_all(bytes: &[u8]) {
    let _ = frame::read::<Hello>(bytes, STRANGER_LIMIT);
    let _ = frame::read::<Proof>(bytes, STRANGER_LIMIT);
    let _ = frame::read::<Answer>(bytes, STRANGER_LIMIT);
    let _ = frame::decode::<Proof>(bytes);
}
