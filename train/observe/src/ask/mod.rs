//! Requests to the processes of a live run, each of which has a socket in the run folder.
//!
//! Requests and replies are one line of JSON each.

mod client;
mod machine;
mod message;
mod socket;
mod symbols;

pub use client::{
    Answer, Answers, Connection, Process, ask_all, send_command, send_line, send_reply, timelines,
};
pub use machine::{ProcessState, state_of, threads_of};
pub use message::{Known, MOST_REQUEST, ProcessStatus, RankStatus, Reply, Request, Thread, ToPrompt, Typed};
pub use socket::{Folder, Owner, clear, remove_if_empty, stranger};
