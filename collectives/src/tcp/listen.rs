//! Where the rendezvous listens: at the port that all ranks are told, or near it.

use super::options::{JoinError, JoinOptions};
use super::pause::{PAUSE, pause_for};
use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpListener, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Ports tried after a port that belongs to another program.
const SHARED_PORT_TRIES: u16 = 16;

/// How long rank 0 tries to open a port that an earlier run may be about to give back.
const LISTEN_PATIENCE: Duration = Duration::from_secs(10);

/// Opens the first port that is free and that the others will try.
pub(super) fn open_rendezvous(options: &JoinOptions) -> Result<TcpListener, JoinError> {
    let host = resolve(&options.host, options.port)
        .map_err(|source| JoinError::Resolve { host: options.host.clone(), source })?;
    let until = Instant::now() + LISTEN_PATIENCE.min(options.timeout);
    loop {
        match listen(&host, options) {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < until => {
                pause_for(PAUSE[1], options)?;
            }
            Err(source) => {
                let address = format!("{}:{}", options.host, options.port);
                return Err(JoinError::Listen { address, source });
            }
        }
    }
}

fn listen(hosts: &[IpAddr], options: &JoinOptions) -> io::Result<TcpListener> {
    let mut failure = io::Error::from(io::ErrorKind::AddrInUse);
    for port in ports_of_rendezvous(options) {
        for host in hosts {
            // A name may lead to an address that this machine has only from outside.
            let bound = TcpListener::bind((*host, port)).or_else(|error| match error.kind() {
                io::ErrorKind::AddrNotAvailable => {
                    TcpListener::bind((IpAddr::V4(Ipv4Addr::UNSPECIFIED), port))
                }
                _ => Err(error),
            });
            match bound {
                Ok(listener) => return Ok(listener),
                Err(error) => failure = error,
            }
        }
    }
    Err(failure)
}

/// Where the rendezvous may be.
pub(super) fn ports_of_rendezvous(options: &JoinOptions) -> Vec<u16> {
    if options.shared_port {
        (1..=SHARED_PORT_TRIES).filter_map(|offset| options.port.checked_add(offset)).collect()
    } else {
        vec![options.port]
    }
}

/// The addresses of a host, each once.
pub(super) fn resolve(host: &str, port: u16) -> io::Result<Vec<IpAddr>> {
    let mut addresses: Vec<IpAddr> = Vec::new();
    for address in (host, port).to_socket_addrs()? {
        if !addresses.contains(&address.ip()) {
            addresses.push(address.ip());
        }
    }
    Ok(addresses)
}
