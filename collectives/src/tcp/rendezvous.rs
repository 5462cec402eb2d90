//! Where the ranks of a run meet, kept by rank 0: it tells them how to reach each other, and finds
//! out what happened when one of them cannot go on.

use super::channel::{Reader, Writer};
use super::doorway::Doorway;
use super::frame::{self, MEMBER_LIMIT};
use super::handshake::{Caller, Purpose};
use super::inquiry;
use super::message::{CalledOff, Cause, GroupNumber, MemberInfo, ToRank, ToRendezvous, Trouble};
use super::options::JoinOptions;
use super::refused::{Refused, Why};
use super::warnings::Warnings;
use crate::flight::Flight;
use crate::sync::{lock, wait_until};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::net::{Shutdown, SocketAddr, TcpListener};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

/// How often each side says that it is alive.
pub(super) const BEAT: Duration = Duration::from_secs(1);

/// How long a write to a rank may take before the message is given up: a stopped rank reads
/// nothing, and must not hold up the others.
const WRITE_TIMEOUT: Duration = Duration::from_secs(2);

/// How long rank 0, when the run has failed and all have been told, waits for them to end: some may be
/// stopped, or at work on something that takes long.
const FAREWELL: Duration = Duration::from_secs(1);

/// The rendezvous of one run.
pub(super) struct Rendezvous {
    hub: Arc<Hub>,
    /// Declared after nothing that needs it: dropping it closes the door.
    door: Doorway,
    linger: Duration,
}

/// What all threads of the rendezvous share.
pub(super) struct Hub {
    pub(super) state: Mutex<State>,
    pub(super) changed: Condvar,
    troubles: Mutex<mpsc::Sender<Event>>,
    session: u64,
    /// The port that the ranks were told, if they meet near it.
    near: Option<u16>,
    /// Whether anyone can work out the secret, so that ranks of another job may know it.
    is_open: bool,
    /// About callers that know the secret.
    warnings: Warnings,
}

pub(super) struct State {
    pub(super) seats: Vec<Seat>,
    /// Why the world has failed.
    world: Option<Cause>,
    /// Why single groups have failed.
    groups: HashMap<GroupNumber, Cause>,
    /// Answers to the question of each number, and when they came.
    pub(super) reports: HashMap<u64, BTreeMap<usize, (Instant, Flight)>>,
    next_request: u64,
    /// What ranks that gave up have said themselves.
    pub(super) aborts: BTreeMap<usize, Cause>,
    joined: bool,
    /// Why nobody waits any longer until all ranks are here.
    called_off: Option<CalledOff>,
    /// Who came in the place of a rank that is not here, at most one for each.
    refused: BTreeMap<usize, Refused>,
    /// Rank 0 is done: threads end.
    closed: bool,
}

impl State {
    /// Whether the world or a group of it has failed.
    fn has_failed(&self) -> bool {
        self.world.is_some() || !self.groups.is_empty()
    }
}

/// What the rendezvous knows of a rank.
pub(super) enum Seat {
    Empty,
    Present {
        writer: Arc<Mutex<Writer>>,
        info: MemberInfo,
        heard: Instant,
    },
    /// It took its leave.
    Left,
    /// Its connection ended without a goodbye.
    Gone,
}

/// What the overseer acts on, one at a time.
enum Event {
    Trouble { rank: usize, trouble: Trouble },
    Gone { rank: usize },
}

/// What may be behind a rank that comes twice, where no secret tells jobs apart.
const OTHER_JOB: &str = "; if one of them is of another job, give each job a port (MASTER_PORT), a name \
                         (TORCHELASTIC_RUN_ID, --rdzv-id) or a secret (KILN_JOB_SECRET) of its own";

/// Callers that were refused and are told of when ranks are missing.
const TOLD: usize = 4;

/// What a dead rank is said to have done.
pub(super) const DIED: &str = "died: its connection closed without a goodbye";

