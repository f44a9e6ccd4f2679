//! The binary as an operator runs it: separate processes, killed and stopped by signals.

use crate::app::{App, admin, config, keys_file};
use crate::ledger::{Ledger, eventually, service};
use daybook::service::Roles;
use secrecy::{ExposeSecret, SecretString};
use std::process::Stdio;
use std::time::Duration;
use tokio::io::{AsyncBufReadExt, AsyncRead, BufReader};
use tokio::process::{Child, ChildStderr, ChildStdout, Command};

fn daybook(ledger: &Ledger) -> Command {
    program(&ledger.name, &ledger.url)
}

/// The binary with the settings of a ledger.
pub fn program(ledger: &str, url: &SecretString) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_daybook"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("DAYBOOK_")) {
        command.env_remove(name);
    }
    command
        .env("DAYBOOK_LEDGER", ledger)
        .env("DAYBOOK_DATABASE_URL", url.expose_secret())
        .env("DAYBOOK_AMQP_URL", service("TEST_AMQP_URL").expose_secret())
        .env("DAYBOOK_KEYS_FILE", keys_file())
        .env("DAYBOOK_HTTP_ADDR", "127.0.0.1:0")
        .env("DAYBOOK_OPS_ADDR", "127.0.0.1:0")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

pub async fn signal(child: &Child, name: &str) {
    let pid = child.id().unwrap().to_string();
    assert!(
        Command::new("kill")
            .args([name, &pid])
            .status()
            .await
            .unwrap()
            .success()
    );
}

/// How many shards relays of the database have.
const LEASES: &str = "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
    WHERE l.locktype = 'advisory' AND l.mode = 'ExclusiveLock' AND a.application_name = 'daybook relay'
      AND a.datname = current_database()";

