use std::ffi::OsString;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use kiln_sys::launcher::Message;
use kiln_sys::output;

use super::child::Job;
use super::ends::PREEMPTED;
use super::logs::claim;
use super::place::{JobSecret, Node, SECRET};
use super::restarts::{Next, Restarts};
use super::supervise::{Life, Signals};
use super::{LaunchError, print, signal_name};

/// Default time for ranks to save and end after a signal.
pub const GRACE: Duration = Duration::from_secs(30);

/// Settings of a launch.
#[derive(Clone, Debug)]
pub struct Options {
    /// The node on which to start the ranks.
    pub node: Node,
    /// The program that every rank runs.
    pub program: PathBuf,
    /// Arguments of the program.
    pub arguments: Vec<OsString>,
    /// Folder of the ranks' logs; `None` for `runs/logs/<job>`.
    pub log_dir: Option<PathBuf>,
    /// Time between SIGTERM and SIGKILL when the job must end.
    pub grace: Duration,
}

/// Starts a node's ranks and restarts them after failures; returns the exit code. Call it from the main thread, because
/// the system ends the ranks when the thread that started them ends.
pub fn run(options: &Options) -> Result<u8, LaunchError> {
    let _output = output::never_block();
    kiln_sys::hear_of_children();
    let signals = Signals::register()?;
    let mut node = options.node.clone();
    let choose_port = node.master.port == 0;
    let name = match node.job.name.take() {
        Some(name) => name,
        // The name must be the same everywhere, so only a single node can generate one.
        None if node.nodes == 1 => format!("kiln-{:.16}", random_text()?),
        None => "none".to_owned(),
    };
    let fallback = Path::new("runs").join("logs").join(name.replace(['/', '\\'], "-").replace("..", "-"));
    let log_dir = options.log_dir.clone().unwrap_or_else(|| fallback.clone());
    if node.secret.is_none() {
        match node.nodes {
            1 => node.secret = Some(JobSecret(random_text()?)),
            _ => print(&format!(
                "warning: {SECRET} is not set, so anyone who reaches port {} of {} could take a rank's \
                 place; unless that is a loopback address or comm.open is true, the ranks will refuse to \
                 start. Set it to the same random string on every node, such as the output of `openssl rand \
                 -hex 32`",
                node.master.port, node.master.host
            )),
        }
    }
    let mut restarts = Restarts::new(node.max_restarts);
    let mut job = Job { node, name, restart: 0, run: None, grace: options.grace };
    let (logs, _claimed) = claim(&log_dir, &fallback, job.rank(0), job.restarts())?;
    if logs != log_dir {
        print(&format!(
            "another launch is writing its logs to {}; the logs of this launch are in {}",
            log_dir.display(),
            logs.display()
        ));
    }
    loop {
        if choose_port {
            job.node.master.port = free_port(&job.node.master.host)?;
        }
        let life =
            Life { job: &job, program: &options.program, arguments: &options.arguments, log_dir: &logs };
        let begun = Instant::now();
        let ends = life.run(&signals)?;
        let verdict = ends.verdict();
        ends.print(&job, verdict);
        let pause = match restarts.after(&ends, verdict, begun.elapsed()) {
            Next::End => return Ok(verdict.code()),
            Next::GiveUp(why) => {
                print(&why);
                return Ok(verdict.code());
            }
            Next::Again(pause) => pause,
        };
        job.restart = restarts.done();
        let run = ends.ranks.iter().find_map(|end| end.last(Message::Run));
        job.run = run.map(str::to_owned).or(job.run);
        print(&format!("the next attempt is in {} s", pause.as_secs()));
        if let Some(signal) = signals.pause(pause) {
            let name = signal_name(signal);
            print(&format!("{name} before the next attempt: not restarting the job"));
            return Ok(PREEMPTED);
        }
        print(&format!(
            "starting all ranks of this node again, restart {} of {}",
            job.restart, job.node.max_restarts
        ));
    }
}

/// Returns an unused port. If another program takes it before rank 0 does, the job fails immediately.
fn free_port(host: &str) -> Result<u16, LaunchError> {
    let listener = TcpListener::bind((host, 0)).or_else(|_| TcpListener::bind(("0.0.0.0", 0)));
    let address = listener.and_then(|listener| listener.local_addr());
    address.map(|address| address.port()).map_err(LaunchError::system("find a free port"))
}

fn random_text() -> Result<String, LaunchError> {
    let mut random = [0; 16];
    getrandom::fill(&mut random)
        .map_err(|error| std::io::Error::other(error.to_string()))
        .map_err(LaunchError::system("get random bytes from the system"))?;
    Ok(format!("{:032x}", u128::from_be_bytes(random)))
}
