//! Encodes messages as frames: four bytes of length, then bincode. Frames may come from anyone, so a length is checked
//! before memory is allocated, also inside the frame.

use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, Read, Write};

pub(super) const HANDSHAKE_LIMIT: usize = 1024;

pub(super) const MESSAGE_LIMIT: usize = 4 << 20;

const CONFIG: bincode::config::Configuration<
    bincode::config::LittleEndian,
    bincode::config::Varint,
    bincode::config::Limit<MESSAGE_LIMIT>,
> = bincode::config::standard().with_limit::<MESSAGE_LIMIT>();

/// The reason why a frame could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The frame is longer than its sender may send.
    #[error("a frame of {length} bytes, where at most {limit} are allowed")]
    TooLong {
        /// The length in its header, or the length needed.
        length: usize,
        /// The maximum length.
        limit: usize,
    },
    /// The content is not the expected message.
    #[error("a frame does not contain a valid message: {0}")]
    Garbage(String),
    /// The connection failed or ended.
    #[error("{}", in_words(.0))]
    Io(#[from] io::Error),
}

/// Returns a sentence whose subject is the other side.
fn in_words(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => "it hung up".to_owned(),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "it did not answer in time".to_owned(),
        _ => error.to_string(),
    }
}

/// Encodes a message as one frame of at most `limit` bytes.
pub fn encode<T: Serialize>(message: &T, limit: usize) -> Result<Vec<u8>, FrameError> {
    let mut frame = vec![0; 4];
    bincode::serde::encode_into_std_write(message, &mut frame, CONFIG)
        .map_err(|error| FrameError::Garbage(error.to_string()))?;
    let length = frame.len() - 4;
    if length > limit {
        return Err(FrameError::TooLong { length, limit });
    }
    frame[..4].copy_from_slice(&(length as u32).to_le_bytes());
    Ok(frame)
}

/// Decodes the whole content of a frame.
pub fn decode<T: DeserializeOwned>(content: &[u8]) -> Result<T, FrameError> {
    let (message, used) = bincode::serde::decode_from_slice(content, CONFIG)
        .map_err(|error| FrameError::Garbage(error.to_string()))?;
    if used != content.len() {
        let left = content.len() - used;
        return Err(FrameError::Garbage(format!("{left} bytes after its end")));
    }
    Ok(message)
}

pub(super) fn write<T: Serialize>(mut to: impl Write, message: &T, limit: usize) -> Result<(), FrameError> {
    Ok(to.write_all(&encode(message, limit)?)?)
}

