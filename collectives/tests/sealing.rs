//! Somebody between two ranks, who lets them meet and then changes what they say.

use kiln_collectives::tcp::{JoinError, JoinOptions, Seal, Secret, TcpCommunicator};
use kiln_collectives::{Buffer, CommError, Communicator, Label, Phase};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

/// Limit of waits that are expected to succeed. Only a failing test ever waits that long.
const PATIENCE: Duration = Duration::from_secs(60);

/// The machine of rank 0, as it says to the rendezvous, which tells all ranks.
const NODE: &str = "the machine of rank 0";

/// What becomes of bytes that a rank is to receive from the rendezvous once it has been let in.
type Change = fn(&mut Vec<u8>);

fn options(rank: usize, port: u16, seal: Seal) -> JoinOptions {
    let mut options = JoinOptions::new(rank, 2, "127.0.0.1", port);
    options.secret = Secret::new("correct horse");
    options.seal = seal;
    options.node = [NODE, "another machine"][rank].into();
    options.linger = Duration::ZERO;
    options.timeout = PATIENCE;
    options
}

fn free_port() -> u16 {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port()
}

fn pass_frame(from: &mut TcpStream, to: &mut TcpStream) {
    let mut length = [0; 4];
    from.read_exact(&mut length).unwrap();
    let mut frame = length.to_vec();
    frame.resize(4 + u32::from_le_bytes(length) as usize, 0);
    from.read_exact(&mut frame[4..]).unwrap();
    to.write_all(&frame).unwrap();
}

/// Stands between a rank and the rendezvous at `port`: passes the handshake on, and after that everything,
/// with `change` made to what comes from the rendezvous once it holds a message as long as the first.
fn stand_between(mut rank: TcpStream, port: u16, change: Change) {
    let mut rendezvous = loop {
        if let Ok(stream) = TcpStream::connect(("127.0.0.1", port)) {
            break stream;
        }
        thread::yield_now();
    };
    pass_frame(&mut rendezvous, &mut rank);
    pass_frame(&mut rank, &mut rendezvous);
    pass_frame(&mut rendezvous, &mut rank);
    let (mut from_rank, mut to_rendezvous) =
        (rank.try_clone().unwrap(), rendezvous.try_clone().unwrap());
    thread::scope(|scope| {
        scope.spawn(move || {
            // Either may end first.
            let _ = std::io::copy(&mut from_rank, &mut to_rendezvous);
            let _ = to_rendezvous.shutdown(Shutdown::Both);
        });
        let (mut seen, mut changed) = (Vec::new(), false);
        let mut some = [0; 4096];
        while let Ok(count @ 1..) = rendezvous.read(&mut some) {
            seen.extend_from_slice(&some[..count]);
            // The first message is the list of ranks; beats are a few bytes.
            if !changed && seen.len() < 60 {
                continue;
            }
            if !std::mem::replace(&mut changed, true) {
                change(&mut seen);
            }
            if rank.write_all(&std::mem::take(&mut seen)).is_err() {
                break;
            }
        }
        let _ = rank.shutdown(Shutdown::Both);
    });
}

/// What rank 1 gets when it joins through somebody who makes `change`, and what rank 0 gets.
fn join_through(seal: Seal, change: Change) -> [Result<TcpCommunicator, JoinError>; 2] {
    let between = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let (port, other) = (free_port(), between.local_addr().unwrap().port());
    thread::scope(|scope| {
        let zero = scope.spawn(move || TcpCommunicator::join(options(0, port, seal)));
        thread::Builder::new()
            .spawn(move || stand_between(between.accept().unwrap().0, port, change))
            .unwrap();
        let one = TcpCommunicator::join(options(1, other, seal));
        [one, zero.join().unwrap()]
    })
}

/// Makes another machine of the one that rank 0 names, if it can be found.
fn rename(bytes: &mut [u8]) {
    let name = NODE.as_bytes();
    let at = bytes.windows(name.len()).position(|window| window == name);
    bytes[at.unwrap_or(40)] ^= 1;
}

fn cut(bytes: &mut Vec<u8>) {
    bytes.drain(..4);
}

#[test]
fn without_a_seal_nobody_notices() {
    let [one, zero] = join_through(Seal::Off, |bytes| rename(bytes));
    let (one, zero) = (one.unwrap(), zero.unwrap());
    drop(zero);
    assert_eq!(one.rank(), 1);
}

#[test]
fn a_change_in_what_the_rendezvous_says_is_noticed() {
    for seal in [Seal::Mac, Seal::Encrypt] {
        for change in [(|bytes| rename(bytes)) as Change, cut] {
            let [one, zero] = join_through(seal, change);
            let error = one.unwrap_err();
            assert!(matches!(error, JoinError::Incomplete { rank: 1, .. }), "{error}");
            let text = error.to_string();
            // Usually the first one; before it, the rendezvous may say that it still waits.
            assert!(text.contains("record "), "{text}");
            zero.unwrap_err();
        }
    }
}

#[test]
fn sealed_ranks_work_together() {
    for seal in [Seal::Mac, Seal::Encrypt] {
        let world = join_through(seal, |_| {}).map(Result::unwrap);
        let sums = thread::scope(|scope| {
            let ranks = world.each_ref().map(|member| {
                scope.spawn(move || -> Result<f32, CommError> {
                    let buffer = Buffer::from_slice(&[member.rank() as f32 + 1.0]);
                    let label = Label::new("block 0", Phase::Forward);
                    let sum = member.all_reduce(label, buffer).wait(PATIENCE)?;
                    Ok(sum.as_slice::<f32>().unwrap()[0])
                })
            });
            ranks.map(|rank| rank.join().unwrap().unwrap())
        });
        assert_eq!(sums, [3.0, 3.0]);
    }
}
