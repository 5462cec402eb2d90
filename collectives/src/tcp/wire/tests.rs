//! Tests two ranks with an attacker between them.

use super::*;
use crate::tcp::options::Seal;
use crate::tcp::transfer::Transfer;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;

const PART: usize = 1_000_003;

fn connected() -> [TcpStream; 2] {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let calling = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    [calling, listener.accept().unwrap().0]
}

/// Forwards at most `end` bytes, with one bit flipped in byte `flip`.
fn pass(mut from: TcpStream, mut to: TcpStream, flip: Option<usize>, end: usize) {
    let mut passed = 0;
    let mut some = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut some) {
        let count = count.min(end - passed);
        if let Some(flip) = flip
            && (passed..passed + count).contains(&flip)
        {
            some[flip - passed] ^= 1;
        }
        // Bytes after the end are still read, so that the connection ends without a reset.
        if count > 0 && to.write_all(&some[..count]).is_ok() {
            passed += count;
        }
        if passed == end {
            let _ = to.shutdown(Shutdown::Write);
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

fn wire(rank: usize, stream: TcpStream, seal: Seal) -> Wire {
    wire_to(rank, stream, seal, None)
}

fn wire_to(rank: usize, stream: TcpStream, seal: Seal, memory: Option<PeerMemory>) -> Wire {
    let mut keys = [&[1; 16], &[2; 16]];
    if rank == 1 {
        keys.reverse();
    }
    let channel = Channel::new(Arc::new(stream), seal, keys);
    channel.stream().set_nonblocking(true).unwrap();
    let mut links = vec![Some(Link { channel, memory }), None];
    if rank == 0 {
        links.reverse();
    }
    Wire::new(links).unwrap()
}

/// Rank 1's result of an all-gather when an attacker flips a bit of rank 0's traffic, or cuts it off.
fn gather(seal: Seal, ring: bool, flip: Option<usize>, end: usize) -> Result<Vec<u8>, Stop> {
    let ([zero, near_zero], [one, near_one]) = (connected(), connected());
    let copies = (near_zero.try_clone().unwrap(), near_one.try_clone().unwrap());
    thread::scope(|scope| {
        scope.spawn(move || pass(near_zero, near_one, flip, end));
        scope.spawn(move || pass(copies.1, copies.0, None, usize::MAX));
        let run = move |rank: usize, stream: TcpStream| {
            let mut wire = wire(rank, stream, seal);
            let input = vec![rank as u8 + 1; PART];
            let mut output = vec![0; 2 * PART];
            wire.begin(7, 1);
            let chunks = [0..PART, PART..2 * PART];
            let mut transfer = Transfer { wire: &mut wire, rank, ring };
            transfer.all_gather(&input, &mut output, &chunks)?;
            wire.begin(8, 1);
            Transfer { wire: &mut wire, rank, ring }.meet()?;
            Ok(output)
        };
        let other = scope.spawn(move || run(0, zero));
        let outcome = run(1, one);
        let _ = other.join().unwrap();
        outcome
    })
}

#[test]
fn what_nobody_touches_arrives() {
    let expected = [vec![1; PART], vec![2; PART]].concat();
    for seal in [Seal::Off, Seal::Encrypt] {
        for ring in [false, true] {
            assert!(gather(seal, ring, None, usize::MAX).unwrap() == expected, "{seal}");
        }
    }
}

#[test]
fn a_changed_payload_is_noticed_if_it_is_sealed() {
    let at = HEADER + PART / 2;
    let expected = [vec![1; PART], vec![2; PART]].concat();
    assert!(gather(Seal::Off, false, Some(at), usize::MAX).unwrap() != expected);
    let stop = gather(Seal::Encrypt, false, Some(at), usize::MAX).unwrap_err();
    let Stop::Lost { peer: 0, left: false, reason } = &stop else { panic!("{stop:?}") };
    assert!(reason.contains("is not genuine"), "{reason}");
}

#[test]
fn a_connection_cut_inside_a_record_is_lost() {
    let stop = gather(Seal::Encrypt, false, None, PART / 2).unwrap_err();
    let Stop::Lost { peer: 0, left: false, reason } = &stop else { panic!("{stop:?}") };
    assert!(reason.contains("ended inside record"), "{reason}");
}

/// A reader reports its end and gets a confirmation. No other byte ends the exchange.
#[test]
fn an_exchange_ends_with_the_words_that_end_it() {
    let payload = vec![7; PEER_READ];
    let read_by = |said: u8| {
        let [here, mut there] = connected();
        let mut wire = wire_to(0, here, Seal::Off, Some(PeerMemory::this_process()));
        wire.begin(1, 1);
        wire.exchange(true);
        assert_eq!(wire.send(1, &payload).unwrap(), Some(PEER_READ));
        let mut descriptor = [0; HEADER + DESCRIPTOR];
        there.read_exact(&mut descriptor).unwrap();
        assert!(!wire.finish_peer_reads(1).unwrap(), "nobody has read it yet");
        there.write_all(&[said]).unwrap();
        loop {
            match wire.finish_peer_reads(1) {
                Ok(false) => wire.wait().unwrap(),
                Ok(true) => {
                    let mut answer = [0];
                    there.read_exact(&mut answer).unwrap();
                    return Ok(answer[0]);
                }
                Err(stop) => return Err(stop),
            }
        }
    };
    assert_eq!(read_by(READ).unwrap(), CONFIRMED);
    // An early header, or the answer instead of the question.
    for wrong in [b'k', 0, CONFIRMED] {
        let stop = read_by(wrong).unwrap_err();
        let Stop::Lost { peer: 1, left: false, reason } = &stop else { panic!("{stop:?}") };
        assert!(reason.contains("something else than the end"), "{reason}");
    }
}
