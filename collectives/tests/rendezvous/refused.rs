//! Refused callers: which of them end the wait for all ranks, and what messages say about them.

use super::{free_address, join_despite, pair};
use kiln_collectives::tcp::{JoinError, JoinOptions, Seal, Secret, TcpCommunicator};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Modifies a rank's options.
type Change = fn(&mut JoinOptions);

/// Returns the error of a rank 1 that joins with different options from rank 0's.
fn refused(options: &JoinOptions, change: impl FnOnce(&mut JoinOptions)) -> JoinError {
    let mut options = options.clone();
    change(&mut options);
    TcpCommunicator::join(options).unwrap_err()
}

#[test]
fn wrong_secrets_and_jobs_do_not_stop_the_job() {
    let (options, _) = pair();
    let mut other = options[1].clone();
    other.timeout = Duration::from_secs(1);
    join_despite(options, || {
        let error = refused(&other, |options| options.secret = Secret::new("battery staple"));
        assert!(matches!(error, JoinError::Incomplete { rank: 1, distrust: true, .. }), "{error}");
        // The port may belong to another job.
        for part in ["KILN_JOB_SECRET", "another job", "MASTER_PORT"] {
            assert!(error.to_string().contains(part), "{error}");
        }

        let error = refused(&other, |options| options.job = "another".into());
        assert!(matches!(error, JoinError::Refused { rank: 1, .. }), "{error}");
        let says = "rank 0 is of the job \"kiln\", and rank 1 of \"another\"";
        assert!(error.to_string().contains(says), "{error}");

        let error = refused(&other, |options| options.rank = 0);
        assert!(matches!(error, JoinError::Listen { .. }), "{error}");
    });
}

/// The rank knows the secret and belongs to this job, so no other rank with its number will arrive. The
/// others stop waiting for it.
#[test]
fn different_settings_end_the_wait_of_all_ranks() {
    let changes: [(Change, &str); 3] = [
        (|options| options.world_size = 3, "rank 0 expects 2 ranks, and rank 1 expects 3"),
        (
            |options| (options.world_size, options.rank) = (5, 4),
            "rank 0 expects 2 ranks, and rank 4 expects 5",
        ),
        (
            |options| options.seal = Seal::Encrypt,
            "rank 0 has comm.seal = \"off\", and rank 1 has \"encrypt\"",
        ),
    ];
    for (change, says) in changes {
        let ([first, second], _) = pair();
        let [kept, other] = thread::scope(|scope| {
            let kept = scope.spawn(|| TcpCommunicator::join(first).unwrap_err());
            let other = refused(&second, change);
            [kept.join().unwrap(), other]
        });
        assert!(matches!(other, JoinError::Refused { .. }), "{other}");
        assert!(other.to_string().contains(says), "{other}");
        assert!(kept.to_string().contains(" at 127.0.0.1 was refused: "), "{kept}");
        assert!(kept.to_string().contains(says), "{kept}");
    }
}

/// Returns rank 0's message about a rank 1 that joins with other options, after waiting long enough for that
/// rank to arrive.
fn waited_for(options: [JoinOptions; 2], change: Change, says: &str) -> String {
    let mut text = String::new();
    for seconds in [1, 4, 16, 64] {
        let [mut first, mut second] = options.clone();
        let address = free_address();
        (first.port, second.port) = (address.port(), address.port());
        first.timeout = Duration::from_secs(seconds);
        second.timeout = Duration::from_secs(seconds);
        let kept = thread::scope(|scope| {
            scope.spawn(|| refused(&second, change));
            TcpCommunicator::join(first).unwrap_err()
        });
        assert!(matches!(&kept, JoinError::Incomplete { missing, .. } if missing == &[1]), "{kept}");
        text = kept.to_string();
        if text.contains(says) {
            break;
        }
    }
    text
}

/// Anyone can connect without the secret, or with an open one. Such callers end no job; they are listed if no
/// genuine rank arrives.
#[test]
fn refused_strangers_are_listed_at_the_end() {
    let (options, _) = pair();
    let says = "does not know this job's secret";
    let text = waited_for(options, |options| options.secret = Secret::new("none"), says);
    for part in [says, "rank 1", "127.0.0.1", "KILN_JOB_SECRET"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let (mut options, _) = pair();
    options.iter_mut().for_each(|options| options.secret = Secret::open("none"));
    let says = "rank 0 expects 2 ranks, and rank 1 expects 3";
    let text = waited_for(options, |options| options.world_size = 3, says);
    assert!(text.contains(says) && text.contains(" at 127.0.0.1 was refused: "), "{text}");
}

/// For example, another program listens at that port.
#[test]
fn silent_and_closed_connections_are_explained() {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let port = listener.local_addr().unwrap().port();
    let error = |milliseconds| {
        let mut options = JoinOptions::new(1, 2, "127.0.0.1", port);
        options.timeout = Duration::from_millis(milliseconds);
        TcpCommunicator::join(options).unwrap_err().to_string()
    };
    let silent = error(300);
    assert!(silent.contains("it did not answer in time"), "{silent}");
    let ended = AtomicBool::new(false);
    let rude = thread::scope(|scope| {
        scope.spawn(|| {
            for stream in listener.incoming() {
                drop(stream);
                if ended.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
        let rude = error(1000);
        ended.store(true, Ordering::Relaxed);
        drop(TcpStream::connect(("127.0.0.1", port)));
        rude
    });
    assert!(rude.contains("it hung up"), "{rude}");
}
