//! Conversations, packed into samples.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::sums::read_small_file;
use super::{DataError, DataInfo, Result, Split, TokenFile};

/// A conversation in the token file.
#[derive(Debug, PartialEq, Eq)]
struct Conversation {
    /// Its tokens in the file.
    tokens: Range<u64>,
    /// Ranges of its tokens that count, from its start.
    counting: Vec<Range<usize>>,
}

/// The conversations of a split, packed into samples of one sequence length.
///
/// A sample has several whole conversations, longest first, and padding of weight 0 at its end. Conversations that do not
/// fit into a sample are cut at their ends. Packing is best-fit decreasing: each conversation goes where the least room
/// remains (Ding et al. 2024, "Fewer Truncations Improve Language Modeling").
#[derive(Debug)]
pub struct PackedChats {
    file: TokenFile,
    conversations: Vec<Conversation>,
    /// Indices of the conversations of each sample.
    samples: Vec<Vec<usize>>,
    seq_len: usize,
    cut: u64,
    omitted: u64,
}

impl PackedChats {
    /// Opens a split of a folder of prepared conversations, for samples of `seq_len` tokens.
    ///
    /// # Errors
    ///
    /// If a file is missing, unusable or changed, or no token counts.
    pub(super) fn open(folder: &Path, split: Split, seq_len: usize) -> Result<Self> {
        if seq_len == 0 {
            return Err(DataError::ZeroSequenceLength);
        }
        let file = TokenFile::open(folder, split, 1)?;
        let path = folder.join(split.turns_name());
        let conversations = parse(&read_small_file(folder, split.turns_name())?, file.info(), split)
            .map_err(|problem| DataError::Damaged {
                folder: folder.to_path_buf(),
                problems: vec![format!("{}: {problem}", path.display())],
            })?;
        let room = seq_len + 1;
        let length = |chat: &Conversation| (chat.tokens.end - chat.tokens.start).min(room as u64) as usize;
        // The first token of a sample is no target.
        let counts =
            |chat: &Conversation| chat.counting.iter().any(|range| range.start.max(1) < range.end.min(room));
        let lengths: Vec<(usize, usize)> = conversations
            .iter()
            .enumerate()
            .filter(|(_, chat)| counts(chat))
            .map(|(index, chat)| (index, length(chat)))
            .collect();
        if lengths.is_empty() {
            return Err(DataError::NothingCounts { path: PathBuf::from(folder), seq_len });
        }
        let cut = lengths.iter().filter(|(index, length)| {
            let tokens = &conversations[*index].tokens;
            tokens.end - tokens.start > *length as u64
        });
        let (cut, omitted) = (cut.count() as u64, (conversations.len() - lengths.len()) as u64);
        Ok(Self { file, samples: pack(lengths, room), conversations, seq_len, cut, omitted })
    }

    /// Returns the number of samples.
    pub fn num_samples(&self) -> u64 {
        self.samples.len() as u64
    }

    /// Returns the number of input tokens, or of target tokens, of a sample.
    pub fn seq_len(&self) -> usize {
        self.seq_len
    }

    /// Returns the number of conversations.
    pub fn conversations(&self) -> u64 {
        self.conversations.len() as u64
    }

    /// Returns a sentence about conversations that are longer than a sample; `None` if there are none.
    pub fn too_long(&self) -> Option<String> {
        (self.cut + self.omitted > 0).then(|| {
            format!(
                "of {} conversations, {} are cut at the end and {} are omitted, because they are longer than \
                 data.seq_len = {}",
                self.conversations(),
                self.cut,
                self.omitted,
                self.seq_len
            )
        })
    }

    /// Compares a few blocks of the token file with their checksums; see [`TokenFile::check`].
    pub(super) fn check(&self) -> Result<()> {
        self.file.check()
    }

