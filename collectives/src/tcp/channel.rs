//! An authenticated connection, whose traffic is plain or sealed in records.

use super::options::Seal;
use super::seal::{Key, Opener, Sealer};
use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;

pub(super) struct Channel {
    pub(super) reader: Reader,
    pub(super) writer: Writer,
}

impl Channel {
    pub(super) fn new(stream: Arc<TcpStream>, seal: Seal, keys: [&Key; 2]) -> Channel {
        let [sending, receiving] = keys;
        Channel {
            writer: Writer {
                stream: Arc::clone(&stream),
                sealer: Sealer::new(seal, sending),
                is_broken: false,
            },
            reader: Reader { stream, opener: Opener::new(seal, receiving) },
        }
    }

    pub(super) fn stream(&self) -> &Arc<TcpStream> {
        &self.reader.stream
    }
}

pub(super) struct Reader {
    pub(super) stream: Arc<TcpStream>,
    opener: Option<Box<Opener>>,
}

impl Read for Reader {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match &mut self.opener {
            None => (&*self.stream).read(into),
            Some(opener) => opener.read(&*self.stream, &mut [IoSliceMut::new(into)]),
        }
    }

    fn read_vectored(&mut self, into: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
        match &mut self.opener {
            None => (&*self.stream).read_vectored(into),
            Some(opener) => opener.read(&*self.stream, into),
        }
    }
}

/// The sending half. After a write that would block, the next write must start with the same bytes.
pub(super) struct Writer {
    pub(super) stream: Arc<TcpStream>,
    sealer: Option<Box<Sealer>>,
    is_broken: bool,
}

impl Writer {
    /// Sends a message within the socket's time limit. A failure on a sealed connection breaks it, because a partial
    /// record may have been sent.
    pub(super) fn deliver(&mut self, message: &[u8]) -> io::Result<()> {
        if self.is_broken {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let outcome = self.write_all(message);
        self.is_broken = outcome.is_err() && self.sealer.is_some();
        outcome
    }
}

impl Write for Writer {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match &mut self.sealer {
            None => (&*self.stream).write(from),
            Some(sealer) => sealer.write(&*self.stream, &[IoSlice::new(from)]),
        }
    }

    fn write_vectored(&mut self, from: &[IoSlice<'_>]) -> io::Result<usize> {
        match &mut self.sealer {
            None => (&*self.stream).write_vectored(from),
            Some(sealer) => sealer.write(&*self.stream, from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
