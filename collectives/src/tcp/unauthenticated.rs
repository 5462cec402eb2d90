//! Connections whose other side has not yet proved that it knows the secret.
//!
//! Anyone can open such connections, so their number is limited. When there are too many, one is closed: the
//! oldest connection of the address that has the most connections. Addresses from which no rank has come are
//! chosen first. So a client that opens many connections and sends nothing loses its own connections, while a
//! rank, which authenticates itself immediately, is rarely affected.

use crate::sync::lock;
use rustix::net::SendFlags;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::{Arc, Mutex};

/// Maximum number of open connections, in addition to two per rank.
const SPARE: usize = 256;

/// The unauthenticated connections of one listener.
pub(super) struct Unauthenticated {
    capacity: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    /// Open connections, oldest first.
    open: BTreeMap<u64, Open>,
    /// Addresses from which a rank has connected.
    known: HashSet<IpAddr>,
}

struct Open {
    from: IpAddr,
    stream: Arc<TcpStream>,
}

/// A connection's number at the listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Number(u64);

impl Unauthenticated {
    pub(super) fn new(ranks: usize) -> Unauthenticated {
        Unauthenticated::with_capacity(SPARE + 2 * ranks)
    }

    fn with_capacity(capacity: usize) -> Unauthenticated {
        Unauthenticated { capacity, state: Mutex::default() }
    }

    /// Adds a new connection. Returns the address of a connection that was closed to make room; that may be
    /// the new connection itself.
    pub(super) fn enter(&self, stream: &Arc<TcpStream>, from: IpAddr) -> (Number, Option<IpAddr>) {
        let mut state = lock(&self.state);
        let number = state.next;
        state.next += 1;
        state.open.insert(number, Open { from, stream: Arc::clone(stream) });
        let is_full = state.open.len() > self.capacity;
        (Number(number), is_full.then(|| state.turn_away()).flatten())
    }

    /// Closes one connection, if there is any, and returns its address.
    pub(super) fn turn_away(&self) -> Option<IpAddr> {
        lock(&self.state).turn_away()
    }

    /// Records that the other side has authenticated itself. Returns false if the connection has already been
    /// closed.
    pub(super) fn prove(&self, number: Number) -> bool {
        let mut state = lock(&self.state);
        let removed = state.open.remove(&number.0);
        if let Some(open) = &removed {
            state.known.insert(open.from);
        }
        removed.is_some()
    }

    /// Records that the other side failed to authenticate itself. Returns false if the connection has already
    /// been closed.
    pub(super) fn leave(&self, number: Number) -> bool {
        lock(&self.state).open.remove(&number.0).is_some()
    }

    pub(super) fn is_empty(&self) -> bool {
        lock(&self.state).open.is_empty()
    }

    /// Closes all connections.
    pub(super) fn clear(&self) {
        while self.turn_away().is_some() {}
    }
}

impl State {
    fn turn_away(&mut self) -> Option<IpAddr> {
        let mut counts: HashMap<IpAddr, usize> = HashMap::new();
        for open in self.open.values() {
            *counts.entry(open.from).or_default() += 1;
        }
        // Prefers addresses from which no rank has connected, then addresses with the most connections. Age
        // decides ties.
        let rank = |from: &IpAddr| {
            let is_foreign = !from.to_canonical().is_loopback() && !self.known.contains(from);
            (is_foreign, counts.get(from).copied())
        };
        let worst = counts.keys().map(rank).max()?;
        let (&number, _) = self.open.iter().find(|(_, open)| rank(&open.from) == worst)?;
        let open = self.open.remove(&number)?;
        // An empty message informs a rank that the connection was not closed because of its secret.
        let _ = rustix::net::send(&*open.stream, &[0; 4], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        // Makes the handshake on this connection fail immediately.
        let _ = open.stream.shutdown(Shutdown::Both);
        Some(open.from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener};

    /// Connections to which a test assigns invented addresses.
    struct Street {
        listener: TcpListener,
        theirs: Vec<TcpStream>,
        unauthenticated: Unauthenticated,
    }

    impl Street {
        fn new(capacity: usize) -> Street {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            Street { listener, theirs: Vec::new(), unauthenticated: Unauthenticated::with_capacity(capacity) }
        }

        fn enter(&mut self, from: u8) -> (Number, Option<IpAddr>) {
            self.theirs.push(TcpStream::connect(self.listener.local_addr().unwrap()).unwrap());
            let stream = Arc::new(self.listener.accept().unwrap().0);
            self.unauthenticated.enter(&stream, address(from))
        }
    }

    fn address(last: u8) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(192, 0, 2, last))
    }

    #[test]
    fn the_busiest_address_makes_room() {
        let mut street = Street::new(4);
        let flood: Vec<Number> = (0..3).map(|_| street.enter(1).0).collect();
        let (rank, displaced) = street.enter(2);
        assert_eq!(displaced, None);
        // Another rank, and more of the flood: the flood pays for both.
        let (other, displaced) = street.enter(3);
        assert_eq!(displaced, Some(address(1)));
        assert_eq!(street.enter(1).1, Some(address(1)));
        assert!(!street.unauthenticated.prove(flood[0]) && !street.unauthenticated.prove(flood[1]));
        assert!(street.unauthenticated.prove(rank) && street.unauthenticated.prove(other));
        assert!(street.unauthenticated.prove(flood[2]));
    }

    #[test]
    fn addresses_of_ranks_make_room_last() {
        let mut street = Street::new(3);
        let (first, _) = street.enter(1);
        assert!(street.unauthenticated.prove(first));
        let ranks: Vec<Number> = (0..3).map(|_| street.enter(1).0).collect();
        // The other address must go, although its connection is the newest and its only one.
        assert_eq!(street.enter(2).1, Some(address(2)));
        assert!(ranks.into_iter().all(|rank| street.unauthenticated.prove(rank)));
    }

    #[test]
    fn many_addresses_with_one_each_go_by_age() {
        let mut street = Street::new(3);
        for from in 1..=3 {
            assert_eq!(street.enter(from).1, None);
        }
        assert_eq!(street.enter(4).1, Some(address(1)));
        assert_eq!(street.enter(5).1, Some(address(2)));
        street.unauthenticated.clear();
        assert!(street.unauthenticated.is_empty());
    }
}
