//! The laboratory: private services, a ledger of its own for each run, the program that is measured.
//!
//! Never touches a database that it did not make, and leaves none behind.

use crate::args::Services;
use crate::database::Database;
use crate::server::{Server, Setup};
use crate::tokens::Tokens;
use anyhow::{Context, Result, ensure};
use daybook::store::bootstrap;
use secrecy::{ExposeSecret, SecretString};
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tokio::process::Command;
use tokio::time::timeout;

/// Before the name of every database of a run.
const PREFIX: &str = "bench";
/// Key of the advisory lock under which databases and roles are made.
const LOCK: i64 = 7_202_611_301;
/// How long migrating an empty database may take.
const MIGRATE_LIMIT: Duration = Duration::from_secs(60);
/// How long `daybook verify` may take: the largest ledger has twenty million events.
const VERIFY_LIMIT: Duration = Duration::from_secs(3_600);

/// The private services of this invocation.
#[derive(Debug)]
pub struct Lab {
    /// The superuser's database.
    postgres: Database,
    postgres_url: SecretString,
    amqp_url: SecretString,
    program: PathBuf,
    scratch: PathBuf,
    tokens: Tokens,
    ledgers: AtomicU32,
    /// Before the name of every database that this lab makes; another lab on the same Postgres has another one.
    prefix: String,
}

/// A migrated ledger in a database of its own.
#[derive(Debug)]
pub struct Ledger {
    /// Its name: also that of the database, of the schema, and a part of the exchange's.
    pub name: String,
    /// The superuser's connections, with the ledger's schema in front.
    pub database: Database,
    /// The broker.
    pub amqp_url: SecretString,
    owner_url: SecretString,
    runtime_url: SecretString,
    program: PathBuf,
    keys_file: PathBuf,
}

impl Lab {
    /// Checks that everything is there, and makes keys.
    ///
    /// # Errors
    /// When the services or the program are not there.
    pub async fn open(services: &Services) -> Result<Self> {
        ensure!(
            services.program.is_file(),
            "{} is not there: cargo build --profile dist --bin daybook",
            services.program.display()
        );
        let postgres = Database::at(&services.database_url)?;
        postgres.connect().await?;
        let scratch = services
            .scratch
            .join(format!("bench-{:016x}", rand::random::<u64>()));
        std::fs::create_dir_all(&scratch).with_context(|| scratch.display().to_string())?;
        Ok(Lab {
            postgres,
            postgres_url: services.database_url.clone().into(),
            amqp_url: services.amqp_url.clone().into(),
            program: services.program.clone(),
            tokens: Tokens::make(&scratch.join("keys.json"))?,
            scratch,
            ledgers: AtomicU32::new(0),
            prefix: format!("{PREFIX}_{:06x}_", rand::random::<u32>() >> 8),
        })
    }

    /// The superuser's database of the private Postgres.
    pub fn postgres(&self) -> &Database {
        &self.postgres
    }

    /// The private RabbitMQ.
    pub fn amqp_url(&self) -> &SecretString {
        &self.amqp_url
    }

    /// Bearer tokens that every server of this lab accepts.
    pub fn tokens(&self) -> &Tokens {
        &self.tokens
    }

    /// A directory for files of this invocation.
    pub fn scratch(&self) -> &Path {
        &self.scratch
    }

    /// Makes a ledger, lets `work` use it, and drops it however that ends.
    ///
    /// # Errors
    /// What `work` returns, and when the ledger cannot be made or dropped.
    pub async fn with_ledger<T>(
        &self,
        scenario: &str,
        work: impl AsyncFnOnce(&Ledger) -> Result<T>,
    ) -> Result<T> {
        let ledger = self.make(scenario).await?;
        let outcome = work(&ledger).await;
        let dropped = self.drop_database(&ledger.name).await;
        let done = outcome?;
        dropped?;
        Ok(done)
    }

