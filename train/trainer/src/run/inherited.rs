//! Files and settings that a run inherits from the folder of its weights.

use std::path::PathBuf;
use std::sync::Arc;

use crate::error::Result;
use kiln_checkpoint::hugging_face::{self, TokenIds};
use kiln_checkpoint::source::ModelSource;
use kiln_config::Config;
use kiln_data::{self as data, DataInfo, Tokenizer};
use kiln_sys::files;

/// Files and settings from the folder of a run's weights, for the run's checkpoints and exports.
pub struct Inherited {
    /// Names and contents of small files: the tokenizer of the data, with its chat template and settings.
    pub files: Vec<(String, Arc<[u8]>)>,
    /// Token ids that end a text, in addition to the tokenizer's own.
    pub end_ids: Vec<u32>,
    /// The longest sequence, in tokens, that the model supports.
    pub context_length: usize,
    /// The context length, if the configuration or the weights set it.
    pub given_context: Option<usize>,
    /// The tokenizer of the weights, if the data use a different one.
    pub other_tokenizer: Option<PathBuf>,
}

impl Inherited {
    /// Reads the files and settings that a run with `config` inherits from `source`, or fails if one is unreadable.
    /// Omits the chat template and end tokens if the data's `tokenizer` differs from the weights' tokenizer.
    /// The token that ends documents also ends generated text; `generation_config.json` declares it if no file does.
    pub(super) fn of(
        source: Option<&ModelSource>,
        config: &Config,
        data: &DataInfo,
        tokenizer: &Arc<[u8]>,
    ) -> Result<Self> {
        let is_other = |own: &PathBuf| {
            let content = files::read(own, files::MAX_WHOLE);
            content.is_ok_and(|content| data::tokenizers_differ(&content, tokenizer))
        };
        let other_tokenizer = source.map(ModelSource::tokenizer).filter(is_other);
        let mut files = vec![("tokenizer.json".to_owned(), tokenizer.clone())];
        // The template next to `data.tokenizer` has written the conversations.
        let of_chats = config.data.tokenizer.as_deref().filter(|_| !config.data.chat.is_empty());
        let of_chats = of_chats.map(|path| if path.is_dir() { path } else { path.parent().unwrap_or(path) });
        let of_source = source.filter(|_| other_tokenizer.is_none()).map(ModelSource::tokenizer_folder);
        let folder_of_files = of_chats.filter(|folder| folder.is_dir()).or(of_source);
        let mut ids = match folder_of_files {
            Some(folder) => hugging_face::token_ids(folder)?,
            None => TokenIds::default(),
        };
        let end = data.end_of_text;
        let path = config.data.path.join("tokenizer.json");
        let is_known = match ids.end.is_empty() {
            true => {
                Tokenizer::from_file(tokenizer.to_vec(), &path)?.end_of_text().is_ok_and(|own| own == end)
            }
            false => ids.end.contains(&end),
        };
        if !is_known {
            ids.end.push(end);
        }
        match folder_of_files {
            Some(folder) => {
                let carried = hugging_face::carried_files(folder, &ids)?;
                files.extend(carried.into_iter().filter(|(name, _)| name != "tokenizer.json"));
            }
            None if !is_known => files.push(hugging_face::generation_file(&ids)),
            None => {}
        }
        let end_ids = ids.end;
        let given_context = config.model.context_length.or(source.and_then(ModelSource::given_context));
        let trained = source.map_or(0, ModelSource::context_length).max(config.data.seq_len);
        let context_length = given_context.unwrap_or(trained);
        Ok(Inherited { files, end_ids, context_length, given_context, other_tokenizer })
    }

    pub(super) fn beyond_context(&self, config: &Config) -> Option<String> {
        let (context, seq_len) = (self.context_length, config.data.seq_len);
        (seq_len > context).then(|| {
            format!(
                "data.seq_len = {seq_len} is longer than the context length of the model, {context} tokens, which \
                 checkpoints and exports keep. To change it, set model.context_length = {seq_len}"
            )
        })
    }
}
