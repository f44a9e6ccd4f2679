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
/// Longest wait for one statement: counting a ledger of twenty million events is the longest.
const STATEMENT_TIMEOUT: &str = "-c statement_timeout=300s";
/// Settings that a result means nothing without.
const SETTINGS: [&str; 10] = [
    "server_version",
    "fsync",
    "synchronous_commit",
    "full_page_writes",
    "wal_compression",
    "wal_level",
    "shared_buffers",
    "max_wal_size",
    "checkpoint_timeout",
    "jit",
];

/// A Postgres on this machine.
#[derive(Clone, Debug)]
pub struct Database {
    config: Config,
}

/// The settings of a server that a result means nothing without, by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings(pub Vec<(String, String)>);

impl Settings {
    /// The value of a setting.
    pub fn value(&self, name: &str) -> Option<&str> {
        self.0
            .iter()
            .find(|(known, _)| known == name)
            .map(|(_, value)| value.as_str())
    }

    /// Whether an answered event survives a power cut.
    pub fn is_durable(&self) -> bool {
        ["fsync", "synchronous_commit", "full_page_writes"]
            .iter()
            .all(|name| self.value(name) == Some("on"))
    }
}

impl Database {
    /// Checks the address.
    ///
    /// # Errors
    /// When it is not one address, or not of this machine.
    pub fn at(url: &str) -> Result<Self> {
        let mut config = Config::from_str(url).context("the database's address")?;
        let port = config.get_ports().first().copied().unwrap_or(PORT);
        match config.get_hosts() {
            [Host::Unix(_)] => {}
            [Host::Tcp(name)] => drop(loopback(name, port).context("the database's address")?),
            _ => bail!("the database's address names not exactly one host"),
        }
        if !config
            .get_hostaddrs()
            .iter()
            .all(std::net::IpAddr::is_loopback)
        {
            bail!("the database's address: hostaddr is not loopback");
        }
        config
            .connect_timeout(CONNECT_TIMEOUT)
            .options(STATEMENT_TIMEOUT)
            .application_name("daybook-loadtest");
        Ok(Database { config })
    }

    /// The same, with a ledger's schema in front. The name is one that the lab made.
    ///
    /// # Errors
    /// As [`Database::at`].
    pub fn of_ledger(url: &str, ledger: &str) -> Result<Self> {
        let mut database = Self::at(url)?;
        database
            .config
            .options(format!("{STATEMENT_TIMEOUT} -c search_path={ledger}"));
        Ok(database)
    }

    /// The user that it connects as.
    pub fn user(&self) -> String {
        self.config.get_user().unwrap_or_default().to_owned()
    }

    /// That user's password.
    pub fn password(&self) -> String {
        let password = self.config.get_password().unwrap_or_default();
        String::from_utf8_lossy(password).into_owned()
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
        variables.push(("PGUSER", self.user()));
        variables.push(("PGPASSWORD", self.password()));
        if let Some(name) = self.config.get_dbname() {
            variables.push(("PGDATABASE", name.to_owned()));
        }
        if let Some(options) = self.config.get_options() {
            variables.push(("PGOPTIONS", options.to_owned()));
        }
        variables
    }

    /// What the result has to be read with.
    ///
    /// # Errors
    /// What Postgres says.
    pub async fn settings(&self) -> Result<Settings> {
        let names = SETTINGS.map(str::to_owned).to_vec();
        let sql = "-- settings
SELECT name, current_setting(name) FROM unnest($1::text[]) WITH ORDINALITY AS wanted (name, place) ORDER BY place";
        let rows = self.connect().await?.query(sql, &[&names]).await?;
        let pairs = rows
            .iter()
            .map(|row| Ok((row.try_get(0)?, row.try_get(1)?)))
            .collect::<Result<_>>()?;
        Ok(Settings(pairs))
    }

    /// Tells the planner what the tables hold now, as autovacuum would in a minute.
    ///
    /// # Errors
    /// What Postgres says.
    pub async fn analyze(&self) -> Result<()> {
        let client = self.connect().await?;
        client
            .batch_execute("-- analyze\nANALYZE")
            .await
            .context("ANALYZE")
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
            ("PGOPTIONS", STATEMENT_TIMEOUT),
        ];
        assert_eq!(
            database.variables(),
            expected.map(|(name, value)| (name, value.to_owned()))
        );
    }

    #[test]
    fn durability_is_three_settings() {
        let all = |fsync: &str| {
            let pairs = [
                ("fsync", fsync),
                ("synchronous_commit", "on"),
                ("full_page_writes", "on"),
            ];
            Settings(pairs.map(|(n, v)| (n.to_owned(), v.to_owned())).to_vec())
        };
        assert!(all("on").is_durable());
        assert!(!all("off").is_durable());
        assert!(!Settings(Vec::new()).is_durable());
    }
}
