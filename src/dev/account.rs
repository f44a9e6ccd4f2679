//! Which operating-system account a private service runs under, and where its data lives.
//!
//! Postgres refuses to run as root, and nothing here may run as root only because its caller does.

use std::fs;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use sha2::{Digest, Sha256};

use super::{Error, at};

/// Where root keeps service data: its checkout may be unreadable to an unprivileged account, and temporary directories are
/// swept by age on some systems, which would tear holes into a database.
const ROOT_DATA: &str = "/var/lib/daybook-dev";

/// An unprivileged account of this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Account {
    /// Login name, for messages.
    pub name: String,
    /// User id.
    pub uid: u32,
    /// Primary group id.
    pub gid: u32,
}

impl Account {
    /// The account to drop to: none when the caller is not root; else `preferred` if the machine has it, else `nobody`.
    ///
    /// # Errors
    /// When the caller's user id or `/etc/passwd` cannot be read, or neither account exists.
    pub fn to_drop_to(preferred: &str) -> Result<Option<Self>, Error> {
        if !is_root()? {
            return Ok(None);
        }
        let passwd = fs::read_to_string("/etc/passwd").map_err(at("/etc/passwd"))?;
        [preferred, "nobody"]
            .iter()
            .find_map(|name| parse_passwd(&passwd, name))
            .filter(|account| account.uid != 0)
            .map(Some)
            .ok_or_else(|| Error::Refused(format!("no account '{preferred}' or 'nobody' to run a service under; services do not run as root")))
    }
}

/// Finds `name` in the text of a passwd file.
#[must_use]
pub fn parse_passwd(text: &str, name: &str) -> Option<Account> {
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let found = fields.next()? == name;
        let uid = fields.nth(1)?.parse().ok()?;
        let gid = fields.next()?.parse().ok()?;
        found.then(|| Account {
            name: name.to_owned(),
            uid,
            gid,
        })
    })
}

/// Whether the caller is root.
///
/// # Errors
/// When `id -u` cannot be run.
pub fn is_root() -> Result<bool, Error> {
    let output = Command::new("id")
        .arg("-u")
        .stdin(Stdio::null())
        .output()
        .map_err(at("id"))?;
    Ok(output.stdout.trim_ascii() == b"0")
}

/// The absolute directory for the service data that belongs to `dir`: `dir` itself, or for root one under `/var/lib` named after it
/// and after a number kept in it, so that who deletes `dir` begins anew. It is made, and so is `dir`.
///
/// # Errors
/// When a directory cannot be made.
pub fn data_place(dir: &Path) -> Result<PathBuf, Error> {
    fs::create_dir_all(dir).map_err(at(dir))?;
    let dir = dir.canonicalize().map_err(at(dir))?;
    if !is_root()? {
        return Ok(dir);
    }
    let number = dir.join("data-number");
    if !number.exists() {
        fs::write(&number, super::secret()).map_err(at(&number))?;
    }
    let mut named = dir.as_os_str().as_encoded_bytes().to_vec();
    named.extend(fs::read(&number).map_err(at(&number))?);
    let mut name = hex::encode(Sha256::digest(named));
    name.truncate(16);
    let place = Path::new(ROOT_DATA).join(name);
    passable_dir(Path::new(ROOT_DATA))?;
    passable_dir(&place)?;
    fs::write(place.join("belongs-to"), format!("{}\n", dir.display())).map_err(at(&place))?;
    Ok(place)
}

/// Makes a directory that every account may pass through, whatever the caller's umask: services have private ones in it.
///
/// # Errors
/// When it cannot be made.
pub fn passable_dir(path: &Path) -> Result<(), Error> {
    fs::create_dir_all(path).map_err(at(path))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o755)).map_err(at(path))
}

/// Makes a directory that only the service's account (the caller when `account` is none) may enter.
///
/// # Errors
/// When it cannot be made or handed over.
pub fn private_dir(path: &Path, account: Option<&Account>) -> Result<(), Error> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .map_err(at(path))?;
    hand_over(path, account)
}

/// Writes a file that only the service's account may read.
///
/// # Errors
/// When it cannot be written or handed over.
pub fn private_file(
    path: &Path,
    content: &str,
    mode: u32,
    account: Option<&Account>,
) -> Result<(), Error> {
    // A file of mode 0400 cannot be opened for writing again by its owner.
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(at(path)(error)),
        _ => {}
    }
    fs::write(path, "").map_err(at(path))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600)).map_err(at(path))?;
    fs::write(path, content).map_err(at(path))?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(at(path))?;
    hand_over(path, account)
}

fn hand_over(path: &Path, account: Option<&Account>) -> Result<(), Error> {
    match account {
        Some(account) => chown(path, Some(account.uid), Some(account.gid)).map_err(at(path)),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &str = "root:x:0:0:root:/root:/bin/bash\nbroken line\npostgres:x:101:104:admin,,,:/var/lib/postgresql:/bin/bash\npost:x:7:8::/:/bin/sh\n";

    #[test]
    fn passwd_is_matched_by_whole_name() {
        assert_eq!(
            parse_passwd(PASSWD, "postgres"),
            Some(Account {
                name: "postgres".into(),
                uid: 101,
                gid: 104
            })
        );
        assert_eq!(parse_passwd(PASSWD, "post").map(|a| a.uid), Some(7));
        assert_eq!(parse_passwd(PASSWD, "rabbitmq"), None);
        assert_eq!(parse_passwd("", "postgres"), None);
        assert_eq!(parse_passwd("postgres:x:many:104::/:\n", "postgres"), None);
    }
}
