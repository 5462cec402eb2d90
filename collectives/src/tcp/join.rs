//! Joins a world: finds the rendezvous, registers there, waits for the other ranks and connects to them.

use super::backend::TcpBackend;
use super::bind::{BIND_PATIENCE, bind_patiently, bind_rendezvous, ports_of_rendezvous, resolve};
use super::channel::{Channel, Reader, Writer};
use super::control::Control;
use super::frame::{self, FrameError, MESSAGE_LIMIT};
use super::handshake::{self, Claim, HandshakeError, Limits, Purpose, Refusal};
use super::listener::Listener;
use super::mesh::{self, World};
use super::message::{CalledOff, GroupName, RankInfo, ToRank, ToRendezvous};
use super::options::{JoinError, JoinOptions, LOOK_EVERY, PAUSE};
use super::pending::PendingConnections;
use super::refused::Refused;
use super::rendezvous::Rendezvous;
use crate::backend::{Backend, RankShared};
use crate::call::list_ranks;
use crate::process_group::ProcessGroup;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// First and maximum time limits for the rendezvous's first message, which a busy rendezvous sends late.
const HELLO: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(40)];

const ANSWER: Duration = Duration::from_secs(60);

/// Time limit for retries if the rendezvous closes the connection after this rank's proof.
const DISTRUST: Duration = Duration::from_secs(10);

impl ProcessGroup<TcpBackend> {
    /// Joins a world of processes, one per rank. Blocks until all ranks have arrived and are connected.
    ///
    /// # Errors
    ///
    /// [`JoinError`], after [`JoinOptions::timeout`] at the latest.
    pub fn join(options: JoinOptions) -> Result<ProcessGroup<TcpBackend>, JoinError> {
        let (rank, world_size) = (options.rank, options.world_size);
        if rank >= world_size {
            return Err(JoinError::Rank { rank, world_size });
        }
        check_secret(&options)?;
        allow_descriptors(world_size);
        let since = Instant::now();
        let until = since + options.timeout;
        let rendezvous = if rank == 0 { Some(host_rendezvous(&options)?) } else { None };
        let joining = Joining { options: &options, since, until };
        joining.join(rendezvous).map(ProcessGroup::start)
    }
}

/// Joins a world whose ranks are all in this process, over the loopback interface, for tests and benchmarks.
/// `configure` changes each rank's options.
///
/// # Errors
///
/// The errors of [`TcpCommunicator::join`](super::TcpCommunicator). Rank 0 does not linger.
pub fn loopback(
    world_size: usize,
    configure: impl Fn(&mut JoinOptions),
) -> Result<Vec<ProcessGroup<TcpBackend>>, JoinError> {
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
        let joining: Vec<_> =
            options.into_iter().map(|options| scope.spawn(|| ProcessGroup::join(options))).collect();
        let panicked = || io_error(0, "join")(io::Error::other("a thread panicked"));
        joining.into_iter().map(|rank| rank.join().unwrap_or_else(|_| Err(panicked()))).collect()
    })
}

/// Fails if anyone can derive the secret, and other machines can reach the ranks or traffic must be sealed.
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

fn host_rendezvous(options: &JoinOptions) -> Result<Rendezvous, JoinError> {
    let listener = match &options.listener {
        Some(listener) => listener.try_clone().map_err(io_error(0, "use its port"))?,
        None => bind_rendezvous(options)?,
    };
    Rendezvous::open(listener, options).map_err(io_error(options.rank, "open the rendezvous"))
}

struct Joining<'a> {
    options: &'a JoinOptions,
    since: Instant,
    until: Instant,
}

