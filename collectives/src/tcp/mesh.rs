//! A connection between every two ranks of a group.

use super::channel::Channel;
use super::frame::FrameError;
use super::handshake::{self, Claim, HandshakeError, Limits, Purpose};
use super::message::GroupName;
use super::options::Secret;
use super::pause::PAUSE;
use super::peer_memory::{self, Pair, PeerMemory, Probe};
use super::wire::{Link, Wire};
use super::world::World;
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// Socket buffers, in bytes: enough to keep a fast network busy while a rank computes.
const SOCKET_BUFFER: usize = 4 << 20;

/// How often a rank that waits for a connection looks whether the world has failed.
const GLANCE: Duration = Duration::from_millis(200);

/// How long one attempt may take to connect, and the other side to send its first message.
const ATTEMPT: Duration = Duration::from_secs(30);

/// Why the ranks of a group could not be connected.
#[derive(Debug, thiserror::Error)]
pub(super) enum MeshError {
    #[error("cannot connect to world rank {rank} at {address}: {source}")]
    Connect { rank: usize, address: String, source: io::Error },
    #[error("world rank {rank} at {address} does not let it in: {source}")]
    Handshake { rank: usize, address: String, source: HandshakeError },
    #[error("world rank {rank} does not say whether its memory can be read: {source}")]
    Probe { rank: usize, source: FrameError },
    #[error("world rank {rank} did not connect in time")]
    Missing { rank: usize },
    #[error("cannot set up its connections: {0}")]
    Socket(#[from] io::Error),
}

/// Connects `rank` with all others of `group`: it calls the ranks before it and is called by those after it.
pub(super) fn connect(
    world: &World,
    group: &GroupName,
    rank: usize,
    until: Instant,
) -> Result<Wire, MeshError> {
    let mut channels: Vec<Option<Channel>> = group.ranks.iter().map(|_| None).collect();
    // Downwards, so that not all ranks call rank 0 at the same time.
    for peer in (0..rank).rev() {
        channels[peer] = Some(call(world, group, group.ranks[rank], group.ranks[peer], until)?);
    }
    for (channel, peer) in channels.iter_mut().zip(&group.ranks).skip(rank + 1) {
        *channel = Some(wait_for(world, group, *peer, until)?);
    }
    for channel in channels.iter().flatten() {
        channel.stream().set_nodelay(true)?;
        let socket = socket2::SockRef::from(&**channel.stream());
        socket.set_send_buffer_size(SOCKET_BUFFER)?;
        socket.set_recv_buffer_size(SOCKET_BUFFER)?;
    }
    let memories = probe_memory(world, group, rank, &mut channels, until)?;
    for channel in channels.iter().flatten() {
        channel.stream().set_nonblocking(true)?;
    }
    let links = channels.into_iter().zip(memories);
    let links = links.map(|(channel, memory)| channel.map(|channel| Link { channel, memory }));
    Ok(Wire::new(links.collect())?)
}

/// Finds the peers whose memory this rank can read and that can read this rank's memory. A rank takes each
/// step with all peers before the next, so that no rank waits for one that waits for another.
fn probe_memory(
    world: &World,
    group: &GroupName,
    rank: usize,
    channels: &mut [Option<Channel>],
    until: Instant,
) -> Result<Vec<Option<PeerMemory>>, MeshError> {
    let mut memories = vec![None; channels.len()];
    let mut probes: Vec<(usize, Probe<'_>)> = Vec::new();
    let at = |peer: usize| move |source| MeshError::Probe { rank: group.ranks[peer], source };
    for (peer, channel) in channels.iter_mut().enumerate() {
        let Some(channel) = channel else { continue };
        let is_near = world.read_memory
            && world.members[group.ranks[peer]].node == world.node
            && peer_memory::is_on_this_machine(channel.stream())?;
        if is_near {
            let pair = Pair {
                secret: &world.secret,
                session: world.session,
                group: group.number,
                own: group.ranks[rank],
                peer: group.ranks[peer],
                in_one_process: world.in_one_process,
            };
            let probe = Probe::start(channel, pair, left(until)).map_err(at(peer))?;
            probes.push((peer, probe));
        }
    }
    for (peer, probe) in &mut probes {
        probe.answer().map_err(at(*peer))?;
    }
    for (peer, probe) in &mut probes {
        probe.check().map_err(at(*peer))?;
    }
    for (peer, probe) in probes {
        memories[peer] = probe.finish().map_err(at(peer))?;
    }
    Ok(memories)
}

fn left(until: Instant) -> Duration {
    until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
}

/// Waits to be called by a rank, unless the world fails meanwhile.
fn wait_for(world: &World, group: &GroupName, rank: usize, until: Instant) -> Result<Channel, MeshError> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if let Some(channel) = world.pending.take(group.number, rank, left.min(GLANCE)) {
            return Ok(channel);
        }
        if left.is_zero() || world.control.cause(group.number).is_some() {
            return Err(MeshError::Missing { rank });
        }
    }
}

