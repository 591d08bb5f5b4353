//! `muxflow manual`: writes man pages and shell completions, made from the commands themselves.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, CommandFactory as _};
use clap_complete::Shell;

/// Write man pages and shell completions below a directory, as `cargo xtask dist` does.
#[derive(Debug, Args)]
pub(crate) struct ManualArgs {
    /// The directory, such as /usr/local/share.
    dir: PathBuf,
}

fn make(dir: &Path) -> anyhow::Result<()> {
    fs::create_dir_all(dir).with_context(|| format!("cannot make {}", dir.display()))
}

pub(crate) fn run(args: &ManualArgs) -> anyhow::Result<ExitCode> {
    let mut command = crate::Cli::command();
    let man = args.dir.join("man/man1");
    make(&man)?;
    // One page for the program and one for each command.
    clap_mangen::generate_to(command.clone(), &man)
        .with_context(|| format!("cannot write man pages to {}", man.display()))?;
    let shells = [
        (Shell::Bash, "bash-completion/completions", "muxflow"),
        (Shell::Zsh, "zsh/site-functions", "_muxflow"),
        (Shell::Fish, "fish/vendor_completions.d", "muxflow.fish"),
    ];
    for (shell, place, file) in shells {
        let dir = args.dir.join(place);
        make(&dir)?;
        let mut text = Vec::new();
        clap_complete::generate(shell, &mut command, "muxflow", &mut text);
        let path = dir.join(file);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}
