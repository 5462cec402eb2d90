//! An attacker between two ranks, who lets them connect and then changes their messages.

use kiln_collectives::tcp::{JoinError, JoinOptions, Seal, Secret, TcpCommunicator};
use kiln_collectives::{Buffer, CommError, Communicator, Label, Phase};
use kiln_testkit::{PATIENCE, receive, wait_for};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::Duration;

/// The name of rank 0's machine, which rank 0 sends to the rendezvous and the rendezvous to all ranks.
const NODE: &str = "the machine of rank 0";

/// Modifies bytes that a rank is about to receive from the rendezvous after its handshake.
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

/// Reads a frame, or a record with a tag of `tag` bytes: both begin with the length of their content.
fn read_message(from: &mut TcpStream, tag: usize) -> Vec<u8> {
    let mut length = [0; 4];
    from.read_exact(&mut length).unwrap();
    let mut message = length.to_vec();
    message.resize(4 + u32::from_le_bytes(length) as usize + tag, 0);
    from.read_exact(&mut message[4..]).unwrap();
    message
}

fn pass_frame(from: &mut TcpStream, to: &mut TcpStream) {
    to.write_all(&read_message(from, 0)).unwrap();
}

/// Stands between a rank and the rendezvous at `port`. Forwards the handshake unchanged, and then everything
/// else, with `change` applied to the list of ranks, which is the first message of the rendezvous that is not
/// a beat. Reports how many beats came before the list.
fn stand_between(mut rank: TcpStream, port: u16, seal: Seal, change: Change, beats_before: &Sender<usize>) {
    let connect = || TcpStream::connect(("127.0.0.1", port)).map_err(|error| error.to_string());
    let mut rendezvous = wait_for("the rendezvous", connect);
    for stream in [&rank, &rendezvous] {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
    }
    pass_frame(&mut rendezvous, &mut rank);
    pass_frame(&mut rank, &mut rendezvous);
    pass_frame(&mut rendezvous, &mut rank);
    let (mut from_rank, mut to_rendezvous) = (rank.try_clone().unwrap(), rendezvous.try_clone().unwrap());
    thread::scope(|scope| {
        scope.spawn(move || {
            // Either direction may end first.
            let _ = std::io::copy(&mut from_rank, &mut to_rendezvous);
            let _ = to_rendezvous.shutdown(Shutdown::Both);
        });
        let tag = if seal == Seal::Off { 0 } else { 16 };
        let (mut beats, mut list) = (0, read_message(&mut rendezvous, tag));
        while list.len() < 60 {
            rank.write_all(&list).unwrap();
            (beats, list) = (beats + 1, read_message(&mut rendezvous, tag));
        }
        beats_before.send(beats).unwrap();
        change(&mut list);
        // The rank may close the connection as soon as it notices.
        if rank.write_all(&list).is_ok() {
            let _ = std::io::copy(&mut rendezvous, &mut rank);
        }
        let _ = rank.shutdown(Shutdown::Both);
    });
}

/// Lets rank 1 join through an attacker who applies `change`. Returns the results of both ranks, rank 1
/// first, and the number of the changed message.
fn join_through(seal: Seal, change: Change) -> ([Result<TcpCommunicator, JoinError>; 2], usize) {
    let between = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let (port, other) = (free_port(), between.local_addr().unwrap().port());
    thread::scope(|scope| {
        let zero = scope.spawn(move || TcpCommunicator::join(options(0, port, seal)));
        let (tell, told) = mpsc::channel();
        thread::Builder::new()
            .spawn(move || stand_between(between.accept().unwrap().0, port, seal, change, &tell))
            .unwrap();
        let one = TcpCommunicator::join(options(1, other, seal));
        ([one, zero.join().unwrap()], receive("the list of ranks", &told))
    })
}

/// Changes the machine name that rank 0 sent, if it can be found.
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
    let ([one, zero], _) = join_through(Seal::Off, |bytes| rename(bytes));
    let (one, zero) = (one.unwrap(), zero.unwrap());
    drop(zero);
    assert_eq!(one.rank(), 1);
}

#[test]
fn tampered_rendezvous_messages_are_noticed() {
    for change in [(|bytes| rename(bytes)) as Change, cut] {
        let ([one, zero], changed) = join_through(Seal::Encrypt, change);
        let error = one.unwrap_err();
        assert!(matches!(error, JoinError::Incomplete { rank: 1, .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains(&format!("record {changed} ")), "{text}");
        zero.unwrap_err();
    }
}

#[test]
fn sealed_ranks_work_together() {
    let world = join_through(Seal::Encrypt, |_| {}).0.map(Result::unwrap);
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
