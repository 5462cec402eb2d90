//! The command line.

use kiln_collectives::tcp::Seal;

pub const USAGE: &str = "\
usage: collectives_peer --backend local --ranks N
       collectives_peer --backend tcp|sockets --ranks N --rank R [--host HOST] --port PORT
                        [--job NAME] [--seal off|mac|encrypt]

  --backend  local: all ranks are threads of this process; tcp: this process is one rank;
             sockets: the same, and it does not read other ranks' memory
  --ranks    number of ranks in the world
  --rank     number of this rank, from 0
  --host     address on which rank 0 listens (default 127.0.0.1)
  --port     port of rank 0
  --job      name that all ranks of one world share
  --seal     protection of the traffic between ranks (default off)";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    Local,
    Tcp,
    /// [`Backend::Tcp`], as if every rank had its own machine.
    Sockets,
}

#[derive(Debug)]
pub struct Arguments {
    pub backend: Backend,
    pub ranks: usize,
    pub rank: usize,
    pub host: String,
    pub port: u16,
    pub job: Option<String>,
    pub seal: Seal,
}

impl Arguments {
    /// Parses the arguments; `None` if help was requested. The error is a sentence for the user.
    pub fn parse(mut words: impl Iterator<Item = String>) -> Result<Option<Arguments>, String> {
        let (mut backend, mut ranks, mut rank, mut port) = (None, None, None, None);
        let (mut host, mut job, mut seal) = ("127.0.0.1".to_string(), None, Seal::Off);
        while let Some(option) = words.next() {
            if matches!(option.as_str(), "-h" | "--help") {
                return Ok(None);
            }
            let mut value = || words.next().ok_or(format!("{option} needs a value"));
            match option.as_str() {
                "--backend" => {
                    backend = Some(match value()?.as_str() {
                        "local" => Backend::Local,
                        "tcp" => Backend::Tcp,
                        "sockets" => Backend::Sockets,
                        other => return Err(format!("unknown backend `{other}`")),
                    });
                }
                "--ranks" => ranks = Some(number(&option, &value()?)?),
                "--rank" => rank = Some(number(&option, &value()?)?),
                "--port" => port = Some(number(&option, &value()?)?),
                "--host" => host = value()?,
                "--job" => job = Some(value()?),
                "--seal" => seal = value()?.parse()?,
                _ => return Err(format!("unknown option `{option}`")),
            }
        }
        let backend = backend.ok_or("--backend is required")?;
        let ranks = ranks.ok_or("--ranks is required")?;
        if ranks == 0 {
            return Err("--ranks must be at least 1".into());
        }
        let (rank, port) = match backend {
            Backend::Local => (0, 0),
            Backend::Tcp | Backend::Sockets => (
                rank.ok_or("--rank, the number of this process, is required")?,
                port.ok_or("--port, on which rank 0 listens, is required")?,
            ),
        };
        if rank >= ranks {
            return Err(format!("--rank {rank} must be less than --ranks {ranks}"));
        }
        Ok(Some(Arguments { backend, ranks, rank, host, port, job, seal }))
    }
}

fn number<T: std::str::FromStr>(option: &str, value: &str) -> Result<T, String> {
    value.parse().map_err(|_| format!("{option} takes a number, not `{value}`"))
}
