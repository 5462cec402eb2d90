//! Connections whose other side has not proved yet that it knows the secret.
//!
//! Anyone can open some, so their number is limited. When there are too many, one is closed: the oldest of
//! the address that has the most, and of an address from which no rank has come as long as there is one.
//! So whoever opens many and says nothing only pushes out their own, and a rank, which answers at once,
//! is rarely among the oldest.

use crate::sync::lock;
use rustix::net::SendFlags;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, Shutdown, TcpStream};
use std::sync::{Arc, Mutex};

/// Connections that are open at a time besides two for each rank.
const SPARE: usize = 256;

/// The connections of one doorway that are not proven.
pub(super) struct Unproven {
    capacity: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    next: u64,
    /// By age.
    open: BTreeMap<u64, Open>,
    /// How many of them each address has.
    of_address: HashMap<IpAddr, usize>,
    /// Addresses from which a rank has come.
    known: HashSet<IpAddr>,
}

struct Open {
    from: IpAddr,
    stream: Arc<TcpStream>,
}

/// A connection's number among those that are not proven.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Number(u64);

impl Unproven {
    pub(super) fn new(ranks: usize) -> Unproven {
        Unproven::with_capacity(SPARE + 2 * ranks)
    }

    fn with_capacity(capacity: usize) -> Unproven {
        Unproven { capacity, state: Mutex::default() }
    }

    /// Notes a new connection. Returns the address of one that had to make room for it; that may be itself.
    pub(super) fn enter(&self, stream: &Arc<TcpStream>, from: IpAddr) -> (Number, Option<IpAddr>) {
        let mut state = lock(&self.state);
        let number = state.next;
        state.next += 1;
        state.open.insert(number, Open { from, stream: Arc::clone(stream) });
        *state.of_address.entry(from).or_default() += 1;
        let is_full = state.open.len() > self.capacity;
        (Number(number), is_full.then(|| state.turn_away()).flatten())
    }

    /// Closes one connection, if there is any; returns its address.
    pub(super) fn turn_away(&self) -> Option<IpAddr> {
        lock(&self.state).turn_away()
    }

    /// The other side has proved itself. False if the connection has been closed meanwhile.
    pub(super) fn prove(&self, number: Number) -> bool {
        let mut state = lock(&self.state);
        let removed = state.remove(number.0);
        if let Some(open) = &removed {
            state.known.insert(open.from);
        }
        removed.is_some()
    }

    /// The other side has failed to prove itself. False if the connection had been closed here.
    pub(super) fn leave(&self, number: Number) -> bool {
        lock(&self.state).remove(number.0).is_some()
    }

    pub(super) fn is_empty(&self) -> bool {
        lock(&self.state).open.is_empty()
    }

    /// Closes all of them.
    pub(super) fn clear(&self) {
        while self.turn_away().is_some() {}
    }
}

impl State {
    fn turn_away(&mut self) -> Option<IpAddr> {
        let is_stranger =
            |from: &IpAddr| !from.to_canonical().is_loopback() && !self.known.contains(from);
        // Strangers first, then whoever has the most. Equal ones follow from their ages below.
        let rank = |(from, count): (&IpAddr, &usize)| (is_stranger(from), *count);
        let worst = self.of_address.iter().map(rank).max()?;
        let is_worst = |open: &Open| {
            let count = self.of_address.get(&open.from).copied().unwrap_or(0);
            (is_stranger(&open.from), count) == worst
        };
        let (number, _) = self.open.iter().find(|(_, open)| is_worst(open))?;
        let number = *number;
        let open = self.remove(number)?;
        // An empty message, if there is room for it: a rank then knows that it is not about its secret.
        let _ =
            rustix::net::send(&*open.stream, &[0; 4], SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        // Whoever reads from it or writes to it fails at once.
        let _ = open.stream.shutdown(Shutdown::Both);
        Some(open.from)
    }

    fn remove(&mut self, number: u64) -> Option<Open> {
        let open = self.open.remove(&number)?;
        if let Some(count) = self.of_address.get_mut(&open.from) {
            *count -= 1;
            if *count == 0 {
                self.of_address.remove(&open.from);
            }
        }
        Some(open)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, TcpListener};

    /// Connections that are not really from where a test says that they are.
    struct Street {
        listener: TcpListener,
        theirs: Vec<TcpStream>,
        unproven: Unproven,
    }

    impl Street {
        fn new(capacity: usize) -> Street {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            Street { listener, theirs: Vec::new(), unproven: Unproven::with_capacity(capacity) }
        }

        fn enter(&mut self, from: u8) -> (Number, Option<IpAddr>) {
            self.theirs.push(TcpStream::connect(self.listener.local_addr().unwrap()).unwrap());
            let stream = Arc::new(self.listener.accept().unwrap().0);
            self.unproven.enter(&stream, address(from))
        }
    }

    fn address(last: u8) -> IpAddr {
        IpAddr::V4(Ipv4Addr::new(192, 0, 2, last))
    }

    #[test]
    fn whoever_has_the_most_makes_room_the_oldest_first() {
        let mut street = Street::new(4);
        let flood: Vec<Number> = (0..3).map(|_| street.enter(1).0).collect();
        let (rank, displaced) = street.enter(2);
        assert_eq!(displaced, None);
        // Another rank, and more of the flood: all at the cost of the flood.
        let (other, displaced) = street.enter(3);
        assert_eq!(displaced, Some(address(1)));
        assert_eq!(street.enter(1).1, Some(address(1)));
        assert!(!street.unproven.prove(flood[0]) && !street.unproven.prove(flood[1]));
        assert!(street.unproven.prove(rank) && street.unproven.prove(other));
        assert!(street.unproven.prove(flood[2]));
    }

    #[test]
    fn addresses_of_ranks_make_room_last() {
        let mut street = Street::new(3);
        let (first, _) = street.enter(1);
        assert!(street.unproven.prove(first));
        let ranks: Vec<Number> = (0..3).map(|_| street.enter(1).0).collect();
        // A stranger has to go although it is the newest and alone.
        assert_eq!(street.enter(2).1, Some(address(2)));
        assert!(ranks.into_iter().all(|rank| street.unproven.prove(rank)));
    }

    #[test]
    fn many_addresses_with_one_each_go_by_age() {
        let mut street = Street::new(3);
        for from in 1..=3 {
            assert_eq!(street.enter(from).1, None);
        }
        assert_eq!(street.enter(4).1, Some(address(1)));
        assert_eq!(street.enter(5).1, Some(address(2)));
        street.unproven.clear();
        assert!(street.unproven.is_empty());
    }
}