/// Reads one frame of at most `limit` bytes.
pub fn read<T: DeserializeOwned>(mut from: impl Read, limit: usize) -> Result<T, FrameError> {
    let mut length = [0; 4];
    from.read_exact(&mut length)?;
    let length = u32::from_le_bytes(length) as usize;
    if length > limit {
        return Err(FrameError::TooLong { length, limit });
    }
    let mut content = vec![0; length];
    from.read_exact(&mut content)?;
    decode(&content)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::Call;
    use crate::call::CallSite;
    use crate::error::{Cause, CommError};
    use crate::label::{Label, Phase};
    use crate::tcp::message::{CalledOff, GroupName, ToRank, ToRendezvous, Trouble, TroubleKind};
    use crate::tcp::refused::{Refused, Why};
    use crate::tcp::wire::{HEADER, Header};
    use proptest::prelude::*;
    use proptest::test_runner::{Config, TestRunner};
    use std::net::Ipv6Addr;
    use std::time::Duration;

    fn trouble(kind: TroubleKind) -> Trouble {
        let group = GroupName { number: 7, name: "shard".into(), ranks: vec![2, 5] };
        let site = CallSite {
            group: "shard".into(),
            rank: 1,
            sequence: 1085,
            operation: crate::Operation::AllGather,
            label: Label::new("block 7", Phase::Forward),
        };
        Trouble { group, site, kind }
    }

    fn genuine() -> Vec<Vec<u8>> {
        let call = Call::barrier(Label::new("step", Phase::Loss));
        let calls = vec![Some(call), None];
        let mismatch = CommError::Mismatch { group: "world".into(), sequence: 3, calls };
        let timed_out = trouble(TroubleKind::TimedOut { waited: Duration::from_secs(60) });
        let from = Ipv6Addr::LOCALHOST.into();
        let refused = Refused { rank: 1, from, why: Why::Job("another".into()) };
        let to_rank = [
            ToRank::Beat,
            ToRank::Incomplete { missing: vec![1, 2], refused: vec![refused.clone()] },
            ToRank::CalledOff(CalledOff::Refused(refused)),
            ToRank::Collect { request: 9, at: Some((timed_out.group.clone(), 1085)) },
            ToRank::Failed { group: None, cause: Cause::Error(mismatch) },
        ];
        let to_rendezvous = [ToRendezvous::Beat, ToRendezvous::Trouble(timed_out), ToRendezvous::Goodbye];
        let to_rank = to_rank.iter().map(|message| encode(message, MESSAGE_LIMIT).unwrap());
        let rest = to_rendezvous.iter().map(|message| encode(message, MESSAGE_LIMIT).unwrap());
        to_rank.chain(rest).collect()
    }

    #[test]
    fn frames_come_back_as_they_went() {
        let sent = trouble(TroubleKind::Lost { peer: 0, left: true, reason: "x".into() });
        let frame = encode(&ToRendezvous::Trouble(sent.clone()), HANDSHAKE_LIMIT).unwrap();
        let back: ToRendezvous = read(&*frame, HANDSHAKE_LIMIT).unwrap();
        let ToRendezvous::Trouble(Trouble { group, site, kind }) = back else { panic!("{back:?}") };
        assert!(matches!(kind, TroubleKind::Lost { peer: 0, left: true, .. }), "{kind:?}");
        assert_eq!((group, site), (sent.group, sent.site));
    }

    #[test]
    fn limits_hold_on_both_sides() {
        let long = "x".repeat(HANDSHAKE_LIMIT);
        assert!(matches!(encode(&long, HANDSHAKE_LIMIT), Err(FrameError::TooLong { .. })));
        let frame = encode(&long, MESSAGE_LIMIT).unwrap();
        let error = read::<String>(&*frame, HANDSHAKE_LIMIT).unwrap_err();
        assert!(matches!(error, FrameError::TooLong { limit: HANDSHAKE_LIMIT, .. }));
        let mut trailing = encode(&1u8, MESSAGE_LIMIT).unwrap();
        trailing.push(0);
        assert!(matches!(decode::<u8>(&trailing[4..]), Err(FrameError::Garbage(_))));
    }

    fn decode_all(bytes: &[u8]) {
        let _ = read::<ToRank>(bytes, MESSAGE_LIMIT);
        let _ = read::<ToRendezvous>(bytes, MESSAGE_LIMIT);
        let _ = decode::<ToRank>(bytes);
        let _ = decode::<ToRendezvous>(bytes);
        crate::tcp::handshake::decode_all(bytes);
        if let Some(Ok(header)) = bytes.get(..HEADER).map(<[u8; HEADER]>::try_from) {
            let decoded = Header::decode(&header);
            assert!(decoded.is_none_or(|known| known.encode() == header));
        }
    }

    fn fuzz(cases: u32) {
        let noise = proptest::collection::vec(any::<u8>(), 0..300);
        let edit = (any::<prop::sample::Index>(), any::<u8>(), 0..3u8);
        let damaged = (0..genuine().len(), proptest::collection::vec(edit, 1..8));
        let inputs = prop_oneof![
            noise.boxed(),
            damaged
                .prop_map(|(which, edits)| {
                    let mut frame = genuine().swap_remove(which);
                    for (index, byte, kind) in edits {
                        let at = index.index(frame.len() + 1).min(frame.len());
                        match kind {
                            0 if at < frame.len() => frame[at] = byte,
                            1 => frame.insert(at, byte),
                            _ => frame.truncate(at.max(1)),
                        }
                    }
                    frame
                })
                .boxed(),
        ];
        let config = Config { cases, failure_persistence: None, ..Config::default() };
        let mut runner = TestRunner::new_with_rng(
            config,
            proptest::test_runner::TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha),
        );
        runner
            .run(&inputs, |bytes| {
                decode_all(&bytes);
                Ok(())
            })
            .unwrap();
    }

    #[test]
    fn garbage_is_an_error() {
        fuzz(5_000);
    }

    /// Runs a million inputs under a memory limit, which an allocation of a claimed length would exceed.
    #[test]
    #[ignore = "takes minutes: cargo test --release -p kiln-collectives --lib -- --ignored fuzz"]
    fn fuzz_a_million_frames() {
        let limit = rustix::process::Rlimit { current: Some(4 << 30), maximum: Some(4 << 30) };
        rustix::process::setrlimit(rustix::process::Resource::As, limit).unwrap();
        fuzz(1_000_000);
    }
}
