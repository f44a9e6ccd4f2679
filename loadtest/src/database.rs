//! The Postgres that is measured: where it is, how it is set, what it holds.
//!
//! Only loopback and sockets; writes nothing here.

use crate::load::loopback;
use anyhow::{Context, Result, bail};
use std::str::FromStr;
use std::time::Duration;
use tokio_postgres::config::Host;
use tokio_postgres::{Client, Config, NoTls};

const PORT: u16 = 5432;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longest wait for one statement: filling and dropping the control's tables are the longest.
const STATEMENT_TIMEOUT: &str = "-c statement_timeout=300s";

/// A Postgres on this machine.
#[derive(Clone, Debug)]
pub struct Database {
    url: String,
    config: Config,
}

/// The settings of a server that a result means nothing without.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The server's version.
    pub version: String,
    /// Whether a commit reaches the disk.
    pub fsync: String,
    /// Whether a commit waits for it.
    pub synchronous_commit: String,
    /// Whether a torn page can be repaired.
    pub full_page_writes: String,
}

impl Settings {
    /// Whether an answered event survives a power cut.
    pub fn is_durable(&self) -> bool {
        self.fsync == "on" && self.synchronous_commit == "on" && self.full_page_writes == "on"
    }
}

impl Database {
    /// Checks the address.
    ///
    /// # Errors
    /// When it is not one address, or not of this machine.
    pub fn at(url: &str) -> Result<Self> {
        let mut config = Config::from_str(url).context("DATABASE_URL")?;
        let port = config.get_ports().first().copied().unwrap_or(PORT);
        match config.get_hosts() {
            [Host::Unix(_)] => {}
            [Host::Tcp(name)] => drop(loopback(name, port).context("DATABASE_URL")?),
            _ => bail!("DATABASE_URL: names not exactly one host"),
        }
        if !config
            .get_hostaddrs()
            .iter()
            .all(std::net::IpAddr::is_loopback)
        {
            bail!("DATABASE_URL: hostaddr is not loopback");
        }
        config
            .connect_timeout(CONNECT_TIMEOUT)
            .options(STATEMENT_TIMEOUT)
            .application_name("daybook-loadtest");
        Ok(Database {
            url: url.to_owned(),
            config,
        })
    }

    /// The address as it was given.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Opens a connection, which ends when the client is dropped.
    ///
    /// # Errors
    /// What Postgres says.
    pub async fn connect(&self) -> Result<Client> {
        let (client, connection) = self.config.connect(NoTls).await.context("Postgres")?;
        // Its error shows in the statement that waits for it.
        tokio::spawn(async move { drop(connection.await) });
        Ok(client)
    }

    /// The address as libpq's variables. An address on a command line would show its password to everybody.
    pub fn variables(&self) -> Vec<(&'static str, String)> {
        let host = match self.config.get_hosts().first() {
            Some(Host::Tcp(name)) => name.clone(),
            Some(Host::Unix(path)) => path.display().to_string(),
            None => String::new(),
        };
        let port = self.config.get_ports().first().copied().unwrap_or(PORT);
        let mut variables = vec![("PGHOST", host), ("PGPORT", port.to_string())];
        if let Some(user) = self.config.get_user() {
            variables.push(("PGUSER", user.to_owned()));
        }
        if let Some(password) = self.config.get_password() {
            variables.push(("PGPASSWORD", String::from_utf8_lossy(password).into_owned()));
        }
        if let Some(name) = self.config.get_dbname() {
            variables.push(("PGDATABASE", name.to_owned()));
        }
        variables
    }

    /// What the result has to be read with.
    ///
    /// # Errors
    /// What Postgres says.
    pub async fn settings(&self) -> Result<Settings> {
        let row = self
            .connect()
            .await?
            .query_one(
                "-- settings
SELECT current_setting('server_version'), current_setting('fsync'), current_setting('synchronous_commit'),
       current_setting('full_page_writes')",
                &[],
            )
            .await?;
        Ok(Settings {
            version: row.try_get(0)?,
            fsync: row.try_get(1)?,
            synchronous_commit: row.try_get(2)?,
            full_page_writes: row.try_get(3)?,
        })
    }

    /// Writes out what came before, so that what is measured next does not pay for it. Who may not, goes without.
    ///
    /// # Errors
    /// When there is no connection.
    pub async fn checkpoint(&self) -> Result<()> {
        let client = self.connect().await?;
        drop(client.batch_execute("-- checkpoint\nCHECKPOINT").await);
        Ok(())
    }

    /// Events and outbox rows of a ledger. The name was checked when the arguments were read.
    ///
    /// # Errors
    /// What Postgres says.
    pub async fn stored(&self, ledger: &str) -> Result<(u64, u64)> {
        let sql = format!(
            "-- stored\nSELECT (SELECT count(*) FROM \"{ledger}\".events), (SELECT count(*) FROM \"{ledger}\".outbox)"
        );
        let row = self.connect().await?.query_one(&sql, &[]).await?;
        let (events, outbox): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
        Ok((u64::try_from(events)?, u64::try_from(outbox)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_database_of_this_machine_is_taken() {
        for good in [
            "postgres://a:b@127.0.0.1:1/d",
            "postgres://a@localhost/d",
            "postgres://a@[::1]:1/d",
            "host=/tmp user=a",
        ] {
            assert!(Database::at(good).is_ok(), "{good}");
        }
        for bad in [
            "postgres://a@192.0.2.1/d",
            "postgres://a@127.0.0.1,192.0.2.1/d",
            "host=127.0.0.1 hostaddr=192.0.2.1 user=a",
            "user=a",
            "nonsense",
        ] {
            assert!(Database::at(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_variables_of_libpq_say_the_same() {
        let database = Database::at("postgres://me:p%40ss@127.0.0.1:15432/d").unwrap();
        let expected = [
            ("PGHOST", "127.0.0.1"),
            ("PGPORT", "15432"),
            ("PGUSER", "me"),
            ("PGPASSWORD", "p@ss"),
            ("PGDATABASE", "d"),
        ];
        assert_eq!(
            database.variables(),
            expected.map(|(name, value)| (name, value.to_owned()))
        );
    }
}
