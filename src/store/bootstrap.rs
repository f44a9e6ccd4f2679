//! Two roles and a database on a fresh server: what an administrator does once. Used by the development environment and by
//! the tests; a production database is prepared by its administrator.

use super::session::SessionError;
use secrecy::{ExposeSecret, SecretString};
use tokio_postgres::config::Host;
use tokio_postgres::{Client, Config, NoTls};

/// The role that owns the ledgers' schemas.
pub const OWNER: &str = "daybook_owner";
/// The role that serves.
pub const RUNTIME: &str = "daybook";

const ROLE_EXISTS: &str = "-- role_exists
SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)";

/// Every statement of this file that can be prepared.
pub const STATEMENTS: &[&str] = &[ROLE_EXISTS];

/// URLs of one database for the two roles.
#[derive(Clone, Debug)]
pub struct Urls {
    /// For migrations.
    pub owner: SecretString,
    /// For the service.
    pub runtime: SecretString,
}

/// The same server and another user or database.
///
/// # Errors
/// When the URL does not parse.
pub fn url_for(
    url: &SecretString,
    user: &str,
    password: &str,
    database: &str,
) -> Result<SecretString, SessionError> {
    let config: Config = url.expose_secret().parse()?;
    let host = match config.get_hosts().first() {
        Some(Host::Tcp(host)) => host.clone(),
        _ => "localhost".to_owned(),
    };
    let port = config.get_ports().first().copied().unwrap_or(5432);
    Ok(format!("postgres://{user}:{password}@{host}:{port}/{database}").into())
}

/// Makes the two roles, if they are missing, sets their password, and lets the owner make schemas in the database.
///
/// # Errors
/// When Postgres cannot be reached or refuses.
pub async fn bootstrap(
    superuser: &SecretString,
    database: &str,
    password: &str,
) -> Result<Urls, SessionError> {
    let (client, connection) = tokio_postgres::connect(superuser.expose_secret(), NoTls).await?;
    let driver = tokio::spawn(connection);
    for role in [OWNER, RUNTIME] {
        role_with(&client, role, password).await?;
    }
    client
        .batch_execute(&format!(
            "GRANT CREATE ON DATABASE \"{database}\" TO {OWNER}"
        ))
        .await?;
    drop(client);
    // The session has said all it had to say.
    let _ = driver.await;
    Ok(Urls {
        owner: url_for(superuser, OWNER, password, database)?,
        runtime: url_for(superuser, RUNTIME, password, database)?,
    })
}

async fn role_with(client: &Client, role: &str, password: &str) -> Result<(), SessionError> {
    let exists: bool = client.query_one(ROLE_EXISTS, &[&role]).await?.try_get(0)?;
    let verb = if exists { "ALTER" } else { "CREATE" };
    let password = password.replace('\'', "''");
    client
        .batch_execute(&format!("{verb} ROLE {role} LOGIN PASSWORD '{password}'"))
        .await?;
    Ok(())
}
