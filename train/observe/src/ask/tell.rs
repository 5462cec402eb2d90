//! Sends one line to the prompt of a live run.

use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::{Duration, Instant};

use super::client::Connection;
use super::message::{Reply, Request, ToPrompt, Typed};
use super::socket::Folder;

/// Maximum time for a run to respond to a line: it reads lines at the end of a step.
const PATIENCE: Duration = Duration::from_secs(5);

/// Sends `line` to the prompt of the run in `out`, and returns the run's response. If the current step takes
/// too long, the run will act on the line later, and the returned text says so.
///
/// # Errors
///
/// If no process with rank 0 can be asked from here, a rank is held, or the run is over.
pub fn tell(out: &Path, line: &str) -> io::Result<String> {
    // A run that ends removes its sockets; a killed run leaves them.
    let or_over = |error: io::Error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
            io::Error::other("it is over: no process of it is on this machine")
        }
        _ => error,
    };
    let folder = Folder::open(out).map_err(or_over)?;
    let owners = folder.owners();
    let Some(first) = owners.iter().find(|owner| owner.ranks.contains(&0)) else {
        return Err(io::Error::new(ErrorKind::NotFound, "no process of it with rank 0 is on this machine"));
    };
    let mut connection = Connection::open(&folder, first, PATIENCE).map_err(or_over)?;
    match connection.ask(&Request::Attach { rank: None })? {
        Reply::Prompt(ToPrompt::Running) => {}
        Reply::Prompt(ToPrompt::End) => return Err(io::Error::other("it is over")),
        Reply::Prompt(_) => return Err(io::Error::other("a rank is held: kiln attach has its prompt")),
        Reply::Refused(reason) => return Err(io::Error::other(reason)),
        Reply::Status(_) | Reply::Timeline(_) => return Err(ErrorKind::InvalidData.into()),
    }
    let end = Instant::now() + PATIENCE;
    connection.say(&Typed::new(line)?)?;
    loop {
        match connection.receive_until(end) {
            Ok(Reply::Prompt(ToPrompt::Text(text))) => return Ok(text),
            Ok(Reply::Prompt(ToPrompt::End)) => return Ok("it is over".to_owned()),
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Ok("it will do so at the end of its step".to_owned());
            }
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use kiln_sys::ProcessId;

    use super::super::socket::Owner;
    use super::*;

    #[test]
    fn an_order_to_a_run_that_is_over_says_so() {
        let out = tempfile::tempdir().unwrap();
        let said = || tell(out.path(), "checkpoint").unwrap_err().to_string();
        assert!(said().starts_with("it is over"), "{}", said());
        // A killed process has left its socket.
        let folder = Folder::make(out.path()).unwrap();
        drop(folder.listen(&Owner { process: ProcessId::this(), ranks: vec![0] }).unwrap());
        assert!(said().starts_with("it is over"), "{}", said());
    }
}
