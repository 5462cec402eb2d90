//! Samples of prepared data, read from a token file or made by a program.

use std::path::Path;

use super::source::OwnSamples;
use super::{DataInfo, PackedChats, Result, Sources, Split, TokenFile};

/// The samples of one split of prepared data.
#[derive(Debug)]
pub enum Samples {
    /// Samples of a token file.
    File(Box<TokenFile>),
    /// Samples that consist of conversations.
    Chats(Box<PackedChats>),
    /// Samples of a [`DataSource`](super::DataSource).
    Own(OwnSamples),
}

impl Samples {
    /// Opens a split of a folder of prepared data, for samples of `seq_len` tokens. `sources` has the sources that
    /// the program adds.
    ///
    /// # Errors
    ///
    /// As for [`TokenFile::open`], and if the samples come from a source that the program does not have.
    pub fn open(folder: impl AsRef<Path>, split: Split, seq_len: usize, sources: &Sources) -> Result<Self> {
        let folder = folder.as_ref();
        let info = DataInfo::load(folder)?;
        match info.source {
            Some(source) => OwnSamples::open(sources, &source, split, seq_len).map(Samples::Own),
            None if info.chat.is_some() => {
                PackedChats::open(folder, split, seq_len).map(|chats| Samples::Chats(Box::new(chats)))
            }
            None => TokenFile::open(folder, split, seq_len).map(Samples::from),
        }
    }

    /// Returns the number of samples, or `None` if they are endless.
    pub fn num_samples(&self) -> Option<u64> {
        match self {
            Samples::File(file) => Some(file.num_samples()),
            Samples::Chats(chats) => Some(chats.num_samples()),
            Samples::Own(own) => own.num_samples(),
        }
    }

    /// Returns the number of input tokens, or of target tokens, of a sample.
    pub fn seq_len(&self) -> usize {
        match self {
            Samples::File(file) => file.seq_len(),
            Samples::Chats(chats) => chats.seq_len(),
            Samples::Own(own) => own.seq_len(),
        }
    }

    /// Returns the number of consecutive samples that belong together; see
    /// [`DataSource::group_size`](super::DataSource::group_size).
    pub fn group_size(&self) -> usize {
        match self {
            Samples::File(_) | Samples::Chats(_) => 1,
            Samples::Own(own) => own.group_size(),
        }
    }

    /// Returns whether samples have weights.
    pub fn is_weighted(&self) -> bool {
        match self {
            Samples::File(_) => false,
            Samples::Chats(_) => true,
            Samples::Own(own) => own.is_weighted(),
        }
    }

    /// Compares a few blocks of a token file with their checksums, as [`TokenFile::check`] does; reads the first
    /// sample of a source.
    ///
    /// # Errors
    ///
    /// If a block differs, or the sample cannot be read.
    pub fn check(&self) -> Result<()> {
        match self {
            Samples::File(file) => file.check(),
            Samples::Chats(chats) => chats.check(),
            Samples::Own(own) => own.read(0).map(drop),
        }
    }

    /// Appends the tokens of sample `index` to `inputs` (without the last) and to `targets` (without the first), and
    /// returns the weights of the targets, if there are any.
    ///
    /// # Errors
    ///
    /// If the sample does not exist, cannot be read, or is invalid.
    pub fn read(&self, index: u64, inputs: &mut Vec<i32>, targets: &mut Vec<i32>) -> Result<Vec<f32>> {
        match self {
            Samples::File(file) => file.read_sample(index, inputs, targets).map(|()| Vec::new()),
            Samples::Chats(chats) => chats.read(index, inputs, targets),
            Samples::Own(own) => {
                let sample = own.read(index)?;
                let ids = || sample.tokens.iter().map(|id| id.cast_signed());
                inputs.extend(ids().take(own.seq_len()));
                targets.extend(ids().skip(1));
                Ok(sample.weights)
            }
        }
    }
}

impl From<TokenFile> for Samples {
    fn from(file: TokenFile) -> Self {
        Samples::File(Box::new(file))
    }
}
