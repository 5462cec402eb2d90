//! Restricting the ports of ranks.

use kiln_collectives::tcp::{self, JoinError, Ports};
use std::net::{Ipv4Addr, TcpListener};
use std::time::Duration;

/// Returns a port that is free now. The system does not hand it out again soon.
fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    listener.local_addr().unwrap().port()
}

/// Returns a range of ports that begins near a port that is free now.
fn some_ports() -> Ports {
    let first = free_port().min(u16::MAX - 40);
    format!("{first}-{}", first + 40).parse().unwrap()
}

#[test]
fn ranks_listen_where_they_may() {
    let ports = some_ports();
    let here = Ipv4Addr::LOCALHOST.into();
    let before = ports.taken(here);
    let world = tcp::loopback(2, |options| options.ports = Some(ports)).unwrap();
    let new = ports.taken(here).into_iter().filter(|port| !before.contains(port));
    assert!(new.count() >= 2);
    drop(world);
}

#[test]
fn ports_that_are_all_taken_are_named() {
    let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let port = other.local_addr().unwrap().port();
    let error = tcp::loopback(2, |options| {
        options.ports = port.to_string().parse().ok();
        options.timeout = Duration::from_millis(100);
    });
    let error = error.unwrap_err();
    assert!(matches!(error, JoinError::PortsTaken { .. }), "{error}");
    assert!(error.to_string().contains(&format!("ports {port} (comm.ports)")), "{error}");
}