impl Joining<'_> {
    fn join(&self, rendezvous: Option<Rendezvous>) -> Result<TcpBackend, JoinError> {
        let options = self.options;
        let rank = options.rank;
        let ports = match &rendezvous {
            Some(rendezvous) => vec![rendezvous.address().port()],
            None => ports_of_rendezvous(options),
        };
        let (mut channel, pending, listener) = self.register(&ports)?;
        let (session, ranks) = self.wait_for_all(&mut channel)?;
        pending.open(session);
        let JoinOptions { world_size, node, recorder_capacity, on_worker_start, .. } = options;
        let shared = RankShared::new(
            rank,
            *world_size,
            node,
            *recorder_capacity,
            Arc::default(),
            on_worker_start.clone(),
        );
        let control = Control::start(channel, Arc::clone(&shared), TcpBackend::NAME, rendezvous)
            .map_err(io_error(rank, "start its control threads"))?;
        let options = JoinOptions { listener: None, ..options.clone() };
        let world = Arc::new(World { control, ranks, session, pending, options, _listener: listener });
        let group = GroupName { number: 0, name: "world".into(), ranks: (0..*world_size).collect() };
        let wire = mesh::connect(&world, &group, rank, self.until).map_err(|error| {
            let reason = error.to_string();
            world.control.abort(group.abort_by(rank, format!("it cannot connect: {reason}")));
            self.incomplete(reason, Vec::new(), false)
        })?;
        Ok(TcpBackend::new(world, shared, group, rank, wire))
    }

    fn register(&self, ports: &[u16]) -> Result<(Channel, Arc<PendingConnections>, Listener), JoinError> {
        let options = self.options;
        let (mut pause, mut hello) = (PAUSE[0], HELLO[0]);
        let mut reason = "no program listens there".to_owned();
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
                    Ok(registered) => return Ok(registered),
                    Err(HandshakeError::Refused(Refusal { reason, retry: false })) => {
                        let (rank, address) = (options.rank, address.to_string());
                        return Err(JoinError::Refused { rank, address, reason });
                    }
                    Err(HandshakeError::Refused(Refusal { reason, retry: true })) => {
                        refusal = Some(format!("{address} refuses this rank: {reason}"));
                    }
                    Err(HandshakeError::Secret) => {
                        distrust = true;
                        reason = "it does not accept this rank's secret: give all processes of this job the \
                                  same KILN_JOB_SECRET; or, if another job keeps this port, give this one \
                                  another (MASTER_PORT)"
                            .into();
                    }
                    Err(error) => {
                        reason = format!("a program listens there, but it is not a rendezvous: {error}");
                    }
                }
            }
            reason = refusal.unwrap_or(reason);
            let since = distrust.then(|| distrusted.unwrap_or_else(Instant::now));
            distrusted = since;
            let distrusts = since.is_some_and(|since| since.elapsed() > DISTRUST);
            if options.is_stopped() {
                return Err(JoinError::Stopped { by: options.rank });
            }
            if distrusts || Instant::now() + pause >= self.until {
                return Err(self.incomplete(reason, vec![0], distrust));
            }
            options.pause(pause)?;
            pause = (pause * 2).min(PAUSE[1]);
            hello = (hello * 2).min(HELLO[1]);
        }
    }

    /// Opens a port for other ranks at the local address of the connection to the rendezvous.
    fn listen_beside(&self, stream: &TcpStream) -> Result<TcpListener, JoinError> {
        let rank = self.options.rank;
        let address = stream.local_addr().map_err(io_error(rank, "use its connection"))?.ip();
        let Some(ports) = self.options.ports else {
            return TcpListener::bind((address, 0)).map_err(io_error(rank, "open a port"));
        };
        // The previous process of this run may still hold ports.
        let patience = BIND_PATIENCE.min(self.options.timeout / 2);
        let listened = bind_patiently(self.options, patience, || ports.listen(address, rank))?;
        listened.map_err(|source| match source.kind() {
            io::ErrorKind::AddrInUse => JoinError::PortsTaken { rank, ports, address },
            _ => io_error(rank, "open a port of comm.ports")(source),
        })
    }

    /// Authenticates this rank to the rendezvous, and sends the port of `listener`, where other ranks can reach it.
    fn introduce(
        &self,
        stream: TcpStream,
        listener: TcpListener,
        hello: Duration,
    ) -> Result<(Channel, Arc<PendingConnections>, Listener), HandshakeError> {
        let options = self.options;
        stream.set_nodelay(true)?;
        let pending = PendingConnections::new(self.until);
        let admitting = Arc::clone(&pending);
        let admit = Arc::new(move |caller| admitting.admit(caller));
        let listener = Listener::open(listener, options, admit)?;
        let purpose = Purpose::Control {
            world_size: options.world_size,
            node: options.node.clone(),
            near: options.near(),
            port: listener.address().port(),
        };
        let (job, seal) = (options.job.clone(), options.seal);
        let claim = Claim { job, rank: options.rank, seal, purpose };
        let left = self.until.saturating_duration_since(Instant::now());
        let left = left.max(Duration::from_millis(1));
        let limits = Limits { hello: hello.min(left), answer: ANSWER.min(left) };
        let channel = handshake::call(stream, claim, &options.secret, limits)?;
        Ok((channel, pending, listener))
    }

    /// Waits until all ranks have arrived. Forwards a stop request to the rendezvous, which informs all ranks.
    fn wait_for_all(&self, channel: &mut Channel) -> Result<(u64, Vec<RankInfo>), JoinError> {
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

    fn listen(&self, reader: &mut Reader) -> Result<(u64, Vec<RankInfo>), JoinError> {
        loop {
            // The rendezvous itself reports missing ranks in time, unless it is stuck.
            let left = self.until.saturating_duration_since(Instant::now()) + CONNECT_TIMEOUT;
            let stream = Arc::clone(&reader.stream);
            let message = stream
                .set_read_timeout(Some(left))
                .map_err(FrameError::from)
                .and_then(|()| frame::read(&mut *reader, MESSAGE_LIMIT));
            match message {
                Ok(ToRank::Joined { session, ranks }) => {
                    stream
                        .set_read_timeout(None)
                        .map_err(io_error(self.options.rank, "use its connection"))?;
                    return Ok((session, ranks));
                }
                Ok(ToRank::CalledOff(CalledOff::Stopped { by })) => {
                    return Err(JoinError::Stopped { by });
                }
                Ok(ToRank::CalledOff(CalledOff::Refused(refused))) => {
                    return Err(JoinError::OtherSettings { refused: refused.to_string() });
                }
                Ok(ToRank::Incomplete { missing, refused }) => {
                    let distrust = refused.iter().any(|one| !one.is_proven());
                    return Err(self.incomplete(absence(&missing, &refused), missing, distrust));
                }
                Ok(_) => {}
                Err(error) => {
                    let reason = format!("the rendezvous on rank 0 went away: {error}");
                    return Err(self.incomplete(reason, vec![0], false));
                }
            }
        }
    }

    fn patience(&self) -> Duration {
        let left = self.until.saturating_duration_since(Instant::now());
        left.clamp(Duration::from_millis(1), CONNECT_TIMEOUT)
    }

    fn incomplete(&self, reason: String, missing: Vec<usize>, distrust: bool) -> JoinError {
        JoinError::Incomplete {
            rank: self.options.rank,
            address: format!("{}:{}", self.options.host, self.options.port),
            waited: self.since.elapsed(),
            reason,
            missing,
            distrust,
        }
    }
}

