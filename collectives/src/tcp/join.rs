//! From options to a world: find the rendezvous, take a seat, wait for the others, connect to them.

use super::channel::{Channel, Reader, Writer};
use super::control::Control;
use super::descriptors;
use super::doorway::Doorway;
use super::end::TcpEnd;
use super::frame::{self, FrameError, MEMBER_LIMIT};
use super::handshake::{self, Claim, HandshakeError, Limits, Purpose};
use super::listen::{
    LISTEN_PATIENCE, listen_patiently, open_rendezvous, ports_of_rendezvous, resolve,
};
use super::lobby::Lobby;
use super::mesh;
use super::message::{CalledOff, GroupName, MemberInfo, ToRank, ToRendezvous};
use super::options::{JoinError, JoinOptions, Ring, Seal, Secret};
use super::pause::{LOOK_EVERY, PAUSE, pause_for};
use super::refused::Refused;
use super::rendezvous::Rendezvous;
use crate::backend::{Backend, RankShared};
use crate::process_group::ProcessGroup;
use crate::recorder::Recorder;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

/// How long one attempt to connect may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// How long the rendezvous may take to say its first word, at first and at most. It may be busy, or another
/// program that never says anything.
const HELLO: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(40)];

/// How long it may take to answer a proof.
const ANSWER: Duration = Duration::from_secs(60);

/// How long a rendezvous that hangs up on this rank's proof is tried again.
const DISTRUST: Duration = Duration::from_secs(10);

/// What a rank knows of its world once it has joined; shared by its groups.
pub(super) struct World {
    pub(super) control: Control,
    pub(super) members: Vec<MemberInfo>,
    pub(super) job: String,
    pub(super) secret: Secret,
    pub(super) seal: Seal,
    pub(super) session: u64,
    pub(super) lobby: Arc<Lobby>,
    /// Machine of this rank.
    pub(super) node: String,
    pub(super) ring: Ring,
    /// Whether ranks on one machine may read each other's memory.
    pub(super) read_memory: bool,
    /// Whether all ranks are in this process.
    pub(super) in_one_process: bool,
    /// How long the ranks of a new group may take to connect.
    pub(super) timeout: Duration,
    /// Closed last of all.
    pub(super) _door: Doorway,
}

impl ProcessGroup<TcpEnd> {
    /// Joins a world as one process per rank: blocks until all ranks are here and connected.
    ///
    /// # Errors
    ///
    /// [`JoinError`], after [`JoinOptions::timeout`] at the latest.
    pub fn join(options: JoinOptions) -> Result<ProcessGroup<TcpEnd>, JoinError> {
        let (rank, world_size) = (options.rank, options.world_size);
        if rank >= world_size {
            return Err(JoinError::Rank { rank, world_size });
        }
        check_secret(&options)?;
        descriptors::allow(world_size);
        let since = Instant::now();
        let until = since + options.timeout;
        let rendezvous = if rank == 0 { Some(keep(&options)?) } else { None };
        Caller { options: &options, since, until }.join(rendezvous).map(ProcessGroup::start)
    }
}

/// Joins a world whose ranks are all in this process and talk over the loopback interface, on a
/// port that the system chooses: for tests and benchmarks. `configure` changes each rank's options.
///
/// # Errors
///
/// As for [`TcpCommunicator::join`](super::TcpCommunicator); rank 0 does not linger.
pub fn loopback(
    world_size: usize,
    configure: impl Fn(&mut JoinOptions),
) -> Result<Vec<ProcessGroup<TcpEnd>>, JoinError> {
    let host = Ipv4Addr::LOCALHOST;
    let listener = TcpListener::bind((host, 0)).map_err(io_error(0, "open a port"))?;
    let port = listener.local_addr().map_err(io_error(0, "open a port"))?.port();
    let listener = Arc::new(listener);
    let options = (0..world_size).map(|rank| {
        let mut options = JoinOptions::new(rank, world_size, host.to_string(), port);
        options.linger = Duration::ZERO;
        options.in_one_process = true;
        options.listener = (rank == 0).then(|| Arc::clone(&listener));
        configure(&mut options);
        options
    });
    let options: Vec<JoinOptions> = options.collect();
    thread::scope(|scope| {
        let joining: Vec<_> = options
            .into_iter()
            .map(|options| scope.spawn(|| ProcessGroup::join(options)))
            .collect();
        let panicked = || io_error(0, "join")(io::Error::other("a thread panicked"));
        joining.into_iter().map(|rank| rank.join().unwrap_or_else(|_| Err(panicked()))).collect()
    })
}

