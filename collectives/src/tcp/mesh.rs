use super::channel::Channel;
use super::control::Control;
use super::frame::FrameError;
use super::handshake::{self, Claim, HandshakeError, Limits, Purpose, Refusal};
use super::listener::Listener;
use super::message::{GroupName, RankInfo};
use super::options::{JoinOptions, PAUSE, Secret};
use super::peer_memory::{self, Pair, PeerMemory, Probe};
use super::pending::PendingConnections;
use super::wire::{Link, Wire};
use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// A world as seen by one of its ranks; all groups of the rank share it.
pub(super) struct World {
    pub(super) control: Control,
    pub(super) ranks: Vec<RankInfo>,
    pub(super) session: u64,
    pub(super) pending: Arc<PendingConnections>,
    /// The timeout also applies to new groups.
    pub(super) options: JoinOptions,
    /// Accepts connections from other ranks. The last field, so that it is closed last.
    pub(super) _listener: Listener,
}

const SOCKET_BUFFER: usize = 4 << 20;

const GLANCE: Duration = Duration::from_millis(200);

const ATTEMPT: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub(super) enum MeshError {
    #[error("cannot connect to world rank {rank} at {address}: {source}")]
    Connect { rank: usize, address: SocketAddr, source: io::Error },
    #[error("world rank {rank} at {address} refused its connection: {source}")]
    Handshake { rank: usize, address: SocketAddr, source: HandshakeError },
    #[error("world rank {rank} did not report whether its memory can be read: {source}")]
    Probe { rank: usize, source: FrameError },
    #[error("world rank {rank} did not connect in time")]
    Missing { rank: usize },
    #[error("cannot set up its connections: {0}")]
    Socket(#[from] io::Error),
}

pub(super) fn connect(
    world: &World,
    group: &GroupName,
    rank: usize,
    until: Instant,
) -> Result<Wire, MeshError> {
    let mut channels: Vec<Option<Channel>> = group.ranks.iter().map(|_| None).collect();
    // Descending order, so that the ranks do not all call rank 0 at the same time.
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

/// Finds the peers with which memory can be read both ways. Takes each step of the probe with all peers before the next
/// step, so that ranks cannot block each other in a circle.
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
        let is_near = world.options.read_memory
            && world.ranks[group.ranks[peer]].node == world.options.node
            && peer_memory::is_on_this_machine(channel.stream())?;
        if is_near {
            let pair = Pair {
                secret: &world.options.secret,
                session: world.session,
                group: group.number,
                own: group.ranks[rank],
                peer: group.ranks[peer],
                in_one_process: world.options.in_one_process,
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

fn call(
    world: &World,
    group: &GroupName,
    from: usize,
    to: usize,
    until: Instant,
) -> Result<Channel, MeshError> {
    let purpose = Purpose::Data { session: world.session, group: group.number };
    let JoinOptions { job, seal, secret, .. } = &world.options;
    let claim = Claim { job: job.clone(), rank: from, seal: *seal, purpose };
    let has_failed = || world.control.cause(group.number).is_some();
    persist(to, world.ranks[to].address, &claim, secret, until, has_failed)
}

/// Retries, because the other rank may be busy, or may have closed this connection with other unauthenticated ones.
fn persist(
    rank: usize,
    address: SocketAddr,
    claim: &Claim,
    secret: &Secret,
    until: Instant,
    has_failed: impl Fn() -> bool,
) -> Result<Channel, MeshError> {
    let mut pause = PAUSE[0];
    let attempt = || {
        let stream = TcpStream::connect_timeout(&address, left(until).min(ATTEMPT))
            .map_err(|source| MeshError::Connect { rank, address, source })?;
        let limits = Limits { hello: left(until).min(ATTEMPT), answer: left(until) };
        handshake::call(stream, claim.clone(), secret, limits).map_err(|source| MeshError::Handshake {
            rank,
            address,
            source,
        })
    };
    loop {
        let error = match attempt() {
            Ok(channel) => return Ok(channel),
            Err(error) => error,
        };
        if error.is_final() || Instant::now() + pause >= until || has_failed() {
            return Err(error);
        }
        tracing::debug!("calls {address} again: {error:?}");
        thread::sleep(pause);
        pause = (pause * 2).min(PAUSE[1]);
    }
}

impl MeshError {
    fn is_final(&self) -> bool {
        let MeshError::Handshake { source, .. } = self else { return false };
        matches!(source, HandshakeError::Refused(Refusal { retry: false, .. }) | HandshakeError::Version(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::lock;
    use crate::tcp::listener::Listener;
    use crate::tcp::options::{JoinOptions, Seal};
    use std::net::{Ipv4Addr, TcpListener};
    use std::sync::mpsc;

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
            let call = scope.spawn(move || persist(0, address, &claim(), &options().secret, until, || false));
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
    fn final_refusals_and_the_end_stop_the_calls() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let admit = |caller: handshake::Caller| caller.refuse("never", false);
        let _door = Listener::open(listener, &options(), Arc::new(admit)).unwrap();
        let until = Instant::now() + PATIENCE;
        let error = persist(0, address, &claim(), &options().secret, until, || false).err().unwrap();
        assert!(error.to_string().contains("never"));
        let other = Secret::new("another");
        let error = persist(0, address, &claim(), &other, until, || true).err().unwrap();
        assert!(matches!(error, MeshError::Handshake { source: HandshakeError::Secret, .. }), "{error:?}");
    }
}