impl Rendezvous {
    /// Opens the door for the ranks of `options`. They are told who is missing when its time is up.
    /// Dropping the rendezvous gives ranks that are still there a while to learn how the run ended.
    pub(super) fn open(listener: TcpListener, options: &JoinOptions) -> io::Result<Rendezvous> {
        let JoinOptions { world_size, timeout, linger, .. } = *options;
        let mut session = [0; 8];
        getrandom::fill(&mut session).map_err(io::Error::other)?;
        let (troubles, events) = mpsc::channel();
        let hub = Arc::new(Hub {
            state: Mutex::new(State {
                seats: (0..world_size).map(|_| Seat::Empty).collect(),
                world: None,
                groups: HashMap::new(),
                reports: HashMap::new(),
                next_request: 0,
                aborts: BTreeMap::new(),
                joined: false,
                called_off: None,
                refused: BTreeMap::new(),
                closed: false,
            }),
            changed: Condvar::new(),
            troubles: Mutex::new(troubles),
            session: u64::from_ne_bytes(session),
            near: options.near(),
            is_open: options.secret.is_open(),
            warnings: Warnings::new(),
        });
        let (admitting, noting) = (Arc::clone(&hub), Arc::clone(&hub));
        let admit = Arc::new(move |caller| admitting.admit(caller));
        let note = Arc::new(move |refused| noting.note(refused));
        let door = Doorway::open_noting(listener, options, admit, note)?;
        let overseer = Arc::clone(&hub);
        thread::Builder::new()
            .name("kiln-rendezvous".into())
            .spawn(move || overseer.oversee(&events, timeout))?;
        let beating = Arc::clone(&hub);
        thread::Builder::new().name("kiln-beat".into()).spawn(move || beating.beat())?;
        Ok(Rendezvous { hub, door, linger })
    }

    /// Where it listens.
    pub(super) fn address(&self) -> SocketAddr {
        self.door.address()
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        let state = lock(&self.hub.state);
        let empty =
            |state: &State| !state.seats.iter().any(|seat| matches!(seat, Seat::Present { .. }));
        let over = |state: &State| empty(state) || state.has_failed();
        let mut state = wait_until(&self.hub.changed, state, self.linger, over);
        if state.has_failed() {
            // Nobody learns more here than what has been said.
            state = wait_until(&self.hub.changed, state, FAREWELL.min(self.linger), empty);
        }
        state.closed = true;
        for seat in &state.seats {
            if let Seat::Present { writer, .. } = seat {
                let _ = lock(writer).stream.shutdown(Shutdown::Both);
            }
        }
        drop(state);
        self.hub.changed.notify_all();
    }
}

impl Hub {
    /// Gives a caller its seat and starts to listen to it.
    fn admit(self: &Arc<Hub>, caller: Caller) {
        let rank = caller.claim.rank;
        let Purpose::Control { world_size, node, near, port } = caller.claim.purpose.clone() else {
            return caller.refuse("this is the rendezvous, not a rank", false);
        };
        let Ok(from) = caller.address() else { return };
        let info = MemberInfo { address: SocketAddr::new(from.ip(), port), node };
        if let (Some(own), Some(told)) = (self.near, near)
            && own != told
        {
            self.warnings.warn(format!(
                "refused rank {rank} of another job from {from}: its ranks were told port {told}, and those of \
                 this job port {own}"
            ));
            let text = format!(
                "it keeps a job whose ranks were told port {own}, and this rank was told port {told}"
            );
            // Its own rendezvous may be at the next port.
            return caller.refuse(&text, true);
        }
        let mut state = lock(&self.state);
        let expected = state.seats.len();
        if world_size != expected || rank >= expected {
            drop(state);
            let (from, why) = (from.ip(), Why::other_world([(0, expected), (rank, world_size)]));
            self.warnings.warn(format!("refused rank {rank} at {from}: {}", why.reason()));
            caller.refuse(why.reason(), false);
            return self.note(Refused { rank, from, why });
        }
        if !matches!(state.seats[rank], Seat::Empty) {
            let mut text = format!("rank {rank} is here already");
            if let Seat::Present { info, .. } = &state.seats[rank] {
                text.push_str(&format!(", from {}", info.address.ip()));
            }
            drop(state);
            if self.is_open {
                text.push_str(OTHER_JOB);
            }
            self.warnings.warn(format!("refused a second rank {rank} from {from}: {text}"));
            return caller.refuse(&text, true);
        }
        let Ok(channel) = caller.welcome() else { return };
        let _ = channel.stream().set_write_timeout(Some(WRITE_TIMEOUT));
        let (reader, writer) = (channel.reader, channel.writer);
        let writer = Arc::new(Mutex::new(writer));
        state.seats[rank] = Seat::Present { writer, info, heard: Instant::now() };
        self.announce(&mut state);
        drop(state);
        self.changed.notify_all();
        let hub = Arc::clone(self);
        let listen = move || hub.listen(rank, reader);
        if let Err(error) = thread::Builder::new().name(format!("kiln-seat-{rank}")).spawn(listen) {
            tracing::warn!("no thread to listen to rank {rank}: {error}");
            self.leave(rank);
        }
    }

