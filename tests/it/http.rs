//! The API over HTTP, with real tokens, on a real database: what a client sees.

use crate::app::{Answer, App, admin, config, token, transfer, user};
use crate::ledger::{Ledger, eventually};
use daybook::domain::Scope;
use daybook::http::{Needs, ROUTES, Verb};
use daybook::service::Roles;
use sha2::{Digest, Sha256};
use std::collections::HashSet;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

fn sha256(text: &str) -> String {
    hex::encode(Sha256::digest(text.as_bytes()))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_is_posted_chained_replayed_and_read() {
    let ledger = Ledger::new().await;
    let app = App::start(&ledger).await;
    let first = app.fund("alice", 10_000).await;
    assert_eq!(first.header("content-type"), "application/cloudevents+json");
    assert_eq!(first.header("etag"), format!("\"{}\"", sha256(&first.body)));
    let second = app
        .post(&user("alice"), "k-1", &transfer("bob", 2_500))
        .await;
    let record = second.ok(201);
    assert_eq!(record["previoushash"], sha256(&first.body));
    assert_eq!(record["usersequence"], "2");
    assert_eq!(record["data"]["postings"][0]["balance"], "7500");
    assert_eq!(record["data"]["postings"][1].get("balance"), None);
    let location = format!("/v1/events/{}", record["id"].as_str().unwrap());
    assert_eq!(second.header("location"), location);
    for spelling in ["k-1", "\"k-1\""] {
        let again = app
            .post(&user("alice"), spelling, &transfer("bob", 2_500))
            .await;
        assert_eq!((again.status, &again.body), (200, &second.body));
        assert_eq!(again.header("idempotency-replayed"), "true");
    }
    assert_eq!(app.get(&user("alice"), &location).await.body, second.body);
    let alice = app.get(&user("alice"), "/v1/users/alice").await.ok(200);
    assert_eq!(
        (alice["sequence"].as_u64(), alice["head"].as_str()),
        (Some(2), Some(&*sha256(&second.body)))
    );
    let unused = app.get(&user("nobody"), "/v1/users/nobody").await.ok(200);
    assert_eq!(unused["sequence"], 0);
    let bob = app
        .get(&user("bob"), "/v1/accounts/users:bob:available")
        .await
        .ok(200);
    assert_eq!(bob["balances"][0]["balance"], "2500");
    let world = app.get(&admin(), "/v1/accounts/world").await.ok(200);
    assert_eq!(world["balances"][0]["balance"], "-10000");
    app.stop().await;
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn m6_a_write_is_read_at_once_from_any_pod() {
    let ledger = Ledger::new().await;
    let pods = [App::start(&ledger).await, App::start(&ledger).await];
    pods[0].fund("alice", 1_000).await;
    for n in 0..20_usize {
        let posted = pods[n % 2]
            .post(&user("alice"), &format!("k{n}"), &transfer("bob", 1))
            .await;
        let record = posted.ok(201);
        let other = &pods[(n + 1) % 2];
        let location = format!("/v1/events/{}", record["id"].as_str().unwrap());
        assert_eq!(other.get(&user("alice"), &location).await.body, posted.body);
        let head = other.get(&user("alice"), "/v1/users/alice").await.ok(200);
        assert_eq!(head["head"], sha256(&posted.body));
        let list = other
            .get(&user("alice"), "/v1/events?limit=100")
            .await
            .ok(200);
        assert_eq!(
            list["items"].as_array().unwrap().last().unwrap()["id"],
            record["id"]
        );
    }
    for pod in pods {
        pod.stop().await;
    }
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn m7_a_broker_that_is_down_changes_no_answer() {
    let ledger = Ledger::new().await;
    let nobody = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = nobody.local_addr().unwrap().port();
    drop(nobody);
    let mut config = config(&ledger);
    config.amqp_url = format!("amqp://guest:guest@127.0.0.1:{port}/%2f").into();
    let app = App::with(config, Roles::ALL).await;
    app.fund("alice", 100).await;
    let record = app
        .post(&user("alice"), "k", &transfer("bob", 40))
        .await
        .ok(201);
    assert_eq!(record["data"]["postings"][0]["balance"], "60");
    assert_eq!(app.ops("/readyz").await.status, 200);
    let outbox = app.get(&admin(), "/v1/outbox").await.ok(200);
    assert_eq!(outbox["depth"], 2);
    app.stop().await;
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn m8_the_smallest_pools_serve_many_clients() {
    let ledger = Ledger::new().await;
    let mut config = config(&ledger);
    (config.lanes, config.pool_size) = (1, 1);
    let app = std::sync::Arc::new(App::with(config, Roles::ALL).await);
    app.fund("alice", 1_000).await;
    let clients = (0..50).map(|n| {
        let app = app.clone();
        tokio::spawn(async move {
            app.post(&user("alice"), &format!("k{n}"), &transfer("bob", 1))
                .await
                .ok(201);
            app.get(&user("alice"), "/v1/users/alice").await.ok(200);
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.unwrap();
    }
    std::sync::Arc::into_inner(app).unwrap().stop().await;
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn m1_another_spelling_of_an_asset_is_refused() {
    let ledger = Ledger::new().await;
    let app = App::start(&ledger).await;
    for asset in [
        "USD", "USD/0", "USD/256", "usd/2", " USD/2", "USD/02", "USD/2 ", "USD/", "/2", "ABC/2", "",
    ] {
        let body = format!(
            r#"{{"type":"deposit","schema":"1.7","subject":"alice","data":{{"asset":"{asset}","amount":"1"}}}}"#
        );
        let answer = app.post(&admin(), "k", &body).await;
        assert_eq!(answer.status, 400, "{asset:?}: {}", answer.body);
        assert_eq!(
            answer.json()["errors"][0]["pointer"],
            "/data/asset",
            "{asset:?}: {}",
            answer.body
        );
    }
    assert_eq!(ledger.value::<i64>("SELECT count(*) FROM events").await, 0);
    app.stop().await;
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn m11_a_transfer_to_oneself_is_refused() {
    let ledger = Ledger::new().await;
    let app = App::start(&ledger).await;
    app.fund("alice", 100).await;
    app.post(&user("alice"), "k", &transfer("alice", 1))
        .await
        .refused(422, "same_account");
    app.stop().await;
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn m12_a_fee_and_split_lines_lose_nothing() {
    let ledger = Ledger::new().await;
    let app = App::start(&ledger).await;
    app.fund("alice", 100_000).await;
    let fee = r#"{"type":"transfer","schema":"1.7","data":{"to":"bob","asset":"EUR/2","amount":"9999","fee_bps":333}}"#;
    let record = app.post(&user("alice"), "fee", fee).await.ok(201);
    let amounts: Vec<i64> = record["data"]["postings"]
        .as_array()
        .unwrap()
        .iter()
        .map(|posting| posting["amount"].as_str().unwrap().parse().unwrap())
        .collect();
    assert_eq!(amounts.iter().sum::<i64>(), 0);
    assert_eq!(amounts[0], -9_999);
    assert!(amounts.contains(&332), "the fee is floored: {amounts:?}");
    let lines = r#"{"type":"transfer","schema":"1.7","data":{"asset":"EUR/2","lines":[
        {"to":"bob","amount":"10","reference":"a"},{"to":"carol","amount":"20"},
        {"to":"bob","amount":"10","reference":"a"},{"to":"bob","amount":"11","reference":"b"}]}}"#;
    let record = app.post(&user("alice"), "lines", lines).await.ok(201);
    assert_eq!(record["data"]["input"]["dropped"], 1);
    assert_eq!(record["data"]["postings"][0]["amount"], "-41");
    let conflict = lines.replace(
        r#""amount":"11","reference":"b""#,
        r#""amount":"11","reference":"a""#,
    );
    app.post(&user("alice"), "conflict", &conflict)
        .await
        .refused(422, "conflicting_lines");
    app.stop().await;
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn i1_i2_a_key_is_one_request_and_a_refusal_burns_none() {
    let ledger = Ledger::new().await;
    let app = App::start(&ledger).await;
    let alice = user("alice");
    app.post(&alice, "k", &transfer("bob", 50))
        .await
        .refused(422, "insufficient_funds");
    app.fund("alice", 100).await;
    app.post(&alice, "k", &transfer("bob", 50)).await.ok(201);
    app.post(&alice, "k", &transfer("bob", 51))
        .await
        .refused(422, "idempotency_key_reused");
    // White space and the order of members are no other meaning.
    let spaced = r#" { "data" : {"amount":"50", "to":"bob","asset":"EUR/2"}, "schema":"1.7","type":"transfer" } "#;
    assert_eq!(app.post(&alice, "k", spaced).await.status, 200);
    // Another writer's key is another key.
    let other = r#"{"type":"transfer","schema":"1.7","subject":"alice","data":{"to":"bob","asset":"EUR/2","amount":"1"}}"#;
    app.post(&admin(), "k", other).await.ok(201);
    app.stop().await;
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn i3_i5_parallel_posts_and_replays_from_two_pods_are_one_event_and_one_message() {
    let ledger = Ledger::new().await;
    let mut quiet = config(&ledger);
    quiet.amqp_url = "amqp://127.0.0.1:1/%2f".to_owned().into();
    let roles = Roles {
        relay: false,
        ..Roles::ALL
    };
    let pods = std::sync::Arc::new([
        App::with(quiet.clone(), roles).await,
        App::with(quiet, roles).await,
    ]);
    pods[0].fund("alice", 1_000).await;
    let posts = (0..100_usize).map(|n| {
        let pods = pods.clone();
        tokio::spawn(async move {
            pods[n % 2]
                .post(&user("alice"), "same", &transfer("bob", 7))
                .await
        })
    });
    let mut answers: Vec<Answer> = Vec::new();
    for post in posts.collect::<Vec<_>>() {
        answers.push(post.await.unwrap());
    }
    assert_eq!(
        answers.iter().filter(|answer| answer.status == 201).count(),
        1
    );
    assert_eq!(
        answers.iter().filter(|answer| answer.status == 200).count(),
        99
    );
    assert!(answers.iter().all(|answer| answer.body == answers[0].body));
    assert_eq!(ledger.value::<i64>("SELECT count(*) FROM outbox").await, 2);
    for pod in std::sync::Arc::into_inner(pods).unwrap() {
        pod.stop().await;
    }
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a2_every_route_wants_its_token_and_scope() {
    let ledger = Ledger::new().await;
    let app = App::start(&ledger).await;
    for route in ROUTES {
        let path = route
            .path
            .replace("{id}", "01a22cf4-4ba8-7714-8003-18f08e76808e")
            .replace("{subject}", "alice")
            .replace("{address}", "users:alice:available")
            .replace("{type}", "transfer")
            .replace("{version}", "1.0");
        let method = match route.method {
            Verb::Get => "GET",
            Verb::Post => "POST",
        };
        let request = || {
            app.request(method, &path)
                .header("Content-Type", "application/json")
                .body("{}")
        };
        app.send(request()).await.refused(401, "token_missing");
        app.send(request().bearer_auth("a.b.c"))
            .await
            .refused(401, "token_invalid");
        let Needs::OneOf(scopes) = route.needs else {
            continue;
        };
        app.send(request().bearer_auth(token("alice", &[])))
            .await
            .refused(403, "scope_missing");
        for scope in Scope::ALL {
            let enough = scopes.iter().any(|needed| {
                [scope]
                    .into_iter()
                    .collect::<daybook::domain::Scopes>()
                    .has(*needed)
            });
            let answer = app
                .send(request().bearer_auth(token("alice", &[scope])))
                .await;
            assert_eq!(
                answer.status == 403,
                !enough,
                "{method} {path} with {}: {}",
                scope.name(),
                answer.body
            );
        }
    }
    app.send(app.request("GET", "/nowhere"))
        .await
        .refused(404, "not_found");
    app.send(app.request("DELETE", "/v1/events"))
        .await
        .refused(405, "method_not_allowed");
    app.stop().await;
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_yours_is_404_to_read_and_403_to_write() {
    let ledger = Ledger::new().await;
    let app = App::start(&ledger).await;
    let record = app.fund("alice", 100).await.json();
    let location = format!("/v1/events/{}", record["id"].as_str().unwrap());
    let eve = user("eve");
    for path in [
        &*location,
        "/v1/users/alice",
        "/v1/accounts/users:alice:available",
        "/v1/accounts/world",
        "/v1/events?subject=alice",
    ] {
        app.get(&eve, path).await.refused(404, "not_found");
        app.get(&admin(), path).await.ok(200);
    }
    let for_alice = r#"{"type":"transfer","schema":"1.7","subject":"alice","data":{"to":"eve","asset":"EUR/2","amount":"1"}}"#;
    app.post(&eve, "k", for_alice)
        .await
        .refused(403, "subject_not_yours");
    // A deposit debits `world`, which is nobody's.
    let mint = r#"{"type":"deposit","schema":"1.7","data":{"asset":"EUR/2","amount":"1"}}"#;
    app.post(&eve, "k", mint)
        .await
        .refused(422, "account_not_yours");
    app.post(&token("eve", &[Scope::Read]), "k", mint)
        .await
        .refused(403, "scope_missing");
    app.stop().await;
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revocation_counts_for_the_next_request_of_every_pod() {
    let ledger = Ledger::new().await;
    let pods = [App::start(&ledger).await, App::start(&ledger).await];
    pods[0].fund("alice", 100).await;
    let (first, second) = (user("alice"), user("alice"));
    for pod in &pods {
        pod.post(&first, &pod.url, &transfer("bob", 1))
            .await
            .ok(201);
    }
    let claims: serde_json::Value = {
        use base64::Engine;
        let middle = first.split('.').nth(1).unwrap();
        serde_json::from_slice(
            &base64::engine::general_purpose::URL_SAFE_NO_PAD
                .decode(middle)
                .unwrap(),
        )
        .unwrap()
    };
    let revoke = async |pod: &App, by: &str, body: String| {
        pod.send(
            pod.request("POST", "/v1/tokens/revoke")
                .bearer_auth(by)
                .header("Content-Type", "application/json")
                .body(body),
        )
        .await
    };
    let by_id = format!(r#"{{"issuer":{},"jti":{}}}"#, claims["iss"], claims["jti"]);
    let others = revoke(&pods[0], &user("eve"), by_id.clone()).await;
    assert_eq!(others.status, 403, "{}", others.body);
    assert_eq!(revoke(&pods[0], &first, by_id).await.status, 204);
    for pod in &pods {
        pod.post(&first, "after", &transfer("bob", 1))
            .await
            .refused(401, "token_revoked");
        pod.get(&first, "/v1/users/alice")
            .await
            .refused(401, "token_revoked");
        pod.post(
            &second,
            &format!("second {}", pod.url).replace(' ', "-"),
            &transfer("bob", 1),
        )
        .await
        .ok(201);
    }
    assert_eq!(
        revoke(&pods[1], &admin(), r#"{"subject":"alice"}"#.to_owned())
            .await
            .status,
        204
    );
    for pod in &pods {
        pod.post(&second, "after", &transfer("bob", 1))
            .await
            .refused(401, "token_revoked");
        pod.get(&second, "/v1/events")
            .await
            .refused(401, "token_revoked");
    }
    for pod in pods {
        pod.stop().await;
    }
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_come_in_the_documented_order() {
    let ledger = Ledger::new().await;
    let app = App::start(&ledger).await;
    app.fund("alice", 100).await;
    app.post(&user("alice"), "used", &transfer("bob", 1))
        .await
        .ok(201);
    let broken = "{";
    let foreign = r#"{"type":"transfer","schema":"1.7","subject":"bob","data":{"to":"alice","asset":"EUR/2","amount":"999"}}"#;
    let weak = token("alice", &[Scope::Read]);
    app.post("x.y.z", "k", broken)
        .await
        .refused(401, "token_invalid");
    app.post(&weak, "k", broken)
        .await
        .refused(403, "scope_missing");
    assert_eq!(app.post(&user("alice"), "k", broken).await.status, 400);
    app.post(&user("alice"), "k", foreign)
        .await
        .refused(403, "subject_not_yours");
    ledger
        .admin
        .batch_execute("UPDATE users SET status = 'frozen' WHERE subject = 'alice'")
        .await
        .unwrap();
    let alice = user("alice");
    assert_eq!(
        app.post(&alice, "used", &transfer("bob", 1)).await.status,
        200
    );
    app.post(&alice, "used", &transfer("bob", 2))
        .await
        .refused(422, "idempotency_key_reused");
    let expecting = r#"{"type":"transfer","schema":"1.7","expected_sequence":7,"data":{"to":"alice","asset":"EUR/2","amount":"999"}}"#;
    app.post(&alice, "k", expecting)
        .await
        .refused(409, "sequence_conflict");
    app.post(&alice, "k", &transfer("alice", 999))
        .await
        .refused(422, "user_frozen");
    // A frozen user still receives.
    app.post(&user("bob"), "k", &transfer("alice", 1))
        .await
        .ok(201);
    ledger
        .admin
        .batch_execute("UPDATE users SET status = 'active'")
        .await
        .unwrap();
    app.post(&alice, "k", &transfer("alice", 999))
        .await
        .refused(422, "same_account");
    app.post(&alice, "k", &transfer("bob", 999))
        .await
        .refused(422, "insufficient_funds");
    app.stop().await;
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn events_are_posted_at_once_on_one_connection_of_http_2() {
    const POSTS: usize = 100;
    let ledger = Ledger::new().await;
    let app = App::start(&ledger).await;
    app.fund("alice", 10_000).await;
    let client = reqwest::Client::builder()
        .http2_prior_knowledge()
        .build()
        .unwrap();
    let post = |key: String, body: String| {
        client
            .post(format!("{}/v1/events", app.url))
            .bearer_auth(user("alice"))
            .header("Idempotency-Key", key)
            .header("Content-Type", "application/json")
            .body(body)
            .send()
    };
    let posts = (0..POSTS).map(|n| post(format!("k-{n}"), transfer("bob", 1)));
    let mut sequences = HashSet::new();
    for answer in futures_util::future::join_all(posts).await {
        let answer = answer.unwrap();
        assert_eq!(answer.version(), reqwest::Version::HTTP_2);
        assert_eq!(answer.status(), 201);
        let etag = answer.headers()["etag"].to_str().unwrap().to_owned();
        let record = answer.text().await.unwrap();
        assert_eq!(etag, format!("\"{}\"", sha256(&record)));
        let record: serde_json::Value = serde_json::from_str(&record).unwrap();
        sequences.insert(record["usersequence"].as_str().unwrap().to_owned());
    }
    assert_eq!(sequences.len(), POSTS);
    let large = post("large".to_owned(), "x".repeat(64 * 1024 + 1)).await;
    assert_eq!(large.unwrap().status(), 413);
    let replay = post("k-0".to_owned(), transfer("bob", 1)).await.unwrap();
    assert_eq!(replay.status(), 200);
    // All of it was one connection, and it does not keep the service from stopping.
    let metrics = app.ops("/metrics").await.body;
    assert!(
        metrics.contains("\ndaybook_http_connections 2\n"),
        "{metrics}"
    );
    app.stop().await;
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_have_limits() {
    let ledger = Ledger::new().await;
    let app = App::start(&ledger).await;
    let alice = user("alice");
    let big = format!(
        r#"{{"type":"transfer","schema":"1.7","data":{{"to":"{}"}}}}"#,
        "x".repeat(70_000)
    );
    app.post(&alice, "k", &big)
        .await
        .refused(413, "body_too_large");
    for key in ["", " ", "ü", &"k".repeat(129), "a b"] {
        let request = app
            .request("POST", "/v1/events")
            .bearer_auth(&alice)
            .header("Content-Type", "application/json");
        let answer = app
            .send(
                request
                    .header("Idempotency-Key", key)
                    .body(transfer("bob", 1)),
            )
            .await;
        assert_eq!(answer.status, 400, "{key:?}: {}", answer.body);
    }
    let request = || {
        app.request("POST", "/v1/events")
            .bearer_auth(&alice)
            .body(transfer("bob", 1))
    };
    let json = ("Content-Type", "application/json");
    app.send(request().header(json.0, json.1))
        .await
        .refused(400, "idempotency_key_missing");
    let twice = request()
        .header(json.0, json.1)
        .header("Idempotency-Key", "a")
        .header("Idempotency-Key", "b");
    app.send(twice)
        .await
        .refused(400, "idempotency_key_invalid");
    for types in [&["text/plain"][..], &["application/json", "text/plain"]] {
        let keyed = request().header("Idempotency-Key", "a");
        let typed = types
            .iter()
            .fold(keyed, |request, one| request.header(json.0, *one));
        app.send(typed).await.refused(415, "unsupported_media_type");
    }
    app.stop().await;
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_anything_is_refused() {
    let ledger = Ledger::new().await;
    let app = App::start(&ledger).await;
    let alice = user("alice");
    for path in [
        "/v1/events?limit=0",
        "/v1/events?limit=101",
        "/v1/events?nonsense=1",
        "/v1/events?after=zzz",
        "/v1/events/17",
        "/v1/events?idempotency_key=",
        "/v1/users/alice?x=1",
    ] {
        let answer = app.get(&alice, path).await;
        assert_eq!(answer.status, 400, "{path}: {}", answer.body);
    }
    for body in [
        r#"{"type":"transfer","schema":"1.7","data":{},"more":1}"#,
        r#"{"type":"nope","schema":"1.0","data":{}}"#,
        r#"{"type":"transfer","schema":"9.9","data":{}}"#,
        "[]",
        "null",
        "1",
        "\"\"",
        "",
        "{\"type\":1}",
    ] {
        let answer = app.post(&alice, "k", body).await;
        assert_eq!(answer.status, 400, "{body}: {}", answer.body);
    }
    assert_eq!(ledger.value::<i64>("SELECT count(*) FROM events").await, 0);
    app.stop().await;
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_sends_no_head_is_cut_off() {
    let ledger = Ledger::new().await;
    let mut config = config(&ledger);
    config.header_timeout_ms = 200;
    let app = App::with(config, Roles::ALL).await;
    let mut slow = TcpStream::connect(app.url.trim_start_matches("http://"))
        .await
        .unwrap();
    slow.write_all(b"POST /v1/events HTTP/1.1\r\nHost: x\r\n")
        .await
        .unwrap();
    let mut rest = Vec::new();
    tokio::time::timeout(Duration::from_secs(60), slow.read_to_end(&mut rest))
        .await
        .unwrap()
        .unwrap();
    app.stop().await;
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d3_a_thousand_clients_cut_off_at_random_leave_whole_events_only() {
    let ledger = Ledger::new().await;
    let app = App::start(&ledger).await;
    app.fund("alice", 1_000_000).await;
    let (alice, address) = (
        user("alice"),
        app.url.trim_start_matches("http://").to_owned(),
    );
    let gate = std::sync::Arc::new(tokio::sync::Semaphore::new(100));
    let clients = (0..1_000).map(|n| {
        let (alice, address, gate) = (alice.clone(), address.clone(), gate.clone());
        tokio::spawn(async move {
            let _turn = gate.acquire().await.unwrap();
            let body = transfer("bob", 1);
            let request = format!(
                "POST /v1/events HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {alice}\r\nIdempotency-Key: k{n}\r\n\
                 Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            );
            let mut stream = TcpStream::connect(address).await.unwrap();
            // One in two sends all of it and leaves without the answer.
            let whole = rand::random::<bool>();
            let cut = if whole { request.len() } else { rand::random_range(0..request.len()) };
            let _ = stream.write_all(&request.as_bytes()[..cut]).await;
        })
    });
    for client in clients.collect::<Vec<_>>() {
        client.await.unwrap();
    }
    app.fund("alice", 1).await;
    app.stop().await;
    let idle = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'";
    assert_eq!(ledger.value::<i64>(idle).await, 0);
    let events: i64 = ledger
        .value("SELECT count(*) FROM events WHERE type = 'transfer'")
        .await;
    let paid: i64 = ledger.value("SELECT coalesce(sum(amount), 0)::bigint FROM balances JOIN accounts USING (account_no) WHERE address = 'users:bob:available'").await;
    assert_eq!(events, paid);
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn d2_no_connection_returns_to_the_pool_inside_a_transaction() {
    let ledger = Ledger::new().await;
    let mut config = config(&ledger);
    config.pool_size = 1;
    let app = App::with(config, Roles::ALL).await;
    app.fund("alice", 10).await;
    let held = crate::ledger::superuser(&ledger.name).await;
    held.batch_execute(&format!(
        "BEGIN; LOCK TABLE {}.users IN ACCESS EXCLUSIVE MODE",
        ledger.name
    ))
    .await
    .unwrap();
    // A read that is given up while its statement waits.
    let address = app.url.trim_start_matches("http://").to_owned();
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!(
        "GET /v1/users/alice HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\n\r\n",
        user("alice")
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()";
    eventually("the read waits", async || {
        ledger.value::<i64>(waiting).await > 0
    })
    .await;
    drop(stream);
    held.batch_execute("ROLLBACK").await.unwrap();
    let idle = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'";
    for _ in 0..10 {
        assert_eq!(app.get(&user("alice"), "/v1/users/alice").await.status, 200);
        assert_eq!(ledger.value::<i64>(idle).await, 0);
    }
    app.stop().await;
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_answers_every_accepted_command() {
    let ledger = Ledger::new().await;
    let app = App::start(&ledger).await;
    app.fund("alice", 100_000).await;
    let url = app.url.clone();
    let (alice, client) = (user("alice"), reqwest::Client::new());
    let posts: Vec<_> = (0..200)
        .map(|n| {
            let request = client
                .post(format!("{url}/v1/events"))
                .bearer_auth(&alice)
                .header("Idempotency-Key", format!("k{n}"))
                .header("Content-Type", "application/json")
                .body(transfer("bob", 1));
            tokio::spawn(async move {
                // A connection that was not accepted any more is no answer; one that was has a whole one.
                match request.send().await {
                    Ok(response) => {
                        Some((response.status().as_u16(), response.text().await.unwrap()))
                    }
                    Err(_) => None,
                }
            })
        })
        .collect();
    eventually("some are stored", async || {
        ledger.value::<i64>("SELECT count(*) FROM events").await > 5
    })
    .await;
    app.stop().await;
    let mut created = 0;
    for post in posts {
        match post.await.unwrap() {
            Some((201, _)) => created += 1,
            Some((status, body)) => assert_eq!(status, 503, "{body}"),
            None => {}
        }
    }
    assert_eq!(
        ledger
            .value::<i64>("SELECT count(*) FROM events WHERE type = 'transfer'")
            .await,
        created
    );
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lists_are_whole_in_order_and_paged() {
    let ledger = Ledger::new().await;
    let app = App::start(&ledger).await;
    app.fund("alice", 100).await;
    app.fund("carol", 100).await;
    for n in 0..24 {
        let writer = if n % 2 == 0 { "alice" } else { "carol" };
        app.post(&user(writer), &format!("k{n}"), &transfer("bob", 1))
            .await
            .ok(201);
    }
    let all = async |token: &str, first: &str, by: &str| {
        let mut seen: Vec<(String, String)> = Vec::new();
        let mut path = first.to_owned();
        loop {
            let page = app.get(token, &path).await.ok(200);
            for item in page["items"].as_array().unwrap() {
                seen.push((
                    item["subject"].as_str().unwrap().into(),
                    item["usersequence"].as_str().unwrap().into(),
                ));
            }
            let Some(next) = page["next"].as_str() else {
                return seen;
            };
            path = format!("/v1/events?limit=5&after={next}{by}");
        }
    };
    let own = all(&user("alice"), "/v1/events?limit=5", "").await;
    let numbers: Vec<String> = own.iter().map(|(_, sequence)| sequence.clone()).collect();
    assert_eq!(
        numbers,
        (1..=13).map(|n: u32| n.to_string()).collect::<Vec<_>>()
    );
    eventually("all have settled", async || {
        all(&admin(), "/v1/events?limit=5", "").await.len() == 26
    })
    .await;
    let transfers = all(
        &admin(),
        "/v1/events?limit=5&type=transfer",
        "&type=transfer",
    )
    .await;
    assert_eq!(transfers.len(), 24);
    let one = app
        .get(
            &user("alice"),
            "/v1/events?subject=alice&idempotency_key=k4",
        )
        .await
        .ok(200);
    assert_eq!(one["items"].as_array().unwrap().len(), 1);
    app.stop().await;
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn probes_and_metrics_tell_the_state() {
    let ledger = Ledger::new().await;
    let app = App::start(&ledger).await;
    app.fund("alice", 100).await;
    assert_eq!(
        (
            app.ops("/livez").await.status,
            app.ops("/readyz").await.status
        ),
        (200, 200)
    );
    let metrics = app.ops("/metrics").await.body;
    for name in [
        "daybook_http_requests_total{route=\"/v1/events\",method=\"POST\",status=\"201\"} 1",
        "daybook_commit_outcomes_total{kind=\"created\"} 1",
        "daybook_commit_batch_size_count 1",
        "daybook_commit_seconds_bucket",
        "daybook_lane_queue 0",
        "daybook_pool_connections{kind=\"size\"}",
        "daybook_outbox_rows",
        "daybook_outbox_oldest_seconds",
        "daybook_relay_leases",
        "daybook_horizon_age_seconds",
    ] {
        assert!(metrics.contains(name), "{name} is missing in\n{metrics}");
    }
    assert!(!metrics.contains("alice"));
    ledger
        .admin
        .batch_execute("UPDATE refinery_schema_history SET version = version - 100")
        .await
        .unwrap();
    assert_eq!(app.ops("/readyz").await.status, 503);
    assert_eq!(app.ops("/livez").await.status, 200);
    ledger
        .admin
        .batch_execute("UPDATE refinery_schema_history SET version = version + 100")
        .await
        .unwrap();
    app.stop().await;
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn many_sums_leave_readiness_and_other_reads_alone() {
    let ledger = Ledger::new().await;
    let mut config = config(&ledger);
    config.pool_size = 2;
    let roles = Roles {
        api: true,
        relay: false,
        keeper: false,
    };
    let app = std::sync::Arc::new(App::with(config, roles).await);
    app.fund("alice", 10).await;
    let held = crate::ledger::superuser(&ledger.name).await;
    held.batch_execute(&format!(
        "BEGIN; LOCK TABLE {}.postings IN ACCESS EXCLUSIVE MODE",
        ledger.name
    ))
    .await
    .unwrap();
    let sums: Vec<_> = (0..6)
        .map(|_| {
            let app = app.clone();
            tokio::spawn(async move { app.get(&admin(), "/v1/accounts/world").await.status })
        })
        .collect();
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database() \
                   AND query LIKE '-- summed_balances%'";
    eventually("a sum waits", async || {
        ledger.value::<i64>(waiting).await > 0
    })
    .await;
    for _ in 0..5 {
        let ready = app.ops("/readyz").await;
        assert_eq!(ready.status, 200, "{}", ready.body);
        app.get(&admin(), "/v1/users/alice").await.ok(200);
        assert!(ledger.value::<i64>(waiting).await <= 1);
    }
    held.batch_execute("ROLLBACK").await.unwrap();
    for sum in sums {
        let status = sum.await.unwrap();
        assert!([200, 503].contains(&status), "{status}");
    }
    app.get(&admin(), "/v1/accounts/world").await.ok(200);
    std::sync::Arc::into_inner(app).unwrap().stop().await;
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_begun_command_is_504_a_second_after_its_deadline_and_goes_on() {
    let ledger = Ledger::new().await;
    let mut config = config(&ledger);
    config.request_timeout_ms = 2_000;
    let app = App::with(config, Roles::ALL).await;
    app.fund("alice", 10).await;
    let owner = crate::ledger::superuser(&ledger.name).await;
    owner
        .batch_execute(&format!(
            "CREATE FUNCTION {0}.slow() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep(5); RETURN NEW; END';
             CREATE TRIGGER slow BEFORE INSERT ON {0}.events FOR EACH ROW EXECUTE FUNCTION {0}.slow()",
            ledger.name
        ))
        .await
        .unwrap();
    let answer = app.post(&user("alice"), "k", &transfer("bob", 1)).await;
    answer.refused(504, "outcome_unknown");
    let detail = answer.json()["detail"].to_string();
    assert!(
        detail.contains("the same key"),
        "its lane says so: {detail}"
    );
    let metrics = app.ops("/metrics").await.body;
    let counted = metrics
        .lines()
        .any(|line| line.contains("kind=\"unknown\"") && line.ends_with(" 1"));
    assert!(counted, "{metrics}");
    eventually("the batch went on", async || {
        app.post(&user("alice"), "k", &transfer("bob", 1))
            .await
            .status
            == 200
    })
    .await;
    app.stop().await;
    ledger.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_reaches_a_client_that_is_still_sending() {
    let ledger = Ledger::new().await;
    let app = App::start(&ledger).await;
    let long = 800_000;
    for (token, path, status) in [
        (user("alice"), "/v1/events", "413"),
        ("x".to_owned(), "/v1/events", "401"),
        (user("alice"), "/nowhere", "404"),
    ] {
        let mut stream = TcpStream::connect(app.url.trim_start_matches("http://"))
            .await
            .unwrap();
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nIdempotency-Key: k\r\n\
             Connection: close\r\nContent-Type: application/json\r\nContent-Length: {long}\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        for _ in 0..long / 10_000 {
            stream.write_all(&[b' '; 10_000]).await.unwrap();
        }
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status} ")),
            "{answer}"
        );
    }
    app.stop().await;
    ledger.finish().await;
}
