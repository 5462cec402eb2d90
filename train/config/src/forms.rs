use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, de};

/// Parses the address of a page: `127.0.0.1:6006`, `localhost:6006`, or a port of the loopback address (`6006`).
///
/// # Errors
///
/// A description of the problem.
pub fn http_address(text: &str) -> Result<SocketAddr, String> {
    let port = text.strip_prefix(':').unwrap_or(text);
    let text = if port.parse::<u16>().is_ok() { format!("127.0.0.1:{port}") } else { text.to_owned() };
    let found = text.to_socket_addrs().ok().and_then(|mut addresses| addresses.next());
    found.ok_or_else(|| "not an address and a port, such as 127.0.0.1:6006, or a port".to_owned())
}

/// The forms of an address of a page.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected an address and a port, such as \"127.0.0.1:6006\", or a port")]
#[schemars(inline)]
pub(super) enum Address {
    Port(u16),
    Text(String),
}

/// The forms of an array of paths.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected an array of paths, as in [\"one\", \"two\"], or one path")]
#[schemars(inline)]
pub(super) enum Paths {
    Many(Vec<PathBuf>),
    One(PathBuf),
}

pub(super) fn address<'de, D: Deserializer<'de>>(from: D) -> Result<Option<SocketAddr>, D::Error> {
    let address = match Address::deserialize(from)? {
        Address::Port(port) => http_address(&port.to_string()),
        Address::Text(text) => http_address(&text),
    };
    address.map(Some).map_err(de::Error::custom)
}

pub(super) fn paths<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<PathBuf>, D::Error> {
    match Paths::deserialize(from)? {
        Paths::Many(paths) => Ok(paths),
        Paths::One(path) if path.as_os_str().as_encoded_bytes().starts_with(b"[") => {
            Err(de::Error::custom("the strings of an array need quotes, as in [\"one\", \"two\"]"))
        }
        Paths::One(path) => Ok(vec![path]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_an_address_of_this_machine() {
        for text in ["6006", ":6006", "127.0.0.1:6006"] {
            assert_eq!(http_address(text).unwrap(), "127.0.0.1:6006".parse().unwrap(), "{text}");
        }
        assert!(http_address("localhost:6006").unwrap().ip().is_loopback());
        for text in ["", "localhost", "70000", "1.2.3.4", "1.2.3.4:70000"] {
            assert!(http_address(text).is_err(), "{text}");
        }
    }

    #[test]
    fn one_path_is_an_array_of_one() {
        let text = |value: &str| toml::from_str::<crate::Config>(&format!("data.text = {value}"));
        assert_eq!(text("'a'").unwrap().data.text, [PathBuf::from("a")]);
        assert_eq!(text("['a', 'b']").unwrap().data.text, [PathBuf::from("a"), PathBuf::from("b")]);
        assert!(text("3").unwrap_err().message().contains("an array of paths"));
        assert!(text("'[a]'").unwrap_err().message().contains("need quotes"));
        let http = |value: &str| toml::from_str::<crate::Config>(&format!("log.http = {value}"));
        assert_eq!(http("6006").unwrap().log.http, http_address(":6006").ok());
        assert!(http("'nowhere'").is_err());
    }
}