/// Refuses a secret that anyone can work out, where others than this machine can reach the ranks or where
/// it is to protect anything.
fn check_secret(options: &JoinOptions) -> Result<(), JoinError> {
    let (rank, seal) = (options.rank, options.seal);
    if !options.secret.is_open() {
        return Ok(());
    }
    if !seal.is_off() {
        return Err(JoinError::SealWithoutSecret { rank, seal });
    }
    if options.open {
        return Ok(());
    }
    match resolve(&options.host, options.port) {
        Ok(hosts) if !hosts.is_empty() && hosts.iter().all(is_loopback) => Ok(()),
        Err(source) => Err(JoinError::Resolve { host: options.host.clone(), source }),
        Ok(_) => Err(JoinError::OpenSecret { rank, host: options.host.clone() }),
    }
}

fn is_loopback(address: &IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

/// Opens the rendezvous on rank 0.
fn keep(options: &JoinOptions) -> Result<Rendezvous, JoinError> {
    let listener = match &options.listener {
        Some(listener) => listener.try_clone().map_err(io_error(0, "use its port"))?,
        None => open_rendezvous(options)?,
    };
    Rendezvous::open(listener, options).map_err(io_error(options.rank, "open the rendezvous"))
}

/// A rank on its way into the world.
struct Caller<'a> {
    options: &'a JoinOptions,
    since: Instant,
    until: Instant,
}

