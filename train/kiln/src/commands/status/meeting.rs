//! The status of a run whose ranks have not all arrived: which are present, and which are missing.

use std::path::Path;

use kiln_observe::status::{Look, ProcessLook, RankLook, State, ranks_of};
use kiln_train::metrics::unix_time;
use kiln_train::run::{Waiting, waiting};

/// Seconds after which waiting for ranks is suspicious; the same as for a wait outside of steps.
const SUSPECT: f64 = 30.0;

const SHOWN: usize = 256;

/// Returns the status of the run in `out`, if some of its ranks are waiting for others to arrive.
pub(super) fn look(out: &Path) -> Option<Look> {
    let waiting = waiting(out);
    let world_size = waiting.first()?.world_size;
    Some(describe(out, &waiting, world_size, unix_time()))
}

fn describe(out: &Path, waiting: &[Waiting], world_size: usize, now: f64) -> Look {
    let of = |rank: usize| waiting.iter().find(|waiting| waiting.rank == rank);
    let host = of(0);
    let come = |rank: usize| host.and_then(|host| host.come.get(&rank));
    let ranks = || 0..world_size.min(1 << 20);
    let there: Vec<_> = ranks().filter(|rank| come(*rank).is_some()).collect();
    let started: Vec<_> = ranks().filter(|rank| come(*rank).is_none() && of(*rank).is_some()).collect();
    let missing: Vec<_> = ranks().filter(|rank| come(*rank).is_none() && of(*rank).is_none()).collect();
    let since = waiting.iter().map(|waiting| waiting.since).fold(now, f64::min);
    let until = waiting.iter().map(|waiting| waiting.until).fold(f64::INFINITY, f64::min);
    let (waited, left) = (now - since, (until - now).max(0.0));
    let rendezvous = waiting.first().map_or("", |waiting| &waiting.rendezvous);
    let mut parts = Vec::new();
    if !there.is_empty() {
        let have = if there.len() == 1 { "has" } else { "have" };
        parts.push(format!("{} {have} reached the rendezvous at {rendezvous}", ranks_of(&there)));
    }
    if !started.is_empty() {
        let have = if started.len() == 1 { "is running but has" } else { "are running but have" };
        parts.push(format!("{} {have} not reached the rendezvous at {rendezvous}", ranks_of(&started)));
    }
    if !missing.is_empty() {
        let are = if missing.len() == 1 { "is" } else { "are" };
        let seen = if host.is_some() { "" } else { ", as far as is known here: only rank 0 sees arrivals" };
        parts.push(format!("{} {are} missing{seen}", ranks_of(&missing)));
    }
    parts.push(format!("the wait has lasted {waited:.0} s; comm.join_timeout_s ends it in {left:.0} s"));
    let rank_look = |rank: usize| {
        let silent = match (come(rank), of(rank)) {
            (Some(address), _) => format!("has arrived, from {address}"),
            (None, Some(Waiting { process, .. })) => {
                format!("runs on {} as process {}, but has not reached rank 0", process.host, process.pid)
            }
            (None, None) => "has not arrived".to_owned(),
        };
        RankLook { rank, silent: Some(silent), ..RankLook::default() }
    };
    let process = |waiting: &Waiting| ProcessLook {
        host: waiting.process.host.clone(),
        process: waiting.process.pid,
        ranks: vec![waiting.rank],
        threads: None,
    };
    Look {
        run: out.display().to_string(),
        state: if waited < SUSPECT { State::Starting } else { State::Suspicion },
        text: format!("ranks are waiting for each other: {}", parts.join("; ")),
        culprits: [started, missing].concat(),
        step: None,
        steps: None,
        saved: None,
        loss: None,
        tokens_per_s: None,
        deadline_s: None,
        ranks: if world_size <= SHOWN { ranks().map(rank_look).collect() } else { Vec::new() },
        processes: waiting.iter().map(process).collect(),
    }
}

#[cfg(test)]
mod tests {
    use kiln_train::process::ProcessId;

    use super::*;

    #[test]
    fn who_is_there_and_who_is_missing_is_said() {
        let rank = |rank: usize, come: &[usize]| Waiting {
            process: ProcessId::this(),
            rank,
            world_size: 5,
            rendezvous: "node7:29500".to_owned(),
            since: 1000.0,
            until: 1300.0,
            come: come.iter().map(|rank| (*rank, [10, 0, 0, *rank as u8].into())).collect(),
        };
        let look = describe(Path::new("run"), &[rank(0, &[0, 1]), rank(3, &[])], 5, 1012.0);
        assert_eq!((look.state, &look.culprits[..]), (State::Starting, &[3, 2, 4][..]));
        let said = "ranks are waiting for each other: ranks 0-1 have reached the rendezvous at node7:29500; rank 3 is \
                    running but has not reached the rendezvous at node7:29500; ranks 2, 4 are missing; the wait \
                    has lasted 12 s; comm.join_timeout_s ends it in 288 s";
        assert_eq!(look.text, said);
        let silent: Vec<_> = look.ranks.iter().map(|rank| rank.silent.as_deref().unwrap_or("")).collect();
        assert_eq!(
            silent[..3],
            ["has arrived, from 10.0.0.0", "has arrived, from 10.0.0.1", "has not arrived"]
        );
        assert!(silent[3].ends_with("but has not reached rank 0"), "{silent:?}");
        let look = describe(Path::new("run"), &[rank(3, &[])], 5, 1031.0);
        assert_eq!(look.state, State::Suspicion);
        assert!(look.text.contains("ranks 0-2, 4 are missing, as far as is known here"), "{}", look.text);
    }
}
