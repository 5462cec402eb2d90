//! Connections that are not authenticated yet. Anyone can open them, so their number is limited. To make room, one is
//! closed: the oldest of the address with the most connections, first among addresses from which no rank has come.
//! rank, which authenticates itself immediately, is rarely affected.

use crate::sync::lock;
use rustix::net::SendFlags;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::{Arc, Mutex};

const SPARE: usize = 256;

pub(super) struct Unauthenticated {
    capacity: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    /// Oldest first.
    open: BTreeMap<u64, Open>,
    known: HashSet<IpAddr>,
}

struct Open {
    from: IpAddr,
    stream: Arc<TcpStream>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Number(u64);

impl Unauthenticated {
    pub(super) fn new(ranks: usize) -> Unauthenticated {
        Unauthenticated::with_capacity(SPARE + 2 * ranks)
    }

    fn with_capacity(capacity: usize) -> Unauthenticated {
        Unauthenticated { capacity, state: Mutex::default() }
    }

    /// Adds a connection. Returns the address of a connection that was closed to make room, perhaps the new one.
    pub(super) fn enter(&self, stream: &Arc<TcpStream>, from: IpAddr) -> (Number, Option<IpAddr>) {
        let mut state = lock(&self.state);
        let number = state.next;
        state.next += 1;
        state.open.insert(number, Open { from, stream: Arc::clone(stream) });
        let is_full = state.open.len() > self.capacity;
        (Number(number), is_full.then(|| state.turn_away()).flatten())
    }

    pub(super) fn turn_away(&self) -> Option<IpAddr> {
        lock(&self.state).turn_away()
    }

    /// Records that the other side is authenticated. Returns false if the connection has already been closed.
    pub(super) fn prove(&self, number: Number) -> bool {
        let mut state = lock(&self.state);
        let removed = state.open.remove(&number.0);
        if let Some(open) = &removed {
            state.known.insert(open.from);
        }
        removed.is_some()
    }

    /// Records that authentication failed. Returns false if the connection has already been closed.
    pub(super) fn leave(&self, number: Number) -> bool {
        lock(&self.state).open.remove(&number.0).is_some()
    }

    pub(super) fn is_empty(&self) -> bool {
        lock(&self.state).open.is_empty()
    }

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
        // Prefers addresses without ranks, then addresses with the most connections, then age.
        let rank = |from: &IpAddr| {
            let is_foreign = !from.to_canonical().is_loopback() && !self.known.contains(from);
            (is_foreign, counts.get(from).copied())
        };
        let worst = counts.keys().map(rank).max()?;
        let (&number, _) = self.open.iter().find(|(_, open)| rank(&open.from) == worst)?;
        let open = self.open.remove(&number)?;
        // An empty message informs a rank that the connection was not closed because of its secret.
        let _ = rustix::net::send(&*open.stream, &[0; 4], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        let _ = open.stream.shutdown(Shutdown::Both);
        Some(open.from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener};

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
