//! Checks that ranks can reach their meeting point: the master's name and its port. Every query has a time limit.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use kiln_collectives::tcp::Ports;

use crate::findings::{Findings, Stage};
use kiln_launch::place::Master;
use kiln_sys::words::{in_ranges, number_of};

/// Maximum time for resolving a name. The system's own limit is often half a minute.
const RESOLVE: Duration = Duration::from_secs(5);

const CONNECT: Duration = Duration::from_secs(2);

const ADDRESSES: usize = 3;

/// Reports the master as seen from this machine, which is the master itself if `is_here`.
pub(crate) fn examine(master: &Master, is_here: bool, findings: &mut Findings) {
    let addresses = match resolve(master) {
        Ok(addresses) => addresses,
        Err(problem) => return findings.failed(Stage::Env, "network", problem),
    };
    let list: Vec<_> = addresses.iter().map(|address| address.ip().to_string()).collect();
    findings.ok(Stage::Env, "network", format!("{} resolves to {}", master.host, list.join(", ")));
    let port = match (master.port, is_here) {
        (0, _) => Ok("its port is chosen at the start".to_owned()),
        (_, true) => bindable(&addresses, master),
        (_, false) => reachable(&addresses),
    };
    match port {
        Ok(detail) => findings.ok(Stage::Env, "network", detail),
        Err(problem) => findings.warned(Stage::Env, "network", problem),
    }
}

/// Describes the ports on which ranks listen for each other. Fails if they do not suffice for `ranks` ranks.
pub(crate) fn ports(ports: Ports, ranks: usize) -> Result<String, String> {
    let taken = ports.taken(Ipv4Addr::UNSPECIFIED.into());
    let (all, free) = (number_of(ports.count(), "port"), ports.count() - taken.len());
    let how_many = match taken.len() {
        0 => "all of which are free".to_owned(),
        _ => format!(
            "{free} of which are free; taken: {}",
            in_ranges(&taken.iter().map(|port| usize::from(*port)).collect::<Vec<_>>())
        ),
    };
    let line = format!("comm.ports {ports}: {all}, {how_many}");
    match free < ranks {
        false => Ok(line),
        true => Err(format!(
            "{line}; too few for {}: name more ports, or end the programs that use them",
            number_of(ranks, "rank")
        )),
    }
}

fn resolve(master: &Master) -> Result<Vec<SocketAddr>, String> {
    let (sender, receiver) = mpsc::channel();
    let (host, port) = (master.host.clone(), master.port);
    // If resolving takes too long, the thread is abandoned, and ends with the process.
    let look_up = move || {
        let found = (host.as_str(), port).to_socket_addrs();
        let _ = sender.send(found.map(|found| found.take(ADDRESSES).collect::<Vec<_>>()));
    };
    let started = thread::Builder::new().spawn(look_up);
    let problem = match started.map(|_| receiver.recv_timeout(RESOLVE)) {
        Ok(Ok(Ok(addresses))) if addresses.is_empty() => "it has no address".to_owned(),
        Ok(Ok(Ok(addresses))) => return Ok(addresses),
        Ok(Ok(Err(error))) | Err(error) => error.to_string(),
        Ok(Err(_)) => format!("no answer within {} s", RESOLVE.as_secs()),
    };
    let host = &master.host;
    Err(format!("{host} does not resolve ({problem}); use an address, or a name that this machine knows"))
}

fn bindable(addresses: &[SocketAddr], master: &Master) -> Result<String, String> {
    let mut problem = String::new();
    for address in addresses {
        match TcpListener::bind(address) {
            Ok(_) => return Ok(format!("rank 0 can listen on {address}")),
            Err(error) if error.kind() == ErrorKind::AddrInUse && master.shared_port => {
                return Ok(format!("torchrun listens on {address}, as it should"));
            }
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                problem = format!(
                    "another process already listens on {address}; choose another MASTER_PORT, unless the process belongs \
                     to this job"
                );
            }
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {
                problem = format!(
                    "{address} is not an address of this machine, but rank 0 is here; set MASTER_ADDR to one of its \
                     addresses"
                );
            }
            Err(error) => problem = format!("rank 0 cannot listen on {address}: {error}"),
        }
    }
    Err(problem)
}

pub(crate) fn can_listen(master: &Master) -> Result<String, String> {
    let addresses = resolve(master)?;
    bindable(&addresses, master).or_else(|problem| {
        let is_elsewhere = |address: &SocketAddr| {
            TcpListener::bind(address).is_err_and(|error| error.kind() == ErrorKind::AddrNotAvailable)
        };
        // Behind NAT, the name may resolve to an address that no interface of this machine has.
        let everywhere = (Ipv4Addr::UNSPECIFIED, master.port);
        match addresses.iter().all(is_elsewhere) && TcpListener::bind(everywhere).is_ok() {
            true => Ok(format!("rank 0 can listen on port {} of each of its addresses", master.port)),
            false => Err(problem),
        }
    })
}

pub(crate) fn is_loopback(master: &Master) -> bool {
    let addresses = resolve(master).unwrap_or_default();
    !addresses.is_empty() && addresses.iter().all(|address| address.ip().to_canonical().is_loopback())
}

fn reachable(addresses: &[SocketAddr]) -> Result<String, String> {
    let mut problem = String::new();
    for address in addresses {
        match TcpStream::connect_timeout(address, CONNECT) {
            Ok(_) => return Ok(format!("a process listens on {address}")),
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                return Ok(format!(
                    "the machine of {address} answers, but no process listens there yet; this is expected before \
                     rank 0 has started"
                ));
            }
            Err(error) => {
                problem =
                    format!("no answer from {address} ({error}); check the address, routes and firewalls");
            }
        }
    }
    Err(problem)
}
