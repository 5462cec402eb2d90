//! Opens the port of the rendezvous: the given port, or one of the next ports.

use super::options::{JoinError, JoinOptions, PAUSE};
use std::io;
use std::net::{IpAddr, Ipv4Addr, TcpListener, ToSocketAddrs};
use std::time::{Duration, Instant};

const SHARED_PORT_TRIES: u16 = 16;

/// Time for retries of a port that an earlier run may be about to release.
pub(super) const BIND_PATIENCE: Duration = Duration::from_secs(10);

/// Opens the first free port of [`ports_of_rendezvous`].
pub(super) fn bind_rendezvous(options: &JoinOptions) -> Result<TcpListener, JoinError> {
    let host = resolve(&options.host, options.port)
        .map_err(|source| JoinError::Resolve { host: options.host.clone(), source })?;
    let patience = BIND_PATIENCE.min(options.timeout);
    bind_patiently(options, patience, || listen(&host, options))?.map_err(|source| {
        let address = format!("{}:{}", options.host, options.port);
        JoinError::Listen { address, source }
    })
}

pub(super) fn bind_patiently(
    options: &JoinOptions,
    patience: Duration,
    mut attempt: impl FnMut() -> io::Result<TcpListener>,
) -> Result<io::Result<TcpListener>, JoinError> {
    let until = Instant::now() + patience;
    loop {
        match attempt() {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && Instant::now() < until => {
                options.pause(PAUSE[1])?;
            }
            outcome => return Ok(outcome),
        }
    }
}

fn listen(hosts: &[IpAddr], options: &JoinOptions) -> io::Result<TcpListener> {
    let mut failure = io::Error::from(io::ErrorKind::AddrInUse);
    for port in ports_of_rendezvous(options) {
        for host in hosts {
            // The name may resolve to an address that reaches this machine only from other machines.
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

pub(super) fn ports_of_rendezvous(options: &JoinOptions) -> Vec<u16> {
    if options.shared_port {
        (1..=SHARED_PORT_TRIES).filter_map(|offset| options.port.checked_add(offset)).collect()
    } else {
        vec![options.port]
    }
}

pub(super) fn resolve(host: &str, port: u16) -> io::Result<Vec<IpAddr>> {
    let mut addresses: Vec<IpAddr> = Vec::new();
    for address in (host, port).to_socket_addrs()? {
        if !addresses.contains(&address.ip()) {
            addresses.push(address.ip());
        }
    }
    Ok(addresses)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates a restart while the previous process of the run still holds the port.
    #[test]
    fn ports_that_are_given_back_are_waited_for() {
        let options = JoinOptions::new(1, 2, "127.0.0.1", 1);
        let mut failures = vec![io::ErrorKind::AddrInUse; 2];
        let patience = Duration::from_secs(60);
        let listened = bind_patiently(&options, patience, || match failures.pop() {
            Some(kind) => Err(kind.into()),
            None => TcpListener::bind((Ipv4Addr::LOCALHOST, 0)),
        });
        listened.unwrap().unwrap();
        for (kind, patience) in
            [(io::ErrorKind::PermissionDenied, patience), (io::ErrorKind::AddrInUse, Duration::ZERO)]
        {
            let mut attempts = 0;
            let listened = bind_patiently(&options, patience, || {
                attempts += 1;
                Err(kind.into())
            });
            assert_eq!((listened.unwrap().unwrap_err().kind(), attempts), (kind, 1));
        }
    }
}
