//! What `daybook dev` tells the person who started it: the `env` file for a shell, and first requests to paste.
//!
//! Never prints or stores anything that opens more than this private development server.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use super::account::private_file;
use super::{Error, at};

/// Addresses and tokens of one run.
#[derive(Clone, Debug)]
pub struct Session {
    /// Base address of the API, such as `http://127.0.0.1:8080`.
    pub url: String,
    /// Base address of probes and metrics.
    pub ops_url: String,
    /// Alice's token.
    pub token: String,
    /// The admin's token.
    pub admin_token: String,
    /// The database, as its owner.
    pub database_url: String,
    /// The broker.
    pub amqp_url: String,
    /// The queue that is bound to every event.
    pub demo_queue: String,
}

impl Session {
    /// Writes `env` into `dir`, whole or not at all, readable by its owner only. To be called when requests are answered.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn write(&self, dir: &Path) -> Result<(), Error> {
        let unfinished = dir.join("env.unfinished");
        private_file(&unfinished, &self.shell(), 0o600, None)?;
        fs::rename(&unfinished, env_file(dir)).map_err(at(&unfinished))
    }

    /// Removes `env` from `dir`; that there is none is no error.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn remove(dir: &Path) -> Result<(), Error> {
        match fs::remove_file(env_file(dir)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(at(env_file(dir))(error))
            }
            _ => Ok(()),
        }
    }

    /// Reads `env` in `dir` back; None when no server runs there, or the file is not one of ours.
    #[must_use]
    pub fn read(dir: &Path) -> Option<Self> {
        let text = fs::read_to_string(env_file(dir)).ok()?;
        let value = |name: &str| {
            let line = text
                .lines()
                .find_map(|line| line.strip_prefix(name)?.strip_prefix('='))?;
            let inner = line.strip_prefix('\'')?.strip_suffix('\'')?;
            Some(inner.replace(r"'\''", "'"))
        };
        Some(Self {
            url: value("DAYBOOK_URL")?,
            ops_url: value("DAYBOOK_OPS_URL")?,
            token: value("DAYBOOK_TOKEN")?,
            admin_token: value("DAYBOOK_ADMIN_TOKEN")?,
            database_url: value("DATABASE_URL")?,
            amqp_url: value("AMQP_URL")?,
            demo_queue: value("DAYBOOK_DEMO_QUEUE")?,
        })
    }

    /// Shell assignments.
    #[must_use]
    pub fn shell(&self) -> String {
        let pairs = [
            ("DAYBOOK_URL", &self.url),
            ("DAYBOOK_OPS_URL", &self.ops_url),
            ("DAYBOOK_TOKEN", &self.token),
            ("DAYBOOK_ADMIN_TOKEN", &self.admin_token),
            ("DATABASE_URL", &self.database_url),
            ("AMQP_URL", &self.amqp_url),
            ("DAYBOOK_DEMO_QUEUE", &self.demo_queue),
        ];
        pairs.iter().fold(String::new(), |mut text, (name, value)| {
            let _ = writeln!(text, "{name}={}", quoted(value));
            text
        })
    }

    /// The text to print when ready: how to post, watch and stop. `program` is how this binary is called from the same directory.
    /// The idempotency keys are new in each call, so that the lines make new events on kept data too.
    #[must_use]
    pub fn welcome(&self, program: &str, dir: &Path) -> String {
        let run = format!("{:08x}", rand::random::<u32>());
        let deposit = r#"{"type":"deposit","schema":"1.7","subject":"alice","data":{"asset":"EUR/2","amount":"10000"}}"#;
        let transfer = r#"{"type":"transfer","schema":"1.7","data":{"to":"bob","asset":"EUR/2","amount":"2500"}}"#;
        format!(
            "\nDaybook is ready at {url}  (probes and metrics: {ops})\n\n\
             The admin deposits 100.00 EUR to alice; paste it into any shell:\n\n{first}\n\n\
             Alice sends 25.00 EUR to bob:\n\n{second}\n\n\
             Token of alice:     {token}\n\
             Token of the admin: {admin}\n\n\
             Watch the messages: {program} events tail --broker\n\
             Break the broker:   {program} dev broker stop   and then   {program} dev broker start\n\
             All of it as shell variables: . {env}\n\
             Stop: Ctrl-C; the data is kept for the next start.\n",
            url = self.url,
            ops = self.ops_url,
            first = self.curl(&self.admin_token, &format!("deposit-{run}"), deposit),
            second = self.curl(&self.token, &format!("transfer-{run}"), transfer),
            token = self.token,
            admin = self.admin_token,
            env = env_file(dir).display(),
        )
    }

    fn curl(&self, token: &str, key: &str, body: &str) -> String {
        format!(
            "curl -isS -w '\\n' {} -H {} -H 'Content-Type: application/json' -H {} -d {}",
            quoted(&format!("{}/v1/events", self.url)),
            quoted(&format!("Authorization: Bearer {token}")),
            quoted(&format!("Idempotency-Key: {key}")),
            quoted(body)
        )
    }
}

fn env_file(dir: &Path) -> PathBuf {
    dir.join("env")
}

/// One word for a POSIX shell, whatever is in it.
fn quoted(value: &str) -> String {
    format!("'{}'", value.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn session() -> Session {
        Session {
            url: "http://127.0.0.1:1".into(),
            ops_url: "http://127.0.0.1:2".into(),
            token: "a.b.c".into(),
            admin_token: "it's $HOME `x` \"y\"\\".into(),
            database_url: "postgres://p:q@127.0.0.1:3/d".into(),
            amqp_url: "amqp://p:q@127.0.0.1:4/%2f".into(),
            demo_queue: "demo queue".into(),
        }
    }

    #[test]
    fn a_shell_reads_back_what_was_written() {
        let dir = std::env::temp_dir().join(format!("daybook-env-{:016x}", rand::random::<u64>()));
        fs::create_dir(&dir).unwrap();
        session().write(&dir).unwrap();
        assert_eq!(
            fs::metadata(dir.join("env")).unwrap().permissions().mode() & 0o777,
            0o600
        );
        let script = format!(
            ". {}/env; printf '%s|%s' \"$DAYBOOK_ADMIN_TOKEN\" \"$DAYBOOK_DEMO_QUEUE\"",
            dir.display()
        );
        let output = std::process::Command::new("sh")
            .args(["-c", &script])
            .output()
            .unwrap();
        assert_eq!(
            String::from_utf8(output.stdout).unwrap(),
            format!("{}|demo queue", session().admin_token)
        );
        assert_eq!(Session::read(&dir).unwrap().shell(), session().shell());
        Session::remove(&dir).unwrap();
        Session::remove(&dir).unwrap();
        assert!(fs::read_dir(&dir).unwrap().next().is_none());
        fs::remove_dir(&dir).unwrap();
    }

    #[test]
    fn the_printed_requests_are_single_lines_with_new_keys() {
        let text = session().welcome("daybook", Path::new(".daybook"));
        let lines: Vec<&str> = text
            .lines()
            .filter(|line| line.starts_with("curl "))
            .collect();
        assert_eq!(lines.len(), 2);
        let again = session().welcome("daybook", Path::new(".daybook"));
        assert!(lines.iter().all(|line| !again.contains(line)));
        for line in lines {
            let body = line.rsplit_once(" -d '").unwrap().1.trim_end_matches('\'');
            serde_json::from_str::<serde_json::Value>(body).unwrap();
        }
    }
}
