//! A ledger of its own for each test: a database made from one migrated template, and a name that no other test has.
//!
//! A missing service fails the test. At its end every ledger is verified, then dropped.

use daybook::keeper::verify::verify;
use daybook::store::{bootstrap, migrate};
use secrecy::{ExposeSecret, SecretString};
use tokio::sync::OnceCell;
use tokio_postgres::{Client, NoTls};

/// What `make test` sets.
pub fn service(variable: &str) -> SecretString {
    let Ok(value) = std::env::var(variable) else {
        panic!("{variable} is not set: run the tests with `make test`")
    };
    value.into()
}

/// A superuser's session; its driver ends with it.
pub async fn superuser(database: &str) -> Client {
    let url = service("TEST_DATABASE_URL");
    let mut config: tokio_postgres::Config = url.expose_secret().parse().unwrap();
    config.dbname(database);
    let (client, connection) = config.connect(NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

const PASSWORD: &str = "test";
static TEMPLATE: OnceCell<String> = OnceCell::const_new();

/// Name of the migrated template of this run; the ledger in it is called `template`.
async fn template() -> String {
    let make = || async {
        let name = format!("template_{:08x}", rand::random::<u32>());
        let client = superuser("postgres").await;
        client
            .batch_execute(&format!("CREATE DATABASE {name}"))
            .await
            .unwrap();
        let superuser_url = service("TEST_DATABASE_URL");
        let urls = bootstrap::bootstrap(&superuser_url, &name, PASSWORD)
            .await
            .unwrap();
        migrate::migrate(&urls.owner, &urls.runtime, "template")
            .await
            .unwrap();
        name
    };
    TEMPLATE.get_or_init(make).await.clone()
}

/// One test's ledger.
pub struct Ledger {
    /// Its name: schema, exchange and database are called so.
    pub name: String,
    /// As the runtime role.
    pub url: SecretString,
    /// As the owner of the schema.
    pub owner_url: SecretString,
    /// As a superuser, in the ledger's schema.
    pub admin: Client,
}

impl Ledger {
    /// Makes one.
    pub async fn new() -> Self {
        let name = format!("t_{:012x}", rand::random::<u64>() & 0xffff_ffff_ffff);
        let template = template().await;
        let server = superuser("postgres").await;
        let copy = format!("CREATE DATABASE {name} TEMPLATE {template}");
        // The template's last session may still be ending.
        eventually("the template is free", async || {
            server.batch_execute(&copy).await.is_ok()
        })
        .await;
        let admin = superuser(&name).await;
        admin
            .batch_execute(&format!(
                "ALTER SCHEMA template RENAME TO {name}; SET search_path = {name}, pg_temp; \
                 GRANT CREATE ON DATABASE {name} TO daybook_owner; \
                 ALTER FUNCTION make_partition(text, timestamptz) SET search_path = {name}, pg_temp"
            ))
            .await
            .unwrap();
        let base = service("TEST_DATABASE_URL");
        Ledger {
            url: bootstrap::url_for(&base, bootstrap::RUNTIME, PASSWORD, &name).unwrap(),
            owner_url: bootstrap::url_for(&base, bootstrap::OWNER, PASSWORD, &name).unwrap(),
            admin,
            name,
        }
    }

    /// One value, as a superuser.
    pub async fn value<T: tokio_postgres::types::FromSqlOwned>(&self, sql: &str) -> T {
        self.admin.query_one(sql, &[]).await.unwrap().get(0)
    }

    /// Proves the ledger and drops it.
    pub async fn finish(self) {
        let superuser_url =
            bootstrap::url_for(&self.owner_url, bootstrap::OWNER, PASSWORD, &self.name).unwrap();
        let report = verify(&superuser_url, &self.name, |_, _| {}).await.unwrap();
        assert_eq!(report.faults, Vec::<String>::new());
        drop(self.admin);
        let server = superuser("postgres").await;
        server
            .batch_execute(&format!("DROP DATABASE {} WITH (FORCE)", self.name))
            .await
            .unwrap();
    }
}

/// Waits for a condition, with a deadline that only a broken product or machine can meet.
pub async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + std::time::Duration::from_secs(60);
    while !holds().await {
        assert!(
            tokio::time::Instant::now() < deadline,
            "in a minute it did not come true that {what}"
        );
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}
