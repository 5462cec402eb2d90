//! A rank whose rendezvous has gone silent.

use super::*;
use crate::label::{Label, Phase};
use crate::operation::Operation;
use crate::tcp::handshake::{self, Claim, Limits, Purpose};
use crate::tcp::options::{Seal, Secret};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::thread;

const PATIENCE: Duration = Duration::from_secs(60);

fn connected() -> [Channel; 2] {
    let secret = Secret::new("of this test");
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let accepted = Arc::new(listener.accept().unwrap().0);
    thread::scope(|scope| {
        let here = scope.spawn(|| handshake::examine(accepted, &secret).unwrap().welcome());
        let purpose = Purpose::Data { session: 0, group: 0 };
        let claim = Claim { job: "kiln".into(), rank: 1, seal: Seal::Off, purpose };
        let limits = Limits { hello: PATIENCE, answer: PATIENCE };
        let there = handshake::call(stream, claim, &secret, limits).unwrap();
        [here.join().unwrap().unwrap(), there]
    })
}

#[test]
fn a_lost_connection_reports_the_time_waited() {
    let [_silent, channel] = connected();
    let shared = RankShared::new(1, 3, "node0", 8, Arc::default(), None);
    let control = Control::start(channel, shared, "tcp", None).unwrap();
    let group = GroupName { number: 0, name: "world".into(), ranks: vec![0, 1, 2] };
    let site = CallSite {
        group: "world".into(),
        rank: 1,
        sequence: 7,
        operation: Operation::Barrier,
        label: Label::new("step", Phase::Other),
    };
    let kind = TroubleKind::Lost { peer: 2, left: false, reason: "reset".to_owned() };
    let asked = Instant::now();
    let cause = control.report(Trouble { group, site, kind });
    let Cause::Error(CommError::TimedOut { waited, verdict, .. }) = cause else { panic!("{cause:?}") };
    assert!(!waited.is_zero() && waited <= asked.elapsed(), "{waited:?}");
    assert_eq!((verdict.finding, verdict.culprits.as_slice()), (Finding::Silent, &[0][..]));
}
