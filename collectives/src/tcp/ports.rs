use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io;
use std::net::{IpAddr, TcpListener};
use std::str::FromStr;

/// Ports on which ranks may listen for each other, such as `29600-29700`, for machines whose firewall opens
/// only some ports. The rendezvous has a port of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
pub struct Ports {
    first: u16,
    last: u16,
}

impl Ports {
    /// Number of ports.
    pub fn count(&self) -> usize {
        usize::from(self.last - self.first) + 1
    }

    /// Returns the ports that are taken at `address`.
    pub fn taken(&self, address: IpAddr) -> Vec<u16> {
        (self.first..=self.last).filter(|port| TcpListener::bind((address, *port)).is_err()).collect()
    }

    /// Listens on the first free port, starting at a position that depends on `rank`. `AddrInUse` if none is free.
    pub(super) fn listen(&self, address: IpAddr, rank: usize) -> io::Result<TcpListener> {
        let count = self.count();
        let mut failure = io::Error::from(io::ErrorKind::AddrInUse);
        for offset in 0..count {
            let port = self.first + ((rank + offset) % count) as u16;
            match TcpListener::bind((address, port)) {
                Ok(listener) => return Ok(listener),
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
                // Skips a port that another program owns or that needs privileges.
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }
}

impl FromStr for Ports {
    type Err = String;

    fn from_str(text: &str) -> Result<Ports, String> {
        let port = |text: &str| text.trim().parse::<u16>().ok().filter(|port| *port > 0);
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        match (port(first), port(last)) {
            (Some(first), Some(last)) if first <= last => Ok(Ports { first, last }),
            (Some(first), Some(last)) => {
                Err(format!("\"{text}\" ends before it begins; write \"{last}-{first}\""))
            }
            _ => Err(format!(
                "\"{text}\" is not a range of ports; write the first and the last, from 1 to 65535, as in \
                 \"29600-29700\""
            )),
        }
    }
}

impl TryFrom<String> for Ports {
    type Error = String;

    fn try_from(text: String) -> Result<Ports, String> {
        text.parse()
    }
}

impl From<Ports> for String {
    fn from(ports: Ports) -> String {
        ports.to_string()
    }
}

impl fmt::Display for Ports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.count() {
            1 => write!(f, "{}", self.first),
            _ => write!(f, "{}-{}", self.first, self.last),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::Ipv4Addr;

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    #[test]
    fn ranges_are_read_and_nonsense_is_not() {
        for (text, shown, count) in
            [("29600-29700", "29600-29700", 101), ("80", "80", 1), (" 1 - 65535", "1-65535", 65535)]
        {
            let ports: Ports = text.parse().unwrap();
            assert_eq!((ports.to_string().as_str(), ports.count()), (shown, count));
            let json = serde_json::to_string(&ports).unwrap();
            assert_eq!(serde_json::from_str::<Ports>(&json).unwrap(), ports);
        }
        for text in ["", "-", "0-5", "5-", "a-b", "1-65536", "1-2-3", "-1", "29600:29700"] {
            let error = text.parse::<Ports>().unwrap_err();
            assert!(error.contains("as in \"29600-29700\""), "{text}: {error}");
        }
        let error = "9-5".parse::<Ports>().unwrap_err();
        assert!(error.ends_with("write \"5-9\""), "{error}");
    }

    #[test]
    fn a_rank_takes_the_first_free_port() {
        let (ports, low, high) = (0..100)
            .find_map(|_| {
                let low = TcpListener::bind((HERE, 0)).ok()?;
                let first = low.local_addr().ok()?.port();
                let high = TcpListener::bind((HERE, first.checked_add(1)?)).ok()?;
                Some((Ports { first, last: first + 1 }, low, high))
            })
            .unwrap();
        let Ports { first, last } = ports;
        assert_eq!(ports.taken(HERE), [first, last]);
        let error = ports.listen(HERE, 3).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        drop(high);
        assert_eq!(ports.taken(HERE), [first]);
        for rank in 0..2 {
            let listener = ports.listen(HERE, rank).unwrap();
            assert_eq!(listener.local_addr().unwrap().port(), last);
        }
        drop(low);
        let listener = ports.listen(HERE, 2).unwrap();
        assert_eq!(listener.local_addr().unwrap().port(), first);
    }
}
