//! A connection between every two ranks of a group.

use super::frame::FrameError;
use super::handshake::{self, Claim, HandshakeError, Purpose};
use super::join::World;
use super::message::GroupName;
use super::neighbour;
use super::wire::{Link, Wire};
use std::io;
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Socket buffers, in bytes: enough to keep a fast network busy while a rank computes.
const SOCKET_BUFFER: usize = 4 << 20;

/// How often a rank that waits to be called looks whether the world has failed.
const GLANCE: Duration = Duration::from_millis(200);

/// Why the ranks of a group could not be connected.
#[derive(Debug, thiserror::Error)]
pub(super) enum MeshError {
    #[error("cannot connect to world rank {rank} at {address}: {source}")]
    Connect { rank: usize, address: String, source: io::Error },
    #[error("world rank {rank} at {address} does not let it in: {source}")]
    Handshake { rank: usize, address: String, source: HandshakeError },
    #[error("world rank {rank} does not say whether its memory can be read: {source}")]
    Meet { rank: usize, source: FrameError },
    #[error("world rank {rank} did not connect in time")]
    Missing { rank: usize },
    #[error("cannot set up its connections: {0}")]
    Socket(#[from] io::Error),
}

/// Connects `rank` with all others of `group`: it calls those before it and is called by those
/// after it.
pub(super) fn connect(
    world: &World,
    group: &GroupName,
    rank: usize,
    until: Instant,
) -> Result<Wire, MeshError> {
    let left = || until.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    let world_rank = group.ranks[rank];
    let mut streams: Vec<Option<TcpStream>> = Vec::with_capacity(group.ranks.len());
    for (peer, peer_world_rank) in group.ranks.iter().copied().enumerate() {
        streams.push(match peer.cmp(&rank) {
            std::cmp::Ordering::Less => {
                Some(call(world, group, world_rank, peer_world_rank, left())?)
            }
            std::cmp::Ordering::Equal => None,
            std::cmp::Ordering::Greater => Some(wait_for(world, group, peer_world_rank, until)?),
        });
    }
    let link = |(peer, stream): (usize, Option<TcpStream>)| {
        stream.map(|stream| set_up(world, group.ranks[peer], stream)).transpose()
    };
    let links = streams.into_iter().enumerate().map(link).collect::<Result<_, MeshError>>()?;
    Ok(Wire::new(links)?)
}

/// Waits to be called by a rank, unless the world fails meanwhile.
fn wait_for(
    world: &World,
    group: &GroupName,
    rank: usize,
    until: Instant,
) -> Result<TcpStream, MeshError> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if let Some(stream) = world.lobby.take(group.number, rank, left.min(GLANCE)) {
            return Ok(stream);
        }
        if left.is_zero() || world.control.cause(group.number).is_some() {
            return Err(MeshError::Missing { rank });
        }
    }
}

/// Makes a connection ready for data. All ranks set up theirs in the same order of pairs, so that
/// those who talk to each other here do not wait in a circle.
fn set_up(world: &World, rank: usize, stream: TcpStream) -> Result<Link, MeshError> {
    stream.set_nodelay(true)?;
    let socket = socket2::SockRef::from(&stream);
    socket.set_send_buffer_size(SOCKET_BUFFER)?;
    socket.set_recv_buffer_size(SOCKET_BUFFER)?;
    let is_near = world.read_memory && world.members[rank].node == world.node;
    let neighbour = if is_near {
        neighbour::meet(&stream).map_err(|source| MeshError::Meet { rank, source })?
    } else {
        None
    };
    stream.set_nonblocking(true)?;
    Ok(Link { stream, neighbour })
}

fn call(
    world: &World,
    group: &GroupName,
    from: usize,
    to: usize,
    timeout: Duration,
) -> Result<TcpStream, MeshError> {
    let address = world.members[to].address;
    let stream = TcpStream::connect_timeout(&address, timeout)
        .map_err(|source| MeshError::Connect { rank: to, address: address.to_string(), source })?;
    let purpose = Purpose::Data { session: world.session, group: group.number };
    let claim = Claim { job: world.job.clone(), rank: from, purpose };
    handshake::call(&stream, claim, &world.secret).map_err(|source| MeshError::Handshake {
        rank: to,
        address: address.to_string(),
        source,
    })?;
    Ok(stream)
}
