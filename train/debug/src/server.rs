//! The socket of a process of a run. Each client has its own thread, so slow clients do not delay others.

use std::io::{self, BufRead, BufReader, Read};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::report::About;
use kiln_observe::ask::{
    Folder, MOST_REQUEST, Owner, Reply, Request, Typed, remove_if_empty, send_reply, stranger,
};
use kiln_sys::ProcessId;

const MOST_CLIENTS: usize = 8;

/// Longest time a client may take to send a request or to receive a part of the answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Serves the socket of this process until dropped. If it cannot be created, the process continues without.
pub(crate) struct Server {
    out: PathBuf,
    kept: Option<Kept>,
}

struct Kept {
    folder: Folder,
    owner: Owner,
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

struct Shared {
    listener: UnixListener,
    ranks: Vec<usize>,
    about: About,
    stopping: AtomicBool,
    clients: AtomicUsize,
    refused: AtomicBool,
}

impl Server {
    pub(crate) fn start(out: &Path, ranks: Vec<usize>, about: About) -> Self {
        let prompts = about.prompts.clone();
        let kept = Kept::start(out, ranks, about).inspect(|_| prompts.open()).map_err(|error| {
            let out = out.display();
            tracing::warn!(%out, %error, "cannot create the socket for kiln status: the status of this process will be incomplete");
        });
        Server { out: out.to_owned(), kept: kept.ok() }
    }
}

impl Kept {
    fn start(out: &Path, ranks: Vec<usize>, about: About) -> io::Result<Self> {
        let folder = Folder::make(out)?;
        let owner = Owner { process: ProcessId::this(), ranks: ranks.clone() };
        let shared = Arc::new(Shared {
            listener: folder.listen(&owner)?,
            ranks,
            about,
            stopping: AtomicBool::new(false),
            clients: AtomicUsize::new(0),
            refused: AtomicBool::new(false),
        });
        let serving = shared.clone();
        let run = move || serving.accept();
        let thread = thread::Builder::new().name("kiln-debug".to_owned()).spawn(run)?;
        Ok(Kept { folder, owner, shared, thread })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let Some(Kept { folder, owner, shared, thread }) = self.kept.take() else { return };
        folder.remove_of(&owner);
        remove_if_empty(&self.out);
        shared.stopping.store(true, Ordering::Relaxed);
        // Wakes the thread that accepts. Clients that are still being served are not waited for.
        let _ = rustix::net::shutdown(&shared.listener, rustix::net::Shutdown::Both);
        let _ = thread.join();
    }
}

impl Shared {
    fn accept(self: Arc<Self>) {
        loop {
            let accepted = self.listener.accept();
            if self.stopping.load(Ordering::Relaxed) {
                return;
            }
            match accepted {
                Ok((stream, _)) => self.admit(stream),
                // Most likely out of file descriptors: waits until some are free instead of spinning.
                Err(_) => thread::sleep(Duration::from_millis(200)),
            }
        }
    }

