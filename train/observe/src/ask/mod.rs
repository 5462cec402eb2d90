//! Asking the processes of a live run.
//!
//! Each process of a run keeps a socket in the run folder (`socket.rs`) and answers its clients. The client
//! (`client.rs`) combines the answers of all processes with information from the machine about those that do
//! not answer (`machine.rs`) and the names of functions (`symbols.rs`), or sends a line to the prompt of the
//! run. Requests and replies are one line of JSON each (`message.rs`).

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
