//! A look into runs that go on: `kiln status`.
//!
//! Each process of a run keeps a socket in the run folder (`socket.rs`), and answers whoever asks there
//! (`server.rs`) what its ranks are doing (`status.rs`). Nothing is done for it while nobody asks. The one who
//! asks (`client.rs`) puts the answers of all processes together, with what the machine knows of those that do
//! not answer (`machine.rs`) and the names of functions (`symbols.rs`), and says whether something is wrong (`opinion.rs`). What is left of a run that has
//! ended is read from its folder (`ended.rs`).
//!
//! A request is one line of JSON, and so is a reply (`message.rs`). A new kind of request is a variant of
//! [`message::Request`] and an arm of `answer` in `server.rs`.

mod client;
mod command;
mod ended;
mod look;
mod machine;
mod message;
mod opinion;
mod server;
mod show;
mod socket;
mod status;
mod symbols;

pub use command::StatusArgs;
pub(crate) use server::Server;
pub(crate) use socket::clear;
pub(crate) use status::About;
