//! The private services themselves: a Postgres of its own per test here, never the one that the other tests share.

use std::path::{Path, PathBuf};

use daybook::dev::Postgres;
use daybook::dev::postgres::Options;
use daybook::dev::process::{is_alive, recognised, signal};

/// A directory for services of this test's own, removed at the end with what runs in it.
struct Place(PathBuf);

impl Place {
    fn new() -> Self {
        let scratch =
            std::env::var_os("TEST_SCRATCH_DIR").expect("TEST_SCRATCH_DIR is set by `make test`");
        Self(Path::new(&scratch).join(format!("{:016x}", rand::random::<u64>())))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let stopped = Postgres::stop_in(&self.0);
        let removed = std::fs::remove_dir_all(&self.0);
        if !std::thread::panicking() {
            stopped.unwrap();
            removed.unwrap();
        }
    }
}

fn start(dir: &Path) -> Postgres {
    Postgres::start(
        dir,
        &Options {
            unsafe_but_fast: true,
            ..Options::default()
        },
    )
    .unwrap()
}

fn server(dir: &Path) -> Option<u32> {
    recognised(&dir.join("data/postmaster.pid"), &["postgres"])
}

async fn ask(url: &str, sql: &str) -> String {
    let (client, connection) = tokio_postgres::connect(url, tokio_postgres::NoTls)
        .await
        .unwrap();
    let connection = tokio::spawn(connection);
    let row = client.query_one(sql, &[]).await.unwrap();
    drop(client);
    connection.await.unwrap().unwrap();
    row.get(0)
}

#[tokio::test]
async fn a_running_postgres_is_adopted_and_its_data_outlives_a_stop() {
    let place = Place::new();
    let first = start(&place.0);
    first.create_database("kept").unwrap();
    first.create_database("kept").unwrap();
    let encoding = "select current_setting('server_encoding') || ' ' || datcollate from pg_database where datname = 'kept'";
    assert_eq!(ask(&first.url("kept"), encoding).await, "UTF8 C");
    let pid = server(&place.0).unwrap();

    // What a killed parent leaves behind is taken over: the same process at the same address.
    let second = start(&place.0);
    assert_eq!(
        (second.url("kept"), server(&place.0)),
        (first.url("kept"), Some(pid))
    );

    second.stop().unwrap();
    assert!(!is_alive(pid));
    let third = start(&place.0);
    assert_eq!(
        ask(&third.url("kept"), "select current_database()::text").await,
        "kept"
    );
    third.stop().unwrap();
    Postgres::stop_in(&place.0).unwrap();
}

#[tokio::test]
async fn stale_pid_files_are_neither_obeyed_nor_in_the_way() {
    let place = Place::new();
    start(&place.0);
    let pid = server(&place.0).unwrap();
    signal(&pid.to_string(), "KILL");
    while is_alive(pid) {
        tokio::task::yield_now().await;
    }

    // The ids now belong to this very test, which must neither be taken for a server nor be ended as one.
    let own = std::process::id().to_string();
    let file = place.0.join("data/postmaster.pid");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replacen(&pid.to_string(), &own, 1)).unwrap();
    std::fs::write(place.0.join("leader.pid"), &own).unwrap();
    Postgres::stop_in(&place.0).unwrap();

    let again = start(&place.0);
    assert_eq!(
        ask(&again.url("postgres"), "select current_database()::text").await,
        "postgres"
    );
    again.stop().unwrap();
}
