//! Text of your own, made by a program, and all commands of `kiln` on it. One more command writes the text
//! and prepares it:
//!
//!     cargo run --release --example own_data -- make runs/data/sums
//!     cargo run --release --example own_data -- train configs/quickstart.toml \
//!         --set 'data.text=[]' --set data.path=runs/data/sums --out runs/sums
//!     cargo run --release --example own_data -- generate runs/sums --prompt "12+7=" --max-tokens 8

use std::env::args_os;
use std::error::Error;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::ExitCode;

use kiln::data::{self, PrepareOptions, TokenizerSource};
use kiln::process::CountingAllocator;
use kiln::registry::Registry;
use kiln_model::Key;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const DOCUMENTS: u64 = 2_000;

/// One document: twenty sums. It depends on the document's number alone, so the text is the same every time.
fn document(number: u64) -> String {
    let key = Key::new(1).fork("sums").fork_index(number);
    let term = |at: u64| (key.uniform(at) * 100.0) as u64;
    (0..20)
        .map(|line| (term(2 * line), term(2 * line + 1)))
        .map(|(a, b)| format!("{a}+{b}={}\n", a + b))
        .collect()
}

/// Writes the documents into a file beside `out`, one per line as JSON, and prepares `out` from it: its
/// tokens and the tokenizer.
fn make(out: &Path) -> Result<(), Box<dyn Error>> {
    let text = out.with_extension("jsonl");
    if let Some(folder) = out.parent() {
        fs::create_dir_all(folder)?;
    }
    let mut file = BufWriter::new(File::create_new(&text)?);
    for number in 0..DOCUMENTS {
        writeln!(file, "{}", serde_json::json!({ "text": document(number) }))?;
    }
    file.into_inner()?.sync_all()?;
    let tokenizer = TokenizerSource::Train { vocab_size: 300 };
    let options = PrepareOptions::new(vec![text], out.to_owned(), tokenizer);
    let info = data::prepare(&options, &mut |_| ())?;
    println!("{} holds {} tokens: train with --set data.path={0}", out.display(), info.train.tokens);
    Ok(())
}

fn main() -> ExitCode {
    let arguments: Vec<_> = args_os().skip(1).collect();
    match &arguments[..] {
        [command, out] if command == "make" => match make(Path::new(out)) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("error: {error}");
                ExitCode::FAILURE
            }
        },
        _ => kiln::cli::main(Registry::default()),
    }
}