impl Caller<'_> {
    fn join(&self, rendezvous: Option<Rendezvous>) -> Result<TcpEnd, JoinError> {
        let options = self.options;
        let rank = options.rank;
        let ports = match &rendezvous {
            Some(rendezvous) => vec![rendezvous.address().port()],
            None => ports_of_rendezvous(options),
        };
        let (mut channel, lobby, door) = self.take_seat(&ports)?;
        let (session, members) = self.wait_for_all(&mut channel)?;
        lobby.open(session);
        let shared = Arc::new(RankShared {
            world_rank: rank,
            world_size: options.world_size,
            recorder: Arc::new(Recorder::new(options.recorder_capacity)),
            on_worker_start: options.on_worker_start.clone(),
        });
        let control = Control::start(channel, Arc::clone(&shared), TcpEnd::NAME, rendezvous)
            .map_err(io_error(rank, "start its control threads"))?;
        let world = Arc::new(World {
            control,
            members,
            job: options.job.clone(),
            secret: options.secret.clone(),
            seal: options.seal,
            session,
            lobby,
            node: options.node.clone(),
            ring: options.ring,
            read_memory: options.read_memory,
            in_one_process: options.in_one_process,
            timeout: options.timeout,
            _door: door,
        });
        let ranks = (0..options.world_size).collect();
        let group = GroupName { number: 0, name: "world".into(), ranks };
        let wire = mesh::connect(&world, &group, rank, self.until).map_err(|error| {
            let reason = error.to_string();
            world.control.abort(&group, rank, &format!("it cannot connect: {reason}"));
            self.incomplete(reason, Vec::new())
        })?;
        Ok(TcpEnd::new(world, shared, group, rank, wire))
    }

    /// Connects to the rendezvous, however often it takes, and is let in.
    fn take_seat(&self, ports: &[u16]) -> Result<(Channel, Arc<Lobby>, Doorway), JoinError> {
        let options = self.options;
        let (mut pause, mut hello) = (PAUSE[0], HELLO[0]);
        let mut reason = "nobody listens there".to_owned();
        let mut distrusted: Option<Instant> = None;
        loop {
            let hosts = match resolve(&options.host, options.port) {
                Ok(hosts) => hosts,
                Err(error) => {
                    reason = format!("cannot find {}: {error}", options.host);
                    Vec::new()
                }
            };
            let addresses = hosts.iter().flat_map(|host| ports.iter().map(|port| (*host, *port)));
            let mut distrust = false;
            let mut refusal = None;
            for (host, port) in addresses {
                let address = SocketAddr::new(host, port);
                let stream = match TcpStream::connect_timeout(&address, self.patience()) {
                    Ok(stream) => stream,
                    Err(error) => {
                        reason = format!("cannot connect to it: {error}");
                        continue;
                    }
                };
                let listener = self.listen_beside(&stream)?;
                match self.introduce(stream, listener, hello) {
                    Ok(seat) => return Ok(seat),
                    Err(HandshakeError::Refused(why, false)) => {
                        let (rank, address) = (options.rank, address.to_string());
                        return Err(JoinError::Refused { rank, address, reason: why });
                    }
                    Err(HandshakeError::Refused(why, true)) => {
                        refusal = Some(format!("{address} refuses this rank: {why}"));
                    }
                    Err(HandshakeError::Secret) => {
                        distrust = true;
                        reason = "it does not accept this rank's secret: give all processes of this job the \
                                  same KILN_JOB_SECRET; or, if another job keeps this port, give this one \
                                  another (MASTER_PORT)"
                            .into();
                    }
                    Err(error) => {
                        reason =
                            format!("somebody listens there, but not as a rendezvous: {error}");
                    }
                }
            }
            // Says more than what other ports have to say.
            reason = refusal.unwrap_or(reason);
            let since = distrust.then(|| distrusted.unwrap_or_else(Instant::now));
            distrusted = since;
            let distrusts = since.is_some_and(|since| since.elapsed() > DISTRUST);
            // A rank that nobody listens to has nobody to tell either.
            if options.is_stopped() {
                return Err(JoinError::Stopped { by: options.rank });
            }
            if distrusts || Instant::now() + pause >= self.until {
                return Err(self.incomplete(reason, vec![0]));
            }
            pause_for(pause, options)?;
            pause = (pause * 2).min(PAUSE[1]);
            hello = (hello * 2).min(HELLO[1]);
        }
    }

    /// Opens a port where other ranks can reach this one: at the address that the connection to the
    /// rendezvous comes from.
    fn listen_beside(&self, stream: &TcpStream) -> Result<TcpListener, JoinError> {
        let rank = self.options.rank;
        let address = stream.local_addr().map_err(io_error(rank, "use its connection"))?.ip();
        let Some(ports) = self.options.ports else {
            return TcpListener::bind((address, 0)).map_err(io_error(rank, "open a port"));
        };
        // Ports that a former life of this run still holds are free in a moment.
        let patience = LISTEN_PATIENCE.min(self.options.timeout / 2);
        let listened = listen_patiently(self.options, patience, || ports.listen(address, rank))?;
        listened.map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => JoinError::PortsTaken { rank, ports, address },
            _ => io_error(rank, "open a port of comm.ports")(source),
        })
    }

    /// Proves who this is, and says where other ranks can reach it: at `listener`.
    fn introduce(
        &self,
        stream: TcpStream,
        listener: TcpListener,
        hello: Duration,
    ) -> Result<(Channel, Arc<Lobby>, Doorway), HandshakeError> {
        let options = self.options;
        stream.set_nodelay(true)?;
        let lobby = Lobby::new(self.until);
        let admitting = Arc::clone(&lobby);
        let door =
            Doorway::open(listener, options, Arc::new(move |caller| admitting.admit(caller)))?;
        let purpose = Purpose::Control {
            world_size: options.world_size,
            node: options.node.clone(),
            near: options.near(),
            port: door.address().port(),
        };
        let (job, seal) = (options.job.clone(), options.seal);
        let claim = Claim { job, rank: options.rank, seal, purpose };
        let left = self.until.saturating_duration_since(Instant::now());
        let left = left.max(Duration::from_millis(1));
        let limits = Limits { hello: hello.min(left), answer: ANSWER.min(left) };
        let channel = handshake::call(stream, claim, &options.secret, limits)?;
        Ok((channel, lobby, door))
    }

    /// Waits until all ranks are here. If this one is asked to stop meanwhile, it tells the rendezvous,
    /// which tells all.
    fn wait_for_all(&self, channel: &mut Channel) -> Result<(u64, Vec<MemberInfo>), JoinError> {
        let options = self.options;
        let Channel { reader, writer } = channel;
        thread::scope(|scope| {
            let (waiting, done) = mpsc::channel();
            if options.stop.is_some() {
                thread::Builder::new()
                    .name("kiln-stop".into())
                    .spawn_scoped(scope, move || tell_stop(options, writer, &done))
                    .map_err(io_error(options.rank, "start a thread"))?;
            }
            let outcome = self.listen(reader);
            drop(waiting);
            outcome
        })
    }

    /// Reads what the rendezvous says until it has an answer.
    fn listen(&self, reader: &mut Reader) -> Result<(u64, Vec<MemberInfo>), JoinError> {
        loop {
            // The rendezvous says who is missing; only if it is stuck does this run out.
            let left = self.until.saturating_duration_since(Instant::now()) + CONNECT_TIMEOUT;
            let stream = Arc::clone(&reader.stream);
            let message = stream
                .set_read_timeout(Some(left))
                .map_err(FrameError::from)
                .and_then(|()| frame::read(&mut *reader, MEMBER_LIMIT));
            match message {
                Ok(ToRank::Joined { session, members }) => {
                    stream
                        .set_read_timeout(None)
                        .map_err(io_error(self.options.rank, "use its connection"))?;
                    return Ok((session, members));
                }
                Ok(ToRank::CalledOff(CalledOff::Stopped { by })) => {
                    return Err(JoinError::Stopped { by });
                }
                Ok(ToRank::CalledOff(CalledOff::Refused(refused))) => {
                    return Err(JoinError::OtherSettings { refused: refused.to_string() });
                }
                Ok(ToRank::Incomplete { missing, refused }) => {
                    return Err(self.incomplete(absence(&missing, &refused), missing));
                }
                Ok(_) => {}
                Err(error) => {
                    let reason = format!("the rendezvous on rank 0 went away: {error}");
                    return Err(self.incomplete(reason, vec![0]));
                }
            }
        }
    }

    fn patience(&self) -> Duration {
        let left = self.until.saturating_duration_since(Instant::now());
        left.clamp(Duration::from_millis(1), CONNECT_TIMEOUT)
    }

    fn incomplete(&self, reason: String, missing: Vec<usize>) -> JoinError {
        JoinError::Incomplete {
            rank: self.options.rank,
            address: format!("{}:{}", self.options.host, self.options.port),
            waited: self.since.elapsed(),
            reason,
            missing,
        }
    }
}