/// Calls a rank of the group, unless the world fails meanwhile.
fn call(
    world: &World,
    group: &GroupName,
    from: usize,
    to: usize,
    until: Instant,
) -> Result<Channel, MeshError> {
    let purpose = Purpose::Data { session: world.session, group: group.number };
    let claim = Claim { job: world.job.clone(), rank: from, seal: world.seal, purpose };
    let address = world.members[to].address;
    let has_failed = || world.control.cause(group.number).is_some();
    persist(address, &claim, &world.secret, until, has_failed).map_err(|failure| failure.at(to, address))
}

/// Calls until a call succeeds. The other rank may be busy, or may have closed this rank's connection among
/// those of unauthenticated callers.
fn persist(
    address: SocketAddr,
    claim: &Claim,
    secret: &Secret,
    until: Instant,
    has_failed: impl Fn() -> bool,
) -> Result<Channel, Failure> {
    let mut pause = PAUSE[0];
    loop {
        let failure = match attempt(address, claim, secret, until) {
            Ok(channel) => return Ok(channel),
            Err(failure) => failure,
        };
        if failure.is_final() || Instant::now() + pause >= until || has_failed() {
            return Err(failure);
        }
        tracing::debug!("calls {address} again: {failure:?}");
        thread::sleep(pause);
        pause = (pause * 2).min(PAUSE[1]);
    }
}

/// Why one call to a rank has failed.
#[derive(Debug)]
enum Failure {
    Connect(io::Error),
    Handshake(HandshakeError),
}

impl Failure {
    /// Whether another attempt would end the same way.
    fn is_final(&self) -> bool {
        let Failure::Handshake(error) = self else { return false };
        matches!(error, HandshakeError::Refused(_, false) | HandshakeError::Version(_))
    }

    fn at(self, rank: usize, address: SocketAddr) -> MeshError {
        let address = address.to_string();
        match self {
            Failure::Connect(source) => MeshError::Connect { rank, address, source },
            Failure::Handshake(source) => MeshError::Handshake { rank, address, source },
        }
    }
}

fn attempt(address: SocketAddr, claim: &Claim, secret: &Secret, until: Instant) -> Result<Channel, Failure> {
    let stream = TcpStream::connect_timeout(&address, left(until).min(ATTEMPT));
    let stream = stream.map_err(Failure::Connect)?;
    let limits = Limits { hello: left(until).min(ATTEMPT), answer: left(until) };
    handshake::call(stream, claim.clone(), secret, limits).map_err(Failure::Handshake)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::lock;
    use crate::tcp::listener::Listener;
    use crate::tcp::options::{JoinOptions, Seal};
    use std::net::{Ipv4Addr, TcpListener};
    use std::sync::{Arc, mpsc};

    const PATIENCE: Duration = Duration::from_secs(60);

    fn options() -> JoinOptions {
        let mut options = JoinOptions::new(1, 2, "127.0.0.1", 1);
        options.secret = Secret::new("of all ranks");
        options
    }

    fn claim() -> Claim {
        let purpose = Purpose::Data { session: 1, group: 0 };
        Claim { job: "kiln".into(), rank: 1, seal: Seal::Off, purpose }
    }

    #[test]
    fn a_rank_that_was_turned_away_calls_again() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        thread::scope(|scope| {
            let until = Instant::now() + PATIENCE;
            let call = scope.spawn(move || persist(address, &claim(), &options().secret, until, || false));
            // Hung up on before the first word, then before the last.
            drop(listener.accept().unwrap());
            let (stream, _) = listener.accept().unwrap();
            drop(handshake::examine(Arc::new(stream), &options().secret).unwrap());
            let (send, receive) = mpsc::channel();
            let send = std::sync::Mutex::new(send);
            let admit = move |caller: handshake::Caller| match caller.claim.rank {
                1 => lock(&send).send(caller.welcome().unwrap()).unwrap(),
                rank => panic!("rank {rank}"),
            };
            let _door = Listener::open(listener, &options(), Arc::new(admit)).unwrap();
            receive.recv_timeout(PATIENCE).unwrap();
            call.join().unwrap().unwrap();
        });
    }

    #[test]
    fn a_refusal_for_good_and_the_end_of_the_world_end_the_calls() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let admit = |caller: handshake::Caller| caller.refuse("never", false);
        let _door = Listener::open(listener, &options(), Arc::new(admit)).unwrap();
        let until = Instant::now() + PATIENCE;
        let failure = persist(address, &claim(), &options().secret, until, || false).err().unwrap();
        assert!(failure.at(0, address).to_string().contains("never"));
        // Nobody believes this one, and then the world has failed.
        let other = Secret::new("another");
        let failure = persist(address, &claim(), &other, until, || true).err().unwrap();
        assert!(matches!(failure, Failure::Handshake(HandshakeError::Secret)), "{failure:?}");
    }
}
