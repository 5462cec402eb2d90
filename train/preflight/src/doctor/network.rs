//! Reachability of the meeting point: the master's name and its port. Every query has a time limit.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use kiln_collectives::tcp::Ports;

use kiln_launch::place::Master;
use kiln_sys::words::in_ranges;

/// Longest time for resolving a name. The system's own limit is often half a minute.
const RESOLVE: Duration = Duration::from_secs(5);

/// Longest time for connecting to one address.
const CONNECT: Duration = Duration::from_secs(2);

/// Number of addresses of a name to try.
const ADDRESSES: usize = 3;

/// Lines about the master as seen from here, and whether ranks can find its machine. `here` is set if it is
/// this one.
pub(super) fn examine(master: &Master, here: bool) -> (Vec<String>, bool) {
    let addresses = match resolve(master.host.clone(), master.port) {
        Ok(addresses) => addresses,
        Err(problem) => {
            let host = &master.host;
            let line = format!(
                "{host} does not resolve ({problem}); use an address, or a name that this machine knows"
            );
            return (vec![line], false);
        }
    };
    let list: Vec<_> = addresses.iter().map(|address| address.ip().to_string()).collect();
    let mut lines = vec![format!("{} resolves to {}", master.host, list.join(", "))];
    match (master.port, here) {
        (0, _) => lines.push("its port is chosen at the start".to_owned()),
        (_, true) => lines.push(bindable(&addresses, master).unwrap_or_else(|problem| problem)),
        (_, false) => lines.push(reachable(&addresses)),
    }
    (lines, true)
}

/// A line about the ports on which ranks listen for each other, and whether they suffice for `ranks` ranks.
pub(super) fn examine_ports(ports: Option<Ports>, ranks: usize) -> (String, bool) {
    let Some(ports) = ports else {
        let line = "comm.ports: none that doctor knows of, so ranks listen wherever the system lets them; \
                    where a firewall is in between, comm.ports = \"29600-29700\" holds them to these, and \
                    kiln doctor --comm-ports 29600-29700 checks it";
        return (line.to_owned(), true);
    };
    let taken = ports.taken(Ipv4Addr::UNSPECIFIED.into());
    let free = ports.count() - taken.len();
    let how_many = match taken.len() {
        0 => "all of which are free".to_owned(),
        _ => format!(
            "{free} of which are free; taken: {}",
            in_ranges(&taken.iter().map(|port| usize::from(*port)).collect::<Vec<_>>())
        ),
    };
    let few = match free < ranks {
        true => format!("; {ranks} ranks here need one each: name more, or end what uses them"),
        false => String::new(),
    };
    let count = ports.count();
    let plural = if count == 1 { "" } else { "s" };
    (format!("comm.ports {ports}: {count} port{plural}, {how_many}{few}"), free >= ranks)
}

fn resolve(host: String, port: u16) -> Result<Vec<SocketAddr>, String> {
    let (sender, receiver) = mpsc::channel();
    // Abandoned if it takes too long; the thread ends with the process.
    let look_up = move || {
        let found = (host.as_str(), port).to_socket_addrs();
        let _ = sender.send(found.map(|found| found.take(ADDRESSES).collect::<Vec<_>>()));
    };
    thread::Builder::new().spawn(look_up).map_err(|error| error.to_string())?;
    match receiver.recv_timeout(RESOLVE) {
        Ok(Ok(addresses)) if addresses.is_empty() => Err("it has no address".to_owned()),
        Ok(Ok(addresses)) => Ok(addresses),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err(format!("no answer within {} s", RESOLVE.as_secs())),
    }
}

/// Checks whether rank 0 could listen. Returns a line in either case.
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
                    "somebody listens on {address} already: this job if it runs, or another one; \
                     then choose another MASTER_PORT"
                );
            }
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {
                problem = format!(
                    "{address} is no address of this machine, but rank 0 is here; set MASTER_ADDR \
                     to one of its own"
                );
            }
            Err(error) => problem = format!("rank 0 cannot listen on {address}: {error}"),
        }
    }
    Err(problem)
}

/// Checks whether rank 0, on this machine, could listen at the meeting point. Returns a line in either case.
pub(super) fn can_listen(master: &Master) -> Result<String, String> {
    let addresses = resolve(master.host.clone(), master.port).map_err(|problem| {
        let host = &master.host;
        format!("{host} does not resolve ({problem}); use an address, or a name that this machine knows")
    })?;
    bindable(&addresses, master).or_else(|problem| {
        let is_elsewhere = |address: &SocketAddr| {
            TcpListener::bind(address).is_err_and(|error| error.kind() == ErrorKind::AddrNotAvailable)
        };
        // A name may resolve to an address that this machine has only from outside, as behind NAT.
        let everywhere = (Ipv4Addr::UNSPECIFIED, master.port);
        match addresses.iter().all(is_elsewhere) && TcpListener::bind(everywhere).is_ok() {
            true => Ok(format!("rank 0 can listen on port {} of every address of its own", master.port)),
            false => Err(problem),
        }
    })
}

/// Returns `true` if all addresses of the master are loopback addresses.
pub(super) fn is_loopback(master: &Master) -> bool {
    let addresses = resolve(master.host.clone(), master.port).unwrap_or_default();
    !addresses.is_empty() && addresses.iter().all(|address| address.ip().to_canonical().is_loopback())
}

/// Checks whether this rank could connect.
fn reachable(addresses: &[SocketAddr]) -> String {
    let mut problem = String::new();
    for address in addresses {
        match TcpStream::connect_timeout(address, CONNECT) {
            Ok(_) => return format!("somebody listens on {address}"),
            Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                return format!(
                    "the machine of {address} answers, but nobody listens there yet; that is right \
                     before rank 0 has started"
                );
            }
            Err(error) => {
                problem =
                    format!("no answer from {address} ({error}); check the address, routes and firewalls");
            }
        }
    }
    problem
}
