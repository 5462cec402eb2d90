//! Turns text into training samples.
//!
//! [`prepare()`] writes a folder of tokens from text files, once. Training and evaluation read samples from it.
//!
//! # The folder on disk
//!
//! | file             | content                                                         |
//! |------------------|-----------------------------------------------------------------|
//! | `train.bin`      | token ids of the training split, one after the other            |
//! | `val.bin`        | token ids of the validation split, in the same form             |
//! | `train.crc`, `val.crc` | CRC-64/NVME of each block of the token files, little-endian |
//! | `data.json`      | [`DataInfo`]: format version, width, vocabulary, counts, checksums |
//! | `tokenizer.json` | the tokenizer that produced the ids, in the `tokenizers` format |
//! | `inputs.json`    | the source of the data: options, and each file with size, modification time and SHA-256 |
//! | `train.turns`, `val.turns` | the tokens that count, if the data are conversations |
//! | `SHA256SUMS`     | SHA-256 of all of these files, as `sha256sum --check` reads it |
//!
//! A token file has no header. Ids are little-endian `u16`, or `u32` when the vocabulary is larger than 65,536. An
//! end-of-text token closes every document. Folders from other programs may lack the checksums, the unigram figures and
//! `inputs.json`.
//!
//! A folder under construction is hidden and lies next to its final place. A failed or stopped preparation removes it.
//!
//! # Samples
//!
//! With a sequence length of `L`, sample `k` is the `L + 1` tokens `k * L ..= (k + 1) * L`: the first `L` are the
//! inputs and the last `L` are the targets. A file of `T` tokens has `(T - 1) / L` samples.
//!
//! Conversations are packed instead: a sample has several whole ones; see [`PackedChats`].
//!
//! A program can make its samples itself, as a [`DataSource`]: its folder has `data.json` and `tokenizer.json` only.
//!
//! [`SampleOrder`] defines which sample comes at each position of a run, and [`BatchSource`] reads a range of
//! positions. A run resumes exactly, on any number of ranks, from position `step * global_batch` (see [`slice_for`]).

mod batch;
mod blocks;
mod builtin;
mod chat;
mod chat_prompt;
mod conversation;
mod corpus;
mod counts;
mod cut;
mod dataset;
mod division;
mod document;
mod encode;
mod error;
mod info;
mod inputs;
mod jsonl;
mod listing;
mod mix;
mod options;
mod order;
mod output;
mod packed;
#[cfg(feature = "parquet")]
mod parquet;
mod piece;
mod prepare;
mod prepare_chat;
mod progress;
mod samples;
mod source;
mod stream;
mod sums;
mod text_file;
mod tokenizer;
mod verify;

pub use batch::{Batch, BatchSource, slice_for};
pub use chat::{ChatTemplate, Message};
pub use chat_prompt::encode_chat_prompt;
pub use dataset::TokenFile;
pub use error::DataError;
use error::Result;
pub use info::{
    ChatInfo, DataInfo, FORMAT_VERSION, SourceInfo, Split, SplitInfo, TokenWidth, UnigramEntropy,
};
pub use jsonl::describe as describe_json;
pub use listing::check_input;
pub use options::{PrepareOptions, TokenizerSource};
pub use order::SampleOrder;
pub use packed::PackedChats;
pub use prepare::{differences, prepare, prepare_until_stopped};
pub use progress::{OnProgress, Progress, Remark};
pub use samples::Samples;
pub use source::{DataInit, DataSource, Sample, SourceError, Sources};
pub use stream::Stream;
pub use tokenizer::{Tokenizer, VOCABULARY_MINIMUM, read_tokenizer_of, tokenizers_differ};
pub use verify::{Verified, verify};

use std::path::{Path, PathBuf};

/// Reports whether `folder` holds prepared data, complete or not.
pub fn is_prepared(folder: &Path) -> bool {
    folder.join(info::INFO_FILE).exists()
}

/// Returns the path of the tokenizer of a folder of prepared data.
///
/// # Errors
///
/// When the folder has no tokenizer.
pub fn tokenizer_of(folder: &Path) -> Result<PathBuf> {
    let path = folder.join(info::TOKENIZER_FILE);
    match path.exists() {
        true => Ok(path),
        false => {
            let folder = folder.to_owned();
            Err(DataError::NotPrepared { folder, file: info::TOKENIZER_FILE })
        }
    }
}