    /// Tells all ranks how to reach each other once they are here, or that nobody waits any longer.
    fn announce(&self, state: &mut State) {
        if let Some(why) = state.called_off.clone() {
            return send_all(state, &ToRank::CalledOff(why));
        }
        // Not worth a copy of those who are here, once for each who comes.
        if !state.seats.iter().all(|seat| matches!(seat, Seat::Present { .. })) {
            return;
        }
        let member = |seat: &Seat| match seat {
            Seat::Present { info, .. } => Some(info.clone()),
            _ => None,
        };
        let Some(members) = state.seats.iter().map(member).collect::<Option<Vec<_>>>() else {
            return;
        };
        state.joined = true;
        send_all(state, &ToRank::Joined { session: self.session, members });
    }

    /// Reads what a rank says until its connection ends.
    fn listen(&self, rank: usize, mut reader: Reader) {
        let mut said_goodbye = false;
        loop {
            let message: ToRendezvous = match frame::read(&mut reader, MEMBER_LIMIT) {
                Ok(message) => message,
                Err(frame::FrameError::Io(_)) => break,
                Err(error) => {
                    let text = format!("rank {rank} sent {error}; its connection is closed");
                    self.warnings.warn(text);
                    break;
                }
            };
            if let Seat::Present { heard, .. } = &mut lock(&self.state).seats[rank] {
                *heard = Instant::now();
            }
            match message {
                ToRendezvous::Beat => {}
                ToRendezvous::Goodbye => said_goodbye = true,
                ToRendezvous::Stop => self.stop(rank),
                ToRendezvous::Trouble(trouble) => {
                    if let Some(cause) = inquiry::own_words(rank, &trouble) {
                        // Also for an inquiry that is under way about what this rank has left behind.
                        lock(&self.state).aborts.entry(rank).or_insert(cause);
                        self.changed.notify_all();
                    }
                    self.raise(Event::Trouble { rank, trouble });
                }
                ToRendezvous::Report { request, flight } => {
                    if let Some(answers) = lock(&self.state).reports.get_mut(&request) {
                        answers.insert(rank, (Instant::now(), *flight));
                    }
                    self.changed.notify_all();
                }
            }
        }
        let mut state = lock(&self.state);
        // Until all are here a rank may go and come again; after that its place stays empty.
        state.seats[rank] = match (said_goodbye, state.joined) {
            (true, _) => Seat::Left,
            (false, false) => Seat::Empty,
            (false, true) => Seat::Gone,
        };
        let died = matches!(state.seats[rank], Seat::Gone);
        drop(state);
        self.changed.notify_all();
        if died {
            self.raise(Event::Gone { rank });
        }
    }

    /// Tells all ranks that `rank` was asked to stop. Once all ranks are here, they agree on a stop themselves.
    fn stop(&self, rank: usize) {
        self.call_off(&mut lock(&self.state), CalledOff::Stopped { by: rank });
        self.changed.notify_all();
    }

    fn call_off(&self, state: &mut State, why: CalledOff) {
        if !state.joined && state.called_off.is_none() {
            state.called_off = Some(why.clone());
            send_all(state, &ToRank::CalledOff(why));
        }
    }

