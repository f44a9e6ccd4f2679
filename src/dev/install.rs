//! Makes sure that Postgres and RabbitMQ server programs are on this machine; on Debian and its relatives installs them by apt.
//!
//! Never lets a service of the system's start because of it, and never asks where nobody can answer.

use std::io::{BufRead, IsTerminal, Write};
use std::process::{Command, Stdio};

use super::account::is_root;
use super::find::Search;
use super::{Error, at, say};

/// Run by a root shell with the packages as arguments; the package list is the only thing that differs between machines.
const SCRIPT: &str = include_str!("apt-install.sh");

/// Installs what is missing.
///
/// # Errors
/// When something is missing and cannot be installed; the message says what to install.
pub fn ensure(search: &Search) -> Result<(), Error> {
    let packages = missing(search)?;
    if packages.is_empty() {
        return Ok(());
    }
    if search.on_path("apt-get").is_none() || search.on_path("dpkg").is_none() {
        return Err(Error::Refused(by_hand(&packages)));
    }
    install(search, &packages)?;
    let still = missing(search)?;
    if still.is_empty() {
        Ok(())
    } else {
        Err(Error::Refused(format!(
            "apt has no version that fits\n{}",
            by_hand(&still)
        )))
    }
}

fn missing(search: &Search) -> Result<Vec<&'static str>, Error> {
    let mut packages = Vec::new();
    if search.postgres(None)?.is_none() {
        packages.push("postgresql");
    }
    if search.rabbitmq()?.is_none() {
        packages.push("rabbitmq-server");
    }
    Ok(packages)
}

fn by_hand(packages: &[&str]) -> String {
    let mut lines = vec!["missing on this machine:".to_owned()];
    for package in packages {
        lines.push(match *package {
            "postgresql" => "  PostgreSQL 15, 16, 17 or 18, the server: programs postgres, initdb and createdb (or set PG_BIN_DIR to their directory)".to_owned(),
            _ => "  RabbitMQ 3.10 or newer, with Erlang: its script rabbitmq-server (or set RABBITMQ_BIN_DIR to its directory)".to_owned(),
        });
    }
    lines.push("  Fedora: dnf install postgresql-server rabbitmq-server · Arch: pacman -S postgresql rabbitmq · macOS: brew install postgresql@18 rabbitmq".to_owned());
    lines.push("They are only used privately, on ports of their own: no system service needs to run. (With Docker instead: see compose.yaml.)".to_owned());
    lines.join("\n")
}

fn install(search: &Search, packages: &[&str]) -> Result<(), Error> {
    let list = packages.join(" ");
    let sudo = if is_root()? { "" } else { "sudo " };
    say(&format!(
        "Missing on this machine: {list}. To be run now:\n\n    \
         {sudo}apt-get update && {sudo}apt-get install -y --no-install-recommends {list}\n\n\
         No system service is started or enabled by it, now or at the next boot (src/dev/apt-install.sh)."
    ));
    let terminal = std::io::stdin().is_terminal();
    if terminal && !agreed()? {
        return Err(Error::Refused(by_hand(packages)));
    }
    let mut command = if sudo.is_empty() {
        Command::new("sh")
    } else {
        let Some(program) = search.on_path("sudo") else {
            return Err(Error::Refused(format!(
                "not root, and there is no sudo\n{}",
                by_hand(packages)
            )));
        };
        let mut command = Command::new(program);
        if !terminal {
            command.arg("-n");
        }
        command.arg("sh");
        command
    };
    let status = command
        .args(["-c", SCRIPT, "apt-install.sh"])
        .args(packages)
        .stdin(Stdio::inherit())
        .status()
        .map_err(at("apt-get"))?;
    if status.success() {
        Ok(())
    } else {
        Err(Error::Refused(format!(
            "the installation did not succeed ({status})\n{}",
            by_hand(packages)
        )))
    }
}

fn agreed() -> Result<bool, Error> {
    print!("Install? [Y/n] ");
    std::io::stdout().flush().map_err(at("terminal"))?;
    let mut answer = String::new();
    // Nothing at all (the terminal was closed) is a no; an empty line takes the default.
    let length = std::io::stdin()
        .lock()
        .read_line(&mut answer)
        .map_err(at("terminal"))?;
    Ok(length > 0
        && matches!(
            answer.trim().to_ascii_lowercase().as_str(),
            "" | "y" | "yes"
        ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::PathBuf;

    #[test]
    fn a_machine_without_apt_says_what_to_install() {
        let search = Search {
            root: PathBuf::from("/nowhere"),
            path: Vec::new(),
            postgres_only: None,
            rabbitmq_only: None,
        };
        let message = ensure(&search).unwrap_err().to_string();
        for part in [
            "PostgreSQL 15, 16, 17 or 18",
            "PG_BIN_DIR",
            "RabbitMQ 3.10",
            "RABBITMQ_BIN_DIR",
            "compose.yaml",
        ] {
            assert!(message.contains(part), "{message}");
        }
    }
}
