//! The checks of `conformance_tcp`, with all traffic encrypted.

use kiln_collectives::tcp::Seal;

include!("conformance/suite.rs");

#[path = "conformance/tcp.rs"]
mod backend;

const SEAL: Seal = Seal::Encrypt;