    async fn make(&self, scenario: &str) -> Result<Ledger> {
        let number = self.ledgers.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}{}_{number}", self.prefix, scenario.replace('-', "_"));
        let client = self.postgres.connect().await?;
        // The roles belong to the whole server, where other labs may be at work; the lock goes with the connection.
        client
            .batch_execute(&format!(
                "-- one_at_a_time\nSELECT pg_advisory_lock({LOCK})"
            ))
            .await?;
        client
            .batch_execute(&format!("-- make_database\nCREATE DATABASE {name}"))
            .await
            .context("making a database")?;
        let (user, password) = (self.postgres.user(), self.postgres.password());
        let superuser = bootstrap::url_for(&self.postgres_url, &user, &password, &name)?;
        // The same for everybody, so that no lab locks another one out.
        let urls = bootstrap::bootstrap(&superuser, &name, &password).await?;
        drop(client);
        let ledger = Ledger {
            database: Database::of_ledger(superuser.expose_secret(), &name)?,
            amqp_url: self.amqp_url.clone(),
            owner_url: urls.owner,
            runtime_url: urls.runtime,
            program: self.program.clone(),
            keys_file: self.tokens.keys_file().to_owned(),
            name,
        };
        ledger
            .run("migrate", MIGRATE_LIMIT)
            .await
            .context("daybook migrate")?;
        Ok(ledger)
    }

    async fn drop_database(&self, name: &str) -> Result<()> {
        self.postgres
            .connect()
            .await?
            .batch_execute(&format!(
                "-- drop_database\nDROP DATABASE IF EXISTS {name} WITH (FORCE)"
            ))
            .await
            .context("dropping a database")
    }

    /// Drops what an interrupted run left: databases, keys, logs.
    ///
    /// # Errors
    /// When Postgres is not there any more.
    pub async fn close(self) -> Result<()> {
        let rows = self
            .postgres
            .connect()
            .await?
            .query(
                "-- databases_of_runs\nSELECT datname FROM pg_database WHERE starts_with(datname, $1)",
                &[&self.prefix],
            )
            .await?;
        for row in rows {
            self.drop_database(row.try_get(0)?).await?;
        }
        std::fs::remove_dir_all(&self.scratch).context("removing the files of this run")
    }
}

impl Ledger {
    /// The measured program, with this ledger's settings and none of the caller's: it refuses settings that it does not know.
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        for (name, _) in std::env::vars_os() {
            if name.as_encoded_bytes().starts_with(b"DAYBOOK_") {
                command.env_remove(name);
            }
        }
        command
            .env("DAYBOOK_LEDGER", &self.name)
            .env("DAYBOOK_DATABASE_URL", self.runtime_url.expose_secret())
            .env("DAYBOOK_AMQP_URL", self.amqp_url.expose_secret())
            .env("DAYBOOK_KEYS_FILE", &self.keys_file)
            .env("DAYBOOK_HTTP_ADDR", "127.0.0.1:0")
            .env("DAYBOOK_OPS_ADDR", "127.0.0.1:0")
            .stdin(Stdio::null())
            .kill_on_drop(true);
        command
    }

    /// The program that is measured.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// A name for a file that goes with the lab.
    pub fn new_file(&self, kind: &str) -> PathBuf {
        let name = format!("{kind}-{:016x}", rand::random::<u64>());
        self.keys_file.with_file_name(name)
    }

    /// Starts a server of this ledger and waits until it is ready.
    ///
    /// # Errors
    /// When it does not get ready.
    pub async fn serve(&self, setup: &Setup) -> Result<Server> {
        Server::start(self, setup).await
    }

    /// Lets the program read the whole ledger again.
    ///
    /// # Errors
    /// When it finds a fault.
    pub async fn verify(&self) -> Result<()> {
        self.run("verify", VERIFY_LIMIT)
            .await
            .context("daybook verify")
    }

    async fn run(&self, action: &str, limit: Duration) -> Result<()> {
        let mut command = self.command();
        command
            .arg(action)
            .env("DAYBOOK_OWNER_DATABASE_URL", self.owner_url.expose_secret());
        let output: Output = timeout(limit, command.output())
            .await
            .context("it does not end")?
            .with_context(|| self.program.display().to_string())?;
        ensure!(
            output.status.success(),
            "failed, {}:\n{}{}",
            output.status,
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(())
    }
}

#[cfg(test)]
impl Lab {
    /// A lab of the test services, with the program that was built beside the tests.
    pub async fn for_test() -> Self {
        let given = |name: &str| {
            std::env::var(name).unwrap_or_else(|_| panic!("{name}: run the tests with `make test`"))
        };
        let tests = std::env::current_exe().unwrap();
        let services = Services {
            database_url: given("TEST_DATABASE_URL"),
            amqp_url: given("TEST_AMQP_URL"),
            scratch: PathBuf::from(given("TEST_SCRATCH_DIR")).join("bench"),
            program: tests.ancestors().nth(2).unwrap().join("daybook"),
        };
        Lab::open(&services).await.unwrap()
    }
}
