//! Asking the processes of a run that goes on.
//!
//! Each process of a run keeps a socket in the run folder (`socket.rs`), and answers whoever asks there. The one who
//! asks (`client.rs`) puts the answers of all processes together, with what the machine knows of those that do not
//! answer (`machine.rs`) and the names of functions (`symbols.rs`); or says a line
//! to the prompt of the run (`tell.rs`). A request is one line of JSON, and so is a reply
//! (`message.rs`).

mod client;
mod machine;
mod message;
mod socket;
mod symbols;
mod tell;

pub use client::{Answer, Answers, Connection, Process, ask_all, say, send_reply, timelines};
pub use machine::{ProcessState, state_of, threads_of};
pub use message::{Known, MOST_REQUEST, ProcessStatus, RankStatus, Reply, Request, Thread, ToPrompt, Typed};
pub use socket::{Folder, Owner, clear, remove_if_empty, stranger};
pub use tell::tell;