/// Tells the rendezvous when this process is asked to stop; ends when nobody waits for it any longer.
fn tell_stop(options: &JoinOptions, writer: &mut Writer, done: &Receiver<()>) {
    while done.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
        if options.is_stopped() {
            // If it cannot be sent, the rendezvous is gone, and the reading side finds out.
            if let Ok(frame) = frame::encode(&ToRendezvous::Stop, MEMBER_LIMIT) {
                let _ = writer.deliver(&frame);
            }
            return;
        }
    }
}

/// Who has not come, and who came instead.
fn absence(missing: &[usize], refused: &[Refused]) -> String {
    let has_come = |rank: &usize| refused.iter().any(|one| one.is_proven() && one.rank == *rank);
    let silent: Vec<usize> = missing.iter().filter(|rank| !has_come(rank)).copied().collect();
    let advice = if silent.len() == 1 {
        "look at its log, or start it"
    } else {
        "look at their logs, or start them"
    };
    let unseen = (!silent.is_empty())
        .then(|| format!("{} did not come; {advice}", crate::call::list_ranks(&silent)));
    let parts: Vec<String> =
        unseen.into_iter().chain(refused.iter().map(Refused::to_string)).collect();
    parts.join("; ")
}

fn io_error(rank: usize, operation: &'static str) -> impl FnOnce(io::Error) -> JoinError {
    move |source| JoinError::Io { rank, operation, source }
}

#[cfg(test)]
mod tests;