    fn admit(self: &Arc<Self>, stream: UnixStream) {
        match stranger(&stream) {
            Ok(None) => {}
            Ok(Some(user)) => {
                if !self.refused.swap(true, Ordering::Relaxed) {
                    tracing::warn!(user, "refused a status request from a process of another user");
                }
                return;
            }
            Err(_) => return,
        }
        if self.clients.fetch_add(1, Ordering::Relaxed) >= MOST_CLIENTS {
            self.clients.fetch_sub(1, Ordering::Relaxed);
            // The reply fits into the empty buffer of a new connection, so this does not block.
            let _ = send_reply(
                &stream,
                &Reply::Refused("too many clients are connected to this process".to_owned()),
            );
            return;
        }
        let shared = self.clone();
        let serve = move || {
            let _ = shared.serve(&stream);
            let _ = stream.shutdown(Shutdown::Both);
            shared.clients.fetch_sub(1, Ordering::Relaxed);
        };
        if thread::Builder::new().name("kiln-debug-peer".to_owned()).spawn(serve).is_err() {
            self.clients.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn serve(&self, stream: &UnixStream) -> io::Result<()> {
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut reader = BufReader::new(stream);
        loop {
            let mut line = String::new();
            let read = reader.by_ref().take(MOST_REQUEST as u64).read_line(&mut line)?;
            if read == 0 {
                return Ok(());
            }
            let reply = match serde_json::from_str(&line) {
                Ok(Request::Attach { rank }) => return self.converse(stream, reader, rank),
                Ok(Request::Status { stacks, all }) => {
                    Reply::Status(Box::new(self.about.status(&self.ranks, stacks, all)))
                }
                Ok(Request::Timeline) => Reply::Timeline(self.about.timelines(&self.ranks)),
                Err(error) => Reply::Refused(format!("this build does not support the request: {error}")),
            };
            send_reply(stream, &reply)?;
            if !line.ends_with('\n') {
                return Ok(());
            }
        }
    }

    /// Passes lines from a prompt to the ranks, and their messages back, until either side ends.
    fn converse(
        &self,
        stream: &UnixStream,
        mut reader: BufReader<&UnixStream>,
        rank: Option<usize>,
    ) -> io::Result<()> {
        stream.set_read_timeout(None)?;
        let prompts = &self.about.prompts;
        let (id, messages) = prompts.attach(rank);
        thread::scope(|scope| {
            let tell = move || {
                for message in messages {
                    if send_reply(stream, &Reply::Prompt(message)).is_err() {
                        break;
                    }
                }
                // The run is over, or no one reads the messages. Shutting down ends the reading side too.
                let _ = stream.shutdown(Shutdown::Both);
            };
            thread::Builder::new().name("kiln-prompt".to_owned()).spawn_scoped(scope, tell)?;
            let mut line = String::new();
            while reader.by_ref().take(MOST_REQUEST as u64).read_line(&mut line).unwrap_or(0) > 0 {
                // A client that sends anything else would wait for an answer forever.
                let Ok(Typed { typed }) = serde_json::from_str(&line) else { break };
                prompts.line(id, &typed);
                line.clear();
            }
            prompts.detach(id);
            let _ = stream.shutdown(Shutdown::Both);
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use kiln_observe::ask::{Answer, Thread, ask_all};
    use kiln_testkit::{PATIENCE as PATIENCE_OF_TESTS, wait_for};

    use super::*;

    fn about() -> About {
        let prompts = Arc::default();
        About { world_size: 2, steps: 5, deadline: Duration::from_secs(60), on_gpu: false, prompts }
    }

    fn ask(folder: &Folder, owner: &Owner, line: &str) -> String {
        let stream = folder.connect(owner).unwrap();
        stream.set_read_timeout(Some(PATIENCE_OF_TESTS)).unwrap();
        // A refused client may get the reply, and be disconnected, before it sends its request.
        let _ = (&stream).write_all(line.as_bytes());
        let mut said = String::new();
        BufReader::new(&stream).read_line(&mut said).unwrap();
        said
    }

    #[test]
    fn silent_clients_are_limited_and_block_nobody() {
        let out = tempfile::tempdir().unwrap();
        let server = Server::start(out.path(), vec![0, 1], about());
        let folder = Folder::open(out.path()).unwrap();
        let [owner] = &folder.owners()[..] else { panic!("one process") };
        let mut silent: Vec<_> = (1..MOST_CLIENTS).map(|_| folder.connect(owner).unwrap()).collect();
        let status = "{\"status\":{\"stacks\":false,\"all\":false}}\n";
        assert!(ask(&folder, owner, status).starts_with("{\"status\":{\"world_size\":2,\"steps\":5,"));
        let refused = wait_for("a refusal", || {
            // The process gives up clients that stay silent, as all do on a machine that stands still for long.
            silent = (0..MOST_CLIENTS).filter_map(|_| folder.connect(owner).ok()).collect();
            let said = ask(&folder, owner, status);
            if said.contains("refused") { Ok(said) } else { Err(said) }
        });
        assert!(refused.contains("too many clients"), "{refused}");
        drop(silent);
        let nonsense = wait_for("a place among the clients", || {
            let said = ask(&folder, owner, "what?\n");
            if said.contains("too many") { Err(said) } else { Ok(said) }
        });
        assert!(nonsense.contains("does not support the request"), "{nonsense}");
        drop(server);
        assert!(!out.path().join("debug").exists());
    }

    #[test]
    fn process_without_a_socket_continues() {
        let out = tempfile::tempdir().unwrap();
        std::fs::write(out.path().join("debug"), "in the way").unwrap();
        drop(Server::start(out.path(), vec![0], about()));
        assert_eq!(std::fs::read(out.path().join("debug")).unwrap(), b"in the way");
    }

    #[test]
    fn silent_and_ended_processes_are_reported() {
        let out = tempfile::tempdir().unwrap();
        assert!(ask_all(out.path(), false).unwrap().processes.is_empty());
        let prompts = std::sync::Arc::default();
        let about = About { world_size: 2, steps: 9, deadline: Duration::MAX, on_gpu: false, prompts };
        let server = Server::start(out.path(), vec![0], about);
        let folder = Folder::open(out.path()).unwrap();
        let owner = Owner { process: ProcessId::this(), ranks: vec![1] };
        let listener = folder.listen(&owner).unwrap();
        let answers = ask_all(out.path(), true).unwrap();
        let [first, second] = &answers.processes[..] else { panic!("{answers:?}") };
        let Answer::Status(status) = &first.answer else { panic!("{first:?}") };
        assert_eq!((status.world_size, status.steps, status.deadline_s), (2, 9, None));
        let threads = status.threads.as_ref().unwrap();
        let is_accepting = |thread: &&Thread| thread.name == "kiln-debug";
        let calls = &threads.iter().find(is_accepting).expect("the thread that accepts").calls;
        assert!(calls.iter().any(|call| call.contains("accept")), "{calls:?}");
        let silent = "the request timed out";
        assert!(matches!(&second.answer, Answer::Silent(why) if why == silent), "{second:?}");
        assert!(second.threads.as_ref().unwrap().len() > 1);
        drop(listener);
        let answers = ask_all(out.path(), false).unwrap();
        assert!(matches!(&answers.processes[1].answer, Answer::Silent(why) if why != silent), "{answers:?}");
        folder.remove_of(&owner);
        drop(server);
        assert!(ask_all(out.path(), false).unwrap().processes.is_empty());
    }
}