fn tell_stop(options: &JoinOptions, writer: &mut Writer, done: &Receiver<()>) {
    while done.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
        if options.is_stopped() {
            // If sending fails, the reading thread notices that the rendezvous is gone.
            if let Ok(frame) = frame::encode(&ToRendezvous::Stop, MESSAGE_LIMIT) {
                let _ = writer.deliver(&frame);
            }
            return;
        }
    }
}

fn absence(missing: &[usize], refused: &[Refused]) -> String {
    let has_come = |rank: &usize| refused.iter().any(|one| one.is_proven() && one.rank == *rank);
    let silent: Vec<usize> = missing.iter().filter(|rank| !has_come(rank)).copied().collect();
    let advice =
        if silent.len() == 1 { "look at its log, or start it" } else { "look at their logs, or start them" };
    let unseen = (!silent.is_empty()).then(|| format!("{} did not come; {advice}", list_ranks(&silent)));
    let parts: Vec<String> = unseen.into_iter().chain(refused.iter().map(Refused::to_string)).collect();
    parts.join("; ")
}

const SPARE: u64 = 512;

/// Maximum connections per peer: one in the world, some in groups split from it, and one being accepted.
const PER_RANK: u64 = 6;

/// Raises the soft limit on open files, often 1,024, to the needs of the world, as far as the hard limit allows.
fn allow_descriptors(world_size: usize) {
    let needed = SPARE + PER_RANK * world_size as u64;
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= needed) {
        return;
    }
    let wanted = maximum.map_or(needed, |maximum| maximum.min(needed));
    let raised = setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum });
    if wanted < needed || raised.is_err() {
        tracing::warn!(
            "{world_size} ranks may need {needed} open files in each process, and {} are allowed: raise \
             the limit with `ulimit -n` if connections fail",
            if raised.is_ok() { wanted } else { current.unwrap_or(wanted) }
        );
    }
}

fn io_error(rank: usize, operation: &'static str) -> impl FnOnce(io::Error) -> JoinError {
    move |source| JoinError::Io { rank, operation, source }
}

#[cfg(test)]
mod tests;