#[tokio::test(flavor = "multi_thread")]
async fn r8_another_relay_takes_over_after_kill_9() {
    let ledger = Ledger::new().await;
    daybook::relay::declare_queue(&service("TEST_AMQP_URL"), &ledger.name, &ledger.name, "#")
        .await
        .unwrap();
    let api = App::with(
        config(&ledger),
        Roles {
            relay: false,
            ..Roles::ALL
        },
    )
    .await;
    let mut first = daybook(&ledger)
        .args(["serve", "--roles", "relay"])
        .spawn()
        .unwrap();
    eventually("the first relay has the shards", async || {
        ledger.value::<i64>(LEASES).await >= 16
    })
    .await;
    let second = daybook(&ledger)
        .args(["serve", "--roles", "relay"])
        .spawn()
        .unwrap();
    for n in 0..20 {
        api.fund(&format!("user-{n}"), 100).await;
    }
    first.start_kill().unwrap();
    first.wait().await.unwrap();
    for n in 0..20 {
        api.fund(&format!("user-{n}"), 100).await;
    }
    eventually("all is published", async || {
        api.get(&admin(), "/v1/outbox").await.ok(200)["depth"] == 0
    })
    .await;
    signal(&second, "-TERM").await;
    let output = second.wait_with_output().await.unwrap();
    assert!(output.status.success(), "{output:?}");
    api.stop().await;
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_print_what_they_found_and_exit_by_it() {
    let ledger = Ledger::new().await;
    let app = App::with(
        config(&ledger),
        Roles {
            relay: false,
            ..Roles::ALL
        },
    )
    .await;
    app.fund("alice", 100).await;
    let run = async |arguments: &[&str]| {
        let output = daybook(&ledger).args(arguments).output().await.unwrap();
        (
            output.status.success(),
            String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap(),
        )
    };
    let (good, text) = run(&[
        "token",
        "--subject",
        "alice",
        "--scope",
        "ledger:read",
        "--ttl-s",
        "60",
    ])
    .await;
    assert!(good, "{text}");
    app.get(text.trim(), "/v1/users/alice").await.ok(200);
    let (good, text) = run(&["outbox", "list"]).await;
    assert!(good && text.contains("waiting 1,"), "{text}");
    let (good, text) = run(&["verify"]).await;
    assert!(good && text.contains("events 1, users 1,"), "{text}");
    ledger
        .admin
        .batch_execute("UPDATE balances SET amount = amount + 1")
        .await
        .unwrap();
    let (good, text) = run(&["verify"]).await;
    assert!(
        !good && text.contains("FAULT users:alice:available EUR/2"),
        "{text}"
    );
    ledger
        .admin
        .batch_execute("UPDATE balances SET amount = amount - 1")
        .await
        .unwrap();
    let (good, text) = run(&["serve", "--roles", "cook"]).await;
    assert!(!good && text.contains("is no role"), "{text}");
    let output = daybook(&ledger)
        .env("DAYBOOK_LANE", "4")
        .arg("verify")
        .output()
        .await
        .unwrap();
    assert!(
        !output.status.success() && String::from_utf8_lossy(&output.stderr).contains("lane"),
        "{output:?}"
    );
    app.stop().await;
    ledger.finish().await;
}

type Lines<T> = tokio::io::Lines<BufReader<T>>;

/// The next line of a child's output with this in it.
async fn line_with(lines: &mut Lines<impl AsyncRead + Unpin>, what: &str) -> String {
    let reading = async {
        loop {
            let line = lines
                .next_line()
                .await
                .unwrap()
                .unwrap_or_else(|| panic!("the output ended before {what:?}"));
            if line.contains(what) {
                return line;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(60), reading)
        .await
        .unwrap_or_else(|_| panic!("no {what:?}"))
}

/// A server that logs each request as JSON: its log, and where it listens.
async fn server(ledger: &Ledger) -> (Child, Lines<ChildStderr>, String) {
    let mut command = daybook(ledger);
    command
        .env("DAYBOOK_LOG", "info,daybook::http=debug")
        .env("DAYBOOK_LOG_FORMAT", "json")
        .arg("serve");
    let mut server = command.spawn().unwrap();
    let mut log = BufReader::new(server.stderr.take().unwrap()).lines();
    let serving: serde_json::Value =
        serde_json::from_str(&line_with(&mut log, "\"serving\"").await).unwrap();
    let address = serving["api"]
        .as_str()
        .unwrap()
        .trim_start_matches("Some(")
        .trim_end_matches(')');
    let url = format!("http://{address}/v1/events");
    (server, log, url)
}

fn tail(ledger: &Ledger, arguments: &[&str]) -> (Child, Lines<ChildStdout>) {
    let mut child = daybook(ledger)
        .args(["events", "tail"])
        .args(arguments)
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    (child, lines)
}

/// Posts a deposit with ids of the client's own; returns the record.
async fn post(url: &str, key: &str) -> String {
    let request = reqwest::Client::new()
        .post(url)
        .bearer_auth(admin())
        .header("Idempotency-Key", key)
        .header("Content-Type", "application/json")
        .header("X-Request-Id", format!("request-{key}"))
        .header("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
        .body(r#"{"type":"deposit","schema":"1.7","subject":"alice","data":{"asset":"EUR/2","amount":"1"}}"#);
    let posted = request.send().await.unwrap();
    assert_eq!(posted.status().as_u16(), 201);
    assert_eq!(
        posted.headers()["x-request-id"].to_str().unwrap(),
        format!("request-{key}")
    );
    posted.text().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_served_request_is_logged_with_its_ids_and_tails_show_the_event() {
    let ledger = Ledger::new().await;
    let mut migrate = daybook(&ledger);
    migrate
        .env(
            "DAYBOOK_OWNER_DATABASE_URL",
            ledger.owner_url.expose_secret(),
        )
        .arg("migrate");
    let migrated = migrate.output().await.unwrap();
    assert!(
        migrated.status.success()
            && String::from_utf8_lossy(&migrated.stdout).starts_with("0 migrations")
    );
    daybook::relay::declare_queue(&service("TEST_AMQP_URL"), &ledger.name, &ledger.name, "#")
        .await
        .unwrap();
    let (server, mut log, url) = server(&ledger).await;
    let (rows, mut row_lines) = tail(&ledger, &[]);
    let (broker, mut message_lines) = tail(&ledger, &["--broker", "--queue", &ledger.name]);
    let started = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE '-- tail_after%' AND datname = current_database()";
    eventually("the rows are followed", async || {
        ledger.value::<i64>(started).await > 0
    })
    .await;
    let record = post(&url, "k").await;
    let answered = line_with(&mut log, "answered").await;
    assert!(
        answered.contains("request-k") && answered.contains("0af7651916cd43dd8448eb211c80319c"),
        "{answered}"
    );
    assert!(
        line_with(&mut message_lines, "deposit subject=alice")
            .await
            .contains("usersequence=1")
    );
    assert_eq!(line_with(&mut message_lines, "specversion").await, record);
    assert_eq!(line_with(&mut row_lines, "specversion").await, record);
    for child in [rows, broker, server] {
        signal(&child, "-TERM").await;
        let output = child.wait_with_output().await.unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    ledger.finish().await;
}
