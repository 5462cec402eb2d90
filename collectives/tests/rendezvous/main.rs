//! Unauthorised connections: how the rendezvous and the ranks treat connections that do not belong to the
//! job, while the job continues.

mod refused;

use kiln_collectives::tcp::{self, JoinError, JoinOptions, Seal, Secret, TcpCommunicator};
use kiln_collectives::{Buffer, CommError, Communicator, Label, Phase};
use kiln_testkit::{PATIENCE, receive, wait_for};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

fn label() -> Label {
    Label::new("block 0", Phase::Forward)
}

/// Returns the options of both ranks of a world of two, and the address of its rendezvous, which opens when
/// rank 0 joins.
fn pair() -> ([JoinOptions; 2], SocketAddr) {
    let address = free_address();
    let options = [0, 1].map(|rank| {
        let mut options = JoinOptions::new(rank, 2, address.ip().to_string(), address.port());
        options.secret = Secret::new("correct horse");
        options.linger = Duration::ZERO;
        options.timeout = PATIENCE;
        options
    });
    (options, address)
}

/// Returns an address that is free now. The system does not hand out a port again soon.
fn free_address() -> SocketAddr {
    TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap()
}

fn connect(address: SocketAddr) -> TcpStream {
    let connect = || TcpStream::connect(address).map_err(|error| error.to_string());
    let stream = wait_for("the rendezvous", connect);
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn read_frame(stream: &mut TcpStream) -> Vec<u8> {
    let mut length = [0; 4];
    stream.read_exact(&mut length).unwrap();
    let mut frame = length.to_vec();
    frame.resize(4 + u32::from_le_bytes(length) as usize, 0);
    stream.read_exact(&mut frame[4..]).unwrap();
    frame
}

/// Reads and discards everything until the other side closes the connection.
fn is_hung_up_on(mut stream: TcpStream) -> bool {
    let mut sink = [0; 4096];
    loop {
        match stream.read(&mut sink) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(error) => return error.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

fn join(options: [JoinOptions; 2]) -> Vec<TcpCommunicator> {
    thread::scope(|scope| {
        let joining = options.map(|options| scope.spawn(|| TcpCommunicator::join(options).unwrap()));
        joining.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Joins both ranks and runs one collective. `before` runs after the rendezvous has opened and before rank 1
/// joins.
fn join_despite(options: [JoinOptions; 2], before: impl FnOnce() + Send) {
    let [first, second] = options;
    thread::scope(|scope| {
        let zero = scope.spawn(|| sum(&TcpCommunicator::join(first).unwrap()));
        before();
        assert_eq!(sum(&TcpCommunicator::join(second).unwrap()), 1.0);
        assert_eq!(zero.join().unwrap(), 1.0);
    });
}

fn sum(member: &TcpCommunicator) -> f32 {
    let buffer = Buffer::from_slice(&[member.rank() as f32]);
    let sum = member.all_reduce(label(), buffer).wait(PATIENCE).unwrap();
    sum.as_slice::<f32>().unwrap()[0]
}

#[test]
fn garbage_is_hung_up_on_and_the_job_goes_on() {
    let (options, address) = pair();
    join_despite(options, || {
        for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 64], &[0xff; 4096], b"\x05\0\0\0abcde"] {
            let mut stream = connect(address);
            // The other side may close the connection during this write.
            let _ = stream.write_all(garbage);
            assert!(is_hung_up_on(stream));
        }
    });
}

#[test]
fn an_oversized_frame_allocates_nothing() {
    let (options, address) = pair();
    join_despite(options, || {
        let mut stream = connect(address);
        read_frame(&mut stream);
        stream.write_all(&u32::MAX.to_le_bytes()).unwrap();
        assert!(is_hung_up_on(stream));
    });
}

#[test]
fn a_silent_stranger_does_not_hold_up_the_job() {
    let (options, address) = pair();
    let silent: Vec<TcpStream> = thread::scope(|scope| {
        let (send, sent) = mpsc::channel();
        scope.spawn(move || {
            join_despite(options, || {
                let strangers = (0..20).map(|_| connect(address)).collect();
                send.send(strangers).unwrap();
            });
        });
        receive("the strangers", &sent)
    });
    drop(silent);
}

#[test]
fn silent_strangers_do_not_keep_a_rank_out() {
    let (options, address) = pair();
    let mut strangers = Vec::new();
    join_despite(options, || {
        strangers.extend((0..1000).map(|_| connect(address)));
        // New callers still get an answer.
        read_frame(&mut connect(address));
    });
}

#[test]
fn a_replayed_handshake_is_refused() {
    let (options, address) = pair();
    let secret = options[1].secret.clone();
    // Records what a genuine rank 1 sends to a listener of the same job, and replays it elsewhere.
    let recorder = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let behind = recorder.local_addr().unwrap();
    let mut genuine = JoinOptions::new(1, 2, behind.ip().to_string(), behind.port());
    genuine.secret = secret;
    genuine.timeout = Duration::from_secs(2);
    join_despite(options, || {
        let said = thread::scope(|scope| {
            scope.spawn(|| TcpCommunicator::join(genuine).unwrap_err());
            let (mut rank, _) = recorder.accept().unwrap();
            let mut door = connect(address);
            rank.write_all(&read_frame(&mut door)).unwrap();
            // The listener that sent this nonce is closed; the recording remains.
            read_frame(&mut rank)
        });
        let mut stream = connect(address);
        read_frame(&mut stream);
        stream.write_all(&said).unwrap();
        assert!(is_hung_up_on(stream));
    });
}

#[test]
fn a_second_rank_of_the_same_number_is_told_so() {
    let (options, _) = pair();
    let mut again = options[1].clone();
    again.timeout = Duration::from_millis(300);
    let _world = join(options);
    let error = TcpCommunicator::join(again).unwrap_err();
    assert!(error.to_string().contains("rank 1 is here already"), "{error}");
}

#[test]
fn an_unopened_rendezvous_is_rank_0s_fault() {
    let (mut options, _) = pair();
    options[1].timeout = Duration::from_millis(200);
    let error = TcpCommunicator::join(options[1].clone()).unwrap_err();
    assert!(matches!(&error, JoinError::Incomplete { missing, .. } if missing == &[0]), "{error}");
}

#[test]
fn missing_ranks_are_named_in_time() {
    let (mut options, _) = pair();
    options[0].timeout = Duration::from_millis(200);
    options[0].world_size = 4;
    let error = TcpCommunicator::join(options[0].clone()).unwrap_err();
    assert!(error.to_string().contains("ranks 1, 2, 3 did not come"), "{error}");
    let JoinError::Incomplete { missing, .. } = error else { panic!("{error}") };
    assert_eq!(missing, [1, 2, 3]);
}

/// Rank 2 of the world never arrives. Rank 0 learns of the stop, even if it registers later.
#[test]
fn a_stop_request_ends_the_wait_of_all_ranks() {
    let outcome = tcp::loopback(2, |options| {
        options.world_size = 3;
        options.linger = PATIENCE;
        options.timeout = PATIENCE;
        options.stop = Some(Arc::new(AtomicBool::new(options.rank == 1)));
    });
    let error = outcome.unwrap_err();
    assert!(matches!(error, JoinError::Stopped { by: 1 }), "{error}");
}

/// The number in "waited N s" is how long the rank has actually waited, not the limit of the wait.
#[test]
fn a_wait_that_ends_early_says_how_long_it_was() {
    let (mut options, _) = pair();
    options.iter_mut().for_each(|options| options.world_size = 3);
    options[0].timeout = Duration::from_secs(1);
    let [first, second] = options;
    // Rank 0 gives up for both ranks after its own limit.
    let start = Instant::now();
    let error = thread::scope(|scope| {
        scope.spawn(|| TcpCommunicator::join(first).unwrap_err());
        TcpCommunicator::join(second).unwrap_err()
    });
    let JoinError::Incomplete { waited, .. } = error else { panic!("{error}") };
    assert!(waited <= start.elapsed(), "{waited:?}");
}

/// Two jobs of a launcher that keeps the given ports for itself, without job names and secrets: the ranks of
/// one job find the rendezvous of the other.
#[test]
fn ranks_of_two_jobs_do_not_cross_over() {
    let (_, address) = pair();
    let job = |rank, port| {
        let mut options = JoinOptions::new(rank, 2, "127.0.0.1", port);
        options.shared_port = true;
        options.linger = Duration::ZERO;
        options.timeout = PATIENCE;
        options
    };
    let mut stranger = job(1, address.port());
    stranger.timeout = Duration::from_secs(1);
    let [first, second] = [0, 1].map(|rank| job(rank, address.port() + 1));
    join_despite([first, second], || {
        let error = TcpCommunicator::join(stranger).unwrap_err();
        let told = format!("and this rank expects port {}", address.port());
        assert!(error.to_string().contains(&told), "{error}");
    });
}

/// If nothing separates the jobs, the message at least names the possible cause.
#[test]
fn a_duplicate_rank_may_be_of_another_job() {
    let (mut options, _) = pair();
    options.iter_mut().for_each(|options| options.secret = Secret::open("none"));
    let mut again = options[1].clone();
    again.timeout = Duration::from_millis(300);
    let _world = join(options);
    let error = TcpCommunicator::join(again).unwrap_err().to_string();
    for part in ["rank 1 is here already, from 127.0.0.1; ", "of another job", "MASTER_PORT"] {
        assert!(error.contains(part), "{error}");
    }
}

/// Rank 1 is busy with something else long after the run has failed. Rank 0 does not wait for it, and rank 1
/// later gets the actual cause, in all groups.
#[test]
fn no_rank_waits_for_one_hung_after_failure() {
    let world = tcp::loopback(2, |options| options.linger = Duration::from_secs(3600)).unwrap();
    let both = |run: fn(&TcpCommunicator) -> Arc<dyn Communicator>| {
        thread::scope(|scope| {
            let ranks: Vec<_> = world.iter().map(|member| scope.spawn(|| run(member))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect::<Vec<_>>()
        })
    };
    let mut parts = both(|member| member.split("part", Some(0), 0).unwrap().unwrap());
    let mut world = world;
    let (late, late_part) = (world.pop().unwrap(), parts.pop().unwrap());
    let (first, first_part) = (world.pop().unwrap(), parts.pop().unwrap());
    let error = first.barrier(label()).wait(Duration::from_millis(50)).unwrap_err();
    assert!(matches!(error, CommError::TimedOut { .. }), "{error}");
    // Returns long before the hour of `linger`.
    drop((first_part, first));
    for member in [&late as &dyn Communicator, &*late_part] {
        assert_eq!(member.barrier(label()).wait(PATIENCE).unwrap_err(), error);
    }
}

#[test]
fn invalid_ranks_and_hosts_are_rejected() {
    let error = TcpCommunicator::join(JoinOptions::new(2, 2, "127.0.0.1", 1)).unwrap_err();
    assert!(matches!(error, JoinError::Rank { rank: 2, world_size: 2 }));
    for rank in 0..2 {
        let options = JoinOptions::new(rank, 2, "no such host", 1);
        let error = TcpCommunicator::join(options).unwrap_err();
        assert!(error.to_string().contains("check MASTER_ADDR"), "{error}");
    }
}

#[test]
fn strangers_do_not_disturb_a_running_job() {
    let (options, address) = pair();
    let world = join(options);
    let totals: Vec<f32> = thread::scope(|scope| {
        let ranks: Vec<_> = world
            .iter()
            .map(|member| scope.spawn(move || (0..200).map(|_| sum(member)).sum::<f32>()))
            .collect();
        for _ in 0..20 {
            let mut stranger = connect(address);
            let _ = stranger.write_all(b"let me in");
        }
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert_eq!(totals, [200.0, 200.0]);
}

/// The unspecified address counts as one that other machines can reach.
#[test]
fn a_default_secret_needs_the_loopback_address() {
    let (mut options, address) = pair();
    for options in &mut options {
        options.host = "0.0.0.0".into();
        options.secret = Secret::open("kiln");
    }
    for options in options.clone() {
        let rank = options.rank;
        let error = TcpCommunicator::join(options).unwrap_err();
        assert!(matches!(&error, JoinError::OpenSecret { rank: r, .. } if *r == rank), "{error}");
        assert!(error.to_string().contains("KILN_JOB_SECRET"), "{error}");
        assert!(TcpStream::connect(address).is_err(), "a program listens");
    }
    options.iter_mut().for_each(|options| options.open = true);
    join_despite(options.clone(), || {});
    // Keys that anyone knows seal nothing, wherever the ranks meet.
    options[0].host = "127.0.0.1".into();
    options[0].seal = Seal::Encrypt;
    let error = TcpCommunicator::join(options[0].clone()).unwrap_err();
    assert!(matches!(error, JoinError::SealWithoutSecret { seal: Seal::Encrypt, .. }), "{error}");
}

#[test]
fn a_port_of_another_program_is_left_alone() {
    // As with torchrun's store, another program listens on the port that all ranks are given.
    let other = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = other.local_addr().unwrap().port();
    let world = join([0, 1].map(|rank| {
        let mut options = JoinOptions::new(rank, 2, "127.0.0.1", port);
        options.shared_port = true;
        options.linger = Duration::ZERO;
        options
    }));
    let sums: Vec<f32> = thread::scope(|scope| {
        let ranks: Vec<_> = world.iter().map(|member| scope.spawn(|| sum(member))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    assert_eq!(sums, [1.0, 1.0]);
}

#[test]
fn nodes_follow_the_names_of_the_machines() {
    let world = tcp::loopback(4, |options| {
        options.node = ["b", "b", "a", "a"][options.rank].into();
    });
    for member in world.unwrap() {
        assert_eq!(member.nodes(), [0, 0, 1, 1]);
        assert_eq!(member.flight().node, if member.rank() < 2 { "b" } else { "a" });
    }
}

#[test]
fn a_rank_that_never_calls_is_named() {
    let world = tcp::loopback(3, |_| {}).unwrap();
    let errors: Vec<CommError> = thread::scope(|scope| {
        let ranks: Vec<_> = world[..2]
            .iter()
            .map(|member| {
                scope.spawn(|| {
                    let work = member.barrier(label());
                    work.wait(Duration::from_millis(100)).unwrap_err()
                })
            })
            .collect();
        world[2].recorder().set_activity("data loading");
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for error in errors {
        let CommError::TimedOut { missing, verdict, .. } = &error else { panic!("{error}") };
        assert_eq!((missing.as_slice(), verdict.culprits.as_slice()), (&[2][..], &[2][..]));
        let text = verdict.to_string();
        let parts = [
            "rank 2 never entered #0 barrier(block 0); it has been in data loading for ",
            " s; ranks 0, 1 wait",
        ];
        assert!(parts.iter().all(|part| text.contains(part)), "{text}");
    }
}