    /// Notes who was refused. A rank of this job that was started with other settings will not come again, so
    /// nobody waits for it any longer. Where anyone can work out the secret it may be a rank of another job,
    /// which ends nothing.
    fn note(&self, refused: Refused) {
        let mut state = lock(&self.state);
        let rank = refused.rank;
        if !matches!(state.seats.get(rank), None | Some(Seat::Empty)) {
            return;
        }
        match refused.why {
            Why::Settings(_) if !self.is_open => {
                self.call_off(&mut state, CalledOff::Refused(refused));
            }
            _ if rank >= state.seats.len() => {}
            // What is proven says more.
            Why::Secret => {
                state.refused.entry(rank).or_insert(refused);
            }
            Why::Job(_) | Why::Settings(_) => {
                state.refused.insert(rank, refused);
            }
        }
        drop(state);
        self.changed.notify_all();
    }

    fn leave(&self, rank: usize) {
        lock(&self.state).seats[rank] = Seat::Empty;
        self.changed.notify_all();
    }

    fn raise(&self, event: Event) {
        // The overseer outlives the seats unless the run is over.
        let _ = lock(&self.troubles).send(event);
    }

    /// Waits until all ranks are here, then looks into one trouble after the other.
    fn oversee(&self, events: &mpsc::Receiver<Event>, timeout: Duration) {
        let here = |state: &State| state.joined || state.closed || state.called_off.is_some();
        let state = wait_until(&self.changed, lock(&self.state), timeout, here);
        if !here(&state) {
            let absent = |(_, seat): &(usize, &Seat)| !matches!(seat, Seat::Present { .. });
            let missing = state.seats.iter().enumerate().filter(absent).map(|(rank, _)| rank);
            let missing: Vec<usize> = missing.collect();
            let refused = missing.iter().filter_map(|rank| state.refused.get(rank).cloned());
            let refused = refused.take(TOLD).collect();
            send_all(&state, &ToRank::Incomplete { missing, refused });
            return;
        }
        if state.called_off.is_some() {
            return;
        }
        drop(state);
        while !lock(&self.state).closed {
            match events.recv_timeout(BEAT) {
                Ok(Event::Trouble { rank, trouble }) => self.look_into(rank, trouble),
                Ok(Event::Gone { rank }) => self.fail(None, inquiry::death(rank)),
                Err(mpsc::RecvTimeoutError::Timeout) => {}
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn look_into(&self, rank: usize, trouble: Trouble) {
        let number = inquiry::group_of(&trouble);
        let known = {
            let state = lock(&self.state);
            let of_group = number.and_then(|number| state.groups.get(&number));
            of_group.or(state.world.as_ref()).is_some()
        };
        // Whoever complains late has been told, or is about to read it.
        if known {
            return;
        }
        let (group, cause) = inquiry::find_cause(self, rank, trouble);
        self.fail(group, cause);
    }

    /// Tells all ranks, unless they know of an earlier cause.
    fn fail(&self, group: Option<GroupNumber>, cause: Cause) {
        let mut state = lock(&self.state);
        match group {
            None if state.world.is_some() => return,
            None => state.world = Some(cause.clone()),
            Some(number) => {
                state.groups.insert(number, cause.clone());
            }
        }
        send_all(&state, &ToRank::Failed { group, cause });
        drop(state);
        self.changed.notify_all();
    }

    /// Numbers a question and asks it of all ranks.
    pub(super) fn ask(&self, question: impl Fn(u64) -> ToRank) -> u64 {
        let mut state = lock(&self.state);
        let request = state.next_request;
        state.next_request += 1;
        state.reports.insert(request, BTreeMap::new());
        send_all(&state, &question(request));
        request
    }

    fn beat(&self) {
        let mut state = lock(&self.state);
        while !state.closed {
            send_all(&state, &ToRank::Beat);
            state = wait_until(&self.changed, state, BEAT, |state| state.closed);
        }
    }
}

/// Sends a message to all ranks that are there. A rank that cannot take it is not waited for.
fn send_all(state: &State, message: &ToRank) {
    let frame = match frame::encode(message, MEMBER_LIMIT) {
        Ok(frame) => frame,
        Err(error) => return tracing::warn!("the rendezvous cannot send: {error}"),
    };
    for seat in &state.seats {
        if let Seat::Present { writer, .. } = seat {
            let _ = lock(writer).deliver(&frame);
        }
    }
}
