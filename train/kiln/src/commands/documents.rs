//! Files generated from the definition of the command line: shell completions and manual pages.

use std::fs;
use std::path::PathBuf;

use clap::{Args, Command};
use clap_complete::Shell;

use kiln_train::error::{Result, TrainError};

#[derive(Args)]
pub(crate) struct CompletionsArgs {
    /// Shell to write the script for.
    shell: Shell,
}

#[derive(Args)]
pub(crate) struct ManArgs {
    /// Output folder, such as ~/.local/share/man/man1.
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
}

impl CompletionsArgs {
    pub(crate) fn run(self, mut kiln: Command) -> String {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut kiln, "kiln", &mut script);
        String::from_utf8_lossy(&script).trim_end().to_owned()
    }
}

impl ManArgs {
    /// Writes a manual page for every command; returns a message for the user.
    pub(crate) fn run(self, kiln: Command) -> Result<String> {
        let out = &self.out;
        let written = fs::create_dir_all(out).and_then(|()| clap_mangen::generate_to(kiln, out));
        written.map_err(TrainError::io("write", out))?;
        Ok(format!("the manual pages are in {}: man {}/kiln.1", out.display(), out.display()))
    }
}