    /// Appends the tokens of a sample to `inputs` and `targets`, and returns the weights of the targets: 1 for those
    /// that count, otherwise 0.
    pub(super) fn read(&self, index: u64, inputs: &mut Vec<i32>, targets: &mut Vec<i32>) -> Result<Vec<f32>> {
        let place = usize::try_from(index).ok().and_then(|index| self.samples.get(index));
        let chats = place.ok_or_else(|| DataError::SampleOutOfRange {
            path: self.file.path().to_path_buf(),
            sample: index,
            samples: self.num_samples(),
        })?;
        let room = self.seq_len + 1;
        let (mut tokens, mut weights) = (Vec::with_capacity(room), vec![0.0; room]);
        for chat in chats.iter().map(|index| &self.conversations[*index]) {
            let start = tokens.len();
            let length = (chat.tokens.end - chat.tokens.start).min((room - start) as u64) as usize;
            self.file.read_tokens(chat.tokens.start, length, index, &mut tokens)?;
            for range in &chat.counting {
                // The first token of a conversation does not follow from the one before.
                let (first, end) = (range.start.clamp(1, length.max(1)), range.end.min(length));
                weights[start + first.min(end)..start + end].fill(1.0);
            }
        }
        tokens.resize(room, self.file.info().end_of_text as i32);
        inputs.extend_from_slice(&tokens[..self.seq_len]);
        targets.extend_from_slice(&tokens[1..]);
        weights.remove(0);
        Ok(weights)
    }
}

/// Reads a file of turns, whose numbers are little-endian `u32`: for each conversation, the number of tokens, the number
/// of ranges that count, and the starts and ends of these.
fn parse(content: &[u8], info: &DataInfo, split: Split) -> Result<Vec<Conversation>, String> {
    let (numbers, rest) = content.as_chunks();
    if !rest.is_empty() {
        return Err("its size is not a multiple of 4".to_owned());
    }
    let mut numbers = numbers.iter().map(|bytes| u32::from_le_bytes(*bytes) as usize);
    let (mut conversations, mut start) = (Vec::new(), 0);
    while let Some(length) = numbers.next() {
        let mut next = || numbers.next().ok_or("it ends in the middle of a conversation");
        let mut counting = Vec::new();
        for _ in 0..next()? {
            let range = next()?..next()?;
            if range.start >= range.end || range.end > length {
                return Err(format!("a range is {range:?} in a conversation of {length} tokens"));
            }
            counting.push(range);
        }
        conversations.push(Conversation { tokens: start..start + length as u64, counting });
        start += length as u64;
    }
    match info.split(split).tokens {
        tokens if tokens == start => Ok(conversations),
        tokens => Err(format!("it describes {start} tokens, and the token file has {tokens}")),
    }
}

/// Packs items of the given lengths, each at most `room`, into bins. Returns the items of each bin.
fn pack(mut lengths: Vec<(usize, usize)>, room: usize) -> Vec<Vec<usize>> {
    lengths.sort_by_key(|(index, length)| (std::cmp::Reverse(*length), *index));
    let mut bins: Vec<Vec<usize>> = Vec::new();
    // Bins by the room that they have left, oldest first.
    let mut open: BTreeMap<usize, VecDeque<usize>> = BTreeMap::new();
    for (index, length) in lengths {
        let found =
            open.range_mut(length..).next().map(|(left, bins)| (*left, bins.pop_front(), bins.is_empty()));
        let (left, bin) = match found {
            Some((left, Some(bin), is_last)) => {
                if is_last {
                    open.remove(&left);
                }
                (left, bin)
            }
            _ => {
                bins.push(Vec::new());
                (room, bins.len() - 1)
            }
        };
        bins[bin].push(index);
        if left > length {
            open.entry(left - length).or_default().push_back(bin);
        }
    }
    bins
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_fills_bins_and_keeps_every_item() {
        let lengths = [3, 7, 10, 2, 8, 5, 5, 1].into_iter().enumerate().collect();
        let bins = pack(lengths, 10);
        assert_eq!(bins, [vec![2], vec![4, 3], vec![1, 0], vec![5, 6], vec![7]]);
        let bins = pack((0..1000).map(|index| (index, index * 7919 % 97 + 1)).collect(), 128);
        let mut items: Vec<usize> = bins.iter().flatten().copied().collect();
        items.sort_unstable();
        assert_eq!(items, (0..1000).collect::<Vec<_>>());
        let tokens: usize = (0..1000).map(|index| index * 7919 % 97 + 1).sum();
        assert!(bins.len() <= tokens.div_ceil(128) * 101 / 100, "{} bins for {tokens} tokens", bins.len());
    }
}
