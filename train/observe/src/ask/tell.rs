//! Says one line to the prompt of a run that goes on.

use std::io::{self, ErrorKind};
use std::path::Path;
use std::time::Duration;

use super::client::Connection;
use super::message::{Reply, Request, ToPrompt, Typed};
use super::socket::Folder;

/// How long a run may take to say what it makes of a line: it reads lines at the end of a step.
const PATIENCE: Duration = Duration::from_secs(5);

/// Says `line` to the prompt of the run in `out`, and returns what the run says to it. One whose step takes long does
/// it later, and that is what is returned.
///
/// # Errors
///
/// If no process with rank 0 can be asked from here, a rank is held, or the run is over.
pub fn tell(out: &Path, line: &str) -> io::Result<String> {
    let folder = Folder::open(out)?;
    let owners = folder.owners();
    let Some(first) = owners.iter().find(|owner| owner.ranks.contains(&0)) else {
        return Err(io::Error::new(ErrorKind::NotFound, "no process of it with rank 0 is on this machine"));
    };
    let mut connection = Connection::open(&folder, first, PATIENCE)?;
    match connection.ask(&Request::Attach { rank: None })? {
        Reply::Prompt(ToPrompt::Running) => {}
        Reply::Prompt(ToPrompt::End) => return Err(io::Error::other("it is over")),
        Reply::Prompt(_) => return Err(io::Error::other("a rank is held: kiln attach has its prompt")),
        Reply::Refused(reason) => return Err(io::Error::other(reason)),
        Reply::Status(_) | Reply::Timeline(_) => return Err(ErrorKind::InvalidData.into()),
    }
    connection.say(&Typed { typed: line.to_owned() })?;
    loop {
        match connection.receive() {
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
