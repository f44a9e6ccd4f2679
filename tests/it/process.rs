//! The binary as an operator runs it: separate processes, killed and stopped by signals.

use crate::app::{App, admin, config, keys_file};
use crate::ledger::{Ledger, eventually, service};
use daybook::service::Roles;
use secrecy::ExposeSecret;
use std::process::Stdio;
use tokio::process::{Child, Command};

/// The binary with the settings of this ledger.
fn daybook(ledger: &Ledger) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_daybook"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("DAYBOOK_")) {
        command.env_remove(name);
    }
    command
        .env("DAYBOOK_LEDGER", &ledger.name)
        .env("DAYBOOK_DATABASE_URL", ledger.url.expose_secret())
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

async fn signal(child: &Child, name: &str) {
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

async fn leases(ledger: &Ledger) -> i64 {
    ledger
        .value(
            "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid)
             WHERE l.locktype = 'advisory' AND l.mode = 'ExclusiveLock' AND a.application_name = 'daybook relay'
               AND a.datname = current_database()",
        )
        .await
}

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
        leases(&ledger).await >= 16
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
    assert!(good && text.contains("1 events of 1 users"), "{text}");
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
