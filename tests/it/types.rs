//! Types that an operator brings as files, posted without a rebuild.

use crate::app::{Answer, App, admin, config};
use crate::ledger::Ledger;
use daybook::service::Roles;
use std::sync::Arc;

async fn start(ledger: &Ledger) -> App {
    let mut config = config(ledger);
    config.schema_dir = Some(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/it/types").into());
    App::with(
        config,
        Roles {
            relay: false,
            ..Roles::ALL
        },
    )
    .await
}

fn sale(amount: u32, order: &str) -> String {
    format!(
        r#"{{"type":"shop.sale","schema":"1.0","subject":"alice",
            "data":{{"amount":"{amount}","merchant":"shop","order":"{order}"}}}}"#
    )
}

/// Account and amount of each posting of a record.
fn legs(answer: &Answer) -> Vec<(String, String)> {
    let postings = answer.json()["data"]["postings"]
        .as_array()
        .unwrap()
        .clone();
    let text = |value: &serde_json::Value| value.as_str().unwrap().to_owned();
    postings
        .iter()
        .map(|posting| (text(&posting["account"]), text(&posting["amount"])))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn sources_are_emptied_in_order_and_what_was_taken_is_split() {
    let ledger = Ledger::new().await;
    let app = start(&ledger).await;
    let grant =
        r#"{"type":"promo.grant","schema":"1.0","subject":"alice","data":{"amount":"300"}}"#;
    app.post(&admin(), "grant", grant).await.ok(201);
    app.fund("alice", 1_000).await;
    app.post(&admin(), "small", &sale(99, "o-1"))
        .await
        .refused(422, "sale_too_small");
    let sold = app.post(&admin(), "sale", &sale(1_000, "o-1")).await;
    sold.ok(201);
    // 1,530 basis points of the 700 that were not promotion; of the other 893 a quarter, floored; the rest.
    let expected = [
        ("users:alice:promo", "-300"),
        ("users:alice:available", "-700"),
        ("platform:clearing", "1000"),
        ("platform:clearing", "-1000"),
        ("users:shop:available", "107"),
        ("platform:partner", "223"),
        ("platform:fees", "670"),
    ];
    assert_eq!(
        legs(&sold),
        expected.map(|(account, amount)| (account.to_owned(), amount.to_owned()))
    );
    app.post(&admin(), "poor", &sale(301, "o-2"))
        .await
        .refused(422, "insufficient_funds");
    app.stop().await;
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_business_key_is_taken_once_from_any_pod_until_it_is_free_again() {
    let ledger = Ledger::new().await;
    let pods = Arc::new([start(&ledger).await, start(&ledger).await]);
    pods[0].fund("alice", 100_000).await;
    let posts = (0..20_usize).map(|n| {
        let pods = pods.clone();
        tokio::spawn(async move {
            pods[n % 2]
                .post(&admin(), &format!("k{n}"), &sale(100, "o-7"))
                .await
        })
    });
    let mut created = Vec::new();
    for post in posts.collect::<Vec<_>>() {
        let answer = post.await.unwrap();
        if answer.status == 201 {
            created.push(answer);
        } else {
            answer.refused(422, "order_taken");
            assert!(answer.header("retry-after").parse::<u32>().unwrap() > 86_000);
        }
    }
    assert_eq!(created.len(), 1);
    assert_eq!(
        created[0].json()["data"]["effects"]["unique"][0]["key"],
        "o-7"
    );
    // A day later, as far as the database knows.
    ledger
        .admin
        .batch_execute("UPDATE business_keys SET until_at = now() - interval '1 second'")
        .await
        .unwrap();
    pods[0]
        .post(&admin(), "later", &sale(100, "o-7"))
        .await
        .ok(201);
    pods[1]
        .post(&admin(), "again", &sale(100, "o-7"))
        .await
        .refused(422, "order_taken");
    for pod in Arc::into_inner(pods).unwrap() {
        pod.stop().await;
    }
    ledger.finish().await;
}
