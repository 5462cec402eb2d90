//! Prepares conversations: tokens of both splits as for text, and the tokens that count in `train.turns` and
//! `val.turns`.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use kiln_sys::words::number_of;
use rayon::prelude::*;

use super::chat::ChatTemplate;
use super::conversation::{Entry, read};
use super::division::Division;
use super::encode::SplitWriter;
use super::info::{ChatInfo, FORMAT_VERSION, INFO_FILE, TOKENIZER_FILE};
use super::inputs::{INPUTS_FILE, Inputs};
use super::listing::Listing;
use super::progress::{Counted, OnProgress, Progress, Remark, check};
use super::sums::Sums;
use super::tokenizer::{TokenNames, read_named_tokenizer};
use super::{DataError, DataInfo, Message, PrepareOptions, Result, Split, TokenWidth, Tokenizer};

/// Conversations that are rendered and encoded together. The first batch is divided into the splits by size.
const BATCH: usize = 1000;

/// The tokens of a conversation.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Encoded {
    pub(super) ids: Vec<u32>,
    /// Ranges of the tokens that count.
    pub(super) counting: Vec<Range<usize>>,
}

/// Writes the files of a prepared folder, as [`prepare()`](super::prepare()) does for text.
pub(super) fn fill(
    folder: &Path,
    Listing { files, .. }: Listing,
    stop: &AtomicBool,
    options: &PrepareOptions,
    progress: OnProgress<'_>,
) -> Result<DataInfo> {
    let (path, template) = options.chat_model()?;
    let (given, names) = (read_named_tokenizer(path, stop)?, TokenNames::next_to(path)?);
    // Reports inputs that are not conversations before files are hashed.
    files.iter().try_for_each(|listed| read(listed).map(drop))?;
    let digests: Result<Vec<_>> = files.par_iter().map(|listed| Ok((listed, listed.digest()?))).collect();
    let inputs = Inputs::new(digests?, options, &given)?;
    let saved = folder.join(TOKENIZER_FILE);
    Tokenizer::from_file(given, path)?.save(&saved)?;
    let tokenizer =
        Tokenizer::load(saved)?.ending_as_named(options.end_of_text.as_deref(), &names)?.for_rendered_text();
    let end_of_text = tokenizer.end_of_text()?;
    let mut writer = Writer {
        train: ChatWriter::create(folder, Split::Train, tokenizer.vocab_size())?,
        validation: ChatWriter::create(folder, Split::Validation, tokenizer.vocab_size())?,
        division: None,
        conversations: 0,
    };
    let limit = options.limit.unwrap_or(u64::MAX);
    let input_bytes = files.iter().map(|listed| listed.bytes).sum();
    let (mut skipped, mut bad_lines, mut batch) = (0_u64, Counted::default(), Vec::new());
    let (mut read_files, mut entries) = (files.iter(), None);
    while writer.conversations + skipped < limit {
        check(stop)?;
        let most = (limit - writer.conversations - skipped).min(BATCH as u64) as usize;
        while batch.len() < most {
            let Some((path, open)) = &mut entries else {
                let Some(listed) = read_files.next() else { break };
                entries = Some((&listed.path, read(listed)?));
                continue;
            };
            match open.next().transpose()? {
                Some(entry) => batch.push((*path, entry)),
                None => entries = None,
            }
        }
        if batch.is_empty() {
            break;
        }
        // Bounds the time after a failure that ends the preparation: a hostile template takes long for each conversation.
        let failed = AtomicBool::new(false);
        let encoded: Vec<(&PathBuf, u64, Result<Option<Encoded>>)> = batch
            .par_drain(..)
            .map(|(path, Entry { line, conversation })| {
                if failed.load(Ordering::Relaxed) || stop.load(Ordering::Relaxed) {
                    return (path, line, Ok(None));
                }
                let named = |problem| DataError::Conversation { path: path.clone(), line, problem };
                let encoded = conversation.map_err(named).and_then(|messages| {
                    encode(&tokenizer, &template, &messages).map_err(|error| match error {
                        error @ DataError::ChatTemplateLimit { .. } => error,
                        error => named(error.to_string()),
                    })
                });
                if let Err(error) = &encoded {
                    let is_skipped =
                        options.skip_bad_lines && matches!(error, DataError::Conversation { .. });
                    failed.fetch_or(!is_skipped, Ordering::Relaxed);
                }
                (path, line, encoded)
            })
            .collect();
        check(stop)?;
        let mut whole = Vec::new();
        for (path, line, encoded) in encoded {
            match encoded {
                Ok(Some(encoded)) => whole.push(encoded),
                Ok(None) => skipped += 1,
                Err(DataError::Conversation { problem, .. }) if options.skip_bad_lines => {
                    bad_lines.add(|| format!("{}, line {line}: {problem}", path.display()));
                }
                Err(error) => return Err(error),
            }
        }
        writer.write(&whole, options)?;
        progress(Progress::Encoding {
            input_bytes,
            text_bytes: 0,
            documents: writer.conversations,
            tokens: writer.train.tokens.tokens() + writer.validation.tokens.tokens(),
        });
    }
    if bad_lines.count > 0 {
        let (lines, was) = (number_of(bad_lines.count, "line"), bad_lines.choose("was", "were"));
        progress(Progress::Remark(Remark::warning(format!("{lines} {was} skipped: {bad_lines}"))));
    }
    if skipped > 0 {
        let count = number_of(skipped, "conversation");
        let message = format!("{count} without a turn of the assistant skipped: no token of them counts");
        progress(Progress::Remark(Remark::note(message)));
    }
    let conversations = writer.conversations;
    if conversations < 2 {
        return Err(DataError::TooFewConversations { conversations });
    }
    let (train, train_counting) = writer.train.finish()?;
    let (validation, validation_counting) = writer.validation.finish()?;
    let info = DataInfo {
        format_version: FORMAT_VERSION,
        dtype: TokenWidth::for_vocabulary(tokenizer.vocab_size()),
        vocab_size: tokenizer.vocab_size(),
        end_of_text,
        train,
        validation,
        documents: conversations,
        skipped_files: 0,
        unknown: 0,
        unigram_entropy: None,
        source: None,
        chat: Some(ChatInfo { counting: [train_counting, validation_counting] }),
    };
    check(stop)?;
    inputs.save(folder)?;
    info.save(folder)?;
    let [train, validation] = [Split::Train, Split::Validation];
    let files = [INFO_FILE, INPUTS_FILE, TOKENIZER_FILE].into_iter().chain(
        [train, validation]
            .into_iter()
            .flat_map(|split| [split.file_name(), split.block_sums_name(), split.turns_name()]),
    );
    Sums::compute(folder, &files.collect::<Vec<_>>(), &[])?.save(folder)?;
    Ok(info)
}

