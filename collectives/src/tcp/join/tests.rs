use super::*;
use crate::sync::lock;
use crate::tcp::handshake::Caller;
use crate::tcp::message::ToRendezvous;
use crate::tcp::options::Seal;
use std::io::Write;
use std::sync::Mutex;

const PATIENCE: Duration = Duration::from_secs(120);

fn options(world_size: usize) -> Vec<JoinOptions> {
    let listener = Arc::new(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    let port = listener.local_addr().unwrap().port();
    let options = (0..world_size).map(|rank| {
        let mut options = JoinOptions::new(rank, world_size, "127.0.0.1", port);
        options.listener = (rank == 0).then(|| Arc::clone(&listener));
        options.linger = PATIENCE;
        options.timeout = PATIENCE;
        options
    });
    options.collect()
}

#[test]
fn peers_that_answer_late_are_all_let_in() {
    const PEERS: usize = 300;
    allow_descriptors(PEERS);
    let options = options(PEERS).swap_remove(0);
    let listener = options.listener.as_ref().unwrap().try_clone().unwrap();
    let address = listener.local_addr().unwrap();
    let welcomed = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&welcomed);
    let admit = move |caller: Caller| {
        let rank = caller.claim.rank;
        lock(&noted).push((rank, caller.welcome().unwrap()));
    };
    let _door = Listener::open(listener, &options, Arc::new(admit)).unwrap();
    let streams: Vec<TcpStream> = (0..PEERS).map(|_| TcpStream::connect(address).unwrap()).collect();
    for (rank, stream) in streams.into_iter().enumerate() {
        let purpose = Purpose::Data { session: 0, group: 0 };
        let claim = Claim { job: "kiln".into(), rank, seal: Seal::Off, purpose };
        let limits = Limits { hello: PATIENCE, answer: PATIENCE };
        handshake::call(stream, claim, &options.secret, limits).unwrap();
    }
    let mut ranks: Vec<usize> = lock(&welcomed).iter().map(|(rank, _)| *rank).collect();
    ranks.sort_unstable();
    assert_eq!(ranks, (0..PEERS).collect::<Vec<_>>());
}

/// The ranks of a large job register, receive each other's addresses, and say goodbye.
#[test]
fn a_thousand_ranks_meet() {
    const RANKS: usize = 1024;
    allow_descriptors(2 * RANKS);
    let start = |options: JoinOptions| {
        let join = move || {
            let rendezvous = (options.rank == 0).then(|| host_rendezvous(&options).unwrap());
            let since = Instant::now();
            let joining = Joining { options: &options, since, until: since + options.timeout };
            let (mut channel, _pending, _listener) = joining.register(&[options.port]).unwrap();
            let (session, ranks) = joining.wait_for_all(&mut channel).unwrap();
            let goodbye = frame::encode(&ToRendezvous::Goodbye, 64).unwrap();
            channel.writer.write_all(&goodbye).unwrap();
            drop(channel);
            drop(rendezvous);
            (session, ranks.len())
        };
        thread::Builder::new().stack_size(256 << 10).spawn(join).unwrap()
    };
    let ranks: Vec<_> = options(RANKS).into_iter().map(start).collect();
    let met: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    assert_eq!(met, vec![(met[0].0, RANKS); RANKS]);
}
