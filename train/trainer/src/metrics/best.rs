//! The lowest validation loss of a run, over all of its starts, read from its metrics.

use std::io;
use std::path::Path;

use kiln_sys::LineReader;
use serde::Deserialize;

const KEY: &[u8] = b"\"val_loss\"";

/// The evaluation with the lowest loss.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
pub struct BestLoss {
    /// Step after which the evaluation was made.
    pub step: u64,
    /// Loss of the evaluation, in nats.
    pub val_loss: f64,
}

impl BestLoss {
    pub(super) fn find(path: &Path) -> io::Result<Option<Self>> {
        let mut lines = match LineReader::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            lines => lines?,
        };
        let mut best = None;
        while let Some(line) = lines.next_line()? {
            if line.windows(KEY.len()).any(|window| window == KEY)
                && let Ok(found) = serde_json::from_slice::<BestLoss>(line)
            {
                best = Self::lower(best, found);
            }
        }
        Ok(best)
    }

    /// Returns the evaluation with the lower loss; `best` if the losses are equal or that of `next` is not finite.
    pub(super) fn lower(best: Option<Self>, next: Self) -> Option<Self> {
        let is_lower = |best: Self| next.val_loss < best.val_loss;
        if next.val_loss.is_finite() && best.is_none_or(is_lower) { Some(next) } else { best }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_loss_of_all_starts_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        assert_eq!(BestLoss::find(&path).unwrap(), None);
        let lines = "{\"step\":1,\"loss\":1.0}\n{\"step\":2,\"val_loss\":3.5,\"val_tokens\":8}\n\
                     {\"step\":4,\"val_loss\":3.25}\n{\"step\":6,\"val_loss\":3.25}\n\
                     {\"step\":8,\"val_loss\":null}\n{\"step\":9,\"val_lo";
        std::fs::write(&path, lines).unwrap();
        assert_eq!(BestLoss::find(&path).unwrap(), Some(BestLoss { step: 4, val_loss: 3.25 }));
    }
}