/// Renders and encodes a conversation. Returns `None` if no token counts.
///
/// The assistant's turns count, with the token that ends each: the blocks that the template marks with
/// `{% generation %}`, or else the text from the generation prompt to the end of the turn.
pub(super) fn encode(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    messages: &[Message],
) -> Result<Option<Encoded>> {
    let turns: Vec<usize> =
        (0..messages.len()).filter(|index| messages[*index].role == "assistant").collect();
    if turns.is_empty() {
        return Ok(None);
    }
    let mut prefixes = vec![(messages.len(), false)];
    if !template.has_generation() {
        prefixes.extend(turns.iter().flat_map(|turn| [(*turn, true), (turn + 1, false)]));
    }
    let mut rendered = template.render_marked(messages, &prefixes)?;
    let whole = rendered.remove(0);
    let mut ranges = whole.generation;
    for (pair, turn) in rendered.chunks(2).zip(&turns) {
        if let Some(part) = pair.iter().find(|part| !whole.text.starts_with(&part.text)) {
            let same = part.text.bytes().zip(whole.text.bytes()).take_while(|(a, b)| a == b).count();
            let problem = format!(
                "it writes the messages before the answer in message {} differently when more \
                 messages follow (from byte {same}), so its tokens are unknown; mark the assistant's text in the \
                 template with {{% generation %}} and {{% endgeneration %}}",
                turn + 1
            );
            return Err(DataError::ChatTemplate { path: template.path().to_path_buf(), problem });
        }
        ranges.push(pair[0].text.len()..pair[1].text.len());
    }
    let (ids, counting) = tokenizer.encode_ranges(&whole.text, &ranges)?;
    Ok((!counting.is_empty()).then_some(Encoded { ids, counting }))
}

struct Writer {
    train: ChatWriter,
    validation: ChatWriter,
    division: Option<Division>,
    conversations: u64,
}

impl Writer {
    fn write(&mut self, whole: &[Encoded], options: &PrepareOptions) -> Result<()> {
        let sizes = || whole.iter().map(|encoded| encoded.ids.len() as u64).collect::<Vec<_>>();
        let division = match &self.division {
            Some(division) => division,
            None if whole.is_empty() => return Ok(()),
            // Conversations are never divided.
            None => self.division.insert(Division::new(
                &sizes(),
                false,
                options.validation_fraction,
                options.seed,
            )),
        };
        for encoded in whole {
            match division.split_of(self.conversations) {
                Split::Train => self.train.write(encoded)?,
                Split::Validation => self.validation.write(encoded)?,
            }
            self.conversations += 1;
        }
        Ok(())
    }
}

/// Writes the conversations of a split. For each, the file of turns has the number of tokens, the number of ranges that
/// count, and their starts and ends, as little-endian `u32`.
struct ChatWriter {
    tokens: SplitWriter,
    path: PathBuf,
    turns: BufWriter<File>,
    counting: u64,
}

impl ChatWriter {
    fn create(folder: &Path, split: Split, vocab_size: usize) -> Result<Self> {
        let path = folder.join(split.turns_name());
        let file = File::create(&path).map_err(DataError::io("create", &path))?;
        let tokens = SplitWriter::create(folder, split, vocab_size)?;
        Ok(Self { tokens, path, turns: BufWriter::new(file), counting: 0 })
    }

    fn write(&mut self, Encoded { ids, counting }: &Encoded) -> Result<()> {
        self.tokens.write(ids, 0)?;
        let ranges = counting.iter().flat_map(|range| [range.start, range.end]);
        // The text has at most 64 MiB, so counts of tokens fit.
        let numbers = [ids.len(), counting.len()].into_iter().chain(ranges);
        let bytes: Vec<u8> = numbers.flat_map(|number| (number as u32).to_le_bytes()).collect();
        self.counting += counting.iter().map(|range| range.len() as u64).sum::<u64>();
        self.turns.write_all(&bytes).map_err(DataError::io("write", &self.path))
    }

    fn finish(self) -> Result<(super::SplitInfo, u64)> {
        let file = self.turns.into_inner().map_err(|error| error.into_error());
        file.and_then(|file| file.sync_all()).map_err(DataError::io("write", &self.path))?;
        let (info, _) = self.tokens.finish()?;
        Ok((super::SplitInfo { text_bytes: None, ..info }, self.counting))
    }
}

#[cfg(test)]
mod tests;
